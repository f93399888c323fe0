//! A session is a timeline: the tokens that went through the model, and the state they left. A state of the delta net
//! cannot be rewound, so a prompt extends the timeline, goes on from a checkpoint, or starts a new one.

use crate::{
    error::ModelError,
    model::{Logits, Model, PassHooks, Rows, SequenceState, Snapshot},
};

/// Tokens and the state after exactly these tokens.
pub struct Session<S> {
    tokens: Vec<u32>,
    state: S,
    /// Rows of a verify that the state has and the tokens have not.
    ahead: usize,
    /// It is the one that was there before, with what its model left behind.
    goes_on: bool,
}

impl<S: SequenceState> Session<S> {
    /// An empty timeline.
    pub fn start<M: Model<State = S>>(model: &M) -> Result<Self, ModelError> {
        Ok(Self { tokens: Vec::new(), state: model.start()?, ahead: 0, goes_on: false })
    }

    /// A session for `prompt`: `previous`, if the prompt continues it by at least one token (the one whose logits are
    /// wanted), or what `deepest` has that the prompt begins with and that is longer; else a new timeline. At no time
    /// there are two states: `previous` becomes the other, or is freed first.
    pub fn sync<M: Model<State = S>>(
        previous: Option<Self>,
        model: &M,
        prompt: &[u32],
        deepest: impl FnOnce(usize) -> Option<Snapshot>,
    ) -> Result<Self, ModelError> {
        let continued = |session: &Self| session.tokens.len() < prompt.len() && prompt.starts_with(&session.tokens);
        // One that does not go on leaves its memory to what is found.
        let previous = previous.filter(continued);
        if let Some(snapshot) = deepest(previous.as_ref().map_or(0, Self::len)) {
            let state = model.restore(&snapshot, previous.map(|session| session.state));
            match state {
                Ok(state) => {
                    return Ok(Self { tokens: prompt[..snapshot.len].to_vec(), state, ahead: 0, goes_on: false });
                }
                Err(error) => tracing::warn!(%error, "a checkpoint is of no use; the prompt is computed"),
            }
            return Self::start(model);
        }
        match previous {
            Some(session) => Ok(Self { goes_on: true, ..session }),
            None => Self::start(model),
        }
    }

    /// Appends `ids` and runs `hooks` (see [`Model::forward_with`]). After an error the state may hold a part of them, so the session must not be used again.
    pub fn extend<M: Model<State = S>>(
        &mut self,
        model: &mut M,
        ids: &[u32],
        rows: Rows,
        hooks: &mut PassHooks<'_>,
    ) -> Result<Logits, ModelError> {
        let logits = model.forward_with(&mut self.state, ids, rows, hooks)?;
        self.tokens.extend_from_slice(ids);
        Ok(logits)
    }

    /// Evaluates `id`, which is certain, and `drafted`, which is not; returns the logits behind each. Tokens that turn
    /// out right are [`Session::accept`]ed in order, and [`Session::settle`] ends it.
    pub fn verify<M: Model<State = S>>(
        &mut self,
        model: &mut M,
        id: u32,
        drafted: &[u32],
    ) -> Result<Logits, ModelError> {
        let rows: Vec<u32> = [&[id], drafted].concat();
        let logits = model.verify(&mut self.state, &rows)?;
        self.tokens.push(id);
        self.ahead = drafted.len();
        Ok(logits)
    }

    /// The next of the drafted tokens is `id`, and right.
    pub fn accept(&mut self, id: u32) {
        self.tokens.push(id);
        self.ahead -= 1;
    }

    /// The state forgets what was not accepted.
    pub fn settle(&mut self) -> Result<(), ModelError> {
        match std::mem::take(&mut self.ahead) {
            0 => Ok(()),
            rows => self.state.reject(rows),
        }
    }

    pub fn snapshot<M: Model<State = S>>(&mut self, model: &M) -> Result<Snapshot, ModelError> {
        model.snapshot(&mut self.state)
    }

    /// Tokens and state, for a draft.
    pub fn parts(&mut self) -> (&[u32], &mut S) {
        (&self.tokens, &mut self.state)
    }

    pub fn state(&self) -> &S {
        &self.state
    }

    /// True if [`Session::sync`] continued the previous timeline as it was.
    pub fn goes_on(&self) -> bool {
        self.goes_on
    }

    pub fn len(&self) -> usize {
        self.tokens.len()
    }

    pub fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }

    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::mock::MockModel;

    fn after(mock: &mut MockModel, ids: &[u32]) -> Session<<MockModel as Model>::State> {
        let mut session = Session::start(mock).unwrap();
        session.extend(mock, ids, Rows::None, &mut PassHooks::default()).unwrap();
        session
    }

    #[test]
    fn a_prompt_that_goes_on_reuses_the_state() {
        let mut mock = MockModel::default();
        let previous = after(&mut mock, &[5, 6, 7]);
        let mut session = Session::sync(Some(previous), &mock, &[5, 6, 7, 8, 9], |_| None).unwrap();
        assert_eq!(session.len(), 3);
        let reused = session.extend(&mut mock, &[8, 9], Rows::Last, &mut PassHooks::default()).unwrap();
        let fresh =
            after(&mut mock, &[5, 6, 7]).extend(&mut mock, &[8, 9], Rows::Last, &mut PassHooks::default()).unwrap();
        assert_eq!(reused.data, fresh.data);
    }

    #[test]
    fn any_other_prompt_starts_anew() {
        for prompt in [&[5, 6, 7][..], &[5, 6], &[5, 9, 7, 8], &[9]] {
            let mut mock = MockModel::default();
            let previous = after(&mut mock, &[5, 6, 7]);
            let session = Session::sync(Some(previous), &mock, prompt, |_| None).unwrap();
            assert!(session.is_empty(), "{prompt:?}");
        }
    }

    #[test]
    fn a_checkpoint_comes_before_a_shorter_timeline() {
        let mut mock = MockModel::default();
        let mut long = after(&mut mock, &[5, 6, 7, 8]);
        let snapshot = long.snapshot(&mock).unwrap();
        for (previous, beyond) in [(&[5, 6][..], 2), (&[9], 0), (&[5, 6, 7, 8, 9, 9, 9], 0)] {
            let previous = after(&mut mock, previous);
            let deepest = |than| {
                assert_eq!(than, beyond);
                Some(snapshot.clone())
            };
            let mut session = Session::sync(Some(previous), &mock, &[5, 6, 7, 8, 9], deepest).unwrap();
            assert_eq!(session.tokens(), [5, 6, 7, 8]);
            let reused = session.extend(&mut mock, &[9], Rows::Last, &mut PassHooks::default()).unwrap();
            let fresh = after(&mut mock, &[5, 6, 7, 8]).extend(&mut mock, &[9], Rows::Last, &mut PassHooks::default());
            assert_eq!(reused.data, fresh.unwrap().data);
        }
    }

    #[test]
    fn one_state_is_alive_at_a_time() {
        let mut mock = MockModel::default();
        let previous = after(&mut mock, &[5, 6, 7]);
        let _session = Session::sync(Some(previous), &mock, &[9], |_| None).unwrap();
        assert_eq!(std::sync::Arc::strong_count(&mock.states), 2);
    }
}
