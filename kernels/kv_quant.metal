// Attention over 8-bit or 4-bit keys and values, in the format of crates/compute/src/ops/attention/kv_quant.rs.
//
// The most recent positions are also kept in f32, in rings of `ring_len` positions. Queries, keys and values are
// multiplied by a Hadamard matrix first. The rest works as in attention.metal.

enum { MAX_DIM = 256 };
// RECENT_SPLIT: number of recent positions in a split. MAX_SPLITS: maximum number of splits of the quantized positions.
// PREFETCH_ROWS: number of positions that are prefetched together.
enum { RECENT_SPLIT = 16, MAX_SPLITS = 256, PREFETCH_ROWS = 16, MERGE_THREADS = 512 };

// Rounds half to even. |x| is at most 2^22.
FN int nearest(float x) { return int(as_type<uint>(x + 12582912.0f) - 0x4b400000u); }

// Quantizes `x`, which is already multiplied by the Hadamard matrix, to one row of a block. 32 threads: a lane has one
// value of each group.
template <uint BITS>
FN void quantize_row(uint dim, DEVICE uchar* block, uint number, THREADGROUP float* x THREAD_IDS_PARAM) {
  DEVICE uchar* row = block + number * code_bytes<BITS>(dim);
  DEVICE uchar* scales = block + PAGE * code_bytes<BITS>(dim) + number * scale_bytes(dim);
  for (uint g = 0; g < dim / KV_GROUP; g++) {
    const float v = x[g * KV_GROUP + lane], max_abs = SIMD_MAX(v < 0 ? -v : v);
    const uint scale_bits = (as_type<uint>(max_abs / (BITS == 8 ? 127.0f : 15.0f)) + 0xffffu) >> 16;
    const bool is_zero = max_abs < 1e-30f;
    const float inverse = is_zero ? 0.0f : 1.0f / bf16(scale_bits);
    if (BITS == 8) row[g * KV_GROUP + lane] = uchar(nearest(v * inverse));
    else {
      x[g * KV_GROUP + lane] = max(0.0f, min(15.0f, float(nearest(v * inverse * 0.5f + 7.5f))));
      BARRIER();
      if (lane < 16) row[g * 16 + lane] = uchar(uint(x[g * KV_GROUP + lane]) | uint(x[g * KV_GROUP + lane + 16]) << 4);
    }
    if (lane == 0) {
      scales[2 * g] = uchar(is_zero ? 0 : scale_bits & 255u);
      scales[2 * g + 1] = uchar(is_zero ? 0 : scale_bits >> 8);
    }
  }
}

// The offset, in floats, of the ring of a row's sequence.
FN ulong ring_start(CONSTANT AttentionArgs& a, DEVICE const SequenceRow* rows, uint row) {
  return a.table_pages != 0 ? ulong(rows[row].sequence) * a.kv_heads * a.ring_len * a.dim : 0;
}

// norm_rope of attention.metal with a Hadamard transform and quantization. Grid (heads + 2 * kv_heads, tokens), 32
// threads.
template <uint BITS>
FN void norm_rope_quantize(CONSTANT AttentionArgs& a, DEVICE const float* proj, DEVICE const float* q_norm,
                           DEVICE const float* k_norm, DEVICE const float* rope, DEVICE float* q, DEVICE uchar* keys,
                           DEVICE uchar* values, DEVICE const uint* table, DEVICE const SequenceRow* rows,
                           DEVICE float* recent_keys, DEVICE float* recent_values,
                           THREADGROUP float* x THREAD_IDS_PARAM) {
  const uint head = tgid.x, token = tgid.y, half_dim = a.rope_dim / 2, position = row_position(a, rows, token);
  const bool query = head < a.heads, value = head >= a.heads + a.kv_heads;
  const uint kv = query ? 0 : (head - a.heads) % a.kv_heads;
  DEVICE const float* row = proj + ulong(token) * a.width + (query ? head * 2 * a.dim : (a.heads + head) * a.dim);
  DEVICE const float* w = query ? q_norm : k_norm;
  float squares = 0;
  for (uint i = lane; i < a.dim; i += 32) squares = fma(row[i], row[i], squares);
  const float scale = 1.0f / sqrt(SIMD_SUM(squares) / float(a.dim) + a.eps);
  float v[MAX_DIM / 32];
  for (uint i = lane; i < a.dim; i += 32) x[i] = value ? row[i] : row[i] * scale * w[i];
  BARRIER();
  UNROLL for (uint j = 0; j < MAX_DIM / 32; j++) {
    const uint i = lane + 32 * j;
    v[j] = i < a.dim ? x[i] : 0;
    if (!value && i < a.rope_dim) {
      const float c = rope[(token * half_dim + i % half_dim) * 2], s = rope[(token * half_dim + i % half_dim) * 2 + 1];
      v[j] = i < half_dim ? x[i] * c - x[i + half_dim] * s : x[i] * c + x[i - half_dim] * s;
    }
  }
  BARRIER();
  UNROLL for (uint j = 0; j < MAX_DIM / 32; j++)
    if (lane + 32 * j < a.dim) x[lane + 32 * j] = v[j];
  hadamard(a.dim, lane, 32, x THREAD_IDS);
  if (query) {
    for (uint i = lane; i < a.dim; i += 32) q[(ulong(token) * a.heads + head) * a.dim + i] = x[i];
    return;
  }
  DEVICE float* recent = (value ? recent_values : recent_keys) + ring_start(a, rows, token) +
                         (ulong(kv) * a.ring_len + position % a.ring_len) * a.dim;
  for (uint i = lane; i < a.dim; i += 32) recent[i] = x[i];
  const ulong to = page_block(row_table(a, rows, table, token), a.kv_heads, kv, position) * block_bytes<BITS>(a.dim);
  quantize_row<BITS>(a.dim, (value ? values : keys) + to, position % PAGE, x THREAD_IDS);
}

// Number of splits of the recent positions for a query at `position`. These splits come before the other splits.
FN uint recent_splits(uint position) { return (position - recent_start(position)) / RECENT_SPLIT + 1; }

// Number of positions per split, for `until` quantized positions.
FN uint split_size(CONSTANT AttentionArgs& a, uint until) {
  uint size = a.min_split;
  while (until / size >= MAX_SPLITS) size *= 2;
  return size;
}

// The column of a lane's value `j`. All values of a lane are in one group, and their codes are adjacent.
template <uint BITS, uint COLUMNS>
FN uint column(uint j THREAD_IDS_PARAM) {
  if (BITS == 8) return COLUMNS * lane + j;
  const uint group = COLUMNS * lane / KV_GROUP * KV_GROUP, in_group = lane % (KV_GROUP / COLUMNS) * (COLUMNS / 2);
  return group + in_group + j / 2 + j % 2 * (KV_GROUP / 2);
}

// A lane's codes of one row and the scale of its values. Codes stay packed until they are used, to save registers.
struct QuantRow { uint w[2]; float scale; };

// `row` is the number of the row in a block.
template <uint BITS, uint COLUMNS>
FN QuantRow load_quant_row(DEVICE const uchar* block, uint row, uint dim THREAD_IDS_PARAM) {
  QuantRow to = {};
  if (lane * COLUMNS >= dim) return to;
  DEVICE const uchar* at = block + row * code_bytes<BITS>(dim) + lane * (COLUMNS * BITS / 8);
  if (COLUMNS * BITS == 64) {
    const uint2 q = *(DEVICE const uint2*)at;
    to.w[0] = q.x, to.w[1] = q.y;
  } else {
    to.w[0] = COLUMNS * BITS == 16 ? uint(*(DEVICE const ushort*)at) : *(DEVICE const uint*)at;
  }
  DEVICE const uchar* scales = block + PAGE * code_bytes<BITS>(dim) + row * scale_bytes(dim);
  to.scale = bf16(((DEVICE const ushort*)scales)[COLUMNS * lane / KV_GROUP]);
  return to;
}

// Unpacks a lane's values without multiplying them by the scale.
template <uint BITS, uint COLUMNS>
FN void unpack_quant_row(QuantRow from, THREAD float* to) {
  UNROLL for (uint j = 0; j < COLUMNS; j++) {
    const uint shift = j * BITS % 16;
    const uint h = (BITS == 8 ? from.w[j / 4] ^ 0x80808080u : from.w[0]) >> 16 * (j * BITS / 16 % 2);
    // A code is masked in place within its 16-bit word. The factor undoes the shift.
    const float factor = as_type<float>((127u - shift) << 23);
    to[j] = BITS == 8 ? fma(MASKED(h, 255u << shift), factor, -128.0f)
                      : fma(MASKED(h, 15u << shift), 2.0f * factor, -15.0f);
  }
}

// Attention over positions `first`..`end` for HEADS query heads from head `head` of kv head `kv`, as in attend_split of
// attention.metal. With RECENT, the positions are read from the ring of recent positions, otherwise from the quantized
// pages.
template <uint BITS, uint COLUMNS, uint HEADS, uint PARTS, bool RECENT>
FN void attend_range(CONSTANT AttentionArgs& a, DEVICE const float* q, DEVICE const uchar* keys,
                     DEVICE const uchar* values, DEVICE const uint* table, DEVICE const float* recent_keys,
                     DEVICE const float* recent_values, DEVICE float* partials, uint first, uint end, uint kv,
                     uint head, uint sets, THREADGROUP float* joined, THREADGROUP float* shares THREAD_IDS_PARAM) {
  enum : uint { BATCH = HEADS < 3 ? 4 : 2, STRIDE = PARTS * BATCH };
  enum : uint { SCORES = (HEADS == 3 ? 4 : HEADS) * BATCH, HEAD_LANES = 32 * BATCH / SCORES };
  const uint token = tgid.z, codes = code_bytes<BITS>(a.dim), scales = scale_bytes(a.dim), part = sg / sets;
  ulong page = RECENT ? 0 : page_block(table, a.kv_heads, kv, first) * block_bytes<BITS>(a.dim);
  float query[HEADS * COLUMNS], sum[HEADS * COLUMNS] = {};
  UNROLL for (uint h = 0; h < HEADS; h++)
    UNROLL for (uint j = 0; j < COLUMNS; j++) {
      const uint i = column<BITS, COLUMNS>(j THREAD_IDS);
      query[h * COLUMNS + j] = i < a.dim ? q[(ulong(token) * a.heads + head + h) * a.dim + i] * a.scale : 0.0f;
    }
  const uint own = lane / (32 / SCORES) % BATCH;  // this lane's position in a batch
  float max_score = -as_type<float>(0x7f7fffffu), denominator = 0;
  for (uint p = first + part * BATCH; p < end; p += STRIDE) {
    if (!RECENT && p % PAGE < STRIDE && p - first >= STRIDE)
      page = page_block(table, a.kv_heads, kv, p) * block_bytes<BITS>(a.dim);
    if (!RECENT && (p - first) % PREFETCH_ROWS == 0 && (p - first) / PREFETCH_ROWS % sets == sg) {
      // Prefetches this and the next group of positions within one page.
      const uint from = p == first ? p : p + PREFETCH_ROWS;
      const uint to = min(min(p + 2 * PREFETCH_ROWS, end), p / PAGE * PAGE + PAGE);
      if (from < to) {
        const ulong at = page + from % PAGE * codes, scales_at = page + PAGE * codes + from % PAGE * scales;
        PREFETCH(keys + at, (to - from) * codes);
        PREFETCH(values + at, (to - from) * codes);
        PREFETCH(keys + scales_at, (to - from) * scales);
        PREFETCH(values + scales_at, (to - from) * scales);
      }
    }
    // All loads are issued before the first value is used.
    QuantRow key[BATCH], value[BATCH];
    float recent[RECENT ? 2 * BATCH * COLUMNS : 1];
    UNROLL for (uint n = 0; n < BATCH; n++) {
      const uint at = min(p + n, end - 1);
      if (RECENT) {
        const ulong row = (ulong(kv) * a.ring_len + at % a.ring_len) * a.dim;
        key[n].scale = value[n].scale = 1;
        UNROLL for (uint j = 0; j < COLUMNS; j++) {
          const uint i = column<BITS, COLUMNS>(j THREAD_IDS);
          recent[2 * n * COLUMNS + j] = i < a.dim ? recent_keys[row + i] : 0.0f;
          recent[(2 * n + 1) * COLUMNS + j] = i < a.dim ? recent_values[row + i] : 0.0f;
        }
      } else {
        key[n] = load_quant_row<BITS, COLUMNS>(keys + page, at % PAGE, a.dim THREAD_IDS);
        value[n] = load_quant_row<BITS, COLUMNS>(values + page, at % PAGE, a.dim THREAD_IDS);
      }
    }
    float score[SCORES] = {};
    UNROLL for (uint n = 0; n < BATCH; n++) {
      float row[COLUMNS];
      if (RECENT) {
        UNROLL for (uint j = 0; j < COLUMNS; j++) row[j] = recent[2 * n * COLUMNS + j];
      } else {
        unpack_quant_row<BITS, COLUMNS>(key[n], row);
      }
      UNROLL for (uint h = 0; h < HEADS; h++) {
        float dot = 0;
        UNROLL for (uint j = 0; j < COLUMNS; j++) dot = fma(query[h * COLUMNS + j], row[j], dot);
        score[h * BATCH + n] = dot * key[n].scale;
      }
    }
    const float product = sum_values<SCORES>(score THREAD_IDS);
    float rescale;
    const float weight =
        own_weight<SCORES, HEAD_LANES>(p + own < end, product, &max_score, &denominator, &rescale THREAD_IDS);
    UNROLL for (uint h = 0; h < HEADS; h++) {
      const float factor = SIMD_LANE(rescale, h * HEAD_LANES);
      UNROLL for (uint j = 0; j < COLUMNS; j++) sum[h * COLUMNS + j] *= factor;
    }
    UNROLL for (uint n = 0; n < BATCH; n++) {
      float row[COLUMNS];
      if (RECENT) {
        UNROLL for (uint j = 0; j < COLUMNS; j++) row[j] = recent[(2 * n + 1) * COLUMNS + j];
      } else {
        unpack_quant_row<BITS, COLUMNS>(value[n], row);
      }
      UNROLL for (uint h = 0; h < HEADS; h++) {
        const float factor = SIMD_LANE(weight, (h * BATCH + n) * (32 / SCORES)) * value[n].scale;
        UNROLL for (uint j = 0; j < COLUMNS; j++) sum[h * COLUMNS + j] = fma(factor, row[j], sum[h * COLUMNS + j]);
      }
    }
  }
  UNROLL for (uint mask = 32 / SCORES; mask < HEAD_LANES; mask *= 2) denominator += SIMD_XOR(denominator, mask);
  if (PARTS == 2)
    join_parts<HEADS, COLUMNS, HEAD_LANES>(sum, &max_score, &denominator, sets, joined, shares THREAD_IDS);
  UNROLL for (uint h = 0; h < HEADS; h++) {
    if (PARTS == 2 && (h < (HEADS + 1) / 2) != (part == 0)) continue;
    DEVICE float* out = partials + ((ulong(token) * a.heads + head + h) * a.splits + tgid.x) * (a.dim + 2);
    UNROLL for (uint j = 0; j < COLUMNS; j++) {
      const uint i = column<BITS, COLUMNS>(j THREAD_IDS);
      if (i < a.dim) out[i] = sum[h * COLUMNS + j];
    }
    if (lane == h * HEAD_LANES) out[a.dim] = max_score, out[a.dim + 1] = denominator;
  }
}

// Attention over one split, recent or quantized, for HEADS queries per simdgroup. The grid and `partials` are those of
// attend_split in attention.metal.
template <uint BITS, uint COLUMNS, uint HEADS, uint PARTS>
FN void attend_split(CONSTANT AttentionArgs& a, DEVICE const float* q, DEVICE const uchar* keys,
                     DEVICE const uchar* values, DEVICE const uint* tables, DEVICE const SequenceRow* rows,
                     DEVICE const float* rings_of_keys, DEVICE const float* rings_of_values, DEVICE float* partials,
                     THREADGROUP float* joined, THREADGROUP float* shares THREAD_IDS_PARAM) {
  const uint groups = a.heads / a.kv_heads, all_sets = groups / HEADS;
  const uint sets = PARTS == 1 ? all_sets : 2 - all_sets % 2, kv = tgid.y / (all_sets / sets);
  const uint head = kv * groups + (tgid.y % (all_sets / sets) * sets + sg % sets) * HEADS;
  DEVICE const uint* table = row_table(a, rows, tables, tgid.z);
  DEVICE const float* recent_keys = rings_of_keys + ring_start(a, rows, tgid.z);
  DEVICE const float* recent_values = rings_of_values + ring_start(a, rows, tgid.z);
  const uint position = row_position(a, rows, tgid.z);
  const uint until = recent_start(position), recent_count = recent_splits(position);
  if (tgid.x < recent_count) {
    const uint first = until + tgid.x * RECENT_SPLIT, end = min(first + RECENT_SPLIT, position + 1);
    attend_range<BITS, COLUMNS, HEADS, PARTS, true>(a, q, keys, values, table, recent_keys, recent_values, partials,
                                                    first, end, kv, head, sets, joined, shares THREAD_IDS);
    return;
  }
  const uint size = split_size(a, until), first = (tgid.x - recent_count) * size, end = min(first + size, until);
  // This row has fewer splits than the grid, whose size fits the row with the largest position.
  if (first >= end) return;
  attend_range<BITS, COLUMNS, HEADS, PARTS, false>(a, q, keys, values, table, recent_keys, recent_values, partials,
                                                   first, end, kv, head, sets, joined, shares THREAD_IDS);
}

// Like attention_merge. The result is transformed back before the gate. Grid (heads, tokens), MERGE_THREADS threads. A
// thread computes one column of every column_groups-th split.
KERNEL(attention_merge_quant, ARGS(AttentionArgs, a), IN(float, proj, 1), IN(float, partials, 2),
       IN(SequenceRow, rows, 3), OUT(float, y, 4)) {
  SHARED(float, factor, MAX_SPLITS + 2 * RECENT_POSITIONS / RECENT_SPLIT);
  SHARED(float, column_sums, MERGE_THREADS);
  SHARED(float, simd_values, 2 * MERGE_THREADS / 32);
  SHARED(float, x, MAX_DIM);
  AWAIT();
  const uint head = tgid.x, token = tgid.y, row = a.dim + 2;
  const uint position = row_position(a, rows, token), until = recent_start(position);
  const uint size = split_size(a, until), splits = recent_splits(position) + (until + size - 1) / size;
  DEVICE const float* from = partials + (ulong(token) * a.heads + head) * a.splits * row;
  DEVICE const float* gate = proj + ulong(token) * a.width + head * 2 * a.dim + a.dim;
  float max_score = -as_type<float>(0x7f7fffffu), denominator = 0;
  for (uint s = tid; s < splits; s += MERGE_THREADS) max_score = max(max_score, from[s * row + a.dim]);
  max_score = SIMD_MAX(max_score);
  if (lane == 0) simd_values[sg] = max_score;
  BARRIER();
  for (uint n = 0; n < MERGE_THREADS / 32; n++) max_score = max(max_score, simd_values[n]);
  for (uint s = tid; s < splits; s += MERGE_THREADS) {
    factor[s] = FAST_EXP(from[s * row + a.dim] - max_score);
    denominator = fma(from[s * row + a.dim + 1], factor[s], denominator);
  }
  denominator = SIMD_SUM(denominator);
  if (lane == 0) simd_values[MERGE_THREADS / 32 + sg] = denominator;
  BARRIER();
  denominator = 0;
  for (uint n = 0; n < MERGE_THREADS / 32; n++) denominator += simd_values[MERGE_THREADS / 32 + n];
  const uint column_groups = MERGE_THREADS / a.dim, rope = tid / a.dim, i = tid % a.dim;
  float sum = 0;
  if (rope < column_groups) {
    uint s = rope;
    for (; s + 15 * column_groups < splits; s += 16 * column_groups) {
      float v[16];
      UNROLL for (uint n = 0; n < 16; n++) v[n] = from[(s + n * column_groups) * row + i];
      UNROLL for (uint n = 0; n < 16; n++) sum = fma(v[n], factor[s + n * column_groups], sum);
    }
    for (; s < splits; s += column_groups) sum = fma(from[s * row + i], factor[s], sum);
  }
  column_sums[tid] = sum;
  BARRIER();
  if (tid < a.dim) {
    for (uint n = 1; n < column_groups; n++) sum += column_sums[n * a.dim + tid];
    x[tid] = sum / denominator;
  }
  hadamard(a.dim, tid, MERGE_THREADS, x THREAD_IDS);
  if (tid < a.dim) y[(ulong(token) * a.heads + head) * a.dim + tid] = x[tid] * sigmoid(gate[tid]);
}

#define ATTEND_PART(name, BITS, COLUMNS)                                                                               \
  KERNEL(name, ARGS(AttentionArgs, a), IN(float, q, 1), IN(uchar, keys, 2), IN(uchar, values, 3), IN(uint, table, 4),  \
         IN(SequenceRow, rows, 5), IN(float, recent_keys, 6), IN(float, recent_values, 7), OUT(float, partials, 8)) {  \
    SHARED(float, joined, MAX_SIMDS * 2 * 32 * COLUMNS);                                                               \
    SHARED(float, shares, MAX_SIMDS * 4 * 2);                                                                          \
    AWAIT();                                                                                                           \
    if (a.shared_heads == 4)                                                                                           \
      attend_split<BITS, COLUMNS, 4, 2>(a, q, keys, values, table, rows, recent_keys, recent_values, partials, joined, \
                                        shares THREAD_IDS);                                                            \
    else if (a.shared_heads == 3)                                                                                      \
      attend_split<BITS, COLUMNS, 3, 2>(a, q, keys, values, table, rows, recent_keys, recent_values, partials, joined, \
                                        shares THREAD_IDS);                                                            \
    else if (a.heads / a.kv_heads % 2 == 0)                                                                            \
      attend_split<BITS, COLUMNS, 2, 1>(a, q, keys, values, table, rows, recent_keys, recent_values, partials, joined, \
                                        shares THREAD_IDS);                                                            \
    else                                                                                                               \
      attend_split<BITS, COLUMNS, 1, 1>(a, q, keys, values, table, rows, recent_keys, recent_values, partials, joined, \
                                        shares THREAD_IDS);                                                            \
  }

#define ATTENTION_QUANT(BITS)                                                                                          \
  KERNEL(qk_norm_rope_q##BITS, ARGS(AttentionArgs, a), IN(float, proj, 1), IN(float, q_norm, 2), IN(float, k_norm, 3), \
         IN(float, rope, 4), OUT(float, q, 5), OUT(uchar, keys, 6), OUT(uchar, values, 7), IN(uint, table, 8),         \
         IN(SequenceRow, rows, 9), OUT(float, recent_keys, 10), OUT(float, recent_values, 11)) {                       \
    SHARED(float, x, MAX_DIM);                                                                                         \
    AWAIT();                                                                                                           \
    norm_rope_quantize<BITS>(a, proj, q_norm, k_norm, rope, q, keys, values, table, rows, recent_keys,                 \
                             recent_values, x THREAD_IDS);                                                             \
  }                                                                                                                    \
  ATTEND_PART(attention_decode_128_q##BITS, BITS, 4)                                                                   \
  ATTEND_PART(attention_decode_256_q##BITS, BITS, 8)

ATTENTION_QUANT(8)
ATTENTION_QUANT(4)
