//! Tests speculation on the real forward pass: a verify gives the same bytes as single decode steps, rejected rows have
//! no effect, and drafts do not change an answer.

use crate::common::{fixtures::DEMO, load_with};
use moestro_base::metrics::Metrics;
use moestro_compute::experts::ReadMode;
use moestro_engine::{
    self as engine, Draft, DraftPolicy, Finish, Handle, LookupDraft, Request, Sampling, Timings, Worker,
};
use moestro_model::model::{HiddenStates, HiddenTaps, LoadOptions, Model, Qwen, QwenState, Rows, SequenceState};
use std::path::Path;
use test_support::files::copy_dir;

fn demo(slots: Option<usize>) -> Qwen {
    let mut options = LoadOptions { threads: Some(2), verify: true, ..LoadOptions::default() };
    options.store.slots = slots;
    load_with(Path::new(DEMO), options)
}

/// A prompt of `length` assorted tokens.
fn prompt(length: u32) -> Vec<u32> {
    (0..length).map(|n| 20 + (n * n * 7 + n * 3) % 1500).collect()
}

/// Appends one token and returns the logits after it.
fn one(model: &mut Qwen, state: &mut QwenState, id: u32) -> Vec<f32> {
    model.forward(state, &[id], Rows::Last).unwrap().data.to_vec()
}

#[test]
#[ignore = "exhaustive: every number of rejected drafts"]
fn verify_equals_single_steps_and_rewinds() {
    for slots in [None, Some(64)] {
        let mut model = demo(slots);
        let (prompt, rows) = (prompt(70), prompt(100)[70..86].to_vec());
        let start = |model: &mut Qwen| {
            let mut state = model.start().unwrap();
            model.forward(&mut state, &prompt, Rows::None).unwrap();
            state
        };
        let mut state = start(&mut model);
        let plain: Vec<_> = rows.iter().map(|&id| one(&mut model, &mut state, id)).collect();
        drop(state);
        for kept in 1..=rows.len() {
            let mut state = start(&mut model);
            let all = model.verify(&mut state, &rows).unwrap();
            assert_eq!(*all.data, plain.concat(), "{slots:?}");
            if kept < rows.len() {
                state.reject(rows.len() - kept).unwrap();
            }
            // Continue with other tokens: first a verify, then single steps.
            let next: Vec<u32> = (0..40).map(|n| 30 + (n * 13) % 900).collect();
            let mut other = start(&mut model);
            model.forward(&mut other, &rows[..kept], Rows::None).unwrap();
            let expected: Vec<_> = next.iter().map(|&id| one(&mut model, &mut other, id)).collect();
            let mut found = model.verify(&mut state, &next[..5]).unwrap().data.to_vec();
            state.reject(2).unwrap();
            found.truncate(3 * all.vocab);
            for &id in &next[3..] {
                found.extend(one(&mut model, &mut state, id));
            }
            assert!(found == expected.concat(), "{slots:?}: kept {kept} rows");
        }
    }
}

#[test]
fn only_rows_of_the_verify_are_removable() {
    let mut model = demo(None);
    let mut state = model.start().unwrap();
    assert!(state.reject(1).is_err());
    model.verify(&mut state, &[30, 31]).unwrap();
    assert!(state.reject(2).is_err(), "the first row is final");
    state.reject(1).unwrap();
    assert!(state.reject(1).is_err(), "a verify can be shortened once");
    assert!(model.verify(&mut state, &[30; 17]).is_err());
    assert!(model.verify(&mut state, &[]).is_err());
}

fn start(model: Qwen, draft: Box<dyn Draft<Qwen>>, speculate: DraftPolicy) -> (Handle, Worker) {
    let options = engine::Options { eos: vec![2], speculate, draft_tokens: 5, ..engine::Options::default() };
    engine::spawn_with(model, draft, options, Metrics::new("test", "cpu")).unwrap()
}

/// The tokens of an answer, and its finish reason or error.
fn ask(handle: &Handle, ids: &[u32], sampling: &Sampling) -> (Vec<u32>, Result<(Finish, Timings), String>) {
    crate::common::ask(handle, Request::new(ids.to_vec(), 60, sampling.clone()))
}

/// The answer's tokens, its finish reason, and the numbers of accepted and rejected draft tokens.
fn answer(
    slots: Option<usize>,
    speculate: DraftPolicy,
    ids: &[u32],
    sampling: &Sampling,
) -> (Vec<u32>, Finish, [usize; 2]) {
    let (handle, worker) = start(demo(slots), Box::new(LookupDraft), speculate);
    let (generated, done) = ask(&handle, ids, sampling);
    let (finish, timings) = done.unwrap();
    drop(handle);
    worker.join().unwrap();
    (generated, finish, [timings.accepted_tokens, timings.drafted_tokens - timings.accepted_tokens])
}

#[test]
fn demo_answers_equal_with_and_without_drafts() {
    let mut counts = [0, 0];
    for (length, temperature, penalty) in [(24, 0.0, 0.0), (90, 0.7, 0.0), (40, 1.3, 0.5)] {
        // The prompt repeats itself, so that prompt lookup finds drafts.
        let ids = prompt(length).repeat(2);
        let sampling = Sampling { temperature, frequency_penalty: penalty, seed: Some(5), ..Sampling::default() };
        let (plain, finish, _) = answer(None, DraftPolicy::Off, &ids, &sampling);
        for slots in [None, Some(64)] {
            let (found, end, drafted) = answer(slots, DraftPolicy::Force, &ids, &sampling);
            assert_eq!((found, end), (plain.clone(), finish), "{length} tokens at {temperature}, {slots:?}");
            counts = [counts[0] + drafted[0], counts[1] + drafted[1]];
        }
    }
    println!("accepted and rejected: {counts:?}");
    assert!(counts.iter().all(|count| *count > 0), "{counts:?}; the test needs both outcomes");
}

#[test]
fn disk_error_fails_without_wrong_tokens() {
    let dir = tempfile::tempdir().unwrap();
    copy_dir(DEMO, dir.path());
    let path = dir.path().join("model.safetensors");
    let bytes = std::fs::read(&path).unwrap();
    let (sampling, ids) = (Sampling::greedy(), prompt(30).repeat(2));
    let whole = answer(None, DraftPolicy::Off, &ids, &sampling).0;
    let mut options = LoadOptions { threads: Some(2), verify: true, ..LoadOptions::default() };
    (options.store.slots, options.store.io) = (Some(64), ReadMode::Buffered);
    let (handle, worker) = start(load_with(dir.path(), options), Box::new(LookupDraft), DraftPolicy::Force);
    assert_eq!(ask(&handle, &ids, &sampling).0, whole);
    let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
    let modified = file.metadata().unwrap().modified().unwrap();
    let mut failed = 0;
    for part in [2, 4, 8] {
        file.set_len((bytes.len() - bytes.len() / part) as u64).unwrap();
        let (generated, done) = ask(&handle, &ids, &sampling);
        assert!(generated == whole[..generated.len()] && (done.is_err() || generated == whole), "{generated:?}");
        failed += usize::from(done.is_err());
        std::fs::write(&path, &bytes).unwrap();
        file.set_modified(modified).unwrap();
        let (mut generated, mut done) = ask(&handle, &ids, &sampling);
        if done.is_err() {
            // `fs::write` truncates the file before it writes the bytes. A prefetch may have read the file in between,
            // so this answer may fail, but it must not have wrong tokens.
            assert!(generated == whole[..generated.len()], "{generated:?}");
            (generated, done) = ask(&handle, &ids, &sampling);
        }
        assert!(done.is_ok() && generated == whole, "{done:?}: bytes read meanwhile are not used");
    }
    assert!(failed > 0, "the test needs both outcomes");
    drop(handle);
    worker.join().unwrap();
}

#[test]
fn hidden_rows_do_not_depend_on_chunks() {
    let mut model = demo(None);
    model.set_taps(&HiddenTaps { layers: vec![7, 1], rows: 20 }).unwrap();
    let (ids, mut found) = (prompt(50), Vec::new());
    let mut state = model.start().unwrap();
    let mut one_by_one = Vec::new();
    for &id in &ids {
        model.forward(&mut state, &[id], Rows::None).unwrap();
        model.tapped_rows(1, &mut found).unwrap();
        assert_eq!(found.len(), 2 * 256);
        one_by_one.extend_from_slice(&found);
    }
    assert_ne!(found[..256], found[256..], "the layers differ");
    // Hidden rows are available for the last rows of a prompt, and then for the rows of a verify.
    let mut state = model.start().unwrap();
    model.forward(&mut state, &ids[..42], Rows::None).unwrap();
    model.tapped_rows(42, &mut found).unwrap();
    assert!(found == one_by_one[22 * 512..42 * 512]);
    model.verify(&mut state, &ids[42..]).unwrap();
    model.tapped_rows(3, &mut found).unwrap();
    assert!(found == one_by_one[42 * 512..45 * 512]);
    assert!(model.set_taps(&HiddenTaps { layers: vec![8], rows: 1 }).is_err(), "the model has eight layers");
}

#[test]
fn extended_verify_is_rewound_as_one() {
    let mut model = demo(None);
    let (prompt, rows) = (prompt(30), [40, 41, 42, 43, 44]);
    let mut state = model.start().unwrap();
    assert!(model.verify_on(&mut state, &[1]).is_err(), "there is no verify to extend");
    model.forward(&mut state, &prompt, Rows::None).unwrap();
    let mut plain = model.start().unwrap();
    model.forward(&mut plain, &prompt, Rows::None).unwrap();
    let expected: Vec<_> = rows.map(|id| one(&mut model, &mut plain, id)).into();
    for kept in 1..rows.len() {
        let mut state = model.start().unwrap();
        model.forward(&mut state, &prompt, Rows::None).unwrap();
        let mut found = model.verify(&mut state, &rows[..1]).unwrap().data.to_vec();
        found.extend_from_slice(&model.verify_on(&mut state, &rows[1..3]).unwrap().data);
        for id in &rows[3..] {
            found.extend_from_slice(&model.verify_on(&mut state, &[*id]).unwrap().data);
        }
        assert!(found == expected.concat());
        state.reject(rows.len() - kept).unwrap();
        let on: Vec<_> = rows[kept..].iter().map(|id| one(&mut model, &mut state, *id)).collect();
        assert!(on.concat() == expected[kept..].concat(), "kept {kept} rows");
    }
}

/// A verify has no more rows than a chunk of the prompt.
#[test]
fn small_chunks_shorten_drafts() {
    let ids = prompt(24).repeat(2);
    let plain = answer(None, DraftPolicy::Off, &ids, &Sampling::greedy());
    for chunk in 1..=3 {
        let mut options = LoadOptions { threads: Some(2), verify: true, ..LoadOptions::default() };
        options.plan.chunk = Some(chunk);
        let (handle, worker) = start(load_with(Path::new(DEMO), options), Box::new(LookupDraft), DraftPolicy::Force);
        let (found, done) = ask(&handle, &ids, &Sampling::greedy());
        assert_eq!((found, done.unwrap().0), (plain.0.clone(), plain.1), "chunks of {chunk}");
        drop(handle);
        worker.join().unwrap();
    }
}

#[test]
fn bench_compares_drafts_with_plain_decoding() {
    let home = tempfile::tempdir().unwrap();
    let mut bench = crate::program::moestro(home.path());
    bench.args(["bench", "--prompt-tokens", "40", "--gen-tokens", "30", "--repeat", "2", "--json", "--threads", "2"]);
    let output = bench
        .args([
            "--speculation",
            "force",
            "--num-draft-tokens",
            "3",
            "--draft-model",
            concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/drafts/model"),
        ])
        .output()
        .unwrap();
    let log = String::from_utf8_lossy(&output.stderr);
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{log}"));
    assert_eq!(report["draft"], "model");
    let [drafted, accepted] = ["drafted_tokens", "accepted_tokens"].map(|name| report[name].as_u64().unwrap());
    assert!(0 < accepted && accepted < drafted, "{report}");
    let places = report["places"].as_array().unwrap();
    assert_eq!(places.len(), 3);
    let right: f64 =
        places.iter().map(|place| place["tried"].as_f64().unwrap() * place["right"].as_f64().unwrap()).sum();
    assert_eq!(right.round() as u64, accepted);
}
