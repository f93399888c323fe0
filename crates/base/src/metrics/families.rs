//! Metric families: constructors for each kind, and histogram buckets. A family has one child for each combination of
//! values of its labels.
//!
//! Names, labels and buckets are literals that no input can change. A mistake in a literal makes every test fail, so
//! the constructors may panic (`expect`).

use prometheus::{
    CounterVec, Error, HistogramOpts, HistogramVec, IntCounterVec, IntGaugeVec, Opts, Registry, core::Collector,
};

/// Buckets for the seconds to the first token: from a short prompt of a small model to a long prompt of a model that is
/// streamed from disk.
pub const FIRST_TOKEN: &[f64] =
    &[0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0];
/// Buckets for the seconds between two tokens.
pub const INTER_TOKEN: &[f64] =
    &[0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0];
/// Buckets for the seconds of a request.
pub const REQUEST: &[f64] =
    &[0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0];
/// Buckets for the seconds in the queue.
pub const QUEUE: &[f64] = &[0.0001, 0.001, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0];
/// Buckets for the number of sequences in a pass.
pub const SEQUENCES: &[f64] = &[1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 16.0, 32.0, 64.0];
/// Buckets for the number of rows in a pass: one row per sequence, and the rows of verified drafts and of chunks of a
/// prompt.
pub const ROWS: &[f64] = &[1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0];
/// Buckets for a number of tokens: from a greeting to a full context.
pub const TOKENS: &[f64] =
    &[16.0, 64.0, 256.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0, 32768.0, 65536.0, 131_072.0, 262_144.0];
/// Buckets for the seconds to read an expert of 0.5 to 10 MB: tens of microseconds from the page cache, milliseconds
/// from a disk.
pub const READ: &[f64] =
    &[25e-6, 50e-6, 100e-6, 200e-6, 500e-6, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0];

pub fn counter(registry: &Registry, name: &str, help: &str, labels: &[&str], _: &[f64]) -> IntCounterVec {
    register(registry, IntCounterVec::new(Opts::new(name, help), labels))
}

/// A counter of fractional seconds.
pub fn seconds(registry: &Registry, name: &str, help: &str, labels: &[&str], _: &[f64]) -> CounterVec {
    register(registry, CounterVec::new(Opts::new(name, help), labels))
}

pub fn gauge(registry: &Registry, name: &str, help: &str, labels: &[&str], _: &[f64]) -> IntGaugeVec {
    register(registry, IntGaugeVec::new(Opts::new(name, help), labels))
}

pub fn histogram(registry: &Registry, name: &str, help: &str, labels: &[&str], buckets: &[f64]) -> HistogramVec {
    register(registry, HistogramVec::new(HistogramOpts::new(name, help).buckets(buckets.to_vec()), labels))
}

fn register<C: Collector + Clone + 'static>(registry: &Registry, family: Result<C, Error>) -> C {
    let family = family.expect("valid name, labels and buckets");
    registry.register(Box::new(family.clone())).expect("unique name");
    family
}
