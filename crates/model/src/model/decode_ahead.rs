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
//! A pass may have a row for each of several sequences. Each row's next token is chosen on the GPU, and the next pass has
//! the same rows. If the CPU then continues only some of the sequences, the logits of the others are computed in vain.
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
    forward::{
        PassOutput,
        buffers::Buffers,
        pass::{Chunk, SequenceRow, SnapshotMarks},
    },
    model_parts::ModelParts,
    positions::RowPositions,
    state::{
        pass_ahead::{PassAhead, collect, drop_failure},
        rollback::MAX_VERIFY_ROWS,
        sequence::QwenState,
    },
};
use crate::error::ModelError;
use moestro_compute::{experts::ExpertStore, ops::Sample};
use std::sync::{Arc, OnceLock};

/// Evaluates one token of each sequence, all in one pass. Returns the logits after each token. If `next` has an entry for
/// each sequence, also submits the pass of the next tokens. Several sequences must share buffers.
pub fn forward(
    parts: &ModelParts,
    device: &mut DeviceState,
    rows: &mut [(&mut QwenState, u32)],
    next: &[NextToken],
) -> Result<Logits, ModelError> {
    let passes: Vec<Arc<PassAhead>> = rows.iter_mut().filter_map(|(state, _)| state.ahead.take()).collect();
    let places: Vec<usize> = if passes.is_empty() {
        collect(&mut device.ahead, device.backend.as_mut());
        run_rows(parts, device, rows, (Some(0), false), PassOutput::Submitted)?;
        (0..rows.len()).collect()
    } else {
        check_tokens(rows, &passes)?;
        let is_submitted = |pass| device.ahead.iter().any(|other| Arc::ptr_eq(other, pass));
        // Besides the device, a sequence that has not ended keeps its pass.
        let is_needed = |other: &Arc<PassAhead>| {
            Arc::strong_count(other) > 1 && !passes.iter().any(|pass| Arc::ptr_eq(pass, other))
        };
        if !passes.iter().all(is_submitted) || device.ahead.iter().any(is_needed) {
            // Something else used the device meanwhile, or another pass begins.
            collect(&mut device.ahead, device.backend.as_mut());
            return collected(parts, device, &passes);
        }
        device.ahead.clear();
        passes.iter().map(|pass| pass.row).collect()
    };
    let next = if is_possible(parts, device) { next } else { &[] };
    let done = read_and_continue(parts, device, rows, &places, next);
    if done.is_err() {
        drop_failure(device.backend.as_mut());
        parts.store.iter().for_each(ExpertStore::clear_device);
    }
    done
}

/// Fails unless `passes` has a pass of each sequence's token.
fn check_tokens(rows: &[(&mut QwenState, u32)], passes: &[Arc<PassAhead>]) -> Result<(), ModelError> {
    if passes.len() < rows.len() {
        return Err(ModelError::Config("only some of the sequences contain the token that follows".into()));
    }
    match rows.iter().zip(passes).find(|((_, id), pass)| pass.id != *id) {
        Some(((_, id), pass)) => {
            Err(ModelError::Config(format!("the sequence already contains token {}, not {id}", pass.id)))
        }
        None => Ok(()),
    }
}

/// The logits of passes that were waited for already.
fn collected(parts: &ModelParts, device: &mut DeviceState, passes: &[Arc<PassAhead>]) -> Result<Logits, ModelError> {
    let mut logits = parts.new_logits(device, passes.len());
    for (row, pass) in logits.chunks_mut(parts.config.vocab).zip(passes) {
        match pass.collected.get() {
            Some(Ok(found)) => row.copy_from_slice(found),
            Some(Err(error)) => return Err(error.clone().into()),
            None => return Err(ModelError::Config("a pass ahead was lost".into())),
        }
    }
    Ok(parts.keep_logits(device, logits))
}

/// Number of rows after which the tables and the logits of a second pass begin.
fn half(buffers: &Buffers) -> usize {
    (buffers.rows / 2).min(MAX_VERIFY_ROWS)
}

/// Reads the logits of the pass that was submitted last, and submits the next pass before that. `places` are the places
/// of the rows in the tables.
fn read_and_continue(
    parts: &ModelParts,
    device: &mut DeviceState,
    rows: &mut [(&mut QwenState, u32)],
    places: &[usize],
    next: &[NextToken],
) -> Result<Logits, ModelError> {
    let config = &parts.config;
    let buffers = device.buffers;
    let half = half(&buffers);
    // Writing the number of a new page would wait for the pass.
    let has_room = |(state, _): &(&mut QwenState, u32)| state.len < parts.plan.context && state.missing_pages(1) == 0;
    let is_possible = next.len() == rows.len() && rows.len() <= half && rows.iter().all(has_room);
    let chosen: Vec<_> = places.iter().zip(next).map(|(place, next)| (*place, next.choice)).collect();
    let count = next.iter().map(|next| next.usable).min().unwrap_or(0).min(config.vocab);
    let scratch = buffers.sample_scratch(&chosen, count).filter(|_| is_possible);
    let Buffers { logits, ids, .. } = buffers;
    let sample = scratch.map(|scratch| Sample { rows: &chosen, count, stride: config.vocab, logits, scratch, ids });
    // The pass of the next tokens uses the other half of the tables.
    let first = if places.first().is_some_and(|place| *place < half) { half } else { 0 };
    if let Some(sample) = sample {
        device.backend.execute(&sample.into())?;
        // The wait for these logits must not include the next pass.
        device.backend.flush()?;
        run_rows(parts, device, rows, (Some(first), true), PassOutput::Submitted)?;
    }
    let mut logits = parts.new_logits(device, rows.len());
    let mut unread = &mut logits[..];
    for run in places.chunk_by(|place, after| place + 1 == *after) {
        let (part, after) = unread.split_at_mut(run.len() * config.vocab);
        device.backend.read_floats(buffers.at_rows(run[0], run.len(), config).logits, part)?;
        unread = after;
    }
    if sample.is_some() {
        let mut ids = vec![0; rows.len()];
        device.backend.read_words(buffers.ids, &mut ids)?;
        for (row, ((state, _), id)) in (first..).zip(rows.iter_mut().zip(ids)) {
            let logits = buffers.at_rows(row, 1, config).logits;
            let pass = Arc::new(PassAhead { id, row, logits, collected: OnceLock::new() });
            device.ahead.push(pass.clone());
            state.ahead = Some(pass);
        }
    }
    Ok(parts.keep_logits(device, logits))
}

/// Runs a pass with one token of each sequence. With `table_row`, the pass is only submitted, with the tables from this
/// row on. With `id_on_device`, the GPU has chosen the tokens. Otherwise they are those of `rows`.
pub fn run_rows(
    parts: &ModelParts,
    device: &mut DeviceState,
    rows: &mut [(&mut QwenState, u32)],
    (table_row, id_on_device): (Option<usize>, bool),
    output: PassOutput<'_>,
) -> Result<(), ModelError> {
    let count = rows.len();
    for (state, id) in &mut *rows {
        let given = [*id];
        parts.check_ids(state.len, if id_on_device { &[] } else { &given })?;
        if count > 1 {
            parts.replay(device, state)?;
        }
        state.verified = 0;
    }
    let sequences: Vec<SequenceRow> = rows.iter().map(|(state, _)| SequenceRow::next_of(state)).collect();
    let ids: Vec<u32> = rows.iter().map(|(_, id)| if id_on_device { 0 } else { *id }).collect();
    let chunk = match &mut *rows {
        [(state, _)] => Chunk::new(&ids, state.len, RowPositions::new(state.next, state.len, &[])),
        _ => Chunk { sequences: &sequences, ..Chunk::new(&ids, 0, RowPositions::new(0, 0, &[])) },
    };
    let chunk = Chunk { table_row, id_on_device, logits: 0..count, size: parts.pass_size(count), ..chunk };
    let mut states: Vec<&mut QwenState> = rows.iter_mut().map(|(state, _)| &mut **state).collect();
    parts.run_pass(device, &mut states, chunk, None, SnapshotMarks::default(), output)?;
    for state in states {
        state.len += 1;
        state.next += 1;
    }
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
