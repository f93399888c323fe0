//! [`PromptCache`]: snapshots in memory, with lookup and eviction.

use super::{
    dir_lock::DirLock,
    disk::{DiskEntry, DiskIndex},
    memory_use::MemoryUse,
    page_requests::PageRequests,
    prefix_tree::{NodeId, PrefixTree},
    snapshot_policy::SnapshotKind,
};
use moestro_base::metrics::Metrics;
use moestro_model::model::{Model, PagePool, Snapshot, SnapshotSize};
use parking_lot::{Condvar, Mutex};
use serde::Serialize;
use std::{path::PathBuf, sync::Arc, thread::JoinHandle, time::Duration};

/// The prompt cache. The engine's thread looks up and inserts snapshots. Handles on other threads read the status of
/// the cache and clear the cache. The lock is never held while bytes are copied.
pub struct PromptCache {
    pub(super) state: Mutex<CacheState>,
    /// Notified when a snapshot was inserted, and when the cache closes.
    pub(super) changed: Condvar,
    pub(super) size: SnapshotSize,
    pub(super) metrics: Arc<Metrics>,
    pub(super) writer: Mutex<Option<DiskWriter>>,
    /// Maximum time to wait for the lock of the cache directory if another server holds it.
    pub(super) lock_timeout: Duration,
    /// Held while this server owns the cache directory.
    pub(super) dir_lock: Mutex<Option<DirLock>>,
}

/// The thread that writes snapshots to disk.
pub(super) struct DiskWriter {
    pub thread: JoinHandle<()>,
    pub page_requests: PageRequests,
}

#[derive(Default)]
pub(super) struct CacheState {
    pub tree: PrefixTree<CacheEntry>,
    pub memory_use: MemoryUse,
    /// Maximum memory of the snapshots in bytes.
    limit: u64,
    /// The page pool that snapshots share with sequences. If `None`, snapshots hold copies of keys and values.
    pub pool: Option<Arc<PagePool>>,
    /// The clock of GreedyDual-Size: the value of the last evicted snapshot.
    pub clock: f64,
    /// Number of times the cache was cleared.
    pub clear_count: u64,
    pub disk: Option<DiskIndex>,
    /// True if another server holds the lock of the cache directory.
    pub is_disk_locked: bool,
    pub is_closed: bool,
}

/// A snapshot in memory, on disk, or both.
pub(super) struct CacheEntry {
    pub kind: SnapshotKind,
    pub memory: Option<Snapshot>,
    pub disk: Option<DiskEntry>,
    /// True if the snapshot was written to disk at any time. Such a snapshot is not written again, even after eviction
    /// from disk.
    pub was_written: bool,
    /// The cache's clock when the snapshot was last used.
    pub last_used: f64,
}

/// The prompt cache as `GET /health` reports it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct PromptCacheStatus {
    /// Maximum memory in bytes.
    pub limit: u64,
    /// Size of the snapshots in memory, in bytes. The memory plan already counts as many KV pages as one sequence of
    /// maximum length needs. Used KV pages count here only beyond that number.
    pub bytes: u64,
    /// Number of snapshots in memory.
    #[serde(rename = "checkpoints")]
    pub snapshots: usize,
    /// `None` if the disk cache is off or not usable.
    pub disk: Option<DiskCacheStatus>,
    /// True if another server owns the cache directory, so that this server runs without a disk cache.
    pub disk_locked: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct DiskCacheStatus {
    pub dir: PathBuf,
    pub limit: u64,
    pub bytes: u64,
    #[serde(rename = "checkpoints")]
    pub snapshots: usize,
}

/// Where a snapshot was found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SnapshotSource {
    Memory,
    Disk,
}

impl PromptCache {
    /// A cache of at most `limit` bytes. `size` gives the bytes of a snapshot by its length.
    pub fn new(limit: u64, size: SnapshotSize, metrics: Arc<Metrics>) -> Self {
        metrics.memory_prompt_cache.set(limit as i64);
        Self {
            state: Mutex::new(CacheState { limit, ..CacheState::default() }),
            changed: Condvar::new(),
            size,
            metrics,
            writer: Mutex::default(),
            // A server that is being replaced by this server normally exits within this time.
            lock_timeout: Duration::from_secs(20),
            dir_lock: Mutex::default(),
        }
    }

    /// Makes new snapshots share the pages of `pool`. Evicts all snapshots in memory, since the device that holds their
    /// pages may no longer be usable.
    pub fn set_page_pool(&self, pool: Option<Arc<PagePool>>) {
        let mut state = self.state.lock();
        let held: Vec<NodeId> =
            state.tree.iter().filter(|(_, entry)| entry.memory.is_some()).map(|(id, _)| id).collect();
        held.into_iter().for_each(|id| self.evict(&mut state, id));
        state.pool = pool;
    }

    /// Evicts snapshots until `pages` pages are free for a sequence.
    pub fn evict_for_pages(&self, pages: usize) {
        if pages == 0 {
            return;
        }
        let mut state = self.state.lock();
        while state.is_short_of_pages(pages) {
            let frees_page =
                |(id, snapshot): &(NodeId, &Snapshot)| state.memory_use.holds_last_reference(snapshot).then_some(*id);
            // If sequences share all pages, evicting a snapshot still frees the copy of its state.
            let has_pages = |(id, snapshot): &(NodeId, &Snapshot)| MemoryUse::pool_pages(snapshot).next().map(|_| *id);
            let victim = state.least_valuable(frees_page, &self.size);
            let Some((value, id)) = victim.or_else(|| state.least_valuable(has_pages, &self.size)) else { return };
            state.clock = state.clock.max(value);
            self.evict(&mut state, id);
        }
    }

    /// The longest snapshot of a proper prefix of `ids`, if that snapshot has more than `min_len` tokens.
    ///
    /// A snapshot on disk is read only if reading it is expected to be faster than computing the tokens that it adds.
    pub fn longest_prefix<M: Model>(
        &self,
        ids: &[u32],
        min_len: usize,
        model: &mut M,
    ) -> Option<(Snapshot, SnapshotSource)> {
        loop {
            let mut state = self.state.lock();
            let CacheState { tree, clock, .. } = &mut *state;
            let path = tree.path(ids);
            // Mark each snapshot of a system prompt or question on the path as used, even if the prompt resumes from a
            // longer snapshot. Other conversations may diverge at the marked snapshot.
            for &id in &path {
                if matches!(tree[id].kind, SnapshotKind::System | SnapshotKind::Query) {
                    tree[id].last_used = *clock;
                }
            }
            let in_memory = path.iter().copied().rfind(|&id| tree.len(id) < ids.len() && tree[id].memory.is_some());
            let known = in_memory.and_then(|id| tree[id].memory.clone());
            let in_memory = in_memory.filter(|&id| tree.len(id) > min_len);
            if let Some(id) = in_memory {
                tree[id].last_used = *clock;
            }
            let len = in_memory.map_or(min_len, |id| tree.len(id));
            let found = in_memory.and(known.clone()).map(|snapshot| (snapshot, SnapshotSource::Memory));
            let Some(len) = state.find_on_disk(&path, len, ids.len(), &self.size) else { return found };
            drop(state);
            match self.read_from_disk(&ids[..len], known.map_or(Vec::new(), |known| known.pages), model) {
                Ok(Some(snapshot)) => return Some((snapshot, SnapshotSource::Disk)),
                // Memory has no room for the snapshot from disk.
                Ok(None) => return found,
                // The file could not be read, and the snapshot was removed from the index. Search again for another
                // snapshot.
                Err(()) => {}
            }
        }
    }

    /// Counts a prompt of which `cached` tokens need no computation. `source` is `None` if the tokens are from the
    /// sequence of an earlier request.
    pub fn count_lookup(&self, cached: usize, source: Option<SnapshotSource>) {
        self.metrics.prompt_tokens_cached.inc_by(cached as u64);
        if cached == 0 {
            return self.metrics.prompt_cache_misses.inc();
        }
        self.metrics.prompt_cache_hit_tokens.observe(cached as f64);
        match source {
            None => self.metrics.prompt_cache_hits_session.inc(),
            Some(SnapshotSource::Memory) => self.metrics.prompt_cache_hits_memory.inc(),
            Some(SnapshotSource::Disk) => self.metrics.prompt_cache_hits_disk.inc(),
        }
    }

    /// Length of the longest snapshot, in memory or on disk, of a proper prefix of `ids`.
    pub fn prefix_len(&self, ids: &[u32]) -> usize {
        let tree = &self.state.lock().tree;
        tree.path(ids).into_iter().map(|id| tree.len(id)).filter(|&len| len < ids.len()).max().unwrap_or(0)
    }

    /// Maximum number of snapshots that one prompt may take: half of the number that fits, limited to the range from 1
    /// to 8. Returns 0 if no snapshot fits.
    pub fn max_snapshots_per_prompt(&self) -> usize {
        let fitting = self.state.lock().copy_limit().checked_div(self.size.state).unwrap_or(0) as usize;
        if fitting == 0 { 0 } else { (fitting / 2).clamp(1, 8) }
    }

    /// Makes room for snapshots of a prompt at `positions`. Returns the positions that fit, ascending.
    ///
    /// The keys and values of the first `shared` positions are in pages that the sequence shares with its snapshots.
    pub fn reserve(
        &self,
        ids: &[u32],
        mut positions: Vec<(usize, SnapshotKind)>,
        shared: usize,
    ) -> Vec<(usize, SnapshotKind)> {
        positions.sort_unstable_by_key(|&(_, kind)| kind);
        let mut reserved: Vec<(usize, SnapshotKind)> = Vec::new();
        for (at, kind) in positions {
            // Bytes of all reserved snapshots together. Each snapshot shares its whole pages with the next shorter
            // snapshot.
            let needed = || {
                let mut shared = shared;
                let mut all: Vec<usize> = reserved.iter().map(|&(at, _)| at).chain([at]).collect();
                all.sort_unstable();
                let bytes = |at| {
                    let before = shared;
                    shared = shared.max(at);
                    self.size.bytes(at, before)
                };
                all.into_iter().map(bytes).sum()
            };
            if self.make_room(&ids[..at], kind, &needed) {
                reserved.push((at, kind));
            }
        }
        reserved.sort_unstable();
        reserved
    }

    /// Evicts snapshots to make room for a snapshot of `ids`. `needed` returns the bytes that the snapshot will take,
    /// given the current content of the cache.
    ///
    /// Returns false if the snapshot exists already or does not fit. Also returns false for a snapshot of kind `Answer`
    /// or `Between` that is less valuable than a snapshot it would replace.
    pub fn make_room(&self, ids: &[u32], kind: SnapshotKind, needed: &dyn Fn() -> u64) -> bool {
        let mut state = self.state.lock();
        if let Some(id) = state.find_exact(ids).filter(|&id| state.tree[id].memory.is_some()) {
            let clock = state.clock;
            let entry = &mut state.tree[id];
            entry.last_used = clock;
            entry.kind = entry.kind.min(kind);
            return false;
        }
        self.make_room_locked(&mut state, ids, kind, 0, &|_| needed())
    }

    /// Evicts snapshots until `needed` more bytes fit into the limit and `pages` more pages are free.
    pub(super) fn make_room_locked(
        &self,
        state: &mut CacheState,
        ids: &[u32],
        kind: SnapshotKind,
        pages: usize,
        needed: &dyn Fn(&MemoryUse) -> u64,
    ) -> bool {
        let shared = if state.pool.is_some() { ids.len() } else { 0 };
        if self.size.bytes(ids.len(), shared) > state.copy_limit() {
            return false;
        }
        let path = state.tree.path(ids);
        let prefix = path.iter().rfind(|&&id| state.tree[id].memory.is_some()).map_or(0, |&id| state.tree.len(id));
        let new_tokens = ids.len() - prefix;
        let is_short = |state: &CacheState| {
            let bytes = state.memory_use.bytes() + needed(&state.memory_use);
            bytes > state.copy_limit()
                || bytes + state.excess_page_bytes(pages) > state.limit
                || state.is_short_of_pages(pages)
        };
        while is_short(state) {
            let Some((value, id)) = state.least_valuable(|(id, _)| Some(*id), &self.size) else { return false };
            let new_value = state.clock + value_of(kind, new_tokens, &self.size);
            if matches!(kind, SnapshotKind::Answer | SnapshotKind::Between) && value > new_value {
                return false;
            }
            state.clock = state.clock.max(value);
            self.evict(state, id);
        }
        true
    }

    /// Adds a snapshot after [`PromptCache::make_room`] has returned true for it. Ignores the snapshot if the cache was
    /// cleared since the caller read `clear_count`, because a cleared cache must not contain earlier prompts.
    pub fn insert(&self, ids: &[u32], kind: SnapshotKind, snapshot: Snapshot, clear_count: u64) {
        let mut state = self.state.lock();
        if state.clear_count != clear_count {
            return;
        }
        let CacheState { tree, memory_use, clock, .. } = &mut *state;
        let new = || CacheEntry { kind, memory: None, disk: None, was_written: false, last_used: 0.0 };
        let id = tree.entry(ids, new);
        tree[id].last_used = *clock;
        if tree[id].memory.is_none() {
            memory_use.add(&snapshot);
            tree[id].memory = Some(snapshot);
        }
        self.update_metrics(&state);
        self.changed.notify_all();
    }

    /// Removes all snapshots from memory and disk.
    pub fn clear(&self) {
        let mut state = self.state.lock();
        self.clear_disk(&mut state);
        state.tree = PrefixTree::default();
        state.memory_use = MemoryUse::default();
        state.clear_count += 1;
        self.update_metrics(&state);
    }

    /// Number of times the cache was cleared. The engine drops idle sequences whose stored number differs, because
    /// their requests began before the last clear.
    pub fn clear_count(&self) -> u64 {
        self.state.lock().clear_count
    }

    pub fn snapshot_size(&self) -> &SnapshotSize {
        &self.size
    }

    pub fn status(&self) -> PromptCacheStatus {
        let state = self.state.lock();
        let (snapshots, on_disk) = state.count_snapshots();
        let disk = state.disk.as_ref().map(|disk| DiskCacheStatus {
            dir: disk.files.dir().to_owned(),
            limit: disk.limit,
            bytes: disk.bytes,
            snapshots: on_disk,
        });
        let disk_locked = state.is_disk_locked;
        PromptCacheStatus { limit: state.limit, bytes: state.bytes(), snapshots, disk, disk_locked }
    }

    /// Removes a snapshot from memory.
    pub(super) fn evict(&self, state: &mut CacheState, id: NodeId) {
        let entry = &mut state.tree[id];
        let kind = entry.kind;
        let on_disk = entry.disk.is_some();
        if let Some(snapshot) = entry.memory.take() {
            state.memory_use.remove(&snapshot);
        }
        self.metrics.prompt_cache_evictions_memory.inc();
        tracing::debug!(tokens = state.tree.len(id), ?kind, "evicted a prompt snapshot from memory");
        if !on_disk {
            state.tree.remove(id);
        }
        self.update_metrics(state);
    }

    pub(super) fn update_metrics(&self, state: &CacheState) {
        let (in_memory, on_disk) = state.count_snapshots();
        self.metrics.prompt_cache_bytes_memory.set(state.bytes() as i64);
        self.metrics.prompt_cache_snapshots_memory.set(in_memory as i64);
        self.metrics.prompt_cache_bytes_disk.set(state.disk.as_ref().map_or(0, |disk| disk.bytes) as i64);
        self.metrics.prompt_cache_snapshots_disk.set(on_disk as i64);
    }
}

impl CacheState {
    /// The node whose tokens are exactly `ids`.
    pub fn find_exact(&self, ids: &[u32]) -> Option<NodeId> {
        self.tree.path(ids).last().copied().filter(|&id| self.tree.len(id) == ids.len())
    }

    /// Number of snapshots in memory, and number of snapshots on disk.
    fn count_snapshots(&self) -> (usize, usize) {
        let count = |is_there: fn(&CacheEntry) -> bool| self.tree.iter().filter(|(_, entry)| is_there(entry)).count();
        (count(|entry| entry.memory.is_some()), count(|entry| entry.disk.is_some()))
    }

    /// Maximum bytes of copies: the limit minus the part that the memory plan reserved for pool pages of snapshots.
    fn copy_limit(&self) -> u64 {
        let reserved = self.pool.as_ref().map_or(0, |pool| pool.snapshot_bytes());
        self.limit.checked_sub(reserved).unwrap_or(self.limit)
    }

    /// Total size in bytes of the used pool pages beyond the number that one sequence of maximum length needs, after
    /// `more` pages are allocated.
    fn excess_page_bytes(&self, more: usize) -> u64 {
        self.pool.as_ref().map_or(0, |pool| pool.excess_bytes(more))
    }

    fn bytes(&self) -> u64 {
        self.memory_use.bytes() + self.excess_page_bytes(0)
    }

    /// True if fewer than `pages` pages are free, or if allocating `pages` pages would exceed the limit.
    fn is_short_of_pages(&self, pages: usize) -> bool {
        let free = self.pool.as_ref().map_or(usize::MAX, |pool| pool.free());
        let excess = self.excess_page_bytes(pages);
        pages > free || (excess > 0 && self.memory_use.bytes() + excess > self.limit)
    }

    /// Value and node of the least valuable snapshot in memory that `select` accepts.
    fn least_valuable(
        &self,
        select: impl Fn(&(NodeId, &Snapshot)) -> Option<NodeId>,
        size: &SnapshotSize,
    ) -> Option<(f64, NodeId)> {
        let in_memory = self.tree.iter().filter_map(|(id, entry)| Some((id, entry.memory.as_ref()?)));
        let values = in_memory.filter_map(|entry| select(&entry)).map(|id| (self.value(id, size), id));
        values.min_by(|a, b| a.0.total_cmp(&b.0))
    }

    pub fn value(&self, id: NodeId, size: &SnapshotSize) -> f64 {
        let mut ancestors = std::iter::successors(self.tree.parent(id), |&id| self.tree.parent(id));
        let prefix = ancestors.find(|&id| self.tree[id].memory.is_some());
        let new_tokens = self.tree.len(id) - prefix.map_or(0, |prefix| self.tree.len(prefix));
        self.tree[id].last_used + value_of(self.tree[id].kind, new_tokens, size)
    }
}

/// Value of a snapshot without the clock: the weighted number of tokens that the snapshot saves, per byte.
fn value_of(kind: SnapshotKind, tokens: usize, size: &SnapshotSize) -> f64 {
    kind.weight() * tokens as f64 / size.bytes(tokens, 0).max(1) as f64
}

#[cfg(test)]
#[path = "cache_tests.rs"]
pub(super) mod tests;
