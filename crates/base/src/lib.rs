//! What every other crate may use: the operating system, the metrics, and errors of files.

pub mod error;
pub mod metrics;
pub mod platform;
