//! Products in f32: dense weights, float encodings, and the reference of the integer kernels.
//!
//! Value `k` is added to lane `k % 16` by fma, in order of `k`. [`Vector::sum`] then adds the lanes.

use super::{Product, scratch::SimdScratch, vector::Vector};
use crate::ops::WeightView;
use crate::ops::quant::unpack;

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

/// Dot products of `a` with `N` rows `b` of the same length.
#[inline(always)]
pub fn dot<V: Vector, const N: usize>(a: &[f32], b: [&[f32]; N]) -> [f32; N] {
    let mut lanes = [V::splat(0.0); N];
    let (chunks, rest) = a.as_chunks::<16>();
    let mut blocks: [&[[f32; 16]]; N] = [&[]; N];
    for n in 0..N {
        blocks[n] = &b[n][..a.len()].as_chunks::<16>().0[..chunks.len()];
    }
    for (index, chunk) in chunks.iter().enumerate() {
        let a = V::load(chunk);
        for n in 0..N {
            lanes[n] = a.fma(V::load(&blocks[n][index]), lanes[n]);
        }
    }
    if !rest.is_empty() {
        let last = V::load(&padded(rest));
        for n in 0..N {
            lanes[n] = last.fma(V::load(&padded(&b[n][chunks.len() * 16..a.len()])), lanes[n]);
        }
    }
    let mut sums = [0f32; N];
    for n in 0..N {
        sums[n] = lanes[n].sum();
    }
    sums
}

/// At most sixteen values, padded with zeros.
#[inline(always)]
pub fn padded<T: Copy + Default>(x: &[T]) -> [T; 16] {
    let mut out = [T::default(); 16];
    out[..x.len()].copy_from_slice(x);
    out
}
