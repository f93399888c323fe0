//! A pack's description of itself, read with care: the files may have been written by anybody.

use crate::{
    error::StoreError,
    experts::{ExpertMap, LayerExperts, LayerRecords, PIECES, Piece},
    platform::read_small_file,
};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::{
    fs,
    path::{Component, Path, PathBuf},
};

pub const MANIFEST: &str = "manifest.json";
pub const FORMAT: &str = "moestro experts";
pub const VERSION: u32 = 2;
/// LayerRecords start at multiples of this: a page of every system, and a block of every disk.
pub const PAGE: u64 = 16 << 10;
/// Pieces within a record start at multiples of this: a cache line.
pub const LINE: u64 = 64;
/// Bytes of a manifest at most: the largest model's has two millions.
const MOST: u64 = 64 << 20;

#[derive(Debug, Serialize, Deserialize)]
pub struct PackManifest {
    pub format: String,
    pub version: u32,
    /// The checkpoint's fingerprint.
    pub source: String,
    /// The identity of the files that were packed; empty if they were too young to have one.
    #[serde(default)]
    pub identity: String,
    pub layers: Vec<LayerManifest>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct LayerManifest {
    pub file: String,
    pub stride: u64,
    /// Offset in the record and length.
    pub pieces: [(u64, usize); PIECES],
    /// Of each whole record, first 32 hexadecimal digits.
    pub sha256: Vec<String>,
    /// Of each record up to the end of its last piece.
    #[serde(default)]
    pub crc32: Vec<u32>,
}

/// The version alone: all that can be said of a manifest of another one.
#[derive(Deserialize)]
struct ManifestVersion {
    format: String,
    version: u32,
}

impl PackManifest {
    /// Reads the manifest in `dir`, with a hash of its text.
    ///
    /// # Errors
    /// It is not there, is not a manifest, or is of another version.
    pub fn read(dir: &Path) -> Result<(Self, [u8; 32]), StoreError> {
        let path = dir.join(MANIFEST);
        let wrong = |why: String| StoreError::NotAPack { path: dir.to_owned(), why };
        let text = read_small_file(&path, MOST).map_err(|source| StoreError::Io { path: path.clone(), source })?;
        let said: ManifestVersion = serde_json::from_slice(&text).map_err(|error| wrong(error.to_string()))?;
        match (said.format.as_str(), said.version) {
            (FORMAT, VERSION) => {}
            (FORMAT, 1) => {
                return Err(wrong(
                    "it is of version 1, without checksums: remove it, then `moestro pack` again".into(),
                ));
            }
            (format, version) => return Err(wrong(format!("it is {format:?} version {version}"))),
        }
        let manifest = serde_json::from_slice(&text).map_err(|error| wrong(error.to_string()))?;
        Ok((manifest, Sha256::digest(&text).into()))
    }

    /// Checks that this can be the pack in `dir` of exactly the experts of `map`, without reading them.
    pub fn check(&self, dir: &Path, source: &str, map: &ExpertMap) -> Result<(), StoreError> {
        let wrong = |why: String| StoreError::NotAPack { path: dir.to_owned(), why };
        if self.source != source {
            return Err(wrong("it was made from another checkpoint".into()));
        }
        if self.layers.len() != map.layers.len() {
            return Err(wrong(format!("it has {} layers, the checkpoint {}", self.layers.len(), map.layers.len())));
        }
        for (index, (layer, experts)) in self.layers.iter().zip(&map.layers).enumerate() {
            let lens = layer.pieces.map(|(_, len)| len);
            let sums = [layer.sha256.len(), layer.crc32.len()];
            if !layer.is_sound() || sums != [experts.len(); 2] || experts.iter().any(|e| e.map(|p| p.len) != lens) {
                return Err(wrong(format!("layer {index} has other experts than the checkpoint's")));
            }
            let file = layer.path(dir).ok_or_else(|| wrong(format!("{:?} is no file's name", layer.file)))?;
            let meta = fs::metadata(&file).map_err(|source| StoreError::Io { path: file.clone(), source })?;
            if !meta.is_file() || Some(meta.len()) != layer.stride.checked_mul(experts.len() as u64) {
                return Err(wrong(format!("{} has {} bytes", layer.file, meta.len())));
            }
        }
        Ok(())
    }

    /// The experts' places in the layers' files.
    pub fn map(&self) -> ExpertMap {
        let record = |file: usize, expert: u64, layer: &LayerManifest| {
            layer.pieces.map(|(at, len)| Piece { file: file as u32, offset: expert * layer.stride + at, len })
        };
        let experts = |(file, layer): (usize, &LayerManifest)| {
            (0..layer.sha256.len() as u64).map(|expert| record(file, expert, layer)).collect()
        };
        ExpertMap { layers: self.layers.iter().enumerate().map(experts).collect() }
    }

    /// The checksums that records are read against, with the experts' places in the checkpoint.
    pub fn records(&self, map: &ExpertMap) -> Vec<LayerRecords> {
        let layers = self.layers.iter().zip(&map.layers);
        let records = |(layer, experts): (&LayerManifest, &LayerExperts)| {
            LayerRecords::new(layer.stride, layer.pieces, layer.crc32.iter().copied().zip(experts.iter().copied()))
        };
        layers.map(records).collect()
    }
}

impl LayerManifest {
    /// The path of its file, directly in `dir`; `None` for a name that leads elsewhere.
    pub fn path(&self, dir: &Path) -> Option<PathBuf> {
        let mut parts = Path::new(&self.file).components();
        let plain = matches!((parts.next(), parts.next()), (Some(Component::Normal(_)), None));
        plain.then(|| dir.join(&self.file))
    }

    /// The end of the last piece, in bytes from the record's start.
    pub fn end(&self) -> u64 {
        let ends = self.pieces.iter().filter(|(_, len)| *len > 0).map(|&(at, len)| at.saturating_add(len as u64));
        ends.max().unwrap_or(0)
    }

    /// LayerRecords of whole pages, in which the pieces follow one another from the start on.
    fn is_sound(&self) -> bool {
        let mut end = 0u64;
        let in_order = self.pieces.iter().all(|&(at, len)| {
            let fits = at == end.next_multiple_of(LINE);
            end = at.saturating_add(len as u64).min(u64::MAX - LINE);
            fits
        });
        in_order && end > 0 && self.stride == end.next_multiple_of(PAGE)
    }
}
