//! Compares the slot table with a simple reference model.

use moestro_compute::{
    device::SyncPoint,
    experts::{
        ExpertChoice,
        eviction::{EvictionScores, ExpertKey},
        slot_table::{ReadReason, SlotId, SlotState, SlotTable},
    },
};
use proptest::prelude::*;
use std::collections::HashMap;

const KEYS: usize = 24;

fn select(scores: &mut EvictionScores, key: ExpertKey) {
    scores.update(0, ExpertChoice { ids: &[key], k: 1, logits: &[] });
}

#[derive(Debug, Clone)]
enum Step {
    Claim { key: ExpertKey, reason: ReadReason },
    Land(usize),
    Vacate(usize),
    Pin(usize),
    Unpin(usize, bool),
    Ask(usize),
    Upload(usize),
    LoseDevice,
    Pass,
    Select(u32),
    Shrink(usize),
    Grow(usize),
}

fn reason() -> impl Strategy<Value = ReadReason> {
    prop_oneof![Just(ReadReason::Demand), Just(ReadReason::Prefetch), Just(ReadReason::WarmStart)]
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (0..KEYS as ExpertKey, reason()).prop_map(|(key, reason)| Step::Claim { key, reason }),
        4 => (0..64usize).prop_map(Step::Land),
        1 => (0..64usize).prop_map(Step::Vacate),
        2 => (0..64usize).prop_map(Step::Pin),
        3 => (0..64usize, any::<bool>()).prop_map(|(n, late)| Step::Unpin(n, late)),
        1 => (0..64usize).prop_map(Step::Ask),
        3 => (0..64usize).prop_map(Step::Upload),
        1 => Just(Step::LoseDevice),
        1 => Just(Step::Pass),
        3 => (0..KEYS as u32).prop_map(Step::Select),
        1 => (0..10usize).prop_map(Step::Shrink),
        1 => (0..10usize).prop_map(Step::Grow),
    ]
}

#[derive(Debug, Clone, Copy)]
struct Held {
    slot: SlotId,
    state: SlotState,
    pins: u32,
    until: u64,
    is_prefetched: bool,
    is_on_device: bool,
}

impl Held {
    fn is_evictable(&self, passed: u64) -> bool {
        self.state == SlotState::Ready && self.pins == 0 && self.until <= passed
    }
}

fn pick(model: &mut HashMap<ExpertKey, Held>, n: usize) -> Option<&mut Held> {
    let mut held: Vec<_> = model.iter_mut().collect();
    held.sort_unstable_by_key(|(key, _)| **key);
    let at = n.checked_rem(held.len())?;
    Some(held.swap_remove(at).1)
}

/// Puts an expert into a slot that no request uses. Returns the evicted expert.
fn take(slots: &mut SlotTable, scores: &EvictionScores, key: ExpertKey) -> Option<ExpertKey> {
    let claim = slots.claim(key, ReadReason::Demand, scores).unwrap();
    slots.states().set(claim.slot, SlotState::Ready);
    slots.unpin(claim.slot, SyncPoint::START, scores);
    claim.evicted
}

proptest! {
    #[test]
    fn slot_table_matches_the_reference_model(size in 1usize..10, steps in proptest::collection::vec(step(), 1..200)) {
        let mut slots = SlotTable::new(size, KEYS);
        let mut scores = EvictionScores::new(1, KEYS);
        let mut model: HashMap<ExpertKey, Held> = HashMap::new();
        let (mut passed, mut present, mut table) = (0, size, Vec::new());
        for step in steps {
            match step {
                Step::Select(key) => select(&mut scores, key),
                Step::Pass => {
                    passed += 1;
                    slots.advance(SyncPoint(passed));
                }
                Step::Claim { key, reason } => {
                    let claim = slots.claim(key, reason, &scores);
                    let is_evictable = |h: &Held| h.is_evictable(passed);
                    let victims: Vec<ExpertKey> = model.iter().filter(|(_, h)| is_evictable(h)).map(|(k, _)| *k).collect();
                    if model.contains_key(&key) || (model.len() == present && victims.is_empty()) {
                        prop_assert_eq!(claim, None);
                        continue;
                    }
                    let claim = claim.expect("a slot is available");
                    prop_assert_eq!(claim.evicted.is_some(), model.len() == present);
                    if let Some(evicted) = claim.evicted {
                        prop_assert!(victims.contains(&evicted), "{evicted} was in use");
                        let old = model.remove(&evicted).expect("the model has it");
                        prop_assert_eq!(claim.was_wasted, old.is_prefetched);
                    }
                    prop_assert!(model.values().all(|h| h.slot != claim.slot), "one slot assigned twice");
                    let state = if reason == ReadReason::Demand { SlotState::Reading } else { SlotState::Queued };
                    let (pins, is_prefetched) = (u32::from(reason != ReadReason::WarmStart), reason == ReadReason::Prefetch);
                    model.insert(key, Held { slot: claim.slot, state, pins, until: 0, is_prefetched, is_on_device: false });
                }
                Step::Grow(to) => {
                    slots.grow(to);
                    present = to.clamp(present, size);
                }
                Step::Shrink(to) => {
                    let stay = model.values().filter(|h| !h.is_evictable(passed)).map(|h| h.slot.index() + 1).max();
                    let to = to.max(stay.unwrap_or(0)).min(present);
                    let (count, before) = (model.len(), slots.len());
                    let shrunk = slots.shrink(to, 1, &scores);
                    prop_assert_eq!(shrunk.evicted, if to < before { count.saturating_sub(to) } else { 0 });
                    for (key, held) in std::mem::take(&mut model) {
                        let moved = shrunk.moved.iter().find(|(from, _)| *from == held.slot);
                        match moved.map(|(_, into)| *into).or(slots.find(key)) {
                            Some(slot) => {
                                prop_assert!(slot.index() < to && (slot == held.slot) == moved.is_none());
                                model.insert(key, Held { slot, is_on_device: held.is_on_device && moved.is_none(), ..held });
                            }
                            None => prop_assert!(held.is_evictable(passed), "{key} was in use"),
                        }
                    }
                    prop_assert_eq!(model.len(), count - shrunk.evicted);
                    present = to;
                }
                Step::Land(n) => if let Some(held) = pick(&mut model, n) {
                    slots.states().set(held.slot, SlotState::Ready);
                    held.state = SlotState::Ready;
                },
                Step::Vacate(n) => if let Some(slot) = pick(&mut model, n).map(|held| held.slot) {
                    model.retain(|_, held| held.slot != slot);
                    slots.vacate(slot);
                    slots.vacate(slot);
                },
                Step::Pin(n) => if let Some(held) = pick(&mut model, n) {
                    slots.pin(held.slot);
                    held.pins += 1;
                },
                Step::Unpin(n, late) => if let Some(held) = pick(&mut model, n) {
                    let until = if late { passed + 1 } else { passed };
                    slots.unpin(held.slot, SyncPoint(until), &scores);
                    held.pins = held.pins.saturating_sub(1);
                    held.until = held.until.max(until);
                },
                Step::Upload(n) => if let Some(held) = pick(&mut model, n) {
                    slots.mark_on_device(held.slot);
                    held.is_on_device = true;
                },
                Step::LoseDevice => {
                    slots.clear_device();
                    model.values_mut().for_each(|held| held.is_on_device = false);
                }
                Step::Ask(n) => if let Some(held) = pick(&mut model, n) {
                    prop_assert_eq!(slots.take_prefetched(held.slot), held.is_prefetched);
                    held.is_prefetched = false;
                },
            }
            if let Some(changed) = slots.take_device_slots(0..KEYS) {
                prop_assert!(slots.take_device_slots(0..KEYS).is_none());
                table = changed;
            }
            for (key, slot) in table.iter().enumerate() {
                let held = model.get(&(key as ExpertKey)).filter(|held| held.is_on_device);
                prop_assert_eq!(*slot, held.map_or(u32::MAX, |held| held.slot.0));
            }
            prop_assert_eq!((slots.used(), slots.len()), (model.len(), present));
            let waiting = model.values().filter(|h| h.pins == 0 && h.until > passed).map(|h| SyncPoint(h.until)).min();
            prop_assert_eq!(slots.next_sync_point(), waiting);
            for key in 0..KEYS as ExpertKey {
                prop_assert_eq!(slots.find(key), model.get(&key).map(|h| h.slot));
            }
            for (key, held) in &model {
                prop_assert_eq!(slots.state(held.slot), held.state);
                prop_assert_eq!(slots.pins(held.slot), held.pins);
                prop_assert_eq!(slots.key(held.slot), Some(*key));
            }
        }
    }
}

#[test]
fn lowest_score_is_evicted_first() {
    let mut slots = SlotTable::new(3, 8);
    assert!(!slots.is_empty() && SlotTable::new(0, 8).is_empty());
    let mut scores = EvictionScores::new(1, 8);
    for key in 0..3u32 {
        (0..=key).for_each(|_| select(&mut scores, key));
        take(&mut slots, &scores, key);
    }
    let lowest = (0..3).min_by(|a, b| scores.score(*a).total_cmp(&scores.score(*b))).unwrap();
    assert_eq!(slots.claim(7, ReadReason::Demand, &scores).unwrap().evicted, Some(lowest));
}

#[test]
fn newly_unpinned_lower_score_is_evicted_first() {
    let mut slots = SlotTable::new(96, 128);
    let mut scores = EvictionScores::new(1, 128);
    for key in 0..96 {
        (0..2).for_each(|_| select(&mut scores, key));
        take(&mut slots, &scores, key);
    }
    assert!(take(&mut slots, &scores, 100).is_some_and(|key| key < 96));
    assert_eq!(take(&mut slots, &scores, 101), Some(100), "no token selected it");
}

#[test]
fn unusable_expert_is_freed_at_last_unpin() {
    for state in [SlotState::Failed, SlotState::Damaged] {
        let (mut slots, scores) = (SlotTable::new(1, 8), EvictionScores::new(1, 8));
        let claim = slots.claim(3, ReadReason::Demand, &scores).unwrap();
        slots.pin(claim.slot);
        slots.states().set(claim.slot, state);
        slots.unpin(claim.slot, SyncPoint::START, &scores);
        assert_eq!((slots.find(3), slots.state(claim.slot)), (Some(claim.slot), state), "it is still pinned");
        slots.unpin(claim.slot, SyncPoint::START, &scores);
        assert_eq!((slots.find(3), slots.used(), slots.state(claim.slot)), (None, 0, SlotState::Free));
    }
    // An unpinned expert can be evicted in state Damaged but not in state Checking.
    for (state, is_evicted) in [
        (SlotState::Damaged, true),
        (SlotState::Checking, false),
        (SlotState::Ready, true),
        (SlotState::Reading, false),
    ] {
        let (mut slots, scores) = (SlotTable::new(1, 8), EvictionScores::new(1, 8));
        let claim = slots.claim(3, ReadReason::WarmStart, &scores).unwrap();
        slots.states().set(claim.slot, state);
        assert_eq!(slots.claim(4, ReadReason::Demand, &scores).is_some(), is_evicted, "{state:?}");
        assert_eq!(state.is_readable(), matches!(state, SlotState::Ready | SlotState::Checking));
    }
}
