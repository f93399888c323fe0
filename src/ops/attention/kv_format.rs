//! The number formats of keys and values.

/// The number format of a cache's keys and values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CacheFormat {
    F32,
    /// The upper half of an f32.
    Bf16,
    /// 16-bit integers and one f32 a row, times which an integer is the value (see `attend/cache.rs`).
    I16,
    /// Integers of 8 or 4 bits and a bf16 for each 32 (see `attend/rounded.rs`), of rows that have been turned.
    Eight,
    Four,
}

impl CacheFormat {
    /// Bytes of one row of `dim` values.
    pub fn row_bytes(self, dim: usize) -> usize {
        match self {
            CacheFormat::F32 => 4 * dim,
            CacheFormat::Bf16 => 2 * dim,
            CacheFormat::I16 => 2 * (dim + 2),
            CacheFormat::Eight => row_bytes(8, dim),
            CacheFormat::Four => row_bytes(4, dim),
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
    pub fn format(self) -> Option<CacheFormat> {
        match self {
            KvBits::Sixteen => None,
            KvBits::Eight => Some(CacheFormat::Eight),
            KvBits::Four => Some(CacheFormat::Four),
        }
    }
}

/// Values that share a scale.
pub const GROUP: usize = 32;

/// Bytes of a row of `dim` values.
pub(crate) fn row_bytes(bits: usize, dim: usize) -> usize {
    dim * bits / 8 + dim / GROUP * 2
}
