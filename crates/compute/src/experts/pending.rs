//! [`PendingExperts`]: the progress of each expert of a fetch, from "has no slot" to "used by the device".

use super::slot_table::SlotId;
use std::{collections::VecDeque, ops::Range};

/// A distinct expert that a layer needs.
#[derive(Debug, Clone)]
pub(super) struct PendingExpert {
    pub expert: u32,
    /// Range in [`PendingExperts::assignments`].
    pub assignments: Range<usize>,
    /// Valid once the expert has a slot.
    pub slot: SlotId,
    /// True while the read into the slot is one that this fetch did not queue.
    pub is_earlier_read: bool,
}

/// The distinct experts of one fetch, in one list per stage. The next fetch reuses the lists, so that no memory is
/// allocated.
#[derive(Default)]
pub(super) struct PendingExperts {
    /// All assignments (`row * k + rank`) of the fetch, sorted by expert.
    pub assignments: Vec<u32>,
    /// Buffer of [`PendingExperts::group`]: pairs of expert and assignment, sorted.
    order: Vec<(u32, u32)>,
    /// Experts without a slot.
    pub waiting: VecDeque<PendingExpert>,
    /// Experts in a pinned slot that were not returned in a batch yet. Their bytes may still be arriving.
    pub in_slots: Vec<PendingExpert>,
    /// Experts of the current batch.
    pub batch: Vec<PendingExpert>,
    /// Slots of earlier batches that are still pinned.
    pub used: Vec<SlotId>,
    /// Experts that were returned in a batch before their checksum was verified. Until the verification, a second pin
    /// protects each of these experts.
    pub unverified: Vec<PendingExpert>,
}

impl PendingExperts {
    /// Groups assignments by expert and puts all experts into `waiting`. `ids` contains the expert of each assignment.
    pub fn group(&mut self, ids: &[u32]) {
        let id = |assignment: u32| ids.get(assignment as usize).copied().unwrap_or(0);
        self.order.clear();
        self.order.extend(ids.iter().zip(0..).map(|(id, assignment)| (*id, assignment)));
        self.order.sort_unstable();
        self.assignments.clear();
        self.assignments.extend(self.order.iter().map(|(_, assignment)| *assignment));
        let mut first = 0;
        for same in self.assignments.chunk_by(|&a, &b| id(a) == id(b)) {
            let expert = same.first().map_or(0, |&assignment| id(assignment));
            let assignments = first..first + same.len();
            first = assignments.end;
            self.waiting.push_back(PendingExpert {
                expert,
                assignments,
                slot: SlotId(u32::MAX),
                is_earlier_read: false,
            });
        }
    }
}
