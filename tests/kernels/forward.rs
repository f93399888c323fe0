//! The demo model with every operation on the kernels: greedy tokens as on the CPU, whatever is resident, however the
//! prompt is cut.

#[path = "../common/mod.rs"]
mod common;

use crate::{gpu::HostGpu, host::Host};
use common::{argmax, load_with};
use moestro::{
    config::Switch,
    device::Math,
    model::{Model, Options, Qwen, Rows, gpu::OnGpu, qwen::StoreOptions},
    store::Io,
};
use std::path::Path;

const DEMO: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/models/demo/moestro-demo");

fn qwen(streaming: bool) -> Qwen {
    let store = StoreOptions { io: Io::Buffered, ..StoreOptions::default() };
    let mut options = Options { math: Math::F32, threads: Some(1), store, ..Options::default() };
    if streaming {
        // Through the page cache the plan keeps two tokens' working sets of slots.
        options.wishes.stream = Switch::On;
        options.wishes.buffered = true;
    }
    load_with(Path::new(DEMO), options)
}

fn on_gpu(host: Host) -> OnGpu<HostGpu> {
    OnGpu::new(qwen(false), HostGpu::new(host)).unwrap()
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
    let (mut cpu, mut gpu) = (qwen(false), on_gpu(Host::fast()));
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
    let mut resident = on_gpu(Host::fast());
    let expected = answer(&mut resident, prompt, &[], count);
    for chunks in [vec![1; prompt.len()], vec![16, 5], vec![20]] {
        assert!(answer(&mut resident, prompt, &chunks, count) == expected, "resident, chunks {chunks:?}");
    }
    let streaming = qwen(true);
    assert!(streaming.store().is_some_and(|store| !store.is_resident() && store.slots() < 8 * 32));
    let mut streaming = OnGpu::new(streaming, HostGpu::new(Host::fast())).unwrap();
    for chunks in [vec![1; prompt.len()], vec![], vec![7]] {
        assert!(answer(&mut streaming, prompt, &chunks, count) == expected, "streaming, chunks {chunks:?}");
    }
}

#[test]
fn no_sanitizer_objects_to_a_pass() {
    let mut model = on_gpu(Host::start());
    // A chunk of experts grouped, a few rows together, and one token.
    answer(&mut model, &cases().swap_remove(1).prompt_ids, &[17], 1);
}
