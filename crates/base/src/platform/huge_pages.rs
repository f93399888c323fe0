//! Large zeroed buffers backed by huge pages.

/// Allocates a buffer of `len` zero bytes. Requests huge pages for large buffers, since allocating huge pages takes the
/// system only a fraction of the time of allocating normal pages.
pub fn zeroed_buffer(len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    advise(&mut bytes);
    bytes
}

#[cfg(target_os = "linux")]
fn advise(bytes: &mut [u8]) {
    const HUGE_PAGE: usize = 2 << 20;
    let before = bytes.as_ptr().align_offset(HUGE_PAGE);
    let Some(inside) = bytes.get_mut(before..).filter(|inside| inside.len() >= HUGE_PAGE) else { return };
    let len = inside.len() / HUGE_PAGE * HUGE_PAGE;
    // SAFETY: the range consists of whole pages of an owned buffer. The advice changes no byte, and its result is
    // ignored.
    unsafe { libc::madvise(inside.as_mut_ptr().cast(), len, libc::MADV_HUGEPAGE) };
}

#[cfg(not(target_os = "linux"))]
fn advise(_: &mut [u8]) {}
