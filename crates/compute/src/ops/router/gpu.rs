//! The router on a GPU.

use super::Router;
use crate::{
    device::{Binding, Launch, SkipUse},
    ops::{
        experts::SharedExpert,
        linear::{HalfBuffers, Linear},
    },
};

impl Router<'_> {
    /// Launches the matrix product of the scores, then the selection. If the experts are `tiled`, their launch computes the
    /// shared expert's gate and up, and the weight of the shared result comes directly after the router's scores. Panics
    /// above 1024 experts.
    pub fn launches(&self, tiled: bool) -> [Launch; 2] {
        let Self { layer, tokens, x, norm, scores, .. } = *self;
        let matrices = match self.shared() {
            Some(_) => &layer.score_matrices(tiled)[..],
            None => &[layer.router],
        };
        let product = Linear { x, tokens, norm, matrices, y: scores, add: false };
        let gate_at = if tiled { layer.router.rows } else { self.width() - 1 };
        [product.launch_split(self.width()), self.choice(gate_at)]
    }

    /// [`Router::launches`], with the shared expert's products on matrix units. The router's scores stay in f32. The
    /// scores are computed from the normalised rows, so a norm must have `keep` set.
    pub(in crate::ops) fn half_launches(&self, buffers: HalfBuffers) -> Option<Vec<Launch>> {
        let Self { layer, tokens, x, norm, scores, .. } = *self;
        let kept = match norm {
            Some(norm) => norm.keep?,
            None => self.shared().map(|_| x)?,
        };
        let cols = layer.router.cols;
        let experts = layer.router.rows;
        let width = self.width();
        let rows = buffers.rows(tokens, cols);
        let matrices = std::slice::from_ref(&layer.router);
        let router = Linear { x: kept, tokens, norm: None, matrices, y: scores, add: false };
        let mut launches = vec![rows.fill(x, cols, norm), router.launch_into(width)];
        if let Some(SharedExpert { gate_up: [gate, up], result, .. }) = self.shared() {
            let shared = Linear { matrices: &[*gate, *up, *result], ..router };
            launches.extend(shared.products(&rows, experts, width));
        }
        launches.push(self.choice(width - 1));
        Some(launches)
    }

    /// The second launch: selects each row's k experts and computes their weights. The weight of the shared expert's
    /// result is in column `gate_at`.
    pub fn choice(&self, gate_at: usize) -> Launch {
        let Self { layer, tokens, table, scores, ids, slots, weights, .. } = *self;
        let experts = layer.router.rows;
        let k = layer.k;
        let width = self.width();
        assert!(experts <= 1024 && k <= experts, "{k} of {experts} experts");
        let shared = self.shared().is_some();
        let words = [0, experts, k, width, gate_at, shared.into(), layer.renormalise.into()];
        Launch {
            kernel: "router",
            args: words.map(|w| w as u32).to_vec(),
            bindings: vec![
                Binding::read(scores.floats(tokens * width)),
                Binding::read(table.floats(experts)),
                Binding::write(ids.floats(tokens * k)),
                Binding::write(slots.floats(tokens * k)),
                Binding::write(weights.floats(tokens * (k + 1))),
                Binding::no_skip_flag(scores),
            ],
            grid: [tokens as u32, 1, 1],
            threads: 32,
            skip: SkipUse::Sets,
        }
    }
}
