//! [`Shard`]: a checkpoint with only experts. The position of a byte determines its value.
#![allow(dead_code)] // Each test binary uses a part of this file.

use moestro_base::error::StoreError;
use moestro_compute::{
    device::{CpuTimeline, SyncPoint},
    experts::{ExpertChoice, ExpertMap, ExpertStore, PIECES, PassSize, Piece},
};
use std::{
    fs,
    path::{Path, PathBuf},
};

pub const EXPERTS: usize = 6;
pub const LAYERS: usize = 2;

pub struct Shard {
    pub map: ExpertMap,
    /// The path of the checkpoint's only file.
    pub files: [PathBuf; 1],
    pub bytes: Vec<u8>,
}

impl Shard {
    /// Creates the checkpoint in `dir/model`. Each expert has nine pieces of `len` bytes.
    pub fn new(dir: &Path, len: usize) -> Self {
        let expert = |layer: usize, expert: usize| {
            std::array::from_fn(|part| {
                let nth = (layer * EXPERTS + expert) * PIECES + part;
                Piece { file: 0, offset: (10 + nth * len) as u64, len }
            })
        };
        let map = ExpertMap { layers: (0..LAYERS).map(|l| (0..EXPERTS).map(|e| expert(l, e)).collect()).collect() };
        let data = (0..LAYERS * EXPERTS * PIECES * len).map(|at| (at * 31 + at / 251) as u8);
        let bytes: Vec<u8> = 2u64.to_le_bytes().into_iter().chain(*b"{}").chain(data).collect();
        let path = dir.join("model/model.safetensors");
        fs::create_dir(dir.join("model")).unwrap();
        fs::write(&path, &bytes).unwrap();
        Self { map, files: [path], bytes }
    }

    /// The directory of the file.
    pub fn dir(&self) -> &Path {
        self.files[0].parent().unwrap()
    }

    /// Fetches experts from `store` and compares every byte. Returns the number of experts.
    pub fn take(
        &self,
        store: &ExpertStore,
        layer: usize,
        experts: &[u32],
        size: PassSize,
    ) -> Result<usize, StoreError> {
        let choice = ExpertChoice { ids: experts, k: experts.len(), logits: &[] };
        let mut asked = store.fetch(layer, &choice, size, &mut CpuTimeline)?;
        let mut seen = 0;
        while let Some(batch) = asked.next(&mut CpuTimeline)? {
            for landed in batch.iter() {
                for (piece, got) in self.map.layers[layer][landed.expert as usize].iter().zip(landed.pieces) {
                    assert!(&self.bytes[piece.offset as usize..][..piece.len] == got, "wrong bytes were served");
                }
            }
            seen += batch.len();
            batch.release_after(SyncPoint::START);
        }
        Ok(seen)
    }
}
