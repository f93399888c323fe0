// The gated delta net between its projections. A row of `proj` holds q k v (the convolution's channels), then z, b, a.

struct DeltaArgs {
  uint tokens, width;               // rows of proj, their length
  uint key_heads, value_heads, dk, dv;
  uint b_at, a_at;                  // where b and a start in a row
  float eps;                        // of the l2 norms
  uint past, stored;                // rows in front; rows behind which the states are written
};

FN float sigmoid(float x) { return 1.0f / (1.0f + exp(-x)); }
FN float silu(float x) { return x / (1.0f + exp(-x)); }

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

KERNEL(conv, ARGS(DeltaArgs, a), IN(float, proj, 1), IN(float, past, 2), IN(float, taps, 3), OUT(float, state, 4), OUT(float, out, 5)) {
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
// `mixed` is what the kernel above wrote, `decay` is -exp(A_log). Grid (ceil(dv / 16), value_heads), 128 threads.
enum { STATES = 4 };

template <uint COLUMNS>
FN void step(CONSTANT DeltaArgs& a, DEVICE const float* proj, DEVICE const float* mixed, DEVICE const float* past_proj,
             DEVICE const float* past_mixed, DEVICE const float* decay, DEVICE const float* dt_bias, DEVICE float* state,
             DEVICE float* out PLACE) {
  const uint head = tgid.y, row = (tgid.x * 4 + sg) * STATES, key = head / (a.value_heads / a.key_heads);
  const uint keys = a.key_heads * a.dk, channels = 2 * keys + a.value_heads * a.dv;
  const float rate = decay[head], bias = dt_bias[head];
  float s[STATES * COLUMNS];
  UNROLL for (uint r = 0; r < STATES; r++)
    UNROLL for (uint j = 0; j < COLUMNS; j++) {
      const uint c = lane + 32 * j;
      s[r * COLUMNS + j] = row + r < a.dv && c < a.dk ? state[(ulong(head) * a.dv + row + r) * a.dk + c] : 0.0f;
    }
  for (uint at = 0;; at++) {
    if (at == a.stored)
      UNROLL for (uint r = 0; r < STATES; r++)
        UNROLL for (uint j = 0; j < COLUMNS; j++) {
          const uint c = lane + 32 * j;
          if (row + r < a.dv && c < a.dk) state[(ulong(head) * a.dv + row + r) * a.dk + c] = s[r * COLUMNS + j];
        }
    if (at == a.past + a.tokens) break;
    const bool past = at < a.past;
    const uint t = past ? at : at - a.past;
    DEVICE const float* from = (past ? past_mixed : mixed) + ulong(t) * channels;
    DEVICE const float* gates = (past ? past_proj : proj) + ulong(t) * a.width;
    const float beta = sigmoid(gates[a.b_at + head]), g = exp(rate * softplus(gates[a.a_at + head] + bias));
    float q[COLUMNS], k[COLUMNS];
    UNROLL for (uint j = 0; j < COLUMNS; j++) {
      const uint c = lane + 32 * j;
      q[j] = c < a.dk ? from[key * a.dk + c] : 0.0f;
      k[j] = c < a.dk ? from[keys + key * a.dk + c] : 0.0f;
    }
    UNROLL for (uint r = 0; r < STATES; r++) {
      float seen = 0, read = 0;
      UNROLL for (uint j = 0; j < COLUMNS; j++) {
        s[r * COLUMNS + j] *= g;
        seen = fma(s[r * COLUMNS + j], k[j], seen);
      }
      const float v = row + r < a.dv ? from[2 * keys + head * a.dv + row + r] : 0.0f;
      const float d = beta * (v - SIMD_SUM(seen));
      UNROLL for (uint j = 0; j < COLUMNS; j++) {
        s[r * COLUMNS + j] = fma(d, k[j], s[r * COLUMNS + j]);
        read = fma(s[r * COLUMNS + j], q[j], read);
      }
      read = SIMD_SUM(read);
      if (lane == 0 && !past && row + r < a.dv) out[(ulong(t) * a.value_heads + head) * a.dv + row + r] = read;
    }
  }
}

#define DELTA(name, COLUMNS)                                                                                                 \
  KERNEL(name, ARGS(DeltaArgs, a), IN(float, proj, 1), IN(float, mixed, 2), IN(float, past_proj, 3), IN(float, past_mixed, 4), \
         IN(float, decay, 5), IN(float, dt_bias, 6), OUT(float, state, 7), OUT(float, out, 8)) {                             \
    const uint row = (tgid.x * 4 + sg) * STATES;                                                                             \
    if (row < a.dv) PREFETCH(state + (ulong(tgid.y) * a.dv + row) * a.dk, min(uint(STATES), a.dv - row) * a.dk * 4);         \
    AWAIT();                                                                                                                 \
    step<COLUMNS>(a, proj, mixed, past_proj, past_mixed, decay, dt_bias, state, out HERE);                                   \
  }

DELTA(delta_128, 4)  // key heads of up to 128
DELTA(delta_256, 8)
