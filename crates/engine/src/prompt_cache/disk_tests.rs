use super::*;
use crate::prompt_cache::{
    SnapshotSource,
    cache::tests::{longest_prefix, paged},
    clear_prompt_dir,
    disk::Throughput,
};
use mock_model::MockModel;
use moestro_base::metrics::Metrics;
use moestro_model::model::{Model, PageSize};
use std::{
    fs,
    ops::Deref,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
};
use test_support::fifo::make_fifo;

/// A recurrent state of 100 bytes, and 2 bytes of keys and values per position.
const SIZE: SnapshotSize = SnapshotSize { state: 100, page: PageSize::without_indexer(2) };
const MAX_TOKENS: usize = 10_000;

fn options(dir: &Path) -> DiskCacheOptions {
    DiskCacheOptions { dir: dir.to_owned(), limit: 1 << 20, key: "a model".into() }
}

/// A cache that is closed when it is dropped.
struct OpenCache(Arc<PromptCache>);

impl Deref for OpenCache {
    type Target = Arc<PromptCache>;

    fn deref(&self) -> &Arc<PromptCache> {
        &self.0
    }
}

impl OpenCache {
    fn close(&self) {
        self.0.close(&mut MockModel::default());
    }
}

impl Drop for OpenCache {
    fn drop(&mut self) {
        self.close();
    }
}

fn open(options: &DiskCacheOptions) -> OpenCache {
    open_within(options, Duration::ZERO)
}

fn open_within(options: &DiskCacheOptions, timeout: Duration) -> OpenCache {
    let cache = PromptCache::new(1 << 20, SIZE, Metrics::new("test", "cpu"));
    let cache = Arc::new(PromptCache { lock_timeout: timeout, ..cache });
    cache.open_disk(options.clone(), MAX_TOKENS, || ());
    OpenCache(cache)
}

/// A snapshot whose bytes depend on its tokens.
fn snapshot(ids: &[u32]) -> Snapshot {
    let bytes = |ids: &[u32]| Arc::new(KvPage::Copied(ids.iter().flat_map(|id| [*id as u8, 9]).collect()));
    Snapshot {
        len: ids.len(),
        pages: ids.chunks(PAGE).map(bytes).collect(),
        state: Arc::new(vec![ids.len() as u8; 100]),
    }
}

fn put(cache: &PromptCache, ids: &[u32]) {
    assert!(cache.make_room(ids, SnapshotKind::Message, &|| SIZE.bytes(ids.len(), 0)));
    cache.insert(ids, SnapshotKind::Message, snapshot(ids), cache.clear_count());
}

/// Length and source of the snapshot that the cache finds for a prompt of `ids` and one more token. Checks the bytes of
/// the snapshot.
fn found(cache: &PromptCache, ids: &[u32]) -> Option<(usize, SnapshotSource)> {
    let (found, source) = longest_prefix(cache, &[ids, &[0]].concat(), 0)?;
    let expected = snapshot(&ids[..found.len]);
    let pages = |of: &Snapshot| of.pages.iter().map(|page| page.copied().unwrap().to_vec()).collect::<Vec<_>>();
    assert_eq!((pages(&found), &found.state), (pages(&expected), &expected.state));
    Some((found.len, source))
}

fn tokens(seed: u32, count: usize) -> Vec<u32> {
    (0..count as u32).map(|n| (n * 31 + seed * 7) % 200).collect()
}

fn files(dir: &Path, extension: &str) -> Vec<PathBuf> {
    let key_dir = fs::read_dir(dir).unwrap().next().unwrap().unwrap().path();
    let all = fs::read_dir(key_dir).unwrap().map(|entry| entry.unwrap().path());
    let mut all: Vec<PathBuf> = all.filter(|path| path.extension().is_some_and(|found| found == extension)).collect();
    all.sort();
    all
}

/// Bytes of all snapshot files.
fn bytes_on_disk(dir: &Path) -> u64 {
    [files(dir, "state"), files(dir, "page")].concat().iter().map(|path| path.metadata().unwrap().len()).sum()
}

/// A cache with snapshots of the first `short` tokens and of all `ids`.
fn cache_with(options: &DiskCacheOptions, ids: &[u32], short: usize) -> OpenCache {
    let cache = open(options);
    put(&cache, &ids[..short]);
    put(&cache, ids);
    cache
}

/// A cache with two snapshots that share a page, and the tokens of the longer snapshot.
fn cache_with_two(options: &DiskCacheOptions) -> (OpenCache, Vec<u32>) {
    let ids = tokens(1, 2 * PAGE + 40);
    (cache_with(options, &ids, PAGE + 10), ids)
}

#[test]
fn snapshots_survive_a_restart() {
    let dir = tempfile::tempdir().unwrap();
    let options = options(dir.path());
    let (first, ids) = cache_with_two(&options);
    let begun = Instant::now();
    first.close();
    assert!(begun.elapsed() < Duration::from_secs(30), "the writer does not wait");
    // The shared page was written once.
    assert_eq!((files(dir.path(), "state").len(), files(dir.path(), "page").len()), (2, 2));
    let bytes = first.status().disk.unwrap().bytes;
    assert_eq!(bytes, bytes_on_disk(dir.path()));
    assert_eq!(first.metrics.prompt_cache_disk_written_bytes.get(), bytes);
    for path in [files(dir.path(), "state"), files(dir.path(), "page")].concat() {
        assert_eq!(path.metadata().unwrap().permissions().mode() & 0o077, 0, "{}", path.display());
    }

    let second = open(&options);
    assert_eq!(second.status().disk.unwrap().bytes, bytes);
    assert_eq!(found(&second, &ids), Some((ids.len(), SnapshotSource::Disk)));
    assert_eq!(found(&second, &ids), Some((ids.len(), SnapshotSource::Memory)));
    assert_eq!(found(&second, &ids[..ids.len() - 1]), Some((PAGE + 10, SnapshotSource::Disk)));
    assert_eq!(second.metrics.prompt_cache_disk_reads.get(), 2);
    // The second server writes no snapshot again.
    second.close();
    assert_eq!(second.metrics.prompt_cache_disk_writes.get(), 0);
    // At least one token of a prompt must be computed, so a snapshot of the whole prompt is not used.
    let third = open(&options);
    assert_eq!(longest_prefix(&third, &ids, 0).unwrap().0.len, PAGE + 10);
    drop(third);
    // A server with another model neither finds nor removes the snapshots.
    let other = open(&DiskCacheOptions { key: "another model".into(), ..options.clone() });
    assert_eq!(found(&other, &ids), None);
    drop(other);
    assert_eq!(found(&open(&options), &ids), Some((ids.len(), SnapshotSource::Disk)));
}

#[test]
fn close_writes_the_remaining_snapshots() {
    let dir = tempfile::tempdir().unwrap();
    let first = open(&options(dir.path()));
    // The writer's thread has not run, which can happen on a busy machine.
    first.state.lock().is_closed = true;
    first.changed.notify_all();
    first.writer.lock().take().unwrap().thread.join().unwrap();
    let ids = tokens(4, PAGE + 20);
    put(&first, &ids[..30]);
    put(&first, &ids);
    assert_eq!(first.metrics.prompt_cache_disk_writes.get(), 0);
    first.close();
    assert_eq!(first.metrics.prompt_cache_disk_writes.get(), 2);
    assert_eq!(found(&open(&options(dir.path())), &ids), Some((ids.len(), SnapshotSource::Disk)));
}

#[test]
fn second_server_gets_the_released_directory() {
    let dir = tempfile::tempdir().unwrap();
    let (first, ids) = cache_with_two(&options(dir.path()));
    let second = open_within(&options(dir.path()), Duration::from_secs(60));
    let status = second.status();
    assert!(status.disk_locked && status.disk.is_none());
    put(&second, &tokens(9, 20));
    drop(first);
    let begun = Instant::now();
    while second.status().disk_locked {
        assert!(begun.elapsed() < Duration::from_secs(30), "the lock is free");
        std::thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(found(&second, &ids), Some((ids.len(), SnapshotSource::Disk)));
    // The snapshot that the second server took before it had the lock is written, too.
    drop(second);
    assert_eq!(found(&open(&options(dir.path())), &tokens(9, 20)), Some((20, SnapshotSource::Disk)));
}

#[test]
fn second_server_runs_without_disk_after_timeout() {
    let dir = tempfile::tempdir().unwrap();
    let (first, ids) = cache_with_two(&options(dir.path()));
    let second = open_within(&options(dir.path()), Duration::from_millis(200));
    second.writer.lock().take().unwrap().thread.join().unwrap();
    assert!(second.status().disk_locked && second.status().disk.is_none());
    put(&second, &ids);
    assert_eq!(found(&second, &ids), Some((ids.len(), SnapshotSource::Memory)));
    drop(second);
    assert!(first.status().disk.is_some() && !first.status().disk_locked);
}

#[test]
fn closing_does_not_wait_for_the_lock() {
    let dir = tempfile::tempdir().unwrap();
    let _first = open(&options(dir.path()));
    let second = open_within(&options(dir.path()), Duration::from_secs(60));
    let begun = Instant::now();
    drop(second);
    assert!(begun.elapsed() < Duration::from_secs(30));
}

#[test]
fn pages_in_memory_are_not_read() {
    let dir = tempfile::tempdir().unwrap();
    let options = options(dir.path());
    let (first, ids) = cache_with_two(&options);
    drop(first);
    let second = open(&options);
    let read = &second.metrics.prompt_cache_disk_read_bytes;
    let whole = |len| SIZE.bytes(len, 0);
    assert_eq!(found(&second, &ids[..PAGE + 20]), Some((PAGE + 10, SnapshotSource::Disk)));
    assert_eq!(read.get(), whole(PAGE + 10));
    assert_eq!(found(&second, &ids), Some((ids.len(), SnapshotSource::Disk)));
    assert_eq!(read.get(), whole(PAGE + 10) + whole(ids.len()) - 2 * PAGE as u64, "the first page is in memory");
}

fn edit(path: &Path, change: impl FnOnce(&mut Vec<u8>)) {
    let mut bytes = fs::read(path).unwrap();
    change(&mut bytes);
    fs::write(path, bytes).unwrap();
}

#[test]
fn damaged_files_are_not_used() {
    let ids = tokens(2, PAGE + 40);
    type Damage = fn(&Path);
    let damages: [(&str, Damage); 8] = [
        ("state", |path| edit(path, Vec::clear)),
        ("state", |path| edit(path, |bytes| bytes.truncate(bytes.len() - 1))),
        ("state", |path| edit(path, |bytes| *bytes.last_mut().unwrap() ^= 1)),
        ("page", |path| edit(path, |bytes| bytes[100] ^= 1)),
        ("page", |path| fs::remove_file(path).unwrap()),
        ("page", |path| edit(path, |bytes| bytes.push(0))),
        // A wrong token count in the header, which the checksum does not cover.
        ("page", |path| edit(path, |bytes| bytes[40] ^= 1)),
        // A wrong key in the header.
        ("state", |path| edit(path, |bytes| bytes[8] ^= 1)),
    ];
    for (number, (extension, damage)) in damages.into_iter().enumerate() {
        let dir = tempfile::tempdir().unwrap();
        let options = options(dir.path());
        drop(cache_with(&options, &ids, 30));
        let all = files(dir.path(), extension);
        damage(all.iter().max_by_key(|path| path.metadata().unwrap().len()).unwrap());
        let second = open(&options);
        assert_eq!(found(&second, &ids), Some((30, SnapshotSource::Disk)), "damage {number}");
        assert_eq!(second.status().disk.unwrap().snapshots, 1, "damage {number}");
    }
}

#[test]
fn disk_limit_is_enforced() {
    let dir = tempfile::tempdir().unwrap();
    let first = open(&DiskCacheOptions { limit: 2500, ..options(dir.path()) });
    for seed in 0..20 {
        put(&first, &tokens(seed, 60 + seed as usize));
    }
    first.close();
    let written = first.metrics.prompt_cache_disk_writes.get();
    assert!(written <= 20, "evicted snapshots are not written again");
    let status = first.status().disk.unwrap();
    assert!(status.bytes <= 2500 && status.snapshots > 2, "{status:?}");
    assert_eq!(files(dir.path(), "state").len(), status.snapshots);
    assert_eq!(status.bytes, bytes_on_disk(dir.path()));
    // The time to write at the end is limited, so that a slow disk may get fewer snapshots than the limit allows.
    assert!(written < 5 || first.metrics.prompt_cache_evictions_disk.get() > 0, "{written}");
    first.clear();
    assert!(files(dir.path(), "state").is_empty());
    assert_eq!(first.status().disk.unwrap().bytes, 0);
}

#[test]
fn shared_pages_go_with_the_last_snapshot() {
    let dir = tempfile::tempdir().unwrap();
    let ids = tokens(3, PAGE + 60);
    // Both snapshots need the first page.
    let first = cache_with(&options(dir.path()), &ids, PAGE + 20);
    first.close();
    for left in [1, 0] {
        let mut state = first.state.lock();
        let id = state.tree.iter().map(|(id, _)| id).max_by_key(|id| state.tree.len(*id)).unwrap();
        state.tree[id].memory = None;
        state.remove_from_disk(id);
        drop(state);
        let bytes = first.status().disk.unwrap().bytes;
        assert_eq!((bytes, files(dir.path(), "page").len()), (bytes_on_disk(dir.path()), left));
    }
    assert_eq!(bytes_on_disk(dir.path()), 0);
}

#[test]
fn unneeded_files_are_removed_at_start() {
    let dir = tempfile::tempdir().unwrap();
    let options = options(dir.path());
    let ids = tokens(4, PAGE + 40);
    put(&open(&options), &ids);
    let page = files(dir.path(), "page").remove(0);
    let stray =
        ["a.page", "b.page.12-3.partial", "c.state.7-1.partial", "d.text"].map(|name| page.with_file_name(name));
    stray.iter().for_each(|path| fs::write(path, b"").unwrap());
    let second = open(&options);
    assert_eq!(found(&second, &ids), Some((ids.len(), SnapshotSource::Disk)));
    assert_eq!(stray.each_ref().map(|path| path.exists()), [false, false, false, true]);
}

#[test]
fn other_versions_files_are_removed_at_start() {
    let dir = tempfile::tempdir().unwrap();
    let options = options(dir.path());
    drop(cache_with_two(&options));
    let states = files(dir.path(), "state");
    assert!(states.len() > 1);
    for path in states.iter().chain(&files(dir.path(), "page")) {
        edit(path, |bytes| bytes[7] -= 1);
    }
    let second = open(&options);
    assert_eq!(second.status().disk.unwrap().snapshots, 0);
    assert!(files(dir.path(), "state").is_empty() && files(dir.path(), "page").is_empty());
}

#[test]
fn special_and_oversized_files_are_ignored() {
    let dir = tempfile::tempdir().unwrap();
    let options = options(dir.path());
    let ids = tokens(4, PAGE + 40);
    drop(cache_with(&options, &ids, 30));
    let page = files(dir.path(), "page").remove(0);
    for name in ["a.state", "b.page", "c.partial"] {
        make_fifo(&page.with_file_name(name));
    }
    // A sparse file of a plausible size. According to its header, reading its tokens would need 1 TB.
    let len = (1u64 << 40) / 4;
    let state = files(dir.path(), "state").into_iter().find(|path| path.metadata().unwrap().is_file()).unwrap();
    let mut header = fs::read(state).unwrap()[..64].to_vec();
    let size = SIZE.bytes(len as usize, len as usize) + 4 * len;
    header[40..48].copy_from_slice(&len.to_le_bytes());
    header[48..56].copy_from_slice(&size.to_le_bytes());
    let sparse = page.with_file_name("sparse.state");
    fs::write(&sparse, &header).unwrap();
    fs::File::options().write(true).open(&sparse).unwrap().set_len(64 + size).unwrap();
    // The page of the longer snapshot becomes a FIFO.
    fs::remove_file(&page).unwrap();
    make_fifo(&page);

    let second = open(&options);
    assert_eq!(found(&second, &ids), Some((30, SnapshotSource::Disk)));
    assert!(!sparse.exists());
}

#[test]
fn clearing_does_not_follow_links() {
    let dir = tempfile::tempdir().unwrap();
    let other = tempfile::tempdir().unwrap();
    let outside = other.path().join("1.state");
    fs::write(&outside, b"").unwrap();
    std::os::unix::fs::symlink(other.path(), dir.path().join("0".repeat(32))).unwrap();
    clear_prompt_dir(dir.path()).unwrap();
    assert!(outside.exists());
    let missing = dir.path().join("missing");
    clear_prompt_dir(&missing).unwrap();
    assert!(!missing.exists());
}

#[test]
fn other_models_keep_half_at_most() {
    let dir = tempfile::tempdir().unwrap();
    // Directories with other names do not belong to the cache.
    let names = ["x".repeat(32), "0".repeat(31), "notes".into()];
    let foreign = names.map(|name| dir.path().join(name));
    for path in &foreign {
        fs::create_dir(path).unwrap();
        fs::write(path.join("file"), [0; 5000]).unwrap();
    }
    let of = |key: &str, limit| DiskCacheOptions { key: key.into(), limit, ..options(dir.path()) };
    for key in ["one", "two"] {
        put(&open(&of(key, 1 << 20)), &tokens(1, 50));
        std::thread::sleep(Duration::from_millis(20));
    }
    // The directories of other models may take at most half of the limit: 500 bytes, which is enough for one of the two
    // directories. The older directory is removed.
    let third = open(&of("three", 1000));
    assert!((500..1000).contains(&third.status().disk.unwrap().limit));
    drop(third);
    assert_eq!(found(&open(&of("one", 1 << 20)), &tokens(1, 50)), None);
    assert!(found(&open(&of("two", 1 << 20)), &tokens(1, 50)).is_some());
    assert!(foreign.iter().all(|path| path.join("file").exists()));
}

#[test]
fn unusable_directory_is_not_used() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("file");
    fs::write(&file, b"").unwrap();
    let without = open(&options(&file));
    assert_eq!(without.status().disk, None);
    put(&without, &tokens(1, 50));
    assert_eq!(found(&without, &tokens(1, 50)), Some((50, SnapshotSource::Memory)));

    // The directory is removed while a server uses it.
    let removed = dir.path().join("removed");
    let cache = open(&options(&removed));
    assert!(cache.status().disk.is_some());
    fs::remove_dir_all(&removed).unwrap();
    put(&cache, &tokens(1, 50));
    cache.close();
    assert_eq!(cache.status().disk, None);
    assert_eq!(found(&cache, &tokens(1, 50)), Some((50, SnapshotSource::Memory)));
}

#[test]
fn failing_disk_is_not_used_again() {
    let dir = tempfile::tempdir().unwrap();
    let ids = tokens(6, 2 * PAGE + 40);
    let first = open(&options(dir.path()));
    put(&first, &ids[..30]);
    while first.status().disk.unwrap().snapshots == 0 {
        first.answer_page_request(&mut MockModel::default());
        std::thread::sleep(Duration::from_millis(5));
    }
    // A directory in the place of the second page makes writing it fail.
    let snapshot_files = first.state.lock().disk.as_ref().unwrap().files.clone();
    let page = page_name(&snapshot_files.digests(&ids).0[1]);
    let blocked = snapshot_files.dir().join(page);
    fs::create_dir_all(blocked.join("file")).unwrap();
    put(&first, &ids);
    first.close();
    assert_eq!(first.status().disk, None);
    assert_eq!(found(&first, &ids), Some((ids.len(), SnapshotSource::Memory)));
    fs::remove_dir_all(blocked).unwrap();
    // The first page is removed again, since no snapshot on disk needs it.
    assert_eq!((files(dir.path(), "page").len(), files(dir.path(), "partial").len()), (0, 0));
    // The next server finds the snapshot that was written before the error.
    let second = open(&options(dir.path()));
    assert_eq!(found(&second, &ids), Some((30, SnapshotSource::Disk)));
}

#[test]
fn slow_disk_is_not_read() {
    let dir = tempfile::tempdir().unwrap();
    put(&open(&options(dir.path())), &tokens(1, 50));
    let second = open(&options(dir.path()));
    // It is no longer than what exists.
    assert!(longest_prefix(&second, &[tokens(1, 50), vec![0]].concat(), 50).is_none());
    // Reading 200 bytes takes 8 s. Computing 50 tokens takes 6 s, then 8 s.
    let set_speeds = |seconds| {
        let mut state = second.state.lock();
        let disk = state.disk.as_mut().unwrap();
        disk.read_speed = Throughput { amount: 100.0, seconds: 4.0 };
        disk.prefill_speed = Throughput { amount: 1000.0, seconds };
    };
    set_speeds(120.0);
    assert_eq!(found(&second, &tokens(1, 50)), None);
    set_speeds(160.0);
    assert_eq!(found(&second, &tokens(1, 50)), Some((50, SnapshotSource::Disk)));
}

#[test]
fn empty_snapshot_is_removed() {
    let dir = tempfile::tempdir().unwrap();
    let DiskCacheOptions { key, .. } = options(dir.path());
    let (own, _) = SnapshotFiles::open(dir.path(), &key, SIZE, MAX_TOKENS).unwrap();
    own.write(&[], &snapshot(&[]).state, (&[], &[]), &mut |_| None, &mut 0).unwrap();
    assert_eq!(files(dir.path(), "state").len(), 1);
    let (_, stored) = SnapshotFiles::open(dir.path(), &key, SIZE, MAX_TOKENS).unwrap();
    assert_eq!((stored.len(), files(dir.path(), "state").len()), (0, 0));
}

#[test]
fn cancelled_write_leaves_no_page() {
    let dir = tempfile::tempdir().unwrap();
    let (own, _) = SnapshotFiles::open(dir.path(), "a key", SIZE, MAX_TOKENS).unwrap();
    let count = || fs::read_dir(own.dir()).unwrap().count();
    let ids = tokens(1, 2 * PAGE);
    let whole = snapshot(&tokens(1, 2 * PAGE));
    let mut pages: Vec<_> = whole.pages.iter().map(Arc::downgrade).collect();
    let mut model = MockModel::default();
    let read: &mut ReadPage = &mut |page| read_page(page, &mut model);
    let mut bytes = 0;
    assert!(own.write(&ids, &whole.state, (&pages, &[true, true]), read, &mut bytes).unwrap());
    let (state, page) = own.bytes(ids.len());
    assert_eq!((count(), bytes), (3, state + 2 * page));
    // Clearing the directory removes the files of all keys.
    clear_prompt_dir(dir.path()).unwrap();
    assert_eq!(count(), 0);
    // The second page was freed, so the write fails. The first page was written before, so its bytes count.
    pages[1] = Weak::new();
    assert!(!own.write(&ids, &whole.state, (&pages, &[true, true]), read, &mut bytes).unwrap());
    assert_eq!((count(), bytes), (0, state + 3 * page));
}

#[test]
fn lost_device_is_no_disk_error() {
    let dir = tempfile::tempdir().unwrap();
    let (model, ids, snapshot) = paged();
    let cache = Arc::new(PromptCache::new(1 << 30, model.info().snapshot_size, Metrics::new("test", "cpu")));
    cache.open_disk(options(dir.path()), MAX_TOKENS, || ());
    drop(model);
    cache.insert(&ids, SnapshotKind::Message, snapshot, 0);
    cache.close(&mut MockModel::default());
    assert_eq!((cache.status().snapshots, cache.status().disk.unwrap().snapshots), (0, 0));
}
