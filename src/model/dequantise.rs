//! Reads whole matrices of a checkpoint as f32, for code that computes in Candle tensors.

use crate::{
    checkpoint::{self, Checkpoint, MatrixLayout},
    error::{ModelError, StoreError},
    experts::Piece,
    ops::WeightView,
};
use std::{fs::File, os::unix::fs::FileExt};

/// Reads the matrix with the name `path`, `[rows, cols]`.
pub fn matrix(from: &Checkpoint, path: &str, rows: usize, cols: usize) -> Result<Vec<f32>, ModelError> {
    let layout = from.layout(path, &[], rows, cols)?;
    let global_scale = from.global_scales(path, 1)?.first().copied().unwrap_or(1.0);
    dequantise(from, &layout, &checkpoint::matrix_pieces(&layout, 0), global_scale)
}

/// Dequantizes a matrix from its codes, scales and biases.
pub fn dequantise(
    from: &Checkpoint,
    layout: &MatrixLayout,
    pieces: &[Piece],
    global_scale: f32,
) -> Result<Vec<f32>, ModelError> {
    let mut parts: [Vec<u8>; 3] = Default::default();
    for (bytes, piece) in parts.iter_mut().zip(pieces) {
        bytes.resize(piece.len, 0);
        let path = &from.index.files[piece.file as usize];
        let read = File::open(path).and_then(|file| file.read_exact_at(bytes, piece.offset));
        read.map_err(StoreError::at(path))?;
    }
    let &MatrixLayout { codes, rows, cols, .. } = layout;
    Ok(WeightView { codes, rows, cols, global_scale, skipped: 0, parts: parts.each_ref().map(Vec::as_slice) }.to_f32())
}
