//! The inner products behind every linear layer, one file an instruction set, all with the same bytes.
//!
//! An affine weight meets activations quantized by [`super::quant`]. Per group the integer dot product fits an i32 and
//! is exact in any order; what comes up on the way, as sums of digits are shifted and added, may wrap around. What
//! follows is f32 and therefore has one order everywhere: the groups of a row are padded with zero groups to a multiple
//! of eight, group `g` belongs to lane `g % 8`, and going up in `g`
//! `lane = fma(dot, scale_w * scale_x, lane)`, then `lane = fma(bias_w, sum_x, lane)`; at the end [`sum8`]. So neither
//! the processor, nor how many rows are computed together, nor the thread can be seen in a result.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod cache_line;
pub(super) mod float;
#[cfg(target_arch = "x86_64")]
mod gemm_avx512;
#[cfg(target_arch = "x86_64")]
mod gemv_avx512;
mod isa;
pub(super) mod math;
#[cfg(target_arch = "aarch64")]
mod neon;
mod operands;
mod scalar;
mod scratch;
#[cfg(target_arch = "x86_64")]
mod tile_avx512;
pub(crate) mod vector;
mod wide;
#[cfg(target_arch = "x86_64")]
mod x86;

pub(crate) use cache_line::CacheLine;
pub use isa::Isa;
pub use operands::{Activations, OutPtr};
pub(crate) use vector::Vector;
pub(crate) use wide::wide;

use super::WeightView;
use operands::AffineWeight;
use scratch::SimdScratch;
use std::{cell::RefCell, ops::Range};

thread_local! {
    static SCRATCH: RefCell<SimdScratch> = RefCell::default();
}

/// `outs[i][row] = weight[row] . lines[i].x` for every row in `rows` and every line; with `integer`, affine weights meet
/// the quantized row instead of the f32 one.
///
/// # Safety
/// There are as many `outs` as lines, each valid for writes at `rows`, and nobody else reads or writes there meanwhile.
/// The processor has `isa`.
/// The view's parts have the lengths its encoding asks for, and the lines `cols` values (padded groups for digits).
pub unsafe fn product(
    isa: Isa,
    integer: bool,
    weight: &WeightView<'_>,
    rows: Range<usize>,
    lines: &[Activations<'_>],
    outs: &[OutPtr],
) {
    SCRATCH.with_borrow_mut(|scratch| match AffineWeight::new(weight).filter(|_| integer) {
        // SAFETY: passed on.
        Some(affine) => unsafe {
            match isa {
                Isa::Scalar => scalar::rows(&affine, rows, lines, outs, scratch),
                #[cfg(target_arch = "x86_64")]
                Isa::Avx2 => avx2::rows(&affine, rows, lines, outs, scratch),
                #[cfg(target_arch = "x86_64")]
                Isa::Avx512 => avx512::rows(&affine, rows, lines, outs, scratch),
                #[cfg(target_arch = "aarch64")]
                Isa::Neon => neon::rows(&affine, rows, lines, outs, scratch),
                #[cfg(target_arch = "aarch64")]
                Isa::Dotprod => neon::rows_dotprod(&affine, rows, lines, outs, scratch),
            }
        },
        // SAFETY: passed on.
        None => unsafe {
            match isa {
                #[cfg(target_arch = "x86_64")]
                Isa::Avx2 => avx2::float_rows(weight, rows, lines, outs, scratch),
                #[cfg(target_arch = "x86_64")]
                Isa::Avx512 => avx512::float_rows(weight, rows, lines, outs, scratch),
                // Arm's baseline has NEON and fma: the compiler uses them here, too.
                _ => float::rows::<[f32; 16]>(weight, rows, lines, outs, scratch),
            }
        },
    })
}

#[cfg(test)]
pub(crate) mod tests;
