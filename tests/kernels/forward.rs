//! The demo model with every operation on the kernels: greedy tokens as on the CPU, whatever is resident, however the
//! prompt is cut.

#[path = "../common/mod.rs"]
mod common;

use crate::{gpu::HostGpu, host::Host};
use common::{argmax, load_with};
use moestro::{
    config::Switch,
    device::Math,
    metrics::Metrics,
    model::{Model, Options, Qwen, Rows, gpu::OnGpu, qwen::StoreOptions},
    store::Io,
};
use std::{path::Path, sync::atomic::Ordering};

const DEMO: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/models/demo/moestro-demo");

fn options(streaming: bool) -> Options {
    let store = StoreOptions { io: Io::Buffered, ..StoreOptions::default() };
    let mut options = Options { math: Math::F32, threads: Some(1), store, ..Options::default() };
    if streaming {
        // Through the page cache the plan keeps two tokens' working sets of slots.
        options.wishes.stream = Switch::On;
        options.wishes.buffered = true;
    }
    options
}

/// The demo, planned for a GPU and shown to one.
fn on_gpu(streaming: bool, gpu: HostGpu) -> OnGpu<HostGpu> {
    let options = Options { gpu: Some(u64::MAX), ..options(streaming) };
    OnGpu::new(load_with(Path::new(DEMO), options), gpu).unwrap_or_else(|refused| panic!("{}", refused.error))
}

fn fast() -> HostGpu {
    HostGpu::new(Host::fast())
}

#[derive(serde::Deserialize)]
struct Case {
    question: String,
    prompt_ids: Vec<u32>,
    greedy_ids: Vec<u32>,
}

fn cases() -> Vec<Case> {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/demo/greedy.json");
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

/// Greedy ids and the bits of every row of logits they were drawn from.
fn answer<M: Model>(model: &mut M, prompt: &[u32], chunks: &[usize], count: usize) -> (Vec<u32>, Vec<Vec<f32>>) {
    let mut state = model.start().unwrap();
    let mut rest = prompt;
    let mut row = Vec::new();
    for chunk in chunks.iter().copied().chain(std::iter::once(usize::MAX)) {
        let (now, later) = rest.split_at(chunk.min(rest.len()));
        if !now.is_empty() {
            row = model.forward(&mut state, now, Rows::Last).unwrap().data;
        }
        rest = later;
    }
    let (mut ids, mut rows) = (Vec::new(), Vec::new());
    for _ in 0..count {
        let id = argmax(&row);
        ids.push(id);
        rows.push(row);
        row = model.forward(&mut state, &[id], Rows::Last).unwrap().data;
    }
    (ids, rows)
}

#[test]
fn the_demo_answers_as_on_the_cpu() {
    let (mut cpu, mut gpu) = (load_with(Path::new(DEMO), options(false)), on_gpu(false, fast()));
    let cases = cases();
    assert_eq!(cases.len(), 8);
    for case in cases {
        let (expected, rows) = answer(&mut cpu, &case.prompt_ids, &[], case.greedy_ids.len());
        let (found, logits) = answer(&mut gpu, &case.prompt_ids, &[], case.greedy_ids.len());
        assert_eq!(found, expected, "{}", case.question);
        for (found, expected) in logits.iter().zip(&rows) {
            let off = common::distance(found, expected);
            assert!(off < 2e-3, "{}: logits off by {off}", case.question);
        }
    }
}

#[test]
fn nothing_depends_on_where_experts_are_or_how_a_prompt_is_cut() {
    let case = cases().swap_remove(3);
    let (prompt, count) = (&case.prompt_ids, 6);
    let mut resident = on_gpu(false, fast());
    let expected = answer(&mut resident, prompt, &[], count);
    for chunks in [vec![1; prompt.len()], vec![16, 5], vec![20]] {
        assert!(answer(&mut resident, prompt, &chunks, count) == expected, "resident, chunks {chunks:?}");
    }
    let mut streaming = on_gpu(true, fast());
    assert!(streaming.qwen().store().is_some_and(|store| !store.is_resident() && store.slots() < 8 * 32));
    for chunks in [vec![1; prompt.len()], vec![], vec![7]] {
        assert!(answer(&mut streaming, prompt, &chunks, count) == expected, "streaming, chunks {chunks:?}");
    }
}

#[test]
fn no_sanitizer_objects_to_a_pass() {
    let mut model = on_gpu(false, HostGpu::new(Host::start()));
    // A chunk of experts grouped, a few rows together, and one token.
    answer(&mut model, &cases().swap_remove(1).prompt_ids, &[17], 1);
}

/// Experts asked of the store by a prompt of 130 tokens that is evaluated `chunk` tokens at a time.
fn asked(chunk: usize) -> u64 {
    let mut options = Options { gpu: Some(u64::MAX), ..options(true) };
    (options.wishes.chunk, options.wishes.context) = (Some(chunk), Some(1024));
    let metrics = Metrics::new("test", "gpu");
    let qwen = Qwen::load(Path::new(DEMO), &options, &metrics, &mut |_, _| ()).unwrap();
    let mut model = OnGpu::new(qwen, fast()).unwrap_or_else(|refused| panic!("{}", refused.error));
    let prompt: Vec<u32> = cases().iter().flat_map(|case| case.prompt_ids.clone()).take(130).collect();
    let mut state = model.start().unwrap();
    model.forward(&mut state, &prompt, Rows::None).unwrap();
    metrics.lookups_prefill_hit.get() + metrics.lookups_prefill_miss.get() + metrics.lookups_prefill_prefetched.get()
}

#[test]
fn a_chunk_reads_each_expert_once() {
    let (layers, experts) = (8, 32);
    let whole = asked(130);
    assert!(whole <= layers * experts, "{whole} lookups in one chunk");
    assert!(asked(65) > whole, "the count sees what two chunks cost");
}

#[test]
fn what_it_takes_is_what_the_plan_says() {
    let gpu = fast();
    let allocated = gpu.allocated.clone();
    let mut options = Options { gpu: Some(u64::MAX), ..options(true) };
    // Room for attention's parts is planned for the longest context there can be.
    options.wishes.context = Some(moestro::model::Config::read(Path::new(DEMO)).unwrap().context);
    let qwen = load_with(Path::new(DEMO), options);
    let model = OnGpu::new(qwen, gpu).unwrap_or_else(|refused| panic!("{}", refused.error));
    let _state = model.start().unwrap();
    let (plan, taken) = (model.qwen().plan(), allocated.load(Ordering::Relaxed) as u64);
    let planned = plan.kv + plan.state + plan.workspace;
    assert!(taken <= planned, "{taken} bytes, planned {planned}");
    assert!(taken > planned / 10 * 9, "{taken} bytes, planned {planned}: the rest would be slots");
}
