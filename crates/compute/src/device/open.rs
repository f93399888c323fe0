//! Opens the system's GPU.

use super::{CommandQueue, DeviceError};

/// The driver of this build.
#[cfg(target_os = "linux")]
pub use super::cuda::Cuda as SystemDriver;
#[cfg(target_os = "macos")]
pub use super::metal::Metal as SystemDriver;

/// The system's GPU.
pub type SystemGpu = CommandQueue<SystemDriver>;

/// Name of the GPU interface of this build, in `--device` and in metrics.
pub const GPU_KIND: &str = if cfg!(target_os = "macos") { "metal" } else { "cuda" };

/// The error message if no GPU was found and no call failed.
pub const NO_GPU: &str = if cfg!(target_os = "macos") {
    "there is no GPU"
} else {
    "there is no NVIDIA GPU, or its driver (libcuda.so.1) is not installed"
};

/// Opens the system's GPU. Returns `None` if the system has no GPU that this build supports.
///
/// Does not compile the kernels. [`Driver::compile`](super::Driver::compile) compiles them and reports errors.
///
/// # Errors
/// The system has a GPU that cannot be used.
pub fn open_gpu() -> Result<Option<SystemGpu>, DeviceError> {
    open(true)
}

/// Opens the system's GPU even if it lacks a feature that the kernels need. `moestro doctor --any-gpu` uses this to
/// test which kernels work.
///
/// # Errors
/// The same as for [`open_gpu`].
pub fn open_any_gpu() -> Result<Option<SystemGpu>, DeviceError> {
    open(false)
}

/// True if Candle can open the system's GPU. On a Mac without a GPU, and before macOS 15, Candle would panic.
pub fn candle_can_open_gpu() -> bool {
    #[cfg(target_os = "macos")]
    return super::metal::has_residency_sets();
    #[cfg(not(target_os = "macos"))]
    false
}

/// Runs `work`, which calls the GPU. An Objective-C exception would end the program. It becomes an error, but everything
/// that `work` owns is lost.
///
/// # Errors
/// A call has thrown an exception.
pub fn catch_gpu_exception<R>(work: impl FnOnce() -> R) -> Result<R, DeviceError> {
    #[cfg(target_os = "macos")]
    return super::metal::catch_exception(work);
    #[cfg(not(target_os = "macos"))]
    Ok(work())
}

#[cfg(target_os = "macos")]
fn open(require_features: bool) -> Result<Option<SystemGpu>, DeviceError> {
    catch_gpu_exception(|| Ok(Some(CommandQueue::new(SystemDriver::new(require_features)?))))?
}

#[cfg(target_os = "linux")]
fn open(require_features: bool) -> Result<Option<SystemGpu>, DeviceError> {
    Ok(SystemDriver::new(require_features)?.map(CommandQueue::new))
}
