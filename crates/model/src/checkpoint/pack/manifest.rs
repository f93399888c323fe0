//! [`PackManifest`]: the description of a pack. Manifests are untrusted input.

use moestro_base::{error::StoreError, platform::read_small_file};
use moestro_compute::experts::{ExpertMap, LayerExperts, LayerRecords, PIECES, Piece};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::{
    fs,
    path::{Component, Path, PathBuf},
};

pub const MANIFEST: &str = "manifest.json";
pub const FORMAT: &str = "moestro experts";
pub const VERSION: u32 = 2;
/// Alignment of records in bytes: the page size of Apple silicon and a multiple of the block size of common
/// disks.
pub const RECORD_ALIGN: u64 = 16 << 10;
/// Alignment of pieces within a record, in bytes: the size of a cache line.
pub const PIECE_ALIGN: u64 = 64;
/// Maximum size of a manifest in bytes. The manifest of the largest model has two million bytes.
const MAX_BYTES: u64 = 64 << 20;

#[derive(Debug, Serialize, Deserialize)]
pub struct PackManifest {
    pub format: String,
    pub version: u32,
    /// The fingerprint of the checkpoint.
    pub source: String,
    /// The identity of the checkpoint's files. Empty if these files were changed shortly before or during packing.
    #[serde(default)]
    pub identity: String,
    pub layers: Vec<LayerManifest>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct LayerManifest {
    pub file: String,
    pub stride: u64,
    /// Offset in the record, and length, of each piece.
    pub pieces: [(u64, usize); PIECES],
    /// First 32 hexadecimal digits of the SHA-256 of each whole record.
    pub sha256: Vec<String>,
    /// CRC-32 of the bytes of each record up to the end of the last piece.
    #[serde(default)]
    pub crc32: Vec<u32>,
}

/// The fields that a manifest of any version has.
#[derive(Deserialize)]
struct ManifestVersion {
    format: String,
    version: u32,
}

impl PackManifest {
    /// Reads the manifest in `dir`. Returns the manifest and the SHA-256 of its text.
    ///
    /// # Errors
    /// The file is missing, not a manifest, or of another version.
    pub fn read(dir: &Path) -> Result<(Self, [u8; 32]), StoreError> {
        let path = dir.join(MANIFEST);
        let wrong = |why: String| StoreError::NotAPack { path: dir.to_owned(), why };
        let text = read_small_file(&path, MAX_BYTES).map_err(StoreError::at(&path))?;
        let head: ManifestVersion = serde_json::from_slice(&text).map_err(|error| wrong(error.to_string()))?;
        match (head.format.as_str(), head.version) {
            (FORMAT, VERSION) => {}
            (FORMAT, 1) => {
                return Err(wrong("version 1 has no checksums: remove the pack, then run `moestro pack` again".into()));
            }
            (format, version) => return Err(wrong(format!("unsupported format {format:?} version {version}"))),
        }
        let manifest = serde_json::from_slice(&text).map_err(|error| wrong(error.to_string()))?;
        Ok((manifest, Sha256::digest(&text).into()))
    }

    /// Checks that the manifest and the file sizes of the pack in `dir` match a checkpoint with fingerprint `source`
    /// and experts `map`. Does not read experts.
    pub fn check(&self, dir: &Path, source: &str, map: &ExpertMap) -> Result<(), StoreError> {
        let wrong = |why: String| StoreError::NotAPack { path: dir.to_owned(), why };
        if self.source != source {
            return Err(wrong("the pack was made from another checkpoint".into()));
        }
        let ours = self.layers.len();
        let theirs = map.layers.len();
        if ours != theirs {
            return Err(wrong(format!("the pack has {ours} layers, the checkpoint {theirs}")));
        }
        for (index, (layer, experts)) in self.layers.iter().zip(&map.layers).enumerate() {
            let lens = layer.pieces.map(|(_, len)| len);
            let sums = [layer.sha256.len(), layer.crc32.len()];
            if !layer.is_valid() || sums != [experts.len(); 2] || experts.iter().any(|e| e.map(|p| p.len) != lens) {
                return Err(wrong(format!("the experts of layer {index} differ from the checkpoint's")));
            }
            let file = layer.path(dir).ok_or_else(|| wrong(format!("{:?} is not a file name", layer.file)))?;
            let meta = fs::metadata(&file).map_err(StoreError::at(&file))?;
            if !meta.is_file() || Some(meta.len()) != layer.stride.checked_mul(experts.len() as u64) {
                return Err(wrong(format!("{} has {} bytes", layer.file, meta.len())));
            }
        }
        Ok(())
    }

    /// The location of each piece of each expert in the files of the pack.
    pub fn map(&self) -> ExpertMap {
        let record = |file: usize, expert: u64, layer: &LayerManifest| {
            layer.pieces.map(|(at, len)| Piece { file: file as u32, offset: expert * layer.stride + at, len })
        };
        let experts = |(file, layer): (usize, &LayerManifest)| {
            (0..layer.sha256.len() as u64).map(|expert| record(file, expert, layer)).collect()
        };
        ExpertMap { layers: self.layers.iter().enumerate().map(experts).collect() }
    }

    /// The records of each file: the checksums of the records, and the location of each expert in the checkpoint, from
    /// `map`.
    pub fn records(&self, map: &ExpertMap) -> Vec<LayerRecords> {
        let layers = self.layers.iter().zip(&map.layers);
        let records = |(layer, experts): (&LayerManifest, &LayerExperts)| {
            LayerRecords::new(layer.stride, layer.pieces, layer.crc32.iter().copied().zip(experts.iter().copied()))
        };
        layers.map(records).collect()
    }
}

impl LayerManifest {
    /// The path of the layer's file in `dir`. `None` if the name is not a plain file name.
    pub fn path(&self, dir: &Path) -> Option<PathBuf> {
        let mut parts = Path::new(&self.file).components();
        let is_plain = matches!((parts.next(), parts.next()), (Some(Component::Normal(_)), None));
        is_plain.then(|| dir.join(&self.file))
    }

    /// The end of the last piece, in bytes from the start of the record.
    pub fn end(&self) -> u64 {
        let ends = self.pieces.iter().filter(|(_, len)| *len > 0).map(|&(at, len)| at.saturating_add(len as u64));
        ends.max().unwrap_or(0)
    }

    /// True if records and pieces are aligned, and no two pieces are separated by more than the alignment requires.
    fn is_valid(&self) -> bool {
        let mut end = 0u64;
        let in_order = self.pieces.iter().all(|&(at, len)| {
            let fits = at == end.next_multiple_of(PIECE_ALIGN);
            end = at.saturating_add(len as u64).min(u64::MAX - PIECE_ALIGN);
            fits
        });
        in_order && end > 0 && self.stride == end.next_multiple_of(RECORD_ALIGN)
    }
}
