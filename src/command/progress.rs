//! Progress bars on stderr, only if it is a terminal.

use indicatif::{ProgressBar, ProgressStyle};

/// A bar of `total` bytes.
pub fn bytes(total: u64, what: impl Into<String>) -> ProgressBar {
    let template = "{msg} [{bar:30}] {binary_bytes} of {binary_total_bytes}, {binary_bytes_per_sec}, {eta} left";
    let style = ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
    ProgressBar::new(total).with_style(style.progress_chars("=> ")).with_message(what.into())
}
