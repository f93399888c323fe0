//! Reads snapshot files with direct I/O and computes their checksums while the bytes are in the CPU cache.

use moestro_base::platform::{Access, DataFile, MAX_BLOCK, read_aligned};
use std::{io, path::Path};

/// Number of reader threads.
pub const READERS: usize = 8;
/// Number of bytes in one read, and size of each reader's buffer.
const BUFFER: usize = 512 << 10;
/// Number of bytes per job if several jobs read parts of one file. A multiple of [`BUFFER`].
pub const READ_PART: usize = 16 * BUFFER;
const _: () = assert!(BUFFER.is_multiple_of(MAX_BLOCK));

/// Access mode and block size for the files of one directory.
pub struct DirectReader {
    access: Access,
    block: usize,
}

impl DirectReader {
    /// Uses direct I/O if the file system of `path` supports direct I/O. The file must be larger than `2 * MAX_BLOCK`
    /// bytes.
    pub fn probe(path: &Path) -> io::Result<Self> {
        match DataFile::open(path, Access::Direct) {
            Err(error) if error.kind() == io::ErrorKind::Unsupported => Ok(Self { access: Access::Buffered, block: 1 }),
            file => Ok(Self { access: Access::Direct, block: file?.block() }),
        }
    }

    /// Reads `head` and then `body` from a regular file. Reading starts at offset `at`, a multiple of [`MAX_BLOCK`].
    /// Returns the CRC-32 of `body`, or an error if the length of the file is not `len` bytes.
    pub fn read(
        &self,
        path: &Path,
        len: u64,
        mut at: u64,
        head: &mut [u8],
        mut body: &mut [u8],
        buffer: &mut ReadBuffer,
    ) -> io::Result<crc32fast::Hasher> {
        // Opening a FIFO would block.
        if !std::fs::symlink_metadata(path)?.is_file() {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "it is not a regular file"));
        }
        let file = DataFile::open_with_block(path, self.access, self.block)?;
        if file.len() != len {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "its size is wrong"));
        }
        let mut checksum = crc32fast::Hasher::new();
        let mut head = Some(head);
        while head.is_some() || !body.is_empty() {
            let head_len = head.as_ref().map_or(0, |head| head.len());
            let bytes = buffer.fill(&file, at, (head_len + body.len()).min(BUFFER))?;
            at += bytes.len() as u64;
            let (first, rest) = bytes.split_at(head_len);
            if let Some(head) = head.take() {
                head.copy_from_slice(first);
            }
            checksum.update(rest);
            let (to, left) = body.split_at_mut(rest.len());
            to.copy_from_slice(rest);
            body = left;
        }
        Ok(checksum)
    }
}

/// Page-aligned memory, as direct reads require.
pub struct ReadBuffer(memmap2::MmapMut);

impl ReadBuffer {
    pub fn new() -> io::Result<Self> {
        Ok(Self(memmap2::MmapMut::map_anon(BUFFER)?))
    }

    /// The next `len` bytes of the file, at most [`BUFFER`].
    fn fill(&mut self, file: &DataFile, at: u64, len: usize) -> io::Result<&[u8]> {
        let into = self.0.get_mut(..len.next_multiple_of(file.block())).unwrap_or_default();
        read_aligned(into, len, file.block(), |rest, done| file.read_at(rest, at + done as u64))?;
        self.0.get(..len).ok_or_else(|| io::ErrorKind::InvalidInput.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_part_is_read_with_its_checksum() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        let bytes: Vec<u8> = (0..2 * BUFFER + MAX_BLOCK + 77).map(|i| (i * 31 + i / 251) as u8).collect();
        std::fs::write(&path, &bytes).unwrap();
        let direct = DirectReader::probe(&path).unwrap();
        for reader in [direct, DirectReader { access: Access::Buffered, block: 1 }] {
            for (at, before) in [(0, 64), (MAX_BLOCK, 0), (BUFFER, 5), (2 * BUFFER, 64)] {
                for end in [at + before, at + before + 1, at + BUFFER, at + BUFFER + 1, bytes.len()] {
                    if end < at + before || end > bytes.len() {
                        continue;
                    }
                    let mut head = vec![0; before];
                    let mut body = vec![0; end - at - before];
                    let mut buffer = ReadBuffer::new().unwrap();
                    let len = bytes.len() as u64;
                    let hash = reader.read(&path, len, at as u64, &mut head, &mut body, &mut buffer).unwrap();
                    assert!(head == bytes[at..at + before] && body == bytes[at + before..end], "{at} {before} {end}");
                    assert_eq!(hash.finalize(), crc32fast::hash(&body));
                }
            }
            let error = |path: &Path, len: usize, at: usize, head: &mut [u8], body: &mut [u8]| {
                let buffer = &mut ReadBuffer::new().unwrap();
                reader.read(path, len as u64, at as u64, head, body, buffer).unwrap_err()
            };
            let beyond = error(&path, bytes.len(), 2 * BUFFER, &mut [0; MAX_BLOCK], &mut [0; 100]);
            assert_eq!(beyond.kind(), io::ErrorKind::UnexpectedEof);
            assert_eq!(error(&path, 5, 0, &mut [], &mut [0]).to_string(), "its size is wrong");
            assert_eq!(error(dir.path(), 5, 0, &mut [], &mut [0]).to_string(), "it is not a regular file");
        }
    }
}
