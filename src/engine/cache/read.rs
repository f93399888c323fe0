//! Reading files past the page cache, pieces of several at once: as many as the disk wants under way, each summed where it
//! lands, in a near cache.

use crate::platform::{Access, DataFile, MAX_BLOCK};
use std::{io, path::Path};

/// Jobs done at once.
pub const READERS: usize = 8;
/// Bytes of one read, and of the room that each reader has.
const PIECE: usize = 512 << 10;

/// The way in which a directory's files are read.
pub struct Reader {
    access: Access,
    block: usize,
}

impl Reader {
    /// Past the page cache, if `tried` can be read so: a file of more than two of the largest blocks.
    pub fn trying(tried: &Path) -> io::Result<Self> {
        let file = match DataFile::open(tried, Access::Direct) {
            Err(error) if error.kind() == io::ErrorKind::Unsupported => None,
            other => Some(other?),
        };
        Ok(match file {
            Some(file) => Self { access: Access::Direct, block: file.block() },
            None => Self { access: Access::Buffered, block: 1 },
        })
    }

    /// Reads `head` and then `body` from byte `at`, a multiple of the largest block, of a file of `len` bytes. Returns the
    /// CRC-32 of `body`.
    pub fn read(
        &self,
        path: &Path,
        len: u64,
        mut at: u64,
        head: &mut [u8],
        mut body: &mut [u8],
        room: &mut Room,
    ) -> io::Result<crc32fast::Hasher> {
        let file = DataFile::open_with_block(path, self.access, self.block)?;
        if file.len() != len {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "its size is wrong"));
        }
        let mut hash = crc32fast::Hasher::new();
        let mut head = Some(head);
        while head.is_some() || !body.is_empty() {
            let before = head.as_ref().map_or(0, |head| head.len());
            let bytes = room.fill(&file, at, (before + body.len()).min(PIECE))?;
            at += bytes.len() as u64;
            let (first, rest) = bytes.split_at(before);
            if let Some(head) = head.take() {
                head.copy_from_slice(first);
            }
            hash.update(rest);
            let (to, left) = body.split_at_mut(rest.len());
            to.copy_from_slice(rest);
            body = left;
        }
        Ok(hash)
    }
}

/// Memory that a direct read may go to.
pub struct Room(memmap2::MmapMut);

impl Room {
    pub fn new() -> io::Result<Self> {
        Ok(Self(memmap2::MmapMut::map_anon(PIECE)?))
    }

    /// The file's next `need` bytes, at most [`PIECE`].
    fn fill(&mut self, file: &DataFile, at: u64, need: usize) -> io::Result<&[u8]> {
        let (mut have, want) = (0, need.next_multiple_of(file.block()));
        while have < need {
            let into = self.0.get_mut(have..want).unwrap_or_default();
            let got = match file.read_at(into, at + have as u64) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                other => other?,
            };
            // A direct read goes on at a block's start. Less than a block more than before is the file's end.
            let reached = if have + got >= need { need } else { (have + got) / file.block() * file.block() };
            if reached == have {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            have = reached;
        }
        self.0.get(..need).ok_or_else(|| io::ErrorKind::InvalidInput.into())
    }
}

/// Bytes of a file that one job reads, where several read one: a multiple of [`PIECE`].
pub const SHARE: usize = 16 * PIECE;
const _: () = assert!(PIECE.is_multiple_of(MAX_BLOCK));

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_part_of_a_file_comes_with_its_sum() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        let bytes: Vec<u8> = (0..2 * PIECE + MAX_BLOCK + 77).map(|i| (i * 31 + i / 251) as u8).collect();
        std::fs::write(&path, &bytes).unwrap();
        let tried = Reader::trying(&path).unwrap();
        for reader in [tried, Reader { access: Access::Buffered, block: 1 }] {
            for (at, before) in [(0, 64), (MAX_BLOCK, 0), (PIECE, 5), (2 * PIECE, 64)] {
                for end in [at + before, at + before + 1, at + PIECE, at + PIECE + 1, bytes.len()] {
                    if end < at + before || end > bytes.len() {
                        continue;
                    }
                    let (mut head, mut body) = (vec![0; before], vec![0; end - at - before]);
                    let mut room = Room::new().unwrap();
                    let len = bytes.len() as u64;
                    let hash = reader.read(&path, len, at as u64, &mut head, &mut body, &mut room).unwrap();
                    assert!(head == bytes[at..at + before] && body == bytes[at + before..end], "{at} {before} {end}");
                    assert_eq!(hash.finalize(), crc32fast::hash(&body));
                }
            }
            let mut beyond = vec![0; 100];
            let result = reader.read(
                &path,
                bytes.len() as u64,
                2 * PIECE as u64,
                &mut [0; MAX_BLOCK],
                &mut beyond,
                &mut Room::new().unwrap(),
            );
            assert_eq!(result.unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
            let result = reader.read(&path, 5, 0, &mut [], &mut [0], &mut Room::new().unwrap());
            assert_eq!(result.unwrap_err().to_string(), "its size is wrong");
        }
    }
}
