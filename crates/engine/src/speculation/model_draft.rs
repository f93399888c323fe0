//! Drafts by a second, smaller model with the same vocabulary.
//!
//! The draft model evaluates the sequence only when tokens must be proposed. The draft model evaluates only the last
//! few hundred tokens, since evaluating a long prompt twice would cost too much. Rejected tokens are removed from the
//! state of the draft model in the same way as from the state of the large model.

use super::draft::{Draft, DraftKind, DraftRequest, TokenHistory};
use moestro_model::{
    error::ModelError,
    model::{Model, Qwen, QwenState, Rows, SequenceState},
};

/// Maximum number of tokens that the draft model evaluates when it starts with an empty state.
const START: usize = 512;
/// Context of the draft model, in tokens. When the context is full, the draft model starts again with the last tokens.
pub const CONTEXT: usize = 2048;

/// A small model that drafts for a larger one.
pub struct ModelDraft {
    model: Qwen,
    state: Option<QwenState>,
    /// Position in the sequence of the first token in the draft model's context.
    base: usize,
    /// The tokens from position `base` on that the draft model has evaluated.
    evaluated: Vec<u32>,
    /// Number of rows in the last verify of the draft model. All of these rows except the first can be removed from its
    /// state.
    verified: usize,
}

impl ModelDraft {
    pub fn new(model: Qwen) -> Self {
        Self { model, state: None, base: 0, evaluated: Vec::new(), verified: 0 }
    }

    /// Returns the state without tokens that are not in `history`. If these tokens cannot be removed, or if the context
    /// has no room for `max` more tokens, returns an empty state.
    fn rewind(&mut self, history: TokenHistory<'_>, max: usize) -> Result<QwenState, ModelError> {
        let context = self.model.info().context;
        let rejected = count_rejected(&self.evaluated, self.base, self.verified, history);
        if let (Some(mut state), Some(rejected)) = (self.state.take(), rejected)
            && history.end() + max <= self.base + context
        {
            if rejected > 0 {
                state.reject(rejected)?;
                self.evaluated.truncate(self.evaluated.len() - rejected);
            }
            return Ok(state);
        }
        self.base = start_position(history.end(), max, context);
        self.evaluated.clear();
        self.model.start()
    }
}

/// Number of tokens at the end of `evaluated` (which starts at position `base`) that differ from `history`. `None` if
/// these tokens cannot be removed from the state, or if no token of `history` would be left to evaluate.
fn count_rejected(evaluated: &[u32], base: usize, verified: usize, history: TokenHistory<'_>) -> Option<usize> {
    let kept = evaluated.iter().zip(base..).take_while(|(id, at)| history.get(*at) == Some(**id)).count();
    let rejected = evaluated.len() - kept;
    ((rejected == 0 || rejected < verified) && base + kept < history.end()).then_some(rejected)
}

/// The position at which an empty state starts to evaluate a sequence of `len` tokens, so that `context` has room for
/// `max` drafted tokens.
fn start_position(len: usize, max: usize, context: usize) -> usize {
    len - len.min(START).min(context.saturating_sub(max).max(1))
}

impl<M: Model> Draft<M> for ModelDraft {
    fn kind(&self) -> DraftKind {
        DraftKind::Model
    }

    fn propose(&mut self, _: &mut M, _: &mut M::State, request: DraftRequest<'_>) -> Result<(), ModelError> {
        let DraftRequest { history, max, mut sampler, out } = request;
        let mut state = self.rewind(history, max)?;
        let next = self.base + self.evaluated.len();
        if next < history.evaluated.len() {
            let ids = &history.evaluated[next..];
            self.model.forward(&mut state, ids, Rows::None)?;
            self.evaluated.extend_from_slice(ids);
        }
        let mut logits = self.model.verify(&mut state, &[history.last])?;
        self.evaluated.push(history.last);
        self.verified = 1;
        while let Some(id) = sampler.draw(&logits.data) {
            out.push(id);
            if out.len() == max {
                break;
            }
            logits = self.model.verify_on(&mut state, &[id])?;
            self.evaluated.push(id);
            self.verified += 1;
        }
        self.state = Some(state);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use moestro_base::metrics::Metrics;
    use moestro_model::model::LoadOptions;
    use std::path::Path;

    #[test]
    fn rejected_tokens_are_counted_if_removable() {
        let history = TokenHistory { evaluated: &[1, 2, 3, 4, 5], last: 6 };
        for (evaluated, base, verified, expected) in [
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
            assert_eq!(count_rejected(evaluated, base, verified, history), expected, "{evaluated:?} from {base}");
        }
    }

    #[test]
    fn draft_model_rewinds_or_restarts() {
        let dir = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures/drafts/model"));
        let mut options = LoadOptions { threads: Some(1), ..LoadOptions::default() };
        options.plan.context = Some(32);
        let model = Qwen::load(dir, &options, &Metrics::new("test", "cpu"), &mut |_, _| ()).unwrap();
        let mut draft = ModelDraft::new(model);
        let ids: Vec<u32> = (20..52).collect();
        let history = |len: usize| TokenHistory { evaluated: &ids[..len - 1], last: ids[len - 1] };
        let mut state = draft.model.start().unwrap();
        draft.model.forward(&mut state, &ids[..20], Rows::None).unwrap();
        draft.state = Some(state);
        draft.evaluated = ids[..20].to_vec();
        // 28 tokens and a draft of 4 tokens just fit into the context.
        draft.state = Some(draft.rewind(history(28), 4).unwrap());
        assert_eq!((draft.base, draft.evaluated.len()), (0, 20));
        draft.state = Some(draft.rewind(history(29), 4).unwrap());
        assert_eq!((draft.base, draft.evaluated.len()), (1, 0));

        // One of three drafted tokens was accepted.
        let mut state = draft.model.start().unwrap();
        draft.model.forward(&mut state, &ids[..20], Rows::None).unwrap();
        draft.model.verify(&mut state, &[ids[20]]).unwrap();
        for id in [7, 8] {
            draft.model.verify_on(&mut state, &[id]).unwrap();
        }
        draft.state = Some(state);
        draft.base = 0;
        draft.verified = 3;
        draft.evaluated = [&ids[..21], &[7, 8]].concat();
        draft.rewind(history(24), 4).unwrap();
        assert_eq!((draft.base, &draft.evaluated[..]), (0, &ids[..21]));
    }

    #[test]
    fn draft_model_starts_with_last_tokens() {
        let cases = [(100, 4, 2048, 0), (600, 4, 2048, 88), (600, 4, 104, 500), (600, 4, 4, 599), (600, 9, 4, 599)];
        assert!(cases.into_iter().all(|(len, max, context, at)| start_position(len, max, context) == at));
    }
}
