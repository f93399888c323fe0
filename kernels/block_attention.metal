// Attention to the blocks of positions that an indexer selects for each row: see crates/compute/src/ops/block_attention/mod.rs.
//
//   index_rows        norms and rotates the indexer's queries, stores raw keys in the ring, computes the keys of blocks
//                     that are now complete (closed)
//   index_scores      the score of each closed block
//   index_select      the blocks with the highest scores, in ascending order
//   block_attention   attention to these blocks and to the open one, over one split of the positions
//   block_attention_merge     merges the splits and applies the gate
//   block_attention_prefill   both on matrix units, for the rows of a prompt
//
// Scores have the CPU's order of operations, so both devices select the same blocks where sqrt and division are rounded
// correctly. Scores are not negative, so their bit patterns have the same order as the scores.

// MAX_DIM: maximum number of dimensions of a head, in the indexer and in attention. SIMDS: number of simdgroups in a
// threadgroup. BATCH: number of positions that are loaded together. HEADS: heads of the indexer that read a key once.
enum { MAX_DIM = 256, SIMDS = 8, BATCH = 4, HEADS = 4 };

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

// The row of a block's key. The key is in the page of the block's last position.
FN ulong key_row(DEVICE const uint* table, uint ratio, uint block) {
  const uint last = (block + 1) * ratio - 1;
  return ulong(table[last / PAGE]) * ((PAGE + ratio - 1) / ratio) + last % PAGE / ratio;
}

// The sum of sixteen lanes, in the CPU's order.
FN float sum_lanes(THREAD const float* l) {
  float s[8];
  UNROLL for (uint i = 0; i < 8; i++) s[i] = l[i] + l[i + 8];
  return ((s[0] + s[4]) + (s[2] + s[6])) + ((s[1] + s[5]) + (s[3] + s[7]));
}

// Head h of a row is a query. The row after the queries is the raw key, which is stored in the ring. If the raw key is
// the last of its block, the key of the block is computed as well. `rope` [tokens, rope_dim / 2, 2] holds cosines and
// sines. A row of the ring has the raw key, then the cosines and sines of its position. The ring's rows of earlier
// calls are read, and no row of this call overwrites them. A row of a sequence of its own is the first of this call.
// Grid (heads + 1, tokens), 32 threads.
KERNEL(index_rows, ARGS(BlockArgs, a), IN(float, index, 1), IN(float, q_norm, 2), IN(float, k_norm, 3),
       IN(float, rope, 4), IN(uint, tables, 5), OUT(float, queries, 6), OUT(float, keys, 7), OUT(float, rings, 8),
       IN(SequenceRow, rows, 9)) {
  SHARED(float, x, MAX_DIM);
  SHARED(float, part, 16);
  AWAIT();
  const uint head = tgid.x, token = tgid.y, position = row_position(a, rows, token), half_dim = a.rope_dim / 2;
  const uint width = (a.heads + 1) * a.dim, ring_width = a.dim + a.rope_dim;
  const bool is_query = head < a.heads;
  DEVICE const float* row = index + ulong(token) * width + head * a.dim;
  DEVICE const float* rotation = rope + ulong(token) * a.rope_dim;
  DEVICE float* to = queries + (ulong(token) * a.heads + head) * a.dim;
  // The first position of this call in the row's sequence, and its row.
  const uint start = a.table_pages != 0 ? position : a.start, row_of_start = token - (position - start);
  if (is_query) {
    for (uint i = lane; i < a.dim; i += 32) x[i] = row[i];
  } else {
    DEVICE const uint* table = row_table(a, rows, tables, token);
    DEVICE float* recent = rings;
    if (a.table_pages != 0) recent += ulong(rows[token].sequence) * a.ring_len * ring_width;
    DEVICE float* slot = recent + ulong(position % a.ring_len) * ring_width;
    for (uint i = lane; i < a.dim; i += 32) slot[i] = row[i];
    for (uint i = lane; i < a.rope_dim; i += 32) slot[a.dim + i] = rotation[i];
    if ((position + 1) % a.ratio != 0) return;
    const uint first = position + 1 - a.ratio;
    for (uint i = lane; i < a.dim; i += 32) {
      float sum = 0;
      for (uint p = first; p <= position; p++)
        sum += p < start ? recent[ulong(p % a.ring_len) * ring_width + i]
                         : index[ulong(row_of_start + p - start) * width + a.heads * a.dim + i];
      x[i] = sum / float(a.ratio);
    }
    // The key of a block gets the rotation of the block's first position.
    if (first < start) rotation = recent + ulong(first % a.ring_len) * ring_width + a.dim;
    else rotation = rope + ulong(row_of_start + first - start) * a.rope_dim;
    to = keys + key_row(table, a.ratio, position / a.ratio) * a.dim;
  }
  BARRIER();
  if (lane < 16) {
    float squares = 0;
    for (uint i = lane; i < a.dim; i += 16) squares = fma(x[i], x[i], squares);
    part[lane] = squares;
  }
  BARRIER();
  float lanes[16];
  UNROLL for (uint i = 0; i < 16; i++) lanes[i] = part[i];
  const float inverse_rms = 1.0f / sqrt(sum_lanes(lanes) / float(a.dim) + a.eps);
  for (uint i = lane; i < a.dim; i += 32) x[i] = x[i] * inverse_rms * (is_query ? q_norm[i] : k_norm[i]);
  BARRIER();
  for (uint i = lane; i < a.dim; i += 32) {
    float v = x[i];
    if (i < a.rope_dim) {
      const float c = rotation[i % half_dim * 2], s = rotation[i % half_dim * 2 + 1];
      v = i < half_dim ? x[i] * c - x[i + half_dim] * s : x[i] * c + x[i - half_dim] * s;
    }
    to[i] = v;
  }
}

// scores [tokens, stride]: the sum over heads of relu(q . key) * scale. Rows that attend to all closed blocks need no
// scores and get zeros. Grid (ceil(stride / 128), tokens), 128 threads, one for each block.
KERNEL(index_scores, ARGS(BlockArgs, a), IN(float, queries, 1), IN(float, keys, 2), IN(uint, tables, 3),
       OUT(float, scores, 4), IN(SequenceRow, rows, 5)) {
  AWAIT();
  const uint block = tgid.x * 128 + tid, token = tgid.y, closed = (row_position(a, rows, token) + 1) / a.ratio;
  if (block >= a.stride) return;
  float sum = 0;
  if (block < closed && closed > a.blocks) {
    DEVICE const float* key = keys + key_row(row_table(a, rows, tables, token), a.ratio, block) * a.dim;
    for (uint head = 0; head < a.heads; head += HEADS) {
      DEVICE const float* q = queries + (ulong(token) * a.heads + head) * a.dim;
      float lanes[HEADS * 16] = {};
      for (uint k = 0; k < a.dim; k += 16) {
        UNROLL for (uint j = 0; j < 16; j += 4) {
          if (k + j >= a.dim) continue;
          float x[4], y[4];
          load_cached4(key + k + j, x);
          UNROLL for (uint h = 0; h < HEADS; h++) {
            if (head + h >= a.heads) continue;
            load_cached4(q + h * a.dim + k + j, y);
            UNROLL for (uint n = 0; n < 4; n++)
              lanes[h * 16 + j + n] = fma(x[n], y[n], lanes[h * 16 + j + n]);
          }
        }
      }
      UNROLL for (uint h = 0; h < HEADS; h++) {
        const float product = sum_lanes(lanes + h * 16);
        if (head + h < a.heads) sum += product > 0 ? product : 0.0f;
      }
    }
  }
  scores[ulong(token) * a.stride + block] = sum * a.scale;
}

// selected [tokens, blocks]: the closed blocks with the highest scores, in ascending order. Of equal scores, the lower
// block is selected. If fewer than `blocks` blocks are closed, all of them are listed, followed by 0xffffffff. Grid
// (tokens), 256 threads.
//
// The lowest selected score is found four bits at a time. For each value of the four bits, the threads count the scores
// that have this value and the higher bits found so far. A thread counts in its own column, so it needs no atomic
// operation.
KERNEL(index_select, ARGS(BlockArgs, a), IN(uint, scores, 1), OUT(uint, selected, 2), IN(SequenceRow, rows, 3)) {
  SHARED(uint, counts, 16 * 256);
  SHARED(uint, parts, 256);
  SHARED(uint, totals, 16);
  AWAIT();
  const uint token = tgid.x, closed = (row_position(a, rows, token) + 1) / a.ratio;
  DEVICE const uint* score = scores + ulong(token) * a.stride;
  DEVICE uint* out = selected + ulong(token) * a.blocks;
  if (closed <= a.blocks) {
    for (uint i = tid; i < a.blocks; i += 256) out[i] = i < closed ? i : 0xffffffffu;
    return;
  }
  // `mask` has the bits of the lowest selected score that are known, and `lowest` has their values. Of the scores with
  // these bits, `left` are selected.
  uint lowest = 0, mask = 0, left = a.blocks;
  for (uint shift = 32; shift != 0;) {
    shift -= 4;
    for (uint n = 0; n < 16; n++) counts[n * 256 + tid] = 0;
    for (uint i = tid; i < closed; i += 256)
      if ((score[i] & mask) == lowest) counts[(score[i] >> shift & 15u) * 256 + tid]++;
    BARRIER();
    uint sum = 0;
    for (uint i = 0; i < 16; i++) sum += counts[tid * 16 + i];
    parts[tid] = sum;
    BARRIER();
    if (tid < 16) {
      sum = 0;
      for (uint i = 0; i < 16; i++) sum += parts[tid * 16 + i];
      totals[tid] = sum;
    }
    BARRIER();
    uint digit = 15;
    while (digit > 0 && totals[digit] < left) left -= totals[digit], digit--;
    lowest |= digit << shift, mask |= 15u << shift;
  }
  // A thread has consecutive blocks. The threads before it have the blocks before these.
  const uint each = (closed + 255) / 256, first = min(tid * each, closed), end = min(first + each, closed);
  uint above = 0, equal = 0;
  for (uint i = first; i < end; i++) above += score[i] > lowest ? 1 : 0, equal += score[i] == lowest ? 1 : 0;
  counts[tid] = above, counts[256 + tid] = equal;
  BARRIER();
  above = 0, equal = 0;
  for (uint i = 0; i < tid; i++) above += counts[i], equal += counts[256 + i];
  uint at = above + min(equal, left);
  for (uint i = first; i < end; i++) {
    const bool taken = score[i] > lowest || (score[i] == lowest && equal < left);
    if (score[i] == lowest) equal++;
    if (taken) out[at++] = i;
  }
}

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

// The row of position `p` for a query that reads positions from `recent` on from the ring.
template <class T>
FN CacheRow<T> row_of(Cache<T> cache, CONSTANT BlockArgs& a, DEVICE const uint* table, uint kv, uint p, uint) {
  CacheRow<T> row;
  row.block = cache.pages + page_block(table, a.kv_heads, kv, p) * block_size(cache.pages, a.head_dim);
  row.number = p % PAGE;
  return row;
}
template <uint BITS>
FN QuantCacheRow<BITS> row_of(QuantCache<BITS> cache, CONSTANT BlockArgs& a, DEVICE const uint* table, uint kv, uint p,
                              uint recent) {
  QuantCacheRow<BITS> row;
  row.block = cache.pages + page_block(table, a.kv_heads, kv, p) * block_bytes<BITS>(a.head_dim);
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

// Attention over one split of the positions of a row's selected blocks and open block, for one head: a softmax without
// normalisation. A simdgroup computes every eighth batch of positions. The order of additions depends only on the row's
// position and selection. `partials` [tokens, heads, splits, dim + 2] receives the weighted sum of values, the largest
// score and the denominator. Grid (heads, tokens, splits), 256 threads.
template <class Row, class Rows>
FN void attend_blocks(CONSTANT BlockArgs& a, DEVICE const float* q, Rows keys, Rows values, DEVICE const uint* tables,
                      DEVICE const uint* selected, DEVICE float* partials, DEVICE const SequenceRow* rows,
                      THREADGROUP float* sums, THREADGROUP float* shares THREAD_IDS_PARAM) {
  const uint head = tgid.x, token = tgid.y, position = row_position(a, rows, token), closed = (position + 1) / a.ratio;
  DEVICE const uint* table = row_table(a, rows, tables, token);
  const uint dim = a.head_dim, kv = head / (a.attention_heads / a.kv_heads), recent = recent_start(position);
  const uint count = selected_count(a, position), size = split_size(a, count);
  const uint begin = tgid.z * size, end = min(begin + size, count);
  if (begin >= end) return;  // the merge does not read this split
  const ulong row = (ulong(token) * a.attention_heads + head) * dim;
  DEVICE const uint* blocks = selected + ulong(token) * a.blocks;
  float query[8], sum[8] = {}, highest = -as_type<float>(0x7f7fffffu), denominator = 0;
  UNROLL for (uint j = 0; j < 8; j++) {
    const uint i = 4 * lane + j / 4 * 128 + j % 4;
    query[j] = i < dim ? q[row + i] * a.attention_scale : 0.0f;
  }
  for (uint first = begin + sg * BATCH; first < end; first += SIMDS * BATCH) {
    Row value[BATCH];
    float score[BATCH], key_scale[BATCH];
    UNROLL for (uint n = 0; n < BATCH; n++) {
      const uint p = selected_position(a, blocks, closed, first + n, count);
      value[n] = row_of(values, a, table, kv, p, recent);
      const Row key_row = row_of(keys, a, table, kv, p, recent);
      float product = 0;
      UNROLL for (uint j = 0; j < 8; j += 4) {
        const uint i = 4 * lane + j * 32;
        float key[4] = {};
        if (i < dim) load4(key_row, dim, i, key);
        UNROLL for (uint m = 0; m < 4; m++) product = fma(query[j + m], key[m], product);
      }
      score[n] = product, key_scale[n] = scale_of(key_row, dim);
    }
    float new_highest = highest;
    UNROLL for (uint n = 0; n < BATCH; n++) {
      score[n] = SIMD_SUM(score[n]) * key_scale[n];
      if (first + n < end) new_highest = max(new_highest, score[n]);
    }
    const float rescale = FAST_EXP(highest - new_highest);
    highest = new_highest;
    denominator *= rescale;
    UNROLL for (uint j = 0; j < 8; j++) sum[j] *= rescale;
    UNROLL for (uint n = 0; n < BATCH; n++) {
      const float weight = first + n < end ? FAST_EXP(score[n] - highest) : 0.0f;
      const float scaled = weight * scale_of(value[n], dim);
      denominator += weight;
      UNROLL for (uint j = 0; j < 8; j += 4) {
        const uint i = 4 * lane + j * 32;
        float v[4] = {};
        if (i < dim) load4(value[n], dim, i, v);
        UNROLL for (uint m = 0; m < 4; m++) sum[j + m] = fma(scaled, v[m], sum[j + m]);
      }
    }
  }
  UNROLL for (uint j = 0; j < 8; j++) sums[sg * MAX_DIM + 4 * lane + j / 4 * 128 + j % 4] = sum[j];
  if (lane == 0) shares[sg] = highest, shares[SIMDS + sg] = denominator;
  BARRIER();
  for (uint n = 0; n < SIMDS; n++) highest = max(highest, shares[n]);
  float total = 0;
  denominator = 0;
  for (uint n = 0; n < SIMDS; n++) {
    const float share = FAST_EXP(shares[n] - highest);
    denominator = fma(shares[SIMDS + n], share, denominator);
    total = fma(sums[n * MAX_DIM + tid], share, total);
  }
  DEVICE float* to = partials + (row / dim * a.splits + tgid.z) * (dim + 2);
  if (tid < dim) to[tid] = total;
  if (tid == 0) to[dim] = highest, to[dim + 1] = denominator;
}

#define ATTEND_BLOCKS(suffix, T)                                                                                       \
  KERNEL(block_attention##suffix, ARGS(BlockArgs, a), IN(float, q, 1), IN(T, keys, 2), IN(T, values, 3),               \
         IN(uint, tables, 4), IN(uint, selected, 5), OUT(float, partials, 6), IN(SequenceRow, rows, 7)) {              \
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
  KERNEL(block_attention##suffix, ARGS(BlockArgs, a), IN(float, q, 1), IN(uchar, keys, 2), IN(uchar, values, 3),       \
         IN(uint, tables, 4), IN(uint, selected, 5), OUT(float, partials, 6), IN(SequenceRow, rows, 7),                \
         IN(float, recent_keys, 8), IN(float, recent_values, 9)) {                                                     \
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
  const CacheRow<T> row = row_of(cache, a, table, kv, p, 0);
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
