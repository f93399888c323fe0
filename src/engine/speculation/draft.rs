//! The seam for drafts: the trait of everything that proposes tokens.

use super::Outlook;
use crate::{
    error::ModelError,
    model::{HiddenTaps, Model},
};

/// A draft's kind, as metrics name it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Lookup,
    Mtp,
    Model,
    Dflash,
}

impl Kind {
    pub fn name(self) -> &'static str {
        match self {
            Kind::Lookup => "lookup",
            Kind::Mtp => "mtp",
            Kind::Model => "model",
            Kind::Dflash => "dflash",
        }
    }
}

/// A sequence: the tokens that went through the model, and the one drawn from its last logits.
#[derive(Debug, Clone, Copy)]
pub struct Sequence<'a> {
    pub seen: &'a [u32],
    pub last: u32,
}

impl Sequence<'_> {
    /// The position behind the last token.
    pub fn end(&self) -> usize {
        self.seen.len() + 1
    }

    /// The token at a position; `None` behind the last.
    pub fn get(&self, position: usize) -> Option<u32> {
        self.seen.get(position).copied().or((position == self.seen.len()).then_some(self.last))
    }
}

/// Proposes what a model `M` may say next. The model verifies each proposal, so a draft can be wrong, and never do harm; one
/// that fails is not asked again.
pub trait Draft<M: Model>: Send {
    fn kind(&self) -> Kind;

    /// The hidden rows that it wants to follow.
    fn taps(&self) -> HiddenTaps {
        HiddenTaps::default()
    }

    /// A sequence begins that does not go on from the last one.
    fn start(&mut self) {}

    /// The sequence now has `len` tokens, and its last ones left the rows `hidden`: `[rows, layers, hidden]`, as
    /// [`Draft::taps`] asked. Rows that were taken back are not shown. There may be a gap in front of them: what came out of
    /// the prompt cache left none. Called after every pass, so it must cost next to nothing.
    fn follow(&mut self, len: usize, hidden: &[f32]) {
        let _ = (len, hidden);
    }

    /// Writes to `out` at most `most` tokens that may come behind `sequence`, whose state in `model` is afterwards what it was
    /// before. `outlook` draws from a draft's logits as the sampler will from the model's.
    fn propose(
        &mut self,
        model: &mut M,
        state: &mut M::State,
        sequence: Sequence<'_>,
        most: usize,
        outlook: &mut Outlook<'_>,
        out: &mut Vec<u32>,
    ) -> Result<(), ModelError>;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_token_stands_behind_those_that_were_seen() {
        let sequence = Sequence { seen: &[7, 8, 9], last: 5 };
        assert_eq!(sequence.end(), 4);
        assert_eq!([0, 2, 3, 4, 5].map(|at| sequence.get(at)), [Some(7), Some(9), Some(5), None, None]);
        assert_eq!((Sequence { seen: &[], last: 1 }.get(0), Sequence { seen: &[], last: 1 }.end()), (Some(1), 1));
    }
}
