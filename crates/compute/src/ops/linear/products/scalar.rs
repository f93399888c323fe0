//! The integer product in portable Rust.

use super::{
    operands::{AffineProduct, Product},
    scratch::SimdScratch,
};
use crate::ops::{quant::QuantizedRow, simd::vector::sum8};

/// See [`super::multiply`].
///
/// # Safety
/// As for [`super::multiply`].
#[inline(always)]
pub unsafe fn rows(product: &AffineProduct<'_>, scratch: &mut SimdScratch) {
    let Product { weight, rows, inputs, outs } = product;
    for row in rows.clone() {
        let loaded = &mut scratch.rows[0];
        loaded.load(weight, row);
        loaded.unpack(weight, row);
        for (input, out) in inputs.iter().zip(*outs) {
            let sum = dot(&loaded.bytes, weight.group, &loaded.constants, &input.digits);
            // SAFETY: the caller allows writes to this output.
            unsafe { out.0.add(row).write(sum * weight.global_scale) };
        }
    }
}

/// One unpacked row of weights times one row of activations.
#[inline(always)]
fn dot(codes: &[u8], group: usize, constants: &[f32], x: &QuantizedRow<'_>) -> f32 {
    let (scales, biases) = constants.split_at(constants.len() / 2);
    let mut lanes = [0f32; 8];
    for index in 0..scales.len() {
        let at = (index * group).min(codes.len())..((index + 1) * group).min(codes.len());
        let codes = &codes[at.clone()];
        let [high, middle, low] = x.planes.map(|plane| {
            codes.iter().zip(&plane[at.clone()]).map(|(code, digit)| i32::from(*code) * i32::from(*digit)).sum::<i32>()
        });
        let dot = (high << 16).wrapping_add(middle << 8).wrapping_add(low);
        let lane = &mut lanes[index % 8];
        *lane = (dot as f32).mul_add(scales[index] * x.scale[index], *lane);
        *lane = biases[index].mul_add(x.sum[index], *lane);
    }
    sum8(lanes)
}
