//! The list of the experts that were hot when a server stopped.
#![no_main]

use libfuzzer_sys::fuzz_target;
use moestro::{
    experts::{ExpertMap, Experts, Io, Options, PIECES, Piece, Warm},
    metrics::Metrics,
};

fuzz_target!(|data: &[u8]| {
    let dir = tempfile::tempdir_in("/dev/shm").unwrap();
    let (shard, list) = (dir.path().join("shard"), dir.path().join("hot.json"));
    std::fs::write(&shard, [7; 9 * 4 * 16]).unwrap();
    std::fs::write(&list, data).unwrap();
    let expert = |expert: usize| {
        std::array::from_fn(|part| Piece { file: 0, offset: ((expert * PIECES + part) * 16) as u64, len: 16 })
    };
    let map = ExpertMap { layers: vec![(0..4).map(expert).collect()] };
    let warm = Some(Warm { file: list, identity: "me".into() });
    let options = Options { io: Io::Buffered, threads: 1, warm, ..Options::new(2) };
    Experts::open(vec![shard], map, options, Metrics::new("0", "cpu")).unwrap().fill(&mut |_, _| ()).unwrap();
});
