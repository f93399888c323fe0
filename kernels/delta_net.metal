// The gated delta net between its projections. A row of `proj` holds q k v (the convolution's channels), then z, b, a.

struct DeltaArgs {
  uint tokens, width;               // rows of proj, their length
  uint key_heads, value_heads, dk, dv;
  uint b_at, a_at;                  // where b and a start in a row
  float eps;                        // of the l2 norms
  uint past, stored;                // rows in front; rows behind which the states are written
  uint raw, gated;                  // the tokens' q and k lack their norms; the norm behind is left to who reads the result
};

// log(1 + exp(x)) without losing small results: log(u) * e / (u - 1) repairs what 1 + e rounds away.
FN float softplus(float x) {
  if (x > 20.0f) return x;
  const float e = exp(x), u = 1.0f + e;
  return u == 1.0f ? e : log(u) * (e / (u - 1.0f));
}

// A row of samples: three of the state, the past ones, then the tokens'.
FN float sample(CONSTANT DeltaArgs& a, DEVICE const float* proj, DEVICE const float* past, DEVICE const float* state,
                uint channels, uint row, uint c) {
  if (row < 3) return state[row * channels + c];
  row -= 3;
  return row < a.past ? past[ulong(row) * a.width + c] : proj[ulong(row - a.past) * a.width + c];
}

// Causal depthwise convolution of width 4, SiLU, then the l2 norm of each head of q and k (q also times dk^-1/2).
// `state` [3, channels] holds the last three rows of raw projections; it is moved on by `stored` rows. `taps` is [4, channels].
// Grid (2 * key_heads + value_heads, ceil(tokens / CONV)), 128 threads: a threadgroup takes one head through CONV tokens.
enum { CONV = 16 };

KERNEL(causal_conv, ARGS(DeltaArgs, a), IN(float, proj, 1), IN(float, past, 2), IN(float, taps, 3), OUT(float, state, 4), OUT(float, out, 5)) {
  SHARED(float, part, 4);
  const uint keys = 2 * a.key_heads, head = tgid.x, begin = tgid.y * CONV, end = min(begin + CONV, a.tokens);
  const uint channels = keys * a.dk + a.value_heads * a.dv;
  const uint first = head < keys ? head * a.dk : keys * a.dk + (head - keys) * a.dv;
  const uint size = head < keys ? a.dk : a.dv;
  PREFETCH(taps + sg * channels + first, size * 4);
  if (sg < 3) PREFETCH(state + sg * channels + first, size * 4);
  AWAIT();
  for (uint t = begin; t < end; t++) {
    float squares = 0;
    for (uint i = tid; i < size; i += 128) {
      const uint c = first + i, row = a.past + t;
      const float s0 = sample(a, proj, past, state, channels, row, c), s1 = sample(a, proj, past, state, channels, row + 1, c);
      const float s2 = sample(a, proj, past, state, channels, row + 2, c), x = proj[ulong(t) * a.width + c];
      const float w0 = taps[c], w1 = taps[channels + c], w2 = taps[2 * channels + c], w3 = taps[3 * channels + c];
      const float y = silu(fma(w3, x, fma(w2, s2, fma(w1, s1, w0 * s0))));
      out[ulong(t) * channels + c] = y;
      squares = fma(y, y, squares);
    }
    if (head >= keys) continue;
    squares = SIMD_SUM(squares);
    if (lane == 0) part[sg] = squares;
    BARRIER();
    const float norm = sqrt(part[0] + part[1] + part[2] + part[3] + a.eps);
    const float scale = (head < a.key_heads ? 1.0f / sqrt(float(a.dk)) : 1.0f) / norm;
    BARRIER();  // before the next token overwrites part
    for (uint i = tid; i < size; i += 128) out[ulong(t) * channels + first + i] *= scale;
  }
  // The first tokens are the only ones that look at the state; and a thread reads and writes its own columns.
  if (a.stored == 0 || begin != 0) return;
  for (uint i = tid; i < size; i += 128) {
    const uint c = first + i;
    const float s0 = sample(a, proj, past, state, channels, a.stored, c), s1 = sample(a, proj, past, state, channels, a.stored + 1, c);
    const float s2 = sample(a, proj, past, state, channels, a.stored + 2, c);
    state[c] = s0, state[channels + c] = s1, state[2 * channels + c] = s2;
  }
}

// The recurrence, one value head at a time: g = exp(decay * softplus(a + dt_bias)), beta = sigmoid(b); S = g S; d = beta (v - S k); S += d k^T; o = S q. S is [value_heads, dv, dk].
// A simdgroup keeps STATES rows of S in registers over all tokens: lane l has columns l, l + 32, ...
// What TOGETHER tokens bring is fetched at once, and their gates are computed side by side: token by token, both would be waited for.
// `mixed` is what the kernel above wrote, or what gemv_conv did: then q and k are RAW. `decay` is -exp(A_log). Grid (ceil(dv / 16),
// value_heads), 128 threads.
// GATED, a result is o * norm * silu(z), and still lacks the factor that makes it a norm. That is found from the squares of each
// STATES rows in `squares`, [tokens, dv / STATES, value_heads]: gated_rms_norm says how.
enum { STATES = 4, ROWS = 4 * STATES, TOGETHER = 8 };

// Writes a simdgroup's rows of the state.
template <uint COLUMNS>
FN void keep(CONSTANT DeltaArgs& a, THREAD const float* s, DEVICE float* state, uint head, uint row PLACE) {
  UNROLL for (uint r = 0; r < STATES; r++)
    UNROLL for (uint j = 0; j < COLUMNS; j++) {
      const uint c = lane + 32 * j;
      if (row + r < a.dv && c < a.dk) state[(ulong(head) * a.dv + row + r) * a.dk + c] = s[r * COLUMNS + j];
    }
}

// A thread's part of what TOGETHER tokens from `first` bring: queries, keys, a value, and what its token's gates are computed from.
template <uint COLUMNS>
FN void fetch(CONSTANT DeltaArgs& a, DEVICE const float* proj, DEVICE const float* mixed, DEVICE const float* past_proj,
              DEVICE const float* past_mixed, uint first, THREAD float* held PLACE) {
  const uint head = tgid.y, key = head / (a.value_heads / a.key_heads) * a.dk, keys = a.key_heads * a.dk;
  const uint channels = 2 * keys + a.value_heads * a.dv, all = a.past + a.tokens;
  UNROLL for (uint n = 0; n < TOGETHER; n++) {
    const uint at = first + n;
    DEVICE const float* from = at < a.past ? past_mixed + ulong(at) * channels : mixed + ulong(at - a.past) * channels;
    UNROLL for (uint j = 0; j < COLUMNS / 4; j++) {
      const uint i = tid + 128 * j;
      const bool there = at < all && i < a.dk;
      held[(n * COLUMNS / 4 + j) * 2] = there ? from[key + i] : 0.0f;
      held[(n * COLUMNS / 4 + j) * 2 + 1] = there ? from[keys + key + i] : 0.0f;
    }
  }
  THREAD float* rest = held + TOGETHER * COLUMNS / 2;
  const uint at = first + tid / ROWS, i = tgid.x * ROWS + tid % ROWS, mine = first + tid;
  const ulong value = 2 * keys + head * a.dv + i;
  rest[0] = at >= all || i >= a.dv ? 0.0f
            : at < a.past ? past_mixed[ulong(at) * channels + value] : mixed[ulong(at - a.past) * channels + value];
  if (tid >= TOGETHER || mine >= all) return;
  DEVICE const float* gates = mine < a.past ? past_proj + ulong(mine) * a.width : proj + ulong(mine - a.past) * a.width;
  rest[1] = gates[a.b_at + head], rest[2] = gates[a.a_at + head];
}

// The norms of the tokens' q and k, as the convolution's kernel finds them: a simdgroup takes one of either at a time.
template <uint COLUMNS>
FN void norms(CONSTANT DeltaArgs& a, uint first, THREADGROUP float* queries, THREADGROUP float* keys PLACE) {
  for (uint i = sg; i < 2 * TOGETHER; i += 4) {
    const uint n = i / 2, dim = 32 * COLUMNS;
    if (first + n < a.past || first + n >= a.past + a.tokens) continue;
    THREADGROUP float* x = (i % 2 == 0 ? queries : keys) + n * dim;
    float part[4];
    UNROLL for (uint g = 0; g < 4; g++) {
      float squares = 0;
      UNROLL for (uint j = 0; j < COLUMNS / 4; j++) {
        const float y = x[128 * j + 32 * g + lane];
        squares = fma(y, y, squares);
      }
      part[g] = SIMD_SUM(squares);
    }
    const float norm = sqrt(part[0] + part[1] + part[2] + part[3] + a.eps);
    const float scale = (i % 2 == 0 ? 1.0f / sqrt(float(a.dk)) : 1.0f) / norm;
    UNROLL for (uint j = 0; j < COLUMNS; j++) x[lane + 32 * j] *= scale;
  }
}

template <uint COLUMNS>
FN void step(CONSTANT DeltaArgs& a, DEVICE const float* proj, DEVICE const float* mixed, DEVICE const float* past_proj,
             DEVICE const float* past_mixed, DEVICE const float* decay, DEVICE const float* dt_bias, DEVICE float* state,
             DEVICE float* out, DEVICE const float* norm, DEVICE float* squares, THREADGROUP float* queries, THREADGROUP float* keys, THREADGROUP float* values,
             THREADGROUP float* gates PLACE) {
  const uint head = tgid.y, row = tgid.x * ROWS + sg * STATES, dim = 32 * COLUMNS, all = a.past + a.tokens;
  const float rate = decay[head], bias = dt_bias[head];
  float s[STATES * COLUMNS], held[TOGETHER * COLUMNS / 2 + 3] = {};
  UNROLL for (uint r = 0; r < STATES; r++)
    UNROLL for (uint j = 0; j < COLUMNS; j++) {
      const uint c = lane + 32 * j;
      s[r * COLUMNS + j] = row + r < a.dv && c < a.dk ? state[(ulong(head) * a.dv + row + r) * a.dk + c] : 0.0f;
    }
  fetch<COLUMNS>(a, proj, mixed, past_proj, past_mixed, 0, held HERE);
  for (uint first = 0; first < all; first += TOGETHER) {
    BARRIER();  // the tokens before are done with
    UNROLL for (uint n = 0; n < TOGETHER * COLUMNS / 4; n++)
      queries[n * 128 + tid] = held[2 * n], keys[n * 128 + tid] = held[2 * n + 1];
    THREAD const float* rest = held + TOGETHER * COLUMNS / 2;
    values[tid] = rest[0];
    if (tid < TOGETHER) gates[2 * tid] = sigmoid(rest[1]), gates[2 * tid + 1] = exp(rate * softplus(rest[2] + bias));
    BARRIER();
    if (a.raw != 0) {
      norms<COLUMNS>(a, first, queries, keys HERE);
      BARRIER();
    }
    fetch<COLUMNS>(a, proj, mixed, past_proj, past_mixed, first + TOGETHER, held HERE);
    for (uint n = 0; n < min(uint(TOGETHER), all - first); n++) {
      if (first + n == a.stored) keep<COLUMNS>(a, s, state, head, row HERE);
      const float beta = gates[2 * n], g = gates[2 * n + 1];
      float q[COLUMNS], k[COLUMNS], d[STATES], read[STATES];
      UNROLL for (uint j = 0; j < COLUMNS; j++) q[j] = queries[n * dim + lane + 32 * j], k[j] = keys[n * dim + lane + 32 * j];
      UNROLL for (uint r = 0; r < STATES; r++) {
        float seen = 0;
        UNROLL for (uint j = 0; j < COLUMNS; j++) {
          s[r * COLUMNS + j] *= g;
          seen = fma(s[r * COLUMNS + j], k[j], seen);
        }
        d[r] = beta * (values[n * ROWS + sg * STATES + r] - SIMD_SUM(seen));
      }
      UNROLL for (uint r = 0; r < STATES; r++) {
        read[r] = 0;
        UNROLL for (uint j = 0; j < COLUMNS; j++) {
          s[r * COLUMNS + j] = fma(d[r], k[j], s[r * COLUMNS + j]);
          read[r] = fma(s[r * COLUMNS + j], q[j], read[r]);
        }
        read[r] = SIMD_SUM(read[r]);
      }
      if (first + n < a.past) continue;
      const uint token = first + n - a.past;
      float mine = read[0], sum = 0;
      UNROLL for (uint r = 0; r < STATES; r++) {
        if (lane == r) mine = read[r];
        sum = fma(read[r], read[r], sum);
      }
      if (lane >= STATES || row + lane >= a.dv) continue;
      if (a.gated != 0) {
        const uint i = head * a.dv + row + lane, channels = 2 * a.key_heads * a.dk + a.value_heads * a.dv;
        mine = mine * norm[row + lane] * silu(proj[ulong(token) * a.width + channels + i]);
        if (lane == 0) squares[(ulong(token) * (a.dv / STATES) + row / STATES) * a.value_heads + head] = sum;
      }
      out[(ulong(token) * a.value_heads + head) * a.dv + row + lane] = mine;
    }
  }
  if (a.stored == all) keep<COLUMNS>(a, s, state, head, row HERE);
}

#define DELTA(name, COLUMNS)                                                                                                 \
  KERNEL(name, ARGS(DeltaArgs, a), IN(float, proj, 1), IN(float, mixed, 2), IN(float, past_proj, 3), IN(float, past_mixed, 4), \
         IN(float, decay, 5), IN(float, dt_bias, 6), OUT(float, state, 7), OUT(float, out, 8), IN(float, norm, 9),           \
         OUT(float, squares, 10)) {                                                                                          \
    SHARED(float, queries, TOGETHER * 32 * COLUMNS);                                                                         \
    SHARED(float, keys, TOGETHER * 32 * COLUMNS);                                                                            \
    SHARED(float, values, TOGETHER * ROWS);                                                                                  \
    SHARED(float, gates, 2 * TOGETHER);                                                                                      \
    const uint row = tgid.x * ROWS + sg * STATES;                                                                            \
    if (row < a.dv) PREFETCH(state + (ulong(tgid.y) * a.dv + row) * a.dk, min(uint(STATES), a.dv - row) * a.dk * 4);         \
    AWAIT();                                                                                                                 \
    step<COLUMNS>(a, proj, mixed, past_proj, past_mixed, decay, dt_bias, state, out, norm, squares, queries, keys, values,   \
                  gates HERE);                                                                                               \
  }

DELTA(gated_delta_128, 4)  // key heads of up to 128
DELTA(gated_delta_256, 8)
