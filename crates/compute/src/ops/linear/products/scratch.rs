//! Buffers of one thread.

use super::operands::WeightRow;
#[cfg(target_arch = "x86_64")]
use super::tile_avx512::WeightTiles;

/// Buffers of one thread for [`super::multiply`], reused by all calls.
#[derive(Default)]
pub(crate) struct SimdScratch {
    /// Two rows of weights for the integer kernels.
    pub rows: [WeightRow; 2],
    /// A row of weights in f32.
    pub values: Vec<f32>,
    /// The unpacked codes of a row.
    pub bytes: Vec<u8>,
    #[cfg(target_arch = "x86_64")]
    pub tiles: WeightTiles,
}
