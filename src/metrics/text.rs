//! The metrics as text, with what is measured only when somebody asks.

use super::{Metrics, openmetrics::openmetrics};
use crate::platform::os;
use prometheus::{Encoder, TextEncoder};

/// The content type of [`Metrics::render`].
pub const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// The content type of [`Metrics::render_openmetrics`].
pub const OPENMETRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

impl Metrics {
    /// Prometheus' text format, see [`CONTENT_TYPE`].
    pub fn render(&self) -> String {
        for (kind, bytes) in os::process_memory() {
            self.process_memory.with_label_values(&[kind]).set(bytes as i64);
        }
        let mut out = Vec::with_capacity(16 << 10);
        // The encoder refuses a metric family without metrics and nothing else; `gather` leaves those out.
        if let Err(error) = TextEncoder::new().encode(&self.registry.gather(), &mut out) {
            tracing::error!(%error, "metrics could not be rendered");
        }
        String::from_utf8_lossy(&out).into_owned()
    }

    /// The same as OpenMetrics has it, see [`OPENMETRICS`].
    pub fn render_openmetrics(&self) -> String {
        openmetrics(&self.render())
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn the_processes_memory_is_measured() {
        let metrics = Metrics::new("1", "cpu");
        let resident = || {
            let text = metrics.render();
            let line =
                text.lines().find_map(|line| line.strip_prefix("moestro_process_memory_bytes{kind=\"resident\"} "));
            line.unwrap_or_else(|| panic!("{text}")).parse::<u64>().unwrap()
        };
        let before = resident();
        let block = std::hint::black_box(vec![1u8; 64 << 20]);
        assert!(resident() >= before + (48 << 20));
        drop(block);
    }
}
