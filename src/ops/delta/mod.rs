//! The gated delta rule (spec 2.2): a matrix per head that forgets by `g`, is corrected towards `v` along `k`, and is
//! read along `q`. Always token by token, in prefill too: so a row's bytes do not depend on the chunk it came in.
//!
//! ```text
//! beta = sigmoid(b);  g = exp(rate * softplus(a + dt_bias));  rate = -exp(A_log)
//! S = g S;  d = beta (v - S k);  S = S + d k^T;  o = S q
//! y = rms(o) * norm * silu(z)
//! ```

mod cases;
mod cpu;
mod gpu;
mod shape;

use super::{Conv, Linear};
use crate::device::{BufferAccess, Region};
pub(super) use cases::cases;
pub use shape::{DeltaShape, Replay};

/// Added to a sum of squares before the root.
pub(super) const EPS: f32 = 1e-6;

/// Parameters of the recurrence's decay, `[value_heads]` each: `rate` is `-exp(A_log)`.
#[derive(Debug, Clone, Copy, Default)]
pub struct Decay {
    pub rate: Region,
    pub dt_bias: Region,
}

/// The rule over all tokens, and the gated norm of what it gives.
#[derive(Debug, Clone, Copy)]
pub struct DeltaRule<'a> {
    pub shape: &'a DeltaShape,
    pub tokens: usize,
    /// `[tokens, width]`: z, b and a are its last columns.
    pub proj: Region,
    /// [`Conv`](super::conv::Conv)'s output.
    pub mixed: Region,
    pub decay: Decay,
    pub past: Replay,
    /// The state is written as it is behind so many rows, of the past ones and then of these.
    pub stored: usize,
    /// `[value_heads, value_dim, key_dim]` f32.
    pub state: Region,
    /// `[value_dim]`, shared by all heads.
    pub norm: Region,
    /// `[tokens, values]`: room for `o`.
    pub out: Region,
    /// `[tokens, values]`; where [`BackendLimits::in_place`](super::BackendLimits) says so it may share memory with `mixed`.
    pub y: Region,
}

impl DeltaRule<'_> {
    pub(super) fn touches(&self, see: &mut dyn FnMut(Region, BufferAccess)) {
        let (tokens, shape) = (self.tokens, self.shape);
        self.past.touches(shape, see);
        see(self.proj.floats(tokens * shape.width()), BufferAccess::Read);
        self.results([BufferAccess::Read, BufferAccess::ReadWrite], see);
        see(self.state.floats(shape.values() * shape.key_dim), BufferAccess::ReadWrite);
        see(self.out.floats(tokens * shape.values()), BufferAccess::Write);
    }

    /// The convolution's results, and the rule's, which may share memory.
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

/// The four in turn, over the same rows. What lies between them is each device's own.
#[derive(Debug, Clone, Copy)]
pub struct DeltaNet<'a> {
    pub project: Linear<'a>,
    pub conv: Conv<'a>,
    pub rule: DeltaRule<'a>,
    pub back: Linear<'a>,
}

impl DeltaNet<'_> {
    pub(in crate::ops) fn touches(&self, see: &mut dyn FnMut(Region, BufferAccess)) {
        let Self { conv: Conv { past, state, .. }, rule, back, .. } = self;
        let DeltaRule { shape, tokens, proj, out, .. } = *rule;
        past.touches(shape, see);
        see(back.y.floats(tokens * back.width()), BufferAccess::ReadWrite);
        see(proj.floats(tokens * shape.width()), BufferAccess::Write);
        rule.results([BufferAccess::Write; 2], see);
        see(*state, BufferAccess::ReadWrite);
        see(rule.state.floats(shape.values() * shape.key_dim), BufferAccess::ReadWrite);
        see(out.floats(tokens * shape.values()), BufferAccess::Write);
    }
}
