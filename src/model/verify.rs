//! A verify that can be taken back: a few rows of which the last may turn out never to have been.
//!
//! Keys and values go back by their length. A delta net's state cannot be rewound, so before the rows are walked the state is
//! copied, and what they were projected to is kept; taking rows back walks those that stay once more, from the copy: no weight
//! is read, nothing else is computed.

use super::{
    Logits, Qwen,
    config::Config,
    forward::Batch,
    net::Mixer,
    placed::Placed,
    state::{LayerState, State},
};
use crate::{
    device::{DeviceError, Region},
    error::ModelError,
    experts::{Experts, Phase},
    ops::{Conv, DeltaRule, Run},
};

/// Rows of a verify at most: as many as the kernels of decoding take.
pub const ROWS: usize = 16;

/// A delta net before the last verify.
#[derive(Debug, Clone, Copy)]
struct Before {
    conv: Region,
    heads: Region,
    /// `[ROWS, width]`: what its rows were projected to.
    proj: Region,
}

/// The delta nets before the last verify, to take rows back.
#[derive(Debug, Default)]
pub(super) struct Undo {
    layers: Vec<Before>,
    /// Rows of the last verify.
    rows: usize,
    /// Delta nets whose state was kept before its first row: all of them, unless the pass failed.
    kept: usize,
}

/// Bytes of an [`Undo`].
pub(super) fn cost(config: &Config) -> u64 {
    let nets = config.layers - config.full_layers();
    let proj = if nets > 0 { ROWS * config.delta_heads().width() * 4 } else { 0 };
    State::fixed_bytes(config) + (nets * proj) as u64
}

impl Undo {
    pub fn new(config: &Config, run: &mut dyn Run) -> Result<Self, DeviceError> {
        let d = &config.delta;
        let nets = config.full.iter().filter(|full| !**full);
        let layers = nets.map(|_| {
            Ok(Before {
                conv: run.allocate((d.taps - 1) * d.mixed() * 4)?,
                heads: run.allocate(d.values() * d.key_dim * 4)?,
                proj: run.allocate(ROWS * config.delta_heads().width() * 4)?,
            })
        });
        Ok(Self { layers: layers.collect::<Result<_, DeviceError>>()?, rows: 0, kept: 0 })
    }
}

impl Qwen {
    /// See [`Model::verify`](super::Model::verify).
    pub(super) fn try_rows(&self, state: &mut State, ids: &[u32]) -> Result<Logits, ModelError> {
        self.try_rows_behind(0, state, ids, false)
    }

    /// Further rows of the verify that the last call was: all of them can be taken back together.
    pub fn verify_on(&self, state: &mut State, ids: &[u32]) -> Result<Logits, ModelError> {
        let before = self.placed.borrow().undo.as_ref().map_or(0, |undo| undo.rows);
        if before == 0 {
            return Err(ModelError::Config("no verify goes on".into()));
        }
        self.try_rows_behind(before, state, ids, false)
    }

    /// The logits behind `id` as far as the experts that are in memory can tell: those that are not are done without, nothing
    /// is read. A draft goes on token by token; before anything else, [`Qwen::end_draft`] takes all of it back.
    ///
    /// # Errors
    /// [`ModelError::NonePresent`] where a layer has no expert in memory: the draft can only be ended.
    pub fn draft(&self, state: &mut State, id: u32) -> Result<Logits, ModelError> {
        let first = *state.drafting.get_or_insert_with(|| {
            // Nothing is kept yet.
            self.placed.borrow_mut().undo.iter_mut().for_each(|undo| undo.kept = 0);
            state.len
        });
        self.try_rows_behind(state.len - first, state, &[id], true)
    }

    /// Takes a draft back, also one whose last pass has failed.
    pub fn end_draft(&self, state: &mut State) -> Result<(), ModelError> {
        let Some(first) = state.drafting else { return Ok(()) };
        let Placed { run, undo, .. } = &mut *self.placed.borrow_mut();
        if let Some(undo) = undo {
            let nets = state.layers.iter().filter_map(|layer| match layer {
                LayerState::DeltaNet { conv, heads } => Some([*conv, *heads]),
                LayerState::Attention(_) => None,
            });
            for (before, [conv, heads]) in undo.layers[..undo.kept].iter().zip(nets) {
                run.copy(before.conv, conv)?;
                run.copy(before.heads, heads)?;
            }
            undo.rows = 0;
        }
        (state.len, state.drafting) = (first, None);
        Ok(())
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
        let mut undo = match placed.undo.take() {
            Some(undo) => undo,
            None => Undo::new(config, &mut *placed.run)?,
        };
        let (proj, rows) = (placed.buffers.proj, ids.len());
        let width = config.delta_heads().width();
        let (mut layers, mut nets) = (undo.layers.iter(), if before == 0 { 0 } else { undo.kept });
        // The mark before the first row of each delta net: its rows are projected, and its state is still the old one.
        let mut mark = |run: &mut dyn Run, _: usize, [conv, heads]: [Region; 2]| {
            let Some(kept) = layers.next() else { return Ok(()) };
            if before == 0 {
                run.copy(conv, kept.conv)?;
                run.copy(heads, kept.heads)?;
                nets += 1;
            }
            Ok(run.copy(proj.floats(rows * width), kept.proj.rows(before, rows, width))?)
        };
        let mut logits = Logits { vocab: config.vocab, data: Vec::new() };
        // Every expert stays in its slot until its layer is done, if there are slots enough for all rows to differ.
        let slots = self.store().map_or(0, Experts::slots);
        let phase = if rows * config.experts_per_token() <= slots { Phase::Decode } else { Phase::Prefill };
        let batch = Batch { ids, logits: 0..rows, phase, present };
        let done = self.chunk(&mut placed, state, batch, (&[0], &mut mark), None, &mut logits.data);
        // After a pass that fails there is nothing to go back to; its memory serves the next one.
        undo.rows = if done.is_ok() { before + rows } else { 0 };
        undo.kept = nets;
        placed.undo = Some(undo);
        done?;
        state.len += rows;
        Ok(logits)
    }

    /// See [`Model::take_back`](super::Model::take_back).
    pub(super) fn forget(&self, state: &mut State, rows: usize) -> Result<(), ModelError> {
        let placed = &mut *self.placed.borrow_mut();
        let Placed { run, buffers, undo, .. } = placed;
        let kept = undo.as_ref().and_then(|undo| undo.rows.checked_sub(rows)).filter(|kept| *kept > 0);
        let (Some(undo), Some(kept)) = (undo, kept) else {
            return Err(ModelError::Config(format!("{rows} rows cannot be taken back")));
        };
        let mut layers = undo.layers.iter();
        for (layer, memory) in self.parts.net.layers.iter().zip(&state.layers) {
            let (Mixer::DeltaNet(net), LayerState::DeltaNet { conv, heads }) = (&layer.mixer, memory) else { continue };
            let Some(before) = layers.next() else { continue };
            run.copy(before.conv, *conv)?;
            run.copy(before.heads, *heads)?;
            let (shape, proj) = (&net.shape, before.proj.floats(kept * net.shape.width()));
            let mixed = buffers.mixed.floats(kept * shape.channels());
            run.run(&Conv { shape, tokens: kept, proj, taps: net.taps, state: *conv, out: mixed }.into())?;
            let [out, y] = [buffers.out, buffers.y].map(|region| region.floats(kept * shape.values()));
            let (decay, norm, state) = (net.decay, net.norm, *heads);
            run.run(&DeltaRule { shape, tokens: kept, proj, mixed, decay, state, norm, out, y }.into())?;
        }
        undo.rows = 0;
        state.len -= rows;
        Ok(())
    }
}
