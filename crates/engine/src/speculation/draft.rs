//! The [`Draft`] trait: a source of proposed tokens.

use super::draft_sampler::DraftSampler;
use moestro_model::{
    error::ModelError,
    model::{HiddenTaps, Model},
};

/// The kind of a draft. Metrics use it as a label.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DraftKind {
    Lookup,
    Mtp,
    Model,
    Dflash,
}

impl DraftKind {
    pub fn name(self) -> &'static str {
        match self {
            DraftKind::Lookup => "lookup",
            DraftKind::Mtp => "mtp",
            DraftKind::Model => "model",
            DraftKind::Dflash => "dflash",
        }
    }
}

/// The tokens of a sequence: the tokens that the model has evaluated, and the last token, which was sampled but not
/// evaluated.
#[derive(Debug, Clone, Copy)]
pub struct TokenHistory<'a> {
    pub evaluated: &'a [u32],
    pub last: u32,
}

impl TokenHistory<'_> {
    /// Number of tokens, including the last token.
    pub fn end(&self) -> usize {
        self.evaluated.len() + 1
    }

    /// The token at a position. `None` for a position after the last token.
    pub fn get(&self, position: usize) -> Option<u32> {
        self.evaluated.get(position).copied().or((position == self.evaluated.len()).then_some(self.last))
    }
}

/// Asks a draft for the tokens after a history.
pub struct DraftRequest<'a> {
    pub history: TokenHistory<'a>,
    /// Maximum number of tokens to propose.
    pub max: usize,
    /// Samples from the draft's logits in the same way as the answer's sampler will sample from the model's logits.
    pub sampler: DraftSampler<'a>,
    /// The proposed tokens are appended to this list.
    pub out: &'a mut Vec<u32>,
}

/// Proposes the tokens that model `M` may generate next.
///
/// The model verifies every drafted token, so a wrong draft costs time but never changes an answer. A draft that
/// returns an error is not used again.
pub trait Draft<M: Model>: Send {
    fn kind(&self) -> DraftKind;

    /// The hidden rows (activations of the residual stream) that the draft needs from the model.
    fn taps(&self) -> HiddenTaps {
        HiddenTaps::default()
    }

    /// Called when the draft must follow another sequence, which does not extend the previous one.
    fn start(&mut self) {}

    /// Receives hidden rows of the model, `[rows, layers, hidden]`, as requested by [`Draft::taps`].
    ///
    /// The rows belong to the last tokens of the sequence, which now has `len` tokens. Rows of rejected tokens are left
    /// out. Tokens that were restored from the prompt cache have no hidden rows, so positions may be missing between
    /// two calls. This method runs after every forward pass, so it must be fast.
    fn observe(&mut self, len: usize, hidden: &[f32]) {
        let _ = (len, hidden);
    }

    /// Proposes tokens after a history. Must not change `state`.
    fn propose(&mut self, model: &mut M, state: &mut M::State, request: DraftRequest<'_>) -> Result<(), ModelError>;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn history_ends_with_the_last_token() {
        let history = TokenHistory { evaluated: &[7, 8, 9], last: 5 };
        assert_eq!(history.end(), 4);
        assert_eq!([0, 2, 3, 4, 5].map(|at| history.get(at)), [Some(7), Some(9), Some(5), None, None]);
        let first = TokenHistory { evaluated: &[], last: 1 };
        assert_eq!((first.get(0), first.end()), (Some(1), 1));
    }
}
