//! Snapshots: the state of a sequence at one position, kept so that another prompt can continue from there.
//!
//! Keys and values only grow, so a full page of them is never written again: the sequence, its snapshots and the sequences
//! restored from them share it ([`kv_pages`](super::kv_pages)). The positions after the last full page and the delta nets'
//! states are overwritten by later tokens, so each snapshot has its own copy of those.

use super::kv_pages::{KvPage, PAGE};
use crate::device::DeviceError;
use std::{
    ops::Range,
    sync::{Arc, Weak},
};

/// A sequence at one position. Cloning shares the data.
#[derive(Debug, Clone, Default)]
pub struct Snapshot {
    /// Tokens seen.
    pub len: usize,
    /// Keys and values of [`PAGE`] positions each. The last page may hold fewer.
    pub pages: Vec<Arc<KvPage>>,
    /// Delta and convolution states of all layers.
    pub state: Arc<Vec<u8>>,
}

/// Sizes of a model's snapshots, in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SnapshotSize {
    /// Delta and convolution states.
    pub state: u64,
    /// Keys and values of one position.
    pub position: u64,
}

impl SnapshotSize {
    /// Bytes of a snapshot of `len` positions that shares the first `shared` ones with others.
    pub fn bytes(&self, len: usize, shared: usize) -> u64 {
        self.state + (len - len.min(shared) / PAGE * PAGE) as u64 * self.position
    }
}

/// Which pages of a sequence existing snapshots hold as copies. For a model that does not compute in pages.
#[derive(Debug, Default)]
pub struct CopiedPages {
    pages: Vec<Weak<KvPage>>,
}

impl CopiedPages {
    /// A snapshot of the first `len` positions with the delta-net states `state`. `read` returns the keys and values of a
    /// range of positions within one page.
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

    /// Positions from the start whose pages a snapshot of this sequence would share.
    pub fn held(&self) -> usize {
        self.pages.iter().take_while(|page| page.strong_count() > 0).count() * PAGE
    }

    /// Restores `snapshot`. `write` receives the keys and values of each range of positions that differ from this
    /// sequence's own.
    pub fn restore<E: From<DeviceError>>(
        &mut self,
        snapshot: &Snapshot,
        mut write: impl FnMut(Range<usize>, &[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        // A weak reference keeps the address of a dropped page from being reused, so equal addresses are equal pages.
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

    /// Position `n` of the sequence holds one byte, `n / 3`.
    fn read(range: Range<usize>) -> Result<Vec<u8>, DeviceError> {
        Ok(range.map(|position| (position / 3) as u8).collect())
    }

    fn bytes(page: &KvPage) -> Vec<u8> {
        page.read().unwrap().into_owned()
    }

    #[test]
    fn snapshots_share_full_pages() {
        let mut frozen = CopiedPages::default();
        let early = frozen.snapshot(PAGE + 5, vec![1], read).unwrap();
        let late = frozen.snapshot(2 * PAGE, vec![2], read).unwrap();
        assert_eq!((early.pages.len(), late.pages.len()), (2, 2));
        assert!(Arc::ptr_eq(&early.pages[0], &late.pages[0]));
        assert_eq!(bytes(&early.pages[1])[..], bytes(&late.pages[1])[..5]);
        // A partial page is copied for each snapshot.
        let between = frozen.snapshot(PAGE + 7, vec![3], read).unwrap();
        assert_eq!(bytes(&between.pages[1])[..], bytes(&late.pages[1])[..7]);
    }

    #[test]
    fn restore_writes_only_differing_pages() {
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
        // Restoring the earlier snapshot dropped the second page, so it is written again.
        frozen.restore(&late, &mut write).unwrap();
        assert_eq!(
            written,
            [PAGE..PAGE + 5, 0..PAGE, PAGE..2 * PAGE, 2 * PAGE..3 * PAGE, PAGE..2 * PAGE, 2 * PAGE..3 * PAGE]
        );
    }

    #[test]
    fn dropped_snapshots_free_their_pages() {
        let mut frozen = CopiedPages::default();
        let first = frozen.snapshot(2 * PAGE + 1, vec![1], read).unwrap();
        assert_eq!(frozen.held(), 2 * PAGE);
        drop(first);
        assert_eq!(frozen.held(), 0);
        let again = frozen.snapshot(PAGE, vec![1], read).unwrap();
        assert_eq!((frozen.held(), bytes(&again.pages[0])[..3].to_vec()), (PAGE, vec![0, 0, 0]));
    }

    #[test]
    fn snapshot_size_excludes_shared_pages() {
        let size = SnapshotSize { state: 100, position: 2 };
        assert_eq!(size.bytes(10, 0), 120);
        assert_eq!(size.bytes(PAGE + 10, PAGE + 4), 120);
        assert_eq!(size.bytes(PAGE, 2 * PAGE), 100);
    }
}
