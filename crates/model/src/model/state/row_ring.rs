//! Ring buffers with one row for each of the last positions: state of a layer other than keys, values and recurrent
//! state.
//!
//! A ring holds `capacity` rows. Position `p` is row `p % capacity`. Rejected rows need no rollback, because later rows
//! overwrite them. A snapshot copies the rows that positions after the snapshot depend on.

use super::rollback::append_region;
use moestro_compute::{
    device::{DeviceError, Region},
    ops::Backend,
};
use std::ops::Range;

#[derive(Debug, Clone, Copy)]
pub struct RowRing {
    /// `[capacity, width]` f32. May hold the rings of several sequences, one after the other.
    pub rows: Region,
    /// Number of rows in the ring of one sequence.
    pub capacity: usize,
    pub width: usize,
    pub keep: KeptRows,
}

/// The rows before a position that later positions depend on.
#[derive(Debug, Clone, Copy)]
pub enum KeptRows {
    /// This number of rows directly before the position.
    Last(usize),
    /// The rows after the last multiple of this many positions.
    OpenBlock(usize),
}

impl KeptRows {
    fn max(self) -> usize {
        match self {
            KeptRows::Last(count) => count,
            KeptRows::OpenBlock(block) => block - 1,
        }
    }

    fn before(self, len: usize) -> Range<usize> {
        match self {
            KeptRows::Last(count) => len.saturating_sub(count)..len,
            KeptRows::OpenBlock(block) => len / block * block..len,
        }
    }
}

impl RowRing {
    /// Number of bytes of the kept rows in a snapshot, the same at every position.
    pub fn snapshot_bytes(&self) -> usize {
        self.keep.max() * self.width * 4
    }

    fn row(&self, position: usize) -> Region {
        self.rows.rows(position % self.capacity, 1, self.width)
    }

    /// Appends the rows that a snapshot of `len` positions keeps to `out`.
    pub fn append_bytes(&self, len: usize, backend: &mut dyn Backend, out: &mut Vec<u8>) -> Result<(), DeviceError> {
        let end = out.len() + self.snapshot_bytes();
        self.keep.before(len).try_for_each(|position| append_region(backend, self.row(position), out))?;
        out.resize(end, 0);
        Ok(())
    }

    /// Restores the rows that [`RowRing::append_bytes`] wrote. `bytes` has the length [`RowRing::snapshot_bytes`].
    pub fn restore(&self, len: usize, bytes: &[u8], backend: &mut dyn Backend) -> Result<(), DeviceError> {
        let mut rows = self.keep.before(len).zip(bytes.chunks_exact(self.width * 4));
        rows.try_for_each(|(position, row)| backend.write(self.row(position), row))
    }
}
