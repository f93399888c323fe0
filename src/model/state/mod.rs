//! What the model remembers of a sequence: its layers' state, the pages of its KV cache, snapshots, and undoing draft tokens.

pub mod kv_pages;
pub mod rollback;
pub mod sequence;
pub mod snapshot;
