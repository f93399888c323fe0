//! Rows of different sequences that one operation computes.

use crate::device::{Binding, Region};

/// One row of each of several sequences. A state buffer holds the states of all sequences. The state of sequence `n` is
/// the `n`-th part of the buffer.
#[derive(Debug, Clone, Copy)]
pub struct SequenceRows {
    /// Minimum and maximum, over all rows, of a row's index in its sequence.
    pub starts: [usize; 2],
    /// `[rows, 2]` u32: the number of each row's sequence, and the row's index in that sequence.
    pub table: Region,
}

impl SequenceRows {
    /// The table of the rows. Without rows of different sequences, the kernel does not read this binding.
    pub(super) fn binding(rows: Option<Self>, unread: Region) -> Binding {
        rows.map_or(Binding::read(unread), |rows| Binding::indices(rows.table))
    }

    /// Rows `first..first + count`.
    pub(super) fn part(self, first: usize, count: usize) -> Self {
        Self { table: self.table.rows(first, count, 2), ..self }
    }
}
