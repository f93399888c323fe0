//! Memory that is about to be written.

/// `len` zeros that will be written all over. Where they are many, the system is asked for large pages: it makes them in a
/// fraction of the time.
pub fn zeros(len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    advise(&mut bytes);
    bytes
}

#[cfg(target_os = "linux")]
fn advise(bytes: &mut [u8]) {
    const LARGE: usize = 2 << 20;
    let before = bytes.as_ptr().align_offset(LARGE);
    let Some(inside) = bytes.get_mut(before..).filter(|inside| inside.len() >= LARGE) else { return };
    let len = inside.len() / LARGE * LARGE;
    // SAFETY: whole pages of memory that is ours; the advice changes no byte of them, and its result does not matter.
    unsafe { libc::madvise(inside.as_mut_ptr().cast(), len, libc::MADV_HUGEPAGE) };
}

#[cfg(not(target_os = "linux"))]
fn advise(_: &mut [u8]) {}

#[cfg(test)]
mod tests {
    use super::zeros;

    #[test]
    fn they_are_zeros_and_can_be_written() {
        for len in [0, 1, 4096, (2 << 20) - 1, (9 << 20) + 5] {
            let mut bytes = zeros(len);
            assert!(bytes.len() == len && bytes.iter().all(|byte| *byte == 0));
            bytes.fill(7);
            bytes.shrink_to_fit();
            assert!(bytes.iter().all(|byte| *byte == 7));
        }
    }
}
