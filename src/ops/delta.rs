//! The gated delta rule (spec 2.2): a matrix per head that forgets by `g`, is corrected towards `v` along `k`, and is
//! read along `q`. Always token by token, in prefill too: so a row's bytes do not depend on the chunk it came in.

use super::{
    math::{exp, sigmoid},
    simd::{self, float},
    view::{Rows, contiguous_mut},
};
use crate::device::Compute;
use candle_core::{CpuStorage, InplaceOp3, Layout, Result, Tensor, bail};
use std::cell::RefCell;

/// What a delta layer's heads have in common.
#[derive(Debug, Clone)]
pub struct DeltaHeads {
    pub key_heads: usize,
    pub value_heads: usize,
    pub key_dim: usize,
    pub value_dim: usize,
    /// `-exp(A_log)`, per value head.
    pub decay: Vec<f32>,
    /// Per value head.
    pub dt_bias: Vec<f32>,
}

/// Added to a sum of squares before the root.
const EPS: f32 = 1e-6;

/// One sequence through the rule. `mixed` is `[T, 2 * key_heads * key_dim + value_heads * value_dim]`: q, k, v after the
/// convolution. `gates` is `[T, 2 * value_heads]`: `b`, then `a`. `state` (`[value_heads, value_dim, key_dim]`) is updated
/// in place. The result is `[value_heads, T, value_dim]`.
pub fn delta_rule(
    compute: &Compute,
    heads: &DeltaHeads,
    mixed: &Tensor,
    gates: &Tensor,
    state: &Tensor,
) -> Result<Tensor> {
    let op = Delta { compute, heads, out: RefCell::default() };
    state.inplace_op3(mixed, gates, &op)?;
    let shape = (heads.value_heads, mixed.dim(0)?, heads.value_dim);
    Tensor::from_vec(op.out.into_inner(), shape, state.device())
}

struct Delta<'a> {
    compute: &'a Compute,
    heads: &'a DeltaHeads,
    out: RefCell<Vec<f32>>,
}

impl InplaceOp3 for Delta<'_> {
    fn name(&self) -> &'static str {
        "delta-rule"
    }

    fn cpu_fwd(
        &self,
        s: &mut CpuStorage,
        sl: &Layout,
        m: &CpuStorage,
        ml: &Layout,
        g: &CpuStorage,
        gl: &Layout,
    ) -> Result<()> {
        let &DeltaHeads { key_heads, value_heads, key_dim, value_dim, ref decay, ref dt_bias } = self.heads;
        let (state, mixed, gates) = (contiguous_mut(s, sl)?, Rows::new(m, ml)?, Rows::new(g, gl)?);
        let (tokens, keys) = (mixed.count(), key_heads * key_dim);
        if mixed.width() != 2 * keys + value_heads * value_dim
            || (gates.count(), gates.width()) != (tokens, 2 * value_heads)
            || state.len() != value_heads * value_dim * key_dim
        {
            bail!("delta-rule: {} values and {} gates a token for {:?}", mixed.width(), gates.width(), self.heads)
        }
        let head_len = value_dim * key_dim;
        // A head's state and its outputs, side by side, so that one task owns both.
        let mut out = vec![0f32; value_heads * tokens * value_dim];
        let mut pairs: Vec<_> =
            state.chunks_exact_mut(head_len).zip(out.chunks_exact_mut((tokens * value_dim).max(1))).collect();
        self.compute.threads.run_pieces(&mut pairs, 1, &|head, pair| {
            let key_head = head / (value_heads / key_heads);
            let (mut q, mut k) = (vec![0f32; key_dim], vec![0f32; key_dim]);
            for (state, out) in pair {
                simd::vectorised(simd::Isa::best(), || {
                    for (token, out) in out.chunks_exact_mut(value_dim).enumerate() {
                        let (row, gate) = (mixed.row(token), gates.row(token));
                        unit(&row[key_head * key_dim..][..key_dim], (key_dim as f32).powf(-0.5), &mut q);
                        unit(&row[keys + key_head * key_dim..][..key_dim], 1.0, &mut k);
                        let v = &row[2 * keys + head * value_dim..][..value_dim];
                        let beta = sigmoid(gate[head]);
                        let g = exp(decay[head] * softplus(gate[value_heads + head] + dt_bias[head]));
                        step(state, &q, &k, v, beta, g, out);
                    }
                });
            }
        });
        self.out.replace(out);
        Ok(())
    }
}

/// `S = g S; S += beta (v - S k) k^T; out = S q`, row by row of `S`.
#[inline(always)]
fn step(state: &mut [f32], q: &[f32], k: &[f32], v: &[f32], beta: f32, g: f32, out: &mut [f32]) {
    for ((s, v), out) in state.chunks_exact_mut(k.len()).zip(v).zip(out) {
        for s in s.iter_mut() {
            *s *= g;
        }
        let [known] = float::dot::<1>(s, [k]);
        let d = beta * (v - known);
        for (s, k) in s.iter_mut().zip(k) {
            *s = d.mul_add(*k, *s);
        }
        [*out] = float::dot::<1>(s, [q]);
    }
}

#[inline(always)]
fn unit(x: &[f32], scale: f32, y: &mut [f32]) {
    let [square] = float::dot::<1>(x, [x]);
    let scale = scale / (square + EPS).sqrt();
    for (y, x) in y.iter_mut().zip(x) {
        *y = x * scale;
    }
}

fn softplus(x: f32) -> f32 {
    if x > 20.0 { x } else { x.exp().ln_1p() }
}
