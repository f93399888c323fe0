//! Damaged checkpoints: every error message says in one sentence what failed, in which file or tensor, and why.

use crate::{
    common::{fixtures::DEMO, load_error, tensor_file::Tensors},
    quantizations,
};
use moestro_base::metrics::Metrics;
use moestro_model::model::{LoadOptions, Qwen};
use safetensors::Dtype;
use std::path::Path;

const BF16: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/micro/affine4.safetensors");

fn refusal(damage: impl FnOnce(&mut Tensors, &mut serde_json::Value)) -> String {
    quantizations::refusal("affine4", damage)
}

fn says(error: &str, words: &[&str]) {
    for word in words {
        assert!(error.contains(word), "{word:?} is not in: {error}");
    }
}

#[test]
fn extra_tensor_is_refused() {
    let error = refusal(|tensors, _| {
        tensors.insert("language_model.model.layers.0.mlp.router_bias".into(), (Dtype::F32, vec![1], vec![0; 4]));
    });
    says(&error, &["router_bias", "model.safetensors", "not part of this architecture"]);
}

#[test]
fn missing_tensor_is_refused() {
    let error = refusal(|tensors, _| {
        tensors.remove("language_model.model.layers.1.self_attn.k_proj.weight");
    });
    says(&error, &["layers.1.self_attn.k_proj.weight", "missing"]);
    let error = refusal(|tensors, _| {
        tensors.remove("language_model.model.layers.1.self_attn.k_proj.biases");
    });
    says(&error, &["k_proj.biases", "missing"]);
}

#[test]
fn wrong_shape_is_refused() {
    let error = refusal(|tensors, _| {
        let name = "language_model.model.layers.0.linear_attn.dt_bias";
        tensors.insert(name.into(), (Dtype::F32, vec![3], vec![0; 12]));
    });
    says(&error, &["dt_bias", "model.safetensors", "expected 2 floats", "found F32 [3]"]);
    let error = refusal(|_, config| config["text_config"]["moe_intermediate_size"] = 128.into());
    says(&error, &["switch_mlp.gate_proj.weight", "expected packed codes for [3, 128, 128]", "found U32 [3, 64, 16]"]);
}

#[test]
fn wrong_type_is_refused() {
    let error = refusal(|tensors, _| {
        let name = "language_model.model.norm.weight";
        tensors.insert(name.into(), (Dtype::I32, vec![128], vec![0; 512]));
    });
    says(&error, &["norm.weight", "expected 128 floats", "found I32 [128]"]);
}

#[test]
fn unsupported_model_is_refused() {
    let error = refusal(|_, config| config["text_config"]["rope_parameters"]["type"] = "yarn".into());
    says(&error, &["rope type yarn is not supported"]);
    let error = refusal(|_, config| config["text_config"]["model_type"] = "llama".into());
    says(&error, &["model_type llama is not supported"]);
}

#[test]
fn missing_checkpoint_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    says(&load_error(dir.path()), &["config.json"]);
    let error = Qwen::load(
        Path::new(BF16),
        &LoadOptions { experts_per_token: Some(3), ..LoadOptions::default() },
        &Metrics::new("test", "cpu"),
        &mut |_, _| (),
    );
    assert!(error.is_err());
}

#[test]
fn experts_per_token_has_bounds() {
    for (wanted, good) in [(0, false), (1, true), (4, true), (5, false)] {
        let options = LoadOptions { experts_per_token: Some(wanted), ..LoadOptions::default() };
        let loaded = Qwen::load(Path::new(DEMO), &options, &Metrics::new("test", "cpu"), &mut |_, _| ());
        assert_eq!(loaded.is_ok(), good, "{wanted}");
    }
}
