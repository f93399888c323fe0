// RMS norms where no product follows that could do it on the way.

struct NormArgs { uint rows, cols, width, gate_at; float eps; };

// y = x / rms(x) * w. Grid (rows), 256 threads.
KERNEL(rms_norm, ARGS(NormArgs, a), IN(float, x, 1), IN(float, w, 2), OUT(float, y, 3)) {
  SHARED(float, part, 8);
  const ulong from = ulong(tgid.x) * a.cols;
  float squares = 0;
  for (uint i = tid; i < a.cols; i += 256) squares = fma(x[from + i], x[from + i], squares);
  squares = SIMD_SUM(squares);
  if (lane == 0) part[sg] = squares;
  BARRIER();
  squares = 0;
  for (uint i = 0; i < 8; i++) squares += part[i];
  const float scale = 1.0f / sqrt(squares / float(a.cols) + a.eps);
  for (uint i = tid; i < a.cols; i += 256) y[from + i] = x[from + i] * scale * w[i];
}

// The delta net's output: y = x / rms(x) * w * silu(z), a head at a time; z stands `gate_at` in rows of `width`, and a row
// of them belongs to `rows` heads. Grid (ceil(heads / 4), tokens), 128 threads: a simdgroup a head.
KERNEL(gated_norm, ARGS(NormArgs, a), IN(float, x, 1), IN(float, z, 2), IN(float, w, 3), OUT(float, y, 4)) {
  const uint head = tgid.x * 4 + sg;
  if (head >= a.rows) return;
  const ulong from = (ulong(tgid.y) * a.rows + head) * a.cols;
  DEVICE const float* gate = z + ulong(tgid.y) * a.width + a.gate_at + head * a.cols;
  float squares = 0;
  for (uint i = lane; i < a.cols; i += 32) squares = fma(x[from + i], x[from + i], squares);
  const float scale = 1.0f / sqrt(SIMD_SUM(squares) / float(a.cols) + a.eps);
  for (uint i = lane; i < a.cols; i += 32) y[from + i] = x[from + i] * scale * w[i] * (gate[i] / (1.0f + exp(-gate[i])));
}
