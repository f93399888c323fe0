//! `kernels/linear.metal`.

use super::Project;
use crate::{
    device::{Binding, Dispatch},
    ops::weight::fast,
};

const NAMES: [[[&str; 2]; 2]; 2] = [
    [["linear_1", "linear_4"], ["linear_norm_1", "linear_norm_4"]],
    [["linear_any_1", "linear_any_4"], ["linear_any_norm_1", "linear_any_norm_4"]],
];

impl Project<'_> {
    /// Panics if there is no matrix, or more than four.
    pub fn dispatch(&self) -> Dispatch {
        self.dispatch_into(self.width())
    }

    /// The same into the first columns of rows of `width` floats.
    pub(in crate::ops) fn dispatch_into(&self, width: usize) -> Dispatch {
        let Self { x, tokens, norm, matrices, y, add } = *self;
        assert!((1..=4).contains(&matrices.len()), "{} matrices in one launch", matrices.len());
        let cols = self.cols();
        let any = !matrices.iter().all(|m| fast(m.codes, m.gain, m.cols, &[4, 8]));
        let keep = norm.and_then(|n| n.keep);
        let eps = norm.map_or(0.0, |n| n.eps);

        let mut args =
            vec![tokens as u32, cols as u32, width as u32, matrices.len() as u32, add.into(), keep.is_some().into()];
        args.push(eps.to_bits());
        for i in 0..4 {
            args.extend(matrices[i.min(matrices.len() - 1)].words());
        }
        let x = x.floats(tokens * cols);
        let y = y.floats(tokens * width);
        let mut bindings = vec![
            Binding::read(x),
            Binding::read(norm.map_or(x.first(0), |n| n.weight.floats(cols))),
            if add || width > self.width() { Binding::update(y) } else { Binding::write(y) },
            keep.map_or(Binding::read(x.first(0)), |kept| Binding::write(kept.floats(tokens * cols))),
        ];
        for i in 0..4 {
            bindings.extend(matrices[i.min(matrices.len() - 1)].bindings());
        }
        let batch = tokens > 1;
        let blocks: usize = matrices.iter().map(|m| m.rows.div_ceil(16)).sum();
        Dispatch {
            kernel: NAMES[usize::from(any)][usize::from(norm.is_some())][usize::from(batch)],
            args,
            bindings,
            grid: [tokens.div_ceil(if batch { 4 } else { 1 }) as u32, blocks as u32, 1],
            threads: 128,
        }
    }
}
