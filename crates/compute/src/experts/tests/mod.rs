//! Tests of the store on real files: the bytes of every piece, and exact metrics.

use super::{
    read_plan::ReadPlan,
    reader::ExpertReader,
    slot_table::{SlotId, SlotState, SlotStates, SlotTable},
    *,
};
use crate::device::{CpuTimeline, Slab, SyncPoint};
use moestro_base::{
    metrics::Metrics,
    platform::{
        Access,
        os::{MemoryLevel, disk_bytes_read},
    },
};
use std::{
    io::Write,
    path::PathBuf,
    sync::Arc,
    time::{Duration, Instant},
};
use test_support::own_process::ran_in_own_process;

mod late_device;
mod memory_pressure;
mod reader;
mod slow_disk;
mod warm_start;

pub(super) const LAYERS: usize = 3;
pub(super) const EXPERTS: usize = 8;
/// Size in bytes of codes, scales and biases of gate, up and down. The last projection has no biases.
const LENS: [usize; PIECES] = [2000, 130, 130, 2000, 130, 130, 1900, 120, 0];

/// The expected byte at offset `at` of file `file`.
pub(super) fn byte(file: u32, at: u64) -> u8 {
    (at.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32) as u8 ^ file as u8
}

pub(super) struct Checkpoint {
    dir: tempfile::TempDir,
    pub(super) map: ExpertMap,
}

/// Two shards as MLX writes them: one tensor per projection and part, with the data of all experts, at odd offsets.
pub(super) fn checkpoint() -> Checkpoint {
    let dir = tempfile::tempdir().unwrap();
    let mut ends = [77u64, 9731];
    let mut map = ExpertMap { layers: vec![vec![[Piece::default(); PIECES]; EXPERTS]; LAYERS] };
    for layer in 0..LAYERS {
        let file = (layer % 2) as u32;
        for (part, &len) in LENS.iter().enumerate() {
            for expert in 0..EXPERTS {
                map.layers[layer][expert][part] = Piece { file, offset: ends[file as usize], len };
                ends[file as usize] += len as u64;
            }
        }
    }
    for (file, &end) in ends.iter().enumerate() {
        let bytes: Vec<u8> = (0..end).map(|at| byte(file as u32, at)).collect();
        let mut out = std::fs::File::create(dir.path().join(format!("{file}.safetensors"))).unwrap();
        out.write_all(&bytes).unwrap();
        out.sync_all().unwrap();
    }
    Checkpoint { dir, map }
}

impl Checkpoint {
    fn files(&self) -> Vec<PathBuf> {
        (0..2).map(|file| self.dir.path().join(format!("{file}.safetensors"))).collect()
    }

    pub(super) fn open(&self, options: Options) -> (ExpertStore, Arc<Metrics>) {
        let metrics = Metrics::new("0", "cpu");
        (ExpertStore::open(self.files(), self.map.clone(), options, metrics.clone()).unwrap(), metrics)
    }
}

/// An [`ExpertChoice`] of one row.
pub(super) fn row(ids: &[u32]) -> ExpertChoice<'_> {
    ExpertChoice { ids, k: ids.len(), logits: &[] }
}

/// Fetches experts of a layer and compares their bytes with the bytes in the files.
pub(super) fn take(store: &ExpertStore, map: &ExpertMap, layer: usize, experts: &[u32], size: PassSize) {
    let mut fetch = store.fetch(layer, &row(experts), size, &mut CpuTimeline).unwrap();
    let mut seen = vec![0; experts.len()];
    while let Some(batch) = fetch.next(&mut CpuTimeline).unwrap() {
        assert!(!batch.is_empty());
        for ready in batch.iter() {
            for &assignment in ready.assignments {
                assert_eq!(experts[assignment as usize], ready.expert);
                seen[assignment as usize] += 1;
            }
            let pieces = &map.layers[layer][ready.expert as usize];
            for (piece, bytes) in pieces.iter().zip(ready.pieces) {
                assert_eq!(bytes.len(), piece.len);
                assert!((piece.offset..).zip(bytes).all(|(at, &b)| b == byte(piece.file, at)), "layer {layer}");
            }
        }
        batch.release_after(SyncPoint::START);
    }
    assert!(seen.iter().all(|&times| times == 1), "{seen:?}");
}

fn read_modes() -> Vec<ReadMode> {
    // A file system without direct reads (tmpfs on old kernels) supports only one mode.
    let checkpoint = checkpoint();
    let direct = ShardFiles::open(&checkpoint.files(), Access::Direct).is_ok();
    if direct {
        vec![ReadMode::Direct, ReadMode::Buffered, ReadMode::Auto]
    } else {
        vec![ReadMode::Buffered, ReadMode::Auto]
    }
}

/// A hit whose slot launches cannot read yet sets the skip flag of a layer span.
#[test]
fn spans_need_experts_that_launches_can_read() {
    let checkpoint = checkpoint();
    let (store, _) = checkpoint.open(Options::new(LAYERS * EXPERTS));
    let run = |mark: bool| {
        for layer in (0..LAYERS).cycle().take(16 * LAYERS) {
            let mut fetch = store.fetch(layer, &row(&[1, 2]), PassSize::Small, &mut CpuTimeline).unwrap();
            while let Some(batch) = fetch.next(&mut CpuTimeline).unwrap() {
                batch.iter().filter(|_| mark).for_each(|ready| store.mark_on_device(ready.slot));
            }
        }
        store.layers_to_submit(0, PassSize::Small)
    };
    assert_eq!([run(false), run(true)], [1, LAYERS]);
}

#[test]
fn every_read_mode_returns_the_files_bytes() {
    let checkpoint = checkpoint();
    for io in read_modes() {
        for threads in [1, 2, 32] {
            for slots in [2, 5, 12, LAYERS * EXPERTS] {
                let (store, _) = checkpoint.open(Options { io, threads, ..Options::new(slots) });
                store.fill(&mut |_, _| {}).unwrap();
                for token in 0..20usize {
                    for layer in 0..LAYERS {
                        let one = ((token * 3 + layer) % EXPERTS) as u32;
                        take(&store, &checkpoint.map, layer, &[one, (one + 3) % EXPERTS as u32], PassSize::Small);
                    }
                }
                let all: Vec<u32> = (0..EXPERTS as u32).rev().collect();
                for layer in 0..LAYERS {
                    take(&store, &checkpoint.map, layer, &all, PassSize::Large);
                }
            }
        }
    }
}

/// True if the system counts direct reads of files in `dir` as reads from a disk. Linux does so, unless the files are in
/// memory.
fn reads_are_counted(dir: &std::path::Path) -> bool {
    #[cfg(target_os = "linux")]
    {
        let path = std::ffi::CString::new(dir.as_os_str().as_encoded_bytes()).unwrap();
        let mut stat = std::mem::MaybeUninit::<libc::statfs>::uninit();
        // SAFETY: `path` is a NUL-terminated string. `stat` is large enough and is read only on success.
        unsafe { libc::statfs(path.as_ptr(), stat.as_mut_ptr()) == 0 && stat.assume_init().f_type != libc::TMPFS_MAGIC }
    }
    #[cfg(not(target_os = "linux"))]
    {
        _ = dir;
        false
    }
}

#[test]
fn metrics_count_exact_reads_and_bytes() {
    if ran_in_own_process(metrics_count_exact_reads_and_bytes) {
        return;
    }
    let checkpoint = checkpoint();
    for io in read_modes() {
        let (store, metrics) = checkpoint.open(Options { io, ..Options::new(4) });
        let block = store.reader.source().block();
        let expected: Vec<_> = (0..4).map(|e| ReadPlan::new(&checkpoint.map.layers[0][e], block)).collect();
        let reads: usize = expected.iter().map(|plan| plan.reads().len()).sum();
        let bytes: usize = expected.iter().flat_map(|plan| plan.reads()).map(|read| read.len).sum();
        let before = disk_bytes_read();
        take(&store, &checkpoint.map, 0, &[0, 1], PassSize::Small);
        take(&store, &checkpoint.map, 0, &[1, 2, 3], PassSize::Large);
        take(&store, &checkpoint.map, 0, &[0, 1, 2, 3], PassSize::Small);
        assert_eq!(metrics.ssd_reads.get(), reads as u64);
        assert_eq!(metrics.ssd_read_bytes.get(), bytes as u64);
        assert_eq!(metrics.ssd_read_seconds.get_sample_count(), reads as u64);
        assert_eq!((metrics.lookups_decode_miss.get(), metrics.lookups_decode_hit.get()), (2, 4));
        assert_eq!((metrics.lookups_prefill_miss.get(), metrics.lookups_prefill_hit.get()), (2, 1));
        assert_eq!((metrics.expert_slots.get(), metrics.expert_slots_used.get()), (4, 4));
        assert_eq!((metrics.expert_evictions.get(), metrics.ssd_errors.get()), (0, 0));
        take(&store, &checkpoint.map, 1, &[0, 1, 2], PassSize::Small);
        assert_eq!(metrics.expert_evictions.get(), 3);
        if io == ReadMode::Direct && !reads_are_counted(checkpoint.dir.path()) {
            println!("skipped: bytes from the disk, because the system does not count them here");
        } else if io == ReadMode::Direct {
            let delivered = disk_bytes_read().unwrap_or(0) - before.unwrap_or(0);
            assert!(delivered >= bytes as u64, "{delivered} of {bytes}");
            drop(store);
            assert!(metrics.ssd_disk_bytes.get() >= bytes as u64);
        }
    }
}

#[test]
fn resident_store_reads_each_expert_once() {
    let checkpoint = checkpoint();
    let (store, metrics) = checkpoint.open(Options { io: ReadMode::Buffered, ..Options::new(1000) });
    assert!(store.is_resident());
    let mut last = 0;
    store
        .fill(&mut |done, total| {
            assert!(done >= last && total == checkpoint.map.bytes());
            last = done;
        })
        .unwrap();
    assert_eq!(last, checkpoint.map.bytes());
    let read = metrics.ssd_read_bytes.get();
    assert_eq!(read, checkpoint.map.bytes());
    for layer in 0..LAYERS {
        take(&store, &checkpoint.map, layer, &[7, 0, 3], PassSize::Small);
    }
    assert_eq!(metrics.ssd_read_bytes.get(), read);
    assert_eq!(metrics.lookups_decode_miss.get(), 0);
}

/// Number of experts that the heatmap shows in each layer.
fn shown(metrics: &Metrics) -> Vec<usize> {
    metrics.heatmap().layers().iter().map(|layer| layer.bytes().filter(|&expert| expert != b'.').count()).collect()
}

#[test]
fn heatmap_shows_experts_without_a_request() {
    let checkpoint = checkpoint();
    let (store, metrics) = checkpoint.open(Options { min_slots: EXPERTS, ..Options::new(LAYERS * EXPERTS) });
    assert_eq!(shown(&metrics), [0; LAYERS]);
    store.fill(&mut |_, _| {}).unwrap();
    assert_eq!(metrics.heatmap().layers(), ["00000000"; LAYERS]);
    assert!(store.adapt_to_level(MemoryLevel::Short(5 * store.slot_bytes() as u64), Instant::now(), &mut CpuTimeline));
    assert_eq!(shown(&metrics).iter().sum::<usize>(), LAYERS * EXPERTS - 5, "five slots were released");
    take(&store, &checkpoint.map, 0, &(0..EXPERTS as u32).collect::<Vec<_>>(), PassSize::Small);
    assert_eq!(shown(&metrics)[0], EXPERTS);
    assert_eq!(shown(&metrics).iter().sum::<usize>(), LAYERS * EXPERTS - 5, "other experts were evicted");
}

#[test]
fn heatmap_shows_experts_of_warm_start() {
    let checkpoint = checkpoint();
    let warm_start = Some(WarmStart { file: checkpoint.dir.path().join("hot.json"), identity: "a".into() });
    let options = Options { warm_start, ..Options::new(6) };
    let (store, _) = checkpoint.open(options.clone());
    take(&store, &checkpoint.map, 1, &[2, 5], PassSize::Small);
    drop(store);
    let (store, metrics) = checkpoint.open(options);
    store.fill(&mut |_, _| {}).unwrap();
    while store.reader.is_busy() {
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(metrics.heatmap().layers(), ["........", "..0..0..", "........"]);
}

#[test]
fn too_few_slots_fail_one_fetch_only() {
    let checkpoint = checkpoint();
    let (store, _) = checkpoint.open(Options::new(3));
    let mut fetch = store.fetch(0, &row(&[0, 1, 2, 3]), PassSize::Small, &mut CpuTimeline).unwrap();
    let error = loop {
        match fetch.next(&mut CpuTimeline) {
            Ok(Some(_)) => {}
            Ok(None) => panic!("four experts fit into three slots"),
            Err(error) => break error,
        }
    };
    assert!(error.to_string().contains("3 slots are too few"), "{error}");
    drop(fetch);
    take(&store, &checkpoint.map, 1, &[4, 5, 6], PassSize::Small);
    assert!(store.fetch(0, &row(&[EXPERTS as u32]), PassSize::Small, &mut CpuTimeline).is_err());
    assert!(store.fetch(LAYERS, &row(&[0]), PassSize::Small, &mut CpuTimeline).is_err());
}

#[test]
fn store_without_slots_needs_dense_model() {
    let checkpoint = checkpoint();
    let open = |map: &ExpertMap| {
        ExpertStore::open(checkpoint.files(), map.clone(), Options::new(0), Metrics::new("0", "cpu"))
            .map(|store| store.slots())
    };
    assert_eq!(open(&checkpoint.map).unwrap_err().to_string(), "no memory for even one expert");
    assert_eq!(open(&ExpertMap::default()).unwrap(), 0, "a dense model needs no slot");
}

#[test]
fn dropped_fetch_frees_its_slots() {
    let checkpoint = checkpoint();
    let (store, _) = checkpoint.open(Options::new(3));
    for round in 0..50u32 {
        let wanted = [round % 8, (round + 1) % 8, (round + 2) % 8];
        drop(store.fetch(0, &row(&wanted), PassSize::Small, &mut CpuTimeline).unwrap());
        take(&store, &checkpoint.map, 1, &[round % 8, (round + 4) % 8], PassSize::Small);
    }
}

#[test]
fn prefetched_experts_are_used() {
    let checkpoint = checkpoint();
    let options = Options { prefetch: Prefetch::On, ..Options::new(20) };
    let (store, metrics) = checkpoint.open(options);
    assert!(store.wants_prefetch(PassSize::Small));
    take(&store, &checkpoint.map, 0, &[0], PassSize::Small);
    store.prefetch(1, &[5, 6, 7], PassSize::Small);
    take(&store, &checkpoint.map, 1, &[5, 2], PassSize::Small);
    // The budget is an eighth of the slots: experts 5 and 6 were prefetched, but expert 7 was not.
    assert_eq!((metrics.lookups_decode_prefetched.get(), metrics.prefetches_used.get()), (1, 1));
    assert_eq!(metrics.lookups_decode_miss.get(), 2);
    for layer in [2, 0, 1, 2] {
        take(&store, &checkpoint.map, layer, &[0, 1, 2, 3, 4, 5, 7], PassSize::Small);
    }
    let used = metrics.prefetches_used.get();
    let wasted = metrics.prefetches_wasted.get();
    assert!(used == 1 && wasted <= 1, "{used} used, {wasted} wasted");
}

#[test]
fn warm_start_restores_hot_experts() {
    let checkpoint = checkpoint();
    let warm = WarmStart { file: checkpoint.dir.path().join("cache/hot.json"), identity: "a".into() };
    let options = Options { warm_start: Some(warm.clone()), ..Options::new(6) };
    let (store, _) = checkpoint.open(options.clone());
    for _ in 0..5 {
        take(&store, &checkpoint.map, 0, &[1, 2], PassSize::Small);
        take(&store, &checkpoint.map, 2, &[3], PassSize::Small);
    }
    drop(store);
    let list: serde_json::Value = serde_json::from_slice(&std::fs::read(&warm.file).unwrap()).unwrap();
    let scores: Vec<_> = list["experts"].as_array().unwrap().iter().map(|expert| expert[2].as_f64().unwrap()).collect();
    assert!(scores.len() == 3 && scores.iter().all(|score| *score > 0.99), "every token selected all three: {list}");

    let (store, metrics) = checkpoint.open(options.clone());
    store.fill(&mut |_, _| {}).unwrap();
    take(&store, &checkpoint.map, 0, &[1, 2], PassSize::Small);
    take(&store, &checkpoint.map, 2, &[3, 4], PassSize::Small);
    assert_eq!(metrics.expert_slots_used.get(), 4, "three hot experts and one miss");
    let plans = [(0, 1), (0, 2), (2, 3), (2, 4)]
        .map(|(layer, expert)| ReadPlan::new(&checkpoint.map.layers[layer][expert], store.reader.source().block()));
    let reads: usize = plans.iter().map(|plan| plan.reads().len()).sum();
    assert_eq!(metrics.ssd_reads.get(), reads as u64, "each expert is read once");
    drop(store);

    let other = WarmStart { identity: "b".into(), ..warm.clone() };
    let (store, metrics) = checkpoint.open(Options { warm_start: Some(other), ..options.clone() });
    store.fill(&mut |_, _| {}).unwrap();
    assert_eq!(metrics.expert_slots_used.get(), 0, "a list of another model is ignored");
    drop(store);
    std::fs::write(&warm.file, b"{ half a fi").unwrap();
    let (store, _) = checkpoint.open(options);
    store.fill(&mut |_, _| {}).unwrap();
}

#[test]
fn demand_reclaims_slots_of_warm_start() {
    let checkpoint = checkpoint();
    let warm = WarmStart { file: checkpoint.dir.path().join("hot.json"), identity: "a".into() };
    let options = Options { warm_start: Some(warm), threads: 1, ..Options::new(6) };
    let (store, _) = checkpoint.open(options.clone());
    take(&store, &checkpoint.map, 0, &[0, 1, 2, 3, 4, 5], PassSize::Small);
    drop(store);
    for _ in 0..20 {
        let (store, _) = checkpoint.open(options.clone());
        store.fill(&mut |_, _| {}).unwrap();
        take(&store, &checkpoint.map, 1, &[0, 1, 2, 3, 4, 5], PassSize::Small);
        take(&store, &checkpoint.map, 0, &[5, 4, 3], PassSize::Small);
    }
}

#[cfg(target_os = "linux")]
#[test]
fn direct_reads_bypass_the_page_cache() {
    let checkpoint = checkpoint();
    if ShardFiles::open(&checkpoint.files(), Access::Direct).is_err() {
        return;
    }
    for path in checkpoint.files() {
        moestro_base::platform::DataFile::open(&path, Access::Buffered).unwrap().drop_cached(0, 0);
    }
    let cached = |path: &std::path::Path| {
        let file = std::fs::File::open(path).unwrap();
        // SAFETY: only this test uses the file, and the test does not change the file.
        let map = unsafe { memmap2::Mmap::map(&file) }.unwrap();
        let mut pages = vec![0u8; map.len().div_ceil(4096)];
        // SAFETY: the vector has one byte per page of the map.
        let status = unsafe { libc::mincore(map.as_ptr() as *mut _, map.len(), pages.as_mut_ptr()) };
        assert_eq!(status, 0);
        pages.iter().filter(|&&page| page & 1 == 1).count()
    };
    if checkpoint.files().iter().any(|path| cached(path) > 0) {
        return; // The file system keeps all pages in memory (tmpfs), so this test cannot show anything.
    }
    let (store, _) = checkpoint.open(Options { io: ReadMode::Direct, ..Options::new(4) });
    let all: Vec<u32> = (0..EXPERTS as u32).collect();
    for layer in 0..LAYERS {
        take(&store, &checkpoint.map, layer, &all, PassSize::Large);
    }
    for path in checkpoint.files() {
        assert_eq!(cached(&path), 0, "{}", path.display());
    }
}

#[test]
fn prefill_window_limits_concurrent_reads() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("experts");
    std::fs::write(&file, vec![7; 200 * 64]).unwrap();
    let expert = |n: u64| std::array::from_fn(|i| Piece { file: 0, offset: n * 64, len: if i == 0 { 64 } else { 0 } });
    let map = ExpertMap { layers: vec![(0..200).map(expert).collect()] };
    let all: Vec<u32> = (0..200).collect();
    for (size, most) in [(PassSize::Large, 64), (PassSize::Small, 150)] {
        let metrics = Metrics::new("0", "cpu");
        let store = ExpertStore::open(vec![file.clone()], map.clone(), Options::new(150), metrics.clone()).unwrap();
        let fetch = store.fetch(0, &row(&all), size, &mut CpuTimeline).unwrap();
        assert_eq!((metrics.expert_slots_used.get(), fetch.len()), (most, 200), "{size:?}");
    }
}
