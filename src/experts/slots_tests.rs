//! The slot table against a model that does the obvious thing.

use super::*;
use proptest::prelude::*;
use std::collections::HashMap;

const KEYS: usize = 24;

fn want(scores: &mut Scores, key: Key) {
    scores.visit(0, crate::experts::Choice { ids: &[key], k: 1, logits: &[] });
}

#[derive(Debug, Clone)]
enum Step {
    Claim { key: Key, purpose: Purpose },
    Land(usize),
    Vacate(usize),
    Pin(usize),
    Unpin(usize, bool),
    Ask(usize),
    Pass,
    Want(u32),
    Shrink(usize),
    Grow(usize),
}

fn purpose() -> impl Strategy<Value = Purpose> {
    prop_oneof![Just(Purpose::Demand), Just(Purpose::Prediction), Just(Purpose::WarmStart)]
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (0..KEYS as Key, purpose()).prop_map(|(key, purpose)| Step::Claim { key, purpose }),
        4 => (0..64usize).prop_map(Step::Land),
        1 => (0..64usize).prop_map(Step::Vacate),
        2 => (0..64usize).prop_map(Step::Pin),
        3 => (0..64usize, any::<bool>()).prop_map(|(n, late)| Step::Unpin(n, late)),
        1 => (0..64usize).prop_map(Step::Ask),
        1 => Just(Step::Pass),
        3 => (0..KEYS as u32).prop_map(Step::Want),
        1 => (0..10usize).prop_map(Step::Shrink),
        1 => (0..10usize).prop_map(Step::Grow),
    ]
}

#[derive(Debug, Clone, Copy)]
struct Held {
    slot: SlotId,
    state: State,
    pins: u32,
    until: u64,
    predicted: bool,
}

impl Held {
    fn may_go(&self, passed: u64) -> bool {
        self.state == State::Ready && self.pins == 0 && self.until <= passed
    }
}

proptest! {
    #[test]
    fn the_table_does_the_obvious_thing(size in 1usize..10, steps in proptest::collection::vec(step(), 1..200)) {
        let mut slots = Slots::new(size, KEYS);
        let mut scores = Scores::new(1, KEYS);
        let mut model: HashMap<Key, Held> = HashMap::new();
        let (mut passed, mut present) = (0, size);
        let pick = |model: &HashMap<Key, Held>, n: usize| {
            let mut keys: Vec<_> = model.keys().copied().collect();
            keys.sort_unstable();
            (!keys.is_empty()).then(|| keys[n % keys.len()])
        };
        for step in steps {
            match step {
                Step::Want(key) => want(&mut scores, key),
                Step::Pass => {
                    passed += 1;
                    slots.advance(SyncPoint(passed));
                }
                Step::Claim { key, purpose } => {
                    let claim = slots.claim(key, purpose, &scores);
                    let may_go = |h: &Held| h.may_go(passed);
                    let victims: Vec<Key> = model.iter().filter(|(_, h)| may_go(h)).map(|(k, _)| *k).collect();
                    if model.contains_key(&key) || (model.len() == present && victims.is_empty()) {
                        prop_assert_eq!(claim, None);
                        continue;
                    }
                    let claim = claim.expect("there is a slot");
                    prop_assert_eq!(claim.evicted.is_some(), model.len() == present);
                    if let Some(evicted) = claim.evicted {
                        prop_assert!(victims.contains(&evicted), "{evicted} was in use");
                        let old = model.remove(&evicted).expect("was there");
                        prop_assert_eq!(claim.wasted, old.predicted);
                    }
                    prop_assert!(model.values().all(|h| h.slot != claim.slot), "one slot given twice");
                    let state = if purpose == Purpose::Demand { State::Reading } else { State::Queued };
                    let (pins, predicted) = (u32::from(purpose != Purpose::WarmStart), purpose == Purpose::Prediction);
                    model.insert(key, Held { slot: claim.slot, state, pins, until: 0, predicted });
                }
                Step::Grow(to) => {
                    slots.grow(to);
                    present = to.clamp(present, size);
                }
                Step::Shrink(to) => {
                    let stay = model.values().filter(|h| !h.may_go(passed)).map(|h| h.slot.index() + 1).max();
                    let to = to.max(stay.unwrap_or(0)).min(present);
                    let (many, most) = (model.len(), slots.len());
                    let shrunk = slots.shrink(to, &scores);
                    prop_assert_eq!(shrunk.evicted, if to < most { many.saturating_sub(to) } else { 0 });
                    for (key, held) in std::mem::take(&mut model) {
                        let moved = shrunk.moved.iter().find(|(from, _)| *from == held.slot);
                        match moved.map(|(_, into)| *into).or(slots.find(key)) {
                            Some(slot) => {
                                prop_assert!(slot.index() < to && (slot == held.slot) == moved.is_none());
                                model.insert(key, Held { slot, ..held });
                            }
                            None => prop_assert!(held.may_go(passed), "{key} was in use"),
                        }
                    }
                    prop_assert_eq!(model.len(), many - shrunk.evicted);
                    present = to;
                }
                Step::Land(n) => if let Some(key) = pick(&model, n) {
                    let held = model.get_mut(&key).expect("picked");
                    slots.states().set(held.slot, State::Ready);
                    held.state = State::Ready;
                },
                Step::Vacate(n) => if let Some(key) = pick(&model, n) {
                    let held = model.remove(&key).expect("picked");
                    slots.vacate(held.slot);
                    slots.vacate(held.slot);
                },
                Step::Pin(n) => if let Some(key) = pick(&model, n) {
                    let held = model.get_mut(&key).expect("picked");
                    slots.pin(held.slot);
                    held.pins += 1;
                },
                Step::Unpin(n, late) => if let Some(key) = pick(&model, n) {
                    let held = model.get_mut(&key).expect("picked");
                    let until = if late { passed + 1 } else { passed };
                    slots.unpin(held.slot, SyncPoint(until), &scores);
                    held.pins = held.pins.saturating_sub(1);
                    held.until = held.until.max(until);
                },
                Step::Ask(n) => if let Some(key) = pick(&model, n) {
                    let held = model.get_mut(&key).expect("picked");
                    prop_assert_eq!(slots.asked(held.slot), held.predicted);
                    held.predicted = false;
                },
            }
            prop_assert_eq!((slots.used(), slots.len()), (model.len(), present));
            let waiting = model.values().filter(|h| h.pins == 0 && h.until > passed).map(|h| SyncPoint(h.until)).min();
            prop_assert_eq!(slots.next_mark(), waiting);
            for key in 0..KEYS as Key {
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
fn the_least_score_goes_first() {
    let mut slots = Slots::new(3, 8);
    assert!(!slots.is_empty() && Slots::new(0, 8).is_empty());
    let mut scores = Scores::new(1, 8);
    for key in 0..3u32 {
        for _ in 0..=key {
            want(&mut scores, key);
        }
        let claim = slots.claim(key, Purpose::Demand, &scores).unwrap();
        slots.states().set(claim.slot, State::Ready);
        slots.unpin(claim.slot, SyncPoint::START, &scores);
    }
    let least = (0..3).min_by(|a, b| scores.score(*a).total_cmp(&scores.score(*b))).unwrap();
    assert_eq!(slots.claim(7, Purpose::Demand, &scores).unwrap().evicted, Some(least));
}

#[test]
fn who_was_never_wanted_again_goes_before_older_victims() {
    let mut slots = Slots::new(96, 128);
    let mut scores = Scores::new(1, 128);
    let take = |slots: &mut Slots, scores: &Scores, key| {
        let claim = slots.claim(key, Purpose::Demand, scores).unwrap();
        slots.states().set(claim.slot, State::Ready);
        slots.unpin(claim.slot, SyncPoint::START, scores);
        claim.evicted
    };
    for key in 0..96 {
        (0..2).for_each(|_| want(&mut scores, key));
        take(&mut slots, &scores, key);
    }
    assert!(take(&mut slots, &scores, 100).is_some_and(|key| key < 96));
    assert_eq!(take(&mut slots, &scores, 101), Some(100), "nobody asked for it even once");
}

#[test]
fn what_cannot_be_used_goes_with_its_last_pin() {
    for state in [State::Failed, State::Damaged] {
        let (mut slots, scores) = (Slots::new(1, 8), Scores::new(1, 8));
        let claim = slots.claim(3, Purpose::Demand, &scores).unwrap();
        slots.pin(claim.slot);
        slots.states().set(claim.slot, state);
        slots.unpin(claim.slot, SyncPoint::START, &scores);
        assert_eq!((slots.find(3), slots.state(claim.slot)), (Some(claim.slot), state), "somebody holds it");
        slots.unpin(claim.slot, SyncPoint::START, &scores);
        assert_eq!((slots.find(3), slots.used(), slots.state(claim.slot)), (None, 0, State::Free));
    }
    // One that nobody ever asked for makes room; one that is being checked does not.
    for (state, goes) in
        [(State::Damaged, true), (State::Checking, false), (State::Ready, true), (State::Reading, false)]
    {
        let (mut slots, scores) = (Slots::new(1, 8), Scores::new(1, 8));
        let claim = slots.claim(3, Purpose::WarmStart, &scores).unwrap();
        slots.states().set(claim.slot, state);
        assert_eq!(slots.claim(4, Purpose::Demand, &scores).is_some(), goes, "{state:?}");
        assert_eq!(state.is_readable(), matches!(state, State::Ready | State::Checking));
    }
}
