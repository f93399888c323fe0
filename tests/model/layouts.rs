//! Converters, fine-tuning tools and uploaders write the same model with other names, files and configurations. A layout
//! that loads gives the logits of the original. Any other layout is refused with a reason.

use crate::{
    common::{
        fixtures::Folded,
        load, load_error, prefill,
        tensor_file::{Tensors, serialized},
    },
    quantizations::{micro, read},
};
use moestro_compute::device::CpuArithmetic;
use safetensors::Dtype;
use serde_json::{Value, json};
use std::{collections::BTreeMap, fs, path::Path};
use test_support::with;

const EMBEDDING: &str = "language_model.model.embed_tokens";
const HEAD: &str = "language_model.lm_head";
pub const INDEX: &str = "model.safetensors.index.json";
pub const POINTER: &str = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n";

pub type Change<'a> = dyn Fn(&mut Layout) + 'a;

/// A checkpoint that is changed before it is written.
#[derive(Clone)]
pub struct Layout {
    pub config: Value,
    pub tensors: Tensors,
    /// Names of the weight files. The tensors are distributed over them.
    pub files: Vec<String>,
    /// The index file: the file of each tensor.
    pub index: Option<BTreeMap<String, String>>,
    /// Further files with their contents.
    pub extras: Vec<(String, Vec<u8>)>,
}

impl Layout {
    pub fn of(name: &str) -> Self {
        let (tensors, config) = micro(name);
        let files = vec!["model.safetensors".into()];
        Self { config, tensors, files, index: None, extras: Vec::new() }
    }

    pub fn rename(&mut self, name: impl Fn(&str) -> String) {
        let tensors = std::mem::take(&mut self.tensors);
        self.tensors = tensors.into_iter().map(|(old, tensor)| (name(&old), tensor)).collect();
    }

    /// Gives the tensors of the text model other prefixes.
    fn rename_prefixes(&mut self, model: &str, head: &str) {
        self.rename(|name| {
            name.replace("language_model.model.", model).replace("language_model.lm_head", &format!("{head}lm_head"))
        });
    }

    fn text(&mut self) -> &mut serde_json::Map<String, Value> {
        self.config["text_config"].as_object_mut().unwrap()
    }

    /// Moves keys from the configuration of the text model to the top level.
    fn lift(&mut self, keys: &[&str]) {
        for key in keys {
            let value = self.text().remove(*key);
            self.config[*key] = value.unwrap_or_default();
        }
    }

    fn set_tied(&mut self, outer: Option<bool>, inner: Option<bool>) {
        set_flag(&mut self.config, outer);
        set_flag(&mut self.config["text_config"], inner);
    }

    /// The parts of a matrix, such as codes and scales.
    fn matrix(&self, path: &str) -> Tensors {
        let prefix = format!("{path}.");
        let parts = self.tensors.iter().filter_map(|(name, tensor)| Some((name.strip_prefix(&prefix)?, tensor)));
        parts.map(|(part, tensor)| (part.to_owned(), tensor.clone())).collect()
    }

    fn remove_matrix(&mut self, path: &str) {
        self.tensors.retain(|name, _| !name.starts_with(&format!("{path}.")));
    }

    pub fn copy_matrix(&mut self, from: &str, to: &str) {
        for (part, tensor) in self.matrix(from) {
            self.tensors.insert(format!("{to}.{part}"), tensor);
        }
    }

    pub fn add(&mut self, name: &str, dtype: Dtype, shape: &[usize]) {
        let bytes = shape.iter().product::<usize>() * dtype.bitsize() / 8;
        self.tensors.insert(name.into(), (dtype, shape.to_vec(), vec![0; bytes]));
    }

    /// Divides the tensors into `count` files of one series, and returns the file of each tensor.
    pub fn divide(&mut self, stem: &str, count: usize) -> BTreeMap<String, String> {
        self.files = (1..=count).map(|number| format!("{stem}-{number:05}-of-{count:05}.safetensors")).collect();
        self.placed().into_iter().map(|(name, file)| (name.clone(), file.clone())).collect()
    }

    /// The file of each tensor.
    pub fn placed(&self) -> Vec<(&String, &String)> {
        let per_file = self.tensors.len().div_ceil(self.files.len());
        self.tensors.keys().enumerate().map(|(at, name)| (name, &self.files[at / per_file])).collect()
    }

    pub fn written(&self) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        let placed = self.placed();
        for file in &self.files {
            let names = placed.iter().filter(|(_, other)| *other == file).map(|(name, _)| *name);
            fs::write(dir.path().join(file), serialized(names.map(|name| (name, &self.tensors[name])))).unwrap();
        }
        if let Some(index) = &self.index {
            let index = json!({"metadata": {"total_size": 1}, "weight_map": index});
            fs::write(dir.path().join(INDEX), index.to_string()).unwrap();
        }
        for (name, bytes) in &self.extras {
            fs::write(dir.path().join(name), bytes).unwrap();
        }
        fs::write(dir.path().join("config.json"), self.config.to_string()).unwrap();
        dir
    }

    pub fn logits(&self) -> Vec<f32> {
        logits(self.written().path())
    }

    pub fn refusal(&self) -> String {
        load_error(self.written().path())
    }
}

fn set_flag(table: &mut Value, flag: Option<bool>) {
    let Some(table) = table.as_object_mut() else { return };
    table.remove("tie_word_embeddings");
    table.extend(flag.map(|flag| ("tie_word_embeddings".to_owned(), flag.into())));
}

pub fn logits(dir: &Path) -> Vec<f32> {
    let ids: Vec<u32> = (5..25).collect();
    prefill(&mut load(dir, CpuArithmetic::Integer), &ids, 100).0.data.to_vec()
}

/// Changes a checkpoint and expects the logits of the unchanged one.
pub fn check_same(name: &str, cases: &[(&str, &Change<'_>)]) {
    let known = Layout::of(name).logits();
    for (what, change) in cases {
        let mut layout = Layout::of(name);
        change(&mut layout);
        assert!(layout.logits() == known, "{name}: {what}");
    }
}

#[test]
fn all_prefixes_give_same_logits() {
    let prefixes = [
        ("ConditionalGeneration", "model.language_model.", ""),
        ("CausalLM", "model.", ""),
        ("the model without its head", "language_model.", ""),
        ("the text model alone", "", ""),
        ("older classes of transformers", "language_model.model.", "language_model."),
        ("the head inside", "model.language_model.model.", "model.language_model."),
        ("merged LoRA, saved with its wrapper", "base_model.model.model.language_model.", "base_model.model."),
        ("a compiled model", "_orig_mod.model.", "_orig_mod."),
        ("data parallel training", "module.model.language_model.", "module."),
    ];
    for (what, model, head) in prefixes {
        check_same("affine4", &[(what, &|layout| layout.rename_prefixes(model, head))]);
        check_same("dense4", &[(what, &|layout| layout.rename_prefixes(model, head))]);
    }
}

#[test]
fn all_config_levels_give_same_logits() {
    let flat = |layout: &mut Layout| {
        let text = layout.config.as_object_mut().unwrap().remove("text_config").unwrap();
        let outer = layout.config["model_type"].clone();
        layout.config = with(layout.config.take(), text);
        layout.config["model_type"] = outer;
    };
    check_same(
        "affine4",
        &[
            ("flat", &flat),
            ("flat, with the type of the text model", &|layout| {
                flat(layout);
                let kind = layout.config["model_type"].as_str().unwrap().to_owned();
                layout.config["model_type"] = format!("{kind}_text").into();
            }),
            ("some keys at the top level", &|layout| {
                layout.lift(&["vocab_size", "hidden_size", "rope_parameters", "num_experts_per_tok", "layer_types"]);
            }),
            ("no type of the text model", &|layout| _ = layout.text().remove("model_type")),
            ("keys of older versions", &|layout| {
                let mut rope = layout.text().remove("rope_parameters").unwrap();
                let rope = rope.as_object_mut().unwrap();
                let theta = rope.remove("rope_theta").unwrap();
                let factor = rope.remove("partial_rotary_factor").unwrap();
                rope.insert("type".into(), "mrope".into());
                let rope = Value::Object(rope.clone());
                layout.text().extend([
                    ("rope_scaling".to_owned(), rope),
                    ("rope_theta".to_owned(), theta),
                    ("partial_rotary_factor".to_owned(), factor),
                ]);
            }),
            ("keys of Unsloth", &|layout| {
                layout.config["unsloth_fixed"] = true.into();
                layout.config["unsloth_version"] = "2026.9.1".into();
                layout.config["transformers_version"] = "5.24.0".into();
                layout.config["pad_token_id"] = Value::Null;
                layout.text().insert("torch_dtype".into(), "bfloat16".into());
            }),
            ("a vision configuration without a tower", &|layout| {
                layout.config["vision_config"] = json!({"depth": 27, "hidden_size": 1152});
                layout.config["image_token_id"] = 3.into();
            }),
        ],
    );
    // A merged model keeps the table of the quantized model that was fine-tuned.
    for table in [json!({"quant_method": "bitsandbytes", "load_in_4bit": true}), json!({"quant_method": "awq"})] {
        let keep = |layout: &mut Layout| layout.config["quantization_config"] = table.clone();
        check_same("bf16", &[("a table without a quantized matrix", &keep)]);
    }
}

#[test]
fn own_head_wins_over_tied_flag() {
    let flags = [Some(true), Some(false), None];
    for name in ["affine4", "bf16"] {
        for (outer, inner) in flags.iter().flat_map(|outer| flags.map(|inner| (*outer, inner))) {
            let what = format!("outer {outer:?}, inner {inner:?}");
            check_same(name, &[(&what, &|layout| layout.set_tied(outer, inner))]);
        }
    }
}

#[test]
fn tied_matrix_may_be_missing() {
    for name in ["affine4", "bf16", "dense4"] {
        let mut with_copy = Layout::of(name);
        with_copy.remove_matrix(HEAD);
        with_copy.copy_matrix(EMBEDDING, HEAD);
        with_copy.set_tied(Some(false), Some(false));
        let known = with_copy.logits();
        for (outer, inner) in
            [(Some(true), Some(true)), (Some(true), None), (None, Some(true)), (Some(false), Some(true))]
        {
            for missing in [None, Some(HEAD), Some(EMBEDDING)] {
                let mut layout = with_copy.clone();
                layout.set_tied(outer, inner);
                missing.iter().for_each(|path| layout.remove_matrix(path));
                assert!(layout.logits() == known, "{name}: outer {outer:?}, inner {inner:?}, without {missing:?}");
            }
        }
        let mut layout = with_copy;
        layout.remove_matrix(HEAD);
        assert!(layout.refusal().contains("lm_head.weight is missing"));
    }
}

#[test]
fn files_decide_over_stale_index() {
    let stale = |layout: &Layout, files: &[&str]| -> BTreeMap<String, String> {
        let names = layout.tensors.keys().cloned();
        names.zip(files.iter().cycle()).map(|(name, file)| (name, format!("{file}.safetensors"))).collect()
    };
    let other = ["model-00001-of-00003", "model-00002-of-00003", "model-00003-of-00003"];
    check_same(
        "affine4",
        &[
            ("one file, index of shards", &|layout| layout.index = Some(stale(layout, &other))),
            ("shards, index of another number of shards", &|layout| {
                layout.divide("model", 2);
                layout.index = Some(stale(layout, &other));
            }),
            ("shards without an index", &|layout| _ = layout.divide("model", 3)),
            ("shards in Qwen's spelling", &|layout| layout.index = Some(layout.divide("model.safetensors", 2))),
            ("files with numbers only", &|layout| {
                layout.files = vec!["00000.safetensors".into(), "00001.safetensors".into()];
                let placed = layout.placed().into_iter().map(|(name, file)| (name.clone(), file.clone()));
                layout.index = Some(placed.collect());
            }),
            ("an index with tensors that were dropped", &|layout| {
                let mut index = layout.divide("model", 2);
                index.insert("model.visual.pos_embed.weight".into(), layout.files[0].clone());
                index.insert("mtp.fc.weight".into(), "model-mtp.safetensors".into());
                layout.index = Some(index);
            }),
            ("an index without the tensors of the last shard", &|layout| {
                let last = "model-00003-of-00003.safetensors";
                layout.index = Some(layout.divide("model", 3).into_iter().filter(|(_, file)| file != last).collect());
            }),
            ("a shard with the tower was deleted", &|layout| {
                layout.add("vision_tower.pos_embed.weight", Dtype::BF16, &[4, 4]);
                layout.files = other.map(|name| format!("{name}.safetensors")).to_vec();
                let tower = layout.tensors.remove("vision_tower.pos_embed.weight");
                layout.files.truncate(2);
                let mut index: BTreeMap<String, String> =
                    layout.placed().into_iter().map(|(name, file)| (name.clone(), file.clone())).collect();
                index.extend(
                    tower.map(|_| ("vision_tower.pos_embed.weight".into(), format!("{}.safetensors", other[2]))),
                );
                layout.index = Some(index);
            }),
            ("a tensor in a file that the index lacks", &|layout| {
                let norm = "language_model.model.norm.weight";
                let moved = BTreeMap::from([(norm.to_owned(), layout.tensors.remove(norm).unwrap())]);
                layout.index = Some(layout.divide("model", 2));
                layout.extras.push(("model-extra.safetensors".into(), serialized(moved.iter())));
            }),
            ("shards of an earlier upload", &|layout| {
                layout
                    .extras
                    .push((format!("{}.safetensors", other[0]), serialized(Layout::of("affine8").tensors.iter())));
                layout.index = Some(stale(layout, &other));
            }),
            ("a stray file beside shards with an index", &|layout| {
                layout.index = Some(layout.divide("model", 2));
                layout.extras.push(("model.safetensors".into(), serialized(Layout::of("affine8").tensors.iter())));
            }),
            ("an unknown file beside the shards", &|layout| {
                layout.index = Some(layout.divide("model", 2));
                let state = BTreeMap::from([("exp_avg".to_owned(), (Dtype::F32, vec![1], vec![0; 4]))]);
                layout.extras.push(("model_state.safetensors".into(), serialized(state.iter())));
                layout.extras.push(("model_broken.safetensors".into(), b"version https://git-lfs".to_vec()));
            }),
            ("an index that is no JSON", &|layout| layout.extras.push((INDEX.into(), b"{\"weight_map\": {".to_vec()))),
            ("an index that is a Git LFS pointer", &|layout| layout.extras.push((INDEX.into(), POINTER.into()))),
            ("an index that is a web page", &|layout| layout.extras.push((INDEX.into(), b"<!DOCTYPE html>".to_vec()))),
            ("an index without a map", &|layout| layout.extras.push((INDEX.into(), b"{\"metadata\": {}}".to_vec()))),
            ("an empty index", &|layout| layout.index = Some(BTreeMap::new())),
        ],
    );
}

#[test]
fn unneeded_tensors_are_ignored() {
    check_same(
        "affine4",
        &[
            ("a tower without its configuration", &|layout| {
                layout.add("model.visual.patch_embed.proj.weight", Dtype::BF16, &[4, 3, 2, 2, 2]);
                layout.add("model.visual.blocks.0.attn.qkv.bias", Dtype::BF16, &[4]);
            }),
            ("RoPE frequencies", &|layout| {
                layout.add("model.layers.3.self_attn.rotary_emb.inv_freq", Dtype::F32, &[8]);
                layout.add("model.rotary_emb.original_inv_freq", Dtype::F32, &[8]);
            }),
            ("scales of FP8 caches", &|layout| {
                layout.add("model.layers.3.self_attn.k_scale", Dtype::F32, &[1]);
                layout.add("model.layers.3.self_attn.v_proj.v_scale", Dtype::F32, &[1]);
            }),
        ],
    );
}

#[test]
fn mixed_floats_give_same_logits() {
    // Widening bf16 to f32 changes no value. The sums of wider matrices may round differently.
    let known = Layout::of("bf16").logits();
    for part in ["norm", "proj", "embed_tokens", "A_log", ""] {
        let mut layout = Layout::of("bf16");
        for (_, (dtype, _, data)) in layout.tensors.iter_mut().filter(|(name, _)| name.contains(part)) {
            if *dtype == Dtype::BF16 {
                let wide = data.as_chunks::<2>().0.iter().flat_map(|half| [0, 0, half[0], half[1]]);
                *data = wide.collect();
                *dtype = Dtype::F32;
            }
        }
        let off = crate::common::distance(&layout.logits(), &known);
        assert!(off < 1e-3, "{part} in f32: off by {off}");
    }
}

/// Loads the same weights from Hugging Face's layouts: zero-centred norms, `[C, 1, K]` convolutions, other names, and
/// experts fused or one by one. The logits must have the same bits.
#[test]
fn hugging_face_layouts_give_same_logits() {
    let known = Layout::of("bf16").logits();
    for fused in [true, false] {
        let dir = Folded::read("bf16").unfold_as_hugging_face(fused);
        assert!(logits(dir.path()) == known, "fused: {fused}");
        // transformers prefers a single file, and other engines ignore the index.
        fs::remove_file(dir.path().join(INDEX)).unwrap();
        assert!(logits(dir.path()) == known, "fused: {fused}, without an index");
    }
}

/// Without the dimension of 1, the shape of a convolution does not show whether norms store `w` or `w - 1`.
#[test]
fn convolutions_of_two_dimensions_give_same_logits() {
    let squeeze = |layout: &mut Layout| {
        for (_, (_, shape, _)) in layout.tensors.iter_mut().filter(|(name, _)| name.ends_with("conv1d.weight")) {
            shape.retain(|side| *side != 1);
            assert_eq!(shape.len(), 2);
        }
    };
    check_same("affine4", &[("MLX", &squeeze)]);
    let known = Layout::of("bf16").logits();
    let dir = Folded::read("bf16").unfold_as_hugging_face(true);
    let files = fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().path());
    let shards = files.filter(|path| path.extension().is_some_and(|ending| ending == "safetensors"));
    let tensors = shards.flat_map(|path| read(&fs::read(path).unwrap()).0).collect();
    let mut layout = Layout { tensors, ..Layout::of("bf16") };
    squeeze(&mut layout);
    assert!(layout.logits() == known);
    layout.rename(|name| name.replace("model.language_model.", "model."));
    assert!(layout.refusal().contains("cannot tell"));
}

/// compressed-tensors and ModelOpt store the scales of blocks under another name, and ModelOpt with further dimensions.
#[test]
fn other_block_scales_give_same_logits() {
    let weights = json!({"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]});
    let compressed = json!({
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    });
    for (table, has_four) in
        [(compressed, false), (json!({"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"}), true)]
    {
        let [fp8, _] = crate::common::fp8_checkpoint::written();
        let known = logits(fp8.path());
        let path = fp8.path().join("model.safetensors");
        let mut tensors = Tensors::new();
        for (name, (dtype, mut shape, data)) in read(&fs::read(&path).unwrap()).0 {
            if has_four && name.ends_with("_scale_inv") {
                shape = vec![shape[0], 1, shape[1], 1];
            }
            tensors.insert(name.replace("_scale_inv", "_scale"), (dtype, shape, data));
        }
        fs::write(&path, serialized(&tensors)).unwrap();
        let path = fp8.path().join("config.json");
        let mut config: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        config["quantization_config"] = table;
        fs::write(&path, config.to_string()).unwrap();
        assert!(logits(fp8.path()) == known, "{config}");
    }
}

#[test]
fn foreign_layouts_are_refused_with_a_reason() {
    let matrix = "model.layers.0.mlp.shared_expert.gate_proj";
    let added = |part: &str, dtype: Dtype| {
        let mut layout = Layout::of("affine4");
        layout.add(&format!("{matrix}.{part}"), dtype, &[2]);
        layout.refusal()
    };
    for (part, dtype, sentence) in [
        ("qweight", Dtype::I32, "GPTQ and AWQ checkpoints are not supported (it has qweight tensors)"),
        ("qzeros", Dtype::I32, "GPTQ and AWQ"),
        ("g_idx", Dtype::I32, "GPTQ and AWQ"),
        ("weight_packed", Dtype::I32, "packed compressed-tensors"),
        ("weight_scale_2", Dtype::F32, "ModelOpt"),
        ("weight.absmax", Dtype::U8, "bitsandbytes"),
        ("weight.quant_state.bitsandbytes__nf4", Dtype::U8, "bitsandbytes"),
        ("SCB", Dtype::F32, "bitsandbytes"),
        ("W_q", Dtype::U8, "HQQ"),
        ("lora_A.weight", Dtype::BF16, "unmerged LoRA"),
        ("lora_b", Dtype::BF16, "unmerged LoRA"),
        ("bias", Dtype::BF16, "shared_expert.gate_proj.bias in "),
    ] {
        let error = added(part, dtype);
        assert!(error.contains(sentence), "{part}: {error}");
    }
    let with_table = |table: Value, change: &Change<'_>| {
        let mut layout = Layout::of("affine4");
        layout.config.as_object_mut().unwrap().remove("quantization");
        layout.config["quantization_config"] = table;
        change(&mut layout);
        layout.refusal()
    };
    let channel = json!({"num_bits": 8, "type": "float", "strategy": "channel", "block_structure": null});
    let packed = json!({"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128});
    for weights in [channel, packed] {
        let table = json!({"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": weights}}});
        let error = with_table(table, &|_| ());
        assert!(error.contains("compressed-tensors is not supported; only"), "{error}");
    }
    let error = with_table(json!({"quant_method": "modelopt", "quant_algo": "NVFP4"}), &|_| ());
    assert!(error.contains("modelopt is not supported"), "{error}");
    let error = with_table(json!({"quant_method": "gptq", "bits": 4, "group_size": 128}), &|layout| {
        layout.add(&format!("{matrix}.qweight"), Dtype::I32, &[2]);
    });
    assert!(error.contains("GPTQ and AWQ"), "{error}");
}

#[test]
fn single_fp8_scales_are_refused_by_name() {
    for (part, shape) in [("weight_scale_inv", &[][..]), ("weight_scale", &[1]), ("weight_scale", &[64, 1])] {
        let mut layout = Layout::of("bf16");
        let name = "language_model.model.layers.0.mlp.shared_expert.gate_proj";
        let (_, sides, _) = layout.tensors[&format!("{name}.weight")].clone();
        layout.add(&format!("{name}.weight"), Dtype::F8_E4M3, &sides);
        layout.add(&format!("{name}.{part}"), Dtype::F32, shape);
        layout.config["quantization_config"] = json!({"quant_method": "fp8", "activation_scheme": "dynamic"});
        let error = layout.refusal();
        assert!(error.contains(part) && error.contains("a scale for each block of 128 rows and columns"), "{error}");
    }
}

#[test]
fn missing_shard_is_named() {
    for with_index in [true, false] {
        let mut layout = Layout::of("affine4");
        let index = layout.divide("model", 3);
        layout.index = with_index.then_some(index);
        let dir = layout.written();
        fs::remove_file(dir.path().join("model-00002-of-00003.safetensors")).unwrap();
        let error = load_error(dir.path());
        let sentence = "1 of 3 weight files missing, such as model-00002-of-00003.safetensors";
        assert!(error.contains(sentence) && error.contains("`moestro pull ORG/NAME` downloads them"), "{error}");
    }
}

/// Writes a JSON file in another spelling. Bits of `spelling`: a byte order mark, decimals for whole numbers, keys with
/// Python's numbers, and line ends of Windows.
pub fn respell(path: &Path, spelling: usize) {
    let mut json: Value = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
    let has = |bit: usize| spelling >> bit & 1 == 1;
    if has(1) {
        add_decimals(&mut json);
    }
    json["unused"] = "@".into();
    let mut text = serde_json::to_string_pretty(&json).unwrap();
    text = text.replace("\"@\"", if has(2) { "[NaN, Infinity, -Infinity]" } else { "0" });
    if has(3) {
        text = text.replace('\n', "\r\n");
    }
    fs::write(path, if has(0) { format!("\u{feff}{text}") } else { text }).unwrap();
}

fn add_decimals(json: &mut Value) {
    match json {
        Value::Number(number) => *json = number.as_f64().into(),
        Value::Array(items) => items.iter_mut().for_each(add_decimals),
        Value::Object(fields) => fields.values_mut().for_each(add_decimals),
        _ => {}
    }
}

#[test]
fn spellings_of_json_give_same_logits() {
    for name in ["affine4", "bf16"] {
        let mut layout = Layout::of(name);
        let known = layout.logits();
        let index = layout.divide("model", 2).into_iter();
        layout.index = Some(index.map(|(tensor, file)| (tensor, format!("./{file}"))).collect());
        for spelling in 0..16 {
            let dir = layout.written();
            [INDEX, "config.json"].iter().for_each(|file| respell(&dir.path().join(file), spelling));
            assert!(logits(dir.path()) == known, "{name}: {spelling}");
        }
    }
}
