//! The store on real files: every byte in its place, every count exact.

use super::*;
use crate::{
    device::{CpuTimeline, SyncPoint},
    platform::os::disk_bytes_read,
};
use std::io::Write;

pub(super) const LAYERS: usize = 3;
pub(super) const EXPERTS: usize = 8;
/// Codes, scales, biases of gate, up, down; the last projection has no biases.
const LENS: [usize; PIECES] = [2000, 130, 130, 2000, 130, 130, 1900, 120, 0];

/// Byte `at` of file `file`.
pub(super) fn byte(file: u32, at: u64) -> u8 {
    (at.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32) as u8 ^ file as u8
}

pub(super) struct Checkpoint {
    dir: tempfile::TempDir,
    pub(super) map: ExpertMap,
}

/// Two shards with tensors at odd offsets, as MLX writes them: one tensor a projection and part, expert after expert.
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

    pub(super) fn open(&self, options: Options) -> (Experts, Arc<Metrics>) {
        let metrics = Metrics::new("0", "cpu");
        (Experts::open(self.files(), self.map.clone(), options, metrics.clone()).unwrap(), metrics)
    }
}

/// One row's choice.
pub(super) fn row(ids: &[u32]) -> Choice<'_> {
    Choice { ids, k: ids.len(), logits: &[] }
}

/// Takes everything a layer is given and compares it with the files.
pub(super) fn take(store: &Experts, map: &ExpertMap, layer: usize, experts: &[u32], phase: Phase) {
    let mut asked = store.ask(layer, &row(experts), phase, &mut CpuTimeline).unwrap();
    let mut seen = vec![0; experts.len()];
    while let Some(batch) = asked.next(&mut CpuTimeline).unwrap() {
        assert!(!batch.is_empty());
        for landed in batch.iter() {
            for &place in landed.places {
                assert_eq!(experts[place as usize], landed.expert);
                seen[place as usize] += 1;
            }
            let pieces = &map.layers[layer][landed.expert as usize];
            for (piece, bytes) in pieces.iter().zip(landed.pieces) {
                assert_eq!(bytes.len(), piece.len);
                assert!((piece.offset..).zip(bytes).all(|(at, &b)| b == byte(piece.file, at)), "layer {layer}");
            }
        }
        batch.reads_until(SyncPoint::START);
    }
    assert!(seen.iter().all(|&times| times == 1), "{seen:?}");
}

fn ios() -> Vec<Io> {
    // A file system without direct reads (tmpfs on old kernels) leaves one way to test.
    let checkpoint = checkpoint();
    let direct = Files::open(&checkpoint.files(), Access::Direct).is_ok();
    if direct { vec![Io::Direct, Io::Buffered, Io::Auto] } else { vec![Io::Buffered, Io::Auto] }
}

#[test]
fn every_way_of_reading_gives_the_files_bytes() {
    let checkpoint = checkpoint();
    for io in ios() {
        for threads in [1, 2, 32] {
            for slots in [2, 5, 12, LAYERS * EXPERTS] {
                let (store, _) = checkpoint.open(Options { io, threads, ..Options::new(slots) });
                store.fill(&mut |_, _| {}).unwrap();
                for token in 0..20usize {
                    for layer in 0..LAYERS {
                        let one = ((token * 3 + layer) % EXPERTS) as u32;
                        take(&store, &checkpoint.map, layer, &[one, (one + 3) % EXPERTS as u32], Phase::Decode);
                    }
                }
                let all: Vec<u32> = (0..EXPERTS as u32).rev().collect();
                for layer in 0..LAYERS {
                    take(&store, &checkpoint.map, layer, &all, Phase::Prefill);
                }
            }
        }
    }
}

#[test]
fn known_reads_show_exactly_these_bytes() {
    let checkpoint = checkpoint();
    for io in ios() {
        let (store, metrics) = checkpoint.open(Options { io, ..Options::new(4) });
        let block = store.reader.source().block();
        let expected: Vec<_> = (0..4).map(|e| Layout::new(&checkpoint.map.layers[0][e], block)).collect();
        let reads: usize = expected.iter().map(|layout| layout.reads().len()).sum();
        let bytes: usize = expected.iter().flat_map(|layout| layout.reads()).map(|read| read.len).sum();
        let before = disk_bytes_read();
        take(&store, &checkpoint.map, 0, &[0, 1], Phase::Decode);
        take(&store, &checkpoint.map, 0, &[1, 2, 3], Phase::Prefill);
        take(&store, &checkpoint.map, 0, &[0, 1, 2, 3], Phase::Decode);
        assert_eq!(metrics.ssd_reads.get(), reads as u64);
        assert_eq!(metrics.ssd_read_bytes.get(), bytes as u64);
        assert_eq!(metrics.ssd_read_seconds.get_sample_count(), reads as u64);
        assert_eq!((metrics.lookups_decode_miss.get(), metrics.lookups_decode_hit.get()), (2, 4));
        assert_eq!((metrics.lookups_prefill_miss.get(), metrics.lookups_prefill_hit.get()), (2, 1));
        assert_eq!((metrics.expert_slots.get(), metrics.expert_slots_used.get()), (4, 4));
        assert_eq!((metrics.expert_evictions.get(), metrics.ssd_errors.get()), (0, 0));
        take(&store, &checkpoint.map, 1, &[0, 1, 2], Phase::Decode);
        assert_eq!(metrics.expert_evictions.get(), 3);
        if io == Io::Direct && cfg!(target_os = "linux") {
            // Past the page cache, what the disk delivered is what was read: other tests of this process may add.
            let delivered = disk_bytes_read().unwrap_or(0) - before.unwrap_or(0);
            assert!(delivered >= bytes as u64, "{delivered} of {bytes}");
            drop(store);
            assert!(metrics.ssd_disk_bytes.get() >= bytes as u64);
        }
    }
}

#[test]
fn resident_reads_everything_once_and_never_again() {
    let checkpoint = checkpoint();
    let (store, metrics) = checkpoint.open(Options { io: Io::Buffered, ..Options::new(1000) });
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
        take(&store, &checkpoint.map, layer, &[7, 0, 3], Phase::Decode);
    }
    assert_eq!(metrics.ssd_read_bytes.get(), read);
    assert_eq!(metrics.lookups_decode_miss.get(), 0);
}

#[test]
fn a_decode_that_cannot_fit_says_so_and_the_next_one_works() {
    let checkpoint = checkpoint();
    let (store, _) = checkpoint.open(Options::new(3));
    let mut asked = store.ask(0, &row(&[0, 1, 2, 3]), Phase::Decode, &mut CpuTimeline).unwrap();
    let error = loop {
        match asked.next(&mut CpuTimeline) {
            Ok(Some(_)) => {}
            Ok(None) => panic!("four experts in three slots"),
            Err(error) => break error,
        }
    };
    assert!(error.to_string().contains("3 slots are too few"), "{error}");
    drop(asked);
    take(&store, &checkpoint.map, 1, &[4, 5, 6], Phase::Decode);
    assert!(store.ask(0, &row(&[EXPERTS as u32]), Phase::Decode, &mut CpuTimeline).is_err());
    assert!(store.ask(LAYERS, &row(&[0]), Phase::Decode, &mut CpuTimeline).is_err());
}

#[test]
fn at_least_one_slot_is_needed_where_there_are_experts() {
    let checkpoint = checkpoint();
    let open = |map: &ExpertMap| {
        Experts::open(checkpoint.files(), map.clone(), Options::new(0), Metrics::new("0", "cpu"))
            .map(|store| store.slots())
    };
    assert_eq!(open(&checkpoint.map).unwrap_err().to_string(), "no memory for even one expert");
    assert_eq!(open(&ExpertMap::default()).unwrap(), 0, "a dense model has none");
}

#[test]
fn a_layer_that_is_dropped_leaves_its_slots_to_others() {
    let checkpoint = checkpoint();
    let (store, _) = checkpoint.open(Options::new(3));
    for round in 0..50u32 {
        let wanted = [round % 8, (round + 1) % 8, (round + 2) % 8];
        drop(store.ask(0, &row(&wanted), Phase::Decode, &mut CpuTimeline).unwrap());
        take(&store, &checkpoint.map, 1, &[round % 8, (round + 4) % 8], Phase::Decode);
    }
}

#[test]
fn what_was_read_ahead_is_found() {
    let checkpoint = checkpoint();
    let options = Options { prefetch: Prefetch::On, ..Options::new(20) };
    let (store, metrics) = checkpoint.open(options);
    assert!(store.wants_prediction(Phase::Decode));
    take(&store, &checkpoint.map, 0, &[0], Phase::Decode);
    store.read_ahead(1, &[5, 6, 7], Phase::Decode);
    take(&store, &checkpoint.map, 1, &[5, 2], Phase::Decode);
    // A budget of an eighth of the slots: 5 and 6 were sent, 7 was not.
    assert_eq!((metrics.lookups_decode_prefetched.get(), metrics.prefetches_used.get()), (1, 1));
    assert_eq!(metrics.lookups_decode_miss.get(), 2);
    for layer in [2, 0, 1, 2] {
        take(&store, &checkpoint.map, layer, &[0, 1, 2, 3, 4, 5, 7], Phase::Decode);
    }
    let (used, wasted) = (metrics.prefetches_used.get(), metrics.prefetches_wasted.get());
    assert!(used == 1 && wasted <= 1, "{used} used, {wasted} wasted");
}

#[test]
fn a_warm_start_brings_back_what_was_hot() {
    let checkpoint = checkpoint();
    let warm = Warm { file: checkpoint.dir.path().join("cache/hot.json"), identity: "a".into() };
    let options = Options { warm: Some(warm.clone()), ..Options::new(6) };
    let (store, _) = checkpoint.open(options.clone());
    for _ in 0..5 {
        take(&store, &checkpoint.map, 0, &[1, 2], Phase::Decode);
        take(&store, &checkpoint.map, 2, &[3], Phase::Decode);
    }
    drop(store);
    let list: serde_json::Value = serde_json::from_slice(&std::fs::read(&warm.file).unwrap()).unwrap();
    let scores: Vec<_> = list["experts"].as_array().unwrap().iter().map(|expert| expert[2].as_f64().unwrap()).collect();
    assert!(scores.len() == 3 && scores.iter().all(|score| *score > 0.99), "each was always chosen: {list}");

    let (store, metrics) = checkpoint.open(options.clone());
    store.fill(&mut |_, _| {}).unwrap();
    take(&store, &checkpoint.map, 0, &[1, 2], Phase::Decode);
    take(&store, &checkpoint.map, 2, &[3, 4], Phase::Decode);
    assert_eq!(metrics.expert_slots_used.get(), 4, "three that were hot and one that was not");
    let layouts = [(0, 1), (0, 2), (2, 3), (2, 4)]
        .map(|(layer, expert)| Layout::new(&checkpoint.map.layers[layer][expert], store.reader.source().block()));
    let reads: usize = layouts.iter().map(|layout| layout.reads().len()).sum();
    assert_eq!(metrics.ssd_reads.get(), reads as u64, "each once");
    drop(store);

    let other = Warm { identity: "b".into(), ..warm.clone() };
    let (store, metrics) = checkpoint.open(Options { warm: Some(other), ..options.clone() });
    store.fill(&mut |_, _| {}).unwrap();
    assert_eq!(metrics.expert_slots_used.get(), 0, "another model's list");
    drop(store);
    std::fs::write(&warm.file, b"{ half a fi").unwrap();
    let (store, _) = checkpoint.open(options);
    store.fill(&mut |_, _| {}).unwrap();
}

#[test]
fn demand_takes_slots_from_a_warm_start() {
    let checkpoint = checkpoint();
    let warm = Warm { file: checkpoint.dir.path().join("hot.json"), identity: "a".into() };
    let options = Options { warm: Some(warm), threads: 1, ..Options::new(6) };
    let (store, _) = checkpoint.open(options.clone());
    take(&store, &checkpoint.map, 0, &[0, 1, 2, 3, 4, 5], Phase::Decode);
    drop(store);
    for _ in 0..20 {
        let (store, _) = checkpoint.open(options.clone());
        store.fill(&mut |_, _| {}).unwrap();
        take(&store, &checkpoint.map, 1, &[0, 1, 2, 3, 4, 5], Phase::Decode);
        take(&store, &checkpoint.map, 0, &[5, 4, 3], Phase::Decode);
    }
}

#[test]
fn a_trace_has_a_line_for_each_layer() {
    let checkpoint = checkpoint();
    let file = checkpoint.dir.path().join("trace");
    let (store, _) = checkpoint.open(Options { trace: Some(file.clone()), ..Options::new(6) });
    take(&store, &checkpoint.map, 0, &[1, 2], Phase::Decode);
    let choice = Choice { ids: &[3, 3], k: 1, logits: &[0.5, 1.0, -2.0, 0.25] };
    drop(store.ask(2, &choice, Phase::Prefill, &mut CpuTimeline).unwrap());
    // Three rows of two experts each, and a row of which the logits are not known.
    let choice = Choice { ids: &[3, 1, 3, 2, 1, 0], k: 2, logits: &[0.5, 1.0, -2.0, 0.25, 3.0, 4.0, 5.0, 6.0, 7.0] };
    drop(store.ask(1, &choice, Phase::Decode, &mut CpuTimeline).unwrap());
    drop(store.ask(1, &row(&[7]), Phase::Prefill, &mut CpuTimeline).unwrap());
    drop(store);
    let lines = "d 0 1 2\nn 2 1 0.500 1.000\nn 2 1 -2.000 0.250\np 2 3\n\
                 n 1 2 0.500 1.000 -2.000\nn 1 2 0.250 3.000 4.000\nn 1 2 5.000 6.000 7.000\nd 1 0 1 2 3\np 1 7\n";
    assert_eq!(std::fs::read_to_string(file).unwrap(), lines);
}

#[cfg(target_os = "linux")]
#[test]
fn direct_reads_leave_nothing_in_the_page_cache() {
    let checkpoint = checkpoint();
    let Ok(files) = Files::open(&checkpoint.files(), Access::Direct) else { return };
    for file in 0..2 {
        files.drop_cached(file, 0, 0);
    }
    let cached = |path: &std::path::Path| {
        let file = std::fs::File::open(path).unwrap();
        // SAFETY: the file is this test's own and nobody changes it.
        let map = unsafe { memmap2::Mmap::map(&file) }.unwrap();
        let mut pages = vec![0u8; map.len().div_ceil(4096)];
        // SAFETY: one byte for each page of the map.
        let status = unsafe { libc::mincore(map.as_ptr() as *mut _, map.len(), pages.as_mut_ptr()) };
        assert_eq!(status, 0);
        pages.iter().filter(|&&page| page & 1 == 1).count()
    };
    if checkpoint.files().iter().any(|path| cached(path) > 0) {
        return; // The system kept the pages although asked not to (tmpfs): nothing can be shown here.
    }
    let (store, _) = checkpoint.open(Options { io: Io::Direct, ..Options::new(4) });
    let all: Vec<u32> = (0..EXPERTS as u32).collect();
    for layer in 0..LAYERS {
        take(&store, &checkpoint.map, layer, &all, Phase::Prefill);
    }
    for path in checkpoint.files() {
        assert_eq!(cached(&path), 0, "{}", path.display());
    }
}

#[test]
fn the_bandwidth_is_bytes_over_time_and_each_expert_is_read_once() {
    /// Takes two milliseconds a read.
    struct Slow(std::sync::Mutex<Vec<u64>>);
    impl Source for Slow {
        fn read(&self, _: u32, offset: u64, into: &mut [u8]) -> std::io::Result<usize> {
            self.0.lock().unwrap().push(offset);
            std::thread::sleep(Duration::from_millis(2));
            Ok(into.len())
        }
        fn size(&self, _: u32) -> Option<u64> {
            None
        }
        fn path(&self, _: u32) -> PathBuf {
            PathBuf::new()
        }
        fn block(&self) -> usize {
            1
        }
    }
    let expert =
        |n: u64| std::array::from_fn(|i| Piece { file: 0, offset: n * 1000, len: if i == 0 { 600 } else { 0 } });
    let map = ExpertMap { layers: vec![(0..13).map(expert).collect(), (13..26).map(expert).collect()] };
    for threads in [1, 3] {
        let (source, begin) = (Slow(Default::default()), Instant::now());
        let found = probe::bandwidth(&source, &map, threads, Duration::from_secs(60), None).unwrap();
        let (most, least) =
            (26.0 * 600.0 / (26.0 / threads as f64 * 0.002), 26.0 * 600.0 / begin.elapsed().as_secs_f64());
        assert!((least..=most).contains(&found), "{least} <= {found} <= {most}");
        let mut read = source.0.into_inner().unwrap();
        if threads == 1 {
            assert_eq!(read[..3], [0, 17_000, 8000], "far from each other");
        }
        read.sort_unstable();
        assert!(read.into_iter().eq((0..26).map(|n| n * 1000)), "{threads} threads");
    }
    // Nine, the stride that comes first, has a factor in common with fifteen.
    let (source, map) = (Slow(Default::default()), ExpertMap { layers: vec![(0..15).map(expert).collect()] });
    probe::bandwidth(&source, &map, 1, Duration::from_secs(60), None).unwrap();
    let read: std::collections::HashSet<u64> = source.0.into_inner().unwrap().into_iter().collect();
    assert_eq!(read.len(), 15);
    assert_eq!(probe::bandwidth(&Slow(Default::default()), &ExpertMap::default(), 2, DRAW, None).unwrap(), 0.0);
}

#[test]
fn a_prompt_has_so_many_experts_on_their_way_at_a_time() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("experts");
    std::fs::write(&file, vec![7; 200 * 64]).unwrap();
    let expert = |n: u64| std::array::from_fn(|i| Piece { file: 0, offset: n * 64, len: if i == 0 { 64 } else { 0 } });
    let map = ExpertMap { layers: vec![(0..200).map(expert).collect()] };
    let all: Vec<u32> = (0..200).collect();
    for (phase, most) in [(Phase::Prefill, 64), (Phase::Decode, 150)] {
        let metrics = Metrics::new("0", "cpu");
        let store = Experts::open(vec![file.clone()], map.clone(), Options::new(150), metrics.clone()).unwrap();
        let asked = store.ask(0, &row(&all), phase, &mut CpuTimeline).unwrap();
        assert_eq!((metrics.expert_slots_used.get(), asked.len()), (most, 200), "{phase:?}");
    }
}
