use super::*;
use prometheus::proto::{Metric, MetricFamily, MetricType};
use std::fmt::Write;
#[cfg(target_os = "linux")]
use test_support::own_process::ran_in_own_process;

const HEAD: &str = "\
# Metrics

`GET /metrics` answers in the Prometheus text format, or in OpenMetrics if the `Accept` header asks for it. Units are base units:
seconds and bytes. The table of `crates/base/src/metrics/mod.rs` declares all metrics, and a test generates this page from it.

| metric | type | labels | meaning |
|---|---|---|---|
";

/// The families that have children at the start.
fn families() -> Vec<MetricFamily> {
    Metrics::new("1.2.3", "cpu").registry.gather()
}

/// Kinds of `moestro_process_memory_bytes` on Linux and on macOS.
const PROCESS_MEMORY: [&str; 5] = ["resident", "swapped", "locked", "footprint", "wired"];

/// The families with all children that are known before requests arrive, also those that are created later.
fn documented_families() -> Vec<MetricFamily> {
    let metrics = Metrics::new("1.2.3", "cpu");
    for device in ["cuda", "metal"] {
        metrics.build_info.with_label_values(&["1.2.3", device, ""]);
    }
    for kind in ["lookup", "mtp", "model", "dflash"] {
        metrics.record_draft(kind, 1, 1, 0.0);
    }
    for state in ["calibrate", "plain", "probe", "speculate"] {
        metrics.draft_states.with_label_values(&[state]);
    }
    for kind in PROCESS_MEMORY {
        metrics.process_memory.with_label_values(&[kind]);
    }
    metrics.registry.gather()
}

#[test]
fn documented_kinds_include_the_measured_ones() {
    assert!(os::process_memory().iter().all(|(kind, _)| PROCESS_MEMORY.contains(kind)));
}

/// Text of the label column: each label with its values.
fn label_column(labels: &[&str], children: &[Metric]) -> String {
    let mut column = Vec::new();
    for label in labels {
        let mut values = Vec::new();
        for pair in children.iter().flat_map(Metric::get_label).filter(|pair| pair.name() == *label) {
            let value = format!("`{}`", pair.value());
            if !values.contains(&value) && *label != "version" && !pair.value().is_empty() {
                values.push(value);
            }
        }
        column.push(if values.is_empty() { format!("`{label}`") } else { format!("`{label}`: {}", values.join(", ")) });
    }
    column.join("; ")
}

/// `MOESTRO_WRITE_DOCS=1 cargo test` writes `docs/metrics.md`.
#[test]
fn docs_page_matches_table() {
    let mut page = HEAD.to_owned();
    let families = documented_families();
    for (kind, name, labels, help) in FAMILIES {
        let family = families.iter().find(|family| family.name() == *name);
        let labels = label_column(labels, family.map_or(&[], MetricFamily::get_metric));
        let kind = if *kind == "seconds" { "counter" } else { kind };
        writeln!(page, "| `{name}` | {kind} | {labels} | {help} |").unwrap();
    }
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/metrics.md");
    if std::env::var_os("MOESTRO_WRITE_DOCS").is_some() {
        std::fs::write(path, &page).unwrap();
    }
    assert_eq!(std::fs::read_to_string(path).unwrap(), page, "docs/metrics.md is out of date");
}

#[test]
fn labelled_children_exist_from_the_start() {
    let families = families();
    for (_, name, _, _) in FAMILIES {
        let dynamic = "requests_total draft_cycles_total draft_tokens_total draft_states_total process_memory_bytes";
        let is_dynamic = dynamic.split(' ').any(|suffix| name.strip_prefix("moestro_") == Some(suffix))
            || name.starts_with("process_") && *name != "process_cpu_seconds_total";
        let family = families.iter().find(|family| family.name() == *name);
        assert_eq!(family.is_none(), is_dynamic, "{name}");
        for metric in family.iter().flat_map(|family| family.get_metric()) {
            let value = match family.unwrap().get_field_type() {
                MetricType::COUNTER => metric.get_counter().get_value(),
                MetricType::GAUGE => metric.get_gauge().get_value(),
                _ => metric.get_histogram().get_sample_count() as f64,
            };
            assert_eq!(value, f64::from(u8::from(*name == "moestro_build_info")), "{name}");
        }
    }
    let metrics = Metrics::new("1.2.3", "cpu");
    metrics.record_request("/v1/chat/completions", 200);
    let text = metrics.render();
    for line in [
        "moestro_requests_total{endpoint=\"/v1/chat/completions\",status=\"200\"} 1",
        "moestro_build_info{device=\"cpu\",model=\"\",version=\"1.2.3\"} 1",
    ] {
        assert!(text.lines().any(|other| other == line), "{line} is missing from\n{text}");
    }
}

#[test]
fn build_info_has_one_child() {
    let metrics = Metrics::new("1", "cpu");
    metrics.set_device("metal");
    metrics.set_model("demo");
    let text = metrics.render();
    let lines: Vec<_> = text.lines().filter(|line| line.starts_with("moestro_build_info")).collect();
    assert_eq!(lines, ["moestro_build_info{device=\"metal\",model=\"demo\",version=\"1\"} 1"]);
}

#[test]
fn two_servers_count_separately() {
    let a = Metrics::new("0", "cpu");
    let b = Metrics::new("0", "cpu");
    a.lookups_decode_hit.inc_by(3);
    a.inter_token_seconds.observe(0.012);
    assert!(a.render().contains("moestro_expert_lookups_total{phase=\"decode\",result=\"hit\"} 3"));
    assert!(a.render().contains("moestro_inter_token_seconds_bucket{le=\"0.02\"} 1"));
    assert!(a.render().contains("moestro_inter_token_seconds_bucket{le=\"0.01\"} 0"));
    assert!(b.render().contains("moestro_expert_lookups_total{phase=\"decode\",result=\"hit\"} 0"));
}

#[cfg(target_os = "linux")]
#[test]
fn process_metrics_exist() {
    if ran_in_own_process(process_metrics_exist) {
        return;
    }
    let text = Metrics::new("0", "cpu").render();
    for (_, name, _, _) in FAMILIES.iter().filter(|(_, name, _, _)| name.starts_with("process_")) {
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        let value: f64 = line.unwrap_or_else(|| panic!("{name} is missing")).parse().unwrap();
        assert!(value > 0.0, "{name} is {value}");
    }
}

#[cfg(target_os = "linux")]
#[test]
fn process_memory_is_measured() {
    if ran_in_own_process(process_memory_is_measured) {
        return;
    }
    let metrics = Metrics::new("1", "cpu");
    let resident = || {
        let text = metrics.render();
        let line = text.lines().find_map(|line| line.strip_prefix("moestro_process_memory_bytes{kind=\"resident\"} "));
        line.unwrap_or_else(|| panic!("{text}")).parse::<u64>().unwrap()
    };
    let before = resident();
    let block = std::hint::black_box(vec![1u8; 64 << 20]);
    assert!(resident() >= before + (48 << 20));
    drop(block);
}
