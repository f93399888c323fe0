// y = x W^T for up to four matrices that share x: their rows follow one another in y. One launch projects q, k and v, or
// the router's scores beside the shared expert's gate and up.
//
// Optionally x is RMS-normed on the way (each simdgroup finds the norm itself: cheaper than a launch), the normed rows are
// kept for whoever needs them next, or the product is added to y. A row's result does not depend on how many rows of x
// there are: verification gives the bytes that decoding gives.
//
// Grid: (ceil(tokens / TOKENS), sum over matrices of ceil(rows / 16)); 128 threads.

struct LinearArgs {
  uint tokens, cols, width;   // rows of x, their length, the length of a row of y
  uint matrices, add, keep;   // how many matrices; y += instead of y =; write the normed x
  float eps;
  Matrix m[4];
};

enum { ROWS = 4, BLOCK = 16 };  // rows of a weight that a simdgroup has, and a threadgroup

// Sixteen values of x * w (or of x), and their sum; the squares of x are added to *squares.
template <bool NORM> FN float load_fast(DEVICE const float* x, DEVICE const float* w, THREAD float* v, THREAD float* squares) {
  const float sum = load16(x, v);
  if (!NORM) return sum;
  float u[16];
  load16(w, u);
  UNROLL for (uint i = 0; i < 16; i++) *squares = fma(v[i], v[i], *squares), v[i] *= u[i];
  return sum16(v);
}

// The same for a row of any length, with zeros past its end.
template <bool NORM> FN float load_any(DEVICE const float* x, DEVICE const float* w, uint c, uint cols, THREAD float* v) {
  UNROLL for (uint i = 0; i < 16; i++) {
    const uint at = c * 16 + i;
    v[i] = at < cols ? (NORM ? x[at] * w[at] : x[at]) : 0.0f;
  }
  return sum16(v);
}
FN float squares_any(DEVICE const float* x, uint c, uint cols) {
  float sum = 0;
  for (uint at = c * 16; at < min(c * 16 + 16, cols); at++) sum = fma(x[at], x[at], sum);
  return sum;
}

// One lane's share of ROWS rows of W (from `row`; rows past the last repeat it) times TOKENS rows of x (from `first`), in
// acc[t * ROWS..], and of the squares of the latter.
template <uint TOKENS, bool NORM, uint BITS>
FN void partial_fast(CONSTANT Matrix& m, CONSTANT LinearArgs& a, uint row, uint first, DEVICE const float* x,
                     DEVICE const float* w, Bytes bytes, THREAD float* acc, THREAD float* squares PLACE) {
  const uint chunks = a.cols / 16;
  Rows<BITS, ROWS> next;
  if (lane < chunks) load_rows(bytes, m.rows, a.cols, row, lane, next);
  for (uint c = lane; c < chunks; c += 32) {
    const Rows<BITS, ROWS> now = next;
    if (c + 32 < chunks) load_rows(bytes, m.rows, a.cols, row, c + 32, next);
    UNROLL for (uint t = 0; t < TOKENS; t++) {
      float v[16];
      const ulong from = ulong(min(first + t, a.tokens - 1)) * a.cols + c * 16;
      const float sum = load_fast<NORM>(x + from, w + c * 16, v, squares + t);
      if (BITS == 4) scale_x4(v);
      add_rows(now, v, sum, acc + t * ROWS);
    }
  }
}

// The same for any encoding.
template <uint TOKENS, bool NORM>
FN void partial_any(CONSTANT Matrix& m, CONSTANT LinearArgs& a, uint row, uint first, DEVICE const float* x,
                    DEVICE const float* w, Bytes bytes, THREAD float* acc, THREAD float* squares PLACE) {
  const uint code_bytes = row_codes(m, a.cols), scale_bytes = row_scales(m, a.cols);
  for (uint c = lane; c < (a.cols + 15) / 16; c += 32) {
    UNROLL for (uint t = 0; t < TOKENS; t++)
      if (NORM) squares[t] += squares_any(x + ulong(min(first + t, a.tokens - 1)) * a.cols, c, a.cols);
    UNROLL for (uint r = 0; r < ROWS; r++) {
      const uint at = min(row + r, m.rows - 1);
      float u[16], v[16];
      chunk(m, bytes.codes + at * code_bytes, c, a.cols, u);
      const float s = chunk_scale(m, bytes.scales + at * scale_bytes, c), b = chunk_bias(m, bytes.biases + at * scale_bytes, c);
      UNROLL for (uint t = 0; t < TOKENS; t++) {
        const float sum = load_any<NORM>(x + ulong(min(first + t, a.tokens - 1)) * a.cols, w, c, a.cols, v);
        float dot = 0;
        UNROLL for (uint i = 0; i < 16; i++) dot = fma(u[i], v[i], dot);
        THREAD float* to = acc + t * ROWS + r;
        *to = fma(b, sum, fma(s, dot, *to));
      }
    }
  }
}

template <uint TOKENS, bool NORM, bool ANY>
FN void linear(CONSTANT LinearArgs& a, CONSTANT Matrix& m, uint start, uint block, DEVICE const float* x,
               DEVICE const float* w, DEVICE float* y, DEVICE float* kept, Bytes bytes PLACE) {
  const uint first = tgid.x * TOKENS, row = block * BLOCK + sg * ROWS;
  float squares[TOKENS], acc[TOKENS * ROWS];
  UNROLL for (uint i = 0; i < TOKENS; i++) squares[i] = 0;
  UNROLL for (uint i = 0; i < TOKENS * ROWS; i++) acc[i] = 0;
  if (ANY) partial_any<TOKENS, NORM>(m, a, row, first, x, w, bytes, acc, squares HERE);
  else if (m.format == 4) partial_fast<TOKENS, NORM, 4>(m, a, row, first, x, w, bytes, acc, squares HERE);
  else partial_fast<TOKENS, NORM, 8>(m, a, row, first, x, w, bytes, acc, squares HERE);
  UNROLL for (uint t = 0; t < TOKENS; t++) {
    const float scale = NORM ? 1.0f / sqrt(SIMD_SUM(squares[t]) / float(a.cols) + a.eps) : 1.0f;
    UNROLL for (uint r = 0; r < ROWS; r++) {
      const float sum = SIMD_SUM(acc[t * ROWS + r]) * scale;
      if (lane == 0 && row + r < m.rows && first + t < a.tokens) {
        DEVICE float* out = y + ulong(first + t) * a.width + start + row + r;
        *out = a.add != 0 ? *out + sum : sum;
      }
    }
    if (!NORM || a.keep == 0 || tgid.y != 0 || first + t >= a.tokens) continue;
    const ulong from = ulong(first + t) * a.cols;
    for (uint i = tid; i < a.cols; i += 128) kept[from + i] = x[from + i] * scale * w[i];
  }
}

// The matrix that a row of threadgroups belongs to, `size` rows each; its y starts at `start`.
FN uint find(CONSTANT LinearArgs& a, uint size, THREAD uint* block, THREAD uint* start) {
  uint i = 0;
  while (i + 1 < a.matrices) {
    const uint blocks = (a.m[i].rows + size - 1) / size;
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
    uint block = tgid.y, start = 0;                                                                                   \
    const uint i = find(a, BLOCK, &block, &start);                                                                    \
    const Bytes bytes = {i == 0 ? c0 : i == 1 ? c1 : i == 2 ? c2 : c3, i == 0 ? s0 : i == 1 ? s1 : i == 2 ? s2 : s3,  \
                         i == 0 ? b0 : i == 1 ? b1 : i == 2 ? b2 : b3};                                               \
    linear<TOKENS, NORM, ANY>(a, a.m[i], start, block, x, w, y, kept, bytes HERE);                                    \
  }

LINEAR(linear_1, 1, false, false)
LINEAR(linear_4, 4, false, false)
LINEAR(linear_norm_1, 1, true, false)
LINEAR(linear_norm_4, 4, true, false)
LINEAR(linear_any_1, 1, false, true)
LINEAR(linear_any_4, 4, false, true)
LINEAR(linear_any_norm_1, 1, true, true)
LINEAR(linear_any_norm_4, 4, true, true)

#ifndef NO_TILES
// The same on matrix units, of rows of halves (half_rows) and the power of two of each. Grid (ceil(tokens / 64), sum over
// matrices of ceil(rows / 64)); 128 threads.
enum { GEMM_TILES = 4 };

template <bool ANY>
FN void gemm(CONSTANT LinearArgs& a, CONSTANT Matrix& m, uint start, uint block, DEVICE const uint* x, DEVICE const float* scale,
             DEVICE float* y, Bytes bytes, THREADGROUP uint4* room PLACE) {
  const uint first = tgid.x * GEMM_TILES * 16, row = block * WIDE, mine = min(row + tid / 2, m.rows - 1);
  uint from[GEMM_TILES];
  UNROLL for (uint i = 0; i < GEMM_TILES; i++) from[i] = min(first + i * 16 + tid / 8, a.tokens - 1);
  if (ANY) multiply<GEMM_TILES, 0>(m, bytes, mine, a.cols, x, from, room HERE);
  else if (m.format == 4) multiply<GEMM_TILES, 4>(m, bytes, mine, a.cols, x, from, room HERE);
  else multiply<GEMM_TILES, 8>(m, bytes, mine, a.cols, x, from, room HERE);
  THREADGROUP const float* sums = (THREADGROUP const float*)room;
  for (uint n = tid; n < GEMM_TILES * 16 * WIDE; n += 128) {
    const uint token = first + n / WIDE, column = row + n % WIDE;
    if (token >= a.tokens || column >= m.rows) continue;
    const float sum = sums[n / WIDE * OUT_PITCH + n % WIDE] * scale[token];
    DEVICE float* out = y + ulong(token) * a.width + start + column;
    *out = a.add != 0 ? *out + sum : sum;
  }
}

#define GEMM(name, ANY)                                                                                               \
  KERNEL(name, ARGS(LinearArgs, a), IN(uint, x, 1), IN(float, scale, 2), OUT(float, y, 3), IN(uchar, c0, 4),          \
         IN(uchar, s0, 5), IN(uchar, b0, 6), IN(uchar, c1, 7), IN(uchar, s1, 8), IN(uchar, b1, 9), IN(uchar, c2, 10), \
         IN(uchar, s2, 11), IN(uchar, b2, 12), IN(uchar, c3, 13), IN(uchar, s3, 14), IN(uchar, b3, 15)) {             \
    SHARED(uint4, room, Room<GEMM_TILES>::SIZE);                                                                      \
    uint block = tgid.y, start = 0;                                                                                   \
    const uint i = find(a, WIDE, &block, &start);                                                                     \
    const Bytes bytes = {i == 0 ? c0 : i == 1 ? c1 : i == 2 ? c2 : c3, i == 0 ? s0 : i == 1 ? s1 : i == 2 ? s2 : s3,  \
                         i == 0 ? b0 : i == 1 ? b1 : i == 2 ? b2 : b3};                                               \
    gemm<ANY>(a, a.m[i], start, block, x, scale, y, bytes, room HERE);                                                \
  }

GEMM(gemm_fast, false)
GEMM(gemm_any, true)
#endif
