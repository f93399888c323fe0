//! Slots for experts: found, claimed, and taken back from predictions.

use super::super::{
    Experts, Live,
    eviction::Key,
    slots::{Purpose, SlotId, State},
};
use crate::device::SyncPoint;

impl Experts {
    /// The slot of `key`; one whose read failed is freed.
    pub(super) fn find(&self, live: &mut Live, key: Key) -> Option<SlotId> {
        let slot = live.slots.find(key)?;
        if live.slots.state(slot) == State::Failed && live.slots.pins(slot) == 0 {
            self.warn_of(live, slot);
            live.slots.vacate(slot);
            return None;
        }
        Some(slot)
    }

    /// A slot for an expert that has none, with its reads under way.
    pub(super) fn slot_for(&self, live: &mut Live, key: Key) -> Option<SlotId> {
        let claim = match live.slots.claim(key, Purpose::Demand, &live.scores) {
            Some(claim) => claim,
            None => {
                // Nothing to evict: a slot that waits for a background read has to do.
                let slot = self.take_back(live)?;
                live.slots.vacate(slot);
                live.slots.claim(key, Purpose::Demand, &live.scores)?
            }
        };
        self.count_eviction(&claim);
        self.send(live, key, claim.slot, Purpose::Demand);
        Some(claim.slot)
    }

    /// A slot whose read no reader has begun, and that nobody has asked for: a warm start's, else a prediction's.
    fn take_back(&self, live: &mut Live) -> Option<SlotId> {
        let mut queued = live.slots.all(State::Queued).map(|(_, slot)| slot);
        queued
            .find(|&slot| live.slots.pins(slot) == 0 && self.reader.cancel(slot))
            .or_else(|| live.ahead.give_up(|slot| live.slots.is_predicted(slot) && self.reader.cancel(slot)))
    }

    /// Unpins the experts that were read ahead for a layer and not asked for.
    pub(super) fn pass_over(&self, live: &mut Live, layer: usize) {
        while let Some(slot) = live.ahead.settle(layer) {
            if live.slots.is_predicted(slot) && self.reader.cancel(slot) {
                live.slots.vacate(slot);
            } else {
                live.slots.unpin(slot, SyncPoint::START, &live.scores);
            }
        }
    }

    /// Frees the slots of predictions that could not be read.
    pub(super) fn forget_failed(&self, live: &mut Live) {
        while let Some(slot) = live.ahead.give_up(|slot| live.slots.state(slot) == State::Failed) {
            self.warn_of(live, slot);
            live.slots.unpin(slot, SyncPoint::START, &live.scores);
        }
    }

    fn warn_of(&self, live: &Live, slot: SlotId) {
        let error = self.failure(live, slot);
        tracing::warn!(%error, "an expert could not be read ahead");
    }
}
