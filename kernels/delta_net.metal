// The gated delta net between its projections: causal convolution and the gated delta rule. A row of `proj` holds
// q, k and v (the channels of the convolution), then z, b and a.

struct DeltaArgs {
  uint can_skip;
  uint tokens, width;               // rows of proj and their length
  uint key_heads, value_heads, dk, dv;
  uint b_at, a_at;                  // columns of b and a in a row
  float eps;                        // epsilon of the l2 norms
  uint replay, committed;           // replayed rows before the tokens; rows after which the states are stored
  // Not 0 if the tokens' q and k still need their l2 norms; not 0 if the reader of the result applies the final norm.
  uint needs_l2_norm, defers_norm;
  uint per_sequence;                // whether each of the grid's z is a row of its own sequence
  uint sigmoid_gate;                // whether the gate of the result is a sigmoid instead of SiLU
};

// The address of the state of a row's sequence. A state has `size` floats.
FN DEVICE float* state_of(CONSTANT DeltaArgs& a, DEVICE const SequenceRow* rows, DEVICE float* states, uint row,
                          ulong size) {
  return a.per_sequence != 0 ? states + rows[row].sequence * size : states;
}

// log(1 + exp(x)) with full precision for small results: log(u) * e / (u - 1) corrects the rounding of u = 1 + e.
FN float softplus(float x) {
  if (x > 20.0f) return x;
  const float e = exp(x), u = 1.0f + e;
  return u == 1.0f ? e : log(u) * (e / (u - 1.0f));
}

// An input row of the convolution: first three rows of the state, then the replayed rows, then the tokens' rows.
FN float conv_input(CONSTANT DeltaArgs& a, DEVICE const float* proj, DEVICE const float* replay,
                    DEVICE const float* state, uint channels, uint row, uint c) {
  if (row < 3) return state[row * channels + c];
  row -= 3;
  return row < a.replay ? replay[ulong(row) * a.width + c] : proj[ulong(row - a.replay) * a.width + c];
}

// Causal depthwise convolution of width 4, SiLU, then the l2 norm of each head of q and k; q is also scaled by
// dk^-1/2.
//
// `state` [3, channels] holds the last three input rows. The state advances by `committed` rows. `conv_weight` is [4,
// channels]. Grid (2 * key_heads + value_heads, ceil(tokens / conv_tokens), 1 or rows of different sequences), 128 threads.
// A threadgroup computes one head for conv_tokens tokens: at least three, so that only the first one reads the state.
FN uint conv_tokens(uint tokens) { return tokens > 16 ? 16 : 4; }

// Column `c` of the convolution of at most four tokens from `t`. All inputs are loaded before the first one is used.
FN void convolve_four(CONSTANT DeltaArgs& a, DEVICE const float* proj, DEVICE const float* replay,
                      DEVICE const float* conv_weight, DEVICE const float* state, uint channels, uint t, uint count,
                      uint c, THREAD float* y) {
  float x[7], w[4];
  UNROLL for (uint n = 0; n < 7; n++)
    x[n] = n < 3 + count ? conv_input(a, proj, replay, state, channels, a.replay + t + n, c) : 0.0f;
  UNROLL for (uint n = 0; n < 4; n++) w[n] = conv_weight[n * channels + c];
  UNROLL for (uint n = 0; n < 4; n++)
    y[n] = silu(fma(w[3], x[n + 3], fma(w[2], x[n + 2], fma(w[1], x[n + 1], w[0] * x[n]))));
}

KERNEL(causal_conv, ARGS(DeltaArgs, a), IN(float, all_proj, 1), IN(float, replay, 2), IN(float, conv_weight, 3),
       OUT(float, states, 4), OUT(float, all_out, 5), IN(SequenceRow, rows, 6), IN(uint, skip, 7)) {
  SHARED(float, part, 16);
  const uint keys = 2 * a.key_heads, head = tgid.x;
  const uint each = conv_tokens(a.tokens), begin = tgid.y * each, end = min(begin + each, a.tokens);
  const uint channels = keys * a.dk + a.value_heads * a.dv;
  const uint first = head < keys ? head * a.dk : keys * a.dk + (head - keys) * a.dv;
  const uint size = head < keys ? a.dk : a.dv;
  DEVICE float* state = state_of(a, rows, states, tgid.z, 3 * channels);
  DEVICE const float* proj = all_proj + ulong(tgid.z) * a.width;
  DEVICE float* out = all_out + ulong(tgid.z) * channels;
  PREFETCH(conv_weight + sg * channels + first, size * 4);
  if (sg < 3) PREFETCH(state + sg * channels + first, size * 4);
  AWAIT();
  if (is_skipped(a.can_skip, skip)) return;
  for (uint t = begin; t < end; t += 4) {
    const uint count = min(end - t, 4u);
    if (head >= keys) {
      for (uint i = tid; i < size; i += 128) {
        float y[4];
        convolve_four(a, proj, replay, conv_weight, state, channels, t, count, first + i, y);
        UNROLL for (uint n = 0; n < 4; n++)
          if (n < count) out[ulong(t + n) * channels + first + i] = y[n];
      }
      continue;
    }
    // A thread has at most two columns of a key.
    float y[8] = {};
    UNROLL for (uint j = 0; j < 2; j++)
      if (tid + 128 * j < size)
        convolve_four(a, proj, replay, conv_weight, state, channels, t, count, first + tid + 128 * j, y + 4 * j);
    UNROLL for (uint n = 0; n < 4; n++) {
      const float squares = SIMD_SUM(fma(y[4 + n], y[4 + n], y[n] * y[n]));
      if (lane == 0) part[n * 4 + sg] = squares;
    }
    BARRIER();
    UNROLL for (uint n = 0; n < 4; n++) {
      THREADGROUP const float* sums = part + n * 4;
      const float norm = sqrt(sums[0] + sums[1] + sums[2] + sums[3] + a.eps);
      const float scale = (head < a.key_heads ? 1.0f / sqrt(float(a.dk)) : 1.0f) / norm;
      UNROLL for (uint j = 0; j < 2; j++)
        if (n < count && tid + 128 * j < size)
          out[ulong(t + n) * channels + first + tid + 128 * j] = y[4 * j + n] * scale;
    }
    BARRIER();  // before the next tokens overwrite part
  }
  // Only the threadgroups of the first tokens read the state, and each thread reads and writes only its own columns. So
  // the state can be overwritten without a barrier.
  if (a.committed == 0 || begin != 0) return;
  for (uint i = tid; i < size; i += 128) {
    const uint c = first + i;
    const float s0 = conv_input(a, proj, replay, state, channels, a.committed, c);
    const float s1 = conv_input(a, proj, replay, state, channels, a.committed + 1, c);
    const float s2 = conv_input(a, proj, replay, state, channels, a.committed + 2, c);
    state[c] = s0, state[channels + c] = s1, state[2 * channels + c] = s2;
  }
}

// The gated delta rule, for each value head: g = exp(decay * softplus(a + dt_bias)), beta = sigmoid(b); S = g S; d
// = beta (v - S k); o = S q + d (k q); S += d k^T. S is [value_heads, dv, dk], and `decay` is -exp(A_log).
//
// A simdgroup keeps STATE_ROWS rows of S in registers for all tokens. Lane l has columns l, l + 32, ... The inputs of
// BATCH tokens are loaded together and their gates are computed in parallel, because otherwise every token would wait
// for its loads.
//
// `mixed` is the output of causal_conv, or of gemv_conv with needs_l2_norm. Grid (ceil(dv / 16), value_heads, 1 or rows
// of different sequences), 128 threads.
//
// With defers_norm, a result is o * norm * gate(z) and lacks the factor 1 / rms(o). The launch that reads the results
// computes this factor from `squares` [tokens, dv / STATE_ROWS, value_heads], the sums of squares of STATE_ROWS rows
// each; see gated_rms_norm.
//
// SUM_LANES: lanes that have the same sum after sum_values of 2 * STATE_ROWS values.
enum { STATE_ROWS = 4, GROUP_ROWS = 4 * STATE_ROWS, BATCH = 8, SUM_LANES = 32 / (2 * STATE_ROWS) };

// Stores a simdgroup's rows of the state.
template <uint COLUMNS>
FN void store_state(CONSTANT DeltaArgs& a, THREAD const float* s, DEVICE float* state, uint head,
                    uint row THREAD_IDS_PARAM) {
  UNROLL for (uint r = 0; r < STATE_ROWS; r++)
    UNROLL for (uint j = 0; j < COLUMNS; j++) {
      const uint c = lane + 32 * j;
      if (row + r < a.dv && c < a.dk) state[(ulong(head) * a.dv + row + r) * a.dk + c] = s[r * COLUMNS + j];
    }
}

// Loads this thread's share of BATCH tokens from `first`: queries, keys, one value, the inputs of a token's gates, and
// one gate of the result.
template <uint COLUMNS>
FN void load_tokens(CONSTANT DeltaArgs& a, DEVICE const float* proj, DEVICE const float* mixed,
                    DEVICE const float* replay_proj, DEVICE const float* replay_mixed, uint first,
                    THREAD float* loaded THREAD_IDS_PARAM) {
  const uint head = tgid.y, key = head / (a.value_heads / a.key_heads) * a.dk, keys = a.key_heads * a.dk;
  const uint channels = 2 * keys + a.value_heads * a.dv, rows = a.replay + a.tokens;
  UNROLL for (uint n = 0; n < BATCH; n++) {
    const uint at = first + n;
    DEVICE const float* from =
        at < a.replay ? replay_mixed + ulong(at) * channels : mixed + ulong(at - a.replay) * channels;
    UNROLL for (uint j = 0; j < COLUMNS / 4; j++) {
      const uint i = tid + 128 * j;
      const bool exists = at < rows && i < a.dk;
      loaded[(n * COLUMNS / 4 + j) * 2] = exists ? from[key + i] : 0.0f;
      loaded[(n * COLUMNS / 4 + j) * 2 + 1] = exists ? from[keys + key + i] : 0.0f;
    }
  }
  THREAD float* loaded_rest = loaded + BATCH * COLUMNS / 2;
  const uint at = first + tid / GROUP_ROWS, i = tgid.x * GROUP_ROWS + tid % GROUP_ROWS, mine = first + tid;
  const ulong value = 2 * keys + head * a.dv + i;
  loaded_rest[3] = 0.0f;
  if (a.defers_norm != 0 && at >= a.replay && at < rows && i < a.dv)
    loaded_rest[3] = proj[ulong(at - a.replay) * a.width + channels + head * a.dv + i];
  if (at >= rows || i >= a.dv) loaded_rest[0] = 0.0f;
  else if (at < a.replay) loaded_rest[0] = replay_mixed[ulong(at) * channels + value];
  else loaded_rest[0] = mixed[ulong(at - a.replay) * channels + value];
  if (tid >= BATCH || mine >= rows) return;
  DEVICE const float* gates =
      mine < a.replay ? replay_proj + ulong(mine) * a.width : proj + ulong(mine - a.replay) * a.width;
  loaded_rest[1] = gates[a.b_at + head], loaded_rest[2] = gates[a.a_at + head];
}

// The l2 norms of q and k, with the same order of sums as causal_conv. A simdgroup norms one q or k at a time.
template <uint COLUMNS>
FN void l2_norms(CONSTANT DeltaArgs& a, uint first, THREADGROUP float* queries,
                 THREADGROUP float* keys THREAD_IDS_PARAM) {
  for (uint i = sg; i < 2 * BATCH; i += 4) {
    const uint n = i / 2, dim = 32 * COLUMNS;
    if (first + n < a.replay || first + n >= a.replay + a.tokens) continue;
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

// The body of the kernels. A threadgroup computes GROUP_ROWS rows of one head's state, for all replayed rows and
// tokens.
template <uint COLUMNS>
FN void recurrence(CONSTANT DeltaArgs& a, DEVICE const float* proj, DEVICE const float* mixed,
                   DEVICE const float* replay_proj, DEVICE const float* replay_mixed, DEVICE const float* decay,
                   DEVICE const float* dt_bias, DEVICE float* state, DEVICE float* out, DEVICE const float* norm,
                   DEVICE float* squares, THREADGROUP float* queries, THREADGROUP float* keys,
                   THREADGROUP float* values, THREADGROUP float* gates, THREADGROUP float* out_gates THREAD_IDS_PARAM) {
  const uint head = tgid.y, row = tgid.x * GROUP_ROWS + sg * STATE_ROWS, dim = 32 * COLUMNS, all = a.replay + a.tokens;
  const float rate = decay[head], bias = dt_bias[head];
  const float weight = a.defers_norm != 0 && lane < STATE_ROWS && row + lane < a.dv ? norm[row + lane] : 0.0f;
  float s[STATE_ROWS * COLUMNS], loaded[BATCH * COLUMNS / 2 + 4] = {};
  UNROLL for (uint r = 0; r < STATE_ROWS; r++)
    UNROLL for (uint j = 0; j < COLUMNS; j++) {
      const uint c = lane + 32 * j;
      s[r * COLUMNS + j] = row + r < a.dv && c < a.dk ? state[(ulong(head) * a.dv + row + r) * a.dk + c] : 0.0f;
    }
  load_tokens<COLUMNS>(a, proj, mixed, replay_proj, replay_mixed, 0, loaded THREAD_IDS);
  for (uint first = 0; first < all; first += BATCH) {
    BARRIER();  // the previous tokens are done
    UNROLL for (uint n = 0; n < BATCH * COLUMNS / 4; n++)
      queries[n * 128 + tid] = loaded[2 * n], keys[n * 128 + tid] = loaded[2 * n + 1];
    THREAD const float* loaded_rest = loaded + BATCH * COLUMNS / 2;
    values[tid] = loaded_rest[0];
    if (a.defers_norm != 0) out_gates[tid] = output_gate(a.sigmoid_gate, loaded_rest[3]);
    if (tid < BATCH) {
      gates[2 * tid] = sigmoid(loaded_rest[1]);
      gates[2 * tid + 1] = exp(rate * softplus(loaded_rest[2] + bias));
    }
    BARRIER();
    if (a.needs_l2_norm != 0) {
      l2_norms<COLUMNS>(a, first, queries, keys THREAD_IDS);
      BARRIER();
    }
    // The product of each token's key and query.
    UNROLL for (uint i = 0; i < BATCH / 4; i++) {
      const uint n = sg * (BATCH / 4) + i;
      float sum = 0;
      UNROLL for (uint j = 0; j < COLUMNS; j++)
        sum = fma(keys[n * dim + lane + 32 * j], queries[n * dim + lane + 32 * j], sum);
      sum = SIMD_SUM(sum);
      if (lane == 0) gates[2 * BATCH + n] = sum;
    }
    load_tokens<COLUMNS>(a, proj, mixed, replay_proj, replay_mixed, first + BATCH, loaded THREAD_IDS);
    BARRIER();
    for (uint n = 0; n < min(uint(BATCH), all - first); n++) {
      if (first + n == a.committed) store_state<COLUMNS>(a, s, state, head, row THREAD_IDS);
      const float beta = gates[2 * n], g = gates[2 * n + 1];
      // products: g S k of each row, then g S q. One reduction has all of them.
      const float key_query = gates[2 * BATCH + n];
      float k[COLUMNS], products[2 * STATE_ROWS] = {}, read[STATE_ROWS];
      UNROLL for (uint j = 0; j < COLUMNS; j++) {
        const float q = queries[n * dim + lane + 32 * j];
        k[j] = keys[n * dim + lane + 32 * j];
        UNROLL for (uint r = 0; r < STATE_ROWS; r++) {
          s[r * COLUMNS + j] *= g;
          products[r] = fma(s[r * COLUMNS + j], k[j], products[r]);
          products[STATE_ROWS + r] = fma(s[r * COLUMNS + j], q, products[STATE_ROWS + r]);
        }
      }
      const float product = sum_values<2 * STATE_ROWS>(products THREAD_IDS);
      UNROLL for (uint r = 0; r < STATE_ROWS; r++) {
        const float seen = SIMD_LANE(product, r * SUM_LANES);
        const float d = beta * (values[n * GROUP_ROWS + sg * STATE_ROWS + r] - seen);
        UNROLL for (uint j = 0; j < COLUMNS; j++) s[r * COLUMNS + j] = fma(d, k[j], s[r * COLUMNS + j]);
        read[r] = fma(d, key_query, SIMD_LANE(product, (STATE_ROWS + r) * SUM_LANES));
      }
      if (first + n < a.replay) continue;
      const uint token = first + n - a.replay;
      float mine = read[0], sum = 0;
      UNROLL for (uint r = 0; r < STATE_ROWS; r++) {
        if (lane == r) mine = read[r];
        sum = fma(read[r], read[r], sum);
      }
      if (lane >= STATE_ROWS || row + lane >= a.dv) continue;
      if (a.defers_norm != 0) {
        mine = mine * weight * out_gates[n * GROUP_ROWS + sg * STATE_ROWS + lane];
        if (lane == 0) squares[(ulong(token) * (a.dv / STATE_ROWS) + row / STATE_ROWS) * a.value_heads + head] = sum;
      }
      out[(ulong(token) * a.value_heads + head) * a.dv + row + lane] = mine;
    }
  }
  if (a.committed == all) store_state<COLUMNS>(a, s, state, head, row THREAD_IDS);
}

// With the file's limit of 80 registers, eight rows and a replayed one take 9.7 us on an H200 instead of 9.1.
#define DELTA(name, COLUMNS)                                                                                           \
  WIDE_KERNEL(name, ARGS_IN_PLACE(DeltaArgs, a), IN(float, proj, 1), IN(float, mixed, 2), IN(float, replay_proj, 3),   \
              IN(float, replay_mixed, 4), IN(float, decay, 5), IN(float, dt_bias, 6), OUT(float, states, 7),           \
              OUT(float, out, 8), IN(float, norm, 9), OUT(float, squares, 10), IN(SequenceRow, rows, 11),              \
              IN(uint, skip, 12)) {                                                                                    \
    SHARED(float, queries, BATCH * 32 * COLUMNS);                                                                      \
    SHARED(float, keys, BATCH * 32 * COLUMNS);                                                                         \
    SHARED(float, values, BATCH * GROUP_ROWS);                                                                         \
    SHARED(float, gates, 3 * BATCH);                                                                                   \
    SHARED(float, out_gates, BATCH * GROUP_ROWS);                                                                      \
    const uint row = tgid.x * GROUP_ROWS + sg * STATE_ROWS, all_values = a.value_heads * a.dv;                         \
    const ulong at = tgid.z;                                                                                           \
    DEVICE float* state = state_of(a, rows, states, tgid.z, ulong(all_values) * a.dk);                                 \
    const uint left = min(uint(STATE_ROWS), a.dv - row);                                                               \
    if (row < a.dv) PREFETCH(state + (ulong(tgid.y) * a.dv + row) * a.dk, left * a.dk * 4);                            \
    AWAIT();                                                                                                           \
    if (is_skipped(a.can_skip, skip)) return;                                                                          \
    recurrence<COLUMNS>(a, proj + at * a.width, mixed + at * (2 * a.key_heads * a.dk + all_values), replay_proj,       \
                        replay_mixed, decay, dt_bias, state, out + at * all_values, norm,                              \
                        squares + at * (all_values / STATE_ROWS), queries, keys, values, gates, out_gates THREAD_IDS); \
  }

DELTA(gated_delta_128, 4)  // for dk up to 128
DELTA(gated_delta_256, 8)
