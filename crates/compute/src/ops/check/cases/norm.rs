//! Checks of `norm`: GPU against CPU.

use crate::{
    device::{DeviceError, Driver},
    ops::{
        check::{CLOSE, KernelCheck},
        norm::{normalise, rms_norm},
    },
};

pub fn cases(b: &mut KernelCheck<'_, impl Driver>) -> Result<(), DeviceError> {
    let (rows, cols, eps) = (3, 200, 1e-6);
    let (x, w) = (b.random.floats(rows * cols), b.random.floats(cols));
    let mut expected = vec![0.0; x.len()];
    for (x, y) in x.chunks_exact(cols).zip(expected.chunks_exact_mut(cols)) {
        normalise(x, &w, eps, y);
    }
    let (x, w, y) = (b.floats(&x)?, b.floats(&w)?, b.buffer(expected.len())?);
    let ran = b.launch(rms_norm(rows, cols, eps, x, w, y));
    b.expect(CLOSE, &ran, y, &expected)
}
