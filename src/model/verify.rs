//! A verify that can be taken back: a few rows of which the last may turn out never to have been.
//!
//! Keys and values go back by their length, the delta nets by their [`tape`](super::tape).

use super::{
    Logits, Qwen,
    forward::Batch,
    net::Mixer,
    placed::Placed,
    state::{LayerState, State},
    tape::{DeltaState, ROWS},
};
use crate::{
    error::ModelError,
    experts::{Experts, Phase},
    ops::{Conv, DeltaRule},
};

impl Qwen {
    /// See [`Model::verify`](super::Model::verify).
    pub(super) fn try_rows(&self, state: &mut State, ids: &[u32]) -> Result<Logits, ModelError> {
        self.try_rows_behind(0, state, ids, false)
    }

    /// Further rows of the verify that the last call was: all of them can be taken back together.
    pub fn verify_on(&self, state: &mut State, ids: &[u32]) -> Result<Logits, ModelError> {
        if state.tried == 0 {
            return Err(ModelError::Config("no verify goes on".into()));
        }
        self.try_rows_behind(state.tried, state, ids, false)
    }

    /// The logits behind `id` as far as the experts that are in memory can tell: those that are not are done without, nothing
    /// is read. A draft goes on token by token; before anything else, [`Qwen::end_draft`] takes all of it back.
    ///
    /// # Errors
    /// [`ModelError::NonePresent`] where a layer has no expert in memory: the draft can only be ended.
    pub fn draft(&self, state: &mut State, id: u32) -> Result<Logits, ModelError> {
        if state.drafting.is_none() {
            state.drafting = Some(state.len);
            state.nets().for_each(DeltaState::begin);
        }
        let first = state.drafting.unwrap_or(state.len);
        self.try_rows_behind(state.len - first, state, &[id], true)
    }

    /// Takes a draft back, also one whose last pass has failed.
    pub fn end_draft(&self, state: &mut State) {
        if let Some(first) = state.drafting.take() {
            state.nets().for_each(DeltaState::end);
            (state.len, state.tried) = (first, 0);
        }
    }

    fn try_rows_behind(
        &self,
        before: usize,
        state: &mut State,
        ids: &[u32],
        present: bool,
    ) -> Result<Logits, ModelError> {
        self.admit(state.len, ids)?;
        let config = &self.parts.config;
        let mut placed = self.placed.borrow_mut();
        if ids.is_empty() || before + ids.len() > ROWS || ids.len() > placed.buffers.rows {
            return Err(ModelError::Config(format!("a verify has 1 to {ROWS} rows, not {}", ids.len())));
        }
        let (rows, shape) = (ids.len(), config.delta_heads());
        state.nets().try_for_each(|net| net.tape(&shape, &mut *placed.run))?;
        let mut logits = Logits { vocab: config.vocab, data: Vec::new() };
        // Every expert stays in its slot until its layer is done, if there are slots enough for all rows to differ.
        let slots = self.store().map_or(0, Experts::slots);
        let phase = if rows * config.experts_per_token() <= slots { Phase::Decode } else { Phase::Prefill };
        let batch = Batch { ids, logits: 0..rows, phase, present, prompt: false, trial: Some(before), go_on: &|| true };
        // After a pass that fails there is nothing to go back to.
        state.tried = 0;
        self.chunk(&mut placed, state, batch, (&[], &mut |_, _, _| Ok(())), None, &mut logits.data)?;
        state.tried = before + rows;
        state.len += rows;
        Ok(logits)
    }

    /// See [`Model::take_back`](super::Model::take_back).
    pub(super) fn forget(&self, state: &mut State, rows: usize) -> Result<(), ModelError> {
        if rows >= state.tried {
            return Err(ModelError::Config(format!("{rows} rows cannot be taken back")));
        }
        state.nets().for_each(|net| net.take_back(rows));
        state.tried = 0;
        state.len -= rows;
        Ok(())
    }

    /// Has the delta nets' states take in what is on their tapes.
    pub(super) fn settle(&self, state: &mut State) -> Result<(), ModelError> {
        let Placed { run, buffers: b, .. } = &mut *self.placed.borrow_mut();
        for (layer, memory) in self.parts.net.layers.iter().zip(&mut state.layers) {
            let (Mixer::DeltaNet(net), LayerState::DeltaNet(memory)) = (&layer.mixer, memory) else { continue };
            let (shape, past) = (&net.shape, memory.past(&net.shape));
            if past.rows == 0 {
                continue;
            }
            let (tokens, stored, proj, mixed) = (0, past.rows, b.proj, b.mixed);
            let (taps, state) = (net.taps, memory.conv);
            run.run(&Conv { shape, tokens, proj, taps, past, stored, state, out: mixed }.into())?;
            let (decay, norm, state, out, y) = (net.decay, net.norm, memory.heads, b.out, b.y(0));
            run.run(&DeltaRule { shape, tokens, proj, mixed, decay, past, stored, state, norm, out, y }.into())?;
            memory.walked(None, 0);
        }
        state.tried = 0;
        Ok(())
    }
}
