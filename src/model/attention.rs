//! Gated full attention (spec 2.1): one layer in four.

use super::config::Config;
use crate::checkpoint::Trunk;
use crate::{
    device::Compute,
    error::ModelError,
    ops::{self, HeadNorm, Rotation, Weight},
};
use candle_core::Tensor;

pub struct Attention {
    dim: usize,
    eps: f32,
    pub(super) q: Weight,
    pub(super) k: Weight,
    pub(super) v: Weight,
    pub(super) o: Weight,
    pub(super) q_norm: Vec<f32>,
    pub(super) k_norm: Vec<f32>,
}

impl Attention {
    /// Loads the layer whose tensors start with `prefix`.
    pub fn load(trunk: &mut Trunk<'_>, prefix: &str, config: &Config) -> Result<Self, ModelError> {
        let (hidden, a) = (config.hidden, &config.attention);
        let path = |name: &str| format!("{prefix}self_attn.{name}");
        Ok(Self {
            dim: a.dim,
            eps: config.eps,
            q: trunk.weight(&path("q_proj"), a.heads * 2 * a.dim, hidden)?,
            k: trunk.weight(&path("k_proj"), a.kv_heads * a.dim, hidden)?,
            v: trunk.weight(&path("v_proj"), a.kv_heads * a.dim, hidden)?,
            o: trunk.weight(&path("o_proj"), hidden, a.heads * a.dim)?,
            q_norm: trunk.from.norm(&path("q_norm.weight"), a.dim)?,
            k_norm: trunk.from.norm(&path("k_norm.weight"), a.dim)?,
        })
    }

    /// `x` (`[T, hidden]`) stands at positions `at..at + T`; `keys` and `values` are the layer's cache.
    pub fn forward(
        &self,
        compute: &Compute,
        x: &Tensor,
        keys: &Tensor,
        values: &Tensor,
        at: usize,
        rotation: &Rotation,
    ) -> Result<Tensor, ModelError> {
        let eps = self.eps;
        // q holds each head's query and its gate; one pass over x gives q, k and v side by side.
        let qkv = ops::linear(compute, x, &[&self.q, &self.k, &self.v])?;
        let q_gate = qkv.narrow(1, 0, self.q.rows)?;
        let k = qkv.narrow(1, self.q.rows, self.k.rows)?;
        let v = qkv.narrow(1, self.q.rows + self.k.rows, self.v.rows)?;

        let q = ops::queries(compute, &q_gate, HeadNorm { weight: &self.q_norm, eps }, rotation)?;
        ops::remember(keys, &k, at, Some((HeadNorm { weight: &self.k_norm, eps }, rotation)))?;
        ops::remember(values, &v, at, None)?;

        let o = ops::attend(compute, &q, keys, values, at)?;
        let o = ops::gate(compute, &o, &q_gate, self.dim)?;
        Ok(ops::linear(compute, &o, &[&self.o])?)
    }
}
