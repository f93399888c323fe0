//! Causal attention over the cache, read in place: query head `n` uses key and value head `n / (H / KV)` (spec 2.1).

use super::{
    linear::contiguous,
    math::{exp, sigmoid},
    simd::{self, float},
    view::Rows,
};
use crate::device::Compute;
use candle_core::{CpuStorage, CustomOp2, CustomOp3, Layout, Result, Shape, Tensor, bail};

/// `softmax(q k^T / sqrt(D)) v` for queries `[T, H, D]` at positions `at..at + T` over caches `[KV, N, D]`; a query sees
/// its own position and those before. The result is `[T, H * D]`.
pub fn attend(compute: &Compute, q: &Tensor, keys: &Tensor, values: &Tensor, at: usize) -> Result<Tensor> {
    q.apply_op3_no_bwd(keys, values, &Attend { compute, at })
}

struct Attend<'a> {
    compute: &'a Compute,
    at: usize,
}

impl CustomOp3 for Attend<'_> {
    fn name(&self) -> &'static str {
        "attend"
    }

    fn cpu_fwd(
        &self,
        q: &CpuStorage,
        ql: &Layout,
        k: &CpuStorage,
        kl: &Layout,
        v: &CpuStorage,
        vl: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let (tokens, heads, dim) = ql.shape().dims3()?;
        let (shared, room, _) = kl.shape().dims3()?;
        let (q, keys, values) = (contiguous(q, ql)?, contiguous(k, kl)?, contiguous(v, vl)?);
        if kl.dims() != vl.dims() || kl.dims() != [shared, room, dim] || self.at + tokens > room {
            bail!("attend: {tokens} queries at {} over {:?} and {:?}", self.at, kl.dims(), vl.dims())
        }
        let scale = (dim as f32).powf(-0.5);
        let mut y = vec![0f32; tokens * heads * dim];
        self.compute.threads.run_pieces(&mut y, dim, &|task, y| {
            let (token, head) = (task / heads, task % heads);
            let start = head / (heads / shared) * room * dim;
            let seen = (self.at + token + 1) * dim;
            let (keys, values) = (&keys[start..start + seen], &values[start..start + seen]);
            simd::vectorised(simd::Isa::best(), || one(&q[task * dim..(task + 1) * dim], keys, values, scale, y));
        });
        Ok((CpuStorage::F32(y), Shape::from((tokens, heads * dim))))
    }
}

/// One query over the keys and values it sees, `[n, D]` each.
#[inline(always)]
fn one(q: &[f32], keys: &[f32], values: &[f32], scale: f32, y: &mut [f32]) {
    let mut scores: Vec<f32> = keys.chunks_exact(q.len()).map(|k| float::dot::<1>(k, [q])[0] * scale).collect();
    let most = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let mut sum = 0.0;
    for score in &mut scores {
        *score = exp(*score - most);
        sum += *score;
    }
    for (score, v) in scores.iter().zip(values.chunks_exact(q.len())) {
        for (y, v) in y.iter_mut().zip(v) {
            *y = score.mul_add(*v, *y);
        }
    }
    for y in y {
        *y /= sum;
    }
}

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
            simd::vectorised(simd::Isa::best(), || {
                for (y, gate) in y.chunks_exact_mut(self.dim).zip(projected.row(token).chunks_exact(2 * self.dim)) {
                    for (y, gate) in y.iter_mut().zip(&gate[self.dim..]) {
                        *y *= sigmoid(*gate);
                    }
                }
            });
        });
        Ok((CpuStorage::F32(y), Shape::from((tokens, width))))
    }
}
