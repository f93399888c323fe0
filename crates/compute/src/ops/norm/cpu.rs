//! RMS norm and the delta net's gate on the CPU.

use crate::ops::simd::{
    float,
    math::{sigmoid, silu},
    wide,
};

wide! {
    /// `y = x / sqrt(mean(x^2) + eps) * weight`. The order of additions depends only on the row's length.
    pub(in crate::ops) fn normalise(x: &[f32], weight: &[f32], eps: f32, y: &mut [f32]) {
        let [square] = float::dot::<V, 1>(x, [x]);
        let scale = 1.0 / (square / x.len() as f32 + eps).sqrt();
        for ((y, x), w) in y.iter_mut().zip(x).zip(weight) {
            *y = x * scale * w;
        }
    }
}

wide! {
    /// `y *= silu(z)`.
    pub(in crate::ops) fn multiply_silu(y: &mut [f32], z: &[f32]) {
        for (y, z) in y.iter_mut().zip(z) {
            *y *= silu(*z);
        }
    }
}

wide! {
    /// `y *= sigmoid(z)`.
    pub(in crate::ops) fn multiply_sigmoid(y: &mut [f32], z: &[f32]) {
        for (y, z) in y.iter_mut().zip(z) {
            *y *= sigmoid(*z);
        }
    }
}
