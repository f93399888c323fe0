//! `y = x W^T` for matrices that share `x`: `kernels/linear.metal`.

use super::{Binding, Dispatch, Matrix, Region, fast, floats};

/// RMS norm of `x` on its way into the product.
#[derive(Debug, Clone, Copy)]
pub struct Norm {
    /// `[cols]` f32.
    pub weight: Region,
    pub eps: f32,
    /// Where to leave the normed rows `[tokens, cols]` f32.
    pub keep: Option<Region>,
}

/// One to four matrices of equal `cols`; their rows follow one another in `y`.
#[derive(Debug, Clone, Copy)]
pub struct Linear<'a> {
    /// `[tokens, cols]` f32.
    pub x: Region,
    pub tokens: usize,
    pub norm: Option<Norm>,
    pub matrices: &'a [Matrix],
    /// `[tokens, sum of rows]` f32.
    pub y: Region,
    /// `y += x W^T` instead of `y = x W^T`.
    pub add: bool,
}

const NAMES: [[[&str; 2]; 2]; 2] = [
    [["linear_1", "linear_4"], ["linear_norm_1", "linear_norm_4"]],
    [["linear_any_1", "linear_any_4"], ["linear_any_norm_1", "linear_any_norm_4"]],
];

/// Panics if there is no matrix, or more than four.
pub fn linear(op: &Linear) -> Dispatch {
    let Linear { x, tokens, norm, matrices, y, add } = *op;
    assert!((1..=4).contains(&matrices.len()), "{} matrices in one launch", matrices.len());
    let cols = matrices[0].cols;
    let width: usize = matrices.iter().map(|m| m.rows).sum();
    let any = !matrices.iter().all(|m| fast(m.codes, m.gain, m.cols, &[4, 8]));
    let keep = norm.and_then(|n| n.keep);
    let eps = norm.map_or(0.0, |n| n.eps);

    let mut args =
        vec![tokens as u32, cols as u32, width as u32, matrices.len() as u32, add.into(), keep.is_some().into()];
    args.push(eps.to_bits());
    for i in 0..4 {
        args.extend(matrices[i.min(matrices.len() - 1)].words());
    }
    let x = floats(x, tokens * cols);
    let y = floats(y, tokens * width);
    let mut bindings = vec![
        Binding::read(x),
        Binding::read(norm.map_or(x.first(0), |n| floats(n.weight, cols))),
        if add { Binding::update(y) } else { Binding::write(y) },
        keep.map_or(Binding::read(x.first(0)), |kept| Binding::write(floats(kept, tokens * cols))),
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
        threads: if batch { 128 } else { 64 },
    }
}
