//! Matrix products with several rows of activations (gemm), with AVX-512.
//!
//! Unpacks 16 or 32 rows of weights into a tile and multiplies it with all inputs. The lanes of a tile's vectors are
//! rows of weights, so no sums across a register are needed. A vector holds four columns of 16 rows. The digits of
//! an input are broadcast four bytes at a time. Each group's integer sums become f32 and are added to one of eight
//! accumulators, in the order that [`super`] defines.
//!
//! A few groups are unpacked at a time, so that they stay in L1 for all inputs. Prefetches of the next rows are
//! spread over these products, because a core tracks a limited number of misses.

use std::{arch::x86_64::*, ops::Range};

use super::{
    operands::{Activations, AffineProduct, AffineWeight, Product},
    scratch::SimdScratch,
    tile_avx512::{ROWS, WeightTiles, ensure_len, fill_codes, fill_constants},
};
use crate::ops::{quant::QuantizedRow, simd::CacheLine};

/// Number of accumulators of a row.
const LANES: usize = 8;
/// Maximum number of inputs for which only four groups are unpacked at a time, so that prefetched lines arrive in time.
/// With more inputs, all groups of a row are unpacked at once, because the inputs' digits come from L2, in order.
const FEW_INPUTS: usize = 16;

/// [`super::multiply`] for the whole tiles in `rows`. Returns the number of rows that were computed.
///
/// # Safety
/// As for [`super::multiply`].
#[target_feature(enable = "avx2,fma,bmi2,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
pub unsafe fn rows(product: &AffineProduct<'_>, scratch: &mut SimdScratch) -> usize {
    let rows = &product.rows;
    let mut row = rows.start;
    // SAFETY: the rows exist. The caller guarantees the rest.
    unsafe {
        while rows.end - row >= 2 * ROWS {
            block::<2>(product, row, &mut scratch.tiles);
            row += 2 * ROWS;
        }
        if rows.end - row >= ROWS {
            block::<1>(product, row, &mut scratch.tiles);
            row += ROWS;
        }
    }
    row - rows.start
}

/// Multiplies `M` tiles of weights, from `row` on, with all inputs.
#[inline]
#[target_feature(enable = "avx2,fma,bmi2,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn block<const M: usize>(product: &AffineProduct<'_>, row: usize, tiles: &mut WeightTiles) {
    let Product { weight, inputs, .. } = product;
    let groups = weight.groups();
    let few = inputs.len() <= FEW_INPUTS;
    let step = if few { LANES / 2 } else { groups };
    ensure_len(&mut tiles.lanes, if few { inputs.len() } else { 4 } * M * LANES);
    // SAFETY: the rows exist, and the accumulators have been allocated. The caller guarantees the rest.
    unsafe {
        for tile in 0..M {
            fill_constants::<M>(weight, row + tile * ROWS, tiles, tile);
        }
        for first in (0..groups).step_by(step) {
            let some = first..(first + step).min(groups);
            for tile in 0..M {
                fill_codes::<M>(weight, row + tile * ROWS, some.clone(), tiles, tile);
            }
            all_inputs::<M>(product, row, some, tiles);
        }
    }
}

/// Prefetches, for one group of the `rows` rows after those from `row` on, the constants and the code bytes beyond
/// four bits. The products prefetch the rest.
#[inline(always)]
fn prefetch_rows(weight: &AffineWeight<'_>, row: usize, rows: usize, group: usize) {
    let (scales, biases) = weight.constants(row);
    let codes = weight.group * weight.bits.saturating_sub(4) / 8;
    let constant = weight.float.bytes();
    for (part, bytes) in [(scales, rows * constant), (biases, rows * constant), (weight.codes(row), rows * codes)] {
        let from = part.as_ptr().wrapping_add(rows * part.len() + bytes * group);
        for line in (0..bytes).step_by(64) {
            // SAFETY: a prefetch may use any address.
            unsafe { _mm_prefetch::<_MM_HINT_T1>(from.wrapping_add(line).cast()) };
        }
    }
}

/// Multiplies `groups`, whose codes are in tiles, with every input. Stores the results after the last group.
#[inline]
#[target_feature(enable = "avx2,fma,bmi2,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn all_inputs<const M: usize>(
    product: &AffineProduct<'_>,
    row: usize,
    groups: Range<usize>,
    tiles: &mut WeightTiles,
) {
    let Product { weight, inputs, outs, .. } = product;
    // The next rows are prefetched shortly before they are needed: by the last four inputs, and by a rest of one to
    // three inputs.
    let last_four = (inputs.len() / 4).saturating_sub(1);
    let whole = groups == (0..weight.groups());
    let last = groups.end == weight.groups();
    for (index, (inputs, outs)) in inputs.chunks(4).zip(outs.chunks(4)).enumerate() {
        // If all groups are computed at once, every four inputs reuse the same accumulators.
        let at = if whole { 0 } else { index * 4 * M * LANES };
        // SAFETY: guaranteed by the caller. There are as many outs as inputs, and accumulators for them.
        unsafe {
            let lanes = tiles.lanes.as_mut_ptr().add(at);
            let groups = groups.clone();
            match *inputs {
                [a] => some_inputs::<M, 1, true>(weight, row, groups, &[a], lanes, tiles),
                [a, b] => some_inputs::<M, 2, true>(weight, row, groups, &[a, b], lanes, tiles),
                [a, b, c] => some_inputs::<M, 3, true>(weight, row, groups, &[a, b, c], lanes, tiles),
                [a, b, c, d] if index == last_four => {
                    some_inputs::<M, 4, true>(weight, row, groups, &[a, b, c, d], lanes, tiles);
                }
                [a, b, c, d] => some_inputs::<M, 4, false>(weight, row, groups, &[a, b, c, d], lanes, tiles),
                _ => {}
            }
            for (index, out) in outs.iter().enumerate().filter(|_| last) {
                for m in 0..M {
                    store_lanes(lanes.add((index * M + m) * LANES), weight, out.0.add(row + m * ROWS));
                }
            }
        }
    }
}

/// Computes sixteen results at `to` from the accumulators at `from`.
#[inline]
#[target_feature(enable = "avx2,fma,bmi2,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn store_lanes(from: *const CacheLine, weight: &AffineWeight<'_>, to: *mut f32) {
    let groups = weight.groups();
    let mut lanes = [_mm512_setzero_ps(); LANES];
    // SAFETY: the accumulators exist, and `to` has enough space (caller).
    unsafe {
        for (lane, value) in lanes.iter_mut().enumerate() {
            if lane < groups {
                *value = _mm512_load_ps(from.add(lane).cast());
            }
        }
        finish(lanes, groups, weight.global_scale, to);
    }
}

/// Multiplies `M` tiles with `N` inputs, whose accumulators are at `lanes`.
#[inline]
#[target_feature(enable = "avx2,fma,bmi2,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn some_inputs<const M: usize, const N: usize, const PREFETCH: bool>(
    weight: &AffineWeight<'_>,
    row: usize,
    groups: Range<usize>,
    inputs: &[Activations<'_>; N],
    lanes: *mut CacheLine,
    tiles: &WeightTiles,
) {
    let words = weight.group / 4;
    let zero = _mm512_setzero_si512();
    // SAFETY: tiles and digits have these groups of `words` words. Each input and tile has eight accumulators
    // (caller).
    unsafe {
        // Not `map`, because its closure would not be compiled for these instructions.
        let mut planes = [[std::ptr::null::<i32>(); 3]; N];
        for (planes, input) in planes.iter_mut().zip(inputs) {
            for (plane, digits) in planes.iter_mut().zip(&input.digits.planes) {
                *plane = digits.as_ptr().cast();
            }
        }
        let codes = tiles.codes.as_ptr().wrapping_sub(groups.start * words * M);
        let next = weight.codes(row).as_ptr().wrapping_add(M * ROWS * weight.cols * weight.bits / 8);
        for group in groups {
            if PREFETCH {
                prefetch_rows(weight, row, M * ROWS, group);
            }
            let mut sums = [[[zero; M]; 3]; N];
            for word in group * words..(group + 1) * words {
                if PREFETCH {
                    _mm_prefetch::<_MM_HINT_T1>(next.wrapping_add(word * 64).cast());
                }
                let mut four = [zero; M];
                for (m, four) in four.iter_mut().enumerate() {
                    *four = _mm512_load_si512(codes.wrapping_add(word * M + m).cast());
                }
                for (sums, planes) in sums.iter_mut().zip(&planes) {
                    for (sums, plane) in sums.iter_mut().zip(planes) {
                        let digits = _mm512_set1_epi32(plane.add(word).read_unaligned());
                        for (sum, four) in sums.iter_mut().zip(four) {
                            *sum = _mm512_dpbusd_epi32(*sum, four, digits);
                        }
                    }
                }
            }
            for m in 0..M {
                let scale = _mm512_load_ps(tiles.scales.as_ptr().add(group * M + m).cast());
                let bias = _mm512_load_ps(tiles.biases.as_ptr().add(group * M + m).cast());
                for n in 0..N {
                    let sums = [sums[n][0][m], sums[n][1][m], sums[n][2][m]];
                    let place = lanes.add((n * M + m) * LANES + group % LANES).cast();
                    let mut lane = if group < LANES { _mm512_setzero_ps() } else { _mm512_load_ps(place) };
                    accumulate(sums, [scale, bias], broadcast(&inputs[n].digits, group), &mut lane);
                    _mm512_store_ps(place, lane);
                }
            }
        }
    }
}

/// Adds the integer sums of one group, one register for each digit, to an accumulator. `weights` are scale and bias,
/// `inputs` scale and sum.
#[inline]
#[target_feature(enable = "avx2,fma,bmi2,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
fn accumulate(sums: [__m512i; 3], weights: [__m512; 2], inputs: [__m512; 2], lane: &mut __m512) {
    let [high, middle, low] = sums;
    let upper = _mm512_add_epi32(_mm512_slli_epi32::<8>(high), middle);
    let dot = _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32::<8>(upper), low));
    *lane = _mm512_fmadd_ps(dot, _mm512_mul_ps(weights[0], inputs[0]), *lane);
    *lane = _mm512_fmadd_ps(weights[1], inputs[1], *lane);
}

/// Scale and sum of an input's group, broadcast to all lanes.
///
/// # Safety
/// The input has that group.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn broadcast(input: &QuantizedRow<'_>, group: usize) -> [__m512; 2] {
    // SAFETY: guaranteed by the caller.
    unsafe { [_mm512_set1_ps(*input.scale.get_unchecked(group)), _mm512_set1_ps(*input.sum.get_unchecked(group))] }
}

/// Adds the accumulators of `groups` groups and stores sixteen results at `to`.
///
/// # Safety
/// `to` has space for sixteen values.
#[inline]
#[target_feature(enable = "avx2,fma,bmi2,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn finish(mut l: [__m512; LANES], groups: usize, global_scale: f32, to: *mut f32) {
    let rest = groups % LANES;
    if rest != 0 {
        // The zero groups of the padding turn -0 into 0.
        for (index, lane) in l.iter_mut().enumerate() {
            if index >= rest {
                *lane = _mm512_add_ps(*lane, _mm512_setzero_ps());
            }
        }
    }
    let sum = |a: __m512, b: __m512| _mm512_add_ps(a, b);
    let total = sum(sum(sum(l[0], l[4]), sum(l[2], l[6])), sum(sum(l[1], l[5]), sum(l[3], l[7])));
    // SAFETY: guaranteed by the caller.
    unsafe { _mm512_storeu_ps(to, _mm512_mul_ps(total, _mm512_set1_ps(global_scale))) };
}
