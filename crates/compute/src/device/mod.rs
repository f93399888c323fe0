//! Devices: buffers that the CPU, the GPU and reads from the SSD use, and kernel launches on Metal and CUDA.
//!
//! This module does not depend on the operations of a model. A [`Launch`] is a plain value: `ops` builds a launch, and
//! a [`CommandQueue`] executes it.
//!
//! ```text
//! CommandQueue   what `ops` uses: order, barriers, command buffers and failures, for any Driver
//! Driver         the calls of Metal or CUDA that CommandQueue needs; in tests, kernels on the CPU
//! ```
//!
//! | file | what it holds |
//! |---|---|
//! | `slab`, `launch`, `timeline`, `error` | shared memory; launches as plain values; sync points; errors |
//! | `gpu`, `command_queue`, `driver` | the interfaces above; barriers, pacing, failures |
//! | `cuda`, `metal` | the two drivers, each with a folder |
//! | `kernels` | the source of the kernels, with a register limit per file |
//! | `open`, `cpu`, `bandwidth` | opening the GPU; the CPU's threads; memory bandwidth |
//! | `residency`, `residency_sets`, `set_assignment` | keeping buffers resident on an idle GPU; Metal's residency sets |

mod bandwidth;
mod command_queue;
mod cpu;
#[cfg(target_os = "linux")]
mod cuda;
mod driver;
mod error;
pub mod kernels;
mod launch;
#[cfg(target_os = "macos")]
mod metal;
mod open;
mod residency;
mod residency_sets;
mod set_assignment;
mod slab;
mod timeline;

pub use bandwidth::memory_bandwidth;
pub use command_queue::CommandQueue;
pub use cpu::{CpuArithmetic, CpuDevice};
pub use driver::{CommandStatus, Driver};
pub use error::{DeviceError, GPU_INTERACTIVITY, GPU_INTERACTIVITY_REMEDY};
pub use launch::{Binding, BufferAccess, Launch, Region, SkipUse};
pub use open::{
    GPU_KIND, NO_GPU, SystemDriver, SystemGpu, candle_can_open_gpu, catch_gpu_exception, open_any_gpu, open_gpu,
};
pub use residency_sets::{ResidencySet, ResidencySets};
pub use slab::Slab;
pub use timeline::{CpuTimeline, SyncPoint, Timeline};
