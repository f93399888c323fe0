//! The gated delta rule (spec 2.2): a matrix per head that forgets by `g`, is corrected towards `v` along `k`, and is
//! read along `q`. Always token by token, in prefill too: so a row's bytes do not depend on the chunk it came in.

use super::{
    math::{exp, sigmoid},
    simd::{Out, float, wide},
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

/// Rows of S in a task of prefill: with keys of 128 they stay in the first-level cache.
const ROWS: usize = 32;
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
        let dims = (key_heads, value_heads, key_dim, value_dim);
        let mut prepared = PREPARED.take();
        prepared.fill(self.compute, dims, &mixed, &gates, decay, dt_bias);
        // Rows of S do not touch each other: a task walks some rows of one head through all tokens.
        let rows = if tokens == 1 { value_dim } else { value_dim.min(ROWS) };
        let tasks = value_dim.div_ceil(rows);
        let mut out = vec![0f32; value_heads * tokens * value_dim];
        let (state, base) = (Out(state.as_mut_ptr()), Out(out.as_mut_ptr()));
        self.compute.threads.run(value_heads * tasks, &|task| {
            let (Out(state), Out(out)) = (state, base);
            let (head, first) = (task / tasks, task % tasks * rows);
            let rows = rows.min(value_dim - first);
            // SAFETY: these rows of this head belong to this task; the state has `value_heads * value_dim` of them.
            let state = unsafe {
                std::slice::from_raw_parts_mut(state.add((head * value_dim + first) * key_dim), rows * key_dim)
            };
            for token in 0..tokens {
                let key = prepared.key(token, head / (value_heads / key_heads), dims);
                let v = &mixed.row(token)[2 * keys + head * value_dim + first..][..rows];
                // SAFETY: these rows of this head's outputs belong to this task.
                let out = unsafe {
                    std::slice::from_raw_parts_mut(out.add((head * tokens + token) * value_dim + first), rows)
                };
                step(state, key, v, prepared.gates[token * value_heads + head], out);
            }
        });
        PREPARED.set(prepared);
        self.out.replace(out);
        Ok(())
    }
}

thread_local! {
    static PREPARED: RefCell<Prepared> = RefCell::default();
}

/// What the heads that share a key need of each token, computed once.
#[derive(Default)]
struct Prepared {
    /// `[T, key_heads, 2, key_dim]`: q and k, normed, q scaled.
    keys: Vec<f32>,
    /// `[T, key_heads]`: `q . k`.
    same: Vec<f32>,
    /// `[T, value_heads]`: beta and the decay.
    gates: Vec<[f32; 2]>,
}

type Dims = (usize, usize, usize, usize);

impl Prepared {
    fn fill(
        &mut self,
        compute: &Compute,
        (key_heads, value_heads, dim, _): Dims,
        mixed: &Rows<'_>,
        gates: &Rows<'_>,
        decay: &[f32],
        dt_bias: &[f32],
    ) {
        let tokens = mixed.count();
        self.keys.resize(tokens * key_heads * 2 * dim, 0.0);
        self.same.resize(tokens * key_heads, 0.0);
        compute.threads.run_pieces(&mut self.keys, key_heads * 2 * dim, &|token, keys| {
            let row = mixed.row(token);
            for (head, keys) in keys.chunks_exact_mut(2 * dim).enumerate() {
                let (q, k) = keys.split_at_mut(dim);
                unit(&row[head * dim..][..dim], (dim as f32).powf(-0.5), q);
                unit(&row[(key_heads + head) * dim..][..dim], 1.0, k);
            }
        });
        for (same, keys) in self.same.iter_mut().zip(self.keys.chunks_exact(2 * dim)) {
            let (q, k) = keys.split_at(dim);
            *same = dot(q, k);
        }
        self.gates.clear();
        for token in 0..tokens {
            let row = gates.row(token);
            self.gates.extend((0..value_heads).map(|head| {
                let step = softplus(row[value_heads + head] + dt_bias[head]);
                [sigmoid(row[head]), exp(decay[head] * step)]
            }));
        }
    }

    fn key(&self, token: usize, head: usize, (key_heads, _, dim, _): Dims) -> Key<'_> {
        let index = token * key_heads + head;
        let (q, k) = self.keys[index * 2 * dim..(index + 1) * 2 * dim].split_at(dim);
        Key { q, k, same: self.same[index] }
    }
}

/// One token's query and key for some heads, and `same = q . k`.
#[derive(Clone, Copy)]
struct Key<'a> {
    q: &'a [f32],
    k: &'a [f32],
    same: f32,
}

wide! {
    /// `s = g s + d k` with `d = beta (v - g s . k)` for some rows of S; `out` gets the new `s . q`, for which `q . k` spares
    /// a second pass: it is `g s . q + d q . k`.
    fn step(state: &mut [f32], key: Key<'_>, v: &[f32], gates: [f32; 2], out: &mut [f32]) {
        let ([beta, g], Key { q, k, same }) = (gates, key);
        for ((s, v), out) in state.chunks_exact_mut(k.len()).zip(v).zip(out) {
            let [known, seen] = float::dot::<V, 2>(s, [k, q]);
            let d = beta * (v - g * known);
            for (s, k) in s.iter_mut().zip(k) {
                *s = g.mul_add(*s, d * k);
            }
            *out = d.mul_add(same, g * seen);
        }
    }
}

wide! {
    fn unit(x: &[f32], scale: f32, y: &mut [f32]) {
        let [square] = float::dot::<V, 1>(x, [x]);
        let scale = scale / (square + EPS).sqrt();
        for (y, x) in y.iter_mut().zip(x) {
            *y = x * scale;
        }
    }
}

wide! {
    fn dot(a: &[f32], b: &[f32]) -> f32 {
        float::dot::<V, 1>(a, [b])[0]
    }
}

fn softplus(x: f32) -> f32 {
    if x > 20.0 { x } else { x.exp().ln_1p() }
}
