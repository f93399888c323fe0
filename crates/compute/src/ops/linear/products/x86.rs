//! Code that AVX2 and AVX-512 share: one row of weights, read once in order, times one row of activations.

use std::arch::x86_64::*;

use super::{
    operands::{AffineProduct, AffineWeight, Product, WeightRow, pdep_mask},
    scratch::SimdScratch,
};
use crate::ops::{
    quant::{QuantizedRow, unpack},
    simd::vector::sum8_avx,
};

/// Prefetch distance ahead of the codes that are read, in bytes.
pub(super) const PREFETCH_BYTES: usize = 4096;

/// Dot products of one group as eight partial sums, with 32-byte vectors.
pub(super) trait GroupDot {
    /// `GROUP` packed 4-bit codes at `codes` times the three planes of digits at `x`, which are in nibble order.
    ///
    /// # Safety
    /// `GROUP / 2` codes and `GROUP` digits are readable.
    unsafe fn nibbles<const GROUP: usize>(codes: *const u8, x: [*const i8; 3]) -> __m256i;

    /// `GROUP` codes of one byte times the digits at `x`. If `WIDE` is true, codes may have any value, otherwise at
    /// most 63.
    ///
    /// # Safety
    /// `GROUP` codes and digits are readable.
    unsafe fn bytes<const GROUP: usize, const WIDE: bool>(codes: *const u8, x: [*const i8; 3]) -> __m256i;
}

/// See [`super::multiply`]. Must be inlined into a function that has the instructions of `D`, FMA and BMI2.
#[inline(always)]
pub(super) unsafe fn rows<D: GroupDot>(product: &AffineProduct<'_>, scratch: &mut SimdScratch) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        match (product.weight.bits, product.weight.group) {
            (4, 32) => rows_of::<D, 4, 32>(product, scratch),
            (4, 64) => rows_of::<D, 4, 64>(product, scratch),
            (4, _) => rows_of::<D, 4, 128>(product, scratch),
            (8, 32) => rows_of::<D, 8, 32>(product, scratch),
            (8, 64) => rows_of::<D, 8, 64>(product, scratch),
            (8, _) => rows_of::<D, 8, 128>(product, scratch),
            (_, 32) => rows_of::<D, 0, 32>(product, scratch),
            (_, 64) => rows_of::<D, 0, 64>(product, scratch),
            (_, _) => rows_of::<D, 0, 128>(product, scratch),
        }
    }
}

/// `BITS` is 4 or 8, or 0 for the widths that are unpacked to bytes first.
#[inline(always)]
unsafe fn rows_of<D: GroupDot, const BITS: usize, const GROUP: usize>(
    product: &AffineProduct<'_>,
    scratch: &mut SimdScratch,
) {
    let Product { weight, rows, inputs, outs } = product;
    for row in rows.clone() {
        let loaded = &mut scratch.rows[0];
        // SAFETY: the processor has BMI2.
        unsafe { load_row::<BITS>(weight, row, loaded) };
        let codes = if BITS == 0 { &loaded.bytes } else { weight.codes(row) };
        for (input, out) in inputs.iter().zip(*outs) {
            // SAFETY: codes, constants and digits have a row's length. The caller allows writes to this output.
            unsafe {
                let sum = dot::<D, BITS, GROUP>(codes, &loaded.constants, &input.digits);
                out.0.add(row).write(sum * weight.global_scale);
            }
        }
    }
}

/// Loads scales and biases. If `BITS` is 0, also unpacks the codes.
#[inline(always)]
pub(super) unsafe fn load_row<const BITS: usize>(weight: &AffineWeight<'_>, row: usize, loaded: &mut WeightRow) {
    let (scales, biases) = weight.constants(row);
    // SAFETY: a prefetch may use any address. The processor has BMI2 (caller).
    unsafe {
        prefetch(scales.as_ptr().wrapping_add(PREFETCH_BYTES / 8));
        prefetch(biases.as_ptr().wrapping_add(PREFETCH_BYTES / 8));
        loaded.load(weight, row);
        if BITS == 0 {
            loaded.bytes.resize(weight.cols, 0);
            unpack_row(weight, row, &mut loaded.bytes);
        }
    }
}

/// Unpacks the codes of `row` to bytes in natural order.
#[inline(always)]
pub(super) unsafe fn unpack_row(weight: &AffineWeight<'_>, row: usize, bytes: &mut [u8]) {
    let mask = pdep_mask(weight.bits);
    // SAFETY: the processor has BMI2 (caller).
    unpack::natural(weight.bits, weight.codes(row), bytes, |word| unsafe { _pdep_u64(word, mask) });
}

#[inline(always)]
unsafe fn dot<D: GroupDot, const BITS: usize, const GROUP: usize>(
    codes: &[u8],
    constants: &[f32],
    x: &QuantizedRow<'_>,
) -> f32 {
    let (scales, biases) = constants.split_at(constants.len() / 2);
    let step = if BITS == 4 { GROUP / 2 } else { GROUP };
    let groups = codes.len() / step;
    // SAFETY: reads only whole groups below `groups`, which codes and digits have. Constants, scales and sums are
    // padded to a multiple of eight.
    unsafe {
        let mut lanes = _mm256_setzero_ps();
        for first in (0..groups).step_by(8) {
            let mut sums = [_mm256_setzero_si256(); 8];
            for line in (0..8 * step).step_by(64) {
                prefetch(codes.as_ptr().wrapping_add(first * step + line + PREFETCH_BYTES));
            }
            if groups - first >= 8 {
                for (index, sum) in sums.iter_mut().enumerate() {
                    *sum = partial::<D, BITS, GROUP>(codes, x, first + index);
                }
            } else {
                for (index, sum) in sums.iter_mut().enumerate().take(groups - first) {
                    *sum = partial::<D, BITS, GROUP>(codes, x, first + index);
                }
            }
            let dots = _mm256_cvtepi32_ps(sum_vectors(sums));
            let scale = _mm256_mul_ps(
                _mm256_loadu_ps(scales.as_ptr().add(first)),
                _mm256_loadu_ps(x.scale.as_ptr().add(first)),
            );
            lanes = _mm256_fmadd_ps(dots, scale, lanes);
            let bias = _mm256_loadu_ps(biases.as_ptr().add(first));
            let sum = _mm256_loadu_ps(x.sum.as_ptr().add(first));
            lanes = _mm256_fmadd_ps(bias, sum, lanes);
        }
        sum8_avx(lanes)
    }
}

/// Dot product of one group as eight partial sums.
#[inline(always)]
unsafe fn partial<D: GroupDot, const BITS: usize, const GROUP: usize>(
    codes: &[u8],
    x: &QuantizedRow<'_>,
    group: usize,
) -> __m256i {
    // SAFETY: codes and digits have this group (caller).
    unsafe {
        let x = x.planes.map(|plane| plane.as_ptr().add(group * GROUP));
        match BITS {
            4 => D::nibbles::<GROUP>(codes.as_ptr().add(group * GROUP / 2), x),
            8 => D::bytes::<GROUP, true>(codes.as_ptr().add(group * GROUP), x),
            _ => D::bytes::<GROUP, false>(codes.as_ptr().add(group * GROUP), x),
        }
    }
}

#[inline(always)]
pub(super) unsafe fn load<T>(at: *const T) -> __m256i {
    // SAFETY: 32 bytes are readable at any alignment (caller).
    unsafe { _mm256_loadu_si256(at.cast()) }
}

/// Prefetches the cache line at `at`, which may be any address.
#[inline(always)]
pub(super) unsafe fn prefetch(at: *const u8) {
    // SAFETY: a prefetch of an unmapped address does nothing.
    unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast()) };
}

/// Lane `i` of the result is the sum of the lanes of vector `i`.
#[inline(always)]
unsafe fn sum_vectors(v: [__m256i; 8]) -> __m256i {
    // SAFETY: the processor has AVX2 (caller).
    unsafe {
        let low = _mm256_hadd_epi32(_mm256_hadd_epi32(v[0], v[1]), _mm256_hadd_epi32(v[2], v[3]));
        let high = _mm256_hadd_epi32(_mm256_hadd_epi32(v[4], v[5]), _mm256_hadd_epi32(v[6], v[7]));
        _mm256_add_epi32(_mm256_permute2x128_si256::<0x20>(low, high), _mm256_permute2x128_si256::<0x31>(low, high))
    }
}
