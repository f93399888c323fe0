//! [`make_fifo`]: creates a FIFO. Opening a FIFO without a writer blocks.

use std::{ffi::CString, path::Path};

/// Creates a FIFO without starting a child process, which would inherit the open files and locks of other tests.
pub fn make_fifo(path: &Path) {
    let name = CString::new(path.as_os_str().as_encoded_bytes()).unwrap();
    // SAFETY: a system call on a NUL-terminated string that outlives the call.
    let status = unsafe { libc::mkfifo(name.as_ptr(), 0o600) };
    assert_eq!(status, 0, "{}: {}", path.display(), std::io::Error::last_os_error());
}
