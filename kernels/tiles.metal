// Matrix products in half precision for the rows of a prompt, in 16x16 tiles on matrix units. Sums are f32. A
// threadgroup has 128 threads. Part of every kernel file, after quant.metal.
//
// A row of x is stored as halves with one power-of-two scale (both from rows_to_half), so that no value overflows.
// Rows are padded with 0 to a multiple of DEPTH columns. Weights are unpacked to halves in threadgroup memory.
// Each sum adds the columns in order, DEPTH at a time, so it depends only on its row of x and its row of W.

// Columns per step; rows of W; words per row of half tiles; words per row of sums.
enum { DEPTH = 64, TILE_WIDTH = 64, PITCH = 36, SUM_PITCH = 68 };

// Size of the threadgroup memory, in uint4, for TILES * 16 rows of x.
template <uint TILES> struct TileScratch { enum : uint { SIZE = (TILES * 16 + TILE_WIDTH) * PITCH / 4 }; };

// Packed values of half of DEPTH columns of one row of W.
template <uint BITS> struct Packed { uint q[BITS == 0 ? 1 : BITS], s, b; };

// Loads half `side` of DEPTH columns, from column `k`, of row `row` of W.
template <uint BITS>
FN void load_packed(WeightPtrs w, uint cols, uint row, uint k, uint side, THREAD Packed<BITS>& to) {
  DEVICE const uint4* q = (DEVICE const uint4*)(w.codes + row * (cols / 8 * BITS) + (k + side * 32) / 8 * BITS);
  UNROLL for (uint i = 0; i < BITS / 4; i++) {
    const uint4 four = q[i];
    to.q[4 * i] = four.x, to.q[4 * i + 1] = four.y, to.q[4 * i + 2] = four.z, to.q[4 * i + 3] = four.w;
  }
  const uint scale = (row * (cols / 64) + k / 64) * 2;
  to.s = *(DEVICE const ushort*)(w.scales + scale);
  to.b = *(DEVICE const ushort*)(w.biases + scale);
}

// Stores four words at once.
FN void put_words(THREADGROUP uint* to, THREAD const uint* words) {
  uint4 four;
  four.x = words[0], four.y = words[1], four.z = words[2], four.w = words[3];
  *(THREADGROUP uint4*)to = four;
}

// Unpacks what load_packed has loaded to halves.
template <uint BITS> FN void unpack_half(THREAD const Packed<BITS>& from, THREADGROUP uint* to) {
  const float s = bf16(from.s), b = bf16(from.b);
  UNROLL for (uint j = 0; j < 4; j++) {
    uint words[4];
    UNROLL for (uint i = 0; i < 4; i++) {
      const uint at = (j * 8 + 2 * i) * BITS, q = from.q[at / 32] >> at % 32, mask = (1u << BITS) - 1u;
      words[i] = HALF2(fma(s, MASKED(q & 0xffffu, mask), b), fma(s, MASKED(q >> BITS & 0xffffu, mask), b));
    }
    put_words(to + 4 * j, words);
  }
}

// Unpacks half of DEPTH columns of one row of W in any encoding, directly from device memory.
FN void unpack_any(CONSTANT Matrix& m, WeightPtrs w, uint cols, uint row, uint k, uint side, THREADGROUP uint* to) {
  const uint code_bytes = row_code_bytes(m, cols), scales = scale_row(m, row) * row_scale_bytes(m, cols);
  for (uint c = k / 16 + side * 2, j = 0; j < 2; c++, j++) {
    float v[16], s = 0, b = 0;
    UNROLL for (uint i = 0; i < 16; i++) v[i] = 0;
    if (c * 16 < cols) {
      unpack_chunk(m, w.codes + row * code_bytes, c, cols, v);
      s = chunk_scale(m, w.scales + scales, c), b = chunk_bias(m, w.biases + scales, c);
    }
    uint words[8];
    UNROLL for (uint i = 0; i < 8; i++) words[i] = HALF2(fma(s, v[2 * i], b), fma(s, v[2 * i + 1], b));
    put_words(to + 8 * j, words);
    put_words(to + 8 * j + 4, words + 4);
  }
}

// Multiplies `count` rows of x, at most TILES * 16, by TILE_WIDTH rows of W. The sums go to `scratch` as floats,
// SUM_PITCH per row. Rows after `count` are skipped in groups of eight. This thread loads rows from[i] of x (for tile
// i) and half of row `row` of W. BITS is 4 or 8, or 0 for any encoding.
template <uint TILES, uint BITS>
FN void tile_matmul(CONSTANT Matrix& m, WeightPtrs w, uint row, uint cols, DEVICE const uint* x,
                    THREAD const uint* from, uint count, THREADGROUP uint4* scratch THREAD_IDS_PARAM) {
  const uint depth = (cols + DEPTH - 1) / DEPTH * DEPTH, side = tid % 2;
  THREADGROUP uint* xs = (THREADGROUP uint*)scratch;
  THREADGROUP uint* ws = xs + TILES * 16 * PITCH;
  THREADGROUP uint* mine = ws + tid / 2 * PITCH + side * 16;
  SUM_TILE sums[TILES];
  uint4 next[TILES];
  Packed<BITS> packed;
  UNROLL for (uint i = 0; i < TILES; i++) {
    TILE_ZERO(sums[i]);
    next[i] = ((DEVICE const uint4*)(x + ulong(from[i]) * (depth / 2)))[tid % 8];
  }
  if (BITS != 0) load_packed<BITS>(w, cols, row, 0, side, packed);
  for (uint k = 0; k < depth; k += DEPTH) {
    BARRIER();
    UNROLL for (uint i = 0; i < TILES; i++)
      *(THREADGROUP uint4*)(xs + (i * 16 + tid / 8) * PITCH + tid % 8 * 4) = next[i];
    if (BITS != 0) unpack_half<BITS>(packed, mine);
    else unpack_any(m, w, cols, row, k, side, mine);
    BARRIER();
    if (k + DEPTH < depth) {
      UNROLL for (uint i = 0; i < TILES; i++)
        next[i] = ((DEVICE const uint4*)(x + ulong(from[i]) * (depth / 2) + (k + DEPTH) / 2))[tid % 8];
      if (BITS != 0) load_packed<BITS>(w, cols, row, k + DEPTH, side, packed);
    }
    UNROLL for (uint j = 0; j < DEPTH / 16; j++) {
      HALF_TILE columns;
      TILE_LOAD_T(columns, ws + sg * 16 * PITCH + j * 8, PITCH);
      UNROLL for (uint i = 0; i < TILES; i++) {
        if (i * 16 >= count) continue;
        HALF_TILE rows;
        TILE_LOAD(rows, xs + i * 16 * PITCH + j * 8, PITCH);
        if (i * 16 + 8 < count) TILE_FMA(sums[i], rows, columns);
        else TILE_FMA_TOP(sums[i], rows, columns);
      }
    }
  }
  BARRIER();
  UNROLL for (uint i = 0; i < TILES; i++)
    TILE_STORE(sums[i], (THREADGROUP float*)scratch + i * 16 * SUM_PITCH + sg * 16, SUM_PITCH);
  BARRIER();
}
