//! Prometheus' text format made into OpenMetrics'.

/// A counter's family goes without the `_total` of its samples, and the text says where it ends.
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
    fn a_counter_is_named_without_its_suffix() {
        let metrics = Metrics::new("1", "cpu");
        metrics.answered("stop", 10, 3);
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
