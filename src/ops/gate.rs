//! The gate of full attention (spec 2.1).

use candle_core::{CpuStorage, CustomOp2, Layout, Result, Shape, Tensor, bail};

use super::{linear::contiguous, math::sigmoid, simd::wide, view::Rows};
use crate::device::Compute;

/// `o * sigmoid(gate)`: `o` is `[T, H * D]`, the gates are the second D of every 2 D of `projected` (`[T, H * 2 * D]`).
pub fn gate(compute: &Compute, o: &Tensor, projected: &Tensor, dim: usize) -> Result<Tensor> {
    o.apply_op2_no_bwd(projected, &Gate { compute, dim })
}

struct Gate<'a> {
    compute: &'a Compute,
    dim: usize,
}

impl CustomOp2 for Gate<'_> {
    fn name(&self) -> &'static str {
        "gate"
    }

    fn cpu_fwd(&self, o: &CpuStorage, ol: &Layout, p: &CpuStorage, pl: &Layout) -> Result<(CpuStorage, Shape)> {
        let (tokens, width) = ol.shape().dims2()?;
        let (o, projected) = (contiguous(o, ol)?, Rows::new(p, pl)?);
        if projected.width() != 2 * width || projected.count() != tokens {
            bail!("gate: [{tokens}, {width}] with [{}, {}]", projected.count(), projected.width())
        }
        let mut y = o.to_vec();
        self.compute.threads.run_pieces(&mut y, width, &|token, y| {
            for (y, gate) in y.chunks_exact_mut(self.dim).zip(projected.row(token).chunks_exact(2 * self.dim)) {
                multiply(y, &gate[self.dim..]);
            }
        });
        Ok((CpuStorage::F32(y), Shape::from((tokens, width))))
    }
}

wide! {
    fn multiply(y: &mut [f32], gate: &[f32]) {
        for (y, gate) in y.iter_mut().zip(gate) {
            *y *= sigmoid(*gate);
        }
    }
}
