//! The cost of checking a packed record's checksum when it is read: CPU time of misses with and without the
//! check.
//!
//! ```text
//! cargo bench --bench checksum -- MODEL [ROUNDS] [ROUTES]
//! ```
//! MODEL must have a pack. Two stores, each with slots for one route, alternately read the same random routes of eight
//! experts. All reads miss. Only one of the stores verifies checksums. In the first round, every record is read for the
//! first time, so each checksum is verified. In later rounds, every sixteenth read is verified. Prints one CSV line for
//! each round: experts, microseconds of CPU time and of wall-clock time for each expert without and with the check, and
//! the ratios. The last line is the additional CPU time for each expert. Linux only.

use moestro_base::metrics::Metrics;
use moestro_compute::{
    device::CpuTimeline,
    experts::{ExpertChoice, ExpertStore, Options, PassSize, Prefetch, ReadMode},
};
use moestro_model::{
    checkpoint::pack,
    model::{self, CheckpointInfo},
};
use std::{path::Path, time::Instant};

/// CPU time of all threads of this process, in seconds.
fn cpu_seconds() -> f64 {
    let tasks = std::fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
    let used = |task: std::fs::DirEntry| std::fs::read_to_string(task.path().join("schedstat")).ok();
    let nanoseconds = tasks.filter_map(used).filter_map(|text| text.split(' ').next()?.parse::<u64>().ok());
    nanoseconds.sum::<u64>() as f64 / 1e9
}

/// CPU time and wall-clock time for each expert, in microseconds.
fn read(store: &ExpertStore, routes: &[(usize, Vec<u32>)]) -> [f64; 2] {
    let (begin, used) = (Instant::now(), cpu_seconds());
    let mut experts = 0;
    for (layer, ids) in routes {
        let choice = ExpertChoice { ids, k: ids.len(), logits: &[] };
        let mut asked = store.fetch(*layer, &choice, PassSize::Small, &mut CpuTimeline).expect("the experts exist");
        while asked.next(&mut CpuTimeline).expect("the read succeeds").is_some() {}
        experts += ids.len();
    }
    [cpu_seconds() - used, begin.elapsed().as_secs_f64()].map(|seconds| seconds * 1e6 / experts as f64)
}

fn main() {
    let mut args = std::env::args().skip(1).filter(|arg| arg != "--bench");
    let Some(dir) = args.next() else {
        println!("checksum: no model given, nothing to measure");
        return;
    };
    let mut number = |default| args.next().map_or(default, |text| text.parse().expect("ROUNDS and ROUTES are numbers"));
    let (rounds, count): (usize, usize) = (number(15), number(200));
    let found =
        CheckpointInfo::unpacked(Path::new(&dir), &model::LoadOptions::default()).expect("MODEL is a checkpoint");
    let open = |checks: bool| {
        let pack = pack::find(Path::new(&dir), &found.experts, &found.files).expect("MODEL has a pack");
        let pack_records = checks.then_some(pack.records);
        let options = Options { io: ReadMode::Direct, prefetch: Prefetch::Off, pack_records, ..Options::new(8) };
        ExpertStore::open(pack.files, pack.map, options, Metrics::new("bench", "cpu")).expect("the store opens")
    };
    let (without, with) = (open(false), open(true));
    let (layers, experts) = (found.experts.layers.len(), found.experts.layers[0].len());
    let all: Vec<(usize, Vec<u32>)> = (0..layers)
        .flat_map(|layer| (0..experts as u32 / 8).map(move |first| (layer, (first * 8..first * 8 + 8).collect())))
        .collect();
    let mut seed = 7u64;
    let mut next = |most: usize| {
        seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (seed >> 33) as usize % most
    };
    println!("round,processor_us,with,ratio,time_us,with,ratio");
    let mut more = Vec::new();
    for round in 0..=rounds {
        let drawn: Vec<(usize, Vec<u32>)> = (0..count)
            .map(|_| {
                let (layer, first) = (next(layers), next(experts));
                (layer, (0..8).map(|i| ((first + i * 31) % experts) as u32).collect())
            })
            .collect();
        let routes = if round == 0 { &all } else { &drawn };
        // The order alternates, so that each store comes first equally often.
        let (a, b) = match round % 2 {
            0 => {
                let a = read(&without, routes);
                (a, read(&with, routes))
            }
            _ => {
                let b = read(&with, routes);
                (read(&without, routes), b)
            }
        };
        println!(
            "{},{:.1},{:.1},{:.3},{:.1},{:.1},{:.3}",
            if round == 0 { "first".into() } else { round.to_string() },
            a[0],
            b[0],
            b[0] / a[0],
            a[1],
            b[1],
            b[1] / a[1]
        );
        more.push(b[0] - a[0]);
    }
    let first = more.remove(0);
    more.sort_by(f64::total_cmp);
    println!(
        "additional CPU time for each expert: {first:.1} us on the first read, {:.1} us later",
        more[more.len() / 2]
    );
}
