//! Products in f32: dense weights, float encodings, and the reference of the integer kernels.

use super::{Product, scratch::SimdScratch};
use crate::ops::{
    WeightView,
    quant::unpack,
    simd::{Vector, float::dot},
};

/// See [`super::multiply`].
///
/// # Safety
/// As for [`super::multiply`].
#[inline(always)]
pub unsafe fn rows<V: Vector>(product: &Product<'_, WeightView<'_>>, scratch: &mut SimdScratch) {
    let Product { weight, rows, inputs, outs } = product;
    for row in rows.clone() {
        unpack::expand(weight, row, &mut scratch.bytes, &mut scratch.values);
        let (fours, rest) = inputs.as_chunks::<4>();
        for (four, outs) in fours.iter().zip(outs.chunks_exact(4)) {
            let sums = dot::<V, 4>(&scratch.values, [four[0].x, four[1].x, four[2].x, four[3].x]);
            for (out, sum) in outs.iter().zip(sums) {
                // SAFETY: the caller allows writes to this output.
                unsafe { out.0.add(row).write(sum * weight.global_scale) };
            }
        }
        for (input, out) in rest.iter().zip(&outs[fours.len() * 4..]) {
            let [sum] = dot::<V, 1>(&scratch.values, [input.x]);
            // SAFETY: as above.
            unsafe { out.0.add(row).write(sum * weight.global_scale) };
        }
    }
}

/// Defines `float_rows`: [`rows`] compiled for some processor features and their [`Vector`].
#[cfg(target_arch = "x86_64")]
macro_rules! compiled_for {
    ($features:literal, $vector:ty) => {
        /// See [`super::multiply`].
        ///
        /// # Safety
        /// As for [`super::multiply`].
        #[target_feature(enable = $features)]
        pub unsafe fn float_rows(product: &super::Product<'_, $crate::ops::WeightView<'_>>, scratch: &mut SimdScratch) {
            // SAFETY: guaranteed by the caller.
            unsafe { float::rows::<$vector>(product, scratch) }
        }
    };
}
#[cfg(target_arch = "x86_64")]
pub(super) use compiled_for;
