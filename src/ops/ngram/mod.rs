//! Adds the rows of an n-gram table to the residual streams, through a gate per stream and a causal convolution.
//!
//! ```text
//! key, v = W_key e, W_value e                        e: the token's rows of the table
//! s = rms(key) . rms(stream) / sqrt(hidden)          per stream; both norms with weights
//! G = sigmoid(sign(s) sqrt(max(|s|, 1e-6))) v;  M = rms(G) * norm
//! stream += G + silu(sum over taps j of conv[j] * M[t - (taps - 1 - j) * step])
//! ```
//! M of earlier tokens is in a ring by position. Before the start it is zero.

mod cpu;

use crate::device::{BufferAccess, Region};

/// Sizes of the injection.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct InjectShape {
    pub streams: usize,
    pub hidden: usize,
    pub taps: usize,
    /// Tokens between two taps.
    pub step: usize,
    /// Positions in the ring: at least those of one call and `(taps - 1) * step` before them.
    pub room: usize,
    pub eps: f32,
}

impl InjectShape {
    pub fn width(&self) -> usize {
        self.streams * self.hidden
    }
}

/// Weights of the norms, `[width]` each, and of the convolution, `[taps, width]`.
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
    /// Buffer for the gates, `[tokens, streams]`.
    pub gates: Region,
    /// M of the last positions, `[room, width]`: position `p` is row `p % room`.
    pub history: Region,
    /// `[tokens, width]`.
    pub streams: Region,
}

impl NgramInject<'_> {
    pub(super) fn touches(&self, see: &mut dyn FnMut(Region, BufferAccess)) {
        let (tokens, shape) = (self.tokens, self.shape);
        see(self.proj.floats(tokens * (shape.width() + shape.hidden)), BufferAccess::Read);
        see(self.gates.floats(tokens * shape.streams), BufferAccess::Write);
        see(self.history, BufferAccess::ReadWrite);
        see(self.streams.floats(tokens * shape.width()), BufferAccess::ReadWrite);
    }
}
