//! Draws from a draft's logits as the sampler would, so that a draft proposes only tokens that can be accepted.

use crate::engine::{Allowed, Constraint, Sampler, constraint::Ahead};

/// The sampler and the constraint as they will be at the next places, if what is drawn here comes.
///
/// It draws with the same bias, penalties, temperature and random numbers as the sampler will, each keyed by the token's
/// place. So a draft whose logits are the model's proposes exactly what will be drawn, at any temperature.
pub struct Outlook<'a> {
    sampler: &'a mut Sampler,
    /// The source of a copy of the constraint, and the copy, once it was needed.
    ahead: Option<&'a Ahead>,
    fork: Option<Box<dyn Constraint>>,
}

impl<'a> Outlook<'a> {
    /// `sampler` is a copy that may go ahead of the answer's.
    pub(in crate::engine) fn new(sampler: &'a mut Sampler, ahead: Option<&'a Ahead>) -> Self {
        Self { sampler, ahead, fork: None }
    }

    /// Draws from a draft's logits and goes on behind it; `None` if nothing is possible.
    pub fn draw(&mut self, logits: &[f32]) -> Option<u32> {
        let allowed = self.allowed()?;
        let id = self.sampler.draw(logits, &allowed)?;
        self.accept(id)?;
        Some(id)
    }

    /// True if `id` may come next; goes on behind it if so.
    pub fn admits(&mut self, id: u32) -> bool {
        self.allowed().is_some_and(|allowed| allowed.contains(id)) && self.accept(id).is_some()
    }

    /// Tokens that may come next; `None` if the constraint cannot tell, which is reported when its own turn comes.
    fn allowed(&mut self) -> Option<Allowed> {
        let Some(ahead) = self.ahead else { return Some(Allowed::Any) };
        if self.fork.is_none() {
            self.fork = ahead.fork();
        }
        self.fork.as_mut()?.allowed().ok()
    }

    fn accept(&mut self, id: u32) -> Option<()> {
        self.fork.as_mut().map_or(Some(()), |fork| fork.accept(id).ok())
    }
}
