#if defined(QUAD_FMA) && !defined(NO_TILES)
// Products of decoded and drafted rows on matrix units, for 4 and 8 bits in groups of 64, and for FP8, mxfp4 and bf16.
// Codes become halves, which is exact (for bf16, see unpack_bf16). A value of x is the sum of two halves, so the result
// is as exact as in f32. W is the left factor: a tile has 16 rows of W. The right factor has eight columns, two for
// each of four rows of x, so a weight is unpacked once for all rows. A column of a tile depends on no other column, so
// neither does a row's result.
//
// A dot product may add the columns of one unit in any order. Lane t of a quad takes quarter t of its row's unit and
// unpacks pairs of codes directly to registers of the left factor. split_rows stores the columns of x in that order. A
// unit is a group of 64 columns, or 32 columns in FP8, mxfp4 and bf16: the order depends on the formats of the launch.
//
// Each simdgroup copies its codes to threadgroup memory one or three steps ahead. The first copies begin before AWAIT.

// PART: words of a tile's first or last halves of a group.
enum { PART = 128 };

// Sources of the rows: x, x times a norm's weights, x times 1 / rms of each head, silu(gate) * up.
enum { SPLIT_PLAIN, SPLIT_NORMED, SPLIT_HEADS, SPLIT_SWIGLU };

// `has_units_of_32`: the order of the columns.
struct SplitArgs { uint cols, stride, source, heads, size; float eps; uint has_units_of_32; };

// 1 / rms of the head of a column, from its sums of squares, in the order of gated_rms_norm. Eight sums are loaded
// together.
FN float head_factor(CONSTANT SplitArgs& a, DEVICE const float* squares, uint row, uint column) {
  const uint count = a.size / 4, quarter = (count + 3) / 4;
  DEVICE const float* from = squares + ulong(row) * count * a.heads + column / a.size;
  float total = 0;
  UNROLL for (uint q = 0; q < 4; q++) {
    const uint end = min((q + 1) * quarter, count);
    float sum = 0;
    for (uint i = q * quarter; i < end; i += 8) {
      float v[8];
      UNROLL for (uint j = 0; j < 8; j++) v[j] = i + j < end ? from[(i + j) * a.heads] : 0.0f;
      UNROLL for (uint j = 0; j < 8; j++) sum += v[j];
    }
    total += sum;
  }
  return 1.0f / sqrt(total / float(a.size) + a.eps);
}

// Splits rows into halves. Each group has its own power of two, which brings its largest value into [2^14, 2^15), so
// that the second halves lose less than 2^-38 of it. `factors` has the sum of each group and the inverse of its power
// of two, `squares` the sum of the squares of x. In units of 64, every second pair of columns is divided by 16, because
// unpack_quad multiplies its codes by 16. A simdgroup has one group, and a lane one pair of columns, four columns
// apart. `halves` and `factors` are stored by tile of rows, group, and lane of the product. Grid (ceil(groups / 4),
// rows), 128 threads.
KERNEL(split_rows, ARGS(SplitArgs, a), IN(float, x, 1), IN(float, w, 2), OUT(uint, halves, 3), OUT(float, factors, 4),
       OUT(float, squares, 5)) {
  const uint group = tgid.x * 4 + sg, groups = a.cols / GROUP, quarter = lane / 8, side = lane / 4 % 2, step = lane % 4;
  AWAIT();
  if (group >= groups) return;
  float v[2], sum = 0, square = 0, max_abs = 0, factor = 1;
  // A head has a multiple of 16 columns, so both columns are in the same head.
  if (a.source == SPLIT_HEADS) factor = head_factor(a, w, tgid.y, group * GROUP + quarter * 16 + side * 8);
  UNROLL for (uint i = 0; i < 2; i++) {
    const uint column = group * GROUP + quarter * 16 + side * 8 + step + i * 4;
    DEVICE const float* from = x + ulong(tgid.y) * a.stride + column;
    v[i] = from[0];
    square = fma(v[i], v[i], square);
    if (a.source == SPLIT_NORMED) v[i] *= w[column];
    if (a.source == SPLIT_HEADS) v[i] *= factor;
    if (a.source == SPLIT_SWIGLU) v[i] = silu(v[i]) * from[a.cols];
    sum += v[i];
    max_abs = max(max_abs, v[i] < 0 ? -v[i] : v[i]);
  }
  sum = SIMD_SUM(sum), square = SIMD_SUM(square), max_abs = SIMD_MAX(max_abs);
  const uint power = max(as_type<uint>(max_abs) >> 23, 15u);
  const float up = as_type<float>((268u - power) << 23);
  const float times = step % 2 == 0 || a.has_units_of_32 != 0 ? up : up * 0.0625f;
  float rest[2];
  UNROLL for (uint i = 0; i < 2; i++) v[i] *= times;
  const uint first = HALF2(v[0], v[1]);
  rest[0] = v[0] - f16(first & 0xffffu), rest[1] = v[1] - f16(first >> 16);
  const ulong tile = ulong(tgid.y / TILE_ROWS) * groups + group;
  const uint row = tgid.y % TILE_ROWS;
  DEVICE uint* to = halves + tile * (2 * PART) + row * 32;
  to += a.has_units_of_32 != 0 ? quarter / 2 * PART + quarter % 2 * 8 + side * 4 + step
                               : step / 2 * PART + quarter * 4 + step % 2 * 2 + side;
  to[0] = first, to[16] = HALF2(rest[0], rest[1]);
  if (lane != 0) return;
  DEVICE float* of_row = factors + (tile * TILE_ROWS + row) * 2;
  of_row[0] = sum, of_row[1] = as_type<float>((power - 14u) << 23);
  squares[ulong(tgid.y) * groups + group] = square;
}

// Multiplies MT * 16 rows of W by NT tiles of x, for steps `begin`..`end`. The first copies are under way. The sums go
// to `total`: for each 16 rows of W and tile, this lane's two rows of W.
template <uint NT, uint MT, uint STAGES, uint FORMAT>
FN void quad_product(CONSTANT LinearArgs& a, uint float_type, uint begin, uint end, THREAD StepPtrs<MT>& from,
                     THREADGROUP uint* stages, DEVICE const uint* halves, DEVICE const float* factors,
                     THREAD float* total THREAD_IDS_PARAM) {
  enum : uint { UNITS = StepShape<FORMAT>::UNITS, MULS = StepShape<FORMAT>::MULS };
  const uint groups = a.cols / GROUP;
  // Lanes without a row of x repeat the last one. They change no other column and are not stored.
  uint x_at[NT], factor_at[NT];
  UNROLL for (uint n = 0; n < NT; n++) {
    const uint tile = min(tgid.x * NT + n, (a.tokens - 1) / TILE_ROWS), last = a.tokens - 1 - tile * TILE_ROWS;
    x_at[n] = tile * groups * (2 * PART) + min(lane / 8, last) * 32 + lane % 8 * 4;
    factor_at[n] = (tile * groups * TILE_ROWS + min(lane % 4, last)) * 2;
  }
  // With two tiles of W and four of x, no register is left.
  const uint ones = MT * NT < 8 ? IN_REGISTER(CODE_ONES) : CODE_ONES, eighth = eighth_at(lane);
  halves += begin * (UNITS * MULS / 2 * PART), factors += begin * (UNITS * MULS) / 4 * (2 * TILE_ROWS);
  UNROLL for (uint i = 0; i < MT * NT * 2; i++) total[i] = 0;
  for (uint step = begin; step < end; step++) {
    float scale[MT];
    UNROLL for (uint m = 0; m < MT; m++)
      scale[m] = FORMAT == FP8 ? load_float(from.scales[m], float_type, step * 64 / FP8_BLOCK) : 1.0f;
    ASYNC_WAIT(STAGES - 2);
    const uint ahead = step + STAGES - 1, stage = (step - begin) % STAGES, free = (stage + STAGES - 1) % STAGES;
    if (ahead < end) copy_step(from, FORMAT, ahead, stages + free * (MT * STAGE) THREAD_IDS);
    ASYNC_COMMIT();
    UNROLL for (uint u = 0; u < UNITS; u++) {
      uint x[NT * MULS * 2];
      UNROLL for (uint i = 0; i < NT * MULS / 2; i++) {
        const uint n = i / (MULS / 2), part = u * (MULS / 2) + i % (MULS / 2);
        const uint4 four = *(DEVICE const uint4*)(halves + x_at[n] + part * PART);
        x[4 * i] = four.x, x[4 * i + 1] = four.y, x[4 * i + 2] = four.z, x[4 * i + 3] = four.w;
      }
      UNROLL for (uint m = 0; m < MT; m++) {
        uint low[MULS * 4];
        float s[2], b[2];
        read_unit<FORMAT>(stages + (stage * MT + m) * STAGE, eighth, u, step % 2 != 0, scale[m], ones, low, s,
                          b THREAD_IDS);
        THREAD const uint* high = low + MULS * 2;
        UNROLL for (uint n = 0; n < NT; n++) {
          const uint2 factor = *(DEVICE const uint2*)(factors + factor_at[n] + u * MULS / 4 * (2 * TILE_ROWS));
          const float sum = as_type<float>(factor.x), inverse = as_type<float>(factor.y);
          THREAD const uint* right = x + n * (MULS * 2);
          float c[4];
          QUAD_MUL(c, low[0], high[0], low[1], high[1], right[0], right[1]);
          UNROLL for (uint j = 2; j < MULS * 2; j += 2)
            QUAD_FMA(c, low[j], high[j], low[j + 1], high[j + 1], right[j], right[j + 1]);
          UNROLL for (uint r = 0; r < 2; r++) {
            THREAD float* to = total + (m * NT + n) * 2 + r;
            const float dot = c[2 * r] + c[2 * r + 1];
            *to = FORMAT < MXFP4 ? fma(b[r], sum, fma(s[r], dot * inverse, *to)) : fma(s[r] * inverse, dot, *to);
          }
        }
      }
    }
    halves += UNITS * MULS / 2 * PART;
    factors += FORMAT == DENSE ? step % 2 * (2 * TILE_ROWS) : UNITS * MULS / 4 * (2 * TILE_ROWS);
  }
}

// 1 / rms of each row of x of this threadgroup, or 1 if the rows are not normed.
template <uint NT, uint SIMDS>
FN void row_scales(CONSTANT LinearArgs& a, DEVICE const float* squares, THREADGROUP float* scales THREAD_IDS_PARAM) {
  const uint groups = a.cols / GROUP;
  for (uint t = sg; t < NT * TILE_ROWS; t += SIMDS) {
    float sum = 0;
    DEVICE const float* from = squares + ulong(min(tgid.x * (NT * TILE_ROWS) + t, a.tokens - 1)) * groups;
    if (a.keep != 0)
      for (uint g = lane; g < groups; g += 32) sum += from[g];
    sum = SIMD_SUM(sum);
    if (lane == 0) scales[t] = a.keep != 0 ? 1.0f / sqrt(sum / float(a.cols) + a.eps) : 1.0f;
  }
}

// Adds the sums of the simdgroups that share `count` blocks of rows of W, in order, and stores them. `part` has the
// sums of all simdgroups, and `row` is the first row of W.
template <uint NT, uint MT, uint KIND, uint SIMDS>
FN void store_sums(CONSTANT LinearArgs& a, CONSTANT Matrix& m, uint start, uint row, uint count,
                   THREADGROUP const float* part, THREADGROUP const float* scales, DEVICE float* y,
                   THREAD const Fused& fused THREAD_IDS_PARAM) {
  enum { SUMS = MT * NT * 64 };
  for (uint i = tid; i < SUMS * count; i += SIMDS * 32) {
    const uint j = i % SUMS, t = j / 64 % NT * TILE_ROWS + j % 4, token = tgid.x * (NT * TILE_ROWS) + t;
    const uint r = row + (i / SUMS * MT + j / (64 * NT)) * 16 + j / 32 % 2 * 8 + j % 32 / 4;
    if (token >= a.tokens || r >= m.rows) continue;
    float sum = 0;
    for (uint k = 0; k < a.split_k; k++) sum += part[(i / SUMS * a.split_k + k) * SUMS + j];
    sum *= scales[t];
    DEVICE float* out = y + ulong(token) * a.width + start + r;
    *out = a.add != 0 ? *out + sum : sum;
    if (KIND != CONV || start != 0) continue;
    float conv_weight[4], samples[4];
    load_samples(fused, m.rows, a.width, r, conv_weight, samples);
    samples[3] = sum;
    convolve(fused, m.rows, r, conv_weight, samples);
  }
}

#define QUAD_PRODUCT(NT, MT, STAGES, FORMAT)                                                                           \
  quad_product<NT, MT, STAGES, FORMAT>(a, m.float_type, begin, end, from, stages, halves, factors, total THREAD_IDS);

// The body of a kernel with arguments `args`, `fused`, halves, factors, squares, y and skip. args.split_k simdgroups
// share the columns of a block of MT * 16 rows of W. STAGES: steps in threadgroup memory. With FLOATS, the formats are
// FP8, mxfp4 and bf16.
#define QUADS(NT, MT, KIND, SIMDS, STAGES, FLOATS)                                                                     \
  COPY(LinearArgs, a, args);                                                                                           \
  SHARED(uint4, memory, SIMDS * STAGES * MT * STAGE / 4);                                                              \
  SHARED(float, scales, NT * TILE_ROWS);                                                                               \
  uint block = tgid.y, start = 0;                                                                                      \
  const uint count = SIMDS / a.split_k, i = find_matrix(args, count * MT * 16, &block, &start);                        \
  COPY(Matrix, m, args.m[i]);                                                                                          \
  const WeightPtrs w = WEIGHT_PTRS(i);                                                                                 \
  const uint format = FLOATS || m.format == 8 ? m.format : 4;                                                          \
  const uint bits = !FLOATS ? format : format == FP8 ? 8 : format == MXFP4 ? 4 : 16;                                   \
  const uint steps = a.cols * bits / 512, each = (steps + a.split_k - 1) / a.split_k;                                  \
  const uint first = block * count * MT * 16, row = first + sg / a.split_k * MT * 16;                                  \
  const uint begin = min(sg % a.split_k * each, steps), end = min(begin + each, steps);                                \
  THREADGROUP uint* stages = (THREADGROUP uint*)memory + sg * (STAGES * MT * STAGE);                                   \
  StepPtrs<MT> from;                                                                                                   \
  UNROLL for (uint n = 0; n < MT; n++) {                                                                               \
    UNROLL for (uint r = 0; r < 2; r++)                                                                                \
      from.codes[n * 2 + r] = w.codes + min(row + n * 16 + r * 8 + lane / 4, m.rows - 1) * (a.cols / 8 * bits) +       \
                              begin * 64 + lane % 4 * 16;                                                              \
    const uint r = min(row + n * 16 + lane / 2, m.rows - 1);                                                           \
    from.scales[n] = (FLOATS || lane % 2 == 0 ? w.scales : w.biases) +                                                 \
                     (FLOATS ? scale_row(m, r) * row_scale_bytes(m, a.cols) : r * (a.cols / 32));                      \
  }                                                                                                                    \
  UNROLL for (uint n = 0; n < STAGES - 1; n++) {                                                                       \
    if (begin + n < end) copy_step(from, format, begin + n, stages + n * (MT * STAGE) THREAD_IDS);                     \
    ASYNC_COMMIT();                                                                                                    \
  }                                                                                                                    \
  AWAIT();                                                                                                             \
  if (is_skipped(a.can_skip, skip)) return;                                                                            \
  row_scales<NT, SIMDS>(a, squares, scales THREAD_IDS);                                                                \
  float total[MT * NT * 2];                                                                                            \
  if (FLOATS && format == FP8) QUAD_PRODUCT(NT, MT, STAGES, FP8)                                                       \
  else if (FLOATS && format == MXFP4) QUAD_PRODUCT(NT, MT, STAGES, MXFP4)                                              \
  else if (FLOATS) QUAD_PRODUCT(NT, MT, STAGES, DENSE)                                                                 \
  else if (format == 4) QUAD_PRODUCT(NT, MT, STAGES, 4)                                                                \
  else QUAD_PRODUCT(NT, MT, STAGES, 8)                                                                                 \
  BARRIER();                                                                                                           \
  THREADGROUP float* part = (THREADGROUP float*)memory;                                                                \
  UNROLL for (uint n = 0; n < MT * NT * 2; n++) part[(sg * (MT * NT * 2) + n) * 32 + lane] = total[n];                 \
  BARRIER();                                                                                                           \
  store_sums<NT, MT, KIND, SIMDS>(a, m, start, first, count, part, scales, y, fused THREAD_IDS);

// Grid (ceil(rows of x / (4 * NT)), sum over matrices of ceil(rows / (16 * MT * SIMDS / split_k))), SIMDS * 32 threads.
// The number of simdgroups that share the columns depends on W only, and nothing else changes a result.
#define LINEAR_QUADS(KIND_OF_KERNEL, name, NT, MT, SIMDS, STAGES, FLOATS)                                              \
  KIND_OF_KERNEL(name, ARGS_IN_PLACE(LinearArgs, args), IN(uint, halves, 1), IN(float, factors, 2),                    \
                 IN(float, squares, 3), OUT(float, y, 4), MATRICES(5), IN(uint, skip, 17)) {                           \
    const Fused fused = {};                                                                                            \
    QUADS(NT, MT, PLAIN, SIMDS, STAGES, FLOATS)                                                                        \
  }

// `pair` and `trio` kernels have a half or a third as many simdgroups for the same rows of W, so they read x less often.
LINEAR_QUADS(KERNEL, gemv_tiles_4, 1, 1, 8, 2, false)
LINEAR_QUADS(WIDE_KERNEL, gemv_tiles_pair_4, 1, 2, 8, 2, false)
LINEAR_QUADS(WIDE_KERNEL, gemv_tiles_8, 2, 1, 8, 4, false)
LINEAR_QUADS(WIDE_KERNEL, gemv_tiles_pair_8, 2, 2, 8, 2, false)
LINEAR_QUADS(WIDEST_KERNEL, gemv_tiles_trio_8, 2, 3, 4, 2, false)
LINEAR_QUADS(WIDE_KERNEL, gemv_tiles_16, 4, 1, 8, 4, false)
LINEAR_QUADS(WIDEST_KERNEL, gemv_tiles_wide_16, 4, 2, 4, 4, false)
LINEAR_QUADS(KERNEL, gemv_tiles_floats_4, 1, 1, 8, 4, true)
LINEAR_QUADS(WIDE_KERNEL, gemv_tiles_floats_8, 2, 1, 8, 4, true)
LINEAR_QUADS(WIDE_KERNEL, gemv_tiles_floats_16, 4, 1, 8, 4, true)

#define CONV_QUADS(KIND_OF_KERNEL, name, MT, STAGES, FLOATS)                                                           \
  KIND_OF_KERNEL(name, ARGS_IN_PLACE(ConvArgs, b), IN(uint, halves, 1), IN(float, factors, 2), IN(float, squares, 3),  \
                 OUT(float, y, 4), IN(float, conv_weight, 5), IN(float, replay, 6), OUT(float, state, 7),              \
                 OUT(float, mixed, 8), MATRICES(9), IN(uint, skip, 21)) {                                              \
    CONSTANT LinearArgs& args = b.product;                                                                             \
    const Fused fused = {conv_weight, replay, state, mixed, b.replay, 0, 0, 0, 0};                                     \
    QUADS(1, MT, CONV, 8, STAGES, FLOATS)                                                                              \
  }

CONV_QUADS(KERNEL, gemv_tiles_conv, 1, 2, false)
CONV_QUADS(WIDE_KERNEL, gemv_tiles_pair_conv, 2, 2, false)
CONV_QUADS(KERNEL, gemv_tiles_floats_conv, 1, 4, true)
#endif
