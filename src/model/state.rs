//! What one sequence remembers: keys and values of the full-attention layers, convolution and delta state of the others.
//! Everything is allocated once and updated in place.

use super::config::Config;
use crate::{
    device::{Compute, Math},
    error::ModelError,
    ops,
};
use candle_core::{DType, Tensor};

/// One layer's memory.
#[derive(Debug, Clone)]
pub enum LayerState {
    /// `[KV, context, row]` each, rows as [`ops::cache_row`] says; keys after norm and rotation.
    Attention { keys: Tensor, values: Tensor },
    /// The last `taps - 1` raw samples, `[taps - 1, C]`, and the heads' matrices, `[Hv, Dv, Dk]`; f32.
    Delta { conv: Tensor, heads: Tensor },
}

/// A sequence's memory. It cannot be rewound: the delta layers keep no history.
#[derive(Debug)]
pub struct State {
    /// Tokens seen.
    pub len: usize,
    pub layers: Vec<LayerState>,
}

impl State {
    /// An empty state with room for `context` tokens. Pages are committed as they are first written.
    pub fn new(config: &Config, context: usize, compute: &Compute) -> Result<Self, ModelError> {
        let (a, d, device) = (&config.attention, &config.delta, &compute.device);
        let (kind, width) = ops::cache_row(compute.math, a.dim);
        let layers = config.full.iter().map(|full| {
            Ok(if *full {
                let zeros = || Tensor::zeros((a.kv_heads, context, width), kind, device);
                LayerState::Attention { keys: zeros()?, values: zeros()? }
            } else {
                LayerState::Delta {
                    conv: Tensor::zeros((d.taps - 1, d.mixed()), DType::F32, device)?,
                    heads: Tensor::zeros((d.value_heads, d.value_dim, d.key_dim), DType::F32, device)?,
                }
            })
        });
        Ok(Self { len: 0, layers: layers.collect::<Result<_, ModelError>>()? })
    }

    /// Bytes of keys and values of one token, all layers.
    pub fn kv_bytes(config: &Config, math: Math) -> u64 {
        let (kind, width) = ops::cache_row(math, config.attention.dim);
        (config.full_layers() * 2 * config.attention.kv_heads * width * kind.size_in_bytes()) as u64
    }

    /// Bytes of everything that does not grow with the context.
    pub fn fixed_bytes(config: &Config) -> u64 {
        let d = &config.delta;
        let layer = d.value_heads * d.value_dim * d.key_dim + (d.taps - 1) * d.mixed();
        ((config.layers - config.full_layers()) * layer * 4) as u64
    }
}
