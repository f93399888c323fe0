//! The model on a GPU: the passes of [`plan::pass`], step by step. The same text runs on Metal and, in the tests, on the
//! kernels compiled for the host.

mod load;

use super::{Logits, Model, Qwen, Rows};
use crate::{
    device::{Gpu, GpuError, Region},
    error::ModelError,
    ops::{
        Rotation,
        plan::{self, Cache, Ffn, Jobs, Memory, Mixer, Mixture, NONE, Net, Residence, Scratch, Step},
    },
    store::{Batch, Choice, Phase, Routed, Store},
};
use std::sync::{Arc, Mutex, PoisonError};

/// Rows of one pass: more gain little, since each weight is read once for every four rows.
const ROWS: usize = 64;

/// Up to this many rows the resident path does not ask the CPU which experts were chosen.
const TOGETHER: usize = 16;

impl From<GpuError> for ModelError {
    fn from(error: GpuError) -> Self {
        ModelError::Memory(format!("GPU: {error}"))
    }
}

/// A model whose weights and states a GPU sees.
pub struct OnGpu<G> {
    qwen: Qwen,
    net: Net,
    /// Behind a lock because states are started through a shared reference.
    gpu: Mutex<G>,
    scratch: Scratch,
    grouped: Grouped,
    ids: Region,
    logits: Region,
    released: Arc<Mutex<Vec<u32>>>,
}

/// Room for experts that run grouped by expert.
#[derive(Clone, Copy)]
struct Grouped {
    jobs: Region,
    order: Region,
    /// `[rows * k, hidden]`: each place's result.
    out: Region,
    /// `[rows, inner]` and `[rows, hidden]` of the shared expert.
    act: Region,
    shared: Region,
}

/// One sequence's memory on the GPU; gives its buffers back when dropped.
pub struct GpuState {
    len: usize,
    layers: Vec<Memory>,
    buffers: Vec<u32>,
    released: Arc<Mutex<Vec<u32>>>,
}

impl Drop for GpuState {
    fn drop(&mut self) {
        self.released.lock().unwrap_or_else(PoisonError::into_inner).append(&mut self.buffers);
    }
}

impl<G: Gpu> OnGpu<G> {
    /// Shows `gpu` the weights of a loaded model. Refuses what the kernels cannot do.
    pub fn new(qwen: Qwen, mut gpu: G) -> Result<Self, ModelError> {
        let net = load::Loader::new(&mut gpu).net(&qwen)?;
        let hidden = qwen.config().hidden;
        let rows = ROWS.min(qwen.plan().context).max(1);
        let scratch = Scratch::new(&net.layers, hidden, rows, |bytes| gpu.allocate(bytes))?;
        let places = scratch.ids.len / 4;
        let mut take = |words: usize| gpu.allocate(words * 4);
        let grouped = Grouped {
            jobs: take(places * 3)?,
            order: take(places)?,
            out: take(places * hidden)?,
            act: take(scratch.act.len / 4)?,
            shared: take(rows * hidden)?,
        };
        let (ids, logits) = (take(rows)?, take(rows * qwen.config().vocab)?);
        let gpu = Mutex::new(gpu);
        Ok(Self { qwen, net, gpu, scratch, grouped, ids, logits, released: Arc::default() })
    }

    fn pass(&mut self, state: &mut GpuState, ids: &[u32], wanted: usize) -> Result<Logits, ModelError> {
        let Self { qwen, net, gpu, scratch, grouped, ids: ids_at, logits, .. } = self;
        let gpu = gpu.get_mut().unwrap_or_else(PoisonError::into_inner);
        let (tokens, vocab) = (ids.len(), qwen.config().vocab);
        let residence = match qwen.store() {
            Some(store) if store.is_resident() && tokens <= TOGETHER => Residence::Resident,
            Some(_) if tokens == 1 => Residence::Streaming,
            Some(_) => Residence::Grouped,
            None => Residence::Resident,
        };
        gpu.write(ids_at.first(tokens * 4), &bytes(ids))?;
        let shape = &qwen.config().attention;
        let turn = Rotation::new(state.len, tokens, shape.rotated, shape.theta);
        let turn: Vec<u32> = turn.pairs().iter().flat_map(|(cos, sin)| [cos.to_bits(), sin.to_bits()]).collect();
        gpu.write(scratch.turn.first(turn.len() * 4), &bytes(&turn))?;

        let head = (wanted > 0).then_some((*logits, wanted));
        let steps = plan::pass(net, &state.layers, (state.len, tokens), *ids_at, residence, scratch, head);
        let run = Run { gpu, net, store: qwen.store(), scratch, grouped, tokens, held: None };
        run.all(&steps)?;
        let mut data = vec![0; wanted * vocab * 4];
        gpu.read(logits.first(data.len()), &mut data)?;
        state.len += tokens;
        let data = data.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
        Ok(Logits { vocab, data })
    }
}

/// One pass under way.
struct Run<'a, G> {
    gpu: &'a mut G,
    net: &'a Net,
    store: Option<&'a Store>,
    scratch: &'a Scratch,
    grouped: &'a Grouped,
    tokens: usize,
    /// The experts the GPU may be reading: their slots must not change before the next wait.
    held: Option<Asked<'a>>,
}

/// A layer's experts on their way.
struct Asked<'a> {
    routed: Routed<'a>,
    /// Distinct experts in the order asked for, and the expert of each place.
    distinct: Vec<u32>,
    chosen: Vec<u32>,
    /// The slot of each place, as far as known.
    slots: Vec<u32>,
    missed: bool,
}

impl<'a, G: Gpu> Run<'a, G> {
    fn all(mut self, steps: &[Step]) -> Result<(), ModelError> {
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
                let hits = self.scratch.hits.first(asked.slots.len() * 4);
                self.gpu.write(hits, &bytes(&asked.slots))?;
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
                let len = late.len() * 4;
                self.gpu.write(self.scratch.misses.first(len), &bytes(&late))?;
                self.gpu.write(self.scratch.places.first(len), &bytes(&asked.slots))?;
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
        let chosen = self.words(self.scratch.ids, self.tokens * moe.k)?;
        // The logits stay on the GPU: counts alone say who is wanted.
        store.note(layer, Choice { ids: &chosen, k: moe.k, logits: &[] });
        let mut distinct = chosen.clone();
        distinct.sort_unstable();
        distinct.dedup();
        let routed = store.route(layer, &distinct, phase)?;
        let slots = vec![NONE; chosen.len()];
        Ok(Asked { routed, distinct, chosen, slots, missed: false })
    }

    /// The experts of a layer, grouped: each batch that has landed runs while its slots are held.
    fn batches(&mut self, layer: usize) -> Result<(), ModelError> {
        let mut asked = self.ask(layer, Phase::Prefill)?;
        let Some(moe) = mixture(self.net, layer) else { return Ok(()) };
        let (slots, tokens, Grouped { jobs, order, out, act, shared }) = (&self.net.slots, self.tokens, *self.grouped);
        while let Some(batch) = asked.routed.next()? {
            let (mut job_words, mut places) = (Vec::new(), Vec::new());
            for landed in batch.iter() {
                let first = places.len();
                let expert = asked.distinct[landed.index];
                places.extend((0..asked.chosen.len()).filter(|&at| asked.chosen[at] == expert).map(|at| at as u32));
                job_words.extend([landed.slot.index(), first, places.len() - first].map(|word| word as u32));
            }
            self.gpu.write(jobs.first(job_words.len() * 4), &bytes(&job_words))?;
            self.gpu.write(order.first(places.len() * 4), &bytes(&places))?;
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

    fn words(&mut self, region: Region, count: usize) -> Result<Vec<u32>, ModelError> {
        let mut data = vec![0; count * 4];
        self.gpu.read(region.first(count * 4), &mut data)?;
        Ok(data.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect())
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

fn bytes(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

impl<G: Gpu> Model for OnGpu<G> {
    type State = GpuState;

    fn start(&self) -> Result<GpuState, ModelError> {
        let mut gpu = self.gpu.lock().unwrap_or_else(PoisonError::into_inner);
        for buffer in self.released.lock().unwrap_or_else(PoisonError::into_inner).drain(..) {
            gpu.release(buffer);
        }
        let mut state = GpuState { len: 0, layers: Vec::new(), buffers: Vec::new(), released: self.released.clone() };
        for layer in &self.net.layers {
            let mut take = |bytes: usize| -> Result<Region, ModelError> {
                let region = gpu.allocate(bytes)?;
                state.buffers.push(region.buffer);
                Ok(region)
            };
            let memory = match &layer.mixer {
                Mixer::Delta { op, .. } => {
                    Memory::Delta { conv: take(op.channels() * 12)?, heads: take(op.values() * op.dk * 4)? }
                }
                Mixer::Attend { op, .. } => {
                    Memory::Attend(Cache { keys: take(op.cache_bytes())?, values: take(op.cache_bytes())? })
                }
            };
            state.layers.push(memory);
        }
        Ok(state)
    }

    fn forward(&mut self, state: &mut GpuState, ids: &[u32], rows: Rows) -> Result<Logits, ModelError> {
        let (vocab, context) = (self.vocab(), self.context());
        if state.len + ids.len() > context {
            return Err(ModelError::ContextFull { context });
        }
        if let Some(&id) = ids.iter().find(|id| **id as usize >= vocab) {
            return Err(ModelError::TokenOutOfRange { id, vocab });
        }
        let mut all = Logits { vocab, data: Vec::new() };
        let chunks = ids.chunks(self.scratch.rows);
        let last = chunks.len();
        for (index, chunk) in chunks.enumerate() {
            let wanted = match rows {
                Rows::All => chunk.len(),
                Rows::Last if index + 1 == last => 1,
                _ => 0,
            };
            all.data.extend(self.pass(state, chunk, wanted)?.data);
        }
        Ok(all)
    }

    fn vocab(&self) -> usize {
        self.qwen.vocab()
    }

    fn context(&self) -> usize {
        self.qwen.context()
    }

    fn chunk(&self) -> usize {
        self.qwen.chunk()
    }
}
