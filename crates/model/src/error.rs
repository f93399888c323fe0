//! Errors of checkpoints, models and images.

use moestro_base::error::StoreError;

/// Errors of a model's configuration and forward pass.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    #[error("config.json: {0}")]
    Config(String),
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error("tensor operation: {0}")]
    Tensor(#[from] candle_core::Error),
    #[error("the context of {context} tokens is full")]
    ContextFull { context: usize },
    #[error("token id {id} is outside the vocabulary of {vocab}")]
    TokenOutOfRange { id: u32, vocab: usize },
    #[error("{0}")]
    Memory(String),
    /// A GPU or its driver failed.
    #[error("{0}")]
    Device(String),
    /// The caller cancelled the pass.
    #[error("the pass was cancelled")]
    GivenUp,
}

impl ModelError {
    pub fn client_message(&self) -> String {
        match self {
            Self::Store(error) => error.client_message(),
            other => other.to_string(),
        }
    }
}

/// Reasons why an image is not shown to the model. Each completes the sentence "the image ...".
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ImageError {
    #[error("is not a PNG, JPEG, WebP or GIF file")]
    Format,
    #[error("has {bytes} bytes; at most {max} are allowed")]
    Bytes { bytes: usize, max: usize },
    #[error("has {width} x {height} pixels; 1 to {max} pixels are allowed")]
    Pixels { width: u32, height: u32, max: u64 },
    #[error("is {width} x {height}; its longer side may be at most {max} times the shorter one")]
    Ratio { width: u32, height: u32, max: u32 },
    #[error("is damaged: {0}")]
    Damaged(String),
}
