//! Kinds of metrics, made and registered, and their buckets.
//!
//! Names, labels and buckets are literals: a mistake in one fails every test that makes a `Metrics`, and no input can cause
//! one. Hence `expect`.

use prometheus::{Counter, Histogram, HistogramOpts, IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Opts, Registry};

/// From the first token of the smallest model to a long prompt streamed from a disk.
pub(super) const FIRST_TOKEN: &[f64] =
    &[0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0];
pub(super) const INTER_TOKEN: &[f64] =
    &[0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0];
pub(super) const REQUEST: &[f64] =
    &[0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0];
pub(super) const QUEUE: &[f64] =
    &[0.0001, 0.001, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0];
/// From a greeting to a full context.
pub(super) const DEPTH: &[f64] =
    &[16.0, 64.0, 256.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0, 32768.0, 65536.0, 131_072.0, 262_144.0];
/// One expert is half a megabyte to ten: tens of microseconds from the page cache, milliseconds from a disk.
pub(super) const READ: &[f64] =
    &[25e-6, 50e-6, 100e-6, 200e-6, 500e-6, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0];

pub(super) fn register<C: prometheus::core::Collector + Clone + 'static>(registry: &Registry, metric: C) -> C {
    registry.register(Box::new(metric.clone())).expect("each metric is named once");
    metric
}

pub(super) fn seconds(registry: &Registry, name: &str, help: &str) -> Counter {
    register(registry, Counter::new(name, help).expect("a valid name"))
}

pub(super) fn counter(registry: &Registry, name: &str, help: &str) -> IntCounter {
    register(registry, IntCounter::new(name, help).expect("a valid name"))
}

pub(super) fn counters(registry: &Registry, name: &str, help: &str, labels: &[&str]) -> IntCounterVec {
    register(registry, IntCounterVec::new(Opts::new(name, help), labels).expect("valid labels"))
}

pub(super) fn gauge(registry: &Registry, name: &str, help: &str) -> IntGauge {
    register(registry, IntGauge::new(name, help).expect("a valid name"))
}

pub(super) fn gauges(registry: &Registry, name: &str, help: &str, labels: &[&str]) -> IntGaugeVec {
    register(registry, IntGaugeVec::new(Opts::new(name, help), labels).expect("valid labels"))
}

pub(super) fn histogram(registry: &Registry, name: &str, help: &str, buckets: &[f64]) -> Histogram {
    let opts = HistogramOpts::new(name, help).buckets(buckets.to_vec());
    register(registry, Histogram::with_opts(opts).expect("ascending buckets"))
}
