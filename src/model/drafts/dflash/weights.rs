//! A DFlash draft's weights: which tensor is whose. Embedding and head are the target's.

use super::config::{Config, Second};
use crate::{
    checkpoint::{Checkpoint, TrunkLoader},
    error::ModelError,
    ops::Weight,
};

/// Everything that the draft brings.
pub struct Net {
    /// `[hidden, taps * hidden]`: brings the taps together.
    pub fc: Weight,
    /// Of what `fc` makes, and of the block's last layer.
    pub hidden_norm: Vec<f32>,
    pub norm: Vec<f32>,
    pub layers: Vec<Layer>,
    /// DFlash2 only.
    pub selector: Option<Selector>,
}

pub struct Layer {
    pub norm: Vec<f32>,
    pub qkv: [Weight; 3],
    /// Of each head.
    pub q_norm: Vec<f32>,
    pub k_norm: Vec<f32>,
    pub out: Weight,
    pub post_norm: Vec<f32>,
    pub gate_up: [Weight; 2],
    pub down: Weight,
    /// DFlash2 only: around the attention, around the feed-forward.
    pub convolutions: Option<[Convolution; 2]>,
}

/// Two convolutions whose kernels are a fixed one and one that depends on the input of the first.
pub struct Convolution {
    /// `[2, taps, hidden]`: in front, behind.
    pub base: Vec<f32>,
    /// `[2 * taps * hidden / group, hidden]`.
    pub kernel: Weight,
}

/// The chooser of a path through the candidates.
pub struct Selector {
    /// `[vocab, rank]` both: a token in front, a token behind.
    pub predecessors: Weight,
    pub successors: Weight,
    /// `[rank, hidden]`.
    pub projection: Weight,
}

/// The canonical form of a name in the draft's files.
fn path(name: &str) -> String {
    format!("language_model.{name}")
}

impl Net {
    /// Claims every tensor of the checkpoint.
    pub fn load(trunk: &mut TrunkLoader<'_>, config: &Config) -> Result<Self, ModelError> {
        let hidden = config.hidden;
        let vector = |name: &str, len: usize| trunk.from.vector(&path(name), len);
        let (hidden_norm, norm) = (vector("hidden_norm.weight", hidden)?, vector("norm.weight", hidden)?);
        let layers = (0..config.layers.len()).map(|index| Layer::load(trunk, &format!("layers.{index}."), config));
        let layers = layers.collect::<Result<_, _>>()?;
        let fc = trunk.weight(&path("fc"), hidden, config.features())?;
        let selector = config.second.map(|second| Selector::load(trunk, config, &second)).transpose()?;
        Ok(Self { fc, hidden_norm, norm, layers, selector })
    }
}

impl Layer {
    fn load(trunk: &mut TrunkLoader<'_>, prefix: &str, config: &Config) -> Result<Self, ModelError> {
        let Config { hidden, intermediate, dim, second, .. } = *config;
        let (queries, kv) = (config.heads * dim, config.kv());
        let convolutions = match second {
            None => None,
            Some(second) => Some([
                Convolution::load(trunk, &format!("{prefix}attention_conv."), hidden, &second)?,
                Convolution::load(trunk, &format!("{prefix}mlp_conv."), hidden, &second)?,
            ]),
        };
        // A norm's weight is what multiplies: unlike the target's in Hugging Face's layout, it is not stored less one.
        let vector = |name: &str, len: usize| trunk.from.vector(&path(&format!("{prefix}{name}.weight")), len);
        let (norm, post_norm) = (vector("input_layernorm", hidden)?, vector("post_attention_layernorm", hidden)?);
        let (q_norm, k_norm) = (vector("self_attn.q_norm", dim)?, vector("self_attn.k_norm", dim)?);
        let mut weight = |name: &str, rows, cols| trunk.weight(&path(&format!("{prefix}{name}")), rows, cols);
        Ok(Self {
            norm,
            qkv: [
                weight("self_attn.q_proj", queries, hidden)?,
                weight("self_attn.k_proj", kv, hidden)?,
                weight("self_attn.v_proj", kv, hidden)?,
            ],
            q_norm,
            k_norm,
            out: weight("self_attn.o_proj", hidden, queries)?,
            post_norm,
            gate_up: [weight("mlp.gate_proj", intermediate, hidden)?, weight("mlp.up_proj", intermediate, hidden)?],
            down: weight("mlp.down_proj", hidden, intermediate)?,
            convolutions,
        })
    }
}

impl Convolution {
    fn load(trunk: &mut TrunkLoader<'_>, prefix: &str, hidden: usize, second: &Second) -> Result<Self, ModelError> {
        let base = trunk.from.vector(&path(&format!("{prefix}base_kernel")), 2 * second.taps * hidden)?;
        let rows = 2 * second.taps * hidden / second.group;
        Ok(Self { base, kernel: trunk.weight(&path(&format!("{prefix}kernel_projection")), rows, hidden)? })
    }
}

impl Selector {
    fn load(trunk: &mut TrunkLoader<'_>, config: &Config, second: &Second) -> Result<Self, ModelError> {
        let mut codebook = |name: &str| {
            let name = path(&format!("candidate_selector.{name}_codebook"));
            // Published without `.weight`; re-saved or quantised files have it.
            match trunk.from.has(&format!("{name}.weight")) {
                true => trunk.weight(&name, config.vocab, second.rank),
                false => trunk.dense(&name, config.vocab, second.rank),
            }
        };
        let (predecessors, successors) = (codebook("predecessor")?, codebook("successor")?);
        let projection = trunk.weight(&path("candidate_selector.hidden_projection"), second.rank, config.hidden)?;
        Ok(Self { predecessors, successors, projection })
    }
}

/// Reads a draft's headers; returns its weights' bytes. Names and shapes are checked.
pub fn measure(checkpoint: &Checkpoint, config: &Config) -> Result<u64, ModelError> {
    let mut ignore = |_, _| ();
    let mut trunk = TrunkLoader::measure(checkpoint, &mut ignore);
    Net::load(&mut trunk, config)?;
    checkpoint.finish()?;
    Ok(trunk.len() as u64)
}
