//! Loads the weights of a DFlash draft. A draft uses the embedding and the head of its target.

use super::config::{Dflash2, DflashConfig};
use crate::{
    checkpoint::{Checkpoint, TrunkLoader},
    error::ModelError,
};
use moestro_compute::ops::Weight;

/// All weights of a draft.
pub struct DflashWeights {
    /// `[hidden, taps * hidden]`: combines the tapped rows.
    pub fc: Weight,
    /// Weight of the norm after `fc`.
    pub hidden_norm: Vec<f32>,
    /// Weight of the norm after the last layer.
    pub norm: Vec<f32>,
    pub layers: Vec<DflashLayer>,
    /// The selector of a DFlash2 draft. `None` for a DFlash draft.
    pub selector: Option<Selector>,
}

pub struct DflashLayer {
    pub norm: Vec<f32>,
    pub qkv: [Weight; 3],
    /// Weight of the norm of each query head, `[dim]`.
    pub q_norm: Vec<f32>,
    /// Weight of the norm of each key head, `[dim]`.
    pub k_norm: Vec<f32>,
    pub out: Weight,
    pub post_norm: Vec<f32>,
    pub gate_up: [Weight; 2],
    pub down: Weight,
    /// DFlash2 only: the convolutions around attention and around the feed-forward.
    pub convolutions: Option<[Convolution; 2]>,
}

/// A convolution before and one after a layer part. Each kernel is a fixed part plus a part that depends on the input
/// of the first convolution.
pub struct Convolution {
    /// Fixed part of both kernels, `[2, taps, hidden]`.
    pub base: Vec<f32>,
    /// Projection to the dynamic part of both kernels, `[2 * taps * hidden / group, hidden]`.
    pub kernel: Weight,
}

/// Scores how well each candidate token follows the previous token.
pub struct Selector {
    /// Codebook of the previous token, `[vocab, rank]`.
    pub predecessors: Weight,
    /// Codebook of the next token, `[vocab, rank]`.
    pub successors: Weight,
    /// Projects a hidden row to the rank of the codebooks, `[rank, hidden]`.
    pub projection: Weight,
}

/// Converts a tensor name of the draft's files to its canonical form.
fn path(name: &str) -> String {
    format!("language_model.model.{name}")
}

impl DflashWeights {
    /// Loads every tensor of the checkpoint.
    pub fn load(trunk: &mut TrunkLoader<'_>, config: &DflashConfig) -> Result<Self, ModelError> {
        let hidden = config.hidden;
        let hidden_norm = trunk.plain_norm(&path("hidden_norm.weight"), hidden)?;
        let norm = trunk.plain_norm(&path("norm.weight"), hidden)?;
        let layers =
            (0..config.layers.len()).map(|index| DflashLayer::load(trunk, &format!("layers.{index}."), config));
        let layers = layers.collect::<Result<_, _>>()?;
        let fc = trunk.weight(&path("fc"), hidden, config.features())?;
        let selector = config.dflash2.map(|dflash2| Selector::load(trunk, config, &dflash2)).transpose()?;
        Ok(Self { fc, hidden_norm, norm, layers, selector })
    }
}

impl DflashLayer {
    fn load(trunk: &mut TrunkLoader<'_>, prefix: &str, config: &DflashConfig) -> Result<Self, ModelError> {
        let DflashConfig { hidden, intermediate, dim, dflash2, .. } = *config;
        let queries = config.heads * dim;
        let kv = config.kv();
        let convolutions = match dflash2 {
            None => None,
            Some(dflash2) => Some([
                Convolution::load(trunk, &format!("{prefix}attention_conv."), hidden, &dflash2)?,
                Convolution::load(trunk, &format!("{prefix}mlp_conv."), hidden, &dflash2)?,
            ]),
        };
        // Norm weights are used as stored, unlike the target's in Hugging Face's layout, which are stored minus one.
        let mut read = |name: &str, len: usize| trunk.plain_norm(&path(&format!("{prefix}{name}.weight")), len);
        let norm = read("input_layernorm", hidden)?;
        let post_norm = read("post_attention_layernorm", hidden)?;
        let q_norm = read("self_attn.q_norm", dim)?;
        let k_norm = read("self_attn.k_norm", dim)?;
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
    fn load(trunk: &mut TrunkLoader<'_>, prefix: &str, hidden: usize, dflash2: &Dflash2) -> Result<Self, ModelError> {
        let base = trunk.from.vector(&path(&format!("{prefix}base_kernel")), 2 * dflash2.taps * hidden)?;
        let rows = 2 * dflash2.taps * hidden / dflash2.group;
        Ok(Self { base, kernel: trunk.weight(&path(&format!("{prefix}kernel_projection")), rows, hidden)? })
    }
}

impl Selector {
    fn load(trunk: &mut TrunkLoader<'_>, config: &DflashConfig, dflash2: &Dflash2) -> Result<Self, ModelError> {
        let mut codebook = |name: &str| {
            let name = path(&format!("candidate_selector.{name}_codebook"));
            // The published tensor name does not end in `.weight`. The name in re-saved or quantized files does.
            if trunk.from.has(&format!("{name}.weight")) {
                trunk.weight(&name, config.vocab, dflash2.rank)
            } else {
                trunk.dense(&name, config.vocab, dflash2.rank)
            }
        };
        let predecessors = codebook("predecessor")?;
        let successors = codebook("successor")?;
        let projection = trunk.weight(&path("candidate_selector.hidden_projection"), dflash2.rank, config.hidden)?;
        Ok(Self { predecessors, successors, projection })
    }
}

/// Reads a draft's headers, checks names and shapes, and returns the bytes of its weights.
pub fn measure(checkpoint: &Checkpoint, config: &DflashConfig) -> Result<u64, ModelError> {
    let mut trunk = TrunkLoader::measure(checkpoint);
    DflashWeights::load(&mut trunk, config)?;
    checkpoint.finish()?;
    Ok(trunk.len() as u64)
}
