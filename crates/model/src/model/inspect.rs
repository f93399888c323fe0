//! Inspects a checkpoint before loading: its tensors, the file offsets of its experts, and the memory that the model
//! needs.

use super::{
    config::{Config, FfnShape},
    drafts::mtp::{self, MtpInfo},
    forward::buffers::Buffers,
    ngram_table,
    options::LoadOptions,
    speed::ProjectionShape,
    state::{
        rollback::replay_bytes,
        sequence::{
            MAX_RING_BLOCK, NEXT_BYTES, delta_bytes, kv_bytes_per_token, kv_shape, recent_snapshot_bytes, ring_bytes,
        },
    },
    vision::{self, VisionTower},
    weights::{Ffn, Network, resolve_layout},
};
use crate::{
    checkpoint::{
        Checkpoint, RowTable, TrunkLoader,
        index::Index,
        pack::{self, PackedRows},
    },
    error::ModelError,
    plan::{MachineLimits, ModelFootprint, Plan, PlanOptions, Strategy},
};
use moestro_base::platform::MAX_BLOCK;
use moestro_compute::{
    experts::{ExpertMap, PackRecords},
    ops::{BackendLimits, Cpu, KvFormat, attention::RECENT, block_attention, gpu_limits},
};
use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
    sync::Arc,
};

/// A checkpoint whose headers were read and checked.
pub struct CheckpointInfo {
    pub config: Config,
    pub checkpoint: Checkpoint,
    /// Offsets of the routed experts in `files`.
    pub experts: ExpertMap,
    /// The files of the checkpoint, or of its pack.
    pub files: Vec<PathBuf>,
    /// The pack's directory.
    pub pack: Option<PathBuf>,
    /// The records of the pack, and the other files that contain the same experts.
    pub packed: Option<Arc<PackRecords>>,
    /// The n-gram tables.
    pub tables: Vec<RowTable>,
    /// The rows of each n-gram table in the pack.
    pub packed_rows: Vec<Option<PackedRows>>,
    pub footprint: ModelFootprint,
    /// Encodings of gate, up and down in the first layer: those of its experts, or of its dense feed-forward.
    pub feed_forward: Option<[ProjectionShape; 3]>,
    /// The vision tower, if the checkpoint has one and the options enable images.
    pub vision: Option<VisionTower>,
    /// The MTP head, if the options ask for one.
    pub head: Option<MtpInfo>,
    kv_format: KvFormat,
}

impl CheckpointInfo {
    /// [`CheckpointInfo::unpacked`], but with the experts of the checkpoint's pack if the checkpoint has one.
    pub fn new(dir: &Path, options: &LoadOptions) -> Result<Self, ModelError> {
        let mut found = Self::unpacked(dir, options)?;
        if !found.tables.is_empty() {
            let dirs = pack::candidates(dir, &found.files)
                .inspect_err(|error| tracing::warn!(%error, "cannot search for packed rows of the n-gram table"));
            found.packed_rows = pack::find_rows(&dirs.unwrap_or_default(), &found.tables, &found.files);
        }
        if let Some(pack) = pack::find(dir, &found.experts, &found.files) {
            tracing::info!(dir = %pack.dir.display(), "experts are read from their pack");
            found.footprint.slot = pack.map.slot_bytes(MAX_BLOCK) as u64;
            found.experts = pack.map;
            found.files = pack.files;
            (found.pack, found.packed) = (Some(pack.dir), Some(pack.records));
        }
        Ok(found)
    }

    /// Reads the headers and a few small tensors, and checks every name and shape.
    pub fn unpacked(dir: &Path, options: &LoadOptions) -> Result<Self, ModelError> {
        let mut config = Config::read(dir)?;
        config.use_fewer_experts(options.experts_per_token, options.max_experts_per_token)?;
        let mut checkpoint = Checkpoint::open(Index::open(dir)?, &config.quantization)?;
        resolve_layout(&mut checkpoint, &mut config)?;
        let mut trunk = TrunkLoader::measure(&checkpoint);
        let (net, layers) = Network::load(&mut trunk, &config)?;
        let len = trunk.len() as u64;
        checkpoint.finish()?;
        checkpoint.index.report_missing_files();
        let experts = ExpertMap { layers };
        let mut files = checkpoint.index.files.clone();
        let tables: Vec<RowTable> =
            net.layers.iter().filter_map(|layer| Some(RowTable::clone(&layer.ngram.as_ref()?.layout.table))).collect();
        let others = tables.iter().flat_map(|table| &table.files).filter(|file| !files.contains(file));
        files.extend(others.cloned().collect::<BTreeSet<_>>());
        let gathered = if net.head.is_some() { net.embed.bytes() as u64 } else { 0 };
        let trunk = [len, gathered, net.head().bytes() as u64];
        let footprint = footprint(&config, options, trunk, &experts);
        let head = mtp::inspect(dir, &config, &checkpoint.index, options)?;
        let is_disabled = options.vision.disabled;
        let vision = if is_disabled { None } else { vision::open(dir, &checkpoint.index, config.hidden) };
        let vision = vision.map(|tower| tower.with_max_tokens(options.image_tokens()));
        let footprint = ModelFootprint {
            vision: vision.as_ref().map_or(0, |tower| tower.bytes(options.vision_on_gpu())),
            ..footprint
        };
        let kv_format = device_limits(options).kv_format;
        let feed_forward = net.layers.first().map(|layer| match &layer.ffn {
            Ffn::Dense(dense) => [&dense.gate_up[0], &dense.gate_up[1], &dense.down].map(ProjectionShape::of),
            Ffn::Moe(moe) => moe.stacks.each_ref().map(ProjectionShape::of_stack),
        });
        Ok(Self {
            config,
            checkpoint,
            experts,
            files,
            pack: None,
            packed: None,
            packed_rows: tables.iter().map(|_| None).collect(),
            tables,
            footprint,
            feed_forward,
            vision,
            head,
            kv_format,
        })
    }

    /// Plans the memory. If the model's experts are resident, the experts of the MTP head are resident too. Leaves out
    /// the MTP head or the vision tower if the memory is too small for it.
    pub fn plan(&mut self, limits: &MachineLimits, options: &PlanOptions) -> Result<Plan, ModelError> {
        let plan = self.plan_with_head(limits, options);
        match plan {
            Err(error) if self.vision.is_some() => {
                let vision = self.vision.take();
                let bytes = std::mem::take(&mut self.footprint.vision);
                let without = self.plan_with_head(limits, options);
                match without {
                    Ok(plan) => {
                        tracing::warn!(%error, "not enough memory for images; the model reads text only");
                        Ok(plan)
                    }
                    Err(_) => {
                        self.vision = vision;
                        self.footprint.vision = bytes;
                        Err(error)
                    }
                }
            }
            plan => plan,
        }
    }

    fn plan_with_head(&mut self, limits: &MachineLimits, options: &PlanOptions) -> Result<Plan, ModelError> {
        let Some(head) = &mut self.head else { return Plan::new(&self.footprint, limits, options) };
        self.footprint.draft.fixed = head.bytes(self.kv_format);
        let mut plan = Plan::new(&self.footprint, limits, options);
        if !plan.as_ref().is_ok_and(|plan| plan.strategy == Strategy::Resident) {
            head.stream();
            self.footprint.draft.fixed = head.bytes(self.kv_format);
            plan = Plan::new(&self.footprint, limits, options);
        }
        if let Err(error) = &plan {
            tracing::warn!(%error, "not enough memory for the MTP head; falling back to prompt-lookup drafts");
            self.head = None;
            self.footprint.draft.fixed = 0;
            plan = Plan::new(&self.footprint, limits, options);
        }
        plan
    }
}

/// Number of bytes that a CPU needs in addition to [`Buffers`]: for each row of a pass, and a fixed part.
pub fn cpu_scratch(config: &Config) -> [u64; 2] {
    let attention = config.attention;
    let delta = config.delta;
    let (assignments, inner, scores) = match config.ffn {
        FfnShape::Dense { intermediate } => (1, intermediate, 0),
        FfnShape::Moe { experts, k, intermediate, shared, .. } => (k + 1, intermediate.max(shared), experts),
    };
    let ngram = config.ngrams.iter().map(|ngram| ngram.width).max().unwrap_or_default();
    let widest = config.residual_width().max(attention.heads * attention.dim).max(delta.values()).max(ngram);
    let [row, fixed] = Cpu::scratch(config.hidden, widest, assignments, inner);
    let selection = if config.indexer.is_some() { block_attention::CPU_SCRATCH } else { 0 };
    [row + 4 * scores, fixed + selection].map(|bytes| bytes as u64)
}

/// The sizes of a model, for the memory plan.
fn footprint(
    config: &Config,
    options: &LoadOptions,
    [trunk, gathered, head]: [u64; 3],
    map: &ExpertMap,
) -> ModelFootprint {
    let (experts, experts_per_token) = match config.ffn {
        FfnShape::Dense { .. } => (0, 0),
        FfnShape::Moe { experts, k, .. } => (experts, k),
    };
    let limits = device_limits(options);
    let (mut workspace_per_row, mut workspace_fixed) = Buffers::cost(config, &limits);
    if options.gpu.is_none() {
        let [row, fixed] = cpu_scratch(config);
        workspace_per_row += row;
        workspace_fixed += fixed;
    }
    // With a quantized KV cache, a snapshot also has the recent positions in the ring's format. The ring also holds the
    // current chunk, so it adds bytes for each row.
    let kv_shape = kv_shape(config, &limits, options.kv_bits, 0, 0);
    let recent = recent_snapshot_bytes(config, &kv_shape);
    workspace_per_row += recent / (2 * RECENT as u64);
    workspace_fixed += recent / 2;
    workspace_per_row += config.ngrams.iter().map(ngram_table::bytes_per_token).sum::<u64>();
    let [rings, kept] = ring_bytes(config, limits.max_mixer_rows.min(MAX_RING_BLOCK));
    let rings = rings.saturating_sub(kept);
    workspace_fixed += rings + (config.ngrams.len() * ngram_table::CACHE_BYTES) as u64;
    let state = delta_bytes(config) + recent + kept + NEXT_BYTES as u64;
    let replay = if options.verify { replay_bytes(config) } else { 0 };
    ModelFootprint {
        trunk,
        gathered,
        head,
        expert: map.bytes() / (map.experts() as u64).max(1),
        slot: map.slot_bytes(MAX_BLOCK) as u64,
        layers: map.layers.len(),
        experts,
        experts_per_token,
        kv_per_token: kv_bytes_per_token(config, kv_shape.format),
        state,
        sequence: state + recent / 2 + rings + replay,
        sequence_per_row: recent / (2 * RECENT as u64),
        workspace_per_row,
        draft: options.draft,
        vision: 0,
        workspace_fixed: workspace_fixed + replay,
        context: config.context,
    }
}

fn device_limits(options: &LoadOptions) -> BackendLimits {
    match options.gpu {
        None => Cpu::limits(options.math),
        Some(bytes) => gpu_limits(Some(bytes)),
    }
}
