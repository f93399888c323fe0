//! What one sequence remembers: keys and values of the full-attention layers, convolution and delta state of the others.
//! Everything is allocated once and updated in place.

use super::{
    config::Config,
    snapshot::{Frozen, Snapshot},
};
use crate::{
    device::{Compute, Math},
    error::ModelError,
    ops::{self, bytes},
};
use candle_core::{DType, Tensor};
use std::ops::Range;

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
    frozen: Frozen,
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
        Ok(Self { len: 0, layers: layers.collect::<Result<_, ModelError>>()?, frozen: Frozen::default() })
    }

    /// A snapshot at `len`, behind what is written of it, where the other layers' states were `fixed`.
    pub fn snapshot(&mut self, len: usize, fixed: Vec<u8>) -> Result<Snapshot, ModelError> {
        let Self { layers, frozen, .. } = self;
        frozen.snapshot(len, fixed, |positions| {
            let mut out = Vec::new();
            for cache in caches(layers) {
                let (heads, room, width) = cache.dims3()?;
                for head in 0..heads {
                    bytes::read(cache, rows(head, room, width, &positions), &mut out)?;
                }
            }
            Ok(out)
        })
    }

    /// See [`Frozen::held`].
    pub fn held(&self) -> usize {
        self.frozen.held()
    }

    /// The delta and convolution states as they are now.
    pub fn fixed(&self) -> Result<Vec<u8>, ModelError> {
        let mut out = Vec::new();
        for layer in &self.layers {
            if let LayerState::Delta { conv, heads } = layer {
                append_fixed(conv, heads, &mut out)?;
            }
        }
        Ok(out)
    }

    /// Makes this the sequence that `snapshot` was taken of.
    pub fn restore(&mut self, snapshot: &Snapshot) -> Result<(), ModelError> {
        let Self { layers, frozen, .. } = self;
        frozen.restore(snapshot, |positions, mut page: &[u8]| {
            for cache in caches(layers) {
                let (heads, room, width) = cache.dims3()?;
                let bytes = width * cache.dtype().size_in_bytes() * positions.len();
                for head in 0..heads {
                    let part = page.split_off(..bytes).ok_or_else(foreign)?;
                    bytes::write(cache, rows(head, room, width, &positions).start, part)?;
                }
            }
            Ok::<_, ModelError>(())
        })?;
        let mut fixed = &snapshot.state[..];
        for layer in layers {
            let LayerState::Delta { conv, heads } = layer else { continue };
            for tensor in [conv, heads] {
                let part = fixed.split_off(..4 * tensor.elem_count()).ok_or_else(foreign)?;
                bytes::write(tensor, 0, part)?;
            }
        }
        self.len = snapshot.len;
        Ok(())
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

/// Keys and values, layer by layer.
fn caches(layers: &[LayerState]) -> impl Iterator<Item = &Tensor> {
    let caches = layers.iter().filter_map(|layer| match layer {
        LayerState::Attention { keys, values } => Some([keys, values]),
        LayerState::Delta { .. } => None,
    });
    caches.flatten()
}

/// The values of a head's rows in a cache `[KV, room, width]`.
fn rows(head: usize, room: usize, width: usize, positions: &Range<usize>) -> Range<usize> {
    let at = |position| (head * room + position) * width;
    at(positions.start)..at(positions.end)
}

/// Appends a delta layer's two states.
pub(super) fn append_fixed(conv: &Tensor, heads: &Tensor, out: &mut Vec<u8>) -> Result<(), ModelError> {
    for tensor in [conv, heads] {
        bytes::read(tensor, 0..tensor.elem_count(), out)?;
    }
    Ok(())
}

fn foreign() -> ModelError {
    ModelError::Config("the snapshot belongs to another model".into())
}
