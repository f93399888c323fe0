//! Directories and files that appear whole or not at all.

use std::{
    fs::{self, File, TryLockError},
    io::{self, Write},
    os::unix::fs::{DirBuilderExt, MetadataExt},
    path::{Path, PathBuf},
    process,
    sync::atomic::{AtomicUsize, Ordering},
};

/// `.NAME.partial` beside what will be `NAME`; removed unless [`Partial::finish`] gives it its name.
pub struct Partial {
    path: PathBuf,
    finished: bool,
    /// Open and locked, so that two runs do not write the same directory. The lock ends with the process.
    _lock: File,
}

impl Partial {
    /// Makes the directory that is to become `out`, and `out`'s parents. A killed run's directory of the same name is
    /// removed.
    pub fn create(out: &Path) -> io::Result<Self> {
        let parent = parent(out);
        let no_name = || io::Error::new(io::ErrorKind::InvalidInput, "this path has no last name");
        let name = out.file_name().ok_or_else(no_name)?.to_string_lossy();
        fs::create_dir_all(parent)?;
        let path = parent.join(format!(".{name}.partial"));
        if path.exists() {
            lock(&path)?;
            fs::remove_dir_all(&path)?;
        }
        fs::create_dir(&path)?;
        Ok(Self { finished: false, _lock: lock(&path)?, path })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Renames it to `out`, which must be the path it was created for, and absent or an empty directory.
    pub fn finish(mut self, out: &Path) -> io::Result<()> {
        fs::rename(&self.path, out)?;
        self.finished = true;
        // The new name itself has to reach the disk.
        File::open(parent(out))?.sync_all()
    }
}

impl Drop for Partial {
    fn drop(&mut self) {
        if self.finished {
            return;
        }
        if let Err(error) = fs::remove_dir_all(&self.path) {
            tracing::warn!(path = %self.path.display(), %error, "could not remove what was left unfinished");
        }
    }
}

/// Writes a file that appears whole or not at all, and its parents: beside its place, then renamed. A failure leaves
/// nothing.
pub fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
    static TURN: AtomicUsize = AtomicUsize::new(0);
    let turn = TURN.fetch_add(1, Ordering::Relaxed);
    let mut beside = path.as_os_str().to_owned();
    beside.push(format!(".{}-{turn}.partial", process::id()));
    fs::create_dir_all(parent(path))?;
    let written = File::create_new(&beside)
        .and_then(|mut file| file.write_all(bytes).and_then(|()| file.sync_all()))
        .and_then(|()| fs::rename(&beside, path));
    if written.is_err() {
        let _ = fs::remove_file(&beside);
    }
    written
}

/// A directory of this user's own below one that anybody may write to.
///
/// # Errors
/// The system's; a directory of that name that belongs to somebody else, or that others may write to.
pub fn private(root: &Path) -> io::Result<PathBuf> {
    // SAFETY: a system call that cannot fail.
    let user = unsafe { libc::geteuid() };
    let dir = root.join(format!("moestro-{user}"));
    match fs::DirBuilder::new().mode(0o700).create(&dir) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
        _ => {}
    }
    let meta = fs::symlink_metadata(&dir)?;
    if meta.is_dir() && meta.uid() == user && meta.mode() & 0o022 == 0 {
        return Ok(dir);
    }
    Err(io::Error::new(io::ErrorKind::PermissionDenied, format!("{} is not this user's alone", dir.display())))
}

fn lock(dir: &Path) -> io::Result<File> {
    let file = File::open(dir)?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(TryLockError::Error(error)) => Err(error),
        Err(TryLockError::WouldBlock) => {
            Err(io::Error::new(io::ErrorKind::ResourceBusy, format!("another run is writing {}", dir.display())))
        }
    }
}

fn parent(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_private_directory_is_nobody_elses() {
        use std::os::unix::fs::PermissionsExt;
        let root = tempfile::tempdir().unwrap();
        let dir = private(root.path()).unwrap();
        assert_eq!(private(root.path()).unwrap(), dir, "it is used again");
        fs::set_permissions(&dir, fs::Permissions::from_mode(0o777)).unwrap();
        assert!(private(root.path()).is_err());
        fs::remove_dir(&dir).unwrap();
        std::os::unix::fs::symlink("/tmp", &dir).unwrap();
        assert!(private(root.path()).is_err());
    }

    #[test]
    fn a_file_is_replaced_whole_or_not_at_all() {
        let root = tempfile::tempdir().unwrap();
        let file = root.path().join("a/file");
        replace(&file, b"one").unwrap();
        replace(&file, b"two").unwrap();
        assert_eq!(fs::read(&file).unwrap(), b"two");
        // A directory in its place cannot be replaced: nothing is left of the attempt.
        assert!(replace(&root.path().join("a"), b"three").is_err());
        assert_eq!(fs::read_dir(root.path()).unwrap().count(), 1);
        assert_eq!(fs::read_dir(root.path().join("a")).unwrap().count(), 1);
    }

    #[test]
    fn it_appears_whole_or_not_at_all() {
        let root = tempfile::tempdir().unwrap();
        let out = root.path().join("a/b");
        let partial = Partial::create(&out).unwrap();
        fs::write(partial.path().join("x"), "1").unwrap();
        assert!(Partial::create(&out).err().unwrap().to_string().contains("another run"));
        drop(partial);
        assert_eq!(fs::read_dir(root.path().join("a")).unwrap().count(), 0);
        // A killed run leaves its directory unlocked.
        fs::create_dir(root.path().join("a/.b.partial")).unwrap();
        fs::write(root.path().join("a/.b.partial/old"), "0").unwrap();
        let partial = Partial::create(&out).unwrap();
        fs::write(partial.path().join("x"), "1").unwrap();
        partial.finish(&out).unwrap();
        let names: Vec<_> = fs::read_dir(&out).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(names, ["x"]);
        assert_eq!(fs::read_dir(root.path().join("a")).unwrap().count(), 1);
    }
}
