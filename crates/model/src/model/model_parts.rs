//! The parts of a loaded model that do not depend on the device.

use super::{config::Config, drafts::mtp::MtpHead, ngram_table::NgramTable, vision::Vision, weights::Network};
use crate::{
    checkpoint::TrunkBuffer,
    plan::{ModelFootprint, Plan},
};
use moestro_compute::{device::CpuDevice, experts::ExpertStore, ops::KvBits};

/// The parts of a model that are the same on every device. After loading, only the caches of images change.
pub struct ModelParts {
    pub config: Config,
    pub net: Network,
    pub weights: [TrunkBuffer; 2],
    pub store: Option<ExpertStore>,
    /// The n-gram tables, in order of layers.
    pub tables: Vec<NgramTable>,
    pub plan: Plan,
    pub footprint: ModelFootprint,
    pub mtp: Option<MtpHead>,
    /// The CPU threads, for the model or for a draft model.
    pub compute: CpuDevice,
    pub kv_bits: KvBits,
    /// Keeps the GPU's clock high while experts are read.
    pub gpu_awake: bool,
    /// The vision tower, if the model reads images.
    pub vision: Option<Vision>,
}
