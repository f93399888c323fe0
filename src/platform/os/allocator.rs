//! Settings of the C allocator, so that freed memory returns to the operating system.

/// Configures glibc to return freed memory to the operating system.
///
/// Blocks of 1 MiB and more are mapped and unmapped directly. By default, glibc raises this threshold after such a
/// block is freed. With a higher threshold, glibc keeps freed memory, and copies a growing block instead of remapping
/// it. Smaller blocks of all threads share one heap, because [`trim_memory`] does not completely release per-thread
/// heaps.
pub fn return_freed_memory() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: `mallopt` sets integers under glibc's own lock.
    unsafe {
        libc::mallopt(libc::M_MMAP_THRESHOLD, 1 << 20);
        libc::mallopt(libc::M_ARENA_MAX, 1);
    }
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
