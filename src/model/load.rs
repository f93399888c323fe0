//! A loaded model: from a directory to weights, memory and a device that computes.

use crate::model::{
    Logits, PassHooks, RouterObserver, Rows,
    config::Config,
    device_state::DeviceState,
    drafts::mtp,
    forward::{Batch, Marked, Pass},
    inspect::CheckpointInfo,
    state::kv_pages::PagePool,
    state::sequence::{QwenState, append, heads},
    weights::Network,
};
use crate::{
    checkpoint::{TrunkLoader, identity::file_identity, index::Index},
    device::{CpuArithmetic, CpuDevice, GPU_KIND, Gpu, Region, Slab},
    error::ModelError,
    experts::{self, ExpertStore, PassKind},
    metrics::Metrics,
    ops::{Backend, Cpu, GpuBackend, KvBits, ModelPart},
    plan::{DraftFootprint, MachineLimits, ModelFootprint, Plan, PlanOptions},
    platform::os,
};
use std::{
    cell::RefCell,
    path::{Path, PathBuf},
    sync::Arc,
};

/// LoadOptions of loading a model.
#[derive(Debug, Clone, Default)]
pub struct LoadOptions {
    /// Compute threads; the physical cores by default.
    pub threads: Option<usize>,
    /// Another model's threads, instead of its own.
    pub compute: Option<CpuDevice>,
    pub math: CpuArithmetic,
    pub plan: PlanOptions,
    /// Fewer experts a token than the model's k; more is an error.
    pub experts_per_token: Option<usize>,
    /// Without `experts_per_token`: experts a token at most.
    pub experts_at_most: Option<usize>,
    /// LoadOptions of reading experts; the plan decides the slots.
    pub store: StoreOptions,
    /// The model goes to a GPU that recommends to be given so many bytes at most; the plan is made for it.
    pub gpu: Option<u64>,
    /// The plan has room for verifies that can be taken back.
    pub verify: bool,
    /// A draft that computes with the model's own parts; its demands on memory are found with it.
    pub drafter: MtpSource,
    /// The memory of a draft beside the model.
    pub draft: DraftFootprint,
    /// Keys and values in fewer than 16 bits.
    pub kv_bits: KvBits,
}

/// A draft that computes on the model's device, from its hidden rows.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum MtpSource {
    #[default]
    None,
    /// The checkpoint's head for multi-token prediction, if it has one that is of use.
    Checkpoint,
    /// A head that has a directory of its own.
    Directory(PathBuf),
}

/// The part of [`experts::Options`] that the plan does not decide.
#[derive(Debug, Clone)]
pub struct StoreOptions {
    /// Fewer slots than the plan has room for, for tests and measurements.
    pub slots: Option<usize>,
    pub io: experts::ReadMode,
    pub threads: usize,
    pub prefetch: experts::Prefetch,
    /// The list of hot experts is kept in the user's cache directory.
    pub warm: bool,
}

impl Default for StoreOptions {
    fn default() -> Self {
        let experts::Options { io, threads, prefetch, .. } = experts::Options::new(0);
        Self { slots: None, io, threads, prefetch, warm: false }
    }
}

/// The parts of a model that are the same on every device.
pub(in crate::model) struct ModelParts {
    pub config: Config,
    pub net: Network,
    /// In the order of [`BUFFERS`].
    pub weights: [Arc<Slab>; 2],
    pub store: Option<ExpertStore>,
    pub plan: Plan,
    pub shape: ModelFootprint,
    pub head: Option<mtp::Head>,
    /// The CPU's threads, for the model or for who drafts for it.
    pub compute: CpuDevice,
    pub kv_bits: KvBits,
}

/// A loaded model.
pub struct Qwen {
    pub(in crate::model) parts: ModelParts,
    /// Behind a cell because states are started through a shared reference.
    pub(in crate::model) device_state: RefCell<DeviceState>,
}

/// A model that the kernels cannot compute, and why.
pub struct Rejected {
    pub qwen: Box<Qwen>,
    pub error: ModelError,
}

impl Qwen {
    /// Loads the checkpoint in `dir`: plans the memory, reads the trunk, and the experts if they fit. `progress` gets
    /// bytes read and bytes in all.
    pub fn load(
        dir: &Path,
        options: &LoadOptions,
        metrics: &Arc<Metrics>,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Self, ModelError> {
        let mut surveyed = CheckpointInfo::new(dir, options)?;
        let plan = surveyed.plan(&MachineLimits::here(options.gpu), &options.plan)?;
        let CheckpointInfo { config, checkpoint, experts, files, packed, shape, head, .. } = surveyed;
        for (gauge, bytes) in [
            (&metrics.memory_limit_bytes, plan.limit),
            (&metrics.memory_trunk, plan.trunk),
            (&metrics.memory_experts, plan.experts),
            (&metrics.memory_kv, plan.kv),
            (&metrics.memory_state, plan.state),
            (&metrics.memory_workspace, plan.workspace),
            (&metrics.memory_draft, plan.draft),
        ] {
            gauge.set(bytes as i64);
        }
        metrics.pack_damaged_records.set(0);
        metrics.gpu_lost.set(0);
        let threads = options.threads.unwrap_or_else(os::physical_cores);
        let mut trunk = TrunkLoader::read(&checkpoint, shape.trunk as usize, progress)?;
        let (mut net, _) = Network::load(&mut trunk, &config)?;
        let weights = trunk.finish()?;
        let store = if experts.layers.is_empty() {
            None
        } else {
            let StoreOptions { slots, io, threads, prefetch, warm } = options.store.clone();
            let slots = slots.unwrap_or(plan.slots).min(plan.slots);
            // Linux shifts what is read directly by what the disk's blocks ask for, which kernels of a GPU refuse; not so a pack.
            let shifts = options.gpu.is_some() && GPU_KIND == "cuda" && packed.is_none();
            let io = if shifts && io == experts::ReadMode::Auto { experts::ReadMode::Buffered } else { io };
            let min_slots = usize::try_from(shape.working_set()).unwrap_or(usize::MAX);
            let warm_start = if warm { hot_list(&checkpoint.index) } else { None };
            let options =
                experts::Options { slots, min_slots, io, threads, prefetch, warm_start, pack_records: packed };
            let store = ExpertStore::open(files, experts, options, metrics.clone())?;
            store.fill(progress)?;
            Some(store)
        };
        if let Some(store) = &store {
            net.lay_out(store);
        }
        let head = head.map(|head| head.load(&net, options, store.as_ref())).transpose()?;
        let compute = options.compute.clone().unwrap_or_else(|| CpuDevice::new(threads, options.math));
        let cpu = Cpu::new(compute.clone());
        let kv_bits = options.kv_bits;
        let parts = ModelParts { config, net, weights, store, plan, shape, head, compute, kv_bits };
        Self::on(parts, Box::new(cpu)).map_err(|refused| refused.1)
    }

    /// Shows a loaded model to a device.
    fn on(mut parts: ModelParts, run: Box<dyn Backend>) -> Result<Self, Box<(ModelParts, ModelError)>> {
        match DeviceState::new(&mut parts, run, None) {
            Ok(device_state) => {
                if let Some(store) = &parts.store {
                    store.verify_in_background(!device_state.limits.waits);
                }
                Ok(Self { parts, device_state: RefCell::new(device_state) })
            }
            Err(error) => Err(Box::new((parts, error))),
        }
    }

    /// Moves the model to a GPU; gives it back where the kernels cannot compute it. States do not move with it.
    pub fn move_to(self, gpu: Box<dyn Gpu>) -> Result<Self, Rejected> {
        let Self { parts, device_state } = self;
        Self::on(parts, Box::new(GpuBackend::new(gpu))).map_err(|refused| {
            let (parts, error) = *refused;
            Rejected { qwen: Box::new(Self { parts, device_state }), error }
        })
    }

    /// Has the CPU go on if the model's GPU was given up. Weights and experts are in the CPU's memory in any case, and keys and
    /// values of new sequences keep the form that snapshots have.
    pub(in crate::model) fn leave_lost_device(&mut self) -> Result<bool, ModelError> {
        let lost = self.device_state.get_mut();
        // A wait has errors reported: the next request meets none of this one's.
        let end = lost.run.sync_point();
        let _ = lost.run.wait_for(end);
        if !lost.run.lost() {
            return Ok(false);
        }
        let (kept, taps) = ((lost.heads, lost.limits.cache), lost.tapped.wanted());
        let ModelParts { store, head, compute, .. } = &self.parts;
        let stores = store.iter().chain(head.iter().filter_map(|head| head.store.as_ref()));
        stores.for_each(ExpertStore::device_lost);
        let cpu = Cpu::new(compute.clone());
        *self.device_state.get_mut() = DeviceState::new(&mut self.parts, Box::new(cpu), Some(kept))?;
        if !taps.layers.is_empty() {
            self.choose_taps(&taps)?;
        }
        Ok(true)
    }

    pub fn config(&self) -> &Config {
        &self.parts.config
    }

    pub fn plan(&self) -> &Plan {
        &self.parts.plan
    }

    pub fn shape(&self) -> &ModelFootprint {
        &self.parts.shape
    }

    /// The store of the routed experts; a dense model has none.
    pub fn store(&self) -> Option<&ExpertStore> {
        self.parts.store.as_ref()
    }

    /// From here on keeps keys and values of new sequences in so many bits; sequences that were started before can only go on
    /// when it is what it was again. The memory plan stays as it is.
    ///
    /// # Errors
    /// The device keeps none in so few.
    pub fn set_kv_bits(&mut self, bits: KvBits) -> Result<(), ModelError> {
        let device_state = self.device_state.get_mut();
        let heads = heads(
            &self.parts.config,
            device_state.limits.cache,
            bits,
            device_state.heads.context,
            device_state.buffers.rows,
        );
        device_state.run.accept(ModelPart::Attention(&heads))?;
        if heads != device_state.heads {
            let known = device_state.pools.iter().find(|(of, _)| *of == heads).map(|(_, pool)| pool.clone());
            let ModelParts { config, plan, .. } = &self.parts;
            let pool = known.map_or_else(|| PagePool::new(config, &heads, plan, &device_state.shared), Ok)?;
            let before = std::mem::replace(&mut device_state.pool, pool);
            if device_state.pools.iter().all(|(of, _)| *of != device_state.heads) {
                device_state.pools.push((device_state.heads, before));
            }
            device_state.arenas = Default::default();
            device_state.heads = heads;
            self.parts.net.set_cache(heads);
        }
        Ok(())
    }

    /// Bytes of keys and values of a token, all layers.
    pub fn kv_bytes(&self) -> u64 {
        QwenState::kv_bytes(&self.parts.config, self.device_state.borrow().heads.format)
    }

    /// Fails if one of `ids` is not a token, or if they and `len` others are more than the context.
    pub(in crate::model) fn admit(&self, len: usize, ids: &[u32]) -> Result<(), ModelError> {
        let (vocab, context) = (self.parts.config.vocab, self.parts.plan.context);
        if len + ids.len() > context {
            return Err(ModelError::ContextFull { context });
        }
        match ids.iter().find(|id| **id as usize >= vocab) {
            Some(&id) => Err(ModelError::TokenOutOfRange { id, vocab }),
            None => Ok(()),
        }
    }

    /// The name of the model's device.
    pub fn device(&self) -> String {
        self.device_state.borrow().run.name()
    }

    /// True if that is a GPU.
    pub fn is_on_gpu(&self) -> bool {
        self.device_state.borrow().limits.waits
    }

    /// [`Model::forward`](crate::model::Model::forward), showing the router's choice of every layer to `observe`; where every expert is in memory, a GPU
    /// tells nobody.
    pub fn forward_observed(
        &self,
        state: &mut QwenState,
        ids: &[u32],
        rows: Rows,
        observe: &mut RouterObserver<'_>,
    ) -> Result<Logits, ModelError> {
        self.pass(state, ids, rows, &mut PassHooks { on_route: Some(observe), ..PassHooks::default() })
    }

    /// As many passes as `ids` have chunks.
    pub(in crate::model) fn pass(
        &self,
        state: &mut QwenState,
        ids: &[u32],
        rows: Rows,
        hooks: &mut PassHooks<'_>,
    ) -> Result<Logits, ModelError> {
        self.admit(state.len, ids)?;
        state.tried = 0;
        let PassHooks { snapshot_at, snapshots: taken, keep_going, on_route: observe } = hooks;
        let mut marks = *snapshot_at;
        let go_on = keep_going.unwrap_or(&|| true);
        let device_state = &mut *self.device_state.borrow_mut();
        let mut logits = Logits { vocab: self.parts.config.vocab, data: Vec::new() };
        let (mut chunks, mut rest) = (ids.chunks(device_state.buffers.rows), ids.len());
        let done = chunks.try_for_each(|chunk| {
            let (tokens, start) = (chunk.len(), state.len);
            rest -= tokens;
            let wanted = match rows {
                Rows::All => 0..tokens,
                Rows::Last if rest == 0 => tokens - 1..tokens,
                _ => 0..0,
            };
            let observe = observe.as_mut().map(|observe| &mut **observe as &mut RouterObserver<'_>);
            let here: Vec<usize> = marks.iter().map(|mark| mark - start).take_while(|mark| *mark <= tokens).collect();
            marks = &marks[here.len()..];
            let mut fixed = vec![Vec::new(); here.len()];
            let mut mark = |run: &mut dyn Backend, index: usize, regions: [Region; 2]| {
                Ok(regions.into_iter().try_for_each(|region| append(run, region, &mut fixed[index]))?)
            };
            let phase = if tokens == 1 { PassKind::Decode } else { PassKind::Prefill };
            let (prompt, trial) = (ids.len() > 1, None);
            let batch = Batch { ids: chunk, logits: wanted, phase, prompt, trial, go_on };
            self.chunk(device_state, state, batch, (&here, &mut mark), observe, &mut logits.data)?;
            for (mark, fixed) in here.iter().zip(fixed) {
                taken.push(state.snapshot(start + mark, fixed, &mut *device_state.run)?);
            }
            state.len += tokens;
            Ok::<_, ModelError>(())
        });
        done.map(|()| logits)
    }

    /// One pass over `batch`, which stands behind `state`; the logits asked for are added to `out`.
    pub(in crate::model) fn chunk<'a>(
        &'a self,
        device_state: &'a mut DeviceState,
        state: &mut QwenState,
        batch: Batch<'a>,
        (marks, mark): (&[usize], &mut Marked<'_>),
        observe: Option<&'a mut RouterObserver<'a>>,
        out: &mut Vec<f32>,
    ) -> Result<(), ModelError> {
        let ModelParts { config, net, store, .. } = &self.parts;
        let DeviceState { run, shared, limits, slots, buffers: b, lists, tapped, .. } = device_state;
        let (run, limits) = (&mut **run, *limits);
        let Batch { ids, logits, phase, prompt, trial, go_on } = batch;
        let half = prompt && limits.half;
        let (experts, start, tokens) = (store.as_ref(), state.len, ids.len());
        state.make_room(tokens, run)?;
        // Whoever reads a page waits until this pass is over, and its errors are told.
        let _whole = shared.whole();
        let mut pass = Pass {
            config,
            net,
            run,
            limits,
            experts,
            slots,
            b,
            start,
            tokens,
            phase,
            half,
            trial,
            lists,
            go_on,
            observe,
            tapped,
        };
        pass.run.prompt(half.then_some(b.half));
        let done = pass.layers(ids, &mut state.layers, marks, mark);
        pass.run.prompt(None);
        let done = done.and_then(|()| pass.head(logits, out));
        // After an error, too, the device is done with this pass before slots are let go.
        let end = pass.run.sync_point();
        let waited = pass.run.wait_for(end);
        done?;
        Ok(waited?)
    }
}

/// The file that keeps the list of a checkpoint's hot experts between runs.
fn hot_list(index: &Index) -> Option<experts::WarmStart> {
    let identity = file_identity(&index.files).ok()?;
    let file = os::cache_dir()?.join("hot").join(format!("{identity}.json"));
    Some(experts::WarmStart { file, identity })
}
