//! Adds the rows of an n-gram table to the residual streams, through a gate per stream and a causal convolution.
//!
//! ```text
//! key, v = W_key e, W_value e                        e: the token's rows of the table
//! s = rms(key) . rms(stream) / sqrt(hidden)          per stream; both norms with weights
//! G = sigmoid(sign(s) sqrt(max(|s|, 1e-6))) v;  M = rms(G) * norm
//! stream += G + silu(sum over j < conv_width of conv[j] * M[t - (conv_width - 1 - j) * dilation])
//! ```
//! A ring buffer holds M of earlier tokens. M is zero before the first token.

mod cpu;
mod gpu;

use super::SequenceRows;
use crate::device::{BufferAccess, DeviceError, Region};

/// Sizes of the injection.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct InjectShape {
    pub streams: usize,
    pub hidden: usize,
    pub conv_width: usize,
    /// Distance in tokens between two weights of the convolution.
    pub dilation: usize,
    /// Number of positions in the ring: at least the positions of one call and `(conv_width - 1) * dilation` positions
    /// before them.
    pub capacity: usize,
    pub eps: f32,
}

impl InjectShape {
    pub fn width(&self) -> usize {
        self.streams * self.hidden
    }
}

/// Weights of the norms, `[width]` each, and of the convolution, `[conv_width, width]`.
#[derive(Debug, Clone, Copy)]
pub struct InjectWeights {
    pub key_norm: Region,
    pub query_norm: Region,
    pub conv_norm: Region,
    pub conv: Region,
}

#[derive(Debug, Clone, Copy)]
pub struct NgramInject<'a> {
    pub shape: &'a InjectShape,
    pub weights: &'a InjectWeights,
    /// Position of the first row.
    pub start: usize,
    pub tokens: usize,
    /// `[tokens, width + hidden]`: keys of all streams, then the value.
    pub proj: Region,
    /// Buffer for the gates, f32 `[tokens, streams]`.
    pub gates: Region,
    /// M of the last positions, `[capacity, width]`: position `p` is row `p % capacity`.
    pub history: Region,
    /// `[tokens, width]`.
    pub streams: Region,
}

/// [`NgramInject`] for one row of each of several sequences. `start` is ignored. `history` holds the rings of all
/// sequences, one after the other.
#[derive(Debug, Clone, Copy)]
pub struct NgramInjectRows<'a> {
    pub inject: NgramInject<'a>,
    pub rows: SequenceRows,
}

impl NgramInjectRows<'_> {
    pub(super) fn touches(&self, see: &mut dyn FnMut(Region, BufferAccess)) {
        self.inject.touches(see);
        see(self.rows.table, BufferAccess::Read);
    }
}

impl NgramInject<'_> {
    /// Checks that the rows of this call, of which each sequence has `tokens`, do not overwrite rows that the convolution
    /// reads.
    fn check_capacity(&self, tokens: usize) -> Result<(), DeviceError> {
        let InjectShape { conv_width, dilation, capacity, .. } = *self.shape;
        if tokens + (conv_width - 1) * dilation > capacity {
            return Err(DeviceError::Failed(format!(
                "a ring of {capacity} positions is too short for {tokens} tokens"
            )));
        }
        Ok(())
    }

    pub(super) fn touches(&self, see: &mut dyn FnMut(Region, BufferAccess)) {
        let tokens = self.tokens;
        let shape = self.shape;
        see(self.proj.floats(tokens * (shape.width() + shape.hidden)), BufferAccess::Read);
        see(self.gates.floats(tokens * shape.streams), BufferAccess::Write);
        see(self.history, BufferAccess::ReadWrite);
        see(self.streams.floats(tokens * shape.width()), BufferAccess::ReadWrite);
    }
}
