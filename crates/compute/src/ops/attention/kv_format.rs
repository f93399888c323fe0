//! The number formats of cached keys and values, and the layout of their rows.
//!
//! The positions of one head in one page, or in a ring, are a *block*: the codes of all its positions, then the scales
//! of all its positions. So the codes of a row fill whole cache lines if the head's dimension is a multiple of 64.

use std::ops::Range;

/// The number format of cached keys and values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KvFormat {
    F32,
    /// 16-bit integers and one f32 scale for each row; see `kv_cache.rs`.
    I16,
    /// 8-bit integers with a bf16 scale for each 32 values, after a Hadamard transform; see `kv_quant.rs`.
    Eight,
    /// 4-bit integers with a bf16 scale for each 32 values, after a Hadamard transform; see `kv_quant.rs`.
    Four,
}

impl KvFormat {
    /// Number of bytes of the codes of one row of `dim` values.
    pub fn code_bytes(self, dim: usize) -> usize {
        match self {
            KvFormat::F32 => 4 * dim,
            KvFormat::I16 => 2 * dim,
            KvFormat::Eight => dim,
            KvFormat::Four => dim / 2,
        }
    }

    /// Number of bytes of the scales of one row of `dim` values.
    pub fn scale_bytes(self, dim: usize) -> usize {
        match self {
            KvFormat::F32 => 0,
            KvFormat::I16 => 4,
            KvFormat::Eight | KvFormat::Four => dim / GROUP * 2,
        }
    }

    /// Number of bytes of one row of `dim` values with its scales.
    pub fn row_bytes(self, dim: usize) -> usize {
        self.code_bytes(dim) + self.scale_bytes(dim)
    }

    /// The codes and the scales of rows `first..first + count`, as byte ranges of a block of `capacity` rows.
    pub fn row_ranges(self, dim: usize, capacity: usize, first: usize, count: usize) -> [Range<usize>; 2] {
        let [codes, scales] = [self.code_bytes(dim), self.scale_bytes(dim)];
        let start = capacity * codes + first * scales;
        [first * codes..(first + count) * codes, start..start + count * scales]
    }
}

/// Bits per cached value, from `--kv-bits`. `Sixteen` means the device's own format: [`KvFormat::I16`], or
/// [`KvFormat::F32`] where the CPU computes in plain f32.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum KvBits {
    #[default]
    Sixteen,
    Eight,
    Four,
}

impl KvBits {
    /// The format that `--kv-bits` asks for. `None` if the device chooses.
    pub fn format(self) -> Option<KvFormat> {
        match self {
            KvBits::Sixteen => None,
            KvBits::Eight => Some(KvFormat::Eight),
            KvBits::Four => Some(KvFormat::Four),
        }
    }
}

/// Number of values that share a scale.
pub const GROUP: usize = 32;
