//! A session is a timeline: the tokens that went through the model, and the state they left. A state of the delta net
//! cannot be rewound, so a prompt either extends the timeline or starts a new one.

use crate::{
    error::ModelError,
    model::{Logits, Model, Rows},
};

/// Tokens and the state after exactly these tokens.
pub struct Session<S> {
    tokens: Vec<u32>,
    state: S,
}

impl<S> Session<S> {
    /// An empty timeline.
    pub fn start<M: Model<State = S>>(model: &M) -> Result<Self, ModelError> {
        Ok(Self { tokens: Vec::new(), state: model.start()? })
    }

    /// `previous`, if `prompt` continues it by at least one token (the one whose logits are wanted); else a new
    /// timeline, with `previous` freed first. What the session's tokens are afterwards need not be evaluated.
    pub fn sync<M: Model<State = S>>(previous: Option<Self>, model: &M, prompt: &[u32]) -> Result<Self, ModelError> {
        match previous {
            Some(session) if session.tokens.len() < prompt.len() && prompt.starts_with(&session.tokens) => Ok(session),
            other => {
                drop(other);
                Self::start(model)
            }
        }
    }

    /// Appends `ids`. After an error the state may hold a part of them, so the session must not be used again.
    pub fn extend<M: Model<State = S>>(
        &mut self,
        model: &mut M,
        ids: &[u32],
        rows: Rows,
    ) -> Result<Logits, ModelError> {
        let logits = model.forward(&mut self.state, ids, rows)?;
        self.tokens.extend_from_slice(ids);
        Ok(logits)
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
    use crate::engine::parrot::Parrot;

    fn after(parrot: &mut Parrot, ids: &[u32]) -> Session<<Parrot as Model>::State> {
        let mut session = Session::start(parrot).unwrap();
        session.extend(parrot, ids, Rows::None).unwrap();
        session
    }

    #[test]
    fn a_prompt_that_goes_on_reuses_the_state() {
        let mut parrot = Parrot::default();
        let previous = after(&mut parrot, &[5, 6, 7]);
        let mut session = Session::sync(Some(previous), &parrot, &[5, 6, 7, 8, 9]).unwrap();
        assert_eq!(session.len(), 3);
        let reused = session.extend(&mut parrot, &[8, 9], Rows::Last).unwrap();
        let fresh = Session::start(&parrot).unwrap().extend(&mut parrot, &[5, 6, 7, 8, 9], Rows::Last).unwrap();
        assert_eq!(reused.data, fresh.data);
    }

    #[test]
    fn any_other_prompt_starts_anew() {
        for prompt in [&[5, 6, 7][..], &[5, 6], &[5, 9, 7, 8], &[9]] {
            let mut parrot = Parrot::default();
            let previous = after(&mut parrot, &[5, 6, 7]);
            let session = Session::sync(Some(previous), &parrot, prompt).unwrap();
            assert!(session.is_empty(), "{prompt:?}");
        }
    }

    #[test]
    fn one_state_is_alive_at_a_time() {
        let mut parrot = Parrot::default();
        let previous = after(&mut parrot, &[5, 6, 7]);
        let _session = Session::sync(Some(previous), &parrot, &[9]).unwrap();
        assert_eq!(std::sync::Arc::strong_count(&parrot.states), 2);
    }
}
