//! Linear layers: `y = x W^T` for matrices that share `x`, with an optional norm before and an optional residual sum
//! after.

mod cpu;
mod gpu;
mod matmul;
pub(super) mod products;
mod row_tiles;

pub use gpu::HalfBuffers;
pub(in crate::ops) use gpu::HalfRows;
pub(in crate::ops) use matmul::{OutputColumns, check, normed, product, reuse_empty};
pub use row_tiles::{RowSource, RowTiles};

use super::Weight;
use crate::device::{BufferAccess, Region};

/// RMS norm of each row: `x / sqrt(mean(x^2) + eps) * weight`.
#[derive(Debug, Clone, Copy)]
pub struct Norm {
    /// `[cols]` f32.
    pub weight: Region,
    pub eps: f32,
    /// Receives the normalised rows, f32 `[tokens, cols]`.
    pub keep: Option<Region>,
}

/// One to four matrices with the same `cols`. The outputs of the matrices are concatenated in each row of `y`.
#[derive(Debug, Clone, Copy)]
pub struct Linear<'a> {
    /// `[tokens, cols]` f32.
    pub x: Region,
    pub tokens: usize,
    pub norm: Option<Norm>,
    pub matrices: &'a [Weight],
    /// `[tokens, sum of rows]` f32.
    pub y: Region,
    /// If true, computes `y += x W^T` instead of `y = x W^T`.
    pub add: bool,
}

impl Linear<'_> {
    fn cols(&self) -> usize {
        self.matrices.first().map_or(0, |matrix| matrix.cols)
    }

    pub(super) fn width(&self) -> usize {
        self.matrices.iter().map(|matrix| matrix.rows).sum()
    }

    pub(super) fn touches(&self, see: &mut dyn FnMut(Region, BufferAccess)) {
        see(self.x.floats(self.tokens * self.cols()), BufferAccess::Read);
        if let Some(keep) = self.norm.and_then(|norm| norm.keep) {
            see(keep.floats(self.tokens * self.cols()), BufferAccess::Write);
        }
        let effect = if self.add { BufferAccess::ReadWrite } else { BufferAccess::Write };
        see(self.y.floats(self.tokens * self.width()), effect);
    }
}
