//! Drafts by a second, smaller model with the same vocabulary.
//!
//! It reads the sequence only when a draft is wanted, and only its last few hundred tokens: a long prompt is not worth reading
//! twice. Its own state goes back with the tokens that were not accepted, as the large model's does.

use super::{Draft, Kind, Outlook, Sequence};
use crate::{
    error::ModelError,
    model::{Model, Qwen, QwenState, Rows, SequenceState},
};

/// Tokens that it begins with, and its context: when that is full, it begins anew with the last ones.
const BEGIN: usize = 512;
pub const ROOM: usize = 2048;

/// A model that drafts for a larger one.
pub struct Companion {
    model: Qwen,
    state: Option<QwenState>,
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
    fn go_back(&mut self, sequence: Sequence<'_>, most: usize) -> Result<QwenState, ModelError> {
        let room = self.model.info().context;
        let wrong = wrong(&self.read, self.base, self.tentative, sequence);
        if let (Some(mut state), Some(wrong)) = (self.state.take(), wrong)
            && sequence.end() + most <= self.base + room
        {
            if wrong > 0 {
                state.reject(wrong)?;
                self.read.truncate(self.read.len() - wrong);
            }
            return Ok(state);
        }
        self.base = begin(sequence.end(), most, room);
        self.read.clear();
        self.model.start()
    }
}

/// The number of the last tokens of `read`, which was read from position `base` on, that are not `sequence`'s; `None` if they
/// cannot be taken back, or if nothing of the sequence would be left to read.
fn wrong(read: &[u32], base: usize, tentative: usize, sequence: Sequence<'_>) -> Option<usize> {
    let kept = read.iter().zip(base..).take_while(|(id, at)| sequence.get(*at) == Some(**id)).count();
    let wrong = read.len() - kept;
    ((wrong == 0 || wrong < tentative) && base + kept < sequence.end()).then_some(wrong)
}

/// The position from which on it reads a sequence up to `end`, to draft `most` tokens with room for `room`.
fn begin(end: usize, most: usize, room: usize) -> usize {
    end - end.min(BEGIN).min(room.saturating_sub(most).max(1))
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{metrics::Metrics, model::LoadOptions};
    use std::path::Path;

    #[test]
    fn what_was_read_goes_back_as_far_as_it_can_be_taken_back() {
        let sequence = Sequence { seen: &[1, 2, 3, 4, 5], last: 6 };
        for (read, base, tentative, wanted) in [
            (&[3u32, 4, 5][..], 2, 1, Some(0)),
            (&[1, 2, 3, 4, 5], 0, 0, Some(0)),
            (&[3, 4, 9, 9], 2, 3, Some(2)),
            (&[3, 4, 9, 9], 2, 2, None),
            (&[3, 4, 5, 6], 2, 4, None),
            (&[4, 5, 6, 7], 3, 3, None),
            (&[2, 3], 2, 2, None),
            (&[2, 3], 2, 3, Some(2)),
            (&[], 6, 0, None),
        ] {
            assert_eq!(wrong(read, base, tentative, sequence), wanted, "{read:?} from {base} on");
        }
    }

    #[test]
    fn it_goes_back_or_begins_anew_when_there_is_no_room_for_the_draft() {
        let dir = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/drafts/model"));
        let mut options = LoadOptions { threads: Some(1), ..LoadOptions::default() };
        options.plan.context = Some(32);
        let model = Qwen::load(dir, &options, &Metrics::new("test", "cpu"), &mut |_, _| ()).unwrap();
        let mut companion = Companion::new(model);
        let ids: Vec<u32> = (20..52).collect();
        let sequence = |end: usize| Sequence { seen: &ids[..end - 1], last: ids[end - 1] };
        let mut state = companion.model.start().unwrap();
        companion.model.forward(&mut state, &ids[..20], Rows::None).unwrap();
        (companion.state, companion.read) = (Some(state), ids[..20].to_vec());
        // The last room that there is: 28 tokens and a draft of 4.
        companion.state = Some(companion.go_back(sequence(28), 4).unwrap());
        assert_eq!((companion.base, companion.read.len()), (0, 20));
        companion.state = Some(companion.go_back(sequence(29), 4).unwrap());
        assert_eq!((companion.base, companion.read.len()), (1, 0));

        // Of three tokens that it drafted the first was right.
        let mut state = companion.model.start().unwrap();
        companion.model.forward(&mut state, &ids[..20], Rows::None).unwrap();
        companion.model.verify(&mut state, &[ids[20]]).unwrap();
        for id in [7, 8] {
            companion.model.verify_on(&mut state, &[id]).unwrap();
        }
        (companion.state, companion.base, companion.tentative) = (Some(state), 0, 3);
        companion.read = [&ids[..21], &[7, 8]].concat();
        companion.go_back(sequence(24), 4).unwrap();
        assert_eq!((companion.base, &companion.read[..]), (0, &ids[..21]));
    }

    #[test]
    fn it_begins_with_the_last_tokens_that_there_is_room_for() {
        let cases = [(100, 4, 2048, 0), (600, 4, 2048, 88), (600, 4, 104, 500), (600, 4, 4, 599), (600, 9, 4, 599)];
        assert!(cases.into_iter().all(|(end, most, room, at)| begin(end, most, room) == at));
    }
}
