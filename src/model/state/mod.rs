//! What a model remembers of a sequence.

pub mod kv_pages;
pub mod rollback;
pub mod sequence;
pub mod snapshot;
