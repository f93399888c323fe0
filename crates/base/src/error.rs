//! Errors of files, with what every crate needs to write its own errors.
//!
//! `Display` writes whole paths, for the log and the terminal. `client_message` is the same text with the names of files
//! only, because directories may contain user names. Errors keep paths in fields of type [`PathBuf`], never in text.

use std::{
    borrow::Cow,
    error::Error,
    fmt, io,
    path::{Path, PathBuf},
};

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
    /// A hub does not list the files of a model, because it cannot be reached.
    Unreachable(String),
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
            Self::Memory(why) | Self::Unreachable(why) | Self::Other(why) => why.clone(),
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
pub fn name_only(path: &Path) -> Cow<'_, str> {
    path.file_name().map_or("a directory".into(), |name| name.to_string_lossy())
}
