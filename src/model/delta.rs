//! The gated delta net (spec 2.2): three layers in four. Its memory is one matrix per head, whatever the context.

use super::config::Config;
use crate::checkpoint::Trunk;
use crate::{
    device::Compute,
    error::ModelError,
    ops::{self, DeltaHeads, Weight},
};
use candle_core::Tensor;

pub struct DeltaNet {
    pub(super) heads: DeltaHeads,
    eps: f32,
    pub(super) qkv: Weight,
    pub(super) z: Weight,
    pub(super) b: Weight,
    pub(super) a: Weight,
    pub(super) out: Weight,
    /// `[taps, C]`.
    pub(super) conv: Tensor,
    /// `[Dv]`.
    pub(super) norm: Tensor,
}

impl DeltaNet {
    /// Loads the layer whose tensors start with `prefix`.
    pub fn load(trunk: &mut Trunk<'_>, prefix: &str, config: &Config, compute: &Compute) -> Result<Self, ModelError> {
        let (hidden, d) = (config.hidden, &config.delta);
        let path = |name: &str| format!("{prefix}linear_attn.{name}");
        let from = trunk.from;
        // [C, K, 1] in MLX, [C, 1, K] in Hugging Face: the same order of values. The op wants a tap's channels together.
        let conv = from.vector(&path("conv1d.weight"), d.mixed() * d.taps)?;
        let conv = Tensor::from_vec(conv, (d.mixed(), d.taps), &compute.device)?.t()?.contiguous()?;
        // Not zero-centred in either layout, unlike the other norms.
        let norm = from.vector(&path("norm.weight"), d.value_dim)?;
        Ok(Self {
            heads: DeltaHeads {
                key_heads: d.key_heads,
                value_heads: d.value_heads,
                key_dim: d.key_dim,
                value_dim: d.value_dim,
                decay: from.vector(&path("A_log"), d.value_heads)?.iter().map(|a| -a.exp()).collect(),
                dt_bias: from.vector(&path("dt_bias"), d.value_heads)?,
            },
            eps: config.eps,
            qkv: trunk.weight(&path("in_proj_qkv"), d.mixed(), hidden)?,
            z: trunk.weight(&path("in_proj_z"), d.values(), hidden)?,
            b: trunk.weight(&path("in_proj_b"), d.value_heads, hidden)?,
            a: trunk.weight(&path("in_proj_a"), d.value_heads, hidden)?,
            out: trunk.weight(&path("out_proj"), hidden, d.values())?,
            conv,
            norm: Tensor::from_vec(norm, d.value_dim, &compute.device)?,
        })
    }

    /// `x` is `[T, hidden]`; `conv` and `heads` are the layer's state. `mark` is called when the state is as it was after
    /// each of `marks` rows (ascending, 1 to T), with the mark's index: rows are walked one by one anyway.
    pub fn forward(
        &self,
        compute: &Compute,
        x: &Tensor,
        (conv, heads): (&Tensor, &Tensor),
        marks: &[usize],
        mark: &mut dyn FnMut(usize) -> Result<(), ModelError>,
    ) -> Result<Tensor, ModelError> {
        let (mixed, values) = (self.qkv.rows, self.z.rows);
        let projected = ops::linear(compute, x, &[&self.qkv, &self.z, &self.b, &self.a])?;
        let qkv = projected.narrow(1, 0, mixed)?;
        let z = projected.narrow(1, mixed, values)?;
        let gates = projected.narrow(1, mixed + values, 2 * self.b.rows)?;

        let (mut parts, mut from) = (Vec::with_capacity(marks.len() + 1), 0);
        for (index, to) in marks.iter().copied().chain([x.dim(0)?]).enumerate() {
            if to > from {
                let part = |rows: &Tensor| rows.narrow(0, from, to - from);
                let qkv = ops::conv(compute, &part(&qkv)?, &self.conv, conv)?;
                parts.push(ops::delta_rule(compute, &self.heads, &qkv, &part(&gates)?, heads)?);
            }
            from = to;
            if index < marks.len() {
                mark(index)?;
            }
        }
        let o = if let [whole] = &parts[..] { whole.clone() } else { Tensor::cat(&parts, 1)? };
        let o = ops::gated_norm(compute, &o, &z, &self.norm, self.eps)?;
        Ok(ops::linear(compute, &o, &[&self.out])?)
    }
}
