//! [`ExpertFetch`]: returns the experts of one layer in batches, in the order in which their bytes arrive.

use super::{
    choice::{ExpertChoice, PassSize},
    eviction::ExpertKey,
    pending::{PendingExpert, PendingExperts},
    read_plan::PIECES,
    slot_table::{ReadReason, SlotId, SlotState},
    store::{ExpertStore, StoreState},
};
use crate::device::{SyncPoint, Timeline};
use moestro_base::error::StoreError;
use std::time::Instant;

/// Maximum number of experts being read at the same time for a large pass. Reads are queued only between batches, so
/// there must be enough reads to keep the disk busy while a batch is computed. A larger window would evict more experts
/// that decoding needs.
const READ_WINDOW: usize = 64;

/// The experts of one layer. Created by [`ExpertStore::fetch`].
///
/// The slots of a batch keep their bytes until two conditions hold: they were released with a sync point
/// ([`ReadyBatch::release_after`], [`ExpertFetch::release_after`]), and the device has completed that sync point.
/// Dropping the fetch releases all other slots at once, so the device must not be reading them.
pub struct ExpertFetch<'s> {
    store: &'s ExpertStore,
    layer: usize,
    size: PassSize,
    pending: PendingExperts,
}

/// Experts whose bytes are in memory.
pub struct ReadyBatch<'r> {
    store: &'r ExpertStore,
    pending: &'r mut PendingExperts,
}

/// An expert whose bytes are in memory.
pub struct ReadyExpert<'r> {
    pub expert: u32,
    pub slot: SlotId,
    /// The assignments (`row * k + rank`) that selected the expert, ascending.
    pub assignments: &'r [u32],
    /// Codes, scales and biases of gate, up and down. A piece is empty if the encoding does not have that piece.
    pub pieces: [&'r [u8]; PIECES],
}

impl ExpertStore {
    /// Starts to fetch the experts that the router of `layer` selected. Updates the eviction scores, pins experts that
    /// are in memory, and starts to read the other experts while slots are available. [`ExpertFetch::next`] returns all
    /// selected experts.
    ///
    /// `device` must be the device that computed the previous layers, since it may still read the slots of these
    /// layers.
    pub fn fetch(
        &self,
        layer: usize,
        choice: &ExpertChoice<'_>,
        size: PassSize,
        device: &mut dyn Timeline,
    ) -> Result<ExpertFetch<'_>, StoreError> {
        if let Some(expert) = choice.ids.iter().find(|&&expert| self.key(layer, expert).is_none()) {
            return Err(StoreError::Other(format!("layer {layer} has no expert {expert}")));
        }
        let state = &mut *self.state.borrow_mut();
        if let Some(observer) = &mut state.observer {
            observer(layer, choice, size);
        }
        let mut pending = state.spare_pending.pop().unwrap_or_default();
        pending.group(choice.ids);
        if !self.is_resident() {
            state.scores.update(layer, *choice);
        }
        if size == PassSize::Small {
            state.prefetcher.start_layer(layer);
        }
        self.save_hot_experts_if_due(state);
        state.slots.advance(device.completed());
        let mut fetch = ExpertFetch { store: self, layer, size, pending };
        fetch.pin_hits(state);
        fetch.claim_slots(state);
        Ok(fetch)
    }

    /// Number of layers from `layer` on that a GPU can compute before the CPU reads the routers' choices.
    pub fn layers_to_submit(&self, layer: usize, size: PassSize) -> usize {
        self.state.borrow().layer_hits.layers_to_submit(layer, self.wants_prefetch(size))
    }

    /// The slots of the experts of `layer` for the device's table, if they have changed since the last call for this
    /// layer. The slots stay valid until the next fetch or prefetch.
    pub fn take_device_slots(&self, layer: usize) -> Option<Vec<u32>> {
        let first = self.key(layer, 0)? as usize;
        let count = self.map.layers.get(layer)?.len();
        self.state.borrow_mut().slots.take_device_slots(first..first + count)
    }

    /// Records that launches can read the expert in `slot`, until the slot is reused.
    pub fn mark_on_device(&self, slot: SlotId) {
        self.state.borrow_mut().slots.mark_on_device(slot);
    }

    /// Records that launches can read no expert, because the device is new or has failed.
    pub fn clear_device(&self) {
        self.state.borrow_mut().slots.clear_device();
    }

    /// The slot of `key`. If the read into that slot has failed, frees the slot and returns `None`.
    fn find_slot(&self, state: &mut StoreState, key: ExpertKey) -> Option<SlotId> {
        let slot = state.slots.find(key)?;
        if state.slots.state(slot) == SlotState::Failed && state.slots.pins(slot) == 0 {
            self.log_earlier_error(state, slot);
            state.slots.vacate(slot);
            return None;
        }
        Some(slot)
    }

    /// Claims a slot for an expert that has no slot, and starts the expert's reads.
    fn claim_slot(&self, state: &mut StoreState, key: ExpertKey) -> Option<SlotId> {
        let claim = match state.slots.claim(key, ReadReason::Demand, &state.scores) {
            Some(claim) => claim,
            None => {
                // No expert can be evicted, so a background read that has not started is cancelled.
                let slot = self.cancel_background_read(state)?;
                state.slots.vacate(slot);
                state.slots.claim(key, ReadReason::Demand, &state.scores)?
            }
        };
        self.count_eviction(&claim);
        self.start_read(state, key, claim.slot, ReadReason::Demand);
        Some(claim.slot)
    }

    /// Cancels a background read that has not started: preferably a warm-start read, otherwise a prefetch. Returns the
    /// slot of that read.
    fn cancel_background_read(&self, state: &mut StoreState) -> Option<SlotId> {
        let mut queued = state.slots.in_state(SlotState::Queued).map(|(_, slot)| slot);
        queued
            .find(|&slot| state.slots.pins(slot) == 0 && self.reader.cancel(slot))
            .or_else(|| state.prefetcher.take_first(|slot| state.slots.is_prefetched(slot) && self.reader.cancel(slot)))
    }

    /// Unpins experts that were prefetched for `layer` but are not part of the layer's fetch.
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
            self.log_earlier_error(state, slot);
            state.slots.unpin(slot, SyncPoint::START, &state.scores);
        }
    }

    /// Logs the error of a read that fails no fetch.
    fn log_earlier_error(&self, state: &StoreState, slot: SlotId) {
        let error = self.read_error(state, slot);
        tracing::warn!(%error, "a read of an expert failed; the expert is read again when it is needed");
    }

    /// The pieces of a ready expert. The expert's slot stays pinned while the result is borrowed.
    fn pieces(&self, slot: SlotId) -> [&[u8]; PIECES] {
        let state = self.state.borrow();
        let base = self.layout.start(slot.index());
        std::array::from_fn(|piece| {
            let span = state.spans.get(slot.index()).map_or(0..0, |spans| spans[piece].clone());
            // SAFETY: the slot is Ready or Checking, so all reads into it have ended. The result borrows the batch, and
            // the slot stays pinned until the batch is released. Therefore no thread writes to the slot while the
            // result exists.
            unsafe { self.slab.bytes(base + span.start..base + span.end) }
        })
    }
}

impl ExpertFetch<'_> {
    /// Number of distinct experts that [`ExpertFetch::next`] has not returned yet.
    pub fn len(&self) -> usize {
        self.pending.waiting.len() + self.pending.in_slots.len()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The next batch of experts: first the experts that were in memory, then the experts that have arrived since the
    /// last call. Blocks until at least one expert is available.
    ///
    /// Returns `None` after every expert was returned and every [background
    /// verification](ExpertStore::verify_in_background) has ended. If a verification fails, the expert is returned a
    /// second time with correct bytes.
    #[allow(clippy::should_implement_trait)] // A lending iterator: a batch borrows the fetch.
    pub fn next(&mut self, device: &mut dyn Timeline) -> Result<Option<ReadyBatch<'_>>, StoreError> {
        let store = self.store;
        let state = &mut *store.state.borrow_mut();
        let PendingExperts { batch, used, .. } = &mut self.pending;
        used.extend(batch.drain(..).map(|expert| expert.slot));
        loop {
            let seen = store.reader.finished();
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
                && let Some(point) = state.slots.next_sync_point()
            {
                // No slot is free, and the device still reads slots of earlier layers or batches. Wait for the device.
                device.wait_for(point).map_err(|error| StoreError::Other(format!("GPU: {error}")))?;
                continue;
            }
            if self.pending.in_slots.is_empty() && !store.reader.is_busy() {
                if store.reader.finished() > seen {
                    continue;
                }
                return Err(StoreError::Other(format!(
                    "layer {}: no slot for {} experts; {} slots are too few",
                    self.layer,
                    self.len(),
                    state.slots.len()
                )));
            }
            let interval = device.begin_disk_wait();
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
            if self.size == PassSize::Small {
                state.prefetcher.count_stall(stalled);
            }
        }
    }

    /// Releases the slots of all batches that were not released yet. The device may read these slots until it has
    /// completed `point`.
    pub fn release_after(mut self, point: SyncPoint) {
        self.release(point);
    }

    /// Pins the experts that have a slot, so that claiming slots for other experts does not evict them. Counts hits and
    /// misses.
    fn pin_hits(&mut self, state: &mut StoreState) {
        let store = self.store;
        let metrics = &store.metrics;
        let (hit, miss, prefetched) = match self.size {
            PassSize::Large => {
                (&metrics.lookups_prefill_hit, &metrics.lookups_prefill_miss, &metrics.lookups_prefill_prefetched)
            }
            PassSize::Small => {
                (&metrics.lookups_decode_hit, &metrics.lookups_decode_miss, &metrics.lookups_decode_prefetched)
            }
        };
        store.release_failed_prefetches(state);
        let mut hits = 0;
        let mut misses = 0;
        let mut from_prefetch = 0;
        let mut are_on_device = true;
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
            are_on_device &= state.slots.is_on_device(slot);
            match (state.slots.take_prefetched(slot), is_readable) {
                (true, _) => from_prefetch += 1,
                (false, true) => hits += 1,
                (false, false) => misses += 1,
            }
            if !is_readable {
                store.reader.expedite(slot);
            }
            in_slots.push(PendingExpert { slot, is_earlier_read: !is_readable, ..wanted.clone() });
            false
        });
        hit.inc_by(hits);
        miss.inc_by(misses);
        prefetched.inc_by(from_prefetch);
        metrics.prefetches_used.inc_by(from_prefetch);
        if self.size == PassSize::Small {
            state.layer_hits.record(self.layer, misses + from_prefetch == 0 && are_on_device);
            state.prefetcher.count_reads(misses, from_prefetch);
        }
        store.release_unused_prefetches(state, self.layer);
    }

    /// Claims slots for waiting experts until no slot is available or the window of reads is full.
    fn claim_slots(&mut self, state: &mut StoreState) {
        let PendingExperts { waiting, in_slots, .. } = &mut self.pending;
        let mut limit = usize::MAX;
        if self.size == PassSize::Large {
            let reading = in_slots.iter().filter(|expert| state.slots.state(expert.slot) == SlotState::Reading).count();
            limit = READ_WINDOW.saturating_sub(reading);
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

    /// Unpins experts whose verification succeeded. Moves damaged experts back to `in_slots`, to be read again.
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

    /// Moves experts whose bytes have arrived from `in_slots` to the batch.
    fn collect_batch(&mut self, state: &mut StoreState) -> Result<(), StoreError> {
        let store = self.store;
        let layer = self.layer;
        let PendingExperts { in_slots, batch, unverified, .. } = &mut self.pending;
        let mut failed = None;
        in_slots.retain_mut(|expert| match state.slots.state(expert.slot) {
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
                expert.is_earlier_read = false;
                if let Some(key) = store.key(layer, expert.expert) {
                    store.start_read(state, key, expert.slot, ReadReason::Demand);
                }
                true
            }
            // The read began before this fetch. The disk may work again.
            SlotState::Failed if std::mem::take(&mut expert.is_earlier_read) => {
                store.log_earlier_error(state, expert.slot);
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
    fn release(&mut self, point: SyncPoint) {
        let state = &mut *self.store.state.borrow_mut();
        let PendingExperts { in_slots, batch, used, unverified, .. } = &mut self.pending;
        for slot in used.drain(..).chain(batch.drain(..).map(|expert| expert.slot)) {
            state.slots.unpin(slot, point, &state.scores);
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
        state.spare_pending.push(std::mem::take(&mut self.pending));
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

    /// Releases the slots of this batch. The slots can be reused after the device has completed `point`, even before
    /// the layer ends.
    pub fn release_after(self, point: SyncPoint) {
        let state = &mut *self.store.state.borrow_mut();
        for expert in self.pending.batch.drain(..) {
            state.slots.unpin(expert.slot, point, &state.scores);
        }
    }
}
