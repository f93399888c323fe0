//! Disk I/O of the prompt cache: opens the directory, writes snapshots on a background thread, and reads snapshots.
//!
//! Every snapshot is written once. After a write error, the disk cache is off until the next start.

use super::{
    cache::{CacheEntry, CacheState, DiskWriter, PromptCache},
    dir_lock::DirLock,
    disk::{DiskCacheOptions, DiskEntry, DiskIndex},
    page_requests::{ReadPage, page_requests, read_page},
    prefix_tree::NodeId,
    snapshot_files::{SnapshotFiles, page_name},
    snapshot_policy::SnapshotKind,
};
use moestro_base::platform::os;
use moestro_model::model::{KvPage, Model, PAGE, Snapshot, SnapshotSize};
use parking_lot::{Mutex, MutexGuard};
use std::{
    collections::HashSet,
    io,
    sync::{Arc, Weak},
    time::{Duration, Instant, SystemTime},
};

const LOCK_INTERVAL: Duration = Duration::from_millis(100);
/// Interval at which to retry snapshots that the hourly write limit has delayed.
const WRITE_RETRY_INTERVAL: Duration = Duration::from_secs(60);
/// Maximum time to write the remaining snapshots when the cache closes.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(5);

/// A snapshot to write to disk. For each page of the snapshot, `missing_pages` is true if the page is not on disk.
struct PendingWrite {
    ids: Vec<u32>,
    snapshot: Snapshot,
    files: Arc<SnapshotFiles>,
    missing_pages: Vec<bool>,
}

impl PromptCache {
    /// Opens the cache directory, loads the index of its snapshots, and starts the thread that writes new snapshots.
    /// Snapshots of more than `max_tokens` tokens are removed.
    ///
    /// If another server holds the lock, tries again in the background for [`PromptCache::lock_timeout`]. Until this
    /// server holds the lock, and after a timeout, the cache works in memory only.
    ///
    /// The thread gets the bytes of pages from [`PromptCache::answer_page_request`]. `wake_engine` makes an idle engine
    /// call it.
    pub fn open_disk(
        self: &Arc<Self>,
        options: DiskCacheOptions,
        max_tokens: usize,
        wake_engine: impl Fn() + Send + 'static,
    ) {
        let opened = self.try_open_disk(&options, max_tokens);
        if let Err(error) = &opened {
            return warn_disk_unused(&options, error);
        }
        let cache = self.clone();
        let dir = options.dir.clone();
        let (mut read, page_requests) = page_requests(wake_engine);
        let work = move || {
            os::background_thread();
            if cache.wait_for_disk(&options, max_tokens) {
                cache.run_writer(&mut read);
            }
        };
        match std::thread::Builder::new().name("prompt cache".into()).spawn(work) {
            Ok(thread) => *self.writer.lock() = Some(DiskWriter { thread, page_requests }),
            Err(error) => tracing::warn!(dir = %dir.display(), %error, "cannot start the disk cache's thread"),
        }
    }

    /// Locks the directory and loads the index. Returns false if another server holds the lock.
    fn try_open_disk(&self, options: &DiskCacheOptions, max_tokens: usize) -> io::Result<bool> {
        let Some(lock) = DirLock::try_create(&options.dir)? else {
            self.state.lock().is_disk_locked = true;
            return Ok(false);
        };
        let loaded = self.load_index(options, max_tokens);
        // Also after an error.
        self.state.lock().is_disk_locked = false;
        *self.dir_lock.lock() = Some(lock);
        loaded.map(|()| true)
    }

    fn load_index(&self, options: &DiskCacheOptions, max_tokens: usize) -> io::Result<()> {
        let (files, found) = SnapshotFiles::open(&options.dir, &options.key, self.size, max_tokens)?;
        let other_models = files.evict_other_models(&options.dir, options.limit / 2)?;
        let mut state = self.state.lock();
        // In one step with the index: the status never shows a cache on disk that another server locks, nor a free
        // directory before its snapshots can be found.
        state.is_disk_locked = false;
        state.disk = Some(DiskIndex::new(Arc::new(files), options.limit.saturating_sub(other_models)));
        for stored in found {
            let entry = DiskEntry { bytes: stored.bytes, last_used: stored.last_used };
            state.add_disk_entry(&stored.tokens, SnapshotKind::Message, entry);
        }
        if let Some(disk) = &state.disk {
            let needed: HashSet<String> = disk.pages.keys().map(page_name).collect();
            disk.files.remove_unused_pages(|name| needed.contains(name))?;
        }
        self.enforce_disk_limit(&mut state);
        self.update_metrics(&state);
        Ok(())
    }

    /// Waits until this server holds the lock of the directory. Returns false after a timeout or an error, or if the
    /// cache closes.
    fn wait_for_disk(&self, options: &DiskCacheOptions, max_tokens: usize) -> bool {
        let begun = Instant::now();
        let mut state = self.state.lock();
        while state.is_disk_locked && !state.is_closed {
            if begun.elapsed() >= self.lock_timeout {
                let dir = options.dir.display();
                tracing::warn!(%dir, "another server uses the prompt cache directory; running without a disk cache");
                return false;
            }
            self.changed.wait_for(&mut state, LOCK_INTERVAL);
            let opened = MutexGuard::unlocked(&mut state, || self.try_open_disk(options, max_tokens));
            if let Err(error) = opened {
                warn_disk_unused(options, &error);
                return false;
            }
        }
        !state.is_closed
    }

    /// Records that `tokens` prompt tokens were computed in `time`. The cache uses this speed to decide whether to read
    /// a snapshot or to compute its tokens.
    pub fn record_prefill_speed(&self, tokens: usize, time: Duration) {
        if let Some(disk) = &mut self.state.lock().disk {
            disk.prefill_speed.record(tokens as f64, time);
        }
    }

    /// Reads a page that the writer's thread waits for. Returns false if it waits for none. The engine's thread calls
    /// this between two passes.
    pub fn answer_page_request<M: Model>(&self, model: &mut M) -> bool {
        self.writer.lock().as_ref().is_some_and(|writer| writer.page_requests.answer_next(model))
    }

    /// Writes the remaining snapshots, for at most [`CLOSE_TIMEOUT`]. Then unlocks the directory and sets the cache's
    /// gauges to 0.
    ///
    /// The writer's thread ends after its current snapshot. The caller's thread writes the rest, because the writer's
    /// thread has a low priority and the server waits for the writes.
    pub fn close<M: Model>(&self, model: &mut M) {
        self.state.lock().is_closed = true;
        self.changed.notify_all();
        if let Some(writer) = self.writer.lock().take() {
            writer.page_requests.answer_all(model);
            // A panic of the thread was already logged.
            let _ = writer.thread.join();
        }
        let begun = Instant::now();
        let mut state = self.state.lock();
        let read = &mut |page: &Weak<KvPage>| read_page(page, model);
        while begun.elapsed() <= CLOSE_TIMEOUT && self.write_next(&mut state, read) {}
        *self.dir_lock.lock() = None;
        self.metrics.prompt_cache_bytes_memory.set(0);
        self.metrics.prompt_cache_snapshots_memory.set(0);
        self.metrics.prompt_cache_bytes_disk.set(0);
        self.metrics.prompt_cache_snapshots_disk.set(0);
    }

    /// Reads the snapshot of `ids` from disk. The snapshot's first pages are in memory as `known` and are not read.
    /// Returns `None` if memory has no room for the snapshot. Logs an error and removes the snapshot from the index
    /// before returning `Err`.
    pub(super) fn read_from_disk<M: Model>(
        &self,
        ids: &[u32],
        known: Vec<Arc<KvPage>>,
        model: &mut M,
    ) -> Result<Option<Snapshot>, ()> {
        let mut state = self.state.lock();
        let Some(files) = state.disk.as_ref().map(|disk| disk.files.clone()) else { return Ok(None) };
        // If the cache is cleared during the read, `insert` ignores the snapshot.
        let clear_count = state.clear_count;
        let known = &known[..known.len().min(ids.len() / PAGE)];
        let is_whole = |page: &&Arc<KvPage>| page.len() as u64 == self.size.page.bytes(PAGE);
        let known: Vec<Arc<KvPage>> = known.iter().filter(is_whole).cloned().collect();
        let has_pool = state.pool.is_some();
        let copied = self.size.bytes(ids.len(), if has_pool { ids.len() } else { 0 });
        // One additional page is for the tokens after the snapshot.
        let pages = if has_pool { ids.len() / PAGE - known.len() + 1 } else { 0 };
        let needed = |memory_use: &super::memory_use::MemoryUse| copied - memory_use.bytes_of(&known);
        if !self.make_room_locked(&mut state, ids, SnapshotKind::Message, pages, &needed) {
            return Ok(None);
        }
        drop(state);

        let begun = Instant::now();
        // The threads that read the files fill pages one after another. This thread, which owns the model, waits for them.
        let model = Mutex::new(model);
        let make_page = |bytes| model.lock().make_page(bytes).map_err(io::Error::other);
        let read = files.read(ids, &known, &make_page);
        let mut state = self.state.lock();
        match read {
            Ok(snapshot) => {
                let known_bytes: u64 = known.iter().map(|page| page.len() as u64).sum();
                let bytes = self.size.bytes(ids.len(), 0) - known_bytes;
                self.metrics.prompt_cache_disk_reads.inc();
                self.metrics.prompt_cache_disk_read_bytes.inc_by(bytes);
                if let Some(disk) = &mut state.disk {
                    disk.read_speed.record(bytes as f64, begun.elapsed());
                }
                let node = state.find_exact(ids);
                if let Some(entry) = node.and_then(|id| state.tree[id].disk.as_mut()) {
                    entry.last_used = SystemTime::now();
                }
                let kind = node.map_or(SnapshotKind::Message, |id| state.tree[id].kind);
                drop(state);
                self.insert(ids, kind, snapshot.clone(), clear_count);
                Ok(Some(snapshot))
            }
            Err(error) => {
                let dir = files.dir().display();
                tracing::warn!(%dir, tokens = ids.len(), %error, "cannot read a prompt snapshot; computing the prompt");
                if let Some(id) = state.find_exact(ids) {
                    state.remove_from_disk(id);
                }
                self.update_metrics(&state);
                Err(())
            }
        }
    }

    /// Removes all snapshots of this model from the disk.
    pub(super) fn clear_disk(&self, state: &mut CacheState) {
        let on_disk: Vec<NodeId> =
            state.tree.iter().filter(|(_, entry)| entry.disk.is_some()).map(|(id, _)| id).collect();
        on_disk.into_iter().for_each(|id| state.remove_from_disk(id));
    }

    /// Removes the least recently used snapshots from disk until the files fit into the limit.
    fn enforce_disk_limit(&self, state: &mut CacheState) {
        let is_over = |state: &CacheState| state.disk.as_ref().is_some_and(|disk| disk.bytes > disk.limit);
        if !is_over(state) {
            return;
        }
        let last_used = |(id, entry): (NodeId, &CacheEntry)| Some((entry.disk?.last_used, id));
        let mut oldest: Vec<_> = state.tree.iter().filter_map(last_used).collect();
        oldest.sort_unstable();
        for (_, id) in oldest {
            if !is_over(state) {
                break;
            }
            tracing::debug!(tokens = state.tree.len(id), "evicted a prompt snapshot from disk");
            state.remove_from_disk(id);
            self.metrics.prompt_cache_evictions_disk.inc();
        }
    }

    /// The loop of the writer's thread. Ends when the cache closes or after a write error.
    fn run_writer(&self, read: &mut ReadPage<'_>) {
        let mut state = self.state.lock();
        while !state.is_closed && state.disk.is_some() {
            if !self.write_next(&mut state, read) && !state.is_closed {
                self.changed.wait_for(&mut state, WRITE_RETRY_INTERVAL);
            }
        }
    }

    /// Writes the most valuable snapshot that is not on disk. Returns false if no snapshot remains to be written, or
    /// after a write error.
    fn write_next(&self, state: &mut MutexGuard<'_, CacheState>, read: &mut ReadPage<'_>) -> bool {
        let Some(PendingWrite { ids, mut snapshot, files, missing_pages }) = state.next_to_write(&self.size) else {
            return false;
        };
        // Only weak references to pool pages are kept, since a sequence may need the pages. The write stops if a page
        // was freed.
        let pages: Vec<Weak<KvPage>> = snapshot.pages.iter().map(Arc::downgrade).collect();
        snapshot.pages.retain(|page| matches!(**page, KvPage::Copied(_)));
        // Copied parts count as used memory until the write has ended, even if the cache evicts the snapshot earlier.
        state.memory_use.add(&snapshot);
        let clear_count = state.clear_count;
        let mut bytes = 0;
        let write = || files.write(&ids, &snapshot.state, (&pages, &missing_pages), read, &mut bytes);
        let written = MutexGuard::unlocked(state, write);
        self.metrics.prompt_cache_disk_written_bytes.inc_by(bytes);
        if let Some(disk) = &mut state.disk {
            disk.record_write(bytes);
        }
        if state.clear_count == clear_count {
            state.memory_use.remove(&snapshot);
        }
        match written {
            Ok(true) => {}
            Ok(false) => {
                // A page was freed or cannot be read, so the snapshot in memory is not usable either.
                let is_same = |other: &Snapshot| Arc::ptr_eq(&other.state, &snapshot.state);
                let node = state.find_exact(&ids).filter(|&id| state.tree[id].memory.as_ref().is_some_and(is_same));
                node.into_iter().for_each(|id| self.evict(state, id));
                return true;
            }
            Err(error) => {
                let dir = files.dir().display();
                tracing::warn!(%dir, %error, "cannot write a prompt snapshot; running without a disk cache");
                state.disable_disk();
                self.update_metrics(state);
                return false;
            }
        }
        drop(snapshot);
        self.metrics.prompt_cache_disk_writes.inc();
        let entry = DiskEntry { bytes: files.bytes(ids.len()).0, last_used: SystemTime::now() };
        state.add_disk_entry(&ids, SnapshotKind::Message, entry);
        if state.clear_count != clear_count {
            self.clear_disk(state);
        }
        self.enforce_disk_limit(state);
        self.update_metrics(state);
        true
    }
}

impl CacheState {
    /// Adds a snapshot file and its pages to the index.
    fn add_disk_entry(&mut self, ids: &[u32], kind: SnapshotKind, entry: DiskEntry) {
        let Some(disk) = &mut self.disk else { return };
        let last_used = self.clock;
        let new = || CacheEntry { kind, memory: None, disk: None, was_written: true, last_used };
        let id = self.tree.entry(ids, new);
        self.tree[id].was_written = true;
        if self.tree[id].disk.replace(entry).is_some() {
            return;
        }
        disk.bytes += entry.bytes;
        let (_, page) = disk.files.bytes(0);
        for digest in disk.files.digests(ids).0 {
            let snapshots = disk.pages.entry(digest).or_default();
            disk.bytes += if *snapshots == 0 { page } else { 0 };
            *snapshots += 1;
        }
    }

    /// Removes a snapshot from disk, and the pages that only this snapshot uses.
    pub fn remove_from_disk(&mut self, id: NodeId) {
        let ids = self.tree.tokens(id);
        let (Some(entry), Some(disk)) = (self.tree[id].disk.take(), &mut self.disk) else { return };
        disk.files.remove_snapshot(&ids);
        disk.bytes -= entry.bytes;
        let (_, page) = disk.files.bytes(0);
        for digest in disk.files.digests(&ids).0 {
            let Some(snapshots) = disk.pages.get_mut(&digest) else { continue };
            *snapshots -= 1;
            if *snapshots == 0 {
                disk.pages.remove(&digest);
                disk.files.remove_page(&digest);
                disk.bytes -= page;
            }
        }
        if self.tree[id].memory.is_none() {
            self.tree.remove(id);
        }
    }

    /// Length of the longest snapshot on disk that has a node in `path`, more than `min_len` tokens, and fewer than
    /// `max_len` tokens.
    ///
    /// Returns `None` if reading the snapshot would take longer than computing the tokens after `min_len`. If the read
    /// speed or the compute speed is unknown, returns the snapshot, so that reading it measures the read speed.
    pub fn find_on_disk(&self, path: &[NodeId], min_len: usize, max_len: usize, size: &SnapshotSize) -> Option<usize> {
        let disk = self.disk.as_ref()?;
        let on_disk = |&id: &NodeId| self.tree.len(id) < max_len && self.tree[id].disk.is_some();
        let len = path.iter().copied().rfind(on_disk).map(|id| self.tree.len(id))?;
        let additional = len.checked_sub(min_len).filter(|additional| *additional > 0)?;
        let compute = disk.prefill_speed.seconds_for(additional as f64);
        let read = disk.read_speed.seconds_for(size.bytes(len, min_len) as f64);
        // An unknown speed is NaN, which makes the comparison false.
        if read > compute { None } else { Some(len) }
    }

    /// The most valuable snapshot that was never written to disk and fits into the size limit and the hourly limit.
    fn next_to_write(&mut self, size: &SnapshotSize) -> Option<PendingWrite> {
        let allowance = self.disk.as_mut()?.write_allowance();
        let disk = self.disk.as_ref()?;
        let is_unwritten = |entry: &CacheEntry| {
            let in_memory = entry.memory.is_some() && entry.disk.is_none();
            in_memory && !entry.was_written && entry.kind != SnapshotKind::Between
        };
        let unwritten = self.tree.iter().filter(|(_, entry)| is_unwritten(entry));
        let mut waiting: Vec<(f64, NodeId)> = unwritten.map(|(id, _)| (self.value(id, size), id)).collect();
        waiting.sort_by(|a, b| b.0.total_cmp(&a.0));
        waiting.into_iter().find_map(|(_, id)| {
            let ids = self.tree.tokens(id);
            let snapshot = self.tree[id].memory.clone()?;
            let (missing_pages, bytes) = disk.missing_pages(&ids);
            let files = disk.files.clone();
            (bytes <= allowance.min(disk.limit)).then_some(PendingWrite { ids, snapshot, files, missing_pages })
        })
    }

    fn disable_disk(&mut self) {
        self.disk = None;
        let all: Vec<NodeId> = self.tree.iter().map(|(id, _)| id).collect();
        for id in all {
            self.tree[id].disk = None;
            if self.tree[id].memory.is_none() {
                self.tree.remove(id);
            }
        }
    }
}

fn warn_disk_unused(options: &DiskCacheOptions, error: &io::Error) {
    tracing::warn!(dir = %options.dir.display(), %error, "cannot open the prompt cache directory; running without a disk cache");
}

#[cfg(test)]
#[path = "disk_tests.rs"]
mod tests;
