//! Rows of different sequences that one launch computes.

use crate::device::Region;

/// One row of each of several sequences. The state of sequence `n` is the `n`-th part of its buffer.
#[derive(Debug, Clone, Copy)]
pub struct SequenceRows {
    /// The smallest and the largest index of a row in its sequence.
    pub starts: [usize; 2],
    /// `[rows, 2]` u32: the number of each row's sequence, and the row's index there.
    pub table: Region,
}

impl SequenceRows {
    /// Some of the rows.
    pub(super) fn part(self, first: usize, count: usize) -> Self {
        Self { table: self.table.rows(first, count, 2), ..self }
    }
}
