//! [`CopiedPages`]: snapshots of a model whose KV cache has no pages.

use moestro_compute::device::DeviceError;
use moestro_model::model::{KvPage, PAGE, Snapshot};
use std::{
    ops::Range,
    sync::{Arc, Weak},
};

/// The copies of a sequence's pages that existing snapshots hold.
#[derive(Debug, Default)]
pub struct CopiedPages {
    pages: Vec<Weak<KvPage>>,
}

impl CopiedPages {
    /// Takes a snapshot of the first `len` positions with the delta-net states `state`. `read` returns the keys and
    /// values of a range of positions within one page.
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

    /// Number of positions from the start whose pages a new snapshot would share with existing snapshots.
    pub fn shared_positions(&self) -> usize {
        self.pages.iter().take_while(|page| page.strong_count() > 0).count() * PAGE
    }

    /// Restores `snapshot`. Calls `write` with the keys and values of each page that differs from the sequence's own
    /// page.
    pub fn restore<E: From<DeviceError>>(
        &mut self,
        snapshot: &Snapshot,
        mut write: impl FnMut(Range<usize>, &[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        // While a weak reference exists, the address of a dropped page is not reused, so equal addresses mean equal
        // pages.
        let same = |(ours, theirs): &(&Weak<KvPage>, &Arc<KvPage>)| ours.as_ptr() == Arc::as_ptr(theirs);
        let same = self.pages.iter().zip(&snapshot.pages).take_while(same).count();
        self.pages.truncate(same);
        for (index, page) in snapshot.pages.iter().enumerate().skip(same) {
            let first = index * PAGE;
            let bytes = page.copied().ok_or_else(|| DeviceError::Failed("the page is on a device".into()))?;
            write(first..snapshot.len.min(first + PAGE), bytes)?;
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

    /// The keys and values of position `n` are one byte, `n / 3`.
    fn read(range: Range<usize>) -> Result<Vec<u8>, DeviceError> {
        Ok(range.map(|position| (position / 3) as u8).collect())
    }

    fn bytes(page: &KvPage) -> &[u8] {
        page.copied().unwrap()
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
        let mut frozen = CopiedPages::default();
        let mut other = CopiedPages::default();
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
        assert_eq!(frozen.shared_positions(), 2 * PAGE);
        drop(first);
        assert_eq!(frozen.shared_positions(), 0);
        let again = frozen.snapshot(PAGE, vec![1], read).unwrap();
        assert_eq!((frozen.shared_positions(), bytes(&again.pages[0])[..3].to_vec()), (PAGE, vec![0, 0, 0]));
    }
}
