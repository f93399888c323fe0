//! The slot table against a model that does the obvious thing.

use super::*;
use proptest::prelude::*;
use std::collections::HashMap;

const KEYS: usize = 24;

fn want(heat: &mut Heat, key: Key) {
    heat.visit(0, crate::experts::Choice { ids: &[key], k: 1, logits: &[] });
}

#[derive(Debug, Clone)]
enum Step {
    Claim { key: Key, ahead: bool },
    Land(usize),
    Vacate(usize),
    Pin(usize),
    Unpin(usize),
    Calm(usize),
    Want(u32),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (0..KEYS as Key, any::<bool>()).prop_map(|(key, ahead)| Step::Claim { key, ahead }),
        4 => (0..64usize).prop_map(Step::Land),
        1 => (0..64usize).prop_map(Step::Vacate),
        2 => (0..64usize).prop_map(Step::Pin),
        3 => (0..64usize).prop_map(Step::Unpin),
        1 => (0..64usize).prop_map(Step::Calm),
        3 => (0..KEYS as u32).prop_map(Step::Want),
    ]
}

#[derive(Debug, Clone, Copy)]
struct Held {
    place: Place,
    ready: bool,
    pins: u32,
    ahead: bool,
}

proptest! {
    #[test]
    fn the_table_does_the_obvious_thing(size in 1usize..10, steps in proptest::collection::vec(step(), 1..200)) {
        let mut slots = Slots::new(size, KEYS);
        let mut heat = Heat::new(1, KEYS);
        let mut model: HashMap<Key, Held> = HashMap::new();
        let pick = |model: &HashMap<Key, Held>, n: usize| {
            let mut keys: Vec<_> = model.keys().copied().collect();
            keys.sort_unstable();
            (!keys.is_empty()).then(|| keys[n % keys.len()])
        };
        for step in steps {
            match step {
                Step::Want(key) => want(&mut heat, key),
                Step::Claim { key, ahead } => {
                    let reason = if ahead { Reason::Ahead } else { Reason::Demand };
                    let claim = slots.claim(key, reason, &heat);
                    let victims: Vec<Key> =
                        model.iter().filter(|(_, h)| h.ready && h.pins == 0 && !h.ahead).map(|(k, _)| *k).collect();
                    if model.contains_key(&key) || (model.len() == size && victims.is_empty()) {
                        prop_assert_eq!(claim, None);
                        continue;
                    }
                    let claim = claim.expect("there is a slot");
                    prop_assert_eq!(claim.evicted.is_some(), model.len() == size);
                    if let Some(evicted) = claim.evicted {
                        prop_assert!(victims.contains(&evicted), "{evicted} was in use");
                        let old = model.remove(&evicted).expect("was there");
                        prop_assert_eq!(slots.state(old.place), None, "the old occupation is over");
                    }
                    prop_assert!(model.values().all(|h| h.place.slot != claim.place.slot), "one slot given twice");
                    model.insert(key, Held { place: claim.place, ready: false, pins: 0, ahead });
                }
                Step::Land(n) => if let Some(key) = pick(&model, n) {
                    let held = model.get_mut(&key).expect("picked");
                    slots.landed(held.place);
                    held.ready = true;
                },
                Step::Vacate(n) => if let Some(key) = pick(&model, n) {
                    let held = model.remove(&key).expect("picked");
                    slots.vacate(held.place);
                    slots.vacate(held.place);
                },
                Step::Pin(n) => if let Some(key) = pick(&model, n) {
                    let held = model.get_mut(&key).expect("picked");
                    prop_assert!(slots.pin(held.place));
                    held.pins += 1;
                },
                Step::Unpin(n) => if let Some(key) = pick(&model, n) {
                    let held = model.get_mut(&key).expect("picked");
                    slots.unpin(held.place, &heat);
                    held.pins = held.pins.saturating_sub(1);
                },
                Step::Calm(n) => if let Some(key) = pick(&model, n) {
                    let held = model.get_mut(&key).expect("picked");
                    slots.set_reason(held.place, Reason::Demand);
                    held.ahead = false;
                },
            }
            prop_assert_eq!(slots.used(), model.len());
            prop_assert_eq!(slots.loading(), model.values().filter(|h| !h.ready).count());
            for key in 0..KEYS as Key {
                prop_assert_eq!(slots.find(key), model.get(&key).map(|h| h.place));
            }
            for held in model.values() {
                let state = if held.ready { State::Ready } else { State::Loading };
                prop_assert_eq!(slots.state(held.place), Some(state));
                prop_assert_eq!(slots.pins(held.place), held.pins);
            }
        }
    }
}

#[test]
fn the_coldest_goes_first() {
    let mut slots = Slots::new(3, 8);
    let mut heat = Heat::new(1, 8);
    for key in 0..3u32 {
        for _ in 0..=key {
            want(&mut heat, key);
        }
        let claim = slots.claim(key, Reason::Demand, &heat).unwrap();
        slots.landed(claim.place);
    }
    let coldest = (0..3).min_by(|a, b| heat.score(*a).total_cmp(&heat.score(*b))).unwrap();
    assert_eq!(slots.claim(7, Reason::Demand, &heat).unwrap().evicted, Some(coldest));
}

#[test]
fn who_was_never_wanted_again_goes_before_older_victims() {
    let mut slots = Slots::new(96, 128);
    let mut heat = Heat::new(1, 128);
    let take = |slots: &mut Slots, heat: &Heat, key| {
        let claim = slots.claim(key, Reason::Demand, heat).unwrap();
        slots.pin(claim.place);
        slots.landed(claim.place);
        slots.unpin(claim.place, heat);
        claim.evicted
    };
    for key in 0..96 {
        (0..2).for_each(|_| want(&mut heat, key));
        take(&mut slots, &heat, key);
    }
    assert!(take(&mut slots, &heat, 100).is_some_and(|key| key < 96));
    assert_eq!(take(&mut slots, &heat, 101), Some(100), "nobody asked for it even once");
}
