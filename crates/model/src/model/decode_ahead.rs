//! Decoding ahead: a GPU starts the pass of the next token before the CPU has read the logits of this token.
//!
//! The GPU chooses the next token: a pass ends with [`Sample`], which writes an id to where the next pass reads its
//! token. The CPU submits the next pass at once and reads the logits of the first pass meanwhile. So the GPU does not
//! wait for the CPU between two tokens.
//!
//! ```text
//! CPU   submit 1 and 2   read 1, submit 3   read 2, submit 4
//! GPU   pass 1           pass 2             pass 3
//! ```
//!
//! A pass ahead cannot be undone, since the recurrent state of a delta net cannot be rewound. At the end of an answer,
//! the sequence therefore contains one token more than otherwise: the last token of the answer, or the token that ended
//! it.
//!
//! The CPU's sampler decides which tokens an answer has. It adds in f64 and the GPU in f32. So they disagree if the
//! random number is within about a millionth of the limit between two tokens. The engine then recomputes the sequence.

use super::{
    Logits, NextToken, SequenceState,
    device_state::DeviceState,
    forward::pass::{Chunk, SnapshotMarks},
    model_parts::ModelParts,
    positions::RowPositions,
    state::{
        pass_ahead::{PassAhead, collect, drop_failure},
        sequence::QwenState,
    },
};
use crate::error::ModelError;
use moestro_compute::{experts::ExpertStore, ops::Sample};
use std::sync::{Arc, OnceLock};

/// Evaluates one token. Returns the logits after it. If `next` is set, also submits the pass of the next token.
pub fn forward(
    parts: &ModelParts,
    device: &mut DeviceState,
    state: &mut QwenState,
    id: u32,
    next: Option<NextToken>,
) -> Result<Logits, ModelError> {
    let next = next.filter(|_| is_possible(parts, device));
    let row = match state.ahead.take() {
        None => {
            collect(&mut device.ahead, device.backend.as_mut());
            submit_token(parts, device, state, 0, Some(id))?;
            0
        }
        Some(pass) if pass.id != id => {
            return Err(ModelError::Config(format!("the sequence already contains token {}, not {id}", pass.id)));
        }
        Some(pass) => match pass.collected.get() {
            Some(Ok(logits)) => return Ok(parts.keep_logits(device, logits.clone())),
            Some(Err(error)) => return Err(error.clone().into()),
            None => {
                device.ahead = None;
                pass.row
            }
        },
    };
    let done = read_and_continue(parts, device, state, row, next);
    if done.is_err() {
        drop_failure(device.backend.as_mut());
        parts.store.iter().for_each(ExpertStore::clear_device);
    }
    done
}

/// Reads the logits of the pass that was submitted last, which uses row `row` of the buffers.
fn read_and_continue(
    parts: &ModelParts,
    device: &mut DeviceState,
    state: &mut QwenState,
    row: usize,
    next: Option<NextToken>,
) -> Result<Logits, ModelError> {
    let config = &parts.config;
    let buffers = device.buffers.at_row(row, config);
    // Writing the number of a new page would wait for the pass.
    let has_room = state.len < parts.plan.context && state.missing_pages(1) == 0;
    let sample = next.filter(|_| has_room).and_then(|NextToken { usable, choice }| {
        let count = usable.min(config.vocab);
        let logits = buffers.logits;
        let id = buffers.ids;
        let words = Sample::scratch_words(&choice, count).filter(|words| words * 4 <= buffers.partials.len)?;
        Some(Sample { choice, count, logits, scratch: buffers.partials.floats(words), id })
    });
    if let Some(sample) = sample {
        device.backend.execute(&sample.into())?;
        // The wait for these logits must not include the next pass.
        device.backend.flush()?;
        submit_token(parts, device, state, 1 - row, None)?;
    }
    let mut logits = parts.new_logits(device, 1);
    device.backend.read_floats(buffers.logits, &mut logits)?;
    if sample.is_some() {
        let mut id = [0];
        device.backend.read_words(buffers.ids, &mut id)?;
        let row = 1 - row;
        let [id] = id;
        let logits = device.buffers.at_row(row, config).logits;
        let pass = Arc::new(PassAhead { id, row, logits, collected: OnceLock::new() });
        device.ahead = Some(pass.clone());
        state.ahead = Some(pass);
    }
    Ok(parts.keep_logits(device, logits))
}

/// Submits the pass of one token, with row `row` of the buffers. If `id` is `None`, the GPU has chosen the token.
fn submit_token(
    parts: &ModelParts,
    device: &mut DeviceState,
    state: &mut QwenState,
    row: usize,
    id: Option<u32>,
) -> Result<(), ModelError> {
    parts.check_ids(state.len, id.as_slice())?;
    state.verified = 0;
    let positions = RowPositions::new(state.next, state.len, &[]);
    let ids = [id.unwrap_or(0)];
    let table_row = Some(row);
    let id_on_device = id.is_none();
    let chunk = Chunk { table_row, id_on_device, logits: 0..1, ..Chunk::new(&ids, state.len, positions) };
    parts.run_pass(device, &mut [state], chunk, None, SnapshotMarks::default(), None)?;
    state.len += 1;
    state.next += 1;
    Ok(())
}

/// True if the device can decode this model ahead.
pub fn is_possible(parts: &ModelParts, device: &DeviceState) -> bool {
    let config = &parts.config;
    // The CPU reads the rows of n-gram tables, hidden rows, and experts that are not resident.
    device.limits.is_async
        && config.ngrams.is_empty()
        && config.indexer.is_none()
        && !device.taps.is_recording()
        && parts.store.as_ref().is_none_or(ExpertStore::is_resident)
        && device.buffers.rows > 1
}
