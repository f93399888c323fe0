//! The identity of files: a cache that was made from a checkpoint is used only while it is the same.

use crate::{error::StoreError, platform::FileStamp};
use sha2::{Digest, Sha256};
use std::path::PathBuf;

/// 32 hexadecimal digits that name these files as they lie on the disk now: a hash of their [`FileStamp`]s, in order.
///
/// It costs one system call a file and reads no data. Whatever is written to a file, copied over it or renamed in its
/// place makes another identity, and so does a copy of the same bytes: a cache filed under it may be lost for nothing,
/// but never belongs to other bytes.
///
/// # Errors
/// A file that is not there.
pub fn file_identity(files: &[PathBuf]) -> Result<String, StoreError> {
    Ok(name(&stamps(files)?))
}

/// As [`identity`], if the files have been left alone for so long that a later write cannot hide behind the same time.
pub fn settled_identity(files: &[PathBuf]) -> Result<Option<String>, StoreError> {
    let stamps = stamps(files)?;
    Ok(stamps.iter().all(FileStamp::is_settled).then(|| name(&stamps)))
}

fn stamps(files: &[PathBuf]) -> Result<Vec<FileStamp>, StoreError> {
    let stamp = |path: &PathBuf| FileStamp::of(path).map_err(|source| StoreError::Io { path: path.clone(), source });
    files.iter().map(stamp).collect()
}

fn name(stamps: &[FileStamp]) -> String {
    let mut hash = Sha256::new();
    for stamp in stamps {
        hash.update(format!("{stamp:?}\n"));
    }
    hex::encode(&hash.finalize()[..16])
}
