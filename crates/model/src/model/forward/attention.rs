//! Gated attention to all positions, or to the blocks that an indexer selects.

use super::pass::{PartInput, Pass, SnapshotMarks};
use crate::{
    error::ModelError,
    model::{
        state::row_ring::{KeptRows, RowRing},
        weights::AttentionWeights,
    },
};
use moestro_compute::ops::{
    Attention, AttentionRows, BlockAttention, BlockAttentionRows, IndexCache, KvCache, KvWrite, Linear, QkNormRope,
};
use std::ops::Range;

impl AttentionWeights {
    /// `h += W_o (softmax(q k^T / sqrt(dim)) v * sigmoid(gate))` for a block of rows. If the rows belong to several
    /// sequences, `cache` has the page tables and rings of all of them.
    pub fn forward(
        &self,
        input: PartInput,
        rows: Range<usize>,
        cache: KvCache,
        index_cache: IndexCache,
        pass: &mut Pass<'_>,
        marks: &mut SnapshotMarks,
    ) -> Result<(), ModelError> {
        let b = pass.buffers;
        let shape = pass.attention;
        let start = pass.chunk.start + rows.start;
        let tokens = rows.len();

        // (q, gate) per head, k, v = split(W_qkv rms_norm(h))
        let x = input.rows(&rows);
        let norm = input.norm;
        pass.execute(Linear { x, tokens, norm, matrices: &self.qkv, y: b.proj, add: false })?;

        // q, k = rope(rms_norm(q), rms_norm(k)) per head, on the first rope_dim values; k and v go into the cache
        let rope_table = b.rope.rows(rows.start, tokens, shape.rope_dim);
        let norm_rope = QkNormRope { q_norm: self.q_norm, k_norm: self.k_norm, rope_table };
        let q = b.head_out;
        let write = KvWrite { shape, start, tokens, proj: b.proj, norm_rope, q, cache };

        // y = softmax(q k^T / sqrt(dim)) v * sigmoid(gate), over the cached positions up to the row's own
        let proj = b.proj;
        let partials = b.partials;
        let y = b.y(tokens);
        let attention = Attention { shape, start, tokens, q, cache, proj, partials, y };
        let sequences = pass.sequence_rows();
        if let Some(indexer) = &self.indexer {
            // with an indexer: the same over the blocks that it selects for each row
            let matrices = std::slice::from_ref(&indexer.proj);
            let index = b.index;
            let shape = &indexer.shape;
            pass.execute(Linear { x, tokens, norm, matrices, y: index, add: false })?;
            let norm_rope = QkNormRope { q_norm: indexer.q_norm, k_norm: indexer.k_norm, rope_table };
            let attend = BlockAttention { attention, indexer: shape, index, norm_rope, cache: index_cache };
            if let Some(rows) = sequences {
                pass.execute(&BlockAttentionRows { write, attend, rows })?;
            } else {
                pass.execute(write)?;
                pass.execute(&attend)?;
            }
            let IndexCache { recent, capacity, .. } = index_cache;
            let width = shape.recent_width();
            let recent = RowRing { rows: recent, capacity, width, keep: KeptRows::OpenBlock(shape.ratio) };
            for mark in marks.within(&rows) {
                marks.record_rows(mark, &recent, pass.chunk.start + marks.rows[mark], &mut *pass.backend)?;
            }
        } else if let Some(rows) = sequences {
            pass.execute(&AttentionRows { write, attention, rows })?;
        } else {
            pass.execute(write)?;
            pass.execute(attention)?;
        }

        // h += W_o y
        let out_proj = pass.out_proj(&self.out, &rows);
        pass.execute(out_proj)
    }
}
