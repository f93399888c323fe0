//! Matrix products for each instruction set (gemv and gemm). All instruction sets give the same bytes.
//!
//! An affine weight is multiplied with quantized activations. The dot product of a group fits an i32 and is exact in
//! any order; partial sums of shifted digits may wrap around. The f32 arithmetic that follows has the same order on all
//! processors. Rows are padded with zero groups to a multiple of eight. Group `g` is added to lane `g % 8`, in order of
//! `g`: `lane = fma(dot, scale_w * scale_x, lane)`, then `lane = fma(bias_w, sum_x, lane)`.
//! [`sum8`](crate::ops::simd::vector::sum8) adds the lanes. So results do not depend on the processor, the thread, or
//! the rows computed together.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod float;
#[cfg(target_arch = "x86_64")]
mod gemm_avx512;
#[cfg(target_arch = "x86_64")]
mod gemv_avx512;
#[cfg(target_arch = "aarch64")]
mod neon;
mod operands;
mod scalar;
mod scratch;
#[cfg(target_arch = "x86_64")]
mod tile_avx512;
#[cfg(target_arch = "x86_64")]
mod x86;

pub use operands::{Activations, Product};

use crate::{
    device::CpuArithmetic,
    ops::{WeightView, simd::Isa},
};
use operands::AffineWeight;
use scratch::SimdScratch;
use std::cell::RefCell;

thread_local! {
    static SCRATCH: RefCell<SimdScratch> = RefCell::default();
}

/// Computes a product. With [`CpuArithmetic::Integer`], affine weights are multiplied with the quantized inputs instead
/// of the f32 inputs.
///
/// # Safety
/// There are as many `outs` as inputs, each valid for writes at `rows`, and no other thread accesses them. The
/// processor has `isa`. The view's parts have the lengths of their encoding, and the inputs have `cols` values, with
/// padded groups if quantized.
pub unsafe fn multiply(isa: Isa, arithmetic: CpuArithmetic, product: Product<'_, WeightView<'_>>) {
    let affine = AffineWeight::new(product.weight).filter(|_| arithmetic == CpuArithmetic::Integer);
    SCRATCH.with_borrow_mut(|scratch| match &affine {
        // SAFETY: guaranteed by the caller.
        Some(weight) => unsafe {
            let Product { rows, inputs, outs, .. } = product;
            let product = &Product { weight, rows, inputs, outs };
            match isa {
                Isa::Scalar => scalar::rows(product, scratch),
                #[cfg(target_arch = "x86_64")]
                Isa::Avx2 => avx2::rows(product, scratch),
                #[cfg(target_arch = "x86_64")]
                Isa::Avx512 => avx512::rows(product, scratch),
                #[cfg(target_arch = "aarch64")]
                Isa::Neon => neon::rows(product, scratch),
                #[cfg(target_arch = "aarch64")]
                Isa::Dotprod => neon::rows_dotprod(product, scratch),
            }
        },
        // SAFETY: guaranteed by the caller.
        None => unsafe {
            match isa {
                #[cfg(target_arch = "x86_64")]
                Isa::Avx2 => avx2::float_rows(&product, scratch),
                #[cfg(target_arch = "x86_64")]
                Isa::Avx512 => avx512::float_rows(&product, scratch),
                // AArch64 always has NEON and fma, so the compiler uses them here.
                _ => float::rows::<[f32; 16]>(&product, scratch),
            }
        },
    })
}

#[cfg(test)]
pub(crate) mod tests;
