//! Counts the memory of checkpoints, to the byte: pages that several of them share count once.

use crate::model::{Snapshot, snapshot::Shared};
use std::{collections::HashMap, sync::Arc};

#[derive(Default)]
pub struct Ledger {
    /// Holders of each page, by its address: it cannot be another's while somebody holds it.
    holders: HashMap<usize, usize>,
    bytes: u64,
}

impl Ledger {
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Bytes of `pages` that somebody holds.
    pub fn held(&self, pages: &[Shared]) -> u64 {
        pages.iter().filter(|page| self.holders.contains_key(&address(page))).map(|page| page.len() as u64).sum()
    }

    /// Somebody holds `snapshot` from now on.
    pub fn hold(&mut self, snapshot: &Snapshot) {
        for part in parts(snapshot) {
            let holders = self.holders.entry(address(part)).or_default();
            *holders += 1;
            if *holders == 1 {
                self.bytes += part.len() as u64;
            }
        }
    }

    /// Somebody holds it no longer.
    pub fn release(&mut self, snapshot: &Snapshot) {
        for part in parts(snapshot) {
            let Some(holders) = self.holders.get_mut(&address(part)) else { continue };
            *holders -= 1;
            if *holders == 0 {
                self.holders.remove(&address(part));
                self.bytes -= part.len() as u64;
            }
        }
    }
}

fn parts(snapshot: &Snapshot) -> impl Iterator<Item = &Shared> {
    snapshot.pages.iter().chain([&snapshot.state])
}

fn address(part: &Shared) -> usize {
    Arc::as_ptr(part) as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_shared_counts_once() {
        let page: Shared = Arc::new(vec![0; 10]);
        let one = Snapshot { len: 1, pages: vec![page.clone()], state: Arc::new(vec![0; 3]) };
        let other = Snapshot { len: 2, pages: vec![page, Arc::new(vec![0; 20])], state: Arc::new(vec![0; 3]) };
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
