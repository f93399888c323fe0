//! The prompt cache: what sequences were at places where another prompt is likely to depart, as a tree of prefixes. A
//! prompt takes the longest that it begins with and computes the rest.
//!
//! A state of the delta net cannot be rewound, so there is something to go on from only where a checkpoint was taken;
//! [`places`] says where that is. When memory is short, the checkpoint goes whose loss costs least for its bytes
//! (GreedyDual-Size: Cao and Irani 1997): `worth = clock + weight * tokens / bytes`, where `tokens` are those to be
//! computed again without it, and the clock is the worth of the last one that went, so what is not used grows old.
//!
//! Keys and values are pages of the model's pool, which checkpoints share with sequences: when a sequence needs one and none is
//! free, checkpoints go as well. What a checkpoint has for itself are states, and the positions behind its last whole page.

mod disk;
mod files;
mod ledger;
mod live;
pub mod places;
mod read;
mod tree;
mod unfinished;

use crate::{
    metrics::Metrics,
    model::{PagePool, Snapshot, SnapshotSize},
};
pub use disk::Storage;
use disk::{Disk, OnDisk};
pub use files::forget_all;
use ledger::Ledger;
use parking_lot::{Condvar, Mutex};
use places::Kind;
use serde::Serialize;
use std::{path::PathBuf, sync::Arc, thread::JoinHandle};
use tree::{Id, Tree};

/// Shared by the engine's thread, which asks and adds, and whoever wants to look at it or empty it. The lock is held for
/// moments only, never while bytes are copied.
pub struct Cache {
    inner: Mutex<Inner>,
    /// There is something to write to the disk, or nothing will come any more.
    changed: Condvar,
    size: SnapshotSize,
    metrics: Arc<Metrics>,
    writer: Mutex<Option<JoinHandle<()>>>,
}

struct Inner {
    tree: Tree<Checkpoint>,
    ledger: Ledger,
    /// Bytes of memory to take at most.
    limit: u64,
    /// The pages of keys and values that checkpoints share with sequences; without, they have copies.
    pool: Option<Arc<PagePool>>,
    clock: f64,
    /// The number of times it was emptied.
    emptied: u64,
    disk: Option<Disk>,
    closed: bool,
}

/// In memory, on the disk, or both.
struct Checkpoint {
    kind: Kind,
    memory: Option<Snapshot>,
    disk: Option<OnDisk>,
    /// It has been written once; it is not written again.
    written: bool,
    /// The clock when it was last taken or used.
    touched: f64,
}

/// The prompt cache as `GET /health` shows it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Status {
    /// Bytes of memory at most.
    pub limit: u64,
    /// Bytes and checkpoints in memory; of pages, those beyond what the longest sequence has.
    pub bytes: u64,
    pub checkpoints: usize,
    /// `None` if nothing is kept on the disk.
    pub disk: Option<DiskStatus>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct DiskStatus {
    pub dir: PathBuf,
    pub limit: u64,
    pub bytes: u64,
    pub checkpoints: usize,
}

/// The place in which a checkpoint was found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    Memory,
    Disk,
}

impl Cache {
    /// At most `limit` bytes of checkpoints that take `size`.
    pub fn new(limit: u64, size: SnapshotSize, metrics: Arc<Metrics>) -> Self {
        metrics.memory_prompt_cache.set(limit as i64);
        let (tree, ledger) = (Tree::default(), Ledger::default());
        let inner = Inner { tree, ledger, limit, pool: None, clock: 0.0, emptied: 0, disk: None, closed: false };
        Self { inner: Mutex::new(inner), changed: Condvar::new(), size, metrics, writer: Mutex::default() }
    }

    /// From here on checkpoints share the pages of `pool`; those in memory are let go, since theirs may be gone.
    pub fn share_pages(&self, pool: Option<Arc<PagePool>>) {
        let mut inner = self.inner.lock();
        let held: Vec<Id> = inner.tree.iter().filter(|(_, one)| one.memory.is_some()).map(|(id, _)| id).collect();
        held.into_iter().for_each(|id| self.evict(&mut inner, id));
        inner.pool = pool;
    }

    /// Lets checkpoints go until there are `pages` for a sequence.
    pub fn leave_pages(&self, pages: usize) {
        if pages == 0 {
            return;
        }
        let mut inner = self.inner.lock();
        while inner.lacks(pages) {
            let alone = |(id, snapshot): &(Id, &Snapshot)| inner.ledger.alone(snapshot).then_some(*id);
            // The writer may hold one page for as long as it reads it.
            let any = |(id, snapshot): &(Id, &Snapshot)| Ledger::of_pool(snapshot).next().map(|_| *id);
            let least = inner.least(alone, &self.size).or_else(|| inner.least(any, &self.size));
            let Some((worth, id)) = least else { return };
            inner.clock = inner.clock.max(worth);
            self.evict(&mut inner, id);
        }
    }

    /// The longest checkpoint that `ids` begin with, if it is longer than `beyond` and leaves a token to compute. One that
    /// is on the disk alone is read, if that is faster than computing what it has more.
    pub fn deepest(&self, ids: &[u32], beyond: usize) -> Option<(Snapshot, Place)> {
        loop {
            let mut inner = self.inner.lock();
            let Inner { tree, clock, .. } = &mut *inner;
            let path = tree.path(ids);
            // Prompts that pass a place where conversations depart show that it is still in use.
            for &id in &path {
                if matches!(tree[id].kind, Kind::System | Kind::Query) {
                    tree[id].touched = *clock;
                }
            }
            let memory = path.iter().copied().rfind(|&id| tree.len(id) < ids.len() && tree[id].memory.is_some());
            let known = memory.and_then(|id| tree[id].memory.clone());
            let memory = memory.filter(|&id| tree.len(id) > beyond);
            if let Some(id) = memory {
                tree[id].touched = *clock;
            }
            let least = memory.map_or(beyond, |id| tree.len(id));
            let found = memory.and(known.clone()).map(|snapshot| (snapshot, Place::Memory));
            let Some(len) = inner.worth_reading(&path, least, ids.len(), &self.size) else { return found };
            drop(inner);
            match self.read_back(&ids[..len], known.map_or(Vec::new(), |known| known.pages)) {
                Ok(Some(snapshot)) => return Some((snapshot, Place::Disk)),
                // There is no room in memory for it.
                Ok(None) => return found,
                // It could not be read and is forgotten: perhaps there is another.
                Err(()) => {}
            }
        }
    }

    /// The number of checkpoints that one prompt may take: half of all, and one at least.
    pub fn share(&self) -> usize {
        let states = self.inner.lock().room().checked_div(self.size.state).unwrap_or(0) as usize;
        if states == 0 { 0 } else { (states / 2).clamp(1, 8) }
    }

    /// Makes room for a checkpoint behind all of `ids`, letting others go; false if it is not worth it, or is there
    /// already. `need` is what it will take as long as the cache holds what it holds now (bytes).
    pub fn make_room(&self, ids: &[u32], kind: Kind, need: &dyn Fn() -> u64) -> bool {
        let mut inner = self.inner.lock();
        let there = inner.tree.path(ids).last().copied().filter(|&id| inner.tree.len(id) == ids.len());
        if let Some(id) = there.filter(|&id| inner.tree[id].memory.is_some()) {
            let (clock, checkpoint) = (inner.clock, &mut inner.tree[id]);
            checkpoint.touched = clock;
            checkpoint.kind = checkpoint.kind.min(kind);
            return false;
        }
        self.fit(&mut inner, ids, kind, 0, &|_| need())
    }

    /// Lets checkpoints go until `need` bytes more are within the limit, and there are so many `pages` more.
    fn fit(&self, inner: &mut Inner, ids: &[u32], kind: Kind, pages: usize, need: &dyn Fn(&Ledger) -> u64) -> bool {
        // Copies of pages that it shares are counted in the limit, too.
        let shared = if inner.pool.is_some() { ids.len() } else { 0 };
        if self.size.bytes(ids.len(), shared) > inner.room() {
            return false;
        }
        let path = inner.tree.path(ids);
        let fresh =
            ids.len() - path.iter().rfind(|&&id| inner.tree[id].memory.is_some()).map_or(0, |&id| inner.tree.len(id));
        let short = |inner: &Inner| {
            let bytes = inner.ledger.bytes() + need(&inner.ledger);
            bytes > inner.room() || bytes + inner.over(pages) > inner.limit || inner.lacks(pages)
        };
        while short(inner) {
            let Some((worth, id)) = inner.least(|(id, _)| Some(*id), &self.size) else { return false };
            let least = inner.clock + worth_of(kind, fresh, &self.size);
            if matches!(kind, Kind::Answer | Kind::Between) && worth > least {
                return false;
            }
            inner.clock = inner.clock.max(worth);
            self.evict(inner, id);
        }
        true
    }

    /// Adds what [`Cache::make_room`] has made room for, unless the cache was emptied since it had been so `emptied` times:
    /// whoever empties it wants to find nothing of what was asked before.
    pub fn insert(&self, ids: &[u32], kind: Kind, snapshot: Snapshot, emptied: u64) {
        let mut inner = self.inner.lock();
        if inner.emptied != emptied {
            return;
        }
        let Inner { tree, ledger, clock, .. } = &mut *inner;
        let id = tree.entry(ids, || Checkpoint { kind, memory: None, disk: None, written: false, touched: 0.0 });
        tree[id].touched = *clock;
        if tree[id].memory.is_none() {
            ledger.hold(&snapshot);
            tree[id].memory = Some(snapshot);
        }
        self.count(&inner);
        self.changed.notify_all();
    }

    /// Lets everything go.
    pub fn clear(&self) {
        let mut inner = self.inner.lock();
        self.clear_disk(&mut inner);
        inner.tree = Tree::default();
        inner.ledger = Ledger::default();
        inner.emptied += 1;
        self.count(&inner);
    }

    /// The number of times it was emptied: states kept elsewhere since before that are to be let go, too.
    pub fn emptied(&self) -> u64 {
        self.inner.lock().emptied
    }

    pub fn size(&self) -> &SnapshotSize {
        &self.size
    }

    pub fn status(&self) -> Status {
        let inner = self.inner.lock();
        let (checkpoints, on_disk) = inner.checkpoints();
        let disk = inner.disk.as_ref().map(|disk| disk.status(on_disk));
        Status { limit: inner.limit, bytes: inner.bytes(), checkpoints, disk }
    }

    /// Takes a checkpoint out of memory.
    fn evict(&self, inner: &mut Inner, id: Id) {
        let checkpoint = &mut inner.tree[id];
        let (kind, gone) = (checkpoint.kind, checkpoint.disk.is_none());
        if let Some(snapshot) = checkpoint.memory.take() {
            inner.ledger.release(&snapshot);
        }
        self.metrics.prompt_cache_evictions_memory.inc();
        tracing::debug!(tokens = inner.tree.len(id), ?kind, "a checkpoint gave way to others");
        if gone {
            inner.tree.remove(id);
        }
        self.count(inner);
    }

    fn count(&self, inner: &Inner) {
        let (in_memory, on_disk) = inner.checkpoints();
        self.metrics.prompt_cache_bytes_memory.set(inner.bytes() as i64);
        self.metrics.prompt_cache_checkpoints_memory.set(in_memory as i64);
        self.metrics.prompt_cache_bytes_disk.set(inner.disk.as_ref().map_or(0, Disk::bytes) as i64);
        self.metrics.prompt_cache_checkpoints_disk.set(on_disk as i64);
    }
}

impl Inner {
    /// Checkpoints in memory and on the disk.
    fn checkpoints(&self) -> (usize, usize) {
        let count =
            |place: fn(&Checkpoint) -> bool| self.tree.iter().filter(|(_, checkpoint)| place(checkpoint)).count();
        (count(|checkpoint| checkpoint.memory.is_some()), count(|checkpoint| checkpoint.disk.is_some()))
    }

    /// Bytes for copies at most: the budget less the pages that were set aside in it, if it is this plan's.
    fn room(&self) -> u64 {
        let beyond = self.pool.as_ref().map_or(0, |pool| pool.beyond());
        self.limit.checked_sub(beyond).unwrap_or(self.limit)
    }

    /// Bytes of pages in use, and of `more`, beyond what the longest sequence has.
    fn over(&self, more: usize) -> u64 {
        self.pool.as_ref().map_or(0, |pool| pool.over(more))
    }

    fn bytes(&self) -> u64 {
        self.ledger.bytes() + self.over(0)
    }

    /// True if there are not so many `pages` more, or not within the limit.
    fn lacks(&self, pages: usize) -> bool {
        let free = self.pool.as_ref().map_or(usize::MAX, |pool| pool.free());
        pages > free || (self.over(pages) > 0 && self.ledger.bytes() + self.over(pages) > self.limit)
    }

    /// The checkpoint in memory that is worth least, of those that `which` says.
    fn least(&self, which: impl Fn(&(Id, &Snapshot)) -> Option<Id>, size: &SnapshotSize) -> Option<(f64, Id)> {
        let held = self.tree.iter().filter_map(|(id, checkpoint)| Some((id, checkpoint.memory.as_ref()?)));
        let worths = held.filter_map(|one| which(&one)).map(|id| (self.worth(id, size), id));
        worths.min_by(|a, b| a.0.total_cmp(&b.0))
    }

    fn worth(&self, id: Id, size: &SnapshotSize) -> f64 {
        let ancestors = std::iter::successors(self.tree.parent(id), |&id| self.tree.parent(id));
        let below = ancestors.into_iter().find(|&id| self.tree[id].memory.is_some());
        let fresh = self.tree.len(id) - below.map_or(0, |below| self.tree.len(below));
        self.tree[id].touched + worth_of(self.tree[id].kind, fresh, size)
    }
}

/// The value of `fresh` tokens of a checkpoint for each byte they take.
fn worth_of(kind: Kind, fresh: usize, size: &SnapshotSize) -> f64 {
    kind.weight() * fresh as f64 / (size.state + fresh as u64 * size.position).max(1) as f64
}

#[cfg(test)]
mod tests;
