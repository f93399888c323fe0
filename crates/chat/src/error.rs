//! Errors of templates and tokenizers.

use moestro_base::error::name_only;
use std::path::PathBuf;

/// Errors of templates and tokenizers.
#[derive(Debug, thiserror::Error)]
pub enum ChatError {
    /// The template called `raise_exception` with this text, or a message is not an object.
    #[error("{0}")]
    Refused(String),
    #[error("the chat template failed: {0}")]
    Template(String),
    /// The template is valid but cannot be rendered with this conversation.
    #[error("the chat template fails on this conversation: {0}")]
    Conversation(String),
    /// A field of `chat_template_kwargs` with the name of a built-in function or variable of templates.
    #[error("chat_template_kwargs may not set `{0}`")]
    Reserved(String),
    #[error("tokenizer: {0}")]
    Tokenizer(String),
    /// A file of the template or the tokenizer is missing or damaged.
    #[error("{}: {why}", path.display())]
    File { path: PathBuf, why: String },
}

impl ChatError {
    pub fn client_message(&self) -> String {
        match self {
            Self::File { path, why } => format!("{}: {why}", name_only(path)),
            other => other.to_string(),
        }
    }
}
