//! The state of a sequence: KV pages, delta-net states, rings of rows, snapshots, and the undoing of rejected rows.

pub mod kv_pages;
pub mod last_tokens;
pub mod pass_ahead;
pub mod rollback;
pub mod row_ring;
pub mod sequence;
pub mod snapshot;
