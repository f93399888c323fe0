//! The router: scores of all experts, softmax, top-k. Ties go to the lower expert number. The same operation
//! computes the weight of the shared expert, and on a GPU also its gate and up projections, unless the experts' launch does.

mod cpu;
mod gpu;

use super::{
    Norm,
    experts::{MoeWeights, SharedExpert},
};
use crate::device::{BufferAccess, Region};

/// Chooses the experts of each row of `x`. If `norm` is given, the row is normalised first.
#[derive(Debug, Clone, Copy)]
pub struct Router<'a> {
    pub layer: &'a MoeWeights,
    pub tokens: usize,
    /// `[tokens, hidden]`.
    pub x: Region,
    pub norm: Option<Norm>,
    /// Skips the shared expert. A row of scores then has one value for each routed expert.
    pub skip_shared: bool,
    /// Slot of each expert, u32 `[experts]`. Experts that are not loaded have [`NO_SLOT`](super::NO_SLOT).
    pub table: Region,
    /// Buffer for `router | shared gate | shared up | weight of the shared result`, `[tokens, layer.width()]`. A GPU with
    /// experts on matrix units leaves gate and up to the experts, and stores `router | weight of the shared result`.
    pub scores: Region,
    /// Chosen experts, u32 `[tokens, k]`, most likely first.
    pub ids: Region,
    /// Slots of the chosen experts, u32 `[tokens, k]`.
    pub slots: Region,
    /// Weights of the chosen experts, f32 `[tokens, k + 1]`. The shared expert's weight comes last.
    pub weights: Region,
}

impl Router<'_> {
    fn width(&self) -> usize {
        if self.skip_shared { self.layer.router.rows } else { self.layer.width() }
    }

    fn shared(&self) -> Option<&SharedExpert> {
        self.layer.shared.as_ref().filter(|_| !self.skip_shared)
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
