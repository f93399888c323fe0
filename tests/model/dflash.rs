//! Compares the DFlash draft with fixtures from transformers and z-lab's implementation. The fixtures are a random
//! target of eight layers, with drafts in both config schemas.

use crate::common::{distance, fixtures::FIXTURES, load_with};
use moestro_compute::device::{CpuArithmetic, CpuDevice};
use moestro_model::model::{HiddenStates, HiddenTaps, LoadOptions, Model, Rows, SequenceState, dflash};
use std::{
    collections::HashMap,
    path::{Path, PathBuf},
};
use test_support::files::copy_files;

fn path(name: &str) -> PathBuf {
    Path::new(FIXTURES).join("dflash").join(name)
}

fn draft(name: &str) -> dflash::DflashModel {
    let target = moestro_model::model::Config::read(&path("target")).unwrap();
    let surveyed = dflash::DflashCheckpoint::new(&path(name), &target).unwrap();
    dflash::DflashModel::load(&surveyed, 64, CpuDevice::new(2, CpuArithmetic::Integer)).unwrap()
}

fn steps(name: &str) -> HashMap<String, Vec<f32>> {
    crate::common::tensors(&path(&format!("{name}_steps.safetensors")))
}

/// Checks four drafts. After the drafts, the context grows by 21, 3, 1 and 5 positions, so that it exceeds the window.
#[test]
fn draft_steps_match_the_reference() {
    for name in ["draft", "draft_legacy", "draft2"] {
        let (mut draft, steps) = (draft(name), steps(name));
        let mut start = 0;
        for step in 0..4 {
            let get = |key: &str| &steps[&format!("{step}.{key}")];
            assert_eq!(get("ctx_start"), &[start as f32]);
            draft.append(start, get("target_hidden")).unwrap();
            start = draft.len();
            let hidden = draft.block(get("noise_embedding")).unwrap();
            let off = distance(&hidden, get("hidden"));
            println!("{name}, step {step}: off by {off:.1e}");
            assert!(off < 1e-4, "{name}, step {step}: off by {off}");
            // A block does not change the context.
            assert_eq!(draft.block(get("noise_embedding")).unwrap(), hidden);
            // The proposed tokens are the most likely tokens of the head, or the tokens that the selector chose.
            let mut before = get("block_ids")[0] as u32;
            for (row, logits) in get("logits").chunks_exact(96).enumerate() {
                let mut logits = logits.to_vec();
                draft.score(before, &hidden[(row + 1) * 64..][..64], &mut logits).unwrap();
                before = crate::common::argmax(&logits);
                assert_eq!(before, get("draft_tokens")[row] as u32, "{name}, step {step}, row {row}");
            }
        }
    }
}

#[test]
fn context_ignores_chunking_and_can_shrink() {
    let (mut grown, mut whole, steps) = (draft("draft"), draft("draft"), steps("draft"));
    let features: Vec<f32> = (0..4).flat_map(|step| steps[&format!("{step}.target_hidden")].clone()).collect();
    let block = &steps["3.noise_embedding"];
    whole.append(0, &features).unwrap();
    let expected = whole.block(block).unwrap();
    assert!(distance(&expected, &steps["3.hidden"]) < 1e-4);
    let width = whole.config().features();
    // Rejected rows are overwritten.
    grown.append(0, &features[..25 * width]).unwrap();
    grown.append(25, &features[..3 * width]).unwrap();
    grown.truncate(27);
    grown.append(25, &features[25 * width..]).unwrap();
    assert_eq!(grown.block(block).unwrap(), expected);
    // A gap is allowed and changes the result.
    grown.truncate(10);
    grown.append(20, &features[20 * width..]).unwrap();
    let with_gap = grown.block(block).unwrap();
    assert_ne!(with_gap, expected);
    // Removing positions afterwards makes the same gap.
    whole.forget(10..20);
    assert_eq!(whole.block(block).unwrap(), with_gap);
    // Dropping positions that no layer attends to does not change the result.
    let mut long = draft("draft");
    for round in 0..40 {
        long.append(round * 30, &features).unwrap();
    }
    assert!(long.block(block).unwrap().iter().all(|value| value.is_finite()));
}

#[test]
fn incomplete_or_foreign_draft_is_rejected() {
    let target = moestro_model::model::Config::read(&path("target")).unwrap();
    let refused = |change: &dyn Fn(&Path)| {
        let dir = tempfile::tempdir().unwrap();
        copy_files(path("draft"), dir.path(), &["config.json", "model.safetensors"]);
        change(dir.path());
        dflash::DflashCheckpoint::new(dir.path(), &target).map(|_| ()).unwrap_err().to_string()
    };
    let cut = |dir: &Path| {
        let file = std::fs::File::options().write(true).open(dir.join("model.safetensors")).unwrap();
        file.set_len(200_000).unwrap();
    };
    assert!(refused(&cut).contains("truncated"));
    let config = |from: &'static str, to: &'static str| {
        move |dir: &Path| {
            let path = dir.join("config.json");
            let text = std::fs::read_to_string(&path).unwrap();
            assert!(text.contains(from));
            std::fs::write(path, text.replace(from, to)).unwrap();
        }
    };
    for (from, to, word) in [
        ("\"num_hidden_layers\": 3", "\"num_hidden_layers\": 2", "layer_types"),
        ("\"intermediate_size\": 128", "\"intermediate_size\": 96", "expected floats"),
        ("   4,\n   5\n", "   4\n", "fc.weight"),
        ("\"num_target_layers\": 8", "\"num_target_layers\": 40", "another model"),
        ("\"vocab_size\": 96", "\"vocab_size\": 128", "another model"),
        ("DFlashDraftModel", "DFlash2DraftModel", "conv_kernel_size"),
    ] {
        let error = refused(&config(from, to));
        assert!(error.contains(word) && !error.contains('\n'), "{from} to {to}: {error}");
    }
    // The file has a tensor that the architecture does not have, such as a head.
    let error = refused(&|dir| {
        let file = std::fs::read(dir.join("model.safetensors")).unwrap();
        let tensors = safetensors::SafeTensors::deserialize(&file).unwrap();
        let mut views: Vec<_> = tensors.tensors();
        let extra = tensors.tensor("norm.weight").unwrap();
        views.push(("lm_head.weight".into(), extra));
        std::fs::write(dir.join("model.safetensors"), safetensors::serialize(views, None).unwrap()).unwrap();
    });
    assert!(error.contains("lm_head.weight") && error.contains("not part of this architecture"), "{error}");
}

/// Compares the states of the delta nets after a verify, for each number of accepted rows.
#[test]
fn rejected_rows_leave_the_reference_state() {
    let expected = crate::common::tensors(&path("verify_block.safetensors"));
    let ids = |name: &str| -> Vec<u32> { expected[name].iter().map(|id| *id as u32).collect() };
    let (prompt, block) = (ids("prompt"), ids("block"));
    let options = LoadOptions { math: CpuArithmetic::F32, threads: Some(2), verify: true, ..LoadOptions::default() };
    let mut model = load_with(&path("target"), options);
    for rows in 0..=block.len() {
        let mut state = model.start().unwrap();
        let last = model.forward(&mut state, &prompt, Rows::Last).unwrap();
        assert!(distance(&last.data, &expected["prefill_last_logits"]) < 1e-4);
        if rows > 0 {
            let logits = model.verify(&mut state, &block).unwrap();
            assert!(distance(&logits.data, &expected["verify_logits"]) < 1e-4);
            if rows < block.len() {
                state.reject(block.len() - rows).unwrap();
            }
        }
        let found = model.snapshot(&mut state).unwrap().state;
        let mut found = found.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes));
        for layer in [0, 1, 2, 4, 5, 6] {
            // Our state is [3, C]. The state of transformers is [C, 4], with one older row.
            let theirs = &expected[&format!("gdn.{layer}.conv.{rows}")];
            let conv: Vec<f32> = found.by_ref().take(3 * 128).collect();
            let theirs: Vec<f32> = (1..4).flat_map(|tap| (0..128).map(move |c| theirs[c * 4 + tap])).collect();
            // Our state is [Hv, Dv, Dk]. The state of transformers is [Hv, Dk, Dv].
            let heads: Vec<f32> = found.by_ref().take(4 * 16 * 16).collect();
            let turned = &expected[&format!("gdn.{layer}.recurrent.{rows}")];
            let at = |n: usize| turned[n / 256 * 256 + n % 16 * 16 + n / 16 % 16];
            let turned: Vec<f32> = (0..heads.len()).map(at).collect();
            let off = distance(&conv, &theirs).max(distance(&heads, &turned));
            assert!(off < 1e-4, "layer {layer} after {rows} rows: off by {off}");
        }
        // The last two words are the position of the next token, in 64 bits.
        let next = [found.next(), found.next()].map(|word| word.unwrap().to_bits());
        assert_eq!(next, [(prompt.len() + rows) as u32, 0]);
        assert_eq!(found.next(), None);
    }
}

/// One cycle of the reference's draft loop.
#[derive(serde::Deserialize)]
struct Cycle {
    start: usize,
    block: Vec<u32>,
    posterior: Vec<u32>,
    accepted: usize,
}

#[derive(serde::Deserialize)]
struct Trace {
    prompt: Vec<u32>,
    dflash_cycles: Vec<Cycle>,
    /// Cycles in which the draft is the greedy answer with three of ten tokens changed.
    scripted_cycles: Vec<Cycle>,
}

/// Checks four answers cycle by cycle: the draft from the model's own hidden rows, the verify, and the number of
/// rejected rows.
#[test]
fn every_cycle_matches_the_reference() {
    let traces: Vec<Trace> = serde_json::from_slice(&std::fs::read(path("e2e_greedy.json")).unwrap()).unwrap();
    let (mut accepted, mut cycles) = (Vec::new(), 0);
    for (trace, scripted) in traces.iter().flat_map(|trace| [(trace, false), (trace, true)]) {
        let options =
            LoadOptions { math: CpuArithmetic::F32, threads: Some(2), verify: true, ..LoadOptions::default() };
        let (mut model, mut draft, mut hidden) = (load_with(&path("target"), options), draft("draft"), Vec::new());
        model.set_taps(&HiddenTaps { layers: draft.config().taps.clone(), rows: 64 }).unwrap();
        let mut state = model.start().unwrap();
        model.forward(&mut state, &trace.prompt, Rows::None).unwrap();
        model.tapped_rows(trace.prompt.len(), &mut hidden).unwrap();
        draft.append(0, &hidden).unwrap();
        for Cycle { start, block, posterior, accepted: kept } in
            if scripted { &trace.scripted_cycles } else { &trace.dflash_cycles }
        {
            assert_eq!(draft.len(), *start);
            if !scripted {
                let masked: Vec<u32> = (0..block.len()).map(|row| if row == 0 { block[0] } else { 90 }).collect();
                let rows = draft.block(&model.embedding(&masked).unwrap()).unwrap();
                let logits = model.head_logits(&rows[64..]).unwrap();
                let drafted: Vec<u32> = logits.chunks_exact(96).map(crate::common::argmax).collect();
                assert_eq!(drafted, block[1..]);
                cycles += 1;
            } else if block.len() == 8 {
                accepted.push(*kept);
            }
            let logits = model.verify(&mut state, block).unwrap();
            assert_eq!(logits.data.chunks_exact(96).map(crate::common::argmax).collect::<Vec<_>>(), *posterior);
            model.tapped_rows(kept + 1, &mut hidden).unwrap();
            if kept + 1 < block.len() {
                state.reject(block.len() - kept - 1).unwrap();
            }
            draft.append(*start, &hidden).unwrap();
        }
    }
    assert!((0..8).all(|kept| accepted.contains(&kept)) && cycles == 39, "{accepted:?}, {cycles}");
}
