// RMS norms where no product follows that could do it on the way, and rows in half precision.

struct NormArgs { uint rows, cols, width, gate_at; float eps; };

// y = x / rms(x) * w. Grid (rows), 256 threads.
KERNEL(rms_norm, ARGS(NormArgs, a), IN(float, x, 1), IN(float, w, 2), OUT(float, y, 3)) {
  SHARED(float, part, 8);
  AWAIT();
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
  AWAIT();
  const uint head = tgid.x * 4 + sg;
  if (head >= a.rows) return;
  const ulong from = (ulong(tgid.y) * a.rows + head) * a.cols;
  DEVICE const float* gate = z + ulong(tgid.y) * a.width + a.gate_at + head * a.cols;
  float squares = 0;
  for (uint i = lane; i < a.cols; i += 32) squares = fma(x[from + i], x[from + i], squares);
  const float scale = 1.0f / sqrt(SIMD_SUM(squares) / float(a.cols) + a.eps);
  for (uint i = lane; i < a.cols; i += 32) y[from + i] = x[from + i] * scale * w[i] * (gate[i] / (1.0f + exp(-gate[i])));
}

#ifndef NO_TILES
// Rows of halves for matrix units: y[row] = x[row], or its RMS norm, divided by scale[row], the power of two at or below its
// largest value; zeros behind its columns up to `pitch`. With `listed`, rows list[0], list[1], ... only. A norm is kept as
// floats, too, if asked for. Grid (rows), 128 threads.
struct HalfArgs { uint cols, stride, pitch, normed, keep, listed; float eps; };

KERNEL(half_rows, ARGS(HalfArgs, a), IN(float, x, 1), IN(float, w, 2), IN(uint, list, 3), OUT(uint, y, 4), OUT(float, scale, 5),
       OUT(float, kept, 6)) {
  SHARED(float, part, 8);
  AWAIT();
  const uint row = a.listed != 0 ? list[tgid.x] : tgid.x;
  DEVICE const float* from = x + ulong(row) * a.stride;
  float squares = 0, most = 0;
  for (uint i = tid; i < a.cols; i += 128) {
    const float v = from[i], u = a.normed != 0 ? v * w[i] : v;
    squares = fma(v, v, squares);
    most = max(most, u < 0 ? -u : u);
  }
  squares = SIMD_SUM(squares), most = SIMD_MAX(most);
  if (lane == 0) part[sg] = squares, part[4 + sg] = most;
  BARRIER();
  squares = part[0] + part[1] + part[2] + part[3];
  const float by = a.normed != 0 ? 1.0f / sqrt(squares / float(a.cols) + a.eps) : 1.0f;
  most = max(max(part[4], part[5]), max(part[6], part[7])) * by;
  // Of zeros and of what is no number: 1.
  const uint bits = as_type<uint>(most) >> 23, power = bits == 0 || bits >= 254 ? 127 : bits;
  const float inverse = as_type<float>((254 - power) << 23);
  if (tid == 0) scale[row] = as_type<float>(power << 23);
  for (uint j = tid; j < a.pitch / 2; j += 128) {
    float v[2];
    UNROLL for (uint n = 0; n < 2; n++) {
      const uint i = 2 * j + n;
      v[n] = i >= a.cols ? 0.0f : a.normed != 0 ? from[i] * by * w[i] : from[i];
      if (a.keep != 0 && i < a.cols) kept[ulong(row) * a.cols + i] = v[n];
    }
    y[ulong(row) * (a.pitch / 2) + j] = HALF2(v[0] * inverse, v[1] * inverse);
  }
}
#endif
