//! Causal attention on the CPU, as in flash attention.
//!
//! The keys are split into blocks at fixed positions. The softmax of a query is computed within a block. Block results
//! are merged in order, and each result is rescaled to the common maximum. The bytes therefore do not depend on which
//! threads compute the blocks or how many queries are computed together. Each key and value is converted to f32 once
//! for all queries that share it.

use super::{
    Attention, AttentionRows, BLOCK, KvCache, KvFormat, KvWrite, PAGE, QkNormRope,
    float_kernels::{merge_blocks, pv, qk, softmax},
    kv_cache::{KvElement, KvView},
    kv_quant::{self, QuantizedKv, recent_start},
    kv_quant_cpu,
    kv_quant_operands::{QuantizedQueries, ValueScales},
};
use crate::{
    device::{DeviceError, Region},
    ops::{
        cpu::{Cpu, refuse},
        simd::{OutPtr, math::sigmoid, wide},
    },
};
use moestro_base::platform::Threads;
use std::{
    cell::RefCell,
    marker::PhantomData,
    ops::Range,
    sync::atomic::{AtomicU64, Ordering},
};

/// Number of floats in one cache line.
const LINE_FLOATS: usize = 16;
/// Maximum number of queries that one task computes together.
const MAX_TILE_QUERIES: usize = 64;
/// Maximum number of block results that are buffered before they are merged.
const MAX_WAVE_BLOCKS: usize = 64;

impl AttentionRows<'_> {
    /// Computes one row after the other.
    pub(in crate::ops) fn on_cpu(&self, cpu: &mut Cpu) -> Result<(), DeviceError> {
        for row in 0..self.write.tokens {
            let (write, attention) = self.row(row, cpu.memory.sequence(&self.rows, row));
            write.on_cpu(cpu)?;
            attention.on_cpu(cpu)?;
        }
        Ok(())
    }

    /// The operations of one row, whose sequence has this number, and which has this index in its sequence.
    pub(in crate::ops) fn row(&self, row: usize, [number, start]: [usize; 2]) -> (KvWrite<'_>, Attention<'_>) {
        let Self { write, attention, .. } = *self;
        let shape = write.shape;
        let values = shape.heads * shape.dim;
        let ring = shape.recent_bytes();
        let table = write.cache.table.rows(number, 1, shape.pages());
        let recent = write.cache.recent.map(|recent| recent.part(number * ring, ring));
        let cache = KvCache { table, recent, ..write.cache };
        let of = |region: Region, width: usize| region.rows(row, 1, width);
        let proj = of(write.proj, shape.width());
        let q = of(write.q, values);
        let y = of(attention.y, values);
        let rope_table = of(write.norm_rope.rope_table, shape.rope_dim);
        let norm_rope = QkNormRope { rope_table, ..write.norm_rope };
        let write = KvWrite { start, tokens: 1, proj, norm_rope, q, cache, ..write };
        (write, Attention { start, tokens: 1, proj, q, cache, y, ..attention })
    }
}

impl Attention<'_> {
    pub(in crate::ops) fn on_cpu(&self, cpu: &mut Cpu) -> Result<(), DeviceError> {
        let shape = self.shape;
        let tokens = self.tokens;
        let memory = &cpu.memory;
        let heads = shape.heads;
        let shared = shape.kv_heads;
        let dim = shape.dim;
        if shared == 0 || !heads.is_multiple_of(shared) || self.start + tokens > shape.context {
            return refuse(format!("cannot attend with {tokens} tokens at position {}: {shape:?}", self.start));
        }
        let q = memory.floats(self.q.floats(tokens * heads * dim));
        let proj = memory.floats(self.proj.floats(tokens * shape.width()));
        let y = memory.floats_mut(self.y.floats(tokens * heads * dim));
        shape.check(tokens)?;
        let caches = [self.cache.keys, self.cache.values].map(|cache| memory.bytes(cache));
        let recent = self.cache.recent.map(|cache| memory.bytes(cache));
        let table = memory.words(self.cache.table);
        if table.len() * PAGE < self.start + tokens {
            return refuse(format!("{} pages are too few for {tokens} tokens at position {}", table.len(), self.start));
        }
        let bits = kv_quant::bits(shape.format);
        let threads = &cpu.compute.threads;
        // The cache of at least 16 bits: all positions, or the ring of recent positions if the cache is quantized.
        let (format, full) = match shape.recent {
            Some(ring) if bits.is_some() => {
                (ring.format, FullKv { bytes: recent, table: None, capacity: ring.capacity })
            }
            _ => (shape.format, FullKv { bytes: caches, table: Some(table), capacity: PAGE }),
        };
        let quantized = bits.map(|bits| caches.map(|cache| QuantizedKv::new(bits, cache, table, shared, dim)));
        match format {
            KvFormat::F32 => AttentionCall::<f32>::new(self, [q, proj], full, quantized).run(threads, tokens, y),
            KvFormat::I16 => AttentionCall::<i16>::new(self, [q, proj], full, quantized).run(threads, tokens, y),
            other => return refuse(format!("the CPU does not support the cache format {other:?}")),
        }
        Ok(())
    }
}

wide! {
    fn apply_gate(y: &mut [f32], gate: &[f32]) {
        for (y, gate) in y.iter_mut().zip(gate) {
            *y *= sigmoid(*gate);
        }
    }
}

/// The positions that each token attends to, if these are not all positions.
pub(in crate::ops) trait KvSelection<T>: Sync {
    /// Number of positions that a token attends to.
    fn count(&self, token: usize) -> usize;

    /// Copies keys and values of one key head to two blocks of [`BLOCK`] rows. `seen` are indices in the token's list
    /// of positions.
    fn copy(&self, token: usize, head: usize, seen: Range<usize>, to: [&mut [T]; 2]);
}

impl Attention<'_> {
    /// Attends to the selected positions only. `is_transformed` is true if keys and values are multiplied by the
    /// Hadamard matrix.
    pub(in crate::ops) fn on_selected<T: KvElement>(
        &self,
        cpu: &Cpu,
        selection: &dyn KvSelection<T>,
        is_transformed: bool,
    ) {
        let tokens = self.tokens;
        let values = tokens * self.shape.heads * self.shape.dim;
        let memory = &cpu.memory;
        let inputs = [self.q.floats(values), self.proj.floats(tokens * self.shape.width())];
        let none = FullKv { bytes: [&[]; 2], table: None, capacity: BLOCK };
        let call = AttentionCall::<T>::new(self, inputs.map(|region| memory.floats(region)), none, None);
        let call = AttentionCall { selection: Some(selection), is_transformed, ..call };
        call.run(&cpu.compute.threads, tokens, memory.floats_mut(self.y.floats(values)));
    }
}

/// Number of calls so far. Lets a thread detect that its cached queries belong to another call.
static CALLS: AtomicU64 = AtomicU64::new(0);

/// Keys and values of at least 16 bits: pages that `table` lists, or a ring with a capacity of `capacity` positions.
#[derive(Clone, Copy)]
struct FullKv<'a> {
    bytes: [&'a [u8]; 2],
    table: Option<&'a [u32]>,
    capacity: usize,
}

/// The arguments of one call, shared by its tasks.
struct AttentionCall<'a, T> {
    /// Number of this call, above 0.
    call: u64,
    q: &'a [f32],
    /// `[tokens, row]`: for each head a query and the gate of its output.
    proj: &'a [f32],
    row: usize,
    full: FullKv<'a>,
    values: PhantomData<T>,
    /// Number of key and value heads.
    shared: usize,
    /// Number of parts into which the query heads of one key head are split. In the methods, `head` is the index of a
    /// part.
    split: usize,
    /// Keys and values of all positions in 8 or 4 bits. `full` is then the ring of recent positions.
    quantized: Option<[QuantizedKv<'a>; 2]>,
    /// The positions to attend to, if not all. `full` is then empty.
    selection: Option<&'a dyn KvSelection<T>>,
    /// True if keys and values are multiplied by the Hadamard matrix.
    is_transformed: bool,
    /// Position of the first token.
    start: usize,
    heads: usize,
    /// Number of query heads in a part.
    group: usize,
    dim: usize,
    /// `dim`, padded to whole vectors.
    width: usize,
}

/// Buffers of one thread, reused by all calls.
#[derive(Default)]
struct AttentionScratch {
    sums: Vec<f32>,
    part: Vec<f32>,
    query: TileQueries,
}

/// The queries of a tile times `1 / sqrt(D)`, prepared once for all blocks.
struct TileQueries {
    /// Padded to whole vectors. Starts at `begin`, a cache line boundary, because each query is loaded again for every
    /// few keys.
    padded: Vec<f32>,
    begin: usize,
    quantized_queries: QuantizedQueries,
    /// Call, key head and first token of these queries.
    loaded_for: (u64, usize, usize),
    value_scales: ValueScales,
    /// Copies of selected keys and values, a block each.
    selected: [Vec<u32>; 2],
}

impl Default for TileQueries {
    fn default() -> Self {
        Self {
            padded: Vec::new(),
            begin: 0,
            quantized_queries: QuantizedQueries::default(),
            loaded_for: (0, 0, 0),
            value_scales: ValueScales::new(),
            selected: Default::default(),
        }
    }
}

thread_local! {
    static SCRATCH: RefCell<AttentionScratch> = RefCell::default();
    static PARTIALS: RefCell<Vec<f32>> = RefCell::default();
}

impl<'a, T: KvElement> AttentionCall<'a, T> {
    fn new(
        op: &Attention<'_>,
        [q, proj]: [&'a [f32]; 2],
        full: FullKv<'a>,
        quantized: Option<[QuantizedKv<'a>; 2]>,
    ) -> Self {
        let shape = op.shape;
        let dim = op.shape.dim;
        Self {
            call: CALLS.fetch_add(1, Ordering::Relaxed) + 1,
            q,
            proj,
            row: shape.width(),
            full,
            values: PhantomData,
            shared: shape.kv_heads,
            split: 1,
            quantized,
            selection: None,
            is_transformed: quantized.is_some(),
            start: op.start,
            heads: shape.heads,
            group: shape.heads / shape.kv_heads,
            dim,
            width: dim.next_multiple_of(16),
        }
    }

    /// Computes the output of all tokens.
    fn run(mut self, threads: &Threads, tokens: usize, y: &mut [f32]) {
        let blocks = self.blocks(&(0..tokens));
        // With fewer tasks than threads, split the query heads. Each part then converts keys and values itself.
        let tasks = self.shared * blocks * tokens.div_ceil(self.tile_height());
        while self.group.is_multiple_of(2) && 2 * self.split * tasks <= threads.count() {
            (self.group, self.split) = (self.group / 2, 2 * self.split);
        }
        let work = &self;
        let group = self.group;
        let width = self.width;
        let shared = self.shared * self.split;
        let out = OutPtr(y.as_mut_ptr());
        // A tile is several tokens with all query heads of one key head.
        let height = self.tile_height();
        let tiles = tokens.div_ceil(height);
        let tile = |task: usize| (task / tiles, task % tiles * height..(task % tiles * height + height).min(tokens));
        if blocks == 1 || threads.count() == 1 || shared * tiles >= 4 * threads.count() {
            threads.run(shared * tiles, &|task| {
                let (head, tokens) = tile(task);
                SCRATCH.with_borrow_mut(|scratch| work.tile(head, tokens, out, scratch));
            });
            return;
        }
        // There are too few tiles to keep all threads busy, so blocks of keys become tasks. The buffer for their
        // results does not grow with the context.
        let size = height.min(tokens) * group * (width + 2);
        let mut parts = PARTIALS.take();
        // Enough blocks for all threads, but few enough that their results are still cached when they are merged.
        let max = (16 * threads.count()).div_ceil(shared * tiles).clamp(16, MAX_WAVE_BLOCKS);
        let sums = shared * tiles * size;
        let wave = blocks.min(max);
        parts.resize((sums * (1 + wave)).max(parts.len()), 0.0);
        let (sums, parts_of) = parts.split_at_mut(sums);
        for (task, sums) in sums.chunks_exact_mut(size).enumerate() {
            clear(sums, tile(task).1.len() * group);
        }
        let sums = OutPtr(sums.as_mut_ptr());
        let part = OutPtr(parts_of.as_mut_ptr());
        // SAFETY: the `size` values of an index lie inside the buffer. Each index belongs to one task at a time.
        let slice =
            |base: OutPtr, index: usize| unsafe { std::slice::from_raw_parts_mut(base.0.add(index * size), size) };
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

/// Resets the results of `queries`: all maxima, then all sums, then all weighted sums of values.
fn clear(sums: &mut [f32], queries: usize) {
    let (max, rest) = sums.split_at_mut(queries);
    max.fill(f32::NEG_INFINITY);
    rest.fill(0.0);
}

impl<T: KvElement> AttentionCall<'_, T> {
    /// Number of tokens in a tile. Tokens with different positions share no keys.
    fn tile_height(&self) -> usize {
        if self.selection.is_some() { 1 } else { (MAX_TILE_QUERIES / self.group).max(1) }
    }

    /// Number of blocks that the last of `tokens` sees. With a quantized cache, block 0 is the ring, and the blocks of
    /// the pages are numbered from 1.
    fn blocks(&self, tokens: &Range<usize>) -> usize {
        if let Some(selection) = self.selection {
            let most = tokens.clone().map(|token| selection.count(token)).max();
            return most.unwrap_or_default().div_ceil(BLOCK);
        }
        match self.quantized {
            None => (self.start + tokens.end).div_ceil(BLOCK),
            Some(_) => 1 + recent_start((self.start + tokens.end).saturating_sub(1)).div_ceil(BLOCK),
        }
    }

    /// The positions of a block that `token` sees. With a selection, their indices in the token's list.
    fn seen(&self, token: usize, block: usize) -> Range<usize> {
        let position = self.start + token;
        let positions_of = |block: usize, end: usize| block * BLOCK..((block + 1) * BLOCK).min(end);
        if let Some(selection) = self.selection {
            return positions_of(block, selection.count(token));
        }
        match (self.quantized, block) {
            (None, _) => positions_of(block, position + 1),
            (Some(_), 0) => recent_start(position)..position + 1,
            (Some(_), _) => positions_of(block - 1, recent_start(position)),
        }
    }

    /// The number of queries of `tokens` that come before the block and see none of its keys.
    fn queries_without_keys(&self, tokens: &Range<usize>, block: usize) -> usize {
        let blind = tokens.clone().take_while(|token| self.seen(*token, block).is_empty()).count();
        blind * self.group
    }

    /// Computes the output of `tokens` over all blocks of keys, in order.
    fn tile(&self, head: usize, tokens: Range<usize>, out: OutPtr, scratch: &mut AttentionScratch) {
        let queries = tokens.len() * self.group;
        let AttentionScratch { sums, part, query } = scratch;
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

    /// Merges a block's `part` into `sums` for the queries that saw any of its keys.
    fn fold(&self, tokens: &Range<usize>, block: usize, sums: &mut [f32], part: &[f32]) {
        merge_blocks(sums, part, tokens.len() * self.group, self.queries_without_keys(tokens, block), self.width);
    }

    /// Divides the weighted sums of values by the sums of weights, applies the gates and writes the output rows.
    fn finish(&self, head: usize, tokens: Range<usize>, sums: &[f32], out: OutPtr) {
        let queries = tokens.len() * self.group;
        for query in 0..queries {
            let token = tokens.start + query / self.group;
            let n = head * self.group + query % self.group;
            // SAFETY: inside the output. Each row belongs to one tile.
            let y = unsafe { std::slice::from_raw_parts_mut(out.0.add((token * self.heads + n) * self.dim), self.dim) };
            let row = &sums[2 * queries + query * self.width..][..self.dim];
            for (y, sum) in y.iter_mut().zip(row) {
                *y = sum / sums[queries + query];
            }
            if self.is_transformed {
                kv_quant::hadamard(y);
            }
            apply_gate(y, &self.proj[token * self.row + (2 * n + 1) * self.dim..]);
        }
    }

    /// Loads the queries of a tile into `query`, unless it holds them already.
    fn load_queries(&self, head: usize, tokens: &Range<usize>, query: &mut TileQueries) {
        let tile = (self.call, head, tokens.start);
        if std::mem::replace(&mut query.loaded_for, tile) == tile {
            return;
        }
        let dim = self.dim;
        let width = self.width;
        let group = self.group;
        let scale = (dim as f32).powf(-0.5);
        let size = tokens.len() * group * width;
        query.padded.clear();
        query.padded.resize(size + LINE_FLOATS, 0.0);
        query.begin = query.padded.as_ptr().align_offset(64).min(LINE_FLOATS);
        let all = &mut query.padded[query.begin..][..size];
        for (index, padded) in all.chunks_exact_mut(width).enumerate() {
            let row = (tokens.start + index / group) * self.heads + head * group + index % group;
            for (padded, q) in padded.iter_mut().zip(&self.q[row * dim..][..dim]) {
                *padded = q * scale;
            }
        }
        if self.quantized.is_some() {
            query.quantized_queries.set(all.chunks_exact(width), dim);
        }
    }

    /// Computes attention of the queries of `tokens` over one block of keys. Writes maxima, sums of weights and
    /// weighted sums of values to `part`.
    fn block(&self, head: usize, tokens: Range<usize>, block: usize, part: &mut [f32], query: &mut TileQueries) {
        self.load_queries(head, &tokens, query);
        let queries = tokens.len() * self.group;
        let quantized = self.quantized.filter(|_| block > 0);
        for (index, token) in tokens.enumerate() {
            let seen = self.seen(token, block);
            if seen.is_empty() {
                continue;
            }
            if let Some(selection) = self.selection {
                let rows = query.selected.each_mut().map(|rows| {
                    rows.resize((BLOCK * (self.dim + T::SCALE_ELEMENTS) * size_of::<T>()).div_ceil(4), 0);
                    bytemuck::cast_slice_mut(rows)
                });
                selection.copy(token, head / self.split, seen.clone(), rows);
            }
            // All queries of a token see the same keys. As many queries are computed together as fit into registers.
            let mut n = 0;
            while n < self.group {
                let at = (index * self.group + n, queries);
                n += match self.group - n {
                    8.. => self.block_queries::<8>(head, seen.clone(), quantized, part, at, query),
                    4.. => self.block_queries::<4>(head, seen.clone(), quantized, part, at, query),
                    2.. => self.block_queries::<2>(head, seen.clone(), quantized, part, at, query),
                    _ => self.block_queries::<1>(head, seen.clone(), quantized, part, at, query),
                };
            }
        }
    }

    /// Computes `N` queries over the keys `seen`. `at` is the index of the first query and the total number of queries.
    fn block_queries<const N: usize>(
        &self,
        head: usize,
        seen: Range<usize>,
        quantized: Option<[QuantizedKv<'_>; 2]>,
        part: &mut [f32],
        at: (usize, usize),
        query: &mut TileQueries,
    ) -> usize {
        let width = self.width;
        let (index, queries) = at;
        let mut scores = [[0f32; BLOCK]; N];
        let selected = query.selected.each_ref().map(|rows| bytemuck::cast_slice(rows));
        let (head, seen, full) = match self.selection {
            None => (head / self.split, seen, self.full),
            Some(_) => (0, 0..seen.len(), FullKv { bytes: selected, table: None, capacity: BLOCK }),
        };
        let sizes = [if self.selection.is_some() { 1 } else { self.shared }, full.capacity, self.dim];
        let [keys, values] = full.bytes.map(|bytes| KvView::<T>::at(bytes, full.table, sizes, seen.start));
        match &quantized {
            None => {
                let rows: [&[f32]; N] =
                    std::array::from_fn(|n| &query.padded[query.begin + (index + n) * width..][..width]);
                qk(&rows, &keys, head, seen.clone(), &mut scores);
            }
            Some([keys, values]) => {
                kv_quant_cpu::qk(&query.quantized_queries, index, [keys, values], head, seen.clone(), &mut scores);
            }
        }
        for (n, [max, sum]) in softmax(&mut scores, seen.len()).into_iter().enumerate() {
            part[index + n] = max;
            part[queries + index + n] = sum;
        }
        let sums = &mut part[2 * queries + index * width..][..N * width];
        match &quantized {
            None => {
                sums.fill(0.0);
                pv(sums, width, &mut scores, &values, head, seen);
            }
            Some([keys, values]) => {
                kv_quant_cpu::pv(sums, width, &scores, [keys, values], head, seen, &mut query.value_scales);
            }
        }
        N
    }
}
