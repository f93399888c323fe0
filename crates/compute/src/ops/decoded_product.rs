//! [`DecodedProduct`]: a product of a decoded row, for which a device may have several kernels.

use super::{MoeWeights, Weight};

/// A product of one decoded row.
#[derive(Debug, Clone)]
pub enum DecodedProduct<'a> {
    /// Matrices that share the row.
    Matrices { matrices: Vec<Weight>, has_norm: bool },
    /// Gate and up of a layer's experts, whose slots have `stride` bytes.
    Experts { layer: &'a MoeWeights, stride: usize },
}
