//! NEON kernels. Byte products use `sdot` on processors that have it (all Apple silicon), otherwise `smull` and
//! `sadalp`.
//!
//! These kernels have never run on real hardware. Under emulation (`tests/neon.sh`), both versions pass the tests of
//! `ops`, and the first one also those of whole models. Their speed has not been measured.

use std::arch::{aarch64::*, asm};

use super::{
    operands::{AffineProduct, Product},
    scratch::SimdScratch,
};
use crate::ops::{
    quant::{QuantizedRow, ValueOrder},
    simd::vector::sum8,
};

/// See [`super::multiply`].
///
/// # Safety
/// As for [`super::multiply`].
pub unsafe fn rows(product: &AffineProduct<'_>, scratch: &mut SimdScratch) {
    // SAFETY: guaranteed by the caller. Every AArch64 processor has NEON.
    unsafe { all_rows::<Smull>(product, scratch) }
}

/// See [`super::multiply`].
///
/// # Safety
/// As for [`super::multiply`].
#[target_feature(enable = "dotprod")]
pub unsafe fn rows_dotprod(product: &AffineProduct<'_>, scratch: &mut SimdScratch) {
    // SAFETY: guaranteed by the caller.
    unsafe { all_rows::<Sdot>(product, scratch) }
}

/// Sixteen byte products.
trait ByteProducts {
    /// Adds each product to one lane of `sum`.
    ///
    /// # Safety
    /// The processor has the instructions.
    unsafe fn add(sum: int32x4_t, a: int8x16_t, b: int8x16_t) -> int32x4_t;
}

struct Smull;
struct Sdot;

impl ByteProducts for Smull {
    #[inline(always)]
    unsafe fn add(sum: int32x4_t, a: int8x16_t, b: int8x16_t) -> int32x4_t {
        // SAFETY: every AArch64 processor has NEON.
        unsafe {
            let low = vmull_s8(vget_low_s8(a), vget_low_s8(b));
            vpadalq_s16(vpadalq_s16(sum, low), vmull_high_s8(a, b))
        }
    }
}

impl ByteProducts for Sdot {
    #[inline(always)]
    unsafe fn add(sum: int32x4_t, a: int8x16_t, b: int8x16_t) -> int32x4_t {
        let mut sum = sum;
        // SAFETY: the processor has the instruction (caller), which only uses these registers. The directive lets the
        // assembler accept the instruction if this function is not inlined into one with the feature. The intrinsic is
        // not stable.
        unsafe {
            asm!(
                ".arch_extension dotprod",
                "sdot {sum:v}.4s, {a:v}.16b, {b:v}.16b",
                sum = inout(vreg) sum, a = in(vreg) a, b = in(vreg) b,
                options(pure, nomem, nostack, preserves_flags)
            );
        }
        sum
    }
}

#[inline(always)]
unsafe fn all_rows<D: ByteProducts>(product: &AffineProduct<'_>, scratch: &mut SimdScratch) {
    let Product { weight, rows, inputs, outs } = product;
    let loaded = &mut scratch.rows[0];
    for row in rows.clone() {
        loaded.load(weight, row);
        // A single input uses packed 4-bit codes. For several inputs, the codes are unpacked once.
        let packed = weight.bits == 4 && inputs.len() == 1;
        if weight.bits != 8 && !packed {
            loaded.unpack(weight, row);
        }
        for (input, out) in inputs.iter().zip(*outs) {
            let constants = &loaded.constants;
            let x = &input.digits;
            // SAFETY: codes, constants and digits have a row's length. The caller allows writes to this output.
            unsafe {
                let sum = match weight.bits {
                    8 => dot::<D, 8>(weight.codes(row), weight.group, constants, x),
                    4 if packed => dot::<D, 4>(weight.codes(row), weight.group, constants, x),
                    _ => dot::<D, 0>(&loaded.bytes, weight.group, constants, x),
                };
                out.0.add(row).write(sum * weight.global_scale);
            }
        }
    }
}

/// `BITS` is 4 for packed codes, 8 for any bytes, 0 for bytes of at most 127.
#[inline(always)]
unsafe fn dot<D: ByteProducts, const BITS: usize>(
    codes: &[u8],
    group: usize,
    constants: &[f32],
    x: &QuantizedRow<'_>,
) -> f32 {
    let (scales, biases) = constants.split_at(constants.len() / 2);
    let groups = codes.len() / if BITS == 4 { group / 2 } else { group };
    // SAFETY: reads only whole groups below `groups`, which codes and digits have. Constants, scales and sums are
    // padded to a multiple of eight.
    unsafe {
        let zero = vdupq_n_s32(0);
        let mut lanes = [vdupq_n_f32(0.0); 2];
        for first in (0..groups).step_by(8) {
            let mut sums = [zero; 8];
            for (index, sum) in sums.iter_mut().enumerate().take(groups - first) {
                let at = (first + index) * group;
                *sum = partial::<D, BITS>(codes, group, at, x);
            }
            for (half, lanes) in lanes.iter_mut().enumerate() {
                let at = first + 4 * half;
                let four = |sums: &[int32x4_t]| vpaddq_s32(vpaddq_s32(sums[0], sums[1]), vpaddq_s32(sums[2], sums[3]));
                let dots = vcvtq_f32_s32(four(&sums[4 * half..4 * half + 4]));
                let scale = vmulq_f32(vld1q_f32(scales.as_ptr().add(at)), vld1q_f32(x.scale.as_ptr().add(at)));
                *lanes = vfmaq_f32(*lanes, dots, scale);
                let bias = vld1q_f32(biases.as_ptr().add(at));
                let sum = vld1q_f32(x.sum.as_ptr().add(at));
                *lanes = vfmaq_f32(*lanes, bias, sum);
            }
        }
        let mut all = [0f32; 8];
        vst1q_f32(all.as_mut_ptr(), lanes[0]);
        vst1q_f32(all.as_mut_ptr().add(4), lanes[1]);
        sum8(all)
    }
}

/// Dot product, as four partial sums, of the group that starts at value `at`.
#[inline(always)]
unsafe fn partial<D: ByteProducts, const BITS: usize>(
    codes: &[u8],
    group: usize,
    at: usize,
    x: &QuantizedRow<'_>,
) -> int32x4_t {
    // SAFETY: the group's codes and digits are readable (caller).
    unsafe {
        let mut sums = [vdupq_n_s32(0); 3];
        let digits = |plane: usize, at: usize| vld1q_s8(x.planes[plane].as_ptr().add(at));
        if BITS == 4 {
            let unit = ValueOrder::unit(group);
            for start in (at..at + group).step_by(unit) {
                for piece in (0..unit / 2).step_by(16) {
                    let both = vld1q_u8(codes.as_ptr().add(start / 2 + piece));
                    let even = vreinterpretq_s8_u8(vandq_u8(both, vdupq_n_u8(15)));
                    let odd = vreinterpretq_s8_u8(vshrq_n_u8::<4>(both));
                    for (plane, sum) in sums.iter_mut().enumerate() {
                        *sum = D::add(*sum, even, digits(plane, start + piece));
                        *sum = D::add(*sum, odd, digits(plane, start + unit / 2 + piece));
                    }
                }
            }
        } else {
            for start in (at..at + group).step_by(16) {
                let codes = vld1q_u8(codes.as_ptr().add(start));
                for (plane, sum) in sums.iter_mut().enumerate() {
                    let digits = digits(plane, start);
                    if BITS == 8 {
                        // A byte is its lower nibble plus sixteen times its upper nibble.
                        let lower = vreinterpretq_s8_u8(vandq_u8(codes, vdupq_n_u8(15)));
                        let upper = vreinterpretq_s8_u8(vshrq_n_u8::<4>(codes));
                        *sum = D::add(*sum, lower, digits);
                        let upper = D::add(vdupq_n_s32(0), upper, digits);
                        *sum = vaddq_s32(*sum, vshlq_n_s32::<4>(upper));
                    } else {
                        *sum = D::add(*sum, vreinterpretq_s8_u8(codes), digits);
                    }
                }
            }
        }
        let upper = vaddq_s32(vshlq_n_s32::<8>(sums[0]), sums[1]);
        vaddq_s32(vshlq_n_s32::<8>(upper), sums[2])
    }
}
