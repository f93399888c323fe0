use super::super::Place;
use super::*;
use crate::{metrics::Metrics, model::Model};
use std::{fs, os::unix::fs::PermissionsExt, path::Path};

/// A state of 100 bytes and 2 bytes a position.
const SIZE: SnapshotSize = SnapshotSize { state: 100, position: 2 };

fn storage(dir: &Path) -> Storage {
    Storage { dir: dir.to_owned(), limit: 1 << 20, key: "a model".into() }
}

fn cache(storage: Option<&Storage>) -> Arc<Cache> {
    let cache = Arc::new(Cache::new(1 << 20, SIZE, Metrics::new("test", "cpu")));
    storage.into_iter().for_each(|storage| cache.store_in(storage));
    cache
}

/// A snapshot whose bytes depend on the tokens.
fn snapshot(ids: &[u32]) -> Snapshot {
    let bytes = |ids: &[u32]| Arc::new(KvPage::Copied(ids.iter().flat_map(|id| [*id as u8, 9]).collect()));
    Snapshot {
        len: ids.len(),
        pages: ids.chunks(PAGE).map(bytes).collect(),
        state: Arc::new(vec![ids.len() as u8; 100]),
    }
}

fn put(cache: &Cache, ids: &[u32]) {
    assert!(cache.make_room(ids, Kind::Message, &|| SIZE.bytes(ids.len(), 0)));
    cache.insert(ids, Kind::Message, snapshot(ids), cache.emptied());
}

/// The length of the checkpoint that a new server finds for a prompt, and its place.
fn found(cache: &Cache, ids: &[u32]) -> Option<(usize, Place)> {
    let (found, place) = cache.deepest(&[ids, &[0]].concat(), 0)?;
    let expected = snapshot(&ids[..found.len]);
    let pages = |of: &Snapshot| of.pages.iter().map(|page| page.read().unwrap().into_owned()).collect::<Vec<_>>();
    assert_eq!((pages(&found), &found.state), (pages(&expected), &expected.state));
    Some((found.len, place))
}

fn tokens(seed: u32, count: usize) -> Vec<u32> {
    (0..count as u32).map(|n| (n * 31 + seed * 7) % 200).collect()
}

fn files(dir: &Path, ending: &str) -> Vec<PathBuf> {
    let inner = fs::read_dir(dir).unwrap().next().unwrap().unwrap().path();
    let all = fs::read_dir(inner).unwrap().map(|entry| entry.unwrap().path());
    let mut all: Vec<PathBuf> = all.filter(|path| path.extension().is_some_and(|found| found == ending)).collect();
    all.sort();
    all
}

/// A cache with two checkpoints that share a page, and the tokens of the longer one.
fn two_kept(storage: &Storage) -> (Arc<Cache>, Vec<u32>) {
    let (cache, ids) = (cache(Some(storage)), tokens(1, 2 * PAGE + 40));
    put(&cache, &ids[..PAGE + 10]);
    put(&cache, &ids);
    (cache, ids)
}

#[test]
fn what_was_kept_is_found_after_a_restart() {
    let dir = tempfile::tempdir().unwrap();
    let storage = storage(dir.path());
    let (first, ids) = two_kept(&storage);
    let begun = Instant::now();
    first.close();
    assert!(begun.elapsed() < Duration::from_secs(30), "the writer has nothing to wait for");
    // The first page is shared, so it was written once.
    assert_eq!((files(dir.path(), "state").len(), files(dir.path(), "page").len()), (2, 2));
    let bytes = first.status().disk.unwrap().bytes;
    let on_disk = |ending| files(dir.path(), ending).iter().map(|path| path.metadata().unwrap().len()).sum::<u64>();
    assert_eq!(bytes, on_disk("state") + on_disk("page"));
    assert_eq!(first.metrics.prompt_cache_disk_written_bytes.get(), bytes);
    for path in [files(dir.path(), "state"), files(dir.path(), "page")].concat() {
        assert_eq!(path.metadata().unwrap().permissions().mode() & 0o077, 0, "{}", path.display());
    }

    let second = cache(Some(&storage));
    assert_eq!(second.status().disk.unwrap().bytes, bytes);
    assert_eq!(found(&second, &ids), Some((ids.len(), Place::Disk)));
    assert_eq!(found(&second, &ids), Some((ids.len(), Place::Memory)));
    assert_eq!(found(&second, &ids[..ids.len() - 1]), Some((PAGE + 10, Place::Disk)));
    // A prompt needs a token that is still to be computed.
    assert_eq!(cache(Some(&storage)).deepest(&ids, 0).unwrap().0.len, PAGE + 10);
    assert_eq!(second.metrics.prompt_cache_disk_reads.get(), 2);
    // Nothing is written again.
    second.close();
    assert_eq!(second.metrics.prompt_cache_disk_writes.get(), 0);
    // Another model finds nothing, and leaves it alone.
    let other = cache(Some(&Storage { key: "another model".into(), ..storage.clone() }));
    assert_eq!(found(&other, &ids), None);
    other.close();
    assert_eq!(found(&cache(Some(&storage)), &ids), Some((ids.len(), Place::Disk)));
}

#[test]
fn who_closes_writes_what_is_left() {
    let dir = tempfile::tempdir().unwrap();
    let first = cache(Some(&storage(dir.path())));
    // The writer has come to nothing, as on a machine whose processors are busy with others.
    first.inner.lock().closed = true;
    first.changed.notify_all();
    first.writer.lock().take().unwrap().join().unwrap();
    let ids = tokens(4, PAGE + 20);
    put(&first, &ids[..30]);
    put(&first, &ids);
    assert_eq!(first.metrics.prompt_cache_disk_writes.get(), 0);
    first.close();
    assert_eq!(first.metrics.prompt_cache_disk_writes.get(), 2);
    assert_eq!(found(&cache(Some(&storage(dir.path()))), &ids), Some((ids.len(), Place::Disk)));
}

#[test]
fn pages_that_are_in_memory_are_not_read() {
    let dir = tempfile::tempdir().unwrap();
    let storage = storage(dir.path());
    let (first, ids) = two_kept(&storage);
    first.close();
    let second = cache(Some(&storage));
    let (read, whole) = (&second.metrics.prompt_cache_disk_read_bytes, |len| SIZE.bytes(len, 0));
    assert_eq!(found(&second, &ids[..PAGE + 20]), Some((PAGE + 10, Place::Disk)));
    assert_eq!(read.get(), whole(PAGE + 10));
    assert_eq!(found(&second, &ids), Some((ids.len(), Place::Disk)));
    assert_eq!(read.get(), whole(PAGE + 10) + whole(ids.len()) - 2 * PAGE as u64, "the first page is there");
}

#[test]
fn what_is_damaged_is_not_there() {
    let ids = tokens(2, PAGE + 40);
    type Damage = fn(&Path);
    let damages: [(&str, Damage); 8] = [
        ("state", |path| fs::write(path, b"").unwrap()),
        ("state", |path| {
            let bytes = fs::read(path).unwrap();
            fs::write(path, &bytes[..bytes.len() - 1]).unwrap();
        }),
        ("state", |path| {
            let mut bytes = fs::read(path).unwrap();
            let last = bytes.len() - 1;
            bytes[last] ^= 1;
            fs::write(path, bytes).unwrap();
        }),
        ("page", |path| {
            let mut bytes = fs::read(path).unwrap();
            bytes[100] ^= 1;
            fs::write(path, bytes).unwrap();
        }),
        ("page", |path| fs::remove_file(path).unwrap()),
        ("page", |path| fs::write(path, [&fs::read(path).unwrap()[..], &[0]].concat()).unwrap()),
        // Of as many tokens more: the header's checksum is of what follows it.
        ("page", |path| {
            let mut bytes = fs::read(path).unwrap();
            bytes[40] ^= 1;
            fs::write(path, bytes).unwrap();
        }),
        // Of another key.
        ("state", |path| {
            let mut bytes = fs::read(path).unwrap();
            bytes[8] ^= 1;
            fs::write(path, bytes).unwrap();
        }),
    ];
    for (number, (ending, damage)) in damages.into_iter().enumerate() {
        let dir = tempfile::tempdir().unwrap();
        let storage = storage(dir.path());
        let first = cache(Some(&storage));
        put(&first, &ids[..30]);
        put(&first, &ids);
        first.close();
        let all = files(dir.path(), ending);
        let hurt = all.iter().max_by_key(|path| path.metadata().unwrap().len()).unwrap();
        damage(hurt);
        let second = cache(Some(&storage));
        assert_eq!(found(&second, &ids), Some((30, Place::Disk)), "damage {number}");
        assert_eq!(second.status().disk.unwrap().checkpoints, 1, "damage {number}");
        second.close();
    }
}

#[test]
fn the_disks_limit_holds() {
    let dir = tempfile::tempdir().unwrap();
    let storage = Storage { limit: 2500, ..storage(dir.path()) };
    let first = cache(Some(&storage));
    for seed in 0..20 {
        put(&first, &tokens(seed, 60 + seed as usize));
    }
    first.close();
    assert!(first.metrics.prompt_cache_disk_writes.get() <= 20, "what had to leave is not written again");
    let status = first.status().disk.unwrap();
    assert!(status.bytes <= 2500 && status.checkpoints > 2, "{status:?}");
    assert_eq!(files(dir.path(), "state").len(), status.checkpoints);
    let all = [files(dir.path(), "state"), files(dir.path(), "page")].concat();
    assert_eq!(status.bytes, all.iter().map(|path| path.metadata().unwrap().len()).sum::<u64>());
    assert!(first.metrics.prompt_cache_evictions_disk.get() > 0);
    first.clear();
    assert!(files(dir.path(), "state").is_empty());
    assert_eq!(first.status().disk.unwrap().bytes, 0);
}

#[test]
fn pages_that_several_need_go_with_the_last() {
    let dir = tempfile::tempdir().unwrap();
    let ids = tokens(3, PAGE + 60);
    let first = cache(Some(&storage(dir.path())));
    // Both have the first page; the second checkpoint alone has more.
    put(&first, &ids[..PAGE + 20]);
    put(&first, &ids);
    first.close();
    let on_disk = || {
        let all = [files(dir.path(), "state"), files(dir.path(), "page")].concat();
        all.iter().map(|path| path.metadata().unwrap().len()).sum::<u64>()
    };
    for left in [1, 0] {
        let mut inner = first.inner.lock();
        let id = inner.tree.iter().map(|(id, _)| id).max_by_key(|id| inner.tree.len(*id)).unwrap();
        inner.tree[id].memory = None;
        first.forget(&mut inner, id);
        drop(inner);
        assert_eq!((first.status().disk.unwrap().bytes, files(dir.path(), "page").len()), (on_disk(), left));
    }
    assert_eq!(on_disk(), 0);
}

#[test]
fn old_pages_that_nobody_needs_are_swept_and_nothing_else() {
    let dir = tempfile::tempdir().unwrap();
    let storage = storage(dir.path());
    let ids = tokens(4, PAGE + 40);
    let first = cache(Some(&storage));
    put(&first, &ids);
    first.close();
    let needed = files(dir.path(), "page");
    let stray = |name: &str, seconds| {
        let path = needed[0].with_file_name(name);
        let file = fs::File::create(&path).unwrap();
        file.set_modified(std::time::SystemTime::now() - Duration::from_secs(seconds)).unwrap();
        path
    };
    let (old, young, other) = (stray("a.page", 700), stray("b.page", 500), stray("c.text", 700));
    for path in &needed {
        let file = fs::File::options().write(true).open(path).unwrap();
        file.set_modified(std::time::SystemTime::now() - Duration::from_secs(700)).unwrap();
    }
    let second = cache(Some(&storage));
    assert_eq!(found(&second, &ids), Some((ids.len(), Place::Disk)));
    assert_eq!([&old, &young, &other].map(|path| path.exists()), [false, true, true]);
}

#[test]
fn other_models_keep_half_at_most() {
    let dir = tempfile::tempdir().unwrap();
    // Whatever else lies there is somebody else's.
    let names = ["x".repeat(32), "0".repeat(31), "notes".into()];
    let others = names.map(|name| dir.path().join(name));
    for other in &others {
        fs::create_dir(other).unwrap();
        fs::write(other.join("file"), [0; 5000]).unwrap();
    }
    other_models(&dir);
    assert!(others.iter().all(|other| other.join("file").exists()));
}

fn other_models(dir: &tempfile::TempDir) {
    let of = |key: &str, limit| Storage { key: key.into(), limit, ..storage(dir.path()) };
    for key in ["one", "two"] {
        let cache = cache(Some(&of(key, 1 << 20)));
        put(&cache, &tokens(1, 50));
        cache.close();
        std::thread::sleep(Duration::from_millis(20));
    }
    // One of them fits into the half, and it is the later one.
    let third = cache(Some(&of("three", 1000)));
    assert!((500..1000).contains(&third.status().disk.unwrap().limit));
    third.close();
    assert_eq!(found(&cache(Some(&of("one", 1 << 20))), &tokens(1, 50)), None);
    assert!(found(&cache(Some(&of("two", 1 << 20))), &tokens(1, 50)).is_some());
}

#[test]
fn a_directory_that_cannot_be_used_is_not_used() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("file");
    fs::write(&file, b"").unwrap();
    let without = cache(Some(&storage(&file)));
    assert_eq!(without.status().disk, None);
    put(&without, &tokens(1, 50));
    assert_eq!(found(&without, &tokens(1, 50)), Some((50, Place::Memory)));

    // One that goes away while it is used.
    let gone = dir.path().join("gone");
    let cache = cache(Some(&storage(&gone)));
    assert!(cache.status().disk.is_some());
    fs::remove_dir_all(&gone).unwrap();
    put(&cache, &tokens(1, 50));
    cache.close();
    assert_eq!(cache.status().disk, None);
    assert_eq!(found(&cache, &tokens(1, 50)), Some((50, Place::Memory)));
}

#[test]
fn older_speeds_count_less() {
    assert_eq!(mean(mean((0.0, 0.0), 100.0, Duration::from_secs(10)), 20.0, Duration::from_secs(4)), (100.0, 12.0));
}

#[test]
fn a_disk_that_fails_is_not_used_any_more() {
    let dir = tempfile::tempdir().unwrap();
    let ids = tokens(6, 2 * PAGE + 40);
    let first = cache(Some(&storage(dir.path())));
    put(&first, &ids[..30]);
    while first.status().disk.unwrap().checkpoints == 0 {
        std::thread::sleep(Duration::from_millis(5));
    }
    // The second page cannot go to its place.
    let files_of = first.inner.lock().disk.as_ref().unwrap().files.clone();
    let page = files::page_name(&files_of.digests(&ids).0[1]);
    let taken = files_of.dir().join(page).join("taken");
    fs::create_dir_all(&taken).unwrap();
    put(&first, &ids);
    first.close();
    assert_eq!(first.status().disk, None);
    assert_eq!(found(&first, &ids), Some((ids.len(), Place::Memory)));
    fs::remove_dir_all(taken.parent().unwrap()).unwrap();
    // The first page is of no use without it.
    assert_eq!((files(dir.path(), "page").len(), files(dir.path(), "unfinished").len()), (0, 0));
    // The next server has what was whole.
    let second = cache(Some(&storage(dir.path())));
    assert_eq!(found(&second, &ids), Some((30, Place::Disk)));
    second.close();
}

#[test]
fn what_is_slower_to_read_is_computed() {
    let dir = tempfile::tempdir().unwrap();
    let storage = storage(dir.path());
    let first = cache(Some(&storage));
    put(&first, &tokens(1, 50));
    first.close();
    let second = cache(Some(&storage));
    assert!(second.deepest(&[tokens(1, 50), vec![0]].concat(), 50).is_none(), "as many tokens are there already");
    // To read 200 bytes takes eight seconds; to compute 50 tokens six, or as long.
    let speeds = |seconds| {
        let mut inner = second.inner.lock();
        let disk = inner.disk.as_mut().unwrap();
        (disk.read, disk.computed) = ((100.0, 4.0), (1000.0, seconds));
    };
    speeds(120.0);
    assert_eq!(found(&second, &tokens(1, 50)), None);
    speeds(160.0);
    assert_eq!(found(&second, &tokens(1, 50)), Some((50, Place::Disk)));
    second.close();
}

#[test]
fn a_state_behind_no_tokens_is_of_no_use() {
    let dir = tempfile::tempdir().unwrap();
    let Storage { key, .. } = storage(dir.path());
    let (own, _) = Files::open(dir.path(), &key, SIZE).unwrap();
    own.write(&[], &snapshot(&[]).state, &[], &[], &mut 0).unwrap();
    assert_eq!(files(dir.path(), "state").len(), 1);
    let (_, there) = Files::open(dir.path(), &key, SIZE).unwrap();
    assert_eq!((there.len(), files(dir.path(), "state").len()), (0, 0));
}

#[test]
fn a_page_whose_device_is_gone_is_no_error_of_the_disk() {
    let dir = tempfile::tempdir().unwrap();
    let (model, ids, snapshot) = super::super::tests::paged();
    let cache = Arc::new(Cache::new(1 << 30, model.info().snapshot_size, Metrics::new("test", "cpu")));
    cache.store_in(&storage(dir.path()));
    drop(model);
    cache.insert(&ids, Kind::Message, snapshot, 0);
    cache.close();
    assert_eq!((cache.status().checkpoints, cache.status().disk.unwrap().checkpoints), (0, 0));
}
