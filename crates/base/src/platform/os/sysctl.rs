//! Values of `sysctl` (macOS).

/// The integer value of a `sysctl`.
pub fn number(name: &std::ffi::CStr) -> Option<u64> {
    let mut bytes = [0u8; 8];
    let mut len = bytes.len();
    // SAFETY: `name` is NUL-terminated. The kernel writes at most `len` bytes and sets `len` to the number written.
    let code =
        unsafe { libc::sysctlbyname(name.as_ptr(), bytes.as_mut_ptr().cast(), &mut len, std::ptr::null_mut(), 0) };
    // On a little-endian CPU, a 4-byte value leaves the upper four bytes zero.
    (code == 0 && (len == 4 || len == 8)).then(|| u64::from_le_bytes(bytes))
}

/// The text value of a `sysctl`.
pub fn text(name: &std::ffi::CStr) -> Option<String> {
    let mut bytes = [0u8; 128];
    let mut len = bytes.len();
    // SAFETY: as in `number`.
    let code =
        unsafe { libc::sysctlbyname(name.as_ptr(), bytes.as_mut_ptr().cast(), &mut len, std::ptr::null_mut(), 0) };
    let text = std::ffi::CStr::from_bytes_until_nul(&bytes).ok()?;
    (code == 0).then(|| text.to_string_lossy().into_owned())
}
