//! Causal attention over the cache, read in place: query head `n` uses key and value head `n / (H / KV)` (spec 2.1).
//!
//! The keys are cut in blocks at fixed positions. A query's softmax runs within a block; the blocks' results are folded
//! in order, each rescaled to the common maximum. So blocks may be computed on different threads or one after the other,
//! with one query or with many, and the result has the same bytes. Every key and value is widened to f32 once for all
//! queries that share it.

use std::{cell::RefCell, ops::Range};

use candle_core::{CpuStorage, CustomOp3, Layout, Result, Shape, Tensor, bail};

use super::{
    cache::{Cached, Heads},
    linear::contiguous,
    math::exp,
    simd::{self, Out, float::lanes_sum},
};
use crate::device::Compute;

/// Positions of a block.
const BLOCK: usize = 256;
/// Most queries that one task computes together.
const QUERIES: usize = 64;

/// `softmax(q k^T / sqrt(D)) v` for queries `[T, H, D]` at positions `at..at + T` over the caches of keys and values (see
/// [`super::cache`]); a query sees its own position and those before. The result is `[T, H * D]`, f32.
pub fn attend(compute: &Compute, q: &Tensor, keys: &Tensor, values: &Tensor, at: usize) -> Result<Tensor> {
    q.apply_op3_no_bwd(keys, values, &Attend { compute, at })
}

struct Attend<'a> {
    compute: &'a Compute,
    at: usize,
}

impl CustomOp3 for Attend<'_> {
    fn name(&self) -> &'static str {
        "attend"
    }

    fn cpu_fwd(
        &self,
        q: &CpuStorage,
        ql: &Layout,
        k: &CpuStorage,
        kl: &Layout,
        v: &CpuStorage,
        vl: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let (tokens, heads, dim) = ql.shape().dims3()?;
        let q = contiguous(q, ql)?;
        let y = match (Heads::<f32>::new(k, kl, dim), Heads::<f32>::new(v, vl, dim)) {
            (Ok(keys), Ok(values)) => self.forward(q, [tokens, heads, dim], keys, values)?,
            _ => {
                let (keys, values) = (Heads::<i16>::new(k, kl, dim)?, Heads::<i16>::new(v, vl, dim)?);
                self.forward(q, [tokens, heads, dim], keys, values)?
            }
        };
        Ok((CpuStorage::F32(y), Shape::from((tokens, heads * dim))))
    }
}

/// What all tasks of a call know.
struct Work<'a, T> {
    q: &'a [f32],
    keys: Heads<'a, T>,
    values: Heads<'a, T>,
    at: usize,
    heads: usize,
    /// Query heads that share a key and value head.
    group: usize,
    dim: usize,
    /// `dim`, padded to whole vectors.
    width: usize,
}

thread_local! {
    static SCRATCH: RefCell<Vec<f32>> = RefCell::default();
    static QUERY: RefCell<Vec<f32>> = RefCell::default();
    static PARTS: RefCell<Vec<f32>> = RefCell::default();
}

impl Attend<'_> {
    fn forward<T: Cached>(
        &self,
        q: &[f32],
        [tokens, heads, dim]: [usize; 3],
        keys: Heads<'_, T>,
        values: Heads<'_, T>,
    ) -> Result<Vec<f32>> {
        let shared = keys.count;
        if (values.count, values.room) != (shared, keys.room)
            || shared == 0
            || !heads.is_multiple_of(shared)
            || self.at + tokens > keys.room
        {
            bail!("attend: {tokens} tokens of {heads} heads at {} of {shared} heads of {}", self.at, keys.room)
        }
        let (group, width) = (heads / shared, dim.next_multiple_of(16));
        let work = Work { q, keys, values, at: self.at, heads, group, dim, width };
        let mut y = vec![0f32; tokens * heads * dim];
        let out = Out(y.as_mut_ptr());
        // A tile is some tokens with all query heads of one key head.
        let height = (QUERIES / group).max(1);
        let tiles = tokens.div_ceil(height);
        let tile = |task: usize| (task / tiles, task % tiles * height..(task % tiles * height + height).min(tokens));
        let blocks = (self.at + tokens).div_ceil(BLOCK);
        let (threads, isa) = (&self.compute.threads, simd::Isa::best());
        if blocks == 1 || shared * tiles >= 4 * threads.count() {
            threads.run(shared * tiles, &|task| {
                let (head, tokens) = tile(task);
                simd::vectorised(isa, || work.tile(head, tokens, out));
            });
            return Ok(y);
        }
        // Too few tiles to keep all threads busy: blocks of keys are tasks of their own.
        let size = height * group * (width + 2);
        let mut parts = PARTS.take();
        parts.resize((shared * tiles * blocks * size).max(parts.len()), 0.0);
        let part = Out(parts.as_mut_ptr());
        threads.run(shared * tiles * blocks, &|task| {
            let (part, out) = (part, task * size);
            let (head, tokens) = tile(task / blocks);
            // SAFETY: `size` values for each task, inside `parts`.
            let part = unsafe { std::slice::from_raw_parts_mut(part.0.add(out), size) };
            simd::vectorised(isa, || work.block(head, tokens, task % blocks, part));
        });
        threads.run(shared * tiles, &|task| {
            let (head, tokens) = tile(task);
            simd::vectorised(isa, || {
                let sums = &mut vec![0f32; size];
                let queries = tokens.len() * group;
                clear(sums, queries, width);
                for block in 0..work.blocks(&tokens) {
                    let at = (task * blocks + block) * size;
                    let part = &parts[at..at + size];
                    fold(sums, part, work.blind(&tokens, block)..queries, queries, width);
                }
                work.finish(head, tokens, sums, out);
            });
        });
        PARTS.set(parts);
        Ok(y)
    }
}

/// Results of some queries over some keys are kept as all maxima, all sums, then all weighted sums of values.
#[inline(always)]
fn clear(sums: &mut [f32], queries: usize, width: usize) {
    sums[..queries].fill(f32::NEG_INFINITY);
    sums[queries..queries * (width + 2)].fill(0.0);
}

/// Adds `part` to `sums` for the queries that saw anything of its block.
#[inline(always)]
fn fold(sums: &mut [f32], part: &[f32], seeing: Range<usize>, queries: usize, width: usize) {
    for query in seeing {
        let (old, new) = (sums[query], part[query]);
        let most = old.max(new);
        let (a, b) = (exp(old - most), exp(new - most));
        sums[query] = most;
        sums[queries + query] = sums[queries + query].mul_add(a, part[queries + query] * b);
        let row = 2 * queries + query * width..2 * queries + (query + 1) * width;
        for (sum, part) in sums[row.clone()].iter_mut().zip(&part[row]) {
            *sum = sum.mul_add(a, part * b);
        }
    }
}

impl<T: Cached> Work<'_, T> {
    /// Blocks that the last of `tokens` sees.
    fn blocks(&self, tokens: &Range<usize>) -> usize {
        (self.at + tokens.end).div_ceil(BLOCK)
    }

    /// How many queries of `tokens` come before the block and see nothing of it.
    fn blind(&self, tokens: &Range<usize>, block: usize) -> usize {
        (block * BLOCK).saturating_sub(self.at + tokens.start).min(tokens.len()) * self.group
    }

    /// The whole result of some tokens, block after block.
    #[inline(always)]
    fn tile(&self, head: usize, tokens: Range<usize>, out: Out) {
        let queries = tokens.len() * self.group;
        let size = queries * (self.width + 2);
        SCRATCH.with_borrow_mut(|scratch| {
            scratch.resize((2 * size).max(scratch.len()), 0.0);
            let (sums, part) = scratch.split_at_mut(size);
            clear(sums, queries, self.width);
            for block in 0..self.blocks(&tokens) {
                self.block(head, tokens.clone(), block, &mut part[..size]);
                fold(sums, part, self.blind(&tokens, block)..queries, queries, self.width);
            }
            self.finish(head, tokens, sums, out);
        });
    }

    /// Divides by the sums and writes the rows.
    #[inline(always)]
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
    #[inline(always)]
    fn block(&self, head: usize, tokens: Range<usize>, block: usize, part: &mut [f32]) {
        let queries = tokens.len() * self.group;
        for (index, token) in tokens.enumerate() {
            let start = block * BLOCK;
            let end = (start + BLOCK).min(self.at + token + 1);
            // All queries of a token see the same keys: they are computed together, as many as fit the registers.
            let mut n = 0;
            while start < end && n < self.group {
                let first = head * self.group + n;
                let at = (index * self.group + n, queries);
                n += match self.group - n {
                    8.. => self.some::<8>(head, token, first, start..end, part, at),
                    4.. => self.some::<4>(head, token, first, start..end, part, at),
                    2.. => self.some::<2>(head, token, first, start..end, part, at),
                    _ => self.some::<1>(head, token, first, start..end, part, at),
                };
            }
        }
    }

    /// `N` query heads of `token`, from head `first` on, over the keys `seen`; the results are number `at.0` of `at.1`.
    #[inline(always)]
    fn some<const N: usize>(
        &self,
        head: usize,
        token: usize,
        first: usize,
        seen: Range<usize>,
        part: &mut [f32],
        at: (usize, usize),
    ) -> usize {
        let (width, (index, queries)) = (self.width, at);
        let mut scores = [[0f32; BLOCK]; N];
        let scale = (self.dim as f32).powf(-0.5);
        QUERY.with_borrow_mut(|query| {
            query.clear();
            query.resize(N * width, 0.0);
            for n in 0..N {
                let q = &self.q[(token * self.heads + first + n) * self.dim..][..self.dim];
                for (padded, q) in query[n * width..].iter_mut().zip(q) {
                    *padded = q * scale;
                }
            }
            let rows: [&[f32]; N] = std::array::from_fn(|n| &query[n * width..(n + 1) * width]);
            for key in seen.clone() {
                let row = self.keys.row(head, key);
                let factor = T::scale(row);
                for (scores, dot) in scores.iter_mut().zip(dots(&rows, T::values(row))) {
                    scores[key - seen.start] = dot * factor;
                }
            }
        });
        for (n, scores) in scores.iter_mut().enumerate() {
            let scores = &mut scores[..seen.len()];
            let most = greatest(scores);
            for score in scores.iter_mut() {
                *score = exp(*score - most);
            }
            part[index + n] = most;
            part[queries + index + n] = lanes_sum(scores);
            for (score, key) in scores.iter_mut().zip(seen.clone()) {
                *score *= T::scale(self.values.row(head, key));
            }
        }
        let sums = &mut part[2 * queries + index * width..][..N * width];
        sums.fill(0.0);
        let mut key = seen.start;
        while key + 4 <= seen.end {
            let rows = [0, 1, 2, 3].map(|next| T::values(self.values.row(head, key + next)));
            let weights: [[f32; 4]; N] =
                std::array::from_fn(|n| std::array::from_fn(|next| scores[n][key - seen.start + next]));
            add::<T, N, 4>(sums, width, &weights, &rows);
            key += 4;
        }
        while key < seen.end {
            let weights: [[f32; 1]; N] = std::array::from_fn(|n| [scores[n][key - seen.start]]);
            add::<T, N, 1>(sums, width, &weights, &[T::values(self.values.row(head, key))]);
            key += 1;
        }
        N
    }
}

/// `q . k` for `N` queries. Lanes and tree as in [`simd::float`].
#[inline(always)]
fn dots<T: Cached, const N: usize>(q: &[&[f32]; N], k: &[T]) -> [f32; N] {
    let mut lanes = [[0f32; 16]; N];
    let (chunks, rest) = k.as_chunks::<16>();
    for (index, chunk) in chunks.iter().enumerate() {
        let k = chunk.map(T::widen);
        for (lanes, q) in lanes.iter_mut().zip(q) {
            for ((lane, q), k) in lanes.iter_mut().zip(&q[index * 16..index * 16 + 16]).zip(&k) {
                *lane = q.mul_add(*k, *lane);
            }
        }
    }
    for (lanes, q) in lanes.iter_mut().zip(q) {
        for ((lane, q), k) in lanes.iter_mut().zip(&q[chunks.len() * 16..]).zip(rest) {
            *lane = q.mul_add(k.widen(), *lane);
        }
    }
    lanes.map(|lanes| simd::float::fold(&lanes))
}

/// `sums[n] += weights[n][0] * rows[0] + weights[n][1] * rows[1] + ...`, one after the other.
#[inline(always)]
fn add<T: Cached, const N: usize, const K: usize>(
    sums: &mut [f32],
    width: usize,
    weights: &[[f32; K]; N],
    rows: &[&[T]; K],
) {
    let len = rows[0].len();
    for at in (0..len).step_by(16) {
        let here = (len - at).min(16);
        let mut values = [[0f32; 16]; K];
        for (values, row) in values.iter_mut().zip(rows) {
            if here == 16 {
                *values = std::array::from_fn(|i| row[at + i].widen());
            } else {
                for (value, row) in values.iter_mut().zip(&row[at..]) {
                    *value = row.widen();
                }
            }
        }
        for (sums, weights) in sums.chunks_exact_mut(width).zip(weights) {
            let sums = &mut sums[at..at + 16];
            for (weight, values) in weights.iter().zip(&values) {
                for (sum, value) in sums.iter_mut().zip(values) {
                    *sum = weight.mul_add(*value, *sum);
                }
            }
        }
    }
}

/// The largest value.
#[inline(always)]
fn greatest(x: &[f32]) -> f32 {
    let mut lanes = [f32::NEG_INFINITY; 16];
    let (chunks, rest) = x.as_chunks::<16>();
    for x in chunks.iter().map(|chunk| chunk.as_slice()).chain([rest]) {
        for (lane, x) in lanes.iter_mut().zip(x) {
            *lane = if *x > *lane { *x } else { *lane };
        }
    }
    lanes.into_iter().fold(f32::NEG_INFINITY, f32::max)
}
