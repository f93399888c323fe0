//! The prompt cache: snapshots of sequences in a tree of token prefixes. A new prompt restores the snapshot of its
//! longest cached prefix and computes only the remaining tokens.
//!
//! The state of a delta net cannot be rewound, so a prompt can only resume where a snapshot was taken.
//! [`snapshot_policy`] chooses these positions. When memory is short, the cache evicts the snapshot with the lowest
//! value, as in GreedyDual-Size (Cao and Irani 1997): `value = clock + weight * tokens / bytes`. `tokens` is the number
//! of tokens that a miss would recompute. The clock is the value of the last evicted snapshot, so unused snapshots age.
//!
//! Keys and values are stored in pages of the model's pool. Snapshots share whole pages with sequences. If a sequence
//! needs a page and no page is free, the cache evicts snapshots. A snapshot's own memory holds the recurrent state and
//! the positions after its last whole page.
//!
//! Snapshots are also written to disk, so that they survive a restart. Only one server at a time owns the directory.
//! A thread writes the files. It asks the engine's thread for the bytes of each page and waits for them. The engine's
//! thread reads at most one page between two steps, and waits for nothing.
//!
//! | file | what it holds |
//! |---|---|
//! | `cache`, `prefix_tree`, `memory_use` | snapshots in memory: lookup and eviction; the tree; counting bytes |
//! | `disk`, `disk_io`, `dir_lock` | snapshots on disk: the index; reads and writes; the lock of the directory |
//! | `page_requests` | the bytes of pages, from the engine's thread to the thread that writes them |
//! | `snapshot_files`, `direct_reader` | the format of the files; direct reads with checksums |
//! | `snapshot_policy` | where to take snapshots |

mod cache;
mod dir_lock;
mod direct_reader;
mod disk;
mod disk_io;
mod memory_use;
mod page_requests;
mod prefix_tree;
mod snapshot_files;
pub mod snapshot_policy;

pub use cache::{DiskCacheStatus, PromptCache, PromptCacheStatus, SnapshotSource};
pub use disk::DiskCacheOptions;
pub use snapshot_files::clear_prompt_dir;
pub use snapshot_policy::SnapshotKind;
