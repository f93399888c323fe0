//! Identifies checkpoint files, so that a cache made from a checkpoint is used only for the same files.
//!
//! * The *identity* is a hash of inode numbers, sizes and times. Computing it reads no data. Every modification changes
//!   it, but a copy of a file has a different identity.
//! * The *fingerprint* is a hash of sizes, headers and samples of the data. A copy has the same fingerprint, but files
//!   with the same fingerprint may differ in a few bytes.

use moestro_base::{
    error::StoreError,
    platform::{FileStamp, open_regular_file},
};
use sha2::{Digest, Sha256};
use std::{
    io,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
};

/// The current identity of files: 32 hexadecimal digits, which are a hash of the [`FileStamp`]s of all files in order.
///
/// Needs one system call per file. Any write, copy or rename to one of the paths changes the identity. A valid cache
/// may therefore be ignored, but a cache of other bytes is never used.
///
/// # Errors
/// A file does not exist.
pub fn file_identity(files: &[PathBuf]) -> Result<String, StoreError> {
    Ok(hash_stamps(&stamps(files)?))
}

/// Like [`file_identity`], but returns `None` if a file was changed so recently that another change could have the same
/// time stamp.
pub fn settled_identity(files: &[PathBuf]) -> Result<Option<String>, StoreError> {
    let stamps = stamps(files)?;
    Ok(stamps.iter().all(FileStamp::is_settled).then(|| hash_stamps(&stamps)))
}

/// Returns `before` if it is still the [`settled_identity`] of the files. Otherwise returns `None`. The caller gets
/// `before` from [`settled_identity`], then reads the files, then calls this function.
pub fn unchanged_identity(before: Option<String>, files: &[PathBuf]) -> Option<String> {
    before.filter(|before| settled_identity(files).is_ok_and(|now| now.as_ref() == Some(before)))
}

fn stamps(files: &[PathBuf]) -> Result<Vec<FileStamp>, StoreError> {
    files.iter().map(|path| FileStamp::of(path).map_err(StoreError::at(path))).collect()
}

fn hash_stamps(stamps: &[FileStamp]) -> String {
    let mut hash = Sha256::new();
    for stamp in stamps {
        hash.update(format!("{stamp:?}\n"));
    }
    hex::encode(&hash.finalize()[..16])
}

/// Size of a sample in bytes.
const SAMPLE_BYTES: usize = 4096;
/// Number of samples per file. The samples are evenly spread over the file.
const SAMPLES: u64 = 16;
/// Maximum size of a safetensors header in bytes.
const MAX_HEADER_BYTES: u64 = 100 << 20;

/// The fingerprint of shards: 32 hexadecimal digits, which are a hash of the shards' sizes, headers (names, shapes and
/// offsets of all tensors) and samples of data. Other models and revisions almost always have a different fingerprint.
/// Files that differ in a few bytes may have the same fingerprint.
pub fn fingerprint(shards: &[PathBuf]) -> Result<String, StoreError> {
    let mut hash = Sha256::new();
    for path in shards {
        hash_samples(&mut hash, path).map_err(StoreError::at(path))?;
    }
    Ok(hex::encode(&hash.finalize()[..16]))
}

fn hash_samples(hash: &mut Sha256, path: &Path) -> io::Result<()> {
    let file = open_regular_file(path)?;
    let size = file.metadata()?.len();
    hash.update(size.to_le_bytes());
    let mut len = [0; 8];
    file.read_exact_at(&mut len, 0)?;
    let len = u64::from_le_bytes(len);
    if len > size.saturating_sub(8).min(MAX_HEADER_BYTES) {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "not a safetensors file"));
    }
    let mut header = vec![0; len as usize];
    file.read_exact_at(&mut header, 8)?;
    hash.update(&header);
    let mut sample = [0; SAMPLE_BYTES];
    for i in 0..SAMPLES {
        let last = size.saturating_sub(SAMPLE_BYTES as u64);
        let from = (last as u128 * i as u128 / (SAMPLES - 1) as u128) as u64;
        let part = &mut sample[..size.min(SAMPLE_BYTES as u64) as usize];
        file.read_exact_at(part, from)?;
        hash.update(part);
    }
    Ok(())
}
