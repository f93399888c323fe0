//! Tests the tiny qwen4_exp checkpoints on the kernels. The logits must match transformers for every cut of the prompt,
//! with and without streaming, in half precision, with images, and with snapshots and rejected drafts. Also tests the
//! MTP head.

use crate::{
    forward::common::{
        Routes, argmax, decode, forward_with_snapshots, fp8_checkpoint, load_with, prefill,
        qwen4_exp::{cases, check, dir, synthetic},
        qwen4_images,
        sequence_mix::mix,
    },
    forward::options,
    gpu::HostGpu,
    host::Host,
    queue::move_to,
};
use moestro_compute::ops::KvBits;
use moestro_model::{
    checkpoint::pack,
    model::{
        CheckpointInfo, HiddenRows, HiddenStates, HiddenTaps, LoadOptions, Model, MtpSource, PassHooks, Qwen, Rows,
        SequenceState,
    },
    plan::Parallel,
};
use std::{collections::BTreeSet, path::Path};
use test_support::random_cases::seeds;

/// Largest difference of a logit, since keys and values have 16 bits.
const LOGIT: f32 = 2e-4;
/// Largest difference of a logit if prompts are computed in half precision.
const HALF: f32 = 2e-2;

fn on_kernels(slots: Option<usize>, half: bool, drafter: MtpSource) -> Qwen {
    let mut options = LoadOptions { gpu: Some(u64::MAX), verify: true, drafter, ..options(false) };
    options.store.slots = slots;
    let mut gpu = HostGpu::new(Host::fast());
    gpu.halves = half;
    placed(&dir(), options, gpu)
}

fn placed(dir: &Path, options: LoadOptions, gpu: HostGpu) -> Qwen {
    move_to(load_with(dir, options), gpu)
}

fn plain(slots: Option<usize>) -> Qwen {
    on_kernels(slots, false, MtpSource::None)
}

#[test]
fn answers_match_transformers() {
    for case in cases() {
        let mut model = plain(None);
        let (logits, mut state, _) = prefill(&mut model, &case.prompt, 1024);
        check(case.name, &logits.data, &case.stored["prompt_logits"], LOGIT);
        let (ids, rows) = decode(&mut model, &mut state, logits.row(logits.rows() - 1), case.greedy.len());
        assert_eq!(ids, case.greedy, "{}", case.name);
        check(case.name, &rows, &case.stored["decode_logits"], LOGIT);
    }
}

/// The second prompt is cut inside its images.
#[test]
fn answers_with_images_match_transformers() {
    for (case, chunk) in qwen4_images::cases().into_iter().zip([1024, 11]) {
        let options = LoadOptions { gpu: Some(u64::MAX), ..options(false) };
        let mut model = placed(&qwen4_images::dir(), options, HostGpu::new(Host::fast()));
        let images = case.placed(&model);
        let mut state = model.start().unwrap();
        let logits = qwen4_images::extend(&mut model, &mut state, &case.prompt, &images, chunk);
        let vocab = model.info().vocab;
        let (ids, rows) = decode(&mut model, &mut state, &logits[logits.len() - vocab..], case.greedy.len());
        assert_eq!(ids, case.greedy, "{}", case.name);
        check(case.name, &rows, &case.stored["decode_logits"], LOGIT);
    }
}

/// 60 is the minimum number of slots: 10 experts per token in each of 6 layers.
#[test]
#[ignore = "exhaustive: many cuts"]
fn logits_ignore_chunks_and_slots() {
    // The long prompt selects blocks. Each way to cut a prompt is tested with one of them.
    for (case, ways) in cases().into_iter().zip([[(1, None), (7, Some(60))], [(1, Some(60)), (20, None)]]) {
        let ids = case.ids();
        let (expected, ..) = prefill(&mut plain(None), &ids, ids.len());
        check(case.name, &expected.data, &case.logits(), LOGIT);
        for (chunk, slots) in ways {
            let (found, ..) = prefill(&mut plain(slots), &ids, chunk);
            assert!(found.data == expected.data, "{}: chunks of {chunk}, {slots:?} slots", case.name);
        }
    }
}

/// The rows of n-gram tables are read for the announced tokens. Others may come instead.
#[test]
fn announced_tokens_change_no_logit() {
    let ids = cases()[1].ids();
    let (expected, ..) = prefill(&mut plain(None), &ids, 7);
    let others: Vec<u32> = ids.iter().rev().copied().collect();
    for announced in [&ids, &others] {
        for most in [usize::MAX, 3] {
            let mut model = plain(None);
            let mut state = model.start().unwrap();
            let mut logits = Vec::new();
            for (index, chunk) in ids.chunks(7).enumerate() {
                let after = &announced[ids.len().min(index * 7 + 7)..];
                let hooks = PassHooks { following: &after[..after.len().min(most)], ..PassHooks::default() };
                logits
                    .extend_from_slice(&model.forward_with(&mut state, chunk, Rows::All, &mut { hooks }).unwrap().data);
            }
            assert!(logits == *expected.data, "at most {most} tokens announced");
        }
    }
}

/// Matrices of the trunk and packed experts in FP8.
#[test]
#[ignore = "long: four models"]
fn fp8_checkpoint_matches_its_values_in_f32() {
    let ([fp8, plain], root) = (fp8_checkpoint::written(), tempfile::tempdir().unwrap());
    let dir = root.path().join("model");
    std::fs::rename(fp8.keep(), &dir).unwrap();
    let found = CheckpointInfo::unpacked(&dir, &options(false)).unwrap();
    pack::write(&found.experts, &found.files, &dir.with_extension("pack"), &|_| ()).unwrap();
    let prompt = &cases()[0].prompt;
    let on_cpu = || prefill(&mut load_with(plain.path(), options(false)), prompt, 1024);
    let on_kernels = |slots, half| {
        let mut options = LoadOptions { gpu: Some(u64::MAX), ..options(false) };
        options.store.slots = slots;
        let mut gpu = HostGpu::new(Host::fast());
        gpu.halves = half;
        prefill(&mut placed(&dir, options, gpu), prompt, 7)
    };
    let (expected, _, routes) = on_cpu();
    for slots in [None, Some(60)] {
        check("f32", &on_kernels(slots, false).0.data, &expected.data, LOGIT);
    }
    // Half precision may choose another expert if two scores are nearly equal, which changes this row and later rows.
    let (found, _, half_routes) = on_kernels(None, true);
    let same = (0..prompt.len()).take_while(|row| experts_of(&routes, *row) == experts_of(&half_routes, *row)).count();
    assert!(same > 3, "only {same} rows have the same experts");
    check("same experts", &found.data[..same * found.vocab], &expected.data[..same * found.vocab], HALF);
    // All experts of each layer: there is no choice.
    [dir.as_path(), plain.path()].into_iter().for_each(choose_all_experts);
    check("all experts", &on_kernels(None, true).0.data, &on_cpu().0.data, HALF);
}

/// The experts of a row in each layer.
fn experts_of(routes: &[Routes], row: usize) -> Vec<BTreeSet<u32>> {
    routes.iter().map(|layer| layer.ids[row * layer.k..(row + 1) * layer.k].iter().copied().collect()).collect()
}

/// Changes the model in `dir` so that each row has all experts.
fn choose_all_experts(dir: &Path) {
    let path = dir.join("config.json");
    let mut json: serde_json::Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    let text = &mut json["text_config"];
    text["num_experts_per_tok"] = text["num_experts"].clone();
    std::fs::write(path, json.to_string()).unwrap();
}

#[test]
#[ignore = "long: whole prompts, twice"]
fn half_precision_prompts_match_transformers() {
    for case in cases() {
        let ids = case.ids();
        for chunk in [ids.len(), 33] {
            let (found, ..) = prefill(&mut on_kernels(None, true, MtpSource::None), &ids, chunk);
            check(case.name, &found.data, &case.logits(), HALF);
        }
    }
}

#[test]
#[ignore = "exhaustive: many cuts"]
fn snapshots_and_rejected_drafts_keep_logits() {
    let case = cases().swap_remove(1);
    let (ids, mut model) = (case.ids(), plain(None));
    let mut state = model.start().unwrap();
    let marks: Vec<usize> = (10..ids.len()).step_by(17).collect();
    let (expected, snapshots) = forward_with_snapshots(&mut model, &mut state, &ids, Rows::All, &marks);
    drop(state);
    for (round, (at, snapshot)) in marks.into_iter().zip(snapshots).enumerate() {
        let mut state = model.restore(&snapshot, None).unwrap();
        // The drafts complete (close) blocks of the block attention. Rejecting the drafts opens the blocks again.
        let (kept, draft) = (round % 3 + 1, [7, 14, 21, 28, 35]);
        let logits = model.verify(&mut state, &[&ids[at..at + kept], &draft[..]].concat()).unwrap();
        state.reject(draft.len()).unwrap();
        let rest = model.forward(&mut state, &ids[at + kept..], Rows::All).unwrap();
        let found = [&logits.data[..kept * logits.vocab], &rest.data[..]].concat();
        assert!(found == expected.data[at * expected.vocab..], "from {at}");
    }
}

#[test]
#[ignore = "long: whole answers"]
fn mtp_head_matches_transformers() {
    for case in cases() {
        let mut model = on_kernels(None, false, MtpSource::Checkpoint);
        model.set_taps(&HiddenTaps { layers: vec![5], rows: 128 }).unwrap();
        let (tokens, mut state, mut rows) = (case.prompt.len(), model.start().unwrap(), Vec::new());
        model.forward(&mut state, &case.prompt, Rows::None).unwrap();
        model.tapped_rows(tokens, &mut rows).unwrap();
        let next = [&case.prompt[1..], &case.greedy[..1]].concat();
        let vocab = case.stored["decode_logits"].len() / case.greedy.len();
        let mut predicted = model.mtp(0, &next, HiddenRows::OfModel(&rows)).unwrap();
        for (step, expected) in case.stored["mtp.draft_logits"].chunks(vocab).enumerate() {
            check(&format!("{} draft {step}", case.name), &predicted.logits, expected, LOGIT);
            let id = argmax(&predicted.logits);
            predicted = model.mtp(tokens + step, &[id], HiddenRows::OfHead(&predicted.hidden)).unwrap();
        }
    }
}

fn together(slots: Option<usize>, sharing: usize) -> Qwen {
    let mut options = LoadOptions { gpu: Some(u64::MAX), verify: true, ..options(false) };
    options.store.slots = slots;
    options.plan.parallel = Parallel::Count(sharing);
    placed(&dir(), options, HostGpu::new(Host::fast()))
}

/// One launch computes rows of several sequences: selection of blocks, rows of n-gram tables and residual streams.
#[test]
fn sequences_together_match_each_alone() {
    mix(&mut together(None, 12), 5, 320);
}

/// Keys and values in 8 bits: the same bytes for any cut and any other sequences, and close to those of the CPU.
#[test]
#[ignore = "long: a prompt, twice, and a mix"]
fn quantized_keys_match_cpu() {
    let root = tempfile::tempdir().unwrap();
    let model = synthetic(root.path(), 32);
    let mut options = LoadOptions { kv_bits: KvBits::Eight, verify: true, ..options(false) };
    options.plan.parallel = Parallel::Count(12);
    let ids: Vec<u32> = (0..150u32).map(|n| (n * n * 37 + n * 11 + 5) % 300).collect();
    let (expected, ..) = prefill(&mut load_with(&model, options.clone()), &ids, 1024);
    options.gpu = Some(u64::MAX);
    let mut model = placed(&model, options, HostGpu::new(Host::fast()));
    let (found, ..) = prefill(&mut model, &ids, 1024);
    check("8 bits", &found.data, &expected.data, HALF);
    assert!(prefill(&mut model, &ids, 37).0.data == found.data);
    mix(&mut model, 1, 300);
}

#[test]
#[ignore = "long: three random mixes"]
fn random_mixes_match_each_alone() {
    let mut models = [(None, 12), (Some(60), 12), (None, 4)].map(|(slots, sharing)| together(slots, sharing));
    seeds(3).for_each(|seed| mix(&mut models[seed as usize % 3], seed, 320));
}
