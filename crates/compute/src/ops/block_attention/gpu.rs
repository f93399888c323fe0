//! Attention to selected blocks on a GPU (`kernels/block_attention.metal`).
//!
//! The buffer of partial results holds the queries, scores and selections of a launch.

use super::{BlockAttention, BlockAttentionRows, IndexerShape};
use crate::{
    device::{Binding, DeviceError, Launch, Region, SkipUse},
    ops::{Attention, AttentionShape, SequenceRows},
};

/// Maximum number of splits of the positions that a row attends to. The heads of one row would not fill a large GPU.
const SPLITS: usize = 8;
/// A launch on matrix units has this many times as many rows, because a row has only one threadgroup for each key head
/// there.
const HALF_ROWS: usize = 16;

impl IndexerShape {
    /// The kernels with the largest threadgroups, besides `index_select`.
    const WIDE_KERNELS: [&'static str; 5] =
        ["block_attention", "block_attention_i16", "block_attention_q8", "block_attention_q4", "block_attention_merge"];
    /// The same kernels on matrix units.
    const WIDE_HALF_KERNELS: [&'static str; 2] = ["block_attention_prefill", "block_attention_prefill_i16"];
    /// Number of threads of these threadgroups.
    const THREADS: u32 = 256;
    /// Number of threads of `index_select`.
    const SELECT_THREADS: u32 = 512;
    /// Maximum number of query heads in a threadgroup.
    const SHARING: usize = 2;
    /// The same on matrix units.
    const QUERIES: usize = 16;

    /// The kernels with the largest threadgroups, and their numbers of threads.
    pub fn wide_kernels(has_matrix_units: bool) -> Vec<(&'static str, u32)> {
        let on_tiles = Self::WIDE_HALF_KERNELS.into_iter().filter(|_| has_matrix_units);
        let attention = Self::WIDE_KERNELS.into_iter().chain(on_tiles).map(|kernel| (kernel, Self::THREADS));
        attention.chain([("index_select", Self::SELECT_THREADS)]).collect()
    }

    /// Number of floats of the queries, selection and scores of a row with `closed` closed blocks.
    fn row_scratch(&self, closed: usize) -> usize {
        self.heads * self.dim + self.blocks + closed.max(1)
    }

    /// Maximum number of floats that a GPU needs for a row of at most `context` positions.
    pub fn gpu_scratch(&self, attention: &AttentionShape, context: usize) -> usize {
        self.row_scratch(context / self.ratio) + attention.split_floats()
    }
}

impl AttentionShape {
    /// Number of floats of the splits of a row.
    fn split_floats(&self) -> usize {
        self.heads * SPLITS * (self.dim + 2)
    }
}

impl BlockAttention<'_> {
    /// Splits the operation into parts of about the same size. Each has at most as many rows as fit into the buffer of
    /// partial results, and at most `max`. On matrix units (`is_half`), attention has no splits in this buffer.
    pub(in crate::ops) fn parts(
        &self,
        max: usize,
        is_half: bool,
        rows: Option<SequenceRows>,
    ) -> impl Iterator<Item = (Self, Option<SequenceRows>)> {
        let tokens = self.attention.tokens;
        let splits = if is_half { 0 } else { self.attention.shape.split_floats() };
        let row = self.indexer.row_scratch(self.closed(self.last(rows)).0) + splits;
        let most = (self.attention.partials.len / (row * 4)).clamp(1, max);
        let at_once = tokens.div_ceil(tokens.div_ceil(most).max(1)).max(1);
        (0..tokens).step_by(at_once).map(move |first| {
            let count = at_once.min(tokens - first);
            (self.part(first, count), rows.map(|rows| rows.part(first, count)))
        })
    }

    /// The last position of any row. With `rows`, each row belongs to a different sequence.
    fn last(&self, rows: Option<SequenceRows>) -> usize {
        rows.map_or((self.attention.start + self.attention.tokens).saturating_sub(1), |rows| rows.starts[1])
    }

    /// The launches of all rows. A part closes its blocks before the next part reads their keys. With `is_half`, the
    /// attention of a cache with f32 or 16-bit rows runs on matrix units.
    pub(in crate::ops) fn launches(
        &self,
        max: usize,
        is_half: bool,
    ) -> Result<impl Iterator<Item = Launch>, DeviceError> {
        self.check_ring(self.attention.tokens)?;
        let is_half = is_half && self.attention.shape.recent.is_none();
        let max = if is_half { max * HALF_ROWS } else { max };
        let of_part = move |part: Self| {
            if is_half {
                let selection = part.selection_launches(true, None);
                return selection.into_iter().chain([part.half_launch()]).collect();
            }
            Vec::from(part.part_launches(None))
        };
        Ok(self.parts(max, is_half, None).flat_map(move |(part, _)| of_part(part)))
    }

    /// The attention of a part of a prompt's rows on matrix units, with the gate.
    pub(in crate::ops) fn half_launch(&self) -> Launch {
        let attention = &self.attention;
        let shape = attention.shape;
        let tokens = attention.tokens;
        let values = tokens * shape.heads * shape.dim;
        let parts = (shape.heads / shape.kv_heads).div_ceil(IndexerShape::QUERIES);
        let [full, integers] = IndexerShape::WIDE_HALF_KERNELS;
        let bindings = vec![
            Binding::read(attention.q.floats(values)),
            Binding::read(attention.cache.keys),
            Binding::read(attention.cache.values),
            Binding::indices(attention.cache.table),
            Binding::read(self.scratch(true, None)[1]),
            Binding::read(attention.proj.floats(tokens * shape.width())),
            Binding::write(attention.y.floats(values)),
        ];
        let kernel = shape.kernel([full, integers, full, full]);
        self.launch(kernel, bindings, [shape.kv_heads * parts, tokens, 1], IndexerShape::THREADS, None)
    }

    /// Number of scores of a row: one for each closed block of the row with the most.
    fn stride(&self, rows: Option<SequenceRows>) -> usize {
        self.closed(self.last(rows)).0.max(1)
    }

    /// Queries `[tokens, heads * dim]`, selections `[tokens, blocks]`, the parts of splits, which matrix units (`is_half`)
    /// do not need, and scores `[tokens, stride]`. Scores are last, because their number grows with the position, and only
    /// launches with the same addresses are replayed as a graph.
    pub(in crate::ops) fn scratch(&self, is_half: bool, rows: Option<SequenceRows>) -> [Region; 4] {
        let shape = self.indexer;
        let Attention { shape: attention, tokens, partials, .. } = self.attention;
        let splits = if is_half { 0 } else { attention.split_floats() };
        let mut first = 0;
        [shape.heads * shape.dim, shape.blocks, splits, self.stride(rows)].map(|row| {
            let region = partials.rows(first, tokens * row, 1);
            first += tokens * row;
            region
        })
    }

    fn args(&self, rows: Option<SequenceRows>) -> Vec<u32> {
        let indexer = self.indexer;
        let shape = self.attention.shape;
        let start = self.attention.start;
        let last = self.last(rows);
        assert!(shape.dim <= 256 && indexer.dim <= 256, "heads of {} and {}", shape.dim, indexer.dim);
        assert!(last < shape.context, "position {last} of {}", shape.context);
        let words = [start, indexer.heads, indexer.dim, indexer.rope_dim, indexer.ratio, indexer.blocks];
        let scale = |dim: usize| (1.0 / (dim as f32).sqrt()).to_bits();
        let mut args = words.map(|word| word as u32).to_vec();
        args.extend([self.cache.capacity as u32, self.stride(rows) as u32, indexer.eps.to_bits(), scale(indexer.dim)]);
        args.extend([shape.width(), shape.heads, shape.kv_heads, shape.dim].map(|word| word as u32));
        args.push(scale(shape.dim));
        args.push(rows.map_or(0, |_| shape.pages() as u32));
        args.push(shape.recent.map_or(0, |recent| recent.capacity as u32));
        args.push(SPLITS as u32);
        args
    }

    /// The launches of a part: queries and keys, scores, selection, attention, merge. If `of_rows` is given, each row
    /// belongs to another sequence.
    pub(in crate::ops) fn part_launches(&self, of_rows: Option<SequenceRows>) -> [Launch; 5] {
        let [rows, scores, select] = self.selection_launches(false, of_rows);
        let [attend, merge] = self.split_launches(of_rows);
        [rows, scores, select, attend, merge]
    }

    fn launch(
        &self,
        kernel: &'static str,
        bindings: Vec<Binding>,
        grid: [usize; 3],
        threads: u32,
        of_rows: Option<SequenceRows>,
    ) -> Launch {
        let args = self.args(of_rows);
        Launch { kernel, args, bindings, grid: grid.map(|count| count as u32), threads, skip: SkipUse::None }
    }

    /// The buffer with the sequence of each row. Without `of_rows`, it is not read.
    fn sequences(&self, of_rows: Option<SequenceRows>) -> Binding {
        SequenceRows::binding(of_rows, self.attention.cache.table)
    }

    /// Queries and keys, scores and selection of a part. `is_half` as in [`BlockAttention::scratch`].
    fn selection_launches(&self, is_half: bool, of_rows: Option<SequenceRows>) -> [Launch; 3] {
        let indexer = self.indexer;
        let Attention { tokens, cache, .. } = self.attention;
        let [queries, selected, _, scores] = self.scratch(is_half, of_rows);
        let sequences = self.sequences(of_rows);
        let keys = vec![
            Binding::read(self.index.floats(tokens * indexer.width())),
            Binding::read(self.norm_rope.q_norm.floats(indexer.dim)),
            Binding::read(self.norm_rope.k_norm.floats(indexer.dim)),
            Binding::read(self.norm_rope.rope_table.floats(tokens * indexer.rope_dim)),
            Binding::indices(cache.table),
            Binding::write(queries),
            Binding::read_write(self.cache.keys),
            Binding::read_write(self.cache.recent),
            sequences,
        ];
        let score = vec![
            Binding::read(queries),
            Binding::read(self.cache.keys),
            Binding::indices(cache.table),
            Binding::write(scores),
            sequences,
        ];
        let select = vec![Binding::read(scores), Binding::write(selected), sequences];
        let groups = self.stride(of_rows).div_ceil(128);
        [
            self.launch("index_rows", keys, [indexer.heads + 1, tokens, 1], 32, of_rows),
            self.launch("index_scores", score, [groups, tokens, 1], 128, of_rows),
            self.launch("index_select", select, [tokens, 1, 1], IndexerShape::SELECT_THREADS, of_rows),
        ]
    }

    /// Attention in splits, and their merge.
    fn split_launches(&self, of_rows: Option<SequenceRows>) -> [Launch; 2] {
        let Attention { shape, tokens, q, cache, proj, y, .. } = self.attention;
        let [_, selected, splits, _] = self.scratch(false, of_rows);
        let sequences = self.sequences(of_rows);
        let values = tokens * shape.heads * shape.dim;
        let mut attend = vec![
            Binding::read(q.floats(values)),
            Binding::read(cache.keys),
            Binding::read(cache.values),
            Binding::indices(cache.table),
            Binding::read(selected),
            Binding::write(splits),
            sequences,
        ];
        let merge = vec![
            Binding::read(splits),
            Binding::read(proj.floats(tokens * shape.width())),
            Binding::write(y.floats(values)),
            sequences,
        ];
        if shape.recent.is_some() {
            attend.extend(shape.rings(cache.recent, of_rows).map(Binding::read));
        }
        let kernel =
            shape.kernel(["block_attention", "block_attention_i16", "block_attention_q8", "block_attention_q4"]);
        let threads = IndexerShape::THREADS;
        let parts = (shape.heads / shape.kv_heads).div_ceil(IndexerShape::SHARING);
        [
            self.launch(kernel, attend, [shape.kv_heads * parts, tokens, SPLITS], threads, of_rows),
            self.launch("block_attention_merge", merge, [shape.heads, tokens, 1], threads, of_rows),
        ]
    }
}

impl BlockAttentionRows<'_> {
    /// First the write of keys and values, then the launches of all rows. The number of launches is the same as for rows
    /// of one sequence.
    pub(in crate::ops) fn launches(&self, max: usize) -> Result<impl Iterator<Item = Launch>, DeviceError> {
        self.attend.check_ring(1)?;
        let parts = self.attend.parts(max, false, Some(self.rows));
        let attention = parts.flat_map(|(part, rows)| part.part_launches(rows));
        Ok(std::iter::once(self.write.launch_rows(Some(self.rows))).chain(attention))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::{KvCache, KvFormat, QkNormRope, block_attention::IndexCache};

    const SHAPE: AttentionShape = AttentionShape {
        heads: 24,
        kv_heads: 2,
        dim: 256,
        rope_dim: 64,
        eps: 1e-6,
        context: 40_000,
        format: KvFormat::I16,
        recent: None,
    };
    const INDEXER: IndexerShape = IndexerShape { heads: 4, dim: 128, rope_dim: 64, ratio: 4, blocks: 512, eps: 1e-6 };

    /// Attention with a buffer of `len` bytes for partial results.
    fn attention(start: usize, tokens: usize, len: usize) -> BlockAttention<'static> {
        let region = |len| Region { buffer: 0, offset: 0, len };
        let all = region(1 << 40);
        let norm_rope = QkNormRope { q_norm: all, k_norm: all, rope_table: all };
        let cache = KvCache { keys: all, values: all, table: all, recent: Default::default() };
        let partials = region(len);
        let attention = Attention { shape: &SHAPE, start, tokens, q: all, cache, proj: all, partials, y: all };
        let cache = IndexCache { keys: all, recent: all, capacity: 4096 };
        BlockAttention { attention, indexer: &INDEXER, index: all, norm_rope, cache }
    }

    #[test]
    fn launches_fit_into_the_partial_results() {
        for len in [INDEXER.gpu_scratch(&SHAPE, SHAPE.context) * 4, 64 << 20] {
            for (start, tokens) in [(0, 2048), (32_768, 2048), (39_990, 10), (39_999, 1)] {
                let op = attention(start, tokens, len);
                for is_half in [false, true] {
                    // A region beyond the end of the buffer panics.
                    let rows = op.launches(128, is_half).unwrap().filter(|launch| launch.kernel == "index_rows");
                    assert_eq!(rows.map(|launch| launch.grid[1] as usize).sum::<usize>(), tokens);
                }
            }
        }
    }

    /// A GPU replays a graph only for launches with the same addresses.
    #[test]
    fn addresses_do_not_depend_on_the_position() {
        for tokens in [1, 4] {
            let addresses = |start| -> Vec<_> {
                let op = attention(start, tokens, 64 << 20);
                let launches = op.launches(128, false).unwrap();
                let of = |launch: Launch| launch.bindings.into_iter().map(|binding| binding.region.offset);
                launches.flat_map(of).collect()
            };
            let first = addresses(0);
            for start in [1, 2, 3, 4, 5, 511, 2047, 2048, 32_768, 39_000] {
                assert_eq!(addresses(start), first, "{tokens} rows at {start}");
            }
        }
    }
}
