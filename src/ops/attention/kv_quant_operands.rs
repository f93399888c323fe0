//! Integer queries and value scales.

use super::{BLOCK, GROUP, MAX_HEAD_DIM};
use crate::ops::{quant, simd::wide};

/// A row as two signed bytes a value.
const FORMAT: quant::ActivationFormat =
    quant::ActivationFormat { group: 1, order: quant::ValueOrder::Natural, levels: 32_639 };

/// The largest integer that stands for a weight: 256 of them times 127 are within an i32.
pub(super) const MAX_WEIGHT: f32 = 65_535.0;

/// Some queries in integers of two signed digits, `256 * high + low`.
#[derive(Default)]
pub(super) struct QuantizedQueries {
    /// `[N, dim]`.
    pub high: Vec<i8>,
    pub low: Vec<i8>,
    /// Of each group of 32, `[N, dim / 32]`: the sums of its high and its low digits.
    pub sums: Vec<[i32; 2]>,
    /// `[N]`.
    pub scales: Vec<f32>,
    pub dim: usize,
}

impl QuantizedQueries {
    /// `queries` are rows of `dim` values or more.
    pub fn set<'a>(&mut self, queries: impl ExactSizeIterator<Item = &'a [f32]>, dim: usize) {
        let (count, groups) = (queries.len(), dim / GROUP);
        self.dim = dim;
        self.high.resize(count * dim, 0);
        self.low.resize(count * dim, 0);
        self.sums.resize(count * groups, [0; 2]);
        self.scales.clear();
        let rows = self.high.chunks_exact_mut(dim).zip(self.low.chunks_exact_mut(dim));
        for ((query, (high, low)), sums) in queries.zip(rows).zip(self.sums.chunks_exact_mut(groups)) {
            let mut integers = [0; MAX_HEAD_DIM];
            let integers = &mut integers[..dim];
            let (scale, _) = quant::quantize(&query[..dim], integers, FORMAT);
            split(integers, high, low, sums);
            self.scales.push(scale);
        }
    }
}

wide! {
    fn split(integers: &[i32], high: &mut [i8], low: &mut [i8], sums: &mut [[i32; 2]]) {
        for ((integer, high), low) in integers.iter().zip(&mut *high).zip(&mut *low) {
            *low = *integer as i8;
            *high = ((*integer + 128) >> 8) as i8;
        }
        let groups = high.as_chunks::<GROUP>().0.iter().zip(low.as_chunks::<GROUP>().0);
        for (sums, (high, low)) in sums.iter_mut().zip(groups) {
            *sums = [high.iter().map(|digit| i32::from(*digit)).sum(), low.iter().map(|digit| i32::from(*digit)).sum()];
        }
    }
}

/// The scales of a block's values, group by group, and what the weights are multiplied with to become integers.
pub(super) struct ValueScales {
    /// `[dim / GROUP][BLOCK]`: the scale by the group's largest, times [`MAX_WEIGHT`].
    pub each: Vec<[f32; BLOCK]>,
    /// A group's largest scale by [`MAX_WEIGHT`]: times which an integer sum is the result.
    pub back: Vec<f32>,
}

impl ValueScales {
    pub const fn new() -> Self {
        Self { each: Vec::new(), back: Vec::new() }
    }

    /// Of a group whose scales are the first `count` of `each[group]`.
    #[inline(always)]
    pub fn finish(&mut self, group: usize, count: usize) {
        let scales = &mut self.each[group][..count];
        // They are not negative, and NaN is on top.
        let most = f32::from_bits(scales.iter().fold(0, |most, scale| most.max(scale.to_bits())));
        let factor = if most > 0.0 { MAX_WEIGHT / most } else { 0.0 };
        scales.iter_mut().for_each(|scale| *scale *= factor);
        self.back[group] = most * (1.0 / MAX_WEIGHT);
    }
}
