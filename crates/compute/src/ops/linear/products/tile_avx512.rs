//! Tiles of weights for AVX-512: the lanes of a register are sixteen rows.

use std::{arch::x86_64::*, ops::Range};

use super::operands::{AffineWeight, pdep_mask};
use crate::ops::{
    Float,
    quant::{ValueOrder, unpack},
    simd::CacheLine,
};

/// Number of rows of a tile: one for each 32-bit lane of a register.
pub const ROWS: usize = 16;

/// Buffers for tiles with their scales and biases.
#[derive(Default)]
pub struct WeightTiles {
    pub codes: Vec<CacheLine>,
    pub scales: Vec<CacheLine>,
    pub biases: Vec<CacheLine>,
    /// Accumulators of each input and tile.
    pub lanes: Vec<CacheLine>,
    /// Rows of one tile before they are transposed.
    bytes: Vec<u8>,
}

/// Grows `vectors` to at least `count`.
pub fn ensure_len(vectors: &mut Vec<CacheLine>, count: usize) {
    vectors.resize(count.max(vectors.len()), CacheLine::ZERO);
}

/// Loads the scales and biases of rows `row..row + 16`, one vector for each group. Writes from vector `at` on,
/// `STEP` vectors apart. All functions here pad each row to a multiple of sixteen words, so they may overwrite later
/// vectors.
#[inline]
#[target_feature(enable = "avx2,fma,bmi2,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
pub unsafe fn fill_constants<const STEP: usize>(
    weight: &AffineWeight<'_>,
    row: usize,
    tiles: &mut WeightTiles,
    at: usize,
) {
    let (scales, biases) = weight.constants(row);
    for (from, to) in [(scales, &mut tiles.scales), (biases, &mut tiles.biases)] {
        ensure_len(to, at + weight.groups().next_multiple_of(ROWS) * STEP);
        // SAFETY: there is space for all groups.
        unsafe { constants::<STEP>(weight, from.as_ptr(), to.as_mut_ptr().add(at)) };
    }
}

/// Loads the scales or biases of sixteen rows of weights, starting at `from`, for each group.
#[inline]
#[target_feature(enable = "avx2,avx512f,avx512bw,avx512vl")]
unsafe fn constants<const STEP: usize>(weight: &AffineWeight<'_>, from: *const u8, to: *mut CacheLine) {
    let groups = weight.groups();
    let size = weight.float.bytes();
    for at in (0..groups).step_by(ROWS) {
        let mask = lane_mask(groups - at);
        let mut values = [_mm512_setzero_si512(); ROWS];
        // SAFETY: sixteen rows are readable, the mask limits the reads, and there is space for all groups (caller).
        unsafe {
            for (row, values) in values.iter_mut().enumerate() {
                let from = from.add((row * groups + at) * size);
                *values = match weight.float {
                    Float::F32 => _mm512_maskz_loadu_epi32(mask, from.cast()),
                    Float::F16 => _mm512_castps_si512(_mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, from.cast()))),
                    Float::Bf16 => {
                        _mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, from.cast())))
                    }
                };
            }
            store_registers::<STEP>(transpose(values), to.add(at * STEP));
        }
    }
}

/// Unpacks the codes of `groups` of rows `row..row + 16`, one vector for each four columns. Writes from vector `at`
/// on, `STEP` vectors apart.
#[inline]
#[target_feature(enable = "avx2,fma,bmi2,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
pub unsafe fn fill_codes<const STEP: usize>(
    weight: &AffineWeight<'_>,
    row: usize,
    groups: Range<usize>,
    tiles: &mut WeightTiles,
    at: usize,
) {
    let cols = groups.len() * weight.group;
    let stride = weight.cols * weight.bits / 8;
    ensure_len(&mut tiles.codes, at + (cols / 4).next_multiple_of(2 * ROWS) * STEP);
    let codes = tiles.codes.as_mut_ptr();
    let from = weight.codes(row).as_ptr().wrapping_add(groups.start * weight.group * weight.bits / 8);
    // SAFETY: sixteen rows follow each other, there is space for the vectors of these columns, and the processor has
    // BMI2.
    unsafe {
        let codes = codes.add(at);
        match weight.bits {
            4 if ValueOrder::unit(weight.group) == 32 => transpose_nibbles::<4, STEP>(from, stride, cols / 8, codes),
            4 => transpose_nibbles::<8, STEP>(from, stride, cols / 8, codes),
            8 => transpose_words::<STEP>(from, stride, cols / 4, codes),
            bits => {
                let mask = pdep_mask(bits);
                let bytes = cols * bits / 8;
                tiles.bytes.resize(ROWS * cols, 0);
                for (index, to) in tiles.bytes.chunks_exact_mut(cols).enumerate() {
                    let packed = std::slice::from_raw_parts(from.add(index * stride), bytes);
                    unpack::natural(bits, packed, to, |word| _pdep_u64(word, mask));
                }
                transpose_words::<STEP>(tiles.bytes.as_ptr(), cols, cols / 4, codes);
            }
        }
    }
}

/// A mask of the first `count` lanes.
fn lane_mask(count: usize) -> u16 {
    if count >= ROWS { u16::MAX } else { (1 << count) - 1 }
}

/// Repeats a body for each of 16 registers. A loop would keep them in memory, because a variable index cannot select
/// a register.
macro_rules! sixteen {
    ($index:ident => $body:expr) => { sixteen!($index => $body; 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15) };
    ($index:ident => $body:expr; $($number:literal)*) => { $({ const $index: usize = $number; $body })* };
}

/// Stores 16 registers, `STEP` vectors apart.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn store_registers<const STEP: usize>(registers: [__m512i; ROWS], to: *mut CacheLine) {
    // SAFETY: there is space (caller).
    sixteen!(INDEX => unsafe { _mm512_store_si512(to.add(INDEX * STEP).cast(), registers[INDEX]) });
}

/// Transposes 16 rows of `words` words that are `stride` bytes apart. Vector `i * STEP` of `to` gets word `i` of
/// every row.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn transpose_words<const STEP: usize>(from: *const u8, stride: usize, words: usize, to: *mut CacheLine) {
    for at in (0..words).step_by(ROWS) {
        let here = (words - at).min(ROWS);
        // SAFETY: the rows have these words, and the caller provides space for the vectors.
        unsafe { store_registers::<STEP>(load_block(from.add(4 * at), stride, here), to.add(at * STEP)) };
    }
}

/// Like [`transpose_words`], but for packed 4-bit codes. Each word becomes its four even codes and its four odd codes,
/// in the order of [`ValueOrder::Nibbles`], whose units have `2 * HALF` words.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn transpose_nibbles<const HALF: usize, const STEP: usize>(
    from: *const u8,
    stride: usize,
    words: usize,
    to: *mut CacheLine,
) {
    let mask = _mm512_set1_epi32(0x0f0f_0f0f);
    for at in (0..words).step_by(ROWS) {
        let here = (words - at).min(ROWS);
        // SAFETY: as in `transpose_words`.
        unsafe {
            let both = load_block(from.add(at * 4), stride, here);
            let to = to.add(2 * at * STEP);
            sixteen!(INDEX => {
                let to = to.add((INDEX / HALF * 2 * HALF + INDEX % HALF) * STEP);
                let odd = _mm512_srli_epi32::<4>(both[INDEX]);
                _mm512_store_si512(to.cast(), _mm512_and_si512(both[INDEX], mask));
                _mm512_store_si512(to.add(HALF * STEP).cast(), _mm512_and_si512(odd, mask));
            });
        }
    }
}

/// Loads and transposes the first `words` (at most 16) words of 16 rows that start `stride` bytes apart.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn load_block(from: *const u8, stride: usize, words: usize) -> [__m512i; ROWS] {
    let mut a = [_mm512_setzero_si512(); ROWS];
    for (index, a) in a.iter_mut().enumerate() {
        // SAFETY: the mask limits the load to words that exist (caller).
        *a = unsafe { _mm512_maskz_loadu_epi32(lane_mask(words), from.add(index * stride).cast()) };
    }
    transpose(a)
}

/// Word `i` of register `j` becomes word `j` of register `i`.
#[inline]
#[target_feature(enable = "avx512f")]
fn transpose(mut a: [__m512i; ROWS]) -> [__m512i; ROWS] {
    // The first two steps transpose 4 x 4 words within 128-bit lanes. The last two steps transpose the lanes.
    let mut b = a;
    for i in 0..8 {
        b[2 * i] = _mm512_unpacklo_epi32(a[2 * i], a[2 * i + 1]);
        b[2 * i + 1] = _mm512_unpackhi_epi32(a[2 * i], a[2 * i + 1]);
    }
    for i in 0..4 {
        a[4 * i] = _mm512_unpacklo_epi64(b[4 * i], b[4 * i + 2]);
        a[4 * i + 1] = _mm512_unpackhi_epi64(b[4 * i], b[4 * i + 2]);
        a[4 * i + 2] = _mm512_unpacklo_epi64(b[4 * i + 1], b[4 * i + 3]);
        a[4 * i + 3] = _mm512_unpackhi_epi64(b[4 * i + 1], b[4 * i + 3]);
    }
    for i in 0..4 {
        b[i] = _mm512_shuffle_i32x4::<0x88>(a[i], a[i + 4]);
        b[i + 4] = _mm512_shuffle_i32x4::<0xdd>(a[i], a[i + 4]);
        b[i + 8] = _mm512_shuffle_i32x4::<0x88>(a[i + 8], a[i + 12]);
        b[i + 12] = _mm512_shuffle_i32x4::<0xdd>(a[i + 8], a[i + 12]);
    }
    for i in 0..4 {
        a[i] = _mm512_shuffle_i32x4::<0x88>(b[i], b[i + 8]);
        a[i + 4] = _mm512_shuffle_i32x4::<0x88>(b[i + 4], b[i + 12]);
        a[i + 8] = _mm512_shuffle_i32x4::<0xdd>(b[i], b[i + 8]);
        a[i + 12] = _mm512_shuffle_i32x4::<0xdd>(b[i + 4], b[i + 12]);
    }
    a
}
