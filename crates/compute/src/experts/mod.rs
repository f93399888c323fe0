//! Streams experts from disk into a fixed number of memory slots. This module computes no part of the model and uses no
//! tensors.
//!
//! [`ExpertStore::fetch`] is the only way to access an expert's weights, on every device. The forward pass calls it
//! once per layer:
//!
//! ```text
//! let mut fetch = store.fetch(layer, &ExpertChoice { ids, k, logits }, size, device)?;    pins hits, reads misses
//! store.prefetch(layer + 1, &guess, size);                                               queued after the misses
//! while let Some(batch) = fetch.next(device)? {                                           hits first, then arrivals
//!     for ready in batch.iter() { .. expert, slot, assignments, pieces .. }               compute, or encode GPU work
//!     batch.release_after(device.sync_point());                                           after the slots' last use
//! }
//! ```
//! `release_after` takes a [`SyncPoint`](crate::device::SyncPoint): a slot is reused only after the device has
//! completed the sync point taken after the last operation that reads the slot. The CPU completes every operation
//! before the call returns. Code for a GPU may call `release_after` for each batch. Then any number of slots is enough.
//! If a GPU reads all batches together at the end of a layer, `fetch.release_after(device.sync_point())` is called
//! instead. Then all experts of the layer need slots at the same time.
//!
//! An assignment is `row * k + rank`. Results are stored per assignment and summed in rank order, so the sum does not
//! depend on the order in which experts arrive.
//!
//! * `choice`: the router's output for a layer. `pending`: the progress of each expert of a fetch.
//! * [`slot_table`]: assigns experts to slots and tracks the state of each slot. Chooses which expert to evict.
//! * [`eviction`]: eviction scores of experts.
//! * [`read_plan`]: the position of an expert's bytes on disk and in a slot.
//! * [`reader`]: threads that read from a [`source`] directly into slots.
//! * [`prefetch`]: measures whether prefetching saves time, and turns it on or off.
//! * `layer_hits`: decides how many layers a GPU computes before the CPU reads the routers' choices.
//! * `warm_start`: saves and loads the list of hot experts.
//! * [`slot_layout`]: positions of slots and segments in the slab.
//! * `memory_pressure`: decides how many slots to keep while the system is short of memory.
//! * `released_memory`: releases memory again that the system has not taken.
//! * `store` and `fetch`: [`ExpertStore`], and [`ExpertFetch`] for the experts of one layer.
//!
//! An [`ExpertStore`] belongs to the thread that owns the model. The slot table needs no lock, because reader threads
//! access only the slot states.

mod choice;
pub mod eviction;
mod fetch;
mod layer_hits;
mod memory_pressure;
mod pending;
pub mod prefetch;
pub mod read_plan;
pub mod reader;
mod released_memory;
pub mod slot_layout;
pub mod slot_table;
pub mod source;
mod store;
mod warm_start;

pub use choice::{ExpertChoice, PassSize};
pub use fetch::{ExpertFetch, ReadyBatch, ReadyExpert};
pub use prefetch::Prefetch;
pub use read_plan::{ExpertMap, LayerExperts, PIECES, Piece};
pub use slot_layout::SlotLayout;
pub use slot_table::SlotId;
pub use source::{ExpertSource, LayerRecords, PackRecords, ReadMode, ShardFiles};
pub use store::{ExpertStore, FetchObserver, Options, SlotDevice};
pub use warm_start::WarmStart;

#[cfg(test)]
mod tests;
