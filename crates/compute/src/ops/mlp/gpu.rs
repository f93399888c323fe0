//! The dense feed-forward on a GPU.

use super::Mlp;
use crate::{
    device::{Launch, Region},
    ops::{experts, linear::Linear},
};

impl Mlp<'_> {
    /// [`Mlp::launches`] in half precision on matrix units.
    pub(in crate::ops) fn half_launches(&self, buffers: Region) -> Vec<Launch> {
        let (gate_up, act, down) = self.steps();
        [&gate_up.half_launches(buffers)[..], &[act], &down.half_launches(buffers)].concat()
    }

    /// Three launches: gate and up, their activation, and down, whose result is added to `h`.
    pub fn launches(&self) -> [Launch; 3] {
        let (gate_up, act, down) = self.steps();
        [gate_up.launch(), act, down.launch()]
    }

    fn steps(&self) -> (Linear<'_>, Launch, Linear<'_>) {
        let Self { tokens, norm, gate_up, down, scores, act, h } = *self;
        let inner = down.cols;
        (
            Linear { x: h, tokens, norm: Some(norm), matrices: gate_up, y: scores, add: false },
            experts::swiglu(tokens, inner, scores, 2 * inner, 0, act),
            Linear { x: act, tokens, norm: None, matrices: std::slice::from_ref(down), y: h, add: true },
        )
    }
}
