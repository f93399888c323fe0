//! Products in f32: dense weights, the float encodings, and the reference beside the integer path.
//!
//! Order: value `k` goes to lane `k % 16` by fma, going up in `k`; lanes 8..16 are added to 0..8, then [`tree`].

use std::ops::Range;

use super::{Line, Out, Scratch, tree, unpack};
use crate::ops::weight::WeightView;

/// See [`super::product`].
///
/// # Safety
/// As for [`super::product`].
#[inline(always)]
pub unsafe fn rows(
    weight: &WeightView<'_>,
    rows: Range<usize>,
    lines: &[Line<'_>],
    outs: &[Out],
    scratch: &mut Scratch,
) {
    for row in rows {
        unpack::expand(weight, row, &mut scratch.bytes, &mut scratch.values);
        let (fours, rest) = lines.as_chunks::<4>();
        for (four, outs) in fours.iter().zip(outs.chunks_exact(4)) {
            let sums = dot::<4>(&scratch.values, [four[0].x, four[1].x, four[2].x, four[3].x]);
            for (out, sum) in outs.iter().zip(sums) {
                // SAFETY: the caller lets us write this output.
                unsafe { out.0.add(row).write(sum * weight.gain) };
            }
        }
        for (line, out) in rest.iter().zip(&outs[fours.len() * 4..]) {
            let [sum] = dot::<1>(&scratch.values, [line.x]);
            // SAFETY: as above.
            unsafe { out.0.add(row).write(sum * weight.gain) };
        }
    }
}

/// `weights . x` for `N` rows at once.
#[inline(always)]
pub fn dot<const N: usize>(weights: &[f32], x: [&[f32]; N]) -> [f32; N] {
    let mut lanes = [[0f32; 16]; N];
    let (blocks, rest) = weights.as_chunks::<16>();
    let x = x.map(|x| x[..weights.len()].as_chunks::<16>());
    for (index, block) in blocks.iter().enumerate() {
        for (lanes, (x, _)) in lanes.iter_mut().zip(&x) {
            for ((lane, weight), x) in lanes.iter_mut().zip(block).zip(&x[index]) {
                *lane = weight.mul_add(*x, *lane);
            }
        }
    }
    for (lanes, (_, x)) in lanes.iter_mut().zip(&x) {
        for ((lane, weight), x) in lanes.iter_mut().zip(rest).zip(*x) {
            *lane = weight.mul_add(*x, *lane);
        }
    }
    lanes.map(|lanes| fold(&lanes))
}

/// The sum of sixteen lanes.
#[inline(always)]
pub fn fold(lanes: &[f32; 16]) -> f32 {
    tree(std::array::from_fn(|lane| lanes[lane] + lanes[lane + 8]))
}

/// The sum of `x`, lane by lane.
#[inline(always)]
pub fn lanes_sum(x: &[f32]) -> f32 {
    let mut lanes = [0f32; 16];
    let (chunks, rest) = x.as_chunks::<16>();
    for x in chunks.iter().map(|chunk| chunk.as_slice()).chain([rest]) {
        for (lane, x) in lanes.iter_mut().zip(x) {
            *lane += x;
        }
    }
    fold(&lanes)
}
