//! The seam through which an answer is held to a form: before each token is drawn, a [`Constraint`] says which ones may
//! come. The engine knows neither grammars nor JSON.
//!
//! [`Ahead`] gives a constraint a thread of its own: the tokens that may follow are worked out while the forward pass
//! runs, so the engine rarely waits for them.

use crate::error::EngineError;
use std::{
    fmt,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::mpsc::{Receiver, Sender, channel},
};

/// Tokens that may come next.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Allowed {
    Any,
    /// Token `id` may come if bit `id % 32` of word `id / 32` is set. Ids beyond the last word may not.
    Only(Vec<u32>),
}

impl Allowed {
    pub fn contains(&self, id: u32) -> bool {
        match self {
            Allowed::Any => true,
            Allowed::Only(words) => words.get(id as usize / 32).is_some_and(|word| word >> (id % 32) & 1 == 1),
        }
    }
}

/// Holds one answer to a form, token by token, from the first token after the prompt.
///
/// An end-of-sequence token is a token like others: it may come where [`Constraint::allowed`] has it. `Err` ends the
/// request with what it says.
pub trait Constraint: Send {
    /// Tokens that may come next.
    fn allowed(&mut self) -> Result<Allowed, String>;

    /// `id`, one of the allowed tokens, came.
    fn accept(&mut self, id: u32) -> Result<(), String>;

    /// A copy that goes its own way from here: to start an answer anew, or to look at tokens that may be taken back.
    fn fork(&self) -> Box<dyn Constraint>;
}

impl Clone for Box<dyn Constraint> {
    fn clone(&self) -> Self {
        self.fork()
    }
}

impl fmt::Debug for dyn Constraint {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("Constraint")
    }
}

/// A constraint that works one token ahead, on a thread that ends with it.
pub(super) struct Ahead {
    drawn: Sender<Word>,
    allowed: Receiver<Result<Allowed, String>>,
}

/// A message to its thread.
enum Word {
    Drew(u32),
    /// A copy is wanted, as the constraint is behind what was drawn.
    Fork(Sender<Box<dyn Constraint>>),
}

impl Ahead {
    /// Begins to work out what may come first.
    pub fn start(mut constraint: Box<dyn Constraint>) -> Result<Self, EngineError> {
        let (drawn, words) = channel();
        let (masks, allowed) = channel();
        let work = move || {
            let next = |constraint: &mut Box<dyn Constraint>, id: Option<u32>| {
                let step = AssertUnwindSafe(|| {
                    id.map_or(Ok(()), |id| constraint.accept(id))?;
                    constraint.allowed()
                });
                catch_unwind(step).unwrap_or_else(|_| Err("it panicked".into()))
            };
            let mut mask = Some(next(&mut constraint, None));
            loop {
                if mask.take().is_some_and(|mask| masks.send(mask).is_err()) {
                    break;
                }
                match words.recv() {
                    Ok(Word::Drew(id)) => mask = Some(next(&mut constraint, Some(id))),
                    Ok(Word::Fork(to)) => drop(to.send(constraint.fork())),
                    Err(_) => break,
                }
            }
        };
        let thread = std::thread::Builder::new().name("grammar".into()).spawn(work);
        thread.map_err(|error| EngineError::Constraint(error.to_string()))?;
        Ok(Self { drawn, allowed })
    }

    /// Tokens that may come next; waits for them if need be. One call a token.
    pub fn allowed(&self) -> Result<Allowed, EngineError> {
        let mask = self.allowed.recv().unwrap_or_else(|_| Err("its thread ended".into()));
        mask.map_err(EngineError::Constraint)
    }

    /// `id` was drawn: begins to work out what may follow.
    pub fn drew(&self, id: u32) {
        // A thread that has ended is noticed by the next `allowed`.
        let _ = self.drawn.send(Word::Drew(id));
    }

    /// A copy behind all that was drawn; `None` if its thread has ended.
    pub fn fork(&self) -> Option<Box<dyn Constraint>> {
        let (to, copy) = channel();
        self.drawn.send(Word::Fork(to)).ok()?;
        copy.recv().ok()
    }
}

#[cfg(test)]
mod tests;
