//! The C allocator: memory that is freed must return to the operating system.

/// Configures glibc to return freed memory to the operating system. Blocks of 1 MiB and more are mapped and unmapped
/// directly. By default glibc raises that threshold once such a block was freed, keeps the memory, and copies growing
/// blocks instead of remapping them. Smaller blocks share one heap, because [`trim_memory`] does not release per-thread
/// heaps completely.
pub fn return_freed_memory() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: sets integers under a lock of glibc.
    unsafe {
        libc::mallopt(libc::M_MMAP_THRESHOLD, 1 << 20);
        libc::mallopt(libc::M_ARENA_MAX, 1);
    }
}

/// Returns memory that the allocator keeps after `free` to the operating system (glibc). Takes up to a few milliseconds.
pub fn trim_memory() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: glibc locks its own state. The call has no preconditions.
    unsafe {
        libc::malloc_trim(0);
    }
}
