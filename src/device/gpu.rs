//! The interface of a GPU: Metal, CUDA and, in tests, the kernels compiled for the host.

use super::{DeviceError, Launch, Region, Slab, Timeline};
use std::{ops::Range, sync::Arc, time::Duration};

/// A device that executes launches in the order given. The CPU may touch the device's memory only between a
/// [`Gpu::wait`] and the next launch that uses it.
pub trait Gpu: Timeline + Send {
    /// The device's name.
    fn name(&self) -> String;

    /// Maximum number of bytes that the driver recommends to allocate, if it says.
    fn working_set(&self) -> Option<u64>;

    /// Compiles every kernel. Returns the name of each kernel, or of each refused file, with the compiler's error if any.
    fn compile(&mut self) -> Vec<(String, Option<DeviceError>)>;

    /// Maximum number of threads in a threadgroup of `kernel`.
    fn max_threads(&mut self, kernel: &str) -> Result<u32, DeviceError>;

    /// Allocates zeroed memory.
    fn allocate(&mut self, bytes: usize) -> Result<Region, DeviceError>;

    /// Frees a buffer from [`Gpu::allocate`] or [`Gpu::adopt`].
    fn release(&mut self, buffer: u32);

    /// Makes a range of a slab readable by launches. The range starts at a page. A device that shares the CPU's memory
    /// also sees bytes that are read into the slab later. A device with its own memory sees them after [`Gpu::upload`].
    fn adopt(&mut self, slab: &Arc<Slab>, range: Range<usize>) -> Result<Region, DeviceError>;

    /// The address of a buffer on the device, for a table of buffers that kernels read
    /// ([`Binding::table`](super::Binding::table)).
    fn address(&mut self, buffer: u32) -> Result<u64, DeviceError>;

    /// True if the device copies adopted bytes into its own memory: launches then see only uploaded bytes.
    fn has_own_memory(&self) -> bool {
        false
    }

    /// True if a prompt's matrix products run on matrix units in half precision.
    fn has_matrix_units(&self) -> bool {
        false
    }

    /// Uploads adopted bytes, in order with launches. They must not change until the device has completed the next
    /// sync point.
    fn upload(&mut self, region: Region) -> Result<(), DeviceError> {
        let _ = region;
        Ok(())
    }

    /// Length of the longest range that can be adopted, in bytes.
    fn max_buffer_len(&self) -> usize;

    fn write(&mut self, region: Region, bytes: &[u8]) -> Result<(), DeviceError>;

    fn read(&mut self, region: Region, bytes: &mut [u8]) -> Result<(), DeviceError>;

    /// Encodes one launch.
    fn launch(&mut self, launch: &Launch) -> Result<(), DeviceError>;

    /// Submits all encoded launches.
    fn commit(&mut self) -> Result<(), DeviceError>;

    /// Submits all encoded launches and waits until the device has completed them.
    fn wait(&mut self) -> Result<(), DeviceError>;

    /// True if the device has been given up. Every call fails from then on, and the CPU must take over.
    fn is_lost(&self) -> bool {
        false
    }

    /// How long a wait spins before it sleeps. Default: 2 ms.
    fn set_spin(&mut self, time: Duration) {
        let _ = time;
    }

    /// Makes the device fail on purpose and returns how the failure was reported. `None` if the device cannot recover.
    ///
    /// # Errors
    /// The failure went unnoticed, or the device did not recover from it.
    fn inject_fault(&mut self) -> Option<Result<String, DeviceError>> {
        None
    }

    /// Writes words to the start of a region.
    fn write_words(&mut self, region: Region, words: &[u32]) -> Result<(), DeviceError> {
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        self.write(region.first(bytes.len()), &bytes)
    }

    /// Reads the whole region as words.
    fn read_words(&mut self, region: Region) -> Result<Vec<u32>, DeviceError> {
        let mut bytes = vec![0; region.len];
        self.read(region, &mut bytes)?;
        Ok(bytes.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect())
    }

    /// Reads the whole region as floats.
    fn read_floats(&mut self, region: Region) -> Result<Vec<f32>, DeviceError> {
        Ok(self.read_words(region)?.into_iter().map(f32::from_bits).collect())
    }
}
