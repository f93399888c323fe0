//! Attention of a block over its context and over itself, and what comes before it: norms and rotations of heads. The context
//! grows by what was committed and nothing else; a block's own keys and values are forgotten with it.

use super::config::{Config, Sight};
use crate::{ops::wide, platform::Threads};
use std::ops::Range;

/// Positions kept beyond a layer's window, so that those which leave it are moved out many at a time.
const SLACK: usize = 256;

/// Keys (normed and rotated) and values, `[positions, kv heads, dim]` each.
#[derive(Debug, Default)]
pub struct Memory {
    pub keys: Vec<f32>,
    pub values: Vec<f32>,
    /// Ascending. There may be gaps: what the draft has not followed.
    pub positions: Vec<usize>,
}

impl Memory {
    /// Room for `context` positions, or for what `sight` can see of them. Pages are committed as they are first written.
    pub fn new(config: &Config, sight: Sight, context: usize) -> Self {
        let most = positions(sight, context);
        let room = || Vec::with_capacity(most * config.kv());
        Self { keys: room(), values: room(), positions: Vec::with_capacity(most) }
    }

    /// Adds neighbouring positions from `start` on; drops what no later one sees.
    pub fn push(&mut self, start: usize, keys: &[f32], values: &[f32], width: usize, sight: Sight) {
        self.keys.extend_from_slice(keys);
        self.values.extend_from_slice(values);
        let end = start + keys.len() / width;
        self.positions.extend(start..end);
        let Some(window) = sight.window else { return };
        let gone = self.positions.partition_point(|position| position + window <= end);
        if gone > SLACK {
            self.positions.drain(..gone);
            self.keys.drain(..gone * width);
            self.values.drain(..gone * width);
        }
    }

    /// Forgets the positions from `len` on.
    pub fn truncate(&mut self, len: usize, width: usize) {
        self.forget(&(len..usize::MAX), width);
    }

    /// Forgets the positions of a range.
    pub fn forget(&mut self, positions: &Range<usize>, width: usize) {
        let index = |bound: usize| self.positions.partition_point(|position| *position < bound);
        let (from, to) = (index(positions.start), index(positions.end));
        self.positions.drain(from..to);
        self.keys.drain(from * width..to * width);
        self.values.drain(from * width..to * width);
    }

    /// Indices of those that the query at `position` sees.
    fn seen(&self, sight: Sight, position: usize) -> Range<usize> {
        let seen = sight.seen(position);
        let index = |bound: usize| self.positions.partition_point(|position| *position < bound);
        index(seen.start)..index(seen.end)
    }
}

/// Positions that a layer holds at most, of a context of so many. A piece of a prompt is pushed before what leaves the window
/// is dropped.
fn positions(sight: Sight, context: usize) -> usize {
    sight.window.map_or(context, |window| context.min(window.saturating_add(SLACK + super::PIECE)))
}

/// Bytes of a layer's context.
pub fn cost(config: &Config, sight: Sight, context: usize) -> u64 {
    (positions(sight, context) as u64).saturating_mul((2 * config.kv() * 4 + size_of::<usize>()) as u64)
}

/// `softmax(q k^T / sqrt(dim)) v` of the block's rows, which begin at position `start`; `q` and the result are `[rows, heads,
/// dim]`.
pub fn attend(
    threads: &Threads,
    config: &Config,
    sight: Sight,
    (q, start): (&[f32], usize),
    memories: [&Memory; 2],
) -> Vec<f32> {
    let (dim, width) = (config.dim, config.kv());
    let size = config.heads / config.kv_heads * dim;
    let scale = (dim as f32).powf(-0.5);
    let mut out = vec![0.0; q.len()];
    // A task is the query heads that share a head of keys, in one row.
    threads.run_pieces(&mut out, size, &|task, out| {
        let (position, head) = (start + task / config.kv_heads, task % config.kv_heads);
        let q = &q[task * size..][..size];
        let spans = memories.map(|memory| memory.seen(sight, position));
        let mut scores = Vec::new();
        for (memory, span) in memories.iter().zip(&spans) {
            score(q, &memory.keys, span.clone(), [head, dim, width], scale, &mut scores);
        }
        softmax(&mut scores, size / dim);
        let mut rest = &scores[..];
        for (memory, span) in memories.iter().zip(&spans) {
            let (here, behind) = rest.split_at(span.len() * (size / dim));
            blend(here, &memory.values, span.clone(), [head, dim, width], out);
            rest = behind;
        }
    });
    out
}

wide! {
    /// For each position of `span`, the products of its key with each of the queries, appended.
    fn score(
        q: &[f32],
        keys: &[f32],
        span: Range<usize>,
        place: [usize; 3],
        scale: f32,
        scores: &mut Vec<f32>,
    ) {
        let [head, dim, width] = place;
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
    /// Adds to each query's result the values of `span`'s positions times its weights.
    fn blend(weights: &[f32], values: &[f32], span: Range<usize>, place: [usize; 3], out: &mut [f32]) {
        let [head, dim, width] = place;
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

/// Of each of `group` queries, whose scores take turns.
fn softmax(scores: &mut [f32], group: usize) {
    for query in 0..group {
        let most = scores.iter().skip(query).step_by(group).copied().fold(f32::NEG_INFINITY, f32::max);
        let mut sum = 0.0;
        for score in scores.iter_mut().skip(query).step_by(group) {
            *score = (*score - most).exp();
            sum += *score;
        }
        scores.iter_mut().skip(query).step_by(group).for_each(|score| *score /= sum);
    }
}

/// `x / sqrt(mean(x^2) + eps) * weight`, row by row. The weight is as stored: not less one.
pub fn norm(x: &mut [f32], weight: &[f32], eps: f32) {
    for row in x.chunks_exact_mut(weight.len()) {
        let scale = (row.iter().map(|x| x * x).sum::<f32>() / row.len() as f32 + eps).sqrt().recip();
        row.iter_mut().zip(weight).for_each(|(x, weight)| *x *= scale * weight);
    }
}

/// Norms and rotates heads: `x` is `[rows, width]`, its rows at positions from `start` on, each of heads of `weight`'s length.
/// All dimensions are rotated, `j` with `j + dim / 2`.
pub fn place(x: &mut [f32], width: usize, start: usize, weight: &[f32], config: &Config) {
    let half = config.dim / 2;
    norm(x, weight, config.eps);
    let mut turns = Vec::with_capacity(half);
    for (row, x) in x.chunks_exact_mut(width).enumerate() {
        let position = (start + row) as f64;
        let turn = |j: usize| (position * config.theta.powf(-2.0 * j as f64 / config.dim as f64)).sin_cos();
        turns.clear();
        turns.extend((0..half).map(turn).map(|(sin, cos)| (sin as f32, cos as f32)));
        for head in x.chunks_exact_mut(config.dim) {
            let (left, right) = head.split_at_mut(half);
            for ((left, right), (sin, cos)) in left.iter_mut().zip(right).zip(&turns) {
                (*left, *right) = (*left * cos - *right * sin, *right * cos + *left * sin);
            }
        }
    }
}
