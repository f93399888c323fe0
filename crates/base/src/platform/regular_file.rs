//! Opens, reads, hashes and identifies regular files. A path from a user may name a FIFO, an endless device, or a file
//! that is larger than memory. The functions of this module reject all three.

use sha2::{Digest, Sha256};
use std::{
    fs::{File, OpenOptions},
    io::{self, Read},
    os::unix::fs::{MetadataExt, OpenOptionsExt},
    path::Path,
    time::{Duration, SystemTime},
};

/// Opens a file for reading without blocking.
///
/// # Errors
/// A system error occurs, or the path names a directory, a FIFO, a socket or a device.
pub fn open_regular_file(path: &Path) -> io::Result<File> {
    // Without `O_NONBLOCK`, opening a FIFO without a writer would block. Regular files ignore the flag.
    let file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path)?;
    if file.metadata()?.is_file() {
        Ok(file)
    } else {
        Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file"))
    }
}

/// Reads a whole file of at most `max` bytes.
///
/// # Errors
/// The errors of [`open_regular_file`], or the file is larger than `max`.
pub fn read_small_file(path: &Path, max: u64) -> io::Result<Vec<u8>> {
    let file = open_regular_file(path)?;
    let len = file.metadata()?.len();
    let mut bytes = Vec::with_capacity(len.min(max) as usize);
    // The file may grow during the read, so the limit also applies to the bytes read.
    file.take(max + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 <= max { Ok(bytes) } else { Err(too_large(len.max(max + 1), max)) }
}

/// Checks a path: either it does not exist, or it names a regular file of at most `max` bytes.
///
/// # Errors
/// The path names another kind of file, a larger file, or a link to a missing file.
pub fn check_small_file(path: &Path, max: u64) -> io::Result<()> {
    match std::fs::metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound && path.is_symlink() => {
            Err(io::Error::new(error.kind(), "a link to a missing file; download it again"))
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error),
        Ok(meta) if !meta.is_file() => Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file")),
        Ok(meta) if meta.len() > max => Err(too_large(meta.len(), max)),
        Ok(_) => Ok(()),
    }
}

fn too_large(len: u64, max: u64) -> io::Error {
    io::Error::new(io::ErrorKind::FileTooLarge, format!("{len} bytes, but at most {max} are allowed here"))
}

/// The SHA-256 of a file as lower-case hexadecimal digits.
pub fn sha256_file(path: &Path) -> io::Result<String> {
    let mut file = File::open(path)?;
    let mut hash = Sha256::new();
    let mut block = vec![0; 1 << 20];
    loop {
        match file.read(&mut block)? {
            0 => return Ok(hex::encode(hash.finalize())),
            read => hash.update(&block[..read]),
        }
    }
}

/// Identity, size and times of a file. The stamp changes when the file is written to or replaced.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileStamp {
    device: u64,
    inode: u64,
    size: u64,
    /// Modification time: seconds and nanoseconds.
    modified: (i64, i64),
    /// Status change time (ctime). Programs can set the modification time, but not this time.
    changed: (i64, i64),
}

/// The coarsest time stamp resolution of common file systems: one second on HFS+, two seconds on FAT.
const COARSEST_TIMESTAMP: Duration = Duration::from_secs(2);

impl FileStamp {
    /// The stamp of the file at `path`. Follows symbolic links.
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

    /// True if another change at this moment would change the stamp. False if the last change is so recent that both
    /// changes could have the same time stamp.
    pub fn is_settled(&self) -> bool {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let before = now.saturating_sub(COARSEST_TIMESTAMP).as_secs() as i64;
        self.modified.0.max(self.changed.0) < before
    }
}
