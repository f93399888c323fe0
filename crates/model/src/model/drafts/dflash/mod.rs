//! DFlash drafts: a small network that proposes a block of tokens in one pass (z-lab, 2026).
//!
//! The draft has neither embedding nor output head. The draft reads the target's residual stream after a few layers,
//! and the target's embedding of the block `[last token, mask, mask, ...]`. The target's head turns the draft's rows
//! into logits.
//!
//! ```text
//! context = rms_norm(fc [tapped layers of a position, side by side])       once per position; layers project to k, v
//! h = embed[block]
//! for each layer:  x = rms_norm(h);  q k v = W x
//!                  h = h + W_o attention(q; k and v of context and block)   the block's rows attend to each other
//!                  h = h + W_down (silu(W_gate y) * W_up y)                 y = rms_norm(h)
//! rows 1.. of rms_norm(h)                                                  row j proposes token j of the block
//! ```
//!
//! The draft's norms multiply by their weight as stored, unlike the target's norms in Hugging Face's layout. RoPE
//! covers all dimensions of a head. The draft computes on the CPU.

mod attention;
pub mod config;
mod dflash2;
mod weights;

pub use config::{DflashConfig, is_dflash};

use crate::{
    checkpoint::{Checkpoint, TrunkLoader, index::Index},
    error::ModelError,
    model::{config::json, drafts::norm, placement::adopt_weights},
    plan::DraftFootprint,
};
use attention::{CONTEXT_CHUNK, ContextCache, attend, norm_and_rope};
use moestro_compute::{
    device::{CpuDevice, Region},
    ops::{Backend, Cpu, Embedding, Linear, Weight},
};
use std::{ops::Range, path::Path};
use weights::{Convolution, DflashWeights};

/// A draft checkpoint whose headers were read and checked.
pub struct DflashCheckpoint {
    pub config: DflashConfig,
    checkpoint: Checkpoint,
    /// Number of bytes of the weights.
    pub weights: u64,
}

impl DflashCheckpoint {
    /// Reads the headers in `dir`. Checks every name and shape, and that the draft is for `target`.
    pub fn new(dir: &Path, target: &crate::model::Config) -> Result<Self, ModelError> {
        let config = DflashConfig::new(&json(dir)?)?;
        config.check(target)?;
        let checkpoint = Checkpoint::open(Index::open(dir)?, &config.quantization)?;
        let weights = weights::measure(&checkpoint, &config)?;
        Ok(Self { config, checkpoint, weights })
    }

    /// The memory that the loaded draft needs.
    pub fn footprint(&self) -> DraftFootprint {
        let config = &self.config;
        // The context of a layer with a window has a fixed size. Without a window, it grows with the sequence.
        let has_window = |window: &&config::AttentionWindow| window.size.is_some();
        let windows: u64 =
            config.layers.iter().filter(has_window).map(|window| attention::cost(config, *window, usize::MAX)).sum();
        let all = config
            .layers
            .iter()
            .filter(|window| !has_window(window))
            .map(|window| attention::cost(config, *window, 1))
            .sum();
        let buffers: usize = buffer_floats(config).iter().map(|floats| floats * 4).sum();
        // There are two copies of the hidden rows: one for each layer of the target, and one with all layers side by
        // side for the draft.
        let per_row = 2 * config.features() as u64 * 4;
        DraftFootprint { fixed: self.weights + windows + buffers as u64, per_token: all, per_row }
    }
}

/// A loaded draft network, and its context for one sequence.
pub struct DflashModel {
    config: DflashConfig,
    net: DflashWeights,
    products: MatrixProducts,
    layers: Vec<ContextCache>,
    /// The position after the last position of the context.
    len: usize,
}

impl DflashModel {
    /// Loads the draft. Reserves memory for `context` positions.
    pub fn load(checkpoint_info: &DflashCheckpoint, context: usize, compute: CpuDevice) -> Result<Self, ModelError> {
        let DflashCheckpoint { config, checkpoint, weights } = checkpoint_info;
        let mut trunk = TrunkLoader::read(checkpoint, *weights as usize)?;
        let net = DflashWeights::load(&mut trunk, config)?;
        trunk.check_not_zero("the DFlash draft")?;
        let [matrices, _] = trunk.finish()?;
        let mut backend = Cpu::new(compute.clone());
        adopt_weights(&matrices, &mut backend)?;
        let [x, y] = buffer_floats(config);
        let x = backend.allocate(x * 4)?;
        let y = backend.allocate(y * 4)?;
        let layers = config.layers.iter().map(|window| ContextCache::new(config, *window, context)).collect();
        Ok(Self { config: config.clone(), net, products: MatrixProducts { backend, compute, x, y }, layers, len: 0 })
    }

    pub fn config(&self) -> &DflashConfig {
        &self.config
    }

    /// The position after the context, at which the next block starts.
    #[allow(clippy::len_without_is_empty)] // No code asks whether the context is empty.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Removes positions that belong to another sequence. The context then has a gap at these positions.
    pub fn forget(&mut self, positions: Range<usize>) {
        let width = self.config.kv();
        self.layers.iter_mut().for_each(|cache| cache.forget(&positions, width));
    }

    /// Removes the positions from `len` on.
    pub fn truncate(&mut self, len: usize) {
        let width = self.config.kv();
        self.layers.iter_mut().for_each(|cache| cache.truncate(len, width));
        self.len = self.len.min(len);
    }

    /// Adds positions from `start` on, with the target's hidden rows `features`, `[positions, taps * hidden]`. Replaces
    /// all positions from `start` on. There may be a gap before `start`.
    pub fn append(&mut self, start: usize, features: &[f32]) -> Result<(), ModelError> {
        self.truncate(start);
        self.len = start;
        let Self { config, net, products, layers, len } = self;
        let width = config.kv();
        for features in features.chunks(CONTEXT_CHUNK * config.features()) {
            let mut context = products.multiply(features, std::slice::from_ref(&net.fc))?;
            norm(&mut context, &net.hidden_norm, config.eps);
            let rows = features.len() / config.features();
            for ((layer, cache), window) in net.layers.iter().zip(layers.iter_mut()).zip(&config.layers) {
                let both = products.multiply(&context, &layer.qkv[1..])?;
                let [mut keys, values] = columns(&both, [0, width, 2 * width]);
                norm_and_rope(&mut keys, width, *len, &layer.k_norm, config);
                cache.push(*len, &keys, &values, width, *window);
            }
            *len += rows;
        }
        Ok(())
    }

    /// Runs a block after the context. `embedded` has the embedding rows of the block. Returns the block's rows after
    /// the last norm. Both are `[rows, hidden]`.
    pub fn block(&mut self, embedded: &[f32]) -> Result<Vec<f32>, ModelError> {
        let Self { config, net, products, layers, len } = self;
        let start = *len;
        let queries = config.heads * config.dim;
        let width = config.kv();
        let mut h: Vec<f32> = embedded.iter().map(|value| value * config.input_scale).collect();
        for ((layer, cache), window) in net.layers.iter().zip(layers).zip(&config.layers) {
            let [attention_conv, mlp_conv] =
                layer.convolutions.as_ref().map_or([None, None], |both| both.each_ref().map(Some));
            products.add_residual(config, attention_conv, &mut h, &layer.norm, |products, x| {
                let qkv = products.multiply(x, &layer.qkv)?;
                let [mut q, rest] = columns(&qkv, [0, queries, queries + 2 * width]);
                let [mut keys, values] = columns(&rest, [0, width, 2 * width]);
                norm_and_rope(&mut q, queries, start, &layer.q_norm, config);
                norm_and_rope(&mut keys, width, start, &layer.k_norm, config);
                let positions = (start..start + embedded.len() / config.hidden).collect();
                let own = ContextCache { keys, values, positions };
                let y = attend(&products.compute.threads, config, *window, &q, start, [cache, &own]);
                products.multiply(&y, std::slice::from_ref(&layer.out))
            })?;
            products.add_residual(config, mlp_conv, &mut h, &layer.post_norm, |products, x| {
                let both = products.multiply(x, &layer.gate_up)?;
                let [mut gate, up] = columns(&both, [0, config.intermediate, 2 * config.intermediate]);
                gate.iter_mut().zip(&up).for_each(|(gate, up)| *gate = *gate / (1.0 + (-*gate).exp()) * up);
                products.multiply(&gate, std::slice::from_ref(&layer.down))
            })?;
        }
        norm(&mut h, &net.norm, config.eps);
        Ok(h)
    }

    /// Turns the head's logits of a row of [`DflashModel::block`] into the draft's logits of the token after `before`.
    /// With DFlash2, tokens that are not candidates get negative infinity.
    pub fn score(&mut self, before: u32, hidden: &[f32], logits: &mut [f32]) -> Result<(), ModelError> {
        let scale = self.config.output_scale;
        match self.config.cap {
            Some(cap) => logits.iter_mut().for_each(|x| *x = (*x * scale / cap).tanh() * cap),
            None if scale != 1.0 => logits.iter_mut().for_each(|x| *x *= scale),
            None => {}
        }
        let (Some(selector), Some(dflash2)) = (&self.net.selector, &self.config.dflash2) else { return Ok(()) };
        let products = &mut self.products;
        let mut candidates = dflash2::greatest(logits, dflash2.candidates);
        let projected = products.multiply(hidden, std::slice::from_ref(&selector.projection))?;
        let predecessor = products.gather(&selector.predecessors, &[before])?;
        let ids: Vec<u32> = candidates.iter().map(|(id, _)| *id).collect();
        let successors = products.gather(&selector.successors, &ids)?;
        dflash2::select(&mut candidates, &predecessor, &projected, &successors);
        logits.fill(f32::NEG_INFINITY);
        for (id, score) in candidates {
            if let Some(logit) = logits.get_mut(id as usize) {
                *logit = score;
            }
        }
        Ok(())
    }
}

/// Number of floats of the largest input and of the largest output of a matrix product.
fn buffer_floats(config: &DflashConfig) -> [usize; 2] {
    let rows = crate::model::MAX_VERIFY_ROWS;
    let widest = (2 * config.intermediate).max(config.heads * config.dim + 2 * config.kv());
    let dflash2 = config.dflash2.map_or(0, |dflash2| {
        (2 * dflash2.taps * config.hidden / dflash2.group)
            .max(dflash2.candidates * dflash2.rank)
            .max(dflash2.candidates)
    });
    let x = (CONTEXT_CHUNK * config.features()).max(rows * widest.max(config.hidden)).max(dflash2);
    let y = (CONTEXT_CHUNK * config.hidden.max(2 * config.kv())).max(rows * widest.max(config.hidden).max(dflash2));
    [x, y]
}

/// Returns columns `cuts[0]..cuts[1]` and `cuts[1]..cuts[2]` of rows with `cuts[2]` columns.
fn columns(rows: &[f32], cuts: [usize; 3]) -> [Vec<f32>; 2] {
    let part =
        |from: usize, to: usize| rows.chunks_exact(cuts[2]).flat_map(|row| row[from..to].iter().copied()).collect();
    [part(cuts[0], cuts[1]), part(cuts[1], cuts[2])]
}

/// Matrix products on all CPU threads.
struct MatrixProducts {
    backend: Cpu,
    compute: CpuDevice,
    /// Input rows.
    x: Region,
    /// Output rows.
    y: Region,
}

impl MatrixProducts {
    /// `x W^T` for one to four matrices that share `x`. The outputs of the matrices are adjacent in each row.
    fn multiply(&mut self, x: &[f32], matrices: &[Weight]) -> Result<Vec<f32>, ModelError> {
        let cols = matrices.first().map_or(1, |matrix| matrix.cols);
        let tokens = x.len() / cols;
        let width = matrices.iter().map(|matrix| matrix.rows).sum::<usize>();
        if x.len() * 4 > self.x.len || tokens * width * 4 > self.y.len {
            return Err(ModelError::Config(format!(
                "the DFlash draft's buffers are too small for {tokens} rows of {width}"
            )));
        }
        self.backend.write(self.x, bytemuck::cast_slice(x))?;
        self.backend.execute(&Linear { x: self.x, tokens, norm: None, matrices, y: self.y, add: false }.into())?;
        let mut y = vec![0.0; tokens * width];
        self.backend.read_floats(self.y, &mut y)?;
        Ok(y)
    }

    /// Returns the rows `ids` of a matrix.
    fn gather(&mut self, table: &Weight, ids: &[u32]) -> Result<Vec<f32>, ModelError> {
        self.backend.write_words(self.x, ids)?;
        self.backend.execute(&Embedding { table, tokens: ids.len(), ids: self.x, into: self.y }.into())?;
        let mut rows = vec![0.0; ids.len() * table.cols];
        self.backend.read_floats(self.y, &mut rows)?;
        Ok(rows)
    }

    /// `h += inner(rms_norm(h))`. DFlash2 has a convolution before and after `inner`.
    fn add_residual(
        &mut self,
        config: &DflashConfig,
        convolution: Option<&Convolution>,
        h: &mut [f32],
        weight: &[f32],
        inner: impl FnOnce(&mut Self, &[f32]) -> Result<Vec<f32>, ModelError>,
    ) -> Result<(), ModelError> {
        let mut x = h.to_vec();
        norm(&mut x, weight, config.eps);
        let y = match (convolution, &config.dflash2) {
            (Some(convolution), Some(dflash2)) => {
                // The kernels of both convolutions depend on the input of the first.
                let dynamic = self.multiply(&x, std::slice::from_ref(&convolution.kernel))?;
                let half = convolution.kernel.rows / 2;
                let kernel = |side: usize| {
                    let dynamic = &dynamic;
                    move |row: usize| &dynamic[(2 * row + side) * half..][..half]
                };
                let (before, after) = convolution.base.split_at(convolution.base.len() / 2);
                let x = dflash2::convolve(&x, before, dflash2, kernel(0));
                let y = inner(self, &x)?;
                dflash2::convolve(&y, after, dflash2, kernel(1))
            }
            _ => inner(self, &x)?,
        };
        h.iter_mut().zip(&y).for_each(|(h, y)| *h += y);
        Ok(())
    }
}
