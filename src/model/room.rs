//! What a model takes besides its weights: the memory plan's figures, before anything is loaded.

use super::{
    config::{Config, FfnShape},
    state::State,
};
use crate::{
    device::Math,
    ops::plan::{PARTS, SPLIT, TOGETHER},
};

/// Rows of logits that a GPU computes at once.
pub const LOGITS: usize = 16;

/// Bytes.
pub struct Room {
    /// Keys and values of one token, all layers.
    pub kv_per_token: u64,
    /// Activations of one row of a pass.
    pub per_row: u64,
    /// Logits, scores of attention, copies of norms and the like.
    pub fixed: u64,
}

/// Floats of a row of the shared expert's activation.
pub fn shared_width(config: &Config) -> usize {
    match config.ffn {
        FfnShape::Moe { shared, .. } => shared.max(1),
        FfnShape::Dense { .. } => 1,
    }
}

impl Room {
    /// On the CPU: floats alive at once in the widest part of a layer, and two rows of logits.
    pub fn on_cpu(config: &Config, math: Math) -> Self {
        let (hidden, d, a) = (config.hidden, &config.delta, &config.attention);
        let (k, intermediate) = match config.ffn {
            FfnShape::Dense { intermediate } => (1, intermediate),
            FfnShape::Moe { k, intermediate, shared, .. } => (k, intermediate.max(shared)),
        };
        // Checkpoints within a pass cut the delta net's output, which is then joined.
        let mixer = (2 * d.mixed() + 4 * d.values()).max(6 * a.heads * a.dim);
        let ffn = (k + 2) * hidden + (k + 1) * 3 * intermediate;
        let row = 4 * hidden + mixer.max(ffn);
        let kv_per_token = State::kv_bytes(config, math);
        Self { kv_per_token, per_row: 4 * row as u64, fixed: 8 * config.vocab as u64 }
    }

    /// On a GPU, where keys and values are f32: the counterpart of `Scratch::new` and of what `OnGpu::new` takes beside it.
    pub fn on_gpu(config: &Config) -> Self {
        let (hidden, d, a) = (config.hidden, &config.delta, &config.attention);
        let full = config.full_layers();
        let (scores, act, k, table) = match config.ffn {
            FfnShape::Dense { intermediate } => (2 * intermediate, intermediate, 1, 0),
            FfnShape::Moe { experts, k, intermediate, shared, .. } => {
                (experts + 2 * shared + 1, (k + 1) * intermediate.max(shared), k, experts)
            }
        };
        let delta = if full < config.layers { d.mixed() + d.values() + 2 * d.value_heads } else { 0 };
        let proj = delta.max((2 * a.heads + 2 * a.kv_heads) * a.dim);
        let out = d.values().max(a.heads * a.dim);
        let words = 6 * k + 2 + a.rotated;
        let grouped = 4 * k + k * hidden + shared_width(config) + hidden;
        let row = 2 * hidden + proj + d.mixed() + 2 * out + scores + act + words + grouped;

        let part = a.heads * config.context.div_ceil(SPLIT) * (a.dim + 2) * 4;
        let parts = (TOGETHER * part).min(PARTS.max(part));
        let of_delta = 4 * d.mixed() + 2 * d.value_heads + d.value_dim;
        let vectors =
            config.layers * (2 * hidden + table) + (config.layers - full) * of_delta + full * 2 * a.dim + hidden;
        Self {
            kv_per_token: (full * 2 * a.kv_heads * a.dim * 4) as u64,
            per_row: 4 * row as u64,
            fixed: (parts + 4 * vectors + 4 * LOGITS * config.vocab) as u64,
        }
    }
}
