#if defined(QUAD_FMA) && !defined(NO_TILES)
// Experts of decoded and drafted rows on matrix units, for 4 bits in groups of 64. As in row_tiles.metal, W is the left
// factor, and a value of x is the sum of two halves. A tile has four rows of x. All rows that use an expert are one job,
// so an expert's weights are read and unpacked once for four rows. A row's result depends on no other row and not on the
// number of rows.
//
//   moe_gate_up_tiles  act[assignment] = silu(gate x) * (up x)
//   moe_down_tiles     out[assignment] = down act, without the weight; moe_combine adds the results
//   moe_down_tiles_1   both for one token: h += sum over ranks of weight * down act
//
// Without `grouped`, the jobs are found from the slots of all assignments. Job j has all assignments with the slot of
// assignment j, unless an earlier assignment has that slot: then job j is empty. With `grouped`, a job is {slot, first,
// count} of the list `order`, with at most JOB_LIST assignments.

// SPLIT_GROUP: columns per scale. JOB_ROWS: rows of x of a tile. UP_GROUPS_STAGED, DOWN_GROUPS_STAGED: groups of a row
// that are in threadgroup memory at a time. UP_SIMDS: simdgroups that share these groups. UP_STEPS, DOWN_STEPS: steps of
// a simdgroup, two groups each. JOB_LIST: most assignments of a job. DOWN_RANKS: most ranks of moe_down_tiles_1.
enum { SPLIT_GROUP = 64, JOB_ROWS = 4, JOB_LIST = 32, DOWN_RANKS = 16 };
enum { UP_GROUPS_STAGED = 32, UP_SIMDS = 8, UP_STEPS = UP_GROUPS_STAGED / UP_SIMDS / 2 };
enum { DOWN_GROUPS_STAGED = 8, DOWN_SIMDS = 4, DOWN_STEPS = DOWN_GROUPS_STAGED / 2 };

// A group of a split row has eight uint4 for each half of its columns: one for each lane of a quad, first halves before
// second halves. So the lanes of a load access adjacent memory.
enum { GROUP_UNITS = 16 };

// The first 11 bits of x, rounded to nearest.
FN float leading_bits(float x) {
  const float t = x * 8193.0f;
  return t - (t - x);
}

// Splits quarter lane % 4 of a group of x into halves. The four lanes of a quad have the same group. A power of two
// brings the largest value into [2^14, 2^15). `factors` gets the sum of the group and the inverse of the power of two.
// Every second pair of columns is divided by 16, because unpack_codes multiplies its codes by 16.
FN void split_quarter(DEVICE const float* x, THREADGROUP uint4* halves, THREADGROUP float* factors THREAD_IDS_PARAM) {
  float v[16], max_abs = 0;
  const float sum = QUAD_SUM(load16(x, v));
  UNROLL for (uint i = 0; i < 16; i++) max_abs = max(max(max_abs, v[i]), -v[i]);
  const uint power = max(as_type<uint>(QUAD_MAX(max_abs)) >> 23, 15u);
  const float up = as_type<float>((268u - power) << 23);
  UNROLL for (uint u = 0; u < 2; u++) {
    uint first[4], second[4];
    UNROLL for (uint i = 0; i < 4; i++) {
      const uint at = i % 2 * 8 + u * 2 + i / 2;
      const float times = i < 2 ? up : up * 0.0625f, a = v[at] * times, b = v[at + 4] * times;
      const float a1 = leading_bits(a), b1 = leading_bits(b);
      first[i] = HALF2(a1, b1), second[i] = HALF2(a - a1, b - b1);
    }
    put_words((THREADGROUP uint*)(halves + u * 8 + lane % 4), first);
    put_words((THREADGROUP uint*)(halves + u * 8 + 4 + lane % 4), second);
  }
  if (lane % 4 == 0) factors[0] = sum, factors[1] = as_type<float>((power - 14u) << 23);
}

// Unpacks 16 codes, a quarter of a group, to halves: h[2 * j + i] has columns 8 i + j and 8 i + j + 4. For even j, the
// halves are q - 8; for odd j, they are 16 times that.
FN void unpack_codes(THREAD const uint* q, THREAD uint* h) {
  UNROLL for (uint i = 0; i < 2; i++)
    UNROLL for (uint j = 0; j < 4; j++) {
      const uint w = q[i] >> j / 2 * 8;
      h[2 * j + i] = j % 2 == 0 ? HALF2_SUB((w & 0x000f000fu) | 0x64006400u, 0x64086408u)
                                : HALF2_SUB((w & 0x00f000f0u) | 0x64006400u, 0x64806480u);
    }
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

// Adds the products of group `u` of a step to `total`, see multiply_block.
template <uint MT>
FN void multiply_group(THREAD const StepCodes<MT>& codes, uint u, THREADGROUP const uint4* halves,
                       THREADGROUP const float* factors, THREAD float* total) {
  const uint4 x = halves[u * GROUP_UNITS], y = halves[u * GROUP_UNITS + 8];
  const float sum = factors[u * 2], inverse = factors[u * 2 + 1];
  uint h[MT * 16];
  float c[MT * 4];
  UNROLL for (uint r = 0; r < MT * 2; r++) unpack_codes(codes.q + r * 4 + u * 2, h + r * 8);
  UNROLL for (uint i = 0; i < MT * 4; i++) c[i] = 0;
  UNROLL for (uint j = 0; j < 4; j++)
    UNROLL for (uint m = 0; m < MT; m++) {
      THREAD const uint* low = h + m * 16 + j * 2;
      THREAD float* sums = c + m * 4;
      QUAD_FMA(sums, low[0], low[8], low[1], low[9], (j == 0 ? x.x : j == 1 ? x.z : j == 2 ? y.x : y.z),
               (j == 0 ? x.y : j == 1 ? x.w : j == 2 ? y.y : y.w));
    }
  UNROLL for (uint r = 0; r < MT * 2; r++) {
    const float s = as_type<float>(u == 0 ? codes.s[r] << 16 : codes.s[r] & 0xffff0000u);
    const float b = fma(8.0f, s, as_type<float>(u == 0 ? codes.b[r] << 16 : codes.b[r] & 0xffff0000u));
    total[r] = fma(s, (c[2 * r] + c[2 * r + 1]) * inverse, total[r]);
    total[r] = fma(b, sum, total[r]);
  }
}

// Multiplies `steps` steps by `count` split rows of x with `staged` groups each, from group `first` on. Adds to
// total[2 * m + i]: row 8 * i + lane / 4 of matrix m, row lane % 4 of x. Columns of the tile after the last row of x
// repeat this row. They change no other column.
template <uint MT, uint STEPS>
FN void multiply_block(THREAD const BlockCodes<MT, STEPS>& codes, uint steps, uint count, uint staged, uint first,
                       THREADGROUP const uint4* halves, THREADGROUP const float* factors,
                       THREAD float* total THREAD_IDS_PARAM) {
  halves += (min(lane / 8, count - 1) * staged + first) * GROUP_UNITS + lane / 4 % 2 * 4 + lane % 4;
  factors += (min(lane % 4, count - 1) * staged + first) * 2;
  UNROLL for (uint i = 0; i < STEPS; i++) {
    if (i >= steps) continue;
    UNROLL for (uint u = 0; u < 2; u++)
      multiply_group<MT>(codes.steps[i], u, halves + i * 2 * GROUP_UNITS, factors + i * 4, total);
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

// Splits `staged` groups, from group `first`, of `count` rows of x. Row r is x[list[r] / per].
template <uint SIMDS>
FN void split_job(DEVICE const float* x, uint stride, THREADGROUP const uint* list, uint per, uint count, uint first,
                  uint staged, THREADGROUP uint4* halves, THREADGROUP float* factors THREAD_IDS_PARAM) {
  const uint all = count * staged;
  for (uint base = sg * 8; base < all; base += SIMDS * 8) {
    const uint i = min(base + lane / 4, all - 1), r = i / staged, group = first + i % staged;
    DEVICE const float* from = x + ulong(list[r] / per) * stride + group * SPLIT_GROUP + lane % 4 * 16;
    split_quarter(from, halves + i * GROUP_UNITS, factors + 2 * i THREAD_IDS);
  }
}

// act of a job's assignments for 16 rows of gate and up. The simdgroups share the columns. Grid (ceil(inner / 16),
// jobs), 256 threads. Without `grouped`, a first job applies SwiGLU to the shared expert's projections.
WIDE_KERNEL(moe_gate_up_tiles, ARGS(ExpertsArgs, a), IN(float, x, 1), IN(float, scores, 2), IN(uint, slots, 3),
            IN(uint, order, 4), OUT(float, act, 5), IN(Segment, table, 6), IN(uint, skip, 7)) {
  SHARED(uint4, halves, JOB_ROWS * UP_GROUPS_STAGED * GROUP_UNITS);
  SHARED(float, factors, JOB_ROWS * UP_GROUPS_STAGED * 2);
  SHARED(float, part, UP_SIMDS * 128);
  SHARED(uint, list, JOB_LIST);
  AWAIT();
  if (is_skipped(a.can_skip, skip)) return;
  if (a.grouped == 0 && tgid.y == 0) {
    if (a.shared_inner != 0)
      for (uint t = tgid.x; t < a.tokens; t += (a.inner + 15) / 16) gate_up_shared(a, t, scores, act THREAD_IDS);
    return;
  }
  const uint job = a.grouped != 0 ? tgid.y : tgid.y - 1, slot = slots[a.grouped != 0 ? job * 3 : job];
  const uint found = find_job(a, slots, order, job, slot, list THREAD_IDS);
  if (found == 0) return;
  const uint row = tgid.x * 16, groups = a.hidden / SPLIT_GROUP;
  DEVICE const uchar* expert = slot_at(a, slot, table);
  const WeightPtrs w[2] = {piece(a, expert, 0), piece(a, expert, 1)};
  for (uint done = 0; done < found; done += JOB_ROWS) {
    const uint count = min(found - done, uint(JOB_ROWS));
    float total[4] = {0, 0, 0, 0};
    for (uint first = 0; first < groups; first += UP_GROUPS_STAGED) {
      const uint staged = min(groups - first, uint(UP_GROUPS_STAGED)), steps = staged / 2;
      const uint each = (steps + UP_SIMDS - 1) / UP_SIMDS, begin = min(sg * each, steps), mine = min(each, steps - begin);
      BlockCodes<2, UP_STEPS> codes;
      load_block<2, UP_STEPS>(w, a.hidden, row, first / 2 + begin, mine, codes THREAD_IDS);
      BARRIER();  // the list is written, and the previous groups are used
      split_job<UP_SIMDS>(x, a.hidden, list + done, a.k, count, first, staged, halves, factors THREAD_IDS);
      BARRIER();
      multiply_block<2, UP_STEPS>(codes, mine, count, staged, begin * 2, halves, factors, total THREAD_IDS);
    }
    UNROLL for (uint i = 0; i < 4; i++) part[sg * 128 + i * 32 + lane] = total[i];
    BARRIER();
    if (tid >= 64) continue;
    const uint t = tid % 4, r = row + tid / 32 * 8 + lane / 4;
    float gate = 0, value = 0;
    UNROLL for (uint k = 0; k < UP_SIMDS; k++) gate += part[k * 128 + tid], value += part[k * 128 + 64 + tid];
    if (t < count) act[ulong(list[done + t]) * a.row + r] = silu(gate) * value;
  }
}

// out of a job's assignments, for 64 columns. A simdgroup has 16 of them. Grid (ceil(hidden / 64), jobs), 128 threads.
WIDE_KERNEL(moe_down_tiles, ARGS(ExpertsArgs, a), IN(float, act, 1), IN(uint, slots, 2), IN(uint, order, 3),
       OUT(float, out, 4), IN(uchar, c, 5), IN(uchar, s, 6), IN(uchar, b, 7), IN(Segment, table, 8),
       IN(uint, skip, 9)) {
  SHARED(uint4, halves, JOB_ROWS * DOWN_GROUPS_STAGED * GROUP_UNITS);
  SHARED(float, factors, JOB_ROWS * DOWN_GROUPS_STAGED * 2);
  SHARED(uint, list, JOB_LIST);
  AWAIT();
  if (is_skipped(a.can_skip, skip)) return;
  // The shared expert's jobs come first, each with JOB_LIST tokens.
  const uint row = tgid.x * 64 + sg * 16, shared_jobs = a.grouped != 0 ? 0 : (a.tokens + JOB_LIST - 1) / JOB_LIST;
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
    if (found == 0) return;
    w = piece(a, slot_at(a, slot, table), 2);
  }
  const uint groups = cols / SPLIT_GROUP;
  for (uint done = 0; done < found; done += JOB_ROWS) {
    const uint count = min(found - done, uint(JOB_ROWS));
    float total[2] = {0, 0};
    for (uint first = 0; first < groups; first += DOWN_GROUPS_STAGED) {
      const uint staged = min(groups - first, uint(DOWN_GROUPS_STAGED));
      BlockCodes<1, DOWN_STEPS> codes;
      load_block<1, DOWN_STEPS>(&w, cols, row, first / 2, staged / 2, codes THREAD_IDS);
      BARRIER();  // the list is written, and the previous groups are used
      split_job<DOWN_SIMDS>(act, a.row, list + done, 1, count, first, staged, halves, factors THREAD_IDS);
      BARRIER();
      multiply_block<1, DOWN_STEPS>(codes, staged / 2, count, staged, 0, halves, factors, total THREAD_IDS);
    }
    if (lane % 4 >= count) continue;
    DEVICE float* to = out + ulong(list[done + lane % 4]) * a.hidden + row + lane / 4;
    to[0] = total[0], to[8] = total[1];
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
  const uint cols = sg < a.k ? a.inner : sg < ranks ? a.shared_inner : 0, groups = cols / SPLIT_GROUP;
  const uint first_steps = min(groups, uint(DOWN_GROUPS_STAGED)) / 2;
  WeightPtrs w = {c, s, b};
  BlockCodes<1, DOWN_STEPS> codes;
  // Loads start before AWAIT. The launch that writes the slots comes before the previous launch, so it has ended. If the
  // slot is another one after AWAIT all the same, its weights are loaded again.
  const uint early = sg < a.k ? PEEK(slots + sg) : NO_SLOT;
  const bool is_early = sg >= a.k || (early >> a.shift < a.segments && table[early >> a.shift].bytes != 0);
  if (sg < a.k && is_early) w = piece(a, slot_at(a, early, table), 2);
  if (is_early) load_block<1, DOWN_STEPS>(&w, cols, row, 0, first_steps, codes THREAD_IDS);
  AWAIT();
  if (is_skipped(a.can_skip, skip)) return;
  const float before = tid < 16 ? h[row + tid] : 0.0f, weight = sg < ranks ? weights[sg] : 0.0f;
  if (sg < a.k && (!is_early || slots[sg] != early)) {
    w = piece(a, slot_at(a, slots[sg], table), 2);
    load_block<1, DOWN_STEPS>(&w, cols, row, 0, first_steps, codes THREAD_IDS);
  }
  THREADGROUP uint4* mine = halves + sg * (DOWN_GROUPS_STAGED * GROUP_UNITS);
  THREADGROUP float* my_factors = factors + sg * (DOWN_GROUPS_STAGED * 2);
  float total[2] = {0, 0};
  for (uint first = 0; first < max(a.inner, a.shared_inner) / SPLIT_GROUP; first += DOWN_GROUPS_STAGED) {
    const uint staged = first < groups ? min(groups - first, uint(DOWN_GROUPS_STAGED)) : 0;
    if (first > 0) {
      load_block<1, DOWN_STEPS>(&w, cols, row, first / 2, staged / 2, codes THREAD_IDS);
      BARRIER();  // before the previous groups are overwritten
    }
    if (staged > 0) {
      const uint i = min(lane / 4, staged - 1);
      DEVICE const float* from = act + ulong(sg) * a.row + (first + i) * SPLIT_GROUP + lane % 4 * 16;
      split_quarter(from, mine + i * GROUP_UNITS, my_factors + 2 * i THREAD_IDS);
    }
    BARRIER();
    if (staged > 0)
      multiply_block<1, DOWN_STEPS>(codes, staged / 2, 1, staged, 0, mine, my_factors, total THREAD_IDS);
  }
  if (lane % 4 == 0 && sg < ranks)
    UNROLL for (uint i = 0; i < 2; i++) part[sg * 16 + i * 8 + lane / 4] = weight * total[i];
  BARRIER();
  if (tid >= 16) return;
  float sum = 0;
  for (uint r = 0; r < ranks; r++) sum += part[r * 16 + tid];
  h[row + tid] = before + sum;
}
#endif
