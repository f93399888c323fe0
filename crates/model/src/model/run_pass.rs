//! Runs one pass of a model on a device.

use super::{
    Logits,
    device_state::DeviceState,
    forward::{
        self, PassOutput,
        pass::{Chunk, ImageRows, LayerHooks, Pass, SnapshotMarks},
    },
    model_parts::ModelParts,
    ngram_table::{NgramInput, NgramTable},
    state::{
        pass_ahead::collect,
        rollback::MAX_VERIFY_ROWS,
        row_ring::RowRing,
        sequence::{LayerState, QwenState},
    },
    vision::{PlacedImage, Vision},
    weights::Mixer,
};
use crate::error::ModelError;
use moestro_compute::experts::{ExpertStore, PassSize};
use std::{ops::Range, sync::Arc};

/// The states of all layers of several sequences that share buffers.
fn states_together(sequences: &[&mut QwenState]) -> Vec<LayerState> {
    // The buffers up to the state of the last sequence.
    let last = sequences.iter().max_by_key(|sequence| sequence.number);
    last.map_or_else(Vec::new, |last| last.layers.iter().map(|layer| layer.up_to(last.number)).collect())
}

/// For each n-gram table, the inputs of its convolution: of one sequence, or of several that share buffers.
fn ngram_histories(sequences: &[&mut QwenState]) -> Vec<RowRing> {
    match sequences {
        [one] => one.rings.ngrams.clone(),
        several => {
            let last = several.iter().max_by_key(|sequence| sequence.number);
            last.map_or_else(Vec::new, |last| last.rings.ngrams_up_to(last.number))
        }
    }
}

/// The last `count` tokens, or fewer if there are not as many.
fn last_of(ids: &[u32], count: usize) -> &[u32] {
    &ids[ids.len().saturating_sub(count)..]
}

impl ModelParts {
    /// Fails if one of `ids` is not a token, or if the context has no room for `ids` after `len` other tokens.
    pub fn check_ids(&self, len: usize, ids: &[u32]) -> Result<(), ModelError> {
        let vocab = self.config.vocab;
        let context = self.plan.context;
        if len + ids.len() > context {
            return Err(ModelError::ContextFull { context });
        }
        match ids.iter().find(|id| **id as usize >= vocab) {
            Some(&id) => Err(ModelError::TokenOutOfRange { id, vocab }),
            None => Ok(()),
        }
    }

    /// Memory for the logits of `rows` rows, for a pass to fill.
    pub fn new_logits(&self, device: &mut DeviceState, rows: usize) -> Vec<f32> {
        let last = if rows > 0 { std::mem::take(&mut device.last_logits) } else { Arc::default() };
        let mut data = Arc::into_inner(last).unwrap_or_default();
        data.resize(rows * self.config.vocab, 0.0);
        data
    }

    /// The logits that a pass has filled. Keeps the memory of a few rows for the next pass.
    pub fn keep_logits(&self, device: &mut DeviceState, data: Vec<f32>) -> Logits {
        let logits = Logits { vocab: self.config.vocab, data: data.into() };
        if (1..=MAX_VERIFY_ROWS).contains(&logits.rows()) {
            device.last_logits = logits.data.clone();
        }
        logits
    }

    pub fn vision(&self) -> Result<&Vision, ModelError> {
        self.vision.as_ref().ok_or_else(|| ModelError::Config("the model has no vision tower".into()))
    }

    /// The rows of `images` for these tokens of a sequence.
    pub fn image_rows(
        &self,
        images: &[PlacedImage],
        tokens: Range<usize>,
        keep_going: Option<&dyn Fn() -> bool>,
    ) -> Result<Vec<ImageRows>, ModelError> {
        let here = images.iter().filter_map(|placed| {
            let image = placed.tokens();
            let from = image.start.max(tokens.start);
            let to = image.end.min(tokens.end);
            // An image after these tokens has no part here.
            (from < to)
                .then(|| (&placed.image, from - tokens.start, from - image.start..to - image.start, to == image.end))
        });
        here.map(|(image, row, tokens, is_finished)| {
            let vision = self.vision()?;
            let values = vision.rows(image, keep_going)?;
            vision.set_finished(image, is_finished);
            Ok(ImageRows { row, values, tokens })
        })
        .collect()
    }

    /// The size of a pass that decodes a few rows. If there are enough slots for the experts of all rows, each expert
    /// stays in its slot until its layer is computed.
    pub fn pass_size(&self, rows: usize) -> PassSize {
        let slots = self.store.as_ref().map_or(0, ExpertStore::slots);
        if rows * self.config.experts_per_token() <= slots { PassSize::Small } else { PassSize::Large }
    }

    /// Adds the rows in the replay buffers, from an earlier verify, to the states of the delta nets.
    pub fn replay(&self, device: &mut DeviceState, state: &mut QwenState) -> Result<(), ModelError> {
        for (layer, layer_state) in self.net.layers.iter().zip(&mut state.layers) {
            if let (Mixer::DeltaNet(delta_net), LayerState::DeltaNet(delta)) = (&layer.mixer, layer_state) {
                delta_net.replay(delta, &device.buffers, device.backend.as_mut())?;
            }
        }
        state.verified = 0;
        Ok(())
    }

    /// Runs one pass and fills `output`. Returns the snapshot marks with the states recorded at these marks. Several
    /// `states` must share buffers and have no rows to replay.
    pub fn run_pass<'a>(
        &'a self,
        device: &'a mut DeviceState,
        states: &mut [&mut QwenState],
        chunk: Chunk<'a>,
        keep_going: Option<&'a dyn Fn() -> bool>,
        marks: SnapshotMarks,
        output: PassOutput<'_>,
    ) -> Result<SnapshotMarks, ModelError> {
        if states.iter().any(|state| state.ahead.is_some()) {
            return Err(ModelError::Config("the sequence already contains the token that follows".into()));
        }
        if chunk.table_row.is_none() {
            collect(&mut device.ahead, device.backend.as_mut());
        }
        let rows_of_each = chunk.ids.len() / states.len().max(1);
        states.iter_mut().try_for_each(|state| state.reserve_pages(rows_of_each, device.backend.as_mut()))?;
        let DeviceState { backend, limits, slots, buffers, kv_shape, scratch, taps, .. } = device;
        let ModelParts { config, net, store, tables, .. } = self;
        let buffers = &chunk.table_row.map_or(*buffers, |first| buffers.at_rows(first, chunk.ids.len(), config));
        // The rows of n-gram tables depend on tokens only, so they are read while the first layers compute.
        let request_rows = |(table, history): (&'a NgramTable, RowRing)| {
            let count = table.layout().shape.size - 1;
            let each = states.iter().zip(chunk.by_sequence());
            let rows: Vec<_> = each.map(|(state, (start, ids))| [state.tokens.before(start, count), ids]).collect();
            let before_following = match rows[..] {
                [[before, ids]] if !chunk.following.is_empty() => last_of(&[before, ids].concat(), count).to_vec(),
                _ => Vec::new(),
            };
            NgramInput { table, pending: Some(table.request(&rows)), history, before_following }
        };
        let ngrams = tables.iter().zip(ngram_histories(states)).map(request_rows).collect();
        if !tables.is_empty() {
            let each = states.iter_mut().zip(chunk.by_sequence());
            each.for_each(|(state, (start, ids))| state.tokens.write(start, ids));
        }
        let mut pass = Pass {
            chunk,
            config,
            backend: backend.as_mut(),
            limits: *limits,
            buffers,
            attention: kv_shape,
            experts: store.as_ref(),
            slots,
            ngrams,
            scratch,
        };
        let mut hooks = LayerHooks { keep_going, marks, taps };
        let mut together;
        let state = match states {
            [state] => &mut state.layers,
            several => {
                together = states_together(several);
                &mut together
            }
        };
        forward::forward(net, state, &mut pass, &mut hooks, output)?;
        Ok(hooks.marks)
    }
}
