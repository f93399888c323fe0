// y = x W^T for up to four matrices that share x: their rows follow one another in y. One launch projects q, k and v, or
// the router's scores beside the shared expert's gate and up.
//
// Optionally x is RMS-normed on the way (each threadgroup finds the norm itself: cheaper than a launch), the normed rows are
// kept for whoever needs them next, or the product is added to y. A row's result does not depend on how many rows of x
// there are: verification gives the bytes that decoding gives.
//
// Grid: (ceil(tokens / TOKENS), sum over matrices of ceil(rows / 16)), 128 threads.

struct LinearArgs {
  uint tokens, cols, width;   // rows of x, their length, the length of a row of y
  uint matrices, add, keep;   // how many matrices; y += instead of y =; write the normed x
  float eps;
  Matrix m[4];
};

enum { ROWS = 4, GROUPS = 4 };  // weight rows of one simdgroup, simdgroups of a threadgroup

// Sixteen values of x * w (or of x), and their sum.
template <bool NORM> FN float load_fast(DEVICE const float* x, DEVICE const float* w, THREAD float* v) {
  float sum = load16(x, v);
  if (NORM) {
    float u[16];
    load16(w, u);
    UNROLL for (uint i = 0; i < 16; i++) v[i] *= u[i];
    sum = sum16(v);
  }
  return sum;
}

// The same for a row of any length, with zeros past its end.
template <bool NORM> FN float load_any(DEVICE const float* x, DEVICE const float* w, uint c, uint cols, THREAD float* v) {
  for (uint i = 0; i < 16; i++) {
    const uint at = c * 16 + i;
    v[i] = at < cols ? (NORM ? x[at] * w[at] : x[at]) : 0.0f;
  }
  return sum16(v);
}

// One lane's share of ROWS rows of W (from `row`; rows past the last repeat it) times TOKENS rows of x (from `first`).
template <uint TOKENS, bool NORM>
FN void partial_fast(CONSTANT Matrix& m, CONSTANT LinearArgs& a, uint row, uint first, DEVICE const float* x,
                     DEVICE const float* w, DEVICE const uchar* codes, DEVICE const uchar* scales,
                     DEVICE const uchar* biases, THREAD float* acc PLACE) {
  const ulong code_bytes = row_codes(m, a.cols), scale_bytes = row_scales(m, a.cols);
  for (uint c = lane; c < a.cols / 16; c += 32) {
    float s[ROWS], b[ROWS], v[16];
    uint4 q[ROWS];
    UNROLL for (uint r = 0; r < ROWS; r++) {
      const uint at = min(row + r, m.rows - 1);
      if (m.format == 4) {
        const uint2 half_of_it = ((DEVICE const uint2*)(codes + at * code_bytes))[c];
        q[r].x = half_of_it.x, q[r].y = half_of_it.y;
      } else {
        q[r] = ((DEVICE const uint4*)(codes + at * code_bytes))[c];
      }
      s[r] = bf16(((DEVICE const ushort*)(scales + at * scale_bytes))[c / 4]);
      b[r] = bf16(((DEVICE const ushort*)(biases + at * scale_bytes))[c / 4]);
    }
    UNROLL for (uint t = 0; t < TOKENS; t++) {
      const float sum = load_fast<NORM>(x + ulong(min(first + t, a.tokens - 1)) * a.cols + c * 16, w + c * 16, v);
      if (m.format == 4) scale_x4(v);
      UNROLL for (uint r = 0; r < ROWS; r++) {
        const float dot = m.format == 4 ? dot_q4(q[r].x, q[r].y, v) : dot_q8(q[r], v);
        acc[t * ROWS + r] = fma(b[r], sum, fma(s[r], dot, acc[t * ROWS + r]));
      }
    }
  }
}

template <uint TOKENS, bool NORM>
FN void partial_any(CONSTANT Matrix& m, CONSTANT LinearArgs& a, uint row, uint first, DEVICE const float* x,
                    DEVICE const float* w, DEVICE const uchar* codes, DEVICE const uchar* scales,
                    DEVICE const uchar* biases, THREAD float* acc PLACE) {
  const ulong code_bytes = row_codes(m, a.cols), scale_bytes = row_scales(m, a.cols);
  for (uint c = lane; c < (a.cols + 15) / 16; c += 32) {
    for (uint r = 0; r < ROWS; r++) {
      const uint at = min(row + r, m.rows - 1);
      float u[16], v[16];
      chunk(m, codes + at * code_bytes, c, a.cols, u);
      const float s = chunk_scale(m, scales + at * scale_bytes, c), b = chunk_bias(m, biases + at * scale_bytes, c);
      for (uint t = 0; t < TOKENS; t++) {
        const float sum = load_any<NORM>(x + ulong(min(first + t, a.tokens - 1)) * a.cols, w, c, a.cols, v);
        float dot = 0;
        for (uint i = 0; i < 16; i++) dot = fma(u[i], v[i], dot);
        acc[t * ROWS + r] = fma(b, sum, fma(s, dot, acc[t * ROWS + r]));
      }
    }
  }
}

// 1 / rms of rows `first`.. of x; the first row of threadgroups keeps the normed rows.
template <uint TOKENS>
FN void norms(CONSTANT LinearArgs& a, uint first, DEVICE const float* x, DEVICE const float* w, DEVICE float* kept,
              THREADGROUP float* part, THREAD float* scale PLACE) {
  for (uint t = 0; t < TOKENS; t++) {
    DEVICE const float* xt = x + ulong(min(first + t, a.tokens - 1)) * a.cols;
    float squares = 0;
    for (uint i = tid; i < a.cols; i += 32 * GROUPS) squares = fma(xt[i], xt[i], squares);
    squares = SIMD_SUM(squares);
    if (lane == 0) part[t * GROUPS + sg] = squares;
  }
  BARRIER();
  for (uint t = 0; t < TOKENS; t++) {
    float squares = 0;
    for (uint i = 0; i < GROUPS; i++) squares += part[t * GROUPS + i];
    scale[t] = 1.0f / sqrt(squares / float(a.cols) + a.eps);
    if (a.keep == 0 || tgid.y != 0 || first + t >= a.tokens) continue;
    const ulong from = ulong(first + t) * a.cols;
    for (uint i = tid; i < a.cols; i += 32 * GROUPS) kept[from + i] = x[from + i] * scale[t] * w[i];
  }
}

template <uint TOKENS, bool NORM, bool ANY>
FN void linear(CONSTANT LinearArgs& a, CONSTANT Matrix& m, uint start, uint block, DEVICE const float* x,
               DEVICE const float* w, DEVICE float* y, DEVICE float* kept, DEVICE const uchar* codes,
               DEVICE const uchar* scales, DEVICE const uchar* biases, THREADGROUP float* part PLACE) {
  const uint first = tgid.x * TOKENS, row = (block * GROUPS + sg) * ROWS;
  float scale[TOKENS], acc[TOKENS * ROWS];
  UNROLL for (uint i = 0; i < TOKENS; i++) scale[i] = 1;
  UNROLL for (uint i = 0; i < TOKENS * ROWS; i++) acc[i] = 0;
  if (NORM) norms<TOKENS>(a, first, x, w, kept, part, scale HERE);
  if (ANY) partial_any<TOKENS, NORM>(m, a, row, first, x, w, codes, scales, biases, acc HERE);
  else partial_fast<TOKENS, NORM>(m, a, row, first, x, w, codes, scales, biases, acc HERE);
  UNROLL for (uint t = 0; t < TOKENS; t++)
    UNROLL for (uint r = 0; r < ROWS; r++) {
      const float sum = SIMD_SUM(acc[t * ROWS + r]) * scale[t];
      if (lane == 0 && row + r < m.rows && first + t < a.tokens) {
        DEVICE float* out = y + ulong(first + t) * a.width + start + row + r;
        *out = a.add != 0 ? *out + sum : sum;
      }
    }
}

// Which matrix a row of threadgroups belongs to; y starts at `start` for it.
FN uint find(CONSTANT LinearArgs& a, THREAD uint* block, THREAD uint* start) {
  uint i = 0;
  while (i + 1 < a.matrices) {
    const uint blocks = (a.m[i].rows + ROWS * GROUPS - 1) / (ROWS * GROUPS);
    if (*block < blocks) break;
    *block -= blocks;
    *start += a.m[i].rows;
    i++;
  }
  return i;
}

#define LINEAR(name, TOKENS, NORM, ANY)                                                                               \
  KERNEL(name, ARGS(LinearArgs, a), IN(float, x, 1), IN(float, w, 2), OUT(float, y, 3), OUT(float, kept, 4),          \
         IN(uchar, c0, 5), IN(uchar, s0, 6), IN(uchar, b0, 7), IN(uchar, c1, 8), IN(uchar, s1, 9), IN(uchar, b1, 10), \
         IN(uchar, c2, 11), IN(uchar, s2, 12), IN(uchar, b2, 13), IN(uchar, c3, 14), IN(uchar, s3, 15),               \
         IN(uchar, b3, 16)) {                                                                                         \
    SHARED(float, part, TOKENS * GROUPS);                                                                             \
    uint block = tgid.y, start = 0;                                                                                   \
    const uint i = find(a, &block, &start);                                                                           \
    linear<TOKENS, NORM, ANY>(a, a.m[i], start, block, x, w, y, kept, i == 0 ? c0 : i == 1 ? c1 : i == 2 ? c2 : c3,   \
                              i == 0 ? s0 : i == 1 ? s1 : i == 2 ? s2 : s3,                                           \
                              i == 0 ? b0 : i == 1 ? b1 : i == 2 ? b2 : b3, part HERE);                               \
  }

LINEAR(linear_1, 1, false, false)
LINEAR(linear_4, 4, false, false)
LINEAR(linear_norm_1, 1, true, false)
LINEAR(linear_norm_4, 4, true, false)
LINEAR(linear_any_1, 1, false, true)
LINEAR(linear_any_4, 4, false, true)
LINEAR(linear_any_norm_1, 1, true, true)
LINEAR(linear_any_norm_4, 4, true, true)
