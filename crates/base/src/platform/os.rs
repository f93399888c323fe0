//! Information from the operating system, and requests to it.
//!
//! A value that the system does not report is `None`, never an estimate.

mod allocator;
#[cfg(target_os = "linux")]
mod cgroup;
mod machine;
mod pressure;
#[cfg(target_os = "linux")]
mod proc_table;
mod process;
#[cfg(target_os = "macos")]
mod sysctl;
mod thread_priority;
mod user_dirs;

pub use allocator::{KeepFreedMemory, return_freed_memory, trim_memory};
pub use machine::{host_name, physical_cores, processor, system, total_memory};
pub use pressure::{MemoryLevel, MemoryMonitor};
pub use process::{
    cpu_seconds, disk_bytes_read, max_files, open_files, peak_resident_memory, process_memory, process_stat,
    raise_descriptor_limit, resident_memory, wired_memory,
};
pub use thread_priority::{background_thread, interactive_thread};
pub use user_dirs::{cache_dir, data_dir, expand_path, state_dir};

use std::{io, path::Path};

/// The lowest memory limit of this process's control groups (v1 or v2) and their ancestors. `None` if no group has a
/// limit, and on systems without control groups.
pub fn cgroup_limit() -> Option<u64> {
    #[cfg(target_os = "linux")]
    return cgroup::limit();
    #[cfg(not(target_os = "linux"))]
    None
}

/// Number of free bytes for this user on the file system of `path`. If `path` does not exist, its nearest existing
/// ancestor is used.
pub fn free_space(path: &Path) -> Option<u64> {
    let existing = path.ancestors().find(|p| p.exists()).filter(|p| !p.as_os_str().is_empty());
    let path = existing.unwrap_or(Path::new("."));
    let path = std::ffi::CString::new(path.as_os_str().as_encoded_bytes()).ok()?;
    let mut stat = std::mem::MaybeUninit::<libc::statvfs>::uninit();
    // SAFETY: `path` is a NUL-terminated string. `stat` is large enough and is read only on success.
    let stat = unsafe { (libc::statvfs(path.as_ptr(), stat.as_mut_ptr()) == 0).then(|| stat.assume_init()) }?;
    #[allow(clippy::unnecessary_cast)] // The integer types of the fields differ between systems.
    (stat.f_bavail as u64).checked_mul(stat.f_frsize as u64)
}

/// Returns an error if the file system of `path` has no room for `bytes` and for a spare of as many bytes, at most
/// 64 MiB. `what` needs the space. `hint` ends the message.
pub fn check_free_space(path: &Path, what: &str, bytes: u64, hint: &str) -> io::Result<()> {
    let spare = bytes.min(64 << 20);
    let Some(free) = free_space(path).filter(|&free| free < bytes + spare) else { return Ok(()) };
    let why = format!("{what} needs {bytes} bytes and {spare} bytes to spare, but only {free} are free{hint}");
    Err(io::Error::new(io::ErrorKind::StorageFull, why))
}

/// Sends SIGTERM to a child process. Does nothing if the process has ended.
pub fn terminate(child: u32) {
    if let Ok(id @ 1..) = libc::pid_t::try_from(child) {
        // SAFETY: a system call without pointers. A positive id addresses a single process.
        unsafe {
            libc::kill(id, libc::SIGTERM);
        }
    }
}

/// The numeric user id.
pub fn user() -> u32 {
    // SAFETY: a system call without arguments that cannot fail.
    unsafe { libc::getuid() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn free_space_uses_the_nearest_ancestor() {
        assert!(free_space(Path::new("/no/such/place/yet")).unwrap() > 0);
        assert!(free_space(Path::new("relative")).unwrap() > 0);
    }

    #[test]
    fn small_file_needs_little_spare_space() {
        let dir = tempfile::tempdir().unwrap();
        check_free_space(dir.path(), "a file", 1, "").unwrap();
        let error = check_free_space(dir.path(), "a file", 1 << 60, "; end").unwrap_err().to_string();
        assert!(error.starts_with("a file needs 1152921504606846976 bytes and 67108864 bytes to spare, but only "));
        assert!(error.ends_with(" are free; end"), "{error}");
    }
}
