//! Writes files and directories atomically: writes under a temporary name, and then renames.

use super::FileLock;
use std::{
    fs::{self, File, OpenOptions, TryLockError},
    io::{self, Write},
    os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt},
    path::{Path, PathBuf},
    process,
    sync::atomic::{AtomicUsize, Ordering},
};

/// A temporary directory `.NAME.partial` in the same directory as the final `NAME`. Dropping this value removes the
/// temporary directory, unless [`PartialDir::finish`] has renamed it.
pub struct PartialDir {
    path: PathBuf,
    is_finished: bool,
    /// The lock of the directory, so that no two processes write to it.
    _lock: FileLock,
}

impl PartialDir {
    /// Creates the temporary directory for `out`, and the parents of `out`. If a killed process has left a temporary
    /// directory for `out`, removes it first.
    pub fn create(out: &Path) -> io::Result<Self> {
        let parent = parent(out);
        let no_name = || io::Error::new(io::ErrorKind::InvalidInput, "the path does not end in a name");
        let name = out.file_name().ok_or_else(no_name)?.to_string_lossy();
        fs::create_dir_all(parent)?;
        let path = parent.join(format!(".{name}.partial"));
        if path.exists() {
            Self::remove_abandoned(&path)?;
        }
        fs::create_dir(&path)?;
        Ok(Self { is_finished: false, _lock: lock(&path)?, path })
    }

    /// Removes the temporary directory that a killed process has left.
    ///
    /// # Errors
    /// A process is writing to the directory.
    pub fn remove_abandoned(path: &Path) -> io::Result<()> {
        let _lock = lock(path)?;
        fs::remove_dir_all(path)
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Renames the directory to `out`, the path given to [`PartialDir::create`]. `out` must not exist or must be empty.
    pub fn finish(mut self, out: &Path) -> io::Result<()> {
        fs::rename(&self.path, out)?;
        self.is_finished = true;
        // This makes the rename durable.
        File::open(parent(out))?.sync_all()
    }
}

impl Drop for PartialDir {
    fn drop(&mut self) {
        if self.is_finished {
            return;
        }
        if let Err(error) = fs::remove_dir_all(&self.path) {
            tracing::warn!(path = %self.path.display(), %error, "cannot remove the temporary directory");
        }
    }
}

/// A file with a temporary name in the directory of its final path. Dropping this value removes the file, unless
/// [`TempFile::persist`] has renamed it.
pub struct TempFile {
    path: PathBuf,
    file: File,
}

impl TempFile {
    /// Writes `parts` to a new temporary file for `path`, with permission bits `mode`. Creates the parents of `path`.
    pub fn write(path: &Path, mode: u32, parts: &[&[u8]]) -> io::Result<Self> {
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        let mut name = path.as_os_str().to_owned();
        name.push(format!(".{}-{}.partial", process::id(), COUNT.fetch_add(1, Ordering::Relaxed)));
        let temp = PathBuf::from(name);
        fs::create_dir_all(parent(path))?;
        let file = OpenOptions::new().write(true).create_new(true).mode(mode).open(&temp)?;
        let mut written = Self { path: temp, file };
        parts.iter().try_for_each(|part| written.file.write_all(part))?;
        Ok(written)
    }

    /// Syncs the data and renames the file to `path`. Replaces an existing file.
    pub fn persist(self, path: &Path) -> io::Result<()> {
        self.file.sync_all()?;
        fs::rename(&self.path, path)
    }
}

impl Drop for TempFile {
    fn drop(&mut self) {
        // After a rename this fails, since the temporary name no longer exists.
        let _ = fs::remove_file(&self.path);
    }
}

/// Replaces the file at `path` atomically. Creates the parents of `path`. Removes the temporary file after an error.
pub fn replace_file(path: &Path, bytes: &[u8]) -> io::Result<()> {
    TempFile::write(path, 0o666, &[bytes])?.persist(path)
}

/// Creates or reuses a private directory of this user inside `root`. All users may be able to write to `root`, as to
/// `/tmp`.
///
/// # Errors
/// A system error occurs, or the directory belongs to another user or is writable by other users.
pub fn private_dir(root: &Path) -> io::Result<PathBuf> {
    // SAFETY: a system call without arguments that cannot fail.
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
    let why = format!("{} belongs to another user or is writable by others", dir.display());
    Err(io::Error::new(io::ErrorKind::PermissionDenied, why))
}

fn lock(dir: &Path) -> io::Result<FileLock> {
    match FileLock::try_lock(File::open(dir)?) {
        Ok(lock) => Ok(lock),
        Err(TryLockError::Error(error)) => Err(error),
        Err(TryLockError::WouldBlock) => {
            Err(io::Error::new(io::ErrorKind::ResourceBusy, format!("another run is writing {}", dir.display())))
        }
    }
}

fn parent(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}
