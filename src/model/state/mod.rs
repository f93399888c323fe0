//! The state of a sequence: KV pages, delta-net states, snapshots.

pub mod kv_pages;
pub mod rollback;
pub mod sequence;
pub mod snapshot;
