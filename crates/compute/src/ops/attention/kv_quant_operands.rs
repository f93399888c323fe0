//! Operands of attention over quantized rows: queries as integers, and the scales of values.

use super::{BLOCK, GROUP, MAX_HEAD_DIM};
use crate::ops::{quant, simd::wide};

/// Integers of two signed bytes.
const FORMAT: quant::ActivationFormat =
    quant::ActivationFormat { group: 1, order: quant::ValueOrder::Natural, levels: 32_639 };

/// The largest integer weight. The sum of 256 products of this weight with 127 still fits in an i32.
pub(super) const MAX_WEIGHT: f32 = 65_535.0;

/// Queries as integers of two signed digits, `256 * high + low`.
#[derive(Default)]
pub(super) struct QuantizedQueries {
    /// High digits, `[N, dim]`.
    pub high: Vec<i8>,
    /// Low digits, `[N, dim]`.
    pub low: Vec<i8>,
    /// For each group of 32, the sums of its high digits and of its low digits, `[N, dim / 32]`.
    pub sums: Vec<[i32; 2]>,
    /// `[N]`.
    pub scales: Vec<f32>,
    pub dim: usize,
}

impl QuantizedQueries {
    /// Quantizes `queries`, rows of at least `dim` values.
    pub fn set<'a>(&mut self, queries: impl ExactSizeIterator<Item = &'a [f32]>, dim: usize) {
        let count = queries.len();
        let groups = dim / GROUP;
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

/// Scales of a block's values, group by group, combined with the factors that turn weights into integers.
pub(super) struct ValueScales {
    /// Scale of each value, divided by the group's largest scale in the block, times [`MAX_WEIGHT`]; `[dim /
    /// GROUP][BLOCK]`.
    pub each: Vec<[f32; BLOCK]>,
    /// A group's largest scale divided by [`MAX_WEIGHT`]. Converts an integer sum to the result.
    pub back: Vec<f32>,
}

impl ValueScales {
    pub const fn new() -> Self {
        Self { each: Vec::new(), back: Vec::new() }
    }

    /// Completes a group. The first `count` entries of `each[group]` must be the group's scales.
    #[inline(always)]
    pub fn finish(&mut self, group: usize, count: usize) {
        let scales = &mut self.each[group][..count];
        // Scales are not negative, so their bit patterns are ordered, and NaN is the largest.
        let max = f32::from_bits(scales.iter().fold(0, |max, scale| max.max(scale.to_bits())));
        let factor = if max > 0.0 { MAX_WEIGHT / max } else { 0.0 };
        scales.iter_mut().for_each(|scale| *scale *= factor);
        self.back[group] = max * (1.0 / MAX_WEIGHT);
    }
}
