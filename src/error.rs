//! One error enum per layer. `http/errors.rs` maps them to HTTP statuses.
//!
//! `Display` writes whole paths, for the log and the terminal. `client_message` is the same text with the names of files
//! only, because directories may contain user names. Errors keep paths in fields of type [`PathBuf`], never in text.

use std::{
    borrow::Cow,
    error::Error,
    fmt, io,
    path::{Path, PathBuf},
};

/// What Metal's error says if macOS ended GPU work because it delayed the screen.
pub const GPU_INTERACTIVITY: &str = "Impacting Interactivity";
/// What a user can do about that error.
pub const GPU_INTERACTIVITY_REMEDY: &str =
    "start Moestro with AGX_RELAX_CDM_CTXSTORE_TIMEOUT=1, use a smaller --prefill-chunk, or let the display sleep";

/// Errors of templates and tokenizers.
#[derive(Debug, thiserror::Error)]
pub enum ChatError {
    /// The template called `raise_exception` with this text.
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

/// Errors of files and checkpoints.
#[derive(Debug)]
pub enum StoreError {
    Io {
        path: PathBuf,
        source: io::Error,
    },
    NotACheckpoint {
        path: PathBuf,
        why: String,
    },
    /// Packed experts are incomplete or belong to another checkpoint.
    NotAPack {
        path: PathBuf,
        why: String,
    },
    Missing {
        name: String,
        dir: PathBuf,
    },
    Mismatch {
        name: String,
        file: PathBuf,
        expected: String,
        found: String,
    },
    Unknown {
        name: String,
        file: PathBuf,
    },
    /// A read of one expert failed. The request fails; the server continues.
    Read {
        layer: usize,
        expert: usize,
        file: PathBuf,
        offset: u64,
        len: usize,
        source: io::Error,
    },
    /// The slots of the experts could not be allocated.
    Memory(String),
    /// The demo model cannot be written to any of its directories.
    DemoUnwritable(Vec<StoreError>),
    Other(String),
}

impl StoreError {
    /// The error in words. `show` writes paths.
    fn text(&self, show: fn(&Path) -> Cow<'_, str>) -> String {
        match self {
            Self::Io { path, source } => format!("{}: {source}", show(path)),
            Self::NotACheckpoint { path, why } => format!("{}: not a checkpoint: {why}", show(path)),
            Self::NotAPack { path, why } => format!("{}: not this checkpoint's pack: {why}", show(path)),
            Self::Missing { name, dir } => format!("tensor {name} is missing (looked for it in {})", show(dir)),
            Self::Mismatch { name, file, expected, found } => {
                format!("tensor {name} in {}: expected {expected}, found {found}", show(file))
            }
            Self::Unknown { name, file } => format!("tensor {name} in {}: not part of this architecture", show(file)),
            Self::Read { layer, expert, file, offset, len, source } => format!(
                "layer {layer}, expert {expert}: reading {len} bytes at offset {offset} of {}: {source}",
                show(file)
            ),
            Self::DemoUnwritable(refused) => {
                let refused: Vec<String> = refused.iter().map(|error| error.text(show)).collect();
                format!("cannot write the demo model anywhere: {}", refused.join("; "))
            }
            Self::Memory(why) | Self::Other(why) => why.clone(),
        }
    }

    pub fn client_message(&self) -> String {
        self.text(name_only)
    }

    /// Adds the path of the file or directory to an I/O error.
    pub fn at(path: &Path) -> impl Fn(io::Error) -> Self + Copy {
        move |source| Self::Io { path: path.to_owned(), source }
    }
}

impl fmt::Display for StoreError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text(Path::to_string_lossy))
    }
}

impl Error for StoreError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match self {
            Self::Io { source, .. } | Self::Read { source, .. } => Some(source),
            _ => None,
        }
    }
}

/// The last part of a path.
fn name_only(path: &Path) -> Cow<'_, str> {
    path.file_name().map_or("a directory".into(), |name| name.to_string_lossy())
}

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
    pub fn client_message(&self) -> String {
        match self {
            Self::Model(error) => error.client_message(),
            other => other.to_string(),
        }
    }
}

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
    #[error("port {port} of {host} is in use; --port takes another one, --port 0 any that is free")]
    PortInUse { host: String, port: u16 },
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
