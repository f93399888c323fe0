//! Loading a model: from a directory to weights, experts, a memory plan, and a device.

use super::{
    HiddenStates, Qwen,
    device_state::DeviceState,
    inspect::CheckpointInfo,
    model_parts::ModelParts,
    ngram_table::NgramTable,
    options::{LoadOptions, StoreOptions},
    vision::Vision,
    weights::Network,
};
use crate::{
    checkpoint::{TrunkLoader, identity::file_identity, index::Index},
    error::ModelError,
    plan::{MachineLimits, ModelFootprint, Plan},
};
use moestro_base::{metrics::Metrics, platform::os};
use moestro_compute::{
    device::{CommandQueue, CpuDevice, Driver, GPU_KIND},
    experts::{self, ExpertStore, PackRecords},
    ops::{Backend, Cpu, GpuBackend},
};
use std::{path::Path, sync::Arc};

/// A model that the GPU cannot compute, and the reason.
pub struct Rejected {
    pub qwen: Box<Qwen>,
    pub error: ModelError,
}

impl Qwen {
    /// Loads the checkpoint in `dir` onto the CPU: plans the memory, then reads the trunk and as many experts as fit.
    /// `progress` receives bytes read and total bytes.
    pub fn load(
        dir: &Path,
        options: &LoadOptions,
        metrics: &Arc<Metrics>,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Self, ModelError> {
        let mut info = CheckpointInfo::new(dir, options)?;
        let machine = MachineLimits::here(options.gpu);
        let plan = info.plan(&machine, &options.plan)?;
        let CheckpointInfo { config, checkpoint, experts, files, packed, packed_rows, footprint, vision, head, .. } =
            info;
        for (gauge, bytes) in [
            (&metrics.memory_limit_bytes, plan.limit),
            (&metrics.memory_process, plan.process),
            (&metrics.memory_trunk, plan.trunk),
            (&metrics.memory_vision, plan.vision),
            (&metrics.memory_experts, plan.experts),
            (&metrics.memory_kv, plan.kv),
            (&metrics.memory_state, plan.state),
            (&metrics.memory_workspace, plan.workspace),
            (&metrics.memory_draft, plan.draft),
            (&metrics.memory_requests, plan.requests),
        ] {
            gauge.set(bytes as i64);
        }
        metrics.pack_damaged_records.set(0);
        metrics.gpu_lost.set(0);
        let mut trunk = TrunkLoader::read(&checkpoint, footprint.trunk as usize)?.with_progress(progress);
        let (mut net, _) = Network::load(&mut trunk, &config)?;
        let weights = trunk.finish()?;
        let mut store = None;
        if !experts.layers.is_empty() {
            let expert_options = expert_options(options, &plan, &footprint, &machine, &checkpoint.index, packed);
            let opened = ExpertStore::open(files, experts, expert_options, metrics.clone())?;
            opened.fill(progress)?;
            net.set_expert_layout(&opened);
            store = Some(opened);
        }
        let layouts = net.layers.iter().filter_map(|layer| layer.ngram.as_ref()).map(|ngram| ngram.layout.clone());
        let tables = layouts
            .zip(packed_rows)
            .map(|(layout, packed)| NgramTable::open(layout, packed, metrics))
            .collect::<Result<_, ModelError>>()?;
        let mtp = head.map(|head| head.load(&net, options, store.as_ref())).transpose()?;
        let threads = options.threads.unwrap_or_else(os::physical_cores);
        let compute = options.compute.clone().unwrap_or_else(|| CpuDevice::new(threads, options.math));
        let cpu = Cpu::new(compute.clone());
        let kv_bits = options.kv_bits;
        let gpu_awake = options.gpu_awake.unwrap_or(GPU_KIND == "metal");
        let vision = vision.map(|tower| {
            let tower = tower.on_gpu(options.vision_on_gpu()).on_threads(compute.threads.clone());
            Vision::new(tower, metrics.clone())
        });
        let parts = ModelParts {
            config,
            net,
            weights,
            store,
            tables,
            plan,
            footprint,
            mtp,
            compute,
            kv_bits,
            gpu_awake,
            vision,
        };
        Self::on(parts, Box::new(cpu)).map_err(|rejected| rejected.1)
    }

    fn on(parts: ModelParts, backend: Box<dyn Backend>) -> Result<Self, Box<(ModelParts, ModelError)>> {
        match DeviceState::new(&parts, backend, None) {
            Ok(device) => {
                if let Some(store) = &parts.store {
                    store.verify_in_background(!device.limits.is_async);
                }
                Ok(Self { parts, device })
            }
            Err(error) => Err(Box::new((parts, error))),
        }
    }

    /// Moves the model to a GPU, or returns the model unchanged if the GPU cannot compute it. Sequences do not move
    /// with the model.
    pub fn move_to(self, gpu: CommandQueue<impl Driver>) -> Result<Self, Rejected> {
        let Self { parts, device } = self;
        Self::on(parts, Box::new(GpuBackend::new(gpu))).map_err(|rejected| {
            let (parts, error) = *rejected;
            Rejected { qwen: Box::new(Self { parts, device }), error }
        })
    }

    /// If the model's GPU was lost, moves the model to the CPU and returns true. Weights and experts are always in the
    /// CPU's memory. New sequences keep the KV format of existing snapshots.
    pub(super) fn leave_lost_device(&mut self) -> Result<bool, ModelError> {
        let lost = &mut self.device;
        // Waiting returns the pending errors, so that the next request does not get the errors of this request.
        let end = lost.backend.sync_point();
        let _ = lost.backend.wait_for(end);
        if !lost.backend.is_lost() {
            return Ok(false);
        }
        let kv = (lost.kv_shape, lost.limits);
        let taps = lost.taps.taps();
        let ModelParts { store, mtp, compute, .. } = &self.parts;
        let stores = store.iter().chain(mtp.iter().filter_map(|head| head.store.as_ref()));
        stores.for_each(ExpertStore::device_lost);
        let cpu = Cpu::new(compute.clone());
        self.device = DeviceState::new(&self.parts, Box::new(cpu), Some(kv))?;
        if !taps.layers.is_empty() {
            self.set_taps(&taps)?;
        }
        Ok(true)
    }
}

/// The options of the expert store. The plan limits the number of slots.
fn expert_options(
    options: &LoadOptions,
    plan: &Plan,
    footprint: &ModelFootprint,
    machine: &MachineLimits,
    index: &Index,
    pack_records: Option<Arc<PackRecords>>,
) -> experts::Options {
    let StoreOptions { slots, io, threads, prefetch, warm, segment_bytes } = options.store.clone();
    let slots = slots.unwrap_or(plan.slots).min(plan.slots);
    // Direct reads on Linux shift experts within their slots unless they come from a pack, but CUDA kernels need
    // aligned experts.
    let shifts = options.gpu.is_some() && GPU_KIND == "cuda" && pack_records.is_none();
    let prefers_buffered = shifts || plan.page_cache_holds_experts(footprint, machine);
    let io = if io == experts::ReadMode::Auto && prefers_buffered { experts::ReadMode::Buffered } else { io };
    let min_slots = usize::try_from(footprint.working_set()).unwrap_or(usize::MAX);
    let warm_start = if warm { hot_list(index) } else { None };
    experts::Options { slots, min_slots, io, threads, prefetch, warm_start, pack_records, segment_bytes }
}

/// The file that keeps a checkpoint's list of hot experts between runs.
fn hot_list(index: &Index) -> Option<experts::WarmStart> {
    let identity = file_identity(&index.files).ok()?;
    let file = os::cache_dir()?.join("hot").join(format!("{identity}.json"));
    Some(experts::WarmStart { file, identity })
}
