//! Text formats of `GET /metrics`: Prometheus and OpenMetrics.

use prometheus::{Encoder, Registry, TextEncoder};

/// Content type of the Prometheus format.
pub const PROMETHEUS: &str = "text/plain; version=0.0.4; charset=utf-8";

/// Content type of the OpenMetrics format.
pub const OPENMETRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

pub(super) fn prometheus(registry: &Registry) -> String {
    let mut out = Vec::with_capacity(16 << 10);
    // The encoder fails only for a family without metrics, and `gather` omits such families.
    if let Err(error) = TextEncoder::new().encode(&registry.gather(), &mut out) {
        tracing::error!(%error, "cannot render metrics");
    }
    String::from_utf8_lossy(&out).into_owned()
}

/// Converts the Prometheus format to OpenMetrics. The name of a counter's family loses the suffix `_total`, but the
/// samples of the family keep the suffix. The text ends with an EOF line.
pub(super) fn openmetrics(text: &str) -> String {
    let counters: Vec<&str> = text
        .lines()
        .filter_map(|line| line.strip_prefix("# TYPE ")?.strip_suffix(" counter")?.strip_suffix("_total"))
        .collect();
    let mut out = String::with_capacity(text.len());
    for line in text.lines() {
        let family = line.strip_prefix("# HELP ").or_else(|| line.strip_prefix("# TYPE "));
        let name = family.and_then(|rest| rest.split(' ').next()).and_then(|name| name.strip_suffix("_total"));
        match name.filter(|name| counters.contains(name)) {
            Some(name) => out += &line.replacen(&format!("{name}_total"), name, 1),
            None => out += line,
        }
        out.push('\n');
    }
    out + "# EOF\n"
}

#[cfg(test)]
mod tests {
    use super::super::Metrics;

    #[test]
    fn openmetrics_counter_has_no_suffix() {
        let metrics = Metrics::new("1", "cpu");
        metrics.record_answer("stop", 10, 3);
        let text = metrics.render_openmetrics();
        for line in [
            "# TYPE moestro_answers counter",
            "# HELP moestro_answers Answers by how they ended",
            "moestro_answers_total{finish_reason=\"stop\"} 1",
            "# TYPE moestro_expert_slots gauge",
            "moestro_request_prompt_tokens_bucket{le=\"16\"} 1",
        ] {
            assert!(text.lines().any(|other| other == line), "{line} is missing from\n{text}");
        }
        assert!(text.ends_with("\n# EOF\n"));
    }
}
