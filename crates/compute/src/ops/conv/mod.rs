//! The causal depthwise convolution of a delta-net layer with SiLU, and the L2 norms of q and k after it.
//!
//! `c[t] = silu(sum over j < K of weight[j] * full[t + j])`, where K is the width of the convolution. `full` is the
//! state (`[K - 1, channels]`), then the [replayed rows](Replay), then the new rows, so the last weight multiplies the
//! current row.
//! Then `q = q / sqrt(sum(q^2) + 1e-6) / sqrt(key_dim)` and `k = k / sqrt(sum(k^2) + 1e-6)`.
//!
//! Afterwards, the state has advanced by `committed` rows: it holds rows `committed` to `committed + K - 2` of `full`.

mod cpu;
mod gpu;

use super::{DeltaShape, Replay};
use crate::device::{BufferAccess, Region};

#[derive(Debug, Clone, Copy)]
pub struct Conv<'a> {
    pub shape: &'a DeltaShape,
    pub tokens: usize,
    /// Projections, `[tokens, width]`. The first `channels` columns are the convolution's input.
    pub proj: Region,
    /// Convolution weights, `[K, channels]`.
    pub weight: Region,
    pub replay: Replay,
    /// Number of replayed and new rows that are added to the state.
    pub committed: usize,
    /// Last `K - 1` inputs, `[K - 1, channels]`.
    pub state: Region,
    /// q, k and v, `[tokens, channels]`.
    pub out: Region,
}

impl Conv<'_> {
    pub(super) fn touches(&self, see: &mut dyn FnMut(Region, BufferAccess)) {
        let channels = self.shape.channels();
        self.replay.touches(self.shape, see);
        see(self.proj.floats(self.tokens * self.shape.width()), BufferAccess::Read);
        see(self.state.floats((self.shape.conv_width - 1) * channels), BufferAccess::ReadWrite);
        see(self.out.floats(self.tokens * channels), BufferAccess::Write);
    }
}
