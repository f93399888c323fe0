//! A sequence: tokens that the model has evaluated, and the resulting state.
//!
//! The recurrent state of a delta net cannot be rewound. A new prompt therefore extends the previous sequence, restores
//! a snapshot, or starts an empty sequence.

use super::cache_salt::{CacheSalt, CachedPrompt};
use moestro_model::{
    error::ModelError,
    model::{Logits, Model, NextToken, PassHooks, PlacedImage, Rows, SequenceState, Snapshot},
};
use std::sync::atomic::{AtomicU64, Ordering};

/// The [`Sequence::id`] that the next new sequence gets.
static NEXT_ID: AtomicU64 = AtomicU64::new(1);

/// Tokens, and the model's state after exactly these tokens.
pub struct Sequence<S> {
    id: u64,
    tokens: Vec<u32>,
    /// Images that begin within the tokens, without their pixels: a kept sequence outlives the request, whose permit
    /// counts the pixels. The last image may end after the last token.
    images: Vec<PlacedImage>,
    /// The salt of the prompts that may extend the sequence.
    salt: Option<CacheSalt>,
    state: S,
    /// Number of drafted tokens that are in `state` but not in `tokens`, because they are not accepted, or not yet.
    unconfirmed: usize,
}

impl<S: SequenceState> Sequence<S> {
    /// An empty sequence.
    pub fn start<M: Model<State = S>>(model: &mut M) -> Result<Self, ModelError> {
        Ok(Self::new(CachedPrompt::default(), model.start()?))
    }

    fn new(prompt: CachedPrompt<'_>, state: S) -> Self {
        let CachedPrompt { ids, images, salt } = prompt;
        let images = within(images, ids.len()).iter().map(PlacedImage::without_pixels).collect();
        Self { id: NEXT_ID.fetch_add(1, Ordering::Relaxed), tokens: ids.to_vec(), images, salt, state, unconfirmed: 0 }
    }

    /// A sequence with the longest reusable prefix of `prompt`: from a snapshot, from `previous`, or empty.
    ///
    /// The prefix is shorter than the prompt, since the logits of the last token are needed. `find_snapshot` receives
    /// the model, and the length of the prefix in `previous`. `find_snapshot` returns a longer snapshot if the cache
    /// has a longer one. The memory of `previous` is reused or freed before another state is allocated.
    pub fn sync<M: Model<State = S>>(
        previous: Option<Self>,
        model: &mut M,
        prompt: CachedPrompt<'_>,
        find_snapshot: impl FnOnce(&mut M, usize) -> Option<Snapshot>,
    ) -> Result<Self, ModelError> {
        // A sequence that is not a prefix is dropped first, so that a snapshot can use its memory.
        let previous = previous.filter(|sequence| sequence.is_prefix_of(prompt));
        let empty = |model: &mut M| Ok(Self { salt: prompt.salt, ..Self::start(model)? });
        if let Some(snapshot) = find_snapshot(model, previous.as_ref().map_or(0, Self::len)) {
            return match model.restore(&snapshot, previous.map(|sequence| sequence.state)) {
                Ok(state) => Ok(Self::new(CachedPrompt { ids: &prompt.ids[..snapshot.len], ..prompt }, state)),
                Err(error) => {
                    tracing::warn!(%error, tokens = snapshot.len, "cannot restore a prompt snapshot; computing the prompt");
                    empty(model)
                }
            };
        }
        previous.map_or_else(|| empty(model), Ok)
    }

    /// True if the sequence is a proper prefix of `prompt`.
    pub fn is_prefix_of(&self, prompt: CachedPrompt<'_>) -> bool {
        let CachedPrompt { ids, images, salt } = prompt;
        let len = self.len();
        salt == self.salt && len < ids.len() && ids.starts_with(&self.tokens) && self.images == within(images, len)
    }

    /// Evaluates and appends `ids`, and runs `hooks`.
    ///
    /// After an error the state may contain some of the new rows, so the caller must drop the sequence.
    pub fn extend<M: Model<State = S>>(
        &mut self,
        model: &mut M,
        ids: &[u32],
        rows: Rows,
        hooks: &mut PassHooks<'_>,
    ) -> Result<Logits, ModelError> {
        let logits = model.forward_with(&mut self.state, ids, rows, hooks)?;
        let start = self.tokens.len();
        self.tokens.extend_from_slice(ids);
        let new = hooks.images.iter().filter(|image| (start..self.tokens.len()).contains(&image.at));
        self.images.extend(new.map(PlacedImage::without_pixels));
        Ok(logits)
    }

    /// Evaluates and appends one token to each sequence in one pass. Returns one row of logits per sequence, with the
    /// same bytes as separate passes. For `next`, see [`Model::forward_each`].
    ///
    /// After an error the caller must drop all of the sequences.
    pub fn extend_each<M: Model<State = S>>(
        model: &mut M,
        rows: &mut [(&mut Self, u32)],
        next: &[NextToken],
    ) -> Result<Logits, ModelError> {
        let mut states: Vec<(&mut S, u32)> = rows.iter_mut().map(|(sequence, id)| (&mut sequence.state, *id)).collect();
        let logits = model.forward_each(&mut states, next)?;
        rows.iter_mut().for_each(|(sequence, id)| sequence.tokens.push(*id));
        Ok(logits)
    }

    /// Evaluates and appends `id`. Also evaluates `drafted` tokens, which may be rejected. Returns one row of logits
    /// per token. With `likeliest_below`, may return the likeliest tokens instead: see [`PassHooks::likeliest_below`].
    ///
    /// [`Sequence::accept`] confirms drafted tokens in order. [`Sequence::settle`] discards the tokens that were not
    /// confirmed.
    pub fn verify<M: Model<State = S>>(
        &mut self,
        model: &mut M,
        id: u32,
        drafted: &[u32],
        likeliest_below: Option<usize>,
    ) -> Result<(Logits, Vec<u32>), ModelError> {
        let rows: Vec<u32> = [&[id], drafted].concat();
        let mut hooks = PassHooks { likeliest_below, ..PassHooks::default() };
        let logits = model.forward_with(&mut self.state, &rows, Rows::Verify, &mut hooks)?;
        self.tokens.push(id);
        self.unconfirmed = drafted.len();
        Ok((logits, hooks.likeliest))
    }

    /// Appends the next drafted token, `id`, because the sampler accepted it.
    pub fn accept(&mut self, id: u32) {
        self.tokens.push(id);
        self.unconfirmed -= 1;
    }

    /// The token that the model has evaluated ahead. It is in the state but not in the tokens.
    pub fn ahead(&self) -> Option<u32> {
        self.state.ahead()
    }

    /// Appends the token that the model has evaluated ahead.
    pub fn append_ahead(&mut self) {
        self.tokens.extend(self.state.take_ahead());
    }

    /// Removes the drafted tokens that were not accepted from the state.
    pub fn settle(&mut self) -> Result<(), ModelError> {
        match std::mem::take(&mut self.unconfirmed) {
            0 => Ok(()),
            rows => self.state.reject(rows),
        }
    }

    pub fn snapshot<M: Model<State = S>>(&mut self, model: &mut M) -> Result<Snapshot, ModelError> {
        model.snapshot(&mut self.state)
    }

    /// The tokens and the mutable state, for a draft.
    pub fn parts(&mut self) -> (&[u32], &mut S) {
        (&self.tokens, &mut self.state)
    }

    pub fn state(&self) -> &S {
        &self.state
    }

    /// Identifies the sequence. A sequence keeps its id when it is extended, even by the prompt of a later request.
    pub fn id(&self) -> u64 {
        self.id
    }

    pub fn len(&self) -> usize {
        self.tokens.len()
    }

    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// The sequence as a prompt of the prompt cache.
    pub fn cached_prompt(&self) -> CachedPrompt<'_> {
        CachedPrompt { ids: &self.tokens, images: &self.images, salt: self.salt }
    }
}

/// The images that begin within the first `len` tokens.
fn within(images: &[PlacedImage], len: usize) -> &[PlacedImage] {
    &images[..images.partition_point(|image| image.at < len)]
}

#[cfg(test)]
mod tests {
    use super::*;
    use mock_model::MockModel;
    use moestro_model::model::Image;
    use std::sync::Arc;

    fn evaluated(mock: &mut MockModel, ids: &[u32]) -> Sequence<<MockModel as Model>::State> {
        let mut sequence = Sequence::start(mock).unwrap();
        append(&mut sequence, mock, ids);
        sequence
    }

    fn prompt(ids: &[u32]) -> CachedPrompt<'_> {
        CachedPrompt { ids, ..CachedPrompt::default() }
    }

    fn append(sequence: &mut Sequence<<MockModel as Model>::State>, mock: &mut MockModel, ids: &[u32]) -> Vec<f32> {
        sequence.extend(mock, ids, Rows::Last, &mut PassHooks::default()).unwrap().data.to_vec()
    }

    #[test]
    fn prompt_that_extends_the_sequence_reuses_it() {
        let mut mock = MockModel::default();
        let previous = evaluated(&mut mock, &[5, 6, 7]);
        let mut sequence = Sequence::sync(Some(previous), &mut mock, prompt(&[5, 6, 7, 8, 9]), |_, _| None).unwrap();
        assert_eq!(sequence.len(), 3);
        let reused = append(&mut sequence, &mut mock, &[8, 9]);
        let mut fresh = evaluated(&mut mock, &[5, 6, 7]);
        assert_eq!(reused, append(&mut fresh, &mut mock, &[8, 9]));
    }

    #[test]
    fn other_prompts_start_empty() {
        for ids in [&[5, 6, 7][..], &[5, 6], &[5, 9, 7, 8], &[9]] {
            let mut mock = MockModel::default();
            let previous = evaluated(&mut mock, &[5, 6, 7]);
            let sequence = Sequence::sync(Some(previous), &mut mock, prompt(ids), |_, _| None).unwrap();
            assert_eq!(sequence.len(), 0, "{ids:?}");
        }
    }

    #[test]
    fn snapshot_wins_over_shorter_sequence() {
        let mut mock = MockModel::default();
        let mut long = evaluated(&mut mock, &[5, 6, 7, 8]);
        let snapshot = long.snapshot(&mut mock).unwrap();
        for (previous, offered) in [(&[5, 6][..], 2), (&[9], 0), (&[5, 6, 7, 8, 9, 9, 9], 0)] {
            let previous = evaluated(&mut mock, previous);
            let find_snapshot = |_: &mut MockModel, length| {
                assert_eq!(length, offered);
                Some(snapshot.clone())
            };
            let mut sequence =
                Sequence::sync(Some(previous), &mut mock, prompt(&[5, 6, 7, 8, 9]), find_snapshot).unwrap();
            assert_eq!(sequence.tokens, [5, 6, 7, 8]);
            let reused = append(&mut sequence, &mut mock, &[9]);
            let mut fresh = evaluated(&mut mock, &[5, 6, 7, 8]);
            assert_eq!(reused, append(&mut fresh, &mut mock, &[9]));
        }
    }

    #[test]
    fn sequence_with_another_image_starts_empty() {
        let image = |hash: u8| PlacedImage {
            at: 1,
            image: Arc::new(Image { hash: [hash; 32], height: 1, width: 2, ..Image::default() }),
        };
        let mut mock = MockModel::default();
        let ids = [5, 9, 9, 6, 7];
        for (len, other, reused) in [(4, 1, 4), (4, 2, 0), (2, 1, 2), (2, 2, 0), (1, 2, 1)] {
            let mut previous = Sequence::start(&mut mock).unwrap();
            let images = [image(1)];
            let mut hooks = PassHooks { images: &images, ..PassHooks::default() };
            previous.extend(&mut mock, &ids[..len], Rows::None, &mut hooks).unwrap();
            let images = [image(other)];
            let prompt = CachedPrompt { images: &images, ..prompt(&ids) };
            let sequence = Sequence::sync(Some(previous), &mut mock, prompt, |_, _| None).unwrap();
            assert_eq!(sequence.len(), reused, "{len} tokens, image {other}");
        }
    }

    #[test]
    fn only_one_state_is_alive() {
        let mut mock = MockModel::default();
        let previous = evaluated(&mut mock, &[5, 6, 7]);
        let _sequence = Sequence::sync(Some(previous), &mut mock, prompt(&[9]), |_, _| None).unwrap();
        assert_eq!(Arc::strong_count(&mock.states), 2);
    }
}
