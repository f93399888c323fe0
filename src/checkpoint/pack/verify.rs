//! Compares a pack with the checkpoint it stands in for, expert by expert.

use super::{
    find::remember,
    fingerprint,
    manifest::PackManifest,
    record::{RecordChecksums, each, gather, open, read},
};
use crate::{
    checkpoint::identity::settled_identity,
    error::StoreError,
    experts::{ExpertMap, ShardFiles},
    platform::Access,
};
use std::path::{Path, PathBuf};

/// Reads every record of the pack in `dir` and every expert of the checkpoint's `files`, and compares each byte and both
/// checksums. `progress` gets the bytes compared since its last call: the pack's size in all. Returns the experts
/// compared.
///
/// # Errors
/// The file system's; the first expert that differs, with its layer and where.
pub fn verify(
    dir: &Path,
    map: &ExpertMap,
    files: &[PathBuf],
    progress: &(dyn Fn(u64) + Sync),
) -> Result<usize, StoreError> {
    let (manifest, text) = PackManifest::read(dir)?;
    manifest.check(dir, &fingerprint(files)?, map)?;
    let before = settled_identity(files)?;
    let source = ShardFiles::open(files, Access::Buffered)?;
    for (index, (layer, experts)) in manifest.layers.iter().zip(&map.layers).enumerate() {
        let wrong = |expert: usize, why: String| StoreError::NotAPack {
            path: dir.to_owned(),
            why: format!("layer {index}, expert {expert}: {why}"),
        };
        let Some(path) = layer.path(dir) else { return Err(wrong(0, "its file has no name".into())) };
        let disk = open(&path)?;
        each(experts.len(), layer.stride as usize, |expert, [packed, ours]| {
            let (Some(pieces), Some(sha256), Some(&crc32)) =
                (experts.get(expert), layer.sha256.get(expert), layer.crc32.get(expert))
            else {
                return Err(wrong(expert, "it has no checksum".into()));
            };
            read(&disk, expert, layer, packed)?;
            gather(&source, pieces, layer, ours)?;
            if let Some(at) = packed.iter().zip(&*ours).position(|(packed, ours)| packed != ours) {
                let byte = expert as u64 * layer.stride + at as u64;
                return Err(wrong(expert, format!("byte {byte} of {} is not the checkpoint's", layer.file)));
            }
            if RecordChecksums::of(ours, layer) != (RecordChecksums { sha256: sha256.clone(), crc32 }) {
                return Err(wrong(expert, "its bytes are the checkpoint's, its checksum is not".into()));
            }
            progress(layer.stride);
            Ok(())
        })?;
    }
    remember(before, files, &text);
    Ok(map.experts())
}

/// Compares every expert in `files` with the manifest's checksum, without looking at the pack's records. If all agree,
/// that is remembered until the files change.
pub fn compare(
    dir: &Path,
    manifest: &PackManifest,
    text: &[u8; 32],
    map: &ExpertMap,
    files: &[PathBuf],
) -> Result<(), StoreError> {
    let before = settled_identity(files)?;
    let source = ShardFiles::open(files, Access::Buffered)?;
    for (index, (layer, experts)) in manifest.layers.iter().zip(&map.layers).enumerate() {
        each(experts.len(), layer.stride as usize, |expert, [record, _]| {
            let (Some(pieces), Some(sha256)) = (experts.get(expert), layer.sha256.get(expert)) else { return Ok(()) };
            gather(&source, pieces, layer, record)?;
            if RecordChecksums::of(record, layer).sha256 == *sha256 {
                return Ok(());
            }
            let why = format!("it was made from another checkpoint: layer {index}, expert {expert} differs");
            Err(StoreError::NotAPack { path: dir.to_owned(), why })
        })?;
    }
    remember(before, files, text);
    Ok(())
}
