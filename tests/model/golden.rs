//! Compares the model's answers with those of mlx-lm, for the demo model and for a small checkpoint in every encoding
//! (`tests/fixtures/make.py`). Covers both CPU arithmetics, chunk sizes, thread counts, and the layouts of the files.

use crate::common::{
    bound, decode, distance,
    fixtures::{self, DEMO, Folded},
    load, load_with, margin, prefill,
};
use moestro_compute::device::CpuArithmetic;
use moestro_model::model::{LoadOptions, Qwen};
use std::path::Path;

const MATHS: [CpuArithmetic; 2] = [CpuArithmetic::F32, CpuArithmetic::Integer];

#[test]
fn demo_answers_match_mlx_lm() {
    let (cases, logits) = fixtures::demo();
    assert_eq!((cases.len(), logits.len()), (8, 4));
    for math in MATHS {
        let mut model = load(Path::new(DEMO), math);
        let mut compared = 0;
        for (index, case) in cases.iter().enumerate() {
            let (prompt, mut state, _) = prefill(&mut model, &case.prompt_ids, 64);
            if let Some(expected) = logits.get(&format!("{index}.prompt_logits")) {
                let off = distance(&prompt.data, expected);
                assert!(off <= bound(math), "{math:?} {}: prompt off by {off}", case.question);
                compared += 1;
            }
            let last = prompt.row(prompt.rows() - 1);
            let (ids, rows) = decode(&mut model, &mut state, last, case.greedy_ids.len());
            let rows: Vec<&[f32]> = rows.chunks(prompt.vocab).collect();
            let sure = rows.iter().take_while(|row| margin(row) >= 0.05).count();
            assert_eq!(ids[..sure], case.greedy_ids[..sure], "{math:?} {}", case.question);
            if let Some(expected) = logits.get(&format!("{index}.decode_logits")) {
                let expected: Vec<&[f32]> = expected.chunks(prompt.vocab).collect();
                for (step, (row, expected)) in rows.iter().zip(&expected).enumerate() {
                    let off = distance(row, expected);
                    assert!(off <= bound(math), "{math:?} {}: token {step} off by {off}", case.question);
                }
                compared += 1;
            }
        }
        assert_eq!(compared, 4);
    }
}

#[test]
fn every_encoding_matches_mlx_lm() {
    for name in fixtures::encodings() {
        let dir = Folded::read(&name).unfold();
        let expected = fixtures::expected(&name);
        let prompt: Vec<u32> = expected["prompt"].iter().map(|id| *id as u32).collect();
        for math in MATHS {
            let mut model = load(dir.path(), math);
            let (logits, mut state, _) = prefill(&mut model, &prompt, 100);
            let off = distance(&logits.data, &expected["prompt_logits"]);
            assert!(off <= bound(math), "{name} {math:?}: prompt off by {off}");
            let last = logits.row(logits.rows() - 1);
            let (ids, rows) = decode(&mut model, &mut state, last, expected["greedy"].len());
            let rows: Vec<&[f32]> = rows.chunks(logits.vocab).collect();
            let known: Vec<&[f32]> = expected["decode_logits"].chunks(logits.vocab).collect();
            for (step, (row, known)) in rows.iter().zip(known).enumerate() {
                let off = distance(row, known);
                assert!(off <= bound(math), "{name} {math:?}: token {step} off by {off}");
                assert_eq!(ids[step], expected["greedy"][step] as u32, "{name} {math:?}");
                if margin(row) < 0.01 {
                    break; // From here on the sequences may legitimately differ.
                }
            }
        }
    }
}

#[test]
fn logits_ignore_chunks_and_threads() {
    let ids: Vec<u32> = (0..150).map(|n| n * 37 % 2000 + 5).collect();
    for math in MATHS {
        let mut one = load(Path::new(DEMO), math);
        let (expected, mut state, routes) = prefill(&mut one, &ids, ids.len());
        let after = decode(&mut one, &mut state, expected.row(ids.len() - 1), 5);
        for (chunk, threads) in [(1, 2), (7, 1), (64, 3), (149, 2), (150, 5)] {
            let options = LoadOptions { math, threads: Some(threads), ..LoadOptions::default() };
            let mut model = load_with(Path::new(DEMO), options);
            let (logits, mut state, same) = prefill(&mut model, &ids, chunk);
            assert!(logits.data == expected.data, "{math:?}: chunks of {chunk} on {threads} threads");
            assert!(same == routes);
            assert!(decode(&mut model, &mut state, logits.row(ids.len() - 1), 5) == after);
        }
    }
}

#[test]
fn interleaved_sequences_stay_independent() {
    let mut model = load(Path::new(DEMO), CpuArithmetic::Integer);
    let (a, b): (Vec<u32>, Vec<u32>) = ((10..40).collect(), (300..320).collect());
    let (alone, ..) = prefill(&mut model, &a, 64);
    let mut states = [model_start(&mut model), model_start(&mut model)];
    let mut rows = Vec::new();
    for (step, id) in a.iter().enumerate() {
        rows.extend(one(&mut model, &mut states[0], *id));
        if let Some(id) = b.get(step) {
            one(&mut model, &mut states[1], *id);
        }
    }
    assert!(rows == *alone.data);
}

fn model_start(model: &mut Qwen) -> moestro_model::model::QwenState {
    moestro_model::model::Model::start(model).unwrap()
}

fn one(model: &mut Qwen, state: &mut moestro_model::model::QwenState, id: u32) -> Vec<f32> {
    model.forward(state, &[id], moestro_model::model::Rows::Last).unwrap().data.to_vec()
}

/// A convolution of width 1 has the same shape in both layouts. The tensor names therefore decide whether norms store
/// `w` or `w - 1`.
#[test]
fn layout_without_wide_convolution_is_recognised() {
    let narrow = Folded::read("bf16").edit(
        |config| config["text_config"]["linear_conv_kernel_dim"] = 1.into(),
        |name, tensor| {
            if name.ends_with("conv1d.weight") {
                // [C, K, 1] in bf16: keep the last weight of each channel.
                let row = tensor.data.len() / tensor.shape[0];
                tensor.data = tensor.data.chunks(row).flat_map(|taps| taps[row - 2..].to_vec()).collect();
                tensor.shape[1] = 1;
            }
            true
        },
    );
    let ids: Vec<u32> = (0..20).map(|n| n * 7 % 96).collect();
    let logits = |dir: &Path| prefill(&mut load(dir, CpuArithmetic::Integer), &ids, 100).0.data;
    let expected = logits(narrow.unfold().path());
    assert!(logits(narrow.unfold_as_hugging_face(true).path()) == expected);
}
