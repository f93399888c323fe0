//! RMS norm of one row (spec 2), and the gate of a delta layer's (spec 2.2).

use super::{
    check::{Bench, CLOSE},
    math::silu,
    simd::{float, wide},
};
use crate::device::{Binding, DeviceError, Dispatch, Region};

wide! {
    /// `y = x / sqrt(mean(x^2) + eps) * weight`. The sum's order is fixed by the row's length alone.
    pub(super) fn normalise(x: &[f32], weight: &[f32], eps: f32, y: &mut [f32]) {
        let [square] = float::dot::<V, 1>(x, [x]);
        let scale = 1.0 / (square / x.len() as f32 + eps).sqrt();
        for ((y, x), w) in y.iter_mut().zip(x).zip(weight) {
            *y = x * scale * w;
        }
    }
}

wide! {
    /// `y *= silu(z)`.
    pub(super) fn multiply(y: &mut [f32], z: &[f32]) {
        for (y, z) in y.iter_mut().zip(z) {
            *y *= silu(*z);
        }
    }
}

/// `y = x / rms(x) * w` for rows of `w`'s length, on its own: `kernels/norm.metal`.
pub fn rms_norm(rows: usize, cols: usize, eps: f32, x: Region, w: Region, y: Region) -> Dispatch {
    Dispatch {
        kernel: "rms_norm",
        args: vec![rows as u32, cols as u32, 0, 0, eps.to_bits()],
        bindings: vec![
            Binding::read(x.floats(rows * cols)),
            Binding::read(w.floats(cols)),
            Binding::write(y.floats(rows * cols)),
        ],
        grid: [rows as u32, 1, 1],
        threads: 256,
    }
}

pub(super) fn cases(b: &mut Bench<'_>) -> Result<(), DeviceError> {
    let (rows, cols, eps) = (3, 200, 1e-6);
    let (x, w) = (b.random.floats(rows * cols), b.random.floats(cols));
    let mut expected = vec![0.0; x.len()];
    for (x, y) in x.chunks_exact(cols).zip(expected.chunks_exact_mut(cols)) {
        normalise(x, &w, eps, y);
    }
    let (x, w, y) = (b.floats(&x)?, b.floats(&w)?, b.room(expected.len())?);
    let ran = b.launch(rms_norm(rows, cols, eps, x, w, y));
    b.expect(CLOSE, &ran, y, &expected)
}
