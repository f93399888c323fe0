//! Settings of the C allocator, so that freed memory returns to the operating system.

const MMAP_THRESHOLD: i32 = 1 << 20;
/// glibc's default.
const TRIM_THRESHOLD: i32 = 128 << 10;

/// Configures glibc to return freed memory to the operating system.
///
/// Blocks of 1 MiB and more are mapped and unmapped directly. By default, glibc raises this threshold after such a
/// block is freed. With a higher threshold, glibc keeps freed memory, and copies a growing block instead of remapping
/// it. Smaller blocks of all threads share one heap, because [`trim_memory`] does not completely release per-thread
/// heaps.
pub fn return_freed_memory() {
    set_limits(MMAP_THRESHOLD, TRIM_THRESHOLD);
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: `mallopt` sets integers under glibc's own lock.
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, 1);
    }
}

/// While this value exists, glibc keeps freed memory of any size, so that code that frees and allocates large blocks
/// again and again does not take a page fault for each page of each block. Then returns the memory to the operating
/// system and sets the limits of [`return_freed_memory`].
#[must_use]
pub struct KeepFreedMemory(());

impl KeepFreedMemory {
    pub fn begin() -> Self {
        set_limits(i32::MAX, i32::MAX);
        Self(())
    }
}

impl Drop for KeepFreedMemory {
    fn drop(&mut self) {
        set_limits(MMAP_THRESHOLD, TRIM_THRESHOLD);
        trim_memory();
    }
}

/// Sets the size from which blocks are mapped, and the size of the free end of the heap from which it is returned.
fn set_limits(mapped: i32, trimmed: i32) {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: `mallopt` sets integers under glibc's own lock.
    unsafe {
        libc::mallopt(libc::M_MMAP_THRESHOLD, mapped);
        libc::mallopt(libc::M_TRIM_THRESHOLD, trimmed);
    }
    #[cfg(not(all(target_os = "linux", target_env = "gnu")))]
    let _ = (mapped, trimmed);
}

/// Makes glibc return memory to the operating system that was freed but that glibc has kept. This takes up to a few
/// milliseconds.
pub fn trim_memory() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: glibc locks its own state, and the call has no preconditions.
    unsafe {
        libc::malloc_trim(0);
    }
}
