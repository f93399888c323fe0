//! A pass, step by step: what the CPU does between launches.

use super::Grouped;
use crate::{
    device::Gpu,
    error::ModelError,
    experts::{Batch, Choice, Phase, Routed, Store},
    ops::plan::{Ffn, Jobs, Mixture, NONE, Net, Scratch, Step},
};

/// One pass under way.
pub(super) struct Run<'a, G> {
    pub gpu: &'a mut G,
    pub net: &'a Net,
    pub store: Option<&'a Store>,
    pub scratch: &'a Scratch,
    pub grouped: &'a Grouped,
    pub tokens: usize,
    /// The experts the GPU may be reading: their slots must not change before the next wait.
    pub held: Option<Asked<'a>>,
    pub observe: &'a mut dyn FnMut(usize, &[u32]),
}

/// A layer's experts on their way.
pub(super) struct Asked<'a> {
    routed: Routed<'a>,
    /// Distinct experts in the order asked for, and the expert of each place.
    distinct: Vec<u32>,
    chosen: Vec<u32>,
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
                let mut asked = self.ask(*layer, Phase::Decode)?;
                if let Some(batch) = asked.routed.next()? {
                    place(&batch, &asked.distinct, &asked.chosen, &mut asked.slots);
                }
                self.gpu.write_words(self.scratch.hits, &asked.slots)?;
                self.held = Some(asked);
            }
            Step::Land(_) => {
                let Some(asked) = &mut self.held else { return Ok(()) };
                let mut late = vec![NONE; asked.slots.len()];
                while let Some(batch) = asked.routed.next()? {
                    asked.missed = true;
                    place(&batch, &asked.distinct, &asked.chosen, &mut late);
                }
                for (slot, late) in asked.slots.iter_mut().zip(&late) {
                    *slot = (*slot).min(*late);
                }
                self.gpu.write_words(self.scratch.misses, &late)?;
                self.gpu.write_words(self.scratch.places, &asked.slots)?;
            }
            Step::Late(dispatch) => {
                if self.held.as_ref().is_some_and(|asked| asked.missed) {
                    self.gpu.launch(dispatch)?;
                }
            }
            Step::Batches(layer) => self.batches(*layer)?,
        }
        Ok(())
    }

    /// Waits for the router's choice and asks the store for it. What was held before is let go.
    fn ask(&mut self, layer: usize, phase: Phase) -> Result<Asked<'a>, ModelError> {
        self.gpu.wait()?;
        self.held = None;
        let (Some(store), Some(moe)) = (self.store, mixture(self.net, layer)) else {
            return Err(ModelError::Config("a dense layer routes nothing".into()));
        };
        let chosen = self.gpu.read_words(self.scratch.ids.first(self.tokens * moe.k * 4))?;
        // The logits stay on the GPU: counts alone say who is wanted.
        store.note(layer, Choice { ids: &chosen, k: moe.k, logits: &[] });
        let mut distinct = chosen.clone();
        distinct.sort_unstable();
        distinct.dedup();
        (self.observe)(layer, &distinct);
        let routed = store.route(layer, &distinct, phase)?;
        let slots = vec![NONE; chosen.len()];
        Ok(Asked { routed, distinct, chosen, slots, missed: false })
    }

    /// The experts of a layer, grouped: each batch that has landed runs while its slots are held.
    fn batches(&mut self, layer: usize) -> Result<(), ModelError> {
        let mut asked = self.ask(layer, Phase::Prefill)?;
        let Some(moe) = mixture(self.net, layer) else { return Ok(()) };
        let (slots, tokens, Grouped { jobs, order, out, act, shared }) = (&self.net.slots, self.tokens, *self.grouped);
        let mut wanted = vec![Vec::new(); asked.distinct.len()];
        for (place, expert) in asked.chosen.iter().enumerate() {
            if let Ok(index) = asked.distinct.binary_search(expert) {
                wanted[index].push(place as u32);
            }
        }
        while let Some(batch) = asked.routed.next()? {
            let (mut job_words, mut places) = (Vec::new(), Vec::new());
            for landed in batch.iter() {
                let first = places.len();
                places.extend(&wanted[landed.index]);
                job_words.extend([landed.slot.index(), first, places.len() - first].map(|word| word as u32));
            }
            self.gpu.write_words(jobs, &job_words)?;
            self.gpu.write_words(order, &places)?;
            let jobs = Jobs { count: job_words.len() / 3, jobs, order: order.first(places.len() * 4) };
            for dispatch in moe.batch(tokens, slots, self.scratch, jobs, out) {
                self.gpu.launch(&dispatch)?;
            }
            self.gpu.wait()?;
        }
        for dispatch in moe.combine(tokens, slots, self.scratch, out, act, shared) {
            self.gpu.launch(&dispatch)?;
        }
        Ok(())
    }
}

fn mixture(net: &Net, layer: usize) -> Option<&Mixture> {
    match &net.layers.get(layer)?.ffn {
        Ffn::Moe(moe) => Some(moe),
        Ffn::Dense(_) => None,
    }
}

/// Enters where the experts of a batch lie: `slots` has an entry for each of `chosen`.
fn place(batch: &Batch<'_>, distinct: &[u32], chosen: &[u32], slots: &mut [u32]) {
    for landed in batch.iter() {
        for (slot, expert) in slots.iter_mut().zip(chosen) {
            if *expert == distinct[landed.index] {
                *slot = landed.slot.index() as u32;
            }
        }
    }
}
