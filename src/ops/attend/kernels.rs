//! The inner loops of attention: a block's scores, their softmax, the weighted values, and the folding of two blocks.

use super::BLOCK;
use crate::ops::{
    cache::{Cached, Heads},
    math::exp,
    simd::{Vector, float, wide},
};
use std::ops::Range;

wide! {
    /// `scores[n][i] = q[n] . key[seen.start + i]`.
    pub(super) fn compare[T: Cached, const N: usize](
        q: &[&[f32]; N],
        keys: &Heads<'_, T>,
        head: usize,
        seen: Range<usize>,
        scores: &mut [[f32; BLOCK]; N],
    ) {
        for (index, key) in seen.enumerate() {
            let row = keys.row(head, key);
            let (factor, dots) = (T::scale(row), dots::<V, T, N>(q, T::values(row)));
            for n in 0..N {
                scores[n][index] = dots[n] * factor;
            }
        }
    }
}

wide! {
    /// `sums[n] += sum over i of scores[n][i] * value[seen.start + i]`, in this order; the scores are multiplied by the
    /// values' scales on the way.
    pub(super) fn collect[T: Cached, const N: usize](
        sums: &mut [f32],
        width: usize,
        scores: &mut [[f32; BLOCK]; N],
        values: &Heads<'_, T>,
        head: usize,
        seen: Range<usize>,
    ) {
        for (index, key) in seen.clone().enumerate() {
            let factor = T::scale(values.row(head, key));
            for scores in scores.iter_mut() {
                scores[index] *= factor;
            }
        }
        let mut index = 0;
        while index + 4 <= seen.len() {
            let rows = row_set::<T, 4>(values, head, seen.start + index);
            add::<V, T, N, 4>(sums, width, scores, index, &rows);
            index += 4;
        }
        while index < seen.len() {
            add::<V, T, N, 1>(sums, width, scores, index, &row_set(values, head, seen.start + index));
            index += 1;
        }
    }
}

wide! {
    /// `e^(score - max)`; returns the maximum and the sum.
    pub(super) fn soften(scores: &mut [f32]) -> (f32, f32) {
        let most = greatest(scores);
        for score in scores.iter_mut() {
            *score = exp(*score - most);
        }
        (most, float::sum::<V>(scores))
    }
}

wide! {
    /// `sum = sum * a + part * b`.
    pub(super) fn blend(sums: &mut [f32], a: f32, part: &[f32], b: f32) {
        for (sum, part) in sums.iter_mut().zip(part) {
            *sum = sum.mul_add(a, part * b);
        }
    }
}

#[inline(always)]
fn row_set<'a, T: Cached, const K: usize>(values: &Heads<'a, T>, head: usize, first: usize) -> [&'a [T]; K] {
    let mut rows: [&[T]; K] = [&[]; K];
    for (index, row) in rows.iter_mut().enumerate() {
        *row = T::values(values.row(head, first + index));
    }
    rows
}

/// `q . k` for `N` queries, padded to whole vectors.
#[inline(always)]
fn dots<V: Vector, T: Cached, const N: usize>(q: &[&[f32]; N], k: &[T]) -> [f32; N] {
    let mut lanes = [V::splat(0.0); N];
    let (chunks, rest) = k.as_chunks::<16>();
    let mut blocks: [&[[f32; 16]]; N] = [&[]; N];
    for n in 0..N {
        blocks[n] = &q[n].as_chunks::<16>().0[..k.len().div_ceil(16)];
    }
    for (index, chunk) in chunks.iter().enumerate() {
        let k = T::load::<V>(chunk);
        for n in 0..N {
            lanes[n] = k.fma(V::load(&blocks[n][index]), lanes[n]);
        }
    }
    if !rest.is_empty() {
        let k = T::load::<V>(&float::padded(rest));
        for n in 0..N {
            lanes[n] = k.fma(V::load(&blocks[n][chunks.len()]), lanes[n]);
        }
    }
    let mut sums = [0f32; N];
    for n in 0..N {
        sums[n] = lanes[n].fold();
    }
    sums
}

/// `sums[n] += scores[n][first] * rows[0] + scores[n][first + 1] * rows[1] + ...`, one after the other.
#[inline(always)]
fn add<V: Vector, T: Cached, const N: usize, const K: usize>(
    sums: &mut [f32],
    width: usize,
    scores: &[[f32; BLOCK]; N],
    first: usize,
    rows: &[&[T]; K],
) {
    let mut weights = [[0f32; K]; N];
    for n in 0..N {
        weights[n].copy_from_slice(&scores[n][first..first + K]);
    }
    let len = rows[0].len();
    for at in (0..len).step_by(16) {
        let mut values = [V::splat(0.0); K];
        for k in 0..K {
            values[k] = match rows[k][at..].first_chunk() {
                Some(chunk) => T::load::<V>(chunk),
                None => T::load::<V>(&float::padded(&rows[k][at..])),
            };
        }
        for n in 0..N {
            if let Some(sums) = sums[n * width + at..].first_chunk_mut::<16>() {
                let mut sum = V::load(sums);
                for k in 0..K {
                    sum = V::splat(weights[n][k]).fma(values[k], sum);
                }
                sum.store(sums);
            }
        }
    }
}

/// The largest value.
#[inline(always)]
fn greatest(x: &[f32]) -> f32 {
    let mut lanes = [f32::NEG_INFINITY; 16];
    for x in x.chunks(16) {
        for (lane, x) in lanes.iter_mut().zip(x) {
            *lane = if *x > *lane { *x } else { *lane };
        }
    }
    lanes.into_iter().fold(f32::NEG_INFINITY, f32::max)
}
