//! Several residual streams instead of one: the parts of a layer read a mixture of all streams and add their result to
//! each stream.
//!
//! ```text
//! n = rms(stream) * norm                    per stream
//! low = silu(W_down n / C);  g = sigmoid(W_up low)
//! out = sum over streams of g * n, divided by C
//! inject = 2 sigmoid(W_inject n / C)        one per stream
//! stream += inject * y                      y: the part's result
//! ```

mod cpu;
mod gpu;

use super::Weight;
use crate::device::{BufferAccess, Region};

/// Sizes of the residual streams. A row is all streams, one after the other.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StreamShape {
    /// C, the number of streams.
    pub count: usize,
    /// Number of outputs of `W_down`: the rank of the mixture's low-rank projection.
    pub rank: usize,
    pub hidden: usize,
    pub eps: f32,
}

impl StreamShape {
    pub fn width(&self) -> usize {
        self.count * self.hidden
    }

    /// Number of outputs of the first product: `low | inject`.
    pub fn low_width(&self) -> usize {
        self.rank + self.count
    }
}

/// The weights that mix all streams into the input of a layer part.
#[derive(Debug, Clone, Copy)]
pub struct StreamMix {
    /// `[width]`.
    pub norm: Region,
    /// `[rank, width]`.
    pub down: Weight,
    /// `[width, rank]`.
    pub up: Weight,
    /// `[count, width]`. `None` before the output head, which adds nothing to the streams.
    pub inject: Option<Weight>,
}

/// Buffers between the products of [`ReadStreams`], for one block of rows.
#[derive(Debug, Clone, Copy, Default)]
pub struct StreamBuffers {
    /// `[tokens, width]`.
    pub normed: Region,
    /// Outputs of the first product, `[tokens, low_width]`.
    pub low: Region,
    /// SiLU of the columns `low` divided by C, `[tokens, rank]`.
    pub act: Region,
    /// `[tokens, width]`.
    pub gates: Region,
}

/// Computes the mixture of all streams, and the factors for [`WriteStreams`].
#[derive(Debug, Clone, Copy)]
pub struct ReadStreams<'a> {
    pub shape: &'a StreamShape,
    pub tokens: usize,
    pub weights: &'a StreamMix,
    /// `[tokens, width]`.
    pub streams: Region,
    pub buffers: StreamBuffers,
    /// `[tokens, hidden]`.
    pub out: Region,
    /// `[tokens, count]`. Empty if the mixture has no `inject`.
    pub inject: Region,
    /// `[tokens, hidden]`. This buffer is set to zero, so that the layer part can add its result to it. May be empty.
    pub zeroed: Region,
}

/// Adds the result of a layer part to each stream. Without `inject`, sets each stream to the result.
#[derive(Debug, Clone, Copy)]
pub struct WriteStreams<'a> {
    pub shape: &'a StreamShape,
    pub tokens: usize,
    /// `[tokens, hidden]`.
    pub y: Region,
    /// `[tokens, count]`. `None` sets each stream to `y`.
    pub inject: Option<Region>,
    /// `[tokens, width]`.
    pub streams: Region,
}

impl ReadStreams<'_> {
    pub(super) fn touches(&self, see: &mut dyn FnMut(Region, BufferAccess)) {
        let tokens = self.tokens;
        let shape = self.shape;
        let buffers = self.buffers;
        see(self.streams.floats(tokens * shape.width()), BufferAccess::Read);
        for region in [buffers.normed, buffers.low, buffers.act, buffers.gates, self.out, self.inject, self.zeroed] {
            see(region, BufferAccess::Write);
        }
    }
}

impl WriteStreams<'_> {
    pub(super) fn touches(&self, see: &mut dyn FnMut(Region, BufferAccess)) {
        let tokens = self.tokens;
        let shape = self.shape;
        see(self.y.floats(tokens * shape.hidden), BufferAccess::Read);
        self.inject.iter().for_each(|inject| see(*inject, BufferAccess::Read));
        see(self.streams.floats(tokens * shape.width()), BufferAccess::ReadWrite);
    }
}
