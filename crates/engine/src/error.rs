//! Reasons why a request is not queued or ends early.

use moestro_compute::device::GPU_INTERACTIVITY;
use moestro_model::error::ModelError;

/// Reasons why a request is not queued or ends early.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// The queue refused the request, or gave it up for a request of another client.
    #[error("the queue is full")]
    QueueFull { retry_seconds: u32 },
    #[error("the server is shutting down")]
    Draining,
    #[error("the model was unloaded for another request because earlier answers were not read in time")]
    Unloaded,
    #[error("the request exceeded its time limit")]
    TimedOut,
    #[error("the prompt is empty")]
    EmptyPrompt,
    #[error("the prompt has {prompt} tokens, the context {context}")]
    PromptTooLong { prompt: usize, context: usize },
    /// Every logit is NaN or negative infinity: the checkpoint or a kernel is broken.
    #[error("the model's logits are not numbers")]
    NoLogits,
    /// A constrained answer has no valid next token.
    #[error("cannot continue the answer in the requested format ({0}); try again with a simpler format")]
    Constraint(String),
    /// A bug. The sequence is discarded and the engine continues.
    #[error("the model panicked: {0}")]
    Panicked(String),
    #[error(transparent)]
    Model(#[from] ModelError),
    #[error("the engine stopped")]
    Stopped,
}

impl EngineError {
    /// True if macOS ended GPU work because it delayed the screen.
    pub fn has_delayed_screen(&self) -> bool {
        matches!(self, Self::Model(error) if error.to_string().contains(GPU_INTERACTIVITY))
    }

    pub fn client_message(&self) -> String {
        match self {
            Self::Model(error) => error.client_message(),
            other => other.to_string(),
        }
    }
}
