//! [`DraftSampler`] samples from a draft's logits in the same way as the answer's sampler samples from the model's
//! logits.

use crate::{
    constraint::{Constraint, MaskWorker, TokenMask},
    sampler::Sampler,
};

/// Copies of the sampler and the constraint that run ahead of the answer.
///
/// The copies use the same bias, penalties, temperature and random numbers as the answer's sampler. A draft with the
/// model's logits therefore proposes exactly the tokens that the answer will contain, at any temperature. A draft also
/// proposes only tokens that the constraint allows.
pub struct DraftSampler<'a> {
    sampler: &'a mut Sampler,
    /// The answer's constraint.
    masks: Option<&'a MaskWorker>,
    /// A copy of the answer's constraint. `None` until the copy is first needed.
    constraint: Option<Box<dyn Constraint>>,
}

impl<'a> DraftSampler<'a> {
    /// `sampler` is a copy of the answer's sampler.
    pub(crate) fn new(sampler: &'a mut Sampler, masks: Option<&'a MaskWorker>) -> Self {
        Self { sampler, masks, constraint: None }
    }

    /// Samples a token from a draft's logits and advances to the next position. Returns `None` if no token can be
    /// sampled.
    pub fn draw(&mut self, logits: &[f32]) -> Option<u32> {
        let mask = self.mask()?;
        let id = self.sampler.draw(logits, &mask)?;
        self.accept(id)?;
        Some(id)
    }

    /// If the constraint allows `id` as the next token, advances to the next position and returns true.
    pub fn admits(&mut self, id: u32) -> bool {
        self.mask().is_some_and(|mask| mask.contains(id)) && self.accept(id).is_some()
    }

    /// The mask for the next token. `None` if the constraint fails. The error is reported when the answer uses its own
    /// constraint.
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
