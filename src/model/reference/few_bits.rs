//! Attention where keys and values are kept in 8 or 4 bits (`--kv-bits`), in plain tensors: what is rounded, how, and who sees it.

use super::{constant, on_cpu};
use crate::ops::attend::{GROUP, rounded_until};
use candle_core::{D, Tensor};
use candle_nn::ops::softmax_last_dim;

/// [`super::attend`] over keys and values that have been turned by a Hadamard matrix and, but for the newest, rounded. A
/// query at `t` sees those from `rounded_until(t)` on as they are. All `[T, heads, dim]`; `dim` is a power of two.
pub fn attend(q: &Tensor, k: &Tensor, v: &Tensor, bits: u32) -> candle_core::Result<Tensor> {
    let (tokens, _, dim) = q.dims3()?;
    let sign = |i: usize, j: usize| if (i & j).count_ones().is_multiple_of(2) { 1.0 } else { -1.0 };
    let entries = (0..dim * dim).map(|at| sign(at / dim, at % dim) / (dim as f64).sqrt()).collect();
    let matrix = constant(entries, (1, dim, dim), q)?;
    let turn = |x: &Tensor| x.broadcast_matmul(&matrix);
    let by_head = |x: &Tensor| x.transpose(0, 1)?.contiguous();
    let (q, k, v) = (turn(q)?, turn(k)?, turn(v)?);
    let scores = |k: &Tensor| by_head(&q)?.matmul(&by_head(k)?.t()?)? * (dim as f64).powf(-0.5);

    let pairs = (0..tokens).flat_map(|t| (0..tokens).map(move |s| (t, s)));
    let newest = pairs.clone().map(|(t, s)| if s >= rounded_until(t) { 1.0 } else { 0.0 });
    let newest = constant(newest.collect(), (1, tokens, tokens), &q)?;
    let older = newest.affine(-1.0, 1.0)?;
    let seen = pairs.map(|(t, s)| if s <= t { 0.0 } else { f64::NEG_INFINITY });
    let mask = constant(seen.collect(), (1, tokens, tokens), &q)?;
    let mixed = (scores(&k)?.broadcast_mul(&newest)? + scores(&rounded(&k, bits)?)?.broadcast_mul(&older)?)?;
    let weights = softmax_last_dim(&mixed.broadcast_add(&mask)?)?;
    let of = |part: &Tensor, v: &Tensor| weights.broadcast_mul(part)?.matmul(&by_head(v)?);
    let o = (of(&newest, &v)? + of(&older, &rounded(&v, bits)?)?)?;
    turn(&o.transpose(0, 1)?.contiguous()?)
}

/// Each 32 values become integers from -127 to 127, or odd ones from -15 to 15, times a scale: the largest magnitude by the
/// largest integer, rounded up to bf16.
fn rounded(x: &Tensor, bits: u32) -> candle_core::Result<Tensor> {
    let values = on_cpu(x)?.flatten_all()?.to_vec1::<f64>()?;
    let mut out = Vec::with_capacity(values.len());
    for group in values.chunks(GROUP) {
        let most = group.iter().fold(0.0, |most: f64, value| most.max(value.abs())) as f32;
        let ratio = most / if bits == 8 { 127.0 } else { 15.0 };
        let scale = f64::from(f32::from_bits((ratio.to_bits() + 0xffff) & 0xffff_0000));
        out.extend(group.iter().map(|value| match (bits, scale) {
            (_, 0.0) => 0.0,
            (8, _) => (value / scale).round_ties_even() * scale,
            _ => (2.0 * (value / scale / 2.0 + 7.5).round_ties_even().clamp(0.0, 15.0) - 15.0) * scale,
        }));
    }
    debug_assert_eq!(x.dim(D::Minus1)? % GROUP, 0);
    constant(out, x.dims(), x)
}
