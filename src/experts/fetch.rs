//! `ExpertFetch`: the experts that one layer asked for, handed out in batches as they become readable.

use super::{
    choice::{ExpertChoice, PassKind},
    eviction::ExpertKey,
    pending::{PendingExpert, PendingExperts},
    read_plan::PIECES,
    slot_table::{ReadReason, SlotId, SlotState},
    store::{ExpertStore, StoreState},
};
use crate::{
    device::{SyncPoint, Timeline},
    error::StoreError,
};
use std::time::Instant;

/// Maximum number of experts being read for a prefill. Reads are queued between batches only, so the window must keep
/// the disk busy while a batch is computed. It must also leave most slots to the experts that decoding needs.
const PREFILL_WINDOW: usize = 64;

/// The experts that a layer asked for. A slot that was handed out keeps its bytes until a mark is set for it
/// ([`ReadyBatch::release_after`], [`ExpertFetch::release_after`]) and the device has passed it. Dropping the fetch
/// unpins all slots, so at that time the device must not be reading slots without a mark.
pub struct ExpertFetch<'s> {
    store: &'s ExpertStore,
    layer: usize,
    phase: PassKind,
    pending: PendingExperts,
}

/// Experts that can be read now.
pub struct ReadyBatch<'r> {
    store: &'r ExpertStore,
    pending: &'r mut PendingExperts,
}

/// One expert that can be read.
pub struct ReadyExpert<'r> {
    pub expert: u32,
    pub slot: SlotId,
    /// The assignments of the choice that selected it, ascending.
    pub assignments: &'r [u32],
    /// Codes, scales and biases of gate, up and down; empty if the encoding has no such part.
    pub pieces: [&'r [u8]; PIECES],
}

impl ExpertStore {
    /// Fetches the experts that the router of `layer` selected. Updates the eviction scores, pins the hits, and starts
    /// reading the misses as far as there are slots. [`ExpertFetch::next`] hands out all of them. `device` is the one
    /// that computed the layers before.
    pub fn fetch(
        &self,
        layer: usize,
        choice: &ExpertChoice<'_>,
        phase: PassKind,
        device: &mut dyn Timeline,
    ) -> Result<ExpertFetch<'_>, StoreError> {
        if let Some(expert) = choice.ids.iter().find(|&&expert| self.key(layer, expert).is_none()) {
            return Err(StoreError::Other(format!("layer {layer} has no expert {expert}")));
        }
        let state = &mut *self.state.borrow_mut();
        if let Some(observer) = &mut state.observer {
            observer(layer, choice, phase);
        }
        let mut pending = state.spare_lists.pop().unwrap_or_default();
        pending.group(choice.ids);
        if !self.is_resident() {
            state.scores.update(layer, *choice);
        }
        if phase == PassKind::Decode {
            state.prefetcher.start_layer(layer);
        }
        self.save_hot_experts_if_due(state);
        self.update_board(state);
        state.slots.advance(device.completed());
        let mut fetch = ExpertFetch { store: self, layer, phase, pending };
        fetch.pin_hits(state);
        fetch.claim_slots(state);
        Ok(fetch)
    }

    /// The slot of `key`. A slot whose read failed is freed.
    fn find_slot(&self, state: &mut StoreState, key: ExpertKey) -> Option<SlotId> {
        let slot = state.slots.find(key)?;
        if state.slots.state(slot) == SlotState::Failed && state.slots.pins(slot) == 0 {
            self.log_prefetch_error(state, slot);
            state.slots.vacate(slot);
            return None;
        }
        Some(slot)
    }

    /// Claims a slot for an expert that has none, and starts its reads.
    fn claim_slot(&self, state: &mut StoreState, key: ExpertKey) -> Option<SlotId> {
        let claim = match state.slots.claim(key, ReadReason::Demand, &state.scores) {
            Some(claim) => claim,
            None => {
                // Nothing is evictable: cancel a background read that has not started.
                let slot = self.cancel_background_read(state)?;
                state.slots.vacate(slot);
                state.slots.claim(key, ReadReason::Demand, &state.scores)?
            }
        };
        self.count_eviction(&claim);
        self.start_read(state, key, claim.slot, ReadReason::Demand);
        Some(claim.slot)
    }

    /// Cancels a read that no reader has started and no layer has asked for: first one of the warm start, otherwise a
    /// prefetch.
    fn cancel_background_read(&self, state: &mut StoreState) -> Option<SlotId> {
        let mut queued = state.slots.in_state(SlotState::Queued).map(|(_, slot)| slot);
        queued
            .find(|&slot| state.slots.pins(slot) == 0 && self.reader.cancel(slot))
            .or_else(|| state.prefetcher.take_first(|slot| state.slots.is_prefetched(slot) && self.reader.cancel(slot)))
    }

    /// Unpins the experts that were prefetched for a layer that did not ask for them.
    fn release_unused_prefetches(&self, state: &mut StoreState, layer: usize) {
        while let Some(slot) = state.prefetcher.take_for_layer(layer) {
            if state.slots.is_prefetched(slot) && self.reader.cancel(slot) {
                state.slots.vacate(slot);
            } else {
                state.slots.unpin(slot, SyncPoint::START, &state.scores);
            }
        }
    }

    /// Frees the slots of prefetches that failed.
    fn release_failed_prefetches(&self, state: &mut StoreState) {
        while let Some(slot) = state.prefetcher.take_first(|slot| state.slots.state(slot) == SlotState::Failed) {
            self.log_prefetch_error(state, slot);
            state.slots.unpin(slot, SyncPoint::START, &state.scores);
        }
    }

    fn log_prefetch_error(&self, state: &StoreState, slot: SlotId) {
        let error = self.read_error(state, slot);
        tracing::warn!(%error, "cannot prefetch an expert");
    }

    /// The pieces of a ready expert. Its slot stays pinned while the result is borrowed.
    fn pieces(&self, slot: SlotId) -> [&[u8]; PIECES] {
        let state = self.state.borrow();
        let base = self.layout.start(slot.index());
        std::array::from_fn(|piece| {
            let span = state.spans.get(slot.index()).map_or(0..0, |spans| spans[piece].clone());
            // SAFETY: the slot is Ready or Checking, so all reads into it have ended. It is pinned until the batch that
            // the result borrows is released, so nothing writes to it before.
            unsafe { self.slab.bytes(base + span.start..base + span.end) }
        })
    }
}

impl ExpertFetch<'_> {
    /// Number of distinct experts that have not been handed out.
    pub fn len(&self) -> usize {
        self.pending.waiting.len() + self.pending.in_slots.len()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The next experts that can be read: first the hits, then whatever has arrived since. Blocks only if there is
    /// nothing to hand out. Returns `None` once every expert was handed out and every
    /// [background verification](ExpertStore::verify_in_background) has ended. An expert with a wrong checksum is handed
    /// out a second time, with the right bytes.
    #[allow(clippy::should_implement_trait)] // A lending iterator: a batch borrows the fetch.
    pub fn next(&mut self, device: &mut dyn Timeline) -> Result<Option<ReadyBatch<'_>>, StoreError> {
        let store = self.store;
        let state = &mut *store.state.borrow_mut();
        let PendingExperts { batch, used, .. } = &mut self.pending;
        used.extend(batch.drain(..).map(|expert| expert.slot));
        loop {
            let seen = store.reader.landed();
            state.slots.advance(device.completed());
            self.finish_verifications(state);
            self.claim_slots(state);
            self.collect_batch(state)?;
            if !self.pending.batch.is_empty() {
                return Ok(Some(ReadyBatch { store, pending: &mut self.pending }));
            }
            let only_verifying = self.is_empty();
            if only_verifying && self.pending.unverified.is_empty() {
                return Ok(None);
            }
            if self.pending.in_slots.is_empty()
                && !only_verifying
                && let Some(mark) = state.slots.next_mark()
            {
                // The device is reading every slot, so wait for the device and not for the disk.
                device.wait_for(mark).map_err(|error| StoreError::Other(format!("GPU: {error}")))?;
                continue;
            }
            if self.pending.in_slots.is_empty() && !store.reader.is_busy() {
                if store.reader.landed() > seen {
                    continue;
                }
                return Err(StoreError::Other(format!(
                    "layer {}: no slot for {} experts; {} slots are too few",
                    self.layer,
                    self.len(),
                    state.slots.len()
                )));
            }
            let interval = device.rest();
            let begin = Instant::now();
            match interval {
                None => store.reader.wait(seen),
                Some(interval) => {
                    while !store.reader.wait_at_most(seen, interval) {
                        device.stay_awake();
                    }
                }
            }
            let stalled = begin.elapsed().as_secs_f64();
            if only_verifying {
                store.metrics.pack_check_seconds.inc_by(stalled);
                continue;
            }
            store.metrics.ssd_stall_seconds.inc_by(stalled);
            if self.phase == PassKind::Decode {
                state.prefetcher.count_stall(stalled);
            }
        }
    }

    /// The device reads everything that was handed out and not released yet, until it passes `mark`.
    pub fn release_after(mut self, mark: SyncPoint) {
        self.release(mark);
    }

    /// Pins the experts that have a slot, before anything is evicted, and counts the lookups.
    fn pin_hits(&mut self, state: &mut StoreState) {
        let store = self.store;
        let metrics = &store.metrics;
        let (hit, miss, prefetched) = match self.phase {
            PassKind::Prefill => {
                (&metrics.lookups_prefill_hit, &metrics.lookups_prefill_miss, &metrics.lookups_prefill_prefetched)
            }
            PassKind::Decode => {
                (&metrics.lookups_decode_hit, &metrics.lookups_decode_miss, &metrics.lookups_decode_prefetched)
            }
        };
        store.release_failed_prefetches(state);
        let (mut hits, mut misses, mut foreseen) = (0, 0, 0);
        let PendingExperts { waiting, in_slots, .. } = &mut self.pending;
        waiting.retain_mut(|wanted| {
            let key = store.key(self.layer, wanted.expert);
            let found = key.and_then(|key| {
                store.heatmap.count(key as usize);
                store.find_slot(state, key)
            });
            let Some(slot) = found else {
                misses += 1;
                return true;
            };
            state.slots.pin(slot);
            let is_readable = state.slots.state(slot).is_readable();
            match (state.slots.take_prefetched(slot), is_readable) {
                (true, _) => foreseen += 1,
                (false, true) => hits += 1,
                (false, false) => misses += 1,
            }
            if !is_readable {
                store.reader.expedite(slot);
            }
            in_slots.push(PendingExpert { slot, ..wanted.clone() });
            false
        });
        hit.inc_by(hits);
        miss.inc_by(misses);
        prefetched.inc_by(foreseen);
        metrics.prefetches_used.inc_by(foreseen);
        if self.phase == PassKind::Decode {
            state.prefetcher.count_reads(misses, foreseen);
        }
        store.release_unused_prefetches(state, self.layer);
    }

    /// Claims slots for waiting experts, as far as there are slots and the prefill window allows.
    fn claim_slots(&mut self, state: &mut StoreState) {
        let PendingExperts { waiting, in_slots, .. } = &mut self.pending;
        let mut limit = usize::MAX;
        if self.phase == PassKind::Prefill {
            let reading = in_slots.iter().filter(|expert| state.slots.state(expert.slot) == SlotState::Reading).count();
            limit = PREFILL_WINDOW.saturating_sub(reading);
        }
        while limit > 0
            && let Some(wanted) = waiting.front()
            && let Some(key) = self.store.key(self.layer, wanted.expert)
            && let Some(slot) = self.store.claim_slot(state, key)
            && let Some(wanted) = waiting.pop_front()
        {
            in_slots.push(PendingExpert { slot, ..wanted });
            limit -= 1;
        }
    }

    /// Unpins experts whose verification succeeded. Damaged ones are read again and handed out a second time.
    fn finish_verifications(&mut self, state: &mut StoreState) {
        let PendingExperts { in_slots, unverified, .. } = &mut self.pending;
        unverified.retain(|expert| match state.slots.state(expert.slot) {
            SlotState::Checking => true,
            SlotState::Damaged => {
                in_slots.push(expert.clone());
                false
            }
            _ => {
                state.slots.unpin(expert.slot, SyncPoint::START, &state.scores);
                false
            }
        });
    }

    /// Moves readable experts to the batch.
    fn collect_batch(&mut self, state: &mut StoreState) -> Result<(), StoreError> {
        let (store, layer) = (self.store, self.layer);
        let PendingExperts { in_slots, batch, unverified, .. } = &mut self.pending;
        let mut failed = None;
        in_slots.retain(|expert| match state.slots.state(expert.slot) {
            SlotState::Ready => {
                batch.push(expert.clone());
                false
            }
            SlotState::Checking => {
                state.slots.pin(expert.slot);
                unverified.push(expert.clone());
                batch.push(expert.clone());
                false
            }
            SlotState::Damaged => {
                if let Some(key) = store.key(layer, expert.expert) {
                    store.start_read(state, key, expert.slot, ReadReason::Demand);
                }
                true
            }
            SlotState::Failed => {
                failed.get_or_insert(expert.slot);
                true
            }
            _ => true,
        });
        match failed {
            Some(slot) => Err(store.read_error(state, slot)),
            None => Ok(()),
        }
    }

    /// Unpins all slots.
    fn release(&mut self, mark: SyncPoint) {
        let state = &mut *self.store.state.borrow_mut();
        let PendingExperts { in_slots, batch, used, unverified, .. } = &mut self.pending;
        for slot in used.drain(..).chain(batch.drain(..).map(|expert| expert.slot)) {
            state.slots.unpin(slot, mark, &state.scores);
        }
        for expert in in_slots.drain(..).chain(unverified.drain(..)) {
            state.slots.unpin(expert.slot, SyncPoint::START, &state.scores);
        }
        self.store.metrics.expert_slots_used.set(state.slots.used() as i64);
    }
}

impl Drop for ExpertFetch<'_> {
    fn drop(&mut self) {
        self.release(SyncPoint::START);
        self.pending.waiting.clear();
        let state = &mut *self.store.state.borrow_mut();
        state.spare_lists.push(std::mem::take(&mut self.pending));
    }
}

impl ReadyBatch<'_> {
    pub fn len(&self) -> usize {
        self.pending.batch.len()
    }

    pub fn is_empty(&self) -> bool {
        self.pending.batch.is_empty()
    }

    pub fn iter(&self) -> impl Iterator<Item = ReadyExpert<'_>> {
        self.pending.batch.iter().map(|ready| ReadyExpert {
            expert: ready.expert,
            slot: ready.slot,
            assignments: self.pending.assignments.get(ready.assignments.clone()).unwrap_or_default(),
            pieces: self.store.pieces(ready.slot),
        })
    }

    /// The device reads these slots until it passes `mark`. Then they can be reused, even before the layer ends.
    pub fn release_after(self, mark: SyncPoint) {
        let state = &mut *self.store.state.borrow_mut();
        for expert in self.pending.batch.drain(..) {
            state.slots.unpin(expert.slot, mark, &state.scores);
        }
    }
}
