// Gated attention between its projections, for decoding, over f32 or 16-bit keys and values.
//
// A row of `proj` holds the query and the gate of each query head, then the keys, then the values of the kv heads. Keys
// in the cache are normed and rotated.
//
//   qk_norm_rope              norms and rotates queries and keys, and writes keys and values to the cache
//   attention_decode_*        flash-decoding: attention over one split of the positions
//   attention_decode_tiles    the same on matrix units
//   attention_merge           merges the splits and applies the gate

// MERGE_SIMDS: simdgroups that merge a head.
enum { MAX_SPLITS = 512, MAX_DIM = 256, MERGE_SIMDS = 16 };

// Positions per split for a query at `position`. Small splits fill the device. The size doubles until there are at most
// MAX_SPLITS splits.
FN uint split_size(CONSTANT AttentionArgs& a, uint position) {
  uint size = a.min_split;
  while (position / size >= MAX_SPLITS) size *= 2;
  return size;
}

// Stores a row of a block. A lane has the values of columns lane, lane + 32, ...
FN void store_row(DEVICE float* block, uint row, uint dim, THREAD const float* v THREAD_IDS_PARAM) {
  UNROLL for (uint j = 0; j < MAX_DIM / 32; j++)
    if (lane + 32 * j < dim) block[row * dim + lane + 32 * j] = v[j];
}
// As on the CPU, the largest magnitude becomes 32639. Adding 1.5 * 2^23 leaves the rounded value as an integer in the
// low bits.
FN void store_row(DEVICE short* block, uint row, uint dim, THREAD const float* v THREAD_IDS_PARAM) {
  const float levels = 32639.0f, rounding = 12582912.0f;
  // Bit patterns of magnitudes have the same order as the magnitudes, and NaN is the largest.
  uint max_bits = 0;
  UNROLL for (uint j = 0; j < MAX_DIM / 32; j++)
    if (lane + 32 * j < dim) max_bits = max(max_bits, as_type<uint>(v[j]) & 0x7fffffffu);
  max_bits = ~SIMD_MIN(~max_bits);
  const float max_abs = as_type<float>(max_bits);
  const bool is_finite = max_bits < 0x7f800000u, is_zero = !is_finite || max_abs < 1e-30f;
  const float inverse = is_zero ? 0.0f : levels / max_abs;
  UNROLL for (uint j = 0; j < MAX_DIM / 32; j++)
    if (lane + 32 * j < dim)
      block[row * dim + lane + 32 * j] =
          short(is_zero ? 0 : as_type<uint>(v[j] * inverse + rounding) - as_type<uint>(rounding));
  const uint scale = is_finite ? as_type<uint>(is_zero ? 0.0f : max_abs / levels) : 0x7fc00000u;
  if (lane == 0) ((DEVICE uint*)(block + PAGE * dim))[row] = scale;
}

// Norms and rotates query and key heads. Writes keys and values to the cache at the rows' positions, and queries to
// `q`. `rope` [tokens, rope_dim / 2, 2] holds cosines and sines. Grid (heads + 2 * kv_heads, tokens), 32 threads.
template <class T>
FN void norm_rope(CONSTANT AttentionArgs& a, DEVICE const float* proj, DEVICE const float* q_norm,
                  DEVICE const float* k_norm, DEVICE const float* rope, DEVICE float* q, DEVICE T* keys,
                  DEVICE T* values, DEVICE const uint* table, DEVICE const SequenceRow* rows,
                  THREADGROUP float* x THREAD_IDS_PARAM) {
  const uint head = tgid.x, token = tgid.y, half_dim = a.rope_dim / 2;
  const bool query = head < a.heads, value = head >= a.heads + a.kv_heads;
  const uint kv = query ? 0 : (head - a.heads) % a.kv_heads;
  const uint from = query ? head * 2 * a.dim : (a.heads + head) * a.dim;
  DEVICE const float* row = proj + ulong(token) * a.width + from;
  const uint position = row_position(a, rows, token);
  const ulong to =
      query ? (ulong(token) * a.heads + head) * a.dim
            : page_block(row_table(a, rows, table, token), a.kv_heads, kv, position) * block_size(keys, a.dim);
  float v[MAX_DIM / 32] = {};
  if (value) {
    UNROLL for (uint j = 0; j < MAX_DIM / 32; j++)
      if (lane + 32 * j < a.dim) v[j] = row[lane + 32 * j];
    store_row(values + to, position % PAGE, a.dim, v THREAD_IDS);
    return;
  }
  DEVICE const float* w = query ? q_norm : k_norm;
  float squares = 0;
  for (uint i = lane; i < a.dim; i += 32) squares = fma(row[i], row[i], squares);
  const float scale = 1.0f / sqrt(SIMD_SUM(squares) / float(a.dim) + a.eps);
  for (uint i = lane; i < a.dim; i += 32) x[i] = row[i] * scale * w[i];
  BARRIER();
  UNROLL for (uint n = 0; n < MAX_DIM / 32; n++) {
    const uint i = lane + 32 * n;
    if (i >= a.dim) continue;
    v[n] = x[i];
    if (i < a.rope_dim) {
      const uint j = i % half_dim;
      const float c = rope[(token * half_dim + j) * 2], s = rope[(token * half_dim + j) * 2 + 1];
      v[n] = i < half_dim ? x[i] * c - x[i + half_dim] * s : x[i] * c + x[i - half_dim] * s;
    }
    if (query) q[to + i] = v[n];
  }
  if (!query) store_row(keys + to, position % PAGE, a.dim, v THREAD_IDS);
}

// Prefetches `count` rows from row `row` of two blocks.
template <class T> FN void prefetch_kv(DEVICE const T* keys, DEVICE const T* values, uint row, uint count, uint dim) {
  PREFETCH(keys + row * dim, count * dim * sizeof(T));
  PREFETCH(values + row * dim, count * dim * sizeof(T));
}
FN void prefetch_scales(DEVICE const float*, uint, uint, uint) {}
FN void prefetch_scales(DEVICE const short* block, uint row, uint count, uint dim) {
  PREFETCH((DEVICE const float*)(block + PAGE * dim) + row, count * 4);
}

// The column of a lane's value `j`. With FULL, a lane has adjacent integers, which it loads at once. Otherwise a lane
// loads four columns at a time, adjacent to those of the next lane.
template <uint COLUMNS, bool FULL> FN uint lane_column(DEVICE const float*, uint j THREAD_IDS_PARAM) {
  return 4 * lane + j / 4 * 128 + j % 4;
}
template <uint COLUMNS, bool FULL> FN uint lane_column(DEVICE const short*, uint j THREAD_IDS_PARAM) {
  return FULL ? COLUMNS * lane + j : 4 * lane + j / 4 * 128 + j % 4;
}
// The place of that column in a row of `partials`. Lanes store adjacent integers apart, so that one store of all lanes
// writes adjacent floats.
template <uint COLUMNS, bool FULL> FN uint partial_place(DEVICE const float* keys, uint j THREAD_IDS_PARAM) {
  return lane_column<COLUMNS, FULL>(keys, j THREAD_IDS);
}
template <uint COLUMNS, bool FULL> FN uint partial_place(DEVICE const short* keys, uint j THREAD_IDS_PARAM) {
  return FULL ? 32 * j + lane : lane_column<COLUMNS, FULL>(keys, j THREAD_IDS);
}

// Loads a lane's columns of a row, packed, without its scale. A row has 32 * COLUMNS columns, or fewer without FULL.
template <uint COLUMNS, bool FULL>
FN void load_columns(DEVICE const float* row, uint dim, THREAD uint* words THREAD_IDS_PARAM) {
  UNROLL for (uint j = 0; j < COLUMNS; j += 4) {
    if (!FULL && 4 * lane + j * 32 >= dim) continue;
    const uint4 q = LOAD((DEVICE const uint4*)(row + 4 * lane + j * 32));
    words[j] = q.x, words[j + 1] = q.y, words[j + 2] = q.z, words[j + 3] = q.w;
  }
}
template <uint COLUMNS, bool FULL>
FN void load_columns(DEVICE const short* row, uint dim, THREAD uint* words THREAD_IDS_PARAM) {
  if (FULL && COLUMNS == 8) {
    const uint4 q = LOAD((DEVICE const uint4*)(row + 8 * lane));
    words[0] = q.x, words[1] = q.y, words[COLUMNS / 2 - 2] = q.z, words[COLUMNS / 2 - 1] = q.w;
    return;
  }
  UNROLL for (uint j = 0; j < COLUMNS; j += 4) {
    if (!FULL && 4 * lane + j * 32 >= dim) continue;
    const uint2 q = LOAD((DEVICE const uint2*)(row + 4 * lane + j * 32));
    words[j / 2] = q.x, words[j / 2 + 1] = q.y;
  }
}
template <uint COLUMNS> FN void unpack_columns(DEVICE const float*, THREAD const uint* words, THREAD float* v) {
  UNROLL for (uint j = 0; j < COLUMNS; j++) v[j] = as_type<float>(words[j]);
}
template <uint COLUMNS> FN void unpack_columns(DEVICE const short*, THREAD const uint* words, THREAD float* v) {
  UNROLL for (uint j = 0; j < COLUMNS; j += 2) unpack_cached2(words[j / 2], v + j);
}

// Loads the scale of a row of a block.
FN float load_scale(DEVICE const float*, uint, uint THREAD_IDS_PARAM) { return 1; }
FN float load_scale(DEVICE const short* block, uint dim, uint row THREAD_IDS_PARAM) {
  return LOAD((DEVICE const float*)(block + PAGE * dim) + row);
}

// The row to load for position `n` of a batch of which positions 0 to `last` exist. Later positions have no weight, but
// their floats may be NaN. Their integers are finite, and constant row numbers need fewer instructions.
FN uint row_of_batch(DEVICE const float*, uint n, uint last) { return min(n, last); }
FN uint row_of_batch(DEVICE const short*, uint n, uint) { return n; }

// Attention over one split of the positions: a softmax without normalisation.
//
// Each simdgroup has HEADS query heads of one kv head. PARTS simdgroups share the same heads: each has every PARTS-th
// batch of BATCH positions. So up to four query heads read a key once. A lane computes the weight of one position for
// one head, so that no exponential is computed twice. At the end, each part joins the results of some of the heads.
// `partials` [tokens, heads, splits, dim + 2] receives the weighted sum of values, the largest score and the
// denominator. The start of a split depends only on the query's position, so a row's result does not depend on the
// other rows. With FULL, a head has 32 * COLUMNS dimensions, which the compiler then knows.
//
// Grid (splits, threadgroups, tokens). A threadgroup has `sets` sets of heads, and PARTS simdgroups for each set: one
// or two sets with two parts, or all sets of a kv head with one part. `joined` and `shares` are threadgroup memory.
template <class T, uint COLUMNS, uint HEADS, uint PARTS, bool FULL>
FN void attend_split(CONSTANT AttentionArgs& a, DEVICE const float* q, DEVICE const T* keys, DEVICE const T* values,
                     DEVICE const uint* tables, DEVICE const SequenceRow* rows, DEVICE float* partials,
                     THREADGROUP float* joined, THREADGROUP float* shares THREAD_IDS_PARAM) {
  // BATCH: number of positions that are loaded together. PREFETCH_ROWS: number of positions that are prefetched ahead.
  // More prefetched positions would evict cache lines that other threads need.
  enum : uint { BATCH = HEADS < 3 ? 4 : 2, STRIDE = PARTS * BATCH, PREFETCH_ROWS = 2 * STRIDE };
  // SCORES: scores of a batch, with a fourth head if HEADS is 3. HEAD_LANES: lanes of a head; the first one counts.
  enum : uint { SCORES = (HEADS == 3 ? 4 : HEADS) * BATCH, HEAD_LANES = 32 * BATCH / SCORES };
  enum : uint { WORDS = COLUMNS * sizeof(T) / 4, SHARE = (HEADS + 1) / 2, WIDTH = 32 * COLUMNS };
  const uint groups = a.heads / a.kv_heads, all_sets = groups / HEADS;
  const uint sets = PARTS == 1 ? all_sets : 2 - all_sets % 2, simds = sets * PARTS, set = sg % sets, part = sg / sets;
  const uint kv = tgid.y / (all_sets / sets), token = tgid.z;
  const uint head = kv * groups + (tgid.y % (all_sets / sets) * sets + set) * HEADS;
  const uint position = row_position(a, rows, token), visible = position + 1, size = split_size(a, position);
  const uint first = tgid.x * size, end = min(first + size, visible);
  DEVICE const uint* table = row_table(a, rows, tables, token);
  // The block of the current page. A split of up to PAGE positions is inside one page.
  const uint dim = FULL ? WIDTH : a.dim, block_len = block_size(keys, dim);
  ulong block = page_block(table, a.kv_heads, kv, min(first, visible - 1)) * block_len;
  if (first < end) {
    const uint count = min(end, first / PAGE * PAGE + PAGE) - first;
    for (uint n = sg * BATCH; n < min(uint(PREFETCH_ROWS), count); n += simds * BATCH)
      prefetch_kv(keys + block, values + block, first % PAGE + n, min(uint(BATCH), count - n), dim);
    if (sg == 0) prefetch_scales(keys + block, first % PAGE, count, dim);
    if (sg == simds - 1) prefetch_scales(values + block, first % PAGE, count, dim);
  }
  AWAIT();
  float query[HEADS * COLUMNS] = {}, sum[HEADS * COLUMNS] = {};
  UNROLL for (uint h = 0; h < HEADS; h++)
    UNROLL for (uint j = 0; j < COLUMNS; j += 4) {
      const uint i = lane_column<COLUMNS, FULL>(keys, j THREAD_IDS), to = h * COLUMNS + j;
      if (FULL || i < dim) load_cached4(q + (ulong(token) * a.heads + head + h) * dim + i, query + to);
      UNROLL for (uint n = 0; n < 4; n++) query[to + n] *= a.scale;
    }
  // This lane's position in a batch. The denominator has this position of each batch only.
  const uint own = lane / (32 / SCORES) % BATCH;
  float max_score = -as_type<float>(0x7f7fffffu), denominator = 0;
  uint turn = set;  // this simdgroup prefetches at turn 0
  for (uint p = first + part * BATCH; p < end; p += STRIDE, turn = (turn == 0 ? sets : turn) - 1) {
    if (p % PAGE < STRIDE && p - first >= STRIDE) block = page_block(table, a.kv_heads, kv, p) * block_len;
    const uint row = p % PAGE, ahead = row + PREFETCH_ROWS;
    if (turn == 0 && p + PREFETCH_ROWS < end && ahead < PAGE)
      prefetch_kv(keys + block, values + block, ahead, min(uint(BATCH), end - p - PREFETCH_ROWS), dim);
    // All loads are issued before the first value is used, so the thread waits once. Values stay packed until they are
    // used, to save registers.
    uint key[BATCH * WORDS] = {}, value[BATCH * WORDS] = {};
    UNROLL for (uint n = 0; n < BATCH; n++) {
      const ulong at = block + (row + row_of_batch(keys, n, end - 1 - p)) * dim;
      load_columns<COLUMNS, FULL>(keys + at, dim, key + n * WORDS THREAD_IDS);
      load_columns<COLUMNS, FULL>(values + at, dim, value + n * WORDS THREAD_IDS);
    }
    const float key_scale = load_scale(keys + block, dim, row + own THREAD_IDS);
    const float value_scale = load_scale(values + block, dim, row + own THREAD_IDS);
    float score[SCORES] = {};
    UNROLL for (uint n = 0; n < BATCH; n++) {
      float unpacked[COLUMNS];
      unpack_columns<COLUMNS>(keys, key + n * WORDS, unpacked);
      UNROLL for (uint j = 0; j < COLUMNS; j++)
        UNROLL for (uint h = 0; h < HEADS; h++)
          score[h * BATCH + n] = fma(query[h * COLUMNS + j], unpacked[j], score[h * BATCH + n]);
    }
    const bool exists = p + own < end;
    const float product = sum_values<SCORES>(score THREAD_IDS) * key_scale;
    float rescale;
    const float weight = own_weight<SCORES, HEAD_LANES>(exists, product, &max_score, &denominator, &rescale THREAD_IDS);
    const float scaled = exists ? weight * value_scale : 0.0f;
    UNROLL for (uint h = 0; h < HEADS; h++) {
      const float factor = SIMD_LANE(rescale, h * HEAD_LANES);
      UNROLL for (uint j = 0; j < COLUMNS; j++) sum[h * COLUMNS + j] *= factor;
    }
    UNROLL for (uint n = 0; n < BATCH; n++) {
      float unpacked[COLUMNS];
      unpack_columns<COLUMNS>(keys, value + n * WORDS, unpacked);
      UNROLL for (uint h = 0; h < HEADS; h++) {
        const float factor = SIMD_LANE(scaled, (h * BATCH + n) * (32 / SCORES));
        UNROLL for (uint j = 0; j < COLUMNS; j++)
          sum[h * COLUMNS + j] = fma(factor, unpacked[j], sum[h * COLUMNS + j]);
      }
    }
  }
  UNROLL for (uint mask = 32 / SCORES; mask < HEAD_LANES; mask *= 2) denominator += SIMD_XOR(denominator, mask);
  if (PARTS == 2)
    join_parts<HEADS, COLUMNS, HEAD_LANES>(sum, &max_score, &denominator, sets, joined, shares THREAD_IDS);
  UNROLL for (uint h = 0; h < HEADS; h++) {
    if (PARTS == 2 && (h < SHARE) != (part == 0)) continue;
    DEVICE float* out = partials + ((ulong(token) * a.heads + head + h) * a.splits + tgid.x) * (dim + 2);
    UNROLL for (uint j = 0; j < COLUMNS; j++)
      if (FULL || lane_column<COLUMNS, FULL>(keys, j THREAD_IDS) < dim)
        out[partial_place<COLUMNS, FULL>(keys, j THREAD_IDS)] = sum[h * COLUMNS + j];
    if (lane == h * HEAD_LANES) out[dim] = max_score, out[dim + 1] = denominator;
  }
}

// The sums of columns over the splits for attention_merge. A simdgroup adds up 32 columns of COLUMNS parts. Part n has
// splits n, n + 16, ... Stores the sum of each part.
template <uint COLUMNS>
FN void merge_parts(DEVICE const float* from, uint row, uint dim, uint splits, THREADGROUP const float* split_weight,
                    THREADGROUP float* column_sums THREAD_IDS_PARAM) {
  // BATCH: splits of a part that are loaded together. STRIDE: simdgroups with the same columns.
  enum : uint { BATCH = COLUMNS == 1 ? 4 : 2, STRIDE = MERGE_SIMDS / COLUMNS };
  const uint i = (tgid.z * COLUMNS + sg % COLUMNS) * 32 + lane, first = sg / COLUMNS;
  float sum[COLUMNS] = {};
  for (uint s = first; i < dim && s < splits; s += MERGE_SIMDS * BATCH) {
    float v[BATCH * COLUMNS];
    UNROLL for (uint n = 0; n < BATCH * COLUMNS; n++)
      v[n] = s + n * STRIDE < splits ? from[(s + n * STRIDE) * row + i] : 0.0f;
    UNROLL for (uint n = 0; n < BATCH * COLUMNS; n++)
      if (s + n * STRIDE < splits) sum[n % COLUMNS] = fma(v[n], split_weight[s + n * STRIDE], sum[n % COLUMNS]);
  }
  UNROLL for (uint n = 0; n < COLUMNS; n++)
    column_sums[((first + n * STRIDE) * COLUMNS + sg % COLUMNS) * 32 + lane] = sum[n];
}

// Merges the splits: out = sum of exp(max_s - max) * partial_s / denominator, then applies the gate. Grid (heads,
// tokens, ceil(dim / 32 / merged_columns)), 512 threads. Sixteen parts of the splits are added up on their own, then in
// order, so `merged_columns` changes no byte.
KERNEL(attention_merge, ARGS(AttentionArgs, a), IN(float, proj, 1), IN(float, partials, 2), IN(SequenceRow, rows, 3),
       OUT(float, y, 4)) {
  SHARED(float, split_weight, MAX_SPLITS);
  SHARED(float, column_sums, MERGE_SIMDS * 32 * 4);
  SHARED(float, simd_values, MERGE_SIMDS * 2);
  AWAIT();
  const uint head = tgid.x, token = tgid.y, position = row_position(a, rows, token);
  const uint splits = position / split_size(a, position) + 1, row = a.dim + 2;
  DEVICE const float* from = partials + (ulong(token) * a.heads + head) * a.splits * row;
  float max_score = -as_type<float>(0x7f7fffffu), denominator = 0;
  for (uint s = tid; s < splits; s += MERGE_SIMDS * 32) max_score = max(max_score, from[s * row + a.dim]);
  max_score = SIMD_MAX(max_score);
  if (lane == 0) simd_values[sg] = max_score;
  BARRIER();
  max_score = SIMD_MAX(simd_values[lane % MERGE_SIMDS]);
  for (uint s = tid; s < splits; s += MERGE_SIMDS * 32) {
    split_weight[s] = FAST_EXP(from[s * row + a.dim] - max_score);
    denominator = fma(from[s * row + a.dim + 1], split_weight[s], denominator);
  }
  denominator = SIMD_SUM(denominator);
  if (lane == 0) simd_values[MERGE_SIMDS + sg] = denominator;
  BARRIER();
  if (a.merged_columns == 4) merge_parts<4>(from, row, a.dim, splits, split_weight, column_sums THREAD_IDS);
  else merge_parts<1>(from, row, a.dim, splits, split_weight, column_sums THREAD_IDS);
  BARRIER();
  if (sg >= a.merged_columns) return;
  const uint block = tgid.z * a.merged_columns + sg, i = block * 32 + lane;
  float sum = 0;
  UNROLL for (uint n = 0; n < MERGE_SIMDS; n++) sum += column_sums[(n * a.merged_columns + sg) * 32 + lane];
  denominator = SIMD_SUM(lane < MERGE_SIMDS ? simd_values[MERGE_SIMDS + lane] : 0.0f);
  if (i >= a.dim) return;
  const uint column = a.lane_columns == 1 ? i : lane * a.lane_columns + block;
  const float gate = proj[ulong(token) * a.width + head * 2 * a.dim + a.dim + column];
  y[(ulong(token) * a.heads + head) * a.dim + column] = sum / denominator * sigmoid(gate);
}

// Heads of 128 and 256 dimensions have the most specialised code if three or four query heads can share a simdgroup.
#define DECODE(T, COLUMNS)                                                                                             \
  SHARED(float, joined, MAX_SIMDS * 2 * 32 * COLUMNS);                                                                 \
  SHARED(float, shares, MAX_SIMDS * 4 * 2);                                                                            \
  if (a.shared_heads == 4)                                                                                             \
    attend_split<T, COLUMNS, 4, 2, true>(a, q, keys, values, table, rows, partials, joined, shares THREAD_IDS);        \
  else if (a.shared_heads == 3)                                                                                        \
    attend_split<T, COLUMNS, 3, 2, true>(a, q, keys, values, table, rows, partials, joined, shares THREAD_IDS);        \
  else if (a.heads / a.kv_heads % 2 == 0)                                                                              \
    attend_split<T, COLUMNS, 2, 1, false>(a, q, keys, values, table, rows, partials, joined, shares THREAD_IDS);       \
  else                                                                                                                 \
    attend_split<T, COLUMNS, 1, 1, false>(a, q, keys, values, table, rows, partials, joined, shares THREAD_IDS);

#define ATTEND(suffix, T)                                                                                              \
  KERNEL(qk_norm_rope##suffix, ARGS(AttentionArgs, a), IN(float, proj, 1), IN(float, q_norm, 2), IN(float, k_norm, 3), \
         IN(float, rope, 4), OUT(float, q, 5), OUT(T, keys, 6), OUT(T, values, 7), IN(uint, table, 8),                 \
         IN(SequenceRow, rows, 9)) {                                                                                   \
    SHARED(float, x, MAX_DIM);                                                                                         \
    AWAIT();                                                                                                           \
    norm_rope<T>(a, proj, q_norm, k_norm, rope, q, keys, values, table, rows, x THREAD_IDS);                           \
  }                                                                                                                    \
  KERNEL(attention_decode_128##suffix, ARGS(AttentionArgs, a), IN(float, q, 1), IN(T, keys, 2), IN(T, values, 3),      \
         IN(uint, table, 4), IN(SequenceRow, rows, 5), OUT(float, partials, 6)) {                                      \
    DECODE(T, 4)                                                                                                       \
  }                                                                                                                    \
  KERNEL(attention_decode_256##suffix, ARGS(AttentionArgs, a), IN(float, q, 1), IN(T, keys, 2), IN(T, values, 3),      \
         IN(uint, table, 4), IN(SequenceRow, rows, 5), OUT(float, partials, 6)) {                                      \
    DECODE(T, 8)                                                                                                       \
  }

ATTEND(, float)
ATTEND(_i16, short)

#ifndef NO_TILES

// attention_decode on matrix units, for heads of 256 dimensions with 16-bit keys and values. Eight query heads of a kv
// head read each key and value once.
//
// Products are nearly as exact as in f32, because each factor is a sum of two halves. An integer divided by 256 is the
// sum of its high byte and its low byte / 256, which are exact. A query or a probability is cut to a half, and the rest
// rounded to another half: rows 0 to 7 of a tile hold the first halves of eight heads, rows 8 to 15 the second ones.

// Positions per step; dimensions; words per row of halves; floats per row of scores; words per row of probabilities.
enum { STEP = 16, WIDE = 256, WIDE_PITCH = WIDE / 2 + 4, SCORE_PITCH = 20, PROB_PITCH = 12 };

// Loads word `tid` of STEP rows of keys or values. They are in one page, because splits start at multiples of STEP.
// Rows after the last position have no weight, and their integers are finite.
FN void load_step(DEVICE const short* rows, THREAD uint* words THREAD_IDS_PARAM) {
  UNROLL for (uint n = 0; n < STEP; n++) words[n] = *(DEVICE const uint*)(rows + n * WIDE + 2 * tid);
}
// Stores what load_step has loaded: STEP rows of high bytes, then STEP rows of low bytes / 256. The bits of a byte
// become the leading bits of the mantissa of 256 + byte, or of 1 + byte / 256.
FN void store_step(THREADGROUP uint* to, THREAD const uint* words THREAD_IDS_PARAM) {
  UNROLL for (uint n = 0; n < STEP; n++) {
    const uint high = (words[n] >> 6 & 0x03fc03fcu) ^ 0x5e005e00u, low = (words[n] << 2 & 0x03fc03fcu) | 0x3c003c00u;
    to[n * WIDE_PITCH + tid] = HALF2_SUB(high, 0x5e005e00u);          // 256 + 128, because the high byte has a sign
    to[(STEP + n) * WIDE_PITCH + tid] = HALF2_SUB(low, 0x3c003c00u);  // 1
  }
}
// Stores two values as the halves of row `row`, and what is left of them as those of row `row` + 8.
FN void store_exact(THREADGROUP uint* to, uint row, uint pitch, float x, float y) {
  const float cut_x = as_type<float>(as_type<uint>(x) & 0xffffe000u);
  const float cut_y = as_type<float>(as_type<uint>(y) & 0xffffe000u);
  to[row * pitch] = HALF2(cut_x, cut_y);
  to[(row + 8) * pitch] = HALF2(x - cut_x, y - cut_y);
}

// Grid (splits, kv_heads * ceil(query heads per kv head / 8), tokens), 128 threads. A simdgroup computes the scores of
// a quarter of the dimensions, the softmax of two heads, and a quarter of the columns of the result.
KERNEL(attention_decode_tiles, ARGS(AttentionArgs, a), IN(float, q, 1), IN(short, keys, 2), IN(short, values, 3),
       IN(uint, tables, 4), IN(SequenceRow, rows, 5), OUT(float, partials, 6)) {
  SHARED(uint4, staged, 2 * STEP * WIDE_PITCH / 4);
  SHARED(float, scores, 4 * 16 * SCORE_PITCH);
  SHARED(uint4, probs, 16 * PROB_PITCH / 4);
  SHARED(float, row_factor, 16 * 8);
  THREADGROUP uint* bytes = (THREADGROUP uint*)staged;
  const uint groups = a.heads / a.kv_heads, parts = (groups + 7) / 8, kv = tgid.y / parts, token = tgid.z;
  const uint head = kv * groups + tgid.y % parts * 8, heads = min(8u, groups - tgid.y % parts * 8);
  AWAIT();
  const uint position = row_position(a, rows, token), visible = position + 1, size = split_size(a, position);
  const uint first = tgid.x * size, end = min(first + size, visible);
  if (first >= end) return;  // the merge does not read this split
  DEVICE const uint* table = row_table(a, rows, tables, token);
  ulong page = page_block(table, a.kv_heads, kv, first) * block_size(keys, WIDE);
  uint key[STEP], value[STEP];
  load_step(keys + page + first % PAGE * WIDE, key THREAD_IDS);
  load_step(values + page + first % PAGE * WIDE, value THREAD_IDS);
  UNROLL for (uint n = 0; n < 8; n++) {
    DEVICE const float* from = q + (ulong(token) * a.heads + head + min(n, heads - 1)) * WIDE + 2 * tid;
    store_exact(bytes + tid, n, WIDE_PITCH, from[0], from[1]);
  }
  row_factor[tid] = 0;
  BARRIER();
  HALF_TILE query[4], some, factor;
  UNROLL for (uint i = 0; i < 4; i++) TILE_LOAD(query[i], bytes + sg * 32 + i * 8, WIDE_PITCH);
  SUM_TILE sums[4];
  UNROLL for (uint i = 0; i < 4; i++) TILE_ZERO(sums[i]);
  // The sums are in units of `unit`, the largest scale of a row of values until now, so that probabilities times scales
  // are at most 1.
  float max_score[2], denominator[2] = {}, unit = 1e-30f;
  UNROLL for (uint n = 0; n < 2; n++) max_score[n] = -as_type<float>(0x7f7fffffu);
  const uint mine = lane % 8 * 2;  // lanes 0 to 7 have two positions of a step each
  for (uint block = first; block < end; block += STEP) {
    float key_scale[2], value_scale[2], largest = 0;
    bool exists[2];
    UNROLL for (uint m = 0; m < 2; m++) {
      const uint row = block % PAGE + mine + m;
      exists[m] = block + mine + m < end;
      key_scale[m] = cache_scale(keys + page, WIDE, row) * (256.0f * a.scale);
      value_scale[m] = exists[m] ? cache_scale(values + page, WIDE, row) : 0.0f;
      largest = max(largest, value_scale[m]);
    }
    BARRIER();
    store_step(bytes, key THREAD_IDS);
    BARRIER();
    const uint next = block + STEP;
    if (next < end && next % PAGE == 0) page = page_block(table, a.kv_heads, kv, next) * block_size(keys, WIDE);
    if (next < end) load_step(keys + page + next % PAGE * WIDE, key THREAD_IDS);
    SUM_TILE score;
    TILE_ZERO(score);
    UNROLL for (uint i = 0; i < 4; i++)
      UNROLL for (uint n = 0; n < 2; n++) {
        TILE_LOAD_T(some, bytes + n * STEP * WIDE_PITCH + sg * 32 + i * 8, WIDE_PITCH);
        TILE_FMA(score, query[i], some);
      }
    TILE_STORE(score, scores + sg * 16 * SCORE_PITCH, SCORE_PITCH);
    BARRIER();
    store_step(bytes, value THREAD_IDS);
    if (next < end) load_step(values + page + next % PAGE * WIDE, value THREAD_IDS);
    // Times 2^10, so that small probabilities are not subnormal.
    const float new_unit = max(unit, SIMD_MAX(largest)), times = 1024.0f / new_unit;
    UNROLL for (uint n = 0; n < 2; n++) {
      const uint row = 2 * sg + n;
      float s[2], new_max = max_score[n];
      UNROLL for (uint m = 0; m < 2; m++) {
        s[m] = 0;
        UNROLL for (uint i = 0; i < 8; i++)
          s[m] += scores[(i % 4 * 16 + row + i / 4 * 8) * SCORE_PITCH + mine + m];
        s[m] = exists[m] ? s[m] * key_scale[m] : -as_type<float>(0x7f7fffffu);
        new_max = max(new_max, s[m]);
      }
      new_max = SIMD_MAX(new_max);
      const float rescale = FAST_EXP(max_score[n] - new_max);
      UNROLL for (uint m = 0; m < 2; m++) s[m] = exists[m] ? FAST_EXP(s[m] - new_max) : 0.0f;
      denominator[n] = fma(denominator[n], rescale, SIMD_SUM(lane < 8 ? s[0] + s[1] : 0.0f));
      max_score[n] = new_max;
      if (lane < 8)
        store_exact((THREADGROUP uint*)probs + lane, row, PROB_PITCH, s[0] * (value_scale[0] * times),
                    s[1] * (value_scale[1] * times));
      if (lane < 2) row_factor[(row + lane * 8) * 8 + row] = rescale * (unit / new_unit);
    }
    unit = new_unit;
    BARRIER();
    TILE_LOAD(factor, (THREADGROUP const uint*)probs, PROB_PITCH);
    UNROLL for (uint i = 0; i < 4; i++) {
      TILE_SCALE(sums[i], row_factor);
      UNROLL for (uint n = 0; n < 2; n++) {
        TILE_LOAD_RIGHT(some, bytes + n * STEP * WIDE_PITCH + sg * 32 + i * 8, WIDE_PITCH);
        TILE_FMA(sums[i], factor, some);
      }
    }
  }
  DEVICE float* out = partials + ((ulong(token) * a.heads + head) * a.splits + tgid.x) * (WIDE + 2);
  const ulong pitch = ulong(a.splits) * (WIDE + 2);
  UNROLL for (uint n = 0; n < 2; n++)
    if (lane == 0 && 2 * sg + n < heads) {
      out[(2 * sg + n) * pitch + WIDE] = max_score[n];
      out[(2 * sg + n) * pitch + WIDE + 1] = denominator[n];
    }
  THREADGROUP float* tile = scores + sg * 16 * SCORE_PITCH;
  UNROLL for (uint i = 0; i < 4; i++) {
    BARRIER();
    TILE_STORE(sums[i], tile, SCORE_PITCH);
    BARRIER();
    UNROLL for (uint n = 0; n < 4; n++) {
      const uint row = 2 * n + lane / 16, column = lane % 16;
      const float sum = tile[row * SCORE_PITCH + column] + tile[(row + 8) * SCORE_PITCH + column];
      if (row < heads) out[row * pitch + sg * 64 + i * 16 + column] = sum * (unit * 256.0f / 1024.0f);
    }
  }
}

#endif
