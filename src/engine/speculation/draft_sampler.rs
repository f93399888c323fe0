//! Samples from a draft's logits the way the answer's sampler will sample from the model's.

use crate::engine::{
    constraint::{Constraint, MaskWorker, TokenMask},
    sampler::Sampler,
};

/// Copies of the sampler and the constraint that run ahead of the answer.
///
/// The copies use the same bias, penalties, temperature and random numbers as the answer's sampler. A draft with the model's
/// logits therefore proposes exactly the tokens that the answer will contain, at any temperature. A draft also proposes only
/// tokens that the constraint allows.
pub struct DraftSampler<'a> {
    sampler: &'a mut Sampler,
    /// The answer's constraint.
    masks: Option<&'a MaskWorker>,
    /// A copy of it, made when it is first needed.
    constraint: Option<Box<dyn Constraint>>,
}

impl<'a> DraftSampler<'a> {
    /// `sampler` is a copy of the answer's sampler.
    pub(in crate::engine) fn new(sampler: &'a mut Sampler, masks: Option<&'a MaskWorker>) -> Self {
        Self { sampler, masks, constraint: None }
    }

    /// Samples a token from a draft's logits and moves on to the next position. `None` if no token is possible.
    pub fn draw(&mut self, logits: &[f32]) -> Option<u32> {
        let mask = self.mask()?;
        let id = self.sampler.draw(logits, &mask)?;
        self.accept(id)?;
        Some(id)
    }

    /// True if `id` may come next. If so, moves on to the next position.
    pub fn admits(&mut self, id: u32) -> bool {
        self.mask().is_some_and(|mask| mask.contains(id)) && self.accept(id).is_some()
    }

    /// The tokens that may come next. `None` if the constraint fails; the answer reports that error when it gets there.
    fn mask(&mut self) -> Option<TokenMask> {
        let Some(masks) = self.masks else { return Some(TokenMask::Any) };
        if self.constraint.is_none() {
            self.constraint = masks.fork();
        }
        self.constraint.as_mut()?.allowed().ok()
    }

    fn accept(&mut self, id: u32) -> Option<()> {
        self.constraint.as_mut().map_or(Some(()), |constraint| constraint.accept(id).ok())
    }
}
