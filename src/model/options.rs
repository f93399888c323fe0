//! How to load a model.

use crate::{
    device::{CpuArithmetic, CpuDevice},
    experts,
    ops::KvBits,
    plan::{DraftFootprint, PlanOptions},
};
use std::path::PathBuf;

/// How to load a model.
#[derive(Debug, Clone, Default)]
pub struct LoadOptions {
    /// Compute threads. Default: the physical cores.
    pub threads: Option<usize>,
    /// Share another model's threads.
    pub compute: Option<CpuDevice>,
    pub math: CpuArithmetic,
    pub plan: PlanOptions,
    /// Fewer experts per token than the model was trained with. More is an error.
    pub experts_per_token: Option<usize>,
    /// Most experts per token, if `experts_per_token` is not set.
    pub experts_at_most: Option<usize>,
    pub store: StoreOptions,
    /// The model goes to a GPU whose working set is at most this many bytes.
    pub gpu: Option<u64>,
    /// Reserve memory for verifies.
    pub verify: bool,
    /// The MTP head to draft with.
    pub drafter: MtpSource,
    /// The memory of a separate draft model.
    pub draft: DraftFootprint,
    /// Bits of keys and values.
    pub kv_bits: KvBits,
}

/// Where the head for multi-token prediction comes from.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum MtpSource {
    #[default]
    None,
    /// The model's own checkpoint, if it has a usable head.
    Checkpoint,
    /// A directory that holds only the head.
    Directory(PathBuf),
}

/// The part of [`experts::Options`] that the plan does not decide.
#[derive(Debug, Clone)]
pub struct StoreOptions {
    /// Fewer slots than the plan has room for, for tests and measurements.
    pub slots: Option<usize>,
    pub io: experts::ReadMode,
    pub threads: usize,
    pub prefetch: experts::Prefetch,
    /// Keep a list of hot experts in the user's cache directory, for a warm start.
    pub warm: bool,
}

impl Default for StoreOptions {
    fn default() -> Self {
        let experts::Options { io, threads, prefetch, .. } = experts::Options::new(0);
        Self { slots: None, io, threads, prefetch, warm: false }
    }
}
