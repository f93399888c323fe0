//! The tiny qwen4_exp checkpoint, and the results of transformers for two prompts.

pub use super::tensor_file::Tensors;
use super::{
    distance,
    fixtures::FIXTURES,
    narrow, synth_options,
    tensor_file::{self, serialized},
    write_synthetic,
};
use moestro::tools::synth::{Dimensions, StreamDimensions, SynthOptions};
use std::{
    collections::HashMap,
    path::{Path, PathBuf},
};
use test_support::files::copy_files;

/// Largest allowed difference of an intermediate result.
pub const STAGE: f32 = 2e-5;
/// Largest allowed difference of a logit.
pub const LOGIT: f32 = 2e-4;

/// A prompt, and the results of transformers for it.
pub struct Case {
    pub name: &'static str,
    pub prompt: Vec<u32>,
    pub greedy: Vec<u32>,
    pub stored: HashMap<String, Vec<f32>>,
}

pub fn dir() -> PathBuf {
    Path::new(FIXTURES).join("qwen4_exp")
}

pub fn cases() -> Vec<Case> {
    let text = std::fs::read(dir().join("refs.json")).unwrap();
    let json: serde_json::Value = serde_json::from_slice(&text).unwrap();
    let ids = |value: &serde_json::Value| serde_json::from_value::<Vec<u32>>(value.clone()).unwrap();
    let case = |name: &'static str| {
        let prompt = &json["prompts"][name];
        let stored = super::tensors(&dir().join(format!("ref_{name}.safetensors")));
        Case { name, prompt: ids(&prompt["tokens"]), greedy: ids(&prompt["greedy"]), stored }
    };
    vec![case("short"), case("long")]
}

impl Case {
    /// The prompt and the answer without its last token. These are the tokens whose rows transformers computed.
    pub fn ids(&self) -> Vec<u32> {
        [&self.prompt[..], &self.greedy[..self.greedy.len() - 1]].concat()
    }

    /// The logits that transformers computed for the rows of [`Case::ids`].
    pub fn logits(&self) -> Vec<f32> {
        let vocab = self.stored["decode_logits"].len() / self.greedy.len();
        [&self.stored["prompt_logits"][..], &self.stored["decode_logits"][vocab..]].concat()
    }
}

pub fn check(what: &str, found: &[f32], expected: &[f32], bound: f32) {
    let off = distance(found, expected);
    println!("{what}: off by {off:.1e}");
    assert!(off <= bound, "{what}: off by {off}");
}

/// Writes a synthetic model whose indexer selects blocks with `budget` positions. Its heads have 64 values, which 8-bit
/// and 4-bit keys need. Returns its directory.
pub fn synthetic(root: &Path, budget: usize) -> PathBuf {
    let real = Dimensions::of_flash_next();
    let streams = StreamDimensions {
        count: 3,
        rank: 64,
        indexer_budget: budget,
        ngram_width: 256,
        ngram_rows: 4096,
        ..real.streams.clone().unwrap()
    };
    let dimensions = Dimensions { layers: 4, streams: Some(streams), ..narrow(real) };
    write_synthetic(root, SynthOptions { eos_token_ids: vec![298, 296], ..synth_options(dimensions, 4) })
}

/// The tensors of the checkpoint without the tensors of the MTP head.
pub fn tensors() -> Tensors {
    let files = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"];
    let all = files.map(|file| tensor_file::read(&std::fs::read(dir().join(file)).unwrap()));
    all.into_iter().flatten().filter(|(name, _)| !name.starts_with("mtp.")).collect()
}

/// A checkpoint of these tensors.
pub fn written(tensors: &Tensors) -> tempfile::TempDir {
    let copy = tempfile::tempdir().unwrap();
    std::fs::write(copy.path().join("model.safetensors"), serialized(tensors)).unwrap();
    copy_files(dir(), copy.path(), &["config.json"]);
    copy
}
