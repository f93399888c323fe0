//! Which expert is in which slot: a pure table, without input or output.
//!
//! A slot is free, loading or ready. Whoever is going to read an expert's bytes pins its slot; a pinned slot is never
//! given to another expert. The victim for a new expert is the coldest ([`Heat`]) of all unpinned ready slots of all
//! layers.

use super::heat::{Heat, Key};

/// A place in the slab.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SlotId(pub u32);

impl SlotId {
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// One occupation of one slot: a slot that was given away since has another number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    pub slot: SlotId,
    pub turn: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    Free,
    Loading,
    Ready,
}

/// Why an expert was given a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reason {
    /// A route wants it now.
    Demand,
    /// A prediction; kept until its layer has been routed, whatever its heat.
    Ahead,
    /// A prediction that its layer did not ask for.
    Passed,
    /// It was hot when the server last stopped.
    Warm,
}

#[derive(Debug, Clone, Copy)]
struct Slot {
    key: Key,
    state: State,
    pins: u32,
    turn: u32,
    reason: Reason,
}

/// What became of a claim.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Claim {
    pub place: Place,
    /// Who had to go.
    pub evicted: Option<Key>,
    /// It had been read ahead and nobody ever asked for it.
    pub unused: bool,
}

const NOWHERE: u32 = u32::MAX;

pub struct Slots {
    slots: Vec<Slot>,
    /// Slot by key.
    places: Vec<u32>,
    free: Vec<u32>,
    /// The coldest slots at the last look, coldest last, with the score they had.
    victims: Vec<(f32, u32)>,
    loading: usize,
}

impl Slots {
    /// `keys`: layers times experts a layer.
    pub fn new(slots: usize, keys: usize) -> Self {
        let empty = Slot { key: 0, state: State::Free, pins: 0, turn: 0, reason: Reason::Demand };
        Self {
            slots: vec![empty; slots],
            places: vec![NOWHERE; keys],
            free: (0..slots as u32).rev().collect(),
            victims: Vec::with_capacity(MAX_VICTIMS),
            loading: 0,
        }
    }

    pub fn len(&self) -> usize {
        self.slots.len()
    }

    pub fn is_empty(&self) -> bool {
        self.slots.is_empty()
    }

    /// Slots that hold or are being filled with an expert.
    pub fn used(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Slots being filled.
    pub fn loading(&self) -> usize {
        self.loading
    }

    /// Where `key` is or will be.
    pub fn find(&self, key: Key) -> Option<Place> {
        let slot = *self.places.get(key as usize)?;
        let turn = self.slots.get(slot as usize)?.turn;
        Some(Place { slot: SlotId(slot), turn })
    }

    /// The state of an occupation; `None` if it is over.
    pub fn state(&self, place: Place) -> Option<State> {
        self.get(place).map(|slot| slot.state)
    }

    pub fn reason(&self, place: Place) -> Option<Reason> {
        self.get(place).map(|slot| slot.reason)
    }

    pub fn pins(&self, place: Place) -> u32 {
        self.get(place).map_or(0, |slot| slot.pins)
    }

    pub fn key(&self, place: Place) -> Option<Key> {
        self.get(place).map(|slot| slot.key)
    }

    /// Every expert that is ready, with its place.
    pub fn ready(&self) -> impl Iterator<Item = (Key, Place)> {
        let ready = self.slots.iter().enumerate().filter(|(_, slot)| slot.state == State::Ready);
        ready.map(|(index, slot)| (slot.key, Place { slot: SlotId(index as u32), turn: slot.turn }))
    }

    /// The occupations that are loading for `reason` and that nobody has pinned.
    pub fn unwanted(&self, reason: Reason) -> impl Iterator<Item = Place> {
        let waiting = move |slot: &Slot| slot.state == State::Loading && slot.reason == reason && slot.pins == 0;
        let found = self.slots.iter().enumerate().filter(move |(_, slot)| waiting(slot));
        found.map(|(index, slot)| Place { slot: SlotId(index as u32), turn: slot.turn })
    }

    /// Keeps the occupation until it is unpinned as often. False if it is over already.
    pub fn pin(&mut self, place: Place) -> bool {
        let Some(slot) = self.get_mut(place) else { return false };
        slot.pins += 1;
        true
    }

    /// Undoes one [`Slots::pin`].
    pub fn unpin(&mut self, place: Place, heat: &Heat) {
        let Some(slot) = self.get_mut(place) else { return };
        slot.pins = slot.pins.saturating_sub(1);
        if evictable(slot) {
            let score = heat.score(slot.key);
            self.offer(score, place.slot.0);
        }
    }

    /// Changes why an expert has its slot; what was ahead or warm becomes ordinary when it is asked for or passed over.
    pub fn set_reason(&mut self, place: Place, reason: Reason) {
        if let Some(slot) = self.get_mut(place) {
            slot.reason = reason;
        }
    }

    /// Gives `key`, which must have no slot, a free slot or that of the coldest victim; it is then loading and not yet
    /// pinned. `None` if no slot can be had.
    pub fn claim(&mut self, key: Key, reason: Reason, heat: &Heat) -> Option<Claim> {
        if self.find(key).is_some() || key as usize >= self.places.len() {
            return None;
        }
        let (index, evicted, unused) = match self.free.pop() {
            Some(index) => (index, None, false),
            None => {
                let index = self.victim(heat)?;
                let old = *self.slots.get(index as usize)?;
                if let Some(place) = self.places.get_mut(old.key as usize) {
                    *place = NOWHERE;
                }
                (index, Some(old.key), old.reason == Reason::Passed)
            }
        };
        let slot = self.slots.get_mut(index as usize)?;
        *slot = Slot { key, state: State::Loading, pins: 0, turn: slot.turn.wrapping_add(1), reason };
        let turn = slot.turn;
        *self.places.get_mut(key as usize)? = index;
        self.loading += 1;
        Some(Claim { place: Place { slot: SlotId(index), turn }, evicted, unused })
    }

    /// The expert's bytes have arrived.
    pub fn landed(&mut self, place: Place) {
        if let Some(slot) = self.get_mut(place)
            && slot.state == State::Loading
        {
            slot.state = State::Ready;
            self.loading -= 1;
        }
    }

    /// Ends the occupation, pinned or not: its bytes will never arrive.
    pub fn vacate(&mut self, place: Place) {
        let Some(slot) = self.get_mut(place) else { return };
        let (key, state) = (slot.key, slot.state);
        if state == State::Free {
            return;
        }
        *slot = Slot { state: State::Free, pins: 0, turn: slot.turn.wrapping_add(1), ..*slot };
        if state == State::Loading {
            self.loading -= 1;
        }
        if let Some(at) = self.places.get_mut(key as usize) {
            *at = NOWHERE;
        }
        self.free.push(place.slot.0);
    }

    /// The coldest slot that may be given away. One look at all slots serves several victims: the list is good as long
    /// as a slot on it is still evictable and no warmer than it was, and colder ones join it when they are unpinned.
    fn victim(&mut self, heat: &Heat) -> Option<u32> {
        for fresh in [false, true] {
            if fresh {
                self.look(heat);
            }
            while let Some(&(score, index)) = self.victims.last() {
                let good = self.slots.get(index as usize).is_some_and(|s| evictable(s) && heat.score(s.key) <= score);
                self.victims.pop();
                if good {
                    return Some(index);
                }
            }
        }
        None
    }

    fn look(&mut self, heat: &Heat) {
        let coldest = (self.slots.len() / 32).clamp(1, MAX_VICTIMS);
        self.victims.clear();
        // The list is a sorted run of the coldest so far; most slots fail the first comparison.
        for (index, slot) in self.slots.iter().enumerate() {
            if !evictable(slot) {
                continue;
            }
            let score = heat.score(slot.key);
            if self.victims.len() == coldest {
                if self.victims.first().is_some_and(|warmest| score >= warmest.0) {
                    continue;
                }
                self.victims.remove(0);
            }
            let at = self.victims.partition_point(|other| other.0 > score);
            self.victims.insert(at, (score, index as u32));
        }
    }

    /// Puts a slot on the list of victims if it is colder than the warmest of them.
    fn offer(&mut self, score: f32, index: u32) {
        if self.victims.first().is_some_and(|warmest| score < warmest.0) {
            if self.victims.len() == MAX_VICTIMS {
                self.victims.remove(0);
            }
            let at = self.victims.partition_point(|other| other.0 > score);
            self.victims.insert(at, (score, index));
        }
    }

    fn get(&self, place: Place) -> Option<&Slot> {
        self.slots.get(place.slot.index()).filter(|slot| slot.turn == place.turn)
    }

    fn get_mut(&mut self, place: Place) -> Option<&mut Slot> {
        self.slots.get_mut(place.slot.index()).filter(|slot| slot.turn == place.turn)
    }
}

/// Most victims found in one look at all slots.
const MAX_VICTIMS: usize = 64;

fn evictable(slot: &Slot) -> bool {
    slot.state == State::Ready && slot.pins == 0 && slot.reason != Reason::Ahead
}

#[cfg(test)]
#[path = "slots_tests.rs"]
mod tests;
