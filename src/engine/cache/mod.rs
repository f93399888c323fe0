//! The prompt cache: what sequences were at places where another prompt is likely to depart, as a tree of prefixes. A
//! prompt takes the longest that it begins with and computes the rest.
//!
//! A state of the delta net cannot be rewound, so there is something to go on from only where a checkpoint was taken;
//! [`places`] says where that is. When memory is short, the checkpoint goes whose loss costs least for its bytes
//! (GreedyDual-Size: Cao and Irani 1997): `worth = clock + weight * tokens / bytes`, where `tokens` are those to be
//! computed again without it, and the clock is the worth of the last one that went, so what is not used grows old.

mod ledger;
pub mod places;
mod tree;

use crate::{
    metrics::Metrics,
    model::{Snapshot, SnapshotSize},
};
use ledger::Ledger;
use places::Kind;
use serde::Serialize;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tree::{Id, Tree};

/// Shared by the engine's thread, which asks and adds, and whoever wants to look at it or empty it. The lock is held for
/// moments only, never while bytes are copied.
pub struct Cache {
    inner: Mutex<Inner>,
    size: SnapshotSize,
    metrics: Arc<Metrics>,
}

struct Inner {
    tree: Tree<Checkpoint>,
    ledger: Ledger,
    /// Bytes of memory to take at most.
    limit: u64,
    clock: f64,
    /// How often it was emptied.
    emptied: u64,
}

struct Checkpoint {
    kind: Kind,
    snapshot: Snapshot,
    /// The clock when it was last taken or used.
    touched: f64,
}

/// What `GET /health` shows.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Status {
    pub limit: u64,
    pub bytes: u64,
    pub checkpoints: usize,
}

impl Cache {
    /// At most `limit` bytes of checkpoints that take `size`.
    pub fn new(limit: u64, size: SnapshotSize, metrics: Arc<Metrics>) -> Self {
        metrics.memory_prompt_cache.set(limit as i64);
        let inner = Inner { tree: Tree::default(), ledger: Ledger::default(), limit, clock: 0.0, emptied: 0 };
        Self { inner: Mutex::new(inner), size, metrics }
    }

    /// The longest checkpoint that `ids` begin with, if it is longer than `beyond` and leaves a token to compute.
    pub fn deepest(&self, ids: &[u32], beyond: usize) -> Option<Snapshot> {
        let mut inner = self.lock();
        let path = inner.tree.path(ids);
        // Where conversations depart, the prompts that pass by show that it is still in use.
        for &id in &path {
            if matches!(inner.tree[id].kind, Kind::System | Kind::Query) {
                inner.tree[id].touched = inner.clock;
            }
        }
        let id = path.into_iter().rfind(|&id| inner.tree.len(id) < ids.len())?;
        if inner.tree.len(id) <= beyond {
            return None;
        }
        inner.tree[id].touched = inner.clock;
        Some(inner.tree[id].snapshot.clone())
    }

    /// How many checkpoints there is room for beside those of other prompts: half of all, and one at least.
    pub fn share(&self) -> usize {
        let states = self.lock().limit.checked_div(self.size.state).unwrap_or(0) as usize;
        if states == 0 { 0 } else { (states / 2).clamp(1, 8) }
    }

    /// Makes room for a checkpoint behind all of `ids`, letting others go; false if it is not worth it, or is there
    /// already. `need` is what it will take as long as the cache holds what it holds now (bytes).
    pub fn make_room(&self, ids: &[u32], kind: Kind, need: &dyn Fn() -> u64) -> bool {
        let mut inner = self.lock();
        let path = inner.tree.path(ids);
        if let Some(&id) = path.last().filter(|&&id| inner.tree.len(id) == ids.len()) {
            inner.tree[id].touched = inner.clock;
            inner.tree[id].kind = inner.tree[id].kind.min(kind);
            return false;
        }
        // Whatever it shares is counted in the limit, too.
        if self.size.bytes(ids.len(), 0) > inner.limit {
            return false;
        }
        let fresh = ids.len() - path.last().map_or(0, |&id| inner.tree.len(id));
        while inner.ledger.bytes() + need() > inner.limit {
            let worths = inner.tree.iter().map(|(id, _)| (inner.worth(id, &self.size), id));
            let Some((worth, id)) = worths.min_by(|a, b| a.0.total_cmp(&b.0)) else { return false };
            let least = inner.clock + worth_of(kind, fresh, &self.size);
            if matches!(kind, Kind::Answer | Kind::Between) && worth > least {
                return false;
            }
            inner.clock = inner.clock.max(worth);
            self.evict(&mut inner, id);
        }
        true
    }

    /// Adds what [`Cache::make_room`] has made room for.
    pub fn insert(&self, ids: &[u32], kind: Kind, snapshot: Snapshot) {
        let mut inner = self.lock();
        let Inner { tree, ledger, clock, .. } = &mut *inner;
        let before = tree.iter().count();
        let checkpoint = Checkpoint { kind, snapshot: snapshot.clone(), touched: *clock };
        tree.entry(ids, || checkpoint);
        if tree.iter().count() > before {
            ledger.hold(&snapshot);
        }
        self.count(&inner);
    }

    /// Lets everything go.
    pub fn clear(&self) {
        let mut inner = self.lock();
        inner.tree = Tree::default();
        inner.ledger = Ledger::default();
        inner.emptied += 1;
        self.count(&inner);
    }

    /// How often it was emptied: what was kept elsewhere before that is to be let go, too.
    pub fn emptied(&self) -> u64 {
        self.lock().emptied
    }

    pub fn size(&self) -> &SnapshotSize {
        &self.size
    }

    pub fn status(&self) -> Status {
        let inner = self.lock();
        Status { limit: inner.limit, bytes: inner.ledger.bytes(), checkpoints: inner.tree.iter().count() }
    }

    fn evict(&self, inner: &mut Inner, id: Id) {
        let len = inner.tree.len(id);
        let Some(checkpoint) = inner.tree.remove(id) else { return };
        inner.ledger.release(&checkpoint.snapshot);
        self.metrics.prompt_cache_evictions_memory.inc();
        tracing::debug!(tokens = len, kind = ?checkpoint.kind, "a checkpoint gave way to others");
        self.count(inner);
    }

    fn count(&self, inner: &Inner) {
        self.metrics.prompt_cache_bytes_memory.set(inner.ledger.bytes() as i64);
        self.metrics.prompt_cache_checkpoints_memory.set(inner.tree.iter().count() as i64);
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Inner {
    fn worth(&self, id: Id, size: &SnapshotSize) -> f64 {
        let fresh = self.tree.len(id) - self.tree.parent(id).map_or(0, |parent| self.tree.len(parent));
        self.tree[id].touched + worth_of(self.tree[id].kind, fresh, size)
    }
}

/// What `fresh` tokens of a checkpoint are worth for each byte they take.
fn worth_of(kind: Kind, fresh: usize, size: &SnapshotSize) -> f64 {
    kind.weight() * fresh as f64 / (size.state + fresh as u64 * size.position).max(1) as f64
}

#[cfg(test)]
mod tests;
