//! Inner loops of attention over f32 and i16 caches: scores of a block, softmax, weighted values, merging of blocks.

use super::{
    BLOCK,
    kv_cache::{KvElement, KvRows, KvView},
};
use crate::ops::simd::{
    Vector, float,
    math::{exp, exp_normal},
    wide,
};
use std::ops::Range;

/// Distance of the prefetch from the row that is being read, in bytes.
const PREFETCH_BYTES: usize = 20480;
/// Weights below `e^MIN_EXPONENT` times the block's largest weight count as 0. Such weights cannot change an f32 sum,
/// and subnormal products are a hundred times slower.
const MIN_EXPONENT: f32 = -60.0;
/// Number of rows in a strip. All queries accumulate the values of a strip while the strip is in the L1 cache.
const STRIP: usize = 32;
/// Distance of the prefetched strip from the strip in use, in strips. Lines are prefetched in memory order, because the
/// hardware prefetcher then fetches further ahead than software prefetches can.
const PREFETCH_STRIPS: usize = 2;
/// Number of scales in one cache line.
const LINE_SCALES: usize = 16;

wide! {
    /// Scores of a block: `scores[n][i] = q[n] . key[seen.start + i]`.
    pub(super) fn qk[T: KvElement, const N: usize](
        q: &[&[f32]; N],
        keys: &KvView<'_, T>,
        head: usize,
        seen: Range<usize>,
        scores: &mut [[f32; BLOCK]; N],
    ) {
        let mut done = 0;
        if V::HAS_32_REGISTERS {
            // Sixteen dot products at a time.
            done = match N {
                8 => qk_blocks::<V, T, N, 2>(q, keys, head, seen.clone(), scores),
                4 => qk_blocks::<V, T, N, 4>(q, keys, head, seen.clone(), scores),
                2 => qk_blocks::<V, T, N, 8>(q, keys, head, seen.clone(), scores),
                _ => qk_blocks::<V, T, N, 16>(q, keys, head, seen.clone(), scores),
            };
        }
        for (index, key) in (seen.start + done..seen.end).enumerate() {
            let (row, scale) = keys.row(head, key);
            let [lanes] = dot_lanes::<V, T, N, 1>(q, &[row], None);
            for n in 0..N {
                scores[n][done + index] = lanes[n].sum() * scale;
            }
        }
    }
}

/// Computes [`qk`] for whole sets of `K` keys, with `N * K = 16`. Returns the number of keys computed.
#[inline(always)]
fn qk_blocks<V: Vector, T: KvElement, const N: usize, const K: usize>(
    q: &[&[f32]; N],
    keys: &KvView<'_, T>,
    head: usize,
    seen: Range<usize>,
    scores: &mut [[f32; BLOCK]; N],
) -> usize {
    let count = seen.len() / K * K;
    for index in (0..count).step_by(K) {
        let ahead = keys.prefetch_address(head, seen.start + index, PREFETCH_BYTES);
        V::prefetch(keys.prefetch_scale(head, seen.start + index, PREFETCH_BYTES / (keys.dim * size_of::<T>())));
        let mut rows: [&[T]; K] = [&[]; K];
        let mut scales = [0f32; K];
        for k in 0..K {
            (rows[k], scales[k]) = keys.row(head, seen.start + index + k);
        }
        let lanes = dot_lanes::<V, T, N, K>(q, &rows, Some(ahead));
        let mut all = [V::splat(0.0); 16];
        for (index, all) in all.iter_mut().enumerate() {
            *all = lanes[index / N % K][index % N];
        }
        let sums = V::sum_all(all);
        for n in 0..N {
            for k in 0..K {
                scores[n][index + k] = sums[k * N + n] * scales[k];
            }
        }
    }
    count
}

wide! {
    /// Adds weighted values: `sums[n] += sum over i of scores[n][i] * value[seen.start + i]`, in order of `i`.
    /// Multiplies the scores by the values' scales first.
    pub(super) fn pv[T: KvElement, const N: usize](
        sums: &mut [f32],
        width: usize,
        scores: &mut [[f32; BLOCK]; N],
        values: &KvView<'_, T>,
        head: usize,
        seen: Range<usize>,
    ) {
        let dim = values.dim;
        for first in (0..seen.len()).step_by(STRIP) {
            let strip = first..(first + STRIP).min(seen.len());
            let rows = values.rows(head, seen.start + first, strip.len());
            // Scales are loaded strip by strip, because the lines of later strips are not prefetched yet.
            let mut scales = [0f32; STRIP];
            for (row, scale) in scales[..strip.len()].iter_mut().enumerate() {
                *scale = rows.scale(row);
            }
            for line in (0..STRIP).step_by(LINE_SCALES) {
                V::prefetch(values.prefetch_scale(head, seen.start + first, PREFETCH_STRIPS * STRIP + line));
            }
            for scores in scores.iter_mut() {
                for (score, scale) in scores[strip.clone()].iter_mut().zip(&scales) {
                    *score *= scale;
                }
            }
            // Each pass over a range of columns prefetches its share of the cache lines.
            let ahead = values.prefetch_address(head, seen.start + first, PREFETCH_STRIPS * STRIP * dim * size_of::<T>());
            let ahead = |at: usize| ahead.wrapping_add(at * STRIP * size_of::<T>());
            let mut at = 0;
            while V::HAS_32_REGISTERS && at + 32 <= dim {
                accumulate::<V, T, N, 2>(sums, width, scores, strip.clone(), &rows, at, ahead(at));
                at += 32;
            }
            while at < dim {
                accumulate::<V, T, N, 1>(sums, width, scores, strip.clone(), &rows, at, ahead(at));
                at += 16;
            }
        }
    }
}

wide! {
    /// Replaces the first `count` scores of each query by `e^(score - max)`. Returns maxima and sums.
    pub(super) fn softmax[const N: usize](scores: &mut [[f32; BLOCK]; N], count: usize) -> [[f32; 2]; N] {
        let mut results = [[0f32; 2]; N];
        // Computes the maxima of all queries first. These computations are independent, so the processor overlaps them.
        for n in 0..N {
            results[n][0] = max_ignoring_nan(&scores[n][..count]);
        }
        let one = V::splat(1.0);
        for n in 0..N {
            let (chunks, rest) = scores[n][..count].as_chunks_mut::<16>();
            let max = results[n][0];
            let mut sum = V::splat(0.0);
            for chunk in chunks {
                for score in chunk.iter_mut() {
                    *score = softmax_weight(*score - max);
                }
                sum = V::load(chunk).fma(one, sum);
            }
            for score in rest.iter_mut() {
                *score = softmax_weight(*score - max);
            }
            results[n][1] = V::load(&float::padded(rest)).fma(one, sum).sum();
        }
        results
    }
}

/// `e^x` for `x <= 0`, or 0 below [`MIN_EXPONENT`].
#[inline(always)]
fn softmax_weight(x: f32) -> f32 {
    let power = exp_normal(x);
    if x < MIN_EXPONENT { 0.0 } else { power }
}

wide! {
    /// Merges a block's `part` into `sums` for the queries from number `first` on. Each of the two slices holds the
    /// maxima of all queries, then the sums of all queries, then the weighted sums, `width` floats for each query.
    pub(super) fn merge_blocks(sums: &mut [f32], part: &[f32], queries: usize, first: usize, width: usize) {
        for query in first..queries {
            let old = sums[query];
            let new = part[query];
            let max = old.max(new);
            let a = exp(old - max);
            let b = exp(new - max);
            sums[query] = max;
            sums[queries + query] = sums[queries + query] * a + part[queries + query] * b;
            let row = 2 * queries + query * width..2 * queries + (query + 1) * width;
            for (sum, part) in sums[row.clone()].iter_mut().zip(&part[row]) {
                *sum = sum.mul_add(a, part * b);
            }
        }
    }
}

/// Lanes of `q . k` for `N` padded queries and `K` keys. Prefetches as much memory as it reads, from `ahead` on, a
/// few lines at a time, because a core tracks a limited number of misses.
#[inline(always)]
fn dot_lanes<V: Vector, T: KvElement, const N: usize, const K: usize>(
    q: &[&[f32]; N],
    keys: &[&[T]; K],
    ahead: Option<*const u8>,
) -> [[V; N]; K] {
    let mut lanes = [[V::splat(0.0); N]; K];
    let dim = keys[0].len();
    let mut blocks: [&[[f32; 16]]; N] = [&[]; N];
    for n in 0..N {
        blocks[n] = &q[n].as_chunks::<16>().0[..dim.div_ceil(16)];
    }
    let mut chunks: [&[[T; 16]]; K] = [&[]; K];
    for k in 0..K {
        chunks[k] = &keys[k].as_chunks::<16>().0[..dim / 16];
    }
    for index in 0..dim / 16 {
        if let Some(ahead) = ahead {
            let piece = K * size_of::<[T; 16]>();
            for line in (0..piece).step_by(64) {
                V::prefetch(ahead.wrapping_add(index * piece + line));
            }
        }
        for k in 0..K {
            let key = T::load::<V>(&chunks[k][index]);
            for n in 0..N {
                lanes[k][n] = key.fma(V::load(&blocks[n][index]), lanes[k][n]);
            }
        }
    }
    if !dim.is_multiple_of(16) {
        for k in 0..K {
            let key = T::load::<V>(&float::padded(&keys[k][dim / 16 * 16..]));
            for n in 0..N {
                lanes[k][n] = key.fma(V::load(&blocks[n][dim / 16]), lanes[k][n]);
            }
        }
    }
    lanes
}

/// `sums[n] += scores[n][i] * row[i]`, row after row, for columns `at..at + 16 * C`. Prefetches as much memory as it
/// reads, from `ahead` on.
#[inline(always)]
fn accumulate<V: Vector, T: KvElement, const N: usize, const C: usize>(
    sums: &mut [f32],
    width: usize,
    scores: &[[f32; BLOCK]; N],
    strip: Range<usize>,
    rows: &KvRows<'_, T>,
    at: usize,
    ahead: *const u8,
) {
    let mut lanes = [[V::splat(0.0); C]; N];
    for n in 0..N {
        let (sums, _) = sums[n * width + at..][..16 * C].as_chunks::<16>();
        for c in 0..C {
            lanes[n][c] = V::load(&sums[c]);
        }
    }
    let mut parts: [&[f32]; N] = [&[]; N];
    for n in 0..N {
        parts[n] = &scores[n][strip.clone()];
    }
    for (index, row) in rows.iter().enumerate().take(strip.len()) {
        let row = &row[at..];
        let piece = C * size_of::<[T; 16]>();
        for line in (0..piece).step_by(64) {
            V::prefetch(ahead.wrapping_add(index * piece + line));
        }
        let mut values = [V::splat(0.0); C];
        for c in 0..C {
            values[c] = match row[16 * c..].first_chunk() {
                Some(chunk) => T::load::<V>(chunk),
                None => T::load::<V>(&float::padded(&row[16 * c..])),
            };
        }
        for n in 0..N {
            let weight = V::splat(parts[n][index]);
            for c in 0..C {
                lanes[n][c] = weight.fma(values[c], lanes[n][c]);
            }
        }
    }
    for n in 0..N {
        let (sums, _) = sums[n * width + at..][..16 * C].as_chunks_mut::<16>();
        for c in 0..C {
            lanes[n][c].store(&mut sums[c]);
        }
    }
}

/// The largest value, ignoring NaN.
#[inline(always)]
fn max_ignoring_nan(x: &[f32]) -> f32 {
    let larger = |a: f32, b: f32| if a > b { a } else { b };
    let mut lanes = [f32::NEG_INFINITY; 16];
    let (chunks, rest) = x.as_chunks::<16>();
    for chunk in chunks {
        for (lane, x) in lanes.iter_mut().zip(chunk) {
            *lane = larger(*x, *lane);
        }
    }
    for (lane, x) in lanes.iter_mut().zip(rest) {
        *lane = larger(*x, *lane);
    }
    let mut half = 8;
    while half > 0 {
        let (low, high) = lanes.split_at_mut(half);
        for (low, high) in low.iter_mut().zip(high) {
            *low = larger(*high, *low);
        }
        half /= 2;
    }
    lanes[0]
}
