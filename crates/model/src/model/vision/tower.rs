//! The vision tower: from an image's patches to one row per token, in Candle tensors.
//!
//! ```text
//! x = patches W^T + b + positions                N patches are N rows of `hidden` values, in block order
//! for each block:
//!     x = x + proj(attention(norm1(x)))          every patch attends to every other one; 2-D RoPE
//!     x = x + fc2(gelu(fc1(norm2(x))))           gelu: the tanh form
//! y = norm(x), the merge^2 patches of a block side by side
//! rows = fc2(gelu(fc1(y)))                       gelu: the exact form
//! ```
//! Source: `qwen3_5_moe` in transformers.

use super::{
    activation::{gelu, linear, softmax},
    config::{ImageLimits, VisionConfig},
    image::Image,
    patches::{block_order, patches},
    weights::{Block, TowerWeights},
    work_limit::WorkLimit,
};
use crate::error::ModelError;
use candle_core::{DType, Device, IndexOp, Result as CandleResult, Tensor};
use candle_nn::{Module, ops::sdpa, rotary_emb::rope};
use moestro_base::platform::os::KeepFreedMemory;

/// Maximum number of rows that an MLP computes at once.
const MLP_ROWS: usize = 1024;
/// Maximum number of rows for which a GPU computes attention at once.
const FUSED_ROWS: usize = 1024;
/// Maximum number of attention scores of one head that are computed at once.
const SCORES: usize = 4 << 20;
/// Head dimensions for which Candle's Metal backend has fused attention.
const FUSED_HEADS: [usize; 7] = [32, 64, 72, 80, 96, 128, 256];

pub struct VisionTower {
    pub config: VisionConfig,
    pub limits: ImageLimits,
    pub weights: TowerWeights,
    pub work: WorkLimit,
}

impl VisionTower {
    /// Computes the rows `[tokens, out_hidden]` of an image. Calls `keep_going` before each block, when the device has
    /// computed the blocks before it.
    ///
    /// # Errors
    /// Fails with [`ModelError::GivenUp`] if `keep_going` returns false. Also fails if weights cannot be read, or if
    /// the device fails.
    pub fn rows(&self, image: &Image, keep_going: Option<&dyn Fn() -> bool>) -> Result<Vec<f32>, ModelError> {
        let Self { config, limits, weights, work } = self;
        // Candle allocates the result of each operation. Page faults of new memory took a fifth of the CPU time.
        let _kept = weights.device.is_cpu().then(KeepFreedMemory::begin);
        let pixels = &image.pixels;
        let grid = Grid { rows: pixels.height / config.patch, columns: pixels.width / config.patch };
        let order = block_order(grid.rows, grid.columns, config.merge);
        let count = order.len();
        let hidden = config.hidden;

        let x = weights.tensor(patches(pixels, config, limits), &[count, config.patch_values()])?;
        let x = weights.patch_embed(config)?.forward(&x)?;
        let mut x = (x + weights.tensor(self.positions(grid, &order)?, &[count, hidden])?)?;
        let (cos, sin) = self.rotations(&order)?;
        for index in 0..config.depth {
            if keep_going.is_some_and(|keep_going| !keep_going()) {
                return Err(ModelError::GivenUp);
            }
            let block = weights.block(index, config)?;
            x = (&x + self.attention(&block, &block.norm1.forward(&x)?, (&cos, &sin))?)?;
            x = (&x + self.mlp(&block, &block.norm2.forward(&x)?)?)?;
            work.wait()?;
        }

        let wide = hidden * config.merge.pow(2);
        let y = weights.norm("merger.norm", hidden)?.forward(&x)?.reshape((count / config.merge.pow(2), wide))?;
        let y = weights.linear("merger.linear_fc1", wide, wide)?.forward(&y)?.gelu_erf()?;
        let y = weights.linear("merger.linear_fc2", config.out_hidden, wide)?.forward(&y)?;
        Ok(y.to_dtype(DType::F32)?.flatten_all()?.to_vec1()?)
    }

    /// Number of bytes of memory that the computation of an image of this many tokens needs.
    pub fn workspace(config: &VisionConfig, tokens: usize) -> u64 {
        let patches = tokens * config.merge.pow(2);
        let hidden = config.hidden;
        let wide = hidden * config.merge.pow(2);
        let block = 4 * hidden * hidden + 2 * hidden * config.intermediate;
        let weights = block.max(wide * (wide + config.out_hidden)) + config.intermediate * hidden;
        let rows = patches * (9 * hidden + config.patch_values()).max(2 * wide / config.merge.pow(2));
        let tiles = 2 * SCORES + 2 * MLP_ROWS.min(patches) * config.intermediate;
        4 * (weights + rows + tiles) as u64
    }

    /// The position embedding of each patch, `[patches, hidden]`: bilinear interpolation of the table. The corners of
    /// the image map to the corners of the table.
    fn positions(&self, grid: Grid, order: &[(usize, usize)]) -> Result<Vec<f32>, ModelError> {
        let table = self.weights.position_table(&self.config)?;
        let side = self.config.table_side;
        let hidden = self.config.hidden;
        let taps = |index: usize, count: usize| {
            let source = index as f32 * (side - 1) as f32 / (count - 1).max(1) as f32;
            let low = source as usize;
            let fraction = source - source.floor();
            [(low, 1.0 - fraction), ((low + 1).min(side - 1), fraction)]
        };
        let mut out = vec![0.0; order.len() * hidden];
        for (out, (row, column)) in out.chunks_exact_mut(hidden).zip(order) {
            for (y, of_row) in taps(*row, grid.rows) {
                for (x, of_column) in taps(*column, grid.columns) {
                    let weight = of_row * of_column;
                    let entry = &table[(y * side + x) * hidden..];
                    out.iter_mut().zip(entry).for_each(|(sum, value)| *sum += value * weight);
                }
            }
        }
        Ok(out)
    }

    /// RoPE cosines and sines, `[patches, head_dim / 2]`. The first half of the angles depends on the patch's row, the
    /// second half on its column.
    fn rotations(&self, order: &[(usize, usize)]) -> Result<(Tensor, Tensor), ModelError> {
        let half = self.config.head_dim() / 2;
        let frequency = |j: usize| 1.0 / self.config.rope_theta.powf(2.0 * j as f32 / half as f32);
        let frequencies: Vec<f32> = (0..half / 2).map(frequency).collect();
        let angles = order.iter().flat_map(|(row, column)| [*row, *column]);
        let angles = angles.flat_map(|at| frequencies.iter().map(move |frequency| at as f32 * frequency));
        let (cos, sin) = angles.map(|angle| (angle.cos(), angle.sin())).unzip();
        let tensor = |values: Vec<f32>| {
            Tensor::from_vec(values, (order.len(), half), &Device::Cpu)?.to_device(&self.weights.device)
        };
        Ok((tensor(cos)?, tensor(sin)?))
    }

    /// `proj(softmax(q k^T / sqrt(head_dim)) v)` over all patches.
    fn attention(&self, block: &Block, x: &Tensor, (cos, sin): (&Tensor, &Tensor)) -> Result<Tensor, ModelError> {
        let heads = self.config.heads;
        let dim = self.config.head_dim();
        let (count, hidden) = x.dims2()?;
        let scale = (dim as f64).powf(-0.5);
        self.work.add(product(count, 3 * hidden, hidden))?;
        // `[3 heads, patches, dim]`: all q, all k, all v.
        let qkv = linear(&block.qkv, x)?.reshape((count, 3 * heads, dim))?.transpose(0, 1)?;
        let qk = rope(&qkv.narrow(0, 0, 2 * heads)?.contiguous()?.unsqueeze(0)?.to_dtype(DType::F32)?, cos, sin)?;
        let qk = qk.to_dtype(x.dtype())?;
        let y = if self.weights.device.is_metal() && FUSED_HEADS.contains(&dim) {
            let q = qk.narrow(1, 0, heads)?.contiguous()?;
            let k = qk.narrow(1, heads, heads)?.contiguous()?;
            let v = qkv.narrow(0, 2 * heads, heads)?.contiguous()?.unsqueeze(0)?;
            in_slices(&q, |q| {
                self.work.add(2.0 * product(q.dim(2)?, count, hidden))?;
                sdpa(q, &k, &v, None, false, scale as f32, 1.0)
            })?
        } else {
            let mut outputs = Vec::with_capacity(heads);
            for head in 0..heads {
                let q = qk.i((0, head))?;
                let k = qk.i((0, heads + head))?.t()?;
                let v = qkv.i(2 * heads + head)?;
                let rows = (SCORES / count).max(16);
                outputs.push(by_rows(&q, rows, |q| softmax(q.matmul(&k)?, scale)?.matmul(&v))?);
            }
            Tensor::cat(&outputs, 1)?
        };
        self.work.add(product(count, hidden, hidden))?;
        Ok(linear(&block.proj, &y)?)
    }

    /// `fc2(gelu(fc1(x)))`, with the tanh form of gelu.
    fn mlp(&self, block: &Block, x: &Tensor) -> CandleResult<Tensor> {
        by_rows(x, MLP_ROWS, |x| {
            self.work.add(2.0 * product(x.dim(0)?, self.config.intermediate, self.config.hidden))?;
            linear(&block.fc2, &gelu(linear(&block.fc1, x)?)?)
        })
    }
}

/// Number of floating-point operations of a matrix product.
fn product(rows: usize, columns: usize, inner: usize) -> f64 {
    2.0 * rows as f64 * columns as f64 * inner as f64
}

/// Applies `attend` to slices of `q` `[1, heads, rows, dim]`. Returns `[rows, heads * dim]`. The slices have about the
/// same number of rows, at most [`FUSED_ROWS`], because Candle computes a few rows with another kernel.
fn in_slices(q: &Tensor, attend: impl Fn(&Tensor) -> CandleResult<Tensor>) -> CandleResult<Tensor> {
    let (_, heads, count, dim) = q.dims4()?;
    let rows = count.div_ceil(count.div_ceil(FUSED_ROWS).max(1)).max(1);
    let slices = (0..count).step_by(rows).map(|first| {
        let slice = q.narrow(2, first, rows.min(count - first))?.contiguous()?;
        attend(&slice)?.squeeze(0)?.transpose(0, 1)?.reshape(((), heads * dim))
    });
    Tensor::cat(&slices.collect::<CandleResult<Vec<_>>>()?, 0)
}

/// Number of rows and columns of patches in an image.
#[derive(Clone, Copy)]
struct Grid {
    rows: usize,
    columns: usize,
}

/// Applies `compute` to blocks of rows.
fn by_rows(x: &Tensor, rows: usize, compute: impl Fn(&Tensor) -> CandleResult<Tensor>) -> CandleResult<Tensor> {
    let count = x.dim(0)?;
    let blocks = (0..count).step_by(rows).map(|first| compute(&x.narrow(0, first, rows.min(count - first))?));
    Tensor::cat(&blocks.collect::<CandleResult<Vec<_>>>()?, 0)
}

#[cfg(test)]
mod tests {
    use super::{super::work_limit::MAX_WORK, *};

    #[test]
    fn attention_in_slices_equals_attention() {
        let count = 2 * FUSED_ROWS + 4;
        let (heads, dim) = (2, 4);
        let values = |seed: usize| (0..heads * count * dim).map(move |at| ((at * 7 + seed) % 13) as f32 / 13.0);
        let tensor = |seed| Tensor::from_vec(values(seed).collect(), (1, heads, count, dim), &Device::Cpu).unwrap();
        let [q, k, v] = [1, 2, 3].map(tensor);
        let rows = std::cell::RefCell::new(Vec::new());
        let attend = |q: &Tensor| {
            rows.borrow_mut().push(q.dim(2)?);
            candle_nn::ops::softmax_last_dim(&q.matmul(&k.t()?)?)?.matmul(&v)
        };
        let whole = attend(&q).unwrap().squeeze(0).unwrap().transpose(0, 1).unwrap();
        let whole = whole.reshape((count, heads * dim)).unwrap().to_vec2::<f32>().unwrap();
        rows.borrow_mut().clear();
        let found = in_slices(&q, attend).unwrap().to_vec2::<f32>().unwrap();
        let largest =
            found.iter().flatten().zip(whole.iter().flatten()).fold(0f32, |max, (a, b)| max.max((a - b).abs()));
        assert!(largest < 1e-6, "{largest}");
        assert_eq!(*rows.borrow(), [684, 684, 684]);
    }

    /// The real towers have 1,152 columns. A GPU's largest image has 2,048 tokens of four patches.
    #[test]
    fn largest_operation_is_bounded() {
        let (patches, hidden, intermediate) = (4 * 2048, 1152, 4304);
        let attention = 2.0 * product(FUSED_ROWS, patches, hidden);
        let qkv = product(patches, 3 * hidden, hidden);
        let mlp = 2.0 * product(MLP_ROWS, intermediate, hidden);
        for work in [attention, qkv, mlp] {
            assert!(work < MAX_WORK, "{work:.1e}");
        }
        // Without slices, attention would exceed it.
        assert!(2.0 * product(patches, patches, hidden) > MAX_WORK);
    }
}
