//! A checkpoint before it is loaded: its tensors, and the memory they will take.

use crate::model::{
    config::{Config, FfnShape},
    drafts::mtp,
    forward::buffers::Buffers,
    load::LoadOptions,
    speed::ProjectionShape,
    state::rollback,
    state::sequence::{QwenState, heads},
    weights::{Ffn, Network},
};
use crate::{
    checkpoint::{Checkpoint, TrunkLoader, index::Index, pack},
    error::ModelError,
    experts::{ExpertMap, PackRecords},
    ops::{BackendLimits, Cpu, KvFormat, attention::RECENT, gpu_limits},
    plan::{MachineLimits, ModelFootprint, Plan, PlanOptions, Strategy},
    platform::MAX_BLOCK,
};
use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

/// A checkpoint that has been examined and not loaded: its tensors, their places in files, the memory they will take.
pub struct CheckpointInfo {
    pub config: Config,
    pub checkpoint: Checkpoint,
    /// The routed experts' places in `files`: the checkpoint's, or its pack's.
    pub experts: ExpertMap,
    pub files: Vec<PathBuf>,
    /// The pack's directory, if there is one.
    pub pack: Option<PathBuf>,
    /// Its records, and what may be read instead.
    pub packed: Option<Arc<PackRecords>>,
    pub shape: ModelFootprint,
    /// The encodings of gate, up and down of the first layer's experts (or, dense, of its feed-forward).
    pub feed_forward: Option<[ProjectionShape; 3]>,
    /// A head to draft with.
    pub head: Option<mtp::Survey>,
    cache: KvFormat,
}

impl CheckpointInfo {
    /// As [`CheckpointInfo::unpacked`]; the experts are those of the checkpoint's pack if it has one.
    pub fn new(dir: &Path, options: &LoadOptions) -> Result<Self, ModelError> {
        let mut found = Self::unpacked(dir, options)?;
        if let Some(pack) = pack::find(dir, &found.experts, &found.files) {
            tracing::info!(dir = %pack.dir.display(), "experts are read from their pack");
            found.shape.slot = pack.map.slot_bytes(MAX_BLOCK) as u64;
            (found.experts, found.files) = (pack.map, pack.files);
            (found.pack, found.packed) = (Some(pack.dir), Some(pack.records));
        }
        Ok(found)
    }

    /// Reads the headers and a few small tensors; checks every name and shape.
    pub fn unpacked(dir: &Path, options: &LoadOptions) -> Result<Self, ModelError> {
        let mut config = Config::read(dir)?;
        config.use_fewer_experts(options.experts_per_token, options.experts_at_most)?;
        let checkpoint = Checkpoint::open(Index::open(dir)?, &config.quantization)?;
        let mut ignore = |_, _| ();
        let mut trunk = TrunkLoader::measure(&checkpoint, &mut ignore);
        let (net, layers) = Network::load(&mut trunk, &config)?;
        let len = trunk.len() as u64;
        checkpoint.finish()?;
        let (experts, files) = (ExpertMap { layers }, checkpoint.index.files.clone());
        let gathered = if net.head.is_some() { net.embed.bytes() as u64 } else { 0 };
        let trunk = [len, gathered, net.head().bytes() as u64];
        let shape = shape(&config, options, trunk, &experts);
        let head = mtp::survey(dir, &config, &checkpoint.index, options)?;
        let cache = device_limits(options).cache;
        let feed_forward = net.layers.first().map(|layer| match &layer.ffn {
            Ffn::Dense(dense) => [&dense.gate_up[0], &dense.gate_up[1], &dense.down].map(ProjectionShape::of),
            Ffn::Moe(moe) => moe.stacks.each_ref().map(ProjectionShape::of_stack),
        });
        Ok(Self { config, checkpoint, experts, files, pack: None, packed: None, shape, feed_forward, head, cache })
    }

    /// The memory plan. A head's experts are all in memory if the model's are; if there is no room for the head, it goes.
    pub fn plan(&mut self, limits: &MachineLimits, options: &PlanOptions) -> Result<Plan, ModelError> {
        let Some(head) = &mut self.head else { return Plan::new(&self.shape, limits, options) };
        self.shape.draft.fixed = head.bytes(self.cache);
        let mut plan = Plan::new(&self.shape, limits, options);
        if !plan.as_ref().is_ok_and(|plan| plan.strategy == Strategy::Resident) {
            head.stream();
            self.shape.draft.fixed = head.bytes(self.cache);
            plan = Plan::new(&self.shape, limits, options);
        }
        if let Err(error) = &plan {
            tracing::warn!(%error, "there is no room for the MTP head: drafts are looked up");
            (self.head, self.shape.draft.fixed) = (None, 0);
            plan = Plan::new(&self.shape, limits, options);
        }
        plan
    }
}

impl Config {
    /// Bytes that a row of a pass takes on a CPU beside the buffers that every device has, and what any pass does.
    pub fn scratch(&self) -> [u64; 2] {
        let (heads, delta) = (self.attention, self.delta);
        let (places, inner, scores) = match self.ffn {
            FfnShape::Dense { intermediate } => (1, intermediate, 0),
            FfnShape::Moe { experts, k, intermediate, shared, .. } => (k + 1, intermediate.max(shared), experts),
        };
        let widest = self.hidden.max(heads.heads * heads.dim).max(delta.values());
        let [row, fixed] = Cpu::scratch(self.hidden, widest, places, inner);
        [row + 4 * scores, fixed].map(|bytes| bytes as u64)
    }
}

/// The sizes of a model, for the plan.
fn shape(config: &Config, options: &LoadOptions, [trunk, gathered, head]: [u64; 3], map: &ExpertMap) -> ModelFootprint {
    let (experts, experts_per_token) = match config.ffn {
        FfnShape::Dense { .. } => (0, 0),
        FfnShape::Moe { experts, k, .. } => (experts, k),
    };
    let limits = device_limits(options);
    let (mut workspace_per_row, mut workspace_fixed) = Buffers::cost(config, &limits);
    if options.gpu.is_none() {
        let [row, fixed] = config.scratch();
        (workspace_per_row, workspace_fixed) = (workspace_per_row + row, workspace_fixed + fixed);
    }
    // A snapshot has the recent positions, the ring also those of a chunk, and is a whole number of blocks.
    let heads = heads(config, limits.cache, options.kv_bits, 0, 0);
    let recent = QwenState::recent_bytes(config, &heads);
    workspace_per_row += recent / (2 * RECENT as u64);
    workspace_fixed += recent / 2;
    ModelFootprint {
        trunk,
        gathered,
        head,
        expert: map.bytes() / (map.experts() as u64).max(1),
        slot: map.slot_bytes(MAX_BLOCK) as u64,
        layers: map.layers.len(),
        experts,
        experts_per_token,
        kv_per_token: QwenState::kv_bytes(config, heads.format),
        state: QwenState::fixed_bytes(config) + recent,
        workspace_per_row,
        draft: options.draft,
        workspace_fixed: workspace_fixed + if options.verify { rollback::cost(config) } else { 0 },
        context: config.context,
    }
}

pub(super) fn device_limits(options: &LoadOptions) -> BackendLimits {
    match options.gpu {
        None => Cpu::limits(options.math),
        Some(bytes) => gpu_limits(Some(bytes)),
    }
}
