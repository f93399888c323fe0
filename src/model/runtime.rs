//! The model as the engine sees it: sequences that start, grow, are kept, and go on from what was kept.

use crate::{
    device::{CpuDevice, DeviceError},
    error::ModelError,
    experts::{ExpertStore, PassKind},
    model::{
        HiddenStates, HiddenTaps, Logits, Model, ModelInfo, PassHooks, Qwen, QwenState, Rows, Snapshot, SnapshotSize,
        device_state::DeviceState,
        drafts::hidden_taps::Tapped,
        forward::Batch,
        load::ModelParts,
        state::{rollback::ROWS, sequence::LayerState},
        weights::Mixer,
    },
    ops::{Conv, DeltaRule, Embedding, Linear},
};

impl Model for Qwen {
    type State = QwenState;

    fn info(&self) -> ModelInfo {
        let ModelParts { config, plan, shape, .. } = &self.parts;
        ModelInfo {
            vocab: config.vocab,
            context: plan.context,
            chunk: plan.chunk,
            snapshot_size: SnapshotSize { state: shape.state, position: shape.kv_per_token },
            pages: Some(self.device_state.borrow().pool.clone()),
        }
    }

    fn start(&self) -> Result<QwenState, ModelError> {
        let DeviceState { run, arenas, pool, heads, .. } = &mut *self.device_state.borrow_mut();
        Ok(QwenState::new(&self.parts.config, *heads, pool, arenas, &mut **run)?)
    }

    fn forward_with(
        &mut self,
        state: &mut QwenState,
        ids: &[u32],
        rows: Rows,
        hooks: &mut PassHooks<'_>,
    ) -> Result<Logits, ModelError> {
        self.pass(state, ids, rows, hooks)
    }

    fn verify(&mut self, state: &mut QwenState, ids: &[u32]) -> Result<Logits, ModelError> {
        self.try_rows(state, ids)
    }

    fn snapshot(&self, state: &mut QwenState) -> Result<Snapshot, ModelError> {
        let shared = self.device_state.borrow().shared.clone();
        let _whole = shared.whole();
        self.settle(state)?;
        let run = &mut *self.device_state.borrow_mut().run;
        let fixed = state.fixed(run)?;
        Ok(state.snapshot(state.len, fixed, run)?)
    }

    fn restore(&self, snapshot: &Snapshot, into: Option<QwenState>) -> Result<QwenState, ModelError> {
        if snapshot.len > self.parts.plan.context {
            return Err(ModelError::ContextFull { context: self.parts.plan.context });
        }
        let DeviceState { run, arenas, pool, heads, .. } = &mut *self.device_state.borrow_mut();
        let mut state = match into {
            Some(state) => state,
            None => QwenState::room(&self.parts.config, *heads, pool, arenas, &mut **run)?,
        };
        state.restore(snapshot, &mut **run)?;
        Ok(state)
    }

    fn fit_memory(&mut self) {
        if let Some(store) = &self.parts.store {
            store.adapt_to_memory(&mut *self.device_state.get_mut().run);
        }
    }

    fn recover(&mut self) -> Result<bool, ModelError> {
        self.leave_lost_device()
    }
}

impl HiddenStates for Qwen {
    fn set_taps(&mut self, taps: &HiddenTaps) -> Result<(), ModelError> {
        self.choose_taps(taps)
    }

    fn enable_taps(&mut self, on: bool) {
        self.device_state.get_mut().tapped.off = !on;
    }

    fn tapped_rows(&mut self, rows: usize, out: &mut Vec<f32>) -> Result<(), ModelError> {
        self.read_taps(rows, out)
    }
}

impl Qwen {
    /// Appends `ids` to the sequence.
    pub fn forward(&mut self, state: &mut QwenState, ids: &[u32], rows: Rows) -> Result<Logits, ModelError> {
        self.pass(state, ids, rows, &mut PassHooks::default())
    }

    /// See [`Model::verify`](crate::model::Model::verify).
    pub(in crate::model) fn try_rows(&self, state: &mut QwenState, ids: &[u32]) -> Result<Logits, ModelError> {
        self.try_rows_behind(0, state, ids)
    }

    /// Further rows of the verify that the last call was: all of them can be taken back together.
    pub fn verify_on(&self, state: &mut QwenState, ids: &[u32]) -> Result<Logits, ModelError> {
        if state.tried == 0 {
            return Err(ModelError::Config("no verify goes on".into()));
        }
        self.try_rows_behind(state.tried, state, ids)
    }

    fn try_rows_behind(&self, before: usize, state: &mut QwenState, ids: &[u32]) -> Result<Logits, ModelError> {
        self.admit(state.len, ids)?;
        let config = &self.parts.config;
        let mut device_state = self.device_state.borrow_mut();
        if ids.is_empty() || before + ids.len() > ROWS || ids.len() > device_state.buffers.rows {
            return Err(ModelError::Config(format!("a verify has 1 to {ROWS} rows, not {}", ids.len())));
        }
        let (rows, shape) = (ids.len(), config.delta);
        state.nets().try_for_each(|net| net.tape(&shape, &mut *device_state.run))?;
        let mut logits = Logits { vocab: config.vocab, data: Vec::new() };
        // Every expert stays in its slot until its layer is done, if there are slots enough for all rows to differ.
        let slots = self.store().map_or(0, ExpertStore::slots);
        let phase = if rows * config.experts_per_token() <= slots { PassKind::Decode } else { PassKind::Prefill };
        let batch = Batch { ids, logits: 0..rows, phase, prompt: false, trial: Some(before), go_on: &|| true };
        // After a pass that fails there is nothing to go back to.
        state.tried = 0;
        self.chunk(&mut device_state, state, batch, (&[], &mut |_, _, _| Ok(())), None, &mut logits.data)?;
        state.tried = before + rows;
        state.len += rows;
        Ok(logits)
    }

    /// Has the delta nets' states take in what is on their tapes.
    pub(in crate::model) fn settle(&self, state: &mut QwenState) -> Result<(), ModelError> {
        let DeviceState { run, buffers: b, .. } = &mut *self.device_state.borrow_mut();
        for (layer, memory) in self.parts.net.layers.iter().zip(&mut state.layers) {
            let (Mixer::DeltaNet(net), LayerState::DeltaNet(memory)) = (&layer.mixer, memory) else { continue };
            let (shape, past) = (&net.shape, memory.past(&net.shape));
            if past.rows == 0 {
                continue;
            }
            let (tokens, stored, proj, mixed) = (0, past.rows, b.proj, b.mixed);
            let (taps, state) = (net.taps, memory.conv);
            run.execute(&Conv { shape, tokens, proj, weight: taps, past, stored, state, out: mixed }.into())?;
            let (decay, norm, state, out, y) = (net.decay, net.norm, memory.heads, b.out, b.y(0));
            run.execute(&DeltaRule { shape, tokens, proj, mixed, decay, past, stored, state, norm, out, y }.into())?;
            memory.walked(None, 0);
        }
        state.tried = 0;
        Ok(())
    }

    /// See [`HiddenStates::set_taps`](crate::model::HiddenStates::set_taps).
    pub(in crate::model) fn choose_taps(&self, taps: &HiddenTaps) -> Result<(), ModelError> {
        let config = &self.parts.config;
        if let Some(layer) = taps.layers.iter().find(|layer| **layer >= config.layers) {
            return Err(ModelError::Config(format!("the draft follows layer {layer} of {}", config.layers)));
        }
        let device_state = &mut *self.device_state.borrow_mut();
        let rows = taps.rows.min(device_state.buffers.rows);
        let layers = taps.layers.iter().map(|&layer| {
            let last = layer + 1 == config.layers;
            let room = if last { None } else { Some(device_state.run.allocate(rows * config.hidden * 4)?) };
            Ok((layer, room))
        });
        let layers = layers.collect::<Result<_, DeviceError>>()?;
        device_state.tapped = Tapped { layers, rows, pass: 0, off: false };
        Ok(())
    }

    /// See [`HiddenStates::tapped_rows`].
    pub(in crate::model) fn read_taps(&self, rows: usize, into: &mut Vec<f32>) -> Result<(), ModelError> {
        let hidden = self.parts.config.hidden;
        let DeviceState { run, buffers, tapped, .. } = &mut *self.device_state.borrow_mut();
        let first = tapped.pass - tapped.pass.min(tapped.rows);
        let (kept, sides) = (rows.min(tapped.pass).saturating_sub(first), tapped.layers.len());
        into.clear();
        into.resize(kept * sides * hidden, 0.0);
        let mut column = vec![0.0; if sides == 1 { 0 } else { kept * hidden }];
        for (side, (_, room)) in tapped.layers.iter().enumerate() {
            let from = room.unwrap_or_else(|| buffers.h.rows(first, kept, hidden));
            if sides == 1 {
                run.read_floats(from, into)?;
                continue;
            }
            run.read_floats(from, &mut column)?;
            for (row, values) in column.chunks_exact(hidden).enumerate() {
                into[(row * sides + side) * hidden..][..hidden].copy_from_slice(values);
            }
        }
        Ok(())
    }

    /// The embedding's rows `[ids, hidden]` of a few tokens.
    pub fn embedding(&self, ids: &[u32]) -> Result<Vec<f32>, ModelError> {
        self.admit(0, ids)?;
        let hidden = self.parts.config.hidden;
        let DeviceState { run, buffers: b, .. } = &mut *self.device_state.borrow_mut();
        few(ids.len(), b.rows)?;
        run.write_words(b.ids, ids)?;
        run.execute(&Embedding { table: &self.parts.net.embed, tokens: ids.len(), ids: b.ids, into: b.h }.into())?;
        let mut rows = vec![0.0; ids.len() * hidden];
        run.read_floats(b.h, &mut rows)?;
        Ok(rows)
    }

    /// The head's logits of a few rows `[rows, hidden]` that are normed already.
    pub fn score(&self, rows: &[f32]) -> Result<Logits, ModelError> {
        let (hidden, vocab) = (self.parts.config.hidden, self.parts.config.vocab);
        let tokens = rows.len() / hidden;
        let DeviceState { run, buffers: b, .. } = &mut *self.device_state.borrow_mut();
        few(tokens, b.rows)?;
        run.write(b.normed.floats(rows.len()), bytemuck::cast_slice(rows))?;
        let matrices = std::slice::from_ref(self.parts.net.head());
        run.execute(&Linear { x: b.normed, tokens, norm: None, matrices, y: b.logits, add: false }.into())?;
        let mut data = vec![0.0; tokens * vocab];
        run.read_floats(b.logits, &mut data)?;
        Ok(Logits { vocab, data })
    }

    /// The threads that compute for the model when it does not.
    pub fn compute(&self) -> CpuDevice {
        self.parts.compute.clone()
    }
}

fn few(rows: usize, room: usize) -> Result<(), ModelError> {
    let most = ROWS.min(room);
    if rows <= most { Ok(()) } else { Err(ModelError::Config(format!("a draft has {rows} rows; there may be {most}"))) }
}
