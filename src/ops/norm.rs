//! RMS norms: the plain one before every sublayer, and the gated one at the end of a delta layer (spec 2, 2.2).

use super::{
    linear::contiguous,
    math::silu,
    simd::{float, wide},
    view::Rows,
};
use crate::device::Compute;
use candle_core::{CpuStorage, CustomOp2, CustomOp3, Layout, Result, Shape, Tensor, bail};

/// `x / sqrt(mean(x^2) + eps) * weight`, row by row: `x` is `[T, H]`, `weight` `[H]`.
pub fn rms_norm(compute: &Compute, x: &Tensor, weight: &Tensor, eps: f32) -> Result<Tensor> {
    x.apply_op2_no_bwd(weight, &RmsNorm { compute, eps })
}

struct RmsNorm<'a> {
    compute: &'a Compute,
    eps: f32,
}

impl CustomOp2 for RmsNorm<'_> {
    fn name(&self) -> &'static str {
        "rms-norm"
    }

    fn cpu_fwd(&self, x: &CpuStorage, l: &Layout, w: &CpuStorage, wl: &Layout) -> Result<(CpuStorage, Shape)> {
        let (x, weight) = (Rows::new(x, l)?, contiguous(w, wl)?);
        let (count, width) = (x.count(), x.width());
        if weight.len() != width {
            bail!("rms-norm: {} weights for rows of {width}", weight.len())
        }
        let mut y = vec![0f32; count * width];
        self.compute.threads.run_pieces(&mut y, 16 * width, &|task, piece| {
            for (row, y) in piece.chunks_exact_mut(width).enumerate() {
                normalise(x.row(task * 16 + row), weight, self.eps, y);
            }
        });
        Ok((CpuStorage::F32(y), Shape::from((count, width))))
    }
}

wide! {
    /// One row: `y = x / sqrt(mean(x^2) + eps) * weight`. The sum's order is fixed by its length alone.
    pub(super) fn normalise(x: &[f32], weight: &[f32], eps: f32, y: &mut [f32]) {
        let [square] = float::dot::<V, 1>(x, [x]);
        let scale = 1.0 / (square / x.len() as f32 + eps).sqrt();
        for ((y, x), w) in y.iter_mut().zip(x).zip(weight) {
            *y = x * scale * w;
        }
    }
}

wide! {
    fn multiply(y: &mut [f32], z: &[f32]) {
        for (y, z) in y.iter_mut().zip(z) {
            *y *= silu(*z);
        }
    }
}

/// `rms_norm(o) * silu(z)` per head: `o` is `[heads, T, D]`, `z` `[T, heads * D]`, `weight` `[D]` for all heads; the
/// result is `[T, heads * D]`.
pub fn gated_norm(compute: &Compute, o: &Tensor, z: &Tensor, weight: &Tensor, eps: f32) -> Result<Tensor> {
    o.apply_op3_no_bwd(z, weight, &GatedNorm { compute, eps })
}

struct GatedNorm<'a> {
    compute: &'a Compute,
    eps: f32,
}

impl CustomOp3 for GatedNorm<'_> {
    fn name(&self) -> &'static str {
        "gated-norm"
    }

    fn cpu_fwd(
        &self,
        o: &CpuStorage,
        ol: &Layout,
        z: &CpuStorage,
        zl: &Layout,
        w: &CpuStorage,
        wl: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let (heads, tokens, width) = ol.shape().dims3()?;
        let (o, z, weight) = (contiguous(o, ol)?, Rows::new(z, zl)?, contiguous(w, wl)?);
        if weight.len() != width || z.count() != tokens || z.width() != heads * width {
            bail!("gated-norm: [{heads}, {tokens}, {width}] with gates [{}, {}]", z.count(), z.width())
        }
        let mut y = vec![0f32; tokens * heads * width];
        self.compute.threads.run_pieces(&mut y, heads * width, &|token, y| {
            for (head, y) in y.chunks_exact_mut(width).enumerate() {
                let start = (head * tokens + token) * width;
                normalise(&o[start..start + width], weight, self.eps, y);
            }
            multiply(y, z.row(token));
        });
        Ok((CpuStorage::F32(y), Shape::from((tokens, heads * width))))
    }
}
