//! How to load a model.

use crate::plan::{DraftFootprint, PlanOptions};
use moestro_compute::{
    device::{CpuArithmetic, CpuDevice, GPU_KIND},
    experts,
    ops::KvBits,
};
use std::path::PathBuf;

/// Default maximum number of tokens of an image if the CPU computes the vision tower. Limited because the time for the
/// vision tower grows faster than the number of tokens.
const CPU_IMAGE_TOKENS: usize = 1024;
/// Default maximum number of tokens of an image if the GPU computes the vision tower.
const GPU_IMAGE_TOKENS: usize = 2048;

/// How to load a model.
#[derive(Debug, Clone, Default)]
pub struct LoadOptions {
    /// Number of compute threads. The default is the number of physical cores.
    pub threads: Option<usize>,
    /// The threads of another model, which this model then shares.
    pub compute: Option<CpuDevice>,
    pub math: CpuArithmetic,
    pub plan: PlanOptions,
    /// Number of experts per token, at most the number that the model was trained with.
    pub experts_per_token: Option<usize>,
    /// Maximum number of experts per token, if `experts_per_token` is not set.
    pub max_experts_per_token: Option<usize>,
    pub store: StoreOptions,
    /// Keeps the GPU's clock high while experts are read. On by default with Metal only.
    pub gpu_awake: Option<bool>,
    /// Maximum working set of the GPU in bytes, for the memory plan. `None` plans for the CPU.
    pub gpu: Option<u64>,
    /// Reserves memory for verifying drafts.
    pub verify: bool,
    /// The MTP head to draft with.
    pub drafter: MtpSource,
    /// Memory that a separate draft model needs.
    pub draft: DraftFootprint,
    /// Number of bits of cached keys and values.
    pub kv_bits: KvBits,
    pub vision: VisionOptions,
}

/// Use of the vision tower.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct VisionOptions {
    /// Disables images: the model reads text only.
    pub disabled: bool,
    /// Maximum number of tokens of an image. The default depends on the device's speed.
    pub max_tokens: Option<usize>,
}

impl LoadOptions {
    /// Maximum number of tokens of an image.
    pub fn image_tokens(&self) -> usize {
        self.vision.max_tokens.unwrap_or(if self.vision_on_gpu() { GPU_IMAGE_TOKENS } else { CPU_IMAGE_TOKENS })
    }

    /// True if the GPU computes the vision tower. With CUDA, the CPU computes it.
    pub fn vision_on_gpu(&self) -> bool {
        self.gpu.is_some() && GPU_KIND == "metal"
    }
}

/// The source of the MTP head (multi-token prediction).
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum MtpSource {
    #[default]
    None,
    /// The model's own checkpoint, if it has a usable head.
    Checkpoint,
    /// A directory that holds only the head.
    Directory(PathBuf),
}

/// The part of [`experts::Options`] that the memory plan does not decide.
#[derive(Debug, Clone)]
pub struct StoreOptions {
    /// Number of slots, if fewer than the memory plan allows. For tests and measurements.
    pub slots: Option<usize>,
    pub io: experts::ReadMode,
    pub threads: usize,
    pub prefetch: experts::Prefetch,
    /// Keeps a list of hot experts in the user's cache directory, for a warm start.
    pub warm: bool,
    /// Maximum size of a segment of slots in bytes; see [`experts::SlotLayout`].
    pub segment_bytes: usize,
}

impl Default for StoreOptions {
    fn default() -> Self {
        let experts::Options { io, threads, prefetch, segment_bytes, .. } = experts::Options::new(0);
        Self { slots: None, io, threads, prefetch, warm: false, segment_bytes }
    }
}
