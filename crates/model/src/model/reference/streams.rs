//! The architecture of qwen4_exp in plain tensors: several residual streams, attention to selected blocks, and an
//! n-gram table. The parent module has the parts that are the same in Qwen3.5.
//!
//! ```text
//! R = [x, x, ..]                        C streams of `hidden` values, x = embed[ids]
//! for each layer:
//!     R = R + ngram(R, ids)             only before the layers that have a table
//!     u, inject = read(R);  R[c] = R[c] + inject[c] * mixer(u)
//!     u, inject = read(R);  R[c] = R[c] + inject[c] * mixture(u)
//! logits = read(R) head^T
//! ```
//! Source: `qwen4_exp` in transformers.

use super::{Computed, Reference, constant, convolve_every, linear, on_cpu, rms_norm, rotate};
use crate::{
    checkpoint::{RowFiles, names},
    error::ModelError,
    model::{ngram_hash::NgramShape, ngram_table::NgramLayout, positions::Position},
};
use candle_core::{D, Tensor};
use candle_nn::ops::{sigmoid, silu};
use moestro_compute::ops::StreamShape;
use std::collections::HashMap;

impl Reference {
    /// Computes the sequence `ids` of a model with several residual streams. `x` has the embeddings `[T, hidden]`, with
    /// the rows of images in place of the embeddings of their tokens. N-grams always have the tokens' ids.
    pub(super) fn forward_streams(
        &self,
        shape: &StreamShape,
        ids: &[u32],
        x: &Tensor,
        positions: &[Position],
    ) -> Result<Computed, ModelError> {
        let mut r = Tensor::cat(&vec![x; shape.count], 1)?;
        let mut residuals = Vec::new();
        let mut routes = Vec::new();
        let mut stages = HashMap::new();
        for (index, full) in self.config.full.iter().enumerate() {
            let layer = names::layer_prefix(index);
            let mut keep = |name: &str, value: &Tensor| stages.insert(format!("layer{index}.{name}"), value.clone());
            if let Some(ngram) = self.config.ngrams.iter().find(|ngram| ngram.layer == index) {
                let (y, rows) = self.ngram(&r, ids, ngram, &format!("{layer}ple."))?;
                keep("ple_rows", &rows);
                keep("ple_out", &y);
                r = (r + y)?;
            }
            let (u, inject) = self.read(shape, &r, &format!("{layer}attn_hyper_connection."), true)?;
            let path = format!("{layer}self_attn.");
            let y = if *full {
                let (mask, blocks) = self.select(&u, positions, &path)?;
                keep("qsa_blocks", &blocks);
                self.attention(&u, positions, &path, Some(&mask))?
            } else {
                self.delta_net(&u, &format!("{layer}linear_attn."))?
            };
            keep("mixer_out", &y);
            r = write(&r, &inject, &y)?;
            let (u, inject) = self.read(shape, &r, &format!("{layer}mlp_hyper_connection."), true)?;
            let (y, chosen) = self.mixture(&u, &format!("{layer}mlp."))?;
            keep("moe_out", &y);
            routes.push(chosen);
            r = write(&r, &inject, &y)?;
            residuals.push(r.clone());
        }
        let (u, _) = self.read(shape, &r, names::LAST_MIX, false)?;
        Ok(Computed { logits: linear(&u, &self.head()?)?, residuals, routes, stages })
    }

    /// Reads the streams: returns the mean of the normalised streams, each multiplied by its gates. A low-rank matrix
    /// computes the gates from all streams. If the mixture `has_inject`, also returns the factor with which a part's
    /// result is added to each stream.
    fn read(
        &self,
        shape: &StreamShape,
        r: &Tensor,
        path: &str,
        has_inject: bool,
    ) -> Result<(Tensor, Tensor), ModelError> {
        let &StreamShape { count, rank, hidden, .. } = shape;
        let (tokens, width) = r.dims2()?;
        let streams = |x: &Tensor| x.reshape((tokens, count, hidden));
        let n = self.stream_norm(r, &format!("{path}hc_norm.weight"))?;
        let low = linear(&n, &self.matrix(&format!("{path}input_mix_weight_down"), rank, width)?)?;
        let low = silu(&(low / count as f64)?)?;
        let gates = sigmoid(&linear(&low, &self.matrix(&format!("{path}input_mix_weight_up"), width, rank)?)?)?;
        let u = (streams(&gates)? * streams(&n)?)?.mean(1)?;
        if !has_inject {
            return Ok((u.clone(), u));
        }
        let inject = linear(&n, &self.matrix(&format!("{path}block_inject_weight"), count, width)?)?;
        Ok((u, (sigmoid(&(inject / count as f64)?)? * 2.0)?))
    }

    /// The RMS norm of each stream separately. The weight has the width of all streams.
    fn stream_norm(&self, r: &Tensor, name: &str) -> Result<Tensor, ModelError> {
        let (tokens, width) = r.dims2()?;
        let hidden = self.config.hidden;
        let one = Tensor::ones(hidden, r.dtype(), r.device())?;
        let scaled = rms_norm(&r.reshape((tokens, width / hidden, hidden))?, &one, self.config.eps)?;
        Ok(scaled.reshape((tokens, width))?.broadcast_mul(&self.norm(name, width)?)?)
    }

    /// Returns the positions that each token attends to, as a mask `[T, T]`, and the blocks that each token selects,
    /// `[T, blocks]`, where -1 means no block. A block of `ratio` tokens is scored with the block's key: the mean of the
    /// keys of its tokens, normalised, and rotated by the position of its first token.
    fn select(&self, u: &Tensor, positions: &[Position], path: &str) -> Result<(Tensor, Tensor), ModelError> {
        let Some(shape) = self.config.indexer else {
            return Err(ModelError::Config("the attention layers have no indexer".into()));
        };
        let (tokens, hidden) = u.dims2()?;
        let eps = self.config.eps;
        let heads = shape.heads;
        let dim = shape.dim;
        let ratio = shape.ratio;
        let norm = |name: &str| self.norm(&format!("{path}indexer.{name}_layernorm.weight"), dim);
        let projected = linear(u, &self.matrix(&format!("{path}indexer.index_qk_proj"), shape.width(), hidden)?)?;
        let q = projected.narrow(1, 0, heads * dim)?.reshape((tokens, heads, dim))?;
        let q = rotate(&rms_norm(&q, &norm("q")?, eps)?, shape.rope_dim, &self.rope_angles(positions))?;
        let closed = tokens / ratio;
        let mut scores = vec![Vec::new(); tokens];
        if closed > 0 {
            let raw = projected.narrow(1, heads * dim, dim)?.narrow(0, 0, closed * ratio)?.contiguous()?;
            let mean = raw.reshape((closed, ratio, dim))?.mean(1)?;
            let keys = rms_norm(&mean, &norm("k")?, eps)?.reshape((closed, 1, dim))?;
            let firsts: Vec<Position> = positions.iter().step_by(ratio).take(closed).copied().collect();
            let keys = rotate(&keys, shape.rope_dim, &self.rope_angles(&firsts))?.reshape((closed, dim))?;
            let products = q.reshape((tokens * heads, dim))?.matmul(&keys.t()?)?.relu()?;
            let sums = products.reshape((tokens, heads, closed))?.sum(1)? * (dim as f64).powf(-0.5);
            scores = on_cpu(&sums?)?.to_vec2::<f64>()?;
        }
        let mut seen = vec![f64::NEG_INFINITY; tokens * tokens];
        let mut selected = vec![-1i64; tokens * shape.blocks];
        for (t, scores) in scores.iter().enumerate() {
            let closed = (t + 1) / ratio;
            let mut blocks: Vec<usize> = (0..closed).collect();
            blocks.sort_by(|a, b| scores[*b].total_cmp(&scores[*a]));
            blocks.truncate(shape.blocks);
            blocks.sort_unstable();
            for (to, block) in selected[t * shape.blocks..].iter_mut().zip(&blocks) {
                *to = *block as i64;
            }
            let positions = blocks.into_iter().flat_map(|block| block * ratio..(block + 1) * ratio);
            positions.chain(closed * ratio..t + 1).for_each(|position| seen[t * tokens + position] = 0.0);
        }
        Ok((constant(seen, (tokens, tokens), u)?, Tensor::from_vec(selected, (tokens, shape.blocks), &self.device)?))
    }

    /// Returns the values that the n-gram table adds to the streams, and the table rows of each token. The gate of a
    /// stream is computed from the dot product of the stream with a key. The value times the gate is added directly,
    /// and again after a causal convolution.
    fn ngram(&self, r: &Tensor, ids: &[u32], shape: &NgramShape, path: &str) -> Result<(Tensor, Tensor), ModelError> {
        let layout = NgramLayout::new(&self.checkpoint, &format!("{path}ple_embedding."), shape)?;
        let rows = layout.rows_of(&[], ids);
        let files = RowFiles::open(layout.table, None)?;
        let mut values = vec![0.0; rows.len() * files.table.width];
        for (row, values) in rows.iter().zip(values.chunks_exact_mut(files.table.width)) {
            files.table.decode(&files.read(*row, &mut Vec::new())?, values);
        }
        let (tokens, width) = r.dims2()?;
        let hidden = self.config.hidden;
        let count = width / hidden;
        let e = constant(values.into_iter().map(f64::from).collect(), (tokens, shape.width), r)?;
        let streams = |x: &Tensor| x.reshape((tokens, count, hidden));

        let key = linear(&e, &self.matrix(&format!("{path}key_proj"), width, shape.width)?)?;
        let key = self.stream_norm(&key, &format!("{path}norm_key.weight"))?;
        let query = self.stream_norm(r, &format!("{path}norm_query.weight"))?;
        let s = ((streams(&key)? * streams(&query)?)?.sum_keepdim(D::Minus1)? * (hidden as f64).powf(-0.5))?;
        // The square root of the magnitude, with the sign of the argument.
        let s = (s.sign()? * s.abs()?.maximum(1e-6)?.sqrt()?)?;
        let value = linear(&e, &self.matrix(&format!("{path}value_proj"), hidden, shape.width)?)?;
        let gated = sigmoid(&s)?.broadcast_mul(&value.unsqueeze(1)?)?.reshape((tokens, width))?;

        let m = self.stream_norm(&gated, &format!("{path}norm_conv.weight"))?;
        let kernel = self
            .vector(&format!("{path}conv1d.weight"), width * shape.conv_width)?
            .reshape((width, shape.conv_width))?;
        let y = (&gated + convolve_every(shape.size, &m, &kernel)?)?;
        let rows = rows.into_iter().map(|row| row as i64).collect::<Vec<_>>();
        Ok((y, Tensor::from_vec(rows, (tokens, shape.table_heads()), &self.device)?))
    }
}

/// Adds `y` times the stream's factor `inject` to each stream.
fn write(r: &Tensor, inject: &Tensor, y: &Tensor) -> candle_core::Result<Tensor> {
    r + inject.unsqueeze(2)?.broadcast_mul(&y.unsqueeze(1)?)?.reshape(r.shape())?
}
