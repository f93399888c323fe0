//! The model on a GPU: the passes of [`plan::pass`], step by step. The same text runs on Metal and, in the tests, on the
//! kernels compiled for the host.

mod load;
mod run;
mod snapshot;

use super::{
    Logits, Model, Qwen, Rows,
    room::{self, LOGITS},
    snapshot::{Frozen, Snapshot, SnapshotSize},
};
use crate::{
    device::{Gpu, GpuError, Region},
    error::ModelError,
    ops::{
        Rotation,
        plan::{self, Cache, Memory, Mixer, Net, Residence, Scratch},
    },
};
use run::Run;
use std::sync::{Arc, Mutex, PoisonError};

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
    frozen: Frozen,
    released: Arc<Mutex<Vec<u32>>>,
}

impl Drop for GpuState {
    fn drop(&mut self) {
        self.released.lock().unwrap_or_else(PoisonError::into_inner).append(&mut self.buffers);
    }
}

/// A model that the kernels cannot compute, and why.
pub struct Refused {
    pub qwen: Box<Qwen>,
    pub error: ModelError,
}

impl<G: Gpu> OnGpu<G> {
    /// Shows `gpu` the weights of a loaded model. Gives the model back where the kernels cannot do it.
    pub fn new(qwen: Qwen, mut gpu: G) -> Result<Self, Refused> {
        let parts = Parts::new(&qwen, &mut gpu);
        match parts {
            Ok(Parts { net, scratch, grouped, ids, logits }) => {
                let gpu = Mutex::new(gpu);
                Ok(Self { qwen, net, gpu, scratch, grouped, ids, logits, released: Arc::default() })
            }
            Err(error) => Err(Refused { qwen: Box::new(qwen), error }),
        }
    }

    /// The model as it was loaded.
    pub fn qwen(&self) -> &Qwen {
        &self.qwen
    }

    /// [`Model::forward`], showing `observe` the distinct experts that each layer asks the store for. Where every expert is
    /// in memory, nobody asks.
    pub fn forward_observed(
        &mut self,
        state: &mut GpuState,
        ids: &[u32],
        rows: Rows,
        observe: &mut dyn FnMut(usize, &[u32]),
    ) -> Result<Logits, ModelError> {
        self.qwen.admit(state.len, ids)?;
        let mut all = Logits { vocab: self.vocab(), data: Vec::new() };
        let chunks = ids.chunks(self.scratch.rows);
        let last = chunks.len();
        for (index, chunk) in chunks.enumerate() {
            let wanted = match rows {
                Rows::All => chunk.len(),
                Rows::Last if index + 1 == last => 1,
                _ => 0,
            };
            self.pass(state, chunk, wanted, observe, &mut all.data)?;
        }
        Ok(all)
    }

    /// One chunk; the logits of its last `wanted` rows are added to `out`.
    fn pass(
        &mut self,
        state: &mut GpuState,
        ids: &[u32],
        wanted: usize,
        observe: &mut dyn FnMut(usize, &[u32]),
        out: &mut Vec<f32>,
    ) -> Result<(), ModelError> {
        let Self { qwen, net, gpu, scratch, grouped, ids: ids_at, logits, .. } = self;
        let gpu = gpu.get_mut().unwrap_or_else(PoisonError::into_inner);
        let tokens = ids.len();
        let residence = match qwen.store() {
            Some(store) if store.is_resident() && tokens <= TOGETHER => Residence::Resident,
            Some(_) if tokens == 1 => Residence::Streaming,
            Some(_) => Residence::Grouped,
            None => Residence::Resident,
        };
        gpu.write_words(*ids_at, ids)?;
        let shape = &qwen.config().attention;
        let turn = Rotation::new(state.len, tokens, shape.rotated, shape.theta);
        let turn: Vec<u32> = turn.pairs().iter().flat_map(|(cos, sin)| [cos.to_bits(), sin.to_bits()]).collect();
        gpu.write_words(scratch.turn, &turn)?;

        // The first rows of logits follow the layers at once; of more there is no room.
        let mut rows = tokens - wanted..tokens.min(tokens - wanted + LOGITS);
        let head = (wanted > 0).then_some((*logits, rows.clone()));
        let steps = plan::pass(net, &state.layers, (state.len, tokens), *ids_at, residence, scratch, head);
        let run = Run { gpu, net, experts: qwen.store(), scratch, grouped, tokens, held: None, observe };
        run.all(&steps)?;
        state.len += tokens;
        while !rows.is_empty() {
            out.extend(gpu.read_floats(logits.first(rows.len() * qwen.config().vocab * 4))?);
            rows = rows.end..tokens.min(rows.end + LOGITS);
            if !rows.is_empty() {
                gpu.launch(&plan::head(net, rows.clone(), scratch, *logits))?;
                gpu.wait()?;
            }
        }
        Ok(())
    }
}

/// What [`OnGpu`] puts on the device.
struct Parts {
    net: Net,
    scratch: Scratch,
    grouped: Grouped,
    ids: Region,
    logits: Region,
}

impl Parts {
    fn new<G: Gpu>(qwen: &Qwen, gpu: &mut G) -> Result<Self, ModelError> {
        let net = load::Loader::new(gpu).net(qwen)?;
        let hidden = qwen.config().hidden;
        // As many rows as a chunk of a prompt has: so each expert is read once a chunk.
        let rows = qwen.plan().chunk.min(qwen.plan().context).max(1);
        let scratch = Scratch::new(&net.layers, hidden, rows, |bytes| gpu.allocate(bytes))?;
        let places = scratch.ids.len / 4;
        let mut take = |words: usize| gpu.allocate(words * 4);
        let grouped = Grouped {
            jobs: take(places * 3)?,
            order: take(places)?,
            out: take(places * hidden)?,
            act: take(rows * room::shared_width(qwen.config()))?,
            shared: take(rows * hidden)?,
        };
        let (ids, logits) = (take(rows)?, take(rows.min(LOGITS) * qwen.config().vocab)?);
        Ok(Self { net, scratch, grouped, ids, logits })
    }
}

impl<G: Gpu> Model for OnGpu<G> {
    type State = GpuState;

    fn start(&self) -> Result<GpuState, ModelError> {
        let mut gpu = self.gpu.lock().unwrap_or_else(PoisonError::into_inner);
        for buffer in self.released.lock().unwrap_or_else(PoisonError::into_inner).drain(..) {
            gpu.release(buffer);
        }
        let released = self.released.clone();
        let (layers, buffers, frozen) = (Vec::new(), Vec::new(), Frozen::default());
        let mut state = GpuState { len: 0, layers, buffers, frozen, released };
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

    /// Kernels do not write states out in passing: a pass ends at each mark.
    fn forward_marking(
        &mut self,
        state: &mut GpuState,
        ids: &[u32],
        rows: Rows,
        marks: &[usize],
        taken: &mut Vec<Snapshot>,
    ) -> Result<Logits, ModelError> {
        let (mut all, mut rest) = (Logits { vocab: self.vocab(), data: Vec::new() }, ids);
        for mark in marks {
            let (now, later) = rest.split_at(mark - state.len);
            let rows = if later.is_empty() || rows == Rows::All { rows } else { Rows::None };
            all.data.extend(self.forward_observed(state, now, rows, &mut |_, _| ())?.data);
            taken.push(self.take(state)?);
            rest = later;
        }
        all.data.extend(self.forward_observed(state, rest, rows, &mut |_, _| ())?.data);
        Ok(all)
    }

    fn snapshot(&self, state: &mut GpuState) -> Result<Snapshot, ModelError> {
        self.take(state)
    }

    fn restore(&self, snapshot: &Snapshot, into: Option<GpuState>) -> Result<GpuState, ModelError> {
        if snapshot.len > self.context() {
            return Err(ModelError::ContextFull { context: self.context() });
        }
        let mut state = into.map_or_else(|| self.start(), Ok)?;
        self.put(snapshot, &mut state)?;
        Ok(state)
    }

    fn held(&self, state: &GpuState) -> usize {
        state.frozen.held()
    }

    fn snapshot_size(&self) -> SnapshotSize {
        self.qwen.snapshot_size()
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
