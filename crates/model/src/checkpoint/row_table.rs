//! [`RowTable`]: a table, such as an n-gram embedding, that is much larger than memory. The rows of the table are read
//! from disk one by one.

use super::{Checkpoint, MatrixLayout, index::Dtype, matrix_pieces, pack::PackedRows};
use crate::error::ModelError;
use moestro_base::{error::StoreError, platform::DataFile};
use moestro_compute::{
    experts::Piece,
    ops::{WeightFormat, WeightView},
};
use std::{
    collections::HashMap,
    io,
    ops::Range,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

/// Format of a table, and location of its rows on disk. A row has codes, and may have scales and biases, which are in
/// other tensors.
#[derive(Debug, Clone)]
pub struct RowTable {
    codes: WeightFormat,
    /// Number of values in a row.
    pub width: usize,
    /// Factor by which all values are multiplied.
    global_scale: f32,
    pub rows: u64,
    /// Number of the first row of each shard.
    starts: Vec<u64>,
    /// The layout of each shard, as a stack of one-row matrices.
    shards: Vec<MatrixLayout>,
    pub files: Vec<PathBuf>,
}

impl RowTable {
    /// Finds the table whose shards are the matrices at `paths`, in order. For an FP8 table, the tensor `scale` has the
    /// scale of all values.
    pub fn new(from: &Checkpoint, paths: &[String], scale: &str, width: usize) -> Result<Self, ModelError> {
        let mut rows = 0;
        let mut starts = Vec::new();
        let mut shards = Vec::<MatrixLayout>::new();
        let mut global_scale = None;
        for path in paths {
            let entry = from.get(&format!("{path}.weight"))?;
            let count = entry.shape.first().copied().unwrap_or_default();
            let (layout, factor) = if entry.dtype == Dtype::F8_E4M3 && entry.shape == [count, width] {
                let entries = [Some(entry.clone()), None, None];
                let layout = MatrixLayout { codes: WeightFormat::Fp8(None), rows: count, cols: width, entries };
                (layout, from.vector(scale, 1)?)
            } else {
                (from.layout(path, &[], count, width)?, from.global_scales(path, 1)?)
            };
            let same_factor = *global_scale.get_or_insert_with(|| factor.clone()) == factor;
            if !same_factor || shards.first().is_some_and(|first| first.codes != layout.codes) {
                return Err(ModelError::Config(format!("{path} is not stored like the table's first shard")));
            }
            starts.push(rows);
            rows += count as u64;
            shards.push(MatrixLayout { rows: 1, ..layout });
        }
        let Some(first) = shards.first() else { return Err(ModelError::Config("a table has no shards".into())) };
        let global_scale = global_scale.iter().flatten().next().copied().unwrap_or(1.0);
        Ok(Self { codes: first.codes, width, global_scale, rows, starts, shards, files: from.index.files.clone() })
    }

    pub fn shards(&self) -> usize {
        self.shards.len()
    }

    /// Sizes of the codes, scales and biases of a row, in bytes.
    pub fn row_bytes(&self) -> [usize; 3] {
        self.codes.row_bytes(self.width)
    }

    /// Total size of a row in bytes.
    pub fn row_len(&self) -> usize {
        self.row_bytes().iter().sum()
    }

    /// The byte ranges of codes, scales and biases of consecutive rows: the rows in `rows` that are in the same shard
    /// as the first one. Also returns the number of these rows.
    pub fn pieces(&self, rows: Range<u64>) -> ([Piece; 3], u64) {
        let shard = self.starts.partition_point(|start| *start <= rows.start).saturating_sub(1);
        let end = self.starts.get(shard + 1).copied().unwrap_or(self.rows).min(rows.end);
        let (Some(layout), Some(start)) = (self.shards.get(shard), self.starts.get(shard)) else {
            return Default::default();
        };
        let count = end.saturating_sub(rows.start);
        let pieces = matrix_pieces(layout, (rows.start - start) as usize);
        (pieces.map(|piece| Piece { len: piece.len * count as usize, ..piece }), count)
    }

    /// Decodes the bytes of a row to `out`, which has room for its values.
    pub fn decode(&self, bytes: &[u8], out: &mut [f32]) {
        let sizes = self.row_bytes();
        let (codes, rest) = bytes.split_at(sizes[0]);
        let (scales, biases) = rest.split_at(sizes[1]);
        let &Self { codes: format, width: cols, global_scale, .. } = self;
        let parts = [codes, scales, biases];
        WeightView { codes: format, rows: 1, cols, global_scale, skipped: 0, parts }.write_f32(out);
    }
}

/// The open files of a table.
pub struct RowFiles {
    pub table: Arc<RowTable>,
    files: HashMap<usize, DataFile>,
    /// The same rows in a pack. The pack is preferred, because it needs only one read per row.
    packed: Option<PackedRows>,
    is_damage_logged: AtomicBool,
}

impl RowFiles {
    pub fn open(table: Arc<RowTable>, packed: Option<PackedRows>) -> Result<Self, StoreError> {
        let mut files = HashMap::new();
        for entry in table.shards.iter().flat_map(|shard| shard.entries.iter().flatten()) {
            if let std::collections::hash_map::Entry::Vacant(vacant) = files.entry(entry.file) {
                let path = &table.files[entry.file];
                vacant.insert(DataFile::open_uncached(path).map_err(StoreError::at(path))?);
            }
        }
        Ok(Self { table, files, packed, is_damage_logged: AtomicBool::new(false) })
    }

    /// Reads the bytes of a row: codes, scales, biases. The caller reuses the buffer `space`.
    pub fn read(&self, row: u64, space: &mut Vec<u8>) -> Result<Vec<u8>, StoreError> {
        if let Some(packed) = &self.packed {
            match packed.read(row, space) {
                Ok(bytes) => return Ok(bytes),
                Err(error) => self.log_damage(packed.path(), row, &error),
            }
        }
        let mut bytes = Vec::with_capacity(self.table.row_len());
        for piece in self.table.pieces(row..row + 1).0 {
            let Some(file) = self.files.get(&(piece.file as usize)).filter(|_| piece.len > 0) else { continue };
            let read = file.read_range(piece.offset, piece.len, space);
            bytes.extend_from_slice(read.map_err(|error| {
                let why = format!("row {row} of the n-gram table at offset {}: {error}", piece.offset);
                StoreError::at(file.path())(io::Error::new(error.kind(), why))
            })?);
        }
        Ok(bytes)
    }

    fn log_damage(&self, path: &Path, row: u64, why: &io::Error) {
        if !self.is_damage_logged.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                path = %path.display(),
                row,
                %why,
                "the pack is damaged; reading damaged rows of the n-gram table from the checkpoint"
            );
        }
    }
}
