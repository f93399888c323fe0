//! The life of an expert, and the table that says which one is in which slot. Pure: no input or output.
//!
//! ```text
//!                    predicted, or hot in the last run
//!            Free ------------------------------------> Queued
//!             |  ^                                       |  |
//!    asked    |  |   given up before a reader took it    |  |  a reader is idle,
//!    for      |  +---------------------------------------+  |  or it is asked for
//!             v                                             |
//!          Reading <----------------------------------------+
//!             |  |
//!             |  +---- a read failed ----> Failed ---+
//!             v                                      |
//!           Ready -----------------------------------+----> Free, or Reading and Queued for another expert
//!                      nobody has it pinned, and the device has passed the mark of its last reader
//! ```
//! A packed expert whose checksum is compared while it is used is Checking between Reading and Ready; one that does not pass
//! is Damaged, and goes back to Reading or, if nobody wants it, the way of Failed.
//!
//! The reader makes these steps: Queued to Reading, Reading to Ready, Failed or Checking, Checking to Ready or Damaged. The
//! table's owner makes the others. A layer pins the slots it is handed until it names the mark behind what reads them; a prediction pins its slot
//! until its layer has asked. The victim for a new expert is the one with the least eviction score ([`Scores`]) of all
//! layers' experts that may go.

use super::eviction::{Key, Scores};
use crate::device::SyncPoint;
use std::sync::{
    Arc,
    atomic::{AtomicU8, Ordering},
};

/// A place in the slab.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SlotId(pub u32);

impl SlotId {
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// The state of a slot's expert: see the drawing above.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum State {
    Free,
    Queued,
    Reading,
    Ready,
    Failed,
    /// Its bytes can be read; they have not been compared with their checksum.
    Checking,
    /// Its bytes are not what was written, and somebody may have read them.
    Damaged,
}

impl State {
    /// True if the expert's bytes are there.
    pub fn is_readable(self) -> bool {
        matches!(self, State::Ready | State::Checking)
    }
}

/// The state of every slot, as the table and the reader see it. Bytes are visible to whoever has seen [`State::Ready`].
#[derive(Clone)]
pub struct States(Arc<[AtomicU8]>);

impl States {
    fn new(slots: usize) -> Self {
        Self((0..slots).map(|_| AtomicU8::new(State::Free as u8)).collect())
    }

    /// [`State::Free`] for a slot that does not exist.
    pub fn get(&self, slot: SlotId) -> State {
        match self.0.get(slot.index()).map(|state| state.load(Ordering::Acquire)) {
            Some(1) => State::Queued,
            Some(2) => State::Reading,
            Some(3) => State::Ready,
            Some(4) => State::Failed,
            Some(5) => State::Checking,
            Some(6) => State::Damaged,
            _ => State::Free,
        }
    }

    pub fn set(&self, slot: SlotId, state: State) {
        if let Some(slot) = self.0.get(slot.index()) {
            slot.store(state as u8, Ordering::Release);
        }
    }
}

/// The reason for which an expert is given a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    /// A layer asks for it: it is read at once, and pinned.
    Demand,
    /// A layer will probably ask for it: it is queued, and pinned until the layer has asked.
    Prediction,
    /// It was hot when the server last stopped: it is queued.
    WarmStart,
}

#[derive(Debug, Clone, Copy)]
struct Slot {
    key: Key,
    pins: u32,
    /// The device may read it up to here.
    until: SyncPoint,
    /// It was predicted, and nobody has asked for it yet.
    predicted: bool,
}

/// The result of a claim.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Claim {
    pub slot: SlotId,
    /// The expert that had to go.
    pub evicted: Option<Key>,
    /// It had been predicted and nobody ever asked for it.
    pub wasted: bool,
}

const NOWHERE: u32 = u32::MAX;

/// The result of giving slots back.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Shrunk {
    /// Experts that have another slot now: their bytes are to be copied from the first to the second.
    pub moved: Vec<(SlotId, SlotId)>,
    /// Experts that had to go, and those of them that nobody had ever asked for.
    pub evicted: usize,
    pub wasted: usize,
}

pub struct Slots {
    slots: Vec<Slot>,
    /// Slots from here on have been given back.
    present: usize,
    states: States,
    /// Slot by key.
    places: Vec<u32>,
    free: Vec<u32>,
    /// The slots of least score at the last look, least last, with the score they had.
    victims: Vec<(f32, u32)>,
    /// The last mark that the device is known to have passed.
    passed: SyncPoint,
}

impl Slots {
    /// `keys`: layers times experts a layer.
    pub fn new(slots: usize, keys: usize) -> Self {
        let empty = Slot { key: 0, pins: 0, until: SyncPoint::START, predicted: false };
        Self {
            slots: vec![empty; slots],
            present: slots,
            states: States::new(slots),
            places: vec![NOWHERE; keys],
            free: (0..slots as u32).rev().collect(),
            victims: Vec::with_capacity(MAX_VICTIMS),
            passed: SyncPoint::START,
        }
    }

    /// The states, for the reader.
    pub fn states(&self) -> &States {
        &self.states
    }

    /// Slots that there are, less those that were given back.
    pub fn len(&self) -> usize {
        self.present
    }

    pub fn is_empty(&self) -> bool {
        self.present == 0
    }

    /// Slots that hold, or are being filled with, an expert.
    pub fn used(&self) -> usize {
        self.present - self.free.len()
    }

    /// The device has passed this mark.
    pub fn advance(&mut self, passed: SyncPoint) {
        self.passed = self.passed.max(passed);
    }

    /// The slot in which `key` is or will be.
    pub fn find(&self, key: Key) -> Option<SlotId> {
        let slot = *self.places.get(key as usize)?;
        (slot != NOWHERE).then_some(SlotId(slot))
    }

    pub fn state(&self, slot: SlotId) -> State {
        self.states.get(slot)
    }

    pub fn pins(&self, slot: SlotId) -> u32 {
        self.slots.get(slot.index()).map_or(0, |slot| slot.pins)
    }

    /// The expert in a slot, unless that is free.
    pub fn key(&self, slot: SlotId) -> Option<Key> {
        let key = self.slots.get(slot.index())?.key;
        (self.find(key) == Some(slot)).then_some(key)
    }

    /// The slots in this state, with their experts.
    pub fn all(&self, state: State) -> impl Iterator<Item = (Key, SlotId)> {
        let slots = self.slots.iter().enumerate().map(|(index, slot)| (slot.key, SlotId(index as u32)));
        slots.filter(move |&(_, slot)| self.state(slot) == state)
    }

    /// The first mark that the device has not passed and that keeps a slot from being given away.
    pub fn next_mark(&self) -> Option<SyncPoint> {
        let waiting = self.slots.iter().filter(|slot| slot.pins == 0 && slot.until > self.passed);
        waiting.map(|slot| slot.until).min()
    }

    /// Keeps the expert in its slot until it is unpinned as often.
    pub fn pin(&mut self, slot: SlotId) {
        if let Some(slot) = self.slots.get_mut(slot.index()) {
            slot.pins += 1;
        }
    }

    /// Undoes one [`Slots::pin`]. The device may read the slot until it passes `until`.
    pub fn unpin(&mut self, slot: SlotId, until: SyncPoint, scores: &Scores) {
        let Some(held) = self.slots.get_mut(slot.index()) else { return };
        held.pins = held.pins.saturating_sub(1);
        held.until = held.until.max(until);
        let (key, pins) = (held.key, held.pins);
        match self.state(slot) {
            State::Failed | State::Damaged if pins == 0 => self.vacate(slot),
            State::Ready if pins == 0 => self.offer(scores.score(key), slot.0),
            _ => {}
        }
    }

    /// Somebody asks for the expert in this slot; true if it is there because this was predicted.
    pub fn asked(&mut self, slot: SlotId) -> bool {
        self.slots.get_mut(slot.index()).is_some_and(|slot| std::mem::take(&mut slot.predicted))
    }

    /// True if the slot's expert was predicted and no layer has asked for it.
    pub fn is_predicted(&self, slot: SlotId) -> bool {
        self.slots.get(slot.index()).is_some_and(|slot| slot.predicted)
    }

    /// Gives `key`, which must have no slot, a free one or that of a victim. `None` if there is none.
    pub fn claim(&mut self, key: Key, purpose: Purpose, scores: &Scores) -> Option<Claim> {
        if self.find(key).is_some() || key as usize >= self.places.len() {
            return None;
        }
        let (index, evicted, wasted) = match self.free.pop() {
            Some(index) => (index, None, false),
            None => {
                let index = self.victim(scores)?;
                let old = *self.slots.get(index as usize)?;
                *self.places.get_mut(old.key as usize)? = NOWHERE;
                (index, Some(old.key), old.predicted)
            }
        };
        let (pins, predicted) = (u32::from(purpose != Purpose::WarmStart), purpose == Purpose::Prediction);
        *self.slots.get_mut(index as usize)? = Slot { key, pins, until: SyncPoint::START, predicted };
        *self.places.get_mut(key as usize)? = index;
        let slot = SlotId(index);
        self.states.set(slot, if purpose == Purpose::Demand { State::Reading } else { State::Queued });
        Some(Claim { slot, evicted, wasted })
    }

    /// Frees a slot that no reader is filling, pinned or not.
    pub fn vacate(&mut self, slot: SlotId) {
        let Some(key) = self.key(slot) else { return };
        if let (Some(at), Some(held)) = (self.places.get_mut(key as usize), self.slots.get_mut(slot.index())) {
            (*at, held.pins, held.until) = (NOWHERE, 0, SyncPoint::START);
        }
        self.states.set(slot, State::Free);
        self.free.push(slot.0);
    }

    /// Gives the last slots back until `to` are left, or as few as those allow that somebody holds or is reading into. The
    /// least wanted experts go, and those behind the new end move before it.
    pub fn shrink(&mut self, to: usize, scores: &Scores) -> Shrunk {
        let mut shrunk = Shrunk::default();
        let holds = |index: &usize| {
            let slot = SlotId(*index as u32);
            self.key(slot).is_some_and(|_| self.slots.get(*index).is_some_and(|held| !self.may_go(held, slot.0)))
        };
        let to = (to..self.present).rev().find(holds).map_or(to, |index| index + 1);
        if to >= self.present {
            return shrunk;
        }
        self.victims.clear();
        let may_go = self.slots.iter().enumerate().filter(|(index, slot)| self.may_go(slot, *index as u32));
        let mut least: Vec<(f32, u32)> = may_go.map(|(index, slot)| (scores.score(slot.key), index as u32)).collect();
        least.sort_unstable_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
        for &(_, index) in least.iter().take(self.used().saturating_sub(to)) {
            shrunk.evicted += 1;
            shrunk.wasted += usize::from(self.is_predicted(SlotId(index)));
            self.vacate(SlotId(index));
        }
        self.free.retain(|&index| (index as usize) < to);
        for from in (to..self.present).map(|index| SlotId(index as u32)) {
            let Some(key) = self.key(from) else { continue };
            // There are as many free ones as are needed: no more experts are left than slots.
            let (Some(into), Some(held)) = (self.free.pop(), self.slots.get(from.index()).copied()) else { continue };
            let into = SlotId(into);
            if let (Some(slot), Some(place)) = (self.slots.get_mut(into.index()), self.places.get_mut(key as usize)) {
                (*slot, *place) = (held, into.0);
            }
            self.states.set(into, self.state(from));
            self.states.set(from, State::Free);
            shrunk.moved.push((from, into));
        }
        self.present = to;
        shrunk
    }

    /// Takes slots again that were given back, until there are `to`, or as many as there were.
    pub fn grow(&mut self, to: usize) {
        let to = to.clamp(self.present, self.slots.len());
        self.free.extend((self.present as u32..to as u32).rev());
        self.present = to;
    }

    /// The slot of least score that may be given away. One look at all slots serves several victims: the list is good as
    /// long as a slot on it may still go and its score has not risen, and lesser ones join it when they are unpinned.
    fn victim(&mut self, scores: &Scores) -> Option<u32> {
        for fresh in [false, true] {
            if fresh {
                self.look(scores);
            }
            while let Some((score, index)) = self.victims.pop() {
                let slot = self.slots.get(index as usize);
                if slot.is_some_and(|slot| self.may_go(slot, index) && scores.score(slot.key) <= score) {
                    return Some(index);
                }
            }
        }
        None
    }

    fn look(&mut self, scores: &Scores) {
        let least = (self.slots.len() / 32).clamp(1, MAX_VICTIMS);
        let mut victims = std::mem::take(&mut self.victims);
        victims.clear();
        // The list is a sorted run of the least so far; most slots fail the first comparison.
        for (index, slot) in self.slots.iter().enumerate() {
            if !self.may_go(slot, index as u32) {
                continue;
            }
            let score = scores.score(slot.key);
            if victims.len() == least {
                if victims.first().is_some_and(|most| score >= most.0) {
                    continue;
                }
                victims.remove(0);
            }
            let at = victims.partition_point(|other| other.0 > score);
            victims.insert(at, (score, index as u32));
        }
        self.victims = victims;
    }

    /// Puts a slot on the list of victims if its score is less than that of the last to go.
    fn offer(&mut self, score: f32, index: u32) {
        if self.victims.first().is_some_and(|most| score < most.0) {
            if self.victims.len() == MAX_VICTIMS {
                self.victims.remove(0);
            }
            let at = self.victims.partition_point(|other| other.0 > score);
            self.victims.insert(at, (score, index));
        }
    }

    fn may_go(&self, slot: &Slot, index: u32) -> bool {
        let over = matches!(self.state(SlotId(index)), State::Ready | State::Failed | State::Damaged);
        over && slot.pins == 0 && slot.until <= self.passed
    }
}

/// Most victims found in one look at all slots.
const MAX_VICTIMS: usize = 64;

#[cfg(test)]
#[path = "slots_tests.rs"]
mod tests;
