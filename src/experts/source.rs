//! Where the reader gets bytes from: the checkpoint's files, or a pack backed by the checkpoint.
//!
//! A pack has a CRC-32 per record. Verifying a record takes a seventh of the time that a fast disk needs to read it:
//! more than 1 % of a token's time on a cold server, which sees every record for the first time. So the CPU computes
//! with a record while another thread verifies it, and a layer ends when all checksums matched. If one did not, the
//! record is rebuilt from the checkpoint and the layer computes that expert again ([`ExpertFetch::next`]). No wrong
//! result leaves the layer.
//!
//! [`ExpertFetch::next`]: super::ExpertFetch::next

use super::read_plan::{ExpertMap, PIECES, Piece};
use crate::{
    error::StoreError,
    platform::{Access, DataFile, MAX_BLOCK},
};
use std::{
    fmt, io,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU8, Ordering},
    },
};

/// `--expert-io`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ReadMode {
    /// Direct reads where the file system supports them, else buffered ones. A caller that knows the memory may decide.
    #[default]
    Auto,
    Direct,
    Buffered,
}

/// Numbered files that many threads can read at any offset at once.
pub trait ExpertSource: Send + Sync {
    /// One read. Returns fewer bytes than requested after a short read, and 0 at the end of the file.
    fn read(&self, file: u32, offset: u64, into: &mut [u8]) -> io::Result<usize>;

    /// The checksums, if the files are a pack.
    fn pack_records(&self) -> Option<&PackRecords> {
        None
    }

    /// Size in bytes; `None` if there is no such file.
    fn size(&self, file: u32) -> Option<u64>;

    /// The path for messages.
    fn path(&self, file: u32) -> PathBuf;

    /// Alignment of offset, length and address of every read: a power of two.
    fn block(&self) -> usize;
}

/// The shards of a checkpoint, or the files of its pack, held open. They are never written to.
pub struct ShardFiles {
    files: Vec<DataFile>,
    block: usize,
    records: Option<Arc<PackRecords>>,
}

impl ShardFiles {
    pub fn open(paths: &[PathBuf], access: Access) -> Result<Self, StoreError> {
        let mut files = Vec::with_capacity(paths.len());
        let mut block = 1;
        for path in paths {
            let file = DataFile::open(path, access).map_err(|source| StoreError::Io { path: path.clone(), source })?;
            block = block.max(file.block());
            files.push(file);
        }
        Ok(Self { files, block, records: None })
    }

    /// Opens the files as `mode` says, and returns how they are read. The records of a pack start at pages, so their slots
    /// do, too: macOS bypasses the page cache only if both are aligned, although it accepts any alignment.
    pub fn open_as(paths: &[PathBuf], mode: ReadMode, is_pack: bool) -> Result<(Self, Access), StoreError> {
        if mode == ReadMode::Buffered {
            return Ok((Self::open(paths, Access::Buffered)?, Access::Buffered));
        }
        match Self::open(paths, Access::Direct) {
            Err(StoreError::Io { path, source }) if source.kind() == io::ErrorKind::Unsupported => {
                if mode == ReadMode::Direct {
                    let why = "this file system does not support direct reads; use --expert-io buffered or auto";
                    return Err(StoreError::Io { path, source: io::Error::new(source.kind(), why) });
                }
                tracing::info!("reading experts through the page cache: the file system does not support direct reads");
                Ok((Self::open(paths, Access::Buffered)?, Access::Buffered))
            }
            other => {
                let mut files = other?;
                if is_pack {
                    files.block = files.block.max(MAX_BLOCK);
                }
                let access = if files.block == 1 { Access::Uncached } else { Access::Direct };
                Ok((files, access))
            }
        }
    }

    /// Marks the files as a pack. Damaged records are then rebuilt from the pack's checkpoint.
    pub fn with_records(self, records: Option<Arc<PackRecords>>) -> Self {
        Self { records, ..self }
    }

    fn get(&self, file: u32) -> io::Result<&DataFile> {
        self.files.get(file as usize).ok_or_else(|| io::Error::from(io::ErrorKind::NotFound))
    }

    /// See [`DataFile::drop_cached`].
    pub fn drop_cached(&self, file: u32, offset: u64, len: usize) {
        if let Ok(file) = self.get(file) {
            file.drop_cached(offset, len);
        }
    }

    /// Fails if a file is shorter than `map` says.
    pub(super) fn check_sizes(source: &dyn ExpertSource, map: &ExpertMap) -> Result<(), StoreError> {
        for (layer, experts) in map.layers.iter().enumerate() {
            for (expert, pieces) in experts.iter().enumerate() {
                for piece in pieces.iter().filter(|piece| piece.len > 0) {
                    let end = piece.offset.saturating_add(piece.len as u64);
                    let size = source.size(piece.file);
                    if size.is_none_or(|size| end > size) {
                        return Err(StoreError::NotACheckpoint {
                            path: source.path(piece.file),
                            why: format!(
                                "layer {layer}, expert {expert} ends at byte {end}, the file at byte {}: truncated?",
                                size.unwrap_or(0)
                            ),
                        });
                    }
                }
            }
        }
        Ok(())
    }
}

impl ExpertSource for ShardFiles {
    fn read(&self, file: u32, offset: u64, into: &mut [u8]) -> io::Result<usize> {
        let file = self.get(file)?;
        let got = file.read_at(into, offset)?;
        // Checked after the read, so that a write before the read is noticed.
        file.check_unchanged()?;
        Ok(got)
    }

    fn pack_records(&self) -> Option<&PackRecords> {
        self.records.as_deref()
    }

    fn size(&self, file: u32) -> Option<u64> {
        self.files.get(file as usize).map(DataFile::len)
    }

    fn path(&self, file: u32) -> PathBuf {
        self.files.get(file as usize).map_or(Path::new("?"), DataFile::path).to_owned()
    }

    fn block(&self) -> usize {
        self.block
    }
}

/// Every 16th read of a record is verified, starting with the first. Damage on the disk is permanent, so the first read
/// finds it. Damage in transit can hit any read.
const VERIFY_EVERY: u8 = 16;

/// The records of one file, stored back to back from its start.
#[derive(Debug)]
pub struct LayerRecords {
    /// Bytes from one record to the next.
    stride: u64,
    /// Offset in the record and length of each piece.
    pieces: [(u64, usize); PIECES],
    records: Vec<Record>,
}

#[derive(Debug)]
struct Record {
    crc32: u32,
    /// Reads since the record was last verified.
    reads: AtomicU8,
    /// A read failed or the checksum did not match. The record is not read again.
    is_damaged: AtomicBool,
    /// The same expert in the checkpoint.
    source: [Piece; PIECES],
}

impl LayerRecords {
    /// `experts` lists the checksum of each record, up to the end of its last piece, and the expert's pieces in the
    /// checkpoint.
    pub fn new(
        stride: u64,
        pieces: [(u64, usize); PIECES],
        experts: impl IntoIterator<Item = (u32, [Piece; PIECES])>,
    ) -> Self {
        let (reads, is_damaged) = (|| AtomicU8::new(0), || AtomicBool::new(false));
        let record = |(crc32, source)| Record { crc32, reads: reads(), is_damaged: is_damaged(), source };
        Self { stride, pieces, records: experts.into_iter().map(record).collect() }
    }

    /// Bytes of a record that are read and verified.
    fn len(&self) -> usize {
        let ends = self.pieces.iter().filter(|(_, len)| *len > 0).map(|&(at, len)| at as usize + len);
        ends.max().unwrap_or(0)
    }
}

/// The records of all files of a pack, and the checkpoint that it was made from.
pub struct PackRecords {
    files: Vec<LayerRecords>,
    checkpoint: ShardFiles,
    /// A damaged record was reported in the log.
    is_reported: AtomicBool,
}

impl PackRecords {
    pub fn new(files: Vec<LayerRecords>, checkpoint: ShardFiles) -> Self {
        Self { files, checkpoint, is_reported: AtomicBool::new(false) }
    }

    fn record(&self, file: u32, offset: u64) -> Option<(&LayerRecords, &Record)> {
        let records = self.files.get(file as usize)?;
        let index = offset.checked_div(records.stride).filter(|index| index * records.stride == offset)?;
        Some((records, records.records.get(usize::try_from(index).ok()?)?))
    }

    /// True for a record known to be damaged, which is not worth reading again.
    pub fn is_damaged(&self, file: u32, offset: u64) -> bool {
        self.record(file, offset).is_some_and(|(_, record)| record.is_damaged.load(Ordering::Relaxed))
    }

    /// Counts a read of `len` bytes at `offset` of `file`. True if this read must be [verified](PackRecords::verify).
    ///
    /// # Errors
    /// The range is not a whole record.
    pub fn is_due(&self, file: u32, offset: u64, len: usize) -> io::Result<bool> {
        let found = self.record(file, offset).filter(|(records, _)| records.len() == len);
        let (_, record) = found.ok_or_else(no_such_record)?;
        Ok(record.reads.fetch_add(1, Ordering::Relaxed).is_multiple_of(VERIFY_EVERY))
    }

    /// Compares the checksum of `bytes` with that of the record at `offset` of `file`.
    ///
    /// # Errors
    /// They differ, or there is no such record.
    pub fn verify(&self, file: u32, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let (_, record) = self.record(file, offset).ok_or_else(no_such_record)?;
        let found = crc32fast::hash(bytes);
        if found == record.crc32 {
            return Ok(());
        }
        // Verify the next read of it too.
        record.reads.store(0, Ordering::Relaxed);
        Err(io::Error::new(
            io::ErrorKind::InvalidData,
            format!("damaged on disk or in transit: its checksum is {found:08x}, the pack lists {:08x}", record.crc32),
        ))
    }

    /// Rebuilds the record at `offset` of `file` from the checkpoint, read through the page cache and dropped from it
    /// afterwards. `into` holds the whole record. Returns the number of reads and bytes.
    ///
    /// # Errors
    /// The checkpoint cannot be read either; the text names its file.
    pub fn rebuild(&self, file: u32, offset: u64, into: &mut [u8]) -> io::Result<(u64, u64)> {
        let (records, record) = self.record(file, offset).ok_or_else(no_such_record)?;
        let (mut reads, mut bytes) = (0, 0);
        for (piece, &(at, len)) in record.source.iter().zip(&records.pieces) {
            let read = |bytes: &mut [u8]| read_piece(&self.checkpoint, piece, bytes);
            let part = into.get_mut(at as usize..at as usize + len).ok_or_else(no_such_record)?;
            reads += read(part).map_err(|error| {
                let path = self.checkpoint.path(piece.file);
                io::Error::new(error.kind(), format!("{}: {error}", path.display()))
            })?;
            bytes += len as u64;
        }
        Ok((reads, bytes))
    }

    /// Marks a record as damaged. True if it was not marked before. The first damaged record of a pack is logged.
    pub fn mark_damaged(&self, file: u32, offset: u64, why: &dyn fmt::Display) -> bool {
        let Some((_, record)) = self.record(file, offset) else { return false };
        let is_new = !record.is_damaged.swap(true, Ordering::Relaxed);
        if is_new && !self.is_reported.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                %why,
                "the pack is damaged; damaged records are read from the checkpoint instead, which is slower. \
                 `moestro pack --verify` lists the damage; pack again to repair it"
            );
        }
        is_new
    }
}

impl fmt::Debug for PackRecords {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PackRecords").field("files", &self.files.len()).finish_non_exhaustive()
    }
}

fn no_such_record() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "the pack has no such record")
}

/// Fills `into` with a piece's bytes. Returns the number of reads.
fn read_piece(files: &ShardFiles, piece: &Piece, into: &mut [u8]) -> io::Result<u64> {
    let (mut done, mut reads) = (0, 0);
    while let Some(rest) = into.get_mut(done..).filter(|rest| !rest.is_empty()) {
        match files.read(piece.file, piece.offset + done as u64, rest) {
            Ok(0) => return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the file ends inside an expert")),
            Ok(got) => done += got,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(error),
        }
        reads += 1;
    }
    files.drop_cached(piece.file, piece.offset, piece.len);
    Ok(reads)
}
