//! The driver interface under [`CommandQueue`](super::CommandQueue), modelled on Metal.
//!
//! Metal and CUDA implement it. So does a test double of Metal, which runs the kernels on the host in every order that
//! Metal allows and injects failures.

use super::{DeviceError, Launch, Region, Slab};
use std::{ops::Range, sync::Arc, time::Duration};

/// The state of a command buffer.
#[derive(Debug, Clone, PartialEq)]
pub enum CommandStatus {
    /// Not finished, as far as the driver knows.
    Pending,
    /// Finished after this many seconds of GPU time.
    Done(f64),
    /// Failed, with the driver's message. It signalled no event, and its output is undefined.
    Failed(String),
}

/// A GPU driver. Buffers are numbered by the caller.
///
/// Launches of one command buffer may overlap unless a barrier separates them. Two command buffers may overlap unless
/// the later one waits for the fence, which every command buffer updates when it ends.
pub trait Driver: Send + 'static {
    /// A command buffer that is being encoded. There is one at a time.
    type Encoder: Send;
    /// A submitted command buffer.
    type CommandBuffer: Send;

    fn name(&self) -> String;

    /// Maximum number of bytes that the driver recommends to allocate, if it says.
    fn working_set(&self) -> Option<u64>;

    /// Length of the longest buffer, in bytes.
    fn max_buffer_len(&self) -> usize;

    /// Compiles every kernel; see [`Gpu::compile`](super::Gpu::compile).
    fn compile(&mut self) -> Vec<(String, Option<DeviceError>)>;

    /// Maximum number of threads in a threadgroup of `kernel`.
    fn max_threads(&mut self, kernel: &str) -> Result<u32, DeviceError>;

    /// Creates `buffer`, filled with zeros.
    fn allocate(&mut self, buffer: u32, bytes: usize) -> Result<(), DeviceError>;

    /// Creates `buffer` from a range of a slab. A driver that shares the CPU's memory makes no copy.
    fn adopt(&mut self, buffer: u32, slab: &Arc<Slab>, range: Range<usize>) -> Result<(), DeviceError>;

    /// The address of `buffer` on the GPU. Kernels use it through a table ([`Binding::table`](super::Binding::table)).
    fn address(&mut self, buffer: u32) -> Result<u64, DeviceError>;

    /// Frees `buffer`. No pending command buffer uses it.
    fn free(&mut self, buffer: u32);

    /// Copies bytes into a buffer. The region lies inside it.
    fn write(&mut self, region: Region, bytes: &[u8]) -> Result<(), DeviceError>;

    /// Copies bytes out of a buffer. The region lies inside it.
    fn read(&mut self, region: Region, bytes: &mut [u8]) -> Result<(), DeviceError>;

    /// True if the GPU multiplies half-precision matrices on matrix units. All GPUs that the kernels target do.
    fn has_matrix_units(&self) -> bool {
        true
    }

    /// True if adopted bytes are visible only after [`Driver::upload`].
    fn has_own_memory(&self) -> bool {
        false
    }

    /// Encodes a copy of adopted bytes to the device. It runs after the launches encoded so far and before later ones,
    /// with or without a barrier. The bytes do not change until it is done.
    fn upload(&mut self, encoder: &mut Self::Encoder, region: Region) -> Result<(), DeviceError> {
        let _ = (encoder, region);
        Ok(())
    }

    /// Opens a command buffer. If `fenced`, it waits for the fence before its first launch.
    fn begin(&mut self, fenced: bool) -> Result<Self::Encoder, DeviceError>;

    /// Makes later launches wait for all earlier ones.
    fn barrier(&mut self, encoder: &mut Self::Encoder);

    fn launch(&mut self, encoder: &mut Self::Encoder, launch: &Launch) -> Result<(), DeviceError>;

    /// True if [`Driver::reset`] can succeed.
    fn can_recover(&self) -> bool {
        true
    }

    /// Encodes a launch that must fail: a write to an unmapped address.
    fn encode_fault(&mut self, encoder: &mut Self::Encoder) -> Result<(), DeviceError>;

    /// Updates the fence, signals the event with `value` when all launches are done, and submits the command buffer.
    fn commit(&mut self, encoder: Self::Encoder, value: u64) -> Self::CommandBuffer;

    /// The event's value.
    fn signalled_value(&self) -> u64;

    fn status(&self, commands: &Self::CommandBuffer) -> CommandStatus;

    /// Sleeps until the event has `value`, at most for `timeout`.
    fn wait_event(&self, value: u64, timeout: Duration);

    /// Recovers from a failure when nothing is pending: creates a new queue, fence and event, and sets the event to
    /// `value`. Buffers are kept.
    fn reset(&mut self, value: u64) -> Result<(), DeviceError>;

    /// A function that renews the residency of all buffers, for another thread. `None` if buffers are always resident.
    fn residency_request(&mut self) -> Option<Box<dyn Fn() + Send>> {
        None
    }

    /// Seconds per GPU thread, before anything was measured. Too high a value costs a few short command buffers; with
    /// too low a value, the system may end the first one.
    fn initial_seconds_per_thread(&self) -> f64 {
        1e-7
    }

    /// Forgets all buffers without freeing them, since a command buffer that never ended may still use them.
    fn leak_buffers(&mut self);
}
