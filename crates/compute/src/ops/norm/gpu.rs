//! RMS norm on a GPU.

use crate::device::{Binding, Launch, Region, SkipUse};

/// `y = x / rms(x) * w` for `rows` rows, as a separate launch.
pub fn rms_norm(rows: usize, cols: usize, eps: f32, x: Region, w: Region, y: Region) -> Launch {
    rms_norms([rows, 1], cols, eps, x, w, y)
}

/// [`rms_norm`] with `weights` rows of `w`: row `i` of `x` uses row `i % weights`.
pub(in crate::ops) fn rms_norms(
    [rows, weights]: [usize; 2],
    cols: usize,
    eps: f32,
    x: Region,
    w: Region,
    y: Region,
) -> Launch {
    Launch {
        kernel: "rms_norm",
        args: vec![cols as u32, weights as u32, eps.to_bits()],
        bindings: vec![
            Binding::read(x.floats(rows * cols)),
            Binding::read(w.floats(weights * cols)),
            Binding::write(y.floats(rows * cols)),
        ],
        grid: [rows as u32, 1, 1],
        threads: 256,
        skip: SkipUse::None,
    }
}
