//! The lock of a cache directory. Only one server at a time holds the lock.

use moestro_base::platform::FileLock;
use std::{
    fs::{self, File, TryLockError},
    io,
    os::unix::fs::DirBuilderExt,
    path::Path,
};

/// Exclusive ownership of a directory. The operating system releases the lock when the process ends, also by `kill -9`.
pub struct DirLock(#[allow(dead_code, reason = "holds the lock until it is dropped")] Option<FileLock>);

impl DirLock {
    /// Creates the directory if necessary and locks it. Returns `None` if another server holds the lock.
    pub fn try_create(dir: &Path) -> io::Result<Option<Self>> {
        fs::DirBuilder::new().recursive(true).mode(0o700).create(dir)?;
        Self::try_lock(dir)
    }

    /// Locks a directory. Returns `None` if another server holds the lock.
    pub fn try_lock(dir: &Path) -> io::Result<Option<Self>> {
        match FileLock::try_lock(File::open(dir)?) {
            Ok(lock) => Ok(Some(Self(Some(lock)))),
            Err(TryLockError::WouldBlock) => Ok(None),
            Err(TryLockError::Error(error)) => {
                // Some network file systems do not support locks. Without a lock, two servers in one directory are
                // harmless: files have checksums and are replaced atomically, so the worst result is a cache miss.
                tracing::debug!(dir = %dir.display(), %error, "cannot lock the directory; using it without a lock");
                Ok(Some(Self(None)))
            }
        }
    }
}
