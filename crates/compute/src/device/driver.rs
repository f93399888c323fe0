//! The [`Driver`] interface that [`CommandQueue`](super::CommandQueue) uses, modelled on Metal.
//!
//! Metal and CUDA implement this interface. Two test doubles, which run the kernels on the host, implement it, too. One
//! of them runs launches in every order that Metal allows, and injects failures.

use super::{DeviceError, Launch, Region, Slab};
use std::{ops::Range, sync::Arc, time::Duration};

/// The state of a command buffer.
#[derive(Debug, Clone, PartialEq)]
pub enum CommandStatus {
    /// The command buffer is not known to have ended.
    Pending,
    /// The command buffer succeeded after this many seconds of GPU time.
    Done(f64),
    /// The command buffer failed, with the driver's message. The command buffer did not signal its event value, and its
    /// output is undefined.
    Failed(String),
}

/// A GPU driver. The caller chooses the numbers of buffers.
///
/// Launches of one command buffer may overlap unless a barrier separates them. Two command buffers may overlap unless
/// the later one waits for the fence. Every command buffer updates the fence at its end.
pub trait Driver: Send + 'static {
    /// The command buffer that is being encoded. There is at most one such command buffer.
    type Encoder: Send;
    /// A submitted command buffer.
    type CommandBuffer: Send;

    fn name(&self) -> String;

    /// Maximum number of bytes that the driver recommends to allocate. `None` if unknown.
    fn working_set(&self) -> Option<u64>;

    /// Maximum length of a buffer in bytes.
    fn max_buffer_len(&self) -> usize;

    /// Compiles every kernel. Returns the name of each kernel, and of each file that does not compile, with the error
    /// if there is one.
    fn compile(&mut self) -> Vec<(String, Option<DeviceError>)>;

    /// Maximum number of threads in a threadgroup of `kernel`.
    fn max_threads(&mut self, kernel: &str) -> Result<u32, DeviceError>;

    /// Creates `buffer` and fills it with zeros.
    fn allocate(&mut self, buffer: u32, bytes: usize) -> Result<(), DeviceError>;

    /// Creates `buffer` for a range of a slab. Makes no copy if the GPU shares the CPU's memory.
    fn adopt(&mut self, buffer: u32, slab: &Arc<Slab>, range: Range<usize>) -> Result<(), DeviceError>;

    /// The address of `buffer` on the GPU, for a table of buffers ([`Binding::table`](super::Binding::table)).
    fn address(&mut self, buffer: u32) -> Result<u64, DeviceError>;

    /// Frees `buffer`. No pending command buffer may use it.
    fn free(&mut self, buffer: u32);

    /// Copies bytes into a buffer. The region must be inside the buffer.
    fn write(&mut self, region: Region, bytes: &[u8]) -> Result<(), DeviceError>;

    /// Copies bytes out of a buffer. The region must be inside the buffer.
    fn read(&mut self, region: Region, bytes: &mut [u8]) -> Result<(), DeviceError>;

    /// True if the GPU multiplies half-precision matrices on matrix units. All GPUs that the kernels target have matrix
    /// units.
    fn has_matrix_units(&self) -> bool {
        true
    }

    /// True if the GPU has its own memory. Such a GPU sees adopted bytes only after [`Driver::upload`].
    fn has_own_memory(&self) -> bool {
        false
    }

    /// True if a load should measure which variant of a kernel is faster.
    fn has_variants(&self) -> bool {
        false
    }

    /// Compiles the kernels with the precise `exp` in attention, for comparisons. Must be called before the first
    /// kernel is needed. False if the device has no faster `exp`.
    fn set_precise_exp(&mut self) -> bool {
        false
    }

    /// Minimum number of weights of a product whose decoded rows are multiplied on matrix units. `None` if matrix units
    /// are not faster than vector units for such products.
    fn min_tiled_weights(&self) -> Option<usize> {
        None
    }

    /// Encodes a copy of adopted bytes to the GPU. The copy runs after all earlier launches and before all later
    /// launches, without a barrier. The caller must not change the bytes until the copy is complete.
    fn upload(&mut self, _encoder: &mut Self::Encoder, _region: Region) -> Result<(), DeviceError> {
        Ok(())
    }

    /// Opens a command buffer. If `fenced` is true, the command buffer waits for the fence before its first launch.
    fn begin(&mut self, fenced: bool) -> Result<Self::Encoder, DeviceError>;

    /// Makes later launches wait for all earlier launches.
    fn barrier(&mut self, encoder: &mut Self::Encoder);

    fn launch(&mut self, encoder: &mut Self::Encoder, launch: &Launch) -> Result<(), DeviceError>;

    /// True if [`Driver::reset`] can succeed.
    fn can_recover(&self) -> bool {
        true
    }

    /// Encodes a launch that writes to an unmapped address, so that the command buffer fails.
    fn encode_fault(&mut self, encoder: &mut Self::Encoder) -> Result<(), DeviceError>;

    /// Submits the command buffer. At its end, the command buffer updates the fence and sets the event to `value`.
    fn commit(&mut self, encoder: Self::Encoder, value: u64) -> Self::CommandBuffer;

    /// The current value of the event.
    fn signalled_value(&self) -> u64;

    fn status(&self, commands: &Self::CommandBuffer) -> CommandStatus;

    /// Sleeps until the value of the event is at least `value`, at most for `timeout`.
    fn wait_event(&self, value: u64, timeout: Duration);

    /// Recovers from a failure: creates a new queue, fence and event, and sets the event to `value`. Keeps the buffers.
    /// No command buffer may be pending.
    fn reset(&mut self, value: u64) -> Result<(), DeviceError>;

    /// A function that another thread calls to keep all buffers resident in memory. `None` if the buffers are always
    /// resident.
    fn residency_request(&mut self) -> Option<Box<dyn Fn() + Send>> {
        None
    }

    /// Estimated seconds per GPU thread before the first measurement. If the estimate is too high, the first command
    /// buffers are short. If the estimate is too low, the system may kill the first command buffer.
    fn initial_seconds_per_thread(&self) -> f64 {
        1e-7
    }

    /// Leaks all buffers, because a command buffer that never ended may still use them.
    fn leak_buffers(&mut self);
}
