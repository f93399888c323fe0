//! Weight matrices as the checkpoint stores them: packed codes with scales and biases, or floats. A matrix is never
//! dequantized as a whole; kernels unpack it in registers.

use crate::device::Region;
use std::ops::Range;

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

    pub(in crate::ops) fn to_le_bytes(self, value: f32) -> Vec<u8> {
        match self {
            Float::F32 => value.to_le_bytes().to_vec(),
            Float::F16 => half::f16::from_f32(value).to_le_bytes().to_vec(),
            Float::Bf16 => half::bf16::from_f32(value).to_le_bytes().to_vec(),
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
    /// E4M3 codes of 8 bits. Hugging Face checkpoints store one scale for each block of [`FP8_BLOCK`] rows and columns,
    /// or only the global scale.
    Fp8(Option<Float>),
}

impl Default for WeightFormat {
    fn default() -> Self {
        WeightFormat::Dense(Float::F32)
    }
}

/// Number of rows, and of columns, in a block that shares a scale in [`WeightFormat::Fp8`].
pub const FP8_BLOCK: usize = 128;

impl WeightFormat {
    /// Number of values in a row that share a scale. 1 for dense and FP8, whose rows may have any length.
    pub fn group(self) -> usize {
        match self {
            WeightFormat::Dense(_) | WeightFormat::Fp8(_) => 1,
            WeightFormat::Affine { group, .. } => group as usize,
            WeightFormat::Mxfp4 | WeightFormat::Mxfp8 => 32,
            WeightFormat::Nvfp4 => 16,
        }
    }

    /// Number of bytes of one row of `cols` values: codes, scales, biases. Scales that several rows share are not
    /// counted.
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
            WeightFormat::Fp8(_) => [cols, 0, 0],
        }
    }

    /// Number of bytes of a matrix `[rows, cols]`: codes, scales, biases.
    pub fn part_bytes(self, rows: usize, cols: usize) -> [usize; 3] {
        let [codes, scales, biases] = self.row_bytes(cols).map(|bytes| bytes * rows);
        let shared = match self {
            WeightFormat::Fp8(Some(scale)) => rows.div_ceil(FP8_BLOCK) * cols.div_ceil(FP8_BLOCK) * scale.bytes(),
            _ => 0,
        };
        [codes, scales + shared, biases]
    }
}

/// A matrix `[rows, cols]` of the trunk (the weights that stay in memory). Products are `y = x W^T`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Weight {
    pub codes: WeightFormat,
    pub rows: usize,
    pub cols: usize,
    /// A factor for all values: the global scale of nvfp4, otherwise 1.
    pub global_scale: f32,
    /// Codes, scales and biases. The last two are empty if the encoding has none. GPUs need offsets that are
    /// multiples of 16 bytes.
    pub parts: [Region; 3],
}

impl Weight {
    /// Number of bytes of all parts.
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
    /// Number of rows before the view that share the view's first FP8 scale.
    pub skipped: usize,
    pub parts: [&'a [u8]; 3],
}

impl WeightView<'_> {
    /// A view of the rows `rows`.
    pub fn of_rows(&self, rows: Range<usize>) -> Self {
        let sizes = self.codes.row_bytes(self.cols);
        let mut parts = [0, 1, 2].map(|index| &self.parts[index][rows.start * sizes[index]..rows.end * sizes[index]]);
        let first = self.skipped + rows.start;
        if let WeightFormat::Fp8(Some(scale)) = self.codes {
            parts[1] = &self.parts[1][first / FP8_BLOCK * self.cols.div_ceil(FP8_BLOCK) * scale.bytes()..];
        }
        Self { rows: rows.len(), skipped: first % FP8_BLOCK, parts, ..*self }
    }
}

impl Default for WeightView<'_> {
    /// A matrix without rows.
    fn default() -> Self {
        Self { codes: WeightFormat::default(), rows: 0, cols: 0, global_scale: 1.0, skipped: 0, parts: [&[]; 3] }
    }
}
