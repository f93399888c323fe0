//! Weight matrices as the checkpoint stores them: packed codes with scales and biases, or floats. A matrix is never
//! dequantized as a whole; kernels unpack it in registers.

use crate::device::Region;

/// A stored float type.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Float {
    F32,
    F16,
    Bf16,
}

impl Float {
    pub fn bytes(self) -> usize {
        match self {
            Float::F32 => 4,
            Float::F16 | Float::Bf16 => 2,
        }
    }

    /// The value at `index` of a packed little-endian array of any alignment.
    pub fn get(self, bytes: &[u8], index: usize) -> f32 {
        match self {
            Float::F32 => f32::from_le_bytes(bytes[index * 4..index * 4 + 4].try_into().expect("4 bytes")),
            Float::F16 => half::f16::from_le_bytes([bytes[index * 2], bytes[index * 2 + 1]]).to_f32(),
            Float::Bf16 => half::bf16::from_le_bytes([bytes[index * 2], bytes[index * 2 + 1]]).to_f32(),
        }
    }
}

/// The encoding of a matrix. A row of codes is one little-endian bit stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WeightFormat {
    /// Not quantized.
    Dense(Float),
    /// `w = scale * q + bias` with unsigned `q` of 2, 3, 4, 5, 6 or 8 bits, and one scale and bias for each `group`
    /// of 32, 64 or 128 values.
    Affine { bits: u8, group: u16, scale: Float },
    /// E2M1 codes of 4 bits, one E8M0 scale for each 32 values.
    Mxfp4,
    /// E2M1 codes of 4 bits, one E4M3 scale for each 16 values.
    Nvfp4,
    /// E4M3 codes of 8 bits, one E8M0 scale for each 32 values.
    Mxfp8,
}

impl WeightFormat {
    /// Values that share a scale; 1 for dense.
    pub fn group(self) -> usize {
        match self {
            WeightFormat::Dense(_) => 1,
            WeightFormat::Affine { group, .. } => group as usize,
            WeightFormat::Mxfp4 | WeightFormat::Mxfp8 => 32,
            WeightFormat::Nvfp4 => 16,
        }
    }

    /// Bytes of one row of `cols` values: codes, scales, biases.
    pub fn row_bytes(self, cols: usize) -> [usize; 3] {
        match self {
            WeightFormat::Dense(float) => [cols * float.bytes(), 0, 0],
            WeightFormat::Affine { bits, group, scale } => {
                let scales = cols / group as usize * scale.bytes();
                [cols * bits as usize / 8, scales, scales]
            }
            WeightFormat::Mxfp4 => [cols / 2, cols / 32, 0],
            WeightFormat::Nvfp4 => [cols / 2, cols / 16, 0],
            WeightFormat::Mxfp8 => [cols, cols / 32, 0],
        }
    }
}

/// A matrix `[rows, cols]` of the trunk, which stays in memory. Products are `y = x W^T`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Weight {
    pub codes: WeightFormat,
    pub rows: usize,
    pub cols: usize,
    /// Factor of all values: the global scale of nvfp4, otherwise 1.
    pub global_scale: f32,
    /// Codes, scales and biases. The last two are empty if the encoding has none. GPUs need offsets that are
    /// multiples of 16 bytes.
    pub parts: [Region; 3],
}

impl Weight {
    /// Bytes of all parts.
    pub fn bytes(&self) -> usize {
        self.parts.iter().map(|part| part.len).sum()
    }
}

/// A matrix as bytes of any alignment: a trunk matrix, or one projection of an expert in a slot.
#[derive(Clone, Copy)]
pub struct WeightView<'a> {
    pub codes: WeightFormat,
    pub rows: usize,
    pub cols: usize,
    pub global_scale: f32,
    pub parts: [&'a [u8]; 3],
}

impl Default for WeightView<'_> {
    /// A matrix without rows.
    fn default() -> Self {
        Self { codes: WeightFormat::Dense(Float::F32), rows: 0, cols: 0, global_scale: 1.0, parts: [&[]; 3] }
    }
}
