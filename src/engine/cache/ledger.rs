//! Counts the memory of checkpoints, to the byte: pages that several of them share count once.

use crate::model::{KvPage, Snapshot};
use std::{collections::HashMap, sync::Arc};

#[derive(Default)]
pub struct Ledger {
    /// Holders of each part, by its address: it cannot be another's while somebody holds it.
    holders: HashMap<usize, usize>,
    bytes: u64,
}

impl Ledger {
    /// Bytes of what is a copy: pages of the model's pool are in its memory.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Bytes of `pages` that somebody holds.
    pub fn held(&self, pages: &[Arc<KvPage>]) -> u64 {
        pages.iter().filter(|page| self.holders.contains_key(&address(page))).map(|page| copied(page)).sum()
    }

    /// Somebody holds `snapshot` from now on.
    pub fn hold(&mut self, snapshot: &Snapshot) {
        for (part, bytes) in parts(snapshot) {
            let holders = self.holders.entry(part).or_default();
            *holders += 1;
            if *holders == 1 {
                self.bytes += bytes;
            }
        }
    }

    /// Somebody holds it no longer.
    pub fn release(&mut self, snapshot: &Snapshot) {
        for (part, bytes) in parts(snapshot) {
            let Some(holders) = self.holders.get_mut(&part) else { continue };
            *holders -= 1;
            if *holders == 0 {
                self.holders.remove(&part);
                self.bytes -= bytes;
            }
        }
    }

    /// True if a page of the pool would be free if none of its holders here held it any more.
    pub fn alone(&self, snapshot: &Snapshot) -> bool {
        let alone = |page: &Arc<KvPage>| self.holders.get(&address(page)) == Some(&Arc::strong_count(page));
        Self::of_pool(snapshot).any(alone)
    }

    /// The pages of the pool that `snapshot` holds.
    pub fn of_pool(snapshot: &Snapshot) -> impl Iterator<Item = &Arc<KvPage>> {
        snapshot.pages.iter().filter(|page| matches!(***page, KvPage::Pooled(_)))
    }
}

/// Each part, by its address, and the bytes that it is a copy of.
fn parts(snapshot: &Snapshot) -> impl Iterator<Item = (usize, u64)> {
    let pages = snapshot.pages.iter().map(|page| (address(page), copied(page)));
    pages.chain([(address(&snapshot.state), snapshot.state.len() as u64)])
}

fn copied(page: &KvPage) -> u64 {
    match page {
        KvPage::Copied(bytes) => bytes.len() as u64,
        KvPage::Pooled(_) => 0,
    }
}

fn address<T>(part: &Arc<T>) -> usize {
    Arc::as_ptr(part) as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_shared_counts_once() {
        let page = Arc::new(KvPage::Copied(vec![0; 10]));
        let one = Snapshot { len: 1, pages: vec![page.clone()], state: Arc::new(vec![0; 3]) };
        let other = Snapshot { len: 2, pages: vec![page, Arc::new(vec![0; 20].into())], state: Arc::new(vec![0; 3]) };
        let mut ledger = Ledger::default();
        ledger.hold(&one);
        ledger.hold(&other);
        ledger.hold(&one);
        assert_eq!(ledger.bytes(), 36);
        ledger.release(&one);
        assert_eq!(ledger.bytes(), 36);
        ledger.release(&one);
        assert_eq!(ledger.bytes(), 33);
        ledger.release(&other);
        assert_eq!((ledger.bytes(), ledger.holders.len()), (0, 0));
    }
}
