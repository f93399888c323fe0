//! Finds the pack that stands in for a checkpoint.

use super::{
    fingerprint,
    manifest::{MANIFEST, PackManifest},
    verify::compare,
};
use crate::{
    checkpoint::identity::{file_identity, settled_identity},
    error::StoreError,
    experts::{ExpertMap, PackRecords, ShardFiles},
    platform::{Access, atomic_file, os, read_small_file},
};
use std::{
    fs, io,
    path::{Path, PathBuf},
    sync::Arc,
};

/// PackRecords experts that belong to a checkpoint.
#[derive(Debug)]
pub struct Pack {
    pub dir: PathBuf,
    /// The experts' places in `files`.
    pub map: ExpertMap,
    pub files: Vec<PathBuf>,
    /// The checksums that records are read against, and the checkpoint, which is read if they differ.
    pub records: Arc<PackRecords>,
}

/// The default directory of the pack of `files`: named by their fingerprint and their identity, so that two
/// checkpoints with one fingerprint get two packs.
pub fn default_dir(files: &[PathBuf]) -> Result<Option<PathBuf>, StoreError> {
    let Some(packs) = cache() else { return Ok(None) };
    Ok(Some(packs.join(format!("{}-{}", fingerprint(files)?, &file_identity(files)?[..8]))))
}

fn cache() -> Option<PathBuf> {
    Some(os::cache_dir()?.join("packs"))
}

/// The pack of the checkpoint in the directory `model`, whose experts are `map` in `files`, if there is one. One that
/// is there but does not match is reported in the log and not used.
pub fn find(model: &Path, map: &ExpertMap, files: &[PathBuf]) -> Option<Pack> {
    let dirs = candidates(model, files).inspect_err(|error| tracing::warn!(%error, "no pack is used")).ok()?;
    dirs.into_iter().find_map(|dir| match open(&dir, map, files) {
        Ok(pack) => Some(pack),
        Err(error) => {
            tracing::warn!(%error, "this pack is not used; the experts are read from the checkpoint");
            None
        }
    })
}

/// The directories of all packs that may be of these files, as far as can be said without reading much.
pub fn candidates(model: &Path, files: &[PathBuf]) -> Result<Vec<PathBuf>, StoreError> {
    let mut dirs: Vec<PathBuf> = beside(model).filter(|dir| dir.join(MANIFEST).exists()).into_iter().collect();
    if let Some(cached) = cache().filter(|dir| dir.exists()) {
        dirs.extend(named(&cached, &fingerprint(files)?));
    }
    Ok(dirs)
}

/// `NAME.pack` for the checkpoint directory `NAME`.
fn beside(model: &Path) -> Option<PathBuf> {
    let model = fs::canonicalize(model).ok()?;
    let mut name = model.file_name()?.to_owned();
    name.push(".pack");
    Some(model.with_file_name(name))
}

/// The packs in the cache whose names begin with a fingerprint, in order.
fn named(cache: &Path, fingerprint: &str) -> Vec<PathBuf> {
    let entries = fs::read_dir(cache).into_iter().flatten().flatten();
    let mut found: Vec<PathBuf> = entries
        .filter(|entry| entry.file_name().to_string_lossy().starts_with(fingerprint))
        .map(|entry| entry.path())
        .filter(|dir| dir.join(MANIFEST).exists())
        .collect();
    found.sort();
    found
}

/// Opens a pack that has to hold exactly the experts of `map` in `files`. Unless these files are known to hold what the pack does, all experts are read and hashed.
pub fn open(dir: &Path, map: &ExpertMap, files: &[PathBuf]) -> Result<Pack, StoreError> {
    let (manifest, text) = PackManifest::read(dir)?;
    manifest.check(dir, &fingerprint(files)?, map)?;
    // Opened before they are looked at: what is read later is what was hashed.
    let checkpoint = ShardFiles::open(files, Access::Buffered)?;
    let now = settled_identity(files)?;
    let known = now.is_some_and(|now| now == manifest.identity || is_remembered(&now, &text));
    if !known {
        tracing::info!(
            dir = %dir.display(),
            bytes = map.bytes(),
            "the checkpoint's files are not known to be those this pack was made from: their experts are hashed, once"
        );
        compare(dir, &manifest, &text, map, files)?;
    }
    let records = Arc::new(PackRecords::new(manifest.records(map), checkpoint));
    let files = manifest.layers.iter().filter_map(|layer| layer.path(dir)).collect();
    Ok(Pack { dir: dir.to_owned(), map: manifest.map(), files, records })
}

/// The file that says which packs the files of an identity have been compared with.
fn memo(identity: &str) -> Option<PathBuf> {
    Some(cache()?.join("compared").join(identity))
}

fn is_remembered(identity: &str, manifest: &[u8; 32]) -> bool {
    let text = memo(identity).and_then(|path| read_small_file(&path, 1 << 20).ok());
    text.is_some_and(|text| text.split(|byte| *byte == b'\n').any(|line| line == hex::encode(manifest).as_bytes()))
}

/// Remembers that `files`, whose identity was `before` when they began to be read, hold what the manifest with this
/// hash says. Nothing is remembered of files that have changed meanwhile, or changed so recently that the next change
/// could go unnoticed.
pub(super) fn remember(before: Option<String>, files: &[PathBuf], manifest: &[u8; 32]) {
    let Some(identity) = before.filter(|before| settled_identity(files).is_ok_and(|now| now.as_ref() == Some(before)))
    else {
        return;
    };
    let Some(path) = memo(&identity).filter(|_| !is_remembered(&identity, manifest)) else { return };
    let mut text = read_small_file(&path, 1 << 20).unwrap_or_default();
    text.extend_from_slice(format!("{}\n", hex::encode(manifest)).as_bytes());
    if let Err(error) = atomic_file::replace_file(&path, &text) {
        tracing::debug!(%error, path = %path.display(), "not kept: the experts will be hashed again");
    }
}

/// Remembers in the cache that the pack of these files lies in `dir`.
pub fn link(files: &[PathBuf], dir: &Path) -> Result<(), StoreError> {
    let Some(link) = default_dir(files)? else { return Ok(()) };
    let at = |path: &Path| {
        let path = path.to_owned();
        move |source| StoreError::Io { path, source }
    };
    let target = fs::canonicalize(dir).map_err(at(dir))?;
    if let Some(parent) = link.parent() {
        fs::create_dir_all(parent).map_err(at(parent))?;
    }
    if link.symlink_metadata().is_ok_and(|meta| meta.is_symlink()) {
        fs::remove_file(&link).map_err(at(&link))?;
    }
    match std::os::unix::fs::symlink(target, &link) {
        // A pack lies there already.
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        other => other.map_err(at(&link)),
    }
}
