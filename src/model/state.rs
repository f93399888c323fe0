//! What one sequence remembers: keys and values of the full-attention layers, convolution and delta state of the others.
//! Everything is allocated once and updated in place.

use super::config::Config;
use crate::error::ModelError;
use candle_core::{DType, Device, Tensor};

/// One layer's memory.
#[derive(Debug, Clone)]
pub enum LayerState {
    /// `[KV, context, D]` each, f32; keys after norm and rotation.
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
    pub fn new(config: &Config, context: usize, device: &Device) -> Result<Self, ModelError> {
        let zeros = |shape: (usize, usize, usize)| Tensor::zeros(shape, DType::F32, device);
        let (a, d) = (&config.attention, &config.delta);
        let layers = config.full.iter().map(|full| {
            Ok(if *full {
                let shape = (a.kv_heads, context, a.dim);
                LayerState::Attention { keys: zeros(shape)?, values: zeros(shape)? }
            } else {
                LayerState::Delta {
                    conv: Tensor::zeros((d.taps - 1, d.mixed()), DType::F32, device)?,
                    heads: zeros((d.value_heads, d.value_dim, d.key_dim))?,
                }
            })
        });
        Ok(Self { len: 0, layers: layers.collect::<Result<_, ModelError>>()? })
    }

    /// Bytes of keys and values of one token, all layers.
    pub fn kv_bytes(config: &Config) -> u64 {
        (config.full_layers() * 2 * config.attention.kv_heads * config.attention.dim * 4) as u64
    }

    /// Bytes of everything that does not grow with the context.
    pub fn fixed_bytes(config: &Config) -> u64 {
        let d = &config.delta;
        let layer = d.value_heads * d.value_dim * d.key_dim + (d.taps - 1) * d.mixed();
        ((config.layers - config.full_layers()) * layer * 4) as u64
    }
}
