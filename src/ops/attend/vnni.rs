//! [`super::integer`] with AVX-512 and VNNI, to the same bytes.
//!
//! Keys are transposed sixteen at a time, so that lanes are keys and a group's scales are one vector; queries meet them as
//! broadcasts of four bytes, in two digits. Values are interleaved four positions at a time, so that lanes are dimensions; the
//! weights of four positions meet them as broadcasts, in two digits as well.

// Arrays of registers: counted loops are unrolled, adapters around closures are not compiled for these instructions.
#![allow(clippy::needless_range_loop)]

mod codes;

use self::codes::{bytes, interleaved, nibbles, spread};
use super::{
    cpu::BLOCK,
    integer::{Asked, Factors, MOST},
    rounded::{GROUP, Rounded},
};
use std::{arch::x86_64::*, cell::RefCell};

/// Sets of sixteen keys that meet the same broadcasts of queries.
const SETS: usize = 2;
/// Positions in a quad, and quads in a block.
const QUAD: usize = 4;
const QUADS: usize = BLOCK / QUAD;

/// A block of values and weights, in the order in which they meet.
struct Tile {
    values: [[__m512i; 4]; QUADS],
    /// Of each query the two digits of the weights of each quad, for two groups.
    weights: Vec<[[i64; QUADS]; 2]>,
}

thread_local! {
    static TILE: RefCell<Option<Box<Tile>>> = const { RefCell::new(None) };
}

/// See [`super::integer::compare`].
///
/// # Safety
/// The processor has these features; `rows` are whole rows of `keys`, a multiple of 32 and at most [`BLOCK`]. `next` are the rows
/// that are wanted afterwards.
#[target_feature(enable = "avx2,fma,bmi2,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
pub(super) unsafe fn compare<const N: usize>(
    asked: &Asked,
    first: usize,
    keys: &Rounded<'_>,
    [rows, next]: [&[u8]; 2],
    scores: &mut [[f32; BLOCK]; N],
) {
    let (dim, groups, bits) = (keys.dim, keys.dim / GROUP, keys.bits);
    let [high, low] = [&asked.high, &asked.low].map(|digits| digits[first * dim..][..N * dim].as_chunks::<GROUP>().0);
    let query_scales = &asked.scales[first..first + N];
    // Codes are integers plus 128, or plus 15.
    let bias = if bits == 8 { 128 } else { 15 };
    let mut excess = [[0; N]; MOST / GROUP];
    for (n, sums) in asked.sums[first * groups..].chunks_exact(groups).enumerate().take(N) {
        for (excess, sum) in excess.iter_mut().zip(sums) {
            excess[n] = -bias * sum;
        }
    }
    let index = _mm512_mullo_epi32(
        _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
        _mm512_set1_epi32(keys.row as i32),
    );
    for (number, rows) in rows.chunks_exact(SETS * 16 * keys.row).enumerate() {
        let next = next.as_ptr().wrapping_add(number * rows.len());
        let set = rows.len() / SETS;
        let mut sums = [[_mm512_setzero_ps(); SETS]; N];
        for pair in 0..groups / 2 {
            let mut scales = [[_mm512_setzero_ps(); SETS]; 2];
            for k in 0..SETS {
                // SAFETY: sixteen rows with four bytes of scales each at this place.
                let both = unsafe {
                    let at = rows.as_ptr().add(k * set + dim * bits / 8 + 4 * pair);
                    _mm512_i32gather_epi32::<1>(index, at.cast())
                };
                scales[0][k] = _mm512_castsi512_ps(_mm512_slli_epi32::<16>(both));
                scales[1][k] = _mm512_castsi512_ps(_mm512_and_si512(both, _mm512_set1_epi32(-65536)));
            }
            for odd in 0..2 {
                let group = 2 * pair + odd;
                let mut tile = [[_mm512_setzero_si512(); 8]; SETS];
                for k in 0..SETS {
                    // SAFETY: sixteen rows, of which this group's codes are read.
                    tile[k] = unsafe {
                        let at = rows.as_ptr().add(k * set + group * GROUP * bits / 8);
                        if bits == 8 { bytes(at, keys.row) } else { nibbles(at, keys.row) }
                    };
                }
                for n in 0..N {
                    // Little by little, since only so many lines can be under way.
                    let piece = rows.len() / (groups * N);
                    fetch(next.wrapping_add((group * N + n) * piece), piece);
                    let (high, low) = (words(&high[n * groups + group]), words(&low[n * groups + group]));
                    let mut h = [_mm512_setzero_si512(); SETS];
                    let mut l = [_mm512_set1_epi32(excess[group][n]); SETS];
                    for word in 0..8 {
                        let (high, low) = (_mm512_set1_epi32(high[word]), _mm512_set1_epi32(low[word]));
                        for k in 0..SETS {
                            h[k] = _mm512_dpbusd_epi32(h[k], tile[k][word], high);
                            l[k] = _mm512_dpbusd_epi32(l[k], tile[k][word], low);
                        }
                    }
                    for k in 0..SETS {
                        let dot = _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32::<8>(h[k]), l[k]));
                        sums[n][k] = _mm512_fmadd_ps(dot, scales[odd][k], sums[n][k]);
                    }
                }
            }
        }
        for n in 0..N {
            for k in 0..SETS {
                let to = &mut scores[n][16 * (SETS * number + k)..][..16];
                let scaled = _mm512_mul_ps(sums[n][k], _mm512_set1_ps(query_scales[n]));
                // SAFETY: sixteen values.
                unsafe { _mm512_storeu_ps(to.as_mut_ptr(), scaled) };
            }
        }
    }
}

/// Four digits in each word.
#[inline(always)]
fn words(digits: &[i8; GROUP]) -> [i32; GROUP / 4] {
    bytemuck::cast(*digits)
}

/// Asks for the lines that begin in some memory, which may be anywhere, into the second-level cache.
#[inline(always)]
fn fetch(at: *const u8, bytes: usize) {
    for line in ((at as usize).wrapping_neg() % 64..bytes).step_by(64) {
        // SAFETY: a hint reads nothing, and every processor with AVX-512 has it.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(at.wrapping_add(line).cast()) };
    }
}

/// See [`super::integer::collect`].
///
/// # Safety
/// The processor has these features; `rows` are whole rows of `values`, a multiple of 64 and at most [`BLOCK`]; `dim` is a
/// multiple of 64 and at most [`MOST`]. `next` is wanted afterwards.
#[target_feature(enable = "avx2,fma,bmi2,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
pub(super) unsafe fn collect<const N: usize>(
    sums: &mut [f32],
    width: usize,
    weights: &[[f32; BLOCK]; N],
    values: &Rounded<'_>,
    [rows, next]: [&[u8]; 2],
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
        tile.weights.resize(N.max(tile.weights.len()), [[0; QUADS]; 2]);
        // A third of what is wanted next is asked for while values are interleaved, the rest while they meet weights.
        let steps = dim / 64 * quads.max(1);
        let [ahead, piece] = [rows.len() / 3 / steps, rows.len() * 2 / 3 / (steps * N.div_ceil(2))];
        let [early, late] = [0, rows.len() / 3].map(|at| next.as_ptr().wrapping_add(at));
        for pair in 0..dim / 64 {
            for quad in 0..quads {
                fetch(early.wrapping_add((pair * quads + quad) * ahead), ahead);
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
            let (even, odd) = (_mm512_set1_ps(factors.back[2 * pair]), _mm512_set1_ps(factors.back[2 * pair + 1]));
            let back = _mm512_mask_blend_ps(0xaaaa, even, odd);
            let (values, mut n) = (&tile.values[..quads], 0);
            while n < N {
                let next = late.wrapping_add((pair * N.div_ceil(2) + n / 2) * quads * piece);
                let sums = &mut sums[n * width + 64 * pair..];
                n += if N - n > 1 {
                    meet::<2>(values, &tile.weights[n..], back, sums, width, next, piece)
                } else {
                    meet::<1>(values, &tile.weights[n..], back, sums, width, next, piece)
                };
            }
        }
    });
}

/// The weighted sums of 64 values for `M` queries.
#[inline]
#[target_feature(enable = "avx2,fma,bmi2,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
fn meet<const M: usize>(
    values: &[[__m512i; 4]],
    weights: &[[[i64; QUADS]; 2]],
    back: __m512,
    sums: &mut [f32],
    width: usize,
    next: *const u8,
    ahead: usize,
) -> usize {
    let Some(weights) = weights.first_chunk::<M>() else { return M };
    let mut totals = [[[_mm512_setzero_si512(); 2]; 4]; M];
    for (quad, values) in values.iter().enumerate() {
        fetch(next.wrapping_add(quad * ahead), ahead);
        for n in 0..M {
            for digit in 0..2 {
                let weight = _mm512_set1_epi64(weights[n][digit][quad]);
                for part in 0..4 {
                    totals[n][part][digit] = _mm512_dpbusd_epi32(totals[n][part][digit], weight, values[part]);
                }
            }
        }
    }
    let natural = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15);
    for n in 0..M {
        for part in 0..4 {
            let [high, low] = totals[n][part];
            let total = _mm512_add_epi32(_mm512_slli_epi32::<8>(high), low);
            let result = _mm512_mul_ps(_mm512_cvtepi32_ps(total), back);
            let mut out = [0f32; 16];
            // SAFETY: sixteen values.
            unsafe { _mm512_storeu_ps(out.as_mut_ptr(), _mm512_permutexvar_ps(natural, result)) };
            for (out, sums) in out.as_chunks::<4>().0.iter().zip(sums[n * width..][..64].chunks_exact_mut(16)) {
                sums[4 * part..4 * part + 4].copy_from_slice(out);
            }
        }
    }
    M
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

/// Weights times the factors of two groups, as integers of two digits, quad by quad in the order of [`place`].
#[inline]
#[target_feature(enable = "avx2,fma,bmi2,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
fn whole(weights: &[f32], factors: [&[f32]; 2], to: &mut [[i64; QUADS]; 2]) {
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
                let to = &mut to[digit][16 * number + 8 * half..][..8];
                // SAFETY: eight values.
                unsafe { _mm512_storeu_si512(to.as_mut_ptr().cast(), quads) };
            }
        }
    }
}

#[cfg(test)]
mod tests;
