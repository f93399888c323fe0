//! Checks of `norm`: GPU against CPU.

use crate::{
    device::{DeviceError, Driver},
    ops::{
        check::{CLOSE, KernelCheck},
        norm::{normalise, rms_norm},
    },
};

pub fn cases(b: &mut KernelCheck<'_, impl Driver>) -> Result<(), DeviceError> {
    let rows = 3;
    let cols = 200;
    let eps = 1e-6;
    let x = b.random.floats(rows * cols);
    let w = b.random.floats(cols);
    let mut expected = vec![0.0; x.len()];
    for (x, y) in x.chunks_exact(cols).zip(expected.chunks_exact_mut(cols)) {
        normalise(x, &w, eps, y);
    }
    let x = b.floats(&x)?;
    let w = b.floats(&w)?;
    let y = b.buffer(expected.len())?;
    let ran = b.launch(rms_norm(rows, cols, eps, x, w, y));
    b.expect(CLOSE, &ran, y, &expected)
}
