//! The state of a sequence at one position, kept so that another prompt can go on from there.
//!
//! Keys and values only ever grow, so those of [`PAGE`] positions are written out once and then shared by every snapshot
//! of the sequence, and by those of the sequences that go on from one. The delta and convolution states are overwritten by
//! every token: each snapshot has its own.

use std::{
    ops::Range,
    sync::{Arc, Weak},
};

/// Positions in a page of keys and values.
pub const PAGE: usize = 256;

/// Bytes that no longer change.
pub type Shared = Arc<Vec<u8>>;

/// A sequence at one position. Cloning shares it.
#[derive(Debug, Clone, Default)]
pub struct Snapshot {
    /// Tokens seen.
    pub len: usize,
    /// Keys and values of `PAGE` positions each, in an order that only the model knows; the last page may hold fewer.
    pub pages: Vec<Shared>,
    /// Delta and convolution states of all layers.
    pub state: Shared,
}

/// The sizes of a model's snapshots, in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SnapshotSize {
    /// Delta and convolution states.
    pub state: u64,
    /// Keys and values of one position.
    pub position: u64,
}

impl SnapshotSize {
    /// A snapshot of `len` positions that shares its first `shared` ones with others.
    pub fn bytes(&self, len: usize, shared: usize) -> u64 {
        self.state + (len - len.min(shared / PAGE * PAGE)) as u64 * self.position
    }
}

/// The pages of a sequence that have been written out, for as long as a snapshot holds them: the sequence itself keeps
/// its keys and values elsewhere.
#[derive(Debug, Default)]
pub struct Frozen {
    pages: Vec<Weak<Vec<u8>>>,
}

impl Frozen {
    /// A snapshot at `len`, where the delta and convolution states are `state`. `read` gives the keys and values of a range
    /// of positions that lies within one page.
    pub fn snapshot<E>(
        &mut self,
        len: usize,
        state: Vec<u8>,
        mut read: impl FnMut(Range<usize>) -> Result<Vec<u8>, E>,
    ) -> Result<Snapshot, E> {
        self.pages.resize(self.pages.len().max(len / PAGE), Weak::new());
        let mut pages = Vec::with_capacity(len.div_ceil(PAGE));
        for (index, page) in self.pages[..len / PAGE].iter_mut().enumerate() {
            let shared = match page.upgrade() {
                Some(shared) => shared,
                None => Arc::new(read(index * PAGE..(index + 1) * PAGE)?),
            };
            *page = Arc::downgrade(&shared);
            pages.push(shared);
        }
        if !len.is_multiple_of(PAGE) {
            pages.push(Arc::new(read(len / PAGE * PAGE..len)?));
        }
        Ok(Snapshot { len, pages, state: Arc::new(state) })
    }

    /// Positions from the first on whose pages a snapshot of this sequence would share with others.
    pub fn held(&self) -> usize {
        self.pages.iter().take_while(|page| page.strong_count() > 0).count() * PAGE
    }

    /// Makes the sequence what `snapshot` says: `write` is given the keys and values of each range of positions that this
    /// sequence does not already hold.
    pub fn restore<E>(
        &mut self,
        snapshot: &Snapshot,
        mut write: impl FnMut(Range<usize>, &[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        // A page that nobody holds any more keeps its address, so no other is taken for it.
        let same = |(ours, theirs): &(&Weak<Vec<u8>>, &Shared)| ours.as_ptr() == Arc::as_ptr(theirs);
        let same = self.pages.iter().zip(&snapshot.pages).take_while(same).count();
        self.pages.truncate(same);
        for (index, page) in snapshot.pages.iter().enumerate().skip(same) {
            let first = index * PAGE;
            write(first..snapshot.len.min(first + PAGE), page)?;
            if first + PAGE <= snapshot.len {
                self.pages.push(Arc::downgrade(page));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::convert::Infallible;

    /// A sequence whose position `n` holds one byte, `n / 3`.
    fn read(range: Range<usize>) -> Result<Vec<u8>, Infallible> {
        Ok(range.map(|position| (position / 3) as u8).collect())
    }

    #[test]
    fn snapshots_of_a_sequence_share_whole_pages() {
        let mut frozen = Frozen::default();
        let Ok(early) = frozen.snapshot(PAGE + 5, vec![1], read);
        let Ok(late) = frozen.snapshot(2 * PAGE, vec![2], read);
        assert_eq!((early.pages.len(), late.pages.len()), (2, 2));
        assert!(Arc::ptr_eq(&early.pages[0], &late.pages[0]));
        assert_eq!(early.pages[1][..], late.pages[1][..5]);
        // A snapshot behind what has been written out has a last page of its own.
        let Ok(between) = frozen.snapshot(PAGE + 7, vec![3], read);
        assert_eq!(between.pages[1][..], late.pages[1][..7]);
    }

    #[test]
    fn only_what_differs_is_written_back() {
        let (mut frozen, mut other) = (Frozen::default(), Frozen::default());
        let Ok(early) = frozen.snapshot(PAGE + 5, vec![1], read);
        let Ok(late) = frozen.snapshot(3 * PAGE, vec![2], read);
        let mut written = Vec::new();
        let mut write = |range: Range<usize>, bytes: &[u8]| -> Result<(), Infallible> {
            assert_eq!(range.len(), bytes.len());
            written.push(range);
            Ok(())
        };
        let Ok(()) = frozen.restore(&early, &mut write);
        let Ok(()) = other.restore(&late, &mut write);
        // The second page was cut off by going back, so it is written again.
        let Ok(()) = frozen.restore(&late, &mut write);
        assert_eq!(
            written,
            [PAGE..PAGE + 5, 0..PAGE, PAGE..2 * PAGE, 2 * PAGE..3 * PAGE, PAGE..2 * PAGE, 2 * PAGE..3 * PAGE]
        );
    }

    #[test]
    fn pages_are_held_by_snapshots_alone() {
        let mut frozen = Frozen::default();
        let Ok(first) = frozen.snapshot(2 * PAGE + 1, vec![1], read);
        assert_eq!(frozen.held(), 2 * PAGE);
        drop(first);
        assert_eq!(frozen.held(), 0);
        let Ok(again) = frozen.snapshot(PAGE, vec![1], read);
        assert_eq!((frozen.held(), again.pages[0][..3].to_vec()), (PAGE, vec![0, 0, 0]));
    }

    #[test]
    fn a_size_counts_what_is_not_shared() {
        let size = SnapshotSize { state: 100, position: 2 };
        assert_eq!(size.bytes(10, 0), 120);
        assert_eq!(size.bytes(PAGE + 10, PAGE + 4), 120);
        assert_eq!(size.bytes(PAGE, 2 * PAGE), 100);
    }
}
