//! The router's choice, embeddings, weights as values and the plain norm: `route.metal`, `weights.metal`, `norm.metal`.

use super::{Binding, Dispatch, Float, Matrix, Region, floats};

/// `experts` scores stand first in rows of `width`; the shared expert's gate stands at `gate_at` if there is one.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Route {
    pub experts: usize,
    pub k: usize,
    pub width: usize,
    pub gate_at: Option<usize>,
    /// A token's weights sum to one.
    pub renormalise: bool,
}

/// What the router decides: `[tokens * k]` ids and slots, `[tokens, k + 1]` weights (the last is the shared expert's).
#[derive(Debug, Clone, Copy)]
pub struct Chosen {
    pub ids: Region,
    pub slots: Region,
    pub weights: Region,
}

/// Softmax, top k, renormalise. `table` `[experts]` holds each expert's slot. Panics above 1024 experts.
pub fn route(op: &Route, tokens: usize, scores: Region, table: Region, to: Chosen) -> Dispatch {
    assert!(op.experts <= 1024 && op.k <= op.experts, "{} of {} experts", op.k, op.experts);
    let gate = [op.gate_at.unwrap_or(0), op.gate_at.is_some().into(), op.renormalise.into()];
    let words = [op.experts, op.k, op.width, gate[0], gate[1], gate[2]];
    Dispatch {
        kernel: "route",
        args: words.map(|w| w as u32).to_vec(),
        bindings: vec![
            Binding::read(floats(scores, tokens * op.width)),
            Binding::read(floats(table, op.experts)),
            Binding::write(floats(to.ids, tokens * op.k)),
            Binding::write(floats(to.slots, tokens * op.k)),
            Binding::write(floats(to.weights, tokens * (op.k + 1))),
        ],
        grid: [tokens as u32, 1, 1],
        threads: 32,
    }
}

/// `h[token] = row ids[token]` of the embedding; an id past the end takes the last row.
pub fn embed(weight: &Matrix, tokens: usize, ids: Region, h: Region) -> Dispatch {
    let mut args = vec![weight.cols as u32, 0];
    args.extend(weight.words());
    let mut bindings = vec![Binding::read(floats(ids, tokens))];
    bindings.extend(weight.bindings());
    bindings.push(Binding::write(floats(h, tokens * weight.cols)));
    Dispatch {
        kernel: "embed",
        args,
        bindings,
        grid: [weight.cols.div_ceil(512) as u32, tokens as u32, 1],
        threads: 32,
    }
}

/// The whole matrix as f16 or f32 values, for a matrix product. Panics for bf16.
pub fn dequantise(weight: &Matrix, float: Float, out: Region) -> Dispatch {
    assert!(float != Float::Bf16, "weights are expanded to f16 or f32");
    let mut args = vec![weight.cols as u32, if float == Float::F32 { 0 } else { 1 }];
    args.extend(weight.words());
    let mut bindings = weight.bindings().to_vec();
    bindings.push(Binding::write(out.first(weight.rows * weight.cols * float.bytes())));
    let grid = [weight.cols.div_ceil(512) as u32, weight.rows as u32, 1];
    Dispatch { kernel: "dequantise", args, bindings, grid, threads: 32 }
}

/// `y = x / rms(x) * w` for rows of `w`'s length.
pub fn rms_norm(rows: usize, cols: usize, eps: f32, x: Region, w: Region, y: Region) -> Dispatch {
    Dispatch {
        kernel: "rms_norm",
        args: vec![rows as u32, cols as u32, 0, 0, eps.to_bits()],
        bindings: vec![
            Binding::read(floats(x, rows * cols)),
            Binding::read(floats(w, cols)),
            Binding::write(floats(y, rows * cols)),
        ],
        grid: [rows as u32, 1, 1],
        threads: 256,
    }
}
