//! Records of single experts: assembles a record from the checkpoint, reads a record from the pack, and computes
//! checksums.

use super::manifest::LayerManifest;
use moestro_base::{
    error::StoreError,
    platform::{self, DataFile, read_aligned},
};
use moestro_compute::{
    device::Slab,
    experts::{ExpertSource, PIECES, Piece, ShardFiles},
};
use sha2::{Digest, Sha256};
use std::path::Path;

/// Number of experts that are read, hashed and written in parallel.
const THREADS: usize = 4;

/// The checksums of a record.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RecordChecksums {
    /// First 32 hexadecimal digits of the SHA-256 of the whole record.
    pub sha256: String,
    /// CRC-32 of the record's bytes up to the end of the last piece. Only these bytes are read while serving.
    pub crc32: u32,
}

impl RecordChecksums {
    pub fn of(record: &[u8], layer: &LayerManifest) -> Self {
        let read = record.get(..layer.end() as usize).unwrap_or(record);
        Self { sha256: hex::encode(&Sha256::digest(record)[..16]), crc32: crc32fast::hash(read) }
    }
}

/// Assembles a record from the checkpoint's pieces.
pub fn gather(
    source: &ShardFiles,
    pieces: &[Piece; PIECES],
    layer: &LayerManifest,
    record: &mut [u8],
) -> Result<(), StoreError> {
    record.fill(0);
    for (piece, &(at, len)) in pieces.iter().zip(&layer.pieces) {
        if let Some(into) = record.get_mut(at as usize..at as usize + len) {
            source.read_piece(piece, into).map_err(StoreError::at(&source.path(piece.file)))?;
        }
    }
    Ok(())
}

/// Opens a layer's file for reads that come from the disk and not from the page cache, if the file system supports such
/// reads.
pub fn open(path: &Path) -> Result<DataFile, StoreError> {
    let disk = DataFile::open_uncached(path).map_err(StoreError::at(path))?;
    disk.drop_cached(0, disk.len() as usize);
    Ok(disk)
}

/// Reads the record of `expert` from the file `disk`.
pub fn read(disk: &DataFile, expert: usize, layer: &LayerManifest, record: &mut [u8]) -> Result<(), StoreError> {
    let start = expert as u64 * layer.stride;
    let len = record.len();
    let result = read_aligned(record, len, disk.block(), |rest, done| disk.read_at(rest, start + done as u64));
    result.map_err(StoreError::at(disk.path()))
}

/// Runs `work(index, expert, buffers)` for every expert of a layer on [`THREADS`] threads. Each thread has two
/// page-aligned buffers of `len` bytes, the size of a record. Returns the results in order, or the first error.
pub fn for_each_expert<E: Send, T: Send>(
    experts: impl Iterator<Item = E>,
    len: usize,
    work: impl Fn(usize, E, [&mut [u8]; 2]) -> Result<T, StoreError> + Sync,
) -> Result<Vec<T>, StoreError> {
    let no_memory = |error| StoreError::Memory(format!("cannot allocate buffers for two experts: {error}"));
    let buffers = || Ok([Slab::new(len).map_err(no_memory)?, Slab::new(len).map_err(no_memory)?]);
    platform::run_jobs("pack", THREADS, experts.enumerate().collect(), buffers, |(index, expert), buffers| {
        work(index, expert, buffers.each_mut().map(Slab::as_mut_slice))
    })
}
