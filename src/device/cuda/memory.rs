//! Memory of the card, and the slabs that it shows.

use super::told;
use crate::device::{DeviceError, Region, Slab};
use cudarc::driver::{
    result,
    sys::{self, CUdeviceptr, CUresult, CUstream},
};
use std::{ffi::c_void, ops::Range, sync::Arc};

/// Memory of the card. It goes with this; then the context is current, and the card no longer uses it.
pub struct Memory {
    pub pointer: CUdeviceptr,
    /// The bytes of ours that it shows.
    host: Option<Host>,
}

struct Host {
    slab: Arc<Slab>,
    range: Range<usize>,
    pages: Pages,
}

/// Pages that cannot be moved are copied by the card itself, while the CPU goes on.
#[derive(PartialEq)]
enum Pages {
    /// Nobody has asked: a slab that is copied once, as a whole, is not worth it.
    Movable,
    Pinned,
    /// Pinning was refused.
    Refused,
}

impl Memory {
    /// Memory of `bytes` bytes, not cleared. The context is current.
    pub fn new(bytes: usize) -> Result<Self, DeviceError> {
        // SAFETY: it is freed once, when this goes.
        let pointer = unsafe { result::malloc_sync(bytes.max(16)) };
        let pointer = pointer.map_err(|error| DeviceError(format!("{bytes} bytes: {}", told(error))))?;
        Ok(Self { pointer, host: None })
    }

    /// Shows a range of a slab, which may be pinned later.
    pub fn show(&mut self, slab: &Arc<Slab>, range: Range<usize>) {
        slab.hold();
        self.host = Some(Host { slab: slab.clone(), range, pages: Pages::Movable });
    }

    /// Copies a part of the slab, if it shows one. The part is complete, and nobody writes it until the stream has come here.
    pub fn fetch(&mut self, region: Region, stream: CUstream) -> Result<(), DeviceError> {
        let Some(host) = &mut self.host else { return Ok(()) };
        if region.len < host.range.len() && host.pages == Pages::Movable {
            host.pin();
        }
        let start = host.range.start + region.offset;
        let to = self.pointer + region.offset as CUdeviceptr;
        // SAFETY: in bounds on both sides (the queue has looked), and not written meanwhile (the caller's promise; of pages that
        // are not pinned CUDA has a copy when the call returns).
        unsafe { result::memcpy_htod_async(to, host.slab.bytes(start..start + region.len), stream) }.map_err(told)
    }
}

impl Host {
    fn start(&self) -> *mut c_void {
        // SAFETY: only the address is taken.
        unsafe { self.slab.bytes(self.range.clone()) }.as_ptr().cast_mut().cast()
    }

    fn pin(&mut self) {
        // SAFETY: the range is mapped as long as the slab lives, which is kept beside it.
        let done = unsafe { sys::cuMemHostRegister_v2(self.start(), self.range.len(), 0) };
        self.pages = if done == CUresult::CUDA_SUCCESS { Pages::Pinned } else { Pages::Refused };
        if self.pages == Pages::Refused {
            tracing::debug!("{} bytes of slots cannot be pinned ({done:?}): copies are slower", self.range.len());
        }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: both were made by the context that is current, and are given back once.
        unsafe {
            if let Some(host) = self.host.as_ref().filter(|host| host.pages == Pages::Pinned) {
                sys::cuMemHostUnregister(host.start());
            }
            let _ = result::free_sync(self.pointer);
        }
    }
}

/// Memory of ours that the card copies to by itself, to read results through: without it the driver does the same in small pieces.
pub struct Pinned(*mut u8);

impl Pinned {
    /// As many bytes as a large vocabulary's logits have.
    const LEN: usize = 4 << 20;

    /// Room for `len` bytes; `None` where there is not so much. The context is current.
    pub fn room(&mut self, len: usize) -> Option<&mut [u8]> {
        if len > Self::LEN {
            return None;
        }
        if self.0.is_null() {
            // SAFETY: it is given back once.
            self.0 = unsafe { result::malloc_host(Self::LEN, 0) }.ok()?.cast();
            // SAFETY: so many bytes are there; none is read before it is written.
            unsafe { self.0.write_bytes(0, Self::LEN) };
        }
        // SAFETY: written above, and borrowed as this is.
        Some(unsafe { std::slice::from_raw_parts_mut(self.0, len) })
    }

    /// Gives it back. The context is current, and nothing copies to it.
    pub fn clear(&mut self) {
        if !self.0.is_null() {
            // SAFETY: it came from the context that is current.
            let _ = unsafe { result::free_host(self.0.cast()) };
            self.0 = std::ptr::null_mut();
        }
    }
}

impl Default for Pinned {
    fn default() -> Self {
        Self(std::ptr::null_mut())
    }
}
