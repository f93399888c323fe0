//! Attention over rows of 8 or 4 bits, in integers: a query is rounded to 16 bits, so are the weights of a block's values, and
//! what is summed within a group is exact. What follows is f32 in one order, so every processor gives the same bytes. This is
//! the plain form; AVX-512 has its own ([`super::kv_quant_avx512`]).

use super::{
    BLOCK, GROUP, MOST,
    kv_quant::{Rounded, read},
};
use crate::ops::{
    quant,
    simd::{Isa, wide},
};
use std::ops::Range;

/// A row as two signed bytes a value.
const FORMAT: quant::Format = quant::Format { group: 1, order: quant::Order::Natural, levels: 32_639 };
/// The largest integer that stands for a weight: 256 of them times 127 are within an i32.
pub(super) const WEIGHTS: f32 = 65_535.0;
const ROUND: f32 = 12_582_912.0;

/// Some queries in integers of two signed digits, `256 * high + low`.
#[derive(Default)]
pub(super) struct Asked {
    /// `[N, dim]`.
    pub high: Vec<i8>,
    pub low: Vec<i8>,
    /// Of each group of 32, `[N, dim / 32]`: the sums of its high and its low digits.
    pub sums: Vec<[i32; 2]>,
    /// `[N]`.
    pub scales: Vec<f32>,
    pub dim: usize,
}

impl Asked {
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
            let mut integers = [0; MOST];
            let integers = &mut integers[..dim];
            let (scale, _) = quant::quantise(&query[..dim], integers, FORMAT);
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

/// `scores[n][i] = q[first + n] . key[seen.start + i]`. Of `seen` both ends are multiples of 32. The values come next and are asked for.
pub(super) fn compare<const N: usize>(
    asked: &Asked,
    first: usize,
    [keys, values]: [&Rounded<'_>; 2],
    head: usize,
    seen: Range<usize>,
    scores: &mut [[f32; BLOCK]; N],
) {
    let [rows, next] = [keys, values].map(|cache| cache.rows(head, seen.start, seen.len()));
    match Isa::best() {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the processor has AVX-512 with VNNI, and `rows` are whole rows, a multiple of 32.
        Isa::Avx512 if seen.len().is_multiple_of(32) => unsafe {
            super::kv_quant_avx512::compare(asked, first, keys, [rows, next], scores)
        },
        _ => {
            let _ = next;
            plain_compare(asked, first, keys, rows, scores);
        }
    }
}

wide! {
    fn plain_compare[const N: usize](
        asked: &Asked,
        first: usize,
        keys: &Rounded<'_>,
        rows: &[u8],
        scores: &mut [[f32; BLOCK]; N],
    ) {
        let (mut integers, mut scales) = ([0i16; MOST], [0f32; MOST / GROUP]);
        let (integers, scales) = (&mut integers[..keys.dim], &mut scales[..keys.dim / GROUP]);
        for (index, row) in rows.chunks_exact(keys.row).enumerate() {
            read(keys.bits, row, integers, scales);
            for (n, scores) in scores.iter_mut().enumerate() {
                let row = (first + n) * keys.dim..(first + n + 1) * keys.dim;
                let query = asked.high[row.clone()].chunks_exact(GROUP).zip(asked.low[row].chunks_exact(GROUP));
                let mut sum = 0f32;
                for (((high, low), key), scale) in query.zip(integers.chunks_exact(GROUP)).zip(&*scales) {
                    let digits = high.iter().zip(low).map(|(high, low)| 256 * i32::from(*high) + i32::from(*low));
                    let dot: i32 = digits.zip(key).map(|(query, key)| query * i32::from(*key)).sum();
                    sum = (dot as f32).mul_add(*scale, sum);
                }
                scores[index] = sum * asked.scales[first + n];
            }
        }
    }
}

/// The scales of a block's values, group by group, and what the weights are multiplied with to become integers.
pub(super) struct Factors {
    /// `[dim / GROUP][BLOCK]`: the scale by the group's largest, times [`WEIGHTS`].
    pub each: Vec<[f32; BLOCK]>,
    /// A group's largest scale by [`WEIGHTS`]: times which an integer sum is the result.
    pub back: Vec<f32>,
}

impl Factors {
    pub const fn new() -> Self {
        Self { each: Vec::new(), back: Vec::new() }
    }

    /// Of a group whose scales are the first `count` of `each[group]`.
    #[inline(always)]
    pub fn finish(&mut self, group: usize, count: usize) {
        let scales = &mut self.each[group][..count];
        // They are not negative, and NaN is on top.
        let most = f32::from_bits(scales.iter().fold(0, |most, scale| most.max(scale.to_bits())));
        let factor = if most > 0.0 { WEIGHTS / most } else { 0.0 };
        scales.iter_mut().for_each(|scale| *scale *= factor);
        self.back[group] = most * (1.0 / WEIGHTS);
    }
}

/// `sums[n] = sum over i of weights[n][i] * value[seen.start + i]`, `[N, width]`. Of `seen` both ends are multiples of 64. The
/// keys behind come next and are asked for.
#[allow(clippy::too_many_arguments)] // The shape of a block.
pub(super) fn collect<const N: usize>(
    sums: &mut [f32],
    width: usize,
    weights: &[[f32; BLOCK]; N],
    [keys, values]: [&Rounded<'_>; 2],
    head: usize,
    seen: Range<usize>,
    factors: &mut Factors,
) {
    let (rows, next) = (values.rows(head, seen.start, seen.len()), keys.behind(head, seen.start, seen.len()));
    let groups = values.dim / GROUP;
    factors.each.resize(groups.max(factors.each.len()), [0.0; BLOCK]);
    factors.back.resize(groups.max(factors.back.len()), 0.0);
    match Isa::best() {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the processor has AVX-512 with VNNI; `rows` are whole rows, a multiple of 64; `sums` has N rows.
        Isa::Avx512 if seen.len().is_multiple_of(64) && values.dim.is_multiple_of(64) => unsafe {
            super::kv_quant_avx512::collect(sums, width, weights, values, [rows, next], factors);
        },
        _ => {
            let _ = next;
            plain_collect(sums, width, weights, values, rows, factors);
        }
    }
}

wide! {
    fn plain_collect[const N: usize](
        sums: &mut [f32],
        width: usize,
        weights: &[[f32; BLOCK]; N],
        values: &Rounded<'_>,
        rows: &[u8],
        factors: &mut Factors,
    ) {
        let (dim, count) = (values.dim, rows.len() / values.row);
        let (mut integers, mut scales) = ([0i16; MOST], [0f32; MOST / GROUP]);
        let (integers, scales) = (&mut integers[..dim], &mut scales[..dim / GROUP]);
        for (index, row) in rows.chunks_exact(values.row).enumerate() {
            read(values.bits, row, integers, scales);
            for (group, scale) in scales.iter().enumerate() {
                factors.each[group][index] = *scale;
            }
        }
        for group in 0..dim / GROUP {
            factors.finish(group, count);
        }
        let mut totals = [[0i32; MOST]; N];
        for (index, row) in rows.chunks_exact(values.row).enumerate() {
            read(values.bits, row, integers, scales);
            for (weights, total) in weights.iter().zip(&mut totals) {
                let weight = weights[index];
                if weight == 0.0 {
                    continue;
                }
                for group in 0..dim / GROUP {
                    let round = weight.mul_add(factors.each[group][index], ROUND).to_bits();
                    let weight = (round.wrapping_sub(ROUND.to_bits()) as i32).clamp(0, WEIGHTS as i32);
                    let range = group * GROUP..(group + 1) * GROUP;
                    for (total, value) in total[range.clone()].iter_mut().zip(&integers[range]) {
                        *total = total.wrapping_add(weight * i32::from(*value));
                    }
                }
            }
        }
        for (n, total) in totals.iter().enumerate() {
            let sums = &mut sums[n * width..][..dim];
            for (at, (sum, total)) in sums.iter_mut().zip(total).enumerate() {
                *sum = *total as f32 * factors.back[at / GROUP];
            }
        }
    }
}
