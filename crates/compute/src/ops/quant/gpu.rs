//! Weights as arguments of GPU kernels.

use super::weight::{Float, Weight, WeightFormat};
use crate::device::Binding;

impl Weight {
    pub(in crate::ops) fn words(&self) -> [u32; 5] {
        matrix_words(self.codes, self.rows, self.global_scale)
    }

    pub(in crate::ops) fn bindings(&self) -> [Binding; 3] {
        // An empty part still needs a bound buffer.
        self.parts.map(|part| Binding::read(if part.len == 0 { self.parts[0].first(0) } else { part }))
    }
}

/// The words of `struct Matrix` in `kernels/quant.metal`.
pub(in crate::ops) fn matrix_words(codes: WeightFormat, rows: usize, global_scale: f32) -> [u32; 5] {
    let real = |float| match float {
        Float::F32 => 0,
        Float::F16 => 1,
        Float::Bf16 => 2,
    };
    let (format, scale) = match codes {
        WeightFormat::Affine { bits, scale, .. } => (bits.into(), real(scale)),
        WeightFormat::Mxfp4 => (20, 0),
        WeightFormat::Nvfp4 => (21, 0),
        WeightFormat::Mxfp8 => (22, 0),
        WeightFormat::Fp8(scale) => (23, scale.map_or(0, real)),
        WeightFormat::Dense(float) => (30, real(float)),
    };
    [rows as u32, format, codes.group() as u32, scale, global_scale.to_bits()]
}

/// True if the kernels have a fast path for this format: affine with one of `bits`, group 64 and bf16 scales.
pub(in crate::ops) fn fast(codes: WeightFormat, global_scale: f32, cols: usize, bits: &[u8]) -> bool {
    matches!(codes, WeightFormat::Affine { bits: b, group: 64, scale: Float::Bf16 } if bits.contains(&b))
        && global_scale == 1.0
        && cols.is_multiple_of(64)
}
