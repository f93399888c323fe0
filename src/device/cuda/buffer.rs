//! GPU buffers, copies from slabs, and a pinned staging buffer.

use super::error::cuda_error;
use crate::device::{DeviceError, Region, Slab};
use cudarc::driver::{
    result,
    sys::{self, CUdeviceptr, CUresult, CUstream},
};
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
            DeviceError(format!("cannot allocate {bytes} bytes of GPU memory: {}", cuda_error(error)))
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
pub struct StagingBuffer(*mut u8);

impl StagingBuffer {
    /// Length in bytes. This is enough for the logits of a large vocabulary.
    const LEN: usize = 4 << 20;

    /// The first `len` bytes. Returns `None` if `len` is too large or allocation fails. The context must be current.
    pub fn get(&mut self, len: usize) -> Option<&mut [u8]> {
        if len > Self::LEN {
            return None;
        }
        if self.0.is_null() {
            // SAFETY: `clear` frees the memory once.
            self.0 = unsafe { result::malloc_host(Self::LEN, 0) }.ok()?.cast();
            // SAFETY: the block has this length. The block is initialised here before any read.
            unsafe { self.0.write_bytes(0, Self::LEN) };
        }
        // SAFETY: the memory was initialised above, and the result is borrowed for as long as `self`.
        Some(unsafe { std::slice::from_raw_parts_mut(self.0, len) })
    }

    /// Frees the memory. The context must be current, and no copy to the memory may be pending.
    pub fn clear(&mut self) {
        if !self.0.is_null() {
            // SAFETY: the current context allocated the memory.
            let _ = unsafe { result::free_host(self.0.cast()) };
            self.0 = std::ptr::null_mut();
        }
    }
}

impl Default for StagingBuffer {
    fn default() -> Self {
        Self(std::ptr::null_mut())
    }
}
