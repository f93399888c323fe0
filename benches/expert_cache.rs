//! Hit rates of eviction policies on recorded traces: LRU, the store's own policy, and two that know the future.
//!
//! ```text
//! cargo bench --bench expert_cache -- TRACE.. > benches/results/expert_cache.csv
//! ```
//! `--bench stream -- .. --trace FILE` writes traces. All policies start empty and must load every requested expert.
//!
//! * `ours` uses the store's slot table and scores ([`SlotTable`], [`EvictionScores`]).
//! * `counts` is `ours` without the router's margins.
//! * `belady` evicts the expert whose next use is last (Belady 1966). No policy that must load every expert does
//!   better.
//! * `belady_bypass` may read an expert without keeping it. No cache has fewer misses.
//! * `fixed` keeps the experts that are the most frequent ones in the whole trace and replaces only the others.
//!   If tokens are independent, for example random, no policy without knowledge of the future is better.

use moestro_compute::{
    device::SyncPoint,
    experts::{
        ExpertChoice,
        eviction::{EvictionScores, ExpertKey},
        slot_table::{ReadReason, SlotState, SlotTable},
    },
};
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// One layer's experts for one token or chunk, and the router's logits per token, if recorded.
struct Route {
    layer: usize,
    keys: Vec<ExpertKey>,
    ids: Vec<u32>,
    k: usize,
    logits: Vec<f32>,
}

struct Trace {
    routes: Vec<Route>,
    layers: usize,
    experts: usize,
}

fn read(path: &str) -> Trace {
    let text = std::fs::read_to_string(path).expect("the trace");
    let mut routes: Vec<Route> = Vec::new();
    let (mut logits, mut k) = (Vec::new(), 0);
    let (mut layers, mut experts) = (0, 0);
    for line in text.lines() {
        let mut words = line.split(' ');
        let kind = words.next().expect("a kind");
        let layer: usize = words.next().expect("a layer").parse().expect("a layer");
        if kind == "n" {
            k = words.next().expect("k").parse().expect("k");
            logits.extend(words.map(|word| word.parse::<f32>().expect("a logit")));
            continue;
        }
        let ids: Vec<u32> = words.map(|word| word.parse().expect("an expert")).collect();
        layers = layers.max(layer + 1);
        experts = experts.max(ids.iter().max().map_or(0, |&id| id as usize + 1));
        let k = if k == 0 { ids.len() } else { k };
        routes.push(Route { layer, keys: Vec::new(), ids, k, logits: std::mem::take(&mut logits) });
    }
    if let Some(first) = routes.iter().find(|route| !route.logits.is_empty() && route.ids.len() == route.k) {
        experts = first.logits.len();
    }
    for route in &mut routes {
        route.keys = route.ids.iter().map(|&id| (route.layer * experts) as ExpertKey + id).collect();
    }
    Trace { routes, layers, experts }
}

/// Lookups and hits in the first and second half of a trace.
#[derive(Default)]
struct Score {
    lookups: [u64; 2],
    hits: [u64; 2],
}

impl Score {
    fn add(&mut self, half: usize, hit: bool) {
        self.lookups[half] += 1;
        self.hits[half] += u64::from(hit);
    }

    fn rates(&self) -> [f64; 3] {
        let rate = |hits: u64, lookups: u64| 100.0 * hits as f64 / lookups.max(1) as f64;
        let [(a, b), (c, d)] = [0, 1].map(|half| (self.hits[half], self.lookups[half]));
        [rate(a + c, b + d), rate(a, b), rate(c, d)]
    }
}

fn halves(trace: &Trace) -> impl Iterator<Item = (usize, &Route)> {
    let middle = trace.routes.len() / 2;
    trace.routes.iter().enumerate().map(move |(at, route)| (usize::from(at >= middle), route))
}

fn lru(trace: &Trace, slots: usize) -> Score {
    let (mut score, mut clock) = (Score::default(), 0u64);
    let (mut used, mut order) = (HashMap::new(), BTreeMap::new());
    for (half, route) in halves(trace) {
        for &key in &route.keys {
            clock += 1;
            let before = used.insert(key, clock);
            score.add(half, before.is_some());
            if let Some(before) = before {
                order.remove(&before);
            } else if order.len() == slots {
                let (_, oldest) = order.pop_first().expect("a full cache");
                used.remove(&oldest);
            }
            order.insert(clock, key);
        }
    }
    score
}

/// A policy that knows the future: evicts the expert with the highest `rank(key, next use)`.
fn offline(trace: &Trace, slots: usize, rank: impl Fn(ExpertKey, u64) -> u64) -> Score {
    let keys: Vec<ExpertKey> = trace.routes.iter().flat_map(|route| route.keys.iter().copied()).collect();
    let (mut next, mut seen) = (vec![u64::MAX; keys.len()], HashMap::new());
    for (at, key) in keys.iter().enumerate().rev() {
        next[at] = seen.insert(*key, at as u64).unwrap_or(u64::MAX);
    }
    let (mut score, mut at) = (Score::default(), 0);
    let (mut held, mut order) = (HashMap::new(), BTreeSet::new());
    for (half, route) in halves(trace) {
        for &key in &route.keys {
            let rank = rank(key, next[at]);
            at += 1;
            let before = held.get(&key).copied();
            score.add(half, before.is_some());
            if let Some(before) = before {
                order.remove(&(before, key));
            } else if held.len() == slots {
                let (_, last) = order.pop_last().expect("a full cache");
                held.remove(&last);
            }
            held.insert(key, rank);
            order.insert((rank, key));
        }
    }
    score
}

/// Belady's algorithm with bypass: if no cached expert has a later next use than the requested one, the requested one
/// is read but not cached.
fn belady_bypass(trace: &Trace, slots: usize) -> Score {
    let keys: Vec<ExpertKey> = trace.routes.iter().flat_map(|route| route.keys.iter().copied()).collect();
    let mut misses = test_support::belady::misses(&keys, slots).into_iter();
    let mut score = Score::default();
    for (half, route) in halves(trace) {
        misses.by_ref().take(route.keys.len()).for_each(|miss| score.add(half, !miss));
    }
    score
}

/// The store's policy. Hits of a route are pinned before experts are evicted for its misses.
fn ours(trace: &Trace, size: usize, margins: bool) -> Score {
    let mut slots = SlotTable::new(size, trace.layers * trace.experts);
    let mut scores = EvictionScores::new(trace.layers, trace.experts);
    let mut score = Score::default();
    for (half, route) in halves(trace) {
        let logits = if margins { route.logits.as_slice() } else { &[] };
        if route.ids.len() == route.k || !logits.is_empty() {
            scores.update(route.layer, ExpertChoice { ids: &route.ids, k: route.k, logits });
        }
        let mut taken = Vec::new();
        for &key in &route.keys {
            let slot = slots.find(key);
            score.add(half, slot.is_some());
            if let Some(slot) = slot {
                slots.pin(slot);
                taken.push(slot);
            }
        }
        for &key in &route.keys {
            if slots.find(key).is_some() {
                continue;
            }
            let claim = slots.claim(key, ReadReason::Demand, &scores).expect("more slots than a route has experts");
            slots.states().set(claim.slot, SlotState::Ready);
            taken.push(claim.slot);
        }
        for slot in taken {
            slots.unpin(slot, SyncPoint::START, &scores);
        }
    }
    score
}

fn main() {
    let traces: Vec<String> = std::env::args().skip(1).filter(|arg| arg != "--bench").collect();
    if traces.is_empty() {
        println!("expert_cache: no trace given, nothing simulated");
        return;
    }
    println!("trace,residency,policy,hit_percent,first_half,second_half");
    for path in traces {
        let trace = read(&path);
        let name = path.rsplit('/').next().unwrap_or(&path);
        let mut counts = HashMap::new();
        for key in trace.routes.iter().flat_map(|route| &route.keys) {
            *counts.entry(*key).or_insert(0u64) += 1;
        }
        for residency in [25, 50] {
            let slots = trace.layers * trace.experts * residency / 100;
            let rows = [
                ("lru", lru(&trace, slots)),
                ("counts", ours(&trace, slots, false)),
                ("ours", ours(&trace, slots, true)),
                ("fixed", offline(&trace, slots, |key, _| u64::MAX - counts[&key])),
                ("belady_bypass", belady_bypass(&trace, slots)),
                ("belady", offline(&trace, slots, |_, next| next)),
            ];
            for (policy, score) in rows {
                let [all, first, second] = score.rates();
                println!("{name},{residency},{policy},{all:.1},{first:.1},{second:.1}");
            }
        }
    }
}
