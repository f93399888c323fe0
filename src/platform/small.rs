//! Files that are read whole: a path may lead to a pipe that nobody writes to, a device without an end, or a file
//! larger than memory.

use std::{
    fs::{File, OpenOptions},
    io::{self, Read},
    os::unix::fs::{MetadataExt, OpenOptionsExt},
    path::Path,
    time::{Duration, SystemTime},
};

/// Opens a file for reading without waiting for anybody.
///
/// # Errors
/// The system's; a directory, a pipe, a socket or a device.
pub fn open_regular(path: &Path) -> io::Result<File> {
    // Opening a pipe would wait for a writer otherwise. Regular files do not know the flag.
    let file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path)?;
    match file.metadata()?.is_file() {
        true => Ok(file),
        false => Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file")),
    }
}

/// All of a file of at most `most` bytes.
///
/// # Errors
/// As [`open_regular`]; more bytes than that.
pub fn read_small(path: &Path, most: u64) -> io::Result<Vec<u8>> {
    let file = open_regular(path)?;
    let len = file.metadata()?.len();
    let mut bytes = Vec::with_capacity(len.min(most) as usize);
    // It may grow while it is read.
    file.take(most + 1).read_to_end(&mut bytes)?;
    match bytes.len() as u64 <= most {
        true => Ok(bytes),
        false => Err(too_large(len.max(most + 1), most)),
    }
}

/// Accepts a `path` to a file of at most `most` bytes, or to nothing at all.
///
/// # Errors
/// It leads to something else, or to more.
pub fn check_small(path: &Path, most: u64) -> io::Result<()> {
    match std::fs::metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error),
        Ok(meta) if !meta.is_file() => Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file")),
        Ok(meta) if meta.len() > most => Err(too_large(meta.len(), most)),
        Ok(_) => Ok(()),
    }
}

fn too_large(len: u64, most: u64) -> io::Error {
    io::Error::new(io::ErrorKind::FileTooLarge, format!("{len} bytes, and at most {most} are expected here"))
}

/// A file as the system describes it. Whatever is written to the file or put in its place has another one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stamp {
    device: u64,
    inode: u64,
    size: u64,
    /// Seconds and nanoseconds.
    modified: (i64, i64),
    /// Of the last change to contents or description: programs can set [`Stamp::modified`] back, and not this.
    changed: (i64, i64),
}

/// A file system may count time in seconds (HFS+) or in two (FAT).
const COARSEST: Duration = Duration::from_secs(2);

impl Stamp {
    /// Of the file that `path` leads to.
    pub fn of(path: &Path) -> io::Result<Self> {
        let meta = std::fs::metadata(path)?;
        Ok(Self {
            device: meta.dev(),
            inode: meta.ino(),
            size: meta.size(),
            modified: (meta.mtime(), meta.mtime_nsec()),
            changed: (meta.ctime(), meta.ctime_nsec()),
        })
    }

    /// True if the last change is so long ago that another one now would have another time.
    pub fn is_settled(&self) -> bool {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let before = now.saturating_sub(COARSEST).as_secs() as i64;
        self.modified.0.max(self.changed.0) < before
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{fs, os::unix::net::UnixListener, time::Instant};

    #[test]
    fn neither_pipes_nor_devices_nor_giants_are_read() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        let pipe = std::ffi::CString::new(at("pipe").to_str().unwrap()).unwrap();
        // SAFETY: a plain system call on a string that lives.
        assert_eq!(unsafe { libc::mkfifo(pipe.as_ptr(), 0o600) }, 0);
        let _listener = UnixListener::bind(at("socket")).unwrap();
        let begin = Instant::now();
        for path in [at("pipe"), at("socket"), "/dev/zero".into(), "/dev/null".into(), "/".into()] {
            assert!(read_small(&path, 1 << 20).is_err(), "{}", path.display());
            assert!(check_small(&path, 1 << 20).is_err(), "{}", path.display());
        }
        let large = File::create(at("large")).unwrap();
        large.set_len(1 << 40).unwrap();
        let error = read_small(&at("large"), 100).unwrap_err().to_string();
        assert!(error.contains("1099511627776 bytes"), "{error}");
        assert!(begin.elapsed() < Duration::from_secs(2));
        fs::write(at("small"), [1; 100]).unwrap();
        assert_eq!(read_small(&at("small"), 100).unwrap(), [1; 100]);
        assert!(read_small(&at("small"), 99).is_err() && check_small(&at("small"), 99).is_err());
        check_small(&at("small"), 100).unwrap();
        check_small(&at("none"), 0).unwrap();
        assert_eq!(read_small(&at("none"), 1).unwrap_err().kind(), io::ErrorKind::NotFound);
    }
}
