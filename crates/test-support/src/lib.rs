//! Helpers for tests of several crates. Depends on none of them, because a unit test would then meet two versions of its
//! own crate.

pub mod belady;
pub mod fifo;
pub mod files;
pub mod formats;
pub mod hub;
pub mod mutate;
pub mod own_process;
pub mod process_memory;
pub mod random_cases;
pub mod split_mix64;
pub mod thread_cpu;

use serde_json::Value;
use std::path::PathBuf;

/// The repository's root.
pub const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");

/// The directory of the demo model.
pub const DEMO: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/demo/moestro-demo");

pub fn demo() -> PathBuf {
    DEMO.into()
}

/// `body` with further fields.
pub fn with(mut body: Value, more: Value) -> Value {
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}
