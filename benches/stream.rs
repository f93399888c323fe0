//! Decoding from a cold start with random tokens, in phases. Shows the cost of a memory limit, a policy or a read mode.
//!
//! ```text
//! cargo bench --bench stream -- MODEL LIMIT [--tokens 64,64] [--threads N] [--io auto|direct|buffered]
//!     [--io-threads N] [--prefetch auto|on|off] [--trace FILE] [--seed N] [--ids FILE] [--checks beside|before]
//! ```
//! LIMIT is the memory limit in bytes (0: none). `--tokens 64,p256,64` decodes 64 tokens one by one, then evaluates a
//! prompt of 256 tokens, then decodes 64 more. `--chunk` is the prompt chunk (`plan`: from the memory plan),
//! `--context` the context size. Tokens are random as in llama-bench, or come from a file of ids, which is repeated.
//! `MARK start` and `MARK phase` lines show a wrapper where phases begin and end. The line `RESULT {json}` has tokens
//! per second, hit rate and bytes of each phase, and the peak resident memory. `--checks beside` (the default) verifies
//! checksums of a pack's experts while they are computed. `--checks before` verifies them before they are used.
//! `check_share` is the fraction of time spent waiting only for checksums.

#[path = "../tests/support/trace.rs"]
mod trace;

use moestro_base::{metrics::Metrics, platform::os::peak_resident_memory};
use moestro_compute::experts::{Prefetch, ReadMode};
use moestro_model::{
    model::{LoadOptions, Model, Qwen, Rows, StoreOptions},
    plan::PlanOptions,
};
use std::{path::Path, time::Instant};

fn main() {
    let args: Vec<String> = std::env::args().skip(1).filter(|arg| arg != "--bench").collect();
    let (Some(dir), Some(limit)) = (args.first(), args.get(1).and_then(|text| text.parse::<u64>().ok())) else {
        println!("stream: no model and limit given, nothing measured");
        return;
    };
    let flag = |name: &str| args.iter().position(|arg| arg == name).and_then(|at| args.get(at + 1)).map(String::as_str);
    let number = |name: &str, default: usize| flag(name).map_or(default, |text| text.parse().expect("a number"));
    let defaults = StoreOptions::default();
    let options = LoadOptions {
        threads: flag("--threads").map(|text| text.parse().expect("threads")),
        plan: PlanOptions {
            limit: (limit > 0).then_some(limit),
            context: Some(number("--context", 512)),
            chunk: (flag("--chunk") != Some("plan")).then(|| number("--chunk", 16)),
            prompt_cache: Some(0),
            stream: if flag("--stream") == Some("on") { Some(true) } else { None },
            buffered: flag("--io") == Some("buffered"),
            ..PlanOptions::default()
        },
        store: StoreOptions {
            io: match flag("--io") {
                Some("direct") => ReadMode::Direct,
                Some("buffered") => ReadMode::Buffered,
                _ => ReadMode::Auto,
            },
            threads: number("--io-threads", defaults.threads),
            prefetch: match flag("--prefetch") {
                Some("on") => Prefetch::On,
                Some("off") => Prefetch::Off,
                _ => Prefetch::Auto,
            },
            ..defaults
        },
        ..LoadOptions::default()
    };
    let metrics = Metrics::new("bench", "cpu");
    let begin = Instant::now();
    let mut model = Qwen::load(Path::new(dir), &options, &metrics, &mut |_, _| ()).expect("the model loads");
    if let (Some(file), Some(store)) = (flag("--trace"), model.store()) {
        store.observe(trace::write_to(Path::new(file)));
    }
    let loaded = begin.elapsed().as_secs_f64();
    if let (Some("before"), Some(store)) = (flag("--checks"), model.store()) {
        store.verify_in_background(false);
    }
    let mut state = model.start().expect("a state");
    let mut seed = number("--seed", 1) as u64;
    let vocab = model.info().vocab as u64;
    let ids: Option<Vec<u64>> = flag("--ids").map(|path| {
        let text = std::fs::read_to_string(path).expect("the file of ids");
        text.split_whitespace().map(|id| id.parse().expect("an id")).collect()
    });
    let mut given = ids.iter().flatten().cycle();
    let mut token = || {
        if let Some(id) = given.next() {
            return (id % vocab) as u32;
        }
        seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        ((seed >> 33) % vocab) as u32
    };
    let slots = metrics.expert_slots.get();
    let chunk = model.info().chunk;
    println!("MARK start slots {slots} chunk {chunk} loaded {loaded:.2} s");
    let mut phases = Vec::new();
    for phase in flag("--tokens").unwrap_or("64,64").split(',') {
        let tokens: usize = phase.trim_start_matches('p').parse().expect("tokens");
        let step = if phase.starts_with('p') { model.info().chunk } else { 1 };
        let count = || {
            let hits = metrics.lookups_decode_hit.get() + metrics.lookups_prefill_hit.get();
            let misses = metrics.lookups_decode_miss.get() + metrics.lookups_prefill_miss.get();
            let foreseen = metrics.lookups_decode_prefetched.get() + metrics.lookups_prefill_prefetched.get();
            let (read, stall) = (metrics.ssd_read_bytes.get(), metrics.ssd_stall_seconds.get());
            let (wasted, checks) = (metrics.prefetches_wasted.get() as f64, metrics.pack_check_seconds.get());
            [hits as f64, misses as f64, foreseen as f64, read as f64, stall, wasted, checks]
        };
        let (before, begin) = (count(), Instant::now());
        for first in (0..tokens).step_by(step) {
            let ids: Vec<u32> = (first..tokens.min(first + step)).map(|_| token()).collect();
            model.forward(&mut state, &ids, Rows::Last).expect("tokens");
        }
        let (after, seconds) = (count(), begin.elapsed().as_secs_f64());
        let [hits, misses, foreseen, read, stall, wasted, checks]: [f64; 7] =
            std::array::from_fn(|i| after[i] - before[i]);
        let lookups = (hits + misses + foreseen).max(1.0);
        println!("MARK phase {phase} tokens");
        phases.push(serde_json::json!({
            "phase": phase,
            "tokens": tokens,
            "tok_s": tokens as f64 / seconds,
            "hit": hits / lookups,
            "foreseen": foreseen / lookups,
            "read_mb_per_token": read / 1e6 / tokens as f64,
            "read_mb_s": read / 1e6 / seconds,
            "stall_share": stall / seconds,
            "check_share": checks / seconds,
            "misses": misses,
            "wasted": wasted,
        }));
    }
    let peak = peak_resident_memory();
    let result = serde_json::json!({ "slots": slots, "chunk": chunk, "loaded_s": loaded, "peak_resident": peak, "phases": phases });
    println!("RESULT {result}");
}
