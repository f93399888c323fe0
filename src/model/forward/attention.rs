//! Gated full attention.

use super::pass::Pass;
use crate::{
    device::Region,
    error::ModelError,
    model::weights::AttentionWeights,
    ops::{Attention, KvCache, KvWrite, Linear, QkNormRope},
};
use std::ops::Range;

impl AttentionWeights {
    /// `h += W_o (softmax(q k^T / sqrt(dim)) v * sigmoid(gate))` for a block of rows.
    pub fn forward(
        &self,
        norm: Region,
        rows: Range<usize>,
        cache: KvCache,
        pass: &mut Pass<'_>,
    ) -> Result<(), ModelError> {
        let (b, shape) = (pass.buffers, pass.attention);
        let (start, tokens) = (pass.chunk.start + rows.start, rows.len());

        // (q, gate) per head, k, v = split(W_qkv rms_norm(h))
        let (x, norm) = (pass.residual(&rows), Some(pass.norm(norm)));
        pass.execute(Linear { x, tokens, norm, matrices: &self.qkv, y: b.proj, add: false })?;

        // q, k = rope(rms_norm(q), rms_norm(k)) per head, on the first rope_dim values; k and v go into the cache
        let rope_table = b.rope.rows(rows.start, tokens, shape.rope_dim);
        let norm_rope = QkNormRope { q_norm: self.q_norm, k_norm: self.k_norm, rope_table };
        let q = b.head_out;
        pass.execute(KvWrite { shape, start, tokens, proj: b.proj, norm_rope, q, cache })?;

        // y = softmax(q k^T / sqrt(dim)) v * sigmoid(gate), over the cached positions up to the row's own
        let (proj, partials, y) = (b.proj, b.partials, b.y(tokens));
        pass.execute(Attention { shape, start, tokens, q, cache, proj, partials, y })?;

        // h += W_o y
        let out_proj = pass.out_proj(&self.out, &rows);
        pass.execute(out_proj)
    }
}
