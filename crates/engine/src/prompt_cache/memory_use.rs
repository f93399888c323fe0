//! Counts the memory of snapshots. Pages that several snapshots share count once.

use moestro_model::model::{KvPage, Snapshot};
use std::{collections::HashMap, sync::Arc};

#[derive(Default)]
pub struct MemoryUse {
    /// For each part (a page or a state), by address: the number of counted snapshots that hold the part.
    references: HashMap<usize, usize>,
    bytes: u64,
}

impl MemoryUse {
    /// Bytes of copied parts. Pages of the model's pool do not count, since the model's memory includes the pool.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Copied bytes of the pages in `pages` that at least one counted snapshot holds.
    pub fn bytes_of(&self, pages: &[Arc<KvPage>]) -> u64 {
        pages.iter().filter(|page| self.references.contains_key(&address(page))).map(|page| copied_bytes(page)).sum()
    }

    pub fn add(&mut self, snapshot: &Snapshot) {
        for (part, bytes) in parts(snapshot) {
            let references = self.references.entry(part).or_default();
            *references += 1;
            if *references == 1 {
                self.bytes += bytes;
            }
        }
    }

    pub fn remove(&mut self, snapshot: &Snapshot) {
        for (part, bytes) in parts(snapshot) {
            let Some(references) = self.references.get_mut(&part) else { continue };
            *references -= 1;
            if *references == 0 {
                self.references.remove(&part);
                self.bytes -= bytes;
            }
        }
    }

    /// True if `snapshot` holds a pool page that only counted snapshots hold, so that evicting these snapshots frees
    /// the page.
    pub fn holds_last_reference(&self, snapshot: &Snapshot) -> bool {
        let is_last = |page: &Arc<KvPage>| self.references.get(&address(page)) == Some(&Arc::strong_count(page));
        Self::pool_pages(snapshot).any(is_last)
    }

    /// The pages of the model's pool that `snapshot` holds.
    pub fn pool_pages(snapshot: &Snapshot) -> impl Iterator<Item = &Arc<KvPage>> {
        snapshot.pages.iter().filter(|page| matches!(***page, KvPage::Pooled(_)))
    }
}

/// Address and copied bytes of each part of a snapshot. A pool page has 0 copied bytes.
fn parts(snapshot: &Snapshot) -> impl Iterator<Item = (usize, u64)> {
    let pages = snapshot.pages.iter().map(|page| (address(page), copied_bytes(page)));
    pages.chain([(address(&snapshot.state), snapshot.state.len() as u64)])
}

fn copied_bytes(page: &KvPage) -> u64 {
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
    fn shared_parts_count_once() {
        let page = Arc::new(KvPage::Copied(vec![0; 10]));
        let one = Snapshot { len: 1, pages: vec![page.clone()], state: Arc::new(vec![0; 3]) };
        let other = Snapshot { len: 2, pages: vec![page, Arc::new(vec![0; 20].into())], state: Arc::new(vec![0; 3]) };
        let mut memory_use = MemoryUse::default();
        memory_use.add(&one);
        memory_use.add(&other);
        memory_use.add(&one);
        assert_eq!(memory_use.bytes(), 36);
        memory_use.remove(&one);
        assert_eq!(memory_use.bytes(), 36);
        memory_use.remove(&one);
        assert_eq!(memory_use.bytes(), 33);
        memory_use.remove(&other);
        assert_eq!((memory_use.bytes(), memory_use.references.len()), (0, 0));
    }
}
