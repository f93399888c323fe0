//! The destination of the log, and the format of its lines.

use crate::{
    cli::{Command, values::LogFormat},
    error::CommandError,
};
use std::io::{self, IsTerminal};
use tracing_appender::rolling::{RollingFileAppender, Rotation};
use tracing_subscriber::{EnvFilter, fmt::writer::BoxMakeWriter};

/// Files of a day each that are kept.
const DAYS: usize = 7;

/// Sets up the log of a command. A server tells what it does; the answer of any other command is what it prints.
///
/// # Errors
/// The directory of the log cannot be written.
pub fn init(command: &Command) -> Result<(), CommandError> {
    let (level, dir, format) = match command {
        Command::Serve(serve) => ("moestro=info,warn", serve.log_dir.as_ref(), serve.log_format),
        _ => ("warn", None, LogFormat::Text),
    };
    let filter = EnvFilter::try_from_env("MOESTRO_LOG").unwrap_or_else(|_| EnvFilter::new(level));
    let terminal = dir.is_none() && io::stderr().is_terminal();
    let colours = terminal && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
    let writer = match dir {
        None => BoxMakeWriter::new(io::stderr),
        Some(dir) => {
            let files = RollingFileAppender::builder().rotation(Rotation::DAILY).max_log_files(DAYS);
            let files = files.filename_prefix("moestro.log").build(dir);
            BoxMakeWriter::new(files.map_err(|error| CommandError::Usage(format!("--log-dir: {error}")))?)
        }
    };
    let lines = tracing_subscriber::fmt().with_env_filter(filter).with_ansi(colours).with_writer(writer);
    match format {
        LogFormat::Text => lines.init(),
        LogFormat::Json => lines.json().flatten_event(true).init(),
    }
    Ok(())
}
