#if defined(QUAD_FMA) && !defined(NO_TILES)
// Copies the codes of a product of decoded rows to threadgroup memory, and unpacks them to halves for matrix units: see
// row_tiles.metal and expert_tiles.metal.

// GROUP: columns per scale. TILE_ROWS: rows of x in a tile. STAGE: words of a step of 16 rows of W: 64 bytes of codes, a
// word of scales and one of offsets for each row.
// CODE_ONES: 1024 in both halves.
enum { CODE_ONES = 0x64006400, GROUP = 64, TILE_ROWS = 4, CODE_WORDS = 256, STAGE = CODE_WORDS + 32 };

// A step has 64 bytes of each row of codes: 128 columns of 4 bits, 64 of 8, or 32 of 16. A lane copies a quarter of a
// step of 2 * MT rows of W, and the scales or the offsets of MT rows. In FP8, the rows of a tile share a scale, which
// is not copied.
template <uint MT> struct StepPtrs { DEVICE const uchar *codes[MT * 2], *scales[MT]; };

// The words of chunk `chunk` of 16 bytes of row `row` in a stage. Chunks are swapped so that the lanes of a simdgroup
// read from different banks.
FN uint chunk_at(uint row, uint chunk) { return row * 16 + (chunk ^ row / 2 % 2 * 2) * 4; }

// Starts to copy `step` and moves the pointers to codes by one step. In 8 bits, two steps share a word of scales.
template <uint MT>
FN void copy_step(THREAD StepPtrs<MT>& from, uint format, uint step, THREADGROUP uint* stage THREAD_IDS_PARAM) {
  const uint shift = format == 8 ? 1 : 0;
  const bool has_word = format < MXFP4 || (format == MXFP4 && lane % 2 == 0);
  UNROLL for (uint m = 0; m < MT; m++) {
    UNROLL for (uint r = 0; r < 2; r++) {
      ASYNC_COPY((THREADGROUP uint4*)(stage + m * STAGE + chunk_at(r * 8 + lane / 4, lane % 4)),
                 (DEVICE const uint4*)from.codes[m * 2 + r]);
      from.codes[m * 2 + r] += 64;
    }
    if (has_word)
      ASYNC_COPY(stage + m * STAGE + CODE_WORDS + lane, (DEVICE const uint*)(from.scales[m] + (step >> shift) * 4));
  }
}

// Unpacks a quarter of a group to halves: h[2 * j + i] has columns 8 i + j and 8 i + j + 4. For even j, the halves are
// q - 8 or q - 128; for odd j, they are 16 times that. The bits of a code become low bits of the mantissa of 1024 or
// 2^14.
template <uint BITS> FN void unpack_quad(THREAD const uint* q, uint ones, THREAD uint* h) {
  UNROLL for (uint i = 0; i < 2; i++)
    UNROLL for (uint j = 0; j < 4; j++) {
      if (BITS == 4) {
        const uint w = q[i] >> j / 2 * 8;
        h[2 * j + i] = j % 2 == 0 ? HALF2_SUB((w & 0x000f000fu) | ones, 0x64086408u)
                                  : HALF2_SUB((w & 0x00f000f0u) | ones, 0x64806480u);
      } else {
        const uint w = (q[2 * i] >> 8 * j & 255u) | (q[2 * i + 1] >> 8 * j & 255u) << 16;
        h[2 * j + i] = j % 2 == 0 ? HALF2_SUB(w | 0x64006400u, 0x64806480u) : HALF2_SUB(w | 0x74007400u, 0x74807480u);
      }
    }
}

// Unpacks eight columns of a unit of 32 to halves: h[j] has columns j and j + 4. The bits of an E2M1 code, at their
// place in a half, are 2^-14 of its value: the scale is multiplied by 2^14.
FN void unpack_e2m1(uint q, THREAD uint* h) {
  UNROLL for (uint j = 0; j < 4; j++) {
    const uint w = q << (12 - 4 * j);
    h[j] = (w & 0x80008000u) | (w >> 3 & 0x0e000e00u);
  }
}

// Two E4M3 codes.
FN uint e4m3_pair(uint q) {
#ifdef E4M3_HALF2
  return E4M3_HALF2(q);
#else
  return HALF2(e4m3(q & 255u), e4m3(q >> 8 & 255u));
#endif
}
FN void unpack_e4m3(uint q0, uint q1, THREAD uint* h) {
  const uint even = (q0 & 0x00ff00ffu) | (q1 << 8 & 0xff00ff00u), odd = (q0 >> 8 & 0x00ff00ffu) | (q1 & 0xff00ff00u);
  h[0] = e4m3_pair(even & 0xffffu), h[1] = e4m3_pair(odd & 0xffffu);
  h[2] = e4m3_pair(even >> 16), h[3] = e4m3_pair(odd >> 16);
}

// A power of two, whose inverse is returned, brings the largest value of a unit of a row of W into [2^14, 2^15). Then a
// value is exact in a half if it is at least 2^-31 of the largest. Smaller values are off by at most 2^-39 of the
// largest, which is less than what the split of x loses.
FN float unpack_bf16(THREAD const uint* q, THREAD uint* h) {
  float v[8];
  uint max_bits = 0;  // without signs
  UNROLL for (uint i = 0; i < 4; i++) {
    v[2 * i] = bf16(q[i]), v[2 * i + 1] = as_type<float>(q[i] & 0xffff0000u);
    max_bits = max(max_bits, max(q[i] << 17, q[i] << 1));
  }
  const uint power = max(as_type<uint>(QUAD_MAX(as_type<float>(max_bits >> 1))) >> 23, 15u);
  const float up = as_type<float>((268u - power) << 23);
  UNROLL for (uint j = 0; j < 4; j++) h[j] = HALF2(v[j] * up, v[j + 4] * up);
  return as_type<float>((power - 14u) << 23);
}

// UNITS: units of a step. MULS: products of a unit, each with four columns per lane.
template <uint FORMAT> struct StepShape {
  enum : uint { MULS = FORMAT < MXFP4 ? 4 : 2, UNITS = FORMAT == 4 || FORMAT == FP8 ? 2 : FORMAT == MXFP4 ? 4 : 1 };
};

// The first of the eight bytes that a lane reads of a row of a stage, in words.
FN uint eighth_at(uint l) { return chunk_at(l / 4, l % 4 / 2) + l % 2 * 2; }

// Reads unit `u` of a step of 16 rows of W: unpacked codes, scales, and offsets of two rows. `second`: the scales of an
// 8-bit step are the second ones of their word. `scale`: the scale of all codes in FP8. `eighth`: see eighth_at. `ones`:
// see unpack_quad.
template <uint FORMAT>
FN void read_unit(THREADGROUP const uint* stage, uint eighth, uint u, bool second, float scale, uint ones,
                  THREAD uint* h, THREAD float* s, THREAD float* b THREAD_IDS_PARAM) {
  const uint row = lane / 4, quarter = lane % 4;
  UNROLL for (uint i = 0; i < 2; i++) {
    const uint r = i * 8 + row;
    THREADGROUP const uint* scales = stage + CODE_WORDS + r * 2;
    uint q[4];
    if (FORMAT == MXFP4) {
      unpack_e2m1(stage[chunk_at(r, u) + quarter], h + i * 4);
      s[i] = e8m0(((THREADGROUP const uchar*)scales)[u]) * 16384.0f;
      continue;
    }
    if (FORMAT == 4 || FORMAT == FP8) {
      const uint2 two = *(THREADGROUP const uint2*)(stage + i * 128 + (eighth ^ u * 8));
      q[0] = two.x, q[1] = two.y;
    } else {
      const uint4 four = *(THREADGROUP const uint4*)(stage + chunk_at(r, quarter));
      q[0] = four.x, q[1] = four.y, q[2] = four.z, q[3] = four.w;
    }
    if (FORMAT == FP8) unpack_e4m3(q[0], q[1], h + i * 4), s[i] = scale;
    if (FORMAT == DENSE) s[i] = unpack_bf16(q, h + i * 4);
    if (FORMAT >= MXFP4) continue;
    unpack_quad<FORMAT>(q, ones, h + i * 8);
    const uint2 two = *(THREADGROUP const uint2*)scales;
    const bool high = FORMAT == 4 ? u == 1 : second;
    s[i] = as_type<float>(high ? two.x & 0xffff0000u : two.x << 16);
    b[i] = as_type<float>(high ? two.y & 0xffff0000u : two.y << 16);
    b[i] = fma(FORMAT == 4 ? 8.0f : 128.0f, s[i], b[i]);
  }
}
#endif
