//! A loaded model: forward passes, verifies, snapshots, and the methods that draft models use.

use super::{
    HiddenStates, HiddenTaps, KvPage, Logits, Model, ModelInfo, NextToken, PAGE, PassHooks, Rows, Snapshot,
    SnapshotSize,
    config::Config,
    decode_ahead,
    device_state::DeviceState,
    drafts::mtp::{HiddenRows, MtpPrediction, PassDevice},
    forward::{
        PassOutput,
        pass::{Chunk, SnapshotMarks},
    },
    hidden_taps::TapBuffers,
    model_parts::ModelParts,
    positions::RowPositions,
    state::{
        kv_pages::{PagePool, foreign_snapshot},
        pass_ahead::collect,
        rollback::{Commit, MAX_VERIFY_ROWS},
        sequence::{ArenaList, QwenState, kv_bytes_per_token, kv_shape},
    },
    vision::{Image, Vision},
};
use crate::{
    error::ModelError,
    plan::{ModelFootprint, Plan},
};
use moestro_base::platform::os::MemoryLevel;
use moestro_compute::{
    device::CpuDevice,
    experts::ExpertStore,
    ops::{Embedding, KvBits, Linear, ModelPart, TokenChoice},
};
use std::{sync::Arc, time::Instant};

/// A loaded model.
pub struct Qwen {
    pub(super) parts: ModelParts,
    pub(super) device: DeviceState,
}

impl Model for Qwen {
    type State = QwenState;

    fn info(&self) -> ModelInfo {
        let ModelParts { config, plan, footprint, .. } = &self.parts;
        ModelInfo {
            vocab: config.vocab,
            context: plan.context,
            chunk: plan.chunk,
            batch: self.batch(),
            exact_chunks: !self.device.limits.uses_half_precision,
            snapshot_size: SnapshotSize { state: footprint.state, page: self.device.pool.page_size() },
            pages: Some(self.device.pool.clone()),
            images: self.parts.vision.as_ref().map(|vision| vision.processor.clone()),
            threads: Some(self.parts.compute.threads.clone()),
        }
    }

    fn start(&mut self) -> Result<QwenState, ModelError> {
        let DeviceState { backend, free_arenas, pool, kv_shape, .. } = &mut self.device;
        Ok(QwenState::new(&self.parts.config, *kv_shape, pool, free_arenas, backend.as_mut())?)
    }

    /// Runs one pass for each chunk of `ids`, or a verify.
    fn forward_with(
        &mut self,
        state: &mut QwenState,
        ids: &[u32],
        rows: Rows,
        hooks: &mut PassHooks<'_>,
    ) -> Result<Logits, ModelError> {
        let wanted = match rows {
            Rows::None => 0,
            Rows::Last => ids.len().min(1),
            Rows::All => ids.len(),
            Rows::Verify => return self.verify_after(0, state, ids, hooks),
        };
        if let ([id], false) = (ids, hooks.is_prompt) {
            let device = &mut self.device;
            let has_next = rows == Rows::Last && hooks.next.is_some();
            if state.ahead.is_some() || has_next && decode_ahead::is_possible(&self.parts, device) {
                return decode_ahead::forward(&self.parts, device, &mut [(state, *id)], hooks.next.as_slice());
            }
        }
        self.parts.check_ids(state.len, ids)?;
        state.verified = 0;
        let device = &mut self.device;
        let mut logits = self.parts.new_logits(device, wanted);
        let mut marks = hooks.snapshot_at;
        let mut rest = ids.len();
        let mut unfilled = &mut logits[..];
        for ids_here in ids.chunks(device.buffers.rows) {
            let tokens = ids_here.len();
            let start = state.len;
            rest -= tokens;
            let wanted_here = wanted.saturating_sub(rest).min(tokens);
            let here: Vec<usize> = marks.iter().map(|mark| mark - start).take_while(|mark| *mark <= tokens).collect();
            marks = &marks[here.len()..];
            let positions = RowPositions::new(state.next, start, hooks.images);
            let image_rows = self.parts.image_rows(hooks.images, start..start + tokens, hooks.keep_going)?;
            // A GPU computes this chunk while the CPU reads for the next one, unless the CPU reads experts.
            let reads_ahead = device.limits.is_async && self.parts.store.as_ref().is_none_or(ExpertStore::is_resident);
            let following = if rest > 0 { &ids[ids.len() - rest..] } else { hooks.following };
            let following = if reads_ahead { &following[..following.len().min(device.buffers.rows)] } else { &[] };
            let chunk = Chunk {
                image_rows: &image_rows,
                following,
                logits: tokens - wanted_here..tokens,
                half: (hooks.is_prompt || ids.len() > 1) && device.limits.uses_half_precision,
                ..Chunk::new(ids_here, start, positions)
            };
            let marks_here = SnapshotMarks::new(here);
            let (logits_here, after) = unfilled.split_at_mut(chunk.logits.len() * self.parts.config.vocab);
            unfilled = after;
            let output = PassOutput::Logits(logits_here);
            let reached = self.parts.run_pass(device, &mut [state], chunk, hooks.keep_going, marks_here, output)?;
            for ((row, delta), rings) in reached.rows.iter().zip(reached.states).zip(reached.rings) {
                let fixed = [delta, rings].concat();
                let next = positions.next_after(*row);
                hooks.snapshots.push(state.snapshot(start + row, next, fixed, device.backend.as_mut())?);
            }
            state.len += tokens;
            state.next = positions.next_after(tokens);
        }
        Ok(self.parts.keep_logits(device, logits))
    }

    fn forward_each(&mut self, rows: &mut [(&mut QwenState, u32)], next: &[NextToken]) -> Result<Logits, ModelError> {
        if rows.len() > 1 && rows.windows(2).all(|pair| pair[0].0.shares_buffers(pair[1].0)) {
            return self.forward_sequences(rows, next);
        }
        // There are more sequences than arenas that share buffers.
        let mut data = Vec::new();
        for (state, id) in rows {
            data.extend_from_slice(&self.forward(state, &[*id], Rows::Last)?.data);
        }
        Ok(Logits { vocab: self.parts.config.vocab, data: data.into() })
    }

    fn snapshot(&mut self, state: &mut QwenState) -> Result<Snapshot, ModelError> {
        let parts = &self.parts;
        self.device.between_passes(|device| {
            parts.replay(device, state)?;
            let fixed = state.fixed_bytes(device.backend.as_mut())?;
            state.snapshot(state.len, state.next, fixed, device.backend.as_mut()).map_err(ModelError::from)
        })
    }

    fn restore(&mut self, snapshot: &Snapshot, reuse: Option<QwenState>) -> Result<QwenState, ModelError> {
        if snapshot.len > self.parts.plan.context {
            return Err(ModelError::ContextFull { context: self.parts.plan.context });
        }
        let config = &self.parts.config;
        self.device.between_passes(|DeviceState { backend, free_arenas, pool, kv_shape, .. }| {
            let mut state = match reuse {
                Some(state) => state,
                None => QwenState::uninitialised(config, *kv_shape, pool, free_arenas, backend.as_mut())?,
            };
            state.restore(snapshot, backend.as_mut())?;
            Ok::<_, ModelError>(state)
        })
    }

    fn read_page(&mut self, page: &KvPage) -> Result<Vec<u8>, ModelError> {
        match page {
            KvPage::Copied(bytes) => Ok(bytes.clone()),
            KvPage::Pooled(page) => {
                let index = page.index_in(&self.device.pool).ok_or_else(foreign_snapshot)?;
                self.device.between_passes(|DeviceState { backend, pool, .. }| pool.read(index, PAGE, backend.as_mut()))
            }
        }
    }

    fn make_page(&mut self, bytes: Vec<u8>) -> Result<Arc<KvPage>, ModelError> {
        self.device.between_passes(|DeviceState { backend, pool, .. }| pool.take_filled(&bytes, backend.as_mut()))
    }

    fn fit_memory(&mut self) {
        let is_short = match (&self.parts.store, &self.parts.vision) {
            (Some(store), _) => store.adapt_to_memory(&mut self.device.placed_slots()),
            (None, Some(vision)) => vision.memory_is_short(),
            (None, None) => false,
        };
        if is_short {
            self.release_images();
        }
    }

    fn recover(&mut self) -> Result<bool, ModelError> {
        self.leave_lost_device()
    }
}

impl HiddenStates for Qwen {
    fn set_taps(&mut self, taps: &HiddenTaps) -> Result<(), ModelError> {
        let device = &mut self.device;
        device.taps = TapBuffers::new(taps, &self.parts.config, device.buffers.rows, device.backend.as_mut())?;
        Ok(())
    }

    fn enable_taps(&mut self, on: bool) {
        self.device.taps.disabled = !on;
    }

    fn tapped_rows(&mut self, rows: usize, out: &mut Vec<f32>) -> Result<(), ModelError> {
        let DeviceState { backend, buffers, taps, .. } = &mut self.device;
        Ok(taps.read(rows, buffers.residual(), self.parts.config.residual_width(), backend.as_mut(), out)?)
    }
}

impl Qwen {
    pub fn config(&self) -> &Config {
        &self.parts.config
    }

    pub fn plan(&self) -> &Plan {
        &self.parts.plan
    }

    pub fn footprint(&self) -> &ModelFootprint {
        &self.parts.footprint
    }

    /// The store of the routed experts. A dense model has none.
    pub fn store(&self) -> Option<&ExpertStore> {
        self.parts.store.as_ref()
    }

    /// Releases or restores expert slots for this memory level. Returns true if slots were released.
    pub fn adapt_to_level(&mut self, level: MemoryLevel, now: Instant) -> bool {
        let Some(store) = &self.parts.store else { return false };
        store.adapt_to_level(level, now, &mut self.device.placed_slots())
    }

    pub fn is_on_gpu(&self) -> bool {
        self.device.limits.is_async
    }

    /// The CPU threads, for a draft model that runs while the model is idle.
    pub fn compute(&self) -> CpuDevice {
        self.parts.compute.clone()
    }

    /// Number of bytes of the keys and values of one token in all layers.
    pub fn kv_bytes(&self) -> u64 {
        kv_bytes_per_token(&self.parts.config, self.device.kv_shape.format)
    }

    /// Sets the number of bits of keys and values for new sequences. Older sequences can only continue after the old
    /// value is set again. Does not change the memory plan.
    ///
    /// # Errors
    /// The device does not support the format.
    pub fn set_kv_bits(&mut self, bits: KvBits) -> Result<(), ModelError> {
        let ModelParts { config, plan, .. } = &self.parts;
        let device = &mut self.device;
        let shape = kv_shape(config, &device.limits, bits, device.kv_shape.context, device.buffers.rows);
        device.backend.accept(ModelPart::Attention(&shape))?;
        if shape != device.kv_shape {
            let known = device.other_pools.iter().find(|(of, _)| *of == shape).map(|(_, pool)| pool.clone());
            let pool = known.map_or_else(|| PagePool::new(config, &shape, plan, device.backend.as_mut()), Ok)?;
            let before = std::mem::replace(&mut device.pool, pool);
            if device.other_pools.iter().all(|(of, _)| *of != device.kv_shape) {
                device.other_pools.push((device.kv_shape, before));
            }
            device.free_arenas = ArenaList::new(plan.parallel);
            device.kv_shape = shape;
        }
        Ok(())
    }

    /// Appends `ids` to the sequence.
    pub fn forward(&mut self, state: &mut QwenState, ids: &[u32], rows: Rows) -> Result<Logits, ModelError> {
        self.forward_with(state, ids, rows, &mut PassHooks::default())
    }

    /// [`Model::forward_with`] with [`Rows::Verify`].
    pub fn verify(&mut self, state: &mut QwenState, ids: &[u32]) -> Result<Logits, ModelError> {
        self.verify_after(0, state, ids, &mut PassHooks::default())
    }

    /// Adds more rows to the verify of the last call. [`SequenceState::reject`](super::SequenceState::reject) then
    /// applies to the rows of both calls.
    pub fn verify_on(&mut self, state: &mut QwenState, ids: &[u32]) -> Result<Logits, ModelError> {
        if state.verified == 0 {
            return Err(ModelError::Config("there is no verify to continue".into()));
        }
        self.verify_after(state.verified, state, ids, &mut PassHooks::default())
    }

    /// Computes the rows of an image, unless they are cached.
    ///
    /// # Errors
    /// The model has no vision tower, or its weights cannot be read.
    pub fn encode_image(&self, image: &Image) -> Result<Arc<Vec<f32>>, ModelError> {
        self.parts.vision()?.rows(image, None)
    }

    /// Frees the cached rows of images that no prompt has begun, and weights of the vision tower on a GPU.
    pub fn release_images(&self) {
        self.parts.vision.iter().for_each(Vision::release);
    }

    /// Returns the embedding rows `[ids, hidden]` of a few tokens, for a draft model. Overwrites the hidden rows of the
    /// last pass.
    pub fn embedding(&mut self, ids: &[u32]) -> Result<Vec<f32>, ModelError> {
        self.parts.check_ids(0, ids)?;
        let mut rows = vec![0.0; ids.len() * self.parts.config.hidden];
        check_draft_rows(ids.len(), self.device.buffers.rows)?;
        self.device.between_passes(|DeviceState { backend, buffers, .. }| {
            backend.write_words(buffers.ids, ids)?;
            let table = &self.parts.net.embed;
            backend.execute(&Embedding { table, tokens: ids.len(), ids: buffers.ids, into: buffers.h }.into())?;
            backend.read_floats(buffers.h, &mut rows)
        })?;
        Ok(rows)
    }

    /// Returns the output head's logits `[rows, vocab]` of a few normalised rows `[rows, hidden]`, for a draft model.
    /// Overwrites the hidden rows of the last pass.
    pub fn head_logits(&mut self, rows: &[f32]) -> Result<Vec<f32>, ModelError> {
        let hidden = self.parts.config.hidden;
        let vocab = self.parts.config.vocab;
        let tokens = rows.len() / hidden;
        let mut logits = vec![0.0; tokens * vocab];
        check_draft_rows(tokens, self.device.buffers.rows)?;
        self.device.between_passes(|DeviceState { backend, buffers, .. }| {
            backend.write(buffers.normed.floats(rows.len()), bytemuck::cast_slice(rows))?;
            let matrices = std::slice::from_ref(self.parts.net.head());
            let x = buffers.normed;
            backend.execute(&Linear { x, tokens, norm: None, matrices, y: buffers.logits, add: false }.into())?;
            backend.read_floats(buffers.logits, &mut logits)
        })?;
        Ok(logits)
    }

    /// Capacity of the MTP head's cache in positions. `None` without an MTP head.
    pub fn mtp_capacity(&self) -> Option<usize> {
        self.device.mtp.as_ref().map(|mtp| mtp.positions)
    }

    /// Runs the MTP head on `ids` and predicts the token after the last of `ids`. The head's cache keeps the positions
    /// before `at`. Later positions are replaced. `hidden` has the hidden row before each of `ids`.
    pub fn mtp(&mut self, at: usize, ids: &[u32], hidden: HiddenRows<'_>) -> Result<MtpPrediction, ModelError> {
        let Some(head) = &self.parts.mtp else { return Err(ModelError::Config("the model has no MTP head".into())) };
        let DeviceState { backend, limits, buffers, scratch, mtp, ahead, .. } = &mut self.device;
        let Some(state) = mtp else { return Err(ModelError::Config("the MTP head is not on the device".into())) };
        collect(ahead, backend.as_mut());
        let backend = backend.as_mut();
        head.predict(at, ids, hidden, state, PassDevice { backend, limits: *limits, buffers, scratch })
    }

    /// Maximum number of sequences that one pass computes together.
    fn batch(&self) -> usize {
        MAX_VERIFY_ROWS.min(self.device.buffers.block).max(1)
    }

    /// Runs one pass with one row of each sequence. The sequences share buffers.
    fn forward_sequences(
        &mut self,
        rows: &mut [(&mut QwenState, u32)],
        next: &[NextToken],
    ) -> Result<Logits, ModelError> {
        let count = rows.len();
        if count > self.batch() {
            return Err(ModelError::Config(format!("one pass cannot compute {count} sequences")));
        }
        let device = &mut self.device;
        let is_ahead = rows.iter().any(|(state, _)| state.ahead.is_some());
        if is_ahead || !next.is_empty() && decode_ahead::is_possible(&self.parts, device) {
            return decode_ahead::forward(&self.parts, device, rows, next);
        }
        let mut logits = self.parts.new_logits(device, count);
        decode_ahead::run_rows(&self.parts, device, rows, (None, false), PassOutput::Logits(&mut logits))?;
        Ok(self.parts.keep_logits(device, logits))
    }

    /// Runs a verify after `before` rows of the last one.
    fn verify_after(
        &mut self,
        before: usize,
        state: &mut QwenState,
        ids: &[u32],
        hooks: &mut PassHooks<'_>,
    ) -> Result<Logits, ModelError> {
        self.parts.check_ids(state.len, ids)?;
        let config = &self.parts.config;
        let device = &mut self.device;
        let rows = ids.len();
        if rows == 0 || before + rows > MAX_VERIFY_ROWS || rows > device.buffers.rows {
            return Err(ModelError::Config(format!("a verify has 1 to {MAX_VERIFY_ROWS} rows, not {rows}")));
        }
        for delta in state.delta_states() {
            delta.ensure_replay_buffer(&config.delta, device.backend.as_mut())?;
        }
        let chunk = Chunk {
            logits: 0..rows,
            size: self.parts.pass_size(rows),
            commit: Commit::verify_after(before),
            ..Chunk::new(ids, state.len, RowPositions::new(state.next, state.len, &[]))
        };
        let choices = [(0, TokenChoice::LIKELIEST); MAX_VERIFY_ROWS];
        let has_scratch = |usable: &usize| device.buffers.sample_scratch(&choices[..rows], *usable).is_some();
        let usable = hooks.likeliest_below.map(|usable| usable.min(config.vocab));
        let usable = usable.filter(|usable| device.limits.is_async && has_scratch(usable));
        let mut logits = self.parts.new_logits(device, if usable.is_some() { 0 } else { rows });
        hooks.likeliest = vec![0; if usable.is_some() { rows } else { 0 }];
        let output = match usable {
            Some(usable) => PassOutput::Likeliest { usable, ids: &mut hooks.likeliest },
            None => PassOutput::Logits(&mut logits),
        };
        // If the verify fails, its rows cannot be rejected.
        state.verified = 0;
        self.parts.run_pass(device, &mut [state], chunk, None, SnapshotMarks::default(), output)?;
        state.verified = before + rows;
        state.len += rows;
        state.next += rows;
        Ok(self.parts.keep_logits(device, logits))
    }
}

fn check_draft_rows(rows: usize, capacity: usize) -> Result<(), ModelError> {
    let max = MAX_VERIFY_ROWS.min(capacity);
    if rows <= max { Ok(()) } else { Err(ModelError::Config(format!("a draft has at most {max} rows, not {rows}"))) }
}
