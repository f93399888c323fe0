//! The number formats of cached keys and values.

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
    /// Number of bytes of one row of `dim` values.
    pub fn row_bytes(self, dim: usize) -> usize {
        match self {
            KvFormat::F32 => 4 * dim,
            KvFormat::I16 => 2 * (dim + 2),
            KvFormat::Eight => row_bytes(8, dim),
            KvFormat::Four => row_bytes(4, dim),
        }
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

/// Number of bytes of one row of `dim` values and its scales.
pub(crate) fn row_bytes(bits: usize, dim: usize) -> usize {
    dim * bits / 8 + dim / GROUP * 2
}
