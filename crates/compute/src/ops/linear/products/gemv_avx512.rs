//! Matrix-vector products (gemv) with AVX-512: two rows of weights at a time, one in each half of a register.

use std::arch::x86_64::*;

use super::{
    operands::{AffineProduct, Product},
    scratch::SimdScratch,
    x86,
};
use crate::ops::{quant::QuantizedRow, simd::vector::sum8_avx};

/// [`super::multiply`] for the whole pairs in `rows`. Returns the number of rows that were computed.
///
/// # Safety
/// As for [`super::multiply`].
#[target_feature(enable = "avx2,fma,bmi2,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
pub unsafe fn rows(product: &AffineProduct<'_>, scratch: &mut SimdScratch) -> usize {
    // SAFETY: guaranteed by the caller.
    unsafe {
        match (product.weight.bits, product.weight.group) {
            // A group of 32 4-bit codes does not fill half a register.
            (4, 32) => 0,
            (4, 64) => pairs::<4, 64>(product, scratch),
            (4, _) => pairs::<4, 128>(product, scratch),
            (8, 32) => pairs::<8, 32>(product, scratch),
            (8, 64) => pairs::<8, 64>(product, scratch),
            (8, _) => pairs::<8, 128>(product, scratch),
            (_, 32) => pairs::<0, 32>(product, scratch),
            (_, 64) => pairs::<0, 64>(product, scratch),
            (_, _) => pairs::<0, 128>(product, scratch),
        }
    }
}

/// `BITS` is 4 or 8, or 0 for the widths that are unpacked to bytes first.
#[inline]
#[target_feature(enable = "avx2,fma,bmi2,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn pairs<const BITS: usize, const GROUP: usize>(
    product: &AffineProduct<'_>,
    scratch: &mut SimdScratch,
) -> usize {
    let Product { weight, rows, inputs, outs } = product;
    let count = rows.len() / 2 * 2;
    for row in (rows.start..rows.start + count).step_by(2) {
        let mut codes = [weight.codes(row), weight.codes(row + 1)];
        for (index, loaded) in scratch.rows.iter_mut().enumerate() {
            // SAFETY: the processor has BMI2.
            unsafe { x86::load_row::<BITS>(weight, row + index, loaded) };
        }
        if BITS == 0 {
            codes = [&scratch.rows[0].bytes, &scratch.rows[1].bytes];
        }
        let constants = [scratch.rows[0].constants.as_slice(), &scratch.rows[1].constants];
        for (input, out) in inputs.iter().zip(*outs) {
            // SAFETY: codes, constants and digits have a row's length. The caller allows writes to these outputs.
            unsafe {
                let lanes = dot::<BITS, GROUP>(codes, constants, &input.digits);
                let a = _mm512_castps512_ps256(lanes);
                let b = _mm512_extractf32x8_ps::<1>(lanes);
                out.0.add(row).write(sum8_avx(a) * weight.global_scale);
                out.0.add(row + 1).write(sum8_avx(b) * weight.global_scale);
            }
        }
    }
    count
}

/// Dot products of two rows: the eight lanes of the first row, then those of the second.
#[inline]
#[target_feature(enable = "avx2,fma,bmi2,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn dot<const BITS: usize, const GROUP: usize>(
    codes: [&[u8]; 2],
    constants: [&[f32]; 2],
    x: &QuantizedRow<'_>,
) -> __m512 {
    let step = if BITS == 4 { GROUP / 2 } else { GROUP };
    let groups = codes[0].len() / step;
    let padded = constants[0].len() / 2;
    let mut lanes = _mm512_setzero_ps();
    for first in (0..groups).step_by(8) {
        let mut sums = [_mm512_setzero_si512(); 8];
        // SAFETY: reads only whole groups below `groups`, which codes and digits have. Constants, scales and sums
        // are padded to a multiple of eight.
        unsafe {
            // The second row's codes follow the first row's codes, so both rows are prefetched in memory order, some
            // lines with each group.
            let ahead = |group: usize| {
                for line in (0..2 * step).step_by(64).take_while(|_| BITS != 0) {
                    x86::prefetch(codes[0].as_ptr().wrapping_add(2 * step * group + line + x86::PREFETCH_BYTES));
                }
            };
            if groups - first >= 8 {
                for (index, sum) in sums.iter_mut().enumerate() {
                    ahead(first + index);
                    *sum = partial::<BITS, GROUP>(codes, first + index, x);
                }
            } else {
                for (index, sum) in sums.iter_mut().enumerate().take(groups - first) {
                    ahead(first + index);
                    *sum = partial::<BITS, GROUP>(codes, first + index, x);
                }
            }
            let both =
                |at: usize| load_pair(constants[0].as_ptr().add(at).cast(), constants[1].as_ptr().add(at).cast());
            let same = |at: &[f32]| _mm512_broadcast_f32x8(_mm256_loadu_ps(at.as_ptr().add(first)));
            let scale = _mm512_mul_ps(_mm512_castsi512_ps(both(first)), same(x.scale));
            lanes = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum_vectors(sums)), scale, lanes);
            lanes = _mm512_fmadd_ps(_mm512_castsi512_ps(both(padded + first)), same(x.sum), lanes);
        }
    }
    lanes
}

/// Loads 32 bytes from each address.
#[inline]
#[target_feature(enable = "avx512f,avx512dq")]
unsafe fn load_pair(a: *const u8, b: *const u8) -> __m512i {
    // SAFETY: readable at any alignment (caller).
    unsafe {
        let a = _mm512_castsi256_si512(_mm256_loadu_si256(a.cast()));
        _mm512_inserti64x4::<1>(a, _mm256_loadu_si256(b.cast()))
    }
}

/// Dot products of one group of two rows, eight partial sums for each row.
#[inline]
#[target_feature(enable = "avx2,fma,bmi2,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn partial<const BITS: usize, const GROUP: usize>(
    codes: [&[u8]; 2],
    group: usize,
    x: &QuantizedRow<'_>,
) -> __m512i {
    let mask = _mm512_set1_epi8(15);
    let mut total = _mm512_setzero_si512();
    // SAFETY: codes and digits have this group (caller).
    unsafe {
        let digits =
            |x: &[i8], at: usize| _mm512_broadcast_i64x4(_mm256_loadu_si256(x.as_ptr().add(group * GROUP + at).cast()));
        if BITS == 4 {
            for at in (0..GROUP).step_by(64) {
                let place = (group * GROUP + at) / 2;
                let both = load_pair(codes[0].as_ptr().add(place), codes[1].as_ptr().add(place));
                let even = _mm512_and_si512(both, mask);
                let odd = _mm512_and_si512(_mm512_srli_epi16::<4>(both), mask);
                let mut sum = _mm512_setzero_si512();
                for plane in x.planes {
                    sum = _mm512_dpbusd_epi32(_mm512_slli_epi32::<8>(sum), even, digits(plane, at));
                    sum = _mm512_dpbusd_epi32(sum, odd, digits(plane, at + 32));
                }
                total = _mm512_add_epi32(total, sum);
            }
        } else {
            for plane in x.planes {
                total = _mm512_slli_epi32::<8>(total);
                for at in (0..GROUP).step_by(32) {
                    let place = group * GROUP + at;
                    let both = load_pair(codes[0].as_ptr().add(place), codes[1].as_ptr().add(place));
                    total = _mm512_dpbusd_epi32(total, both, digits(plane, at));
                }
            }
        }
    }
    total
}

/// Lane `i` of each half is the sum of that half of vector `i`.
#[inline]
#[target_feature(enable = "avx512f")]
fn sum_vectors(v: [__m512i; 8]) -> __m512i {
    let halves = |a, b| _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
    let quarters = |a, b| _mm512_add_epi32(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
    // In each 128-bit lane, `low` has the partial sums of vectors 0 to 3, and `high` those of vectors 4 to 7. Each row
    // has two lanes of both.
    let low = quarters(halves(v[0], v[1]), halves(v[2], v[3]));
    let high = quarters(halves(v[4], v[5]), halves(v[6], v[7]));
    let first = _mm512_permutex2var_epi64(low, _mm512_setr_epi64(0, 1, 8, 9, 4, 5, 12, 13), high);
    let second = _mm512_permutex2var_epi64(low, _mm512_setr_epi64(2, 3, 10, 11, 6, 7, 14, 15), high);
    _mm512_add_epi32(first, second)
}
