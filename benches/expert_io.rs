//! Throughput of misses: reads routes of ROUTE (default 8) experts that are not in memory from one large file, without
//! any computation.
//!
//! ```text
//! cargo bench --bench expert_io -- FILE [SECONDS] [THREADS,THREADS..] [direct|all] [ROUTE]
//! ```
//! FILE is any file of at least 1 GB that is not in the page cache, for instance a shard of a checkpoint. It is read
//! with two hypothetical layouts of the 35B model's dimensions: as in MLX checkpoints (nine ranges per expert) and
//! packed (one range). Prints one CSV line per configuration: layout, io, threads, MB/s of experts, reads/s, bytes from
//! the block device per byte of an expert, mean milliseconds per route. `benches/disk.py` compares it with fio.

use moestro_base::metrics::Metrics;
use moestro_compute::{
    device::CpuTimeline,
    experts::{ExpertChoice, ExpertMap, ExpertStore, Options, PIECES, PassSize, Piece, Prefetch, ReadMode},
};
use std::{path::PathBuf, time::Instant};

/// Codes, scales and biases of gate, up and down.
const LENS: [usize; PIECES] = [524_288, 32_768, 32_768, 524_288, 32_768, 32_768, 524_288, 32_768, 32_768];
const EXPERT: usize = 1_769_472;
const EXPERTS: usize = 256;

fn map(size: u64, packed: bool) -> ExpertMap {
    let layers = (size / (EXPERT * EXPERTS + 8192) as u64) as usize;
    let layer = |layer: usize| {
        let start = (layer * EXPERT * EXPERTS) as u64;
        let expert = |expert: usize| {
            // MLX: a header of odd length, then one tensor after the other. Packed: page-aligned records.
            let mut at = if packed { start + (expert * EXPERT) as u64 } else { start + 9731 };
            std::array::from_fn(|part| {
                let len = LENS[part];
                let piece = Piece { file: 0, offset: if packed { at } else { at + (expert * len) as u64 }, len };
                at += if packed { len as u64 } else { (len * EXPERTS) as u64 };
                piece
            })
        };
        (0..EXPERTS).map(expert).collect()
    };
    ExpertMap { layers: (0..layers).map(layer).collect() }
}

fn main() {
    let mut args = std::env::args().skip(1).filter(|arg| arg != "--bench");
    let Some(path) = args.next().map(PathBuf::from) else {
        println!("expert_io: no file given, nothing measured");
        return;
    };
    let seconds: f64 = args.next().map_or(3.0, |text| text.parse().expect("seconds"));
    let threads: Vec<usize> =
        args.next().map_or(vec![8, 16, 32], |text| text.split(',').map(|n| n.parse().expect("threads")).collect());
    let ways =
        [(false, ReadMode::Direct), (true, ReadMode::Direct), (false, ReadMode::Buffered), (true, ReadMode::Buffered)];
    let ways = if args.next().as_deref() == Some("direct") { &ways[..2] } else { &ways[..] };
    let route: usize = args.next().map_or(8, |text| text.parse().expect("experts a route"));
    let size = std::fs::metadata(&path).expect("the file").len();
    println!("layout,io,threads,mb_per_s,reads_per_s,disk_per_wanted,route_ms");
    for &(packed, io) in ways {
        for &threads in &threads {
            let metrics = Metrics::new("bench", "cpu");
            let map = map(size, packed);
            let layers = map.layers.len();
            let options = Options { io, threads, prefetch: Prefetch::Off, ..Options::new(route) };
            let store = ExpertStore::open(vec![path.clone()], map, options, metrics.clone()).expect("the store opens");
            let (mut routes, mut seed, begin) = (0u64, 7u64, Instant::now());
            while begin.elapsed().as_secs_f64() < seconds {
                let mut next = || {
                    seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                    (seed >> 33) as usize
                };
                let layer = next() % layers;
                let first = next() % EXPERTS;
                let experts: Vec<u32> = (0..route).map(|i| ((first + i * 31) % EXPERTS) as u32).collect();
                let choice = ExpertChoice { ids: &experts, k: route, logits: &[] };
                let asked = store.fetch(layer, &choice, PassSize::Small, &mut CpuTimeline);
                let mut asked = asked.expect("experts that there are");
                while asked.next(&mut CpuTimeline).expect("a read").is_some() {}
                routes += 1;
            }
            let spent = begin.elapsed().as_secs_f64();
            // Dropping the store updates the block device's byte count.
            drop(store);
            let wanted = metrics.lookups_decode_miss.get() as f64 * EXPERT as f64;
            println!(
                "{},{},{threads},{:.0},{:.0},{:.4},{:.2}",
                if packed { "packed" } else { "mlx" },
                if io == ReadMode::Direct { "direct" } else { "buffered" },
                wanted / spent / 1e6,
                metrics.ssd_reads.get() as f64 / spent,
                metrics.ssd_disk_bytes.get() as f64 / wanted,
                1e3 * spent / routes as f64,
            );
        }
    }
}
