//! The seam under [`Queue`](super::Queue): the calls of a GPU's driver that it needs, as Metal has them. Metal
//! implements it, and CUDA, and in the tests a double of Metal that runs the kernels on the host, in every order that Metal allows, and fails when told to.

use super::{DeviceError, Dispatch, Region, Slab};
use std::{ops::Range, sync::Arc, time::Duration};

/// The state of a command buffer.
#[derive(Debug, Clone, PartialEq)]
pub enum Status {
    /// Not over, as far as the driver says.
    Pending,
    /// Done, in so many seconds of the GPU's time.
    Done(f64),
    /// Over without a result, in the driver's words. It has signalled nothing, and what it wrote is worth nothing.
    Failed(String),
}

/// A GPU that sees the CPU's memory, or has a copy of it. Launches of one command buffer may overlap unless a barrier lies between them, and so may
/// command buffers unless the later one begins behind the fence, which each one updates at its end.
pub trait Driver: Send + 'static {
    /// A command buffer that is being encoded; there is one at a time.
    type Open: Send;
    /// One that was handed over.
    type Committed: Send;

    fn name(&self) -> String;

    /// Bytes that the device should be made to hold at most, if it says.
    fn working_set(&self) -> Option<u64>;

    /// The longest buffer (bytes).
    fn longest(&self) -> usize;

    /// Makes every kernel ready; see [`Gpu::compile`](super::Gpu::compile).
    fn compile(&mut self) -> Vec<(String, Option<DeviceError>)>;

    /// Threads that a threadgroup of `kernel` may have.
    fn most_threads(&mut self, kernel: &str) -> Result<u32, DeviceError>;

    /// Makes `buffer` of zeros.
    fn allocate(&mut self, buffer: u32, bytes: usize) -> Result<(), DeviceError>;

    /// Makes `buffer` of a range of a slab, without a copy.
    fn adopt(&mut self, buffer: u32, slab: &Arc<Slab>, range: Range<usize>) -> Result<(), DeviceError>;

    /// Gives `buffer` back. No command buffer that names it is pending.
    fn free(&mut self, buffer: u32);

    /// Copies into a buffer; the region lies inside it.
    fn write(&mut self, region: Region, bytes: &[u8]) -> Result<(), DeviceError>;

    /// Copies out of a buffer; the region lies inside it.
    fn read(&mut self, region: Region, bytes: &mut [u8]) -> Result<(), DeviceError>;

    /// True if it multiplies matrices in half precision by units of its own, as every one does that the kernels are for.
    fn has_matrix_units(&self) -> bool {
        true
    }

    /// True if adopted memory is seen only after [`Driver::landed`].
    fn has_own_memory(&self) -> bool {
        false
    }

    /// Encodes a copy of adopted bytes to the device, behind the launches so far and in front of those that follow, barrier or not.
    /// Nobody writes these bytes before it is done.
    fn landed(&mut self, open: &mut Self::Open, region: Region) -> Result<(), DeviceError> {
        let _ = (open, region);
        Ok(())
    }

    /// Opens a command buffer, behind the fence if `fenced`.
    fn begin(&mut self, fenced: bool) -> Result<Self::Open, DeviceError>;

    /// Launches encoded from here on wait for those encoded before.
    fn barrier(&mut self, open: &mut Self::Open);

    fn launch(&mut self, open: &mut Self::Open, dispatch: &Dispatch) -> Result<(), DeviceError>;

    /// True if [`Driver::renew`] can succeed.
    fn recovers(&self) -> bool {
        true
    }

    /// Encodes what a GPU must fail at: a write to an address that nobody has.
    fn provoke(&mut self, open: &mut Self::Open) -> Result<(), DeviceError>;

    /// Updates the fence, has the event set to `value` once all is done, and hands over.
    fn commit(&mut self, open: Self::Open, value: u64) -> Self::Committed;

    /// The event's value.
    fn signalled(&self) -> u64;

    fn status(&self, committed: &Self::Committed) -> Status;

    /// Sleeps until the event has `value`, or for `most`.
    fn park(&self, value: u64, most: Duration);

    /// Starts anew after a failure, when nothing is pending: another queue, fence and event, whose value is `value`. Buffers
    /// stay.
    fn renew(&mut self, value: u64) -> Result<(), DeviceError>;

    /// Asks for all buffers to be made resident now, before they are used.
    fn reside(&mut self);

    /// Lets go of all buffers without giving their memory back: a command buffer that never ended may still use it.
    fn leak(&mut self);
}
