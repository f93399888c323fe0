//! A pass, step by step: what the CPU does between launches.

use super::Grouped;
use crate::{
    device::Gpu,
    error::ModelError,
    experts::{Asked, Batch, Choice, Experts, Phase},
    ops::plan::{Ffn, Jobs, Linear, Mixture, NONE, Net, Scratch, Step, linear},
};

/// One pass under way.
pub(super) struct Run<'a, G> {
    pub gpu: &'a mut G,
    pub net: &'a Net,
    pub experts: Option<&'a Experts>,
    pub scratch: &'a Scratch,
    pub grouped: &'a Grouped,
    pub tokens: usize,
    /// The experts the GPU may be reading: their slots must not change before the next wait.
    pub held: Option<Held<'a>>,
    pub observe: &'a mut dyn FnMut(usize, &[u32]),
}

/// A token's experts on their way.
pub(super) struct Held<'a> {
    asked: Asked<'a>,
    /// The slot of each place, as far as known.
    slots: Vec<u32>,
    missed: bool,
}

impl<'a, G: Gpu> Run<'a, G> {
    /// Executes the steps; whatever happens, the device has finished when this returns.
    pub fn all(mut self, steps: &[Step]) -> Result<(), ModelError> {
        let done = steps.iter().try_for_each(|step| self.step(step));
        if done.is_err() {
            // Slots are let go below; nothing may be reading them.
            let _ = self.gpu.wait();
        }
        done
    }

    fn step(&mut self, step: &Step) -> Result<(), ModelError> {
        match step {
            Step::Launch(dispatch) => self.gpu.launch(dispatch)?,
            Step::Commit => self.gpu.commit()?,
            Step::Wait => {
                self.gpu.wait()?;
                self.held = None;
            }
            Step::Route(layer) => {
                let (mut asked, places) = self.ask(*layer, Phase::Decode)?;
                let mut slots = vec![NONE; places];
                if let Some(batch) = asked.next(self.gpu)? {
                    place(&batch, &mut slots);
                }
                self.gpu.write_words(self.scratch.hits, &slots)?;
                self.held = Some(Held { asked, slots, missed: false });
            }
            Step::Land(_) => {
                let Some(held) = &mut self.held else { return Ok(()) };
                let mut late = vec![NONE; held.slots.len()];
                // One launch reads them all: nothing is marked before it.
                while let Some(batch) = held.asked.next(self.gpu)? {
                    held.missed = true;
                    place(&batch, &mut late);
                }
                for (slot, late) in held.slots.iter_mut().zip(&late) {
                    *slot = (*slot).min(*late);
                }
                self.gpu.write_words(self.scratch.misses, &late)?;
                self.gpu.write_words(self.scratch.places, &held.slots)?;
            }
            Step::Late(dispatch) => {
                if self.held.as_ref().is_some_and(|held| held.missed) {
                    self.gpu.launch(dispatch)?;
                }
            }
            Step::Batches(layer) => self.batches(*layer)?,
        }
        Ok(())
    }

    /// Waits for the router's choice and asks for it; returns how many places it has. What was held before is let go.
    fn ask(&mut self, layer: usize, phase: Phase) -> Result<(Asked<'a>, usize), ModelError> {
        let (Some(experts), Some(moe)) = (self.experts, mixture(self.net, layer)) else {
            return Err(ModelError::Config("a dense layer routes nothing".into()));
        };
        // What the next layer's router makes of this layer's input goes where nothing is before the experts have run.
        let (tokens, guess) = (self.tokens, self.grouped.out);
        let next = mixture(self.net, layer + 1).filter(|_| experts.wants_prediction(phase));
        let next = next.filter(|next| tokens * next.router.rows * 4 <= guess.len);
        if let Some(next) = next {
            let (x, matrices) = (self.scratch.normed, std::slice::from_ref(&next.router));
            self.gpu.launch(&linear(&Linear { x, tokens, norm: None, matrices, y: guess, add: false }))?;
        }
        self.gpu.wait()?;
        self.held = None;
        let ids = self.gpu.read_words(self.scratch.ids.first(self.tokens * moe.k * 4))?;
        let mut logits = Vec::new();
        if !experts.is_resident() {
            for row in 0..self.tokens {
                let scores = self.scratch.scores.part(row * moe.width() * 4, moe.router.rows * 4);
                logits.extend(self.gpu.read_floats(scores)?);
            }
        }
        let mut distinct = ids.clone();
        distinct.sort_unstable();
        distinct.dedup();
        (self.observe)(layer, &distinct);
        let asked = experts.ask(layer, &Choice { ids: &ids, k: moe.k, logits: &logits }, phase, self.gpu)?;
        if let Some(next) = next {
            let guess = self.gpu.read_floats(guess.first(tokens * next.router.rows * 4))?;
            let guess: Vec<u32> = guess.chunks(next.router.rows).flat_map(|row| largest(row, next.k)).collect();
            experts.read_ahead(layer + 1, &guess, phase);
        }
        Ok((asked, ids.len()))
    }

    /// The experts of a layer, grouped: each batch runs as it lands.
    fn batches(&mut self, layer: usize) -> Result<(), ModelError> {
        let (mut asked, _) = self.ask(layer, Phase::Prefill)?;
        let Some(moe) = mixture(self.net, layer) else { return Ok(()) };
        let (slots, tokens, Grouped { jobs, order, out, act, shared }) = (&self.net.slots, self.tokens, *self.grouped);
        let (mut experts, mut places) = (0, 0);
        while let Some(batch) = asked.next(self.gpu)? {
            let (mut job_words, mut order_words) = (Vec::new(), Vec::new());
            for landed in batch.iter() {
                let (first, count) = (order_words.len(), landed.places.len());
                order_words.extend(landed.places);
                job_words.extend([landed.slot.index(), first, count].map(|word| word as u32));
            }
            // A part of its own for each batch: the GPU may still be reading the lists of those before.
            let count = job_words.len() / 3;
            let jobs = jobs.part(experts * 12, count * 12);
            let order = order.part(places * 4, order_words.len() * 4);
            (experts, places) = (experts + count, places + order_words.len());
            self.gpu.write_words(jobs, &job_words)?;
            self.gpu.write_words(order, &order_words)?;
            for dispatch in moe.batch(tokens, slots, self.scratch, Jobs { count, jobs, order }, out) {
                self.gpu.launch(&dispatch)?;
            }
            self.gpu.commit()?;
            batch.reads_until(self.gpu.mark());
        }
        for dispatch in moe.combine(tokens, slots, self.scratch, out, act, shared) {
            self.gpu.launch(&dispatch)?;
        }
        Ok(())
    }
}

/// The `k` experts of largest logit, largest first.
fn largest(logits: &[f32], k: usize) -> Vec<u32> {
    let mut ids: Vec<u32> = (0..logits.len() as u32).collect();
    ids.sort_by(|&a, &b| logits[b as usize].total_cmp(&logits[a as usize]));
    ids.truncate(k);
    ids
}

fn mixture(net: &Net, layer: usize) -> Option<&Mixture> {
    match &net.layers.get(layer)?.ffn {
        Ffn::Moe(moe) => Some(moe),
        Ffn::Dense(_) => None,
    }
}

/// Enters where the experts of a batch lie: `slots` has an entry for each place.
fn place(batch: &Batch<'_>, slots: &mut [u32]) {
    for landed in batch.iter() {
        for &place in landed.places {
            if let Some(slot) = slots.get_mut(place as usize) {
                *slot = landed.slot.0;
            }
        }
    }
}
