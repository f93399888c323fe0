// Several residual streams: the mixture that a part of a layer reads, the result that each stream gets, and the rows of
// an n-gram table that are added to all streams. `crates/compute/src/ops/streams` and `crates/compute/src/ops/ngram` have the formulas. C is the
// number of streams. A row is all streams, one after the other.

struct StreamArgs {
  uint streams, hidden;
  uint rank, low_width;             // stream_gates: columns of act, and of a row of low
  // stream_mix: set `zeroed` to 0. stream_write: add to the streams instead of setting them.
  uint flag;
};

// In each row of `low`, the first `rank` columns become act = silu(low / C), and the remaining C columns become
// inject = 2 sigmoid(low / C). Grid (ceil(low_width / 128), tokens), 128 threads.
KERNEL(stream_gates, ARGS(StreamArgs, a), IN(float, low, 1), OUT(float, act, 2), OUT(float, inject, 3)) {
  AWAIT();
  const uint i = tgid.x * 128 + tid;
  if (i >= a.low_width) return;
  const float x = low[ulong(tgid.y) * a.low_width + i] / float(a.streams);
  if (i < a.rank) act[ulong(tgid.y) * a.rank + i] = silu(x);
  else inject[ulong(tgid.y) * a.streams + i - a.rank] = 2.0f * sigmoid(x);
}

// out = sum over streams of sigmoid(gate) * normed, divided by C. Grid (ceil(hidden / 128), tokens), 128 threads.
KERNEL(stream_mix, ARGS(StreamArgs, a), IN(float, normed, 1), IN(float, gates, 2), OUT(float, out, 3),
       OUT(float, zeroed, 4)) {
  AWAIT();
  const uint i = tgid.x * 128 + tid;
  if (i >= a.hidden) return;
  float sum = 0;
  for (uint s = 0; s < a.streams; s++) {
    const ulong at = (ulong(tgid.y) * a.streams + s) * a.hidden + i;
    sum = fma(sigmoid(gates[at]), normed[at], sum);
  }
  const ulong to = ulong(tgid.y) * a.hidden + i;
  out[to] = sum / float(a.streams);
  if (a.flag != 0) zeroed[to] = 0;
}

// stream += inject * y, or stream = y. Grid (ceil(hidden / 128), streams, tokens), 128 threads.
KERNEL(stream_write, ARGS(StreamArgs, a), IN(float, y, 1), IN(float, inject, 2), OUT(float, streams, 3)) {
  AWAIT();
  const uint i = tgid.x * 128 + tid;
  if (i >= a.hidden) return;
  const ulong row = ulong(tgid.z) * a.streams + tgid.y, at = row * a.hidden + i;
  const float value = y[ulong(tgid.z) * a.hidden + i];
  streams[at] = a.flag != 0 ? fma(inject[row], value, streams[at]) : value;
}

// A row of `proj` has a key per stream, then the value. Position p has row p % ring_len of `history`.
struct NgramArgs {
  uint start;                       // position of the first row
  uint streams, hidden;
  uint conv_width, dilation;        // weights of the convolution per channel, and tokens between two of them
  uint ring_len;
  float eps;
  uint per_sequence;                // whether each row has a sequence of its own
};

// The position of a row, and the ring of its sequence.
FN uint row_position(CONSTANT NgramArgs& a, DEVICE const SequenceRow* rows, uint row) {
  return a.per_sequence != 0 ? rows[row].position : a.start + row;
}
FN ulong ring_start(CONSTANT NgramArgs& a, DEVICE const SequenceRow* rows, uint row) {
  return a.per_sequence != 0 ? ulong(rows[row].sequence) * a.ring_len * a.streams * a.hidden : 0;
}

// The sum of x over 128 threads.
FN float sum_of_group(float x, THREADGROUP float* part THREAD_IDS_PARAM) {
  x = SIMD_SUM(x);
  if (lane == 0) part[sg] = x;
  BARRIER();
  x = part[0] + part[1] + part[2] + part[3];
  BARRIER();  // before the next sum overwrites part
  return x;
}

// gate = sigmoid(signed root of rms(key) . rms(stream) / sqrt(hidden)), and the row of the history, rms(gate * value) *
// norm. Grid (streams, tokens), 128 threads.
KERNEL(ngram_gate, ARGS(NgramArgs, a), IN(float, proj, 1), IN(float, streams, 2), IN(float, key_norm, 3),
       IN(float, query_norm, 4), IN(float, conv_norm, 5), OUT(float, gates, 6), OUT(float, histories, 7),
       IN(SequenceRow, rows, 8)) {
  SHARED(float, part, 4);
  AWAIT();
  const uint width = a.streams * a.hidden, first = tgid.x * a.hidden, position = row_position(a, rows, tgid.y);
  DEVICE const float* row = proj + ulong(tgid.y) * (width + a.hidden);
  DEVICE const float* query = streams + ulong(tgid.y) * width + first;
  DEVICE const float *key = row + first, *value = row + width;
  float keys = 0, queries = 0, dot = 0;
  for (uint i = tid; i < a.hidden; i += 128) {
    keys = fma(key[i], key[i], keys), queries = fma(query[i], query[i], queries);
    dot = fma(key[i] * key_norm[first + i], query[i] * query_norm[first + i], dot);
  }
  keys = sum_of_group(keys, part THREAD_IDS), queries = sum_of_group(queries, part THREAD_IDS);
  dot = sum_of_group(dot, part THREAD_IDS);
  const float size = float(a.hidden);
  const float s = dot * (1.0f / sqrt(keys / size + a.eps)) * (1.0f / sqrt(queries / size + a.eps)) / sqrt(size);
  const float root = sqrt(max(s < 0 ? -s : s, 1e-6f));
  const float gate = sigmoid(s == 0 ? 0.0f : s < 0 ? -root : root);
  float squares = 0;
  for (uint i = tid; i < a.hidden; i += 128) squares = fma(gate * value[i], gate * value[i], squares);
  const float scale = 1.0f / sqrt(sum_of_group(squares, part THREAD_IDS) / size + a.eps);
  DEVICE float* to = histories + ring_start(a, rows, tgid.y) + ulong(position % a.ring_len) * width + first;
  for (uint i = tid; i < a.hidden; i += 128) to[i] = gate * value[i] * scale * conv_norm[first + i];
  if (tid == 0) gates[tgid.y * a.streams + tgid.x] = gate;
}

// stream += gate * value + silu(convolution of the history). Positions before the start count as 0. Grid (ceil(hidden /
// 128), streams, tokens), 128 threads.
KERNEL(ngram_add, ARGS(NgramArgs, a), IN(float, proj, 1), IN(float, gates, 2), IN(float, conv, 3),
       IN(float, histories, 4), OUT(float, streams, 5), IN(SequenceRow, rows, 6)) {
  AWAIT();
  const uint i = tgid.x * 128 + tid;
  if (i >= a.hidden) return;
  const uint width = a.streams * a.hidden, c = tgid.y * a.hidden + i;
  const uint position = row_position(a, rows, tgid.z);
  DEVICE const float* history = histories + ring_start(a, rows, tgid.z);
  float sum = 0;
  for (uint tap = 0; tap < a.conv_width; tap++) {
    const uint back = (a.conv_width - 1 - tap) * a.dilation;
    if (back > position) continue;
    sum = fma(conv[tap * width + c], history[ulong((position - back) % a.ring_len) * width + c], sum);
  }
  const float value = proj[ulong(tgid.z) * (width + a.hidden) + width + i];
  streams[ulong(tgid.z) * width + c] += fma(gates[tgid.z * a.streams + tgid.y], value, silu(sum));
}
