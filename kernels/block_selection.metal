// The selection of blocks of positions by an indexer; part of block_attention.metal.
//
//   index_rows        norms and rotates the indexer's queries, stores raw keys in the ring, computes the keys of blocks
//                     that are now complete (closed)
//   index_scores      the score of each closed block
//   index_select      the blocks with the highest scores, in ascending order
//
// Scores have the CPU's order of operations, so both devices select the same blocks where sqrt and division are rounded
// correctly. Scores are not negative, so their bit patterns have the same order as the scores.

// HEADS: query heads that are scored with one load of a key.
enum { HEADS = 4 };

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
// calls are read, and no row of this call overwrites them. If the rows belong to different sequences, each is the first
// row of its sequence in this call.
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

// SELECT_THREADS: threads of index_select. KEPT: scores that a thread keeps in registers.
enum { SELECT_THREADS = 512, SELECT_SIMDS = SELECT_THREADS / 32, KEPT = 16 };

// The sum of four counts, each in eight bits.
FN uint sum_bytes(uint counts) { return (counts & 0x01010101u) * 0x01010101u >> 24; }

// selected [tokens, blocks]: the closed blocks with the highest scores, in ascending order. Of equal scores, the lower
// block is selected. If fewer than `blocks` blocks are closed, all of them are listed, followed by 0xffffffff. Grid
// (tokens), SELECT_THREADS threads.
//
// The lowest selected score is found bit by bit: it is the largest value that at least `blocks` scores reach. All scores
// reach the least one, and none exceeds the highest one, so the bits that these two have in common need no counts. Words
// that are no scores, which a failed command buffer may leave, give a selection of the same length.
KERNEL(index_select, ARGS(BlockArgs, a), IN(uint, scores, 1), OUT(uint, selected, 2), IN(SequenceRow, rows, 3)) {
  SHARED(float4, counts, SELECT_SIMDS / 2);
  SHARED(uint4, flags, SELECT_THREADS * KEPT / 16);
  SHARED(uint, totals, 2 * SELECT_SIMDS);
  AWAIT();
  const uint token = tgid.x, closed = (row_position(a, rows, token) + 1) / a.ratio;
  DEVICE const uint* score = scores + ulong(token) * a.stride;
  DEVICE uint* out = selected + ulong(token) * a.blocks;
  if (closed <= a.blocks) {
    for (uint i = tid; i < a.blocks; i += SELECT_THREADS) out[i] = i < closed ? i : 0xffffffffu;
    return;
  }
  uint kept[KEPT];
  UNROLL for (uint n = 0; n < KEPT; n++) {
    const uint i = tid + n * SELECT_THREADS;
    kept[n] = i < closed ? score[i] : 0;
  }
  uint least = 0xffffffffu, highest = 0;
  UNROLL for (uint n = 0; n < KEPT; n++)
    if (tid + n * SELECT_THREADS < closed) least = min(least, kept[n]), highest = max(highest, kept[n]);
  for (uint i = tid + KEPT * SELECT_THREADS; i < closed; i += SELECT_THREADS)
    least = min(least, score[i]), highest = max(highest, score[i]);
  least = SIMD_MIN(least), highest = ~SIMD_MIN(~highest);
  if (lane == 0) totals[sg] = least, totals[SELECT_SIMDS + sg] = ~highest;
  BARRIER();
  least = SIMD_MIN(totals[lane % SELECT_SIMDS]), highest = ~SIMD_MIN(totals[SELECT_SIMDS + lane % SELECT_SIMDS]);
  uint lowest = 0, above = 0, half_used = 0;
  for (uint bit = 1u << 31;;) {
    // In the last step, the scores above the lowest selected one are counted.
    const uint limit = bit != 0 ? lowest | bit : lowest + 1;
    if (bit != 0 && (limit <= least || limit > highest)) {
      if (limit <= least) lowest = limit;
      bit /= 2;
      continue;
    }
    uint count = 0;
    UNROLL for (uint n = 0; n < KEPT; n++) count += kept[n] >= limit ? 1 : 0;
    for (uint i = tid + KEPT * SELECT_THREADS; i < closed; i += SELECT_THREADS) count += score[i] >= limit ? 1 : 0;
    const float sum = SIMD_SUM(float(count));
    // Each step uses the other half of `counts`, so it needs one barrier.
    THREADGROUP float4* here = counts + half_used * (SELECT_SIMDS / 4);
    half_used ^= 1;
    if (lane == 0) ((THREADGROUP float*)here)[sg] = sum;
    BARRIER();
    float all = 0;
    UNROLL for (uint i = 0; i < SELECT_SIMDS / 4; i++) all += here[i].x + here[i].y + here[i].z + here[i].w;
    above = uint(all);
    if (bit == 0) break;
    if (above >= a.blocks) lowest = limit;
    // If exactly `blocks` scores reach a limit, the other bits do not matter.
    bit = above == a.blocks ? 0 : bit / 2;
  }
  // Of the scores that are equal to `lowest`, `left` are selected. No word is above the largest one.
  const uint left = a.blocks - (lowest != 0xffffffffu ? above : 0);
  uint above_before = 0, equal_before = 0;
  for (uint start = 0; start < closed; start += SELECT_THREADS * KEPT) {
    // 1: selected; 2: equal to the lowest selected score.
    UNROLL for (uint n = 0; n < KEPT; n++) {
      const uint place = tid + n * SELECT_THREADS, i = start + place;
      const uint v = start == 0 ? kept[n] : i < closed ? score[i] : 0;
      ((THREADGROUP uchar*)flags)[place] = i >= closed ? 0 : v > lowest ? 1 : v == lowest ? 2 : 0;
    }
    BARRIER();
    // A thread has KEPT consecutive blocks. The threads before it have the blocks before these.
    const uint4 four = flags[tid];
    const uint words[4] = {four.x, four.y, four.z, four.w};
    uint mine = 0;
    UNROLL for (uint n = 0; n < 4; n++) mine += sum_bytes(words[n]) | sum_bytes(words[n] >> 1) << 16;
    uint before = mine;
    UNROLL for (uint step = 1; step < 32; step *= 2) {
      const uint other = as_type<uint>(SIMD_LANE(as_type<float>(before), lane >= step ? lane - step : lane));
      before += lane >= step ? other : 0;
    }
    if (lane == 31) totals[sg] = before;
    before -= mine;
    BARRIER();
    uint total = 0;
    UNROLL for (uint i = 0; i < SELECT_SIMDS; i++) {
      before += i < sg ? totals[i] : 0;
      total += totals[i];
    }
    uint equal = equal_before + (before >> 16), at = above_before + (before & 0xffffu) + min(equal, left);
    UNROLL for (uint n = 0; n < KEPT; n++) {
      const uint flag = words[n / 4] >> n % 4 * 8 & 3u;
      if (flag == 1 || (flag == 2 && equal < left)) out[at++] = start + tid * KEPT + n;
      if (flag == 2) equal++;
    }
    above_before += total & 0xffffu, equal_before += total >> 16;
    BARRIER();
  }
}
