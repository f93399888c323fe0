//! Attention to selected blocks on a GPU (`kernels/block_attention.metal`).
//!
//! The buffer of partial results holds the queries, scores and selections of a launch.

use super::{BlockAttention, IndexerShape};
use crate::{
    device::{Binding, DeviceError, Launch, Region, SkipUse},
    ops::{QkNormRope, attention::KvFormat},
};

impl IndexerShape {
    /// The kernels with the largest threadgroups.
    pub const WIDE_KERNELS: [&'static str; 3] = ["index_select", "block_attention", "block_attention_i16"];
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
    pub(in crate::ops) fn parts(&self, max: usize) -> impl Iterator<Item = Self> {
        let start = self.attention.start;
        let tokens = self.attention.tokens;
        let row = self.indexer.row_scratch(self.closed((start + tokens).saturating_sub(1)).0) * 4;
        let at_once = (self.attention.partials.len / row).clamp(1, max);
        (0..tokens).step_by(at_once).map(move |first| self.part(first, at_once.min(tokens - first)))
    }

    fn part(&self, first: usize, count: usize) -> Self {
        let rope_table = self.norm_rope.rope_table.rows(first, count, self.indexer.rope_dim);
        let index = self.index.rows(first, count, self.indexer.width());
        let norm_rope = QkNormRope { rope_table, ..self.norm_rope };
        Self { attention: self.attention.part(first, count), index, norm_rope, ..*self }
    }

    /// The launches of all rows. A part closes its blocks before the next part reads their keys.
    pub(in crate::ops) fn launches(&self, max: usize) -> Result<impl Iterator<Item = Launch>, DeviceError> {
        self.check_ring()?;
        Ok(self.parts(max).flat_map(|part| part.part_launches()))
    }

    /// Number of scores of a row: one for each closed block of the last row.
    fn stride(&self) -> usize {
        self.closed((self.attention.start + self.attention.tokens).saturating_sub(1)).0.max(1)
    }

    /// Queries `[tokens, heads * dim]`, selections `[tokens, blocks]` and scores `[tokens, stride]`.
    pub(in crate::ops) fn scratch(&self) -> [Region; 3] {
        let shape = self.indexer;
        let tokens = self.attention.tokens;
        let [queries, selected, scores] =
            [shape.heads * shape.dim, shape.blocks, self.stride()].map(|row| tokens * row);
        let of = |first: usize, count: usize| self.attention.partials.rows(first, count, 1);
        [of(0, queries), of(queries, selected), of(queries + selected, scores)]
    }

    fn args(&self) -> Vec<u32> {
        let indexer = self.indexer;
        let shape = self.attention.shape;
        let start = self.attention.start;
        let tokens = self.attention.tokens;
        assert!(shape.dim <= 256 && indexer.dim <= 256, "heads of {} and {}", shape.dim, indexer.dim);
        assert!(start + tokens <= shape.context, "position {} of {}", start + tokens, shape.context);
        let words = [start, indexer.heads, indexer.dim, indexer.rope_dim, indexer.ratio, indexer.blocks];
        let scale = |dim: usize| (1.0 / (dim as f32).sqrt()).to_bits();
        let mut args = words.map(|word| word as u32).to_vec();
        args.extend([self.ring_len() as u32, self.stride() as u32, indexer.eps.to_bits(), scale(indexer.dim)]);
        args.extend([shape.width(), shape.heads, shape.kv_heads, shape.dim].map(|word| word as u32));
        args.push(scale(shape.dim));
        args
    }

    /// The launches of a part: queries and keys, scores, selection, attention.
    pub(in crate::ops) fn part_launches(&self) -> [Launch; 4] {
        let indexer = self.indexer;
        let attention = &self.attention;
        let args = self.args();
        let shape = attention.shape;
        let tokens = attention.tokens;
        let [queries, selected, scores] = self.scratch();
        let table = attention.cache.table;
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
        ];
        let score =
            vec![Binding::read(queries), Binding::read(self.cache.keys), Binding::read(table), Binding::write(scores)];
        let attend = vec![
            Binding::read(attention.q.floats(values)),
            Binding::read(attention.cache.keys),
            Binding::read(attention.cache.values),
            Binding::read(table),
            Binding::read(selected),
            Binding::read(attention.proj.floats(tokens * shape.width())),
            Binding::write(attention.y.floats(values)),
        ];
        let kernel = if shape.format == KvFormat::I16 { "block_attention_i16" } else { "block_attention" };
        [
            launch("index_rows", keys, [indexer.heads as u32 + 1, rows], 32),
            launch("index_scores", score, [self.stride().div_ceil(128) as u32, rows], 128),
            launch(
                "index_select",
                vec![Binding::read(scores), Binding::write(selected)],
                [rows, 1],
                IndexerShape::THREADS,
            ),
            launch(kernel, attend, [shape.heads as u32, rows], IndexerShape::THREADS),
        ]
    }
}
