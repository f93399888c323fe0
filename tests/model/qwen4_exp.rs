//! Compares qwen4_exp with transformers on a tiny checkpoint. Tests the reference and the fast pass, for every split of
//! the prompt, with and without streaming, with snapshots and rejected drafts.

pub use crate::common::qwen4_exp::{LOGIT, STAGE, Tensors, cases, check, dir, synthetic, tensors, written};

use crate::common::{self, decode, distance, forward_with_snapshots, load_with, prefill};
use candle_core::{DType, Device, Tensor};
use moestro_base::metrics::Metrics;
use moestro_compute::device::CpuArithmetic;
use moestro_engine::{self as engine, DraftPolicy, MtpDraft, Request, Sampling};
use moestro_model::{
    error::ModelError,
    model::{
        HiddenRows, HiddenStates, HiddenTaps, KvPage, LoadOptions, Model, MtpSource, Qwen, Reference, Rows,
        SequenceState, Snapshot, StoreOptions, reference::Computed,
    },
};
use safetensors::Dtype;
use std::{path::Path, sync::Arc};
use test_support::files::copy_dir;

const LAYERS: usize = 6;

pub fn values(tensor: &Tensor) -> Vec<f32> {
    tensor.flatten_all().unwrap().to_dtype(DType::F32).unwrap().to_vec1().unwrap()
}

pub fn options() -> LoadOptions {
    LoadOptions { math: CpuArithmetic::F32, threads: Some(2), ..LoadOptions::default() }
}

pub fn load() -> Qwen {
    load_with(&dir(), options())
}

#[test]
fn reference_matches_transformers_at_every_stage() {
    for case in cases() {
        for precision in [DType::F32, DType::F64] {
            let reference = Reference::open(&dir(), Device::Cpu, precision).unwrap();
            let Computed { logits, residuals, routes, stages } = reference.forward(&case.ids()).unwrap();
            let what = |stage: &str| format!("{} {precision:?} {stage}", case.name);
            check(&what("logits"), &values(&logits), &case.logits(), LOGIT);
            let mut compared = 0;
            for layer in 0..LAYERS {
                let name = format!("layer{layer}.R");
                let found = values(&residuals[layer]);
                let (prompt, answer) = found.split_at(case.stored[&name].len());
                check(&what(&name), prompt, &case.stored[&name], STAGE);
                if let Some(expected) = case.stored.get(&format!("decode.{name}")) {
                    check(&what(&name), answer, expected, STAGE);
                }
                for stage in ["mixer_out", "moe_out", "ple_out", "ple_rows", "qsa_blocks"] {
                    let name = format!("layer{layer}.{stage}");
                    let (Some(found), Some(expected)) = (stages.get(&name), case.stored.get(&name)) else { continue };
                    let found = values(found);
                    // `ple_rows` and `qsa_blocks` are row numbers and block numbers, so they must be equal.
                    check(
                        &what(&name),
                        &found[..expected.len()],
                        expected,
                        if stage.ends_with("out") { STAGE } else { 0.0 },
                    );
                    if let Some(expected) = case.stored.get(&format!("decode.{name}")) {
                        check(&what(&name), &found[found.len() - expected.len()..], expected, 0.0);
                    }
                    compared += 1;
                }
                let expected = &case.stored[&format!("layer{layer}.router_idx")];
                for (token, (found, expected)) in routes[layer].iter().zip(expected.chunks(10)).enumerate() {
                    let expected: Vec<u32> = expected.iter().map(|id| *id as u32).collect();
                    assert_eq!(sorted(found), sorted(&expected), "{} layer {layer}, token {token}", case.name);
                }
            }
            assert_eq!(compared, if case.name == "short" { 2 * LAYERS + 4 } else { 3 });
        }
    }
}

fn sorted(ids: &[u32]) -> Vec<u32> {
    let mut ids = ids.to_vec();
    ids.sort_unstable();
    ids
}

#[test]
fn fast_pass_matches_transformers_in_every_layer() {
    for case in cases() {
        let mut model = load();
        model.set_taps(&HiddenTaps { layers: (0..LAYERS).collect(), rows: 128 }).unwrap();
        let ids = case.ids();
        let mut state = model.start().unwrap();
        let logits = model.forward(&mut state, &ids, Rows::All).unwrap();
        check(case.name, &logits.data, &case.logits(), LOGIT);
        let (mut rows, width) = (Vec::new(), 256);
        model.tapped_rows(ids.len(), &mut rows).unwrap();
        for layer in 0..LAYERS {
            let expected = &case.stored[&format!("layer{layer}.R")];
            let found: Vec<f32> =
                rows.chunks(LAYERS * width).flat_map(|row| row[layer * width..][..width].to_vec()).collect();
            check(&format!("{} layer {layer}", case.name), &found[..expected.len()], expected, STAGE);
        }
    }
}

#[test]
fn greedy_answer_matches_transformers() {
    for case in cases() {
        let mut model = load();
        let (logits, mut state, routes) = prefill(&mut model, &case.prompt, 1024);
        check(case.name, &logits.data, &case.stored["prompt_logits"], LOGIT);
        for (layer, routes) in routes.iter().enumerate() {
            let expected = &case.stored[&format!("layer{layer}.router_idx")];
            for (found, expected) in routes.ids.chunks(10).zip(expected.chunks(10)) {
                let expected: Vec<u32> = expected.iter().map(|id| *id as u32).collect();
                assert_eq!(sorted(found), sorted(&expected), "{} layer {layer}", case.name);
            }
        }
        let last = logits.row(logits.rows() - 1);
        let (ids, rows) = decode(&mut model, &mut state, last, case.greedy.len());
        assert_eq!(ids, case.greedy, "{}", case.name);
        check(case.name, &rows, &case.stored["decode_logits"], LOGIT);
    }
}

#[test]
fn logits_ignore_chunks_threads_and_slots() {
    for case in cases() {
        let ids = case.ids();
        let (expected, ..) = prefill(&mut load(), &ids, ids.len());
        for (chunk, threads, slots) in
            [(1, 2, None), (3, 1, None), (7, 3, Some(60)), (20, 2, Some(60)), (1, 1, Some(60))]
        {
            let store = StoreOptions { slots, ..StoreOptions::default() };
            let mut model = load_with(&dir(), LoadOptions { threads: Some(threads), store, ..options() });
            // At least 60 slots are needed: 10 experts per token in each of 6 layers.
            assert_eq!(model.store().unwrap().slots(), slots.unwrap_or(96));
            let (logits, ..) = prefill(&mut model, &ids, chunk);
            assert!(logits.data == expected.data, "{}: chunks of {chunk}, {slots:?} slots", case.name);
        }
    }
}

#[test]
fn snapshots_restore_everywhere() {
    for case in cases() {
        let ids = case.ids();
        let mut model = load();
        let mut state = model.start().unwrap();
        // Take snapshots at every position within a block, also at the start, where the rings of the last rows are not
        // full.
        let marks: Vec<usize> = (1..ids.len()).step_by(3).collect();
        let (expected, snapshots) = forward_with_snapshots(&mut model, &mut state, &ids, Rows::All, &marks);
        for (at, snapshot) in marks.into_iter().zip(snapshots) {
            // Restore into a new sequence, and into a sequence that has computed other tokens.
            for reuse in [false, true] {
                let reuse = reuse.then(|| {
                    let mut other = model.start().unwrap();
                    model.forward(&mut other, &ids[5..], Rows::None).unwrap();
                    other
                });
                let mut restored = model.restore(&snapshot, reuse).unwrap();
                let own = model.snapshot(&mut restored).unwrap();
                assert!(own.state == snapshot.state, "{} at {at}", case.name);
                let rest = model.forward(&mut restored, &ids[at..], Rows::All).unwrap();
                assert!(rest.data[..] == expected.data[at * expected.vocab..], "{} at {at}", case.name);
            }
        }
    }
}

/// Rejects drafts at every position. The drafts complete (close) blocks, and rejecting the drafts opens the blocks
/// again.
#[test]
fn rejected_drafts_leave_no_trace() {
    for case in cases() {
        let ids = case.ids();
        let mut model = load();
        let (expected, ..) = prefill(&mut model, &ids, ids.len());
        let mut state = model.start().unwrap();
        let (mut at, mut round) = (0, 0);
        while at < ids.len() {
            let kept = (round % 3 + 1).min(ids.len() - at);
            let draft: Vec<u32> = (0..5).map(|n| (n * 7 + at as u32) % 300).collect();
            let rows = [&ids[at..at + kept], &draft[..]].concat();
            let logits = model.verify(&mut state, &rows).unwrap();
            let (found, vocab) = (&logits.data[..kept * expected.vocab], expected.vocab);
            assert!(found == &expected.data[at * vocab..][..kept * vocab], "{} at {at}", case.name);
            state.reject(draft.len()).unwrap();
            (at, round) = (at + kept, round + 1);
        }
    }
}

/// A copy of the checkpoint with another configuration.
pub fn edited(edit: impl Fn(&mut serde_json::Value)) -> tempfile::TempDir {
    let copy = tempfile::tempdir().unwrap();
    copy_dir(dir(), copy.path());
    let mut json = serde_json::from_slice(&std::fs::read(dir().join("config.json")).unwrap()).unwrap();
    edit(&mut json);
    std::fs::write(copy.path().join("config.json"), json.to_string()).unwrap();
    copy
}

fn refusal(dir: &Path, options: &LoadOptions) -> String {
    let metrics = moestro_base::metrics::Metrics::new("test", "cpu");
    let loaded: Result<Qwen, ModelError> = Qwen::load(dir, options, &metrics, &mut |_, _| ());
    loaded.err().unwrap().to_string()
}

#[test]
fn wrong_hash_constants_are_refused() {
    for (key, value, word) in
        [("seed", 0, "layer_multipliers"), ("ngram_vocab_size_base", 60, "ngram_heads_vocab_sizes")]
    {
        let copy = edited(|json| json["text_config"][key] = value.into());
        let error = refusal(copy.path(), &options());
        assert!(error.contains(word), "{key}: {error}");
    }
}

/// Checks that wrong values in the configuration change the logits. The values are the function of the output gate, the
/// end-of-text token that cuts n-grams, the indexer's budget, and the normalisation of the experts' weights.
#[test]
fn configured_mistakes_change_the_logits() {
    let case = &cases()[1];
    let edits: [(&str, serde_json::Value); 4] = [
        ("output_gate_type", "silu".into()),
        ("eos_token_id", 301.into()),
        ("indexer_budget", 4096.into()),
        ("norm_topk_prob", false.into()),
    ];
    for (key, value) in edits {
        let copy = edited(|json| json["text_config"][key] = value.clone());
        let (logits, ..) = prefill(&mut load_with(copy.path(), options()), &case.prompt, 1024);
        let off = distance(&logits.data, &case.stored["prompt_logits"]);
        assert!(off > 0.1, "{key}: off by {off}");
    }
}

/// Compares the logits of the MTP head, token by token and with a whole prompt in one call. Then compares the logits of
/// drafts, for which the head's input is its own previous output.
#[test]
fn mtp_head_matches_transformers() {
    for case in cases() {
        let mut model = load_with(&dir(), LoadOptions { drafter: MtpSource::Checkpoint, ..options() });
        model.set_taps(&HiddenTaps { layers: vec![LAYERS - 1], rows: 128 }).unwrap();
        let (tokens, mut state, mut rows) = (case.prompt.len(), model.start().unwrap(), Vec::new());
        model.forward(&mut state, &case.prompt, Rows::None).unwrap();
        model.tapped_rows(tokens, &mut rows).unwrap();
        let next = [&case.prompt[1..], &case.greedy[..1]].concat();
        let (width, stored) = (rows.len() / tokens, &case.stored["mtp.logits"]);
        let vocab = case.stored["decode_logits"].len() / case.greedy.len();
        let first = tokens - stored.len() / vocab;
        for (token, id) in next.iter().enumerate() {
            let predicted = model.mtp(token, &[*id], HiddenRows::OfModel(&rows[token * width..][..width])).unwrap();
            if token >= first {
                let what = format!("{} MTP after token {token}", case.name);
                check(&what, &predicted.logits, &stored[(token - first) * vocab..][..vocab], LOGIT);
            }
        }
        let mut predicted = model.mtp(0, &next, HiddenRows::OfModel(&rows)).unwrap();
        for (step, expected) in case.stored["mtp.draft_logits"].chunks(vocab).enumerate() {
            check(&format!("{} draft {step}", case.name), &predicted.logits, expected, LOGIT);
            let id = common::argmax(&predicted.logits);
            predicted = model.mtp(tokens + step, &[id], HiddenRows::OfHead(&predicted.hidden)).unwrap();
        }
    }
}

fn is_norm(name: &str) -> bool {
    name.contains("norm") && !name.contains("linear_attn.norm")
}

/// `1 + w` of a bf16 tensor, in f32.
fn plus_one(data: &[u8]) -> Vec<u8> {
    let halves = data.as_chunks::<2>().0.iter();
    halves.flat_map(|half| (half::bf16::from_le_bytes(*half).to_f32() + 1.0).to_le_bytes()).collect()
}

/// The same weights as MLX's converters write them: with other names, `1 + w` in norms, `[C, K, 1]` convolutions, and
/// experts in three stacks.
fn mlx(tensors: Tensors) -> Tensors {
    let mut all = Tensors::new();
    for (name, (mut dtype, mut shape, mut data)) in tensors {
        if is_norm(&name) {
            (dtype, data) = (Dtype::F32, plus_one(&data));
        }
        if name.ends_with("conv1d.weight") {
            shape = vec![shape[0], shape[2], 1];
        }
        let name = name.replace("model.language_model.", "language_model.model.").replace(".shard_", ".shards.");
        let name = if name.starts_with("lm_head") { format!("language_model.{name}") } else { name };
        if let Some(mlp) = name.strip_suffix("experts.gate_up_proj") {
            let half = data.len() / shape[0] / 2;
            for (part, at) in [("gate", 0), ("up", 1)] {
                let data = data.chunks(half).skip(at).step_by(2).flatten().copied().collect();
                let shape = vec![shape[0], shape[1] / 2, shape[2]];
                all.insert(format!("{mlp}switch_mlp.{part}_proj.weight"), (dtype, shape, data));
            }
            continue;
        }
        let name = match name.strip_suffix("experts.down_proj") {
            Some(mlp) => format!("{mlp}switch_mlp.down_proj.weight"),
            None => name,
        };
        all.insert(name, (dtype, shape, data));
    }
    all
}

#[test]
fn mlx_layout_gives_same_logits() {
    let case = &cases()[1];
    let (expected, ..) = prefill(&mut load(), &case.prompt, 1024);
    let copy = written(&mlx(tensors()));
    let (found, ..) = prefill(&mut load_with(copy.path(), options()), &case.prompt, 1024);
    assert!(found.data == expected.data);
}

#[test]
fn mixed_norm_encodings_are_refused() {
    let mut mixed = mlx(tensors());
    for (name, (dtype, shape, data)) in tensors() {
        if is_norm(&name) && name.contains("mlp_hyper_connection") {
            mixed.insert(name.replace("model.language_model.", "language_model.model."), (dtype, shape, data));
        }
    }
    let error = refusal(written(&mixed).path(), &options());
    assert!(error.contains("w or 1 + w"), "{error}");
}

/// The norms of a model in Hugging Face's layout store `w`, also if their mean is 1.2, as if they stored `1 + w`.
#[test]
fn large_hugging_face_norms_are_zero_centred() {
    let mut large = tensors();
    for (name, (_, _, data)) in &mut large {
        if is_norm(name) && name.contains("hyper_connection") {
            let values = plus_one(data);
            let values = values.as_chunks::<4>().0.iter().map(|word| half::bf16::from_f32(f32::from_le_bytes(*word)));
            *data = values.flat_map(half::bf16::to_le_bytes).collect();
        }
    }
    let logits = |tensors: &Tensors| {
        let copy = written(tensors);
        prefill(&mut load_with(copy.path(), options()), &cases()[1].prompt, 1024).0.data
    };
    assert!(logits(&large) == logits(&mlx(large)));
}

/// Copies of the pages of a snapshot.
fn copied(model: &mut Qwen, snapshot: &Snapshot) -> Vec<Arc<KvPage>> {
    snapshot.pages.iter().map(|page| Arc::new(model.read_page(page).unwrap().into())).collect()
}

/// Blocks of 3 positions cross the boundary of a page, at position 256. A block that starts in a full page closes in the
/// next page, and may close again after drafts were rejected.
#[test]
fn blocks_cross_pages() {
    let copy = edited(|json| {
        json["text_config"]["indexer_compress_ratio"] = 3.into();
        json["text_config"]["indexer_budget"] = 12.into();
    });
    let ids: Vec<u32> = (0..300u32).map(|n| (n * n * 37 + n * 11 + 5) % 300).collect();
    let reference = Reference::open(copy.path(), Device::Cpu, DType::F64).unwrap().forward(&ids).unwrap();
    let mut model = load_with(copy.path(), options());
    let (mut state, marks) = (model.start().unwrap(), [254, 255, 256, 257, 258]);
    let (expected, snapshots) = forward_with_snapshots(&mut model, &mut state, &ids, Rows::All, &marks);
    check("blocks of 3", &expected.data, &values(&reference.logits), LOGIT);
    for chunk in [1, 100] {
        assert!(prefill(&mut model, &ids, chunk).0.data == expected.data, "chunks of {chunk}");
    }
    for (at, snapshot) in marks.into_iter().zip(snapshots) {
        let pages = copied(&mut model, &snapshot);
        let mut state = model.restore(&Snapshot { pages, ..snapshot }, None).unwrap();
        let draft = [&ids[at..at + 1], &[7, 8, 9, 10][..]].concat();
        model.verify(&mut state, &draft).unwrap();
        state.reject(4).unwrap();
        let rest = model.forward(&mut state, &ids[at + 1..], Rows::All).unwrap();
        assert!(rest.data[..] == expected.data[(at + 1) * expected.vocab..], "restored at {at}");
    }
}

/// With forced drafts of the MTP head, the engine gives the same answers as plain decoding.
#[test]
fn engine_with_mtp_drafts_keeps_answers() {
    let case = &cases()[1];
    for slots in [None, Some(60)] {
        let store = StoreOptions { slots, ..StoreOptions::default() };
        let with_head = LoadOptions { drafter: MtpSource::Checkpoint, verify: true, store, ..options() };
        let model = load_with(&dir(), with_head);
        let draft = MtpDraft::new(&model).unwrap();
        let options = engine::Options { speculate: DraftPolicy::Force, draft_tokens: 3, ..engine::Options::default() };
        let metrics = Metrics::new("test", "cpu");
        let (handle, _) = engine::spawn_with(model, Box::new(draft), options, metrics).unwrap();
        // The second prompt extends the first. The third is a prefix of the first.
        for prompt in [case.prompt.clone(), case.ids()[..90].to_vec(), case.prompt[..30].to_vec()] {
            let (found, end) = common::ask(&handle, Request::new(prompt.clone(), 40, Sampling::greedy()));
            assert!(end.unwrap().1.drafted_tokens > 0);
            let mut plain = load();
            let (logits, mut state, _) = prefill(&mut plain, &prompt, 1024);
            let (expected, _) = decode(&mut plain, &mut state, logits.row(logits.rows() - 1), 40);
            assert_eq!(found, expected, "{} tokens, {slots:?} slots", prompt.len());
        }
    }
}

/// A synthetic model with the released model's indexer, below and above the indexer's budget of 2,051 positions. Up to
/// this budget, a query attends to all positions. Chunks start and end before, at and after the budget.
#[test]
fn synthetic_model_matches_reference_across_budget() {
    let root = tempfile::tempdir().unwrap();
    let out = synthetic(root.path(), 2048);
    let ids: Vec<u32> = (0..2100u32).map(|n| (n * n * 37 + n * 11 + 5) % 300).collect();
    let reference = Reference::open(&out, Device::Cpu, DType::F64).unwrap().forward(&ids).unwrap();
    let expected = values(&reference.logits);
    let load = |plan_context| {
        let mut options = LoadOptions { math: CpuArithmetic::F32, threads: Some(2), ..LoadOptions::default() };
        options.plan.context = Some(plan_context);
        load_with(&out, options)
    };
    let (found, ..) = prefill(&mut load(2304), &ids, ids.len());
    check("2100 tokens", &found.data, &expected, LOGIT);
    // Take a snapshot after eight pages. The snapshot's pages are copies, like the pages of snapshots from disk.
    let (mut model, at) = (load(2304), 2053);
    let mut state = model.start().unwrap();
    let (_, snapshots) = forward_with_snapshots(&mut model, &mut state, &ids[..2060], Rows::None, &[at]);
    let pages = copied(&mut model, &snapshots[0]);
    drop(state);
    let mut restored = model.restore(&Snapshot { pages, ..snapshots[0].clone() }, None).unwrap();
    let rest = model.forward(&mut restored, &ids[at..], Rows::All).unwrap();
    assert!(rest.data[..] == found.data[at * found.vocab..]);
    for chunk in [2048, 700] {
        assert!(prefill(&mut load(2304), &ids, chunk).0.data == found.data, "chunks of {chunk}");
    }
}
