//! Checks of `embedding`: GPU against CPU.

use super::linear::FORMATS;
use crate::{
    device::{DeviceError, Driver},
    ops::{
        Float,
        check::{CLOSE, KernelCheck, difference},
        embedding::{Embedding, dequantize},
    },
};

/// Checks the lookup of all rows of a table, and its dequantization to f32 and f16.
pub fn cases(b: &mut KernelCheck<'_, impl Driver>) -> Result<(), DeviceError> {
    for codes in FORMATS.into_iter().flatten() {
        let table = &b.weight(codes, 37, 256)?;
        let count = table.rows * table.cols;
        let ids: Vec<u32> = (0..table.rows as u32).collect();
        let ids = b.words(&ids)?;
        let into = b.buffer(count)?;
        let half = b.buffer(count.div_ceil(2))?;
        b.check(Embedding { table, tokens: table.rows, ids, into }, &[into], &[])?;
        let expected = b.on_cpu(into)?;
        let full = b.buffer(count)?;
        let ran = b.launch(dequantize(table, Float::F32, full));
        b.expect(CLOSE, &ran, full, &expected)?;
        let ran = b.launch(dequantize(table, Float::F16, half.first(count * 2)));
        let words = b.on_gpu(half)?;
        let halves = bytemuck::cast_slice::<f32, u16>(&words);
        let found: Vec<f32> = halves[..count].iter().map(|bits| half::f16::from_bits(*bits).to_f32()).collect();
        let rounded: Vec<f32> = expected.iter().map(|v| half::f16::from_f32(*v).to_f32()).collect();
        // Allows one unit in the last place of f16, because the f32 values before rounding may differ.
        b.record(&ran, difference(&found, &rounded), 1e-3);
    }
    Ok(())
}
