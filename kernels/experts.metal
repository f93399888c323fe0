// The experts, where the SSD left them: a slot holds one expert's gate, up and down (each codes, scales, biases), and a
// kernel is told slot numbers. A "place" is one chosen expert of one token: place = token * k + rank. NONE as a slot means
// "not in this launch": hits run first, misses when they have been read.
//
//   experts_up         act[place] = silu(Gate x) * (Up x)              grid (ceil(inner / 8), places), 128 threads
//   experts_down       h[token] += sum over ranks of weight * Down act  grid (ceil(hidden / 4), tokens), (k + 1) * 32 threads
//   experts_up_rows, experts_down_rows   rows grouped by expert: a job is {slot, first, count} of `order`, a list of places
//   experts_combine    h[token] += sum over ranks of weight * out[place]
//
// The shared expert is the last rank. Its gate and up were projected beside the router's scores; experts_up only multiplies
// them, experts_down reads its Down from the trunk. Sums run in rank order whatever arrived first.

enum : uint { NONE = 0xffffffffu };
enum { UP_ROWS = 2, DOWN_ROWS = 4, UP_GROUPS = 4, JOB_TOKENS = 4 };

struct ExpertsArgs {
  uint hidden, inner, k, tokens;
  uint shared_inner, row;         // the shared expert's width (0: there is none); the length of a row of act
  uint scores, shared_at;         // the length of a row of `scores`, and where the shared gate (then up) starts in it
  uint stride, slots;             // a slot's size in units of 16 bytes; slots in one slab
  uint at[9];                     // where a slot's pieces start, in units of 16 bytes: gate, up, down, each c s b
  Matrix gate, up, down, shared;  // `shared`: the shared expert's down
};

FN DEVICE const uchar* slot_at(CONSTANT ExpertsArgs& a, uint slot, DEVICE const uchar* slab0, DEVICE const uchar* slab1,
                               DEVICE const uchar* slab2, DEVICE const uchar* slab3) {
  const uint slab = slot / a.slots;
  DEVICE const uchar* p = slab == 0 ? slab0 : slab == 1 ? slab1 : slab == 2 ? slab2 : slab3;
  return p + ulong(slot % a.slots) * a.stride * 16;
}

FN float silu(float x) { return x / (1.0f + exp(-x)); }

// One lane's share of COUNT rows of a projection (rows past the last repeat it) times TOKENS rows of x, starting at from[t].
template <uint COUNT, uint TOKENS, bool ANY>
FN void rows_times(CONSTANT Matrix& m, uint cols, uint row, DEVICE const float* x, THREAD const ulong* from,
                   DEVICE const uchar* codes, DEVICE const uchar* scales, DEVICE const uchar* biases, THREAD float* acc PLACE) {
  const ulong code_bytes = row_codes(m, cols), scale_bytes = row_scales(m, cols);
  for (uint c = lane; c < cols / 16; c += 32) {
    uint2 q4[COUNT];
    float s[COUNT], b[COUNT], v[16];
    if (!ANY) {
      UNROLL for (uint r = 0; r < COUNT; r++) {
        const uint at = min(row + r, m.rows - 1);
        q4[r] = ((DEVICE const uint2*)(codes + at * code_bytes))[c];
        s[r] = bf16(((DEVICE const ushort*)(scales + at * scale_bytes))[c / 4]);
        b[r] = bf16(((DEVICE const ushort*)(biases + at * scale_bytes))[c / 4]);
      }
    }
    UNROLL for (uint t = 0; t < TOKENS; t++) {
      const float sum = load16(x + from[t] + c * 16, v);
      if (!ANY) scale_x4(v);
      UNROLL for (uint r = 0; r < COUNT; r++) {
        float dot = 0;
        if (ANY) {
          const uint at = min(row + r, m.rows - 1);
          float u[16];
          chunk(m, codes + at * code_bytes, c, cols, u);
          s[r] = chunk_scale(m, scales + at * scale_bytes, c), b[r] = chunk_bias(m, biases + at * scale_bytes, c);
          for (uint i = 0; i < 16; i++) dot = fma(u[i], v[i], dot);
        } else {
          dot = dot_q4(q4[r].x, q4[r].y, v);
        }
        acc[t * COUNT + r] = fma(b[r], sum, fma(s[r], dot, acc[t * COUNT + r]));
      }
    }
  }
}

// TOKENS places (count of them real) of one expert: rows `row`.. of gate and up, then SwiGLU.
template <uint TOKENS, bool ANY>
FN void up(CONSTANT ExpertsArgs& a, DEVICE const uchar* expert, uint row, THREAD const uint* place, uint count,
           DEVICE const float* x, DEVICE float* act PLACE) {
  float gate[TOKENS * UP_ROWS], value[TOKENS * UP_ROWS];
  ulong from[TOKENS];
  UNROLL for (uint t = 0; t < TOKENS; t++) from[t] = ulong(place[t] / a.k) * a.hidden;
  UNROLL for (uint i = 0; i < TOKENS * UP_ROWS; i++) gate[i] = 0, value[i] = 0;
  rows_times<UP_ROWS, TOKENS, ANY>(a.gate, a.hidden, row, x, from, expert + ulong(a.at[0]) * 16, expert + ulong(a.at[1]) * 16,
                                   expert + ulong(a.at[2]) * 16, gate HERE);
  rows_times<UP_ROWS, TOKENS, ANY>(a.up, a.hidden, row, x, from, expert + ulong(a.at[3]) * 16, expert + ulong(a.at[4]) * 16,
                                   expert + ulong(a.at[5]) * 16, value HERE);
  UNROLL for (uint t = 0; t < TOKENS; t++)
    UNROLL for (uint r = 0; r < UP_ROWS; r++) {
      const float g = SIMD_SUM(gate[t * UP_ROWS + r]), u = SIMD_SUM(value[t * UP_ROWS + r]);
      if (lane == 0 && t < count && row + r < a.inner) act[ulong(place[t]) * a.row + row + r] = silu(g) * u;
    }
}

// The shared expert's activation, from projections that are already there: one more place a token, after all others.
FN void up_shared(CONSTANT ExpertsArgs& a, uint token, DEVICE const float* scores, DEVICE float* act PLACE) {
  DEVICE const float* from = scores + ulong(token) * a.scores + a.shared_at;
  DEVICE float* to = act + ulong(a.tokens * a.k + token) * a.row;
  for (uint i = tid; i < a.shared_inner; i += 32 * UP_GROUPS) to[i] = silu(from[i]) * from[a.shared_inner + i];
}

template <bool ANY>
FN void up_places(CONSTANT ExpertsArgs& a, DEVICE const float* x, DEVICE const float* scores, DEVICE const uint* slots,
                  DEVICE float* act, DEVICE const uchar* slab0, DEVICE const uchar* slab1, DEVICE const uchar* slab2,
                  DEVICE const uchar* slab3 PLACE) {
  const uint places = a.tokens * a.k;
  if (tgid.y >= places) {
    if (tgid.x == 0) up_shared(a, tgid.y - places, scores, act HERE);
    return;
  }
  const uint slot = slots[tgid.y], place = tgid.y;
  if (slot == NONE) return;
  up<1, ANY>(a, slot_at(a, slot, slab0, slab1, slab2, slab3), (tgid.x * UP_GROUPS + sg) * UP_ROWS, &place, 1, x, act HERE);
}

// DOWN_ROWS rows of sum over ranks of weight * Down act: a simdgroup a rank.
template <bool ANY>
FN void down(CONSTANT ExpertsArgs& a, DEVICE const float* act, DEVICE const float* weights, DEVICE const uint* slots,
             DEVICE float* h, DEVICE const uchar* codes, DEVICE const uchar* scales, DEVICE const uchar* biases,
             DEVICE const uchar* slab0, DEVICE const uchar* slab1, DEVICE const uchar* slab2, DEVICE const uchar* slab3,
             THREADGROUP float* part PLACE) {
  const uint row = tgid.x * DOWN_ROWS, token = tgid.y, place = token * a.k + sg;
  const uint ranks = a.shared_inner != 0 ? a.k + 1 : a.k;
  float acc[DOWN_ROWS];
  UNROLL for (uint r = 0; r < DOWN_ROWS; r++) acc[r] = 0;
  if (sg < a.k) {
    DEVICE const uchar* expert = slot_at(a, slots[place], slab0, slab1, slab2, slab3);
    const ulong from = ulong(place) * a.row;
    rows_times<DOWN_ROWS, 1, ANY>(a.down, a.inner, row, act, &from, expert + ulong(a.at[6]) * 16,
                                  expert + ulong(a.at[7]) * 16, expert + ulong(a.at[8]) * 16, acc HERE);
  } else if (sg < ranks) {
    const ulong from = ulong(a.tokens * a.k + token) * a.row;
    rows_times<DOWN_ROWS, 1, ANY>(a.shared, a.shared_inner, row, act, &from, codes, scales, biases, acc HERE);
  }
  UNROLL for (uint r = 0; r < DOWN_ROWS; r++) {
    const float sum = SIMD_SUM(acc[r]);
    if (lane == 0) part[sg * DOWN_ROWS + r] = sum;
  }
  BARRIER();
  if (tid >= DOWN_ROWS || row + tid >= a.hidden) return;
  float sum = 0;
  for (uint r = 0; r < ranks; r++) sum = fma(weights[token * (a.k + 1) + r], part[r * DOWN_ROWS + tid], sum);
  h[ulong(token) * a.hidden + row + tid] += sum;
}

// A job's next JOB_TOKENS places; the last one again where there are fewer.
FN void places_of(DEVICE const uint* job, DEVICE const uint* order, uint done, THREAD uint* place) {
  for (uint t = 0; t < JOB_TOKENS; t++) place[t] = order[job[1] + min(done + t, job[2] - 1)];
}

template <bool ANY>
FN void up_rows(CONSTANT ExpertsArgs& a, DEVICE const float* x, DEVICE const uint* job, DEVICE const uint* order,
                DEVICE float* act, DEVICE const uchar* slab0, DEVICE const uchar* slab1, DEVICE const uchar* slab2,
                DEVICE const uchar* slab3 PLACE) {
  DEVICE const uchar* expert = slot_at(a, job[0], slab0, slab1, slab2, slab3);
  for (uint done = 0; done < job[2]; done += JOB_TOKENS) {
    uint place[JOB_TOKENS];
    places_of(job, order, done, place);
    up<JOB_TOKENS, ANY>(a, expert, (tgid.x * UP_GROUPS + sg) * UP_ROWS, place, job[2] - done, x, act HERE);
  }
}

// out[place] = Down act, unweighted. Grid (ceil(hidden / 16), jobs), 128 threads.
template <bool ANY>
FN void down_rows(CONSTANT ExpertsArgs& a, DEVICE const float* act, DEVICE const uint* job, DEVICE const uint* order,
                  DEVICE float* out, DEVICE const uchar* slab0, DEVICE const uchar* slab1, DEVICE const uchar* slab2,
                  DEVICE const uchar* slab3 PLACE) {
  DEVICE const uchar* expert = slot_at(a, job[0], slab0, slab1, slab2, slab3);
  const uint row = (tgid.x * UP_GROUPS + sg) * DOWN_ROWS;
  for (uint done = 0; done < job[2]; done += JOB_TOKENS) {
    uint place[JOB_TOKENS];
    ulong from[JOB_TOKENS];
    float acc[JOB_TOKENS * DOWN_ROWS];
    places_of(job, order, done, place);
    for (uint t = 0; t < JOB_TOKENS; t++) from[t] = ulong(place[t]) * a.row;
    for (uint i = 0; i < JOB_TOKENS * DOWN_ROWS; i++) acc[i] = 0;
    rows_times<DOWN_ROWS, JOB_TOKENS, ANY>(a.down, a.inner, row, act, from, expert + ulong(a.at[6]) * 16,
                                           expert + ulong(a.at[7]) * 16, expert + ulong(a.at[8]) * 16, acc HERE);
    UNROLL for (uint t = 0; t < JOB_TOKENS; t++)
      UNROLL for (uint r = 0; r < DOWN_ROWS; r++) {
        const float sum = SIMD_SUM(acc[t * DOWN_ROWS + r]);
        if (lane == 0 && done + t < job[2] && row + r < a.hidden) out[ulong(place[t]) * a.hidden + row + r] = sum;
      }
  }
}

#define SLABS(n) IN(uchar, slab0, n), IN(uchar, slab1, n + 1), IN(uchar, slab2, n + 2), IN(uchar, slab3, n + 3)

#define EXPERTS(suffix, ANY)                                                                                             \
  KERNEL(experts_up##suffix, ARGS(ExpertsArgs, a), IN(float, x, 1), IN(float, scores, 2), IN(uint, slots, 3),            \
         OUT(float, act, 4), SLABS(5)) {                                                                                 \
    up_places<ANY>(a, x, scores, slots, act, slab0, slab1, slab2, slab3 HERE);                                           \
  }                                                                                                                      \
  KERNEL(experts_down##suffix, ARGS(ExpertsArgs, a), IN(float, act, 1), IN(float, weights, 2), IN(uint, slots, 3),       \
         OUT(float, h, 4), IN(uchar, c, 5), IN(uchar, s, 6), IN(uchar, b, 7), SLABS(8)) {                                \
    SHARED(float, part, 32 * DOWN_ROWS);                                                                                 \
    down<ANY>(a, act, weights, slots, h, c, s, b, slab0, slab1, slab2, slab3, part HERE);                                \
  }                                                                                                                      \
  KERNEL(experts_up_rows##suffix, ARGS(ExpertsArgs, a), IN(float, x, 1), IN(uint, jobs, 2), IN(uint, order, 3),          \
         OUT(float, act, 4), SLABS(5)) {                                                                                 \
    up_rows<ANY>(a, x, jobs + tgid.y * 3, order, act, slab0, slab1, slab2, slab3 HERE);                                  \
  }                                                                                                                      \
  KERNEL(experts_down_rows##suffix, ARGS(ExpertsArgs, a), IN(float, act, 1), IN(uint, jobs, 2), IN(uint, order, 3),      \
         OUT(float, out, 4), SLABS(5)) {                                                                                 \
    down_rows<ANY>(a, act, jobs + tgid.y * 3, order, out, slab0, slab1, slab2, slab3 HERE);                              \
  }

EXPERTS(, false)
EXPERTS(_any, true)

// Grid (ceil(hidden / 128), tokens), 128 threads. The shared expert's rows stand in `shared`, one a token.
KERNEL(experts_combine, ARGS(ExpertsArgs, a), IN(float, out, 1), IN(float, shared, 2), IN(float, weights, 3), OUT(float, h, 4)) {
  const uint i = tgid.x * 128 + tid, token = tgid.y;
  if (i >= a.hidden) return;
  float sum = 0;
  for (uint r = 0; r < a.k; r++)
    sum = fma(weights[token * (a.k + 1) + r], out[ulong(token * a.k + r) * a.hidden + i], sum);
  if (a.shared_inner != 0) sum = fma(weights[token * (a.k + 1) + a.k], shared[ulong(token) * a.hidden + i], sum);
  h[ulong(token) * a.hidden + i] += sum;
}

// act = silu(gate) * up of rows of `width` in which `inner` gates, then `inner` ups, start at `at`. Grid as above.
struct SwigluArgs { uint inner, width, at; };

KERNEL(swiglu, ARGS(SwigluArgs, a), IN(float, scores, 1), OUT(float, act, 2)) {
  const uint i = tgid.x * 128 + tid;
  if (i >= a.inner) return;
  DEVICE const float* from = scores + ulong(tgid.y) * a.width + a.at;
  act[ulong(tgid.y) * a.inner + i] = silu(from[i]) * from[a.inner + i];
}
