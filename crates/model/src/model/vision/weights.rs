//! The weights of the vision tower, which are read from the checkpoint's files when they are needed.
//!
//! On the CPU, each block is read again for every image, so the weights take no memory between images. All threads read
//! and convert them: 0.9 GB in bf16 for the real models. A GPU keeps the weights until [`TowerWeights::release`].

use super::config::{CHANNELS, VisionConfig};
use crate::{
    checkpoint::{
        Checkpoint,
        index::{Index, zero_weights},
        names::{VISION_TOWER, vision_name},
    },
    error::ModelError,
    model::dequantize,
};
use candle_core::{DType, Device, Tensor};
use candle_nn::{LayerNorm, Linear};
use moestro_base::platform::Threads;
use serde_json::Value;
use std::{cell::RefCell, sync::Arc};

/// Epsilon of every LayerNorm of the tower. The configuration does not contain this value.
const EPS: f64 = 1e-6;

pub struct TowerWeights {
    from: Checkpoint,
    pub device: Device,
    /// Data type of weights and activations.
    pub dtype: DType,
    /// The threads that read and convert weights.
    threads: Arc<Threads>,
    /// Blocks that stay in the GPU's memory.
    kept: RefCell<Vec<Option<Block>>>,
}

/// A transformer block: `x += attention(norm1(x)); x += mlp(norm2(x))`.
#[derive(Clone)]
pub struct Block {
    pub norm1: LayerNorm,
    pub qkv: Linear,
    pub proj: Linear,
    pub norm2: LayerNorm,
    pub fc1: Linear,
    pub fc2: Linear,
}

impl TowerWeights {
    /// Returns `None` if the checkpoint has no tower. Converters for text models remove the tower but may leave its
    /// configuration.
    pub fn open(index: Index) -> Result<Option<Self>, ModelError> {
        let from = Checkpoint::open_as(index, &Value::Null, vision_name)?;
        let has_tower = from.has(&format!("{VISION_TOWER}patch_embed.proj.weight"));
        let device = Device::Cpu;
        let dtype = DType::F32;
        let threads = Arc::new(Threads::new(1));
        Ok(has_tower.then(|| Self { from, device, dtype, threads, kept: RefCell::default() }))
    }

    /// Computes on this GPU in bf16.
    pub fn on_gpu(self, device: Device) -> Self {
        Self { device, dtype: DType::BF16, ..self }
    }

    pub fn on_threads(self, threads: Arc<Threads>) -> Self {
        Self { threads, ..self }
    }

    /// Checks the names and shapes of all tensors without reading the matrices.
    pub fn check(&self, config: &VisionConfig) -> Result<(), ModelError> {
        let linear = |path: &str, rows: usize, cols: usize| {
            self.from.layout(&name(path), &[], rows, cols).and_then(|_| self.vector(&format!("{path}.bias"), rows))
        };
        let norm = |path: &str, len: usize| {
            self.vector(&format!("{path}.weight"), len).and_then(|_| self.vector(&format!("{path}.bias"), len))
        };
        let hidden = config.hidden;
        let wide = config.hidden * config.merge.pow(2);
        for index in 0..config.depth {
            let path = format!("blocks.{index}");
            norm(&format!("{path}.norm1"), hidden)?;
            norm(&format!("{path}.norm2"), hidden)?;
            linear(&format!("{path}.attn.qkv"), 3 * hidden, hidden)?;
            linear(&format!("{path}.attn.proj"), hidden, hidden)?;
            linear(&format!("{path}.mlp.linear_fc1"), config.intermediate, hidden)?;
            linear(&format!("{path}.mlp.linear_fc2"), hidden, config.intermediate)?;
        }
        norm("merger.norm", hidden)?;
        linear("merger.linear_fc1", wide, wide)?;
        linear("merger.linear_fc2", config.out_hidden, wide)?;
        self.from.layout(&name("pos_embed"), &[], config.table_side.pow(2), hidden)?;
        self.patch_shape(config)?;
        self.vector("patch_embed.proj.bias", hidden)?;
        self.from.finish()
    }

    /// Number of bytes of the blocks that stay on a GPU. They are bf16 whatever the checkpoint's format.
    pub fn gpu_bytes(config: &VisionConfig) -> u64 {
        let VisionConfig { hidden, intermediate, .. } = *config;
        let linear = |rows: usize, cols: usize| rows * cols + rows;
        let attention = linear(3 * hidden, hidden) + linear(hidden, hidden);
        let mlp = linear(intermediate, hidden) + linear(hidden, intermediate);
        (config.depth * 2 * (attention + mlp + 4 * hidden)) as u64
    }

    /// Drops the blocks in the GPU's memory.
    pub fn release(&self) {
        self.kept.borrow_mut().clear();
    }

    pub fn block(&self, index: usize, config: &VisionConfig) -> Result<Block, ModelError> {
        let kept = self.kept.borrow().get(index).cloned().flatten();
        if let Some(block) = kept {
            return Ok(block);
        }
        let block = self.read_block(&format!("blocks.{index}"), config)?;
        // Candle computes the block on its own threads.
        self.threads.expect_pause();
        if !self.device.is_cpu() {
            let mut kept = self.kept.borrow_mut();
            kept.resize(config.depth, None);
            kept[index] = Some(block.clone());
        }
        Ok(block)
    }

    fn read_block(&self, path: &str, config: &VisionConfig) -> Result<Block, ModelError> {
        let hidden = config.hidden;
        let intermediate = config.intermediate;
        Ok(Block {
            norm1: self.norm(&format!("{path}.norm1"), hidden)?,
            qkv: self.linear(&format!("{path}.attn.qkv"), 3 * hidden, hidden)?,
            proj: self.linear(&format!("{path}.attn.proj"), hidden, hidden)?,
            norm2: self.norm(&format!("{path}.norm2"), hidden)?,
            fc1: self.linear(&format!("{path}.mlp.linear_fc1"), intermediate, hidden)?,
            fc2: self.linear(&format!("{path}.mlp.linear_fc2"), hidden, intermediate)?,
        })
    }

    pub fn linear(&self, path: &str, rows: usize, cols: usize) -> Result<Linear, ModelError> {
        let weight = dequantize::matrix(&self.from, &name(path), rows, cols, &self.threads)?;
        self.check_not_zero(&format!("{path}.weight"), &weight)?;
        let bias = self.vector(&format!("{path}.bias"), rows)?;
        Ok(Linear::new(self.tensor(weight, &[rows, cols])?, Some(self.tensor(bias, &[rows])?)))
    }

    pub fn norm(&self, path: &str, len: usize) -> Result<LayerNorm, ModelError> {
        let weight = self.vector(&format!("{path}.weight"), len)?;
        self.check_not_zero(&format!("{path}.weight"), &weight)?;
        let bias = self.vector(&format!("{path}.bias"), len)?;
        Ok(LayerNorm::new(self.tensor(weight, &[len])?, self.tensor(bias, &[len])?, EPS))
    }

    /// The convolution that embeds patches, as a matrix. This is possible because the convolution's stride is its
    /// width.
    pub fn patch_embed(&self, config: &VisionConfig) -> Result<Linear, ModelError> {
        let rows = config.hidden;
        let cols = config.patch_values();
        let channels_last = self.patch_shape(config)?;
        let stored = self.vector("patch_embed.proj.weight", rows * cols)?;
        self.check_not_zero("patch_embed.proj.weight", &stored)?;
        let weight = if channels_last {
            // MLX's layout [rows, frames, patch, patch, channels].
            let column = |row: usize, col: usize| {
                let channel = col / (cols / CHANNELS);
                let pixel = col % (cols / CHANNELS);
                stored[row * cols + pixel * CHANNELS + channel]
            };
            (0..rows).flat_map(|row| (0..cols).map(move |col| (row, col))).map(|(row, col)| column(row, col)).collect()
        } else {
            stored
        };
        let bias = self.vector("patch_embed.proj.bias", rows)?;
        Ok(Linear::new(self.tensor(weight, &[rows, cols])?, Some(self.tensor(bias, &[rows])?)))
    }

    /// True if channels are the last dimension of the convolution (MLX), false if they are the second (Hugging Face).
    fn patch_shape(&self, config: &VisionConfig) -> Result<bool, ModelError> {
        let VisionConfig { hidden, patch, frames, .. } = *config;
        let path = name("patch_embed.proj.weight");
        let entry = self.from.get(&path)?;
        let [mlx, hugging_face] = [[hidden, frames, patch, patch, CHANNELS], [hidden, CHANNELS, frames, patch, patch]];
        if entry.shape == hugging_face {
            Ok(false)
        } else if entry.shape == mlx {
            Ok(true)
        } else {
            Err(self.from.mismatch(&path, entry, format!("floats {mlx:?} or {hugging_face:?}")))
        }
    }

    /// The position table `[table_side^2, hidden]`.
    pub fn position_table(&self, config: &VisionConfig) -> Result<Vec<f32>, ModelError> {
        dequantize::matrix(&self.from, &name("pos_embed"), config.table_side.pow(2), config.hidden, &self.threads)
    }

    /// Checks that the weights `values` of the tensor `path` are not zero, as in a file whose download did not end.
    fn check_not_zero(&self, path: &str, values: &[f32]) -> Result<(), ModelError> {
        if values.iter().any(|value| *value != 0.0) {
            return Ok(());
        }
        let path = name(path);
        Err(zero_weights(self.from.index.path(self.from.get(&path)?), &path).into())
    }

    fn vector(&self, path: &str, len: usize) -> Result<Vec<f32>, ModelError> {
        self.from.vector(&name(path), len)
    }

    /// A tensor on the tower's device.
    pub fn tensor(&self, values: Vec<f32>, shape: &[usize]) -> Result<Tensor, ModelError> {
        Ok(Tensor::from_vec(values, shape, &Device::Cpu)?.to_dtype(self.dtype)?.to_device(&self.device)?)
    }
}

fn name(path: &str) -> String {
    format!("{VISION_TOWER}{path}")
}
