//! The whole text model (spec section 2).
//!
//! ```text
//! h = embed[tokens]
//! for each layer:  h = h + mixer(rms(h))        mixer: gated delta net, or every fourth layer gated attention
//!                  h = h + ffn(rms(h))          ffn: mixture of experts, or dense
//! logits = rms(h) head^T
//! ```

use super::{
    Logits, Rows,
    attention::Attention,
    config::{Config, FfnShape},
    delta::DeltaNet,
    moe::{Mlp, Moe},
    room::Room,
    snapshot::Snapshot,
    speed::Kind,
    state::{self, LayerState, State},
};
use crate::{
    checkpoint::{Checkpoint, Trunk, identity::identity, index::Index, names, pack},
    device::{Compute, Math},
    error::ModelError,
    experts::{self, ExpertMap, Experts, LayerExperts, Sums},
    metrics::Metrics,
    ops::{self, Rotation, Routes, Weight},
    plan::{Limits, Plan, Shape, Wishes},
    platform::{MAX_BLOCK, os},
};
use candle_core::Tensor;
use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

/// How to load a model.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// Compute threads; the physical cores by default.
    pub threads: Option<usize>,
    pub math: Math,
    pub wishes: Wishes,
    /// Fewer experts a token than the model's k; more is an error.
    pub experts_per_token: Option<usize>,
    /// Where that says nothing: experts a token at most.
    pub experts_at_most: Option<usize>,
    /// How experts are read; `slots` is the plan's business.
    pub store: StoreOptions,
    /// The model goes to a GPU that recommends to be given so many bytes at most; the plan is made for it.
    pub gpu: Option<u64>,
}

/// What [`experts::Options`] has and the plan does not decide.
#[derive(Debug, Clone)]
pub struct StoreOptions {
    /// Fewer slots than the plan has room for, for tests and measurements.
    pub slots: Option<usize>,
    pub io: experts::Io,
    pub threads: usize,
    pub prefetch: experts::Prefetch,
    /// Whether the list of hot experts is kept in the user's cache directory.
    pub warm: bool,
    pub trace: Option<std::path::PathBuf>,
}

impl Default for StoreOptions {
    fn default() -> Self {
        let experts::Options { io, threads, prefetch, trace, .. } = experts::Options::new(0);
        Self { slots: None, io, threads, prefetch, trace, warm: false }
    }
}

pub(super) enum Mixer {
    Attention(Attention),
    Delta(DeltaNet),
}

// One a layer: its size does not matter.
#[allow(clippy::large_enum_variant)]
pub(super) enum Ffn {
    Dense(Mlp),
    Moe(Moe),
}

pub(super) struct Layer {
    pub(super) input_norm: Tensor,
    pub(super) mixer: Mixer,
    pub(super) post_norm: Tensor,
    pub(super) ffn: Ffn,
}

/// Everything but the routed experts.
pub(super) struct Net {
    pub(super) embed: Weight,
    pub(super) layers: Vec<Layer>,
    pub(super) norm: Tensor,
    /// `None`: the embedding is the head, too.
    pub(super) head: Option<Weight>,
}

/// A loaded model.
pub struct Qwen {
    pub(super) config: Config,
    pub(super) compute: Compute,
    pub(super) net: Net,
    pub(super) store: Option<Experts>,
    pub(super) plan: Plan,
    pub(super) shape: Shape,
}

impl Net {
    /// Claims every tensor of the checkpoint. Routed experts are only located.
    fn load(
        trunk: &mut Trunk<'_>,
        config: &Config,
        compute: &Compute,
    ) -> Result<(Self, Vec<LayerExperts>), ModelError> {
        let (from, hidden) = (trunk.from, config.hidden);
        let norm = |name: &str| -> Result<Tensor, ModelError> {
            Ok(Tensor::from_vec(from.norm(name, hidden)?, hidden, &compute.device)?)
        };
        let embed = trunk.weight(names::EMBED, config.vocab, hidden)?;
        let mut map = Vec::new();
        let mut layers = Vec::with_capacity(config.layers);
        for (index, full) in config.full.iter().enumerate() {
            let prefix = names::layer(index);
            layers.push(Layer {
                input_norm: norm(&format!("{prefix}input_layernorm.weight"))?,
                mixer: if *full {
                    Mixer::Attention(Attention::load(trunk, &prefix, config)?)
                } else {
                    Mixer::Delta(DeltaNet::load(trunk, &prefix, config, compute)?)
                },
                post_norm: norm(&format!("{prefix}post_attention_layernorm.weight"))?,
                ffn: match config.ffn {
                    FfnShape::Dense { intermediate } => {
                        Ffn::Dense(Mlp::load(trunk, &format!("{prefix}mlp."), hidden, intermediate)?)
                    }
                    FfnShape::Moe { .. } => Ffn::Moe(Moe::load(trunk, &prefix, config, index, &mut map)?),
                },
            });
        }
        let head = if config.tied { None } else { Some(trunk.weight(names::HEAD, config.vocab, hidden)?) };
        Ok((Self { embed, layers, norm: norm(names::NORM)?, head }, map))
    }
}

/// A checkpoint that has been looked at and not loaded: what there is, where it lies, what it will cost.
pub struct Surveyed {
    pub config: Config,
    pub checkpoint: Checkpoint,
    /// Where the routed experts lie in `files`: the checkpoint's, or its pack's.
    pub experts: ExpertMap,
    pub files: Vec<PathBuf>,
    /// The pack's directory, if there is one.
    pub pack: Option<PathBuf>,
    /// What its records have to be.
    pub sums: Option<Arc<Sums>>,
    pub shape: Shape,
    /// How gate, up and down of the first layer's experts (or, dense, of its feed-forward) are stored.
    pub feed_forward: Option<[Kind; 3]>,
}

impl Surveyed {
    /// As [`Surveyed::unpacked`]; the experts are those of the checkpoint's pack if it has one.
    pub fn new(dir: &Path, options: &Options) -> Result<Self, ModelError> {
        let mut found = Self::unpacked(dir, options)?;
        if let Some(pack) = pack::find(dir, &found.experts, &found.files) {
            tracing::info!(dir = %pack.dir.display(), "experts are read from their pack");
            found.shape.slot = pack.map.slot_bytes(MAX_BLOCK) as u64;
            (found.experts, found.files) = (pack.map, pack.files);
            (found.pack, found.sums) = (Some(pack.dir), Some(pack.sums));
        }
        Ok(found)
    }

    /// Reads the headers and a few small tensors; checks every name and shape.
    pub fn unpacked(dir: &Path, options: &Options) -> Result<Self, ModelError> {
        let mut config = Config::read(dir)?;
        config.use_fewer_experts(options.experts_per_token, options.experts_at_most)?;
        let checkpoint = Checkpoint::open(Index::open(dir)?, &config.quantization)?;
        let compute = Compute::cpu(1, options.math);
        let mut ignore = |_, _| ();
        let mut trunk = Trunk::measure(&checkpoint, &mut ignore);
        let (net, layers) = Net::load(&mut trunk, &config, &compute)?;
        let len = trunk.len() as u64;
        checkpoint.finish()?;
        let (experts, files) = (ExpertMap { layers }, checkpoint.index.files.clone());
        let gathered = if net.head.is_some() { table_bytes(&net.embed) } else { 0 };
        let shape = shape(&config, options, len, gathered, &experts);
        let feed_forward = net.layers.first().map(|layer| match &layer.ffn {
            Ffn::Dense(mlp) => mlp.kinds(),
            Ffn::Moe(moe) => moe.kinds(),
        });
        Ok(Self { config, checkpoint, experts, files, pack: None, sums: None, shape, feed_forward })
    }
}

fn table_bytes(table: &Weight) -> u64 {
    (table.codes.row_bytes(table.cols).iter().sum::<usize>() * table.rows) as u64
}

/// What the plan needs to know of a model.
fn shape(config: &Config, options: &Options, trunk: u64, gathered: u64, map: &ExpertMap) -> Shape {
    let (experts, experts_per_token) = match config.ffn {
        FfnShape::Dense { .. } => (0, 0),
        FfnShape::Moe { experts, k, .. } => (experts, k),
    };
    let room = match options.gpu {
        None => Room::on_cpu(config, options.math),
        Some(_) => Room::on_gpu(config),
    };
    Shape {
        trunk,
        gathered,
        expert: map.bytes() / (map.experts() as u64).max(1),
        slot: map.slot_bytes(MAX_BLOCK) as u64,
        layers: map.layers.len(),
        experts,
        experts_per_token,
        kv_per_token: room.kv_per_token,
        state: State::fixed_bytes(config),
        workspace_per_row: room.per_row,
        workspace_fixed: room.fixed,
        context: config.context,
    }
}

impl Qwen {
    /// Loads the checkpoint in `dir`: plans the memory, reads the trunk, and the experts if they fit. `progress` gets
    /// bytes read and bytes in all.
    pub fn load(
        dir: &Path,
        options: &Options,
        metrics: &Arc<Metrics>,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Self, ModelError> {
        let Surveyed { config, checkpoint, experts, files, sums, shape, .. } = Surveyed::new(dir, options)?;
        let plan = Plan::new(&shape, &Limits::here(options.gpu), &options.wishes)?;
        for (gauge, bytes) in [
            (&metrics.memory_limit_bytes, plan.limit),
            (&metrics.memory_trunk, plan.trunk),
            (&metrics.memory_experts, plan.experts),
            (&metrics.memory_kv, plan.kv),
            (&metrics.memory_state, plan.state),
            (&metrics.memory_workspace, plan.workspace),
        ] {
            gauge.set(bytes as i64);
        }
        let threads = options.threads.unwrap_or_else(os::physical_cores);
        let compute = Compute::cpu(threads, options.math);
        let mut trunk = Trunk::read(&checkpoint, shape.trunk as usize, progress)?;
        let (net, _) = Net::load(&mut trunk, &config, &compute)?;
        let store = if experts.layers.is_empty() {
            None
        } else {
            let StoreOptions { slots, io, threads, prefetch, warm, trace } = options.store.clone();
            let slots = slots.unwrap_or(plan.slots).min(plan.slots);
            let warm = if warm { hot_list(&checkpoint.index) } else { None };
            let options = experts::Options { slots, io, threads, prefetch, warm, trace, sums };
            let store = Experts::open(files, experts, options, metrics.clone())?;
            store.fill(progress)?;
            Some(store)
        };
        Ok(Self { config, compute, net, store, plan, shape })
    }

    pub fn config(&self) -> &Config {
        &self.config
    }

    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// Where the routed experts come from; a dense model has none.
    pub fn store(&self) -> Option<&Experts> {
        self.store.as_ref()
    }

    /// Whether `ids` are tokens, and may follow `len` others.
    pub(super) fn admit(&self, len: usize, ids: &[u32]) -> Result<(), ModelError> {
        let (vocab, context) = (self.config.vocab, self.plan.context);
        if len + ids.len() > context {
            return Err(ModelError::ContextFull { context });
        }
        match ids.iter().find(|id| **id as usize >= vocab) {
            Some(&id) => Err(ModelError::TokenOutOfRange { id, vocab }),
            None => Ok(()),
        }
    }

    /// [`Model::forward`], showing the router's choice of every layer to `observe`.
    pub fn forward_observed(
        &self,
        state: &mut State,
        ids: &[u32],
        rows: Rows,
        observe: &mut dyn FnMut(usize, &Routes),
    ) -> Result<Logits, ModelError> {
        self.pass(state, ids, rows, (&[], &mut Vec::new()), observe)
    }

    pub(super) fn pass(
        &self,
        state: &mut State,
        ids: &[u32],
        rows: Rows,
        (marks, taken): (&[usize], &mut Vec<Snapshot>),
        observe: &mut dyn FnMut(usize, &Routes),
    ) -> Result<Logits, ModelError> {
        self.admit(state.len, ids)?;
        let Self { config, compute, net, .. } = self;
        if ids.is_empty() {
            return Ok(Logits { vocab: config.vocab, data: Vec::new() });
        }
        let marks: Vec<usize> = marks.iter().map(|mark| mark - state.len).collect();
        let room = if marks.is_empty() { 0 } else { State::fixed_bytes(config) as usize };
        let mut fixed: Vec<Vec<u8>> = marks.iter().map(|_| Vec::with_capacity(room)).collect();
        let rotation = Rotation::new(state.len, ids.len(), config.attention.rotated, config.attention.theta);
        let mut h = ops::embed(&net.embed, ids, &compute.device)?;
        for (index, (layer, memory)) in net.layers.iter().zip(&state.layers).enumerate() {
            let x = ops::rms_norm(compute, &h, &layer.input_norm, config.eps)?;
            let y = match (&layer.mixer, memory) {
                (Mixer::Attention(attention), LayerState::Attention { keys, values }) => {
                    attention.forward(compute, &x, keys, values, state.len, &rotation)?
                }
                (Mixer::Delta(delta), LayerState::Delta { conv, heads }) => {
                    let mut mark = |index: usize| state::append_fixed(conv, heads, &mut fixed[index]);
                    delta.forward(compute, &x, (conv, heads), &marks, &mut mark)?
                }
                _ => return Err(ModelError::Config("the state belongs to another model".into())),
            };
            h = (h + y)?;
            let x = ops::rms_norm(compute, &h, &layer.post_norm, config.eps)?;
            let y = match (&layer.ffn, &self.store) {
                (Ffn::Moe(moe), Some(store)) => {
                    let next = net.layers.get(index + 1).and_then(|layer| layer.ffn.moe());
                    let (y, routes) = moe.forward(compute, store, &x, next)?;
                    observe(index, &routes);
                    y
                }
                (Ffn::Dense(mlp), _) => mlp.forward(compute, &x)?,
                (Ffn::Moe(_), None) => return Err(ModelError::Config("the experts are not loaded".into())),
            };
            h = (h + y)?;
        }
        for (mark, fixed) in marks.iter().zip(fixed) {
            taken.push(state.snapshot(state.len + mark, fixed)?);
        }
        state.len += ids.len();
        let h = match rows {
            Rows::None => return Ok(Logits { vocab: config.vocab, data: Vec::new() }),
            Rows::Last => h.narrow(0, ids.len() - 1, 1)?,
            Rows::All => h,
        };
        let h = ops::rms_norm(compute, &h, &net.norm, config.eps)?;
        let logits = ops::linear(compute, &h, &[net.head.as_ref().unwrap_or(&net.embed)])?;
        Ok(Logits { vocab: config.vocab, data: logits.flatten_all()?.to_vec1()? })
    }
}

impl Ffn {
    fn moe(&self) -> Option<&Moe> {
        match self {
            Ffn::Moe(moe) => Some(moe),
            Ffn::Dense(_) => None,
        }
    }
}

/// Where the list of a checkpoint's hot experts is kept between runs.
fn hot_list(index: &Index) -> Option<experts::Warm> {
    let identity = identity(&index.files).ok()?;
    let file = os::cache_dir()?.join("hot").join(format!("{identity}.json"));
    Some(experts::Warm { file, identity })
}
