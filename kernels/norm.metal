// RMS norms that are not fused into a product, and the conversion of rows to half precision.

struct NormArgs { uint cols, weights; float eps; };

// y = x / rms(x) * w. Row r of x uses row r % weights of w. Grid (rows), 256 threads.
KERNEL(rms_norm, ARGS(NormArgs, a), IN(float, x, 1), IN(float, w, 2), OUT(float, y, 3)) {
  SHARED(float, part, 8);
  AWAIT();
  const ulong from = ulong(tgid.x) * a.cols;
  DEVICE const float* weight = w + ulong(tgid.x % a.weights) * a.cols;
  float squares = 0;
  for (uint i = tid; i < a.cols; i += 256) squares = fma(x[from + i], x[from + i], squares);
  squares = SIMD_SUM(squares);
  if (lane == 0) part[sg] = squares;
  BARRIER();
  squares = 0;
  for (uint i = 0; i < 8; i++) squares += part[i];
  const float scale = 1.0f / sqrt(squares / float(a.cols) + a.eps);
  for (uint i = tid; i < a.cols; i += 256) y[from + i] = x[from + i] * scale * weight[i];
}

// The output norm of the delta net, per head: y = x * w * gate(z) / rms(x), where the gate is SiLU or sigmoid. z starts
// at column `gate_at` of rows of `width`. A head has at most 256 columns. Grid (ceil(heads / 4), tokens), 128 threads:
// one simdgroup per head.
//
// The squares are added in this order: the squares of each four adjacent columns, then each quarter of these sums, then
// the four quarters. The fused path gives the same bits, because it uses the same order: there, the delta rule adds up
// four columns, and the product after it adds up the rest (sum_quarters in linear.metal).
struct GatedNormArgs { uint heads, cols, width, gate_at, sigmoid_gate; float eps; };

KERNEL(gated_rms_norm, ARGS(GatedNormArgs, a), IN(float, x, 1), IN(float, z, 2), IN(float, w, 3), OUT(float, y, 4)) {
  SHARED(float, fours, 4 * 64);
  AWAIT();
  const uint head = tgid.x * 4 + sg, count = (a.cols + 3) / 4, quarter = (count + 3) / 4;
  const ulong from = (ulong(tgid.y) * a.heads + head) * a.cols;
  for (uint n = lane; head < a.heads && n < count; n += 32) {
    float sum = 0;
    for (uint i = 4 * n; i < min(4 * n + 4, a.cols); i++) sum = fma(x[from + i], x[from + i], sum);
    fours[sg * 64 + n] = sum;
  }
  BARRIER();
  if (head >= a.heads) return;
  float squares = 0;
  for (uint q = 0; q < 4; q++) {
    float sum = 0;
    for (uint n = q * quarter; n < min((q + 1) * quarter, count); n++) sum += fours[sg * 64 + n];
    squares += sum;
  }
  const float scale = 1.0f / sqrt(squares / float(a.cols) + a.eps);
  DEVICE const float* gate = z + ulong(tgid.y) * a.width + a.gate_at + head * a.cols;
  for (uint i = lane; i < a.cols; i += 32)
    y[from + i] = x[from + i] * w[i] * output_gate(a.sigmoid_gate, gate[i]) * scale;
}

#ifndef NO_TILES
// Converts rows to halves for matrix units: y[row] = x[row], or its RMS norm, divided by scale[row]. scale[row] is
// the largest power of two that is not above the row's largest magnitude. Columns up to `pitch` are padded with 0.
// With `listed`, only rows list[0], list[1], ... are converted. With `keep`, the normed row is also stored as
// floats. Grid (rows), 128 threads.
struct HalfArgs { uint cols, stride, pitch, normed, keep, listed; float eps; };

KERNEL(rows_to_half, ARGS(HalfArgs, a), IN(float, x, 1), IN(float, w, 2), IN(uint, list, 3), OUT(uint, y, 4),
       OUT(float, scale, 5), OUT(float, kept, 6)) {
  SHARED(float, part, 8);
  AWAIT();
  const uint row = a.listed != 0 ? list[tgid.x] : tgid.x;
  DEVICE const float* from = x + ulong(row) * a.stride;
  float squares = 0, max_abs = 0;
  for (uint i = tid; i < a.cols; i += 128) {
    const float v = from[i], u = a.normed != 0 ? v * w[i] : v;
    squares = fma(v, v, squares);
    max_abs = max(max_abs, u < 0 ? -u : u);
  }
  squares = SIMD_SUM(squares), max_abs = SIMD_MAX(max_abs);
  if (lane == 0) part[sg] = squares, part[4 + sg] = max_abs;
  BARRIER();
  squares = part[0] + part[1] + part[2] + part[3];
  const float by = a.normed != 0 ? 1.0f / sqrt(squares / float(a.cols) + a.eps) : 1.0f;
  max_abs = max(max(part[4], part[5]), max(part[6], part[7])) * by;
  // The scale is 1 if the largest magnitude is subnormal, 2^127 or more, or not finite.
  const uint bits = as_type<uint>(max_abs) >> 23, power = bits == 0 || bits >= 254 ? 127 : bits;
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
