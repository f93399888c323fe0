//! Adds the rows of an n-gram table to the residual streams before a layer.

use super::pass::{Pass, SnapshotMarks};
use crate::{error::ModelError, model::weights::NgramWeights};
use moestro_compute::ops::{InjectShape, Linear, NgramInject, NgramInjectRows};

impl NgramWeights {
    /// `R += G + silu(conv(rms_norm(G)))`, `G = gate(rms_norm(W_key e), rms_norm(R)) * W_value e`.
    pub fn forward(&self, pass: &mut Pass<'_>, marks: &mut SnapshotMarks) -> Result<(), ModelError> {
        let shape = &self.layout.shape;
        let input = pass.ngrams.iter_mut().find(|input| input.table.layout().shape.layer == shape.layer);
        let Some((table, pending, history)) =
            input.and_then(|input| Some((input.table, input.pending.take()?, input.history)))
        else {
            return Err(ModelError::Config(format!("the n-gram table of layer {} is not loaded", shape.layer)));
        };
        // e = rows of the table. A GPU computes the layers before this one while they are read.
        pass.backend.flush()?;
        let e = table.wait(pending)?;
        let b = pass.buffers;
        let hidden = pass.config.hidden;
        let width = pass.config.residual_width();
        let inject = InjectShape {
            streams: width / hidden,
            hidden,
            conv_width: shape.conv_width,
            dilation: shape.size,
            capacity: history.capacity,
            eps: pass.config.eps,
        };
        for rows in pass.mixer_blocks() {
            let start = pass.chunk.start + rows.start;
            let tokens = rows.len();
            let values = &e[rows.start * shape.width..rows.end * shape.width];
            pass.backend.write(b.ngram.floats(values.len()), bytemuck::cast_slice(values))?;
            // keys of all streams, v = W e
            let proj = Linear { x: b.ngram, tokens, norm: None, matrices: &self.proj, y: b.proj, add: false };
            pass.execute(proj)?;
            // R += G + silu(conv(rms_norm(G)))
            let streams = pass.residual(&rows);
            let weights = &self.inject;
            let gates = b.inject;
            let shape = &inject;
            let proj = b.proj;
            let history_rows = history.rows;
            let inject = NgramInject { shape, weights, start, tokens, proj, gates, history: history_rows, streams };
            match pass.sequence_rows() {
                Some(rows) => pass.execute(NgramInjectRows { inject, rows })?,
                None => pass.execute(inject)?,
            }
            for index in marks.within(&rows) {
                let len = pass.chunk.start + marks.rows[index];
                marks.record_rows(index, &history, len, &mut *pass.backend)?;
            }
        }
        Ok(())
    }
}
