//! [`DataFile`]: a file opened for positional reads, with or without the page cache.

use std::{
    fs, io,
    os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt},
    path::{Path, PathBuf},
};

/// The use of the page cache by reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// Bypasses the page cache: `O_DIRECT` on Linux, `F_NOCACHE` on macOS.
    Direct,
    /// `F_NOCACHE` (macOS) with reads of any alignment. The data is copied through the page cache, which does not keep
    /// it.
    Uncached,
    /// Reads through the page cache, without read-ahead.
    Buffered,
}

/// The largest alignment that a direct read may need, in bytes.
pub const MAX_BLOCK: usize = 4096;

/// A file opened for reading.
pub struct DataFile {
    file: fs::File,
    path: PathBuf,
    len: u64,
    block: usize,
    /// Modification time when the file was opened: seconds and nanoseconds.
    modified: (i64, i64),
}

impl DataFile {
    /// Opens `path`. With [`Access::Direct`], fails with `ErrorKind::Unsupported` if the file system does not support
    /// direct I/O.
    pub fn open(path: &Path, access: Access) -> io::Result<Self> {
        Self::open_as(path, access, None)
    }

    /// Opens `path` with a block size that is known from another file in the same directory. A known block size saves a
    /// test read.
    pub fn open_with_block(path: &Path, access: Access, block: usize) -> io::Result<Self> {
        Self::open_as(path, access, Some(block))
    }

    fn open_as(path: &Path, access: Access, block: Option<usize>) -> io::Result<Self> {
        let mut options = fs::OpenOptions::new();
        // Without `O_NONBLOCK`, opening a FIFO without a writer would block.
        let flags = if access == Access::Buffered { 0 } else { os::DIRECT };
        options.read(true).custom_flags(flags | libc::O_NONBLOCK);
        let file = options.open(path).map_err(|error| match error.raw_os_error() {
            Some(libc::EINVAL) if access != Access::Buffered => io::Error::from(io::ErrorKind::Unsupported),
            _ => error,
        })?;
        let meta = file.metadata()?;
        if !meta.is_file() {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file"));
        }
        let block = match block {
            _ if access == Access::Buffered => os::buffered(&file)?,
            None => os::direct(&file)?,
            Some(block) => os::uncached(&file).map(|()| block)?,
        };
        Ok(Self { file, path: path.to_owned(), len: meta.len(), block, modified: (meta.mtime(), meta.mtime_nsec()) })
    }

    /// Opens `path` for direct I/O, or for buffered I/O if the file system does not support direct I/O.
    pub fn open_uncached(path: &Path) -> io::Result<Self> {
        match Self::open(path, Access::Direct) {
            Err(error) if error.kind() == io::ErrorKind::Unsupported => Self::open(path, Access::Buffered),
            other => other,
        }
    }

    /// Reads `len` bytes at any offset. Reads whole blocks into `space`, a buffer that the caller reuses.
    ///
    /// # Errors
    /// A system error, `UnexpectedEof` if the file ends too early, or an error if the file was modified after it was
    /// opened.
    pub fn read_range<'a>(&self, offset: u64, len: usize, space: &'a mut Vec<u8>) -> io::Result<&'a [u8]> {
        let start = offset / self.block as u64 * self.block as u64;
        let skip = (offset - start) as usize;
        let whole = (skip + len).next_multiple_of(self.block);
        space.resize((whole + MAX_BLOCK).max(space.len()), 0);
        let aligned = space.as_ptr().align_offset(MAX_BLOCK);
        let into = &mut space[aligned..aligned + whole];
        read_aligned(into, skip + len, self.block, |into, at| {
            let got = self.read_at(into, start + at as u64)?;
            self.check_unchanged()?;
            Ok(got)
        })?;
        Ok(&into[skip..skip + len])
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Size in bytes when the file was opened.
    #[allow(clippy::len_without_is_empty)] // No code asks whether a file is empty.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Required alignment of offset, length and memory address of every read. A power of two, which is 1 if there is no
    /// requirement.
    pub fn block(&self) -> usize {
        self.block
    }

    /// Performs one positional read. Returns the number of bytes read, which is 0 at the end of the file.
    pub fn read_at(&self, into: &mut [u8], offset: u64) -> io::Result<usize> {
        self.file.read_at(into, offset)
    }

    /// Fails if the file was modified after it was opened, because bytes from before and after the change are
    /// inconsistent. Replacing the file by a rename is harmless and not detected, since the open descriptor refers to
    /// the old file.
    pub fn check_unchanged(&self) -> io::Result<()> {
        let meta = self.file.metadata()?;
        if (meta.mtime(), meta.mtime_nsec()) == self.modified && meta.len() == self.len {
            return Ok(());
        }
        Err(io::Error::other("the file changed while it was being served; restart to use the new contents"))
    }

    /// Asks the system to drop the cached pages of a range, so that the next read comes from the disk.
    pub fn drop_cached(&self, offset: u64, len: usize) {
        os::drop_cached(&self.file, offset, len);
    }
}

/// Fills the first `needed` bytes of `into` by calling `read(buffer, start)` repeatedly. After a short read, the next
/// read starts at the last block boundary, because a direct read at another offset fails with EINVAL. The length of
/// `into` must be a multiple of `block`.
///
/// # Errors
/// An error of `read` other than an interruption, or `UnexpectedEof` if a read returns less than one new block.
pub fn read_aligned(
    into: &mut [u8],
    needed: usize,
    block: usize,
    mut read: impl FnMut(&mut [u8], usize) -> io::Result<usize>,
) -> io::Result<()> {
    let mut have = 0;
    while let Some(rest) = into.get_mut(have..).filter(|_| have < needed) {
        let got = match read(rest, have) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            other => other?,
        };
        if have + got >= needed {
            break;
        }
        let reached = (have + got) / block * block;
        if reached == have {
            let text = format!("unexpected end of file: {} bytes are missing", needed - have - got);
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, text));
        }
        have = reached;
    }
    Ok(())
}

#[cfg(target_os = "linux")]
mod os {
    use super::MAX_BLOCK;
    use std::{
        fs, io,
        os::{fd::AsRawFd, unix::fs::FileExt},
    };

    pub const DIRECT: i32 = libc::O_DIRECT;

    /// Does nothing, since the file was opened with `O_DIRECT`.
    pub fn uncached(_: &fs::File) -> io::Result<()> {
        Ok(())
    }

    /// Finds the required alignment of direct reads by test reads. The alignments that `statx` and the block device
    /// report are not always correct.
    pub fn direct(file: &fs::File) -> io::Result<usize> {
        // This is large enough to contain an address that is a multiple of `block` but not of `2 * block`.
        let mut space = vec![0u8; 4 * MAX_BLOCK];
        let base = space.as_ptr() as usize;
        for block in [512, 1024, 2048, MAX_BLOCK] {
            let start = (base + block).next_multiple_of(2 * block) + block - base;
            let Some(into) = space.get_mut(start..start + block) else { continue };
            match file.read_at(into, block as u64) {
                Ok(_) => return Ok(block),
                Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {}
                Err(error) => return Err(error),
            }
        }
        Err(io::ErrorKind::Unsupported.into())
    }

    /// Disables read-ahead. Each read covers a whole expert, and the bytes after the expert are usually not needed.
    pub fn buffered(file: &fs::File) -> io::Result<usize> {
        advise(file, 0, 0, libc::POSIX_FADV_RANDOM);
        Ok(1)
    }

    pub fn drop_cached(file: &fs::File, offset: u64, len: usize) {
        advise(file, offset, len, libc::POSIX_FADV_DONTNEED);
    }

    fn advise(file: &fs::File, offset: u64, len: usize, advice: i32) {
        // SAFETY: a system call without pointers on an open descriptor. The result of the advice is ignored.
        unsafe { libc::posix_fadvise(file.as_raw_fd(), offset as libc::off_t, len as libc::off_t, advice) };
    }
}

#[cfg(target_os = "macos")]
mod os {
    use std::{fs, io, os::fd::AsRawFd};

    pub const DIRECT: i32 = 0;

    /// Sets `F_NOCACHE`, which accepts reads of any alignment. macOS bypasses the page cache only if file offset and
    /// address are multiples of 4096. macOS copies other reads through the cache and then drops the pages. Only packs
    /// have aligned records: the pieces of a checkpoint have arbitrary file offsets, but GPU kernels need aligned
    /// addresses.
    pub fn direct(file: &fs::File) -> io::Result<usize> {
        uncached(file)?;
        Ok(1)
    }

    pub fn uncached(file: &fs::File) -> io::Result<()> {
        set(file, libc::F_NOCACHE, 1)?;
        set(file, libc::F_RDAHEAD, 0)
    }

    pub fn buffered(file: &fs::File) -> io::Result<usize> {
        set(file, libc::F_RDAHEAD, 0)?;
        Ok(1)
    }

    fn set(file: &fs::File, command: i32, value: i32) -> io::Result<()> {
        // SAFETY: a system call without pointers on an open descriptor.
        if unsafe { libc::fcntl(file.as_raw_fd(), command, value) } == -1 {
            return Err(io::Error::last_os_error());
        }
        Ok(())
    }

    /// Drops cached pages of a range by invalidating a shared mapping of the range. macOS has no call that does this
    /// with a descriptor.
    pub fn drop_cached(file: &fs::File, offset: u64, len: usize) {
        // SAFETY: a system call without pointers.
        let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) }.max(1) as u64;
        let start = offset / page * page;
        let len = (offset - start) as usize + len;
        if len == 0 {
            return;
        }
        // SAFETY: creates a new mapping of an open file, never accesses it, and unmaps it once.
        unsafe {
            let read = libc::PROT_READ;
            let shared = libc::MAP_SHARED;
            let at = libc::mmap(std::ptr::null_mut(), len, read, shared, file.as_raw_fd(), start as libc::off_t);
            if at != libc::MAP_FAILED {
                // If this fails, pages only stay in the cache, so the result is ignored.
                libc::msync(at, len, libc::MS_INVALIDATE);
                libc::munmap(at, len);
            }
        }
    }
}
