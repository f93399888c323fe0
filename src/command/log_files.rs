//! Log files of bounded size: `moestro.log` is the current file, and `moestro.log.1` and higher numbers are older
//! files, newest first. launchd writes stderr to `stderr.log` in the same directory. That file has panic messages, and
//! errors from before the log is open.

use std::{
    fs::{self, File, TryLockError},
    io::{self, Write},
    path::{Path, PathBuf},
};

const NAME: &str = "moestro.log";
const STDERR: &str = "stderr.log";
/// Maximum number of bytes of one log file.
const MAX_BYTES: u64 = 16 << 20;
/// Maximum number of log files.
const MAX_FILES: usize = 8;

/// True if a running server writes to this log, which is a file or the directory of [`LogFiles`]. Then it is locked.
pub fn is_log_in_use(log: &Path) -> bool {
    File::open(log).is_ok_and(|log| matches!(log.try_lock(), Err(TryLockError::WouldBlock)))
}

/// A writer of whole lines. If the current file is full, it starts a new file and deletes the oldest file.
pub struct LogFiles {
    dir: PathBuf,
    file: File,
    bytes: u64,
    max_bytes: u64,
    /// The locked directory. If the file system has no locks, this is an unlocked file.
    _dir_lock: File,
}

impl LogFiles {
    /// Opens the log in `dir`. Creates the directory if needed. An existing log is continued.
    ///
    /// # Errors
    /// The directory or the file cannot be created or written.
    pub fn open(dir: &Path) -> io::Result<Self> {
        Self::with_size(dir, MAX_BYTES)
    }

    fn with_size(dir: &Path, max_bytes: u64) -> io::Result<Self> {
        fs::create_dir_all(dir)?;
        let dir_lock = File::open(dir)?;
        let _ = dir_lock.try_lock_shared();
        let (file, bytes) = append(dir)?;
        let files = Self { dir: dir.into(), file, bytes, max_bytes, _dir_lock: dir_lock };
        files.bound_stderr();
        Ok(files)
    }

    /// Empties the file to which launchd writes stderr if that file is too large. Each start of the server appends to
    /// the file, even a failed start.
    fn bound_stderr(&self) {
        let Ok(file) = File::options().write(true).open(self.dir.join(STDERR)) else { return };
        if file.metadata().is_ok_and(|metadata| metadata.is_file() && metadata.len() > self.max_bytes) {
            let _ = file.set_len(0);
        }
    }

    /// Increments the number of each file and opens a new file.
    fn rotate(&mut self) -> io::Result<()> {
        let numbered = |number: usize| match number {
            0 => self.dir.join(NAME),
            _ => self.dir.join(format!("{NAME}.{number}")),
        };
        for number in (0..MAX_FILES - 1).rev() {
            match fs::rename(numbered(number), numbered(number + 1)) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
        }
        (self.file, self.bytes) = append(&self.dir)?;
        self.bound_stderr();
        Ok(())
    }
}

/// Opens the current file for appending. Returns the file and its size.
fn append(dir: &Path) -> io::Result<(File, u64)> {
    let file = File::options().create(true).append(true).open(dir.join(NAME))?;
    let bytes = file.metadata()?.len();
    Ok((file, bytes))
}

impl Write for LogFiles {
    /// Writes a line. If the line does not fit into the current file, starts a new file first.
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        if self.bytes > 0 && self.bytes + line.len() as u64 > self.max_bytes {
            self.rotate()?;
        }
        let written = self.file.write(line)?;
        self.bytes += written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    /// Names and sizes of the files in a directory, sorted by name.
    fn sizes(dir: &Path) -> Vec<(String, u64)> {
        let files = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap());
        let mut sizes: Vec<_> =
            files.map(|file| (file.file_name().into_string().unwrap(), file.metadata().unwrap().len())).collect();
        sizes.sort();
        sizes
    }

    #[test]
    fn log_size_is_bounded() {
        let dir = tempfile::tempdir().unwrap();
        let mut log = LogFiles::with_size(dir.path(), 1000).unwrap();
        for number in 0..10_000 {
            log.write_all(format!("{number:099}\n").as_bytes()).unwrap();
        }
        let files = sizes(dir.path());
        assert_eq!(files.len(), MAX_FILES, "{files:?}");
        assert!(files.iter().all(|(_, bytes)| *bytes == 1000), "{files:?}");
        let last = |name| fs::read_to_string(dir.path().join(name)).unwrap().lines().last().unwrap().parse::<u64>();
        assert_eq!(last(NAME), Ok(9999));
        assert_eq!(last("moestro.log.1"), Ok(9989));
        assert_eq!(last("moestro.log.7"), Ok(9929));
    }

    #[test]
    fn open_log_is_in_use() {
        let dir = tempfile::tempdir().unwrap();
        let logs = [(); 2].map(|()| LogFiles::open(dir.path()).unwrap());
        assert!(is_log_in_use(dir.path()));
        drop(logs);
        assert!(!is_log_in_use(dir.path()) && !is_log_in_use(&dir.path().join("none")));
    }

    #[test]
    fn restart_continues_the_log() {
        let dir = tempfile::tempdir().unwrap();
        for _ in 0..5 {
            LogFiles::with_size(dir.path(), 10).unwrap().write_all(b"12345").unwrap();
        }
        let expected = [(NAME, 5), ("moestro.log.1", 10), ("moestro.log.2", 10)].map(|(name, n)| (name.to_owned(), n));
        assert_eq!(sizes(dir.path()), expected);
    }

    #[test]
    fn large_stderr_file_is_emptied() {
        let dir = tempfile::tempdir().unwrap();
        let stderr = dir.path().join(STDERR);
        let len = || fs::metadata(&stderr).unwrap().len();
        fs::write(&stderr, "1234567890").unwrap();
        let mut log = LogFiles::with_size(dir.path(), 10).unwrap();
        assert_eq!(len(), 10);
        let mut appended = File::options().append(true).open(&stderr).unwrap();
        appended.write_all(b"1").unwrap();
        for _ in 0..2 {
            log.write_all(b"1234567890").unwrap();
        }
        assert_eq!(len(), 0, "emptied at a rotation");
        appended.write_all(b"12345678901").unwrap();
        LogFiles::with_size(dir.path(), 10).unwrap();
        assert_eq!(len(), 0, "emptied at a start");
    }

    #[test]
    fn failed_rotation_keeps_the_bound() {
        let dir = tempfile::tempdir().unwrap();
        let mut log = LogFiles::with_size(dir.path(), 10).unwrap();
        for _ in 0..MAX_FILES - 1 {
            log.write_all(b"1234567890").unwrap();
        }
        // Renaming fails, because a file cannot replace a directory, even for root.
        let last = dir.path().join(format!("{NAME}.{}", MAX_FILES - 1));
        fs::create_dir_all(last.join("in-the-way")).unwrap();
        assert!(log.write(b"more").is_err());
        assert_eq!(fs::read(dir.path().join(NAME)).unwrap(), b"1234567890");
        fs::remove_dir_all(last).unwrap();
        log.write_all(b"more").unwrap();
        assert_eq!(fs::read(dir.path().join(NAME)).unwrap(), b"more");
    }

    #[test]
    fn unusable_directory_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("file"), "").unwrap();
        assert!(LogFiles::open(&dir.path().join("file/logs")).is_err());
        let mode = fs::metadata(dir.path()).unwrap().permissions().mode();
        assert_eq!(mode & 0o700, 0o700);
        LogFiles::open(&dir.path().join("new/logs")).unwrap();
    }
}
