//! Compares streaming on the GPU path with streaming on the CPU path: lookups, hits, evictions and used prefetches must
//! be equal.

use crate::{forward::DEMO, gpu::HostGpu, host::Host, queue::move_to, trace};
use moestro_base::metrics::Metrics;
use moestro_compute::{
    device::CpuArithmetic,
    experts::{Prefetch, ReadMode},
};
use moestro_model::model::{LoadOptions, Model, Qwen, Rows, StoreOptions};
use std::{path::Path, sync::Arc};

/// Number of slots: enough for a quarter of the demo's experts.
const SLOTS: usize = 64;

fn load(prefetch: Prefetch, trace_file: &Path, gpu: bool) -> (Qwen, Arc<Metrics>) {
    let store =
        StoreOptions { slots: Some(SLOTS), io: ReadMode::Buffered, threads: 1, prefetch, ..StoreOptions::default() };
    let mut options = LoadOptions {
        math: CpuArithmetic::F32,
        threads: Some(1),
        store,
        gpu: gpu.then_some(u64::MAX),
        ..LoadOptions::default()
    };
    options.plan.stream = Some(true);
    options.plan.context = Some(1024);
    let metrics = Metrics::new("test", "cpu");
    let qwen = Qwen::load(Path::new(DEMO), &options, &metrics, &mut |_, _| ()).unwrap();
    qwen.store().unwrap().observe(trace::write_to(trace_file));
    (qwen, metrics)
}

/// Decodes the first `tokens` of a fixed sequence.
fn decode(model: &mut Qwen, tokens: u32) {
    let mut state = model.start().unwrap();
    for token in 0..tokens {
        model.forward(&mut state, &[100 + token * 37 % 1500], Rows::None).unwrap();
    }
}

struct Counts {
    hits: u64,
    misses: u64,
    foreseen: u64,
    used: u64,
    evictions: u64,
    /// Each layer with the experts that were requested in it.
    asked: Vec<String>,
}

fn run(prefetch: Prefetch, gpu: bool, tokens: u32) -> Counts {
    let dir = tempfile::tempdir().unwrap();
    let trace = dir.path().join("trace");
    let (mut qwen, metrics) = load(prefetch, &trace, gpu);
    if gpu {
        decode(&mut move_to(qwen, HostGpu::new(Host::fast())), tokens);
    } else {
        decode(&mut qwen, tokens);
        drop(qwen);
    }
    let text = std::fs::read_to_string(trace).unwrap();
    let margins = text.lines().filter(|line| line.starts_with('n')).count();
    let asked: Vec<String> = text.lines().filter(|line| line.starts_with('d')).map(String::from).collect();
    assert_eq!(margins, asked.len(), "every selection has margins");
    Counts {
        hits: metrics.lookups_decode_hit.get(),
        misses: metrics.lookups_decode_miss.get(),
        foreseen: metrics.lookups_decode_prefetched.get(),
        used: metrics.prefetches_used.get(),
        evictions: metrics.expert_evictions.get(),
        asked,
    }
}

#[test]
#[ignore = "long: whole answers"]
fn gpu_cache_counts_match_the_cpu() {
    let (cpu, gpu) = (run(Prefetch::Off, false, 100), run(Prefetch::Off, true, 100));
    assert!(cpu.asked == gpu.asked, "the routers chose differently");
    let counts = |counts: &Counts| [counts.hits, counts.misses, counts.foreseen, counts.used, counts.evictions];
    println!("{:?}", counts(&cpu));
    assert_eq!(counts(&cpu), counts(&gpu));
    assert!(cpu.hits > 0 && cpu.evictions > 0 && cpu.foreseen == 0);
    assert_eq!(cpu.hits + cpu.misses, 100 * 8 * 4);
}

#[test]
fn prefetches_are_used_and_counted() {
    for gpu in [false, true] {
        let counts = run(Prefetch::On, gpu, 40);
        println!("{} of {} read ahead", counts.used, counts.misses + counts.foreseen);
        assert_eq!(counts.hits + counts.misses + counts.foreseen, 40 * 8 * 4);
        assert_eq!(counts.foreseen, counts.used);
        // Most experts that had to be read were predicted, even if some of them were not read in time.
        assert!(counts.foreseen > counts.misses, "{} foreseen, {} not", counts.foreseen, counts.misses);
    }
}
