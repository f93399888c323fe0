//! The dense feed-forward layer: `h += Down(silu(Gate x) * Up x)` with `x = rms(h)`.

mod cpu;
mod gpu;

use super::{Norm, Weight};
use crate::device::{BufferAccess, Region};

#[derive(Debug, Clone, Copy)]
pub struct Mlp<'a> {
    pub tokens: usize,
    /// Norm before gate and up.
    pub norm: Norm,
    /// Both `[I, H]`.
    pub gate_up: &'a [Weight; 2],
    /// `[H, I]`.
    pub down: &'a Weight,
    /// Buffer for gate and up, `[tokens, 2 * I]`.
    pub scores: Region,
    /// Buffer for the activation, `[tokens, I]`.
    pub act: Region,
    /// Residual stream, `[tokens, H]`.
    pub h: Region,
}

impl Mlp<'_> {
    pub(super) fn touches(&self, see: &mut dyn FnMut(Region, BufferAccess)) {
        let inner = self.tokens * self.down.cols;
        see(self.scores.floats(2 * inner), BufferAccess::Write);
        see(self.act.floats(inner), BufferAccess::Write);
        see(self.h.floats(self.tokens * self.down.rows), BufferAccess::ReadWrite);
    }
}
