// Reading quantized weights in the encodings of MLX checkpoints. Part of every kernel file.
//
// A lane reads 16 consecutive values of a row at a time, a *chunk*. The n-bit codes of a chunk are n 16-bit words,
// and a chunk never crosses a group. Codes, scales and biases start at 16-byte boundaries. The length of a row of codes
// is a multiple of the bytes that one load reads.

// The value of an affine format is its number of bits.
enum Format { MXFP4 = 20, NVFP4 = 21, MXFP8 = 22, FP8 = 23, DENSE = 30 };
enum Float { F32 = 0, F16 = 1, BF16 = 2 };
enum { FP8_BLOCK = 128 };  // rows, and columns, that share a scale of FP8

// A weight matrix W [rows, cols] of y = x W^T. `float_type` is the type of scales and biases, or of the values if
// W is dense.
struct Matrix { uint rows, format, group, float_type; float global_scale; };

// Conversions from and to the float formats of weights and scales, bit pattern by bit pattern.
FN float bf16(uint h) { return as_type<float>(h << 16); }

FN float f16(uint h) {
  const uint e = (h >> 10) & 31u, m = h & 1023u;
  float v = e == 0 ? float(m) * as_type<float>(0x33800000u)                 // 2^-24
                   : as_type<float>(((e == 31 ? 255u : e + 112u) << 23) | (m << 13));
  return h & 0x8000u ? -v : v;
}

FN uint to_f16(float x) {  // rounds to nearest, ties to even
  const uint u = as_type<uint>(x), sign = (u >> 16) & 0x8000u, a = u & 0x7fffffffu;
  if (a >= 0x7f800000u) return sign | (a > 0x7f800000u ? 0x7e00u : 0x7c00u);
  if (a >= 0x477ff000u) return sign | 0x7c00u;
  if (a >= 0x38800000u) return sign | ((a - 0x38000000u + 0xfffu + ((a >> 13) & 1u)) >> 13);
  if (a < 0x33000000u) return sign;
  const uint shift = 126u - (a >> 23), m = (a & 0x7fffffu) | 0x800000u;  // subnormal result: shift is 14 to 24
  const uint whole = m >> shift, rest = m & ((1u << shift) - 1u), half_unit = 1u << (shift - 1);
  return sign | (whole + (rest > half_unit || (rest == half_unit && (whole & 1u)) ? 1u : 0u));
}

// The bits of an E4M3 code are the leading bits of a half, apart from the exponent's bias: the half times 2^8 is the
// value. This also holds for subnormals. GPUs convert halves at the rate of other operations.
FN float e4m3(uint q) {
  const float value = HALF_TO_FLOAT((q & 128u) << 8 | (q & 127u) << 7) * 256.0f;
  return (q & 127u) == 127u ? as_type<float>(0x7fc00000u) : value;
}

FN float e2m1(uint q) {
  const uint e = (q >> 1) & 3u, m = q & 1u;
  float v = e == 0 ? float(m) * 0.5f : as_type<float>(((e + 126u) << 23) | (m << 22));
  return q & 8u ? -v : v;
}

FN float e8m0(uint s) { return as_type<float>(s == 255 ? 0x7fc00000u : s == 0 ? 0x00400000u : s << 23); }

FN float silu(float x) { return x / (1.0f + exp(-x)); }

// Addresses of a matrix's codes, scales and biases.
struct WeightPtrs { DEVICE const uchar *codes, *scales, *biases; };

// Value `i` of an array of floats of type `float_type`.
FN float load_float(DEVICE const uchar* p, uint float_type, uint i) {
  if (float_type == BF16) return bf16(((DEVICE const ushort*)p)[i]);
  if (float_type == F16) return f16(((DEVICE const ushort*)p)[i]);
  return ((DEVICE const float*)p)[i];
}

// Bytes of one row of codes, and of one row of scales. Biases have the size of scales.
FN uint row_code_bytes(CONSTANT Matrix& m, uint cols) {
  if (m.format == DENSE) return cols * (m.float_type == F32 ? 4 : 2);
  if (m.format == MXFP8 || m.format == FP8) return cols;
  return cols / 8 * (m.format >= MXFP4 ? 4 : m.format);
}
FN uint row_scale_bytes(CONSTANT Matrix& m, uint cols) {
  if (m.format == DENSE) return 0;
  if (m.format == FP8) return (cols + FP8_BLOCK - 1) / FP8_BLOCK * (m.float_type == F32 ? 4 : 2);
  if (m.format >= MXFP4) return cols / (m.format == NVFP4 ? 16 : 32);
  return cols / m.group * (m.float_type == F32 ? 4 : 2);
}
// The row of scales that row `row` of a matrix uses: its own, or in FP8 that of its block.
FN uint scale_row(CONSTANT Matrix& m, uint row) { return m.format == FP8 ? row / FP8_BLOCK : row; }

// Unpacks 16 codes of BITS bits.
template <uint BITS> FN void unpack(DEVICE const uchar* p, THREAD float* v) {
  DEVICE const ushort* w = (DEVICE const ushort*)p;
  uint words[BITS + 1];
  UNROLL for (uint i = 0; i < BITS; i++) words[i] = w[i];
  words[BITS] = 0;
  UNROLL for (uint i = 0; i < 16; i++) {
    const uint at = i * BITS / 16, shift = i * BITS % 16;
    v[i] = MASKED((words[at] | words[at + 1] << 16) >> shift, (1u << BITS) - 1u);
  }
}

// Unpacks the codes of chunk `c` of a row to floats, without scale and bias. Values past the end of a dense row are 0.
FN void unpack_chunk(CONSTANT Matrix& m, DEVICE const uchar* row, uint c, uint cols, THREAD float* v) {
  switch (m.format) {
    case 2: return unpack<2>(row + c * 4, v);
    case 3: return unpack<3>(row + c * 6, v);
    case 4: return unpack<4>(row + c * 8, v);
    case 5: return unpack<5>(row + c * 10, v);
    case 6: return unpack<6>(row + c * 12, v);
    case 8: return unpack<8>(row + c * 16, v);
    case MXFP4:
    case NVFP4:
      unpack<4>(row + c * 8, v);
      UNROLL for (uint i = 0; i < 16; i++) v[i] = e2m1(uint(v[i]));
      return;
    case MXFP8:
    case FP8:
      UNROLL for (uint i = 0; i < 16; i += 2) {
        const uint two = ((DEVICE const ushort*)row)[c * 8 + i / 2];
        v[i] = e4m3(two & 255u), v[i + 1] = e4m3(two >> 8);
      }
      return;
    default:
      UNROLL for (uint i = 0; i < 16; i++) v[i] = c * 16 + i < cols ? load_float(row, m.float_type, c * 16 + i) : 0.0f;
  }
}

// The scale of chunk `c`, and the bias of its values: value = scale * code + bias.
FN float chunk_scale(CONSTANT Matrix& m, DEVICE const uchar* scales, uint c) {
  if (m.format == DENSE) return m.global_scale;
  if (m.format == NVFP4) return e4m3(scales[c]) * m.global_scale;
  if (m.format == FP8) return load_float(scales, m.float_type, c * 16 / FP8_BLOCK) * m.global_scale;
  if (m.format >= MXFP4) return e8m0(scales[c / 2]) * m.global_scale;
  return load_float(scales, m.float_type, c * 16 / m.group) * m.global_scale;
}
FN float chunk_bias(CONSTANT Matrix& m, DEVICE const uchar* biases, uint c) {
  return m.format < MXFP4 ? load_float(biases, m.float_type, c * 16 / m.group) * m.global_scale : 0.0f;
}

// The encodings of Hugging Face's checkpoints store floats: E4M3 (FP8) with bf16 scales, or bf16. A lane loads the
// floats of all rows before it uses them, so that it waits for memory once.
FN bool stores_floats(CONSTANT Matrix& m, uint cols, uint format) {
  return m.format == format && m.float_type == BF16 && cols % 16 == 0;
}

// True if the kernels of 4-bit and 8-bit weights can read this matrix: affine, groups of 64, bf16 scales.
FN bool is_fast(CONSTANT Matrix& m, uint cols) {
  return (m.format == 4 || m.format == 8) && m.group == 64 && m.float_type == BF16 && m.global_scale == 1.0f &&
         cols % 64 == 0;
}

// acc[t * COUNT + r] += row `row` + r of W times v[t * 16..] at chunk `c`, in the order of any other encoding. FORMAT
// is FP8 or DENSE. The last row replaces rows past the end.
template <uint FORMAT, uint COUNT, uint TOKENS>
FN void dot_floats(CONSTANT Matrix& m, WeightPtrs w, uint cols, uint row, uint c, THREAD const float* v,
                   THREAD float* acc) {
  enum { WORDS = FORMAT == FP8 ? 4 : 8 };
  uint q[COUNT * WORDS];
  float s[COUNT];
  UNROLL for (uint r = 0; r < COUNT; r++) {
    const uint at = min(row + r, m.rows - 1);
    DEVICE const uint4* from = (DEVICE const uint4*)(w.codes + (at * cols + c * 16) * (WORDS / 4));
    UNROLL for (uint i = 0; i < WORDS / 4; i++) {
      const uint4 p = from[i];
      q[r * WORDS + 4 * i] = p.x, q[r * WORDS + 4 * i + 1] = p.y;
      q[r * WORDS + 4 * i + 2] = p.z, q[r * WORDS + 4 * i + 3] = p.w;
    }
    const uint scale = at / FP8_BLOCK * ((cols + FP8_BLOCK - 1) / FP8_BLOCK) + c * 16 / FP8_BLOCK;
    s[r] = FORMAT == FP8 ? bf16(((DEVICE const ushort*)w.scales)[scale]) : 1.0f;
  }
  UNROLL for (uint r = 0; r < COUNT; r++) {
    float dot[TOKENS];
    UNROLL for (uint t = 0; t < TOKENS; t++) dot[t] = 0;
    UNROLL for (uint i = 0; i < 16; i++) {
      const uint bits = FORMAT == FP8 ? q[r * WORDS + i / 4] >> 8 * (i % 4) & 255u
                                      : q[r * WORDS + i / 2 % WORDS] >> 16 * (i % 2) & 0xffffu;
      const float u = FORMAT == FP8 ? e4m3(bits) : bf16(bits);
      UNROLL for (uint t = 0; t < TOKENS; t++) dot[t] = fma(u, v[t * 16 + i], dot[t]);
    }
    UNROLL for (uint t = 0; t < TOKENS; t++)
      acc[t * COUNT + r] = fma(s[r] * m.global_scale, dot[t], acc[t * COUNT + r]);
  }
}

// Fast path for the two common formats: 4 and 8 bits, group 64, bf16 scales. A 4-bit code is masked in place within its
// 16-bit word, so it is multiplied by a power of two. The activations are divided by the same power of two, which is
// exact and saves the shifts.
FN void scale_x4(THREAD float* x) {
  UNROLL for (uint i = 0; i < 16; i++) x[i] *= as_type<float>((127u - 4 * (i % 4)) << 23);
}
// The dot product of 16 packed codes with 16 activations, which scale_x4 has scaled for 4-bit codes.
FN float dot_q4(THREAD const uint* q, THREAD const float* x) {
  float sum = 0;
  UNROLL for (uint h = 0; h < 4; h++) {
    const uint w = q[h / 2] >> 16 * (h % 2);
    UNROLL for (uint i = 0; i < 4; i++) sum = fma(MASKED(w, 15u << 4 * i), x[4 * h + i], sum);
  }
  return sum;
}
FN float dot_q8(THREAD const uint* q, THREAD const float* x) {
  float sum = 0;
  UNROLL for (uint i = 0; i < 16; i++) sum = fma(MASKED(q[i / 4] >> 8 * (i % 4), 255u), x[i], sum);
  return sum;
}

// A kernel with a skip flag does nothing while the flag is set. The CPU submits several layers ahead and lets the
// kernels find the slots of experts in a table. If an expert of a layer has no slot, the router sets the flag. Later
// launches must then leave everything as it is, until the CPU has read the expert. The first argument word of such a
// kernel says whether the launch has a flag, and the last buffer is the flag: one word, not zero while the flag is set.
FN bool is_skipped(uint can_skip, DEVICE const uint* skip) { return can_skip != 0 && PEEK(skip) != 0; }

// Slot number of an expert that is not loaded, or that is not part of a launch.
enum : uint { NO_SLOT = 0xffffffffu };

// Packed values of COUNT rows at one chunk. The values are loaded one step before they are used, so that loads overlap
// with arithmetic.
template <uint BITS, uint COUNT> struct PackedRows { uint q[COUNT * BITS / 2], s[COUNT], b[COUNT]; };

// Loads rows `row`.. at chunk `c`. The last row replaces rows past the end. 32-bit offsets suffice: a matrix is smaller
// than 4 GiB.
template <uint BITS, uint COUNT>
FN void load_rows(WeightPtrs w, uint rows, uint cols, uint row, uint c, THREAD PackedRows<BITS, COUNT>& to) {
  UNROLL for (uint r = 0; r < COUNT; r++) {
    const uint at = min(row + r, rows - 1);
    const uint code = at * (cols / 8 * BITS) + c * (2 * BITS), scale = (at * (cols / 64) + c / 4) * 2;
    if (BITS == 4) {
      const uint2 q = *(DEVICE const uint2*)(w.codes + code);
      to.q[2 * r] = q.x, to.q[2 * r + 1] = q.y;
    } else {
      const uint4 q = *(DEVICE const uint4*)(w.codes + code);
      to.q[4 * r] = q.x, to.q[4 * r + 1] = q.y, to.q[4 * r + 2] = q.z, to.q[4 * r + 3] = q.w;
    }
    to.s[r] = *(DEVICE const ushort*)(w.scales + scale);
    to.b[r] = *(DEVICE const ushort*)(w.biases + scale);
  }
}

// Prefetches COUNT rows from `row` of a matrix with BITS-bit codes in groups of 64. A simdgroup reads a few
// columns at a time and would otherwise wait for memory at each step.
template <uint COUNT> FN void prefetch_rows(WeightPtrs w, uint bits, uint rows, uint cols, uint row) {
  if (row >= rows) return;
  const uint count = min(COUNT, rows - row), codes = cols / 8 * bits, scales = cols / 64 * 2;
  PREFETCH(w.codes + row * codes, count * codes);
  PREFETCH(w.scales + row * scales, count * scales);
  PREFETCH(w.biases + row * scales, count * scales);
}

// acc[r] += row r of W times v. For 4-bit codes, scale_x4 has scaled v. `sum` is the sum of v before that scaling.
template <uint BITS, uint COUNT>
FN void dot_rows(THREAD const PackedRows<BITS, COUNT>& w, THREAD const float* v, float sum, THREAD float* acc) {
  UNROLL for (uint r = 0; r < COUNT; r++) {
    const float dot = BITS == 4 ? dot_q4(w.q + r * (BITS / 2), v) : dot_q8(w.q + r * (BITS / 2), v);
    acc[r] = fma(bf16(w.b[r]), sum, fma(bf16(w.s[r]), dot, acc[r]));
  }
}

// The sum of 16 values, in a fixed order.
FN float sum16(THREAD const float* v) {
  float a = 0, b = 0;
  UNROLL for (uint i = 0; i < 16; i += 2) a += v[i], b += v[i + 1];
  return a + b;
}

// Loads 16 activations and returns their sum, which the biases multiply.
FN float load16(DEVICE const float* x, THREAD float* v) {
  DEVICE const float4* p = (DEVICE const float4*)x;
  UNROLL for (uint i = 0; i < 4; i++) {
    const float4 q = p[i];
    v[4 * i] = q.x, v[4 * i + 1] = q.y, v[4 * i + 2] = q.z, v[4 * i + 3] = q.w;
  }
  return sum16(v);
}

// Staging activations in threadgroup memory, for products of 128 threads.
//
// If each lane loaded its own chunk from device memory, the accesses of neighbouring lanes would be 64 bytes apart:
// four times as many transactions, repeated by every simdgroup. Instead, the threadgroup loads STAGED_CHUNKS chunks
// together, counted over all rows of x. The four quarters (float4) of a chunk are stored 32 quarters apart, the order
// in which the lanes read them.
enum { STAGED_CHUNKS = 256 };

// The place of quarter `i` of staged chunk `c`.
FN uint quarter_at(uint c, uint i) { return c / 32 * 128 + i * 32 + c % 32; }

// Stages `count` chunks of x. If NORM, multiplies the chunks by w, and adds the squares of x to *squares.
template <bool NORM>
FN void stage_rows(DEVICE const float* x, DEVICE const float* w, uint count, THREADGROUP float4* scratch,
                   THREAD float* squares THREAD_IDS_PARAM) {
  for (uint i = tid; i < count * 4; i += 128) {
    float4 v = ((DEVICE const float4*)x)[i];
    if (NORM) {
      const float4 u = ((DEVICE const float4*)w)[i];
      *squares = fma(v.w, v.w, fma(v.z, v.z, fma(v.y, v.y, fma(v.x, v.x, *squares))));
      v.x *= u.x, v.y *= u.y, v.z *= u.z, v.w *= u.w;
    }
    scratch[quarter_at(i / 4, i % 4)] = v;
  }
}

// Loads staged chunk `c`.
FN void load_staged(THREADGROUP const float4* scratch, uint c, THREAD float* v) {
  UNROLL for (uint i = 0; i < 4; i++) {
    const float4 q = scratch[quarter_at(c, i)];
    v[4 * i] = q.x, v[4 * i + 1] = q.y, v[4 * i + 2] = q.z, v[4 * i + 3] = q.w;
  }
}

// Like dot_rows for TOKENS rows of x at chunk `c`; each row of x has `pitch` staged chunks. A code is unpacked
// once for all rows of x. Only a quarter of the chunk is in registers at a time. Each sum is added in the order of
// dot_rows.
template <uint BITS, uint COUNT, uint TOKENS>
FN void dot_staged(THREAD const PackedRows<BITS, COUNT>& w, THREADGROUP const float4* scratch, uint pitch, uint c,
                   THREADGROUP const float* sums, THREAD float* acc) {
  float dot[TOKENS * COUNT];
  UNROLL for (uint i = 0; i < TOKENS * COUNT; i++) dot[i] = 0;
  UNROLL for (uint i = 0; i < 4; i++) {
    float v[TOKENS * 4];
    UNROLL for (uint t = 0; t < TOKENS; t++) {
      const float4 q = scratch[t * pitch * 4 + quarter_at(c, i)];
      v[4 * t] = q.x, v[4 * t + 1] = q.y, v[4 * t + 2] = q.z, v[4 * t + 3] = q.w;
    }
    UNROLL for (uint r = 0; r < COUNT; r++)
      UNROLL for (uint n = 0; n < 4; n++) {
        const uint bits = BITS == 4 ? w.q[2 * r + i / 2] >> 16 * (i % 2) : w.q[BITS / 2 * r + i % (BITS / 2)] >> 8 * n;
        const float u = MASKED(bits, BITS == 4 ? 15u << 4 * n : 255u);
        UNROLL for (uint t = 0; t < TOKENS; t++) dot[t * COUNT + r] = fma(u, v[4 * t + n], dot[t * COUNT + r]);
      }
  }
  UNROLL for (uint t = 0; t < TOKENS; t++)
    UNROLL for (uint r = 0; r < COUNT; r++) {
      const float scaled = fma(bf16(w.s[r]), dot[t * COUNT + r], acc[t * COUNT + r]);
      acc[t * COUNT + r] = fma(bf16(w.b[r]), sums[t * pitch + c], scaled);
    }
}

// Computes the sum of each staged chunk, and applies scale_x4 for 4-bit codes.
template <uint BITS>
FN void sum_staged(uint count, THREADGROUP float4* scratch, THREADGROUP float* sums THREAD_IDS_PARAM) {
  for (uint c = tid; c < count; c += 128) {
    float v[16];
    load_staged(scratch, c, v);
    sums[c] = sum16(v);
    if (BITS != 4) continue;
    scale_x4(v);
    UNROLL for (uint i = 0; i < 4; i++) {
      float4 q;
      q.x = v[4 * i], q.y = v[4 * i + 1], q.z = v[4 * i + 2], q.w = v[4 * i + 3];
      scratch[quarter_at(c, i)] = q;
    }
  }
}

FN float sigmoid(float x) { return 1.0f / (1.0f + exp(-x)); }

// The factor of a delta net's output: silu(z), or sigmoid(z).
FN float output_gate(uint is_sigmoid, float z) { return is_sigmoid != 0 ? sigmoid(z) : silu(z); }

// Paged keys and values. A page holds PAGE positions: a block for each kv head. `table` lists the pages of a sequence
// in order.
enum { PAGE = 256 };

// A row of one of several sequences: the number of its sequence, and its position. The states of all sequences are in
// one buffer, in the order of the sequence numbers.
struct SequenceRow { uint sequence, position; };

// The position of a row, and the page table of its sequence. `table_pages` of the arguments is the number of pages in
// the table of each sequence if each row belongs to a different sequence, else 0.
template <class Args>
FN uint row_position(CONSTANT Args& a, DEVICE const SequenceRow* rows, uint row) {
  return a.table_pages != 0 ? rows[row].position : a.start + row;
}
template <class Args>
FN DEVICE const uint* row_table(CONSTANT Args& a, DEVICE const SequenceRow* rows, DEVICE const uint* table, uint row) {
  return a.table_pages != 0 ? table + ulong(rows[row].sequence) * a.table_pages : table;
}

// The number of the block that has a position of a kv head.
FN ulong page_block(DEVICE const uint* table, uint kv_heads, uint head, uint position) {
  return ulong(table[position / PAGE]) * kv_heads + head;
}

// A block of the cache: PAGE rows of `dim` floats; or PAGE rows of `dim` 16-bit integers, then an f32 scale for each
// row. So a row of 64, 128 or 256 integers fills whole cache lines. Integers take half the bytes of floats, and their
// error is at most 2e-5 of the row's largest value.
FN uint block_size(DEVICE const float*, uint dim) { return PAGE * dim; }
FN uint block_size(DEVICE const short*, uint dim) { return PAGE * (dim + 2); }
FN float cache_scale(DEVICE const float*, uint, uint) { return 1.0f; }
FN float cache_scale(DEVICE const short* block, uint dim, uint row) {
  return ((DEVICE const float*)(block + PAGE * dim))[row];
}
FN void load_cached4(DEVICE const float* p, THREAD float* v) {
  const float4 q = *(DEVICE const float4*)p;
  v[0] = q.x, v[1] = q.y, v[2] = q.z, v[3] = q.w;
}
// Unpacks two integers without their scale. The bits of an integer become the low bits of the float 2^23 + 2^15 + n,
// and subtracting the constant is exact. On CUDA, a conversion has an eighth of the rate of a subtraction.
FN void unpack_cached2(uint q, THREAD float* v) {
  v[0] = as_type<float>((q & 0xffffu) ^ 0x4b008000u) - 8421376.0f;
  v[1] = as_type<float>((q >> 16) ^ 0x4b008000u) - 8421376.0f;
}
FN void load_cached4(DEVICE const short* p, THREAD float* v) {
  const uint2 q = *(DEVICE const uint2*)p;
  unpack_cached2(q.x, v);
  unpack_cached2(q.y, v + 2);
}

// A block in 8 or 4 bits: PAGE rows of codes, then PAGE rows of scales. So the codes of a row of 128 bytes or more fill
// whole cache lines. Sizes in bytes: a row of codes, a row of scales, a block.
// KV_GROUP: values of a row that share a scale.
enum { KV_GROUP = 32 };
template <uint BITS> FN uint code_bytes(uint dim) { return dim * BITS / 8; }
FN uint scale_bytes(uint dim) { return dim / KV_GROUP * 2; }
template <uint BITS> FN uint block_bytes(uint dim) { return PAGE * (code_bytes<BITS>(dim) + scale_bytes(dim)); }

// Keys and values in 8 or 4 bits: a query reads at least this many positions from the ring of recent positions.
enum { RECENT_POSITIONS = 64 };

// The first position that a query at `position` reads from the ring of recent positions.
FN uint recent_start(uint position) {
  const uint block = position / RECENT_POSITIONS * RECENT_POSITIONS;
  return block < RECENT_POSITIONS ? 0 : block - RECENT_POSITIONS;
}

// x = H x / sqrt(n), where n is the largest power of two that divides dim. `threads` threads take part, and this
// is thread `t`.
FN void hadamard(uint dim, uint t, uint threads, THREADGROUP float* x THREAD_IDS_PARAM) {
  uint size = 1;
  while (dim % (2 * size) == 0) size *= 2;
  for (uint half_dim = 1; half_dim < size; half_dim *= 2) {
    BARRIER();
    for (uint i = t; i < dim / 2; i += threads) {
      const uint low = i / half_dim * 2 * half_dim + i % half_dim;
      const float a = x[low], b = x[low + half_dim];
      x[low] = a + b;
      x[low + half_dim] = a - b;
    }
  }
  BARRIER();
  const float factor = 1.0f / sqrt(float(size));
  for (uint i = t; i < dim; i += threads) x[i] *= factor;
  BARRIER();
}

struct AttentionArgs {
  uint tokens, width, heads, kv_heads, dim;
  uint rope_dim;            // leading dimensions that are rotated, in pairs (j, j + rope_dim / 2)
  uint start;             // position of the first row
  uint splits;            // most splits of the positions of any row
  float eps, scale;
  uint ring_len;              // 8 and 4 bits: positions in the ring of recent keys and values
  uint min_split;             // fewest positions in a split
  uint table_pages;           // see row_table
  uint lane_columns;          // partial results are in the order of columns if 1; else lanes have this many columns
  uint shared_heads;          // query heads that share a simdgroup: 4 or 3; 0 for two or one
  uint merged_columns;        // attention_merge: groups of 32 columns per threadgroup, 1 or 4
};

// Flash-decoding: a softmax over some positions without normalisation, for several query heads of one kv head.
//
// MAX_SIMDS: most simdgroups that join their results.
enum { MAX_SIMDS = 4 };

// Adds COUNT values, a power of two, over all lanes. Lane l receives the sum of value l / (32 / COUNT). The order of
// the additions is that of CUDA's SIMD_SUM, but there are fewer exchanges.
template <uint COUNT> FN float sum_values(THREAD float* v THREAD_IDS_PARAM) {
  UNROLL for (uint mask = 16; mask > 0; mask /= 2) {
    const uint half_count = COUNT * mask / 32;
    if (half_count == 0) {
      v[0] += SIMD_XOR(v[0], mask);
      continue;
    }
    const bool upper = (lane & mask) != 0;
    UNROLL for (uint i = 0; i < half_count; i++) {
      const float kept = upper ? v[i + half_count] : v[i], sent = upper ? v[i] : v[i + half_count];
      v[i] = kept + SIMD_XOR(sent, mask);
    }
  }
  return v[0];
}

// The weight of this lane's position for this lane's head. Updates the largest score of the head, which all its lanes
// have, and the denominator of this lane's positions. Results of before must be multiplied by *rescale.
template <uint SCORES, uint HEAD_LANES>
FN float own_weight(bool exists, float score, THREAD float* max_score, THREAD float* denominator,
                    THREAD float* rescale THREAD_IDS_PARAM) {
  float new_max = exists ? score : -as_type<float>(0x7f7fffffu);
  UNROLL for (uint mask = 32 / SCORES; mask < HEAD_LANES; mask *= 2) new_max = max(new_max, SIMD_XOR(new_max, mask));
  new_max = max(*max_score, new_max);
  const float weight = exists ? FAST_EXP(score - new_max) : 0.0f;
  *rescale = FAST_EXP(*max_score - new_max);
  *max_score = new_max;
  *denominator = fma(*denominator, *rescale, weight);
  return weight;
}

// Joins the results of two simdgroups with the same heads and different positions: simdgroups sg and sg + sets. Each of
// them receives the joined results of its share of the heads. `joined` and `shares` are threadgroup memory for
// MAX_SIMDS * 2 * 32 * COLUMNS and MAX_SIMDS * 4 * 2 floats.
template <uint HEADS, uint COLUMNS, uint HEAD_LANES>
FN void join_parts(THREAD float* sum, THREAD float* max_score, THREAD float* denominator, uint sets,
                   THREADGROUP float* joined, THREADGROUP float* shares THREAD_IDS_PARAM) {
  enum : uint { SHARE = (HEADS + 1) / 2, WIDTH = 32 * COLUMNS };
  const bool is_first = sg < sets;
  const uint other = is_first ? sg + sets : sg - sets, own_head = lane / HEAD_LANES;
  if (lane % HEAD_LANES == 0) {
    shares[(sg * 4 + own_head) * 2] = *max_score;
    shares[(sg * 4 + own_head) * 2 + 1] = *denominator;
  }
  UNROLL for (uint h = 0; h < HEADS; h++) {
    if ((h < SHARE) == is_first) continue;
    UNROLL for (uint j = 0; j < COLUMNS; j++)
      joined[(sg * SHARE + h % SHARE) * WIDTH + 32 * j + lane] = sum[h * COLUMNS + j];
  }
  BARRIER();
  const float other_max = shares[(other * 4 + own_head) * 2], new_max = max(*max_score, other_max);
  const float ours = FAST_EXP(*max_score - new_max), theirs = FAST_EXP(other_max - new_max);
  *max_score = new_max;
  *denominator = fma(shares[(other * 4 + own_head) * 2 + 1], theirs, *denominator * ours);
  UNROLL for (uint h = 0; h < HEADS; h++) {
    const float keep = SIMD_LANE(ours, h * HEAD_LANES), add = SIMD_LANE(theirs, h * HEAD_LANES);
    if ((h < SHARE) != is_first) continue;
    UNROLL for (uint j = 0; j < COLUMNS; j++)
      sum[h * COLUMNS + j] = fma(joined[(other * SHARE + h % SHARE) * WIDTH + 32 * j + lane], add,
                                 sum[h * COLUMNS + j] * keep);
  }
}
