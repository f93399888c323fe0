//! Attention to selected blocks on a GPU (`kernels/block_attention.metal`).
//!
//! The buffer of partial results holds the queries, scores and selections of a launch.

use super::{BlockAttention, BlockAttentionRows, IndexerShape};
use crate::{
    device::{Binding, DeviceError, Launch, Region, SkipUse},
    ops::SequenceRows,
};

impl IndexerShape {
    /// The kernels with the largest threadgroups.
    pub const WIDE_KERNELS: [&'static str; 5] =
        ["index_select", "block_attention", "block_attention_i16", "block_attention_q8", "block_attention_q4"];
    /// Number of threads of these threadgroups.
    pub const THREADS: u32 = 256;

    /// Number of floats of the queries, selection and scores of a row with `closed` closed blocks.
    fn row_scratch(&self, closed: usize) -> usize {
        self.heads * self.dim + self.blocks + closed.max(1)
    }

    /// Maximum number of floats that a GPU needs for a row of at most `context` positions.
    pub fn gpu_scratch(&self, context: usize) -> usize {
        self.row_scratch(context / self.ratio)
    }
}

impl BlockAttention<'_> {
    /// Splits the operation into parts: each has as many rows as fit into the buffer of partial results, at most `max`.
    pub(in crate::ops) fn parts(
        &self,
        max: usize,
        rows: Option<SequenceRows>,
    ) -> impl Iterator<Item = (Self, Option<SequenceRows>)> {
        let tokens = self.attention.tokens;
        let row = self.indexer.row_scratch(self.closed(self.last(rows)).0) * 4;
        let at_once = (self.attention.partials.len / row).clamp(1, max);
        (0..tokens).step_by(at_once).map(move |first| {
            let count = at_once.min(tokens - first);
            (self.part(first, count), rows.map(|rows| rows.part(first, count)))
        })
    }

    /// The last position of any row. With `rows`, each row belongs to a different sequence.
    fn last(&self, rows: Option<SequenceRows>) -> usize {
        rows.map_or((self.attention.start + self.attention.tokens).saturating_sub(1), |rows| rows.starts[1])
    }

    /// The launches of all rows. A part closes its blocks before the next part reads their keys.
    pub(in crate::ops) fn launches(&self, max: usize) -> Result<impl Iterator<Item = Launch>, DeviceError> {
        self.check_ring(self.attention.tokens)?;
        Ok(self.parts(max, None).flat_map(|(part, rows)| part.part_launches(rows)))
    }

    /// Number of scores of a row: one for each closed block of the row with the most.
    fn stride(&self, rows: Option<SequenceRows>) -> usize {
        self.closed(self.last(rows)).0.max(1)
    }

    /// Queries `[tokens, heads * dim]`, selections `[tokens, blocks]` and scores `[tokens, stride]`.
    pub(in crate::ops) fn scratch(&self, rows: Option<SequenceRows>) -> [Region; 3] {
        let shape = self.indexer;
        let tokens = self.attention.tokens;
        let [queries, selected, scores] =
            [shape.heads * shape.dim, shape.blocks, self.stride(rows)].map(|row| tokens * row);
        let of = |first: usize, count: usize| self.attention.partials.rows(first, count, 1);
        [of(0, queries), of(queries, selected), of(queries + selected, scores)]
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
        args
    }

    /// The launches of a part: queries and keys, scores, selection, attention. If `of_rows` is given, each row belongs to
    /// another sequence.
    pub(in crate::ops) fn part_launches(&self, of_rows: Option<SequenceRows>) -> [Launch; 4] {
        let indexer = self.indexer;
        let attention = &self.attention;
        let args = self.args(of_rows);
        let shape = attention.shape;
        let tokens = attention.tokens;
        let [queries, selected, scores] = self.scratch(of_rows);
        let table = attention.cache.table;
        let sequences = Binding::read(of_rows.map_or(table, |rows| rows.table));
        let rows = tokens as u32;
        let values = tokens * shape.heads * shape.dim;
        let launch = |kernel, bindings, grid: [u32; 2], threads| {
            let grid = [grid[0], grid[1], 1];
            Launch { kernel, args: args.clone(), bindings, grid, threads, skip: SkipUse::None }
        };
        let keys = vec![
            Binding::read(self.index.floats(tokens * indexer.width())),
            Binding::read(self.norm_rope.q_norm.floats(indexer.dim)),
            Binding::read(self.norm_rope.k_norm.floats(indexer.dim)),
            Binding::read(self.norm_rope.rope_table.floats(tokens * indexer.rope_dim)),
            Binding::read(table),
            Binding::write(queries),
            Binding::read_write(self.cache.keys),
            Binding::read_write(self.cache.recent),
            sequences,
        ];
        let score = vec![
            Binding::read(queries),
            Binding::read(self.cache.keys),
            Binding::read(table),
            Binding::write(scores),
            sequences,
        ];
        let mut attend = vec![
            Binding::read(attention.q.floats(values)),
            Binding::read(attention.cache.keys),
            Binding::read(attention.cache.values),
            Binding::read(table),
            Binding::read(selected),
            Binding::read(attention.proj.floats(tokens * shape.width())),
            Binding::write(attention.y.floats(values)),
            sequences,
        ];
        if shape.recent.is_some() {
            attend.extend(shape.rings(attention.cache.recent, of_rows).map(Binding::read));
        }
        let kernel =
            shape.kernel(["block_attention", "block_attention_i16", "block_attention_q8", "block_attention_q4"]);
        [
            launch("index_rows", keys, [indexer.heads as u32 + 1, rows], 32),
            launch("index_scores", score, [self.stride(of_rows).div_ceil(128) as u32, rows], 128),
            launch(
                "index_select",
                vec![Binding::read(scores), Binding::write(selected), sequences],
                [rows, 1],
                IndexerShape::THREADS,
            ),
            launch(kernel, attend, [shape.heads as u32, rows], IndexerShape::THREADS),
        ]
    }
}

impl BlockAttentionRows<'_> {
    /// First the write of keys and values, then the launches of all rows. The number of launches is the same as for rows
    /// of one sequence.
    pub(in crate::ops) fn launches(&self, max: usize) -> Result<impl Iterator<Item = Launch>, DeviceError> {
        self.attend.check_ring(1)?;
        let parts = self.attend.parts(max, Some(self.rows));
        let attention = parts.flat_map(|(part, rows)| part.part_launches(rows));
        Ok(std::iter::once(self.write.launch_rows(Some(self.rows))).chain(attention))
    }
}
