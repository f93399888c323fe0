//! Reads whole matrices of a checkpoint as f32, for code that computes in Candle tensors.

use crate::{
    checkpoint::{self, Checkpoint, MatrixLayout},
    error::ModelError,
};
use moestro_base::{error::StoreError, platform::Threads};
use moestro_compute::{experts::Piece, ops::WeightView};
use std::{fs::File, io, os::unix::fs::FileExt, path::Path, sync::OnceLock};

/// Number of bytes that a thread reads at once.
const READ_BYTES: usize = 1 << 20;

/// Reads the matrix with the name `path`, `[rows, cols]`, on all `threads`.
pub fn matrix(
    from: &Checkpoint,
    path: &str,
    rows: usize,
    cols: usize,
    threads: &Threads,
) -> Result<Vec<f32>, ModelError> {
    let layout = from.layout(path, &[], rows, cols)?;
    let global_scale = from.global_scales(path, 1)?.first().copied().unwrap_or(1.0);
    dequantize(from, &layout, &checkpoint::matrix_pieces(&layout, 0), global_scale, threads)
}

/// Dequantizes a matrix from its codes, scales and biases, on all `threads`.
pub fn dequantize(
    from: &Checkpoint,
    layout: &MatrixLayout,
    pieces: &[Piece],
    global_scale: f32,
    threads: &Threads,
) -> Result<Vec<f32>, ModelError> {
    let mut parts: [Vec<u8>; 3] = Default::default();
    for (bytes, piece) in parts.iter_mut().zip(pieces) {
        // Unlike `resize`, this does not write the pages. The threads that read do.
        *bytes = vec![0; piece.len];
        let path = &from.index.files[piece.file as usize];
        read(path, piece.offset, bytes, threads).map_err(StoreError::at(path))?;
    }
    let &MatrixLayout { codes, rows, cols, .. } = layout;
    let parts = parts.each_ref().map(Vec::as_slice);
    let view = WeightView { codes, rows, cols, global_scale, skipped: 0, parts };
    let mut values = vec![0.0; rows * cols];
    let rows_at_once = rows.div_ceil(4 * threads.count()).max(1);
    threads.run_pieces(&mut values, rows_at_once * cols, &|piece, out| {
        let first = piece * rows_at_once;
        view.of_rows(first..first + out.len() / cols).write_f32(out);
    });
    Ok(values)
}

fn read(path: &Path, offset: u64, bytes: &mut [u8], threads: &Threads) -> io::Result<()> {
    let file = File::open(path)?;
    let failed = OnceLock::new();
    threads.run_pieces(bytes, READ_BYTES, &|piece, bytes| {
        if let Err(error) = file.read_exact_at(bytes, offset + (piece * READ_BYTES) as u64) {
            let _ = failed.set(error);
        }
    });
    failed.into_inner().map_or(Ok(()), Err)
}
