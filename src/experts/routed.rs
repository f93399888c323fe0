//! One layer's experts on their way: what a route hands out as it becomes readable.

use super::{
    Choice, Phase, Store,
    heat::Key,
    layout::PIECES,
    slots::{Place, Reason, SlotId, State as SlotState},
};
use crate::error::StoreError;
use std::time::Instant;

/// Experts of a prefill that may be on their way at a time: enough for any disk, few enough to spare the pool.
const WINDOW: usize = 16;

/// Where one wanted expert stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// No slot yet.
    Asked,
    /// In a slot, which is pinned; ready or being read.
    Held(Place),
    /// Handed out; still pinned.
    Given(Place),
    /// Handed out and released.
    Over,
}

/// Lists that are used again by the next route, so that none allocates.
#[derive(Default)]
pub(super) struct Scratch {
    wanted: Vec<(Key, Stage)>,
    batch: Vec<usize>,
}

/// The experts a layer asked for. While it lives, the slots it handed out keep their bytes (in [`Phase::Prefill`]: those
/// of the last batch).
pub struct Routed<'s> {
    store: &'s Store,
    layer: usize,
    phase: Phase,
    scratch: Scratch,
}

/// Experts that can be read now.
pub struct Batch<'r> {
    routed: &'r Routed<'r>,
}

/// One expert that can be read.
pub struct Landed<'r> {
    /// Which of the routed experts, counted as they were given to [`Store::route`].
    pub index: usize,
    pub slot: SlotId,
    /// Codes, scales, biases of gate, up, down; empty where the encoding has none.
    pub pieces: [&'r [u8]; PIECES],
}

impl Store {
    /// Asks for distinct `experts` of `layer`. Missing ones are being read when this returns; [`Routed::next`] hands
    /// them out.
    pub fn route(&self, layer: usize, experts: &[u32], phase: Phase) -> Result<Routed<'_>, StoreError> {
        let state = &mut *self.state.borrow_mut();
        let mut scratch = state.spare.pop().unwrap_or_default();
        scratch.wanted.clear();
        for &expert in experts {
            let Some(key) = self.key(layer, expert) else {
                return Err(StoreError::Other(format!("layer {layer} has no expert {expert}")));
            };
            scratch.wanted.push((key, Stage::Asked));
        }
        if let Some(trace) = &mut state.trace {
            trace.route(layer, experts, phase);
        }
        if state.noted.take() != Some(layer) && phase == Phase::Decode {
            state.heat.visit(layer, Choice { ids: experts, k: experts.len(), logits: &[] });
        }
        if phase == Phase::Decode {
            state.ahead.tick(layer);
        }
        self.save_hot_if_due(state);
        self.reader.collect(&mut state.done);
        self.settle(state);
        let mut routed = Routed { store: self, layer, phase, scratch };
        routed.find(state);
        routed.claim(state);
        Ok(routed)
    }
}

impl Routed<'_> {
    /// Experts handed out and not: how many were asked for.
    pub fn len(&self) -> usize {
        self.scratch.wanted.len()
    }

    pub fn is_empty(&self) -> bool {
        self.scratch.wanted.is_empty()
    }

    /// The next experts that can be read: first those that are in slots already, then what has been read since; waits
    /// only if there is nothing else to hand out. `None` when every expert has been handed out once. In
    /// [`Phase::Prefill`] this gives the slots of the batch before back to the pool: no kernel may still be reading them.
    #[allow(clippy::should_implement_trait)] // A lending iterator: a batch borrows what hands it out.
    pub fn next(&mut self) -> Result<Option<Batch<'_>>, StoreError> {
        let store = self.store;
        {
            let state = &mut *store.state.borrow_mut();
            if self.phase == Phase::Prefill {
                self.release(state);
            }
            self.scratch.batch.clear();
            loop {
                store.reader.collect(&mut state.done);
                store.settle(state);
                self.claim(state);
                let open = self.gather(state)?;
                if !self.scratch.batch.is_empty() {
                    break;
                }
                if open == 0 {
                    return Ok(None);
                }
                if state.slots.loading() == 0 {
                    let slots = state.slots.len();
                    return Err(StoreError::Other(format!(
                        "layer {}: {open} experts found no slot; {slots} slots are too few",
                        self.layer
                    )));
                }
                let begin = Instant::now();
                store.reader.wait();
                let stalled = begin.elapsed().as_secs_f64();
                store.metrics.ssd_stall_seconds.inc_by(stalled);
                state.ahead.stalled(stalled);
            }
        }
        Ok(Some(Batch { routed: self }))
    }

    /// Pins what has a slot already, before anything is evicted, and counts the lookups.
    fn find(&mut self, state: &mut super::State) {
        let metrics = &self.store.metrics;
        let (hit, miss, prefetched) = match self.phase {
            Phase::Prefill => {
                (&metrics.lookups_prefill_hit, &metrics.lookups_prefill_miss, &metrics.lookups_prefill_prefetched)
            }
            Phase::Decode => {
                (&metrics.lookups_decode_hit, &metrics.lookups_decode_miss, &metrics.lookups_decode_prefetched)
            }
        };
        let (mut hits, mut misses, mut foreseen) = (0, 0, 0);
        for (key, stage) in &mut self.scratch.wanted {
            let Some(place) = state.slots.find(*key) else {
                misses += 1;
                continue;
            };
            state.slots.pin(place);
            *stage = Stage::Held(place);
            let loading = state.slots.state(place) == Some(SlotState::Loading);
            match state.slots.reason(place) {
                Some(Reason::Ahead | Reason::Passed) => foreseen += 1,
                _ if loading => misses += 1,
                _ => hits += 1,
            }
            if loading {
                self.store.reader.hurry(place);
            }
            state.slots.set_reason(place, Reason::Demand);
        }
        hit.inc_by(hits);
        miss.inc_by(misses);
        prefetched.inc_by(foreseen);
        metrics.prefetches_used.inc_by(foreseen);
        state.ahead.looked_up(misses, foreseen);
        self.store.pass_over(state, self.layer);
    }

    /// Gives slots to experts that have none, as far as there are any and the window allows.
    fn claim(&mut self, state: &mut super::State) {
        let most = if self.phase == Phase::Prefill { WINDOW } else { usize::MAX };
        let loading = |stage: &Stage| match stage {
            Stage::Held(place) => state.slots.state(*place) == Some(SlotState::Loading),
            _ => false,
        };
        let mut under_way = match self.phase {
            Phase::Prefill => self.scratch.wanted.iter().filter(|(_, stage)| loading(stage)).count(),
            Phase::Decode => 0,
        };
        for (key, stage) in &mut self.scratch.wanted {
            if *stage != Stage::Asked {
                continue;
            }
            if under_way >= most {
                break;
            }
            let Some(place) = self.store.slot_for(state, *key) else { break };
            state.slots.pin(place);
            *stage = Stage::Held(place);
            under_way += 1;
        }
    }

    /// Collects what is ready into the batch; returns how many experts are not.
    fn gather(&mut self, state: &mut super::State) -> Result<usize, StoreError> {
        let mut open = 0;
        for (index, (key, stage)) in self.scratch.wanted.iter_mut().enumerate() {
            match *stage {
                Stage::Asked => open += 1,
                Stage::Held(place) => match state.slots.state(place) {
                    Some(SlotState::Ready) => {
                        *stage = Stage::Given(place);
                        self.scratch.batch.push(index);
                    }
                    Some(_) => open += 1,
                    None => {
                        *stage = Stage::Over;
                        return Err(self.store.failure(state, place, *key));
                    }
                },
                Stage::Given(_) | Stage::Over => {}
            }
        }
        Ok(open)
    }

    fn release(&mut self, state: &mut super::State) {
        for (_, stage) in &mut self.scratch.wanted {
            if let Stage::Given(place) = *stage {
                state.slots.unpin(place, &state.heat);
                *stage = Stage::Over;
            }
        }
    }
}

impl Store {
    /// A slot for an expert that has none, with its reads under way.
    fn slot_for(&self, state: &mut super::State, key: Key) -> Option<Place> {
        let claim = match state.slots.claim(key, Reason::Demand, &state.heat) {
            Some(claim) => claim,
            None => {
                // Nothing to evict: a slot that waits for a background read has to do.
                let mut waiting = [Reason::Warm, Reason::Ahead].into_iter();
                let place = waiting.find_map(|reason| state.slots.unwanted(reason).find(|&p| self.reader.cancel(p)))?;
                state.ahead.forget(place);
                state.slots.vacate(place);
                state.slots.claim(key, Reason::Demand, &state.heat)?
            }
        };
        self.count_eviction(&claim);
        self.send(state, key, claim.place, Reason::Demand);
        Some(claim.place)
    }

    /// What was read ahead for a layer and not asked for becomes an ordinary victim.
    fn pass_over(&self, state: &mut super::State, layer: usize) {
        while let Some(place) = state.ahead.settle(layer) {
            if state.slots.reason(place) != Some(Reason::Ahead) {
                continue;
            }
            if self.reader.cancel(place) {
                state.slots.vacate(place);
            } else {
                state.slots.set_reason(place, Reason::Passed);
            }
        }
    }

    fn failure(&self, state: &mut super::State, place: Place, key: Key) -> StoreError {
        match state.failed.iter().position(|(failed, ..)| *failed == place) {
            Some(at) => {
                let (_, key, failure) = state.failed.swap_remove(at);
                self.name(failure, key)
            }
            None => StoreError::Other(format!("expert {key} lost its slot while it was wanted")),
        }
    }
}

impl Drop for Routed<'_> {
    fn drop(&mut self) {
        let state = &mut *self.store.state.borrow_mut();
        for (_, stage) in &self.scratch.wanted {
            if let Stage::Held(place) | Stage::Given(place) = *stage {
                state.slots.unpin(place, &state.heat);
                state.failed.retain(|(failed, ..)| *failed != place);
            }
        }
        state.spare.push(std::mem::take(&mut self.scratch));
    }
}

impl<'r> Batch<'r> {
    pub fn len(&self) -> usize {
        self.routed.scratch.batch.len()
    }

    pub fn is_empty(&self) -> bool {
        self.routed.scratch.batch.is_empty()
    }

    pub fn iter(&self) -> impl Iterator<Item = Landed<'r>> {
        let routed = self.routed;
        routed.scratch.batch.iter().filter_map(move |&index| match routed.scratch.wanted.get(index)?.1 {
            Stage::Given(place) => Some(Landed { index, slot: place.slot, pieces: routed.store.pieces(place) }),
            _ => None,
        })
    }
}

impl Store {
    /// The pieces of an occupation that is ready and pinned for as long as the result lives.
    fn pieces(&self, place: Place) -> [&[u8]; PIECES] {
        let state = self.state.borrow();
        let base = place.slot.index() * self.slot_bytes;
        std::array::from_fn(|piece| {
            let span = state.spans.get(place.slot.index()).map_or(0..0, |spans| spans[piece].clone());
            // SAFETY: the slot is ready, so all reads into it are over, and it is pinned by the `Routed` that the result
            // borrows: nobody writes to it before that lets go.
            unsafe { self.slab.bytes(base + span.start..base + span.end) }
        })
    }
}
