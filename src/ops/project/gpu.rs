//! `kernels/linear.metal`.

use super::Project;
use crate::{
    device::{Binding, Dispatch},
    ops::weight::{Weight, fast},
};

const NAMES: [[[&str; 2]; 2]; 2] = [
    [["linear_1", "linear_2"], ["linear_norm_1", "linear_norm_2"]],
    [["linear_any_1", "linear_any_2"], ["linear_any_norm_1", "linear_any_norm_2"]],
];

/// Rows of x that a threadgroup takes where there are several: a thread's registers have no room for more.
const TOGETHER: usize = 2;

/// `LinearArgs`: tokens, columns, floats in a row of results, and what is done with them.
pub(super) fn args(sizes: [usize; 3], matrices: &[Weight], add: bool, keep: bool, eps: f32) -> Vec<u32> {
    assert!((1..=4).contains(&matrices.len()), "{} matrices in one launch", matrices.len());
    let mut args = sizes.map(|size| size as u32).to_vec();
    args.extend([matrices.len() as u32, add.into(), keep.into(), eps.to_bits()]);
    args.extend(four(matrices).flat_map(Weight::words));
    args
}

/// As many as a kernel has bindings for: the last one stands in for those that are not there.
pub(super) fn four(matrices: &[Weight]) -> impl Iterator<Item = &Weight> {
    (0..4).map(|i| &matrices[i.min(matrices.len() - 1)])
}

/// Rows of all matrices of a launch that do not fill a large card otherwise.
const FEW: usize = 4096;

impl Project<'_> {
    /// Panics if there is no matrix, or more than four.
    pub fn dispatch(&self) -> Dispatch {
        self.dispatch_into(self.width())
    }

    /// The same into the first columns of rows of `width` floats.
    pub(in crate::ops) fn dispatch_into(&self, width: usize) -> Dispatch {
        let Self { x, tokens, norm, matrices, y, add } = *self;
        let cols = self.cols();
        let any = !matrices.iter().all(|m| fast(m.codes, m.gain, m.cols, &[4, 8]));
        let keep = norm.and_then(|n| n.keep);
        let x = x.floats(tokens * cols);
        let y = y.floats(tokens * width);
        let mut bindings = vec![
            Binding::read(x),
            Binding::read(norm.map_or(x.first(0), |n| n.weight.floats(cols))),
            if add || width > self.width() { Binding::update(y) } else { Binding::write(y) },
            keep.map_or(Binding::read(x.first(0)), |kept| Binding::write(kept.floats(tokens * cols))),
        ];
        bindings.extend(four(matrices).flat_map(Weight::bindings));
        let batch = tokens > 1;
        // The four simdgroups of a threadgroup have four rows each, or share four where there are few; but not those of the shared
        // expert's down, whose sums are those of `experts_down`.
        let few = !any && (add || norm.is_some()) && matrices.iter().map(|m| m.rows).sum::<usize>() <= FEW;
        let blocks: usize = matrices.iter().map(|m| m.rows.div_ceil(if few { 4 } else { 16 })).sum();
        Dispatch {
            kernel: NAMES[usize::from(any)][usize::from(norm.is_some())][usize::from(batch)],
            args: args([tokens, cols, width], matrices, add, keep.is_some(), norm.map_or(0.0, |n| n.eps)),
            bindings,
            grid: [tokens.div_ceil(if batch { TOGETHER } else { 1 }) as u32, blocks as u32, 1],
            threads: 128,
        }
    }
}
