//! Opening the system's GPU.

#[cfg(any(target_os = "macos", target_os = "linux"))]
use super::CommandQueue;
use super::{DeviceError, Gpu};

/// The GPU interface that this build supports, as `--device` and the metrics name it.
pub const GPU_KIND: &str = if cfg!(target_os = "macos") { "metal" } else { "cuda" };

/// The message for a missing GPU when nothing failed.
pub const NO_GPU: &str = if cfg!(target_os = "macos") {
    "there is no GPU"
} else if cfg!(target_os = "linux") {
    "there is no NVIDIA GPU, or its driver (libcuda.so.1) is not installed"
} else {
    "this build supports no GPU"
};

/// Opens the system's GPU. Returns `None` if there is none that this build supports.
///
/// The kernels are not compiled yet, and some may fail to compile: [`Gpu::compile`] reports that.
///
/// # Errors
/// There is a GPU, but it cannot be used.
pub fn open_gpu() -> Result<Option<Box<dyn Gpu>>, DeviceError> {
    open(true)
}

/// Opens the system's GPU even if it lacks a feature that the kernels need. `moestro doctor --any-gpu` uses it to find
/// out which kernels work there.
///
/// # Errors
/// Like [`open_gpu`].
pub fn open_any_gpu() -> Result<Option<Box<dyn Gpu>>, DeviceError> {
    open(false)
}

/// Candle's device on the system's GPU, for the reference implementation. `None` where Candle has none.
pub fn open_candle_gpu() -> Option<candle_core::Device> {
    #[cfg(target_os = "macos")]
    return super::metal::candle();
    #[cfg(not(target_os = "macos"))]
    None
}

#[cfg(target_os = "macos")]
fn open(require_features: bool) -> Result<Option<Box<dyn Gpu>>, DeviceError> {
    Ok(Some(Box::new(CommandQueue::new(super::metal::Metal::new(require_features)?))))
}

#[cfg(target_os = "linux")]
fn open(require_features: bool) -> Result<Option<Box<dyn Gpu>>, DeviceError> {
    let cuda = super::cuda::Cuda::new(require_features)?;
    Ok(cuda.map(|cuda| Box::new(CommandQueue::new(cuda)) as Box<dyn Gpu>))
}

#[cfg(not(any(target_os = "macos", target_os = "linux")))]
fn open(_: bool) -> Result<Option<Box<dyn Gpu>>, DeviceError> {
    Ok(None)
}
