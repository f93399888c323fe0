//! DFlash: a small network that proposes a whole block of tokens in one pass (z-lab, 2026). It has neither embedding nor head
//! of its own: it looks at the target's residual stream behind a few of its layers, takes the embedding of the block `[last
//! token, mask, mask, ...]`, and its rows go through the target's head.
//!
//! ```text
//! context = rms(fc [taps of a position, side by side])        once a position; every layer projects it to keys and values
//! h = embed[block]
//! for each layer:  x = rms(h);  q k v = W x
//!                  h = h + W_o attention(q; keys and values of context and block)    the block's rows see each other
//!                  h = h + Down(silu(Gate y) * Up y)          y = rms(h)
//! rows 1.. of rms(h)                                          row j proposes the token at the block's place j
//! ```
//! Norms multiply by their weight as it is stored, unlike the target's in Hugging Face's layout; all dimensions of a head are
//! rotated. The draft computes on the CPU, in f32 for weights that are floats.

mod attention;
pub mod config;
mod dflash2;
mod weights;

pub use config::{Config, is_dflash};

use crate::{
    checkpoint::{Checkpoint, TrunkLoader, index::Index},
    device::{CpuDevice, Region},
    error::ModelError,
    model::placement::adopt_weights,
    ops::{Backend, Cpu, Embedding, Linear, Weight},
    plan::DraftFootprint,
};
use attention::{Memory, attend, norm, place};
use std::{ops::Range, path::Path};
use weights::{Convolution, Net};

/// Positions of a prompt that become context together.
const PIECE: usize = 256;

/// A draft that has been looked at and not loaded.
pub struct DflashCheckpoint {
    pub config: Config,
    checkpoint: Checkpoint,
    /// Bytes of its weights.
    pub weights: u64,
}

impl DflashCheckpoint {
    /// Reads the headers in `dir`; checks every name and shape, and that it is a draft for `target`.
    pub fn new(dir: &Path, target: &crate::model::Config) -> Result<Self, ModelError> {
        let config = Config::new(&config::read(dir)?)?;
        config.check(target)?;
        let checkpoint = Checkpoint::open(Index::open(dir)?, &config.quantization)?;
        let weights = weights::measure(&checkpoint, &config)?;
        Ok(Self { config, checkpoint, weights })
    }

    /// The loaded draft's demands on memory.
    pub fn shape(&self) -> DraftFootprint {
        let config = &self.config;
        // Layers with a window keep that and little more, the others everything.
        let window = |sight: &&config::Sight| sight.window.is_some();
        let windows: u64 =
            config.layers.iter().filter(window).map(|sight| attention::cost(config, *sight, usize::MAX)).sum();
        let all =
            config.layers.iter().filter(|sight| !window(sight)).map(|sight| attention::cost(config, *sight, 1)).sum();
        let room: usize = room(config).iter().map(|floats| floats * 4).sum();
        // Hidden rows lie where the layers leave them, and side by side where the draft takes them from.
        let per_row = 2 * config.features() as u64 * 4;
        DraftFootprint { fixed: self.weights + windows + room as u64, per_token: all, per_row }
    }
}

/// A loaded draft and the context of one sequence.
pub struct DflashModel {
    config: Config,
    net: Net,
    products: Products,
    layers: Vec<Memory>,
    /// The position behind the context's last.
    len: usize,
}

impl DflashModel {
    /// Loads what `surveyed` has looked at, with room for `context` positions.
    pub fn load(surveyed: &DflashCheckpoint, context: usize, compute: CpuDevice) -> Result<Self, ModelError> {
        let DflashCheckpoint { config, checkpoint, weights } = surveyed;
        let mut ignore = |_, _| ();
        let mut trunk = TrunkLoader::read(checkpoint, *weights as usize, &mut ignore)?;
        let net = Net::load(&mut trunk, config)?;
        let [matrices, _] = trunk.finish()?;
        let mut run = Cpu::new(compute.clone());
        adopt_weights(&matrices, &mut run)?;
        let [x, y] = room(config);
        let (x, y) = (run.allocate(x * 4)?, run.allocate(y * 4)?);
        let layers = config.layers.iter().map(|sight| Memory::new(config, *sight, context)).collect();
        Ok(Self { config: config.clone(), net, products: Products { run, compute, x, y }, layers, len: 0 })
    }

    pub fn config(&self) -> &Config {
        &self.config
    }

    /// The position that comes next: where the context ends and a block begins.
    pub fn len(&self) -> usize {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Leaves a gap in the context: its positions of this range are another sequence's.
    pub fn forget(&mut self, positions: Range<usize>) {
        let width = self.config.kv();
        self.layers.iter_mut().for_each(|memory| memory.forget(&positions, width));
    }

    /// The context ends before position `len`.
    pub fn truncate(&mut self, len: usize) {
        let width = self.config.kv();
        self.layers.iter_mut().for_each(|memory| memory.truncate(len, width));
        self.len = self.len.min(len);
    }

    /// Adds the positions from `start` on, whose taps are `features` (`[positions, taps * hidden]`). Older
    /// ones from `start` on are forgotten; in front of `start` there may be a gap.
    pub fn append(&mut self, start: usize, features: &[f32]) -> Result<(), ModelError> {
        self.truncate(start);
        self.len = start;
        let Self { config, net, products, layers, len } = self;
        let width = config.kv();
        for features in features.chunks(PIECE * config.features()) {
            let mut context = products.of(features, std::slice::from_ref(&net.fc))?;
            norm(&mut context, &net.hidden_norm, config.eps);
            let rows = features.len() / config.features();
            for ((layer, memory), sight) in net.layers.iter().zip(layers.iter_mut()).zip(&config.layers) {
                let both = products.of(&context, &layer.qkv[1..])?;
                let [mut keys, values] = columns(&both, [0, width, 2 * width]);
                place(&mut keys, width, *len, &layer.k_norm, config);
                memory.push(*len, &keys, &values, width, *sight);
            }
            *len += rows;
        }
        Ok(())
    }

    /// The block's last rows, normed (`[rows, hidden]`), from its embedding (`[rows, hidden]`), behind the context.
    pub fn block(&mut self, embedded: &[f32]) -> Result<Vec<f32>, ModelError> {
        let Self { config, net, products, layers, len } = self;
        let (start, queries, width) = (*len, config.heads * config.dim, config.kv());
        let mut h: Vec<f32> = embedded.iter().map(|value| value * config.input_scale).collect();
        for ((layer, memory), sight) in net.layers.iter().zip(layers).zip(&config.layers) {
            let [around, other] = layer.convolutions.as_ref().map_or([None, None], |both| both.each_ref().map(Some));
            products.around(config, around, &mut h, &layer.norm, |products, x| {
                let qkv = products.of(x, &layer.qkv)?;
                let [mut q, rest] = columns(&qkv, [0, queries, queries + 2 * width]);
                let [mut keys, values] = columns(&rest, [0, width, 2 * width]);
                place(&mut q, queries, start, &layer.q_norm, config);
                place(&mut keys, width, start, &layer.k_norm, config);
                let positions = (start..start + embedded.len() / config.hidden).collect();
                let own = Memory { keys, values, positions };
                let y = attend(&products.compute.threads, config, *sight, (&q, start), [memory, &own]);
                products.of(&y, std::slice::from_ref(&layer.out))
            })?;
            products.around(config, other, &mut h, &layer.post_norm, |products, x| {
                let both = products.of(x, &layer.gate_up)?;
                let [mut gate, up] = columns(&both, [0, config.intermediate, 2 * config.intermediate]);
                gate.iter_mut().zip(&up).for_each(|(gate, up)| *gate = *gate / (1.0 + (-*gate).exp()) * up);
                products.of(&gate, std::slice::from_ref(&layer.down))
            })?;
        }
        norm(&mut h, &net.norm, config.eps);
        Ok(h)
    }

    /// Turns the head's logits of a row of [`DflashModel::block`] into the draft's for the token behind `before`: those of DFlash2
    /// are negative infinity where there is no candidate.
    pub fn score(&mut self, before: u32, hidden: &[f32], logits: &mut [f32]) -> Result<(), ModelError> {
        let scale = self.config.output_scale;
        match self.config.cap {
            Some(cap) => logits.iter_mut().for_each(|x| *x = (*x * scale / cap).tanh() * cap),
            None if scale != 1.0 => logits.iter_mut().for_each(|x| *x *= scale),
            None => {}
        }
        let (Some(selector), Some(second)) = (&self.net.selector, &self.config.second) else { return Ok(()) };
        let products = &mut self.products;
        let mut candidates = dflash2::greatest(logits, second.candidates);
        let projected = products.of(hidden, std::slice::from_ref(&selector.projection))?;
        let predecessor = products.rows(&selector.predecessors, &[before])?;
        let ids: Vec<u32> = candidates.iter().map(|(id, _)| *id).collect();
        let successors = products.rows(&selector.successors, &ids)?;
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

/// Floats of the rows that meet matrices, and of what becomes of them.
fn room(config: &Config) -> [usize; 2] {
    let rows = crate::model::MAX_VERIFY_ROWS;
    let widest = (2 * config.intermediate).max(config.heads * config.dim + 2 * config.kv());
    let second = config.second.map_or(0, |second| {
        (2 * second.taps * config.hidden / second.group).max(second.candidates * second.rank).max(second.candidates)
    });
    let x = (PIECE * config.features()).max(rows * widest.max(config.hidden)).max(second);
    let y = (PIECE * config.hidden.max(2 * config.kv())).max(rows * widest.max(config.hidden).max(second));
    [x, y]
}

/// Columns `cuts[0]..cuts[1]` and `cuts[1]..cuts[2]` of rows of `cuts[2]`.
fn columns(rows: &[f32], cuts: [usize; 3]) -> [Vec<f32>; 2] {
    let part =
        |from: usize, to: usize| rows.chunks_exact(cuts[2]).flat_map(|row| row[from..to].iter().copied()).collect();
    [part(cuts[0], cuts[1]), part(cuts[1], cuts[2])]
}

/// Products of rows with matrices, on all threads.
struct Products {
    run: Cpu,
    compute: CpuDevice,
    /// Rows on their way in, and out.
    x: Region,
    y: Region,
}

impl Products {
    /// `x W^T` for one to four matrices that share `x`; their rows follow one another.
    fn of(&mut self, x: &[f32], matrices: &[Weight]) -> Result<Vec<f32>, ModelError> {
        let cols = matrices.first().map_or(1, |matrix| matrix.cols);
        let (tokens, width) = (x.len() / cols, matrices.iter().map(|matrix| matrix.rows).sum::<usize>());
        if x.len() * 4 > self.x.len || tokens * width * 4 > self.y.len {
            return Err(ModelError::Config(format!("a DFlash draft has no room for {tokens} rows of {width}")));
        }
        self.run.write(self.x, bytemuck::cast_slice(x))?;
        self.run.execute(&Linear { x: self.x, tokens, norm: None, matrices, y: self.y, add: false }.into())?;
        let mut y = vec![0.0; tokens * width];
        self.run.read_floats(self.y, &mut y)?;
        Ok(y)
    }

    /// Rows `ids` of a matrix.
    fn rows(&mut self, table: &Weight, ids: &[u32]) -> Result<Vec<f32>, ModelError> {
        self.run.write_words(self.x, ids)?;
        self.run.execute(&Embedding { table, tokens: ids.len(), ids: self.x, into: self.y }.into())?;
        let mut rows = vec![0.0; ids.len() * table.cols];
        self.run.read_floats(self.y, &mut rows)?;
        Ok(rows)
    }

    /// `h += inner(rms(h))`; in DFlash2 with a convolution in front of `inner` and one behind.
    fn around(
        &mut self,
        config: &Config,
        convolution: Option<&Convolution>,
        h: &mut [f32],
        weight: &[f32],
        inner: impl FnOnce(&mut Self, &[f32]) -> Result<Vec<f32>, ModelError>,
    ) -> Result<(), ModelError> {
        let mut x = h.to_vec();
        norm(&mut x, weight, config.eps);
        let y = match (convolution, &config.second) {
            (Some(convolution), Some(second)) => {
                // Both kernels depend on what the first one sees.
                let dynamic = self.of(&x, std::slice::from_ref(&convolution.kernel))?;
                let half = convolution.kernel.rows / 2;
                let kernel = |side: usize| {
                    let dynamic = &dynamic;
                    move |row: usize| &dynamic[(2 * row + side) * half..][..half]
                };
                let (front, behind) = convolution.base.split_at(convolution.base.len() / 2);
                let x = dflash2::convolve(&x, front, second, kernel(0));
                let y = inner(self, &x)?;
                dflash2::convolve(&y, behind, second, kernel(1))
            }
            _ => inner(self, &x)?,
        };
        h.iter_mut().zip(&y).for_each(|(h, y)| *h += y);
        Ok(())
    }
}
