// y = x W^T for up to four matrices that share x. The results of the matrices are adjacent in a row of y: for example
// q, k and v, or the router's scores and the shared expert's gate and up.
//
// Optional fused steps: x is RMS-normed first (each threadgroup computes the norm, which is cheaper than a
// launch), the normed rows are stored for a later launch, or the product is added to y. A row's result does not
// depend on the number of rows of x, so verifying drafts gives the same bytes as decoding.
//
// Two variants of the kernel fuse small steps of a delta net. gemv_conv takes one row and applies the convolution
// (delta_net.metal) to each channel of the first matrix in the simdgroup that computes the channel, since only the
// state of that channel is needed. gemv_head_norm reads x from the delta rule with a deferred norm and multiplies each
// head by the head's factor 1 / rms.
//
// With split_k, the four simdgroups of a threadgroup share four rows: each has every fourth group of 32 chunks. Grid
// (ceil(tokens / TOKENS), sum over matrices of ceil(rows / 16), or of ceil(rows / 4) with split_k), 128 threads.

struct LinearArgs {
  uint can_skip;
  uint tokens, cols, width;   // rows of x, their length, length of a row of y
  uint matrices, add;         // number of matrices; y += instead of y =
  uint keep;                  // threadgroups that store the normed x, or 0; of tiles: 1 if the rows are normed
  uint split_k;
  float eps;
  Matrix m[4];
};

struct ConvArgs { LinearArgs product; uint replay; };                   // replayed rows, between the state's rows and x
struct HeadsArgs { LinearArgs product; uint heads, size; float eps; };  // heads of x, columns per head

enum { PLAIN, NORMED, CONV, HEAD_NORM };
enum { MAX_HEADS = 64 };

// Inputs of a fused step: the convolution's state as in causal_conv, or the heads and their sums of squares. The sum of
// a head is in four parts.
struct Fused {
  DEVICE const float *conv_weight, *replay;
  DEVICE float *state, *mixed;
  uint rows, heads, size;
  float eps;
  THREADGROUP float* quarters;
};

// Applies the convolution to channel `c`, whose last sample is the product, and moves the state by one row.
FN void convolve(THREAD const Fused& at, uint channels, uint c, THREAD const float* weight,
                 THREAD const float* samples) {
  float mixed = weight[0] * samples[0];
  UNROLL for (uint i = 1; i < 4; i++) mixed = fma(weight[i], samples[i], mixed);
  at.mixed[c] = silu(mixed);
  UNROLL for (uint i = 0; i < 3; i++) at.state[i * channels + c] = samples[i + 1];
}

// Loads the weights of channel `c` of the convolution, and the three samples before the product.
FN void load_samples(THREAD const Fused& at, uint channels, uint width, uint c, THREAD float* weight,
                     THREAD float* samples) {
  UNROLL for (uint i = 0; i < 4; i++) {
    const uint row = at.rows + i;
    weight[i] = at.conv_weight[i * channels + c];
    if (i == 3) continue;
    samples[i] = row < 3 ? at.state[row * channels + c] : at.replay[(row - 3) * width + c];
  }
}

enum { ROWS = 4, BLOCK = 16 };  // rows of W per simdgroup, and per threadgroup

// Loads chunk `c` of x * w (or of x) and returns its sum. Values past the end of the row are 0.
template <bool NORM>
FN float load_any(DEVICE const float* x, DEVICE const float* w, uint c, uint cols, THREAD float* v) {
  UNROLL for (uint i = 0; i < 16; i++) {
    const uint at = c * 16 + i;
    v[i] = at < cols ? (NORM ? x[at] * w[at] : x[at]) : 0.0f;
  }
  return sum16(v);
}
// The sum of the squares of chunk `c` of x.
FN float squares_any(DEVICE const float* x, uint c, uint cols) {
  float sum = 0;
  for (uint at = c * 16; at < min(c * 16 + 16, cols); at++) sum = fma(x[at], x[at], sum);
  return sum;
}

// Sums the squares of each head of rows `first`.. of x in four parts, one per simdgroup. Each value of `squares` is a
// sum over four columns.
template <uint TOKENS>
FN void sum_quarters(CONSTANT LinearArgs& a, uint first, DEVICE const float* squares,
                     THREAD const Fused& at THREAD_IDS_PARAM) {
  const uint count = at.size / 4, quarter = (count + 3) / 4, begin = sg * quarter, end = min(begin + quarter, count);
  UNROLL for (uint t = 0; t < TOKENS; t++) {
    DEVICE const float* from = squares + ulong(min(first + t, a.tokens - 1)) * count * at.heads;
    for (uint head = lane; head < at.heads; head += 32) {
      float sum = 0;
      for (uint i = begin; i < end; i += 8) {
        float v[8];
        UNROLL for (uint j = 0; j < 8; j++) v[j] = i + j < end ? from[(i + j) * at.heads + head] : 0.0f;
        UNROLL for (uint j = 0; j < 8; j++) sum += v[j];
      }
      at.quarters[(t * 4 + sg) * MAX_HEADS + head] = sum;
    }
  }
}

// The factor 1 / rms of the head of a column of x.
FN float head_scale(THREAD const Fused& at, uint t, uint column) {
  THREADGROUP const float* q = at.quarters + t * 4 * MAX_HEADS + column / at.size;
  return 1.0f / sqrt((q[0] + q[MAX_HEADS] + q[2 * MAX_HEADS] + q[3 * MAX_HEADS]) / float(at.size) + at.eps);
}

// Applies head_scale to the staged chunks that this thread sums next.
FN void scale_staged(THREAD const Fused& at, uint t, uint begin, uint count,
                     THREADGROUP float4* scratch THREAD_IDS_PARAM) {
  for (uint c = tid; c < count; c += 128) {
    const float scale = head_scale(at, t, (begin + c) * 16);
    UNROLL for (uint i = 0; i < 4; i++) {
      float4 q = scratch[quarter_at(c, i)];
      q.x *= scale, q.y *= scale, q.z *= scale, q.w *= scale;
      scratch[quarter_at(c, i)] = q;
    }
  }
}

// Multiplies this lane's share of ROWS rows of W, from `row`, by TOKENS rows of x, from `first`. The last row of W
// replaces rows past the end. The sums go to acc[t * ROWS..]. Also sums this thread's share of the squares of x.
template <uint TOKENS, uint KIND, uint BITS>
FN void partial_fast(CONSTANT Matrix& m, CONSTANT LinearArgs& a, uint row, uint first, DEVICE const float* x,
                     DEVICE const float* w, WeightPtrs bytes, bool split_k, THREAD const Fused& fused,
                     THREAD float* acc, THREAD float* squares, THREADGROUP float4* scratch,
                     THREADGROUP float* sums THREAD_IDS_PARAM) {
  const uint chunks = a.cols / 16, step = split_k ? 128 : 32;
  uint c = split_k ? tid : lane;
  PackedRows<BITS, ROWS> next;
  if (TOKENS == 1 && c < chunks) load_rows(bytes, m.rows, a.cols, row, c, next);
  const uint max_chunks = STAGED_CHUNKS / TOKENS;
  for (uint begin = 0; begin < chunks; begin += max_chunks) {
    const uint count = min(max_chunks, chunks - begin);
    if (begin > 0) BARRIER();  // before the previous chunks are overwritten
    UNROLL for (uint t = 0; t < TOKENS; t++) {
      const ulong from = ulong(min(first + t, a.tokens - 1)) * a.cols + begin * 16;
      THREADGROUP float4* to = scratch + t * max_chunks * 4;
      stage_rows<KIND == NORMED || KIND == CONV>(x + from, w + begin * 16, count, to, squares + t THREAD_IDS);
    }
    BARRIER();
    UNROLL for (uint t = 0; t < TOKENS; t++) {
      if (KIND == HEAD_NORM) scale_staged(fused, t, begin, count, scratch + t * max_chunks * 4 THREAD_IDS);
      sum_staged<BITS>(count, scratch + t * max_chunks * 4, sums + t * max_chunks THREAD_IDS);
    }
    BARRIER();
    for (; c < begin + count; c += step) {
      if (TOKENS > 1) {
        // Loading one step ahead would need too many registers. With several rows, arithmetic hides the latency.
        load_rows(bytes, m.rows, a.cols, row, c, next);
        dot_staged<BITS, ROWS, TOKENS>(next, scratch, max_chunks, c - begin, sums, acc);
        continue;
      }
      const PackedRows<BITS, ROWS> now = next;
      if (c + step < chunks) load_rows(bytes, m.rows, a.cols, row, c + step, next);
      float v[16];
      load_staged(scratch, c - begin, v);
      dot_rows(now, v, sums[c - begin], acc);
    }
  }
}

// Like partial_fast for one row of x, with the same bytes. Each lane reads its chunks of x from the cache instead of
// threadgroup memory, so more threadgroups run at the same time and a threadgroup waits at fewer barriers.
template <uint KIND, uint BITS>
FN void partial_direct(CONSTANT Matrix& m, CONSTANT LinearArgs& a, uint row, uint first, DEVICE const float* x,
                       DEVICE const float* w, WeightPtrs bytes, bool split_k, THREAD const Fused& fused,
                       THREAD float* acc, THREAD float* squares THREAD_IDS_PARAM) {
  const bool NORM = KIND == NORMED || KIND == CONV;
  const uint chunks = a.cols / 16, step = split_k ? 128 : 32;
  DEVICE const float* from = x + ulong(first) * a.cols;
  if (KIND == HEAD_NORM) BARRIER();  // before the sums of the heads are read
  uint c = split_k ? tid : lane;
  PackedRows<BITS, ROWS> next;
  if (c < chunks) load_rows(bytes, m.rows, a.cols, row, c, next);
  for (; c < chunks; c += step) {
    const PackedRows<BITS, ROWS> now = next;
    if (c + step < chunks) load_rows(bytes, m.rows, a.cols, row, c + step, next);
    float v[16], u[16], sum = load16(from + c * 16, v);
    if (NORM) load16(w + c * 16, u);
    if (KIND != PLAIN) {
      const float scale = KIND == HEAD_NORM ? head_scale(fused, 0, c * 16) : 1.0f;
      UNROLL for (uint i = 0; i < 16; i++) v[i] *= NORM ? u[i] : scale;
      sum = sum16(v);
    }
    if (BITS == 4) scale_x4(v);
    dot_rows(now, v, sum, acc);
  }
  // The squares are added in the order of stage_rows.
  for (uint i = tid; NORM && i < a.cols / 4; i += 128) {
    const float4 q = ((DEVICE const float4*)from)[i];
    *squares = fma(q.w, q.w, fma(q.z, q.z, fma(q.y, q.y, fma(q.x, q.x, *squares))));
  }
}

// Like partial_fast, for FP8 and bf16.
template <uint TOKENS, uint KIND, uint FORMAT>
FN void partial_floats(CONSTANT Matrix& m, CONSTANT LinearArgs& a, uint row, uint first, DEVICE const float* x,
                       DEVICE const float* w, WeightPtrs bytes, bool split_k, THREAD const Fused& fused,
                       THREAD float* acc, THREAD float* squares THREAD_IDS_PARAM) {
  const bool NORM = KIND == NORMED || KIND == CONV;
  for (uint c = split_k ? tid : lane; c < a.cols / 16; c += split_k ? 128 : 32) {
    float v[TOKENS * 16];
    UNROLL for (uint t = 0; t < TOKENS; t++) {
      THREAD float* to = v + t * 16;
      load16(x + ulong(min(first + t, a.tokens - 1)) * a.cols + c * 16, to);
      float u[16], sum = 0;
      if (NORM) load16(w + c * 16, u);
      const float scale = KIND == HEAD_NORM ? head_scale(fused, t, c * 16) : 1.0f;
      UNROLL for (uint i = 0; i < 16; i++) {
        if (NORM) sum = fma(to[i], to[i], sum), to[i] *= u[i];
        if (KIND == HEAD_NORM) to[i] *= scale;
      }
      if (NORM) squares[t] += sum;
    }
    dot_floats<FORMAT, ROWS, TOKENS>(m, bytes, a.cols, row, c, v, acc);
  }
}

// Like partial_fast, for weights of any encoding.
template <uint TOKENS, uint KIND>
FN void partial_any(CONSTANT Matrix& m, CONSTANT LinearArgs& a, uint row, uint first, DEVICE const float* x,
                    DEVICE const float* w, WeightPtrs bytes, bool split_k, THREAD const Fused& fused, THREAD float* acc,
                    THREAD float* squares THREAD_IDS_PARAM) {
  const bool NORM = KIND == NORMED || KIND == CONV;
  const uint code_bytes = row_code_bytes(m, a.cols), scale_bytes = row_scale_bytes(m, a.cols);
  for (uint c = lane; c < (a.cols + 15) / 16; c += 32) {
    if (split_k && c / 32 % 4 != sg) continue;  // this loop needs fewer registers than one with a variable step
    UNROLL for (uint t = 0; t < TOKENS; t++)
      if (NORM) squares[t] += squares_any(x + ulong(min(first + t, a.tokens - 1)) * a.cols, c, a.cols);
    UNROLL for (uint r = 0; r < ROWS; r++) {
      const uint at = min(row + r, m.rows - 1);
      float u[16], v[16];
      unpack_chunk(m, bytes.codes + at * code_bytes, c, a.cols, u);
      const uint scales = scale_row(m, at) * scale_bytes;
      const float s = chunk_scale(m, bytes.scales + scales, c), b = chunk_bias(m, bytes.biases + scales, c);
      UNROLL for (uint t = 0; t < TOKENS; t++) {
        float sum = load_any<NORM>(x + ulong(min(first + t, a.tokens - 1)) * a.cols, w, c, a.cols, v);
        if (KIND == HEAD_NORM) {
          const float scale = head_scale(fused, t, c * 16);
          UNROLL for (uint i = 0; i < 16; i++) v[i] *= scale;
          sum = sum16(v);
        }
        float dot = 0;
        UNROLL for (uint i = 0; i < 16; i++) dot = fma(u[i], v[i], dot);
        THREAD float* to = acc + t * ROWS + r;
        *to = fma(b, sum, fma(s, dot, *to));
      }
    }
  }
}

// The body of the kernels: TOKENS rows of x times ROWS rows of matrix `m`, from `row`, per simdgroup (per threadgroup
// with split_k). The results go to column `start` + `row` of y. With ANY, the matrices of the launch have any
// encodings. With DIRECT, x is not staged.
template <uint TOKENS, uint KIND, bool ANY, bool DIRECT>
FN void linear(CONSTANT LinearArgs& a, CONSTANT Matrix& m, uint start, uint row, DEVICE const float* x,
               DEVICE const float* w, DEVICE float* y, DEVICE float* kept, WeightPtrs bytes, bool split_k,
               THREAD const Fused& fused, THREADGROUP float4* scratch, THREADGROUP float* sums,
               THREADGROUP float* part THREAD_IDS_PARAM) {
  const bool NORM = KIND == NORMED || KIND == CONV;
  const uint first = tgid.x * TOKENS;
  float squares[TOKENS], acc[TOKENS * ROWS], conv_weight[4] = {}, samples[4] = {};
  // One lane applies the convolution to one row of W.
  const bool mine = KIND == CONV && start == 0 && lane < ROWS && row + lane < m.rows && (!split_k || sg == 0);
  if (mine) load_samples(fused, m.rows, a.width, row + lane, conv_weight, samples);
  if (KIND == HEAD_NORM) {
    sum_quarters<TOKENS>(a, first, w, fused THREAD_IDS);
    if (ANY) BARRIER();  // otherwise the product has a barrier
  }
  UNROLL for (uint i = 0; i < TOKENS; i++) squares[i] = 0;
  UNROLL for (uint i = 0; i < TOKENS * ROWS; i++) acc[i] = 0;
  // A convolution leaves too few registers for both kinds of loads.
  const bool any = ANY && (KIND == CONV || !is_fast(m, a.cols));
  if (any && stores_floats(m, a.cols, FP8)) {
    partial_floats<TOKENS, KIND, FP8>(m, a, row, first, x, w, bytes, split_k, fused, acc, squares THREAD_IDS);
  } else if (any && stores_floats(m, a.cols, DENSE)) {
    partial_floats<TOKENS, KIND, DENSE>(m, a, row, first, x, w, bytes, split_k, fused, acc, squares THREAD_IDS);
  } else if (any) {
    partial_any<TOKENS, KIND>(m, a, row, first, x, w, bytes, split_k, fused, acc, squares THREAD_IDS);
  } else if (DIRECT && m.format == 4) {
    partial_direct<KIND, 4>(m, a, row, first, x, w, bytes, split_k, fused, acc, squares THREAD_IDS);
  } else if (DIRECT) {
    partial_direct<KIND, 8>(m, a, row, first, x, w, bytes, split_k, fused, acc, squares THREAD_IDS);
  } else if (m.format == 4) {
    partial_fast<TOKENS, KIND, 4>(m, a, row, first, x, w, bytes, split_k, fused, acc, squares, scratch,
                                  sums THREAD_IDS);
  } else {
    partial_fast<TOKENS, KIND, 8>(m, a, row, first, x, w, bytes, split_k, fused, acc, squares, scratch,
                                  sums THREAD_IDS);
  }
  if (NORM) {
    UNROLL for (uint t = 0; t < TOKENS; t++) {
      squares[t] = SIMD_SUM(squares[t]);
      if (any && !split_k) continue;  // each simdgroup has summed the whole row
      if (lane == 0) part[t * 4 + sg] = squares[t];
    }
    BARRIER();
    UNROLL for (uint t = 0; t < TOKENS; t++)
      if (!any || split_k) squares[t] = part[t * 4] + part[t * 4 + 1] + part[t * 4 + 2] + part[t * 4 + 3];
  }
  UNROLL for (uint i = 0; i < TOKENS * ROWS; i++) acc[i] = SIMD_SUM(acc[i]);
  if (split_k) {
    BARRIER();
    UNROLL for (uint i = 0; i < TOKENS * ROWS; i++)
      if (lane == 0) sums[i * 4 + sg] = acc[i];
    BARRIER();
    UNROLL for (uint i = 0; i < TOKENS * ROWS; i++)
      acc[i] = sums[i * 4] + sums[i * 4 + 1] + sums[i * 4 + 2] + sums[i * 4 + 3];
  }
  UNROLL for (uint t = 0; t < TOKENS; t++) {
    const float scale = NORM ? 1.0f / sqrt(squares[t] / float(a.cols) + a.eps) : 1.0f;
    UNROLL for (uint r = 0; r < ROWS; r++) {
      const float sum = acc[t * ROWS + r] * scale;
      if (KIND == CONV && lane == r) samples[3] = sum;
      if (lane == 0 && (!split_k || sg == 0) && row + r < m.rows && first + t < a.tokens) {
        DEVICE float* out = y + ulong(first + t) * a.width + start + row + r;
        *out = a.add != 0 ? *out + sum : sum;
      }
    }
    if (!NORM || a.keep == 0 || first + t >= a.tokens) continue;
    const ulong from = ulong(first + t) * a.cols;
    for (uint i = tgid.y * 128 + tid; i < a.cols; i += a.keep * 128) kept[from + i] = x[from + i] * scale * w[i];
  }
  if (mine) convolve(fused, m.rows, row + lane, conv_weight, samples);
}

// Finds the matrix of a block of `size` rows, and the column `start` of its results in y.
FN uint find_matrix(CONSTANT LinearArgs& a, uint size, THREAD uint* block, THREAD uint* start) {
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

#define MATRICES(n)                                                                                                    \
  IN(uchar, c0, n), IN(uchar, s0, n + 1), IN(uchar, b0, n + 2), IN(uchar, c1, n + 3), IN(uchar, s1, n + 4),            \
  IN(uchar, b1, n + 5), IN(uchar, c2, n + 6), IN(uchar, s2, n + 7), IN(uchar, b2, n + 8), IN(uchar, c3, n + 9),        \
  IN(uchar, s3, n + 10), IN(uchar, b3, n + 11)

// The weights of matrix `i` of MATRICES.
#define PICK(i, p) (i == 0 ? p##0 : i == 1 ? p##1 : i == 2 ? p##2 : p##3)
#define WEIGHT_PTRS(i) {PICK(i, c), PICK(i, s), PICK(i, b)}

// The body of a kernel with arguments `args`, `fused`, x, w, y, kept and skip.
#define PRODUCT(TOKENS, KIND, ANY, DIRECT)                                                                             \
  COPY(LinearArgs, a, args);                                                                                           \
  uint block = tgid.y, start = 0;                                                                                      \
  SHARED(float4, scratch, DIRECT ? 1 : STAGED_CHUNKS * 4);                                                             \
  SHARED(float, sums, DIRECT ? TOKENS * ROWS * 4 : STAGED_CHUNKS);                                                     \
  SHARED(float, part, TOKENS * 4);                                                                                     \
  const bool split_k = a.split_k != 0;                                                                                 \
  const uint size = split_k ? ROWS : BLOCK, i = find_matrix(args, size, &block, &start);                               \
  COPY(Matrix, m, args.m[i]);                                                                                          \
  const uint row = block * size + (split_k ? 0 : sg * ROWS);                                                           \
  const WeightPtrs bytes = WEIGHT_PTRS(i);                                                                             \
  if (!ANY && split_k) prefetch_rows<1>(bytes, m.format, m.rows, a.cols, row + sg);                                    \
  else if (!ANY) prefetch_rows<ROWS>(bytes, m.format, m.rows, a.cols, row);                                            \
  AWAIT();                                                                                                             \
  if (is_skipped(a.can_skip, skip)) return;                                                                            \
  linear<TOKENS, KIND, ANY, DIRECT>(a, m, start, row, x, w, y, kept, bytes, split_k, fused, scratch, sums,             \
                            part THREAD_IDS);

#define LINEAR(name, TOKENS, KIND, ANY, DIRECT)                                                                        \
  KERNEL(name, ARGS_IN_PLACE(LinearArgs, args), IN(float, x, 1), IN(float, w, 2), OUT(float, y, 3),                    \
         OUT(float, kept, 4), MATRICES(5), IN(uint, skip, 17)) {                                                       \
    const Fused fused = {};                                                                                            \
    PRODUCT(TOKENS, KIND, ANY, DIRECT)                                                                                 \
  }

LINEAR(gemv_1, 1, PLAIN, false, false)
LINEAR(gemv_2, 2, PLAIN, false, false)
LINEAR(gemv_norm_1, 1, NORMED, false, false)
LINEAR(gemv_norm_2, 2, NORMED, false, false)
LINEAR(gemv_any_1, 1, PLAIN, true, false)
LINEAR(gemv_any_2, 2, PLAIN, true, false)
LINEAR(gemv_any_norm_1, 1, NORMED, true, false)
LINEAR(gemv_any_norm_2, 2, NORMED, true, false)
LINEAR(gemv_direct_1, 1, PLAIN, false, true)
LINEAR(gemv_direct_norm_1, 1, NORMED, false, true)

#define LINEAR_CONV(name, ANY, DIRECT)                                                                                 \
  KERNEL(name, ARGS_IN_PLACE(ConvArgs, b), IN(float, x, 1), IN(float, w, 2), OUT(float, y, 3),                         \
         IN(float, conv_weight, 4), IN(float, replay, 5), OUT(float, state, 6), OUT(float, mixed, 7), MATRICES(8),     \
         IN(uint, skip, 20)) {                                                                                         \
    CONSTANT LinearArgs& args = b.product;                                                                             \
    const Fused fused = {conv_weight, replay, state, mixed, b.replay, 0, 0, 0, 0};                                     \
    DEVICE float* kept = y;                                                                                            \
    PRODUCT(1, CONV, ANY, DIRECT)                                                                                      \
  }

LINEAR_CONV(gemv_conv, false, false)
LINEAR_CONV(gemv_any_conv, true, false)
LINEAR_CONV(gemv_direct_conv, false, true)

#define LINEAR_HEADS(name, TOKENS, ANY, DIRECT)                                                                        \
  KERNEL(name, ARGS_IN_PLACE(HeadsArgs, b), IN(float, x, 1), IN(float, w, 2), OUT(float, y, 3), MATRICES(4),           \
         IN(uint, skip, 16)) {                                                                                         \
    SHARED(float, quarters, TOKENS * 4 * MAX_HEADS);                                                                   \
    CONSTANT LinearArgs& args = b.product;                                                                             \
    const Fused fused = {0, 0, 0, 0, 0, b.heads, b.size, b.eps, quarters};                                             \
    DEVICE float* kept = y;                                                                                            \
    PRODUCT(TOKENS, HEAD_NORM, ANY, DIRECT)                                                                            \
  }

LINEAR_HEADS(gemv_head_norm_1, 1, false, false)
LINEAR_HEADS(gemv_head_norm_2, 2, false, false)
LINEAR_HEADS(gemv_any_head_norm_1, 1, true, false)
LINEAR_HEADS(gemv_any_head_norm_2, 2, true, false)
LINEAR_HEADS(gemv_direct_head_norm_1, 1, false, true)

#ifndef NO_TILES
// The products of this file on matrix units, from rows of halves and their scales (rows_to_half). Grid (ceil(tokens /
// 64), sum over matrices of ceil(rows / 64)), 128 threads.
enum { GEMM_TILES = 4 };

// A threadgroup computes GEMM_TILES * 16 rows of y by TILE_WIDTH columns. A thread loads half of row `mine` of W.
template <bool ANY>
FN void gemm_block(CONSTANT LinearArgs& a, CONSTANT Matrix& m, uint start, uint block, DEVICE const uint* x,
                   DEVICE const float* scale, DEVICE float* y, WeightPtrs bytes,
                   THREADGROUP uint4* scratch THREAD_IDS_PARAM) {
  const uint first = tgid.x * GEMM_TILES * 16, row = block * TILE_WIDTH, mine = min(row + tid / 2, m.rows - 1);
  uint from[GEMM_TILES];
  UNROLL for (uint i = 0; i < GEMM_TILES; i++) from[i] = min(first + i * 16 + tid / 8, a.tokens - 1);
  const uint count = GEMM_TILES * 16;
  if (ANY && !is_fast(m, a.cols)) tile_matmul<GEMM_TILES, 0>(m, bytes, mine, a.cols, x, from, count, scratch THREAD_IDS);
  else if (m.format == 4) tile_matmul<GEMM_TILES, 4>(m, bytes, mine, a.cols, x, from, count, scratch THREAD_IDS);
  else tile_matmul<GEMM_TILES, 8>(m, bytes, mine, a.cols, x, from, count, scratch THREAD_IDS);
  THREADGROUP const float* sums = (THREADGROUP const float*)scratch;
  for (uint n = tid; n < count * TILE_WIDTH; n += 128) {
    const uint token = first + n / TILE_WIDTH, column = row + n % TILE_WIDTH;
    if (token >= a.tokens || column >= m.rows) continue;
    const float sum = sums[n / TILE_WIDTH * SUM_PITCH + n % TILE_WIDTH] * scale[token];
    DEVICE float* out = y + ulong(token) * a.width + start + column;
    *out = a.add != 0 ? *out + sum : sum;
  }
}

#define GEMM(name, ANY)                                                                                                \
  KERNEL(name, ARGS_IN_PLACE(LinearArgs, args), IN(uint, x, 1), IN(float, scale, 2), OUT(float, y, 3), MATRICES(4)) {  \
    COPY(LinearArgs, a, args);                                                                                         \
    SHARED(uint4, scratch, TileScratch<GEMM_TILES>::SIZE);                                                             \
    AWAIT();                                                                                                           \
    uint block = tgid.y, start = 0;                                                                                    \
    const uint i = find_matrix(args, TILE_WIDTH, &block, &start);                                                      \
    COPY(Matrix, m, args.m[i]);                                                                                        \
    const WeightPtrs bytes = WEIGHT_PTRS(i);                                                                           \
    gemm_block<ANY>(a, m, start, block, x, scale, y, bytes, scratch THREAD_IDS);                                       \
  }

GEMM(gemm, false)
GEMM(gemm_any, true)
#endif
