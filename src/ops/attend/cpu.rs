//! Causal attention over the cache, read in place.
//!
//! The keys are cut in blocks at fixed positions. A query's softmax runs within a block; the blocks' results are folded
//! in order, each rescaled to the common maximum. So blocks may be computed on different threads or one after the other,
//! with one query or with many, and the result has the same bytes. Every key and value is widened to f32 once for all
//! queries that share it.

use super::{
    Attend,
    cache::{Cached, CachedHeads},
    kernels::{blend, collect, compare, soften},
};
use crate::{
    device::DeviceError,
    ops::{
        cpu::{Cpu, refuse},
        math::{exp, sigmoid},
        run::CacheFormat,
        simd::{Out, wide},
    },
    platform::Threads,
};
use std::{cell::RefCell, ops::Range};

/// Positions of a block.
pub(super) const BLOCK: usize = 256;
/// Most queries that one task computes together.
const QUERIES: usize = 64;
/// Most blocks whose results wait to be folded.
const WAVE: usize = 64;

impl Attend<'_> {
    pub(in crate::ops) fn on_cpu(&self, cpu: &mut Cpu) -> Result<(), DeviceError> {
        let (shape, tokens, memory) = (self.shape, self.tokens, &cpu.memory);
        let (heads, shared, dim) = (shape.heads, shape.kv_heads, shape.dim);
        if shared == 0 || !heads.is_multiple_of(shared) || self.start + tokens > shape.context {
            return refuse(format!("{tokens} tokens at {} of {shape:?}", self.start));
        }
        let q = memory.floats(self.q.floats(tokens * heads * dim));
        let y = memory.floats_mut(self.y.floats(tokens * heads * dim));
        let (keys, values) = (memory.bytes(self.cache.keys), memory.bytes(self.cache.values));
        let threads = &cpu.compute.threads;
        match shape.format {
            CacheFormat::F32 => Work::<f32>::new(self, q, keys, values).all(threads, tokens, y),
            CacheFormat::I16 => Work::<i16>::new(self, q, keys, values).all(threads, tokens, y),
            CacheFormat::Bf16 => return refuse("the CPU keeps no bf16 cache".into()),
        }
        let proj = memory.floats(self.proj.floats(tokens * shape.width()));
        threads.run_pieces(y, heads * dim, &|token, y| {
            let row = &proj[token * shape.width()..];
            for (y, gate) in y.chunks_exact_mut(dim).zip(row.chunks_exact(2 * dim)) {
                gated(y, &gate[dim..]);
            }
        });
        Ok(())
    }
}

wide! {
    fn gated(y: &mut [f32], gate: &[f32]) {
        for (y, gate) in y.iter_mut().zip(gate) {
            *y *= sigmoid(*gate);
        }
    }
}

/// One call's arguments, shared by its tasks.
struct Work<'a, T> {
    q: &'a [f32],
    keys: CachedHeads<'a, T>,
    values: CachedHeads<'a, T>,
    at: usize,
    heads: usize,
    /// Query heads that share a key and value head.
    group: usize,
    dim: usize,
    /// `dim`, padded to whole vectors.
    width: usize,
}

/// Buffers of one thread.
#[derive(Default)]
struct Scratch {
    sums: Vec<f32>,
    part: Vec<f32>,
    /// Queries times `1 / sqrt(D)`, padded to whole vectors.
    query: Vec<f32>,
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
    static PARTIALS: RefCell<Vec<f32>> = RefCell::default();
}

impl<'a, T: Cached> Work<'a, T> {
    fn new(op: &Attend<'_>, q: &'a [f32], keys: &'a [u8], values: &'a [u8]) -> Self {
        let (shape, dim) = (op.shape, op.shape.dim);
        let cache = |bytes| CachedHeads::new(bytes, shape.kv_heads, shape.context, dim);
        Self {
            q,
            keys: cache(keys),
            values: cache(values),
            at: op.start,
            heads: shape.heads,
            group: shape.heads / shape.kv_heads,
            dim,
            width: dim.next_multiple_of(16),
        }
    }

    /// The results of all tokens.
    fn all(&self, threads: &Threads, tokens: usize, y: &mut [f32]) {
        let (work, group, width, shared) = (self, self.group, self.width, self.keys.count);
        let out = Out(y.as_mut_ptr());
        // A tile is some tokens with all query heads of one key head.
        let height = (QUERIES / group).max(1);
        let tiles = tokens.div_ceil(height);
        let tile = |task: usize| (task / tiles, task % tiles * height..(task % tiles * height + height).min(tokens));
        let blocks = (self.at + tokens).div_ceil(BLOCK);
        if blocks == 1 || shared * tiles >= 4 * threads.count() {
            threads.run(shared * tiles, &|task| {
                let (head, tokens) = tile(task);
                SCRATCH.with_borrow_mut(|scratch| work.tile(head, tokens, out, scratch));
            });
            return;
        }
        // Too few tiles to keep all threads busy: blocks of keys are tasks of their own, as many at a time as there is
        // room for, which does not grow with the context.
        let size = height.min(tokens) * group * (width + 2);
        let mut parts = PARTIALS.take();
        let (sums, wave) = (shared * tiles * size, blocks.min(WAVE));
        parts.resize((sums * (1 + wave)).max(parts.len()), 0.0);
        let (sums, parts_of) = parts.split_at_mut(sums);
        for (task, sums) in sums.chunks_exact_mut(size).enumerate() {
            clear(sums, tile(task).1.len() * group);
        }
        let (sums, part) = (Out(sums.as_mut_ptr()), Out(parts_of.as_mut_ptr()));
        // SAFETY: `size` values for each index, inside its buffer; each belongs to one task at a time.
        let slice = |base: Out, index: usize| unsafe { std::slice::from_raw_parts_mut(base.0.add(index * size), size) };
        for first in (0..blocks).step_by(wave) {
            let count = wave.min(blocks - first);
            threads.run(shared * tiles * count, &|task| {
                let (head, tokens) = tile(task / count);
                let part = slice(part, task);
                SCRATCH.with_borrow_mut(|scratch| {
                    work.block(head, tokens, first + task % count, part, &mut scratch.query);
                });
            });
            threads.run(shared * tiles, &|task| {
                let (head, tokens) = tile(task);
                let sums = slice(sums, task);
                for block in first..(first + count).min(work.blocks(&tokens)) {
                    work.fold(&tokens, block, sums, slice(part, task * count + block - first));
                }
                if first + count == blocks {
                    work.finish(head, tokens, sums, out);
                }
            });
        }
        PARTIALS.set(parts);
    }
}

/// Results of some queries over some keys are kept as all maxima, all sums, then all weighted sums of values.
fn clear(sums: &mut [f32], queries: usize) {
    let (most, rest) = sums.split_at_mut(queries);
    most.fill(f32::NEG_INFINITY);
    rest.fill(0.0);
}

impl<T: Cached> Work<'_, T> {
    /// Blocks that the last of `tokens` sees.
    fn blocks(&self, tokens: &Range<usize>) -> usize {
        (self.at + tokens.end).div_ceil(BLOCK)
    }

    /// The number of queries of `tokens` that come before the block and see nothing of it.
    fn blind(&self, tokens: &Range<usize>, block: usize) -> usize {
        (block * BLOCK).saturating_sub(self.at + tokens.start).min(tokens.len()) * self.group
    }

    /// The whole result of some tokens, block after block.
    fn tile(&self, head: usize, tokens: Range<usize>, out: Out, scratch: &mut Scratch) {
        let queries = tokens.len() * self.group;
        let Scratch { sums, part, query } = scratch;
        let size = queries * (self.width + 2);
        sums.resize(size.max(sums.len()), 0.0);
        part.resize(size.max(part.len()), 0.0);
        clear(&mut sums[..size], queries);
        for block in 0..self.blocks(&tokens) {
            self.block(head, tokens.clone(), block, part, query);
            self.fold(&tokens, block, sums, part);
        }
        self.finish(head, tokens, sums, out);
    }

    /// Adds a block's `part` to `sums` for the queries that saw anything of it.
    fn fold(&self, tokens: &Range<usize>, block: usize, sums: &mut [f32], part: &[f32]) {
        let queries = tokens.len() * self.group;
        for query in self.blind(tokens, block)..queries {
            let (old, new) = (sums[query], part[query]);
            let most = old.max(new);
            let (a, b) = (exp(old - most), exp(new - most));
            sums[query] = most;
            sums[queries + query] = sums[queries + query] * a + part[queries + query] * b;
            let row = 2 * queries + query * self.width..2 * queries + (query + 1) * self.width;
            blend(&mut sums[row.clone()], a, &part[row], b);
        }
    }

    /// Divides by the sums and writes the rows.
    fn finish(&self, head: usize, tokens: Range<usize>, sums: &[f32], out: Out) {
        let queries = tokens.len() * self.group;
        for query in 0..queries {
            let (token, n) = (tokens.start + query / self.group, head * self.group + query % self.group);
            // SAFETY: inside the output; every row belongs to one tile.
            let y = unsafe { std::slice::from_raw_parts_mut(out.0.add((token * self.heads + n) * self.dim), self.dim) };
            let row = &sums[2 * queries + query * self.width..][..self.dim];
            for (y, sum) in y.iter_mut().zip(row) {
                *y = sum / sums[queries + query];
            }
        }
    }

    /// Queries of `tokens` over one block of keys: maxima, sums and weighted values into `part`.
    fn block(&self, head: usize, tokens: Range<usize>, block: usize, part: &mut [f32], query: &mut Vec<f32>) {
        let queries = tokens.len() * self.group;
        for (index, token) in tokens.enumerate() {
            let start = block * BLOCK;
            let seen = start..(start + BLOCK).min(self.at + token + 1);
            if seen.is_empty() {
                continue;
            }
            // All queries of a token see the same keys: they are computed together, as many as fit the registers.
            let mut n = 0;
            while n < self.group {
                let at = (index * self.group + n, queries);
                let first = token * self.heads + head * self.group + n;
                n += match self.group - n {
                    8.. => self.some::<8>(head, first, seen.clone(), part, at, query),
                    4.. => self.some::<4>(head, first, seen.clone(), part, at, query),
                    2.. => self.some::<2>(head, first, seen.clone(), part, at, query),
                    _ => self.some::<1>(head, first, seen.clone(), part, at, query),
                };
            }
        }
    }

    /// `N` queries from row `first` on over the keys `seen`; the results are number `at.0` and following of `at.1`.
    fn some<const N: usize>(
        &self,
        head: usize,
        first: usize,
        seen: Range<usize>,
        part: &mut [f32],
        at: (usize, usize),
        query: &mut Vec<f32>,
    ) -> usize {
        let (dim, width, (index, queries)) = (self.dim, self.width, at);
        let scale = (dim as f32).powf(-0.5);
        query.clear();
        query.resize(N * width, 0.0);
        for (padded, q) in query.chunks_exact_mut(width).zip(self.q[first * dim..].chunks_exact(dim)) {
            for (padded, q) in padded.iter_mut().zip(q) {
                *padded = q * scale;
            }
        }
        let rows: [&[f32]; N] = std::array::from_fn(|n| &query[n * width..(n + 1) * width]);
        let mut scores = [[0f32; BLOCK]; N];
        compare(&rows, &self.keys, head, seen.clone(), &mut scores);
        for (n, scores) in scores.iter_mut().enumerate() {
            let (most, sum) = soften(&mut scores[..seen.len()]);
            part[index + n] = most;
            part[queries + index + n] = sum;
        }
        let sums = &mut part[2 * queries + index * width..][..N * width];
        sums.fill(0.0);
        collect(sums, width, &mut scores, &self.values, head, seen);
        N
    }
}
