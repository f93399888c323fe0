//! The gated delta rule: each head's state matrix decays by `g`, is corrected towards `v` along `k` and is read
//! along `q`. Rows are always computed one by one, so that a row's bytes do not depend on its chunk.
//!
//! ```text
//! beta = sigmoid(b);  g = exp(rate * softplus(a + dt_bias));  rate = -exp(A_log)
//! S = g S;  d = beta (v - S k);  S = S + d k^T;  o = S q
//! y = rms(o) * norm * gate(z)                 gate: SiLU or sigmoid
//! ```

mod cpu;
mod gpu;

use super::{Conv, DeltaShape, Linear, Replay, SequenceRows};
use crate::device::{BufferAccess, Region};

/// Parameters of the decay, `[value_heads]` each. `rate` is `-exp(A_log)`.
#[derive(Debug, Clone, Copy, Default)]
pub struct Decay {
    pub rate: Region,
    pub dt_bias: Region,
}

/// The recurrence over all rows, and the gated norm of its output.
#[derive(Debug, Clone, Copy)]
pub struct DeltaRule<'a> {
    pub shape: &'a DeltaShape,
    pub tokens: usize,
    /// Projections, `[tokens, width]`. The last columns are z, b and a.
    pub proj: Region,
    /// Output of [`Conv`].
    pub mixed: Region,
    pub decay: Decay,
    pub replay: Replay,
    /// Number of replayed and new rows that are added to the state.
    pub committed: usize,
    /// f32, `[value_heads, value_dim, key_dim]`.
    pub state: Region,
    /// `[value_dim]`, shared by all heads.
    pub norm: Region,
    /// `o` of the recurrence, `[tokens, values]`.
    pub out: Region,
    /// `[tokens, values]`. May overlap `mixed` if [`BackendLimits::delta_in_place`](super::BackendLimits) is set.
    pub y: Region,
}

impl DeltaRule<'_> {
    pub(super) fn touches(&self, see: &mut dyn FnMut(Region, BufferAccess)) {
        let tokens = self.tokens;
        let shape = self.shape;
        self.replay.touches(shape, see);
        see(self.proj.floats(tokens * shape.width()), BufferAccess::Read);
        self.results([BufferAccess::Read, BufferAccess::ReadWrite], see);
        see(self.state.floats(shape.values() * shape.key_dim), BufferAccess::ReadWrite);
        see(self.out.floats(tokens * shape.values()), BufferAccess::Write);
    }

    /// Calls `see` with the convolution's output and the layer's output. If the two share memory, `see` is called once,
    /// with both and the access `shared`. Otherwise the convolution's output has the access `apart`.
    fn results(&self, [apart, shared]: [BufferAccess; 2], see: &mut dyn FnMut(Region, BufferAccess)) {
        let mixed = self.mixed.floats(self.tokens * self.shape.channels());
        let y = self.y.floats(self.tokens * self.shape.values());
        if mixed.overlaps(y) {
            see(mixed.union(y), shared);
        } else {
            see(mixed, apart);
            see(y, BufferAccess::Write);
        }
    }
}

/// A whole delta-net layer: four operations over the same rows. The device chooses where intermediate results are
/// stored.
#[derive(Debug, Clone, Copy)]
pub struct DeltaNet<'a> {
    pub in_proj: Linear<'a>,
    pub conv: Conv<'a>,
    pub rule: DeltaRule<'a>,
    pub out_proj: Linear<'a>,
}

/// A whole delta-net layer of one row of each of several sequences. The state regions of `conv` and `rule` hold the
/// states of all sequences, one after the other. No row is replayed, and each row is added to the state of its sequence.
#[derive(Debug, Clone, Copy)]
pub struct DeltaNetRows<'a> {
    pub net: DeltaNet<'a>,
    pub rows: SequenceRows,
}

impl DeltaNetRows<'_> {
    pub(in crate::ops) fn touches(&self, see: &mut dyn FnMut(Region, BufferAccess)) {
        self.net.touches(see);
        see(self.rows.table, BufferAccess::Read);
    }
}

impl DeltaNet<'_> {
    pub(in crate::ops) fn touches(&self, see: &mut dyn FnMut(Region, BufferAccess)) {
        let Self { conv: Conv { replay, state, .. }, rule, out_proj, .. } = self;
        let DeltaRule { shape, tokens, proj, out, .. } = *rule;
        replay.touches(shape, see);
        see(out_proj.y.floats(tokens * out_proj.width()), BufferAccess::ReadWrite);
        see(proj.floats(tokens * shape.width()), BufferAccess::Write);
        rule.results([BufferAccess::Write; 2], see);
        see(*state, BufferAccess::ReadWrite);
        see(rule.state, BufferAccess::ReadWrite);
        see(out.floats(tokens * shape.values()), BufferAccess::Write);
    }
}
