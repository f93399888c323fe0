//! Packed experts: one page-aligned record per expert, so that a miss is one read instead of nine.
//!
//! A pack is a directory of its own; the checkpoint is never written to. It holds one file a layer, `layer-000.experts`
//! and so on, and a manifest:
//!
//! ```text
//! { "format": "moestro experts", "version": 1, "source": IDENTITY,
//!   "layers": [ { "file": NAME, "stride": BYTES, "pieces": [[OFFSET, LEN]; 9], "sha256": [HEX; experts] } ] }
//! ```
//!
//! Expert `e` of a layer is the record at byte `e * stride`: its nine pieces (codes, scales, biases of gate, up, down)
//! at the manifest's offsets, the rest zero. The stride is a multiple of 16 KiB, the largest page in use. The identity is
//! a hash of the checkpoint's sizes, headers and samples of its data, so a pack outlives a move of the checkpoint but
//! not another revision of it.
//!
//! A pack is looked for as `NAME.pack` beside the checkpoint directory `NAME`, then in the cache directory under its
//! identity; where `--out` put it elsewhere, the cache holds a link to it.

mod identity;
mod write;

pub use identity::identity;
pub use write::{Summary, write};

use crate::experts::{ExpertMap, PIECES, Piece};
use crate::{error::StoreError, platform::os};
use serde::{Deserialize, Serialize};
use std::{
    fs, io,
    path::{Path, PathBuf},
};

const MANIFEST: &str = "manifest.json";
const FORMAT: &str = "moestro experts";
const VERSION: u32 = 1;
/// Records start at multiples of this: a page of every system, and a block of every disk.
const PAGE: u64 = 16 << 10;
/// Pieces within a record start at multiples of this: a cache line.
const LINE: u64 = 64;

#[derive(Debug, Serialize, Deserialize)]
struct Manifest {
    format: String,
    version: u32,
    source: String,
    layers: Vec<Layer>,
}

#[derive(Debug, Serialize, Deserialize)]
struct Layer {
    file: String,
    stride: u64,
    /// Offset in the record and length.
    pieces: [(u64, usize); PIECES],
    /// Of each record, first 16 hexadecimal digits.
    sha256: Vec<String>,
}

/// Packed experts that belong to a checkpoint.
#[derive(Debug)]
pub struct Pack {
    pub dir: PathBuf,
    /// Where the experts lie in `files`.
    pub map: ExpertMap,
    pub files: Vec<PathBuf>,
}

/// Where a pack of this identity goes by default.
pub fn default_dir(identity: &str) -> Option<PathBuf> {
    Some(os::cache_dir()?.join("packs").join(identity))
}

/// The pack of the checkpoint in the directory `model`, whose experts are `map` in `files`, if there is one. One that
/// is there but does not match is reported in the log and not used.
pub fn find(model: &Path, map: &ExpertMap, files: &[PathBuf]) -> Option<Pack> {
    let beside = beside(model).filter(|dir| dir.join(MANIFEST).exists());
    let cached = os::cache_dir().map(|dir| dir.join("packs")).filter(|dir| dir.exists());
    if beside.is_none() && cached.is_none() {
        return None;
    }
    let identity = identity(files).inspect_err(|error| tracing::warn!(%error, "no pack is used")).ok()?;
    let cached = cached.map(|dir| dir.join(&identity)).filter(|dir| dir.join(MANIFEST).exists());
    [beside, cached].into_iter().flatten().find_map(|dir| match open(&dir, &identity, map) {
        Ok(pack) => Some(pack),
        Err(error) => {
            tracing::warn!(%error, "this pack is not used; the experts are read from the checkpoint");
            None
        }
    })
}

/// `NAME.pack` for the checkpoint directory `NAME`.
fn beside(model: &Path) -> Option<PathBuf> {
    let model = fs::canonicalize(model).ok()?;
    let mut name = model.file_name()?.to_owned();
    name.push(".pack");
    Some(model.with_file_name(name))
}

/// Opens a pack that has to hold exactly the experts of `map`.
pub fn open(dir: &Path, identity: &str, map: &ExpertMap) -> Result<Pack, StoreError> {
    let path = dir.join(MANIFEST);
    let wrong = |why: String| StoreError::NotAPack { path: dir.to_owned(), why };
    let text = fs::read(&path).map_err(|source| StoreError::Io { path: path.clone(), source })?;
    let manifest: Manifest = serde_json::from_slice(&text).map_err(|error| wrong(error.to_string()))?;
    if manifest.format != FORMAT || manifest.version != VERSION {
        return Err(wrong(format!("it is {:?} version {}", manifest.format, manifest.version)));
    }
    if manifest.source != identity {
        return Err(wrong("it was made from another checkpoint".into()));
    }
    if manifest.layers.len() != map.layers.len() {
        return Err(wrong(format!("it has {} layers, the checkpoint {}", manifest.layers.len(), map.layers.len())));
    }
    let mut pack = Pack { dir: dir.to_owned(), map: ExpertMap::default(), files: Vec::new() };
    for (index, (layer, experts)) in manifest.layers.iter().zip(&map.layers).enumerate() {
        let file = dir.join(&layer.file);
        let len = |piece: &Piece| piece.len;
        let lens = layer.pieces.map(|(_, len)| len);
        let fits = layer.pieces.iter().all(|&(at, len)| at.checked_add(len as u64).is_some_and(|e| e <= layer.stride));
        if !fits || layer.sha256.len() != experts.len() || experts.iter().any(|e| e.each_ref().map(len) != lens) {
            return Err(wrong(format!("layer {index} has other experts than the checkpoint's")));
        }
        let size = fs::metadata(&file).map_err(|source| StoreError::Io { path: file.clone(), source })?.len();
        if Some(size) != layer.stride.checked_mul(experts.len() as u64) {
            return Err(wrong(format!("{} has {size} bytes", layer.file)));
        }
        pack.map.layers.push((0..experts.len() as u64).map(|e| record(index as u32, e, layer)).collect());
        pack.files.push(file);
    }
    Ok(pack)
}

/// The pieces of one expert's record.
fn record(file: u32, expert: u64, layer: &Layer) -> [Piece; PIECES] {
    layer.pieces.map(|(at, len)| Piece { file, offset: expert * layer.stride + at, len })
}

/// Remembers in the cache that the pack of this identity lies in `dir`.
pub fn link(identity: &str, dir: &Path) -> Result<(), StoreError> {
    let Some(link) = default_dir(identity) else { return Ok(()) };
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

#[cfg(test)]
mod tests;
