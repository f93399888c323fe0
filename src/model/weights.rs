//! The weights of the network: which tensor of the checkpoint goes where. They do not change after load.

use crate::{
    checkpoint::{self, Checkpoint, MatrixLayout, TrunkLoader, names},
    device::Region,
    error::ModelError,
    experts::{ExpertStore, LayerExperts},
    model::config::{Config, FfnShape},
    ops::{Decay, DeltaShape, ExpertStack, MoeWeights, SharedExpert, Weight},
};

/// Everything but the routed experts.
pub struct Network {
    pub embed: Weight,
    pub layers: Vec<LayerWeights>,
    /// `[hidden]`, before the head.
    pub norm: Region,
    /// `None` if the embedding is also the head.
    pub head: Option<Weight>,
}

pub struct LayerWeights {
    /// `[hidden]`, before the mixer.
    pub norm: Region,
    pub mixer: Mixer,
    /// `[hidden]`, before the feed-forward.
    pub post_norm: Region,
    pub ffn: Ffn,
}

/// The part of a layer in which tokens see each other.
pub enum Mixer {
    Attention(AttentionWeights),
    DeltaNet(DeltaNetWeights),
}

/// Gated full attention: one layer in four.
pub struct AttentionWeights {
    /// `(query, gate) of each head`, keys, values.
    pub qkv: [Weight; 3],
    /// `[dim]`, per head.
    pub q_norm: Region,
    pub k_norm: Region,
    pub out: Weight,
}

/// The gated delta net: three layers in four.
pub struct DeltaNetWeights {
    pub shape: DeltaShape,
    /// `q k v`, z, b, a.
    pub in_proj: [Weight; 4],
    /// `[conv_width, channels]`.
    pub conv: Region,
    pub decay: Decay,
    /// `[value_dim]`, per head.
    pub norm: Region,
    pub out: Weight,
}

/// The feed-forward part of a layer.
// One value per layer, so its size does not matter.
#[allow(clippy::large_enum_variant)]
pub enum Ffn {
    Dense(DenseWeights),
    Moe(MoeWeights),
}

/// The feed-forward of the small models.
pub struct DenseWeights {
    pub gate_up: [Weight; 2],
    pub down: Weight,
}

impl Mixer {
    /// The matrices that a backend must be able to multiply.
    pub fn matrices(&self) -> Vec<Weight> {
        match self {
            Mixer::Attention(attention) => [&attention.qkv[..], &[attention.out]].concat(),
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
    /// Claims every tensor of the checkpoint. Routed experts are located, not read.
    pub fn load(trunk: &mut TrunkLoader<'_>, config: &Config) -> Result<(Self, Vec<LayerExperts>), ModelError> {
        let hidden = config.hidden;
        let embed = trunk.weight(names::EMBEDDING, config.vocab, hidden)?;
        let mut map = Vec::new();
        let mut layers = Vec::with_capacity(config.layers);
        for (index, full) in config.full.iter().enumerate() {
            layers.push(LayerWeights::load(trunk, &names::layer_prefix(index), *full, config, &mut map)?);
        }
        let head = if config.tied {
            // Some files also hold a copy of the embedding as the head. Claim it and drop it, as transformers does.
            for part in ["weight", "scales", "biases", "global_scale"] {
                trunk.from.find(&format!("{}.{part}", names::LM_HEAD));
            }
            None
        } else {
            Some(trunk.weight(names::LM_HEAD, config.vocab, hidden)?)
        };
        Ok((Self { embed, layers, norm: trunk.norm(names::FINAL_NORM, hidden)?, head }, map))
    }

    pub fn head(&self) -> &Weight {
        self.head.as_ref().unwrap_or(&self.embed)
    }

    /// Sets where the parts of each expert lie within a slot. Part of loading.
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
    /// Loads the layer whose tensor names start with `prefix`. Appends the places of its experts to `map`.
    pub fn load(
        trunk: &mut TrunkLoader<'_>,
        prefix: &str,
        full: bool,
        config: &Config,
        map: &mut Vec<LayerExperts>,
    ) -> Result<Self, ModelError> {
        let hidden = config.hidden;
        Ok(Self {
            norm: trunk.norm(&format!("{prefix}input_layernorm.weight"), hidden)?,
            mixer: if full {
                Mixer::Attention(AttentionWeights::load(trunk, prefix, config)?)
            } else {
                Mixer::DeltaNet(DeltaNetWeights::load(trunk, prefix, config)?)
            },
            post_norm: trunk.norm(&format!("{prefix}post_attention_layernorm.weight"), hidden)?,
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

impl AttentionWeights {
    fn load(trunk: &mut TrunkLoader<'_>, prefix: &str, config: &Config) -> Result<Self, ModelError> {
        let (hidden, a) = (config.hidden, &config.attention);
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
        })
    }
}

impl DeltaNetWeights {
    fn load(trunk: &mut TrunkLoader<'_>, prefix: &str, config: &Config) -> Result<Self, ModelError> {
        let (hidden, d) = (config.hidden, &config.delta);
        let path = |name: &str| format!("{prefix}linear_attn.{name}");
        // [C, K, 1] in MLX, [C, 1, K] in Hugging Face: the same order of values. The operation reads [K, C].
        let raw = trunk.from.vector(&path("conv1d.weight"), d.channels() * d.conv_width)?;
        let conv: Vec<f32> =
            (0..d.conv_width).flat_map(|at| raw.iter().skip(at).step_by(d.conv_width).copied()).collect();
        let rate: Vec<f32> = trunk.from.vector(&path("A_log"), d.value_heads)?.iter().map(|a| -a.exp()).collect();
        let dt_bias = trunk.from.vector(&path("dt_bias"), d.value_heads)?;
        // Stored as it is in every layout, unlike the other norms.
        let norm = trunk.from.vector(&path("norm.weight"), d.value_dim)?;
        let decay = Decay { rate: trunk.vector(&rate), dt_bias: trunk.vector(&dt_bias) };
        let (conv, norm) = (trunk.vector(&conv), trunk.vector(&norm));
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

/// Gate, up and down projection: `<prefix>gate_proj` and so on.
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

/// A layer's router and shared expert. Appends the places of its routed experts to `map`.
fn mixture(
    trunk: &mut TrunkLoader<'_>,
    prefix: &str,
    config: &Config,
    map: &mut Vec<LayerExperts>,
) -> Result<MoeWeights, ModelError> {
    let FfnShape::Moe { experts, k, intermediate, shared, renormalise } = config.ffn else {
        return Err(ModelError::Config("a dense model has no experts".into()));
    };
    let (hidden, prefix) = (config.hidden, format!("{prefix}mlp."));
    let (stacks, pieces) = find_experts(trunk.from, &prefix, experts, hidden, intermediate)?;
    map.push(pieces);
    let router = trunk.weight(&format!("{prefix}gate"), experts, hidden)?;
    let result = trunk.weight(&format!("{prefix}shared_expert_gate"), 1, hidden)?;
    let (gate_up, down) = mlp(trunk, &format!("{prefix}shared_expert."), hidden, shared)?;
    Ok(MoeWeights { k, renormalise, router, shared: Some(SharedExpert { gate_up, down, result }), stacks })
}

/// Locates a layer's experts in any of three layouts: stacked (MLX), fused gate and up (Hugging Face), or one tensor per
/// expert (Hugging Face, re-saved).
pub fn find_experts(
    from: &Checkpoint,
    mlp: &str,
    experts: usize,
    hidden: usize,
    intermediate: usize,
) -> Result<([ExpertStack; 3], LayerExperts), ModelError> {
    let lead = [experts];
    if from.find(&format!("{mlp}experts.gate_up_proj")).is_some() {
        let fused = from.dense(&format!("{mlp}experts.gate_up_proj"), &[experts, 2 * intermediate, hidden])?;
        let down = from.dense(&format!("{mlp}experts.down_proj"), &[experts, hidden, intermediate])?;
        let half = MatrixLayout { rows: intermediate, ..fused.clone() };
        let pieces = (0..experts).map(|expert| {
            let projections = [(&half, 2 * expert), (&half, 2 * expert + 1), (&down, expert)];
            checkpoint::expert_pieces(projections.map(|(layout, index)| checkpoint::matrix_pieces(layout, index)))
        });
        let pieces = pieces.collect();

        return Ok((
            [stack(&half, vec![1.0; experts]), stack(&half, vec![1.0; experts]), stack(&down, vec![1.0; experts])],
            pieces,
        ));
    }
    let names =
        [("gate_proj", intermediate, hidden), ("up_proj", intermediate, hidden), ("down_proj", hidden, intermediate)];
    if from.find(&format!("{mlp}experts.0.gate_proj.weight")).is_some() {
        let mut pieces = Vec::with_capacity(experts);
        let mut first: Option<[ExpertStack; 3]> = None;
        for expert in 0..experts {
            let mut layouts = Vec::with_capacity(3);
            for (name, rows, cols) in names {
                layouts.push(from.layout(&format!("{mlp}experts.{expert}.{name}"), &[], rows, cols)?);
            }
            let Ok(layouts) = <[MatrixLayout; 3]>::try_from(layouts) else { continue };
            pieces.push(checkpoint::expert_pieces(std::array::from_fn(|index| {
                checkpoint::matrix_pieces(&layouts[index], 0)
            })));
            let stacks =
                first.get_or_insert_with(|| layouts.each_ref().map(|layout| stack(layout, vec![1.0; experts])));
            for (stack, layout) in stacks.iter().zip(&layouts) {
                if stack.codes != layout.codes {
                    return Err(ModelError::Config(format!("{mlp}experts.{expert} is not stored like expert 0")));
                }
            }
        }
        if let Some(stacks) = first {
            return Ok((stacks, pieces));
        }
    }
    let mut stacks: [ExpertStack; 3] = Default::default();
    let mut layouts = Vec::with_capacity(3);
    for ((name, rows, cols), found) in names.into_iter().zip(&mut stacks) {
        let path = format!("{mlp}switch_mlp.{name}");
        let layout = from.layout(&path, &lead, rows, cols)?;
        *found = stack(&layout, from.global_scales(&path, experts)?);
        layouts.push(layout);
    }
    let piece = |expert: usize| std::array::from_fn(|index| checkpoint::matrix_pieces(&layouts[index], expert));
    let pieces = (0..experts).map(|expert| checkpoint::expert_pieces(piece(expert))).collect();
    Ok((stacks, pieces))
}

fn stack(layout: &MatrixLayout, global_scales: Vec<f32>) -> ExpertStack {
    ExpertStack { codes: layout.codes, rows: layout.rows, cols: layout.cols, global_scales, at: Vec::new() }
}
