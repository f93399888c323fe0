//! The [`Gpu`] interface, for Metal, CUDA and, in tests, kernels compiled for the host.

use super::{DeviceError, Launch, Region, Slab, Timeline};
use std::{ops::Range, sync::Arc, time::Duration};

/// A device that executes launches in the order in which they were encoded. The CPU may access a buffer only after
/// [`Gpu::wait`] and before the next launch that uses the buffer.
pub trait Gpu: Timeline + Send {
    /// The device's name.
    fn name(&self) -> String;

    /// Maximum number of bytes that the driver recommends to allocate. `None` if unknown.
    fn working_set(&self) -> Option<u64>;

    /// Compiles every kernel. Returns the name of each kernel, and of each file that does not compile, with the error
    /// if there is one.
    fn compile(&mut self) -> Vec<(String, Option<DeviceError>)>;

    /// Maximum number of threads in a threadgroup of `kernel`.
    fn max_threads(&mut self, kernel: &str) -> Result<u32, DeviceError>;

    /// Allocates zeroed memory.
    fn allocate(&mut self, bytes: usize) -> Result<Region, DeviceError>;

    /// Frees a buffer from [`Gpu::allocate`] or [`Gpu::adopt`].
    fn release(&mut self, buffer: u32);

    /// Makes a range of a slab readable by launches. The range must start at a page boundary. If the device shares the
    /// CPU's memory, launches see later writes to the slab. Otherwise launches see only bytes that [`Gpu::upload`] has
    /// copied.
    fn adopt(&mut self, slab: &Arc<Slab>, range: Range<usize>) -> Result<Region, DeviceError>;

    /// The address of a buffer on the device, for a table of buffers ([`Binding::table`](super::Binding::table)).
    fn address(&mut self, buffer: u32) -> Result<u64, DeviceError>;

    /// True if the device has its own memory. Launches then see only those bytes of adopted ranges that were uploaded.
    fn has_own_memory(&self) -> bool {
        false
    }

    /// True if the matrix products of a prefill run on matrix units in half precision.
    fn has_matrix_units(&self) -> bool {
        false
    }

    /// Copies adopted bytes to the device, in order with launches. The bytes must not change until the device has
    /// completed the next sync point.
    fn upload(&mut self, _region: Region) -> Result<(), DeviceError> {
        Ok(())
    }

    /// Maximum length of an adopted range in bytes.
    fn max_buffer_len(&self) -> usize;

    fn write(&mut self, region: Region, bytes: &[u8]) -> Result<(), DeviceError>;

    fn read(&mut self, region: Region, bytes: &mut [u8]) -> Result<(), DeviceError>;

    /// Encodes one launch.
    fn launch(&mut self, launch: &Launch) -> Result<(), DeviceError>;

    /// Submits all encoded launches.
    fn commit(&mut self) -> Result<(), DeviceError>;

    /// Submits all encoded launches and waits until the device has completed them.
    fn wait(&mut self) -> Result<(), DeviceError>;

    /// True if the device is lost after repeated failures. Every further call fails, so the caller must use the CPU.
    fn is_lost(&self) -> bool {
        false
    }

    /// Sets the time for which a wait spins before it sleeps. The default is 2 ms.
    fn set_spin(&mut self, _time: Duration) {}

    /// Makes the device fail on purpose, for `moestro doctor`. Returns the reported error message. `None` if the device
    /// cannot recover from a failure.
    ///
    /// # Errors
    /// The device did not report the failure, or did not recover from it.
    fn inject_fault(&mut self) -> Option<Result<String, DeviceError>> {
        None
    }

    /// Writes 32-bit words to the start of a region.
    fn write_words(&mut self, region: Region, words: &[u32]) -> Result<(), DeviceError> {
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        self.write(region.first(bytes.len()), &bytes)
    }

    /// Reads the whole region as 32-bit words.
    fn read_words(&mut self, region: Region) -> Result<Vec<u32>, DeviceError> {
        let mut bytes = vec![0; region.len];
        self.read(region, &mut bytes)?;
        Ok(bytes.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect())
    }

    /// Reads the whole region as f32 values.
    fn read_floats(&mut self, region: Region) -> Result<Vec<f32>, DeviceError> {
        Ok(self.read_words(region)?.into_iter().map(f32::from_bits).collect())
    }
}
