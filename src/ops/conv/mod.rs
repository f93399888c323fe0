//! The causal depthwise convolution of a delta layer with SiLU, and the norms of q and k behind it (spec 2.2).
//!
//! `c[t] = silu(sum over j < K of taps[j] * full[t + j])`, `full` being the state (`[K - 1, C]`) followed by the tokens' raw
//! samples: the last tap meets the current one. Then `q = q / sqrt(sum(q^2) + 1e-6) / sqrt(key_dim)` and `k = k / sqrt(sum(k^2) + 1e-6)`.
//! Replay rows stand between the state and the tokens. Afterwards the state holds the last `K - 1` rows of `full` behind `stored` of
//! those that follow it.

mod cases;
mod cpu;
mod gpu;

pub(super) use cases::cases;

use super::delta::{DeltaShape, Replay};
use crate::device::{BufferAccess, Region};

#[derive(Debug, Clone, Copy)]
pub struct Conv<'a> {
    pub shape: &'a DeltaShape,
    pub tokens: usize,
    /// `[tokens, width]`: the samples are its first columns.
    pub proj: Region,
    /// `[K, channels]`.
    pub taps: Region,
    pub past: Replay,
    /// As for the [`DeltaRule`](super::DeltaRule).
    pub stored: usize,
    /// `[K - 1, channels]`.
    pub state: Region,
    /// `[tokens, channels]`: q, k, v.
    pub out: Region,
}

impl Conv<'_> {
    pub(super) fn touches(&self, see: &mut dyn FnMut(Region, BufferAccess)) {
        let channels = self.shape.channels();
        self.past.touches(self.shape, see);
        see(self.proj.floats(self.tokens * self.shape.width()), BufferAccess::Read);
        see(self.state.floats((self.shape.conv_width - 1) * channels), BufferAccess::ReadWrite);
        see(self.out.floats(self.tokens * channels), BufferAccess::Write);
    }
}
