//! The number formats of keys and values.

/// The number format of a cache's keys and values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KvFormat {
    F32,
    /// The upper half of an f32.
    Bf16,
    /// 16-bit integers and one f32 a row, times which an integer is the value (see `attend/cache.rs`).
    I16,
    /// Integers of 8 or 4 bits and a bf16 for each 32 (see `attend/rounded.rs`), of rows that have been turned.
    Eight,
    Four,
}

impl KvFormat {
    /// Bytes of one row of `dim` values.
    pub fn row_bytes(self, dim: usize) -> usize {
        match self {
            KvFormat::F32 => 4 * dim,
            KvFormat::Bf16 => 2 * dim,
            KvFormat::I16 => 2 * (dim + 2),
            KvFormat::Eight => row_bytes(8, dim),
            KvFormat::Four => row_bytes(4, dim),
        }
    }
}

/// Bits for each value of a cache: the device's 16 or more, or fewer.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum KvBits {
    #[default]
    Sixteen,
    Eight,
    Four,
}

impl KvBits {
    /// The same on every device; `None` where the device chooses.
    pub fn format(self) -> Option<KvFormat> {
        match self {
            KvBits::Sixteen => None,
            KvBits::Eight => Some(KvFormat::Eight),
            KvBits::Four => Some(KvFormat::Four),
        }
    }
}

/// Values that share a scale.
pub const GROUP: usize = 32;

/// Bytes of a row of `dim` values.
pub(crate) fn row_bytes(bits: usize, dim: usize) -> usize {
    dim * bits / 8 + dim / GROUP * 2
}
