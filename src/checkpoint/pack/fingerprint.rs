//! Fingerprints of checkpoints: a pack with the same one may have been made from it. Cheap to ask, and no proof.

use crate::{error::StoreError, platform::open_regular_file};
use sha2::{Digest, Sha256};
use std::{
    io,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
};

/// Bytes of one sample.
const SAMPLE: usize = 4096;
/// Samples a file, evenly spread from its start to its end.
const SAMPLES: u64 = 16;
/// No header of a checkpoint is longer.
const MAX_HEADER: u64 = 100 << 20;

/// 32 hexadecimal digits: a hash of the shards' sizes, their headers (names, shapes, places of all tensors) and samples
/// of the data. Another model or another revision has another one, nearly always; a copy in which a few bytes were
/// changed may have the same.
pub fn fingerprint(shards: &[PathBuf]) -> Result<String, StoreError> {
    let mut hash = Sha256::new();
    for path in shards {
        add(&mut hash, path).map_err(|source| StoreError::Io { path: path.clone(), source })?;
    }
    Ok(hex::encode(&hash.finalize()[..16]))
}

fn add(hash: &mut Sha256, path: &Path) -> io::Result<()> {
    let file = open_regular_file(path)?;
    let size = file.metadata()?.len();
    hash.update(size.to_le_bytes());
    let mut len = [0; 8];
    file.read_exact_at(&mut len, 0)?;
    let len = u64::from_le_bytes(len);
    if len > size.saturating_sub(8).min(MAX_HEADER) {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "not a safetensors file"));
    }
    let mut header = vec![0; len as usize];
    file.read_exact_at(&mut header, 8)?;
    hash.update(&header);
    let mut sample = [0; SAMPLE];
    for i in 0..SAMPLES {
        let last = size.saturating_sub(SAMPLE as u64);
        let from = (last as u128 * i as u128 / (SAMPLES - 1) as u128) as u64;
        let part = &mut sample[..size.min(SAMPLE as u64) as usize];
        file.read_exact_at(part, from)?;
        hash.update(part);
    }
    Ok(())
}
