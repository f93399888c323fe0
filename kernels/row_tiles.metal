#if defined(QUAD_FMA) && !defined(NO_TILES)
// Products of decoded and drafted rows on matrix units, for 4 and 8 bits in groups of 64. Codes become halves, which is
// exact. A value of x is the sum of two halves, so the result is as exact as in f32. W is the left factor: a tile has
// 16 rows of W. The right factor has eight columns, two for each of four rows of x, so a weight is unpacked once for
// all rows. A column of a tile depends on no other column, so neither does a row's result.
//
// A dot product may add the columns of one group in any order. Lane t of a quad loads quarter t of its row's group and
// unpacks pairs of codes directly to registers of the left factor. split_rows stores the columns of x in that order.

// GROUP: columns per scale. PART: words of the first or second halves of a group. SCALE_BITS: a power of two brings the
// largest value of a group into [2^14, 2^15), so that the second halves lose less than 2^-38 of it. AHEAD: steps
// between a prefetch and its use. MAX_SIMDS: most simdgroups of a threadgroup.
enum { GROUP = 64, PART = GROUP / 2, AHEAD = 4, MAX_SIMDS = 8 };

// Sources of the rows: x, x times a norm's weights, x times 1 / rms of each head, silu(gate) * up.
enum { SPLIT_PLAIN, SPLIT_NORMED, SPLIT_HEADS, SPLIT_SWIGLU };

struct SplitArgs { uint cols, stride, source, heads, size; float eps; };

// 1 / rms of the head of a column, from its sums of squares, in the order of gated_rms_norm.
FN float head_factor(CONSTANT SplitArgs& a, DEVICE const float* squares, uint row, uint column) {
  const uint count = a.size / 4, quarter = (count + 3) / 4;
  DEVICE const float* from = squares + ulong(row) * count * a.heads + column / a.size;
  float total = 0;
  for (uint q = 0; q < 4; q++) {
    float sum = 0;
    for (uint i = q * quarter; i < min((q + 1) * quarter, count); i++) sum += from[i * a.heads];
    total += sum;
  }
  return 1.0f / sqrt(total / float(a.size) + a.eps);
}

// Splits rows into halves. Each group has its own power of two. `factors` has the sum of each group and the inverse of
// its power of two, `squares` the sum of the squares of x. Every second pair of columns is divided by 16, because
// unpack_quad multiplies its codes by 16. A simdgroup has one group, and a lane one pair of columns, four columns
// apart. Grid (ceil(groups / 4), rows), 128 threads.
KERNEL(split_rows, ARGS(SplitArgs, a), IN(float, x, 1), IN(float, w, 2), OUT(uint, halves, 3), OUT(float, factors, 4),
       OUT(float, squares, 5)) {
  const uint group = tgid.x * 4 + sg, groups = a.cols / GROUP, quarter = lane / 8, side = lane / 4 % 2, step = lane % 4;
  AWAIT();
  if (group >= groups) return;
  float v[2], sum = 0, square = 0, max_abs = 0;
  UNROLL for (uint i = 0; i < 2; i++) {
    const uint column = group * GROUP + quarter * 16 + side * 8 + step + i * 4;
    DEVICE const float* from = x + ulong(tgid.y) * a.stride + column;
    v[i] = from[0];
    square = fma(v[i], v[i], square);
    if (a.source == SPLIT_NORMED) v[i] *= w[column];
    if (a.source == SPLIT_HEADS) v[i] *= head_factor(a, w, tgid.y, column);
    if (a.source == SPLIT_SWIGLU) v[i] = silu(v[i]) * from[a.cols];
    sum += v[i];
    max_abs = max(max_abs, v[i] < 0 ? -v[i] : v[i]);
  }
  sum = SIMD_SUM(sum), square = SIMD_SUM(square), max_abs = SIMD_MAX(max_abs);
  const uint power = max(as_type<uint>(max_abs) >> 23, 15u);
  const float up = as_type<float>((268u - power) << 23), times = step % 2 == 0 ? up : up * 0.0625f;
  float rest[2];
  UNROLL for (uint i = 0; i < 2; i++) v[i] *= times;
  const uint first = HALF2(v[0], v[1]);
  rest[0] = v[0] - f16(first & 0xffffu), rest[1] = v[1] - f16(first >> 16);
  const ulong at = ulong(tgid.y) * groups + group;
  DEVICE uint* to = halves + at * (2 * PART) + step / 2 * 16 + quarter * 4 + step % 2 * 2 + side;
  to[0] = first, to[PART] = HALF2(rest[0], rest[1]);
  if (lane == 0) factors[2 * at] = sum, factors[2 * at + 1] = as_type<float>((power - 14u) << 23), squares[at] = square;
}

// A step has 64 bytes of each row of codes: two groups of 4 bits, or one of 8. A lane has a quarter of each group of 2
// * MT rows of W.
template <uint BITS, uint MT> struct QuadRows { uint q[MT * 8], s[MT * 2], b[MT * 2]; };

// A lane's addresses in 2 * MT rows of codes, and its offsets in as many rows of scales.
template <uint MT> struct QuadPtrs { DEVICE const uchar* codes[MT * 2]; uint scales[MT * 2]; };

// Loads a step and moves to the next one.
template <uint BITS, uint MT>
FN void load_quads(WeightPtrs w, THREAD QuadPtrs<MT>& from, THREAD QuadRows<BITS, MT>& to) {
  UNROLL for (uint r = 0; r < MT * 2; r++) {
    if (BITS == 4) {
      UNROLL for (uint u = 0; u < 2; u++) {
        const uint2 two = STREAM((DEVICE const uint2*)(from.codes[r] + u * 32));
        to.q[r * 4 + 2 * u] = two.x, to.q[r * 4 + 2 * u + 1] = two.y;
      }
      to.s[r] = *(DEVICE const uint*)(w.scales + from.scales[r]);
      to.b[r] = *(DEVICE const uint*)(w.biases + from.scales[r]);
    } else {
      const uint4 four = STREAM((DEVICE const uint4*)from.codes[r]);
      to.q[r * 4] = four.x, to.q[r * 4 + 1] = four.y, to.q[r * 4 + 2] = four.z, to.q[r * 4 + 3] = four.w;
      to.s[r] = *(DEVICE const ushort*)(w.scales + from.scales[r]);
      to.b[r] = *(DEVICE const ushort*)(w.biases + from.scales[r]);
    }
    from.codes[r] += 64, from.scales[r] += 16 / BITS;
  }
}

// Unpacks a quarter of a group to halves: h[2 * j + i] has columns 8 i + j and 8 i + j + 4. For even j, the halves are
// q - 8 or q - 128; for odd j, they are 16 times that. The bits of a code become low bits of the mantissa of 1024 or
// 2^14.
template <uint BITS> FN void unpack_quad(THREAD const uint* q, THREAD uint* h) {
  UNROLL for (uint i = 0; i < 2; i++)
    UNROLL for (uint j = 0; j < 4; j++) {
      if (BITS == 4) {
        const uint w = q[i] >> j / 2 * 8;
        h[2 * j + i] = j % 2 == 0 ? HALF2_SUB((w & 0x000f000fu) | 0x64006400u, 0x64086408u)
                                  : HALF2_SUB((w & 0x00f000f0u) | 0x64006400u, 0x64806480u);
      } else {
        const uint w = (q[2 * i] >> 8 * j & 255u) | (q[2 * i + 1] >> 8 * j & 255u) << 16;
        h[2 * j + i] = j % 2 == 0 ? HALF2_SUB(w | 0x64006400u, 0x64806480u) : HALF2_SUB(w | 0x74007400u, 0x74807480u);
      }
    }
}

// Multiplies MT * 16 rows of W, from `row`, by NT * 4 rows of x, from `first`, for some steps. The sums go to `part`.
template <uint NT, uint MT, uint BITS>
FN void quad_product(CONSTANT LinearArgs& a, uint rows, uint row, uint first, uint begin, uint end, WeightPtrs w,
                     DEVICE const uint* halves, DEVICE const float* factors, THREADGROUP float* part THREAD_IDS_PARAM) {
  enum { GROUPS = 8 / BITS };  // per step
  const uint groups = a.cols / GROUP, quarter = lane % 4, column = lane / 4, ahead = min(row + lane, rows - 1);
  QuadPtrs<MT> from;
  UNROLL for (uint r = 0; r < MT * 2; r++) {
    const uint at = min(row + r * 8 + lane / 4, rows - 1);
    from.codes[r] = w.codes + at * (a.cols / 8 * BITS) + begin * 64 + quarter * (2 * BITS);
    from.scales[r] = at * (a.cols / 32) + begin * (16 / BITS);
  }
  DEVICE const uchar* line = w.codes + ahead * (a.cols / 8 * BITS) + (begin + AHEAD) * 64;
  // Columns of the tile after the last row of x repeat this row. They change no other column and are not stored.
  uint x_at[NT], factor_at[NT];
  UNROLL for (uint n = 0; n < NT; n++) {
    const uint mine = min(first + n * 4 + column / 2, a.tokens - 1), other = min(first + n * 4 + quarter, a.tokens - 1);
    x_at[n] = (mine * groups * 2 + column % 2) * PART + quarter * 4, factor_at[n] = other * groups * 2;
  }
  halves += begin * (GROUPS * 2 * PART), factors += begin * (GROUPS * 2);
  float total[MT * NT * 2];
  UNROLL for (uint i = 0; i < MT * NT * 2; i++) total[i] = 0;
  QuadRows<BITS, MT> next;
  if (begin < end) load_quads(w, from, next);
  for (uint step = begin; step < end; step++) {
    const QuadRows<BITS, MT> now = next;
    if (lane < MT * 16 && step % 2 == 0 && step + AHEAD < end) PREFETCH_LINE(line);
    line += 64;
    if (step + 1 < end) load_quads(w, from, next);
    UNROLL for (uint u = 0; u < GROUPS; u++) {
      uint h[MT * 16];
      float s[MT * 2], b[MT * 2];
      UNROLL for (uint r = 0; r < MT * 2; r++) {
        unpack_quad<BITS>(now.q + r * 4 + u * 2, h + r * 8);
        s[r] = as_type<float>(u == 0 ? now.s[r] << 16 : now.s[r] & 0xffff0000u);
        b[r] = as_type<float>(u == 0 ? now.b[r] << 16 : now.b[r] & 0xffff0000u);
        b[r] = fma(BITS == 4 ? 8.0f : 128.0f, s[r], b[r]);
      }
      UNROLL for (uint n = 0; n < NT; n++) {
        const uint4 x = *(DEVICE const uint4*)(halves + x_at[n] + u * (2 * PART));
        const uint4 y = *(DEVICE const uint4*)(halves + x_at[n] + u * (2 * PART) + 16);
        const uint2 factor = *(DEVICE const uint2*)(factors + factor_at[n] + u * 2);
        const float sum = as_type<float>(factor.x), inverse = as_type<float>(factor.y);
        UNROLL for (uint m = 0; m < MT; m++) {
          THREAD const uint* low = h + m * 16;
          THREAD const uint* high = low + 8;
          float c[4];
          UNROLL for (uint i = 0; i < 4; i++) c[i] = 0;
          QUAD_FMA(c, low[0], high[0], low[1], high[1], x.x, x.y);
          QUAD_FMA(c, low[2], high[2], low[3], high[3], x.z, x.w);
          QUAD_FMA(c, low[4], high[4], low[5], high[5], y.x, y.y);
          QUAD_FMA(c, low[6], high[6], low[7], high[7], y.z, y.w);
          UNROLL for (uint r = 0; r < 2; r++) {
            THREAD float* to = total + (m * NT + n) * 2 + r;
            *to = fma(s[m * 2 + r], (c[2 * r] + c[2 * r + 1]) * inverse, *to);
            *to = fma(b[m * 2 + r], sum, *to);
          }
        }
      }
    }
    halves += GROUPS * 2 * PART, factors += GROUPS * 2;
  }
  UNROLL for (uint i = 0; i < MT * NT * 2; i++) part[(sg * (MT * NT * 2) + i) * 32 + lane] = total[i];
}

// The body of the kernels: a block of MT * 16 rows of matrix `m`, from `row`. args.split_k is the number of simdgroups.
template <uint NT, uint MT, uint KIND>
FN void quad_block(CONSTANT LinearArgs& a, CONSTANT Matrix& m, uint start, uint row, uint begin, uint end,
                   WeightPtrs bytes, DEVICE const uint* halves, DEVICE const float* factors,
                   DEVICE const float* squares, DEVICE float* y, THREAD const Fused& fused, THREADGROUP float* part,
                   THREADGROUP float* scales THREAD_IDS_PARAM) {
  const uint first = tgid.x * (NT * 4), groups = a.cols / GROUP, simds = a.split_k;
  for (uint t = sg; t < NT * 4; t += simds) {
    float sum = 0;
    DEVICE const float* from = squares + ulong(min(first + t, a.tokens - 1)) * groups;
    if (a.keep != 0)
      for (uint g = lane; g < groups; g += 32) sum += from[g];
    sum = SIMD_SUM(sum);
    if (lane == 0) scales[t] = a.keep != 0 ? 1.0f / sqrt(sum / float(a.cols) + a.eps) : 1.0f;
  }
  if (m.format == 4)
    quad_product<NT, MT, 4>(a, m.rows, row, first, begin, end, bytes, halves, factors, part THREAD_IDS);
  else quad_product<NT, MT, 8>(a, m.rows, row, first, begin, end, bytes, halves, factors, part THREAD_IDS);
  BARRIER();
  for (uint i = tid; i < MT * NT * 64; i += simds * 32) {
    const uint token = i / 64 % NT * 4 + i % 4, r = row + i / 64 / NT * 16 + i / 32 % 2 * 8 + i % 32 / 4;
    if (first + token >= a.tokens || r >= m.rows) continue;
    float sum = 0;
    for (uint k = 0; k < simds; k++) sum += part[k * (MT * NT * 64) + i];
    sum *= scales[token];
    DEVICE float* out = y + ulong(first + token) * a.width + start + r;
    *out = a.add != 0 ? *out + sum : sum;
    if (KIND != CONV || start != 0) continue;
    float conv_weight[4], samples[4];
    load_samples(fused, m.rows, a.width, r, conv_weight, samples);
    samples[3] = sum;
    convolve(fused, m.rows, r, conv_weight, samples);
  }
}

// The body of a kernel with arguments `args`, `fused`, halves, factors, squares, y and skip.
#define QUADS(NT, MT, KIND)                                                                                            \
  COPY(LinearArgs, a, args);                                                                                           \
  SHARED(float, part, MAX_SIMDS * MT * NT * 64);                                                                       \
  SHARED(float, scales, NT * 4);                                                                                       \
  uint block = tgid.y, start = 0;                                                                                      \
  const uint i = find_matrix(args, MT * 16, &block, &start);                                                           \
  COPY(Matrix, m, args.m[i]);                                                                                          \
  const WeightPtrs bytes = WEIGHT_PTRS(i);                                                                             \
  const uint steps = a.cols * m.format / 512, each = (steps + 2 * a.split_k - 1) / (2 * a.split_k) * 2;                \
  const uint row = block * (MT * 16), begin = sg * each, end = min(begin + each, steps);                               \
  if (lane < MT * 16 && begin < end) {                                                                                 \
    const uint ahead = min(row + lane, m.rows - 1), scale = ahead * (a.cols / 32) + begin * 16 / m.format;             \
    for (uint n = 0; n < AHEAD && begin + n < end; n += 2)                                                             \
      PREFETCH_LINE(bytes.codes + ahead * (a.cols / 8 * m.format) + (begin + n) * 64);                                 \
    PREFETCH_LINE(bytes.scales + scale);                                                                               \
    PREFETCH_LINE(bytes.biases + scale);                                                                               \
  }                                                                                                                    \
  AWAIT();                                                                                                             \
  if (is_skipped(a.can_skip, skip)) return;                                                                            \
  quad_block<NT, MT, KIND>(a, m, start, row, begin, end, bytes, halves, factors, squares, y, fused, part,              \
                           scales THREAD_IDS);

// Grid (ceil(rows of x / (4 * NT)), sum over matrices of ceil(rows / (16 * MT))), 32 threads per simdgroup. The number
// of simdgroups and MT depend on the number of rows of W only, and a result depends on the number of simdgroups only.
#define LINEAR_QUADS(KIND_OF_KERNEL, name, NT, MT)                                                                     \
  KIND_OF_KERNEL(name, ARGS_IN_PLACE(LinearArgs, args), IN(uint, halves, 1), IN(float, factors, 2),                    \
                 IN(float, squares, 3), OUT(float, y, 4), MATRICES(5), IN(uint, skip, 17)) {                           \
    const Fused fused = {};                                                                                            \
    QUADS(NT, MT, PLAIN)                                                                                               \
  }

LINEAR_QUADS(KERNEL, gemv_tiles_4, 1, 1)
LINEAR_QUADS(KERNEL, gemv_tiles_8, 2, 1)
LINEAR_QUADS(WIDE_KERNEL, gemv_tiles_16, 4, 1)

#define LINEAR_QUADS_CONV(name, MT)                                                                                    \
  KERNEL(name, ARGS_IN_PLACE(ConvArgs, b), IN(uint, halves, 1), IN(float, factors, 2), IN(float, squares, 3),          \
         OUT(float, y, 4), IN(float, conv_weight, 5), IN(float, replay, 6), OUT(float, state, 7),                      \
         OUT(float, mixed, 8), MATRICES(9), IN(uint, skip, 21)) {                                                      \
    CONSTANT LinearArgs& args = b.product;                                                                             \
    const Fused fused = {conv_weight, replay, state, mixed, b.replay, 0, 0, 0, 0};                                     \
    QUADS(1, MT, CONV)                                                                                                 \
  }

LINEAR_QUADS_CONV(gemv_tiles_conv, 1)
#endif
