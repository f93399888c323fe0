//! Experts in memory: from bytes on disk to bytes in slots. This module does no arithmetic and does not use tensors.
//!
//! One call per layer is the only way to an expert's weights, on every device:
//!
//! ```text
//! let mut fetch = store.fetch(layer, &ExpertChoice { ids, k, logits }, phase, device)?;   pins hits, starts reading misses
//! store.prefetch(layer + 1, &guess, phase);                                               queued after the misses
//! while let Some(batch) = fetch.next(device)? {                                           hits first, then arrivals
//!     for ready in batch.iter() { .. expert, slot, assignments, pieces .. }               compute, or encode GPU work
//!     batch.release_after(device.sync_point());                                                 after the last use of the slots
//! }
//! ```
//! The rule for reusing slots: a slot can be filled again once the device has passed a mark that was set after its last
//! reader. `device` is a [`Timeline`](crate::device::Timeline). The CPU ([`CpuTimeline`](crate::device::CpuTimeline)) has
//! passed every mark; a GPU is asked. A device that reads the slots of all batches together at the end of a layer calls
//! `fetch.release_after(device.sync_point())`; then all experts of the layer need slots at once. With a mark per batch, any
//! number of slots is enough. An assignment is `row * k + rank`. Results are stored per assignment and summed in rank
//! order, so they do not depend on the order of arrival.
//!
//! * [`slot_table`]: which expert is in which slot, and the states of a slot. [`eviction`]: the scores of experts.
//! * [`read_plan`]: where an expert's bytes lie on disk and in a slot.
//! * [`reader`]: the threads that read from a [`source`] straight into slots.
//! * [`prefetch`]: decides whether prefetching pays. `warm_start`: the hot experts of the last run.
//! * [`slot_layout`]: slots and segments in the slab.
//! * `memory_pressure`: how many slots stay while the system is short of memory.
//! * `store` and `fetch`: the store, and one layer's experts as they arrive.
//!
//! An [`ExpertStore`] belongs to the thread that owns the model. The slot table needs no lock: reader threads only access
//! slot states.

mod choice;
pub mod eviction;
mod fetch;
mod memory_pressure;
mod pending;
pub mod prefetch;
pub mod read_plan;
pub mod reader;
pub mod slot_layout;
pub mod slot_table;
pub mod source;
mod store;
mod warm_start;

pub use choice::{ExpertChoice, PassKind};
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
