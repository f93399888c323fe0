//! Memory that CPU, SSD and GPU see, and whoever runs launches on it. It knows no operation.

mod bandwidth;
#[cfg(target_os = "linux")]
mod cuda;
mod dispatch;
mod driver;
mod gpu;
pub mod kernels;
mod memory;
#[cfg(target_os = "macos")]
mod metal;
mod queue;
mod timeline;

use crate::platform::Threads;
pub use bandwidth::memory_bandwidth;
pub use dispatch::{Binding, Dispatch, Effect, Region};
pub use driver::{Driver, Status};
pub use gpu::{DeviceError, Gpu, KIND, NONE, any_gpu, candle_gpu, gpu};
pub use memory::{Filling, Slab, Span};
pub use queue::Queue;
use std::sync::Arc;
pub use timeline::{Immediate, Mark, Timeline};

/// The arithmetic of quantised products on the CPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Math {
    /// Activations as integers with a scale per group: relative error of a product with 4-bit codes about 2e-7, with
    /// 8-bit codes about 4e-6. The default.
    #[default]
    Integer,
    /// Plain f32: the reference.
    F32,
}

/// The CPU's threads and arithmetic; cheap to clone.
#[derive(Clone)]
pub struct Compute {
    pub threads: Arc<Threads>,
    pub math: Math,
}

impl std::fmt::Debug for Compute {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        write!(f, "Compute({:?})", self.math)
    }
}

impl Compute {
    /// The CPU with `threads` compute threads (the caller is one of them).
    pub fn cpu(threads: usize, math: Math) -> Self {
        Self { threads: Arc::new(Threads::new(threads)), math }
    }
}
