//! The architecture of Qwen3.5, dense and mixture of experts, in plain tensors: one function per formula. Read this
//! file first.
//!
//! A whole sequence is computed at once, in f32 on any Candle device, or in f64 to exclude rounding errors. Nothing is
//! cached, and nothing is optimised for speed. A matrix is read from the checkpoint and dequantized each time it is
//! used, so only one matrix is in memory at a time. The tests and `moestro doctor` compare the fast pass with this
//! code.
//!
//! ```text
//! h = embed[ids]                        T tokens are T rows of `hidden` values
//! for each layer:
//!     h = h + mixer(rms_norm(h))        every fourth layer attention, the others a gated delta net
//!     h = h + feed_forward(rms_norm(h)) a mixture of experts, or a dense MLP
//! logits = rms_norm(h) head^T
//! ```
//!
//! The layers of a model with several residual streams differ. `reference/streams.rs` has their formulas.
//!
//! Sources: `qwen3_5_moe` in transformers and mlx-lm. The delta rule is equation 10 of Yang et al., "Gated Delta
//! Networks" (2024).

mod streams;

use crate::model::{
    config::{Config, FfnShape},
    dequantize,
    positions::{Position, RowPositions, axis},
    vision::PlacedImage,
    weights::{find_experts, resolve_layout},
};
use crate::{
    checkpoint::{Checkpoint, MatrixLayout, index::Index, names},
    error::ModelError,
};
use candle_core::{D, DType, Device, Shape, Tensor};
use candle_nn::ops::{sigmoid, silu, softmax_last_dim};
use moestro_base::platform::Threads;
use moestro_compute::{
    experts::Piece,
    ops::{
        AttentionShape, DeltaShape, OutputGate,
        attention::{GROUP, recent_start},
    },
};
use std::{collections::HashMap, path::Path};

/// A checkpoint, and the device and precision to compute with.
pub struct Reference {
    config: Config,
    checkpoint: Checkpoint,
    device: Device,
    precision: DType,
    /// Number of bits of quantized keys and values: 8 or 4. `None` without quantization.
    kv_bits: Option<u32>,
}

/// The results of a sequence of T tokens.
pub struct Computed {
    /// `[T, vocab]`: row `t` scores the token after `t`.
    pub logits: Tensor,
    /// The residual stream after each layer, `[T, hidden]`. Has all streams if the model has several residual streams.
    pub residuals: Vec<Tensor>,
    /// `routes[layer][token]`: the chosen experts, most likely first. Empty for a dense model.
    pub routes: Vec<Vec<Vec<u32>>>,
    /// Intermediate results by name. Empty unless the model has several residual streams.
    pub stages: HashMap<String, Tensor>,
}

impl Reference {
    /// Opens the checkpoint in `dir`. `precision` is `F32` or `F64`.
    ///
    /// # Errors
    /// Fails if a file cannot be read, or if the model has another architecture.
    pub fn open(dir: &Path, device: Device, precision: DType) -> Result<Self, ModelError> {
        let mut config = Config::read(dir)?;
        let mut checkpoint = Checkpoint::open(Index::open(dir)?, &config.quantization)?;
        resolve_layout(&mut checkpoint, &mut config)?;
        Ok(Self { config, checkpoint, device, precision, kv_bits: None })
    }

    /// Quantizes keys and values to 8 or 4 bits.
    pub fn with_kv_bits(self, bits: u32) -> Self {
        Self { kv_bits: Some(bits), ..self }
    }

    /// Runs the model on the sequence `ids`, which must not be empty.
    ///
    /// # Errors
    /// Fails if a token is outside the vocabulary, if a tensor is missing or has another shape, or if the device fails.
    pub fn forward(&self, ids: &[u32]) -> Result<Computed, ModelError> {
        self.forward_with_images(ids, &[])
    }

    /// [`Reference::forward`] with images. The rows `[tokens, hidden]` of an image replace the embeddings of the
    /// image's tokens.
    pub fn forward_with_images(&self, ids: &[u32], images: &[(PlacedImage, Vec<f32>)]) -> Result<Computed, ModelError> {
        let Config { hidden, vocab, eps, .. } = self.config;
        if let Some(&id) = ids.iter().find(|id| **id as usize >= vocab) {
            return Err(ModelError::TokenOutOfRange { id, vocab });
        }
        let embedding = self.matrix(names::EMBEDDING, vocab, hidden)?;
        let mut h = embedding.index_select(&Tensor::new(ids, &self.device)?, 0)?;
        drop(embedding);
        for (placed, rows) in images {
            let rows = Tensor::from_slice(rows, (placed.image.tokens(), hidden), &self.device)?;
            h = h.slice_scatter0(&rows.to_dtype(self.precision)?, placed.at)?;
        }
        let placed: Vec<PlacedImage> = images.iter().map(|(placed, _)| placed.clone()).collect();
        let positions: Vec<Position> = RowPositions::new(0, 0, &placed).take(ids.len()).collect();
        if let Some(streams) = &self.config.streams {
            return self.forward_streams(streams, ids, &h, &positions);
        }
        let mut residuals = Vec::new();
        let mut routes = Vec::new();
        for (index, full) in self.config.full.iter().enumerate() {
            let layer = names::layer_prefix(index);
            let x = rms_norm(&h, &self.norm(&format!("{layer}input_layernorm.weight"), hidden)?, eps)?;
            h = (h + if *full {
                self.attention(&x, &positions, &format!("{layer}self_attn."), None)?
            } else {
                self.delta_net(&x, &format!("{layer}linear_attn."))?
            })?;
            let x = rms_norm(&h, &self.norm(&format!("{layer}post_attention_layernorm.weight"), hidden)?, eps)?;
            h = (h + match self.config.ffn {
                FfnShape::Dense { intermediate } => self.mlp(&x, &format!("{layer}mlp."), intermediate)?,
                FfnShape::Moe { .. } => {
                    let (y, chosen) = self.mixture(&x, &format!("{layer}mlp."))?;
                    routes.push(chosen);
                    y
                }
            })?;
            residuals.push(h.clone());
        }
        let h = rms_norm(&h, &self.norm(names::FINAL_NORM, hidden)?, eps)?;
        let stages = HashMap::new();
        Ok(Computed { logits: linear(&h, &self.head()?)?, residuals, routes, stages })
    }

    /// The matrix of the output head. A tied head is the embedding.
    fn head(&self) -> Result<Tensor, ModelError> {
        let Config { hidden, vocab, tied, .. } = self.config;
        self.matrix(if tied { names::EMBEDDING } else { names::LM_HEAD }, vocab, hidden)
    }

    /// Gated attention. The query projection holds, per head, the query and a gate for the head's output. Several query
    /// heads share one head of keys and values. `mask`, `[T, T]`, selects the positions that each token attends to.
    /// Without a mask, a token attends to its own and all earlier positions.
    fn attention(
        &self,
        x: &Tensor,
        positions: &[Position],
        path: &str,
        mask: Option<&Tensor>,
    ) -> Result<Tensor, ModelError> {
        let AttentionShape { heads, kv_heads, dim, rope_dim, .. } = self.config.attention;
        let (tokens, hidden) = x.dims2()?;
        let project = |name: &str, heads: usize, dim: usize| -> Result<Tensor, ModelError> {
            let weight = self.matrix(&format!("{path}{name}"), heads * dim, hidden)?;
            Ok(linear(x, &weight)?.reshape((tokens, heads, dim))?)
        };
        let head_norm = |x: &Tensor, name: &str| -> Result<Tensor, ModelError> {
            Ok(rms_norm(x, &self.norm(&format!("{path}{name}.weight"), dim)?, self.config.eps)?)
        };
        let q_gate = project("q_proj", heads, 2 * dim)?;
        let angles = self.rope_angles(positions);
        let q = rotate(&head_norm(&q_gate.narrow(2, 0, dim)?, "q_norm")?, rope_dim, &angles)?;
        let k = rotate(&head_norm(&project("k_proj", kv_heads, dim)?, "k_norm")?, rope_dim, &angles)?;
        let v = project("v_proj", kv_heads, dim)?;
        let k = repeat_heads(&k, heads)?;
        let v = repeat_heads(&v, heads)?;
        let o = match (mask, self.kv_bits) {
            (Some(mask), None) => attend_masked(&q, &k, &v, mask)?,
            (None, None) => attend(&q, &k, &v)?,
            (Some(mask), Some(bits)) => attend_quantized(&q, &k, &v, mask, bits)?,
            (None, Some(bits)) => attend_quantized(&q, &k, &v, &causal_mask(&q)?, bits)?,
        };
        let gated = (o * sigmoid(&q_gate.narrow(2, dim, dim)?.contiguous()?)?)?;
        let out = self.matrix(&format!("{path}o_proj"), hidden, heads * dim)?;
        Ok(linear(&gated.reshape((tokens, heads * dim))?, &out)?)
    }

    /// `position * theta^(-2j / rope_dim)` for each position and frequency `j`. A text token has one position. A token
    /// of an image has three positions, and each frequency uses one of the three.
    fn rope_angles(&self, positions: &[Position]) -> Vec<f64> {
        let Config { rope_theta: theta, rope_sections, attention: AttentionShape { rope_dim, .. }, .. } = &self.config;
        let angle = |position: &Position, j: usize| {
            position[axis(j, rope_sections)] as f64 * theta.powf(-2.0 * j as f64 / *rope_dim as f64)
        };
        positions.iter().flat_map(|position| (0..rope_dim / 2).map(move |j| angle(position, j))).collect()
    }

    /// The gated delta net. Its state is one matrix per head, whose size does not depend on the length of the sequence.
    fn delta_net(&self, x: &Tensor, path: &str) -> Result<Tensor, ModelError> {
        let shape @ DeltaShape { key_heads, value_heads, key_dim, value_dim, conv_width, .. } = self.config.delta;
        let (tokens, hidden) = x.dims2()?;
        let project = |name: &str, rows: usize| -> Result<Tensor, ModelError> {
            Ok(linear(x, &self.matrix(&format!("{path}{name}"), rows, hidden)?)?)
        };
        // [C, taps, 1] in MLX's layout, [C, 1, taps] in Hugging Face's: the same order of values.
        let kernel = self.vector(&format!("{path}conv1d.weight"), shape.channels() * conv_width)?;
        let mixed =
            convolve(&project("in_proj_qkv", shape.channels())?, &kernel.reshape((shape.channels(), conv_width))?)?;
        let keys = key_heads * key_dim;
        let q = mixed.narrow(1, 0, keys)?.reshape((tokens, key_heads, key_dim))?;
        let k = mixed.narrow(1, keys, keys)?.reshape((tokens, key_heads, key_dim))?;
        let v = mixed.narrow(1, 2 * keys, shape.values())?.reshape((tokens, value_heads, value_dim))?;
        let q = (repeat_heads(&unit(&q)?, value_heads)? * (key_dim as f64).powf(-0.5))?;
        let k = repeat_heads(&unit(&k)?, value_heads)?;

        let beta = sigmoid(&project("in_proj_b", value_heads)?)?;
        let step = softplus(
            &project("in_proj_a", value_heads)?.broadcast_add(&self.vector(&format!("{path}dt_bias"), value_heads)?)?,
        )?;
        let rate = self.vector(&format!("{path}A_log"), value_heads)?.exp()?;
        let decay = step.broadcast_mul(&rate)?.neg()?.exp()?;
        let o = delta_rule(&q, &k, &v, &beta, &decay)?;

        // The norm comes before the gate. Every layout stores the weight of this norm unchanged, whereas Hugging Face's
        // layout stores the weights of the other norms minus one.
        let o = rms_norm(&o, &self.vector(&format!("{path}norm.weight"), value_dim)?, self.config.eps)?;
        let z = project("in_proj_z", shape.values())?;
        let gate = match shape.gate {
            OutputGate::Silu => silu(&z)?,
            OutputGate::Sigmoid => sigmoid(&z)?,
        };
        let gated = (o.reshape((tokens, shape.values()))? * gate)?;
        Ok(linear(&gated, &self.matrix(&format!("{path}out_proj"), hidden, shape.values())?)?)
    }

    /// The mixture of experts: the k experts of each token, weighted by the router, plus a gated expert that all tokens
    /// share. Also returns the experts chosen for each token.
    fn mixture(&self, x: &Tensor, path: &str) -> Result<(Tensor, Vec<Vec<u32>>), ModelError> {
        let FfnShape::Moe { experts, k, intermediate, shared, renormalise } = self.config.ffn else {
            return Err(ModelError::Config("a dense model has no experts".into()));
        };
        let (tokens, hidden) = x.dims2()?;
        let router = self.matrix(&format!("{path}gate"), experts, hidden)?;
        let chosen = top_k(&softmax_last_dim(&linear(x, &router)?)?, k, renormalise)?;
        let (stacks, pieces) = find_experts(&self.checkpoint, path, experts, hidden, intermediate)?;
        let mut routed = x.zeros_like()?;
        for (expert, pieces) in pieces.iter().enumerate() {
            let visits = (0..tokens).flat_map(|token| {
                let of_token = chosen[token].iter().filter(|(id, _)| *id == expert as u32);
                of_token.map(move |(_, weight)| (token as u32, *weight))
            });
            let (rows, weights): (Vec<u32>, Vec<f64>) = visits.unzip();
            if rows.is_empty() {
                continue;
            }
            let matrix = |index: usize| -> Result<Tensor, ModelError> {
                let stack = &stacks[index];
                let codes = stack.codes;
                let rows = stack.rows;
                let cols = stack.cols;
                let layout = MatrixLayout { codes, rows, cols, entries: [None, None, None] };
                self.dequantize(&layout, &pieces[3 * index..3 * index + 3], stack.global_scales[expert])
            };
            let weights = constant(weights, (rows.len(), 1), x)?;
            let rows = Tensor::new(rows, &self.device)?;
            let y = swiglu(&x.index_select(&rows, 0)?, &matrix(0)?, &matrix(1)?, &matrix(2)?)?;
            routed = routed.index_add(&rows, &y.broadcast_mul(&weights)?, 0)?;
        }
        let gate = sigmoid(&linear(x, &self.matrix(&format!("{path}shared_expert_gate"), 1, hidden)?)?)?;
        let shared = self.mlp(x, &format!("{path}shared_expert."), shared)?;
        let ids = chosen.into_iter().map(|token| token.into_iter().map(|(id, _)| id).collect());
        Ok(((routed + shared.broadcast_mul(&gate)?)?, ids.collect()))
    }

    /// A dense MLP with SwiGLU: the feed-forward network of a dense model, or the shared expert of a mixture.
    fn mlp(&self, x: &Tensor, path: &str, intermediate: usize) -> Result<Tensor, ModelError> {
        let hidden = x.dim(1)?;
        let gate = self.matrix(&format!("{path}gate_proj"), intermediate, hidden)?;
        let up = self.matrix(&format!("{path}up_proj"), intermediate, hidden)?;
        let down = self.matrix(&format!("{path}down_proj"), hidden, intermediate)?;
        Ok(swiglu(x, &gate, &up, &down)?)
    }

    /// The matrix at `path`, `[rows, cols]`, dequantized.
    fn matrix(&self, path: &str, rows: usize, cols: usize) -> Result<Tensor, ModelError> {
        let values = dequantize::matrix(&self.checkpoint, path, rows, cols, &Threads::new(1))?;
        Ok(Tensor::from_vec(values, (rows, cols), &self.device)?.to_dtype(self.precision)?)
    }

    /// Dequantizes a matrix from its codes, scales and biases.
    fn dequantize(&self, layout: &MatrixLayout, pieces: &[Piece], global_scale: f32) -> Result<Tensor, ModelError> {
        let values = dequantize::dequantize(&self.checkpoint, layout, pieces, global_scale, &Threads::new(1))?;
        Ok(Tensor::from_vec(values, (layout.rows, layout.cols), &self.device)?.to_dtype(self.precision)?)
    }

    /// A small tensor that is never quantized, `[len]`.
    fn vector(&self, name: &str, len: usize) -> Result<Tensor, ModelError> {
        Ok(Tensor::from_vec(self.checkpoint.vector(name, len)?, len, &self.device)?.to_dtype(self.precision)?)
    }

    /// The weight of a norm, `[len]`. Hugging Face's layout stores the weight minus one.
    fn norm(&self, name: &str, len: usize) -> Result<Tensor, ModelError> {
        Ok(Tensor::from_vec(self.checkpoint.norm(name, len)?, len, &self.device)?.to_dtype(self.precision)?)
    }
}

/// `x W^T`: `[T, cols]` by `[rows, cols]` to `[T, rows]`.
pub fn linear(x: &Tensor, weight: &Tensor) -> candle_core::Result<Tensor> {
    x.matmul(&weight.t()?)
}

/// `x / sqrt(mean(x^2) + eps) * w` over the last dimension.
pub fn rms_norm(x: &Tensor, weight: &Tensor, eps: f32) -> candle_core::Result<Tensor> {
    let size = (x.sqr()?.mean_keepdim(D::Minus1)? + f64::from(eps))?.sqrt()?;
    x.broadcast_div(&size)?.broadcast_mul(weight)
}

/// `x / sqrt(sum(x^2) + 1e-6)` over the last dimension.
pub fn unit(x: &Tensor) -> candle_core::Result<Tensor> {
    x.broadcast_div(&(x.sqr()?.sum_keepdim(D::Minus1)? + 1e-6)?.sqrt()?)
}

/// `ln(1 + e^x)`, on the CPU: Candle has no `ln_1p`, which keeps precision where `e^x` is small.
pub fn softplus(x: &Tensor) -> candle_core::Result<Tensor> {
    let values = on_cpu(x)?.flatten_all()?.to_vec1::<f64>()?.into_iter();
    constant(values.map(|x| x.max(0.0) + (-x.abs()).exp().ln_1p()).collect(), x.dims(), x)
}

/// `Down(silu(Gate x) * Up x)`.
pub fn swiglu(x: &Tensor, gate: &Tensor, up: &Tensor, down: &Tensor) -> candle_core::Result<Tensor> {
    linear(&(silu(&linear(x, gate)?)? * linear(x, up)?)?, down)
}

/// `[T, n, dim]` to `[T, heads, dim]`: each head is repeated `heads / n` times.
fn repeat_heads(x: &Tensor, heads: usize) -> candle_core::Result<Tensor> {
    let (tokens, few, dim) = x.dims3()?;
    x.unsqueeze(2)?.expand((tokens, few, heads / few, dim))?.reshape((tokens, heads, dim))
}

/// Rotary position embedding of `[T, heads, dim]`: token `t` rotates the pairs `(j, j + rotated / 2)` of each head by
/// `angles[t, j]`. The dimensions from `rotated` on are not rotated.
pub fn rotate(x: &Tensor, rotated: usize, angles: &[f64]) -> candle_core::Result<Tensor> {
    let (tokens, _, dim) = x.dims3()?;
    let half = rotated / 2;
    let (cos, sin) = angles.iter().map(|angle| (angle.cos(), angle.sin())).unzip();
    let cos = constant(cos, (tokens, 1, half), x)?;
    let sin = constant(sin, (tokens, 1, half), x)?;
    let a = x.narrow(2, 0, half)?;
    let b = x.narrow(2, half, half)?;
    let left = (a.broadcast_mul(&cos)? - b.broadcast_mul(&sin)?)?;
    let right = (b.broadcast_mul(&cos)? + a.broadcast_mul(&sin)?)?;
    Tensor::cat(&[left, right, x.narrow(2, rotated, dim - rotated)?], 2)
}

/// `softmax(q k^T / sqrt(dim)) v` for each head, where a token attends to itself and to earlier tokens. All tensors are
/// `[T, heads, dim]`.
pub fn attend(q: &Tensor, k: &Tensor, v: &Tensor) -> candle_core::Result<Tensor> {
    attend_masked(q, k, v, &causal_mask(q)?)
}

/// The mask with which a token attends to itself and to earlier tokens. `q` is `[T, heads, dim]`.
fn causal_mask(q: &Tensor) -> candle_core::Result<Tensor> {
    let tokens = q.dim(0)?;
    let seen = (0..tokens).flat_map(|t| (0..tokens).map(move |s| if s <= t { 0.0 } else { f64::NEG_INFINITY }));
    constant(seen.collect(), (tokens, tokens), q)
}

/// [`attend`] with a mask `[T, T]` that is added to the scores: 0 for positions that a token attends to, negative
/// infinity for the others.
fn attend_masked(q: &Tensor, k: &Tensor, v: &Tensor, mask: &Tensor) -> candle_core::Result<Tensor> {
    let dim = q.dim(2)?;
    let by_head = |x: &Tensor| x.transpose(0, 1)?.contiguous();
    let scores = (by_head(q)?.matmul(&by_head(k)?.t()?)? * (dim as f64).powf(-0.5))?;
    let o = softmax_last_dim(&scores.broadcast_add(mask)?)?.matmul(&by_head(v)?)?;
    o.transpose(0, 1)?.contiguous()
}

/// [`attend_masked`] with quantized keys and values (`--kv-bits`). Keys and values are multiplied by a Hadamard matrix and
/// then rounded. A query at `t` reads positions from `recent_start(t)` on without rounding. All tensors are `[T, heads,
/// dim]`, and `dim` is a power of two.
fn attend_quantized(q: &Tensor, k: &Tensor, v: &Tensor, mask: &Tensor, bits: u32) -> candle_core::Result<Tensor> {
    let (tokens, _, dim) = q.dims3()?;
    let sign = |i: usize, j: usize| if (i & j).count_ones().is_multiple_of(2) { 1.0 } else { -1.0 };
    let entries = (0..dim * dim).map(|at| sign(at / dim, at % dim) / (dim as f64).sqrt()).collect();
    let matrix = constant(entries, (1, dim, dim), q)?;
    let hadamard = |x: &Tensor| x.broadcast_matmul(&matrix);
    let by_head = |x: &Tensor| x.transpose(0, 1)?.contiguous();
    let q = hadamard(q)?;
    let k = hadamard(k)?;
    let v = hadamard(v)?;
    let scores = |k: &Tensor| by_head(&q)?.matmul(&by_head(k)?.t()?)? * (dim as f64).powf(-0.5);

    let pairs = (0..tokens).flat_map(|t| (0..tokens).map(move |s| (t, s)));
    let newest = pairs.map(|(t, s)| if s >= recent_start(t) { 1.0 } else { 0.0 });
    let newest = constant(newest.collect(), (1, tokens, tokens), &q)?;
    let older = newest.affine(-1.0, 1.0)?;
    let mixed = (scores(&k)?.broadcast_mul(&newest)? + scores(&rounded(&k, bits)?)?.broadcast_mul(&older)?)?;
    let weights = softmax_last_dim(&mixed.broadcast_add(mask)?)?;
    let of = |part: &Tensor, v: &Tensor| weights.broadcast_mul(part)?.matmul(&by_head(v)?);
    let o = (of(&newest, &v)? + of(&older, &rounded(&v, bits)?)?)?;
    hadamard(&o.transpose(0, 1)?.contiguous()?)
}

/// Rounds groups of 32 values to a scale times integers from -127 to 127, or times odd integers from -15 to 15. The
/// scale is the largest magnitude divided by the largest integer, rounded up to bf16.
fn rounded(x: &Tensor, bits: u32) -> candle_core::Result<Tensor> {
    let values = on_cpu(x)?.flatten_all()?.to_vec1::<f64>()?;
    let mut out = Vec::with_capacity(values.len());
    for group in values.chunks(GROUP) {
        let max = group.iter().fold(0.0, |max: f64, value| max.max(value.abs())) as f32;
        let ratio = max / if bits == 8 { 127.0 } else { 15.0 };
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

/// A causal convolution of each channel: `silu(sum_j w[c, j] x[t - taps + 1 + j, c])`, zeros before the first token.
/// `x` is `[T, C]`, `w` is `[C, taps]`.
pub fn convolve(x: &Tensor, kernel: &Tensor) -> candle_core::Result<Tensor> {
    convolve_every(1, x, kernel)
}

/// [`convolve`] with weights that are `step` tokens apart.
fn convolve_every(step: usize, x: &Tensor, kernel: &Tensor) -> candle_core::Result<Tensor> {
    let (tokens, _) = x.dims2()?;
    let (channels, taps) = kernel.dims2()?;
    let before = Tensor::zeros(((taps - 1) * step, channels), x.dtype(), x.device())?;
    let padded = Tensor::cat(&[&before, x], 0)?;
    let mut sum = x.zeros_like()?;
    for tap in 0..taps {
        let weight = kernel.narrow(1, tap, 1)?.reshape((1, channels))?;
        sum = (sum + padded.narrow(0, tap * step, tokens)?.broadcast_mul(&weight)?)?;
    }
    silu(&sum)
}

/// The gated delta rule. Each head has a matrix S, zero at first, that maps keys to values. Each token decays the
/// matrix, corrects the value that the matrix returns for the token's key, and reads the matrix with the token's query:
///
/// ```text
/// S = decay_t S;   S = S + beta_t (v_t - S k_t) k_t^T;   o_t = S q_t
/// ```
/// `q` and `k` are `[T, heads, key dim]`, `v` and the result `[T, heads, value dim]`, `beta` and `decay` `[T, heads]`.
fn delta_rule(q: &Tensor, k: &Tensor, v: &Tensor, beta: &Tensor, decay: &Tensor) -> candle_core::Result<Tensor> {
    let (tokens, heads, key_dim) = q.dims3()?;
    let value_dim = v.dim(2)?;
    let mut s = Tensor::zeros((heads, value_dim, key_dim), v.dtype(), v.device())?;
    let mut out = Vec::with_capacity(tokens);
    for t in 0..tokens {
        let column = |x: &Tensor| x.get(t)?.unsqueeze(2);
        let scalar = |x: &Tensor| x.get(t)?.reshape((heads, 1, 1));
        let key = column(k)?;
        s = s.broadcast_mul(&scalar(decay)?)?;
        let correction = (column(v)? - s.matmul(&key)?)?.broadcast_mul(&scalar(beta)?)?;
        s = (s + correction.broadcast_mul(&key.transpose(1, 2)?)?)?;
        out.push(s.matmul(&column(q)?)?.squeeze(2)?);
    }
    Tensor::stack(&out, 0)
}

/// The `k` most likely experts of each row of `[T, experts]` with their weights, most likely first. Of equally likely
/// experts, the expert with the lower number comes first. If `renormalise` is true, the weights of a token sum to one.
pub fn top_k(likelihood: &Tensor, k: usize, renormalise: bool) -> candle_core::Result<Vec<Vec<(u32, f64)>>> {
    let choose = |row: Vec<f64>| {
        let mut chosen: Vec<(u32, f64)> = (0..).zip(row).collect();
        chosen.sort_by(|a, b| b.1.total_cmp(&a.1));
        chosen.truncate(k);
        let sum: f64 = if renormalise { chosen.iter().map(|(_, weight)| weight).sum() } else { 1.0 };
        chosen.into_iter().map(|(id, weight)| (id, weight / sum)).collect()
    };
    Ok(on_cpu(likelihood)?.to_vec2::<f64>()?.into_iter().map(choose).collect())
}

/// Copies a tensor to the CPU as f64, for operations that Candle does not have.
fn on_cpu(x: &Tensor) -> candle_core::Result<Tensor> {
    x.to_device(&Device::Cpu)?.to_dtype(DType::F64)
}

/// A tensor of `values` with the device and precision of `like`.
fn constant(values: Vec<f64>, shape: impl Into<Shape>, like: &Tensor) -> candle_core::Result<Tensor> {
    Tensor::from_vec(values, shape.into(), &Device::Cpu)?.to_dtype(like.dtype())?.to_device(like.device())
}
