//! [`Abort`]: why a request ends before its answer is complete.

use crate::error::EngineError;
use moestro_model::error::ModelError;
use std::{
    any::Any,
    panic::{AssertUnwindSafe, catch_unwind},
};

/// The reason why a request ends before its answer is complete.
#[derive(Debug)]
pub enum Abort {
    /// The client disconnected between two steps. The sequence can be reused.
    Disconnected,
    /// The client disconnected during a step while other requests waited. The sequence is incomplete.
    StepCancelled,
    Failed(EngineError),
}

impl Abort {
    /// True if the request ended between two steps, so that its state matches its tokens.
    pub fn is_between_steps(&self) -> bool {
        matches!(self, Self::Disconnected | Self::Failed(EngineError::TimedOut | EngineError::Draining))
    }
}

impl From<EngineError> for Abort {
    fn from(error: EngineError) -> Self {
        Abort::Failed(error)
    }
}

impl From<ModelError> for Abort {
    fn from(error: ModelError) -> Self {
        match error {
            ModelError::GivenUp => Abort::StepCancelled,
            error => Abort::Failed(error.into()),
        }
    }
}

/// Runs `work` and turns a panic into an error. After a panic in a forward pass, only the sequences of the pass are
/// invalid, because every pass writes the model's buffers before it reads them.
pub fn catch_panic<T>(work: impl FnOnce() -> Result<T, Abort>) -> Result<T, Abort> {
    let message = |panic: Box<dyn Any + Send>| {
        let text = panic.downcast_ref::<&str>().map(|text| text.to_string());
        text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "no message".into())
    };
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|panic| Err(EngineError::Panicked(message(panic)).into()))
}
