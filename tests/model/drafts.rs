//! Tests MTP heads and draft models: their acceptance matches the reference, they do not change answers, and they load
//! from every layout that converters write.

use crate::common::{
    argmax,
    fixtures::{self, DEMO},
    load_with,
    tensor_file::{self, Tensors, serialized},
};
use moestro_base::metrics::Metrics;
use moestro_engine::{self as engine, Draft, DraftPolicy, ModelDraft, MtpDraft, Request, Sampling, Timings};
use moestro_model::model::{HiddenRows, HiddenStates, HiddenTaps, LoadOptions, Model, MtpSource, Qwen, Rows};
use safetensors::Dtype;
use std::path::{Path, PathBuf};
use test_support::files::{copy_dir, copy_files};

const HEAD: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/drafts/mtp.safetensors");
const SMALL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/drafts/model");

/// A copy of the demo model without an MTP head.
fn demo(at: &Path) -> PathBuf {
    let dir = at.join("demo");
    copy_dir(DEMO, &dir);
    dir
}

fn with_head(at: &Path) -> PathBuf {
    let dir = demo(at);
    std::fs::copy(HEAD, dir.join("mtp.safetensors")).unwrap();
    dir
}

fn options(drafter: MtpSource) -> LoadOptions {
    LoadOptions { threads: Some(2), verify: true, drafter, ..LoadOptions::default() }
}

struct Answer {
    ids: Vec<u32>,
    timings: Timings,
    /// Number of passes that verified a draft.
    cycles: u64,
}

/// Answers the prompts one after another.
fn answers(
    model: Qwen,
    draft: Option<Box<dyn Draft<Qwen>>>,
    width: usize,
    prompts: &[Vec<u32>],
    tokens: usize,
    sampling: &Sampling,
) -> Vec<Answer> {
    let options = engine::Options {
        eos: vec![2040, 2038],
        speculate: if draft.is_some() { DraftPolicy::Force } else { DraftPolicy::Off },
        draft_tokens: width,
        ..engine::Options::default()
    };
    let draft = draft.unwrap_or_else(|| Box::new(engine::LookupDraft));
    let (kind, metrics) = (draft.kind().name(), Metrics::new("test", "cpu"));
    let (handle, worker) = engine::spawn_with(model, draft, options, metrics.clone()).unwrap();
    let mut cycles = 0;
    let answer = |ids: &Vec<u32>| {
        let (generated, end) = crate::common::ask(&handle, Request::new(ids.clone(), tokens, sampling.clone()));
        let timings = end.unwrap().1;
        let before = std::mem::replace(&mut cycles, metrics.draft_cycles.with_label_values(&[kind]).get());
        Answer { ids: generated, timings, cycles: cycles - before }
    };
    let answers = prompts.iter().map(answer).collect();
    drop(handle);
    worker.join().unwrap();
    answers
}

fn mtp(model: &Qwen) -> Option<Box<dyn Draft<Qwen>>> {
    Some(Box::new(MtpDraft::new(model).expect("the model has a head")))
}

/// Returns the numbers of cycles, drafted and accepted tokens over the golden prompts. Asserts that the answers equal
/// those of mlx-lm.
fn acceptance(model: Qwen, draft: Option<Box<dyn Draft<Qwen>>>, width: usize) -> [u64; 3] {
    let (cases, _) = fixtures::demo();
    let prompts: Vec<_> = cases.iter().map(|case| case.prompt_ids.clone()).collect();
    let answers = answers(model, draft, width, &prompts, 110, &Sampling::greedy());
    let mut counts = [0; 3];
    for (case, answer) in cases.iter().zip(&answers) {
        let both = answer.ids.len().min(case.greedy_ids.len());
        assert_eq!(answer.ids[..both], case.greedy_ids[..both], "{}", case.question);
        let Timings { drafted_tokens, accepted_tokens, .. } = answer.timings;
        let here = [answer.cycles, drafted_tokens as u64, accepted_tokens as u64];
        counts.iter_mut().zip(here).for_each(|(count, here)| *count += here);
    }
    println!("cycles, drafted, accepted: {counts:?}");
    counts
}

/// Numbers of cycles, drafted and accepted tokens of an MTP head with drafts of `width` tokens, counted without the
/// engine. `answer` has at most `max` tokens. The head evaluates the whole sequence again for each draft. The last of
/// `max` tokens is never drafted, and tokens that are drafted after the end of the answer do not count.
pub fn count_drafts(model: &mut Qwen, prompt: &[u32], answer: &[u32], [width, max]: [usize; 2]) -> [u64; 3] {
    model.set_taps(&HiddenTaps { layers: vec![model.config().layers - 1], rows: 256 }).unwrap();
    let (mut counts, mut at) = ([0; 3], 0);
    while at + 1 < answer.len() {
        let ids = [prompt, &answer[..at]].concat();
        let width = width.min(max - at - 2);
        let (mut state, mut rows, mut draft) = (model.start().unwrap(), Vec::new(), Vec::new());
        model.forward(&mut state, &ids, Rows::None).unwrap();
        model.tapped_rows(ids.len(), &mut rows).unwrap();
        let next = [&ids[1..], &answer[at..at + 1]].concat();
        let mut predicted = model.mtp(0, &next, HiddenRows::OfModel(&rows)).unwrap();
        for step in 0..width {
            draft.push(argmax(&predicted.logits));
            predicted = model.mtp(ids.len() + step, &draft[step..], HiddenRows::OfHead(&predicted.hidden)).unwrap();
        }
        let accepted = draft.iter().zip(&answer[at + 1..]).take_while(|(drafted, id)| drafted == id).count();
        let ends = at + 1 + accepted == answer.len();
        let here = [usize::from(width > 0), if ends { accepted } else { width }, accepted];
        counts.iter_mut().zip(here).for_each(|(count, here)| *count += here as u64);
        at += accepted + 1;
    }
    counts
}

/// The counts of [`count_drafts`] over the golden prompts with the demo's head.
fn counts_of_plain_loop(dir: &Path) -> [u64; 3] {
    let mut model = load_with(dir, options(MtpSource::Checkpoint));
    let (cases, _) = fixtures::demo();
    let each = cases.iter().map(|case| count_drafts(&mut model, &case.prompt_ids, &case.greedy_ids, [2, 110]));
    each.fold([0; 3], |sum, each| std::array::from_fn(|at| sum[at] + each[at]))
}

#[test]
fn mtp_head_matches_reference_acceptance() {
    let dir = tempfile::tempdir().unwrap();
    let model = load_with(&with_head(dir.path()), options(MtpSource::Checkpoint));
    assert!(model.plan().draft > 3 << 20, "{:?}", model.plan());
    let draft = mtp(&model);
    assert_eq!(acceptance(model, draft, 2), counts_of_plain_loop(&dir.path().join("demo")));
}

fn small() -> Option<Box<dyn Draft<Qwen>>> {
    Some(Box::new(ModelDraft::new(load_with(Path::new(SMALL), options(MtpSource::None)))))
}

#[test]
fn draft_model_matches_reference_acceptance() {
    let [cycles, _, accepted] = acceptance(load_with(Path::new(DEMO), options(MtpSource::None)), small(), 4);
    assert!(accepted as f64 / cycles as f64 >= 3.6);
}

#[test]
fn draft_model_with_other_tokens_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    copy_files(SMALL, dir.path(), &["config.json", "model.safetensors"]);
    let ask = |vocabulary: &str| {
        std::fs::write(dir.path().join("tokenizer.json"), vocabulary).unwrap();
        let mut generate = crate::program::moestro(dir.path());
        generate.args(["generate", "-p", "What is 12+7?", "--speculation", "force", "--draft-model"]).arg(dir.path());
        let output = generate.output().unwrap();
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        (output.status.code(), text(&output.stdout), text(&output.stderr))
    };
    let whole = std::fs::read_to_string(Path::new(DEMO).join("tokenizer.json")).unwrap();
    let (code, output, log) = ask(&whole);
    assert_eq!(code, Some(0), "{log}");
    assert!(output.contains("19") && log.contains("accepted"), "{output} {log}");
    // In this copy of the tokenizer, two tokens are swapped.
    let mut json: serde_json::Value = serde_json::from_str(&whole).unwrap();
    let vocab = json["model"]["vocab"].as_object_mut().unwrap();
    let at = |vocab: &serde_json::Map<String, serde_json::Value>, id| {
        vocab.iter().find(|(_, found)| **found == id).unwrap().0.clone()
    };
    let (one, other) = (at(vocab, 900), at(vocab, 901));
    vocab.insert(one, 901.into());
    vocab.insert(other, 900.into());
    let (code, _, log) = ask(&json.to_string());
    assert_eq!(code, Some(2), "{log}");
    assert!(log.contains("its tokens differ from the model's: token 900 is "), "{log}");
}

fn head() -> Tensors {
    tensor_file::read(&std::fs::read(HEAD).unwrap())
}

fn write(tensors: &Tensors, path: &Path) {
    std::fs::write(path, serialized(tensors)).unwrap();
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks::<2>().0.iter().map(|half| half::bf16::from_le_bytes(*half).to_f32()).collect()
}

/// Converts the head to Hugging Face's layout. Norms store `w - 1`, in 32 bits so that no value is rounded. If
/// `numbered`, each expert has its own tensors. Otherwise gate and up are fused.
fn hugging_face(head: Tensors, numbered: bool) -> Tensors {
    let mut out = Tensors::new();
    let stack = |name: &str| &head[&format!("mtp.layers.0.mlp.switch_mlp.{name}_proj.weight")];
    let (gate, up, down) = (stack("gate"), stack("up"), stack("down"));
    let (experts, each) = (gate.1[0], gate.2.len() / gate.1[0]);
    for expert in 0..experts {
        let part = |from: &(Dtype, Vec<usize>, Vec<u8>)| from.2[expert * each..(expert + 1) * each].to_vec();
        let prefix = "mtp.layers.0.mlp.experts.";
        if numbered {
            for (name, from) in [("gate", gate), ("up", up), ("down", down)] {
                let tensor = (from.0, from.1[1..].to_vec(), part(from));
                out.insert(format!("{prefix}{expert}.{name}_proj.weight"), tensor);
            }
        } else {
            let shape = vec![experts, 2 * gate.1[1], gate.1[2]];
            let fused = out.entry(format!("{prefix}gate_up_proj")).or_insert((gate.0, shape, Vec::new()));
            fused.2.extend([part(gate), part(up)].concat());
            out.insert(format!("{prefix}down_proj"), down.clone());
        }
    }
    for (name, (dtype, shape, data)) in head {
        if name.contains("norm") {
            let data = floats(&data).iter().flat_map(|w| (w - 1.0).to_le_bytes()).collect();
            out.insert(name, (Dtype::F32, shape, data));
        } else if !name.contains("switch_mlp") {
            out.insert(name, (dtype, shape, data));
        }
    }
    out
}

/// Quantizes the matrices that `is_selected` selects as MLX does: affine, 8 bits, groups of 64.
fn quantized(head: Tensors, is_selected: impl Fn(&str) -> bool) -> Tensors {
    let mut out = Tensors::new();
    for (name, (dtype, shape, data)) in head {
        let Some(path) = name.strip_suffix(".weight").filter(|path| !path.contains("norm") && is_selected(path)) else {
            out.insert(name, (dtype, shape, data));
            continue;
        };
        let (mut codes, mut scales, mut biases) = (Vec::new(), Vec::new(), Vec::new());
        for group in floats(&data).chunks(64) {
            let (low, high) = group.iter().fold((f32::MAX, f32::MIN), |(low, high), x| (low.min(*x), high.max(*x)));
            let (scale, bias) = (half::bf16::from_f32((high - low) / 255.0), half::bf16::from_f32(low));
            codes.extend(group.iter().map(|x| ((x - bias.to_f32()) / scale.to_f32()).round().clamp(0.0, 255.0) as u8));
            scales.extend(scale.to_le_bytes());
            biases.extend(bias.to_le_bytes());
        }
        let side = |last: usize| [&shape[..shape.len() - 1], &[shape[shape.len() - 1] / last]].concat();
        out.insert(format!("{path}.weight"), (Dtype::U32, side(4), codes));
        out.insert(format!("{path}.scales"), (Dtype::BF16, side(64), scales));
        out.insert(format!("{path}.biases"), (Dtype::BF16, side(64), biases));
    }
    out
}

fn renamed(head: Tensors, name: impl Fn(&str) -> String) -> Tensors {
    head.into_iter().map(|(old, tensor)| (name(&old), tensor)).collect()
}

/// The head's logits after a prompt.
fn predicted(model: &mut Qwen) -> Vec<f32> {
    let ids: Vec<u32> = (0..40).map(|n| 20 + n * 31).collect();
    let mut hidden = Vec::new();
    model.set_taps(&moestro_model::model::HiddenTaps { layers: vec![7], rows: 64 }).unwrap();
    let mut state = model.start().unwrap();
    model.forward(&mut state, &ids[..39], Rows::None).unwrap();
    model.tapped_rows(39, &mut hidden).unwrap();
    model.mtp(0, &ids[1..], HiddenRows::OfModel(&hidden)).unwrap().logits
}

#[test]
fn every_layout_loads_the_same_head() {
    let root = tempfile::tempdir().unwrap();
    let mut expected: Option<Vec<f32>> = None;
    let mut compare = |what: &str, dir: &Path, drafter: MtpSource, max: f32| {
        let found = predicted(&mut load_with(dir, options(drafter)));
        let expected = expected.get_or_insert_with(|| found.clone());
        let worst = found.iter().zip(expected.iter()).fold(0f32, |worst, (a, b)| worst.max((a - b).abs()));
        assert!(worst <= max, "{what}: {worst}");
    };
    // A copy ends with its guard, so that the test fits in a small TMPDIR.
    let fresh = || {
        let at = tempfile::tempdir_in(root.path()).unwrap();
        (demo(at.path()), at)
    };
    let variants: [(&str, &str, Tensors, f32); 5] = [
        ("beside", "mtp.safetensors", head(), 0.0),
        ("prefixed", "mtp.safetensors", renamed(head(), |name| format!("language_model.{name}")), 0.0),
        ("fused", "model-mtp.safetensors", hugging_face(head(), false), 1e-4),
        ("numbered", "mtp.safetensors", hugging_face(head(), true), 1e-4),
        ("quantized", "mtp.safetensors", quantized(head(), |path| !path.ends_with(".fc")), 0.6),
    ];
    for (what, file, tensors, max) in &variants {
        let (dir, _at) = fresh();
        write(tensors, &dir.join(file));
        compare(what, &dir, MtpSource::Checkpoint, *max);
    }
    // The head is in a shard of the checkpoint, without an index.
    let (dir, at) = fresh();
    write(&head(), &dir.join("model-mtp.safetensors"));
    std::fs::remove_file(dir.join("model.safetensors.index.json")).unwrap();
    compare("shards", &dir, MtpSource::Checkpoint, 0.0);
    drop(at);
    // The head is in a separate directory, without a prefix. A second version is fully quantized.
    let (dir, _at) = fresh();
    let alone = root.path().join("alone");
    std::fs::create_dir(&alone).unwrap();
    std::fs::write(alone.join("config.json"), r#"{"model_type": "qwen3_5_mtp", "block_size": 3}"#).unwrap();
    let bare = renamed(head(), |name| name.trim_start_matches("mtp.").into());
    write(&bare, &alone.join("model.safetensors"));
    compare("alone", &dir, MtpSource::Directory(alone.clone()), 0.0);
    write(&quantized(bare, |_| true), &alone.join("model.safetensors"));
    compare("alone and quantized", &dir, MtpSource::Directory(alone), 0.6);
}

#[test]
fn unusable_head_is_skipped_or_refused() {
    let root = tempfile::tempdir().unwrap();
    let dir = demo(root.path());
    // `config.json` declares a head that is absent.
    assert!(MtpDraft::new(&load_with(&dir, options(MtpSource::Checkpoint))).is_none());
    let file = dir.join("mtp.safetensors");
    let mut strange = head();
    strange.insert("mtp.layers.0.mlp.extra.weight".into(), (Dtype::BF16, vec![2], vec![0; 4]));
    let mut missing = head();
    missing.remove("mtp.norm.weight");
    // These norm weights fit neither convention, `w` or `w - 1`.
    let mut unclear = head();
    for (name, (_, _, data)) in &mut unclear {
        if name.ends_with("_norm.weight") {
            *data = floats(data).iter().flat_map(|_| half::bf16::from_f32(0.9).to_le_bytes()).collect();
        }
    }
    for (what, tensors) in [("strange", strange), ("missing", missing), ("unclear", unclear)] {
        write(&tensors, &file);
        assert!(MtpDraft::new(&load_with(&dir, options(MtpSource::Checkpoint))).is_none(), "{what}");
        // If the user passes the directory of a head, a head that cannot be used is an error.
        let alone = root.path().join(what);
        std::fs::create_dir(&alone).unwrap();
        std::fs::write(alone.join("config.json"), r#"{"model_type": "qwen3_5_mtp"}"#).unwrap();
        std::fs::copy(&file, alone.join("model.safetensors")).unwrap();
        let options = options(MtpSource::Directory(alone));
        let metrics = Metrics::new("test", "cpu");
        assert!(Qwen::load(&dir, &options, &metrics, &mut |_, _| ()).is_err(), "{what}");
    }
    // The file ends in the middle of a tensor.
    let whole = std::fs::read(HEAD).unwrap();
    std::fs::write(&file, &whole[..whole.len() / 2]).unwrap();
    assert!(MtpDraft::new(&load_with(&dir, options(MtpSource::Checkpoint))).is_none());
}
