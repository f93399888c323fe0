//! The router's choice (spec 2.3): scores of all experts, softmax, the k likeliest. Of equal scores the expert of lower number
//! goes first. The shared expert's gate is computed beside it, and on a GPU also its gate and up projection.

mod cases;
mod cpu;
mod gpu;

pub(super) use cases::cases;

use super::{
    Norm,
    experts::{MoeWeights, SharedExpert},
};
use crate::device::{BufferAccess, Region};

/// The experts of each row of `x`, or of its norm.
#[derive(Debug, Clone, Copy)]
pub struct Router<'a> {
    pub layer: &'a MoeWeights,
    pub tokens: usize,
    /// `[tokens, hidden]`.
    pub x: Region,
    pub norm: Option<Norm>,
    /// Only the choice: nothing of the shared expert is computed, and a row of scores is as long as there are experts.
    pub alone: bool,
    /// `[experts]` u32: each expert's slot, as far as known.
    pub table: Region,
    /// `[tokens, layer.width()]`: room for `router | shared gate | shared up | gate of the shared result`.
    pub scores: Region,
    /// `[tokens, k]` u32, likeliest first.
    pub ids: Region,
    /// `[tokens, k]` u32: the table's entry of each.
    pub slots: Region,
    /// `[tokens, k + 1]` f32: a weight for each rank, the shared expert's last.
    pub weights: Region,
}

impl Router<'_> {
    fn width(&self) -> usize {
        if self.alone { self.layer.router.rows } else { self.layer.width() }
    }

    fn shared(&self) -> Option<&SharedExpert> {
        self.layer.shared.as_ref().filter(|_| !self.alone)
    }

    pub(super) fn touches(&self, see: &mut dyn FnMut(Region, BufferAccess)) {
        let (tokens, MoeWeights { k, router, .. }) = (self.tokens, self.layer);
        see(self.x.floats(tokens * router.cols), BufferAccess::Read);
        if let Some(keep) = self.norm.and_then(|norm| norm.keep) {
            see(keep.floats(tokens * router.cols), BufferAccess::Write);
        }
        see(self.scores.floats(tokens * self.width()), BufferAccess::Write);
        see(self.ids.floats(tokens * k), BufferAccess::Write);
        see(self.slots.floats(tokens * k), BufferAccess::Write);
        see(self.weights.floats(tokens * (k + 1)), BufferAccess::Write);
    }
}
