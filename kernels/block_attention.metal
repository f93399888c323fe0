// Attention to the blocks of positions that an indexer selects for each row: see crates/compute/src/ops/block_attention/mod.rs.
//
//   block_attention   attention to the selected blocks and to the open one, over one split of the positions
//   block_attention_merge     merges the splits and applies the gate
//   block_attention_prefill   both on matrix units, for the rows of a prompt

// MAX_DIM: maximum number of dimensions of a head, in the indexer and in attention. SIMDS: number of simdgroups in a
// threadgroup. BATCH: number of positions that are loaded together. SHARING: query heads of a kv head that read a key or
// value once.
enum { MAX_DIM = 256, SIMDS = 8, BATCH = 4, SHARING = 2 };

struct BlockArgs {
  uint start;                  // position of the first row
  uint heads, dim, rope_dim;   // the indexer's
  uint ratio, blocks;          // positions of a block, and closed blocks that a row attends to
  uint ring_len;               // positions in the ring
  uint stride;                 // scores of a row
  float eps, scale;            // of the indexer's norms, and of scores
  uint width, attention_heads, kv_heads, head_dim;
  float attention_scale;
  uint table_pages;            // see row_table
  uint kv_ring_len;            // 8 and 4 bits: positions in the ring of recent keys and values
  uint splits;                 // most splits of a row
};

// Keys or values, and a row of them. With 8 or 4 bits, recent positions are read from a ring.
template <class T>
struct Cache { DEVICE const T* pages; };
template <class T>
struct CacheRow {
  DEVICE const T* block;
  uint number;  // of the row in the block
};
template <uint BITS>
struct QuantCache {
  DEVICE const uchar* pages;
  DEVICE const float* ring;
};
template <uint BITS>
struct QuantCacheRow {
  DEVICE const uchar* block;
  uint number;
  DEVICE const float* recent;
  bool is_recent;
};

// The row of position `p`, which is in block `block` of the cache, for a query that reads positions from `recent` on from
// the ring.
template <class T>
FN CacheRow<T> row_of(Cache<T> cache, CONSTANT BlockArgs& a, ulong block, uint, uint p, uint) {
  CacheRow<T> row;
  row.block = cache.pages + block * block_size(cache.pages, a.head_dim);
  row.number = p % PAGE;
  return row;
}
template <uint BITS>
FN QuantCacheRow<BITS> row_of(QuantCache<BITS> cache, CONSTANT BlockArgs& a, ulong block, uint kv, uint p,
                              uint recent) {
  QuantCacheRow<BITS> row;
  row.block = cache.pages + block * block_bytes<BITS>(a.head_dim);
  row.number = p % PAGE;
  row.recent = cache.ring + (ulong(kv) * a.kv_ring_len + p % a.kv_ring_len) * a.head_dim;
  row.is_recent = p >= recent;
  return row;
}

// Values i..i + 3 of a row, without the scale of the row. i is a multiple of 4.
template <class T>
FN void load4(CacheRow<T> row, uint dim, uint i, THREAD float* v) {
  load_cached4(row.block + row.number * dim + i, v);
}
template <uint BITS>
FN void load4(QuantCacheRow<BITS> row, uint dim, uint i, THREAD float* v) {
  if (row.is_recent) {
    load_cached4(row.recent + i, v);
    return;
  }
  const uint group = i / KV_GROUP, in_group = i % KV_GROUP;
  // With 4 bits, the second half of a group is in the high nibbles.
  const uint first = BITS == 8 ? i : group * (KV_GROUP / 2) + in_group % (KV_GROUP / 2);
  const uint word = *(DEVICE const uint*)(row.block + row.number * code_bytes<BITS>(dim) + first);
  DEVICE const uchar* scales = row.block + PAGE * code_bytes<BITS>(dim) + row.number * scale_bytes(dim);
  const float scale = bf16(((DEVICE const ushort*)scales)[group]);
  UNROLL for (uint n = 0; n < 4; n++) {
    const uint code = word >> 8 * n & 255u;
    const int nibble = int(in_group < KV_GROUP / 2 ? code & 15u : code >> 4);
    v[n] = float(BITS == 8 ? int(code ^ 128u) - 128 : 2 * nibble - 15) * scale;
  }
}
template <class T>
FN float scale_of(CacheRow<T> row, uint dim) {
  return cache_scale(row.block, dim, row.number);
}
template <uint BITS>
FN float scale_of(QuantCacheRow<BITS>, uint) {
  return 1.0f;
}

// The `nth` of `count` positions that a row attends to. A wrong selection gives a wrong result, but reads no memory
// outside of the cache.
FN uint selected_position(CONSTANT BlockArgs& a, DEVICE const uint* blocks, uint closed, uint nth, uint count) {
  const uint in_blocks = min(closed, a.blocks) * a.ratio;
  nth = min(nth, count - 1);
  const uint block = nth < in_blocks ? min(blocks[nth / a.ratio], closed - 1) : closed;
  return block * a.ratio + (nth < in_blocks ? nth % a.ratio : nth - in_blocks);
}

// Number of positions that a row attends to.
FN uint selected_count(CONSTANT BlockArgs& a, uint position) {
  const uint closed = (position + 1) / a.ratio;
  return min(closed, a.blocks) * a.ratio + position + 1 - closed * a.ratio;
}
// Positions in a split of `count` positions: the same number of batches for each simdgroup.
FN uint split_size(CONSTANT BlockArgs& a, uint count) {
  const uint step = SIMDS * BATCH;
  return (count + a.splits * step - 1) / (a.splits * step) * step;
}

// Loads a lane's columns of a row, without the scale of the row. Columns past the end are 0.
template <class Row>
FN void load_lane(Row row, uint dim, THREAD float* v THREAD_IDS_PARAM) {
  UNROLL for (uint j = 0; j < 8; j += 4) {
    const uint i = 4 * lane + j * 32;
    UNROLL for (uint m = 0; m < 4; m++) v[j + m] = 0;
    if (i < dim) load4(row, dim, i, v + j);
  }
}

// The softmax of some positions without normalisation, for one head: a lane's columns of the query and of the weighted
// sum of values, the largest score and the denominator.
struct HeadSum { float query[8], sum[8], highest, denominator; };

// The scores of BATCH positions, of which `left` are in the split, for one head. Rescales the sums to the largest score.
FN void score_positions(THREAD HeadSum& head, THREAD const float* keys, THREAD const float* key_scales, uint left,
                        THREAD float* weights) {
  float new_highest = head.highest;
  UNROLL for (uint n = 0; n < BATCH; n++) {
    float product = 0;
    UNROLL for (uint j = 0; j < 8; j++) product = fma(head.query[j], keys[8 * n + j], product);
    weights[n] = SIMD_SUM(product) * key_scales[n];
    if (n < left) new_highest = max(new_highest, weights[n]);
  }
  const float rescale = FAST_EXP(head.highest - new_highest);
  head.highest = new_highest;
  head.denominator *= rescale;
  UNROLL for (uint j = 0; j < 8; j++) head.sum[j] *= rescale;
  UNROLL for (uint n = 0; n < BATCH; n++) {
    weights[n] = n < left ? FAST_EXP(weights[n] - new_highest) : 0.0f;
    head.denominator += weights[n];
  }
}

// Attention over one split of the positions of a row's selected blocks and open block, for up to SHARING heads: a softmax
// without normalisation. A simdgroup computes every eighth batch of positions. The order of additions depends only on
// the row's position and selection. `partials` [tokens, heads, splits, dim + 2] receives the weighted sum of values, the
// largest score and the denominator. Grid (kv_heads * ceil(query heads per kv head / SHARING), tokens, splits), 256
// threads.
template <class Row, class Rows>
FN void attend_blocks(CONSTANT BlockArgs& a, DEVICE const float* q, Rows keys, Rows values, DEVICE const uint* tables,
                      DEVICE const uint* selected, DEVICE float* partials, DEVICE const SequenceRow* rows,
                      THREADGROUP float* sums, THREADGROUP float* shares THREAD_IDS_PARAM) {
  const uint groups = a.attention_heads / a.kv_heads, parts = (groups + SHARING - 1) / SHARING, kv = tgid.x / parts;
  const uint part = tgid.x % parts * SHARING, heads = min(uint(SHARING), groups - part), dim = a.head_dim;
  const uint token = tgid.y, position = row_position(a, rows, token), closed = (position + 1) / a.ratio;
  DEVICE const uint* table = row_table(a, rows, tables, token);
  const uint recent = recent_start(position), count = selected_count(a, position), size = split_size(a, count);
  const uint begin = tgid.z * size, end = min(begin + size, count);
  if (begin >= end) return;  // the merge does not read this split
  const ulong first_head = ulong(token) * a.attention_heads + kv * groups + part;
  DEVICE const uint* blocks = selected + ulong(token) * a.blocks;
  HeadSum head[SHARING];
  UNROLL for (uint h = 0; h < SHARING; h++) {
    UNROLL for (uint j = 0; j < 8; j++) {
      const uint i = 4 * lane + j / 4 * 128 + j % 4;
      head[h].query[j] = i < dim ? q[(first_head + min(h, heads - 1)) * dim + i] * a.attention_scale : 0.0f;
      head[h].sum[j] = 0;
    }
    head[h].highest = -as_type<float>(0x7f7fffffu), head[h].denominator = 0;
  }
  // A lane finds the place of one of 32 / BATCH batches of this simdgroup, so that loads do not wait for the selection.
  for (uint start = begin + sg * BATCH; start < end; start += 32 * SIMDS) {
    const uint own = selected_position(a, blocks, closed, start + lane / BATCH * (SIMDS * BATCH) + lane % BATCH, count);
    const uint own_block = uint(page_block(table, a.kv_heads, kv, own));
    for (uint batch = 0; batch < 32 / BATCH; batch++) {
      const uint first = start + batch * (SIMDS * BATCH);
      if (first >= end) break;
      float v[8 * BATCH], scale[BATCH], weights[SHARING][BATCH];
      Row value_row[BATCH];
      UNROLL for (uint n = 0; n < BATCH; n++) {
        const uint p = as_type<uint>(SIMD_LANE(as_type<float>(own), batch * BATCH + n));
        const uint block = as_type<uint>(SIMD_LANE(as_type<float>(own_block), batch * BATCH + n));
        const Row key_row = row_of(keys, a, block, kv, p, recent);
        load_lane(key_row, dim, v + 8 * n THREAD_IDS);
        scale[n] = scale_of(key_row, dim), value_row[n] = row_of(values, a, block, kv, p, recent);
      }
      UNROLL for (uint h = 0; h < SHARING; h++) score_positions(head[h], v, scale, end - first, weights[h]);
      UNROLL for (uint n = 0; n < BATCH; n++) {
        float x[8];
        load_lane(value_row[n], dim, x THREAD_IDS);
        const float x_scale = scale_of(value_row[n], dim);
        UNROLL for (uint h = 0; h < SHARING; h++) {
          const float scaled = weights[h][n] * x_scale;
          UNROLL for (uint j = 0; j < 8; j++) head[h].sum[j] = fma(scaled, x[j], head[h].sum[j]);
        }
      }
    }
  }
  UNROLL for (uint h = 0; h < SHARING; h++) {
    BARRIER();
    UNROLL for (uint j = 0; j < 8; j++) sums[sg * MAX_DIM + 4 * lane + j / 4 * 128 + j % 4] = head[h].sum[j];
    if (lane == 0) shares[sg] = head[h].highest, shares[SIMDS + sg] = head[h].denominator;
    BARRIER();
    float highest = head[h].highest, total = 0, denominator = 0;
    for (uint n = 0; n < SIMDS; n++) highest = max(highest, shares[n]);
    for (uint n = 0; n < SIMDS; n++) {
      const float share = FAST_EXP(shares[n] - highest);
      denominator = fma(shares[SIMDS + n], share, denominator);
      total = fma(sums[n * MAX_DIM + tid], share, total);
    }
    // Without a second head, the results of the first one are stored twice.
    DEVICE float* to = partials + ((first_head + min(h, heads - 1)) * a.splits + tgid.z) * (dim + 2);
    if (tid < dim) to[tid] = total;
    if (tid == 0) to[dim] = highest, to[dim + 1] = denominator;
  }
}

#define ATTEND_BLOCKS(suffix, T)                                                                                       \
  WIDE_KERNEL(block_attention##suffix, ARGS(BlockArgs, a), IN(float, q, 1), IN(T, keys, 2), IN(T, values, 3),          \
              IN(uint, tables, 4), IN(uint, selected, 5), OUT(float, partials, 6), IN(SequenceRow, rows, 7)) {         \
    SHARED(float, sums, SIMDS * MAX_DIM);                                                                              \
    SHARED(float, shares, 2 * SIMDS);                                                                                  \
    AWAIT();                                                                                                           \
    Cache<T> all_keys, all_values;                                                                                     \
    all_keys.pages = keys, all_values.pages = values;                                                                  \
    attend_blocks<CacheRow<T>>(a, q, all_keys, all_values, tables, selected, partials, rows, sums, shares THREAD_IDS); \
  }

ATTEND_BLOCKS(, float)
ATTEND_BLOCKS(_i16, short)

#define ATTEND_QUANT_BLOCKS(suffix, BITS)                                                                              \
  WIDE_KERNEL(block_attention##suffix, ARGS(BlockArgs, a), IN(float, q, 1), IN(uchar, keys, 2), IN(uchar, values, 3),  \
              IN(uint, tables, 4), IN(uint, selected, 5), OUT(float, partials, 6), IN(SequenceRow, rows, 7),           \
              IN(float, recent_keys, 8), IN(float, recent_values, 9)) {                                                \
    SHARED(float, sums, SIMDS * MAX_DIM);                                                                              \
    SHARED(float, shares, 2 * SIMDS);                                                                                  \
    AWAIT();                                                                                                           \
    const ulong ring = ulong(a.kv_heads) * a.kv_ring_len * a.head_dim;                                                 \
    const ulong first = a.table_pages != 0 ? rows[tgid.y].sequence * ring : 0;                                         \
    QuantCache<BITS> all_keys, all_values;                                                                             \
    all_keys.pages = keys, all_keys.ring = recent_keys + first;                                                        \
    all_values.pages = values, all_values.ring = recent_values + first;                                                \
    attend_blocks<QuantCacheRow<BITS>>(a, q, all_keys, all_values, tables, selected, partials, rows, sums,             \
                                       shares THREAD_IDS);                                                             \
  }

ATTEND_QUANT_BLOCKS(_q8, 8)
ATTEND_QUANT_BLOCKS(_q4, 4)

// Merges the splits of a row and head, and applies the gate. With 8 or 4 bits, the result is multiplied by the Hadamard
// matrix before the gate. Grid (heads, tokens), 256 threads.
KERNEL(block_attention_merge, ARGS(BlockArgs, a), IN(float, partials, 1), IN(float, proj, 2), OUT(float, y, 3),
       IN(SequenceRow, rows, 4)) {
  SHARED(float, sums, MAX_DIM);
  AWAIT();
  const uint head = tgid.x, token = tgid.y, dim = a.head_dim, width = dim + 2;
  const uint count = selected_count(a, row_position(a, rows, token)), size = split_size(a, count);
  const uint splits = (count + size - 1) / size;
  const ulong row = ulong(token) * a.attention_heads + head;
  DEVICE const float* from = partials + row * a.splits * width;
  float highest = -as_type<float>(0x7f7fffffu), denominator = 0, total = 0;
  for (uint s = 0; s < splits; s++) highest = max(highest, from[s * width + dim]);
  for (uint s = 0; s < splits; s++) {
    const float share = FAST_EXP(from[s * width + dim] - highest);
    denominator = fma(from[s * width + dim + 1], share, denominator);
    if (tid < dim) total = fma(from[s * width + tid], share, total);
  }
  total /= denominator;
  if (a.kv_ring_len != 0) {
    sums[tid] = total;
    hadamard(dim, tid, SIMDS * 32, sums THREAD_IDS);
    total = sums[tid];
  }
  if (tid >= dim) return;
  y[row * dim + tid] = total * sigmoid(proj[ulong(token) * a.width + (head * 2 + 1) * dim + tid]);
}

#ifndef NO_TILES

// block_attention on matrix units, for the rows of a prompt and up to QUERIES query heads of one kv head. These heads
// read each selected key and value once. As in attention_prefill.metal, queries, keys, probabilities and values are
// halves, and values are clamped to the largest half.

// Query heads; positions per step; words per row of halves; floats per row of scores; words per row of probabilities.
enum { QUERIES = 16, STEP = 32, ROW_PITCH = MAX_DIM / 2 + 4, SCORE_PITCH = 20, PROB_PITCH = STEP / 2 + 4 };

// Loads this thread's share of a row of keys or values: four times eight columns. Columns past the end are 0.
template <class T>
FN void load_share(Cache<T> cache, CONSTANT BlockArgs& a, DEVICE const uint* table, uint kv, uint p,
                   THREAD float* v THREAD_IDS_PARAM) {
  const CacheRow<T> row = row_of(cache, a, page_block(table, a.kv_heads, kv, p), kv, p, 0);
  const float scale = scale_of(row, a.head_dim);
  UNROLL for (uint j = 0; j < 8; j++) {
    const uint i = tid % 8 * 8 + j / 2 * 64 + j % 2 * 4;
    UNROLL for (uint n = 0; n < 4; n++) v[4 * j + n] = 0;
    if (i < a.head_dim) load4(row, a.head_dim, i, v + 4 * j);
    UNROLL for (uint n = 0; n < 4; n++) v[4 * j + n] = max(-65504.0f, min(65504.0f, v[4 * j + n] * scale));
  }
}
// Stores what load_share has loaded, as halves.
FN void store_share(THREADGROUP uint* to, THREAD const float* v THREAD_IDS_PARAM) {
  UNROLL for (uint j = 0; j < 4; j++) {
    uint words[4];
    UNROLL for (uint n = 0; n < 4; n++) words[n] = HALF2(v[8 * j + 2 * n], v[8 * j + 2 * n + 1]);
    put_words(to + tid / 8 * ROW_PITCH + tid % 8 * 4 + j * 32, words);
  }
}

// `staged` holds the queries, then STEP keys or values. `scores` holds a tile of 16x16 partial scores of each simdgroup,
// which has half of a step's positions and a quarter of the columns. Then each simdgroup computes the softmax of two
// heads and 32 columns of the result. `row_factor` holds a diagonal 8x8 matrix for each eight heads.
template <class T>
FN void attend_blocks_half(CONSTANT BlockArgs& a, DEVICE const float* q, Cache<T> keys, Cache<T> values,
                           DEVICE const uint* table, DEVICE const uint* selected, DEVICE const float* proj,
                           DEVICE float* y, THREADGROUP uint* staged, THREADGROUP float* scores,
                           THREADGROUP uint* probs, THREADGROUP float* row_factor THREAD_IDS_PARAM) {
  const uint groups = a.attention_heads / a.kv_heads, parts = (groups + QUERIES - 1) / QUERIES, kv = tgid.x / parts;
  const uint token = tgid.y, part = tgid.x % parts * QUERIES, heads = min(uint(QUERIES), groups - part);
  const uint position = a.start + token, closed = (position + 1) / a.ratio, dim = a.head_dim;
  const uint count = selected_count(a, position);
  const ulong first_head = ulong(token) * a.attention_heads + kv * groups + part;
  DEVICE const uint* blocks = selected + ulong(token) * a.blocks;
  for (uint i = tid; i < QUERIES * MAX_DIM / 2; i += SIMDS * 32) {
    const uint head = i / (MAX_DIM / 2), column = i % (MAX_DIM / 2) * 2;
    float v[2] = {};
    UNROLL for (uint n = 0; n < 2; n++)
      if (column + n < dim) v[n] = q[(first_head + min(head, heads - 1)) * dim + column + n] * a.attention_scale;
    staged[head * ROW_PITCH + column / 2] = HALF2(v[0], v[1]);
  }
  if (tid < QUERIES * 8) row_factor[tid] = 0;
  BARRIER();
  HALF_TILE query[4];
  UNROLL for (uint i = 0; i < 4; i++) TILE_LOAD(query[i], staged + sg / 2 * 32 + i * 8, ROW_PITCH);
  SUM_TILE sums[2];
  UNROLL for (uint i = 0; i < 2; i++) TILE_ZERO(sums[i]);
  // This lane's head and its two positions of a step.
  const uint own = sg * 2 + lane / 16, mine = lane % 16 * 2;
  float max_score = -as_type<float>(0x7f7fffffu), denominator = 0, next[32];
  uint p = selected_position(a, blocks, closed, tid / 8, count);
  load_share(keys, a, table, kv, p, next THREAD_IDS);
  for (uint first = 0; first < count; first += STEP) {
    BARRIER();
    store_share(staged, next THREAD_IDS);
    BARRIER();
    load_share(values, a, table, kv, p, next THREAD_IDS);
    SUM_TILE score;
    TILE_ZERO(score);
    UNROLL for (uint i = 0; i < 4; i++) {
      HALF_TILE columns;
      TILE_LOAD_T(columns, staged + sg % 2 * 16 * ROW_PITCH + sg / 2 * 32 + i * 8, ROW_PITCH);
      TILE_FMA(score, query[i], columns);
    }
    TILE_STORE(score, scores + sg * 16 * SCORE_PITCH, SCORE_PITCH);
    BARRIER();
    float s[2];
    UNROLL for (uint m = 0; m < 2; m++) {
      s[m] = 0;
      UNROLL for (uint n = 0; n < 4; n++)
        s[m] += scores[((n * 2 + mine / 16) * 16 + own) * SCORE_PITCH + mine % 16 + m];
      if (first + mine + m >= count) s[m] = -as_type<float>(0x7f7fffffu);
    }
    float new_max = max(s[0], s[1]);
    UNROLL for (uint mask = 1; mask < 16; mask *= 2) new_max = max(new_max, SIMD_XOR(new_max, mask));
    new_max = max(max_score, new_max);
    const float rescale = FAST_EXP(max_score - new_max);
    max_score = new_max;
    UNROLL for (uint m = 0; m < 2; m++) s[m] = FAST_EXP(s[m] - new_max);
    probs[own * PROB_PITCH + mine / 2] = HALF2(s[0], s[1]);
    float sum = s[0] + s[1];
    UNROLL for (uint mask = 1; mask < 16; mask *= 2) sum += SIMD_XOR(sum, mask);
    denominator = fma(denominator, rescale, sum);
    if (mine == 0) row_factor[own * 8 + own % 8] = rescale;
    store_share(staged, next THREAD_IDS);
    BARRIER();
    if (first + STEP < count) {
      p = selected_position(a, blocks, closed, first + STEP + tid / 8, count);
      load_share(keys, a, table, kv, p, next THREAD_IDS);
    }
    UNROLL for (uint i = 0; i < 2; i++) TILE_SCALE(sums[i], row_factor);
    UNROLL for (uint k = 0; k < STEP / 16; k++) {
      HALF_TILE some, value;
      TILE_LOAD(some, probs + k * 8, PROB_PITCH);
      UNROLL for (uint i = 0; i < 2; i++) {
        TILE_LOAD_RIGHT(value, staged + k * 16 * ROW_PITCH + sg * 16 + i * 8, ROW_PITCH);
        TILE_FMA(sums[i], some, value);
      }
    }
  }
  BARRIER();
  if (mine == 0) row_factor[own * 8 + own % 8] = 1.0f / denominator;
  THREADGROUP float* result = scores + sg * 16 * SCORE_PITCH;
  UNROLL for (uint i = 0; i < 2; i++) {
    BARRIER();
    TILE_SCALE(sums[i], row_factor);
    TILE_STORE(sums[i], result, SCORE_PITCH);
    BARRIER();
    UNROLL for (uint n = 0; n < 8; n++) {
      const uint head = n * 2 + lane / 16, column = sg * 32 + i * 16 + lane % 16;
      if (head >= heads || column >= dim) continue;
      const float gate = proj[ulong(token) * a.width + ((kv * groups + part + head) * 2 + 1) * dim + column];
      y[(first_head + head) * dim + column] = result[head * SCORE_PITCH + lane % 16] * sigmoid(gate);
    }
  }
}

// Grid (kv_heads * ceil(query heads per kv head / QUERIES), tokens), 256 threads.
#define ATTEND_BLOCKS_HALF(suffix, T)                                                                                  \
  KERNEL(block_attention_prefill##suffix, ARGS(BlockArgs, a), IN(float, q, 1), IN(T, keys, 2), IN(T, values, 3),       \
         IN(uint, table, 4), IN(uint, selected, 5), IN(float, proj, 6), OUT(float, y, 7)) {                            \
    SHARED(uint4, staged, STEP * ROW_PITCH / 4);                                                                       \
    SHARED(float, scores, SIMDS * 16 * SCORE_PITCH);                                                                   \
    SHARED(uint4, probs, QUERIES * PROB_PITCH / 4);                                                                    \
    SHARED(float, row_factor, QUERIES * 8);                                                                            \
    AWAIT();                                                                                                           \
    Cache<T> all_keys, all_values;                                                                                     \
    all_keys.pages = keys, all_values.pages = values;                                                                  \
    attend_blocks_half<T>(a, q, all_keys, all_values, table, selected, proj, y, (THREADGROUP uint*)staged, scores,     \
                          (THREADGROUP uint*)probs, row_factor THREAD_IDS);                                            \
  }

ATTEND_BLOCKS_HALF(, float)
ATTEND_BLOCKS_HALF(_i16, short)

#endif
