#if defined(QUAD_FMA) && !defined(NO_TILES)
// Products of the rows of a short prompt on matrix units, for 4 and 8 bits in groups of 64. `gemm` waits for the
// weights of one step at a time, and its blocks are too few to hide that if a prompt has few rows. These kernels copy
// weights and rows of x to threadgroup memory several steps ahead. A simdgroup unpacks its rows of W to registers. The
// instructions and the order of each sum are those of `gemm`, so the results have the same bytes.

// Words per row of x and per row of codes in a step, so that simdgroups read from different banks. Words of eight rows
// of W in a step: 64 bytes of codes, a word of scales and one of offsets for each row.
enum { X_PITCH = 68, CODES_PITCH = 20, STRIP = 8 * CODES_PITCH + 16 };

// The part of N * 8 rows of W that a lane copies: a quarter of a step of codes of N rows, and scales or offsets of one
// row.
template <uint N> struct StripPtrs { DEVICE const uchar *codes[N], *scales; };

// Starts to copy a step of N * 8 rows of W and moves the pointers to codes. `shift` is 1 if two steps share a word of
// scales.
template <uint N>
FN void copy_strips(THREAD StripPtrs<N>& from, uint step, uint shift, THREADGROUP uint* to THREAD_IDS_PARAM) {
  UNROLL for (uint n = 0; n < N; n++) {
    ASYNC_COPY((THREADGROUP uint4*)(to + n * STRIP + lane / 4 * CODES_PITCH + lane % 4 * 4),
               (DEVICE const uint4*)from.codes[n]);
    from.codes[n] += 64;
  }
  if (lane < N * 16)
    ASYNC_COPY(to + lane / 16 * STRIP + 8 * CODES_PITCH + lane % 16,
               (DEVICE const uint*)(from.scales + (step >> shift) * 4));
}

// The chunks of 16 bytes that a thread copies of a step of TILES * 16 rows of x. A step has CHUNKS * 8 columns.
template <uint TILES, uint SIMDS, uint CHUNKS> struct RowPtrs {
  enum : uint { ALL = TILES * 16 * CHUNKS, COUNT = (ALL + SIMDS * 32 - 1) / (SIMDS * 32) };
  DEVICE const uint4* chunks[COUNT];
};

template <uint TILES, uint SIMDS, uint CHUNKS>
FN void find_rows(CONSTANT LinearArgs& a, DEVICE const uint* x,
                  THREAD RowPtrs<TILES, SIMDS, CHUNKS>& rows THREAD_IDS_PARAM) {
  UNROLL for (uint i = 0; i < rows.COUNT; i++) {
    const uint chunk = tid + i * SIMDS * 32;
    const uint token = min(tgid.x * (TILES * 16) + chunk / CHUNKS, a.tokens - 1);
    rows.chunks[i] = (DEVICE const uint4*)(x + ulong(token) * (a.cols / 2)) + chunk % CHUNKS;
  }
}

// Starts to copy a step of the rows of x and moves their pointers.
template <uint TILES, uint SIMDS, uint CHUNKS>
FN void copy_rows(THREAD RowPtrs<TILES, SIMDS, CHUNKS>& rows, THREADGROUP uint* to THREAD_IDS_PARAM) {
  UNROLL for (uint i = 0; i < rows.COUNT; i++) {
    const uint chunk = tid + i * SIMDS * 32;
    if (chunk < rows.ALL)
      ASYNC_COPY((THREADGROUP uint4*)(to + chunk / CHUNKS * X_PITCH + chunk % CHUNKS * 4), rows.chunks[i]);
    rows.chunks[i] += CHUNKS;
  }
}

// Reads the codes of a group of a row of W that a lane unpacks: for each 16 columns, two words whose byte lane % 4 has
// the codes, or two words with two 8-bit codes.
template <uint BITS> FN void read_codes(THREADGROUP const uint* from, THREAD uint* to THREAD_IDS_PARAM) {
  UNROLL for (uint i = 0; i < 2; i++) {
    if (BITS == 8) continue;
    const uint4 four = ((THREADGROUP const uint4*)from)[i];
    to[4 * i] = four.x, to[4 * i + 1] = four.y, to[4 * i + 2] = four.z, to[4 * i + 3] = four.w;
  }
  UNROLL for (uint i = 0; i < 8; i++)
    if (BITS == 8) to[i] = ((THREADGROUP const ushort*)from)[i * 4 + lane % 4];
}

// Unpacks two columns, as unpack_half does. Before the sum, the second 4-bit code is multiplied by 16, and its scale by
// 1/16. Both are exact.
template <uint BITS> FN uint unpack_two(uint codes, float s, float b THREAD_IDS_PARAM) {
  if (BITS == 8) return HALF2(fma(s, MASKED(codes, 255u), b), fma(s, MASKED(codes >> 8, 255u), b));
  const uint q = codes >> lane % 4 * 8;
  return HALF2(fma(s, MASKED(q, 15u), b), fma(s * 0.0625f, MASKED(q, 240u), b));
}

// Multiplies TILES * 16 rows of x by N * 8 rows of W per simdgroup. The first copies of W are under way. All reads of a
// group come before its products, because a compiler keeps their order.
template <uint TILES, uint N, uint SIMDS, uint STAGES, uint BITS>
FN void strip_product(CONSTANT LinearArgs& a, DEVICE const uint* x, THREAD StripPtrs<N>& from, THREADGROUP uint* stages,
                      THREAD float* sums THREAD_IDS_PARAM) {
  enum { CHUNKS = 64 / BITS, ROWS_OF_X = TILES * 16 * X_PITCH, SIZE = ROWS_OF_X + SIMDS * N * STRIP };
  const uint steps = a.cols / (CHUNKS * 8), mine = ROWS_OF_X + sg * (N * STRIP);
  RowPtrs<TILES, SIMDS, CHUNKS> rows;
  find_rows(a, x, rows THREAD_IDS);
  UNROLL for (uint n = 0; n < STAGES - 1; n++) {
    if (n < steps) copy_rows(rows, stages + n * SIZE THREAD_IDS);
    ASYNC_COMMIT();
  }
  UNROLL for (uint i = 0; i < TILES * N * 4; i++) sums[i] = 0;
  uint stage = 0;
  for (uint step = 0; step < steps; step++) {
    ASYNC_WAIT(STAGES - 2);
    BARRIER();
    if (step + STAGES - 1 < steps) {
      THREADGROUP uint* to = stages + (stage == 0 ? STAGES - 1 : stage - 1) * SIZE;
      copy_strips<N>(from, step + STAGES - 1, BITS / 8, to + mine THREAD_IDS);
      copy_rows(rows, to THREAD_IDS);
    }
    ASYNC_COMMIT();
    THREADGROUP const uint* xs = stages + stage * SIZE;
    stage = stage == STAGES - 1 ? 0 : stage + 1;
    UNROLL for (uint u = 0; u < CHUNKS / 8; u++) {
      uint codes[N * 8], left[TILES * 16];
      float s[N], b[N];
      UNROLL for (uint n = 0; n < N; n++) {
        THREADGROUP const uint* strip = xs + mine + n * STRIP;
        read_codes<BITS>(strip + lane / 4 * CODES_PITCH + u * 8, codes + n * 8 THREAD_IDS);
        const uint2 two = *(THREADGROUP const uint2*)(strip + 8 * CODES_PITCH + lane / 4 * 2);
        const bool high = BITS == 4 ? u == 1 : step % 2 != 0;
        s[n] = as_type<float>(high ? two.x & 0xffff0000u : two.x << 16);
        b[n] = as_type<float>(high ? two.y & 0xffff0000u : two.y << 16);
      }
      UNROLL for (uint i = 0; i < TILES * 4; i++)
        QUAD_LOAD(left + i * 4, xs + i / 4 * 16 * X_PITCH + u * 32 + i % 4 * 8, X_PITCH);
      UNROLL for (uint j = 0; j < DEPTH / 16; j++) {
        UNROLL for (uint n = 0; n < N; n++) {
          const uint first = unpack_two<BITS>(codes[n * 8 + j * 2], s[n], b[n] THREAD_IDS);
          const uint second = unpack_two<BITS>(codes[n * 8 + j * 2 + 1], s[n], b[n] THREAD_IDS);
          UNROLL for (uint t = 0; t < TILES; t++) {
            THREAD const uint* of = left + (t * 4 + j) * 4;
            THREAD float* to = sums + (t * N + n) * 4;
            QUAD_FMA(to, of[0], of[1], of[2], of[3], first, second);
          }
        }
      }
    }
  }
}

// Grid (ceil(tokens / (16 * TILES)), sum over matrices of ceil(rows / (8 * N * SIMDS))), SIMDS * 32 threads.
#define GEMM_SHORT(KIND_OF_KERNEL, name, TILES, N, SIMDS, STAGES)                                                      \
  KIND_OF_KERNEL(name, ARGS_IN_PLACE(LinearArgs, args), IN(uint, x, 1), IN(float, scale, 2), OUT(float, y, 3),         \
                 MATRICES(4)) {                                                                                        \
    COPY(LinearArgs, a, args);                                                                                         \
    enum { SIZE = TILES * 16 * X_PITCH + SIMDS * N * STRIP };                                                          \
    SHARED(uint4, memory, STAGES * SIZE / 4);                                                                          \
    THREADGROUP uint* stages = (THREADGROUP uint*)memory;                                                              \
    uint block = tgid.y, start = 0;                                                                                    \
    const uint i = find_matrix(args, SIMDS * N * 8, &block, &start);                                                   \
    COPY(Matrix, m, args.m[i]);                                                                                        \
    const WeightPtrs w = WEIGHT_PTRS(i);                                                                               \
    const uint row = (block * SIMDS + sg) * (N * 8), steps = a.cols * m.format / 512;                                  \
    StripPtrs<N> from;                                                                                                 \
    UNROLL for (uint n = 0; n < N; n++)                                                                                \
      from.codes[n] = w.codes + min(row + n * 8 + lane / 4, m.rows - 1) * (a.cols / 8 * m.format) + lane % 4 * 16;     \
    from.scales = (lane % 2 == 0 ? w.scales : w.biases) + min(row + lane / 2, m.rows - 1) * (a.cols / 32);             \
    UNROLL for (uint n = 0; n < STAGES - 1; n++) {                                                                     \
      THREADGROUP uint* to = stages + n * SIZE + TILES * 16 * X_PITCH + sg * (N * STRIP);                              \
      if (n < steps) copy_strips<N>(from, n, m.format / 8, to THREAD_IDS);                                             \
      ASYNC_COMMIT();                                                                                                  \
    }                                                                                                                  \
    AWAIT();                                                                                                           \
    float sums[TILES * N * 4];                                                                                         \
    if (m.format == 4) strip_product<TILES, N, SIMDS, STAGES, 4>(a, x, from, stages, sums THREAD_IDS);                 \
    else strip_product<TILES, N, SIMDS, STAGES, 8>(a, x, from, stages, sums THREAD_IDS);                               \
    UNROLL for (uint n = 0; n < TILES * N * 4; n++) {                                                                  \
      const uint token = tgid.x * (TILES * 16) + n / (N * 4) * 16 + n % 4 / 2 * 8 + lane / 4;                          \
      const uint column = row + n / 4 % N * 8 + lane % 4 * 2 + n % 2;                                                  \
      if (token >= a.tokens || column >= m.rows) continue;                                                             \
      DEVICE float* out = y + ulong(token) * a.width + start + column;                                                 \
      const float sum = sums[n] * scale[token];                                                                        \
      *out = a.add != 0 ? *out + sum : sum;                                                                            \
    }                                                                                                                  \
  }

GEMM_SHORT(KERNEL, gemm_short_16, 1, 1, 8, 4)
GEMM_SHORT(WIDE_KERNEL, gemm_short_32, 2, 2, 4, 3)
GEMM_SHORT(WIDE_KERNEL, gemm_short_64, 4, 2, 4, 2)
#endif
