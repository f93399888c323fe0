//! Attention to selected blocks on the CPU. The result of a row does not depend on the other rows or on the number of
//! threads.

use super::{BlockAttention, BlockAttentionRows, IndexCache};
use crate::{
    device::DeviceError,
    ops::{
        QkNormRope,
        activation::softmax,
        attention::{
            KvElement, KvFormat, KvView, PAGE,
            kv_quant::{self, QuantizedKv, recent_start},
        },
        cpu::{Cpu, refuse},
        simd::{Vector, float, math::sigmoid, wide},
    },
};
use std::cell::RefCell;

thread_local! {
    /// Scores of the queries of a task, `[queries, positions]`, their sums of values, `[queries, padded dim]`, and a row
    /// of a quantized cache, `[dim]`.
    static SCRATCH: RefCell<[Vec<f32>; 3]> = RefCell::default();
}

impl BlockAttentionRows<'_> {
    /// Computes one row after the other.
    pub(in crate::ops) fn on_cpu(&self, cpu: &mut Cpu) -> Result<(), DeviceError> {
        let Self { attend, rows, .. } = *self;
        let both = self.attention_rows();
        let indexer = attend.indexer;
        let ring = attend.cache.capacity * indexer.recent_width() * 4;
        for row in 0..self.write.tokens {
            let at = cpu.memory.sequence(&rows, row);
            let (write, attention) = both.row(row, at);
            write.on_cpu(cpu)?;
            let index = attend.index.rows(row, 1, indexer.width());
            let rope_table = attend.norm_rope.rope_table.rows(row, 1, indexer.rope_dim);
            let norm_rope = QkNormRope { rope_table, ..attend.norm_rope };
            let cache = IndexCache { recent: attend.cache.recent.part(at[0] * ring, ring), ..attend.cache };
            BlockAttention { attention, index, norm_rope, cache, indexer }.on_cpu(cpu)?;
        }
        Ok(())
    }
}

impl BlockAttention<'_> {
    pub(in crate::ops) fn on_cpu(&self, cpu: &mut Cpu) -> Result<(), DeviceError> {
        let shape = self.attention.shape;
        let tokens = self.attention.tokens;
        if tokens == 0 || shape.kv_heads == 0 || !shape.heads.is_multiple_of(shape.kv_heads) {
            return refuse(format!("cannot attend with {tokens} tokens: {shape:?}"));
        }
        shape.check(tokens)?;
        let pages = cpu.memory.words(self.attention.cache.table).len();
        if pages * PAGE < self.attention.start + tokens {
            return refuse(format!("{pages} pages are too few for position {}", self.attention.start + tokens));
        }
        self.close_blocks(&cpu.memory)?;
        let mut scratch = std::mem::take(&mut cpu.scratch.selection);
        self.select(cpu, &mut scratch);
        match shape.recent.map_or(shape.format, |ring| ring.format) {
            KvFormat::F32 => self.attend::<f32>(cpu, &scratch.selected),
            KvFormat::I16 => self.attend::<i16>(cpu, &scratch.selected),
            other => return refuse(format!("the CPU does not support the cache format {other:?}")),
        }
        cpu.scratch.selection = scratch;
        Ok(())
    }

    /// Attends to `selected`, `[tokens, blocks]`, and to each query's open block. `T` is the format of the cache or, if
    /// the cache is quantized, of the ring of recent positions.
    fn attend<T: KvElement>(&self, cpu: &Cpu, selected: &[u32]) {
        let op = &self.attention;
        let memory = &cpu.memory;
        let threads = &cpu.compute.threads;
        let shape = op.shape;
        let tokens = op.tokens;
        let dim = op.shape.dim;
        let q = memory.floats(op.q.floats(tokens * shape.heads * dim));
        let proj = memory.floats(op.proj.floats(tokens * shape.width()));
        let y = memory.floats_mut(op.y.floats(tokens * shape.heads * dim));
        let caches = [op.cache.keys, op.cache.values].map(|cache| memory.bytes(cache));
        let rings = op.cache.recent.map(|ring| memory.bytes(ring));
        let table = memory.words(op.cache.table);
        let quantized = kv_quant::bits(shape.format)
            .map(|bits| caches.map(|cache| QuantizedKv::new(bits, cache, table, shape.kv_heads, dim)));
        let capacity = shape.recent.map_or(PAGE, |ring| ring.capacity);
        let group = shape.heads / shape.kv_heads;
        // With few rows, each query head is a task. Otherwise the query heads that share a key head are one task.
        let heads = if tokens * shape.kv_heads < 4 * threads.count() { 1 } else { group };
        threads.run_pieces(y, heads * dim, &|task, y| {
            let token = task * heads / shape.heads;
            let head = task * heads % shape.heads;
            let position = op.start + token;
            let (closed, chosen) = self.closed(position);
            let ratio = self.indexer.ratio;
            let blocks = &selected[token * self.indexer.blocks..][..chosen];
            let runs = blocks.iter().map(|block| *block as usize * ratio..(*block as usize + 1) * ratio);
            let runs = runs.chain(std::iter::once(closed * ratio..position + 1));
            let positions = runs.flatten();
            // A row of the cache or of the ring. `None` if the row is quantized.
            let row = |cache: usize, at: usize| {
                let sizes = [shape.kv_heads, capacity, dim];
                match quantized {
                    None => Some(KvView::<T>::at(caches[cache], Some(table), sizes, at).row(head / group, at)),
                    Some(_) if at < recent_start(position) => None,
                    Some(_) => Some(KvView::<T>::at(rings[cache], None, sizes, at).row(head / group, at)),
                }
            };
            let dequantize = |cache: usize, at: usize, to: &mut [f32]| {
                if let Some(cache) = quantized.map(|caches| caches[cache]) {
                    let row = cache.rows(head / group, at, 1);
                    kv_quant::dequantize_row(cache.bits, [row.codes, row.scales], to);
                }
            };
            SCRATCH.with_borrow_mut(|[scores, sums, dequantized]| {
                dequantized.resize(dim, 0.0);
                let count = chosen * ratio + (position + 1 - closed * ratio);
                scores.resize(heads * count, 0.0);
                let padded = dim.next_multiple_of(16);
                sums.clear();
                sums.resize(heads * padded, 0.0);
                let q = &q[(token * shape.heads + head) * dim..][..heads * dim];
                for (index, at) in positions.clone().enumerate() {
                    if let Some(key) = row(0, at) {
                        score_row(key, q, dim, scores, index, count);
                    } else {
                        dequantize(0, at, dequantized);
                        score_row::<f32>((dequantized, 1.0), q, dim, scores, index, count);
                    }
                }
                for scores in scores.chunks_exact_mut(count) {
                    softmax(scores, 1.0 / (dim as f32).sqrt());
                }
                for (index, at) in positions.enumerate() {
                    if let Some(value) = row(1, at) {
                        add_row(value, scores, index, count, sums, padded);
                    } else {
                        dequantize(1, at, dequantized);
                        add_row::<f32>((dequantized, 1.0), scores, index, count, sums, padded);
                    }
                }
                for (index, y) in y.chunks_exact_mut(dim).enumerate() {
                    let gate = &proj[token * shape.width() + (2 * (head + index) + 1) * dim..][..dim];
                    y.copy_from_slice(&sums[index * padded..][..dim]);
                    if quantized.is_some() {
                        kv_quant::hadamard(y);
                    }
                    for (y, gate) in y.iter_mut().zip(gate) {
                        *y *= sigmoid(*gate);
                    }
                }
            });
        });
    }
}

/// Sixteen elements from `at` on, padded with zeros.
#[inline(always)]
fn load<V: Vector, T: KvElement>(values: &[T], at: usize) -> V {
    match values[at..].first_chunk() {
        Some(chunk) => T::load::<V>(chunk),
        None => T::load::<V>(&float::padded(&values[at..])),
    }
}

wide! {
    /// `scores[query, at] = q . key` for each query.
    fn score_row[T: KvElement](key: (&[T], f32), queries: &[f32], dim: usize, scores: &mut [f32], at: usize, count: usize) {
        let (values, scale) = key;
        for (index, q) in queries.chunks_exact(dim).enumerate() {
            let mut lanes = V::splat(0.0);
            for first in (0..dim).step_by(16) {
                lanes = load::<V, T>(values, first).fma(load::<V, f32>(q, first), lanes);
            }
            scores[index * count + at] = lanes.sum() * scale;
        }
    }
}

wide! {
    /// `sums[query] += scores[query, at] * value` for each query.
    fn add_row[T: KvElement](value: (&[T], f32), scores: &[f32], at: usize, count: usize, sums: &mut [f32], padded: usize) {
        let (values, scale) = value;
        for (index, sums) in sums.chunks_exact_mut(padded).enumerate() {
            let weight = V::splat(scores[index * count + at] * scale);
            for (first, sums) in sums.as_chunks_mut::<16>().0.iter_mut().enumerate() {
                weight.fma(load::<V, T>(values, 16 * first), V::load(sums)).store(sums);
            }
        }
    }
}
