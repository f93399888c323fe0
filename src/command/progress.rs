//! Progress bars on stderr, which are shown only if stderr is a terminal, and log lines that do not disturb the bars.

use indicatif::{MultiProgress, ProgressBar, ProgressStyle};
use std::{
    io::{self, Write},
    sync::LazyLock,
};

/// All progress bars of the program.
static BARS: LazyLock<MultiProgress> = LazyLock::new(MultiProgress::new);

/// Creates a progress bar of `total` bytes.
pub fn bytes(total: u64, what: impl Into<String>) -> ProgressBar {
    let template = "{msg} [{wide_bar}] {binary_bytes} of {binary_total_bytes}, {binary_bytes_per_sec}, {eta} left";
    let style = ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
    let bar = ProgressBar::new(total).with_style(style.progress_chars("=> ")).with_message(what.into());
    BARS.add(bar)
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
