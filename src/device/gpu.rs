//! The calls a GPU answers: Metal, CUDA, and (in the tests) the kernels compiled for the host.

use super::{Dispatch, Mark, Region, Slab, Timeline};
use std::{ops::Range, sync::Arc};

/// A GPU's failure: the driver's own words where there are any.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct DeviceError(pub String);

/// A device that executes launches in the order given. The CPU may touch its memory only between a [`Gpu::wait`] and the launch
/// that uses it.
pub trait Gpu: Timeline + Send {
    /// The device's name.
    fn name(&self) -> String;

    /// Bytes that it should be made to hold at most, if it says.
    fn working_set(&self) -> Option<u64>;

    /// Makes every kernel ready: its name (or a file's), and what the compiler said if it refused it.
    fn compile(&mut self) -> Vec<(String, Option<DeviceError>)>;

    /// Zeroed memory.
    fn allocate(&mut self, bytes: usize) -> Result<Region, DeviceError>;

    /// Gives memory from [`Gpu::allocate`] back.
    fn release(&mut self, buffer: u32);

    /// Makes a range of a slab visible to launches: what is read into it later is seen, too, without a copy or, by a device with
    /// memory of its own, once it was told that it has landed. The range starts at a page.
    fn adopt(&mut self, slab: &Arc<Slab>, range: Range<usize>) -> Result<Region, DeviceError>;

    /// True if launches see adopted bytes only as they were when [`Gpu::landed`] named them.
    fn has_own_memory(&self) -> bool {
        false
    }

    /// True if the products of a prompt's rows are to be computed in half precision.
    fn has_matrix_units(&self) -> bool {
        false
    }

    /// Adopted bytes are complete, and stay so until the device has passed a mark behind this: launches that follow see them.
    fn landed(&mut self, region: Region) -> Result<(), DeviceError> {
        let _ = region;
        Ok(())
    }

    /// The longest range that can be adopted (bytes).
    fn longest(&self) -> usize;

    fn write(&mut self, region: Region, bytes: &[u8]) -> Result<(), DeviceError>;

    fn read(&mut self, region: Region, bytes: &mut [u8]) -> Result<(), DeviceError>;

    /// Encodes one launch.
    fn launch(&mut self, dispatch: &Dispatch) -> Result<(), DeviceError>;

    /// Hands over what has been encoded.
    fn commit(&mut self) -> Result<(), DeviceError>;

    /// Hands over and waits until the device has done everything.
    fn wait(&mut self) -> Result<(), DeviceError>;

    /// True if the device has been given up: nothing will succeed any more, and the CPU should go on.
    fn lost(&self) -> bool {
        false
    }

    /// Makes the device fail on purpose, and says how that was reported; `None` if nobody can.
    ///
    /// # Errors
    /// The failure was not noticed, or never ended.
    fn provoke(&mut self) -> Option<Result<String, DeviceError>> {
        None
    }

    /// [`Gpu::write`] to the region's beginning.
    fn write_words(&mut self, region: Region, words: &[u32]) -> Result<(), DeviceError> {
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        self.write(region.first(bytes.len()), &bytes)
    }

    /// [`Gpu::read`] of the whole region.
    fn read_words(&mut self, region: Region) -> Result<Vec<u32>, DeviceError> {
        let mut bytes = vec![0; region.len];
        self.read(region, &mut bytes)?;
        Ok(bytes.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect())
    }

    /// [`Gpu::read_words`] of floats.
    fn read_floats(&mut self, region: Region) -> Result<Vec<f32>, DeviceError> {
        Ok(self.read_words(region)?.into_iter().map(f32::from_bits).collect())
    }
}

/// A GPU behind a pointer.
macro_rules! behind {
    ($pointer:ty) => {
        impl<G: Gpu + ?Sized> Timeline for $pointer {
            fn mark(&mut self) -> Mark {
                (**self).mark()
            }

            fn passed(&mut self) -> Mark {
                (**self).passed()
            }

            fn wait_for(&mut self, mark: Mark) -> Result<(), DeviceError> {
                (**self).wait_for(mark)
            }
        }

        impl<G: Gpu + ?Sized> Gpu for $pointer {
            fn name(&self) -> String {
                (**self).name()
            }

            fn working_set(&self) -> Option<u64> {
                (**self).working_set()
            }

            fn compile(&mut self) -> Vec<(String, Option<DeviceError>)> {
                (**self).compile()
            }

            fn allocate(&mut self, bytes: usize) -> Result<Region, DeviceError> {
                (**self).allocate(bytes)
            }

            fn release(&mut self, buffer: u32) {
                (**self).release(buffer);
            }

            fn adopt(&mut self, slab: &Arc<Slab>, range: Range<usize>) -> Result<Region, DeviceError> {
                (**self).adopt(slab, range)
            }

            fn has_own_memory(&self) -> bool {
                (**self).has_own_memory()
            }

            fn has_matrix_units(&self) -> bool {
                (**self).has_matrix_units()
            }

            fn landed(&mut self, region: Region) -> Result<(), DeviceError> {
                (**self).landed(region)
            }

            fn longest(&self) -> usize {
                (**self).longest()
            }

            fn write(&mut self, region: Region, bytes: &[u8]) -> Result<(), DeviceError> {
                (**self).write(region, bytes)
            }

            fn read(&mut self, region: Region, bytes: &mut [u8]) -> Result<(), DeviceError> {
                (**self).read(region, bytes)
            }

            fn launch(&mut self, dispatch: &Dispatch) -> Result<(), DeviceError> {
                (**self).launch(dispatch)
            }

            fn commit(&mut self) -> Result<(), DeviceError> {
                (**self).commit()
            }

            fn wait(&mut self) -> Result<(), DeviceError> {
                (**self).wait()
            }

            fn lost(&self) -> bool {
                (**self).lost()
            }

            fn provoke(&mut self) -> Option<Result<String, DeviceError>> {
                (**self).provoke()
            }
        }
    };
}
behind!(Box<G>);
behind!(&mut G);

/// Candle's own device on the system's GPU, for the reference implementation, where Candle has one.
pub fn candle_gpu() -> Option<candle_core::Device> {
    #[cfg(target_os = "macos")]
    return super::metal::candle();
    #[cfg(not(target_os = "macos"))]
    None
}

/// The kind of GPU that this build knows, as `--device` and metrics call it.
pub const KIND: &str = if cfg!(target_os = "macos") { "metal" } else { "cuda" };

/// The reason for no GPU where nothing is wrong.
pub const NONE: &str = if cfg!(target_os = "macos") {
    "there is no GPU"
} else if cfg!(target_os = "linux") {
    "there is no NVIDIA card, or no driver of NVIDIA's (libcuda.so.1)"
} else {
    "this build knows no kind of GPU"
};

/// The system's GPU though it may lack what the kernels need: to find out what it makes of them.
///
/// # Errors
/// As [`gpu`].
pub fn any_gpu() -> Result<Option<Box<dyn Gpu>>, DeviceError> {
    open(false)
}

/// The system's GPU; `None` if there is none that this build knows. Not every kernel need have compiled: [`Gpu::compile`] tells.
///
/// # Errors
/// There should be a GPU, and it is of no use.
pub fn gpu() -> Result<Option<Box<dyn Gpu>>, DeviceError> {
    open(true)
}

#[cfg(target_os = "macos")]
fn open(gate: bool) -> Result<Option<Box<dyn Gpu>>, DeviceError> {
    Ok(Some(Box::new(super::Queue::new(super::metal::Metal::new(gate)?))))
}

#[cfg(target_os = "linux")]
fn open(gate: bool) -> Result<Option<Box<dyn Gpu>>, DeviceError> {
    Ok(super::cuda::Cuda::new(gate)?.map(|cuda| Box::new(super::Queue::new(cuda)) as Box<dyn Gpu>))
}

#[cfg(not(any(target_os = "macos", target_os = "linux")))]
fn open(_: bool) -> Result<Option<Box<dyn Gpu>>, DeviceError> {
    Ok(None)
}
