//! Sources of expert bytes: the shards of a checkpoint, or a pack with the checkpoint as a fallback.
//!
//! A pack has a CRC-32 per record (one record per expert). On a server that has just started, every read must be
//! verified. This takes up to 7.5 % of the time per token (`benches/results/hardening.csv`), so the CPU computes with a
//! record while another thread verifies it. A layer ends only after all checksums are verified. If a checksum does not
//! match, the record is rebuilt from the checkpoint, and the layer computes with that expert again
//! ([`ExpertFetch::next`]). A wrong result never leaves the layer.
//!
//! [`ExpertFetch::next`]: super::ExpertFetch::next

use super::read_plan::{ExpertMap, PIECES, Piece};
use moestro_base::{
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

/// The method of reading expert files: the value of `--expert-io`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ReadMode {
    /// Direct I/O if the file system supports direct I/O, otherwise buffered I/O. The loader replaces `Auto` by
    /// `Buffered` where buffered I/O is known to be faster.
    #[default]
    Auto,
    Direct,
    Buffered,
}

/// Numbered files that several threads can read at the same time.
pub trait ExpertSource: Send + Sync {
    /// Performs one positional read. Returns the number of bytes read, which is 0 at the end of the file.
    fn read(&self, file: u32, offset: u64, into: &mut [u8]) -> io::Result<usize>;

    /// The checksums of the pack. `None` if the files are not a pack.
    fn pack_records(&self) -> Option<&PackRecords> {
        None
    }

    /// Size of a file in bytes. `None` if the file does not exist.
    fn size(&self, file: u32) -> Option<u64>;

    /// Path of a file, for error messages.
    fn path(&self, file: u32) -> PathBuf;

    /// Required alignment of offset, length and address of every read. A power of two.
    fn block(&self) -> usize;
}

/// The open shards of a checkpoint, or the open files of a pack. Read-only.
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
            let file = DataFile::open(path, access).map_err(StoreError::at(path))?;
            block = block.max(file.block());
            files.push(file);
        }
        Ok(Self { files, block, records: None })
    }

    /// Opens the files in `mode`. Returns the files and the access mode that they use.
    ///
    /// For a pack with direct I/O, [`ExpertSource::block`] is at least [`MAX_BLOCK`], so that slots are aligned like
    /// the records. macOS accepts any alignment, but bypasses the page cache only for aligned reads.
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

    /// Marks the files as a pack with these records. A damaged record is then rebuilt from the checkpoint.
    pub fn with_records(self, records: Option<Arc<PackRecords>>) -> Self {
        Self { records, ..self }
    }

    fn get(&self, file: u32) -> io::Result<&DataFile> {
        self.files.get(file as usize).ok_or_else(|| io::Error::from(io::ErrorKind::NotFound))
    }

    /// Fills `into` with the bytes of a piece, and then removes them from the page cache. Returns the number of reads.
    pub fn read_piece(&self, piece: &Piece, into: &mut [u8]) -> io::Result<u64> {
        let mut done = 0;
        let mut reads = 0;
        while let Some(rest) = into.get_mut(done..).filter(|rest| !rest.is_empty()) {
            match self.read(piece.file, piece.offset + done as u64, rest) {
                Ok(0) => return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the file ends inside an expert")),
                Ok(got) => done += got,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(error),
            }
            reads += 1;
        }
        self.get(piece.file)?.drop_cached(piece.offset, piece.len);
        Ok(reads)
    }

    /// Fails if a file ends before one of the pieces in `map`.
    pub(super) fn check_sizes(source: &dyn ExpertSource, map: &ExpertMap) -> Result<(), StoreError> {
        for (layer, experts) in map.layers.iter().enumerate() {
            for (expert, pieces) in experts.iter().enumerate() {
                for piece in pieces.iter().filter(|piece| piece.len > 0) {
                    let end = piece.offset.saturating_add(piece.len as u64);
                    let size = source.size(piece.file).unwrap_or(0);
                    if end > size {
                        let ends = format!("layer {layer}, expert {expert} ends at byte {end}");
                        let why = format!("{ends}, the file at byte {size}: truncated?");
                        return Err(StoreError::NotACheckpoint { path: source.path(piece.file), why });
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
        // The check comes after the read, so that it detects a file that changed before or during the read.
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

/// The first read of a record is verified, and then every 16th read. The first verification finds permanent damage on
/// the disk. The later verifications sample transient errors between disk and memory.
const VERIFY_EVERY: u8 = 16;

/// The records of one pack file. Record `n` starts at byte `n * stride`.
#[derive(Debug)]
pub struct LayerRecords {
    /// Number of bytes from the start of one record to the start of the next.
    stride: u64,
    /// Offset in the record, and length, of each piece.
    pieces: [(u64, usize); PIECES],
    records: Vec<Record>,
}

#[derive(Debug)]
struct Record {
    crc32: u32,
    /// Number of reads since the record was last verified.
    reads: AtomicU8,
    /// True after a failed read or a wrong checksum. The record is then rebuilt instead of read.
    is_damaged: AtomicBool,
    /// The pieces of the same expert in the checkpoint.
    source: [Piece; PIECES],
}

impl LayerRecords {
    /// `experts` lists, for each record, the CRC-32 of its bytes up to the end of the last piece, and the pieces of the
    /// same expert in the checkpoint.
    pub fn new(
        stride: u64,
        pieces: [(u64, usize); PIECES],
        experts: impl IntoIterator<Item = (u32, [Piece; PIECES])>,
    ) -> Self {
        let reads = || AtomicU8::new(0);
        let is_damaged = || AtomicBool::new(false);
        let record = |(crc32, source)| Record { crc32, reads: reads(), is_damaged: is_damaged(), source };
        Self { stride, pieces, records: experts.into_iter().map(record).collect() }
    }

    /// Number of bytes of a record that are read and verified.
    fn len(&self) -> usize {
        let ends = self.pieces.iter().filter(|(_, len)| *len > 0).map(|&(at, len)| at as usize + len);
        ends.max().unwrap_or(0)
    }
}

/// The records of all files of a pack, and the checkpoint from which the pack was made.
pub struct PackRecords {
    files: Vec<LayerRecords>,
    checkpoint: ShardFiles,
    /// True after the first damaged record was logged.
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

    /// True if the record was marked as damaged.
    pub fn is_damaged(&self, file: u32, offset: u64) -> bool {
        self.record(file, offset).is_some_and(|(_, record)| record.is_damaged.load(Ordering::Relaxed))
    }

    /// Counts a read of `len` bytes at `offset` of `file`. Returns true if this read must be
    /// [verified](PackRecords::verify).
    ///
    /// # Errors
    /// The range is not a whole record.
    pub fn count_read(&self, file: u32, offset: u64, len: usize) -> io::Result<bool> {
        let found = self.record(file, offset).filter(|(records, _)| records.len() == len);
        let (_, record) = found.ok_or_else(no_such_record)?;
        Ok(record.reads.fetch_add(1, Ordering::Relaxed).is_multiple_of(VERIFY_EVERY))
    }

    /// Compares the checksum of `bytes` with the checksum of the record at `offset` of `file`.
    ///
    /// # Errors
    /// The checksums differ, or the record does not exist.
    pub fn verify(&self, file: u32, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let (_, record) = self.record(file, offset).ok_or_else(no_such_record)?;
        let found = crc32fast::hash(bytes);
        if found == record.crc32 {
            return Ok(());
        }
        // The next read of this record must be verified, too.
        record.reads.store(0, Ordering::Relaxed);
        Err(io::Error::new(
            io::ErrorKind::InvalidData,
            format!("damaged on disk or in transit: its checksum is {found:08x}, the pack lists {:08x}", record.crc32),
        ))
    }

    /// Rebuilds the record at `offset` of `file` from the checkpoint into `into`, which has room for the whole record.
    /// Then removes the checkpoint's bytes from the page cache. Returns the number of reads and the number of bytes.
    ///
    /// # Errors
    /// The checkpoint cannot be read. The error names the file.
    pub fn rebuild(&self, file: u32, offset: u64, into: &mut [u8]) -> io::Result<(u64, u64)> {
        let (records, record) = self.record(file, offset).ok_or_else(no_such_record)?;
        let mut reads = 0;
        let mut bytes = 0;
        for (piece, &(at, len)) in record.source.iter().zip(&records.pieces) {
            let part = into.get_mut(at as usize..at as usize + len).ok_or_else(no_such_record)?;
            reads += self.checkpoint.read_piece(piece, part).map_err(|error| {
                let path = self.checkpoint.path(piece.file);
                let name = path.file_name().unwrap_or_default().to_string_lossy();
                io::Error::new(error.kind(), format!("{name}: {error}"))
            })?;
            bytes += len as u64;
        }
        Ok((reads, bytes))
    }

    /// Marks a record as damaged. Returns true if the record was not marked before. Logs only the first damaged record
    /// of a pack.
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
