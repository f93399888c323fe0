//! The mixture of experts (spec 2.3).
//!
//! ```text
//! h --norm--> x --+-- router --> ids --> experts ----> hits ----> Experts --+
//!                 |                            |                           |
//!                 |                            +-- reads --> as they land -+--> CombineExperts in rank order --> h
//!                 +-- shared expert, while the disk works -----------------+
//! ```
//! Each place's result is kept apart until all are there, and the places are summed in the router's order: so it does not
//! matter what landed first.

use crate::model::{RouterChoice, forward::Pass};
use crate::{
    device::Region,
    error::ModelError,
    experts::{ExpertChoice, ExpertFetch},
    ops::{CombineExperts, ExpertGroup, ExpertSet, Experts, MoeWeights, NO_SLOT, Norm, Router},
};

/// Rows of a prompt whose choice the next layer's is guessed from: they want the same experts most as all rows do.
const GUESSED: usize = 64;

/// Lists that keep their room from layer to layer.
#[derive(Default)]
pub(in crate::model) struct Lists {
    chosen: Vec<u32>,
    logits: Vec<f32>,
    weights: Vec<f32>,
    guess: Vec<u32>,
    /// A batch: its experts, and their places.
    groups: Vec<ExpertGroup>,
    places: Vec<u32>,
    /// The slot of each place, as far as known.
    slots: Vec<u32>,
}

impl Pass<'_> {
    /// `h += sum of weight * expert(x) + sigmoid(x . w_sg) * shared(x)`, `x = rms(h)`. `next` is the following layer's mixture,
    /// whose experts are predicted and read ahead.
    pub(in crate::model) fn moe(
        &mut self,
        index: usize,
        norm: Norm,
        layer: &MoeWeights,
        next: Option<&MoeWeights>,
    ) -> Result<(), ModelError> {
        let Some(experts) = self.experts else {
            return Err(ModelError::Config("the experts are not loaded".into()));
        };
        let (b, tokens, slots, limits) = (self.b, self.tokens, self.slots, self.limits);
        let (x, room) = (b.normed, b.room);
        let norm = Some(Norm { keep: Some(x), ..norm });
        let table = self.b.tables.rows(index, 1, layer.router.rows);
        let (ids, chosen_slots, scores, weights) = (b.chosen, b.slots, room.scores, room.weights);
        let route =
            Router { layer, tokens, x: b.h, norm, alone: false, table, scores, ids, slots: chosen_slots, weights };
        self.run.execute(&route.into())?;
        let combine = CombineExperts { layer, slots, tokens, room, per_assignment: None, h: b.h };
        if experts.is_resident() && tokens <= limits.by_table && !self.half {
            let which = ExpertSet::Table { ids, slots: chosen_slots };
            self.run.execute(&Experts { layer, slots, tokens, x, room, which }.into())?;
            return Ok(self.run.execute(&CombineExperts { per_assignment: Some(chosen_slots), ..combine }.into())?);
        }

        let phase = self.phase;
        // The next layer's router on this layer's input: a guess, read only when nothing better is to be done. While a prompt is
        // at it that is from this layer's last read to the next layer's first: its mixer, above all.
        let next = next.filter(|_| experts.wants_prefetch(phase));
        let mut lists = std::mem::take(&mut self.lists.moe);
        if let Some(next) = next.filter(|_| limits.waits) {
            // Read first, as it comes last: one wait is then enough for both.
            self.guess(index + 1, next, &mut lists.guess)?;
        }
        self.read_choice(layer, !experts.is_resident(), &mut lists)?;
        if let Some(observe) = &mut self.observe {
            observe(index, &lists.routes(layer.k));
        }
        let choice = ExpertChoice { ids: &lists.chosen, k: layer.k, logits: &lists.logits };
        let mut asked = experts.fetch(index, &choice, phase, &mut *self.run)?;
        if let Some(next) = next {
            if !limits.waits {
                self.guess(index + 1, next, &mut lists.guess)?;
            }
            experts.prefetch(index + 1, &lists.guess, phase);
        }
        let done = self.landed(index, &mut asked, combine, experts.is_resident(), &mut lists);
        let mark = self.run.sync_point();
        if done.is_err() {
            // Slots are let go below; nothing may be reading them.
            let _ = self.run.wait_for(mark);
        }
        asked.release_after(mark);
        self.lists.moe = lists;
        done
    }

    /// Runs each batch of experts that has landed, and sums up.
    fn landed(
        &mut self,
        index: usize,
        asked: &mut ExpertFetch<'_>,
        combine: CombineExperts<'_>,
        resident: bool,
        lists: &mut Lists,
    ) -> Result<(), ModelError> {
        let (b, limits) = (self.b, self.limits);
        let CombineExperts { layer, slots, tokens, mut room, .. } = combine;
        let Lists { groups, places, slots: known, .. } = lists;
        let (x, row) = (b.normed, tokens * layer.k);
        let per_assignment = tokens <= limits.per_assignment && !self.half;
        let own = |call: usize| per_assignment.then(|| b.per_assignment.rows(call.min(layer.k + 1), 1, row));
        let mut shared = layer.shared.is_some();
        if shared && !resident && !limits.waits {
            // The disk is at work: the shared expert must not wait for it.
            let which = ExpertSet::Landed { groups: &[], assignments: &[], shared, per_assignment: own(0) };
            self.run.execute(&Experts { layer, slots, tokens, x, room, which }.into())?;
            shared = false;
        }
        known.clear();
        known.resize(row, NO_SLOT);
        let mut call = 0;
        while let Some(batch) = asked.next(&mut *self.run)? {
            groups.clear();
            places.clear();
            for landed in batch.iter() {
                let (first, count) = (places.len() as u32, landed.assignments.len() as u32);
                if !resident {
                    // The same expert has the same bytes whenever it is read.
                    let content = (index as u64) << 32 | u64::from(landed.expert);
                    self.run.landed(slots.of(landed.slot.0), content)?;
                }
                groups.push(ExpertGroup { expert: landed.expert, slot: landed.slot.0, first, count });
                places.extend(landed.assignments);
                for place in landed.assignments {
                    known[*place as usize] = landed.slot.0;
                }
            }
            if room.jobs.len < groups.len() * 12 || room.order.len < places.len() * 4 {
                // Experts that come once more, behind a wrong checksum.
                let mark = self.run.sync_point();
                self.run.wait_for(mark)?;
                room = combine.room;
            }
            let which = ExpertSet::Landed { groups, assignments: places, shared, per_assignment: own(call) };
            self.run.execute(&Experts { layer, slots, tokens, x, room, which }.into())?;
            (shared, call) = (false, call + 1);
            // A part of its own for each batch: the device may still be reading the lists of those before. A job has a place
            // at least.
            let rest = |list: Region, words: usize| list.part(words * 4, list.len - words * 4);
            (room.jobs, room.order) = (rest(room.jobs, places.len() * 3), rest(room.order, places.len()));
            if !per_assignment {
                // Place by place, `down` reads the slots once more.
                batch.release_after(self.run.sync_point());
            }
            if !asked.is_empty() {
                self.run.flush()?;
            }
        }
        let per_assignment = own(layer.k + 1);
        if let Some(at) = per_assignment {
            self.run.write_words(at, known)?;
        }
        Ok(self.run.execute(&CombineExperts { per_assignment, ..combine }.into())?)
    }

    /// The guess of the next layer's choice: its router on this layer's input. It is computed in the experts' buffers,
    /// which are free until they run.
    fn guess(&mut self, index: usize, layer: &MoeWeights, into: &mut Vec<u32>) -> Result<(), ModelError> {
        let (b, tokens, x) = (self.b, self.tokens.min(GUESSED), self.b.normed);
        let (scores, room) = (b.room.out, tokens * layer.k * 4);
        into.clear();
        if scores.len < tokens * layer.router.rows * 4 || b.room.act.len < 4 * room {
            return Ok(());
        }
        let [ids, slots, weights] = [(0, 1), (1, 1), (2, 2)].map(|(at, len)| b.room.act.part(at * room, len * room));
        let table = b.tables.rows(index, 1, layer.router.rows);
        let route = Router { layer, tokens, x, norm: None, alone: true, table, scores, ids, slots, weights };
        self.run.execute(&route.into())?;
        into.resize(tokens * layer.k, 0);
        Ok(self.run.read_words(ids, into)?)
    }

    /// Waits for the router's choice: the one wait of a layer.
    fn read_choice(&mut self, layer: &MoeWeights, logits: bool, lists: &mut Lists) -> Result<(), ModelError> {
        let (b, tokens, k) = (self.b, self.tokens, layer.k);
        lists.chosen.resize(tokens * k, 0);
        self.run.read_words(b.chosen, &mut lists.chosen)?;
        let (experts, width) = (layer.router.rows, layer.width());
        lists.logits.resize(if logits { tokens * experts } else { 0 }, 0.0);
        for (token, row) in lists.logits.chunks_exact_mut(experts).enumerate() {
            self.run.read_floats(b.room.scores.rows(token, 1, width), row)?;
        }
        if self.observe.is_some() {
            lists.weights.resize(tokens * (k + 1), 0.0);
            self.run.read_floats(b.room.weights, &mut lists.weights)?;
        }
        Ok(())
    }
}

impl Lists {
    fn routes(&self, k: usize) -> RouterChoice {
        let weights = self.weights.chunks_exact(k + 1).flat_map(|row| row[..k].iter().copied()).collect();
        RouterChoice { k, ids: self.chosen.clone(), weights }
    }
}
