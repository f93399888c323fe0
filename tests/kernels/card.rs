//! Compares the demo on this machine's GPU with the CPU: resident and streaming, with prompts cut in different ways.
//! `tests/gpu.sh` runs these tests. On a machine without a GPU, the tests print a message and pass.

use crate::{
    forward::{DEMO, answer, cases, common, options},
    layer_spans,
    queue::move_to_queue,
};
use common::{load_with, margin, narrow, write_model};
use moestro::tools::synth::Dimensions;
use moestro_base::platform::os::MemoryLevel;
use moestro_compute::{
    device::{self, Driver, SystemGpu},
    ops::{Comparison, KvBits, compare_kernels},
};
use moestro_model::model::{LoadOptions, Qwen};
use std::{
    path::Path,
    time::{Duration, Instant},
};
use test_support::{own_process::ran_in_own_process, process_memory};

/// If the lead of the most likely token is smaller than this, the two devices may choose different tokens.
const MIN_LEAD: f32 = 0.05;

fn gpu() -> Option<SystemGpu> {
    let gpu = device::open_gpu().unwrap_or_else(|error| panic!("{error}"));
    match &gpu {
        Some(gpu) => println!("{}", gpu.driver.name()),
        None => println!("{}", device::NO_GPU),
    }
    gpu
}

#[test]
fn compared_kernels_run_on_the_gpu() {
    let Some(mut gpu) = gpu() else { return };
    let found = compare_kernels(&mut gpu).unwrap();
    for Comparison { what, ways: [first, second], micros: [a, b] } in &found {
        println!("{a:>8.1}  {b:>8.1} {:>5.2}  {what}: {first}, {second}", a / b);
    }
    assert_eq!(found.len(), 21);
    assert!(found.iter().flat_map(|found| found.micros).all(|micros| micros > 0.0 && micros < 1e5));
}

fn planned(options: LoadOptions, gpu: SystemGpu) -> Qwen {
    move_to_queue(load_with(Path::new(DEMO), LoadOptions { gpu: Some(u64::MAX), ..options }), gpu)
}

fn streaming(slots: Option<usize>) -> LoadOptions {
    let mut options = options(true);
    options.store.slots = slots;
    options
}

/// The largest difference between log-probabilities.
pub fn max_log_prob_difference(found: &[f32], expected: &[f32]) -> f32 {
    let logarithms = |row: &[f32]| {
        let max = f64::from(row.iter().copied().fold(f32::MIN, f32::max));
        let sum: f64 = row.iter().map(|value| (f64::from(*value) - max).exp()).sum();
        row.iter().map(|value| (f64::from(*value) - max - sum.ln()) as f32).collect::<Vec<_>>()
    };
    common::distance(&logarithms(found), &logarithms(expected))
}

/// Asserts that the tokens equal the CPU's tokens up to the first token with a small lead, and that their
/// log-probabilities differ by at most `tolerance`.
pub fn assert_agrees(
    what: &str,
    found: &(Vec<u32>, Vec<Vec<f32>>),
    expected: &(Vec<u32>, Vec<Vec<f32>>),
    tolerance: f32,
) {
    let sure = expected.1.iter().take_while(|row| margin(row) >= MIN_LEAD).count();
    assert_eq!(found.0[..sure], expected.0[..sure], "{what}");
    let same = found.0.iter().zip(&expected.0).take_while(|(a, b)| a == b).count();
    let rows = found.1.iter().zip(&expected.1).take((same + 1).min(found.1.len()));
    let worst = rows.map(|(found, expected)| max_log_prob_difference(found, expected)).fold(0.0, f32::max);
    println!("{what}: {same} of {} tokens the same ({sure} sure), log-probabilities off by {worst:.1e}", found.0.len());
    assert!(worst <= tolerance, "{what}: off by {worst}");
}

#[test]
fn layer_spans_match_a_resident_model() {
    if gpu().is_some() {
        layer_spans::compare(|| gpu().unwrap());
    }
}

/// Releases the segments of a model with 256 experts of 440 KB, and restores them.
#[test]
fn released_segments_free_memory_and_keep_answers() {
    if ran_in_own_process(released_segments_free_memory_and_keep_answers) {
        return;
    }
    let Some(first) = gpu() else { return };
    let dimensions = Dimensions {
        layers: 4,
        experts: 64,
        experts_per_token: 4,
        hidden: 512,
        expert_hidden: 512,
        ..narrow(Dimensions::of_35b())
    };
    let root = tempfile::tempdir().unwrap();
    let dir = write_model(root.path(), dimensions, 5);
    let mut options = LoadOptions { gpu: Some(u64::MAX), ..options(false) };
    options.store.segment_bytes = 8 << 20;
    let mut model = move_to_queue(load_with(&dir, options), first);
    let prompt: Vec<u32> = (0..40).map(|i| i * 37 % 300).collect();
    let expected = answer(&mut model, &prompt, &[], 6);
    // Free memory of a GPU that has its own, and this process's RAM.
    let memory = || {
        let free = gpu().filter(|gpu| gpu.driver.has_own_memory()).and_then(|gpu| gpu.driver.working_set());
        [free, cfg!(target_os = "linux").then(|| process_memory::memory("self", "VmRSS"))]
    };
    let (now, slot_bytes) = (Instant::now(), model.store().unwrap().slot_bytes());
    // At first, segments are uploaded as a whole. Later, experts are uploaded one by one, which may pin their segment.
    for round in 0..2 {
        let (before, slots) = (memory(), model.store().unwrap().slots());
        let short = MemoryLevel::Short((slots / 2 * slot_bytes) as u64);
        // A slot stays while its expert is read or checked, or while the GPU uses it. The server also tries again.
        let deadline = Instant::now() + Duration::from_secs(60);
        while !model.adapt_to_level(short, now + Duration::from_secs(20 * round)) {
            assert!(Instant::now() < deadline, "round {round}: no slot was released");
            std::thread::sleep(Duration::from_millis(10));
        }
        let released = ((slots - model.store().unwrap().slots()) * slot_bytes) as u64;
        let [free, resident] = before;
        let is_free = |[free_after, resident_after]: [Option<u64>; 2]| {
            free.zip(free_after).is_none_or(|(before, after)| after >= before + released / 2)
                && resident.zip(resident_after).is_none_or(|(before, after)| before >= after + released / 2)
        };
        // Other programs and tests also use the GPU's memory, and free what they use in the end.
        let deadline = Instant::now() + Duration::from_secs(60);
        let mut after = memory();
        while !is_free(after) && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(100));
            after = memory();
        }
        println!("released {released} bytes: free on the GPU and resident in RAM {before:?}, then {after:?}");
        assert!(is_free(after), "released {released} bytes of {before:?}, then {after:?}");
        assert!(answer(&mut model, &prompt, &[], 6) == expected, "round {round}");
    }
    let fewest = model.store().unwrap().slots();
    for round in 2..8 {
        model.adapt_to_level(MemoryLevel::Spare(1 << 40), now + Duration::from_secs(20 * round));
        assert!(answer(&mut model, &prompt, &[], 6) == expected, "round {round}");
    }
    assert!(model.store().unwrap().slots() > fewest);
}

#[test]
fn gpu_gives_the_cpu_answers() {
    for (what, few) in [("resident", None), ("five slots", Some(5))] {
        let Some(gpu) = gpu() else { return };
        let options = if few.is_some() { streaming(few) } else { options(false) };
        let (mut cpu, mut gpu) = (load_with(Path::new(DEMO), self::options(false)), planned(options, gpu));
        for case in cases() {
            let count = case.greedy_ids.len();
            let expected = answer(&mut cpu, &case.prompt_ids, &[], count);
            // First evaluate the prompt token by token, as in decoding. Then evaluate the whole prompt, on matrix
            // units.
            // The CPU's plain f32 has f32 keys and values, and the GPU has 16 bits.
            for (chunks, close) in [(vec![1; case.prompt_ids.len()], 2e-3), (vec![], 2e-2)] {
                let found = answer(&mut gpu, &case.prompt_ids, &chunks, count);
                assert_agrees(&format!("{what}: {}", case.question), &found, &expected, close);
            }
        }
    }
}

#[test]
fn gpu_results_ignore_slots_and_chunking() {
    let Some(first) = gpu() else { return };
    let case = cases().swap_remove(3);
    let (prompt, count) = (&case.prompt_ids, 6);
    let mut resident = planned(options(false), first);
    let expected = answer(&mut resident, prompt, &[], count);
    let twos = vec![2; prompt.len() / 2 - 1];
    for chunks in [twos.clone(), vec![16, 5], vec![20]] {
        assert!(answer(&mut resident, prompt, &chunks, count) == expected, "chunks {chunks:?}");
    }
    drop(resident);
    for (slots, chunks) in [(None, vec![]), (None, twos), (Some(5), vec![]), (Some(5), vec![7])] {
        let Some(gpu) = gpu() else { return };
        let mut streaming = planned(streaming(slots), gpu);
        assert!(answer(&mut streaming, prompt, &chunks, count) == expected, "{slots:?} slots, chunks {chunks:?}");
    }
}

#[test]
fn gpu_long_prompts_match_the_cpu() {
    let Some(gpu) = gpu() else { return };
    let text: Vec<u32> = cases().iter().flat_map(|case| [&case.prompt_ids[..], &case.greedy_ids].concat()).collect();
    let load = |chunk| {
        let mut options = options(false);
        options.threads = None;
        (options.plan.context, options.plan.chunk) = (Some(2304), Some(chunk));
        options
    };
    let (mut cpu, mut gpu) = (load_with(Path::new(DEMO), load(512)), planned(load(512), gpu));
    for len in [63, 64, 65, 255, 256, 257, 511, 512, 513, 2048] {
        let prompt: Vec<u32> = text.iter().copied().cycle().take(len).collect();
        let expected = answer(&mut cpu, &prompt, &[], 3);
        let found = answer(&mut gpu, &prompt, &[], 3);
        assert_agrees(&format!("{len} rows"), &found, &expected, 2e-2);
        assert!(answer(&mut gpu, &prompt, &[len / 3, 40.min(len / 3)], 3) == found, "{len} rows, cut");
    }
}

#[test]
fn gpu_quantized_cache_matches_the_cpu() {
    let text: Vec<u32> = cases().iter().flat_map(|case| [&case.prompt_ids[..], &case.greedy_ids].concat()).collect();
    let ids = &text[..text.len().min(170)];
    for kv_bits in [KvBits::Eight, KvBits::Four] {
        let Some(gpu) = gpu() else { return };
        let options = || LoadOptions { kv_bits, ..options(false) };
        let (mut cpu, mut gpu) = (load_with(Path::new(DEMO), options()), planned(options(), gpu));
        let (expected, found) = (answer(&mut cpu, ids, &[], 2), answer(&mut gpu, ids, &[130], 2));
        // If a key or value is between two integers, the devices may round it differently.
        assert_agrees(&format!("{kv_bits:?}"), &found, &expected, 5e-2);
    }
}

#[test]
fn gpu_reads_back_long_buffers() {
    let Some(mut gpu) = gpu() else { return };
    let bytes: Vec<u8> = (0..(5 << 20) + 12).map(|at: usize| (at ^ at >> 9) as u8).collect();
    let region = gpu.allocate(bytes.len()).unwrap();
    gpu.write(region, &bytes).unwrap();
    for (from, len) in [(0, 4), (8, 1 << 20), (4, (1 << 20) + 4), (12, 2 << 20), (0, (3 << 20) - 4), (12, 5 << 20)] {
        let mut read = vec![0; len];
        gpu.read(region.part(from, len), &mut read).unwrap();
        assert!(read == bytes[from..from + len], "{len} bytes from {from}");
    }
}
