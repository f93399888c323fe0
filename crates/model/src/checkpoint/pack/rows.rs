//! Writes, finds and verifies the files of a pack with the rows of n-gram tables.

use super::{
    find::{is_remembered, remember_comparison},
    row_file::{PackedRows, RowBlocks, RowHeader, file_name},
    write::{PackSummary, write},
};
use crate::checkpoint::{
    identity::{fingerprint, settled_identity, unchanged_identity},
    row_table::RowTable,
};
use moestro_base::{
    error::StoreError,
    platform::{self, Access, OnBytes, os},
};
use moestro_compute::experts::{ExpertMap, ExpertSource, ShardFiles};
use sha2::{Digest, Sha256};
use std::{
    fs::{self, File},
    io,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
};

/// Number of blocks per chunk. A chunk is read, hashed and written as a unit.
const CHUNK: u64 = 1024;
/// Number of chunks that are processed at the same time.
const THREADS: usize = 4;

/// The arrangement of the rows of `table` in blocks.
pub fn row_blocks(table: &RowTable) -> RowBlocks {
    RowBlocks::new(table.rows, table.row_len())
}

/// Writes a complete pack: the experts ([`write()`]), then the rows of n-gram tables ([`write_rows`]). Returns the
/// summary of the experts, and the number of bytes of rows written.
pub fn write_with_rows(
    map: &ExpertMap,
    tables: &[RowTable],
    files: &[PathBuf],
    out: &Path,
    progress: OnBytes<'_>,
) -> Result<(PackSummary, u64), StoreError> {
    let summary = write(map, files, out, progress)?;
    Ok((summary, write_rows(tables, files, out, progress)?))
}

/// Writes the rows of the checkpoint's tables into the pack directory `out`. `files` are the files of the checkpoint.
/// Skips tables that the pack already has. Returns the number of bytes written. `progress` receives the bytes written
/// or verified since the last call of `progress`. The sum of these values is twice the number of bytes written.
///
/// # Errors
/// A file system error occurs, rows do not read back as written, or the pack belongs to another checkpoint.
pub fn write_rows(
    tables: &[RowTable],
    files: &[PathBuf],
    out: &Path,
    progress: OnBytes<'_>,
) -> Result<u64, StoreError> {
    let mut written = 0;
    for (index, table) in tables.iter().enumerate() {
        let path = out.join(file_name(index));
        if path.exists() {
            open(&path, table, files)?;
            continue;
        }
        let bytes = row_blocks(table).file_bytes();
        let checked = os::check_free_space(out, "the n-gram table", bytes, "; choose another directory");
        checked.map_err(StoreError::at(&path))?;
        let partial = out.join(format!(".{}.partial", file_name(index).display()));
        let result = write_file(table, files, &partial, progress)
            .and_then(|()| fs::rename(&partial, &path).map_err(StoreError::at(&path)));
        if result.is_err() {
            let _ = fs::remove_file(&partial);
        }
        result?;
        written += bytes;
    }
    Ok(written)
}

fn write_file(table: &RowTable, files: &[PathBuf], path: &Path, progress: OnBytes<'_>) -> Result<(), StoreError> {
    let failed = StoreError::at(path);
    let source = fingerprint(files)?;
    let before = settled_identity(files)?;
    let blocks = row_blocks(table);
    let file = File::create(path).map_err(failed)?;
    let sums = for_each_chunk(table, |first, chunk| {
        file.write_all_at(chunk, blocks.offset(first)).map_err(failed)?;
        progress(chunk.len() as u64);
        Ok(Sha256::digest(chunk))
    })?;
    let identity = unchanged_identity(before, files).unwrap_or_default();
    let row = table.row_len();
    let header = RowHeader::new(source, identity, table.rows, row, hex::encode(Sha256::digest(sums.concat())));
    file.write_all_at(&header.to_bytes()?, 0).map_err(failed)?;
    file.sync_all().map_err(failed)?;
    let packed = PackedRows::open(path, table.rows, row)?;
    let mut space = Vec::new();
    let mut first = 0;
    for sum in sums {
        let count = CHUNK.min(blocks.count() - first) as usize;
        let chunk = packed.read_blocks(first, count, &mut space).map_err(failed)?;
        if Sha256::digest(chunk) != sum {
            let why = format!("blocks from {first} on do not read back as written: the disk or the memory is faulty");
            return Err(failed(io::Error::new(io::ErrorKind::InvalidData, why)));
        }
        progress(chunk.len() as u64);
        first += CHUNK;
    }
    Ok(())
}

/// For each table, opens the rows of the table in the first directory of `dirs` that has matching rows. Skips files
/// that do not match the table, with a warning.
pub fn find_rows(dirs: &[PathBuf], tables: &[RowTable], files: &[PathBuf]) -> Vec<Option<PackedRows>> {
    let warn = |error: &StoreError| {
        tracing::warn!(%error, "cannot use these packed rows; reading the n-gram table from the checkpoint");
    };
    let find = |(index, table): (usize, &RowTable)| {
        let paths = dirs.iter().map(|dir| dir.join(file_name(index))).filter(|path| path.exists());
        paths.into_iter().find_map(|path| open(&path, table, files).inspect_err(warn).ok())
    };
    tables.iter().enumerate().map(find).collect()
}

/// Opens a file that must contain exactly the rows of `table` in `files`. If the files are not yet known to match,
/// hashes all of their rows.
fn open(path: &Path, table: &RowTable, files: &[PathBuf]) -> Result<PackedRows, StoreError> {
    let packed = PackedRows::open(path, table.rows, table.row_len())?;
    let wrong = |why: &str| StoreError::NotAPack { path: path.to_owned(), why: why.into() };
    let header = &packed.header;
    if header.source != fingerprint(files)? {
        return Err(wrong("the rows are from another checkpoint"));
    }
    let now = settled_identity(files)?;
    if !now.as_ref().is_some_and(|now| *now == header.identity || is_remembered(now, &packed.hash)) {
        tracing::info!(
            path = %path.display(),
            rows = table.rows,
            "hashing the n-gram table once to check that the packed rows were made from it"
        );
        let sums = for_each_chunk(table, |_, chunk| Ok(Sha256::digest(chunk)))?;
        if hex::encode(Sha256::digest(sums.concat())) != header.sha256 {
            return Err(wrong("the rows are from another checkpoint: their hash differs"));
        }
        remember_comparison(now, files, &packed.hash);
    }
    Ok(packed)
}

/// Compares the packed rows in `dir` with the checkpoint, byte by byte. Skips tables without packed rows. Returns the
/// number of rows compared.
///
/// # Errors
/// A file system error occurs, or a byte differs.
pub fn verify_rows(dir: &Path, tables: &[RowTable], progress: OnBytes<'_>) -> Result<u64, StoreError> {
    let mut compared = 0;
    for (index, table) in tables.iter().enumerate() {
        let path = dir.join(file_name(index));
        if !path.exists() {
            continue;
        }
        let packed = PackedRows::open(&path, table.rows, table.row_len())?;
        let blocks = row_blocks(table);
        for_each_chunk(table, |first, ours| {
            let mut space = Vec::new();
            let count = ours.len() / blocks.size;
            let theirs = packed.read_blocks(first, count, &mut space).map_err(StoreError::at(&path))?;
            if let Some(at) = theirs.iter().zip(ours.iter()).position(|(theirs, ours)| theirs != ours) {
                let byte = blocks.offset(first) + at as u64;
                let why = format!("byte {byte} differs from the checkpoint");
                return Err(StoreError::NotAPack { path: path.clone(), why });
            }
            progress(ours.len() as u64);
            Ok(())
        })?;
        compared += table.rows;
    }
    Ok(compared)
}

/// Assembles every chunk of `table` from the checkpoint and runs `work(first block, bytes)` for each chunk, on
/// [`THREADS`] threads. Returns the results in order.
fn for_each_chunk<T: Send>(
    table: &RowTable,
    work: impl Fn(u64, &[u8]) -> Result<T, StoreError> + Sync,
) -> Result<Vec<T>, StoreError> {
    let blocks = row_blocks(table);
    let source = ShardFiles::open(&table.files, Access::Buffered)?;
    let chunks = (0..blocks.count()).step_by(CHUNK as usize).collect();
    let buffers = || Ok((Vec::new(), Vec::new()));
    platform::run_jobs("pack", THREADS, chunks, buffers, |first, (chunk, part): &mut (Vec<u8>, Vec<u8>)| {
        let count = CHUNK.min(blocks.count() - first);
        gather(&source, table, first..first + count, chunk, part)?;
        work(first, chunk)
    })
}

/// Assembles the blocks `numbers` from the checkpoint into `chunk`. The caller reuses the buffer `part`.
fn gather(
    source: &ShardFiles,
    table: &RowTable,
    numbers: std::ops::Range<u64>,
    chunk: &mut Vec<u8>,
    part: &mut Vec<u8>,
) -> Result<(), StoreError> {
    let blocks = row_blocks(table);
    let sizes = table.row_bytes();
    let per_block = blocks.per_block as u64;
    let row_bytes = sizes.iter().sum::<usize>();
    chunk.clear();
    chunk.resize((numbers.end - numbers.start) as usize * blocks.size, 0);
    let first = numbers.start * per_block;
    let end = (numbers.end * per_block).min(table.rows);
    let mut row = first;
    while row < end {
        let (pieces, count) = table.pieces(row..end);
        let mut before = 0;
        for (piece, size) in pieces.iter().zip(sizes) {
            part.clear();
            part.resize(piece.len, 0);
            source.read_piece(piece, part).map_err(StoreError::at(&source.path(piece.file)))?;
            for (at, bytes) in part.chunks_exact(size.max(1)).enumerate() {
                let at = row - first + at as u64;
                let start = (at / per_block) as usize * blocks.size + (at % per_block) as usize * row_bytes + before;
                chunk[start..start + size].copy_from_slice(bytes);
            }
            before += size;
        }
        row += count.max(1);
    }
    for (number, block) in numbers.zip(chunk.chunks_exact_mut(blocks.size)) {
        RowBlocks::seal(number, block);
    }
    Ok(())
}
