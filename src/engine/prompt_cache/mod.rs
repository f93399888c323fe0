//! The prompt cache: snapshots of sequences, as a tree of token prefixes. A new prompt restores the longest snapshot that it
//! starts with and computes the rest.
//!
//! The state of a delta net cannot be rewound, so a prompt can only resume where a snapshot was taken. [`snapshot_policy`]
//! chooses these positions. When memory is short, the cache evicts the snapshot with the lowest value, after GreedyDual-Size
//! (Cao and Irani 1997): `value = clock + weight * tokens / bytes`. `tokens` are those that would have to be computed again.
//! The clock is the value of the last evicted snapshot, so unused snapshots age.
//!
//! Keys and values live in pages of the model's pool, which snapshots share with sequences. When a sequence needs a page and
//! none is free, the cache evicts snapshots, too. A snapshot's own memory is the recurrent state and the positions after its
//! last whole page.
//!
//! Snapshots are also written to disk, so that they survive a restart. One server at a time owns the directory.

mod cache;
mod dir_lock;
mod direct_reader;
mod disk;
mod disk_io;
mod memory_use;
mod prefix_tree;
mod snapshot_files;
pub mod snapshot_policy;

pub use cache::{DiskCacheStatus, PromptCache, PromptCacheStatus, SnapshotSource};
pub use disk::DiskCacheOptions;
pub use snapshot_files::clear_prompt_dir;
pub use snapshot_policy::SnapshotKind;
