//! Converters write the `quantization` table in many ways, and some of these tables are wrong. The tests check that
//! matrices are read correctly or refused.

use crate::{
    common::tensor_file::{self, Tensors, serialized},
    layouts::Layout,
    program::moestro,
};
use safetensors::{Dtype, SafeTensors};
use serde_json::{Value, json};
use std::process::Output;
use test_support::{DEMO, files::copy_dir};

/// A change to a config.
type Change<'a> = dyn Fn(&mut Value) + 'a;

/// The tensors and configuration of a small checkpoint.
pub fn read(file: &[u8]) -> (Tensors, Value) {
    let (_, header) = SafeTensors::read_metadata(file).unwrap();
    let config = header.metadata().as_ref().and_then(|more| serde_json::from_str(more.get("config")?).ok());
    (tensor_file::read(file), config.unwrap_or_default())
}

pub fn micro(name: &str) -> (Tensors, Value) {
    read(&std::fs::read(format!("{}/tests/fixtures/micro/{name}.safetensors", env!("CARGO_MANIFEST_DIR"))).unwrap())
}

/// The error of loading a checkpoint after `damage` changed its tensors or configuration.
pub fn refusal(name: &str, damage: impl FnOnce(&mut Tensors, &mut Value)) -> String {
    let mut layout = Layout::of(name);
    damage(&mut layout.tensors, &mut layout.config);
    layout.refusal()
}

/// The `quantization` table with every path rewritten by `spell`.
fn spelled(config: &Value, spell: impl Fn(&str) -> String) -> Value {
    let table = config["quantization"].as_object().unwrap();
    let word = |key: &String| if key.contains('.') { spell(key) } else { key.clone() };
    table.iter().map(|(key, value)| (word(key), value.clone())).collect::<serde_json::Map<_, _>>().into()
}

#[test]
fn all_table_spellings_give_same_logits() {
    for name in ["mixed", "affine4", "mxfp4", "mxfp8", "nvfp4"] {
        let whole = Layout::of(name);
        let known = whole.logits();
        let under = |prefix: &'static str| {
            move |key: &str| format!("{prefix}{}", key.strip_prefix("language_model.model.").unwrap_or(key))
        };
        let cases: [(&str, &Change<'_>); 8] = [
            // DWQ, OptiQ and oQ write the standard table, with the names from before or after tensors were renamed.
            ("transformers' prefix", &|c| c["quantization"] = spelled(c, under("model.language_model."))),
            ("no language model", &|c| c["quantization"] = spelled(c, under("model."))),
            ("stacked experts", &|c| c["quantization"] = spelled(c, |key| key.replace("switch_mlp", "experts"))),
            ("another place", &|c| {
                let table = c["quantization"].take();
                c["text_config"]["quantization_config"] = table;
                c.as_object_mut().unwrap().remove("quantization");
            }),
            // UD-MLX writes a table that may have no entry for some matrices.
            ("no entry", &|c| {
                let table = c["quantization"].as_object().unwrap();
                let all = table.iter().filter(|(key, _)| !key.contains('.'));
                c["quantization"] = all.map(|(k, v)| (k.clone(), v.clone())).collect::<serde_json::Map<_, _>>().into();
            }),
            // JANG writes the smallest width, another group size, or no entry.
            ("JANG, two bits", &|c| c["quantization"] = json!({"bits": 2, "group_size": 32})),
            ("JANG, eight bits", &|c| c["quantization"] = json!({"bits": 8, "group_size": 128})),
            ("no table", &|c| drop(c.as_object_mut().unwrap().remove("quantization"))),
        ];
        for (what, change) in cases {
            let mut layout = whole.clone();
            change(&mut layout.config);
            assert!(layout.logits() == known, "{name}: {what}");
        }
    }
}

#[test]
fn contradictory_tables_are_refused_by_name() {
    let gate = "language_model.model.layers.0.mlp.gate";
    let error = refusal("affine4", |_, config| config["quantization"][gate] = json!({"mode": "mxfp8"}));
    assert!(error.contains("layers.0.mlp.gate.weight") && error.contains("mode mxfp8"), "{error}");
    let error = refusal("affine4", |_, config| config["quantization"][gate] = false.into());
    assert!(error.contains("layers.0.mlp.gate.weight") && error.contains("not quantized"), "{error}");
    let error = refusal("affine4", |_, config| {
        config["quantization"]["model.layers.0.mlp.gate"] = json!({"bits": 2});
    });
    assert!(error.contains("two contradictory entries for") && error.contains("layers.0.mlp.gate"), "{error}");
    // One-byte scales cannot have biases.
    let head = "language_model.lm_head";
    let error = refusal("mxfp4", |tensors, _| {
        let scales = tensors[&format!("{head}.scales")].clone();
        tensors.insert(format!("{head}.biases"), scales);
    });
    assert!(error.contains("lm_head.weight") && error.contains("biases"), "{error}");
    // No kernel supports these widths.
    let error = refusal("affine4", |tensors, _| {
        let (_, shape, _) = tensors[&format!("{head}.weight")].clone();
        let shape = vec![shape[0], shape[1] / 4];
        tensors.insert(format!("{head}.weight"), (Dtype::U32, shape.clone(), vec![0; shape[0] * shape[1] * 4]));
    });
    assert!(error.contains("lm_head.weight") && error.contains("1 bits in groups of 64"), "{error}");
}

#[test]
fn non_mlx_formats_are_refused_by_name() {
    let error = refusal("affine4", |tensors, _| {
        tensors.insert("model.layers.0.mlp.experts.0.gate_proj.tq_packed".into(), (Dtype::U8, vec![1], vec![0]));
    });
    assert!(error.contains("JANGTQ"), "{error}");
    let error = refusal("affine4", |_, config| {
        config.as_object_mut().unwrap().remove("quantization");
        config["quantization_config"] = json!({"quant_method": "awq", "group_size": 128});
    });
    assert!(error.contains("the quantization method awq"), "{error}");
    let error = refusal("affine4", |_, config| {
        config.as_object_mut().unwrap().remove("quantization");
        config["quantization_config"] = json!({"quant_method": "fp8", "weight_block_size": [64, 128]});
    });
    assert!(error.contains("weight_block_size must be [128, 128]"), "{error}");
    for (outer, inner) in [("qwen5", "qwen5_text"), ("qwen5", "qwen3_5_moe_text")] {
        let error = refusal("affine4", |_, config| {
            config["model_type"] = outer.into();
            config["text_config"]["model_type"] = inner.into();
        });
        assert!(error.contains("qwen5"), "{error}");
    }
    let error = refusal("affine4", |tensors, _| {
        let norm = tensors["language_model.model.norm.weight"].clone();
        tensors.insert("model.norm.weight".into(), norm);
    });
    assert!(error.contains("two names of the same tensor"), "{error}");
}

/// Adds a constant to the norms of queries and keys of the demo model, and returns the output of `moestro generate`.
fn shifted(by: f32) -> Output {
    let dir = tempfile::tempdir().unwrap();
    copy_dir(DEMO, dir.path());
    let path = dir.path().join("model.safetensors");
    let mut tensors = tensor_file::read(&std::fs::read(&path).unwrap());
    for (name, (dtype, _, data)) in &mut tensors {
        if name.ends_with("q_norm.weight") || name.ends_with("k_norm.weight") {
            assert_eq!(*dtype, Dtype::BF16);
            for value in data.as_chunks_mut::<2>().0 {
                *value = half::bf16::from_f32(half::bf16::from_le_bytes(*value).to_f32() + by).to_le_bytes();
            }
        }
    }
    std::fs::write(path, serialized(&tensors)).unwrap();
    let home = tempfile::tempdir().unwrap();
    moestro(home.path()).args(["generate", "-p", "Hi", "--temp", "0"]).arg(dir.path()).output().unwrap()
}

#[test]
fn doubly_shifted_norms_are_detected() {
    // The mean of the demo's norms is 1.2, and the mean of Qwen3.5's norms is 1.7.
    for (by, noticed) in [(0.0, false), (1.5, true)] {
        let output = shifted(by);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{said}");
        assert_eq!(said.contains("may have added 1 twice"), noticed, "{said}");
    }
}
