//! The CPU as a compute device.

use moestro_base::platform::Threads;
use std::{fmt, sync::Arc};

/// The arithmetic with which the CPU multiplies quantized weights and activations.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum CpuArithmetic {
    /// The default. Quantizes activations to integers with one scale per group. The relative error of a product is
    /// about 2e-7 with 4-bit weights and 4e-6 with 8-bit weights.
    #[default]
    Integer,
    /// Multiplies in f32. This is slower, and is used as the reference.
    F32,
}

/// The CPU's compute threads and its arithmetic. Cheap to clone.
#[derive(Clone)]
pub struct CpuDevice {
    pub threads: Arc<Threads>,
    pub arithmetic: CpuArithmetic,
}

impl fmt::Debug for CpuDevice {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "CpuDevice({:?})", self.arithmetic)
    }
}

impl CpuDevice {
    /// A CPU device with `threads` compute threads, including the calling thread.
    pub fn new(threads: usize, arithmetic: CpuArithmetic) -> Self {
        Self { threads: Arc::new(Threads::new(threads)), arithmetic }
    }
}
