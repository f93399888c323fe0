//! Compares a pack with its checkpoint, byte by byte.

use super::{
    find::remember_comparison,
    manifest::PackManifest,
    record::{RecordChecksums, for_each_expert, gather, open, read},
};
use crate::checkpoint::identity::{fingerprint, settled_identity};
use moestro_base::{
    error::StoreError,
    platform::{Access, OnBytes},
};
use moestro_compute::experts::{ExpertMap, ShardFiles};
use std::path::{Path, PathBuf};

/// Compares every record of the pack in `dir` with the checkpoint's `files` and with the two checksums of the record.
/// `progress` receives the bytes compared since the last call of `progress`. The sum of these values is the size of the
/// pack. Returns the number of experts.
///
/// # Errors
/// A file system error occurs, or an expert differs. The error names the layer and the offset.
pub fn verify(dir: &Path, map: &ExpertMap, files: &[PathBuf], progress: OnBytes<'_>) -> Result<usize, StoreError> {
    let (manifest, text) = PackManifest::read(dir)?;
    manifest.check(dir, &fingerprint(files)?, map)?;
    let before = settled_identity(files)?;
    let source = ShardFiles::open(files, Access::Buffered)?;
    for (index, (layer, experts)) in manifest.layers.iter().zip(&map.layers).enumerate() {
        let wrong = |expert: usize, why: String| StoreError::NotAPack {
            path: dir.to_owned(),
            why: format!("layer {index}, expert {expert}: {why}"),
        };
        let Some(path) = layer.path(dir) else { return Err(wrong(0, "the manifest has no valid file name".into())) };
        let disk = open(&path)?;
        let experts = experts.iter().zip(layer.sha256.iter().zip(&layer.crc32));
        for_each_expert(experts, layer.stride as usize, |expert, (pieces, (sha256, &crc32)), [packed, ours]| {
            read(&disk, expert, layer, packed)?;
            gather(&source, pieces, layer, ours)?;
            if let Some(at) = packed.iter().zip(&*ours).position(|(packed, ours)| packed != ours) {
                let byte = expert as u64 * layer.stride + at as u64;
                return Err(wrong(expert, format!("byte {byte} of {} differs from the checkpoint", layer.file)));
            }
            if RecordChecksums::of(ours, layer) != (RecordChecksums { sha256: sha256.clone(), crc32 }) {
                return Err(wrong(expert, "its bytes match the checkpoint, but its checksum does not".into()));
            }
            progress(layer.stride);
            Ok(())
        })?;
    }
    remember_comparison(before, files, &text);
    Ok(map.experts())
}
