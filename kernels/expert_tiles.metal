#if defined(QUAD_FMA) && !defined(NO_TILES)
// Experts of decoded and drafted rows on matrix units, for 4 bits in groups of 64. As in row_tiles.metal, W is the left
// factor, and a value of x is the sum of two halves. A tile has four rows of x. All rows that use an expert are one job,
// so an expert's weights are read and unpacked once for four rows. A row's result depends on no other row and not on the
// number of rows.
//
//   moe_gate_up_tiles*  act[assignment] = silu(gate x) * (up x), also of the shared expert, whose jobs come first
//   moe_down_tiles      out[assignment] = down act, without the weight; moe_combine adds the results
//   moe_down_tiles_1    both for one token: h += sum over ranks of weight * down act
//
// Without `grouped`, the jobs are found from the slots of all assignments. Job j has all assignments with the slot of
// assignment j, unless an earlier assignment has that slot: then job j is empty. With `grouped`, a job is {slot, first,
// count} of the list `order`, with at most JOB_LIST assignments.
//
// moe_gate_up_tiles_1 and moe_down_tiles_1 are for few jobs, which do not fill a GPU: a simdgroup loads all its codes at
// once to registers, and x is split once per threadgroup. The others are for many jobs: a simdgroup copies codes to
// threadgroup memory two steps ahead, and splits its columns of x once for several blocks of 16 rows of W. Both give the
// same bytes.

// UP_SIMDS, DOWN_SIMDS: runs of steps of a row that are summed on their own, then added up in order. JOB_LIST: most
// assignments of a job.
enum { UP_SIMDS = 8, DOWN_SIMDS = 4, JOB_LIST = 32 };
// moe_gate_up_tiles_1 and moe_down_tiles_1: groups of a row that are in threadgroup memory at a time, steps of a
// simdgroup, two groups each, and most ranks of moe_down_tiles_1.
enum { UP_GROUPS_STAGED = 32, UP_STEPS = UP_GROUPS_STAGED / UP_SIMDS / 2 };
enum { DOWN_GROUPS_STAGED = 8, DOWN_STEPS = DOWN_GROUPS_STAGED / 2, DOWN_RANKS = 16 };

// A group of a split row has eight uint4 for each half of its columns: one for each lane of a quad, first halves before
// second halves. So the lanes of a load access adjacent memory.
enum { GROUP_UNITS = 16 };

// The first 11 bits of x, rounded to nearest.
FN float leading_bits(float x) {
  const float t = x * 8193.0f;
  return t - (t - x);
}

// Loads quarter lane % 4 of a group of x. The four lanes of a quad have the same group. A power of two brings the
// largest value into [2^14, 2^15); returns its inverse. Every second column is divided by 16, because
// unpack_quad multiplies its codes by 16.
FN float scale_quarter(DEVICE const float* x, THREAD float* v, THREAD float& sum THREAD_IDS_PARAM) {
  float max_abs = 0;
  sum = QUAD_SUM(load16(x, v));
  UNROLL for (uint i = 0; i < 16; i++) max_abs = max(max(max_abs, v[i]), -v[i]);
  const uint power = max(as_type<uint>(QUAD_MAX(max_abs)) >> 23, 15u);
  const float up = as_type<float>((268u - power) << 23);
  UNROLL for (uint i = 0; i < 16; i++) v[i] *= i % 2 == 0 ? up : up * 0.0625f;
  return as_type<float>((power - 14u) << 23);
}

// Word `i` of a quarter's first or second halves, in the order of unpack_quad.
FN uint split_pair(THREAD const float* v, uint i, bool is_second) {
  const float a = v[i % 2 * 8 + i / 2], b = v[i % 2 * 8 + i / 2 + 4], a1 = leading_bits(a), b1 = leading_bits(b);
  return HALF2(is_second ? a - a1 : a1, is_second ? b - b1 : b1);
}

// Adds the product of a group of 16 rows of W, with scales s and offsets b, to two rows of `total`. `h` has the codes,
// `x` the split columns of x.
FN void multiply_group(THREAD const uint* h, THREAD const float* s, THREAD const float* b, THREAD const uint* x,
                       float sum, float inverse, THREAD float* total) {
  float c[4];
  QUAD_MUL(c, h[0], h[8], h[1], h[9], x[0], x[1]);
  UNROLL for (uint j = 2; j < 8; j += 2) QUAD_FMA(c, h[j], h[j + 8], h[j + 1], h[j + 9], x[j], x[j + 1]);
  UNROLL for (uint r = 0; r < 2; r++)
    total[r] = fma(b[r], sum, fma(s[r], (c[2 * r] + c[2 * r + 1]) * inverse, total[r]));
}

// Splits quarter lane % 4 of a group of x into halves. `factors` gets the sum of the group and the inverse of the power
// of two.
FN void split_quarter(DEVICE const float* x, THREADGROUP uint4* halves, THREADGROUP float* factors THREAD_IDS_PARAM) {
  float v[16], sum;
  const float inverse = scale_quarter(x, v, sum THREAD_IDS);
  UNROLL for (uint u = 0; u < 2; u++) {
    uint first[4], second[4];
    UNROLL for (uint i = 0; i < 4; i++) {
      first[i] = split_pair(v, u * 4 + i, false);
      second[i] = split_pair(v, u * 4 + i, true);
    }
    put_words((THREADGROUP uint*)(halves + u * 8 + lane % 4), first);
    put_words((THREADGROUP uint*)(halves + u * 8 + 4 + lane % 4), second);
  }
  if (lane % 4 == 0) factors[0] = sum, factors[1] = inverse;
}

// A step has two groups of 16 rows of each of MT matrices. A lane has a quarter of each group of two rows of each
// matrix.
template <uint MT> struct StepCodes { uint q[MT * 8], s[MT * 2], b[MT * 2]; };
// All steps of a simdgroup. They are loaded together, because a step takes less time than a load.
template <uint MT, uint STEPS> struct BlockCodes { StepCodes<MT> steps[STEPS]; };

// Loads `count` steps of 16 rows, from `row`, of each matrix.
template <uint MT, uint STEPS>
FN void load_block(THREAD const WeightPtrs* w, uint cols, uint row, uint first, uint count,
                   THREAD BlockCodes<MT, STEPS>& to THREAD_IDS_PARAM) {
  UNROLL for (uint r = 0; r < MT * 2; r++) {
    const ulong at = row + r % 2 * 8 + lane / 4;
    DEVICE const uchar* codes = w[r / 2].codes + at * (cols / 2) + first * 64 + lane % 4 * 8;
    DEVICE const uchar* scales = w[r / 2].scales + at * (cols / 32) + first * 4;
    DEVICE const uchar* biases = w[r / 2].biases + at * (cols / 32) + first * 4;
    UNROLL for (uint i = 0; i < STEPS; i++) {
      if (i >= count) continue;
      UNROLL for (uint u = 0; u < 2; u++) {
        const uint2 two = STREAM((DEVICE const uint2*)(codes + i * 64 + u * 32));
        to.steps[i].q[r * 4 + 2 * u] = two.x, to.steps[i].q[r * 4 + 2 * u + 1] = two.y;
      }
      to.steps[i].s[r] = *(DEVICE const uint*)(scales + i * 4);
      to.steps[i].b[r] = *(DEVICE const uint*)(biases + i * 4);
    }
  }
}

// The steps of moe_gate_up_tiles_1 that this simdgroup has of `staged` groups: their start and number.
FN void share_columns(uint staged, THREAD uint& begin, THREAD uint& mine THREAD_IDS_PARAM) {
  const uint steps = staged / 2, each = (steps + UP_SIMDS - 1) / UP_SIMDS;
  begin = min(sg * each, steps), mine = min(each, steps - begin);
}

// Loads this simdgroup's steps of the groups from `first` that are staged together.
FN void load_columns(THREAD const WeightPtrs* w, uint cols, uint row, uint first,
                     THREAD BlockCodes<2, UP_STEPS>& codes THREAD_IDS_PARAM) {
  uint begin, mine;
  share_columns(min(cols / GROUP - first, uint(UP_GROUPS_STAGED)), begin, mine THREAD_IDS);
  load_block<2, UP_STEPS>(w, cols, row, first / 2 + begin, mine, codes THREAD_IDS);
}

// Multiplies a step by rows of x in threadgroup memory: `halves` and `factors` of this lane. Adds to total[2 * m + i]:
// row 8 * i + lane / 4 of matrix m, row lane % 4 of x.
template <uint MT>
FN void multiply_codes(THREAD const StepCodes<MT>& codes, uint ones, THREADGROUP const uint4* halves,
                       THREADGROUP const float* factors, THREAD float* total) {
  UNROLL for (uint u = 0; u < 2; u++) {
    const uint4 first = halves[u * GROUP_UNITS], second = halves[u * GROUP_UNITS + 8];
    const uint x[8] = {first.x, first.y, first.z, first.w, second.x, second.y, second.z, second.w};
    UNROLL for (uint m = 0; m < MT; m++) {
      uint h[16];
      float s[2], b[2];
      UNROLL for (uint i = 0; i < 2; i++) {
        const uint r = m * 2 + i;
        unpack_quad<4>(codes.q + r * 4 + u * 2, ones, h + i * 8);
        s[i] = as_type<float>(u == 0 ? codes.s[r] << 16 : codes.s[r] & 0xffff0000u);
        b[i] = fma(8.0f, s[i], as_type<float>(u == 0 ? codes.b[r] << 16 : codes.b[r] & 0xffff0000u));
      }
      multiply_group(h, s, b, x, factors[u * 2], factors[u * 2 + 1], total + m * 2);
    }
  }
}

// Finds a threadgroup's job. Returns the number of its assignments, which are in `list` after the next barrier.
FN uint find_job(CONSTANT ExpertsArgs& a, DEVICE const uint* slots, DEVICE const uint* order, uint job, uint slot,
                 THREADGROUP uint* list THREAD_IDS_PARAM) {
  if (a.grouped != 0) {
    DEVICE const uint* words = slots + job * 3;
    if (tid < words[2]) list[tid] = order[words[1] + tid];
    return words[2];
  }
  const uint all = a.tokens * a.k;
  uint count = 0;
  if (a.tokens == 1) {
    if (tid == 0) list[0] = job;
    return slot == NO_SLOT ? 0 : 1;
  }
  for (uint next = 0; slot != NO_SLOT && count < JOB_LIST; count++) {
    uint found = NO_SLOT;
    for (uint i = next + lane; i < all && found == NO_SLOT; i += 32)
      if (slots[i] == slot) found = i;
    found = SIMD_MIN(found);
    if (found == NO_SLOT || (count == 0 && found != job)) break;
    if (tid == 0) list[count] = found;
    next = found + 1;
  }
  return count;
}

// The row of x of an assignment. The shared expert's assignments come after those of all routed experts.
FN DEVICE const float* row_of(CONSTANT ExpertsArgs& a, DEVICE const float* x, uint assignment) {
  const uint routed = a.tokens * a.k;
  return x + ulong(assignment < routed ? assignment / a.k : assignment - routed) * a.hidden;
}

// Splits `staged` groups, from group `first`, of the `count` rows of x of the assignments in `list`.
FN void split_job(CONSTANT ExpertsArgs& a, DEVICE const float* x, THREADGROUP const uint* list, uint count, uint first,
                  uint staged, THREADGROUP uint4* halves, THREADGROUP float* factors THREAD_IDS_PARAM) {
  const uint all = count * staged;
  for (uint base = sg * 8; base < all; base += UP_SIMDS * 8) {
    const uint i = min(base + lane / 4, all - 1), r = i / staged, group = first + i % staged;
    DEVICE const float* from = row_of(a, x, list[r]) + group * GROUP + lane % 4 * 16;
    split_quarter(from, halves + i * GROUP_UNITS, factors + 2 * i THREAD_IDS);
  }
}

// Finds a threadgroup's job of gate and up. Returns the number of its assignments, which are in `list` after the next
// barrier, or 0 if `row` is not a row of its weights. `w` has the shared expert's weights, and gets those of the job. A
// job of the shared expert has one tile of rows.
FN uint gate_up_job(CONSTANT ExpertsArgs& a, DEVICE const uint* slots, DEVICE const uint* order,
                    DEVICE const Segment* table, uint row, THREADGROUP uint* list,
                    THREAD WeightPtrs* w THREAD_IDS_PARAM) {
  if (tgid.y < a.shared_jobs) {
    const uint first = tgid.y * TILE_ROWS, count = min(a.tokens - first, uint(TILE_ROWS));
    if (tid < count) list[tid] = a.tokens * a.k + first + tid;
    return row < a.shared_inner ? count : 0;
  }
  const uint job = tgid.y - a.shared_jobs, slot = slots[a.grouped != 0 ? job * 3 : job];
  const uint found = row < a.inner ? find_job(a, slots, order, job, slot, list THREAD_IDS) : 0;
  if (found == 0 || !is_mapped(a, slot, table)) return 0;
  DEVICE const uchar* expert = slot_at(a, slot, table);
  w[0] = piece(a, expert, 0), w[1] = piece(a, expert, 1);
  return found;
}

// Adds the sums of the simdgroups, for `count` blocks of 16 rows from `row`, and stores act.
FN void store_act(CONSTANT ExpertsArgs& a, THREADGROUP const float* part, THREADGROUP const uint* list, uint rows,
                  uint count, uint row, DEVICE float* act THREAD_IDS_PARAM) {
  for (uint i = tid; i < count * 64; i += UP_SIMDS * 32) {
    const uint at = i / 64 * 128 + i % 64;
    float gate = 0, value = 0;
    UNROLL for (uint k = 0; k < UP_SIMDS; k++) {
      gate += part[k * count * 128 + at];
      value += part[k * count * 128 + at + 64];
    }
    if (i % 4 < rows) act[ulong(list[i % 4]) * a.row + row + i / 32 * 8 + i % 32 / 4] = silu(gate) * value;
  }
}

// The weights of the shared expert's gate and up, as kernels bind them.
#define SHARED_GATE_UP                                                                                                 \
  IN(uchar, c0, 6), IN(uchar, s0, 7), IN(uchar, b0, 8), IN(uchar, c1, 9), IN(uchar, s1, 10), IN(uchar, b1, 11)

// act of a job's assignments for 16 rows of gate and up. The simdgroups share the columns. Grid (ceil(rows / 16), jobs),
// 256 threads. A job of the shared expert loads its weights before AWAIT, so these threadgroups end early.
WIDE_KERNEL(moe_gate_up_tiles_1, ARGS(ExpertsArgs, a), IN(float, x, 1), IN(uint, slots, 2), IN(uint, order, 3),
            OUT(float, act, 4), IN(Segment, table, 5), SHARED_GATE_UP, IN(uint, skip, 12)) {
  SHARED(uint4, halves, TILE_ROWS * UP_GROUPS_STAGED * GROUP_UNITS);
  SHARED(float, factors, TILE_ROWS * UP_GROUPS_STAGED * 2);
  SHARED(float, part, UP_SIMDS * 128);
  SHARED(uint, list, JOB_LIST);
  const uint row = tgid.x * 16, groups = a.hidden / GROUP;
  const bool is_early = tgid.y < a.shared_jobs && row < a.shared_inner;
  WeightPtrs w[2] = {{c0, s0, b0}, {c1, s1, b1}};
  BlockCodes<2, UP_STEPS> codes;
  if (is_early) load_columns(w, a.hidden, row, 0, codes THREAD_IDS);
  AWAIT();
  if (is_skipped(a.can_skip, skip)) return;
  const uint found = gate_up_job(a, slots, order, table, row, list, w THREAD_IDS), ones = IN_REGISTER(CODE_ONES);
  for (uint done = 0; done < found; done += TILE_ROWS) {
    const uint count = min(found - done, uint(TILE_ROWS));
    float total[4] = {0, 0, 0, 0};
    for (uint first = 0; first < groups; first += UP_GROUPS_STAGED) {
      const uint staged = min(groups - first, uint(UP_GROUPS_STAGED));
      uint begin, mine;
      share_columns(staged, begin, mine THREAD_IDS);
      if (!is_early || first > 0) load_columns(w, a.hidden, row, first, codes THREAD_IDS);
      BARRIER();  // the list is written, and the previous groups are used
      split_job(a, x, list + done, count, first, staged, halves, factors THREAD_IDS);
      BARRIER();
      // Columns of the tile after the last row of x repeat this row. They change no other column.
      const uint of_lane = min(lane / 8, count - 1) * staged + begin * 2, factor = min(lane % 4, count - 1) * staged;
      THREADGROUP const uint4* from = halves + of_lane * GROUP_UNITS + lane / 4 % 2 * 4 + lane % 4;
      THREADGROUP const float* factor_from = factors + (factor + begin * 2) * 2;
      UNROLL for (uint i = 0; i < UP_STEPS; i++)
        if (i < mine) multiply_codes<2>(codes.steps[i], ones, from + i * 2 * GROUP_UNITS, factor_from + i * 4, total);
    }
    UNROLL for (uint i = 0; i < 4; i++) part[sg * 128 + i * 32 + lane] = total[i];
    BARRIER();
    store_act(a, part, list + done, count, 1, row, act THREAD_IDS);
  }
}

// A group of a row of x that a lane has in registers: the first or the second halves of a quarter, and the sum and the
// inverse of the power of two of row lane % 4 of the tile.
struct SplitGroup { uint x[8]; float sum, inverse; };

// Splits a group of row lane / 8 of a tile.
FN void split_group(DEVICE const float* x, THREAD SplitGroup& to THREAD_IDS_PARAM) {
  float v[16], sum;
  const float inverse = scale_quarter(x + lane % 4 * 16, v, sum THREAD_IDS);
  UNROLL for (uint i = 0; i < 8; i++) to.x[i] = split_pair(v, i, lane / 4 % 2 != 0);
  to.sum = SIMD_LANE(sum, lane % 4 * 8), to.inverse = SIMD_LANE(inverse, lane % 4 * 8);
}

// Multiplies BLOCKS * 16 rows, from `row`, of MT matrices by a tile of x, for the columns of this simdgroup. The sums go
// to total[(block * MT + matrix) * 2 + i], see multiply_codes. `x` is this lane's row of x.
template <uint MT, uint BLOCKS, uint SIMDS, uint STEPS>
FN void multiply_rows(THREAD const WeightPtrs* w, uint cols, uint row, DEVICE const float* x, THREADGROUP uint* stages,
                      THREAD float* total THREAD_IDS_PARAM) {
  enum : uint { ITEMS = BLOCKS * STEPS };
  const uint steps = cols / (2 * GROUP), ones = IN_REGISTER(CODE_ONES), eighth = IN_REGISTER(eighth_at(lane));
  UNROLL for (uint i = 0; i < BLOCKS * MT * 2; i++) total[i] = 0;
  for (uint first = 0; first < steps; first += SIMDS * STEPS) {
    const uint staged = min(steps - first, uint(SIMDS * STEPS)), each = (staged + SIMDS - 1) / SIMDS;
    const uint begin = first + min(sg * each, staged), count = min(each, first + staged - begin);
    StepPtrs<MT> from;
    UNROLL for (uint m = 0; m < MT; m++) {
      from.codes[m * 2] = w[m].codes + (row + lane / 4) * (cols / 2) + begin * 64 + lane % 4 * 16;
      from.scales[m] = (lane % 2 == 0 ? w[m].scales : w[m].biases) + (row + lane / 2) * (cols / 32) + begin * 4;
    }
    SplitGroup groups[STEPS * 2];
    // Item `next` is copied and item next - 2 is multiplied. Two items share a stage.
    UNROLL for (uint next = 0; next < ITEMS + 2; next++) {
      THREADGROUP uint* stage = stages + next % 2 * (MT * STAGE);
      const uint now = next - 2, step = next % STEPS;
      if (next >= 2) {
        ASYNC_WAIT(1);
        UNROLL for (uint i = 0; i < MT * 2; i++) {
          if (now % STEPS >= count) continue;
          const uint m = i / 2, u = i % 2;
          THREAD const SplitGroup& group = groups[now % STEPS * 2 + u];
          uint h[16];
          float s[2], b[2];
          read_unit<4>(stage + m * STAGE, eighth, u, false, 1.0f, ones, h, s, b THREAD_IDS);
          multiply_group(h, s, b, group.x, group.sum, group.inverse, total + (now / STEPS * MT + m) * 2);
        }
        SIMD_BARRIER();
      }
      if (next < ITEMS && step < count) {
        StepPtrs<MT> at = from;
        UNROLL for (uint m = 0; m < MT; m++)
          at.codes[m * 2] += step * 64, at.codes[m * 2 + 1] = at.codes[m * 2] + 4 * cols;
        copy_step(at, 4, step, stage THREAD_IDS);
      }
      ASYNC_COMMIT();
      if (step == STEPS - 1)
        UNROLL for (uint m = 0; m < MT; m++) from.codes[m * 2] += 8 * cols, from.scales[m] += cols / 2;
      if (next == 1)
        UNROLL for (uint i = 0; i < STEPS * 2; i++)
          if (i / 2 < count) split_group(x + (begin * 2 + i) * GROUP, groups[i] THREAD_IDS);
    }
  }
}

// act of a job's assignments for BLOCKS * 16 rows of gate and up. Grid (ceil(rows / (16 * BLOCKS)), jobs), 256 threads.
// The jobs are those of moe_gate_up_tiles_1.
#define GATE_UP_TILES(name, BLOCKS)                                                                                    \
  WIDE_KERNEL(name, ARGS(ExpertsArgs, a), IN(float, x, 1), IN(uint, slots, 2), IN(uint, order, 3), OUT(float, act, 4), \
              IN(Segment, table, 5), SHARED_GATE_UP, IN(uint, skip, 12)) {                                             \
    SHARED(uint4, memory, UP_SIMDS * 4 * STAGE / 4);                                                                   \
    SHARED(uint, list, JOB_LIST);                                                                                      \
    const uint row = tgid.x * (16 * BLOCKS), prefetched = row + sg * (2 * BLOCKS);                                     \
    WeightPtrs w[2] = {{c0, s0, b0}, {c1, s1, b1}};                                                                    \
    if (tgid.y < a.shared_jobs)                                                                                        \
      UNROLL for (uint m = 0; m < 2; m++) prefetch_rows<2 * BLOCKS>(w[m], 4, a.shared_inner, a.hidden, prefetched);    \
    AWAIT();                                                                                                           \
    if (is_skipped(a.can_skip, skip)) return;                                                                          \
    const uint found = gate_up_job(a, slots, order, table, row, list, w THREAD_IDS);                                   \
    THREADGROUP float* part = (THREADGROUP float*)memory;                                                              \
    for (uint done = 0; done < found; done += TILE_ROWS) {                                                             \
      const uint count = min(found - done, uint(TILE_ROWS));                                                           \
      BARRIER(); /* the list is written, and the previous sums are used */                                             \
      DEVICE const float* from = row_of(a, x, list[done + min(lane / 8, count - 1)]);                                  \
      THREADGROUP uint* stages = (THREADGROUP uint*)memory + sg * (4 * STAGE);                                         \
      float total[BLOCKS * 4];                                                                                         \
      multiply_rows<2, BLOCKS, UP_SIMDS, UP_STEPS>(w, a.hidden, row, from, stages, total THREAD_IDS);                  \
      BARRIER();                                                                                                       \
      UNROLL for (uint i = 0; i < BLOCKS * 4; i++) part[(sg * (BLOCKS * 4) + i) * 32 + lane] = total[i];               \
      BARRIER();                                                                                                       \
      store_act(a, part, list + done, count, BLOCKS, row, act THREAD_IDS);                                             \
    }                                                                                                                  \
  }

GATE_UP_TILES(moe_gate_up_tiles_2, 2)
GATE_UP_TILES(moe_gate_up_tiles_4, 4)

// out of a job's assignments, for 128 columns. The simdgroups share the columns of act. Grid (hidden / 128, jobs), 128
// threads. Without `grouped`, the shared expert's jobs come first, each with JOB_LIST tokens.
WIDE_KERNEL(moe_down_tiles, ARGS(ExpertsArgs, a), IN(float, act, 1), IN(uint, slots, 2), IN(uint, order, 3),
            OUT(float, out, 4), IN(uchar, c, 5), IN(uchar, s, 6), IN(uchar, b, 7), IN(Segment, table, 8),
            IN(uint, skip, 9)) {
  enum : uint { BLOCKS = 8 };
  SHARED(uint4, memory, DOWN_SIMDS * 2 * STAGE / 4);
  SHARED(uint, list, JOB_LIST);
  AWAIT();
  if (is_skipped(a.can_skip, skip)) return;
  const uint row = tgid.x * (16 * BLOCKS), shared_jobs = a.grouped != 0 ? 0 : (a.tokens + JOB_LIST - 1) / JOB_LIST;
  WeightPtrs w = {c, s, b};
  uint found = 0, cols = a.inner;
  if (tgid.y < shared_jobs) {
    const uint first = tgid.y * JOB_LIST;
    found = min(a.tokens - first, uint(JOB_LIST)), cols = a.shared_inner;
    if (tid < found) list[tid] = a.tokens * a.k + first + tid;
    if (cols == 0) return;
  } else {
    const uint job = tgid.y - shared_jobs, slot = slots[a.grouped != 0 ? job * 3 : job];
    found = find_job(a, slots, order, job, slot, list THREAD_IDS);
    if (is_mapped(a, slot, table)) w = piece(a, slot_at(a, slot, table), 2);
    else found = 0;
    if (found == 0) return;
  }
  THREADGROUP float* part = (THREADGROUP float*)memory;
  for (uint done = 0; done < found; done += TILE_ROWS) {
    const uint count = min(found - done, uint(TILE_ROWS));
    BARRIER();  // the list is written, and the previous sums are used
    DEVICE const float* from = act + ulong(list[done + min(lane / 8, count - 1)]) * a.row;
    THREADGROUP uint* stages = (THREADGROUP uint*)memory + sg * (2 * STAGE);
    float total[BLOCKS * 2];
    multiply_rows<1, BLOCKS, DOWN_SIMDS, 1>(&w, cols, row, from, stages, total THREAD_IDS);
    BARRIER();
    UNROLL for (uint i = 0; i < BLOCKS * 2; i++) part[(sg * (BLOCKS * 2) + i) * 32 + lane] = total[i];
    BARRIER();
    for (uint i = tid; i < BLOCKS * 64; i += DOWN_SIMDS * 32) {
      float sum = 0;
      UNROLL for (uint k = 0; k < DOWN_SIMDS; k++) sum += part[k * (BLOCKS * 64) + i];
      if (i % 4 < count) out[ulong(list[done + i % 4]) * a.hidden + row + i / 32 * 8 + i % 32 / 4] = sum;
    }
  }
}

// h of one token, for 16 columns. A simdgroup has one rank. Grid (ceil(hidden / 16)), 32 threads per rank.
WIDE_KERNEL(moe_down_tiles_1, ARGS(ExpertsArgs, a), IN(float, act, 1), IN(float, weights, 2), IN(uint, slots, 3),
       OUT(float, h, 4), IN(uchar, c, 5), IN(uchar, s, 6), IN(uchar, b, 7), IN(Segment, table, 8),
       IN(uint, skip, 9)) {
  SHARED(uint4, halves, DOWN_RANKS * DOWN_GROUPS_STAGED * GROUP_UNITS);
  SHARED(float, factors, DOWN_RANKS * DOWN_GROUPS_STAGED * 2);
  SHARED(float, part, DOWN_RANKS * 16);
  const uint row = tgid.x * 16, ranks = a.shared_inner != 0 ? a.k + 1 : a.k;
  const uint cols = sg < a.k ? a.inner : sg < ranks ? a.shared_inner : 0;
  uint groups = cols / GROUP;
  const uint first_steps = min(groups, uint(DOWN_GROUPS_STAGED)) / 2;
  WeightPtrs w = {c, s, b};
  BlockCodes<1, DOWN_STEPS> codes;
  // Loads start before AWAIT. The launch that writes the slots comes before the previous launch, so it has ended. If the
  // slot is a different one after AWAIT, its weights are loaded again.
  const uint early = sg < a.k ? PEEK(slots + sg) : NO_SLOT;
  const bool is_early = sg >= a.k || is_mapped(a, early, table);
  if (sg < a.k && is_early) w = piece(a, slot_at(a, early, table), 2);
  if (is_early) load_block<1, DOWN_STEPS>(&w, cols, row, 0, first_steps, codes THREAD_IDS);
  AWAIT();
  if (is_skipped(a.can_skip, skip)) return;
  const float before = tid < 16 ? h[row + tid] : 0.0f, weight = sg < ranks ? weights[sg] : 0.0f;
  if (sg < a.k && (!is_early || slots[sg] != early)) {
    const uint slot = slots[sg];
    if (is_mapped(a, slot, table)) {
      w = piece(a, slot_at(a, slot, table), 2);
      load_block<1, DOWN_STEPS>(&w, cols, row, 0, first_steps, codes THREAD_IDS);
    } else {
      groups = 0;
    }
  }
  THREADGROUP uint4* mine = halves + sg * (DOWN_GROUPS_STAGED * GROUP_UNITS);
  THREADGROUP float* my_factors = factors + sg * (DOWN_GROUPS_STAGED * 2);
  const uint ones = IN_REGISTER(CODE_ONES);
  float total[DOWN_STEPS * 2] = {};  // of each step's place in a run, as the simdgroups of moe_down_tiles have them
  for (uint first = 0; first < max(a.inner, a.shared_inner) / GROUP; first += DOWN_GROUPS_STAGED) {
    const uint staged = first < groups ? min(groups - first, uint(DOWN_GROUPS_STAGED)) : 0;
    if (first > 0) {
      load_block<1, DOWN_STEPS>(&w, cols, row, first / 2, staged / 2, codes THREAD_IDS);
      BARRIER();  // before the previous groups are overwritten
    }
    if (staged > 0) {
      const uint i = min(lane / 4, staged - 1);
      DEVICE const float* from = act + ulong(sg) * a.row + (first + i) * GROUP + lane % 4 * 16;
      split_quarter(from, mine + i * GROUP_UNITS, my_factors + 2 * i THREAD_IDS);
    }
    BARRIER();
    THREADGROUP const uint4* quarter = mine + lane / 4 % 2 * 4 + lane % 4;
    UNROLL for (uint i = 0; i < DOWN_STEPS; i++)
      if (i < staged / 2)
        multiply_codes<1>(codes.steps[i], ones, quarter + i * 2 * GROUP_UNITS, my_factors + i * 4, total + i * 2);
  }
  if (lane % 4 == 0 && sg < ranks)
    UNROLL for (uint i = 0; i < 2; i++) {
      float sum = 0;
      UNROLL for (uint k = 0; k < DOWN_SIMDS; k++) sum += total[k * 2 + i];
      part[sg * 16 + i * 8 + lane / 4] = weight * sum;
    }
  BARRIER();
  if (tid >= 16) return;
  float sum = 0;
  for (uint r = 0; r < ranks; r++) sum += part[r * 16 + tid];
  h[row + tid] = before + sum;
}
#endif
