//! Sets up the log: its destination and the format of its lines.

use crate::{
    cli::{Command, values::LogFormat},
    error::CommandError,
};
use std::io::{self, IsTerminal};
use tracing_appender::{
    non_blocking::{NonBlockingBuilder, WorkerGuard},
    rolling::{RollingFileAppender, Rotation},
};
use tracing_subscriber::EnvFilter;

/// Daily log files that are kept.
const MAX_FILES: usize = 7;

/// Sets up the log of a command. A server logs from INFO, other commands from WARN: their result is what they print.
///
/// Lines are written by a thread, so a full pipe or a dead terminal never blocks or ends a request: lines that cannot be
/// written are dropped. The returned guard writes the remaining lines when it is dropped.
///
/// # Errors
/// The log directory is not writable.
pub fn init(command: &Command) -> Result<WorkerGuard, CommandError> {
    let (level, dir, format) = match command {
        Command::Serve(serve) => ("moestro=info,warn", serve.log_dir.as_ref(), serve.log_format),
        _ => ("warn", None, LogFormat::Text),
    };
    let filter = EnvFilter::try_from_env("MOESTRO_LOG").unwrap_or_else(|_| EnvFilter::new(level));
    let on_terminal = dir.is_none() && io::stderr().is_terminal();
    let colours = on_terminal && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
    let builder = NonBlockingBuilder::default().lossy(true).thread_name("log");
    let (writer, guard) = match dir {
        None => builder.finish(io::stderr()),
        Some(dir) => {
            let files = RollingFileAppender::builder().rotation(Rotation::DAILY).max_log_files(MAX_FILES);
            let files = files.filename_prefix("moestro.log").build(dir);
            builder.finish(files.map_err(|error| CommandError::Usage(format!("--log-dir: {error}")))?)
        }
    };
    // tracing-subscriber reports its own errors to stderr, and panics if stderr is closed.
    let lines = tracing_subscriber::fmt().with_env_filter(filter).with_ansi(colours).with_writer(writer);
    let lines = lines.log_internal_errors(false);
    match format {
        LogFormat::Text => lines.init(),
        LogFormat::Json => lines.json().flatten_event(true).init(),
    }
    Ok(guard)
}
