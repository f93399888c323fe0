//! The part of the cache that survives: which checkpoints are on the disk, the thread that writes them, and reading them
//! back. Every state is written once, when nothing better is to be done; a disk that fails is not used any more.

use super::{
    Cache, Checkpoint, DiskStatus, Inner, Kind,
    files::{self, Digest, Files},
    tree::Id,
};
use crate::{
    model::{KvPage, PAGE, Snapshot, SnapshotSize},
    platform::os,
};
use parking_lot::MutexGuard;
use std::{
    collections::{HashMap, VecDeque},
    io,
    path::PathBuf,
    sync::{Arc, Weak},
    time::{Duration, Instant, SystemTime},
};

/// Bytes written in an hour at most: SSDs wear.
const HOURLY: u64 = 16 << 30;
const HOUR: Duration = Duration::from_secs(3600);
/// A stopping server writes its last checkpoints for this long at most.
const LAST: Duration = Duration::from_secs(5);
/// Speeds are means of what was measured, the last halved by so many more tokens or bytes.
const KEPT: f64 = 0.8;

/// The directory of checkpoints on the disk.
#[derive(Debug, Clone)]
pub struct Storage {
    pub dir: PathBuf,
    /// Bytes at most.
    pub limit: u64,
    /// Names everything that a state depends on beside its tokens: checkpoint, arithmetic, device, version.
    pub key: String,
}

pub(super) struct Disk {
    files: Arc<Files>,
    limit: u64,
    bytes: u64,
    /// States that begin with each page.
    pages: HashMap<Digest, usize>,
    /// The bytes of each write in the last hour.
    recent: VecDeque<(Instant, u64)>,
    /// Tokens computed and bytes read, and the seconds they took.
    computed: (f64, f64),
    read: (f64, f64),
}

/// A state's file.
#[derive(Debug, Clone, Copy)]
pub(super) struct OnDisk {
    bytes: u64,
    used: SystemTime,
}

impl Disk {
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    pub fn status(&self, checkpoints: usize) -> DiskStatus {
        DiskStatus { dir: self.files.dir().to_owned(), limit: self.limit, bytes: self.bytes, checkpoints }
    }

    /// Bytes that may be written now.
    fn allowance(&mut self) -> u64 {
        while self.recent.front().is_some_and(|(at, _)| at.elapsed() > HOUR) {
            self.recent.pop_front();
        }
        HOURLY.saturating_sub(self.recent.iter().map(|(_, bytes)| bytes).sum())
    }

    /// One flag a page of `ids`, true if it is not there; and the bytes of writing those pages and the state.
    fn missing(&self, ids: &[u32]) -> (Vec<bool>, u64) {
        let (pages, _) = self.files.digests(ids);
        let missing: Vec<bool> = pages.iter().map(|page| !self.pages.contains_key(page)).collect();
        let (state, page) = self.files.bytes(ids.len());
        let bytes = state + page * missing.iter().filter(|missing| **missing).count() as u64;
        (missing, bytes)
    }
}

impl Cache {
    /// Starts keeping checkpoints in `storage`, with what is there. A directory that cannot be used is not used.
    pub fn store_in(self: &Arc<Self>, storage: &Storage) {
        if let Err(error) = self.open(storage) {
            let dir = storage.dir.display();
            tracing::warn!(%dir, %error, "no checkpoints of prompts are kept on the disk");
        }
    }

    fn open(self: &Arc<Self>, storage: &Storage) -> io::Result<()> {
        let (files, found) = Files::open(&storage.dir, &storage.key, self.size)?;
        let others = files.make_way(&storage.dir, storage.limit / 2)?;
        let mut inner = self.inner.lock();
        let files = Arc::new(files);
        inner.disk = Some(Disk {
            files: files.clone(),
            // Half at least, whatever servers of other models have: theirs do not go while they run.
            limit: storage.limit.saturating_sub(others).max(storage.limit / 2),
            bytes: 0,
            pages: HashMap::new(),
            recent: VecDeque::new(),
            computed: (0.0, 0.0),
            read: (0.0, 0.0),
        });
        for filed in found {
            inner.add(&filed.tokens, Kind::Message, OnDisk { bytes: filed.bytes, used: filed.used });
        }
        let needed: std::collections::HashSet<String> =
            inner.disk.iter().flat_map(|disk| disk.pages.keys().map(files::page_name)).collect();
        files.sweep(|name| needed.contains(name))?;
        self.trim(&mut inner);
        self.count(&inner);
        drop(inner);
        let cache = self.clone();
        let writer = std::thread::Builder::new().name("prompt cache".into()).spawn(move || cache.write_on())?;
        *self.writer.lock() = Some(writer);
        Ok(())
    }

    /// `tokens` of a prompt took so long to compute.
    pub fn computed(&self, tokens: usize, time: Duration) {
        if let Some(disk) = &mut self.inner.lock().disk {
            disk.computed = mean(disk.computed, tokens as f64, time);
        }
    }

    /// Writes what is left, for a moment, and stops. The writer's thread ends with what it is at; since it lets everything
    /// else go before it, and somebody waits now, the caller writes the rest.
    pub fn close(&self) {
        self.inner.lock().closed = true;
        self.changed.notify_all();
        if let Some(writer) = self.writer.lock().take() {
            // A panic there has been reported by its thread.
            let _ = writer.join();
        }
        let begin = Instant::now();
        let mut inner = self.inner.lock();
        while begin.elapsed() <= LAST && self.write_next(&mut inner) {}
    }

    /// Reads the state behind `ids`, whose first pages are `known`. `None`: there is no room for it. An error has been
    /// reported, and the checkpoint is forgotten.
    pub(super) fn read_back(&self, ids: &[u32], known: Vec<Arc<KvPage>>) -> Result<Option<Snapshot>, ()> {
        let mut inner = self.inner.lock();
        let Some(files) = inner.disk.as_ref().map(|disk| disk.files.clone()) else { return Ok(None) };
        // What is emptied from here on does not come back by this.
        let emptied = inner.emptied;
        let whole = self.size.bytes(ids.len(), 0);
        let known = &known[..known.len().min(ids.len() / PAGE)];
        let known: Vec<Arc<KvPage>> =
            known.iter().filter(|page| page.len() as u64 == PAGE as u64 * self.size.position).cloned().collect();
        let pool = inner.pool.clone();
        let pages = if pool.is_some() { ids.len() / PAGE - known.len() } else { 0 };
        let copied = self.size.bytes(ids.len(), if pool.is_some() { ids.len() } else { 0 });
        // One more for what comes behind.
        let more = if pool.is_some() { pages + 1 } else { 0 };
        if !self.fit(&mut inner, ids, Kind::Message, more, &|ledger| copied - ledger.held(&known)) {
            return Ok(None);
        }
        drop(inner);
        let begin = Instant::now();
        let keep = |bytes: Vec<u8>| match &pool {
            Some(pool) => pool.put(&bytes).map_err(io::Error::other),
            None => Ok(Arc::new(bytes.into())),
        };
        let read = files.read(ids, &known, &keep);
        let mut inner = self.inner.lock();
        match read {
            Ok(snapshot) => {
                let bytes = whole - known.iter().map(|page| page.len() as u64).sum::<u64>();
                self.metrics.prompt_cache_disk_reads.inc();
                self.metrics.prompt_cache_disk_read_bytes.inc_by(bytes);
                if let Some(disk) = &mut inner.disk {
                    disk.read = mean(disk.read, bytes as f64, begin.elapsed());
                }
                if let Some(id) = inner.exact(ids)
                    && let Some(filed) = &mut inner.tree[id].disk
                {
                    filed.used = SystemTime::now();
                }
                let kind = inner.exact(ids).map_or(Kind::Message, |id| inner.tree[id].kind);
                drop(inner);
                self.insert(ids, kind, snapshot.clone(), emptied);
                Ok(Some(snapshot))
            }
            Err(error) => {
                let dir = files.dir().display();
                tracing::warn!(%dir, tokens = ids.len(), %error, "a checkpoint cannot be read; it is computed again");
                if let Some(id) = inner.exact(ids) {
                    self.forget(&mut inner, id);
                }
                Err(())
            }
        }
    }

    /// Removes all files.
    pub(super) fn clear_disk(&self, inner: &mut Inner) {
        let ids: Vec<Id> =
            inner.tree.iter().filter(|(_, checkpoint)| checkpoint.disk.is_some()).map(|(id, _)| id).collect();
        for id in ids {
            self.forget(inner, id);
        }
    }

    /// Takes a checkpoint off the disk, and pages that only it needed.
    fn forget(&self, inner: &mut Inner, id: Id) {
        let ids = inner.tree.tokens(id);
        let (Some(filed), Some(disk)) = (inner.tree[id].disk.take(), &mut inner.disk) else { return };
        disk.files.remove_state(&ids);
        disk.bytes -= filed.bytes;
        let (_, page) = disk.files.bytes(0);
        for digest in disk.files.digests(&ids).0 {
            let Some(states) = disk.pages.get_mut(&digest) else { continue };
            *states -= 1;
            if *states == 0 {
                disk.pages.remove(&digest);
                disk.files.remove_page(&digest);
                disk.bytes -= page;
            }
        }
        if inner.tree[id].memory.is_none() {
            inner.tree.remove(id);
        }
        self.count(inner);
    }

    /// Keeps to the limit: what has not been used for longest goes.
    fn trim(&self, inner: &mut Inner) {
        while inner.disk.as_ref().is_some_and(|disk| disk.bytes > disk.limit) {
            let used = |(id, checkpoint): (Id, &Checkpoint)| Some((checkpoint.disk?.used, id));
            let Some((_, id)) = inner.tree.iter().filter_map(used).min() else { return };
            tracing::debug!(tokens = inner.tree.len(id), "a checkpoint left the disk");
            self.forget(inner, id);
            self.metrics.prompt_cache_evictions_disk.inc();
        }
    }

    /// The writer's thread, until the cache is closed or its disk given up.
    fn write_on(&self) {
        os::background_thread();
        let mut inner = self.inner.lock();
        while !inner.closed && inner.disk.is_some() {
            if !self.write_next(&mut inner) && !inner.closed {
                // Checkpoints that the hour's bound held back are tried again every minute.
                self.changed.wait_for(&mut inner, Duration::from_secs(60));
            }
        }
    }

    /// Writes the checkpoint that is worth most and is not there yet. False if there is none, or the disk failed.
    fn write_next(&self, inner: &mut MutexGuard<'_, Inner>) -> bool {
        let Some((ids, mut snapshot, files, missing)) = inner.next_to_write(&self.size) else { return false };
        // Pages of the pool are left to whoever needs one meanwhile: then it is not written.
        let pages: Vec<Weak<KvPage>> = snapshot.pages.iter().map(Arc::downgrade).collect();
        snapshot.pages.retain(|page| matches!(**page, KvPage::Copied(_)));
        // Held while it is written, so that it is counted even if it gives way meanwhile.
        inner.ledger.hold(&snapshot);
        let emptied = inner.emptied;
        let mut bytes = 0;
        let written = MutexGuard::unlocked(inner, || files.write(&ids, &snapshot.state, &pages, &missing, &mut bytes));
        self.metrics.prompt_cache_disk_written_bytes.inc_by(bytes);
        if let Some(disk) = &mut inner.disk {
            disk.recent.push_back((Instant::now(), bytes));
        }
        if inner.emptied == emptied {
            inner.ledger.release(&snapshot);
        }
        match written {
            Ok(true) => {}
            Ok(false) => {
                // What has pages that cannot be read is of no use to anybody.
                let ours = |one: &Snapshot| Arc::ptr_eq(&one.state, &snapshot.state);
                let still = inner.exact(&ids).filter(|&id| inner.tree[id].memory.as_ref().is_some_and(ours));
                still.into_iter().for_each(|id| self.evict(inner, id));
                return true;
            }
            Err(error) => {
                let dir = files.dir().display();
                tracing::warn!(%dir, %error, "checkpoints of prompts are not kept on the disk any more");
                inner.give_up();
                self.count(inner);
                return false;
            }
        }
        drop(snapshot);
        self.metrics.prompt_cache_disk_writes.inc();
        let filed = OnDisk { bytes: files.bytes(ids.len()).0, used: SystemTime::now() };
        inner.add(&ids, Kind::Message, filed);
        if inner.emptied != emptied {
            self.clear_disk(inner);
        }
        self.trim(inner);
        self.count(inner);
        true
    }
}

type Writing = (Vec<u32>, Snapshot, Arc<Files>, Vec<bool>);

impl Inner {
    /// The node of exactly `ids`.
    fn exact(&self, ids: &[u32]) -> Option<Id> {
        self.tree.path(ids).last().copied().filter(|&id| self.tree.len(id) == ids.len())
    }

    /// A state's file is there, and the pages that it needs.
    fn add(&mut self, ids: &[u32], kind: Kind, filed: OnDisk) {
        let Some(disk) = &mut self.disk else { return };
        let clock = self.clock;
        let fresh = || Checkpoint { kind, memory: None, disk: None, written: true, touched: clock };
        let id = self.tree.entry(ids, fresh);
        self.tree[id].written = true;
        if self.tree[id].disk.replace(filed).is_some() {
            return;
        }
        disk.bytes += filed.bytes;
        let (_, page) = disk.files.bytes(0);
        for digest in disk.files.digests(ids).0 {
            let states = disk.pages.entry(digest).or_default();
            disk.bytes += if *states == 0 { page } else { 0 };
            *states += 1;
        }
    }

    /// The longest checkpoint of `path` that is on the disk, longer than `least` and shorter than `most`, if reading it
    /// takes less time than computing what it has more. Without a measurement it is read, which makes one.
    pub(super) fn worth_reading(&self, path: &[Id], least: usize, most: usize, size: &SnapshotSize) -> Option<usize> {
        let disk = self.disk.as_ref()?;
        let len = |id: Id| self.tree.len(id);
        let id = path.iter().copied().rfind(|&id| len(id) < most && self.tree[id].disk.is_some())?;
        let more = len(id).checked_sub(least).filter(|more| *more > 0)?;
        let ((tokens, computing), (bytes, reading)) = (disk.computed, disk.read);
        let compute = more as f64 * computing / tokens;
        let read = size.bytes(len(id), least) as f64 * reading / bytes;
        // Not a number where nothing has been measured.
        if read > compute { None } else { Some(len(id)) }
    }

    /// The next checkpoint for the writer.
    fn next_to_write(&mut self, size: &SnapshotSize) -> Option<Writing> {
        let allowance = self.disk.as_mut()?.allowance();
        let disk = self.disk.as_ref()?;
        let open = |checkpoint: &Checkpoint| {
            !checkpoint.written && checkpoint.disk.is_none() && checkpoint.kind != Kind::Between
        };
        let mut waiting: Vec<(f64, Id)> = self
            .tree
            .iter()
            .filter(|(_, checkpoint)| open(checkpoint) && checkpoint.memory.is_some())
            .map(|(id, _)| (self.worth(id, size), id))
            .collect();
        waiting.sort_by(|a, b| b.0.total_cmp(&a.0));
        waiting.into_iter().find_map(|(_, id)| {
            let (ids, snapshot) = (self.tree.tokens(id), self.tree[id].memory.clone()?);
            let (missing, bytes) = disk.missing(&ids);
            (bytes <= allowance.min(disk.limit)).then(|| (ids, snapshot, disk.files.clone(), missing))
        })
    }

    /// The disk is not used any more.
    fn give_up(&mut self) {
        self.disk = None;
        let all: Vec<Id> = self.tree.iter().map(|(id, _)| id).collect();
        for id in all {
            self.tree[id].disk = None;
            if self.tree[id].memory.is_none() {
                self.tree.remove(id);
            }
        }
    }
}

/// A running mean of a speed: the amount and the seconds, of which the older count less.
fn mean((amount, seconds): (f64, f64), more: f64, time: Duration) -> (f64, f64) {
    (KEPT * amount + more, KEPT * seconds + time.as_secs_f64())
}

#[cfg(test)]
mod tests;
