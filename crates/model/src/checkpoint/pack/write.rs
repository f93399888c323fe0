//! Creates a pack, and reads back and verifies every record.

use super::{
    find,
    manifest::{FORMAT, LayerManifest, MANIFEST, PIECE_ALIGN, PackManifest, RECORD_ALIGN, VERSION},
    record::{RecordChecksums, for_each_expert, gather, open, read},
};
use crate::checkpoint::identity::{fingerprint, settled_identity, unchanged_identity};
use moestro_base::{
    error::StoreError,
    platform::{Access, OnBytes, atomic_file::PartialDir, os},
};
use moestro_compute::experts::{ExpertMap, PIECES, Piece, ShardFiles};
use std::{
    fs::{self, File},
    io::{self, Write},
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
};

/// The outcome of packing a checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PackSummary {
    pub bytes: u64,
    pub experts: usize,
    /// False if the same pack already existed.
    pub written: bool,
}

/// Packs the experts at `map` in the checkpoint's `files` into the directory `out`.
///
/// Writes to a temporary directory, reads back and verifies every record from the disk, and then renames the directory.
/// After an error, removes the temporary directory. `progress` receives the bytes written or verified since the last
/// call of `progress`. The sum of these values is twice the size of the pack.
///
/// # Errors
/// A file system error occurs (the error names the file), `out` exists and is neither empty nor a pack, a record does
/// not read back as written, or the checkpoint was modified while it was read.
pub fn write(map: &ExpertMap, files: &[PathBuf], out: &Path, progress: OnBytes<'_>) -> Result<PackSummary, StoreError> {
    let experts = map.experts();
    let plans = map.layers.iter().enumerate().map(|(i, layer)| plan_layer(i, layer)).collect::<Result<Vec<_>, _>>()?;
    let bytes = plans.iter().zip(&map.layers).map(|(plan, layer)| plan.stride * layer.len() as u64).sum();
    if experts == 0 {
        return Err(StoreError::Other("the model has no routed experts, so there is nothing to pack".into()));
    }
    let fingerprint = fingerprint(files)?;
    if out.join(MANIFEST).exists() {
        return find::open(out, map, files).map(|_| PackSummary { bytes, experts, written: false });
    }
    let failed = StoreError::at(out);
    if fs::read_dir(out).map_or(out.exists(), |mut entries| entries.next().is_some()) {
        return Err(StoreError::Other(format!("{} is neither empty nor a pack", out.display())));
    }
    os::check_free_space(out, "the pack", bytes, "; choose another directory with --out").map_err(failed)?;
    let before = settled_identity(files)?;
    // Reads from these open files fail if a file was modified after it was opened.
    let source = ShardFiles::open(files, Access::Buffered)?;
    let partial = PartialDir::create(out).map_err(failed)?;
    let mut layers = Vec::with_capacity(plans.len());
    for (mut layer, experts) in plans.into_iter().zip(&map.layers) {
        let path = partial.path().join(&layer.file);
        let sums = write_layer(&source, experts, &layer, &path, progress)?;
        read_back(&layer, &sums, &path, progress)?;
        (layer.sha256, layer.crc32) = sums.into_iter().map(|sum| (sum.sha256, sum.crc32)).unzip();
        layers.push(layer);
    }
    let identity = unchanged_identity(before, files).unwrap_or_default();
    let manifest = PackManifest { format: FORMAT.into(), version: VERSION, source: fingerprint, identity, layers };
    let path = partial.path().join(MANIFEST);
    let text = serde_json::to_vec(&manifest).map_err(|error| StoreError::Other(error.to_string()))?;
    let write = || {
        let mut file = File::create_new(&path)?;
        file.write_all(&text)?;
        file.sync_all()
    };
    write().map_err(StoreError::at(&path))?;
    partial.finish(out).map_err(failed)?;
    Ok(PackSummary { bytes, experts, written: true })
}

/// Computes the offsets of the pieces in the records of a layer.
fn plan_layer(index: usize, experts: &[[Piece; PIECES]]) -> Result<LayerManifest, StoreError> {
    let lens = experts.first().map_or([0; PIECES], |pieces| pieces.map(|piece| piece.len));
    if experts.iter().any(|pieces| pieces.map(|piece| piece.len) != lens) {
        return Err(StoreError::Other(format!("cannot pack layer {index}: its experts differ in size")));
    }
    let mut end = 0u64;
    let pieces = lens.map(|len| {
        let at = end.next_multiple_of(PIECE_ALIGN);
        end = at + len as u64;
        (at, len)
    });
    let stride = end.next_multiple_of(RECORD_ALIGN);
    let file = format!("layer-{index:03}.experts");
    Ok(LayerManifest { file, stride, pieces, sha256: Vec::new(), crc32: Vec::new() })
}

fn write_layer(
    source: &ShardFiles,
    experts: &[[Piece; PIECES]],
    layer: &LayerManifest,
    path: &Path,
    progress: OnBytes<'_>,
) -> Result<Vec<RecordChecksums>, StoreError> {
    let failed = StoreError::at(path);
    let file = File::create_new(path).map_err(failed)?;
    let sums = for_each_expert(experts.iter(), layer.stride as usize, |expert, pieces, [record, _]| {
        gather(source, pieces, layer, record)?;
        file.write_all_at(record, expert as u64 * layer.stride).map_err(failed)?;
        progress(layer.stride);
        Ok(RecordChecksums::of(record, layer))
    })?;
    file.sync_all().map_err(failed)?;
    Ok(sums)
}

fn read_back(
    layer: &LayerManifest,
    sums: &[RecordChecksums],
    path: &Path,
    progress: OnBytes<'_>,
) -> Result<(), StoreError> {
    let disk = open(path)?;
    for_each_expert(sums.iter(), layer.stride as usize, |expert, sum, [record, _]| {
        read(&disk, expert, layer, record)?;
        if RecordChecksums::of(record, layer) != *sum {
            let why = format!("expert {expert} does not read back as written: the disk or the memory is faulty");
            return Err(StoreError::at(path)(io::Error::new(io::ErrorKind::InvalidData, why)));
        }
        progress(layer.stride);
        Ok(())
    })?;
    Ok(())
}
