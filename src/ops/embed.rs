//! Rows of an embedding table, dequantised as they are gathered.

use super::{
    simd::{Scratch, unpack},
    weight::Weight,
};
use candle_core::{Device, Result, Tensor, bail};

/// The rows `ids` of `table`: `[T, H]`, f32.
pub fn embed(table: &Weight, ids: &[u32], device: &Device) -> Result<Tensor> {
    let view = table.view();
    let mut scratch = Scratch::default();
    let mut rows = Vec::with_capacity(ids.len() * view.cols);
    for &id in ids {
        if id as usize >= view.rows {
            bail!("token {id} of {}", view.rows)
        }
        unpack::expand(&view, id as usize, &mut scratch.bytes, &mut scratch.values);
        rows.extend(scratch.values.iter().map(|value| value * view.gain));
    }
    Tensor::from_vec(rows, (ids.len(), view.cols), device)
}
