//! Random inputs of the checks.

use crate::ops::{Float, WeightFormat};
use moestro_base::platform::split_mix64::SplitMix64;

/// Random inputs, which are the same on every machine.
pub(in crate::ops) struct RandomInputs(pub SplitMix64);

impl RandomInputs {
    /// Returns a value from -1 to 1.
    pub fn float(&mut self) -> f32 {
        ((self.0.bits() >> 40) as f32 / (1u64 << 23) as f32) - 1.0
    }

    pub fn floats(&mut self, count: usize) -> Vec<f32> {
        (0..count).map(|_| self.float()).collect()
    }

    /// Codes, scales and biases of a random matrix with values of moderate size.
    pub fn parts(&mut self, format: WeightFormat, rows: usize, cols: usize) -> [Vec<u8>; 3] {
        let [code_bytes, scale_bytes, bias_bytes] = format.part_bytes(rows, cols);
        match format {
            WeightFormat::Dense(float) => {
                [(0..rows * cols).flat_map(|_| float.to_le_bytes(self.float())).collect(), vec![], vec![]]
            }
            WeightFormat::Affine { bits, scale, .. } => {
                let codes = (0..code_bytes).map(|_| self.0.bits() as u8).collect();
                let step = 1.0 / f32::from(1u16 << bits);
                let scales =
                    (0..scale_bytes / scale.bytes()).flat_map(|_| scale.to_le_bytes(self.float() * step)).collect();
                [codes, scales, (0..bias_bytes / scale.bytes()).flat_map(|_| scale.to_le_bytes(self.float())).collect()]
            }
            WeightFormat::Fp8(scale) => {
                let scale = scale.unwrap_or(Float::F32);
                let codes = (0..code_bytes).map(|_| (self.0.bits() as u8) & 0xee).collect();
                let scales = (0..scale_bytes / scale.bytes()).flat_map(|_| scale.to_le_bytes(self.float() / 64.0));
                [codes, scales.collect(), vec![]]
            }
            // 0x7f is NaN, both as an 8-bit code and as a scale of nvfp4.
            WeightFormat::Mxfp4 | WeightFormat::Mxfp8 | WeightFormat::Nvfp4 => {
                let codes = (0..code_bytes).map(|_| (self.0.bits() as u8) & 0xee).collect();
                // About 1/4 to 1, as E4M3 or as powers of two.
                let least = if matches!(format, WeightFormat::Nvfp4) { 40 } else { 125 };
                [codes, (0..scale_bytes).map(|_| least + (self.0.bits() % 3) as u8).collect(), vec![]]
            }
        }
    }
}
