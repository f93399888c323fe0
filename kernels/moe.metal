// Mixture of experts. Kernels use the weights of experts directly in the slots into which they were read from the SSD.
// A slot holds one expert's gate, up and down matrices, each with codes, scales and biases. Kernels get slot numbers,
// not expert numbers. An *assignment* is one selected expert of one token, with number token * k + rank. The slot
// NO_SLOT means "not in this launch": experts in memory are computed first, the others once they have been read.
//
//   moe_gate_up    act[assignment] = silu(gate x) * (up x)         grid (ceil(inner / 8), k + 1, tokens), 128 threads
//   moe_down       h[token] += sum over ranks of weight * down act grid (ceil(hidden / 8), tokens), 32 (k + 1) threads
//   *_grouped      assignments grouped by expert: a job is {slot, first, count} of the list `order`
//   *_gemm         grouped assignments on matrix units
//   moe_combine    h[token] += sum over ranks of weight * out[assignment]
//
// The shared expert is the last rank. The product that computes the router's scores also computes the shared expert's
// gate and up projections, so moe_gate_up only applies SwiGLU to them (expert_tiles.metal computes them itself). moe_down
// reads the shared expert's down matrix from the trunk. Sums are added in rank order, so the order of reads does not
// change the result.

// UP_ROWS: rows of gate and of up that a simdgroup computes at a time. DOWN_ROWS: the same for down. UP_GROUPS:
// simdgroups of a threadgroup for gate and up. JOB_TOKENS: assignments of a job that are computed at a time.
enum { UP_ROWS = 2, DOWN_ROWS = 4, UP_GROUPS = 4, JOB_TOKENS = 2 };
enum { DOWN_PARTS = 2 };  // moe_down computes DOWN_PARTS * DOWN_ROWS rows per threadgroup

struct ExpertsArgs {
  uint can_skip;
  uint hidden, inner, k, tokens;
  uint shared_inner, row;         // the shared expert's width (0 if there is none); length of a row of act
  uint scores, shared_at;         // length of a row of `scores`; column where the shared expert's gate (then up) starts
  uint stride;                    // size of a slot in units of 16 bytes
  uint shift, slots;              // a segment has 1 << shift slots; number of slots
  // Offsets of a slot's pieces in units of 16 bytes: codes, scales and biases of gate, up and down.
  uint piece_offset[9];
  Matrix gate, up, down, shared;  // `shared`: the shared expert's down
  // expert_tiles.metal: the jobs are a list; number of jobs of the shared expert's gate and up, which come first.
  uint grouped, shared_jobs;
};

// The address of a segment of slots on the device. Zero while the segment is not mapped there.
struct Segment { DEVICE const uchar* bytes; };

// True if there is such a slot and its segment is mapped. NO_SLOT is no slot. If the command buffer that writes the slot
// numbers has failed, the launches after it read other bytes in their place. They must not use them as addresses.
FN bool is_mapped(CONSTANT ExpertsArgs& a, uint slot, DEVICE const Segment* table) {
  return slot < a.slots && table[slot >> a.shift].bytes != 0;
}

// The first byte of a mapped slot.
FN DEVICE const uchar* slot_at(CONSTANT ExpertsArgs& a, uint slot, DEVICE const Segment* table) {
  return table[slot >> a.shift].bytes + ulong(slot & ((1u << a.shift) - 1)) * a.stride * 16;
}

// Piece `i` of an expert: 0 gate, 1 up, 2 down.
FN WeightPtrs piece(CONSTANT ExpertsArgs& a, DEVICE const uchar* expert, uint i) {
  CONSTANT uint* at = a.piece_offset + 3 * i;
  const WeightPtrs bytes = {expert + ulong(at[0]) * 16, expert + ulong(at[1]) * 16, expert + ulong(at[2]) * 16};
  return bytes;
}

// Multiplies PARTS * COUNT rows of weights by TOKENS rows of x, and adds this lane's share of the sums to
// acc[(j * TOKENS + t) * COUNT..]. Part j has COUNT rows of w[j], starting at row + j * step. The last row of w[j]
// replaces rows past the end. Row t of x starts at from[t].
template <uint PARTS, uint COUNT, uint TOKENS>
FN void rows_fast(THREAD const WeightPtrs* w, uint rows, uint cols, uint row, uint step, DEVICE const float* x,
                  THREAD const ulong* from, THREAD float* acc THREAD_IDS_PARAM) {
  const uint chunks = cols / 16;
  PackedRows<4, COUNT> next;
  if (lane < chunks) load_rows(w[0], rows, cols, row, lane, next);
  for (uint c = lane; c < chunks; c += 32) {
    float v[16], sum = 0;
    UNROLL for (uint j = 0; j < PARTS; j++) {
      const PackedRows<4, COUNT> now = next;
      if (j + 1 < PARTS) load_rows(w[j + 1], rows, cols, row + (j + 1) * step, c, next);
      else if (c + 32 < chunks) load_rows(w[0], rows, cols, row, c + 32, next);
      UNROLL for (uint t = 0; t < TOKENS; t++) {
        if (TOKENS > 1 || j == 0) {
          sum = load16(x + from[t] + c * 16, v);
          scale_x4(v);
        }
        dot_rows(now, v, sum, acc + (j * TOKENS + t) * COUNT);
      }
    }
  }
}

// Multiplies COUNT rows of w[0] and of w[1], starting at `row`, by one row of x. The 128 threads stage x in threadgroup
// memory.
template <uint COUNT>
FN void rows_staged(THREAD const WeightPtrs* w, uint rows, uint cols, uint row, DEVICE const float* x,
                    THREAD float* acc, THREADGROUP float4* scratch, THREADGROUP float* sums THREAD_IDS_PARAM) {
  const uint chunks = cols / 16;
  PackedRows<4, COUNT> next;
  if (lane < chunks) load_rows(w[0], rows, cols, row, lane, next);
  for (uint begin = 0; begin < chunks; begin += STAGED_CHUNKS) {
    const uint count = min(uint(STAGED_CHUNKS), chunks - begin);
    if (begin > 0) BARRIER();  // before the previous chunks are overwritten
    stage_rows<false>(x + begin * 16, x, count, scratch, acc THREAD_IDS);
    BARRIER();
    sum_staged<4>(count, scratch, sums THREAD_IDS);
    BARRIER();
    for (uint i = lane; i < count; i += 32) {
      const uint c = begin + i;
      float v[16];
      load_staged(scratch, i, v);
      UNROLL for (uint j = 0; j < 2; j++) {
        const PackedRows<4, COUNT> now = next;
        if (j == 0) load_rows(w[1], rows, cols, row, c, next);
        else if (c + 32 < chunks) load_rows(w[0], rows, cols, row, c + 32, next);
        dot_rows(now, v, sums[i], acc + j * COUNT);
      }
    }
  }
}

// rows_fast with one part, for FP8 and bf16.
template <uint FORMAT, uint COUNT, uint TOKENS>
FN void rows_floats(CONSTANT Matrix& m, WeightPtrs w, uint cols, uint row, DEVICE const float* x,
                       THREAD const ulong* from, THREAD float* acc THREAD_IDS_PARAM) {
  for (uint c = lane; c < cols / 16; c += 32) {
    float v[TOKENS * 16];
    UNROLL for (uint t = 0; t < TOKENS; t++) load16(x + from[t] + c * 16, v + t * 16);
    dot_floats<FORMAT, COUNT, TOKENS>(m, w, cols, row, c, v, acc);
  }
}

// rows_fast with one part, for any encoding.
template <uint COUNT, uint TOKENS>
FN void rows_any(CONSTANT Matrix& m, WeightPtrs w, uint cols, uint row, DEVICE const float* x, THREAD const ulong* from,
                 THREAD float* acc THREAD_IDS_PARAM) {
  if (stores_floats(m, cols, FP8)) return rows_floats<FP8, COUNT, TOKENS>(m, w, cols, row, x, from, acc THREAD_IDS);
  if (stores_floats(m, cols, DENSE)) return rows_floats<DENSE, COUNT, TOKENS>(m, w, cols, row, x, from, acc THREAD_IDS);
  const uint code_bytes = row_code_bytes(m, cols), scale_bytes = row_scale_bytes(m, cols);
  for (uint c = lane; c < cols / 16; c += 32) {
    UNROLL for (uint r = 0; r < COUNT; r++) {
      const uint at = min(row + r, m.rows - 1);
      float u[16], v[16];
      unpack_chunk(m, w.codes + at * code_bytes, c, cols, u);
      const uint scales = scale_row(m, at) * scale_bytes;
      const float s = chunk_scale(m, w.scales + scales, c), b = chunk_bias(m, w.biases + scales, c);
      UNROLL for (uint t = 0; t < TOKENS; t++) {
        const float sum = load16(x + from[t] + c * 16, v);
        float dot = 0;
        UNROLL for (uint i = 0; i < 16; i++) dot = fma(u[i], v[i], dot);
        acc[t * COUNT + r] = fma(b, sum, fma(s, dot, acc[t * COUNT + r]));
      }
    }
  }
}

// Computes UP_ROWS rows of gate and up, starting at `row`, and applies SwiGLU, for TOKENS assignments of one expert.
// Only results of the first `count` assignments are stored. With STAGED, TOKENS is 1 and x is staged in `scratch`.
template <uint TOKENS, bool ANY, bool STAGED>
FN void gate_up(CONSTANT ExpertsArgs& a, DEVICE const uchar* expert, uint row, THREAD const uint* assignment,
                THREAD const uint* token, uint count, DEVICE const float* x, DEVICE float* act,
                THREADGROUP float4* scratch, THREADGROUP float* sums THREAD_IDS_PARAM) {
  const WeightPtrs w[2] = {piece(a, expert, 0), piece(a, expert, 1)};
  float acc[2 * TOKENS * UP_ROWS];  // gate sums, then up sums
  ulong from[TOKENS];
  UNROLL for (uint t = 0; t < TOKENS; t++) from[t] = ulong(token[t]) * a.hidden;
  UNROLL for (uint i = 0; i < 2 * TOKENS * UP_ROWS; i++) acc[i] = 0;
  if (ANY) {
    rows_any<UP_ROWS, TOKENS>(a.gate, w[0], a.hidden, row, x, from, acc THREAD_IDS);
    rows_any<UP_ROWS, TOKENS>(a.up, w[1], a.hidden, row, x, from, acc + TOKENS * UP_ROWS THREAD_IDS);
  } else if (STAGED) {
    rows_staged<UP_ROWS>(w, a.inner, a.hidden, row, x + from[0], acc, scratch, sums THREAD_IDS);
  } else {
    rows_fast<2, UP_ROWS, TOKENS>(w, a.inner, a.hidden, row, 0, x, from, acc THREAD_IDS);
  }
  UNROLL for (uint t = 0; t < TOKENS; t++)
    UNROLL for (uint r = 0; r < UP_ROWS; r++) {
      const float gate = SIMD_SUM(acc[t * UP_ROWS + r]), value = SIMD_SUM(acc[(TOKENS + t) * UP_ROWS + r]);
      if (lane == 0 && t < count && row + r < a.inner) act[ulong(assignment[t]) * a.row + row + r] = silu(gate) * value;
    }
}

// Applies SwiGLU to the shared expert's projections. The shared expert has one assignment per token, and its rows of
// act come after those of all selected experts.
FN void gate_up_shared(CONSTANT ExpertsArgs& a, uint token, DEVICE const float* scores,
                       DEVICE float* act THREAD_IDS_PARAM) {
  DEVICE const float* from = scores + ulong(token) * a.scores + a.shared_at;
  DEVICE float* to = act + ulong(a.tokens * a.k + token) * a.row;
  for (uint i = tid; i < a.shared_inner; i += 32 * UP_GROUPS) to[i] = silu(from[i]) * from[a.shared_inner + i];
}

// act of one assignment per threadgroup, for UP_GROUPS * UP_ROWS rows. The rank after the last routed expert is the
// shared expert's.
template <bool ANY, bool STAGED>
FN void gate_up_assignments(CONSTANT ExpertsArgs& a, DEVICE const float* x, DEVICE const float* scores,
                            DEVICE const uint* slots, DEVICE float* act, DEVICE const Segment* table,
                            THREADGROUP float4* scratch, THREADGROUP float* sums THREAD_IDS_PARAM) {
  if (tgid.y == a.k) {
    if (tgid.x == 0) gate_up_shared(a, tgid.z, scores, act THREAD_IDS);
    return;
  }
  const uint token = tgid.z, assignment = token * a.k + tgid.y, slot = slots[assignment];
  const uint row = (tgid.x * UP_GROUPS + sg) * UP_ROWS;
  if (!is_mapped(a, slot, table)) return;
  DEVICE const uchar* expert = slot_at(a, slot, table);
  if (!ANY) {
    prefetch_rows<UP_ROWS>(piece(a, expert, 0), 4, a.inner, a.hidden, row);
    prefetch_rows<UP_ROWS>(piece(a, expert, 1), 4, a.inner, a.hidden, row);
  }
  gate_up<1, ANY, STAGED>(a, expert, row, &assignment, &token, 1, x, act, scratch, sums THREAD_IDS);
}

// Computes DOWN_PARTS * DOWN_ROWS rows of the sum over ranks of weight * down act. Each simdgroup computes one rank.
template <bool ANY>
FN void down(CONSTANT ExpertsArgs& a, DEVICE const float* act, DEVICE const float* weights, DEVICE const uint* slots,
             DEVICE float* h, WeightPtrs shared, DEVICE const Segment* table, DEVICE const uint* skip,
             THREADGROUP float* part THREAD_IDS_PARAM) {
  const uint count = DOWN_PARTS * DOWN_ROWS, row = tgid.x * count, token = tgid.y;
  const uint ranks = a.shared_inner != 0 ? a.k + 1 : a.k;
  if (!ANY && sg < ranks) {
    // Prefetching starts before AWAIT, so it needs the slots before AWAIT. Reading them is safe: the launch that writes
    // the slots comes before the previous launch, so it has ended.
    const uint slot = sg < a.k ? PEEK(slots + token * a.k + sg) : NO_SLOT;
    if (sg == a.k) prefetch_rows<DOWN_PARTS * DOWN_ROWS>(shared, 4, a.hidden, a.shared_inner, row);
    else if (is_mapped(a, slot, table)) {
      const WeightPtrs w = piece(a, slot_at(a, slot, table), 2);
      prefetch_rows<DOWN_PARTS * DOWN_ROWS>(w, 4, a.hidden, a.inner, row);
    }
  }
  AWAIT();
  if (is_skipped(a.can_skip, skip)) return;
  float acc[DOWN_PARTS * DOWN_ROWS], weight = 0;
  UNROLL for (uint r = 0; r < count; r++) acc[r] = 0;
  // A rank without a mapped slot is left out.
  const uint slot = sg < a.k ? slots[token * a.k + sg] : NO_SLOT;
  if (sg < a.k ? is_mapped(a, slot, table) : sg < ranks) {
    weight = weights[token * (a.k + 1) + sg];
    const uint assignment = sg < a.k ? token * a.k + sg : a.tokens * a.k + token;
    const uint cols = sg < a.k ? a.inner : a.shared_inner;
    WeightPtrs w = shared;
    if (sg < a.k) w = piece(a, slot_at(a, slot, table), 2);
    const ulong from = ulong(assignment) * a.row;
    if (ANY) {
      UNROLL for (uint j = 0; j < DOWN_PARTS; j++)
        rows_any<DOWN_ROWS, 1>(sg < a.k ? a.down : a.shared, w, cols, row + j * DOWN_ROWS, act, &from,
                               acc + j * DOWN_ROWS THREAD_IDS);
    } else {
      const WeightPtrs same[DOWN_PARTS] = {w, w};
      rows_fast<DOWN_PARTS, DOWN_ROWS, 1>(same, a.hidden, cols, row, DOWN_ROWS, act, &from, acc THREAD_IDS);
    }
  }
  UNROLL for (uint r = 0; r < count; r++) {
    const float sum = weight * SIMD_SUM(acc[r]);
    if (lane == 0) part[sg * count + r] = sum;
  }
  BARRIER();
  if (tid >= count || row + tid >= a.hidden) return;
  float sum = 0;
  for (uint r = 0; r < ranks; r++) sum += part[r * count + tid];
  h[ulong(token) * a.hidden + row + tid] += sum;
}

// A job's next JOB_TOKENS assignments. If fewer are left, the job's last assignment is repeated.
FN void job_assignments(DEVICE const uint* job, DEVICE const uint* order, uint done, THREAD uint* assignment) {
  for (uint t = 0; t < JOB_TOKENS; t++) assignment[t] = order[job[1] + min(done + t, job[2] - 1)];
}

// act of all assignments of a job. Grid (ceil(inner / 8), jobs), 128 threads.
template <bool ANY>
FN void gate_up_grouped(CONSTANT ExpertsArgs& a, DEVICE const float* x, DEVICE const uint* job,
                        DEVICE const uint* order, DEVICE float* act, DEVICE const Segment* table THREAD_IDS_PARAM) {
  DEVICE const uchar* expert = slot_at(a, job[0], table);
  const uint row = (tgid.x * UP_GROUPS + sg) * UP_ROWS;
  for (uint done = 0; done < job[2]; done += JOB_TOKENS) {
    uint assignment[JOB_TOKENS], token[JOB_TOKENS];
    job_assignments(job, order, done, assignment);
    UNROLL for (uint t = 0; t < JOB_TOKENS; t++) token[t] = assignment[t] / a.k;
    gate_up<JOB_TOKENS, ANY, false>(a, expert, row, assignment, token, job[2] - done, x, act, 0, 0 THREAD_IDS);
  }
}

// out[assignment] = down act, without the weight. Grid (ceil(hidden / 16), jobs), 128 threads.
template <bool ANY>
FN void down_grouped(CONSTANT ExpertsArgs& a, DEVICE const float* act, DEVICE const uint* job, DEVICE const uint* order,
                     DEVICE float* out, DEVICE const Segment* table THREAD_IDS_PARAM) {
  const WeightPtrs w = piece(a, slot_at(a, job[0], table), 2);
  const uint row = (tgid.x * UP_GROUPS + sg) * DOWN_ROWS;
  for (uint done = 0; done < job[2]; done += JOB_TOKENS) {
    uint assignment[JOB_TOKENS];
    ulong from[JOB_TOKENS];
    float acc[JOB_TOKENS * DOWN_ROWS];
    job_assignments(job, order, done, assignment);
    for (uint t = 0; t < JOB_TOKENS; t++) from[t] = ulong(assignment[t]) * a.row;
    for (uint i = 0; i < JOB_TOKENS * DOWN_ROWS; i++) acc[i] = 0;
    if (ANY) rows_any<DOWN_ROWS, JOB_TOKENS>(a.down, w, a.inner, row, act, from, acc THREAD_IDS);
    else rows_fast<1, DOWN_ROWS, JOB_TOKENS>(&w, a.hidden, a.inner, row, 0, act, from, acc THREAD_IDS);
    UNROLL for (uint t = 0; t < JOB_TOKENS; t++)
      UNROLL for (uint r = 0; r < DOWN_ROWS; r++) {
        const float sum = SIMD_SUM(acc[t * DOWN_ROWS + r]);
        if (lane == 0 && done + t < job[2] && row + r < a.hidden) out[ulong(assignment[t]) * a.hidden + row + r] = sum;
      }
  }
}

#ifndef NO_TILES
// Grouped assignments on matrix units, at most JOB_TILES * 16 per job. A short prompt has few assignments per expert,
// so groups of eight rows without an assignment are skipped. x has one row per token, and act has one row per
// assignment. The rows of x and act are halves from rows_to_half, and each row has a scale. Gate and up: 32 rows of
// each at a time, grid (ceil(inner / 32), jobs). Down: grid (ceil(hidden / 64), jobs). 128 threads.
enum { JOB_TILES = 2 };

// act of a job's assignments, for 32 columns. The first 64 threads load rows of gate, the others rows of up.
template <bool ANY>
FN void gate_up_gemm(CONSTANT ExpertsArgs& a, DEVICE const uint* x, DEVICE const float* scale, DEVICE const uint* job,
                     DEVICE const uint* order, DEVICE float* act, DEVICE const Segment* table,
                     THREADGROUP uint4* scratch THREAD_IDS_PARAM) {
  const uint row = tgid.x * 32, side = tid / 64, mine = min(row + tid / 2 % 32, a.inner - 1), count = job[2];
  const WeightPtrs w = piece(a, slot_at(a, job[0], table), side);
  uint from[JOB_TILES];
  UNROLL for (uint i = 0; i < JOB_TILES; i++) from[i] = order[job[1] + min(i * 16 + tid / 8, count - 1)] / a.k;
  tile_matmul<JOB_TILES, ANY ? 0 : 4>(side == 0 ? a.gate : a.up, w, mine, a.hidden, x, from, count, scratch THREAD_IDS);
  THREADGROUP const float* sums = (THREADGROUP const float*)scratch;
  for (uint n = tid; n < count * 32; n += 128) {
    const uint column = n % 32;
    if (row + column >= a.inner) continue;
    const uint assignment = order[job[1] + n / 32];
    const float by = scale[assignment / a.k];
    THREADGROUP const float* sum = sums + n / 32 * SUM_PITCH + column;
    act[ulong(assignment) * a.row + row + column] = silu(sum[0] * by) * (sum[32] * by);
  }
}

// out of a job's assignments, without the weight, for TILE_WIDTH columns.
template <bool ANY>
FN void down_gemm(CONSTANT ExpertsArgs& a, DEVICE const uint* act, DEVICE const float* scale, DEVICE const uint* job,
                  DEVICE const uint* order, DEVICE float* out, DEVICE const Segment* table,
                  THREADGROUP uint4* scratch THREAD_IDS_PARAM) {
  const uint row = tgid.x * TILE_WIDTH, mine = min(row + tid / 2, a.hidden - 1), count = job[2];
  const WeightPtrs w = piece(a, slot_at(a, job[0], table), 2);
  uint from[JOB_TILES];
  UNROLL for (uint i = 0; i < JOB_TILES; i++) from[i] = order[job[1] + min(i * 16 + tid / 8, count - 1)];
  tile_matmul<JOB_TILES, ANY ? 0 : 4>(a.down, w, mine, a.inner, act, from, count, scratch THREAD_IDS);
  THREADGROUP const float* sums = (THREADGROUP const float*)scratch;
  for (uint n = tid; n < count * TILE_WIDTH; n += 128) {
    const uint assignment = order[job[1] + n / TILE_WIDTH], column = row + n % TILE_WIDTH;
    const float sum = sums[n / TILE_WIDTH * SUM_PITCH + n % TILE_WIDTH];
    if (column < a.hidden) out[ulong(assignment) * a.hidden + column] = sum * scale[assignment];
  }
}

#endif

// If STAGED, x is in threadgroup memory, else lanes read it from the cache. Both give the same bytes.
#define GATE_UP(name, ANY, STAGED)                                                                                     \
  KERNEL(name, ARGS(ExpertsArgs, a), IN(float, x, 1), IN(float, scores, 2), IN(uint, slots, 3), OUT(float, act, 4),    \
         IN(Segment, table, 5), IN(uint, skip, 6)) {                                                                   \
    SHARED(float4, scratch, STAGED ? STAGED_CHUNKS * 4 : 1);                                                           \
    SHARED(float, sums, STAGED ? STAGED_CHUNKS : 1);                                                                   \
    AWAIT();                                                                                                           \
    if (is_skipped(a.can_skip, skip)) return;                                                                          \
    gate_up_assignments<ANY, STAGED>(a, x, scores, slots, act, table, scratch, sums THREAD_IDS);                       \
  }

GATE_UP(moe_gate_up, false, true)
GATE_UP(moe_gate_up_direct, false, false)
GATE_UP(moe_gate_up_any, true, false)

#define EXPERTS(suffix, ANY)                                                                                           \
  KERNEL(moe_down##suffix, ARGS(ExpertsArgs, a), IN(float, act, 1), IN(float, weights, 2), IN(uint, slots, 3),         \
         OUT(float, h, 4), IN(uchar, c, 5), IN(uchar, s, 6), IN(uchar, b, 7), IN(Segment, table, 8),                   \
         IN(uint, skip, 9)) {                                                                                          \
    SHARED(float, part, 32 * DOWN_PARTS * DOWN_ROWS);                                                                  \
    const WeightPtrs shared = {c, s, b};                                                                               \
    down<ANY>(a, act, weights, slots, h, shared, table, skip, part THREAD_IDS);                                        \
  }                                                                                                                    \
  KERNEL(moe_gate_up_grouped##suffix, ARGS(ExpertsArgs, a), IN(float, x, 1), IN(uint, jobs, 2), IN(uint, order, 3),    \
         OUT(float, act, 4), IN(Segment, table, 5)) {                                                                  \
    AWAIT();                                                                                                           \
    gate_up_grouped<ANY>(a, x, jobs + tgid.y * 3, order, act, table THREAD_IDS);                                       \
  }                                                                                                                    \
  KERNEL(moe_down_grouped##suffix, ARGS(ExpertsArgs, a), IN(float, act, 1), IN(uint, jobs, 2), IN(uint, order, 3),     \
         OUT(float, out, 4), IN(Segment, table, 5)) {                                                                  \
    AWAIT();                                                                                                           \
    down_grouped<ANY>(a, act, jobs + tgid.y * 3, order, out, table THREAD_IDS);                                        \
  }

EXPERTS(, false)
EXPERTS(_any, true)

#ifndef NO_TILES
#define EXPERTS_HALF(suffix, ANY)                                                                                      \
  KERNEL(moe_gate_up_gemm##suffix, ARGS(ExpertsArgs, a), IN(uint, x, 1), IN(float, scale, 2), IN(uint, jobs, 3),       \
         IN(uint, order, 4), OUT(float, act, 5), IN(Segment, table, 6)) {                                              \
    SHARED(uint4, scratch, TileScratch<JOB_TILES>::SIZE);                                                              \
    AWAIT();                                                                                                           \
    gate_up_gemm<ANY>(a, x, scale, jobs + tgid.y * 3, order, act, table, scratch THREAD_IDS);                          \
  }                                                                                                                    \
  KERNEL(moe_down_gemm##suffix, ARGS(ExpertsArgs, a), IN(uint, act, 1), IN(float, scale, 2), IN(uint, jobs, 3),        \
         IN(uint, order, 4), OUT(float, out, 5), IN(Segment, table, 6)) {                                              \
    SHARED(uint4, scratch, TileScratch<JOB_TILES>::SIZE);                                                              \
    AWAIT();                                                                                                           \
    down_gemm<ANY>(a, act, scale, jobs + tgid.y * 3, order, out, table, scratch THREAD_IDS);                           \
  }

EXPERTS_HALF(, false)
EXPERTS_HALF(_any, true)
#endif

// h[token] += sum over ranks of weight * out, one column per thread. `shared` has the shared expert's output, one row
// per token. Grid (ceil(hidden / 128), tokens), 128 threads.
KERNEL(moe_combine, ARGS(ExpertsArgs, a), IN(float, out, 1), IN(float, shared, 2), IN(float, weights, 3),
       OUT(float, h, 4), IN(uint, skip, 5)) {
  AWAIT();
  if (is_skipped(a.can_skip, skip)) return;
  const uint i = tgid.x * 128 + tid, token = tgid.y;
  if (i >= a.hidden) return;
  float sum = 0;
  for (uint r = 0; r < a.k; r++)
    sum += weights[token * (a.k + 1) + r] * out[ulong(token * a.k + r) * a.hidden + i];
  if (a.shared_inner != 0) sum += weights[token * (a.k + 1) + a.k] * shared[ulong(token) * a.hidden + i];
  h[ulong(token) * a.hidden + i] += sum;
}

// act = silu(gate) * up for rows of `width` columns. `inner` gates and then `inner` ups start at column `at`. Grid
// (ceil(inner / 128), tokens), 128 threads.
struct SwigluArgs { uint inner, width, at; };

KERNEL(swiglu, ARGS(SwigluArgs, a), IN(float, scores, 1), OUT(float, act, 2)) {
  AWAIT();
  const uint i = tgid.x * 128 + tid;
  if (i >= a.inner) return;
  DEVICE const float* from = scores + ulong(tgid.y) * a.width + a.at;
  act[ulong(tgid.y) * a.inner + i] = silu(from[i]) * from[a.inner + i];
}
