//! Loads the weights of the network from the tensors of a checkpoint. The weights do not change after loading.

use crate::{
    checkpoint::{self, Checkpoint, MatrixLayout, TrunkLoader, names, norm_encoding},
    error::ModelError,
    model::{
        config::{Config, FfnShape},
        ngram_hash::NgramShape,
        ngram_table::NgramLayout,
    },
};
use moestro_compute::{
    device::Region,
    experts::{ExpertStore, LayerExperts},
    ops::{
        Decay, DeltaShape, ExpertStack, IndexerShape, InjectWeights, MoeWeights, SharedExpert, StreamMix, StreamShape,
        Weight, WeightFormat,
    },
};

/// All weights of a model except the routed experts.
pub struct Network {
    pub embed: Weight,
    pub layers: Vec<LayerWeights>,
    /// Reads the residual for the output head.
    pub before_head: Residual,
    /// The output head. `None` if the embedding is also the head.
    pub head: Option<Weight>,
}

pub struct LayerWeights {
    /// The n-gram table whose rows are added to the residual streams before the layer.
    pub ngram: Option<NgramWeights>,
    /// Reads the residual for the mixer, and adds the mixer's result to it.
    pub before_mixer: Residual,
    pub mixer: Mixer,
    /// Reads the residual for the feed-forward, and adds the feed-forward's result to it.
    pub before_ffn: Residual,
    pub ffn: Ffn,
}

/// The weights with which a layer part reads the residual, and with which the part's result is added to it.
pub enum Residual {
    /// One stream: `x = rms_norm(h)` with this weight, `[hidden]`; `h += y`.
    Norm(Region),
    /// Several streams: the part reads a mixture of all streams and adds a multiple of `y` to each stream.
    Streams(Box<StreamMix>),
}

/// The weights with which the rows of an n-gram table are added to the residual streams.
pub struct NgramWeights {
    pub layout: NgramLayout,
    /// The projections to the keys of all streams, and to the value.
    pub proj: [Weight; 2],
    pub inject: InjectWeights,
}

/// The layer part in which tokens interact: attention or a delta net.
pub enum Mixer {
    Attention(AttentionWeights),
    DeltaNet(DeltaNetWeights),
}

/// Gated full attention: one layer in four.
pub struct AttentionWeights {
    /// Projections to `(query, gate) of each head`, keys and values.
    pub qkv: [Weight; 3],
    /// Weight of the norm of each query head, `[dim]`.
    pub q_norm: Region,
    /// Weight of the norm of each key head, `[dim]`.
    pub k_norm: Region,
    pub out: Weight,
    /// Selects the blocks that each query attends to. `None` if queries attend to all positions.
    pub indexer: Option<IndexerWeights>,
}

/// The indexer of an attention layer.
pub struct IndexerWeights {
    pub shape: IndexerShape,
    /// Projection to the queries of all heads, and to the key.
    pub proj: Weight,
    /// Weight of the norm of each query head, `[dim]`.
    pub q_norm: Region,
    /// Weight of the norm of the key, `[dim]`.
    pub k_norm: Region,
}

/// The gated delta net: three layers in four.
pub struct DeltaNetWeights {
    pub shape: DeltaShape,
    /// Projections to `q k v`, z, b and a.
    pub in_proj: [Weight; 4],
    /// `[conv_width, channels]`.
    pub conv: Region,
    pub decay: Decay,
    /// Weight of the norm of each head, `[value_dim]`.
    pub norm: Region,
    pub out: Weight,
}

/// The feed-forward part of a layer.
// There is one value for each layer, so the size of the enum does not matter.
#[allow(clippy::large_enum_variant)]
pub enum Ffn {
    Dense(DenseWeights),
    Moe(MoeWeights),
}

/// The feed-forward of a layer of a dense model.
pub struct DenseWeights {
    pub gate_up: [Weight; 2],
    pub down: Weight,
}

impl Mixer {
    /// The matrices that a backend must be able to multiply.
    pub fn matrices(&self) -> Vec<Weight> {
        match self {
            Mixer::Attention(attention) => {
                let index = attention.indexer.iter().map(|indexer| indexer.proj);
                attention.qkv.iter().copied().chain([attention.out]).chain(index).collect()
            }
            Mixer::DeltaNet(delta) => [&delta.in_proj[..], &[delta.out]].concat(),
        }
    }
}

impl Ffn {
    pub fn moe(&self) -> Option<&MoeWeights> {
        match self {
            Ffn::Moe(moe) => Some(moe),
            Ffn::Dense(_) => None,
        }
    }
}

impl Network {
    /// Loads every tensor of the checkpoint except the routed experts, whose file offsets are returned.
    pub fn load(trunk: &mut TrunkLoader<'_>, config: &Config) -> Result<(Self, Vec<LayerExperts>), ModelError> {
        let hidden = config.hidden;
        let embed = trunk.weight(names::EMBEDDING, config.vocab, hidden)?;
        trunk.check_not_zero("the embedding")?;
        let mut map = Vec::new();
        let mut layers = Vec::with_capacity(config.layers);
        for (index, full) in config.full.iter().enumerate() {
            let mut layer = LayerWeights::load(trunk, &names::layer_prefix(index), *full, config, &mut map)?;
            if let Some(ngram) = config.ngrams.iter().find(|ngram| ngram.layer == index) {
                layer.ngram = Some(NgramWeights::load(trunk, ngram, config)?);
            }
            trunk.report_zero();
            layers.push(layer);
        }
        let head = if config.tied { None } else { Some(trunk.weight(names::LM_HEAD, config.vocab, hidden)?) };
        trunk.check_not_zero("the LM head")?;
        let before_head = Residual::load(trunk, config, names::FINAL_NORM, names::LAST_MIX, false)?;
        match &before_head {
            Residual::Norm(_) => trunk.check_not_zero("the last norm")?,
            Residual::Streams(_) => trunk.report_zero(),
        }
        Ok((Self { embed, layers, before_head, head }, map))
    }

    pub fn head(&self) -> &Weight {
        self.head.as_ref().unwrap_or(&self.embed)
    }

    /// Sets the offsets of each expert's parts within its slot. Called once, while the model is loaded.
    pub fn set_expert_layout(&mut self, store: &ExpertStore) {
        for (index, layer) in self.layers.iter_mut().enumerate() {
            let Ffn::Moe(moe) = &mut layer.ffn else { continue };
            let spans = |expert: usize| store.spans(index, expert as u32).unwrap_or_default();
            let spans: Vec<_> = (0..moe.router.rows).map(spans).collect();
            for (projection, stack) in moe.stacks.iter_mut().enumerate() {
                let at = |part: usize| move |spans: &[std::ops::Range<usize>; 9]| spans[3 * projection + part].start;
                stack.at = spans.iter().map(|spans| [0, 1, 2].map(|part| at(part)(spans))).collect();
            }
        }
    }
}

impl LayerWeights {
    /// Loads the layer whose tensor names start with `prefix`. Appends the file offsets of its experts to `map`.
    pub fn load(
        trunk: &mut TrunkLoader<'_>,
        prefix: &str,
        full: bool,
        config: &Config,
        map: &mut Vec<LayerExperts>,
    ) -> Result<Self, ModelError> {
        let hidden = config.hidden;
        let residual = |trunk: &mut TrunkLoader<'_>, norm: &str, mix: &str| {
            Residual::load(trunk, config, &format!("{prefix}{norm}.weight"), &format!("{prefix}{mix}."), true)
        };
        Ok(Self {
            ngram: None,
            before_mixer: residual(trunk, "input_layernorm", "attn_hyper_connection")?,
            mixer: if full {
                Mixer::Attention(AttentionWeights::load(trunk, prefix, config)?)
            } else {
                Mixer::DeltaNet(DeltaNetWeights::load(trunk, prefix, config)?)
            },
            before_ffn: residual(trunk, "post_attention_layernorm", "mlp_hyper_connection")?,
            ffn: match config.ffn {
                FfnShape::Dense { intermediate } => {
                    let (gate_up, down) = mlp(trunk, &format!("{prefix}mlp."), hidden, intermediate)?;
                    Ffn::Dense(DenseWeights { gate_up, down })
                }
                FfnShape::Moe { .. } => Ffn::Moe(mixture(trunk, prefix, config, map)?),
            },
        })
    }
}

impl Residual {
    /// Loads the norm with this name. If the model has several streams, loads the mixture whose tensor names start with
    /// `mix` instead.
    pub fn load(
        trunk: &mut TrunkLoader<'_>,
        config: &Config,
        norm: &str,
        mix: &str,
        has_inject: bool,
    ) -> Result<Self, ModelError> {
        let Some(StreamShape { count, rank, .. }) = config.streams else {
            return Ok(Self::Norm(trunk.norm(norm, config.hidden)?));
        };
        let path = |name: &str| format!("{mix}{name}");
        let width = config.residual_width();
        let inject = if has_inject { Some(trunk.weight(&path("block_inject_weight"), count, width)?) } else { None };
        Ok(Self::Streams(Box::new(StreamMix {
            norm: trunk.norm(&path("hc_norm.weight"), width)?,
            down: trunk.weight(&path("input_mix_weight_down"), rank, width)?,
            up: trunk.weight(&path("input_mix_weight_up"), width, rank)?,
            inject,
        })))
    }

    /// The matrices that a backend must be able to multiply.
    pub fn matrices(&self) -> Vec<Weight> {
        match self {
            Self::Norm(_) => Vec::new(),
            Self::Streams(mix) => [mix.down, mix.up].into_iter().chain(mix.inject).collect(),
        }
    }
}

impl NgramWeights {
    fn load(trunk: &mut TrunkLoader<'_>, shape: &NgramShape, config: &Config) -> Result<Self, ModelError> {
        let prefix = format!("{}ple.", names::layer_prefix(shape.layer));
        let width = config.residual_width();
        let path = |name: &str| format!("{prefix}{name}");
        // The operation reads [K, C].
        let raw = trunk.from.convolution(&path("conv1d.weight"), width, shape.conv_width)?;
        let conv: Vec<f32> =
            (0..shape.conv_width).flat_map(|at| raw.iter().skip(at).step_by(shape.conv_width).copied()).collect();
        Ok(Self {
            layout: NgramLayout::new(trunk.from, &path("ple_embedding."), shape)?,
            proj: [
                trunk.weight(&path("key_proj"), width, shape.width)?,
                trunk.weight(&path("value_proj"), config.hidden, shape.width)?,
            ],
            inject: InjectWeights {
                key_norm: trunk.norm(&path("norm_key.weight"), width)?,
                query_norm: trunk.norm(&path("norm_query.weight"), width)?,
                conv_norm: trunk.norm(&path("norm_conv.weight"), width)?,
                conv: trunk.vector(&conv),
            },
        })
    }
}

/// Decides by the tensors what the configuration and the layout of the files do not show reliably.
pub fn resolve_layout(from: &mut Checkpoint, config: &mut Config) -> Result<(), ModelError> {
    decide_head(from, config)?;
    decide_norm_encoding(from, config)
}

/// Decides whether the embedding is also the output head. If the configuration says so, either of them may be missing.
/// If both exist and differ, the configuration is wrong and the head is used, as in transformers. Merges and fine-tunes
/// with new tokens are such checkpoints.
fn decide_head(from: &mut Checkpoint, config: &mut Config) -> Result<(), ModelError> {
    let has = |path: &str| from.has(&format!("{path}.weight"));
    match (has(names::EMBEDDING), has(names::LM_HEAD)) {
        (false, true) if config.tied => from.rename_matrix(names::LM_HEAD, names::EMBEDDING),
        (true, true) if config.tied => {
            if from.are_equal_matrices(names::EMBEDDING, names::LM_HEAD)? {
                from.remove_matrix(names::LM_HEAD);
            } else {
                tracing::warn!("config.json ties the head to the embedding, but they differ; using the head");
                config.tied = false;
            }
        }
        _ => {}
    }
    Ok(())
}

/// Decides whether the norm tensors store `w` or `w - 1`, if the layout of the files does not show it. In Hugging
/// Face's layout they always store `w - 1`. MLX's converters of models with several residual streams write both.
fn decide_norm_encoding(from: &mut Checkpoint, config: &Config) -> Result<(), ModelError> {
    if config.streams.is_some() && from.hugging_face != Some(true) {
        let names = |layer: usize| {
            ["attn", "mlp"].map(|part| format!("{}{part}_hyper_connection.hc_norm.weight", names::layer_prefix(layer)))
        };
        let names: Vec<String> = (0..config.layers).flat_map(names).collect();
        from.hugging_face = Some(norm_encoding::is_zero_centred(from, &names)?);
    }
    Ok(())
}

impl AttentionWeights {
    fn load(trunk: &mut TrunkLoader<'_>, prefix: &str, config: &Config) -> Result<Self, ModelError> {
        let hidden = config.hidden;
        let a = &config.attention;
        let path = |name: &str| format!("{prefix}self_attn.{name}");
        let mut weight = |name, rows, cols| trunk.weight(&path(name), rows, cols);
        Ok(Self {
            qkv: [
                weight("q_proj", a.heads * 2 * a.dim, hidden)?,
                weight("k_proj", a.kv_heads * a.dim, hidden)?,
                weight("v_proj", a.kv_heads * a.dim, hidden)?,
            ],
            out: weight("o_proj", hidden, a.heads * a.dim)?,
            q_norm: trunk.norm(&path("q_norm.weight"), a.dim)?,
            k_norm: trunk.norm(&path("k_norm.weight"), a.dim)?,
            indexer: match config.indexer {
                None => None,
                Some(shape) => Some(IndexerWeights {
                    shape,
                    proj: trunk.weight(&path("indexer.index_qk_proj"), shape.width(), hidden)?,
                    q_norm: trunk.norm(&path("indexer.q_layernorm.weight"), shape.dim)?,
                    k_norm: trunk.norm(&path("indexer.k_layernorm.weight"), shape.dim)?,
                }),
            },
        })
    }
}

impl DeltaNetWeights {
    fn load(trunk: &mut TrunkLoader<'_>, prefix: &str, config: &Config) -> Result<Self, ModelError> {
        let hidden = config.hidden;
        let d = &config.delta;
        let path = |name: &str| format!("{prefix}linear_attn.{name}");
        // The operation reads [K, C].
        let raw = trunk.from.convolution(&path("conv1d.weight"), d.channels(), d.conv_width)?;
        trunk.note_zero(&path("conv1d.weight"), &raw)?;
        let conv: Vec<f32> =
            (0..d.conv_width).flat_map(|at| raw.iter().skip(at).step_by(d.conv_width).copied()).collect();
        let rate: Vec<f32> = trunk.from.vector(&path("A_log"), d.value_heads)?.iter().map(|a| -a.exp()).collect();
        let dt_bias = trunk.from.vector(&path("dt_bias"), d.value_heads)?;
        let norm = trunk.plain_norm(&path("norm.weight"), d.value_dim)?;
        let decay = Decay { rate: trunk.vector(&rate), dt_bias: trunk.vector(&dt_bias) };
        let conv = trunk.vector(&conv);
        let norm = trunk.vector(&norm);
        let mut weight = |name, rows, cols| trunk.weight(&path(name), rows, cols);
        Ok(Self {
            shape: config.delta,
            in_proj: [
                weight("in_proj_qkv", d.channels(), hidden)?,
                weight("in_proj_z", d.values(), hidden)?,
                weight("in_proj_b", d.value_heads, hidden)?,
                weight("in_proj_a", d.value_heads, hidden)?,
            ],
            out: weight("out_proj", hidden, d.values())?,
            conv,
            decay,
            norm,
        })
    }
}

/// Loads the gate, up and down projections: `<prefix>gate_proj` and so on.
fn mlp(
    trunk: &mut TrunkLoader<'_>,
    prefix: &str,
    hidden: usize,
    intermediate: usize,
) -> Result<([Weight; 2], Weight), ModelError> {
    let gate = trunk.weight(&format!("{prefix}gate_proj"), intermediate, hidden)?;
    let up = trunk.weight(&format!("{prefix}up_proj"), intermediate, hidden)?;
    Ok(([gate, up], trunk.weight(&format!("{prefix}down_proj"), hidden, intermediate)?))
}

/// Loads the router and shared expert of a layer. Appends the file offsets of its routed experts to `map`.
fn mixture(
    trunk: &mut TrunkLoader<'_>,
    prefix: &str,
    config: &Config,
    map: &mut Vec<LayerExperts>,
) -> Result<MoeWeights, ModelError> {
    let FfnShape::Moe { experts, k, intermediate, shared, renormalise } = config.ffn else {
        return Err(ModelError::Config("a dense model has no experts".into()));
    };
    let hidden = config.hidden;
    let prefix = format!("{prefix}mlp.");
    let (stacks, pieces) = find_experts(trunk.from, &prefix, experts, hidden, intermediate)?;
    map.push(pieces);
    let router = trunk.weight(&format!("{prefix}gate"), experts, hidden)?;
    let result = trunk.weight(&format!("{prefix}shared_expert_gate"), 1, hidden)?;
    let (gate_up, down) = mlp(trunk, &format!("{prefix}shared_expert."), hidden, shared)?;
    Ok(MoeWeights { k, renormalise, router, shared: Some(SharedExpert { gate_up, down, result }), stacks })
}

/// Locates a layer's experts in any of four layouts: stacked (MLX), stacked with fused gate and up (MLX), the same as
/// tensors without a suffix (Hugging Face), or one tensor per expert (Hugging Face, re-saved).
pub fn find_experts(
    from: &Checkpoint,
    mlp: &str,
    experts: usize,
    hidden: usize,
    intermediate: usize,
) -> Result<([ExpertStack; 3], LayerExperts), ModelError> {
    let pieces_of = |layouts: [(&MatrixLayout, usize); 3]| {
        checkpoint::expert_pieces(layouts.map(|(layout, index)| checkpoint::matrix_pieces(layout, index)))
    };
    let halves = |half: &MatrixLayout, down: &MatrixLayout| -> LayerExperts {
        (0..experts).map(|e| pieces_of([(half, 2 * e), (half, 2 * e + 1), (down, e)])).collect()
    };
    if from.find(&format!("{mlp}experts.gate_up_proj")).is_some() {
        let fused = from.dense(&format!("{mlp}experts.gate_up_proj"), &[experts, 2 * intermediate, hidden])?;
        let down = from.dense(&format!("{mlp}experts.down_proj"), &[experts, hidden, intermediate])?;
        let half = MatrixLayout { rows: intermediate, ..fused };
        return Ok(([&half, &half, &down].map(|layout| stack(layout, vec![1.0; experts])), halves(&half, &down)));
    }
    let layouts = |prefix: &str, lead: &[usize]| -> Result<[MatrixLayout; 3], ModelError> {
        let layout = |name: &str, rows, cols| from.layout(&format!("{prefix}{name}_proj"), lead, rows, cols);
        Ok([
            layout("gate", intermediate, hidden)?,
            layout("up", intermediate, hidden)?,
            layout("down", hidden, intermediate)?,
        ])
    };
    if from.find(&format!("{mlp}experts.0.gate_proj.weight")).is_some() {
        let all = (0..experts).map(|expert| layouts(&format!("{mlp}experts.{expert}."), &[]));
        let all = all.collect::<Result<Vec<_>, _>>()?;
        let Some(first) = all.first() else { return Ok(Default::default()) };
        let codes = |layouts: &[MatrixLayout; 3]| layouts.each_ref().map(|layout| layout.codes);
        if let Some(expert) = all.iter().position(|layouts| codes(layouts) != codes(first)) {
            return Err(ModelError::Config(format!("{mlp}experts.{expert} is not stored like expert 0")));
        }
        let pieces = all.iter().map(|layouts| pieces_of(layouts.each_ref().map(|layout| (layout, 0)))).collect();
        return Ok((first.each_ref().map(|layout| stack(layout, vec![1.0; experts])), pieces));
    }
    let prefix = format!("{mlp}switch_mlp.");
    let scales = |name: &str| from.global_scales(&format!("{prefix}{name}_proj"), experts);
    if from.has(&format!("{prefix}gate_up_proj.weight")) {
        let layout = |name: &str, rows, cols| from.layout(&format!("{prefix}{name}_proj"), &[experts], rows, cols);
        let fused = layout("gate_up", 2 * intermediate, hidden)?;
        let down = layout("down", hidden, intermediate)?;
        // A block of FP8 may lie in both halves.
        if matches!(fused.codes, WeightFormat::Fp8(_)) {
            return Err(ModelError::Config(format!("cannot split {prefix}gate_up_proj, which is FP8")));
        }
        let half = MatrixLayout { rows: intermediate, ..fused };
        let of_half = scales("gate_up")?;
        let stacks = [stack(&half, of_half.clone()), stack(&half, of_half), stack(&down, scales("down")?)];
        return Ok((stacks, halves(&half, &down)));
    }
    let layouts = layouts(&prefix, &[experts])?;
    let [gate, up, down] = &layouts;
    let stacks = [stack(gate, scales("gate")?), stack(up, scales("up")?), stack(down, scales("down")?)];
    let pieces = (0..experts).map(|expert| pieces_of(layouts.each_ref().map(|layout| (layout, expert)))).collect();
    Ok((stacks, pieces))
}

fn stack(layout: &MatrixLayout, global_scales: Vec<f32>) -> ExpertStack {
    ExpertStack { codes: layout.codes, rows: layout.rows, cols: layout.cols, global_scales, at: Vec::new() }
}
