//! Sizes of a delta-net layer, and the rows to replay.

use crate::device::{BufferAccess, Region};

/// Added to the sum of squares of q or k before the square root.
pub(super) const QK_EPS: f32 = 1e-6;

/// Sizes of a delta-net layer. A projected row is `q k v | z | b | a`, `width` floats.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DeltaShape {
    pub key_heads: usize,
    pub value_heads: usize,
    pub key_dim: usize,
    pub value_dim: usize,
    /// Number of rows that one output of the convolution depends on.
    pub conv_width: usize,
    /// Epsilon of the gated norm.
    pub eps: f32,
    pub gate: OutputGate,
}

/// The activation of the gate z.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum OutputGate {
    #[default]
    Silu,
    Sigmoid,
}

impl DeltaShape {
    pub fn channels(&self) -> usize {
        2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim
    }

    pub fn values(&self) -> usize {
        self.value_heads * self.value_dim
    }

    pub fn width(&self) -> usize {
        self.channels() + self.values() + 2 * self.value_heads
    }
}

/// Rows before the new rows that the layer's state does not include yet. Replayed rows update the state, but their
/// output is not computed.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Replay {
    pub rows: usize,
    /// Projections, `[rows, width]`.
    pub proj: Region,
    /// Convolution outputs, `[rows, channels]`.
    pub mixed: Region,
}

impl Replay {
    pub(in crate::ops) fn touches(&self, shape: &DeltaShape, see: &mut dyn FnMut(Region, BufferAccess)) {
        see(self.proj.floats(self.rows * shape.width()), BufferAccess::Read);
        see(self.mixed.floats(self.rows * shape.channels()), BufferAccess::Read);
    }
}
