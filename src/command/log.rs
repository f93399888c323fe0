//! Sets up the log: its destination and the format of its lines.

use super::{log_files::LogFiles, progress::LogStderr};
use crate::{
    cli::{
        Cli, Command,
        values::{LogFormat, LogLevel},
    },
    error::CommandError,
    http::REQUEST_LOG,
};
use moestro_base::platform::DeferredSignals;
use std::{
    fmt::{self, Debug, Write as _},
    io::{self, IsTerminal, Write},
    sync::mpsc::{Sender, SyncSender, TrySendError, channel, sync_channel},
    thread,
    time::{Duration, Instant},
};
use tracing::{Event, Subscriber, field::Field};
use tracing_subscriber::{
    EnvFilter,
    field::MakeExt,
    fmt::{
        FmtContext, FormatEvent, FormatFields,
        format::{Format, Writer, debug_fn},
        time::{FormatTime, SystemTime},
    },
    registry::LookupSpan,
};

/// Maximum number of lines that wait for the writing thread. When this many lines are waiting, new lines are dropped.
const MAX_WAITING: usize = 16_384;
/// Time to write the last lines before the process exits.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(1);

/// Sets up the log of a command. A server logs from INFO. Other commands log from WARN, because their output is what
/// they print. `--log-level` changes the level, and `MOESTRO_LOG` selects levels by module.
///
/// A separate thread writes the lines, so a full pipe or a dead terminal never blocks or ends a request. Lines that
/// cannot be written are dropped. When the returned guard is dropped, it waits until the remaining lines are written.
///
/// # Errors
/// The log directory is not writable.
pub fn init(cli: &Cli) -> Result<LogGuard, CommandError> {
    let (level, dir, format) = match &cli.command {
        Command::Serve(serve) => ("moestro=info,warn", serve.log_dir.as_ref(), serve.log_format),
        _ => ("warn", None, LogFormat::Text),
    };
    let level = match cli.log_level() {
        None => level,
        Some(LogLevel::Error) => "error",
        Some(LogLevel::Warn) => "warn",
        Some(LogLevel::Info) => "moestro=info,warn",
        Some(LogLevel::Debug) => "moestro=debug,warn",
        Some(LogLevel::Trace) => "moestro=trace,info",
    };
    let filter = EnvFilter::try_from_env("MOESTRO_LOG").unwrap_or_else(|_| EnvFilter::new(level));
    let on_terminal = dir.is_none() && io::stderr().is_terminal();
    let colours = on_terminal && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
    let (lines, guard) = match dir {
        None => write_in_thread(LogStderr),
        Some(dir) => {
            let files = LogFiles::open(dir)
                .map_err(|error| CommandError::Usage(format!("--log-dir {}: {error}", dir.display())))?;
            write_in_thread(files)
        }
    }
    .map_err(CommandError::io("the log"))?;
    // tracing-subscriber reports its own errors to stderr, and panics if stderr is closed.
    let layer = tracing_subscriber::fmt().with_env_filter(filter).with_ansi(colours).log_internal_errors(false);
    let layer = layer.with_writer(move || lines.clone());
    match format {
        LogFormat::Text => layer.event_format(TextLines::default()).fmt_fields(text_fields()).init(),
        LogFormat::Json => layer.json().flatten_event(true).init(),
    }
    Ok(guard)
}

/// Writes the fields of a text line. JSON lines do not need this, because JSON escapes control characters.
fn text_fields() -> impl for<'a> FormatFields<'a> {
    let field = |line: &mut Writer<'_>, field: &Field, value: &dyn Debug| match field.name() {
        "message" => write!(line, "{}", OneLine(value)),
        name => write!(line, "{name}={}", OneLine(value)),
    };
    debug_fn(field).delimited(" ")
}

/// Displays a value without control characters. For example, the name of a file must not start another line or reach
/// the terminal as an escape sequence.
struct OneLine<'a>(&'a dyn Debug);

impl fmt::Display for OneLine<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for c in format!("{:?}", self.0).chars() {
            if c.is_control() { write!(f, "{}", c.escape_default())? } else { f.write_char(c)? }
        }
        Ok(())
    }
}

/// Human-readable lines without module names. The line of a request has only its sentence, without the fields.
struct TextLines(Format);

impl Default for TextLines {
    fn default() -> Self {
        Self(Format::default().with_target(false))
    }
}

impl<S, N> FormatEvent<S, N> for TextLines
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(&self, context: &FmtContext<'_, S, N>, mut line: Writer<'_>, event: &Event<'_>) -> fmt::Result {
        if event.metadata().target() != REQUEST_LOG {
            return self.0.format_event(context, line, event);
        }
        SystemTime.format_time(&mut line)?;
        write!(line, " {:>5} ", event.metadata().level())?;
        let mut written = Ok(());
        event.record(&mut |field: &Field, value: &dyn Debug| {
            if field.name() == "message" {
                written = write!(line, "{}", OneLine(value));
            }
        });
        written.and_then(|()| writeln!(line))
    }
}

enum LogMessage {
    Line(Vec<u8>),
    /// The writing thread drops this sender when all earlier lines are written.
    Finish(Sender<()>),
}

/// Sends lines to the writing thread.
#[derive(Clone)]
struct LogLines(SyncSender<LogMessage>);

impl Write for LogLines {
    /// Accepts the whole line and never waits. If the queue is full, the line is dropped.
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let _ = self.0.try_send(LogMessage::Line(line.to_vec()));
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Waits when it is dropped, up to [`FLUSH_TIMEOUT`], until the remaining lines are written.
pub struct LogGuard(LogLines);

impl Drop for LogGuard {
    fn drop(&mut self) {
        let end = Instant::now() + FLUSH_TIMEOUT;
        let (sender, finished) = channel();
        let mut message = LogMessage::Finish(sender);
        while let Err(TrySendError::Full(back)) = self.0.0.try_send(message) {
            if Instant::now() >= end {
                return;
            }
            message = back;
            thread::sleep(Duration::from_millis(10));
        }
        let _ = finished.recv_timeout(end.saturating_duration_since(Instant::now()));
    }
}

/// Starts a thread that writes lines. If `writer` fails, the line is dropped, and the thread continues with the next
/// line.
fn write_in_thread(mut writer: impl Write + Send + 'static) -> io::Result<(LogLines, LogGuard)> {
    let (sender, messages) = sync_channel(MAX_WAITING);
    thread::Builder::new().name("log".into()).spawn(move || {
        // A signal that ends the process must reach a thread that may defer it.
        let _signals = DeferredSignals::begin();
        for message in messages {
            match message {
                LogMessage::Line(line) => drop(writer.write_all(&line)),
                LogMessage::Finish(finished) => drop(finished),
            }
        }
    })?;
    let lines = LogLines(sender);
    Ok((lines.clone(), LogGuard(lines)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{os::unix::net::UnixStream, path::Path, sync::Arc};

    /// The text lines that `log` produces.
    fn text_lines(log: impl FnOnce()) -> Vec<String> {
        let (mut read, write) = io::pipe().unwrap();
        let writer = move || write.try_clone().unwrap();
        let lines = tracing_subscriber::fmt().with_ansi(false).with_writer(writer);
        let lines = lines.event_format(TextLines::default()).fmt_fields(text_fields());
        tracing::subscriber::with_default(lines.finish(), log);
        let mut text = String::new();
        io::Read::read_to_string(&mut read, &mut text).unwrap();
        text.split_terminator('\n').map(str::to_owned).collect()
    }

    #[test]
    fn request_line_has_no_fields() {
        let lines = text_lines(|| {
            tracing::info!(target: REQUEST_LOG, status = 200, id = "req_1", "chat 18 -> 30 tokens, 200");
            tracing::warn!(error = "full", count = 3, "cannot write");
        });
        let [request, other] = lines.try_into().unwrap();
        assert!(request.ends_with("Z  INFO chat 18 -> 30 tokens, 200"), "{request}");
        assert!(other.ends_with("Z  WARN cannot write error=\"full\" count=3"), "{other}");
    }

    #[test]
    fn control_characters_forge_no_line() {
        let forged = "m\n2026-01-01T00:00:00Z  INFO forged\r\u{1b}]52;c;aGk=\u{7}\u{9b}2J\0\u{7f}";
        let lines = text_lines(|| {
            tracing::info!("{forged} is loaded after 1 s");
            tracing::info!(target: REQUEST_LOG, "chat {forged}, 200");
            tracing::warn!(dir = %forged, path = ?Path::new(forged), name = forged, "cannot read");
            let _span = tracing::info_span!("load", model = %forged).entered();
            tracing::error!(error = &io::Error::other(forged) as &dyn std::error::Error, "failed");
        });
        assert_eq!(lines.len(), 4, "{lines:?}");
        for line in lines {
            assert!(!line.contains(char::is_control), "{line:?}");
            assert!(line.contains("m\\n2026"), "{line:?}");
        }
    }

    #[test]
    fn waiting_lines_are_written_at_exit() {
        let (read, write) = io::pipe().unwrap();
        let (mut lines, guard) = write_in_thread(write).unwrap();
        for number in 0..1000 {
            writeln!(lines, "line {number}").unwrap();
        }
        drop((guard, lines));
        let text = io::read_to_string(read).unwrap();
        assert_eq!(text.lines().count(), 1000);
        assert!(text.ends_with("line 999\n"), "{text}");
    }

    #[test]
    fn blocked_writer_never_blocks_a_line() {
        // Nothing reads from the socket, so the writer blocks for ever.
        let (reader, write) = UnixStream::pair().unwrap();
        let (mut lines, guard) = write_in_thread(write).unwrap();
        let line = vec![b'x'; 4096];
        for _ in 0..MAX_WAITING + 1000 {
            lines.write_all(&line).unwrap();
        }
        drop(guard);
        drop(reader);
    }

    #[test]
    fn failed_line_does_not_end_the_log() {
        struct Failing(Arc<parking_lot::Mutex<Vec<u8>>>);
        impl Write for Failing {
            fn write(&mut self, line: &[u8]) -> io::Result<usize> {
                if line.starts_with(b"bad") {
                    return Err(io::Error::from(io::ErrorKind::StorageFull));
                }
                self.0.lock().extend(line);
                Ok(line.len())
            }
            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
        let written = Arc::default();
        let (mut lines, guard) = write_in_thread(Failing(Arc::clone(&written))).unwrap();
        for line in ["bad\n", "good\n", "bad\n", "end\n"] {
            lines.write_all(line.as_bytes()).unwrap();
        }
        drop(guard);
        assert_eq!(&*written.lock(), b"good\nend\n");
    }
}
