//! What the model computes, against mlx-lm: the demo model, and a small checkpoint in every encoding
//! (`tests/fixtures/make.py`). Both arithmetics, any chunk size, any number of threads, every layout of the files.

mod common;

use common::{argmax, decode, distance, load, load_with, margin, prefill, tensors};
use moestro::{
    device::Math,
    model::{Options, Qwen},
};
use std::{
    collections::HashMap,
    path::{Path, PathBuf},
};

const FIXTURES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures");
const DEMO: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/models/demo/moestro-demo");

/// How far logits may be from the reference.
fn bound(math: Math) -> f32 {
    if math == Math::F32 { 2e-4 } else { 1e-3 }
}

const MATHS: [Math; 2] = [Math::F32, Math::Integer];

#[test]
fn the_demo_answers_as_mlx_does() {
    #[derive(serde::Deserialize)]
    struct Case {
        question: String,
        prompt_ids: Vec<u32>,
        greedy_ids: Vec<u32>,
    }
    let cases: Vec<Case> =
        serde_json::from_slice(&std::fs::read(format!("{FIXTURES}/demo/greedy.json")).unwrap()).unwrap();
    let logits = tensors(Path::new(&format!("{FIXTURES}/demo/logits.safetensors")));
    assert_eq!((cases.len(), logits.len()), (8, 4));
    for math in MATHS {
        let mut model = load(Path::new(DEMO), math);
        let mut compared = 0;
        for (index, case) in cases.iter().enumerate() {
            let (prompt, mut state, _) = prefill(&model, &case.prompt_ids, 64);
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

/// A folded checkpoint: its configuration and tensors.
struct Folded {
    config: String,
    file: Vec<u8>,
}

impl Folded {
    fn read(name: &str) -> Self {
        let file = std::fs::read(format!("{FIXTURES}/micro/{name}.safetensors")).unwrap();
        let (_, header) = safetensors::SafeTensors::read_metadata(&file).unwrap();
        Self { config: header.metadata().as_ref().unwrap()["config"].clone(), file }
    }

    /// Unfolds it into a directory as converters leave it.
    fn unfold(&self) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("config.json"), &self.config).unwrap();
        std::fs::write(dir.path().join("model.safetensors"), &self.file).unwrap();
        dir
    }
}

#[test]
fn every_encoding() {
    let mut names: Vec<String> = std::fs::read_dir(format!("{FIXTURES}/micro"))
        .unwrap()
        .filter_map(|entry| {
            Some(entry.unwrap().file_name().to_str()?.strip_suffix(".expected.safetensors")?.to_string())
        })
        .collect();
    names.sort();
    assert_eq!(names.len(), 14);
    for name in names {
        let dir = Folded::read(&name).unfold();
        let expected = tensors(&PathBuf::from(format!("{FIXTURES}/micro/{name}.expected.safetensors")));
        let prompt: Vec<u32> = expected["prompt"].iter().map(|id| *id as u32).collect();
        for math in MATHS {
            let mut model = load(dir.path(), math);
            let (logits, mut state, _) = prefill(&model, &prompt, 100);
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
                    break; // From here on the sequences may differ rightly.
                }
            }
        }
    }
}

#[test]
fn chunks_and_threads_cannot_be_seen() {
    let ids: Vec<u32> = (0..150).map(|n| n * 37 % 2000 + 5).collect();
    for math in MATHS {
        let one = load(Path::new(DEMO), math);
        let (expected, mut state, routes) = prefill(&one, &ids, ids.len());
        let mut one = one;
        let after = decode(&mut one, &mut state, expected.row(ids.len() - 1), 5);
        for (chunk, threads) in [(1, 2), (7, 1), (64, 3), (149, 2), (150, 5)] {
            let options = Options { math, threads: Some(threads), ..Options::default() };
            let mut model = load_with(Path::new(DEMO), options);
            let (logits, mut state, same) = prefill(&model, &ids, chunk);
            assert!(logits.data == expected.data, "{math:?}: chunks of {chunk} on {threads} threads");
            assert!(same == routes);
            assert!(decode(&mut model, &mut state, logits.row(ids.len() - 1), 5) == after);
        }
    }
}

#[test]
fn sequences_do_not_leak_into_each_other() {
    let model = load(Path::new(DEMO), Math::Integer);
    let (a, b): (Vec<u32>, Vec<u32>) = ((10..40).collect(), (300..320).collect());
    let (alone, ..) = prefill(&model, &a, 64);
    let mut states = [model_start(&model), model_start(&model)];
    let mut rows = Vec::new();
    for (step, id) in a.iter().enumerate() {
        rows.extend(one(&model, &mut states[0], *id));
        if let Some(id) = b.get(step) {
            one(&model, &mut states[1], *id);
        }
    }
    assert!(rows == alone.data);
}

fn model_start(model: &Qwen) -> moestro::model::State {
    moestro::model::Model::start(model).unwrap()
}

fn one(model: &Qwen, state: &mut moestro::model::State, id: u32) -> Vec<f32> {
    model.forward_observed(state, &[id], moestro::model::Rows::Last, &mut |_, _| ()).unwrap().data
}

/// The same weights in Hugging Face's layouts: zero-centred norms, `[C, 1, K]` convolutions, other names, experts fused
/// or one by one. Not a bit of the logits may change.
#[test]
fn hugging_face_layouts() {
    let mlx = Folded::read("bf16");
    let ids: Vec<u32> = (0..40).map(|n| n * 7 % 96).collect();
    let dir = mlx.unfold();
    let (expected, ..) = prefill(&load(dir.path(), Math::Integer), &ids, 100);
    for fused in [true, false] {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("config.json"), &mlx.config).unwrap();
        let tensors = hugging_face(&mlx.file, fused);
        // Two shards and an index.
        let mut map = serde_json::Map::new();
        let names: Vec<&String> = tensors.keys().collect();
        for (shard, names) in names.chunks(names.len().div_ceil(2)).enumerate() {
            let file = format!("model.safetensors-0000{}-of-00002.safetensors", shard + 1);
            let views = names.iter().map(|name| (name.as_str(), tensors[*name].view()));
            let bytes = safetensors::serialize(views, None).unwrap();
            std::fs::write(dir.path().join(&file), bytes).unwrap();
            map.extend(names.iter().map(|name| (name.to_string(), file.clone().into())));
        }
        let index = serde_json::json!({ "weight_map": map }).to_string();
        std::fs::write(dir.path().join("model.safetensors.index.json"), index).unwrap();
        let (logits, ..) = prefill(&load(dir.path(), Math::Integer), &ids, 100);
        assert!(logits.data == expected.data, "fused: {fused}");
        assert_ne!(argmax(logits.row(0)), argmax(logits.row(39)));
    }
}

struct Owned {
    dtype: safetensors::Dtype,
    shape: Vec<usize>,
    data: Vec<u8>,
}

impl Owned {
    fn view(&self) -> safetensors::tensor::TensorView<'_> {
        safetensors::tensor::TensorView::new(self.dtype, self.shape.clone(), &self.data).unwrap()
    }
}

fn hugging_face(file: &[u8], fused: bool) -> HashMap<String, Owned> {
    let mlx = safetensors::SafeTensors::deserialize(file).unwrap();
    let mut tensors = HashMap::new();
    for (name, tensor) in mlx.tensors() {
        let (mut dtype, mut shape, mut data) = (tensor.dtype(), tensor.shape().to_vec(), tensor.data().to_vec());
        if name.ends_with("conv1d.weight") {
            shape = vec![shape[0], 1, shape[1]];
        }
        if name.contains("norm") && !name.contains("linear_attn.norm") {
            // `1 + w` in bf16, so `w` in f32 gives it back exactly.
            let values = data.as_chunks::<2>().0.iter().map(|pair| half::bf16::from_le_bytes(*pair).to_f32() - 1.0);
            data = values.flat_map(f32::to_le_bytes).collect();
            dtype = safetensors::Dtype::F32;
        }
        let name = name.replace("language_model.model.", "model.language_model.").replace("language_model.lm", "lm");
        if name.contains("switch_mlp") && !fused {
            let len = data.len() / shape[0];
            for (expert, data) in data.chunks(len).enumerate() {
                let name = name.replace("switch_mlp", &format!("experts.{expert}"));
                tensors.insert(name, Owned { dtype, shape: shape[1..].to_vec(), data: data.to_vec() });
            }
            continue;
        }
        tensors.insert(name, Owned { dtype, shape, data });
    }
    let gates: Vec<String> =
        tensors.keys().filter(|name| name.ends_with("switch_mlp.gate_proj.weight")).cloned().collect();
    for name in gates {
        let path = name.trim_end_matches("switch_mlp.gate_proj.weight").to_string();
        let gate = tensors.remove(&name).unwrap();
        let up = tensors.remove(&format!("{path}switch_mlp.up_proj.weight")).unwrap();
        let down = tensors.remove(&format!("{path}switch_mlp.down_proj.weight")).unwrap();
        let len = gate.data.len() / gate.shape[0];
        let pairs = gate.data.chunks(len).zip(up.data.chunks(len));
        let data = pairs.flat_map(|(gate, up)| [gate, up].concat()).collect();
        let shape = vec![gate.shape[0], 2 * gate.shape[1], gate.shape[2]];
        tensors.insert(format!("{path}experts.gate_up_proj"), Owned { dtype: gate.dtype, shape, data });
        tensors.insert(format!("{path}experts.down_proj"), down);
    }
    tensors
}
