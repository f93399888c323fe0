// Dequantized weights: rows of the embedding, and a whole matrix as f16 or f32 for a matrix product.

struct WeightsArgs { uint cols, float_type; Matrix m; };

// The 16 values of chunk `c` of a row.
FN void dequantize_chunk(CONSTANT Matrix& m, uint cols, uint row, uint c, DEVICE const uchar* codes,
                         DEVICE const uchar* scales, DEVICE const uchar* biases, THREAD float* v) {
  const ulong code_bytes = row_code_bytes(m, cols), scale_bytes = row_scale_bytes(m, cols);
  unpack_chunk(m, codes + row * code_bytes, c, cols, v);
  const ulong at = scale_row(m, row) * scale_bytes;
  const float s = chunk_scale(m, scales + at, c), b = chunk_bias(m, biases + at, c);
  UNROLL for (uint i = 0; i < 16; i++) v[i] = fma(s, v[i], b);
}

// h[token] = row ids[token] of the table. Grid (ceil(cols / 512), tokens), 32 threads.
KERNEL(embed, ARGS(WeightsArgs, a), IN(uint, ids, 1), IN(uchar, codes, 2), IN(uchar, scales, 3), IN(uchar, biases, 4),
       OUT(float, h, 5)) {
  AWAIT();
  const uint c = tgid.x * 32 + lane;
  if (c * 16 >= a.cols) return;
  float v[16];
  dequantize_chunk(a.m, a.cols, min(ids[tgid.y], a.m.rows - 1), c, codes, scales, biases, v);
  for (uint i = 0; i < 16; i++)
    if (c * 16 + i < a.cols) h[ulong(tgid.y) * a.cols + c * 16 + i] = v[i];
}

// Writes all rows as `float_type` (f16 or f32). Grid (ceil(cols / 512), rows), 32 threads.
KERNEL(dequantize, ARGS(WeightsArgs, a), IN(uchar, codes, 1), IN(uchar, scales, 2), IN(uchar, biases, 3),
       OUT(uchar, out, 4)) {
  AWAIT();
  const uint c = tgid.x * 32 + lane;
  if (c * 16 >= a.cols) return;
  float v[16];
  dequantize_chunk(a.m, a.cols, tgid.y, c, codes, scales, biases, v);
  const ulong at = ulong(tgid.y) * a.cols + c * 16;
  for (uint i = 0; i < 16 && c * 16 + i < a.cols; i++) {
    if (a.float_type == F32) ((DEVICE float*)out)[at + i] = v[i];
    else ((DEVICE ushort*)out)[at + i] = ushort(to_f16(v[i]));
  }
}
