//! The gated delta net: linear attention whose state is one matrix for each head, of the same size at any length.

use super::{
    buffers::Buffers,
    pass::{PartInput, Pass, SnapshotMarks},
};
use crate::{
    error::ModelError,
    model::{
        state::rollback::{Commit, DeltaState},
        weights::DeltaNetWeights,
    },
};
use moestro_compute::{
    device::Region,
    ops::{Backend, Conv, DeltaNet, DeltaNetRows, DeltaRule, DeltaShape, Linear},
};
use std::ops::Range;

/// The buffers of a delta net for some rows.
#[derive(Clone, Copy)]
struct RowBuffers {
    /// `[rows, width]`: q, k, v, z, b, a.
    proj: Region,
    /// `[rows, channels]`: q, k, v after the convolution.
    mixed: Region,
    /// `[rows, values]`: the output of the delta rule.
    out: Region,
    /// `[rows, values]`: the output of the delta rule after norm and gate.
    y: Region,
}

impl RowBuffers {
    /// The buffers of rows `rows`.
    fn part(self, rows: &Range<usize>, shape: &DeltaShape) -> Self {
        let part = |region: Region, width: usize| region.rows(rows.start, rows.len(), width);
        Self {
            proj: part(self.proj, shape.width()),
            mixed: part(self.mixed, shape.channels()),
            out: part(self.out, shape.values()),
            y: part(self.y, shape.values()),
        }
    }
}

impl DeltaNetWeights {
    /// `h += W_out (rms_norm(delta_rule(conv(q, k, v))) * gate(z))` for a block of rows; the gate is SiLU or sigmoid. If
    /// the rows belong to several sequences, `state` has the states of all of them, and no sequence has rows to replay.
    pub fn forward(
        &self,
        input: PartInput,
        rows: Range<usize>,
        state: &mut DeltaState,
        pass: &mut Pass<'_>,
        marks: &mut SnapshotMarks,
    ) -> Result<(), ModelError> {
        let b = pass.buffers;
        let shape = &self.shape;
        let tokens = rows.len();
        let commit = pass.chunk.commit;
        // A verify projects into the replay buffer, where its rows stay until they are accepted or rejected.
        let [proj, mixed] = state.replay_rows(shape, commit, tokens).unwrap_or([b.proj, b.mixed]);
        let buffers = RowBuffers { proj, mixed, out: b.head_out, y: b.y(tokens) };

        // q k v, z, b, a = W_in rms_norm(h)
        let x = input.rows(&rows);
        let norm = input.norm;
        let in_proj = Linear { x, tokens, norm, matrices: &self.in_proj, y: proj, add: false };
        // h += W_out y
        let out_proj = pass.out_proj(&self.out, &rows);

        let here = marks.within(&rows);
        if here.is_empty() {
            let (conv, rule) = self.recurrence(state, commit, tokens, buffers.part(&(0..tokens), shape));
            let net = DeltaNet { in_proj, conv, rule, out_proj };
            match pass.sequence_rows() {
                Some(rows) => pass.execute(&DeltaNetRows { net, rows })?,
                None => pass.execute(&net)?,
            }
            state.advance(commit, tokens);
            return Ok(());
        }
        // Snapshots are needed inside these rows, so the recurrence stops after each marked row.
        pass.execute(in_proj)?;
        let mut from = 0;
        for index in here {
            let to = marks.rows[index] - rows.start;
            self.advance_rows(from..to, state, buffers, pass)?;
            marks.record(index, state, &mut *pass.backend)?;
            from = to;
        }
        self.advance_rows(from..tokens, state, buffers, pass)?;
        pass.execute(out_proj)
    }

    /// Adds the rows of the replay buffer to the state.
    pub fn replay(&self, state: &mut DeltaState, b: &Buffers, backend: &mut dyn Backend) -> Result<(), ModelError> {
        if state.pending(&self.shape).rows > 0 {
            let buffers = RowBuffers { proj: b.proj, mixed: b.mixed, out: b.head_out, y: b.y(0) };
            let (conv, rule) = self.recurrence(state, Commit::Now, 0, buffers);
            backend.execute(&conv.into())?;
            backend.execute(&rule.into())?;
            state.advance(Commit::Now, 0);
        }
        Ok(())
    }

    /// Computes the convolution and the delta rule for some of the projected rows.
    fn advance_rows(
        &self,
        rows: Range<usize>,
        state: &mut DeltaState,
        all: RowBuffers,
        pass: &mut Pass<'_>,
    ) -> Result<(), ModelError> {
        if rows.is_empty() {
            return Ok(());
        }
        let commit = pass.chunk.commit;
        let (conv, rule) = self.recurrence(state, commit, rows.len(), all.part(&rows, &self.shape));
        pass.execute(conv)?;
        pass.execute(rule)?;
        state.advance(commit, rows.len());
        Ok(())
    }

    /// The convolution and the delta rule as operations, over the rows to replay and then `tokens` new rows:
    ///
    /// ```text
    /// q, k, v = silu(causal_conv(q k v));  q, k to unit length per head
    /// g = exp(-exp(A_log) softplus(a + dt_bias));  beta = sigmoid(b)
    /// S = g S + beta (v - g S k) k^T;  o = S q                           per head, row by row
    /// y = rms_norm(o) * gate(z)
    /// ```
    fn recurrence(
        &self,
        state: &DeltaState,
        commit: Commit,
        tokens: usize,
        RowBuffers { proj, mixed, out, y }: RowBuffers,
    ) -> (Conv<'_>, DeltaRule<'_>) {
        let shape = &self.shape;
        let replay = state.pending(shape);
        let committed = state.rows_to_commit(commit, tokens);
        let conv = Conv { shape, tokens, proj, weight: self.conv, replay, committed, state: state.conv, out: mixed };
        let decay = self.decay;
        let norm = self.norm;
        let state = state.recurrent;
        (conv, DeltaRule { shape, tokens, proj, mixed, decay, replay, committed, state, norm, out, y })
    }
}
