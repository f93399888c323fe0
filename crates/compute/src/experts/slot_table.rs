//! [`SlotTable`] assigns experts to slots and tracks the state of each slot. The table performs no I/O.
//!
//! ```text
//!                    prefetched, or hot in the last run
//!            Free ------------------------------------> Queued
//!             |  ^                                       |  |
//!    needed   |  |   cancelled before a reader took it   |  |  a reader is idle,
//!    by a     |  +---------------------------------------+  |  or a layer needs it
//!    layer    v                                             |
//!          Reading <----------------------------------------+
//!             |  |
//!             |  +---- a read failed ----> Failed ---+
//!             v                                      |
//!           Ready -----------------------------------+----> Free, or reused for another expert
//!                      no pins, and the device no longer reads the slot
//! ```
//! If the checksum of a packed expert is verified in the background, the state between Reading and Ready is Checking.
//! If the checksum does not match, the state becomes Damaged. A damaged expert is read again if a layer needs it, and
//! is freed otherwise.
//!
//! The reader makes the transitions Queued to Reading, Reading to Ready, Failed or Checking, and Checking to Ready or
//! Damaged. The thread that owns the table makes all other transitions.
//!
//! A layer pins the slots that it receives. When the layer unpins a slot, it names the sync point after which the
//! device no longer reads the slot. A prefetched expert stays pinned until its layer is fetched. A new expert replaces
//! the unpinned expert with the lowest [eviction score](EvictionScores) of all layers.

use super::eviction::{EvictionScores, ExpertKey};
use crate::device::SyncPoint;
use std::{
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

/// Index of a slot in the slab.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SlotId(pub u32);

impl SlotId {
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// The state of a slot. See the diagram in the module's documentation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum SlotState {
    Free,
    Queued,
    Reading,
    Ready,
    Failed,
    /// The bytes can be read, but their checksum is not verified yet.
    Checking,
    /// The checksum did not match. A layer may already have used the bytes.
    Damaged,
}

impl SlotState {
    /// The state in the lowest byte of `slot`.
    fn of(slot: u64) -> Self {
        match slot & 0xff {
            1 => SlotState::Queued,
            2 => SlotState::Reading,
            3 => SlotState::Ready,
            4 => SlotState::Failed,
            5 => SlotState::Checking,
            6 => SlotState::Damaged,
            _ => SlotState::Free,
        }
    }

    /// True if the expert's bytes have arrived.
    pub fn is_readable(self) -> bool {
        matches!(self, SlotState::Ready | SlotState::Checking)
    }
}

/// The state of every slot, shared by the table and the reader, and the last expert of every slot. Loads acquire and
/// stores release: a thread that loads [`SlotState::Ready`] also sees the expert's bytes.
///
/// A value has the state in its lowest byte, and the expert's key above. Only one thread at a time changes a slot.
#[derive(Clone)]
pub struct SlotStates(Arc<[AtomicU64]>);

impl SlotStates {
    fn new(slots: usize) -> Self {
        Self((0..slots).map(|_| AtomicU64::new(SlotState::Free as u64)).collect())
    }

    /// The state of a slot. Returns [`SlotState::Free`] if the slot does not exist.
    pub fn get(&self, slot: SlotId) -> SlotState {
        self.0.get(slot.index()).map_or(SlotState::Free, |slot| SlotState::of(slot.load(Ordering::Acquire)))
    }

    pub fn set(&self, slot: SlotId, state: SlotState) {
        if let Some(slot) = self.0.get(slot.index()) {
            slot.store(slot.load(Ordering::Relaxed) & !0xff | state as u64, Ordering::Release);
        }
    }

    /// Sets the expert and the state of a slot.
    fn assign(&self, slot: SlotId, key: ExpertKey, state: SlotState) {
        if let Some(slot) = self.0.get(slot.index()) {
            slot.store(u64::from(key) << 8 | state as u64, Ordering::Release);
        }
    }

    /// The experts whose bytes have arrived. Any thread may call this while slots change.
    pub fn readable_experts(&self) -> impl Iterator<Item = ExpertKey> {
        let slots = self.0.iter().map(|slot| slot.load(Ordering::Acquire));
        slots.filter(|&slot| SlotState::of(slot).is_readable()).map(|slot| (slot >> 8) as ExpertKey)
    }
}

/// The reason to read an expert.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReadReason {
    /// A layer needs the expert now. The expert is pinned and read before all queued experts.
    Demand,
    /// A layer will probably need the expert. The expert is queued, and pinned until the layer is fetched.
    Prefetch,
    /// The expert was hot when the server last stopped. The expert is queued and not pinned.
    WarmStart,
}

#[derive(Debug, Clone, Copy)]
struct Slot {
    key: ExpertKey,
    pins: u32,
    /// The device may read the slot until it has completed this sync point.
    in_use_until: SyncPoint,
    /// True if the expert was prefetched and no layer has used it yet.
    is_prefetched: bool,
    /// True if launches can read the expert's bytes.
    is_on_device: bool,
}

/// The result of [`SlotTable::claim`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SlotClaim {
    pub slot: SlotId,
    /// The expert that was evicted to free the slot. `None` if the slot was free.
    pub evicted: Option<ExpertKey>,
    /// True if the evicted expert was prefetched and never used.
    pub was_wasted: bool,
}

const NO_SLOT: u32 = u32::MAX;

/// The result of [`SlotTable::shrink`].
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Shrunk {
    /// Old and new slot of each expert that was moved. The caller must copy the expert's bytes.
    pub moved: Vec<(SlotId, SlotId)>,
    /// Number of evicted experts.
    pub evicted: usize,
    /// Number of evicted experts that were prefetched and never used.
    pub wasted: usize,
}

pub struct SlotTable {
    slots: Vec<Slot>,
    /// Number of usable slots. Memory of the other slots, at the end of the slab, was released to the system.
    present: usize,
    states: SlotStates,
    /// The slot of each expert, indexed by expert key.
    slot_of: Vec<u32>,
    /// Experts whose entry in the device's table of slots may be out of date.
    is_stale: Vec<bool>,
    free: Vec<u32>,
    /// Eviction candidates, sorted by descending score. The score is the one at the time when the slot was added.
    victims: Vec<(f32, u32)>,
    /// The last sync point that the device is known to have completed.
    completed: SyncPoint,
}

impl SlotTable {
    /// A table of free slots. `keys` is the number of layers times the number of experts per layer.
    pub fn new(slots: usize, keys: usize) -> Self {
        let empty = Slot { key: 0, pins: 0, in_use_until: SyncPoint::START, is_prefetched: false, is_on_device: false };
        Self {
            slots: vec![empty; slots],
            present: slots,
            states: SlotStates::new(slots),
            slot_of: vec![NO_SLOT; keys],
            is_stale: vec![true; keys],
            free: (0..slots as u32).rev().collect(),
            victims: Vec::with_capacity(MAX_VICTIMS),
            completed: SyncPoint::START,
        }
    }

    /// The states of the slots, to be shared with the reader.
    pub fn states(&self) -> &SlotStates {
        &self.states
    }

    /// Number of usable slots.
    pub fn len(&self) -> usize {
        self.present
    }

    pub fn is_empty(&self) -> bool {
        self.present == 0
    }

    /// Number of slots that hold an expert or are being filled.
    pub fn used(&self) -> usize {
        self.present - self.free.len()
    }

    /// Records that the device has completed this sync point.
    pub fn advance(&mut self, completed: SyncPoint) {
        self.completed = self.completed.max(completed);
    }

    /// The slot that holds `key`, or that is being filled with `key`.
    pub fn find(&self, key: ExpertKey) -> Option<SlotId> {
        let slot = *self.slot_of.get(key as usize)?;
        (slot != NO_SLOT).then_some(SlotId(slot))
    }

    pub fn state(&self, slot: SlotId) -> SlotState {
        self.states.get(slot)
    }

    pub fn pins(&self, slot: SlotId) -> u32 {
        self.slots.get(slot.index()).map_or(0, |slot| slot.pins)
    }

    /// The expert in a slot. `None` if the slot is free.
    pub fn key(&self, slot: SlotId) -> Option<ExpertKey> {
        let key = self.slots.get(slot.index())?.key;
        (self.find(key) == Some(slot)).then_some(key)
    }

    /// All slots in this state, with their experts.
    pub fn in_state(&self, state: SlotState) -> impl Iterator<Item = (ExpertKey, SlotId)> {
        let slots = self.slots.iter().enumerate().map(|(index, slot)| (slot.key, SlotId(index as u32)));
        slots.filter(move |&(_, slot)| self.state(slot) == state)
    }

    /// The first sync point for which an unpinned slot waits. `None` if no slot waits for the device.
    pub fn next_sync_point(&self) -> Option<SyncPoint> {
        let waiting = self.slots.iter().filter(|slot| slot.pins == 0 && slot.in_use_until > self.completed);
        waiting.map(|slot| slot.in_use_until).min()
    }

    /// Keeps the expert in its slot until a matching [`SlotTable::unpin`].
    pub fn pin(&mut self, slot: SlotId) {
        if let Some(slot) = self.slots.get_mut(slot.index()) {
            slot.pins += 1;
        }
    }

    /// Undoes one [`SlotTable::pin`]. The device may read the slot until it has completed `in_use_until`.
    pub fn unpin(&mut self, slot: SlotId, in_use_until: SyncPoint, scores: &EvictionScores) {
        let Some(pinned) = self.slots.get_mut(slot.index()) else { return };
        pinned.pins = pinned.pins.saturating_sub(1);
        pinned.in_use_until = pinned.in_use_until.max(in_use_until);
        let key = pinned.key;
        let pins = pinned.pins;
        match self.state(slot) {
            SlotState::Failed | SlotState::Damaged if pins == 0 => self.vacate(slot),
            SlotState::Ready if pins == 0 => self.add_victim(scores.score(key), slot.0),
            _ => {}
        }
    }

    /// Marks the expert in this slot as used. Returns true if the expert was prefetched and not used before.
    pub fn take_prefetched(&mut self, slot: SlotId) -> bool {
        self.slots.get_mut(slot.index()).is_some_and(|slot| std::mem::take(&mut slot.is_prefetched))
    }

    /// True if the slot's expert was prefetched and no layer has used the expert.
    pub fn is_prefetched(&self, slot: SlotId) -> bool {
        self.slots.get(slot.index()).is_some_and(|slot| slot.is_prefetched)
    }

    /// Assigns a slot to `key`: a free slot, or the slot of an evicted expert. Returns `None` if `key` has a slot
    /// already, or if no expert can be evicted.
    pub fn claim(&mut self, key: ExpertKey, reason: ReadReason, scores: &EvictionScores) -> Option<SlotClaim> {
        if self.find(key).is_some() || key as usize >= self.slot_of.len() {
            return None;
        }
        let (index, evicted, was_wasted) = match self.free.pop() {
            Some(index) => (index, None, false),
            None => {
                let index = self.take_victim(scores)?;
                let old = *self.slots.get(index as usize)?;
                *self.slot_of.get_mut(old.key as usize)? = NO_SLOT;
                self.set_stale(old.key);
                (index, Some(old.key), old.is_prefetched)
            }
        };
        let pins = u32::from(reason != ReadReason::WarmStart);
        let is_prefetched = reason == ReadReason::Prefetch;
        *self.slots.get_mut(index as usize)? =
            Slot { key, pins, in_use_until: SyncPoint::START, is_prefetched, is_on_device: false };
        *self.slot_of.get_mut(key as usize)? = index;
        let slot = SlotId(index);
        let state = if reason == ReadReason::Demand { SlotState::Reading } else { SlotState::Queued };
        self.states.assign(slot, key, state);
        Some(SlotClaim { slot, evicted, was_wasted })
    }

    /// Records that launches can read the expert in this slot.
    pub fn mark_on_device(&mut self, slot: SlotId) {
        let Some(slot) = self.slots.get_mut(slot.index()) else { return };
        if !std::mem::replace(&mut slot.is_on_device, true) {
            let key = slot.key;
            self.set_stale(key);
        }
    }

    fn set_stale(&mut self, key: ExpertKey) {
        if let Some(stale) = self.is_stale.get_mut(key as usize) {
            *stale = true;
        }
    }

    /// True if launches can read the expert in this slot.
    pub fn is_on_device(&self, slot: SlotId) -> bool {
        self.slots.get(slot.index()).is_some_and(|slot| slot.is_on_device)
    }

    /// Records that launches can read no expert any more.
    pub fn clear_device(&mut self) {
        self.slots.iter_mut().for_each(|slot| slot.is_on_device = false);
        self.is_stale.fill(true);
    }

    /// The slots of these experts for the device's table, or `None` if the last call for them has returned the same
    /// slots. Experts that are not on the device have the slot [`NO_SLOT`].
    pub fn take_device_slots(&mut self, keys: Range<usize>) -> Option<Vec<u32>> {
        let stale = self.is_stale.get_mut(keys.clone())?;
        if !stale.contains(&true) {
            return None;
        }
        stale.fill(false);
        let is_on_device = |&slot: &u32| self.is_on_device(SlotId(slot));
        let slots = self.slot_of.get(keys)?.iter();
        Some(slots.map(|slot| if is_on_device(slot) { *slot } else { NO_SLOT }).collect())
    }

    /// Frees a slot and removes its pins. No reader thread may be filling the slot.
    pub fn vacate(&mut self, slot: SlotId) {
        let Some(key) = self.key(slot) else { return };
        if let (Some(at), Some(freed)) = (self.slot_of.get_mut(key as usize), self.slots.get_mut(slot.index())) {
            *at = NO_SLOT;
            freed.pins = 0;
            freed.in_use_until = SyncPoint::START;
        }
        self.set_stale(key);
        self.states.set(slot, SlotState::Free);
        self.free.push(slot.0);
    }

    /// Removes slots from the end until `to` slots are left, rounded up to a multiple of `step`.
    ///
    /// Keeps every slot up to the last slot that is pinned, being filled or in use by the device. Evicts the experts
    /// with the lowest scores. Moves the remaining experts of removed slots to free slots.
    pub fn shrink(&mut self, to: usize, step: usize, scores: &EvictionScores) -> Shrunk {
        let mut shrunk = Shrunk::default();
        let is_busy = |index: &usize| {
            let slot = SlotId(*index as u32);
            self.key(slot).is_some_and(|_| self.slots.get(*index).is_some_and(|held| !self.is_evictable(held, slot.0)))
        };
        let to = (to..self.present).rev().find(is_busy).map_or(to, |index| index + 1).next_multiple_of(step.max(1));
        if to >= self.present {
            return shrunk;
        }
        self.victims.clear();
        let evictable = self.slots.iter().enumerate().filter(|(index, slot)| self.is_evictable(slot, *index as u32));
        let mut lowest: Vec<(f32, u32)> =
            evictable.map(|(index, slot)| (scores.score(slot.key), index as u32)).collect();
        lowest.sort_unstable_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
        for &(_, index) in lowest.iter().take(self.used().saturating_sub(to)) {
            shrunk.evicted += 1;
            shrunk.wasted += usize::from(self.is_prefetched(SlotId(index)));
            self.vacate(SlotId(index));
        }
        self.free.retain(|&index| (index as usize) < to);
        for from in (to..self.present).map(|index| SlotId(index as u32)) {
            let Some(key) = self.key(from) else { continue };
            // At most `to` experts are left, so there are enough free slots.
            let (Some(into), Some(held)) = (self.free.pop(), self.slots.get(from.index()).copied()) else { continue };
            let into = SlotId(into);
            if let (Some(slot), Some(at)) = (self.slots.get_mut(into.index()), self.slot_of.get_mut(key as usize)) {
                *slot = Slot { is_on_device: false, ..held };
                *at = into.0;
            }
            self.set_stale(key);
            self.states.assign(into, key, self.state(from));
            self.states.set(from, SlotState::Free);
            shrunk.moved.push((from, into));
        }
        self.present = to;
        shrunk
    }

    /// Restores removed slots until there are `to` slots, but never more than the original number.
    pub fn grow(&mut self, to: usize) {
        let to = to.clamp(self.present, self.slots.len());
        self.free.extend((self.present as u32..to as u32).rev());
        self.present = to;
    }

    /// Takes the evictable slot with the lowest score.
    ///
    /// A scan of all slots is slow, so each scan fills a list of several victims. A victim of the list is used only if
    /// its slot is still evictable and its score has not risen. [`SlotTable::unpin`] adds slots with lower scores to
    /// the list.
    fn take_victim(&mut self, scores: &EvictionScores) -> Option<u32> {
        for rescan in [false, true] {
            if rescan {
                self.scan_victims(scores);
            }
            while let Some((score, index)) = self.victims.pop() {
                let slot = self.slots.get(index as usize);
                if slot.is_some_and(|slot| self.is_evictable(slot, index) && scores.score(slot.key) <= score) {
                    return Some(index);
                }
            }
        }
        None
    }

    fn scan_victims(&mut self, scores: &EvictionScores) {
        let count = (self.slots.len() / 32).clamp(1, MAX_VICTIMS);
        let mut victims = std::mem::take(&mut self.victims);
        victims.clear();
        // Keep the lowest scores in a sorted list. Most slots fail the first comparison, so insertion is rare.
        for (index, slot) in self.slots.iter().enumerate() {
            if !self.is_evictable(slot, index as u32) {
                continue;
            }
            let score = scores.score(slot.key);
            if victims.len() == count {
                if victims.first().is_some_and(|highest| score >= highest.0) {
                    continue;
                }
                victims.remove(0);
            }
            let at = victims.partition_point(|other| other.0 > score);
            victims.insert(at, (score, index as u32));
        }
        self.victims = victims;
    }

    /// Adds a slot to the list of victims if its score is below the highest score of the list.
    fn add_victim(&mut self, score: f32, index: u32) {
        if self.victims.first().is_some_and(|highest| score < highest.0) {
            if self.victims.len() == MAX_VICTIMS {
                self.victims.remove(0);
            }
            let at = self.victims.partition_point(|other| other.0 > score);
            self.victims.insert(at, (score, index));
        }
    }

    fn is_evictable(&self, slot: &Slot, index: u32) -> bool {
        let is_done = matches!(self.state(SlotId(index)), SlotState::Ready | SlotState::Failed | SlotState::Damaged);
        is_done && slot.pins == 0 && slot.in_use_until <= self.completed
    }
}

/// Maximum number of victims found by one scan of all slots.
const MAX_VICTIMS: usize = 64;
