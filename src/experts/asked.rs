//! One layer's experts on their way: what [`Experts::ask`] hands out as it becomes readable.

use super::{
    Choice, Experts, Live, Phase,
    layout::PIECES,
    slots::{Purpose, SlotId, State},
};
use crate::{
    device::{SyncPoint, Timeline},
    error::StoreError,
};
use std::{collections::VecDeque, ops::Range, time::Instant};

/// Experts of a prefill that may be on their way at a time: enough to keep the disk at work while a batch is computed (reads
/// are lined up between batches only), few enough to spare what decoding has left in the slots.
const WINDOW: usize = 64;

/// One of the distinct experts that a layer asks for.
#[derive(Debug, Clone)]
struct Wanted {
    expert: u32,
    /// Its part of [`Lists::places`].
    places: Range<usize>,
    /// Valid once the expert has one.
    slot: SlotId,
}

/// An expert goes from list to list. Kept for the next layer, so that asking allocates nothing.
#[derive(Default)]
pub(super) struct Lists {
    /// The places of the choice, sorted by expert.
    places: Vec<u32>,
    /// Experts and places, in that order.
    order: Vec<(u32, u32)>,
    /// Experts without a slot.
    waiting: VecDeque<Wanted>,
    /// Experts in a pinned slot that are not handed out yet.
    coming: Vec<Wanted>,
    /// Experts that were handed out last.
    batch: Vec<Wanted>,
    /// Slots that were handed out before and are still pinned.
    held: Vec<SlotId>,
    /// Experts that were handed out before their checksums were compared, pinned once more until they have been.
    unchecked: Vec<Wanted>,
}

/// The experts a layer asked for. A slot that was handed out keeps its bytes until a mark has been named for it
/// ([`Batch::reads_until`], [`Asked::reads_until`]) and the device has passed that. Dropping this lets go of all slots: then
/// nothing may be reading those without a mark.
pub struct Asked<'s> {
    experts: &'s Experts,
    layer: usize,
    phase: Phase,
    lists: Lists,
}

/// Experts that can be read now.
pub struct Batch<'r> {
    experts: &'r Experts,
    lists: &'r mut Lists,
}

/// One expert that can be read.
pub struct Landed<'r> {
    pub expert: u32,
    pub slot: SlotId,
    /// The places of the choice that took it, ascending.
    pub places: &'r [u32],
    /// Codes, scales, biases of gate, up, down; empty where the encoding has none.
    pub pieces: [&'r [u8]; PIECES],
}

impl Experts {
    /// Asks for the experts that the router of `layer` has chosen. Scores are brought up to date, what has a slot is pinned,
    /// and what is missing is being read when this returns, as far as there are slots; [`Asked::next`] hands out all of it.
    /// `device` is what read the layers before.
    pub fn ask(
        &self,
        layer: usize,
        choice: &Choice<'_>,
        phase: Phase,
        device: &mut dyn Timeline,
    ) -> Result<Asked<'_>, StoreError> {
        if let Some(expert) = choice.ids.iter().find(|&&expert| self.key(layer, expert).is_none()) {
            return Err(StoreError::Other(format!("layer {layer} has no expert {expert}")));
        }
        let live = &mut *self.live.borrow_mut();
        let mut lists = live.spare.pop().unwrap_or_default();
        lists.group(choice.ids);
        if let Some(trace) = &mut live.trace {
            trace.ask(layer, choice, lists.waiting.iter().map(|wanted| wanted.expert), phase);
        }
        if !self.is_resident() {
            live.scores.visit(layer, *choice);
        }
        if phase == Phase::Decode {
            live.ahead.tick(layer);
        }
        self.save_hot_if_due(live);
        self.draw(live);
        live.slots.advance(device.completed());
        let mut asked = Asked { experts: self, layer, phase, lists };
        asked.find(live);
        asked.claim(live);
        Ok(asked)
    }
}

impl Lists {
    /// Sorts the places of a choice by expert. Everything is waiting.
    fn group(&mut self, ids: &[u32]) {
        let id = |place: u32| ids.get(place as usize).copied().unwrap_or(0);
        self.order.clear();
        self.order.extend(ids.iter().zip(0..).map(|(id, place)| (*id, place)));
        self.order.sort_unstable();
        self.places.clear();
        self.places.extend(self.order.iter().map(|(_, place)| *place));
        let mut first = 0;
        for same in self.places.chunk_by(|&a, &b| id(a) == id(b)) {
            let (expert, places) = (same.first().map_or(0, |&place| id(place)), first..first + same.len());
            first = places.end;
            self.waiting.push_back(Wanted { expert, places, slot: SlotId(u32::MAX) });
        }
    }
}

impl Asked<'_> {
    /// Distinct experts that have not been handed out.
    pub fn len(&self) -> usize {
        self.lists.waiting.len() + self.lists.coming.len()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The next experts that can be read: first those that are in slots already, then what has been read since; waits only
    /// if there is nothing to hand out. `None` when every expert has been handed out once, and its checksum, where one is
    /// compared [beside](Experts::check_beside), was right: an expert with a wrong one comes once more, with its own bytes.
    #[allow(clippy::should_implement_trait)] // A lending iterator: a batch borrows what hands it out.
    pub fn next(&mut self, device: &mut dyn Timeline) -> Result<Option<Batch<'_>>, StoreError> {
        let experts = self.experts;
        let live = &mut *experts.live.borrow_mut();
        let Lists { batch, held, .. } = &mut self.lists;
        held.extend(batch.drain(..).map(|wanted| wanted.slot));
        loop {
            let seen = experts.reader.landed();
            live.slots.advance(device.completed());
            self.confirm(live);
            self.claim(live);
            self.gather(live)?;
            if !self.lists.batch.is_empty() {
                return Ok(Some(Batch { experts, lists: &mut self.lists }));
            }
            let checks_alone = self.is_empty();
            if checks_alone && self.lists.unchecked.is_empty() {
                return Ok(None);
            }
            if self.lists.coming.is_empty()
                && !checks_alone
                && let Some(mark) = live.slots.next_mark()
            {
                // Every slot is being read by the device: that one waits, not the disk.
                device.wait_for(mark).map_err(|error| StoreError::Other(format!("GPU: {error}")))?;
                continue;
            }
            if self.lists.coming.is_empty() && !experts.reader.is_busy() {
                if experts.reader.landed() > seen {
                    continue;
                }
                return Err(StoreError::Other(format!(
                    "layer {}: {} experts found no slot; {} slots are too few",
                    self.layer,
                    self.len(),
                    live.slots.len()
                )));
            }
            device.rest();
            let begin = Instant::now();
            experts.reader.wait(seen);
            let stalled = begin.elapsed().as_secs_f64();
            if checks_alone {
                experts.metrics.pack_check_seconds.inc_by(stalled);
                continue;
            }
            experts.metrics.ssd_stall_seconds.inc_by(stalled);
            if self.phase == Phase::Decode {
                live.ahead.stalled(stalled);
            }
        }
    }

    /// The device reads what was handed out, and not let go of since, until it passes `mark`.
    pub fn reads_until(mut self, mark: SyncPoint) {
        self.let_go(mark);
    }

    /// Pins what has a slot already, before anything is evicted, and counts the lookups.
    fn find(&mut self, live: &mut Live) {
        let experts = self.experts;
        let metrics = &experts.metrics;
        let (hit, miss, prefetched) = match self.phase {
            Phase::Prefill => {
                (&metrics.lookups_prefill_hit, &metrics.lookups_prefill_miss, &metrics.lookups_prefill_prefetched)
            }
            Phase::Decode => {
                (&metrics.lookups_decode_hit, &metrics.lookups_decode_miss, &metrics.lookups_decode_prefetched)
            }
        };
        experts.forget_failed(live);
        let (mut hits, mut misses, mut foreseen) = (0, 0, 0);
        let Lists { waiting, coming, .. } = &mut self.lists;
        waiting.retain_mut(|wanted| {
            let key = experts.key(self.layer, wanted.expert);
            let found = key.and_then(|key| {
                experts.board.asked(key as usize);
                experts.find(live, key)
            });
            let Some(slot) = found else {
                misses += 1;
                return true;
            };
            live.slots.pin(slot);
            let ready = live.slots.state(slot).is_readable();
            match (live.slots.asked(slot), ready) {
                (true, _) => foreseen += 1,
                (false, true) => hits += 1,
                (false, false) => misses += 1,
            }
            if !ready {
                experts.reader.hurry(slot);
            }
            coming.push(Wanted { slot, ..wanted.clone() });
            false
        });
        hit.inc_by(hits);
        miss.inc_by(misses);
        prefetched.inc_by(foreseen);
        metrics.prefetches_used.inc_by(foreseen);
        if self.phase == Phase::Decode {
            live.ahead.looked_up(misses, foreseen);
        }
        experts.pass_over(live, self.layer);
    }

    /// Gives slots to experts that have none, as far as there are any and the window allows.
    fn claim(&mut self, live: &mut Live) {
        let Lists { waiting, coming, .. } = &mut self.lists;
        let mut room = usize::MAX;
        if self.phase == Phase::Prefill {
            let under_way = coming.iter().filter(|wanted| live.slots.state(wanted.slot) == State::Reading).count();
            room = WINDOW.saturating_sub(under_way);
        }
        while room > 0
            && let Some(wanted) = waiting.front()
            && let Some(key) = self.experts.key(self.layer, wanted.expert)
            && let Some(slot) = self.experts.slot_for(live, key)
            && let Some(wanted) = waiting.pop_front()
        {
            coming.push(Wanted { slot, ..wanted });
            room -= 1;
        }
    }

    /// Looks after the checks of what has been handed out: what passed is let go of, what did not is read again, by other
    /// means, and will be handed out once more.
    fn confirm(&mut self, live: &mut Live) {
        let Lists { coming, unchecked, .. } = &mut self.lists;
        unchecked.retain(|wanted| match live.slots.state(wanted.slot) {
            State::Checking => true,
            State::Damaged => {
                coming.push(wanted.clone());
                false
            }
            _ => {
                live.slots.unpin(wanted.slot, SyncPoint::START, &live.scores);
                false
            }
        });
    }

    /// Moves what can be read to the batch.
    fn gather(&mut self, live: &mut Live) -> Result<(), StoreError> {
        let (experts, layer) = (self.experts, self.layer);
        let Lists { coming, batch, unchecked, .. } = &mut self.lists;
        let mut failed = None;
        coming.retain(|wanted| match live.slots.state(wanted.slot) {
            State::Ready => {
                batch.push(wanted.clone());
                false
            }
            State::Checking => {
                live.slots.pin(wanted.slot);
                unchecked.push(wanted.clone());
                batch.push(wanted.clone());
                false
            }
            State::Damaged => {
                if let Some(key) = experts.key(layer, wanted.expert) {
                    experts.send(live, key, wanted.slot, Purpose::Demand);
                }
                true
            }
            State::Failed => {
                failed.get_or_insert(wanted.slot);
                true
            }
            _ => true,
        });
        match failed {
            Some(slot) => Err(self.experts.failure(live, slot)),
            None => Ok(()),
        }
    }

    /// Unpins everything.
    fn let_go(&mut self, mark: SyncPoint) {
        let live = &mut *self.experts.live.borrow_mut();
        let Lists { coming, batch, held, unchecked, .. } = &mut self.lists;
        for slot in held.drain(..).chain(batch.drain(..).map(|wanted| wanted.slot)) {
            live.slots.unpin(slot, mark, &live.scores);
        }
        for wanted in coming.drain(..).chain(unchecked.drain(..)) {
            live.slots.unpin(wanted.slot, SyncPoint::START, &live.scores);
        }
        self.experts.metrics.expert_slots_used.set(live.slots.used() as i64);
    }
}

impl Drop for Asked<'_> {
    fn drop(&mut self) {
        self.let_go(SyncPoint::START);
        self.lists.waiting.clear();
        let live = &mut *self.experts.live.borrow_mut();
        live.spare.push(std::mem::take(&mut self.lists));
    }
}

impl Batch<'_> {
    pub fn len(&self) -> usize {
        self.lists.batch.len()
    }

    pub fn is_empty(&self) -> bool {
        self.lists.batch.is_empty()
    }

    pub fn iter(&self) -> impl Iterator<Item = Landed<'_>> {
        self.lists.batch.iter().map(|wanted| Landed {
            expert: wanted.expert,
            slot: wanted.slot,
            places: self.lists.places.get(wanted.places.clone()).unwrap_or_default(),
            pieces: self.experts.pieces(wanted.slot),
        })
    }

    /// The device reads these slots until it passes `mark`: then they may be filled again, also before the layer ends.
    pub fn reads_until(self, mark: SyncPoint) {
        let live = &mut *self.experts.live.borrow_mut();
        for wanted in self.lists.batch.drain(..) {
            live.slots.unpin(wanted.slot, mark, &live.scores);
        }
    }
}

impl Experts {
    /// The pieces of an expert that is ready, in a slot that is pinned for as long as the result lives.
    fn pieces(&self, slot: SlotId) -> [&[u8]; PIECES] {
        let live = self.live.borrow();
        let base = slot.index() * self.slot_bytes;
        std::array::from_fn(|piece| {
            let span = live.spans.get(slot.index()).map_or(0..0, |spans| spans[piece].clone());
            // SAFETY: the slot is ready, or being checked, so all reads into it are over, and it is pinned until the
            // batch that the result borrows is let go of: nobody writes to it before.
            unsafe { self.slab.bytes(base + span.start..base + span.end) }
        })
    }
}

mod claim;
#[cfg(test)]
mod slow_tests;
#[cfg(test)]
mod tests;
