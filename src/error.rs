//! The error that ends a command. `http/errors.rs` maps the errors of all crates to HTTP statuses.

use moestro_base::error::{StoreError, name_only};
use moestro_chat::error::ChatError;
use moestro_engine::error::EngineError;
use moestro_model::error::ModelError;
use std::{borrow::Cow, io, path::PathBuf};

/// The error that ended a command. Printed in one line.
#[derive(Debug, thiserror::Error)]
pub enum CommandError {
    /// The command line is invalid.
    #[error("{0}")]
    Usage(String),
    #[error("no such directory: {}", .0.display())]
    NoSuchDirectory(PathBuf),
    /// The service manager failed, or one of the service's files could not be written.
    #[error("{0}")]
    Service(String),
    /// This machine computes wrong results. Names them, and says what to do.
    #[error("wrong results on this machine: {0}")]
    Unsound(String),
    #[error("port {port} of {host} is in use; {flag} takes another one, {flag} 0 any that is free")]
    PortInUse { host: String, port: u16, flag: &'static str },
    #[error("{what}: {source}")]
    Io { what: String, source: io::Error },
    #[error(transparent)]
    Chat(#[from] ChatError),
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error(transparent)]
    Model(#[from] ModelError),
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// A second Ctrl-C or SIGTERM.
    #[error("interrupted")]
    Interrupted,
}

impl CommandError {
    /// Adds to an I/O error what the program was doing.
    pub fn io(what: impl Into<String>) -> impl Fn(io::Error) -> Self {
        let what = what.into();
        move |source| Self::Io { what: what.clone(), source }
    }

    pub fn client_message(&self) -> String {
        match self {
            Self::NoSuchDirectory(path) => format!("no such directory: {}", name_only(path)),
            Self::Chat(error) => error.client_message(),
            Self::Store(error) => error.client_message(),
            Self::Model(error) => error.client_message(),
            Self::Engine(error) => error.client_message(),
            other => other.to_string(),
        }
    }

    /// Exit code: 2 for usage errors, 130 for an interruption, 1 otherwise.
    pub fn exit_code(&self) -> u8 {
        match self {
            CommandError::Usage(_) => 2,
            CommandError::Interrupted => 130,
            _ => 1,
        }
    }
}

/// A text without its middle if it has more than `max` bytes.
pub fn bounded(text: &str, max: usize) -> Cow<'_, str> {
    if text.len() <= max {
        return text.into();
    }
    let boundary = |from: usize| (from..).find(|&at| text.is_char_boundary(at)).unwrap_or(text.len());
    let start = boundary(max / 2);
    let end = boundary(text.len() - max / 4);
    format!("{} ... {}", &text[..start], &text[end..]).into()
}
