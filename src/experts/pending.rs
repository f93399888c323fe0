//! `PendingExperts`: the distinct experts of one layer, on their way from "no slot" to "used by the device".

use super::slot_table::SlotId;
use std::{collections::VecDeque, ops::Range};

/// One of the distinct experts that a layer needs.
#[derive(Debug, Clone)]
pub(super) struct PendingExpert {
    pub expert: u32,
    /// Range in [`PendingExperts::assignments`].
    pub assignments: Range<usize>,
    /// Valid once the expert has a slot.
    pub slot: SlotId,
}

/// Lists that an expert moves through. They are reused for the next layer, so that a fetch allocates nothing.
#[derive(Default)]
pub(super) struct PendingExperts {
    /// The assignments of the choice, sorted by expert.
    pub assignments: Vec<u32>,
    /// Pairs of expert and assignment, sorted.
    order: Vec<(u32, u32)>,
    /// Experts without a slot.
    pub waiting: VecDeque<PendingExpert>,
    /// Experts in a pinned slot that have not been handed out.
    pub in_slots: Vec<PendingExpert>,
    /// Experts of the last batch that was handed out.
    pub batch: Vec<PendingExpert>,
    /// Slots of earlier batches that are still pinned.
    pub used: Vec<SlotId>,
    /// Experts that were handed out before verification. A second pin keeps them until it ends.
    pub unverified: Vec<PendingExpert>,
}

impl PendingExperts {
    /// Groups the assignments of a choice by expert. All experts are then waiting.
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
            self.waiting.push_back(PendingExpert { expert, assignments, slot: SlotId(u32::MAX) });
        }
    }
}
