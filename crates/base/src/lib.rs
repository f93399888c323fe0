//! Code that every other crate may use.
//!
//! * [`platform`]: the operating system: files, threads, memory and its limits, sockets of a service manager.
//! * [`metrics`]: the table of metrics, and the text of `GET /metrics`.
//! * [`error`]: errors of files.

pub mod error;
pub mod metrics;
pub mod platform;
