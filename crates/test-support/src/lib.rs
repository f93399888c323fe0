//! What tests of several crates use. Depends on none of them, because a unit test would then meet two versions of its
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

/// The repository's root.
pub const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");
