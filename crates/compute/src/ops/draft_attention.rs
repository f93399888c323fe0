//! Scores and sums of attention over keys and values of drafts, which are rows of f32 in memory of the CPU.

use super::simd::wide;
use std::ops::Range;

wide! {
    /// Appends the dot products of each position's key with each of the queries `q`, times `scale`, to the scores. A
    /// position has `width` values, and the key head `head` has `dim` of them. `layout` is `[head, dim, width]`.
    pub fn score(
        q: &[f32],
        keys: &[f32],
        span: Range<usize>,
        layout: [usize; 3],
        scale: f32,
        scores: &mut Vec<f32>,
    ) {
        let [head, dim, width] = layout;
        for position in span {
            let key = &keys[position * width + head * dim..][..dim];
            for q in q.chunks_exact(dim) {
                let mut lanes = [0.0f32; 16];
                let (q, q_rest) = q.as_chunks::<16>();
                let (key, key_rest) = key.as_chunks::<16>();
                for (q, key) in q.iter().zip(key) {
                    for lane in 0..16 {
                        lanes[lane] = q[lane].mul_add(key[lane], lanes[lane]);
                    }
                }
                let rest: f32 = q_rest.iter().zip(key_rest).map(|(q, key)| q * key).sum();
                scores.push((lanes.iter().sum::<f32>() + rest) * scale);
            }
        }
    }
}

wide! {
    /// Adds the weighted values of `span`'s positions to each query's output. `layout` is that of [`score`].
    pub fn blend(weights: &[f32], values: &[f32], span: Range<usize>, layout: [usize; 3], out: &mut [f32]) {
        let [head, dim, width] = layout;
        let group = out.len() / dim;
        for (position, weights) in span.zip(weights.chunks_exact(group)) {
            let value = &values[position * width + head * dim..][..dim];
            for (out, weight) in out.chunks_exact_mut(dim).zip(weights) {
                for (out, value) in out.iter_mut().zip(value) {
                    *out = value.mul_add(*weight, *out);
                }
            }
        }
    }
}
