//! Rows in half precision, for matrix units: `half_rows` of `kernels/norm.metal`, and the products that take them.

use super::{
    Norm, Project,
    gpu::{args, four},
};
use crate::{
    device::{Binding, Dispatch, Region},
    ops::weight::{Weight, fast},
};

/// Columns that a product takes at a time: rows of halves have zeros up to a multiple.
const DEPTH: usize = 64;
/// Rows of x, and of a matrix, that a threadgroup multiplies.
const TILE: [usize; 2] = [64, 64];

/// Room for rows in half precision: those that go into a product, and the activations between two.
#[derive(Debug, Clone, Copy, Default)]
pub struct Halves {
    pub x: Region,
    pub act: Region,
}

impl Halves {
    /// Words of room for a row of `cols` values.
    pub fn words(cols: usize) -> usize {
        cols.next_multiple_of(DEPTH) / 2 + 1
    }
}

/// Rows of halves, and the power of two that each is to be multiplied by.
#[derive(Debug, Clone, Copy)]
pub(in crate::ops) struct HalfRows {
    values: Region,
    scales: Region,
    cols: usize,
}

impl HalfRows {
    pub fn new(room: Region, rows: usize, cols: usize) -> Self {
        let bytes = rows * cols.next_multiple_of(DEPTH) * 2;
        Self { values: room.first(bytes), scales: room.part(bytes, rows * 4), cols }
    }

    pub fn bindings(&self) -> [Binding; 2] {
        [self.values, self.scales].map(Binding::read)
    }

    /// Writes all rows from `x`, which has `stride` floats a row, or from its norm.
    pub fn fill(&self, x: Region, stride: usize, norm: Option<Norm>) -> Dispatch {
        self.launch(x, stride, norm, None, self.scales.len / 4)
    }

    /// Writes the rows that `list` names, `count` of them.
    pub fn fill_some(&self, x: Region, stride: usize, list: Region, count: usize) -> Dispatch {
        self.launch(x, stride, None, Some(list.floats(count)), count)
    }

    fn launch(&self, x: Region, stride: usize, norm: Option<Norm>, list: Option<Region>, count: usize) -> Dispatch {
        let (cols, rows, none) = (self.cols, self.scales.len / 4, Binding::read(x.first(0)));
        let keep = norm.and_then(|norm| norm.keep);
        let words = [cols, stride, cols.next_multiple_of(DEPTH), norm.is_some().into(), keep.is_some().into()];
        let mut args = words.map(|w| w as u32).to_vec();
        args.extend([list.is_some().into(), norm.map_or(0.0, |norm| norm.eps).to_bits()]);
        let write = if list.is_some() { Binding::update } else { Binding::write };
        Dispatch {
            kernel: "half_rows",
            args,
            bindings: vec![
                Binding::read(x.floats(rows * stride)),
                norm.map_or(none, |norm| Binding::read(norm.weight.floats(cols))),
                list.map_or(none, Binding::read),
                write(self.values),
                write(self.scales),
                keep.map_or(none, |keep| Binding::write(keep.floats(rows * cols))),
            ],
            grid: [count as u32, 1, 1],
            threads: 128,
        }
    }

    /// `y = x W^T` for one to four matrices, whose rows follow one another from column `at` of rows of `width`; `y +=` with `add`.
    pub fn product(&self, matrices: &[Weight], y: Region, (at, width): (usize, usize), add: bool) -> Dispatch {
        let (tokens, cols) = (self.scales.len / 4, self.cols);
        let any = !matrices.iter().all(|m| fast(m.codes, m.gain, m.cols, &[4, 8]));
        let rows: usize = matrices.iter().map(|m| m.rows).sum();
        let y = y.floats(tokens * width).part(at * 4, (tokens * width - at) * 4);
        let mut bindings = self.bindings().to_vec();
        bindings.push(if add || rows < width { Binding::update(y) } else { Binding::write(y) });
        bindings.extend(four(matrices).flat_map(Weight::bindings));
        let blocks: usize = matrices.iter().map(|m| m.rows.div_ceil(TILE[1])).sum();
        Dispatch {
            kernel: if any { "gemm_any" } else { "gemm_fast" },
            args: args([tokens, cols, width], matrices, add, false, 0.0),
            bindings,
            grid: [tokens.div_ceil(TILE[0]) as u32, blocks as u32, 1],
            threads: 128,
        }
    }
}

impl Project<'_> {
    /// The same as [`Project::dispatch`] on matrix units, in half precision.
    pub fn halves(&self, room: Region) -> [Dispatch; 2] {
        let Self { x, tokens, norm, matrices, y, add } = *self;
        let (cols, width) = (self.cols(), self.width());
        let rows = HalfRows::new(room, tokens, cols);
        [rows.fill(x, cols, norm), rows.product(matrices, y, (0, width), add)]
    }
}
