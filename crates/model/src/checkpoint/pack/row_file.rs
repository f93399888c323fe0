//! [`PackedRows`]: a file of a pack with the rows of a table. Reading a row takes one aligned read.
//!
//! ```text
//! header block:  a JSON object, padded with spaces
//! other blocks:  as many whole rows as fit, zeros, and a CRC-32 in the last 4 bytes (little-endian)
//! ```
//! The size of a block is the smallest multiple of 4 KiB that has room for a row and the CRC. The CRC-32 covers the
//! block's number (8 bytes, little-endian) and all bytes of the block before the CRC. Like the manifest of experts, the
//! header contains the checkpoint's fingerprint and identity. The header also contains a SHA-256 over the hashes of all
//! rows.

use moestro_base::{error::StoreError, platform::DataFile};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::{
    io,
    path::{Path, PathBuf},
};

const FORMAT: &str = "moestro rows";
const VERSION: u32 = 1;
/// Size of the header block in bytes. The size of each other block is a multiple of this size.
const BLOCK: usize = 4096;
/// Size of a block's CRC-32 in bytes.
const CHECKSUM: usize = 4;

/// The header of a file of rows. Headers are untrusted input.
#[derive(Debug, Serialize, Deserialize)]
pub struct RowHeader {
    format: String,
    version: u32,
    /// The fingerprint of the checkpoint.
    pub source: String,
    /// The identity of the checkpoint's files. Empty if these files were changed shortly before or during packing.
    pub identity: String,
    pub rows: u64,
    /// Size of a row in bytes.
    pub row: usize,
    /// SHA-256 of the concatenated SHA-256 hashes of all chunks of rows.
    pub sha256: String,
}

impl RowHeader {
    pub fn new(source: String, identity: String, rows: u64, row: usize, sha256: String) -> Self {
        Self { format: FORMAT.into(), version: VERSION, source, identity, rows, row, sha256 }
    }

    /// The header block.
    pub fn to_bytes(&self) -> Result<Vec<u8>, StoreError> {
        let mut text = serde_json::to_vec(self).map_err(|error| StoreError::Other(error.to_string()))?;
        text.resize(text.len().max(BLOCK), b' ');
        Ok(text)
    }
}

/// The arrangement of rows in blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RowBlocks {
    /// Size of a row in bytes.
    row: usize,
    rows: u64,
    /// Size of a block in bytes.
    pub size: usize,
    pub per_block: usize,
}

impl RowBlocks {
    /// Arranges `rows` rows of `row` bytes each.
    pub fn new(rows: u64, row: usize) -> Self {
        let size = (row + CHECKSUM).next_multiple_of(BLOCK);
        Self { row, rows, size, per_block: (size - CHECKSUM) / row.max(1) }
    }

    pub fn count(&self) -> u64 {
        self.rows.div_ceil(self.per_block as u64)
    }

    /// Offset of a block in the file.
    pub fn offset(&self, block: u64) -> u64 {
        BLOCK as u64 + block * self.size as u64
    }

    /// Size of the whole file in bytes.
    pub fn file_bytes(&self) -> u64 {
        self.offset(self.count())
    }

    /// Writes the checksum into a block.
    pub fn seal(number: u64, block: &mut [u8]) {
        if let Some((bytes, sum)) = block.split_last_chunk_mut::<CHECKSUM>() {
            *sum = checksum(number, bytes).to_le_bytes();
        }
    }

    /// True if the block's checksum matches.
    pub fn is_intact(number: u64, block: &[u8]) -> bool {
        block
            .split_last_chunk::<CHECKSUM>()
            .is_some_and(|(bytes, sum)| checksum(number, bytes) == u32::from_le_bytes(*sum))
    }
}

fn checksum(number: u64, bytes: &[u8]) -> u32 {
    let mut hash = crc32fast::Hasher::new();
    hash.update(&number.to_le_bytes());
    hash.update(bytes);
    hash.finalize()
}

/// An open file of rows.
pub struct PackedRows {
    file: DataFile,
    blocks: RowBlocks,
    pub header: RowHeader,
    /// The SHA-256 of the header's block.
    pub hash: [u8; 32],
}

impl PackedRows {
    /// Opens the file at `path`, which must contain `rows` rows of `row` bytes.
    ///
    /// # Errors
    /// A file system error occurs, or the file has another format or size.
    pub fn open(path: &Path, rows: u64, row: usize) -> Result<Self, StoreError> {
        let io_error = StoreError::at(path);
        let wrong = |why: String| StoreError::NotAPack { path: path.to_owned(), why };
        let file = DataFile::open_uncached(path).map_err(io_error)?;
        let mut space = Vec::new();
        let bytes = file.read_range(0, BLOCK, &mut space).map_err(io_error)?;
        let hash = Sha256::digest(bytes).into();
        let header: RowHeader = serde_json::from_slice(bytes).map_err(|error| wrong(error.to_string()))?;
        if (header.format.as_str(), header.version) != (FORMAT, VERSION) {
            return Err(wrong(format!("unsupported format {:?} version {}", header.format, header.version)));
        }
        let blocks = RowBlocks::new(rows, row);
        let count = header.rows;
        let width = header.row;
        let len = file.len();
        if (count, width) != (rows, row) || len != blocks.file_bytes() {
            let why =
                format!("it has {count} rows of {width} bytes in a file of {len}, not {rows} rows of {row} bytes");
            return Err(wrong(why));
        }
        Ok(Self { file, blocks, header, hash })
    }

    pub fn path(&self) -> &Path {
        self.file.path()
    }

    /// Reads the bytes of a row. `space` is a buffer that the caller reuses.
    ///
    /// # Errors
    /// A file system error occurs, or the checksum of the row's block does not match.
    pub fn read(&self, row: u64, space: &mut Vec<u8>) -> io::Result<Vec<u8>> {
        let RowBlocks { row: len, size, per_block, .. } = self.blocks;
        let number = row / per_block as u64;
        let at = (row % per_block as u64) as usize * len;
        let block = self.file.read_range(self.blocks.offset(number), size, space)?;
        if !RowBlocks::is_intact(number, block) {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "a checksum differs"));
        }
        Ok(block[at..at + len].to_vec())
    }

    /// Reads consecutive blocks.
    pub fn read_blocks<'a>(&self, first: u64, count: usize, space: &'a mut Vec<u8>) -> io::Result<&'a [u8]> {
        self.file.read_range(self.blocks.offset(first), count * self.blocks.size, space)
    }
}

/// Name of the file with the rows of table number `table`.
pub fn file_name(table: usize) -> PathBuf {
    format!("table-{table:03}.rows").into()
}
