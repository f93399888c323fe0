//! GPU buffers, copies from slabs, and a pinned staging buffer.

use super::error::cuda_error;
use crate::device::{DeviceError, Region, Slab};
use cudarc::driver::{
    result::{self, DriverError},
    sys::{self, CUdeviceptr, CUresult, CUstream},
};
use moestro_base::platform::Threads;
use std::{ffi::c_void, ops::Range, sync::Arc};

/// A block of GPU memory. Dropping this value frees the block. At that time, the context must be current, and the GPU
/// must have stopped using the block.
pub struct DeviceBuffer {
    pub pointer: CUdeviceptr,
    /// The range of a slab from which this buffer is filled. `None` if the buffer was allocated without a slab.
    source: Option<SlabSource>,
}

struct SlabSource {
    slab: Arc<Slab>,
    range: Range<usize>,
    pages: PageState,
}

/// The pinning state of a slab's pages. The GPU copies pinned pages without blocking the CPU.
#[derive(PartialEq)]
enum PageState {
    /// The pages are not pinned. The first upload of only a part of the range pins the pages. A slab that is uploaded
    /// once and as a whole is never pinned, because pinning would take longer than it saves.
    Pageable,
    Pinned,
    /// The driver refused to pin the pages.
    Refused,
}

impl DeviceBuffer {
    /// Allocates memory without clearing it. The context must be current.
    pub fn new(bytes: usize) -> Result<Self, DeviceError> {
        // SAFETY: `drop` frees the memory once.
        let pointer = unsafe { result::malloc_sync(bytes.max(16)) };
        let pointer = pointer.map_err(|error| {
            DeviceError::Memory(format!("cannot allocate {bytes} bytes of GPU memory: {}", cuda_error(error)))
        })?;
        Ok(Self { pointer, source: None })
    }

    /// Sets the range of a slab from which [`DeviceBuffer::upload`] fills this buffer.
    pub fn set_source(&mut self, slab: &Arc<Slab>, range: Range<usize>) {
        self.source = Some(SlabSource { slab: slab.clone(), range, pages: PageState::Pageable });
    }

    /// Copies a region from the slab to the GPU. Does nothing if the buffer has no slab. The bytes must not change
    /// until the stream has copied them. The first upload of only a part of the range pins the pages of the whole
    /// range.
    pub fn upload(&mut self, region: Region, stream: CUstream) -> Result<(), DeviceError> {
        let Some(source) = &mut self.source else { return Ok(()) };
        if region.len < source.range.len() && source.pages == PageState::Pageable {
            source.pin();
        }
        let start = source.range.start + region.offset;
        let to = self.pointer + region.offset as CUdeviceptr;
        // SAFETY: both ranges are in bounds (checked by the queue), and the caller does not change the bytes during the
        // copy. For pageable memory, CUDA copies the bytes before the call returns.
        unsafe { result::memcpy_htod_async(to, source.slab.bytes(start..start + region.len), stream) }
            .map_err(cuda_error)
    }
}

impl SlabSource {
    fn start(&self) -> *mut c_void {
        // SAFETY: only the address is used.
        unsafe { self.slab.bytes(self.range.clone()) }.as_ptr().cast_mut().cast()
    }

    fn pin(&mut self) {
        // SAFETY: the range is mapped while the slab lives, and `self` keeps the slab alive.
        let done = unsafe { sys::cuMemHostRegister_v2(self.start(), self.range.len(), 0) };
        self.pages = if done == CUresult::CUDA_SUCCESS { PageState::Pinned } else { PageState::Refused };
        if self.pages == PageState::Refused {
            tracing::debug!("cannot pin {} bytes of slots ({done:?}); uploads will be slower", self.range.len());
        }
    }
}

impl Drop for DeviceBuffer {
    fn drop(&mut self) {
        // SAFETY: the current context allocated the memory and pinned the pages. Both are released once.
        unsafe {
            if let Some(source) = self.source.as_ref().filter(|source| source.pages == PageState::Pinned) {
                sys::cuMemHostUnregister(source.start());
            }
            let _ = result::free_sync(self.pointer);
        }
    }
}

/// Pinned memory to which the GPU copies results. A copy to pageable memory is slower, since the driver splits it.
pub struct StagingBuffer {
    memory: *mut u8,
    len: usize,
    /// The threads that copy large results to their destination. Started for the first large result.
    threads: Option<Threads>,
}

impl StagingBuffer {
    /// Minimum and maximum length in bytes. The maximum is enough for 16 rows of logits of a large vocabulary.
    const MIN_LEN: usize = 4 << 20;
    const MAX_LEN: usize = 16 << 20;
    /// Number of bytes that a thread copies at a time: a row of logits. One thread alone copies more slowly than the
    /// GPU.
    const PART: usize = 1 << 20;
    const THREADS: usize = 4;

    /// Fills `bytes` from the GPU's memory at `from`, after the work submitted to `stream` so far.
    ///
    /// # Safety
    /// The context is current, `stream` belongs to it, and `bytes.len()` bytes of GPU memory start at `from`.
    pub unsafe fn read(&mut self, from: CUdeviceptr, bytes: &mut [u8], stream: CUstream) -> Result<(), DriverError> {
        let is_staged = self.reserve(bytes.len());
        // SAFETY: `reserve` has initialised the memory. No other reference to it exists while `self` is borrowed.
        let mut staged = is_staged.then(|| unsafe { std::slice::from_raw_parts_mut(self.memory, bytes.len()) });
        // SAFETY: the caller guarantees the bounds. `synchronize` waits for the copy.
        unsafe {
            result::memcpy_dtoh_async(staged.as_deref_mut().unwrap_or(&mut *bytes), from, stream)?;
            result::stream::synchronize(stream)?;
        }
        match staged {
            Some(staged) if staged.len() > Self::PART => {
                let threads = self.threads.get_or_insert_with(|| Threads::new(Self::THREADS));
                threads.run_pieces(bytes, Self::PART, &|index, part| {
                    part.copy_from_slice(&staged[index * Self::PART..][..part.len()]);
                });
            }
            Some(staged) => bytes.copy_from_slice(staged),
            None => {}
        }
        Ok(())
    }

    /// Makes the buffer at least `len` bytes long. Returns false if `len` is too large or allocation fails.
    fn reserve(&mut self, len: usize) -> bool {
        if len > Self::MAX_LEN {
            return false;
        }
        if self.len < len.max(Self::MIN_LEN) {
            self.clear();
            let new = len.next_power_of_two().max(Self::MIN_LEN);
            // SAFETY: `clear` frees the memory once.
            let Ok(memory) = (unsafe { result::malloc_host(new, 0) }) else { return false };
            self.memory = memory.cast();
            self.len = new;
            // SAFETY: the block has this length. The block is initialised here before any read.
            unsafe { self.memory.write_bytes(0, new) };
        }
        true
    }

    /// Frees the memory. The context must be current, and no copy to the memory may be pending.
    pub fn clear(&mut self) {
        if !self.memory.is_null() {
            // SAFETY: the current context allocated the memory.
            let _ = unsafe { result::free_host(self.memory.cast()) };
            self.memory = std::ptr::null_mut();
            self.len = 0;
        }
    }
}

impl Default for StagingBuffer {
    fn default() -> Self {
        Self { memory: std::ptr::null_mut(), len: 0, threads: None }
    }
}
