//! The state of a sequence at one position, kept so that another prompt can go on from there.
//!
//! Keys and values only ever grow, so a whole page of them is never written again: the sequence, every snapshot of it and whoever
//! goes on from one hold the same page ([`pages`](super::kv_pages)). The positions behind the last whole page, and the delta and
//! convolution states, are overwritten by what comes: each snapshot has its own.

use crate::device::DeviceError;
use crate::model::state::kv_pages::PooledPage;
pub use crate::ops::attention::PAGE;
use std::{
    borrow::Cow,
    ops::Range,
    sync::{Arc, Weak},
};

/// Bytes that no longer change.
pub type Shared = Arc<Vec<u8>>;

/// Keys and values of up to [`PAGE`] positions, in an order that only the model knows.
#[derive(Debug)]
pub enum KvPage {
    /// A copy of them.
    Copied(Vec<u8>),
    /// The place where they were computed.
    Pooled(PooledPage),
}

impl KvPage {
    /// Bytes.
    pub fn len(&self) -> usize {
        match self {
            KvPage::Copied(bytes) => bytes.len(),
            KvPage::Pooled(held) => held.bytes(),
        }
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// What is in it.
    ///
    /// # Errors
    /// The device that has it is gone.
    pub fn read(&self) -> Result<Cow<'_, [u8]>, DeviceError> {
        match self {
            KvPage::Copied(bytes) => Ok(Cow::Borrowed(bytes)),
            KvPage::Pooled(held) => held.read().map(Cow::Owned),
        }
    }
}

impl From<Vec<u8>> for KvPage {
    fn from(bytes: Vec<u8>) -> Self {
        KvPage::Copied(bytes)
    }
}

/// A sequence at one position. Cloning shares it.
#[derive(Debug, Clone, Default)]
pub struct Snapshot {
    /// Tokens seen.
    pub len: usize,
    /// Keys and values of `PAGE` positions each; the last page may hold fewer.
    pub pages: Vec<Arc<KvPage>>,
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
        self.state + (len - len.min(shared) / PAGE * PAGE) as u64 * self.position
    }
}

/// The pages of a sequence that were copied, for as long as a snapshot holds them: for a model that keeps its keys and values
/// elsewhere than in pages.
#[derive(Debug, Default)]
pub struct CopiedPages {
    pages: Vec<Weak<KvPage>>,
}

impl CopiedPages {
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
                None => Arc::new(read(index * PAGE..(index + 1) * PAGE)?.into()),
            };
            *page = Arc::downgrade(&shared);
            pages.push(shared);
        }
        if !len.is_multiple_of(PAGE) {
            pages.push(Arc::new(read(len / PAGE * PAGE..len)?.into()));
        }
        Ok(Snapshot { len, pages, state: Arc::new(state) })
    }

    /// Positions from the first on whose pages a snapshot of this sequence would share with others.
    pub fn held(&self) -> usize {
        self.pages.iter().take_while(|page| page.strong_count() > 0).count() * PAGE
    }

    /// Makes the sequence what `snapshot` says: `write` is given the keys and values of each range of positions that this
    /// sequence does not already hold.
    pub fn restore<E: From<DeviceError>>(
        &mut self,
        snapshot: &Snapshot,
        mut write: impl FnMut(Range<usize>, &[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        // A page that nobody holds any more keeps its address, so no other is taken for it.
        let same = |(ours, theirs): &(&Weak<KvPage>, &Arc<KvPage>)| ours.as_ptr() == Arc::as_ptr(theirs);
        let same = self.pages.iter().zip(&snapshot.pages).take_while(same).count();
        self.pages.truncate(same);
        for (index, page) in snapshot.pages.iter().enumerate().skip(same) {
            let first = index * PAGE;
            write(first..snapshot.len.min(first + PAGE), &page.read()?)?;
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

    /// A sequence whose position `n` holds one byte, `n / 3`.
    fn read(range: Range<usize>) -> Result<Vec<u8>, DeviceError> {
        Ok(range.map(|position| (position / 3) as u8).collect())
    }

    fn bytes(page: &KvPage) -> Vec<u8> {
        page.read().unwrap().into_owned()
    }

    #[test]
    fn snapshots_of_a_sequence_share_whole_pages() {
        let mut frozen = CopiedPages::default();
        let early = frozen.snapshot(PAGE + 5, vec![1], read).unwrap();
        let late = frozen.snapshot(2 * PAGE, vec![2], read).unwrap();
        assert_eq!((early.pages.len(), late.pages.len()), (2, 2));
        assert!(Arc::ptr_eq(&early.pages[0], &late.pages[0]));
        assert_eq!(bytes(&early.pages[1])[..], bytes(&late.pages[1])[..5]);
        // A snapshot behind what has been written out has a last page of its own.
        let between = frozen.snapshot(PAGE + 7, vec![3], read).unwrap();
        assert_eq!(bytes(&between.pages[1])[..], bytes(&late.pages[1])[..7]);
    }

    #[test]
    fn only_what_differs_is_written_back() {
        let (mut frozen, mut other) = (CopiedPages::default(), CopiedPages::default());
        let early = frozen.snapshot(PAGE + 5, vec![1], read).unwrap();
        let late = frozen.snapshot(3 * PAGE, vec![2], read).unwrap();
        let mut written = Vec::new();
        let mut write = |range: Range<usize>, bytes: &[u8]| -> Result<(), DeviceError> {
            assert_eq!(range.len(), bytes.len());
            written.push(range);
            Ok(())
        };
        frozen.restore(&early, &mut write).unwrap();
        other.restore(&late, &mut write).unwrap();
        // The second page was cut off by going back, so it is written again.
        frozen.restore(&late, &mut write).unwrap();
        assert_eq!(
            written,
            [PAGE..PAGE + 5, 0..PAGE, PAGE..2 * PAGE, 2 * PAGE..3 * PAGE, PAGE..2 * PAGE, 2 * PAGE..3 * PAGE]
        );
    }

    #[test]
    fn pages_are_held_by_snapshots_alone() {
        let mut frozen = CopiedPages::default();
        let first = frozen.snapshot(2 * PAGE + 1, vec![1], read).unwrap();
        assert_eq!(frozen.held(), 2 * PAGE);
        drop(first);
        assert_eq!(frozen.held(), 0);
        let again = frozen.snapshot(PAGE, vec![1], read).unwrap();
        assert_eq!((frozen.held(), bytes(&again.pages[0])[..3].to_vec()), (PAGE, vec![0, 0, 0]));
    }

    #[test]
    fn a_size_counts_what_is_not_shared() {
        let size = SnapshotSize { state: 100, position: 2 };
        assert_eq!(size.bytes(10, 0), 120);
        assert_eq!(size.bytes(PAGE + 10, PAGE + 4), 120);
        assert_eq!(size.bytes(PAGE, 2 * PAGE), 100);
    }
}
