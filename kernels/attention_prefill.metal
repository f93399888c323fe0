// Gated attention for the rows of a prompt, on matrix units: queries, keys, weights and values in half precision, sums in f32.
// Keys and values come from the cache as attention.metal leaves it (f32 or bf16).
//
// A threadgroup has QUERIES pairs of a row and a query head, all of one kv head, and goes over the positions from the first
// to the last that any of them sees, KEYS at a time: scores, the softmax so far, its weights times the values. What a row does
// not see has the weight zero, which changes no bit of its sums; so a row's bytes depend on nothing but its own position.
//
// Queries and keys are normed, so their halves do not overflow; values are cut off at the largest half.

#ifndef NO_TILES

struct PromptArgs {
  uint tokens, width, heads, kv_heads, dim;
  uint start;  // position of the first row
  float scale;
};

enum { QUERIES = 32, KEYS = 64, VALUES = 16 };   // of a threadgroup; looked at together; values in threadgroup memory at a time
enum { COLUMNS = 256, LONG = COLUMNS / 2 + 4 };  // of a head at most; words of a whole row of halves

FN void four(DEVICE const float* p, THREAD float* v) {
  const float4 q = *(DEVICE const float4*)p;
  v[0] = q.x, v[1] = q.y, v[2] = q.z, v[3] = q.w;
}
FN void four(DEVICE const ushort* p, THREAD float* v) { UNROLL for (uint n = 0; n < 4; n++) v[n] = bf16(p[n]); }

// Eight columns of a row of `dim`; zeros behind its end.
template <class T> FN void eight(DEVICE const T* row, uint column, uint dim, THREAD float* v) {
  UNROLL for (uint n = 0; n < 8; n++) v[n] = 0;
  UNROLL for (uint n = 0; n < 8; n += 4)
    if (column + n < dim) four(row + column + n, v + n);
}
FN void put_eight(THREADGROUP uint* to, THREAD const float* v) {
  uint words[4];
  UNROLL for (uint n = 0; n < 4; n++) words[n] = HALF2(v[2 * n], v[2 * n + 1]);
  put_words(to, words);
}

// This thread's share, two times eight columns, of DEPTH columns of KEYS keys from position `block`, of whose page `keys` is the
// beginning. Behind `last` nothing may be there: that position is taken instead.
template <class T>
FN void load_keys(DEVICE const T* keys, uint block, uint last, uint column, uint dim, THREAD float* v PLACE) {
  UNROLL for (uint n = 0; n < 2; n++)
    eight(keys + min(block + tid / 8 + n * 32, last) % PAGE * dim, column + tid % 8 * 8, dim, v + n * 8);
}
FN void put_keys(THREADGROUP uint* to, THREAD const float* v PLACE) {
  UNROLL for (uint n = 0; n < 2; n++) put_eight(to + (tid / 8 + n * 32) * PITCH + tid % 8 * 4, v + n * 8);
}
// The same of VALUES whole values.
template <class T> FN void load_values(DEVICE const T* values, uint block, uint last, uint dim, THREAD float* v PLACE) {
  UNROLL for (uint n = 0; n < 2; n++)
    eight(values + min(block + tid / 32 + n * 8, last) % PAGE * dim, tid % 32 * 8, dim, v + n * 8);
}
FN void put_values(THREADGROUP uint* to, THREAD float* v PLACE) {
  UNROLL for (uint n = 0; n < 16; n++) v[n] = max(-65504.0f, min(65504.0f, v[n]));
  UNROLL for (uint n = 0; n < 2; n++) put_eight(to + (tid / 32 + n * 8) * LONG + tid % 32 * 4, v + n * 8);
}

// `by` has a diagonal matrix for each eight rows: a factor for each row.
template <class T>
FN void look(CONSTANT PromptArgs& a, DEVICE const float* q, DEVICE const T* keys, DEVICE const T* values,
             DEVICE const uint* table, DEVICE const float* proj, DEVICE float* y, THREADGROUP uint* queries, THREADGROUP uint* room,
             THREADGROUP uint* weights, THREADGROUP float* by PLACE) {
  const uint groups = a.heads / a.kv_heads, pairs = a.tokens * groups, head = tgid.y * groups;
  // Those that see most begin first.
  const uint first = ((pairs + QUERIES - 1) / QUERIES - 1 - tgid.x) * QUERIES;
  const uint last = a.start + min(first + QUERIES - 1, pairs - 1) / groups, pieces = (a.dim + DEPTH - 1) / DEPTH;
  ulong page = page_row(table, a.kv_heads, tgid.y, 0) * a.dim;
  THREADGROUP float* scores = (THREADGROUP float*)room;
  for (uint i = tid; i < QUERIES * COLUMNS / 8; i += 256) {
    const uint row = i / (COLUMNS / 8), column = i % (COLUMNS / 8) * 8, pair = min(first + row, pairs - 1);
    float v[8];
    eight(q + (ulong(pair / groups) * a.heads + head + pair % groups) * a.dim, column, a.dim, v);
    UNROLL for (uint n = 0; n < 8; n++) v[n] *= a.scale;
    put_eight(queries + row * LONG + column / 2, v);
  }
  by[tid] = 0;
  SUM_TILE sums[4];  // two tiles of rows by two of columns; a simdgroup has 32 columns
  UNROLL for (uint i = 0; i < 4; i++) TILE_ZERO(sums[i]);
  float largest[4], total[4], next[16];  // a simdgroup has four rows' softmax
  UNROLL for (uint n = 0; n < 4; n++) largest[n] = -as_type<float>(0x7f7fffffu), total[n] = 0;
  load_keys(keys + page, 0, last, 0, a.dim, next HERE);
  for (uint block = 0; block <= last; block += KEYS) {
    SUM_TILE score;
    TILE_ZERO(score);
    for (uint piece = 0; piece < pieces; piece++) {
      BARRIER();
      put_keys(room, next HERE);
      BARRIER();
      if (piece + 1 < pieces) load_keys(keys + page, block, last, (piece + 1) * DEPTH, a.dim, next HERE);
      else load_values(values + page, block, last, a.dim, next HERE);
      UNROLL for (uint j = 0; j < DEPTH / 16; j++) {
        HALF_TILE rows, columns;
        TILE_LOAD(rows, queries + sg % 2 * 16 * LONG + piece * (DEPTH / 2) + j * 8, LONG);
        TILE_LOAD_T(columns, room + sg / 2 * 16 * PITCH + j * 8, PITCH);
        TILE_FMA(score, rows, columns);
      }
    }
    BARRIER();
    TILE_STORE(score, scores + sg % 2 * 16 * OUT_PITCH + sg / 2 * 16, OUT_PITCH);
    BARRIER();
    UNROLL for (uint n = 0; n < 4; n++) {
      const uint row = sg * 4 + n, sees = a.start + min(first + row, pairs - 1) / groups;
      float s[2];
      UNROLL for (uint m = 0; m < 2; m++) {
        s[m] = scores[row * OUT_PITCH + 2 * lane + m];
        if (block + 2 * lane + m > sees) s[m] = -as_type<float>(0x7f7fffffu);
      }
      const float most = max(largest[n], SIMD_MAX(max(s[0], s[1]))), old = exp(largest[n] - most);
      UNROLL for (uint m = 0; m < 2; m++) s[m] = exp(s[m] - most);
      weights[row * PITCH + lane] = HALF2(s[0], s[1]);
      largest[n] = most;
      total[n] = total[n] * old + SIMD_SUM(s[0] + s[1]);
      if (lane == 0) by[row * 8 + row % 8] = old;
    }
    for (uint piece = 0; piece < KEYS / VALUES; piece++) {
      BARRIER();
      put_values(room, next HERE);
      BARRIER();
      if (piece + 1 < KEYS / VALUES) load_values(values + page, block + (piece + 1) * VALUES, last, a.dim, next HERE);
      else {
        const uint behind = min(block + KEYS, last);
        if (behind % PAGE == 0) page = page_row(table, a.kv_heads, tgid.y, behind) * a.dim;
        load_keys(keys + page, behind, last, 0, a.dim, next HERE);
      }
      if (piece == 0) {
        UNROLL for (uint i = 0; i < 4; i++) TILE_SCALE(sums[i], by + i % 2 * 128);
      }
      HALF_TILE some[2], value;
      UNROLL for (uint i = 0; i < 2; i++) TILE_LOAD(some[i], weights + i * 16 * PITCH + piece * (VALUES / 2), PITCH);
      UNROLL for (uint i = 0; i < 4; i++) {
        if (i % 2 == 0) TILE_LOAD_RIGHT(value, room + sg * 16 + i / 2 * 8, LONG);
        TILE_FMA(sums[i], some[i % 2], value);
      }
    }
  }
  BARRIER();
  UNROLL for (uint n = 0; n < 4; n++)
    if (lane == 0) by[(sg * 4 + n) * 8 + (sg * 4 + n) % 8] = 1.0f / total[n];
  THREADGROUP float* mine = (THREADGROUP float*)queries + sg * 16 * 20;
  UNROLL for (uint i = 0; i < 4; i++) {
    BARRIER();
    TILE_SCALE(sums[i], by + i % 2 * 128);
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

// Grid (ceil(tokens * heads of a kv head / QUERIES), kv heads), 256 threads.
#define PROMPT(suffix, T)                                                                                              \
  KERNEL(attention_prefill##suffix, ARGS(PromptArgs, a), IN(float, q, 1), IN(T, keys, 2), IN(T, values, 3), IN(uint, table, 4),   \
         IN(float, proj, 5), OUT(float, y, 6)) {                                                                       \
    SHARED(uint4, queries, QUERIES * LONG / 4);                                                                        \
    SHARED(uint4, room, KEYS * PITCH / 4);                                                                             \
    SHARED(uint4, weights, QUERIES * PITCH / 4);                                                                       \
    SHARED(float, by, QUERIES * 8);                                                                                    \
    AWAIT();                                                                                                           \
    look<T>(a, q, keys, values, table, proj, y, (THREADGROUP uint*)queries, (THREADGROUP uint*)room,                   \
            (THREADGROUP uint*)weights, by HERE);                                                                      \
  }

PROMPT(, float)
PROMPT(_bf16, ushort)

#endif
