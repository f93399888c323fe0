//! Constrained decoding. A [`Constraint`] decides which tokens may come next. The engine itself knows no grammars.
//!
//! [`MaskWorker`] runs a constraint on its own thread. The thread computes the mask for the next token during the
//! forward pass, so the engine rarely waits for a mask.

use crate::error::EngineError;
use std::{
    fmt,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel},
    time::Duration,
};

/// The tokens that may come next.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TokenMask {
    Any,
    /// A bitmask: token `id` is allowed if bit `id % 32` of word `id / 32` is set. Ids beyond the last word are not
    /// allowed.
    Only(Vec<u32>),
}

impl TokenMask {
    pub fn contains(&self, id: u32) -> bool {
        match self {
            TokenMask::Any => true,
            TokenMask::Only(words) => words.get(id as usize / 32).is_some_and(|word| word >> (id % 32) & 1 == 1),
        }
    }
}

/// Restricts the tokens of one answer, from the first token after the prompt.
///
/// The answer can end only where [`Constraint::allowed`] includes an end-of-sequence token. If a method returns `Err`,
/// the request fails with that message.
pub trait Constraint: Send {
    /// The tokens that may come next.
    fn allowed(&mut self) -> Result<TokenMask, String>;

    /// Appends `id`, which is one of the allowed tokens.
    fn accept(&mut self, id: u32) -> Result<(), String>;

    /// An independent copy with the current state. A draft appends its tokens to the copy, because draft tokens may be
    /// rejected.
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

/// The engine waits at most this long for a mask, because other answers wait with it. The slowest of 20,000 random
/// grammars took 11 ms.
const MAX_WAIT: Duration = Duration::from_secs(10);

/// A constraint that computes masks on its own thread. After this value is dropped, the thread ends as soon as it has
/// computed the mask that it is working on.
pub(super) struct MaskWorker {
    commands: Sender<MaskCommand>,
    masks: Receiver<Result<TokenMask, String>>,
}

enum MaskCommand {
    /// Append this token and compute the next mask.
    Append(u32),
    /// Send a copy of the constraint.
    Fork(Sender<Box<dyn Constraint>>),
}

impl MaskWorker {
    /// Starts the thread, which begins to compute the mask for the first token.
    pub fn start(mut constraint: Box<dyn Constraint>) -> Result<Self, EngineError> {
        let (commands, received) = channel();
        let (sender, masks) = channel();
        let work = move || {
            let next_mask = |constraint: &mut Box<dyn Constraint>, id: Option<u32>| {
                let step = AssertUnwindSafe(|| {
                    id.map_or(Ok(()), |id| constraint.accept(id))?;
                    constraint.allowed()
                });
                catch_unwind(step).unwrap_or_else(|_| Err("the grammar thread panicked".into()))
            };
            let mut mask = Some(next_mask(&mut constraint, None));
            loop {
                if mask.take().is_some_and(|mask| sender.send(mask).is_err()) {
                    break;
                }
                match received.recv() {
                    Ok(MaskCommand::Append(id)) => mask = Some(next_mask(&mut constraint, Some(id))),
                    Ok(MaskCommand::Fork(reply)) => drop(reply.send(constraint.fork())),
                    Err(_) => break,
                }
            }
        };
        let thread = std::thread::Builder::new().name("grammar".into()).spawn(work);
        thread.map_err(|error| EngineError::Constraint(error.to_string()))?;
        Ok(Self { commands, masks })
    }

    /// Waits for the mask for the next token. Must be called exactly once per token.
    pub fn next_mask(&self) -> Result<TokenMask, EngineError> {
        self.next_mask_within(MAX_WAIT)
    }

    fn next_mask_within(&self, limit: Duration) -> Result<TokenMask, EngineError> {
        let mask = self.masks.recv_timeout(limit).unwrap_or_else(|error| {
            Err(match error {
                RecvTimeoutError::Timeout => format!("the grammar took longer than {limit:?} for one token"),
                RecvTimeoutError::Disconnected => "the grammar thread ended".into(),
            })
        });
        mask.map_err(EngineError::Constraint)
    }

    /// Appends a sampled token and starts to compute the next mask.
    pub fn append(&self, id: u32) {
        // If the thread has ended, the next call of `next_mask` returns an error.
        let _ = self.commands.send(MaskCommand::Append(id));
    }

    /// A copy of the constraint in its current state. `None` if the thread has ended or does not answer.
    pub fn fork(&self) -> Option<Box<dyn Constraint>> {
        let (reply, copy) = channel();
        self.commands.send(MaskCommand::Fork(reply)).ok()?;
        copy.recv_timeout(MAX_WAIT).ok()
    }
}

#[cfg(test)]
#[path = "constraint_tests.rs"]
mod tests;
