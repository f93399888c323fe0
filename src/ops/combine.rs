//! The weighted sum of a token's experts, in router rank order, and the gated shared expert.

use candle_core::{CpuStorage, CustomOp1, CustomOp3, Layout, Result, Shape, Tensor, bail};

use super::{
    linear::contiguous,
    simd::{self, wide},
};
use crate::device::Compute;

/// `y[t] = sum over r < k of weights[t * k + r] * out[t * k + r]`, in this order, `+ gate[t] * shared[t]` if there is a
/// shared expert.
///
/// `out` is `[at least T * k, H]`, `weights` has `T * k` values, `shared` is `([T, H], T gates)`; the result is `[T, H]`.
/// All f32.
pub fn combine(
    compute: &Compute,
    out: &Tensor,
    weights: &[f32],
    k: usize,
    shared: Option<(&Tensor, &Tensor)>,
) -> Result<Tensor> {
    let op = Combine { compute, weights, k };
    match shared {
        None => out.apply_op1_no_bwd(&op),
        Some((shared, gate)) => out.apply_op3_no_bwd(shared, gate, &op),
    }
}

struct Combine<'a> {
    compute: &'a Compute,
    weights: &'a [f32],
    k: usize,
}

impl Combine<'_> {
    fn forward(&self, out: &[f32], hidden: usize, shared: Option<(&[f32], &[f32])>) -> Result<(CpuStorage, Shape)> {
        let (weights, k) = (self.weights, self.k);
        if k == 0 || !weights.len().is_multiple_of(k) || out.len() < weights.len() * hidden {
            bail!("combine: {} weights, {k} a token, for {} values of {hidden}", weights.len(), out.len())
        }
        let tokens = weights.len() / k;
        if let Some((shared, gate)) = shared
            && (shared.len() != tokens * hidden || gate.len() != tokens)
        {
            bail!("combine: {} shared values and {} gates for {tokens} tokens", shared.len(), gate.len())
        }
        let mut y = vec![0f32; tokens * hidden];
        let base = simd::Out(y.as_mut_ptr());
        self.compute.threads.run_split(tokens, 16, &|range| {
            let base = &base;
            for token in range {
                // SAFETY: the ranges of a split are disjoint: this row of `y` is ours.
                let y = unsafe { std::slice::from_raw_parts_mut(base.0.add(token * hidden), hidden) };
                add(y, &weights[token * k..(token + 1) * k], &out[token * k * hidden..(token + 1) * k * hidden]);
                if let Some((shared, gate)) = shared {
                    add(y, &gate[token..=token], &shared[token * hidden..(token + 1) * hidden]);
                }
            }
        });
        Ok((CpuStorage::F32(y), Shape::from((tokens, hidden))))
    }
}

wide! {
    /// Adds every row of `x`, weighted.
    fn add(y: &mut [f32], weights: &[f32], x: &[f32]) {
        for (weight, x) in weights.iter().zip(x.chunks_exact(y.len())) {
            for (y, x) in y.iter_mut().zip(x) {
                *y = weight.mul_add(*x, *y);
            }
        }
    }
}

impl CustomOp1 for Combine<'_> {
    fn name(&self) -> &'static str {
        "combine"
    }

    fn cpu_fwd(&self, out: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let (_, hidden) = layout.shape().dims2()?;
        self.forward(contiguous(out, layout)?, hidden, None)
    }
}

impl CustomOp3 for Combine<'_> {
    fn name(&self) -> &'static str {
        "combine"
    }

    fn cpu_fwd(
        &self,
        out: &CpuStorage,
        layout: &Layout,
        shared: &CpuStorage,
        shared_layout: &Layout,
        gate: &CpuStorage,
        gate_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let (_, hidden) = layout.shape().dims2()?;
        let shared = (contiguous(shared, shared_layout)?, contiguous(gate, gate_layout)?);
        self.forward(contiguous(out, layout)?, hidden, Some(shared))
    }
}
