//! Files that are being written, under names of their own until they are whole. Servers may share a directory: no two of them
//! write to one file, and a lock tells a file that somebody writes from one that a killed server left.

use std::{
    fs::{self, File, OpenOptions, TryLockError},
    io::{self, Write},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
    process,
    sync::atomic::{AtomicU64, Ordering::Relaxed},
    time::Duration,
};

/// The ending of their names.
pub const UNFINISHED: &str = "unfinished";

/// Between its creation and its lock nobody takes a file away.
const FRESH: Duration = Duration::from_secs(2);
/// Nobody writes a file for so long. It counts where there are no locks, and for pages whose state is still to come.
const OLD: Duration = Duration::from_secs(600);

/// A file that is whole but for its name. It is removed if it gets none.
pub struct Unfinished {
    path: PathBuf,
    _locked: File,
}

impl Unfinished {
    /// Writes what is to be at `path`.
    pub fn write(path: &Path, parts: &[&[u8]]) -> io::Result<Self> {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let mut name = path.as_os_str().to_owned();
        name.push(format!(".{}-{}.{UNFINISHED}", process::id(), COUNT.fetch_add(1, Relaxed)));
        let path = PathBuf::from(name);
        // A server of another container may have this one's number.
        let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path)?;
        // Without locks its age has to do.
        let _ = file.try_lock();
        let mut written = Self { path, _locked: file };
        parts.iter().try_for_each(|part| written._locked.write_all(part))?;
        Ok(written)
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Gives it its name. What is there by that name goes.
    pub fn finish(self, path: &Path) -> io::Result<()> {
        // Written here and now, or the system would do it later at a moment of its own, and faster.
        self._locked.sync_data()?;
        fs::rename(&self.path, path)
    }
}

impl Drop for Unfinished {
    fn drop(&mut self) {
        remove(&self.path);
    }
}

/// True if nobody writes this unfinished file any more.
pub fn is_abandoned(path: &Path) -> bool {
    let Ok(file) = File::open(path) else { return false };
    match file.try_lock() {
        Ok(()) => is_older(path, FRESH),
        Err(TryLockError::WouldBlock) => false,
        Err(TryLockError::Error(_)) => is_old(path),
    }
}

/// True if it is so old that no server is still at it.
pub fn is_old(path: &Path) -> bool {
    is_older(path, OLD)
}

fn is_older(path: &Path, than: Duration) -> bool {
    let age = fs::metadata(path).and_then(|meta| meta.modified()).map(|at| at.elapsed().unwrap_or_default());
    age.is_ok_and(|age| age > than)
}

/// Removes a file; one that is gone already is no error.
pub fn remove(path: &Path) {
    if let Err(error) = fs::remove_file(path).or_else(gone) {
        tracing::debug!(path = %path.display(), %error, "a checkpoint's file could not be removed");
    }
}

pub fn gone(error: io::Error) -> io::Result<()> {
    if error.kind() == io::ErrorKind::NotFound { Ok(()) } else { Err(error) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::SystemTime;

    #[test]
    fn two_may_write_the_same_at_once() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.page");
        let (one, other) = (Unfinished::write(&path, &[b"1", b"2"]), Unfinished::write(&path, &[b"12"]));
        let (one, other) = (one.unwrap(), other.unwrap());
        assert_ne!(one.path(), other.path());
        one.finish(&path).unwrap();
        other.finish(&path).unwrap();
        drop(Unfinished::write(&path, &[b"3"]).unwrap());
        assert_eq!((fs::read(&path).unwrap(), fs::read_dir(dir.path()).unwrap().count()), (b"12".to_vec(), 1));
    }

    #[test]
    fn what_is_being_written_is_not_abandoned_however_old() {
        let dir = tempfile::tempdir().unwrap();
        let written = Unfinished::write(&dir.path().join("a.page"), &[b"1"]).unwrap();
        let left = dir.path().join("b.page.1-1.unfinished");
        fs::write(&left, b"1").unwrap();
        assert!(!is_abandoned(&left), "it may be about to be locked");
        for path in [written.path(), &left] {
            let hours_ago = SystemTime::now() - Duration::from_secs(7200);
            File::options().write(true).open(path).unwrap().set_modified(hours_ago).unwrap();
        }
        assert!(is_abandoned(&left) && !is_abandoned(written.path()));
    }
}
