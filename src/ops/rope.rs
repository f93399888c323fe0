//! Queries and keys of full attention: a norm per head, then a rotation of the first dimensions (spec 2.1).

use super::{norm::normalise, view::Rows};
use crate::device::Compute;
use candle_core::{CpuStorage, CustomOp1, Layout, Result, Shape, Tensor};

/// Cosines and sines of a run of positions, computed once for all layers.
pub struct Rotation {
    /// Half the number of rotated dimensions.
    half: usize,
    /// `half` pairs (cos, sin) a position.
    table: Vec<(f32, f32)>,
}

impl Rotation {
    /// Positions `start..start + count`; dimension `j` and `j + rotated / 2` turn by `position * theta^(-2j / rotated)`.
    pub fn new(start: usize, count: usize, rotated: usize, theta: f64) -> Self {
        let half = rotated / 2;
        let frequencies: Vec<f64> = (0..half).map(|j| theta.powf(-2.0 * j as f64 / rotated as f64)).collect();
        let positions = (start..start + count).flat_map(|position| {
            frequencies.iter().map(move |frequency| {
                let angle = position as f64 * frequency;
                (angle.cos() as f32, angle.sin() as f32)
            })
        });
        Self { half, table: positions.collect() }
    }

    /// `half` pairs (cos, sin) a position.
    pub fn pairs(&self) -> &[(f32, f32)] {
        &self.table
    }

    #[inline(always)]
    pub(super) fn turn(&self, token: usize, head: &mut [f32]) {
        let (low, high) = head[..2 * self.half].split_at_mut(self.half);
        for ((low, high), (cos, sin)) in low.iter_mut().zip(high).zip(&self.table[token * self.half..]) {
            (*low, *high) = (*low * cos - *high * sin, *high * cos + *low * sin);
        }
    }
}

/// What the heads of one attention layer have in common.
#[derive(Clone, Copy)]
pub struct HeadNorm<'a> {
    /// `[D]`.
    pub weight: &'a [f32],
    pub eps: f32,
}

/// The queries: `projected` is `[T, H * 2 * D]`, per head D query values and D gate values; the result is `[T, H, D]`,
/// normed and turned.
pub fn queries(compute: &Compute, projected: &Tensor, norm: HeadNorm<'_>, rotation: &Rotation) -> Result<Tensor> {
    projected.apply_op1_no_bwd(&Queries { compute, norm, rotation })
}

struct Queries<'a> {
    compute: &'a Compute,
    norm: HeadNorm<'a>,
    rotation: &'a Rotation,
}

impl CustomOp1 for Queries<'_> {
    fn name(&self) -> &'static str {
        "queries"
    }

    fn cpu_fwd(&self, p: &CpuStorage, l: &Layout) -> Result<(CpuStorage, Shape)> {
        let (projected, dim) = (Rows::new(p, l)?, self.norm.weight.len());
        let heads = projected.width() / (2 * dim);
        let mut y = vec![0f32; projected.count() * heads * dim];
        self.compute.threads.run_pieces(&mut y, heads * dim, &|token, y| {
            for (y, x) in y.chunks_exact_mut(dim).zip(projected.row(token).chunks_exact(2 * dim)) {
                normalise(&x[..dim], self.norm.weight, self.norm.eps, y);
                self.rotation.turn(token, y);
            }
        });
        Ok((CpuStorage::F32(y), Shape::from((projected.count(), heads, dim))))
    }
}
