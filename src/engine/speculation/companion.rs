//! Drafts by a second, smaller model with the same vocabulary.
//!
//! It reads the sequence only when a draft is wanted, and only its last few hundred tokens: a long prompt is not worth reading
//! twice. Its own state goes back with the tokens that were not accepted, as the large model's does.

use super::{Draft, Kind, Outlook, Sequence};
use crate::{
    error::ModelError,
    model::{Model, Qwen, Rows, State},
};

/// Tokens that it begins with, and its context: when that is full, it begins anew with the last ones.
const BEGIN: usize = 512;
pub const ROOM: usize = 2048;

/// A model that drafts for a larger one.
pub struct Companion {
    model: Qwen,
    state: Option<State>,
    /// The position of the first token that it has read, and all it has read from there on.
    base: usize,
    read: Vec<u32>,
    /// The last ones of them can be taken back: so many, less one.
    tentative: usize,
}

impl Companion {
    pub fn new(model: Qwen) -> Self {
        Self { model, state: None, base: 0, read: Vec::new(), tentative: 0 }
    }

    /// Brings the state to the sequence's tokens as far as they were read; to none if it cannot go back so far.
    fn go_back(&mut self, sequence: Sequence<'_>, most: usize) -> Result<State, ModelError> {
        let same = |index: &usize| sequence.get(self.base + index) == Some(self.read[*index]);
        let kept = (0..self.read.len()).take_while(same).count();
        let wrong = self.read.len() - kept;
        let room = self.model.context();
        let possible = (wrong == 0 || wrong < self.tentative) && self.base + kept < sequence.end();
        if let Some(mut state) = self.state.take()
            && possible
            && sequence.end() + most <= self.base + room
        {
            if wrong > 0 {
                self.model.take_back(&mut state, wrong)?;
                self.read.truncate(kept);
            }
            return Ok(state);
        }
        self.base = sequence.end() - sequence.end().min(BEGIN).min(room.saturating_sub(most).max(1));
        self.read.clear();
        self.model.start()
    }
}

impl<M: Model> Draft<M> for Companion {
    fn kind(&self) -> Kind {
        Kind::Model
    }

    fn propose(
        &mut self,
        _: &mut M,
        _: &mut M::State,
        sequence: Sequence<'_>,
        most: usize,
        outlook: &mut Outlook<'_>,
        out: &mut Vec<u32>,
    ) -> Result<(), ModelError> {
        let mut state = self.go_back(sequence, most)?;
        let ahead = self.base + self.read.len();
        if ahead < sequence.seen.len() {
            let ids = &sequence.seen[ahead..];
            self.model.forward(&mut state, ids, Rows::None)?;
            self.read.extend_from_slice(ids);
        }
        let mut logits = self.model.verify(&mut state, &[sequence.last])?;
        self.read.push(sequence.last);
        self.tentative = 1;
        while let Some(id) = outlook.draw(&logits.data) {
            out.push(id);
            if out.len() == most {
                break;
            }
            logits = self.model.verify_on(&mut state, &[id])?;
            self.read.push(id);
            self.tentative += 1;
        }
        self.state = Some(state);
        Ok(())
    }
}
