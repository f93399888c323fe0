//! Attention of a block over its context and over itself, and the norms and RoPE of its heads.
//!
//! Only accepted tokens are added to the context. The keys and values of a block are dropped after the block.

use super::config::{AttentionWindow, DflashConfig};
use crate::model::drafts::norm;
use moestro_base::platform::Threads;
use moestro_compute::ops::draft_attention::{blend, score};
use std::ops::Range;

/// Number of prompt positions that are added to the context at a time.
pub const CONTEXT_CHUNK: usize = 256;
/// Number of positions kept beyond a layer's window, so that many old positions are removed at a time.
const SLACK: usize = 256;

/// The context of one layer: keys, after norm and RoPE, and values, `[positions, kv heads, dim]` each.
#[derive(Debug, Default)]
pub struct ContextCache {
    pub keys: Vec<f32>,
    pub values: Vec<f32>,
    /// Positions in ascending order. There are gaps at positions whose hidden rows were not recorded.
    pub positions: Vec<usize>,
}

impl ContextCache {
    /// Reserves memory for `context` positions, or for as many positions as a layer with `window` holds. The system
    /// commits the memory on first write.
    pub fn new(config: &DflashConfig, window: AttentionWindow, context: usize) -> Self {
        let max = positions(window, context);
        let empty = || Vec::with_capacity(max * config.kv());
        Self { keys: empty(), values: empty(), positions: Vec::with_capacity(max) }
    }

    /// Adds consecutive positions from `start` on. Drops old positions that no later query attends to.
    pub fn push(&mut self, start: usize, keys: &[f32], values: &[f32], width: usize, window: AttentionWindow) {
        self.keys.extend_from_slice(keys);
        self.values.extend_from_slice(values);
        let end = start + keys.len() / width;
        self.positions.extend(start..end);
        let Some(size) = window.size else { return };
        let gone = self.positions.partition_point(|position| position + size <= end);
        if gone > SLACK {
            self.positions.drain(..gone);
            self.keys.drain(..gone * width);
            self.values.drain(..gone * width);
        }
    }

    /// Removes the positions from `len` on.
    pub fn truncate(&mut self, len: usize, width: usize) {
        self.forget(&(len..usize::MAX), width);
    }

    /// Removes the positions of a range.
    pub fn forget(&mut self, positions: &Range<usize>, width: usize) {
        let index = |bound: usize| self.positions.partition_point(|position| *position < bound);
        let from = index(positions.start);
        let to = index(positions.end);
        self.positions.drain(from..to);
        self.keys.drain(from * width..to * width);
        self.values.drain(from * width..to * width);
    }

    /// Indices of the positions that the query at `position` attends to.
    fn seen(&self, window: AttentionWindow, position: usize) -> Range<usize> {
        let seen = window.seen(position);
        let index = |bound: usize| self.positions.partition_point(|position| *position < bound);
        index(seen.start)..index(seen.end)
    }
}

/// Maximum number of positions that a layer holds of a context. A chunk of a prompt is added before old positions are
/// dropped.
fn positions(window: AttentionWindow, context: usize) -> usize {
    window.size.map_or(context, |size| context.min(size.saturating_add(SLACK + CONTEXT_CHUNK)))
}

/// Number of bytes of a layer's context.
pub fn cost(config: &DflashConfig, window: AttentionWindow, context: usize) -> u64 {
    (positions(window, context) as u64).saturating_mul((2 * config.kv() * 4 + size_of::<usize>()) as u64)
}

/// `softmax(q k^T / sqrt(dim)) v` of the block's rows, which start at position `start`. `q` and the result have the
/// shape `[rows, heads, dim]`.
pub fn attend(
    threads: &Threads,
    config: &DflashConfig,
    window: AttentionWindow,
    q: &[f32],
    start: usize,
    caches: [&ContextCache; 2],
) -> Vec<f32> {
    let dim = config.dim;
    let width = config.kv();
    let size = config.heads / config.kv_heads * dim;
    let scale = (dim as f32).powf(-0.5);
    let mut out = vec![0.0; q.len()];
    // Each task computes, for one row, the query heads that share one key head.
    threads.run_pieces(&mut out, size, &|task, out| {
        let position = start + task / config.kv_heads;
        let head = task % config.kv_heads;
        let q = &q[task * size..][..size];
        let spans = caches.map(|cache| cache.seen(window, position));
        let mut scores = Vec::new();
        for (cache, span) in caches.iter().zip(&spans) {
            score(q, &cache.keys, span.clone(), [head, dim, width], scale, &mut scores);
        }
        softmax(&mut scores, size / dim);
        let mut rest = &scores[..];
        for (cache, span) in caches.iter().zip(&spans) {
            let (here, after) = rest.split_at(span.len() * (size / dim));
            blend(here, &cache.values, span.clone(), [head, dim, width], out);
            rest = after;
        }
    });
    out
}

/// Computes the softmax of each of `group` queries, whose scores are interleaved.
fn softmax(scores: &mut [f32], group: usize) {
    for query in 0..group {
        let max = scores.iter().skip(query).step_by(group).copied().fold(f32::NEG_INFINITY, f32::max);
        let mut sum = 0.0;
        for score in scores.iter_mut().skip(query).step_by(group) {
            *score = (*score - max).exp();
            sum += *score;
        }
        scores.iter_mut().skip(query).step_by(group).for_each(|score| *score /= sum);
    }
}

/// RMS norm and RoPE of each head of `x`, `[rows, width]`, whose rows are at positions from `start` on. All dimensions
/// are rotated, `j` with `j + dim / 2`.
pub fn norm_and_rope(x: &mut [f32], width: usize, start: usize, weight: &[f32], config: &DflashConfig) {
    let half = config.dim / 2;
    norm(x, weight, config.eps);
    let mut rotations = Vec::with_capacity(half);
    for (row, x) in x.chunks_exact_mut(width).enumerate() {
        let position = (start + row) as f64;
        let rotation = |j: usize| (position * config.theta.powf(-2.0 * j as f64 / config.dim as f64)).sin_cos();
        rotations.clear();
        rotations.extend((0..half).map(rotation).map(|(sin, cos)| (sin as f32, cos as f32)));
        for head in x.chunks_exact_mut(config.dim) {
            let (left, right) = head.split_at_mut(half);
            for ((left, right), (sin, cos)) in left.iter_mut().zip(right).zip(&rotations) {
                (*left, *right) = (*left * cos - *right * sin, *right * cos + *left * sin);
            }
        }
    }
}
