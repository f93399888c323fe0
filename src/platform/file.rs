//! Files as the expert reader needs them: positional reads that leave nothing in the page cache.

use std::{
    fs, io,
    os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt},
    path::{Path, PathBuf},
};

/// Bytes read are kept by the reader's buffer alone, or by the page cache too.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// Past the page cache: `O_DIRECT` on Linux, `F_NOCACHE` on macOS.
    Direct,
    /// Through the page cache, without read-ahead.
    Buffered,
}

/// The largest block a direct read may have to be aligned to.
pub const MAX_BLOCK: usize = 4096;

/// One file held open for reading. It is never written to.
pub struct File {
    file: fs::File,
    path: PathBuf,
    len: u64,
    block: usize,
    modified: (i64, i64),
}

impl File {
    /// Opens `path`. `Access::Direct` fails with `ErrorKind::Unsupported` where the file system cannot do it.
    pub fn open(path: &Path, access: Access) -> io::Result<Self> {
        Self::opened(path, access, |file| match access {
            Access::Direct => os::direct(file),
            Access::Buffered => os::buffered(file),
        })
    }

    /// Opens `path` like another file of its directory, whose block is known: nothing is read to find it.
    pub fn open_as(path: &Path, access: Access, block: usize) -> io::Result<Self> {
        Self::opened(path, access, |file| {
            match access {
                Access::Direct => os::uncached(file)?,
                Access::Buffered => drop(os::buffered(file)?),
            }
            Ok(block)
        })
    }

    fn opened(path: &Path, access: Access, block: impl Fn(&fs::File) -> io::Result<usize>) -> io::Result<Self> {
        let mut options = fs::OpenOptions::new();
        // Opening a pipe would wait for somebody to write to it otherwise.
        let flags = if access == Access::Direct { os::DIRECT } else { 0 };
        options.read(true).custom_flags(flags | libc::O_NONBLOCK);
        let file = options.open(path).map_err(|error| match error.raw_os_error() {
            Some(libc::EINVAL) if access == Access::Direct => io::Error::from(io::ErrorKind::Unsupported),
            _ => error,
        })?;
        let meta = file.metadata()?;
        if !meta.is_file() {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file"));
        }
        let block = block(&file)?;
        Ok(Self { file, path: path.to_owned(), len: meta.len(), block, modified: (meta.mtime(), meta.mtime_nsec()) })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Bytes in the file when it was opened.
    pub fn len(&self) -> u64 {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Offset, length and memory address of a read must be multiples of this power of two; 1 if anything goes.
    pub fn block(&self) -> usize {
        self.block
    }

    /// One positional read; may return fewer bytes than asked for, 0 at the end of the file.
    pub fn read_at(&self, into: &mut [u8], offset: u64) -> io::Result<usize> {
        self.file.read_at(into, offset)
    }

    /// Fails if the file was written to since it was opened: bytes read before and after would not belong together. A
    /// file replaced by renaming another over it goes unnoticed and does no harm: the open one lives on.
    pub fn check_unchanged(&self) -> io::Result<()> {
        let meta = self.file.metadata()?;
        if (meta.mtime(), meta.mtime_nsec()) == self.modified && meta.len() == self.len {
            return Ok(());
        }
        Err(io::Error::other("the file was changed while it was being served; restart to use it"))
    }

    /// Asks the system to drop cached pages of a range, so that a following read measures the disk.
    pub fn drop_cached(&self, offset: u64, len: usize) {
        os::drop_cached(&self.file, offset, len);
    }
}

#[cfg(target_os = "linux")]
mod os {
    use super::MAX_BLOCK;
    use std::{
        fs, io,
        os::{fd::AsRawFd, unix::fs::FileExt},
    };

    pub const DIRECT: i32 = libc::O_DIRECT;

    /// A flag at opening has done it.
    pub fn uncached(_: &fs::File) -> io::Result<()> {
        Ok(())
    }

    /// The alignment direct reads of `file` need, found by trying: what `statx` and the block device say is not always
    /// what the file system then takes.
    pub fn direct(file: &fs::File) -> io::Result<usize> {
        // Room for a buffer that is aligned to `block` and to nothing larger.
        let mut room = vec![0u8; 4 * MAX_BLOCK];
        let base = room.as_ptr() as usize;
        for block in [512, 1024, 2048, MAX_BLOCK] {
            let start = (base + block).next_multiple_of(2 * block) + block - base;
            let Some(into) = room.get_mut(start..start + block) else { continue };
            match file.read_at(into, block as u64) {
                Ok(_) => return Ok(block),
                Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {}
                Err(error) => return Err(error),
            }
        }
        Err(io::ErrorKind::Unsupported.into())
    }

    /// Read-ahead off: an expert is read whole or not at all, and its neighbours are not wanted.
    pub fn buffered(file: &fs::File) -> io::Result<usize> {
        advise(file, 0, 0, libc::POSIX_FADV_RANDOM);
        Ok(1)
    }

    pub fn drop_cached(file: &fs::File, offset: u64, len: usize) {
        advise(file, offset, len, libc::POSIX_FADV_DONTNEED);
    }

    fn advise(file: &fs::File, offset: u64, len: usize, advice: i32) {
        // SAFETY: plain system call on a file that is open; it is advice, so its result does not matter.
        unsafe { libc::posix_fadvise(file.as_raw_fd(), offset as libc::off_t, len as libc::off_t, advice) };
    }
}

#[cfg(target_os = "macos")]
mod os {
    use std::{fs, io, os::fd::AsRawFd};

    pub const DIRECT: i32 = 0;

    /// `F_NOCACHE` takes any alignment (partial pages pass through the cache), so pieces lie where kernels like them.
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

    fn set(file: &fs::File, what: i32, value: i32) -> io::Result<()> {
        // SAFETY: plain system call on a file that is open.
        if unsafe { libc::fcntl(file.as_raw_fd(), what, value) } == -1 {
            return Err(io::Error::last_os_error());
        }
        Ok(())
    }

    /// macOS has no call that drops one file's pages.
    pub fn drop_cached(_: &fs::File, _: u64, _: usize) {}
}

#[cfg(not(any(target_os = "linux", target_os = "macos")))]
mod os {
    use std::{fs, io};

    pub const DIRECT: i32 = 0;

    pub fn direct(_: &fs::File) -> io::Result<usize> {
        Err(io::ErrorKind::Unsupported.into())
    }

    pub fn uncached(_: &fs::File) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    pub fn buffered(_: &fs::File) -> io::Result<usize> {
        Ok(1)
    }

    pub fn drop_cached(_: &fs::File, _: u64, _: usize) {}
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    fn file(len: usize) -> (tempfile::NamedTempFile, Vec<u8>) {
        let bytes: Vec<u8> = (0..len).map(|i| (i * 31 + i / 251) as u8).collect();
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(&bytes).unwrap();
        file.as_file().sync_all().unwrap();
        (file, bytes)
    }

    #[test]
    fn both_ways_of_reading_give_the_files_bytes() {
        let (named, bytes) = file(3 * MAX_BLOCK + 100);
        for access in [Access::Direct, Access::Buffered] {
            let opened = match File::open(named.path(), access) {
                Err(error) if error.kind() == io::ErrorKind::Unsupported => continue,
                other => other.unwrap(),
            };
            let mut map = memmap2::MmapMut::map_anon(4 * MAX_BLOCK).unwrap();
            let room = &mut map[..];
            let got = opened.read_at(room, MAX_BLOCK as u64).unwrap();
            assert_eq!(&room[..got], &bytes[MAX_BLOCK..], "{access:?}: up to the ragged end");
            assert_eq!(opened.len(), bytes.len() as u64);
        }
    }

    #[test]
    fn a_file_written_to_is_noticed_and_a_renamed_one_is_not() {
        let (named, _) = file(1000);
        let opened = File::open(named.path(), Access::Buffered).unwrap();
        opened.check_unchanged().unwrap();
        let (other, _) = file(500);
        let path = named.path().to_owned();
        fs::rename(other.path(), &path).unwrap();
        opened.check_unchanged().unwrap();

        let again = File::open(&path, Access::Buffered).unwrap();
        fs::OpenOptions::new().append(true).open(&path).unwrap().write_all(b"x").unwrap();
        assert!(again.check_unchanged().is_err());
    }

    #[test]
    fn a_directory_is_no_file() {
        assert!(File::open(Path::new("/"), Access::Buffered).is_err());
    }
}
