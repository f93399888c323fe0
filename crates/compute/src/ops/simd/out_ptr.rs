//! An address that several threads share.

/// An address in an output that several threads write. Each thread writes its own values.
#[derive(Clone, Copy)]
pub struct OutPtr(pub *mut f32);

impl OutPtr {
    /// The address of the value `count` places after this one.
    ///
    /// # Safety
    /// As for `add` of the pointer.
    pub unsafe fn add(self, count: usize) -> Self {
        // SAFETY: guaranteed by the caller.
        Self(unsafe { self.0.add(count) })
    }
}

// SAFETY: only unsafe code writes through the pointer, and it must ensure that no two threads access the same value.
unsafe impl Send for OutPtr {}

// SAFETY: as above.
unsafe impl Sync for OutPtr {}
