//! [`super::integer`] with AVX-512 and VNNI, to the same bytes.
//!
//! Keys are transposed sixteen at a time, so that lanes are keys and a group's scales are one vector; queries meet them as
//! broadcasts of four bytes, in two digits. Values are interleaved four positions at a time, so that lanes are dimensions; the
//! weights of four positions meet them as broadcasts, in two digits as well.

// Arrays of registers: counted loops are unrolled, adapters around closures are not compiled for these instructions.
#![allow(clippy::needless_range_loop)]

use super::{
    cpu::BLOCK,
    integer::{Asked, Factors, MOST},
    rounded::{GROUP, Rounded},
};
use std::{arch::x86_64::*, cell::RefCell};

/// Keys so many bytes further on are asked for.
const AHEAD: usize = 20480;
/// Positions in a quad, and quads in a block.
const QUAD: usize = 4;
const QUADS: usize = BLOCK / QUAD;

/// Queries as bytes: of each four values the high digits and the low ones, and of each group what is to be taken away because
/// the codes of keys are not signed.
#[derive(Default)]
struct Digits {
    /// Of each query, each group.
    groups: Vec<Group>,
}

#[derive(Clone, Copy)]
struct Group {
    high: [i32; 8],
    low: [i32; 8],
    excess: i32,
}

/// A block of values and weights, in the order in which they meet.
struct Tile {
    values: [[__m512i; 4]; QUADS],
    /// Of each query the two digits of the weights of a quad, of two groups.
    weights: Vec<[[i64; 2]; QUADS]>,
}

thread_local! {
    static DIGITS: RefCell<Digits> = RefCell::default();
    static TILE: RefCell<Option<Box<Tile>>> = const { RefCell::new(None) };
}

/// See [`super::integer::compare`].
///
/// # Safety
/// The processor has these features; `rows` are whole rows of `keys`, a multiple of 16 and at most [`BLOCK`]. `next` are the rows
/// that are wanted afterwards.
#[target_feature(enable = "avx2,fma,bmi2,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
pub(super) unsafe fn compare<const N: usize>(
    asked: &Asked,
    keys: &Rounded<'_>,
    [rows, next]: [&[u8]; 2],
    scores: &mut [[f32; BLOCK]; N],
) {
    let (dim, groups, bits) = (keys.dim, keys.dim / GROUP, keys.bits);
    // Codes are integers plus 128, or half of integers plus 15.
    let (bias, shift) = if bits == 8 { (128, 0) } else { (15, 1) };
    DIGITS.with_borrow_mut(|digits| {
        fill(digits, &asked.integers[..N * dim], bias);
        let digits = &digits.groups[..N * groups];
        let shift = _mm_cvtsi32_si128(shift);
        let index = _mm512_mullo_epi32(
            _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
            _mm512_set1_epi32(keys.row as i32),
        );
        for (number, rows) in rows.chunks_exact(16 * keys.row).enumerate() {
            fetch(rows.as_ptr().wrapping_add(AHEAD), rows.len());
            fetch(next.as_ptr().wrapping_add(number * rows.len()), rows.len());
            let mut sums = [_mm512_setzero_ps(); N];
            for pair in 0..groups / 2 {
                // SAFETY: sixteen rows with four bytes of scales each at this place.
                let both = unsafe {
                    let at = rows.as_ptr().add(dim * bits / 8 + 4 * pair);
                    _mm512_i32gather_epi32::<1>(index, at.cast())
                };
                let halves = [_mm512_slli_epi32::<16>(both), _mm512_and_si512(both, _mm512_set1_epi32(-65536))];
                for odd in 0..2 {
                    let group = 2 * pair + odd;
                    // SAFETY: sixteen rows, of which this group's codes are read.
                    let tile = unsafe {
                        let at = rows.as_ptr().add(group * GROUP * bits / 8);
                        if bits == 8 { bytes(at, keys.row) } else { nibbles(at, keys.row) }
                    };
                    let key_scales = _mm512_castsi512_ps(halves[odd]);
                    for n in 0..N {
                        let Group { high, low, excess } = &digits[n * groups + group];
                        let (mut h, mut l) = (_mm512_setzero_si512(), _mm512_setzero_si512());
                        for word in 0..8 {
                            h = _mm512_dpbusd_epi32(h, tile[word], _mm512_set1_epi32(high[word]));
                            l = _mm512_dpbusd_epi32(l, tile[word], _mm512_set1_epi32(low[word]));
                        }
                        let dot = _mm512_sll_epi32(_mm512_add_epi32(_mm512_slli_epi32::<8>(h), l), shift);
                        let dot = _mm512_sub_epi32(dot, _mm512_set1_epi32(*excess));
                        sums[n] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot), key_scales, sums[n]);
                    }
                }
            }
            for n in 0..N {
                let to = &mut scores[n][16 * number..16 * number + 16];
                let scaled = _mm512_mul_ps(sums[n], _mm512_set1_ps(asked.scales[n]));
                // SAFETY: sixteen values.
                unsafe { _mm512_storeu_ps(to.as_mut_ptr(), scaled) };
            }
        }
    });
}

/// Asks for memory, which may be anywhere, into the second-level cache.
#[inline(always)]
fn fetch(at: *const u8, bytes: usize) {
    for line in (0..bytes).step_by(64) {
        // SAFETY: a hint reads nothing, and every processor with AVX-512 has it.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(at.wrapping_add(line).cast()) };
    }
}

#[target_feature(enable = "avx2,fma,bmi2,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
fn fill(digits: &mut Digits, integers: &[i16], bias: i32) {
    digits.groups.clear();
    for group in integers.as_chunks::<GROUP>().0 {
        let (mut high, mut low) = ([0; 8], [0; 8]);
        for (word, four) in group.as_chunks::<4>().0.iter().enumerate() {
            low[word] = i32::from_le_bytes(four.map(|integer| integer as u8));
            high[word] = i32::from_le_bytes(four.map(|integer| ((i32::from(integer) + 128) >> 8) as u8));
        }
        let excess = bias * group.iter().map(|integer| i32::from(*integer)).sum::<i32>();
        digits.groups.push(Group { high, low, excess });
    }
}

/// Codes of 32 values of sixteen rows, plus 128: vector `w` has values `4 w..4 w + 4` of each row.
///
/// # Safety
/// 32 bytes at `at` and at each of the 15 multiples of `stride` behind it can be read.
#[inline]
#[target_feature(enable = "avx2,fma,bmi2,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn bytes(at: *const u8, stride: usize) -> [__m512i; 8] {
    let mut rows = [_mm512_setzero_si512(); 8];
    for row in 0..8 {
        let first = row / 4 * 8 + row % 4;
        // SAFETY: passed on.
        let (low, high) = unsafe {
            let at = at.add(first * stride);
            (_mm256_loadu_si256(at.cast()), _mm256_loadu_si256(at.add(4 * stride).cast()))
        };
        let both = _mm512_inserti64x4::<1>(_mm512_castsi256_si512(low), high);
        rows[row] = _mm512_xor_si512(both, _mm512_set1_epi8(-128));
    }
    // Quarters: values 0..16 and 16..32 of four rows, then of the next four.
    let a = transposed([rows[0], rows[1], rows[2], rows[3]]);
    let b = transposed([rows[4], rows[5], rows[6], rows[7]]);
    let mut out = [_mm512_setzero_si512(); 8];
    for word in 0..4 {
        out[word] = _mm512_shuffle_i32x4::<0x88>(a[word], b[word]);
        out[word + 4] = _mm512_shuffle_i32x4::<0xdd>(a[word], b[word]);
    }
    out
}

/// As [`bytes`], of halves of bytes, and as they are.
///
/// # Safety
/// 16 bytes at `at` and at each of the 15 multiples of `stride` behind it can be read.
#[inline]
#[target_feature(enable = "avx2,fma,bmi2,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn nibbles(at: *const u8, stride: usize) -> [__m512i; 8] {
    let mut rows = [_mm512_setzero_si512(); 4];
    for row in 0..4 {
        // SAFETY: passed on.
        unsafe {
            let at = at.add(row * stride);
            let whole = _mm512_castsi128_si512(_mm_loadu_si128(at.cast()));
            let whole = _mm512_inserti32x4::<1>(whole, _mm_loadu_si128(at.add(4 * stride).cast()));
            let whole = _mm512_inserti32x4::<2>(whole, _mm_loadu_si128(at.add(8 * stride).cast()));
            rows[row] = _mm512_inserti32x4::<3>(whole, _mm_loadu_si128(at.add(12 * stride).cast()));
        }
    }
    let words = transposed(rows);
    let mask = _mm512_set1_epi8(15);
    let mut out = [_mm512_setzero_si512(); 8];
    for word in 0..4 {
        out[word] = _mm512_and_si512(words[word], mask);
        out[word + 4] = _mm512_and_si512(_mm512_srli_epi16::<4>(words[word]), mask);
    }
    out
}

/// In each quarter, word `w` of vector `v` becomes word `v` of vector `w`.
#[inline]
#[target_feature(enable = "avx2,fma,bmi2,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
fn transposed(v: [__m512i; 4]) -> [__m512i; 4] {
    let (a, b) = (_mm512_unpacklo_epi32(v[0], v[1]), _mm512_unpacklo_epi32(v[2], v[3]));
    let (c, d) = (_mm512_unpackhi_epi32(v[0], v[1]), _mm512_unpackhi_epi32(v[2], v[3]));
    [_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b), _mm512_unpacklo_epi64(c, d), _mm512_unpackhi_epi64(c, d)]
}

/// See [`super::integer::collect`].
///
/// # Safety
/// The processor has these features; `rows` are whole rows of `values`, a multiple of 64 and at most [`BLOCK`]; `dim` is a
/// multiple of 64 and at most [`MOST`].
#[target_feature(enable = "avx2,fma,bmi2,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
pub(super) unsafe fn collect<const N: usize>(
    sums: &mut [f32],
    width: usize,
    weights: &[[f32; BLOCK]; N],
    values: &Rounded<'_>,
    rows: &[u8],
    factors: &mut Factors,
) {
    let (dim, bits, stride) = (values.dim.min(MOST), values.bits, values.row);
    let count = rows.len() / stride;
    let quads = (count / QUAD).min(QUADS);
    // SAFETY: passed on.
    unsafe { scales(values, rows, factors) };
    TILE.with_borrow_mut(|tile| {
        let tile = tile.get_or_insert_with(|| {
            let zero = _mm512_setzero_si512();
            Box::new(Tile { values: [[zero; 4]; QUADS], weights: Vec::new() })
        });
        tile.weights.resize(N.max(tile.weights.len()), [[0; 2]; QUADS]);
        for pair in 0..dim / 64 {
            for quad in 0..quads {
                let mut four = [_mm512_setzero_si512(); QUAD];
                for row in 0..QUAD {
                    // SAFETY: rows of the block, of which 64 values are read.
                    four[row] = unsafe {
                        spread(rows.as_ptr().add((place(quad) * QUAD + row) * stride + pair * 8 * bits), bits)
                    };
                }
                tile.values[quad] = interleaved(four);
            }
            let each = &factors.each[2 * pair..2 * pair + 2];
            for (weights, to) in weights.iter().zip(&mut tile.weights) {
                whole(&weights[..count], [&each[0][..count], &each[1][..count]], to);
            }
            let Some(weights_of) = tile.weights.first_chunk::<N>() else { return };
            let (even, odd) = (_mm512_set1_ps(factors.back[2 * pair]), _mm512_set1_ps(factors.back[2 * pair + 1]));
            let back = _mm512_mask_blend_ps(0xaaaa, even, odd);
            for part in 0..4 {
                let (mut high, mut low) = ([_mm512_setzero_si512(); N], [_mm512_setzero_si512(); N]);
                for quad in 0..quads {
                    let values = tile.values[quad][part];
                    for n in 0..N {
                        let digits = &weights_of[n][quad];
                        high[n] = _mm512_dpbusd_epi32(high[n], _mm512_set1_epi64(digits[0]), values);
                        low[n] = _mm512_dpbusd_epi32(low[n], _mm512_set1_epi64(digits[1]), values);
                    }
                }
                let natural = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15);
                for n in 0..N {
                    let total = _mm512_add_epi32(_mm512_slli_epi32::<8>(high[n]), low[n]);
                    let result = _mm512_mul_ps(_mm512_cvtepi32_ps(total), back);
                    let mut out = [0f32; 16];
                    // SAFETY: sixteen values.
                    unsafe { _mm512_storeu_ps(out.as_mut_ptr(), _mm512_permutexvar_ps(natural, result)) };
                    let sums = &mut sums[n * width + 64 * pair..][..64];
                    for (out, sums) in out.as_chunks::<4>().0.iter().zip(sums.chunks_exact_mut(16)) {
                        sums[4 * part..4 * part + 4].copy_from_slice(out);
                    }
                }
            }
        }
    });
}

/// The quad of four positions that comes as number `index`, which is how [`whole`] leaves the weights: sixteen at a time.
#[inline(always)]
fn place(index: usize) -> usize {
    let (base, index) = (index / 16 * 16, index % 16);
    base + index / 8 * 8 + 4 * (index % 2) + index / 2 % 4
}

/// The scales of a block's values.
///
/// # Safety
/// As for [`collect`].
#[inline]
#[target_feature(enable = "avx2,fma,bmi2,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn scales(values: &Rounded<'_>, rows: &[u8], factors: &mut Factors) {
    let index = _mm512_mullo_epi32(
        _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
        _mm512_set1_epi32(values.row as i32),
    );
    for pair in 0..values.dim / 64 {
        for (number, rows) in rows.chunks_exact(16 * values.row).enumerate() {
            // SAFETY: sixteen rows with four bytes of scales each at this place.
            let both = unsafe {
                let at = rows.as_ptr().add(values.dim * values.bits / 8 + 4 * pair);
                _mm512_i32gather_epi32::<1>(index, at.cast())
            };
            let halves = [_mm512_slli_epi32::<16>(both), _mm512_and_si512(both, _mm512_set1_epi32(-65536))];
            for (odd, half) in halves.into_iter().enumerate() {
                let to = &mut factors.each[2 * pair + odd][16 * number..16 * number + 16];
                // SAFETY: sixteen values.
                unsafe { _mm512_storeu_ps(to.as_mut_ptr(), _mm512_castsi512_ps(half)) };
            }
        }
    }
    for group in 0..values.dim / GROUP {
        factors.finish(group, rows.len() / values.row);
    }
}

/// 64 values of a row as signed bytes, in their order.
///
/// # Safety
/// `8 * bits` bytes can be read.
#[inline]
#[target_feature(enable = "avx2,fma,bmi2,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn spread(at: *const u8, bits: usize) -> __m512i {
    if bits == 8 {
        // SAFETY: passed on.
        return unsafe { _mm512_loadu_si512(at.cast()) };
    }
    // SAFETY: passed on.
    let both = unsafe { _mm256_loadu_si256(at.cast()) };
    let (mask, high) = (_mm256_set1_epi8(15), _mm256_srli_epi16::<4>(both));
    let low = _mm512_castsi256_si512(_mm256_and_si256(both, mask));
    let codes = _mm512_inserti64x4::<1>(low, _mm256_and_si256(high, mask));
    // Each half has sixteen values of the one group, then of the other.
    let codes = _mm512_shuffle_i32x4::<0xd8>(codes, codes);
    _mm512_sub_epi8(_mm512_add_epi8(codes, codes), _mm512_set1_epi8(15))
}

/// Four rows of 64 values: each lane gets one value of all four; even lanes are of the first 32, odd ones of the others.
#[inline]
#[target_feature(enable = "avx2,fma,bmi2,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
fn interleaved([a, b, c, d]: [__m512i; 4]) -> [__m512i; 4] {
    let lows = (_mm512_unpacklo_epi8(a, b), _mm512_unpacklo_epi8(c, d));
    let highs = (_mm512_unpackhi_epi8(a, b), _mm512_unpackhi_epi8(c, d));
    let order = _mm512_setr_epi32(0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15);
    let parts = [
        _mm512_unpacklo_epi16(lows.0, lows.1),
        _mm512_unpackhi_epi16(lows.0, lows.1),
        _mm512_unpacklo_epi16(highs.0, highs.1),
        _mm512_unpackhi_epi16(highs.0, highs.1),
    ];
    let mut out = parts;
    for part in 0..4 {
        out[part] = _mm512_permutexvar_epi32(order, parts[part]);
    }
    out
}

/// Weights times the factors of two groups, as integers of two digits, quad by quad in the order of [`place`].
#[inline]
#[target_feature(enable = "avx2,fma,bmi2,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
fn whole(weights: &[f32], factors: [&[f32]; 2], to: &mut [[i64; 2]; QUADS]) {
    let low_bytes = _mm512_set1_epi16(255);
    for (number, weights) in weights.as_chunks::<64>().0.iter().enumerate() {
        let mut digits = [[_mm512_setzero_si512(); 2]; 2];
        for group in 0..2 {
            let factors = &factors[group][64 * number..64 * number + 64];
            let mut integers = [_mm512_setzero_si512(); 4];
            for part in 0..4 {
                // SAFETY: sixteen values of 64.
                let (weight, factor) = unsafe {
                    (_mm512_loadu_ps(weights.as_ptr().add(16 * part)), _mm512_loadu_ps(factors.as_ptr().add(16 * part)))
                };
                integers[part] = _mm512_cvtps_epi32(_mm512_mul_ps(weight, factor));
            }
            let a = _mm512_packus_epi32(integers[0], integers[1]);
            let b = _mm512_packus_epi32(integers[2], integers[3]);
            digits[group] = [
                _mm512_packus_epi16(_mm512_srli_epi16::<8>(a), _mm512_srli_epi16::<8>(b)),
                _mm512_packus_epi16(_mm512_and_si512(a, low_bytes), _mm512_and_si512(b, low_bytes)),
            ];
        }
        for digit in 0..2 {
            let (even, odd) = (digits[0][digit], digits[1][digit]);
            for (half, quads) in
                [_mm512_unpacklo_epi32(even, odd), _mm512_unpackhi_epi32(even, odd)].into_iter().enumerate()
            {
                let mut out = [0i64; 8];
                // SAFETY: eight values.
                unsafe { _mm512_storeu_si512(out.as_mut_ptr().cast(), quads) };
                for (to, out) in to[16 * number + 8 * half..].iter_mut().zip(out) {
                    to[digit] = out;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;
