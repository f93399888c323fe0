//! Gated attention to all positions, or to the blocks that an indexer selects.

use super::pass::{PartInput, Pass, SnapshotMarks};
use crate::{
    error::ModelError,
    model::{
        state::row_ring::{KeptRows, RowRing},
        weights::AttentionWeights,
    },
};
use moestro_compute::{
    device::Region,
    ops::{Attention, AttentionRows, BlockAttention, IndexCache, KvCache, KvWrite, Linear, QkNormRope, SequenceRows},
};
use std::ops::Range;

impl AttentionWeights {
    /// `h += W_o (softmax(q k^T / sqrt(dim)) v * sigmoid(gate))` for a block of rows.
    pub fn forward(
        &self,
        input: PartInput,
        rows: Range<usize>,
        cache: KvCache,
        index_cache: IndexCache,
        pass: &mut Pass<'_>,
        marks: &mut SnapshotMarks,
    ) -> Result<(), ModelError> {
        let (b, shape) = (pass.buffers, pass.attention);
        let (start, tokens) = (pass.chunk.start + rows.start, rows.len());

        // (q, gate) per head, k, v = split(W_qkv rms_norm(h))
        let (x, norm) = (input.rows(&rows), input.norm);
        pass.execute(Linear { x, tokens, norm, matrices: &self.qkv, y: b.proj, add: false })?;

        // q, k = rope(rms_norm(q), rms_norm(k)) per head, on the first rope_dim values; k and v go into the cache
        let rope_table = b.rope.rows(rows.start, tokens, shape.rope_dim);
        let norm_rope = QkNormRope { q_norm: self.q_norm, k_norm: self.k_norm, rope_table };
        let q = b.head_out;
        pass.execute(KvWrite { shape, start, tokens, proj: b.proj, norm_rope, q, cache })?;

        // y = softmax(q k^T / sqrt(dim)) v * sigmoid(gate), over the cached positions up to the row's own
        let (proj, partials, y) = (b.proj, b.partials, b.y(tokens));
        let attention = Attention { shape, start, tokens, q, cache, proj, partials, y };
        match &self.indexer {
            None => pass.execute(attention)?,
            Some(indexer) => {
                // with an indexer: the same over the blocks that it selects for each row
                let (matrices, index, shape) = (std::slice::from_ref(&indexer.proj), b.index, &indexer.shape);
                pass.execute(Linear { x, tokens, norm, matrices, y: index, add: false })?;
                let norm_rope = QkNormRope { q_norm: indexer.q_norm, k_norm: indexer.k_norm, rope_table };
                let op = BlockAttention { attention, indexer: shape, index, norm_rope, cache: index_cache };
                pass.execute(&op)?;
                let (rows_of, width) = (index_cache.recent, shape.recent_width());
                let recent = RowRing { rows: rows_of, width, keep: KeptRows::OpenBlock(shape.ratio) };
                for mark in marks.within(&rows) {
                    marks.record_rows(mark, &recent, pass.chunk.start + marks.rows[mark], &mut *pass.backend)?;
                }
            }
        }

        // h += W_o y
        let out_proj = pass.out_proj(&self.out, &rows);
        pass.execute(out_proj)
    }

    /// Computes attention, without the projections, for rows of different sequences in one operation. `cache` has the
    /// page tables and rings of all sequences.
    pub fn attend_together(&self, cache: KvCache, rows: SequenceRows, pass: &mut Pass<'_>) -> Result<(), ModelError> {
        let (b, shape, tokens, start) = (pass.buffers, pass.attention, pass.rows(), 0);
        let rope_table = b.rope.rows(0, tokens, shape.rope_dim);
        let norm_rope = QkNormRope { q_norm: self.q_norm, k_norm: self.k_norm, rope_table };
        let (proj, q, partials, y) = (b.proj, b.head_out, b.partials, b.y(tokens));
        let write = KvWrite { shape, start, tokens, proj, norm_rope, q, cache };
        let attention = Attention { shape, start, tokens, q, cache, proj, partials, y };
        pass.execute(&AttentionRows { write, attention, rows })
    }

    /// Computes attention, without the projections, for row `row` of a pass whose rows belong to different sequences.
    /// Does not support an indexer.
    pub fn attend_row(&self, row: usize, cache: KvCache, pass: &mut Pass<'_>) -> Result<(), ModelError> {
        let (b, shape, start, partials) =
            (pass.buffers, pass.attention, pass.chunk.sequences[row].start, pass.buffers.partials);
        let of = |region: Region, width: usize| region.rows(row, 1, width);
        let (proj, values) = (of(b.proj, shape.width()), shape.heads * shape.dim);
        let (q, y, rope_table) = (of(b.head_out, values), of(b.y(pass.rows()), values), of(b.rope, shape.rope_dim));
        let norm_rope = QkNormRope { q_norm: self.q_norm, k_norm: self.k_norm, rope_table };
        pass.execute(KvWrite { shape, start, tokens: 1, proj, norm_rope, q, cache })?;
        pass.execute(Attention { shape, start, tokens: 1, q, cache, proj, partials, y })
    }
}
