//! Snapshots: the saved state of a sequence at one position. Another prompt that starts with the same tokens can
//! continue from the snapshot.
//!
//! Keys and values only grow, so a full page of them is never written again: the sequence, its snapshots and the
//! sequences restored from them share it ([`kv_pages`](super::kv_pages)). Later tokens overwrite the delta nets' states
//! and the positions after the last full page, so each snapshot has its own copy of these.

use super::kv_pages::{KvPage, PAGE, PageSize};
use std::sync::Arc;

/// The saved state of a sequence. Clones share the data.
#[derive(Debug, Clone, Default)]
pub struct Snapshot {
    /// Number of tokens.
    pub len: usize,
    /// Keys and values of [`PAGE`] positions each. The last page may hold fewer positions.
    pub pages: Vec<Arc<KvPage>>,
    /// The parts of fixed size, such as the recurrent and convolution states of all delta nets.
    pub state: Arc<Vec<u8>>,
}

/// Sizes of a model's snapshots, in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SnapshotSize {
    /// Number of bytes of the parts of fixed size, such as the states of all delta nets.
    pub state: u64,
    pub page: PageSize,
}

impl SnapshotSize {
    /// Number of bytes of a snapshot of `len` positions that shares its first `shared` positions with other snapshots.
    pub fn bytes(&self, len: usize, shared: usize) -> u64 {
        let pages = len / PAGE - len.min(shared) / PAGE;
        let rows = len % PAGE;
        self.state + pages as u64 * self.page.bytes(PAGE) + self.page.bytes(rows)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn snapshot_size_excludes_shared_pages() {
        let size = SnapshotSize { state: 100, page: PageSize::without_indexer(2) };
        assert_eq!(size.bytes(10, 0), 120);
        assert_eq!(size.bytes(PAGE + 10, PAGE + 4), 120);
        assert_eq!(size.bytes(PAGE, 2 * PAGE), 100);
    }

    #[test]
    fn partial_block_has_a_whole_key() {
        let size = SnapshotSize { state: 0, page: PageSize { position: 2, block: 5, block_key: 7 } };
        for (len, bytes) in [(1, 2 + 7), (5, 10 + 7), (6, 12 + 14), (PAGE, 2 * PAGE + 52 * 7)] {
            assert_eq!(size.bytes(len, 0), bytes as u64, "{len}");
            assert_eq!(size.bytes(PAGE + len, PAGE), bytes as u64, "{len}");
        }
    }
}
