//! Tests of disk faults. The request that needs the unreadable expert gets an error that names file, expert and offset.
//! The next request must work, and no slot may be lost.

use moestro_base::{error::StoreError, metrics::Metrics};
use moestro_compute::{
    device::{CpuTimeline, SyncPoint},
    experts::{
        ExpertChoice, ExpertMap, ExpertSource, ExpertStore, Options, PIECES, PassSize, Piece, Prefetch, ReadMode,
        ShardFiles, WarmStart,
    },
};
use std::{
    io::{self, Write},
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
};
use test_support::own_process::ran_in_own_process;

const EXPERTS: usize = 6;
const LAYERS: usize = 2;
const LEN: usize = 5000;

fn byte(at: u64) -> u8 {
    (at.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 40) as u8
}

/// A map of experts in one file. The three pieces of each expert are so far apart that they need three reads.
fn map() -> ExpertMap {
    let piece = |layer: usize, expert: usize, part: usize| {
        let nth = part * LAYERS * EXPERTS + layer * EXPERTS + expert;
        Piece { file: 0, offset: (33 + nth * LEN) as u64, len: LEN }
    };
    let expert = |layer, expert| {
        let piece = |at: usize| if at.is_multiple_of(3) { piece(layer, expert, at / 3) } else { Piece::default() };
        std::array::from_fn::<_, PIECES, _>(piece)
    };
    ExpertMap { layers: (0..LAYERS).map(|l| (0..EXPERTS).map(|e| expert(l, e)).collect()).collect() }
}

fn size() -> usize {
    33 + 3 * LAYERS * EXPERTS * LEN
}

/// Fetches experts and compares every byte with the file.
fn fetch_and_compare(store: &ExpertStore, layer: usize, experts: &[u32], size: PassSize) -> Result<(), StoreError> {
    let map = map();
    let choice = ExpertChoice { ids: experts, k: experts.len(), logits: &[] };
    let mut asked = store.fetch(layer, &choice, size, &mut CpuTimeline)?;
    let mut seen = 0;
    while let Some(batch) = asked.next(&mut CpuTimeline)? {
        for ready in batch.iter() {
            seen += 1;
            for (piece, got) in map.layers[layer][ready.expert as usize].iter().zip(ready.pieces) {
                assert!((piece.offset..).zip(got).all(|(at, &b)| b == byte(at)) && got.len() == piece.len);
            }
        }
        batch.release_after(SyncPoint::START);
    }
    assert_eq!(seen, experts.len());
    Ok(())
}

/// Checks after a fault that every expert can be fetched and that no slot is lost.
fn assert_works(store: &ExpertStore) {
    let slots = store.slots();
    for round in 0..4 {
        for layer in 0..LAYERS {
            let experts: Vec<u32> = (0..slots.min(EXPERTS)).map(|i| ((i + round) % EXPERTS) as u32).collect();
            fetch_and_compare(store, layer, &experts, PassSize::Small).unwrap();
            fetch_and_compare(store, layer, &[0, 1, 2, 3, 4, 5], PassSize::Large).unwrap();
        }
    }
}

/// Faults of a simulated disk.
#[derive(Default)]
struct DiskFaults {
    /// Byte ranges of the file that cannot be read.
    unreadable: Mutex<Vec<std::ops::Range<u64>>>,
    /// Number of reads that will be interrupted.
    interrupted: AtomicUsize,
    /// If true, reads return at most 700 bytes.
    is_short: AtomicBool,
}

struct FaultySource(Arc<DiskFaults>);

impl ExpertSource for FaultySource {
    fn read(&self, _: u32, offset: u64, into: &mut [u8]) -> io::Result<usize> {
        let faults = &self.0;
        if faults.interrupted.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |n| n.checked_sub(1)).is_ok() {
            return Err(io::ErrorKind::Interrupted.into());
        }
        let end = offset + into.len() as u64;
        if faults.unreadable.lock().unwrap().iter().any(|range| range.start < end && offset < range.end) {
            return Err(io::Error::from_raw_os_error(5));
        }
        let most = if faults.is_short.load(Ordering::SeqCst) { 700 } else { usize::MAX };
        let len = into.len().min((size() as u64 - offset) as usize).min(most);
        for (at, byte_at) in into[..len].iter_mut().zip(offset..) {
            *at = byte(byte_at);
        }
        Ok(len)
    }

    fn size(&self, _: u32) -> Option<u64> {
        Some(size() as u64)
    }

    fn path(&self, _: u32) -> PathBuf {
        "model-00001-of-00001.safetensors".into()
    }

    fn block(&self) -> usize {
        1
    }
}

fn faulty_store(slots: usize) -> (ExpertStore, Arc<DiskFaults>, Arc<Metrics>) {
    let faults = Arc::new(DiskFaults::default());
    let metrics = Metrics::new("0", "cpu");
    let options = Options { prefetch: Prefetch::On, ..Options::new(slots) };
    let source = Box::new(FaultySource(faults.clone()));
    let store = ExpertStore::with_source(source, map(), options, metrics.clone()).unwrap();
    (store, faults, metrics)
}

#[test]
fn unreadable_range_fails_only_its_request() {
    for slots in [3, 4, LAYERS * EXPERTS] {
        for size in [PassSize::Small, PassSize::Large] {
            let (store, faults, metrics) = faulty_store(slots);
            let bad = map().layers[1][4][6];
            *faults.unreadable.lock().unwrap() = std::iter::once(bad.offset + 9..bad.offset + 10).collect();
            for _ in 0..10 {
                fetch_and_compare(&store, 0, &[4, 1], size).unwrap();
                let error = fetch_and_compare(&store, 1, &[0, 4, 2], size).unwrap_err();
                let text = error.to_string();
                let StoreError::Read { layer: 1, expert: 4, offset, len: LEN, source, .. } = error else {
                    panic!("{text}")
                };
                assert_eq!((offset, source.raw_os_error()), (bad.offset, Some(5)));
                for part in ["layer 1", "expert 4", "model-00001-of-00001.safetensors", "offset"] {
                    assert!(text.contains(part), "{text}");
                }
                fetch_and_compare(&store, 1, &[5, 2], size).unwrap();
            }
            assert_eq!(metrics.ssd_errors.get(), 10);
            faults.unreadable.lock().unwrap().clear();
            assert_works(&store);
        }
    }
}

#[test]
fn unreadable_resident_model_fails_to_load() {
    let (store, faults, _) = faulty_store(LAYERS * EXPERTS);
    let bad = map().layers[0][3][0];
    faults.unreadable.lock().unwrap().push(bad.offset..bad.offset + 1);
    let error = store.fill(&mut |_, _| {}).unwrap_err();
    assert!(matches!(error, StoreError::Read { layer: 0, expert: 3, .. }), "{error}");
}

#[test]
fn failed_prefetch_fails_no_request() {
    let (store, faults, metrics) = faulty_store(11);
    let bad = map().layers[1][2][0];
    faults.unreadable.lock().unwrap().push(bad.offset..bad.offset + 1);
    for _ in 0..20 {
        fetch_and_compare(&store, 0, &[0, 1], PassSize::Small).unwrap();
        store.prefetch(1, &[2], PassSize::Small);
        fetch_and_compare(&store, 1, &[0, 1], PassSize::Small).unwrap();
    }
    assert!(metrics.ssd_errors.get() <= 20);
    faults.unreadable.lock().unwrap().clear();
    assert_works(&store);
    assert_eq!(store.slots() as i64, metrics.expert_slots_used.get());
}

#[test]
fn interrupted_and_short_reads_are_retried() {
    let (store, faults, metrics) = faulty_store(4);
    faults.interrupted.store(50, Ordering::SeqCst);
    assert_works(&store);
    faults.is_short.store(true, Ordering::SeqCst);
    assert_works(&store);
    assert_eq!(metrics.ssd_errors.get(), 0);
}

fn shard(dir: &Path) -> PathBuf {
    let path = dir.join("model.safetensors");
    let mut file = std::fs::File::create(&path).unwrap();
    file.write_all(&(0..size() as u64).map(byte).collect::<Vec<_>>()).unwrap();
    file.sync_all().unwrap();
    path
}

/// The read modes that this file system supports.
fn read_modes(path: &Path) -> Vec<ReadMode> {
    let direct = ShardFiles::open(&[path.to_owned()], moestro_base::platform::Access::Direct).is_ok();
    if direct { vec![ReadMode::Buffered, ReadMode::Direct] } else { vec![ReadMode::Buffered] }
}

fn open(path: &Path, io: ReadMode) -> Result<ExpertStore, StoreError> {
    let options = Options { io, ..Options::new(4) };
    ExpertStore::open(vec![path.to_owned()], map(), options, Metrics::new("0", "cpu"))
}

#[test]
fn truncated_shard_fails_to_open() {
    let dir = tempfile::tempdir().unwrap();
    let path = shard(dir.path());
    std::fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(size() as u64 - 1).unwrap();
    for io in read_modes(&path) {
        let error = open(&path, io).err().expect("a byte is missing").to_string();
        assert!(error.contains("model.safetensors") && error.contains("layer 1, expert 5"), "{error}");
    }
}

/// Modifies a shard while two of its experts are in memory, in each read mode. Checks that these experts stay usable.
fn modify_while_serving(modify: impl Fn(&Path, &ExpertStore)) {
    for io in [ReadMode::Buffered, ReadMode::Direct] {
        let dir = tempfile::tempdir().unwrap();
        let path = shard(dir.path());
        if !read_modes(&path).contains(&io) {
            continue;
        }
        let store = open(&path, io).unwrap();
        fetch_and_compare(&store, 0, &[0, 1], PassSize::Small).unwrap();
        modify(&path, &store);
        fetch_and_compare(&store, 0, &[0, 1], PassSize::Small).expect("experts in memory stay usable");
    }
}

#[test]
fn truncation_while_serving_fails_affected_requests() {
    modify_while_serving(|path, store| {
        let last = map().layers[1][5][6];
        std::fs::OpenOptions::new().write(true).open(path).unwrap().set_len(last.offset + 1).unwrap();
        let error = fetch_and_compare(store, 1, &[5], PassSize::Small).unwrap_err();
        assert!(matches!(error, StoreError::Read { layer: 1, expert: 5, .. }), "{error}");
    });
}

#[test]
fn modification_while_serving_fails_later_reads() {
    modify_while_serving(|path, store| {
        std::thread::sleep(std::time::Duration::from_millis(20));
        std::fs::OpenOptions::new().write(true).open(path).unwrap().write_all(&vec![0; size()]).unwrap();
        let error = fetch_and_compare(store, 1, &[3], PassSize::Small).unwrap_err();
        assert!(error.to_string().contains("changed while it was being served"), "{error}");
    });
}

#[test]
fn store_limits_slots_to_experts() {
    for (slots, has) in [(3, 3), (LAYERS * EXPERTS, LAYERS * EXPERTS), (1000, LAYERS * EXPERTS)] {
        assert_eq!(faulty_store(slots).0.slots(), has);
    }
    let source = Box::new(FaultySource(Arc::default()));
    let none = ExpertStore::with_source(source, map(), Options::new(0), Metrics::new("0", "cpu"));
    assert!(none.err().expect("no slot").to_string().contains("no memory for even one expert"));
}

#[test]
fn only_streaming_store_saves_hot_list() {
    let dir = tempfile::tempdir().unwrap();
    for (slots, asked, kept) in [(4, true, true), (4, false, false), (LAYERS * EXPERTS, true, false)] {
        let file = dir.path().join(format!("hot-{slots}-{asked}.json"));
        let warm_start = Some(WarmStart { file: file.clone(), identity: "me".into() });
        let options = Options { warm_start, ..Options::new(slots) };
        let source = Box::new(FaultySource(Arc::default()));
        let store = ExpertStore::with_source(source, map(), options, Metrics::new("0", "cpu")).unwrap();
        if asked {
            fetch_and_compare(&store, 0, &[1, 2], PassSize::Small).unwrap();
        }
        drop(store);
        assert_eq!(file.exists(), kept, "{slots} slots, asked: {asked}");
    }
}

#[test]
fn replaced_shard_is_served_from_open_file() {
    let dir = tempfile::tempdir().unwrap();
    let path = shard(dir.path());
    for io in read_modes(&path) {
        shard(dir.path());
        let store = open(&path, io).unwrap();
        let other = dir.path().join("other");
        std::fs::write(&other, vec![0; size()]).unwrap();
        std::fs::rename(&other, &path).unwrap();
        assert_works(&store);
    }
}

/// Runs in a process of its own, because the limit of open files applies to the whole process.
#[test]
fn descriptor_limit_error_names_the_file() {
    if ran_in_own_process(descriptor_limit_error_names_the_file) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let path = shard(dir.path());
    let mut limit = libc::rlimit { rlim_cur: 64, rlim_max: 64 };
    // SAFETY: system calls with a pointer to a local struct.
    unsafe {
        assert_eq!(libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit), 0);
        limit.rlim_cur = 64;
        assert_eq!(libc::setrlimit(libc::RLIMIT_NOFILE, &limit), 0);
    }
    let mut held: Vec<_> = std::iter::from_fn(|| std::fs::File::open(&path).ok()).take(100).collect();
    assert!(held.len() < 100);
    let error = open(&path, ReadMode::Buffered).err().expect("no descriptor is left");
    assert!(error.to_string().contains("model.safetensors"), "{error}");
    held.truncate(held.len() - 8);
    let store = open(&path, ReadMode::Buffered).unwrap();
    while let Ok(file) = std::fs::File::open(&path) {
        held.push(file);
    }
    assert_works(&store);
}
