//! Fuzzes the saved list of hot experts.
#![no_main]

use libfuzzer_sys::fuzz_target;
use moestro_compute::experts::{ExpertMap, ExpertStore, Options, PIECES, Piece, ReadMode, WarmStart};
use moestro_base::metrics::Metrics;

fuzz_target!(|data: &[u8]| {
    let dir = tempfile::tempdir_in("/dev/shm").unwrap();
    let (shard, list) = (dir.path().join("shard"), dir.path().join("hot.json"));
    std::fs::write(&shard, [7; 9 * 4 * 16]).unwrap();
    std::fs::write(&list, data).unwrap();
    let expert = |expert: usize| {
        std::array::from_fn(|part| Piece { file: 0, offset: ((expert * PIECES + part) * 16) as u64, len: 16 })
    };
    let map = ExpertMap { layers: vec![(0..4).map(expert).collect()] };
    let warm_start = Some(WarmStart { file: list, identity: "me".into() });
    let options = Options { io: ReadMode::Buffered, threads: 1, warm_start, ..Options::new(2) };
    ExpertStore::open(vec![shard], map, options, Metrics::new("0", "cpu")).unwrap().fill(&mut |_, _| ()).unwrap();
});
