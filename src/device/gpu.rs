//! What a GPU has to be able to do. Two devices can: Metal, and (in the tests) the kernels compiled for the host.

use super::{Dispatch, Region, Slab};
use std::{ops::Range, sync::Arc};

/// Why a GPU could not do what it was asked: the driver's own words where there are any.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct GpuError(pub String);

/// A device that executes launches in the order given. Memory is visible to the CPU, which may touch it only between a
/// [`Gpu::wait`] and the launch that uses it.
pub trait Gpu: Send + 'static {
    /// Zeroed memory.
    fn allocate(&mut self, bytes: usize) -> Result<Region, GpuError>;

    /// Gives memory from [`Gpu::allocate`] back.
    fn release(&mut self, buffer: u32);

    /// Makes a range of a slab visible to launches, without a copy: what is read into it later is seen, too. The range
    /// starts at a page.
    fn adopt(&mut self, slab: &Arc<Slab>, range: Range<usize>) -> Result<Region, GpuError>;

    /// The longest range that can be adopted (bytes).
    fn longest(&self) -> usize;

    fn write(&mut self, region: Region, bytes: &[u8]) -> Result<(), GpuError>;

    fn read(&mut self, region: Region, bytes: &mut [u8]) -> Result<(), GpuError>;

    /// Encodes one launch.
    fn launch(&mut self, dispatch: &Dispatch) -> Result<(), GpuError>;

    /// Hands over what has been encoded.
    fn commit(&mut self) -> Result<(), GpuError>;

    /// Hands over and waits until the device has done everything.
    fn wait(&mut self) -> Result<(), GpuError>;
}
