// Several residual streams: the mixture that a part of a layer reads, the result that each stream gets, and the rows of an
// n-gram table that are added to all. `src/ops/streams` and `src/ops/ngram` have the formulas. A row is all streams, one after
// the other.

struct StreamArgs {
  uint streams, hidden;
  uint rank, low_width;             // stream_gates: columns of act, and of a row of low
  uint flag;                        // stream_mix: set `zeroed` to 0; stream_write: add to the streams instead of setting them
};

// act = silu(low / C) and inject = 2 sigmoid(low / C), from rows `low | inject`. Grid (ceil(low_width / 128), tokens), 128
// threads.
KERNEL(stream_gates, ARGS(StreamArgs, a), IN(float, low, 1), OUT(float, act, 2), OUT(float, inject, 3)) {
  AWAIT();
  const uint i = tgid.x * 128 + tid;
  if (i >= a.low_width) return;
  const float x = low[ulong(tgid.y) * a.low_width + i] / float(a.streams);
  if (i < a.rank) act[ulong(tgid.y) * a.rank + i] = silu(x);
  else inject[ulong(tgid.y) * a.streams + i - a.rank] = 2.0f * sigmoid(x);
}

// out = sum over streams of sigmoid(gate) * normed, divided by C. Grid (ceil(hidden / 128), tokens), 128 threads.
KERNEL(stream_mix, ARGS(StreamArgs, a), IN(float, normed, 1), IN(float, gates, 2), OUT(float, out, 3), OUT(float, zeroed, 4)) {
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
