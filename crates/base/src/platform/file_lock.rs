//! Locks against other processes.

use std::fs::{File, TryLockError};

/// An exclusive lock of an open file or directory. The operating system also releases it when the process ends.
///
/// A child process that is being started has copies of all open files until it executes its program. A lock lasts as
/// long as such a copy, so closing the file is not enough: dropping this value unlocks it explicitly.
pub struct FileLock(File);

impl FileLock {
    /// # Errors
    /// Another process or another open file has the lock, or the file system does not support locks.
    pub fn try_lock(file: File) -> Result<Self, TryLockError> {
        file.try_lock()?;
        Ok(Self(file))
    }
}

impl Drop for FileLock {
    fn drop(&mut self) {
        // If this fails, closing the file releases the lock.
        let _ = self.0.unlock();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dropped_lock_is_free_despite_copies() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let open = || File::open(file.path()).unwrap();
        let lock = FileLock::try_lock(open()).unwrap();
        // A child process has such a copy between `fork` and `exec`.
        let copy = lock.0.try_clone().unwrap();
        assert!(matches!(FileLock::try_lock(open()), Err(TryLockError::WouldBlock)));
        drop(lock);
        assert!(FileLock::try_lock(open()).is_ok());
        drop(copy);
    }
}
