//! The output head: from hidden rows to logits.

use super::{buffers::LOGIT_ROWS, pass::Pass};
use crate::{
    error::ModelError,
    model::weights::{Network, Residual},
};
use moestro_compute::{
    device::Region,
    ops::{Linear, Sample, TokenChoice},
};
use std::ops::Range;

/// Fills `out` with `rms_norm(h) W_head^T` for the rows whose logits the chunk asks for, at most [`LOGIT_ROWS`] at a
/// time. In a model with several residual streams, the mixture of the streams takes the place of `rms_norm(h)`.
pub fn read_logits(net: &Network, pass: &mut Pass<'_>, out: &mut [f32]) -> Result<(), ModelError> {
    let vocab = pass.config.vocab;
    let wanted = pass.chunk.logits.clone();
    for (first, out) in wanted.clone().step_by(LOGIT_ROWS).zip(out.chunks_mut(LOGIT_ROWS * vocab)) {
        write_logits(net, pass, first..wanted.end.min(first + LOGIT_ROWS))?;
        pass.backend.read_floats(pass.buffers.logits, out)?;
    }
    Ok(())
}

/// Fills `ids` with the likeliest token of each row whose logits the chunk asks for, of the ids below `usable`. There
/// must be scratch for this, see [`Buffers::sample_scratch`](super::buffers::Buffers::sample_scratch).
pub fn read_likeliest(net: &Network, pass: &mut Pass<'_>, usable: usize, ids: &mut [u32]) -> Result<(), ModelError> {
    write_logits(net, pass, pass.chunk.logits.clone())?;
    let b = pass.buffers;
    let rows: Vec<_> = (0..ids.len()).map(|row| (row, TokenChoice::LIKELIEST)).collect();
    let Some(scratch) = b.sample_scratch(&rows, usable) else {
        return Err(ModelError::Config(format!("cannot choose from {} rows of logits on the device", rows.len())));
    };
    let stride = pass.config.vocab;
    pass.execute(Sample { rows: &rows, count: usable, stride, logits: b.logits, scratch, ids: b.ids })?;
    Ok(pass.backend.read_words(b.ids, ids)?)
}

/// Computes the logits of at most [`LOGIT_ROWS`] rows into the buffer for logits.
pub fn write_logits(net: &Network, pass: &mut Pass<'_>, rows: Range<usize>) -> Result<(), ModelError> {
    let b = pass.buffers;
    let hidden = pass.config.hidden;
    let tokens = rows.len();
    let (x, norm) = match &net.before_head {
        Residual::Norm(weight) => (b.h.rows(rows.start, tokens, hidden), Some(pass.norm(*weight))),
        Residual::Streams(mix) => {
            let x = b.normed.rows(0, tokens, hidden);
            pass.mix_streams(mix, &rows, x, [Region::default(); 2])?;
            (x, None)
        }
    };
    let matrices = std::slice::from_ref(net.head());
    pass.execute(Linear { x, tokens, norm, matrices, y: b.logits, add: false })
}
