//! Embedding lookup: rows of the table, dequantized.

mod cpu;
mod gpu;

pub use gpu::dequantize;

use super::Weight;
use crate::device::{BufferAccess, Region};

/// `into[t] = table[ids[t]]`.
#[derive(Debug, Clone, Copy)]
pub struct Embedding<'a> {
    /// `[vocab, hidden]`.
    pub table: &'a Weight,
    pub tokens: usize,
    /// `[tokens]` u32.
    pub ids: Region,
    /// `[tokens, hidden]` f32.
    pub into: Region,
}

impl Embedding<'_> {
    pub(super) fn touches(&self, see: &mut dyn FnMut(Region, BufferAccess)) {
        see(self.ids.floats(self.tokens), BufferAccess::Read);
        see(self.into.floats(self.tokens * self.table.cols), BufferAccess::Write);
    }
}
