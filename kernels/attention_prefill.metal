// Gated attention for the rows of a prompt, on matrix units. Queries, keys, probabilities and values are halves;
// sums are f32. Keys and values come from the cache of attention.metal (f32 or 16 bits).
//
// A threadgroup has QUERIES pairs of a row and a query head, all of one kv head. The threadgroup reads the positions
// from the first to the last that any of its rows attends to, KEYS positions at a time: scores, online softmax,
// probabilities times values. A position that a row does not attend to has probability 0, which changes no bit of the
// row's sums. So a row's result depends only on its own position.
//
// Queries and keys are normed, so they do not overflow as halves. Values are clamped to the largest half.

#ifndef NO_TILES

struct PrefillArgs {
  uint tokens, width, heads, kv_heads, dim;
  uint start;  // position of the first row
  float scale;
};

// Pairs of a threadgroup; keys per step; values in threadgroup memory at a time.
enum { QUERIES = 32, KEYS = 64, VALUES = 16 };
enum { COLUMNS = 256, ROW_PITCH = COLUMNS / 2 + 4 };  // most columns of a head; 32-bit words per row of halves

// Loads eight columns of a row of a block of the cache, or of queries. Columns past the end are 0.
template <class T> FN void load8(DEVICE const T* block, uint row, uint column, uint dim, THREAD float* v) {
  const float scale = cache_scale(block, dim, row);
  UNROLL for (uint n = 0; n < 8; n++) v[n] = 0;
  UNROLL for (uint n = 0; n < 8; n += 4)
    if (column + n < dim) load_cached4(block + row * dim + column + n, v + n);
  UNROLL for (uint n = 0; n < 8; n++) v[n] *= scale;
}
// Stores eight columns as halves.
FN void store8(THREADGROUP uint* to, THREAD const float* v) {
  uint words[4];
  UNROLL for (uint n = 0; n < 4; n++) words[n] = HALF2(v[2 * n], v[2 * n + 1]);
  put_words(to, words);
}

// Loads this thread's share, two times eight columns, of DEPTH columns of KEYS keys from position `block`. `keys` is
// the block of the page that contains `block`. Positions after `last` may not exist, so `last` is loaded instead.
template <class T>
FN void load_keys(DEVICE const T* keys, uint block, uint last, uint column, uint dim,
                  THREAD float* v THREAD_IDS_PARAM) {
  UNROLL for (uint n = 0; n < 2; n++) {
    const uint row = min(block + tid / 8 + n * 32, last) % PAGE;
    load8(keys, row, column + tid % 8 * 8, dim, v + n * 8);
  }
}
// Stores what load_keys has loaded.
FN void store_keys(THREADGROUP uint* to, THREAD const float* v THREAD_IDS_PARAM) {
  UNROLL for (uint n = 0; n < 2; n++) store8(to + (tid / 8 + n * 32) * PITCH + tid % 8 * 4, v + n * 8);
}
// Loads this thread's share of all columns of VALUES values, as load_keys does for keys.
template <class T>
FN void load_values(DEVICE const T* values, uint block, uint last, uint dim, THREAD float* v THREAD_IDS_PARAM) {
  UNROLL for (uint n = 0; n < 2; n++) {
    const uint row = min(block + tid / 32 + n * 8, last) % PAGE;
    load8(values, row, tid % 32 * 8, dim, v + n * 8);
  }
}
// Stores what load_values has loaded.
FN void store_values(THREADGROUP uint* to, THREAD float* v THREAD_IDS_PARAM) {
  UNROLL for (uint n = 0; n < 16; n++) v[n] = max(-65504.0f, min(65504.0f, v[n]));
  UNROLL for (uint n = 0; n < 2; n++) store8(to + (tid / 32 + n * 8) * ROW_PITCH + tid % 32 * 4, v + n * 8);
}

// The body of the kernels. A threadgroup of 256 threads computes the outputs of QUERIES pairs: its eight simdgroups
// share the score tiles (two by four), the softmax (four rows each) and the columns of the values (32 each).
//
// `queries`, `scratch` and `probs` are threadgroup memory: the queries as halves; a piece of keys or values as halves,
// or the scores of a step; the probabilities of a step as halves. `row_factor` holds a diagonal 8x8 matrix per eight
// rows: one factor for each row.
template <class T>
FN void attend_rows(CONSTANT PrefillArgs& a, DEVICE const float* q, DEVICE const T* keys, DEVICE const T* values,
                    DEVICE const uint* table, DEVICE const float* proj, DEVICE float* y, THREADGROUP uint* queries,
                    THREADGROUP uint* scratch, THREADGROUP uint* probs,
                    THREADGROUP float* row_factor THREAD_IDS_PARAM) {
  const uint groups = a.heads / a.kv_heads, pairs = a.tokens * groups, head = tgid.y * groups;
  // Threadgroups with the longest context start first.
  const uint first = ((pairs + QUERIES - 1) / QUERIES - 1 - tgid.x) * QUERIES;
  const uint last = a.start + min(first + QUERIES - 1, pairs - 1) / groups, pieces = (a.dim + DEPTH - 1) / DEPTH;
  ulong page = page_block(table, a.kv_heads, tgid.y, 0) * block_size(keys, a.dim);
  THREADGROUP float* scores = (THREADGROUP float*)scratch;
  for (uint i = tid; i < QUERIES * COLUMNS / 8; i += 256) {
    const uint row = i / (COLUMNS / 8), column = i % (COLUMNS / 8) * 8, pair = min(first + row, pairs - 1);
    float v[8];
    load8(q + (ulong(pair / groups) * a.heads + head + pair % groups) * a.dim, 0, column, a.dim, v);
    UNROLL for (uint n = 0; n < 8; n++) v[n] *= a.scale;
    store8(queries + row * ROW_PITCH + column / 2, v);
  }
  row_factor[tid] = 0;
  SUM_TILE sums[4];  // two row tiles by two column tiles; a simdgroup has 32 columns
  UNROLL for (uint i = 0; i < 4; i++) TILE_ZERO(sums[i]);
  float max_score[4], denominator[4], next[16];  // a simdgroup computes the softmax of four rows
  UNROLL for (uint n = 0; n < 4; n++) max_score[n] = -as_type<float>(0x7f7fffffu), denominator[n] = 0;
  load_keys(keys + page, 0, last, 0, a.dim, next THREAD_IDS);
  for (uint block = 0; block <= last; block += KEYS) {
    SUM_TILE score;
    TILE_ZERO(score);
    for (uint piece = 0; piece < pieces; piece++) {
      BARRIER();
      store_keys(scratch, next THREAD_IDS);
      BARRIER();
      if (piece + 1 < pieces) load_keys(keys + page, block, last, (piece + 1) * DEPTH, a.dim, next THREAD_IDS);
      else load_values(values + page, block, last, a.dim, next THREAD_IDS);
      UNROLL for (uint j = 0; j < DEPTH / 16; j++) {
        HALF_TILE rows, columns;
        TILE_LOAD(rows, queries + sg % 2 * 16 * ROW_PITCH + piece * (DEPTH / 2) + j * 8, ROW_PITCH);
        TILE_LOAD_T(columns, scratch + sg / 2 * 16 * PITCH + j * 8, PITCH);
        TILE_FMA(score, rows, columns);
      }
    }
    BARRIER();
    TILE_STORE(score, scores + sg % 2 * 16 * SUM_PITCH + sg / 2 * 16, SUM_PITCH);
    BARRIER();
    UNROLL for (uint n = 0; n < 4; n++) {
      const uint row = sg * 4 + n, sees = a.start + min(first + row, pairs - 1) / groups;
      float s[2];
      UNROLL for (uint m = 0; m < 2; m++) {
        s[m] = scores[row * SUM_PITCH + 2 * lane + m];
        if (block + 2 * lane + m > sees) s[m] = -as_type<float>(0x7f7fffffu);
      }
      const float new_max = max(max_score[n], SIMD_MAX(max(s[0], s[1]))), rescale = FAST_EXP(max_score[n] - new_max);
      UNROLL for (uint m = 0; m < 2; m++) s[m] = FAST_EXP(s[m] - new_max);
      probs[row * PITCH + lane] = HALF2(s[0], s[1]);
      max_score[n] = new_max;
      denominator[n] = denominator[n] * rescale + SIMD_SUM(s[0] + s[1]);
      if (lane == 0) row_factor[row * 8 + row % 8] = rescale;
    }
    for (uint piece = 0; piece < KEYS / VALUES; piece++) {
      BARRIER();
      store_values(scratch, next THREAD_IDS);
      BARRIER();
      if (piece + 1 < KEYS / VALUES) {
        load_values(values + page, block + (piece + 1) * VALUES, last, a.dim, next THREAD_IDS);
      } else {
        const uint following = min(block + KEYS, last);
        if (following % PAGE == 0) page = page_block(table, a.kv_heads, tgid.y, following) * block_size(keys, a.dim);
        load_keys(keys + page, following, last, 0, a.dim, next THREAD_IDS);
      }
      if (piece == 0) {
        UNROLL for (uint i = 0; i < 4; i++) TILE_SCALE(sums[i], row_factor + i % 2 * 128);
      }
      HALF_TILE some[2], value;
      UNROLL for (uint i = 0; i < 2; i++) TILE_LOAD(some[i], probs + i * 16 * PITCH + piece * (VALUES / 2), PITCH);
      UNROLL for (uint i = 0; i < 4; i++) {
        if (i % 2 == 0) TILE_LOAD_RIGHT(value, scratch + sg * 16 + i / 2 * 8, ROW_PITCH);
        TILE_FMA(sums[i], some[i % 2], value);
      }
    }
  }
  BARRIER();
  UNROLL for (uint n = 0; n < 4; n++)
    if (lane == 0) row_factor[(sg * 4 + n) * 8 + (sg * 4 + n) % 8] = 1.0f / denominator[n];
  THREADGROUP float* mine = (THREADGROUP float*)queries + sg * 16 * 20;
  UNROLL for (uint i = 0; i < 4; i++) {
    BARRIER();
    TILE_SCALE(sums[i], row_factor + i % 2 * 128);
    TILE_STORE(sums[i], mine, 20);
    BARRIER();
    UNROLL for (uint n = 0; n < 8; n++) {
      const uint row = n * 2 + lane / 16, column = sg * 32 + i / 2 * 16 + lane % 16, pair = first + i % 2 * 16 + row;
      if (pair >= pairs || column >= a.dim) continue;
      const uint token = pair / groups, at = head + pair % groups;
      const float gate = proj[ulong(token) * a.width + at * 2 * a.dim + a.dim + column];
      y[(ulong(token) * a.heads + at) * a.dim + column] = mine[row * 20 + lane % 16] * sigmoid(gate);
    }
  }
}

// Grid (ceil(tokens * query heads per kv head / QUERIES), kv_heads), 256 threads.
#define ATTENTION_PREFILL(suffix, T)                                                                                   \
  KERNEL(attention_prefill##suffix, ARGS(PrefillArgs, a), IN(float, q, 1), IN(T, keys, 2), IN(T, values, 3),           \
         IN(uint, table, 4), IN(float, proj, 5), OUT(float, y, 6)) {                                                   \
    SHARED(uint4, queries, QUERIES * ROW_PITCH / 4);                                                                   \
    SHARED(uint4, scratch, KEYS * PITCH / 4);                                                                          \
    SHARED(uint4, probs, QUERIES * PITCH / 4);                                                                         \
    SHARED(float, row_factor, QUERIES * 8);                                                                            \
    AWAIT();                                                                                                           \
    attend_rows<T>(a, q, keys, values, table, proj, y, (THREADGROUP uint*)queries, (THREADGROUP uint*)scratch,         \
            (THREADGROUP uint*)probs, row_factor THREAD_IDS);                                                          \
  }

ATTENTION_PREFILL(, float)
ATTENTION_PREFILL(_i16, short)

#endif
