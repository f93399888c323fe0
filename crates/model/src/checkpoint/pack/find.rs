//! Finds and opens the pack of a checkpoint.

use super::{
    manifest::{MANIFEST, PackManifest},
    record::{RecordChecksums, for_each_expert, gather},
};
use crate::checkpoint::identity::{file_identity, fingerprint, settled_identity, unchanged_identity};
use moestro_base::{
    error::StoreError,
    platform::{
        Access,
        atomic_file::{self, PartialDir},
        os, read_small_file,
    },
};
use moestro_compute::experts::{ExpertMap, PackRecords, ShardFiles};
use std::{
    fs, io,
    path::{Path, PathBuf},
    sync::Arc,
};

/// The directory of comparisons in the directory of packs.
const COMPARISONS: &str = "compared";

/// A pack that belongs to a checkpoint.
#[derive(Debug)]
pub struct Pack {
    pub dir: PathBuf,
    /// Location of each piece of each expert in `files`.
    pub map: ExpertMap,
    pub files: Vec<PathBuf>,
    /// Checksums of the records, and the checkpoint from which damaged records are rebuilt.
    pub records: Arc<PackRecords>,
}

/// The default directory for the pack of a checkpoint with these `files`. The directory's name consists of fingerprint
/// and identity, so that two checkpoints with the same fingerprint have different directories. `None` if there is no
/// cache directory.
pub fn default_dir(files: &[PathBuf]) -> Result<Option<PathBuf>, StoreError> {
    let Some(packs) = packs_dir() else { return Ok(None) };
    Ok(Some(packs.join(format!("{}-{}", fingerprint(files)?, &file_identity(files)?[..8]))))
}

fn packs_dir() -> Option<PathBuf> {
    Some(os::cache_dir()?.join("packs"))
}

/// Finds the pack of the checkpoint in directory `model`. The experts of the checkpoint are at `map` in `files`. Skips
/// packs that do not match the checkpoint, with a warning.
pub fn find(model: &Path, map: &ExpertMap, files: &[PathBuf]) -> Option<Pack> {
    let dirs = candidates(model, files)
        .inspect_err(|error| tracing::warn!(%error, "cannot search for a pack; reading experts from the checkpoint"))
        .ok()?;
    let warn = |error: &StoreError| tracing::warn!(%error, "cannot use this pack; reading experts from the checkpoint");
    dirs.into_iter().find_map(|dir| open(&dir, map, files).inspect_err(warn).ok())
}

/// The directories of all packs that may belong to these files. Compares only fingerprints.
pub fn candidates(model: &Path, files: &[PathBuf]) -> Result<Vec<PathBuf>, StoreError> {
    let mut dirs: Vec<PathBuf> = sibling_dir(model).filter(|dir| dir.join(MANIFEST).exists()).into_iter().collect();
    if let Some(cached) = packs_dir().filter(|dir| dir.exists()) {
        dirs.extend(with_fingerprint(&cached, &fingerprint(files)?));
    }
    Ok(dirs)
}

/// The directory `NAME.pack` for the checkpoint directory `NAME`.
fn sibling_dir(model: &Path) -> Option<PathBuf> {
    let model = fs::canonicalize(model).ok()?;
    let mut name = model.file_name()?.to_owned();
    name.push(".pack");
    Some(model.with_file_name(name))
}

/// All packs in the cache directory, sorted: also links, and directories that are not complete.
pub fn all() -> Vec<PathBuf> {
    let Some(entries) = packs_dir().and_then(|cache| fs::read_dir(cache).ok()) else { return Vec::new() };
    let is_pack = |path: &PathBuf| (path.is_dir() || path.is_symlink()) && !path.ends_with(COMPARISONS);
    let mut packs: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).filter(is_pack).collect();
    packs.sort();
    packs
}

/// True if a pack was written completely.
pub fn is_complete(pack: &Path) -> bool {
    pack.join(MANIFEST).exists()
}

/// Removes a pack, or the link to it.
///
/// # Errors
/// A process is writing the pack, or a file cannot be removed.
pub fn remove(pack: &Path) -> io::Result<()> {
    if pack.is_symlink() {
        fs::remove_file(pack)
    } else if is_complete(pack) {
        fs::remove_dir_all(pack)
    } else {
        PartialDir::remove_abandoned(pack)
    }
}

/// The packs in the cache directory whose names start with `fingerprint`, sorted.
fn with_fingerprint(cache: &Path, fingerprint: &str) -> Vec<PathBuf> {
    let entries = fs::read_dir(cache).into_iter().flatten().flatten();
    let mut found: Vec<PathBuf> = entries
        .filter(|entry| entry.file_name().to_string_lossy().starts_with(fingerprint))
        .map(|entry| entry.path())
        .filter(|dir| dir.join(MANIFEST).exists())
        .collect();
    found.sort();
    found
}

/// Opens a pack that must contain exactly the experts at `map` in `files`. If the files are not yet known to match the
/// pack, hashes all of their experts.
pub fn open(dir: &Path, map: &ExpertMap, files: &[PathBuf]) -> Result<Pack, StoreError> {
    let (manifest, text) = PackManifest::read(dir)?;
    manifest.check(dir, &fingerprint(files)?, map)?;
    // Later reads use the files that are opened here. The identity is theirs only if it did not change meanwhile.
    let before = settled_identity(files)?;
    let checkpoint = ShardFiles::open(files, Access::Buffered)?;
    let identity = unchanged_identity(before, files);
    if !identity.as_ref().is_some_and(|found| *found == manifest.identity || is_remembered(found, &text)) {
        tracing::info!(
            dir = %dir.display(),
            bytes = map.bytes(),
            "hashing the checkpoint's experts once to check that this pack was made from them"
        );
        compare(dir, &manifest, map, &checkpoint)?;
        remember_comparison(identity, files, &text);
    }
    let records = Arc::new(PackRecords::new(manifest.records(map), checkpoint));
    let files = manifest.layers.iter().filter_map(|layer| layer.path(dir)).collect();
    Ok(Pack { dir: dir.to_owned(), map: manifest.map(), files, records })
}

/// Compares every expert of the checkpoint with its SHA-256 in the manifest. Does not read the records of the pack.
fn compare(dir: &Path, manifest: &PackManifest, map: &ExpertMap, checkpoint: &ShardFiles) -> Result<(), StoreError> {
    for (index, (layer, experts)) in manifest.layers.iter().zip(&map.layers).enumerate() {
        let experts = experts.iter().zip(&layer.sha256);
        for_each_expert(experts, layer.stride as usize, |expert, (pieces, sha256), [record, _]| {
            gather(checkpoint, pieces, layer, record)?;
            if RecordChecksums::of(record, layer).sha256 == *sha256 {
                return Ok(());
            }
            let why = format!("the pack was made from another checkpoint: layer {index}, expert {expert} differs");
            Err(StoreError::NotAPack { path: dir.to_owned(), why })
        })?;
    }
    Ok(())
}

/// Path of the file that remembers comparisons for checkpoint files with this identity. That file lists the hashes of
/// the manifests that match the checkpoint files.
fn comparisons_file(identity: &str) -> Option<PathBuf> {
    Some(packs_dir()?.join(COMPARISONS).join(identity))
}

pub(super) fn is_remembered(identity: &str, manifest: &[u8; 32]) -> bool {
    let text = comparisons_file(identity).and_then(|path| read_small_file(&path, 1 << 20).ok());
    text.is_some_and(|text| text.split(|byte| *byte == b'\n').any(|line| line == hex::encode(manifest).as_bytes()))
}

/// Remembers that `files` match the manifest with this hash. `before` is the [`settled_identity`] of the files before
/// they were read. Does nothing if the files have changed since then, or so recently that another change could be
/// missed.
pub(super) fn remember_comparison(before: Option<String>, files: &[PathBuf], manifest: &[u8; 32]) {
    let Some(identity) = unchanged_identity(before, files) else { return };
    let Some(path) = comparisons_file(&identity).filter(|_| !is_remembered(&identity, manifest)) else { return };
    let mut text = read_small_file(&path, 1 << 20).unwrap_or_default();
    text.extend_from_slice(format!("{}\n", hex::encode(manifest)).as_bytes());
    if let Err(error) = atomic_file::replace_file(&path, &text) {
        tracing::debug!(%error, path = %path.display(), "cannot remember the comparison; the experts will be hashed again");
    }
}

/// Creates a link in the cache directory that points to the pack in `dir`, so that a search for these files finds the
/// pack.
pub fn link(files: &[PathBuf], dir: &Path) -> Result<(), StoreError> {
    let Some(link) = default_dir(files)? else { return Ok(()) };
    let target = fs::canonicalize(dir).map_err(StoreError::at(dir))?;
    if let Some(parent) = link.parent() {
        fs::create_dir_all(parent).map_err(StoreError::at(parent))?;
    }
    let at = StoreError::at(&link);
    if link.symlink_metadata().is_ok_and(|meta| meta.is_symlink()) {
        fs::remove_file(&link).map_err(at)?;
    }
    match std::os::unix::fs::symlink(target, &link) {
        // The cache directory already has a pack of these files.
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        other => other.map_err(at),
    }
}
