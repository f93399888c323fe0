//! The dense feed-forward on a GPU.

use super::Mlp;
use crate::{
    device::Launch,
    ops::{
        experts,
        linear::{HalfBuffers, Linear, RowSource, RowTiles},
    },
};

impl Mlp<'_> {
    /// [`Mlp::launches`] in half precision on matrix units.
    pub(in crate::ops) fn half_launches(&self, buffers: HalfBuffers) -> Vec<Launch> {
        let (gate_up, act, down) = self.steps();
        [&gate_up.half_launches(buffers)[..], &[act], &down.half_launches(buffers)].concat()
    }

    /// The launches of gate and up, of their activation, and of down, whose result is added to `h`.
    pub fn launches(&self, tiles: Option<RowTiles>) -> Vec<Launch> {
        let (gate_up, act, down) = self.steps();
        let mut launches = gate_up.launches(tiles);
        // On matrix units, the launch that splits the rows also computes the activation.
        let from_scores = Linear { x: self.scores, ..down };
        match from_scores.tiled(tiles, RowSource::Swiglu) {
            Some(tiled) => launches.extend(tiled),
            None => launches.extend([act, down.launch()]),
        }
        launches
    }

    /// Number of words of the buffer for split rows.
    pub fn split_words(&self, min_weights: usize) -> usize {
        let (gate_up, _, down) = self.steps();
        gate_up.split_words(min_weights).max(down.split_words(min_weights))
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
