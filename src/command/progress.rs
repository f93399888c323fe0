//! Progress bars on stderr, which are shown only if stderr is a terminal, and log lines that do not disturb the bars.

use super::download_speed::DownloadSpeed;
use indicatif::{HumanBytes, HumanDuration, MultiProgress, ProgressBar, ProgressState, ProgressStyle};
use std::{
    fmt,
    io::{self, Write},
    sync::{Arc, LazyLock},
    time::Duration,
};

/// All progress bars of the program.
static BARS: LazyLock<MultiProgress> = LazyLock::new(MultiProgress::new);

/// Creates a progress bar of `total` bytes.
pub fn bytes(total: u64, what: impl Into<String>) -> ProgressBar {
    add(total, what.into(), style("{binary_bytes_per_sec}, {eta} left"))
}

/// Creates the progress bar of a download. Its position includes bytes of earlier runs, and `speed` does not.
pub fn download(what: impl Into<String>, speed: Arc<DownloadSpeed>) -> ProgressBar {
    let write_speed = move |state: &ProgressState, out: &mut dyn fmt::Write| {
        let per_second = speed.per_second();
        let missing = state.len().unwrap_or_default().saturating_sub(state.pos());
        let _ = write!(out, "{}/s", HumanBytes(per_second as u64));
        if per_second >= 1.0 {
            let left = Duration::from_secs((missing as f64 / per_second) as u64);
            let _ = write!(out, ", {:#} left", HumanDuration(left));
        }
    };
    add(0, what.into(), style("{speed}").with_key("speed", write_speed))
}

/// True if the log has only errors. There are no progress bars and hints then.
pub fn is_quiet() -> bool {
    !tracing::enabled!(tracing::Level::WARN)
}

fn style(speed: &str) -> ProgressStyle {
    let template = format!("{{msg}} [{{wide_bar}}] {{binary_bytes}} of {{binary_total_bytes}}, {speed}");
    ProgressStyle::with_template(&template).unwrap_or_else(|_| ProgressStyle::default_bar()).progress_chars("=> ")
}

fn add(total: u64, what: String, style: ProgressStyle) -> ProgressBar {
    if is_quiet() {
        return ProgressBar::hidden();
    }
    BARS.add(ProgressBar::new(total).with_style(style).with_message(what))
}

/// stderr for log lines. Hides the progress bars while a line is written, so that no fragments of a bar stay on the
/// screen.
pub struct LogStderr;

impl Write for LogStderr {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        BARS.suspend(|| io::stderr().write(bytes))
    }

    fn flush(&mut self) -> io::Result<()> {
        io::stderr().flush()
    }
}
