//! Sizes of a delta net.

use crate::device::{BufferAccess, Region};

/// AttentionShape and sizes. A row of the projection is `q k v | z | b | a`, `width` floats.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DeltaShape {
    pub key_heads: usize,
    pub value_heads: usize,
    pub key_dim: usize,
    pub value_dim: usize,
    /// Inputs that one output of the convolution depends on.
    pub conv_width: usize,
    /// Of the norm behind the recurrence.
    pub eps: f32,
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

/// Rows in front that a layer's states have not taken in: they are walked once more, and what comes of them is not wanted.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Replay {
    pub rows: usize,
    /// `[rows, width]`.
    pub proj: Region,
    /// `[rows, channels]`: behind the convolution.
    pub mixed: Region,
}

impl Replay {
    pub(in crate::ops) fn touches(&self, shape: &DeltaShape, see: &mut dyn FnMut(Region, BufferAccess)) {
        see(self.proj.floats(self.rows * shape.width()), BufferAccess::Read);
        see(self.mixed.floats(self.rows * shape.channels()), BufferAccess::Read);
    }
}
