//! Directories that servers use. Each has a lock on its own, which goes with the process, so that nobody who needs room takes
//! it away.

use super::unfinished::{gone, is_old};
use std::{
    fs::{self, File, TryLockError},
    io,
    os::unix::fs::{DirBuilderExt, MetadataExt},
    path::Path,
};

/// Makes a directory unless it is there. It is in use as long as the result is held.
pub fn enter(dir: &Path) -> io::Result<File> {
    loop {
        fs::DirBuilder::new().recursive(true).mode(0o700).create(dir)?;
        let Some(used) = found(File::open(dir))? else { continue };
        // Waits for who removes it just now. Some file systems have no locks: see below.
        let _ = used.lock_shared();
        if is_same(&used, dir)? {
            return Ok(used);
        }
    }
}

/// Removes a directory with all that is in it. False: a server uses it, or may, where there are no locks.
pub fn remove_unused(dir: &Path) -> io::Result<bool> {
    match found(File::open(dir))? {
        Some(handle) => remove_if_unused(&handle, dir),
        None => Ok(true),
    }
}

/// As [`remove_unused`]; `handle` was the directory when it was looked for.
fn remove_if_unused(handle: &File, dir: &Path) -> io::Result<bool> {
    match handle.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => return Ok(false),
        Err(TryLockError::Error(_)) if !is_old(dir) => return Ok(false),
        Err(TryLockError::Error(_)) => {}
    }
    // Before the lock was had, somebody may have removed it, and a server may have made it anew: that has a lock on the new one.
    if !is_same(handle, dir)? {
        return Ok(false);
    }
    fs::remove_dir_all(dir).or_else(gone)?;
    Ok(true)
}

/// True if `dir` is still what was opened.
fn is_same(handle: &File, dir: &Path) -> io::Result<bool> {
    let (ours, there) = (handle.metadata()?, found(fs::metadata(dir))?);
    Ok(there.is_some_and(|there| (there.dev(), there.ino()) == (ours.dev(), ours.ino())))
}

/// `None` of what is gone.
pub fn found<T>(result: io::Result<T>) -> io::Result<Option<T>> {
    match result {
        Ok(found) => Ok(Some(found)),
        Err(error) => gone(error).map(|()| None),
    }
}

#[cfg(test)]
mod tests {
    use super::{super::files::Files, *};
    use crate::model::SnapshotSize;

    const SIZE: SnapshotSize = SnapshotSize { state: 100, position: 2 };

    #[test]
    fn other_models_go_until_the_rest_is_within_the_bound() {
        let dir = tempfile::tempdir().unwrap();
        let (own, _) = Files::open(dir.path(), "a model", SIZE).unwrap();
        for name in ["a", "b", "c"] {
            let other = dir.path().join(name.repeat(32));
            fs::create_dir(&other).unwrap();
            fs::write(other.join("file"), [0; 300]).unwrap();
        }
        for (most, left, others) in [(900, 900, 3), (899, 600, 2), (300, 300, 1), (299, 0, 0)] {
            assert_eq!(own.make_way(dir.path(), most).unwrap(), left);
            assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1 + others, "{most} bytes");
        }
    }

    #[test]
    fn what_another_server_uses_stays_and_so_does_what_is_no_directory() {
        let dir = tempfile::tempdir().unwrap();
        let (own, _) = Files::open(dir.path(), "a model", SIZE).unwrap();
        let (other, _) = Files::open(dir.path(), "another model", SIZE).unwrap();
        fs::write(other.dir().join("file"), [0; 300]).unwrap();
        fs::write(dir.path().join("d".repeat(32)), [0; 5]).unwrap();
        assert_eq!(own.make_way(dir.path(), 0).unwrap(), 300);
        let (path, same) = (other.dir().to_owned(), Files::open(dir.path(), "another model", SIZE).unwrap());
        drop(other);
        assert_eq!(own.make_way(dir.path(), 0).unwrap(), 300, "one of two is still there");
        drop(same);
        assert_eq!(own.make_way(dir.path(), 0).unwrap(), 0);
        assert!(own.dir().exists() && !path.exists());
    }

    #[test]
    fn a_directory_that_was_made_anew_meanwhile_stays() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("key");
        drop(enter(&path).unwrap());
        let stale = File::open(&path).unwrap();
        assert!(remove_unused(&path).unwrap());
        let _used = enter(&path).unwrap();
        assert!(!remove_if_unused(&stale, &path).unwrap());
        assert!(path.exists());
    }
}
