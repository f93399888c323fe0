//! Reads `config.json` into checked shapes. Returns an error for anything that is not supported.

use super::{
    json_table::{JsonTable, epsilon, refuse},
    ngram_hash::NgramShape,
};
use crate::error::ModelError;
use moestro_base::{error::StoreError, platform::read_json_file};
use moestro_compute::ops::{
    AttentionShape, DeltaShape, IndexerShape, KvFormat, OutputGate, StreamShape, attention::PAGE,
};
use serde_json::Value;
use std::path::Path;

/// Maximum size of a `config.json` in bytes. A large model that overrides the quantization of every matrix needs about
/// one million.
const MAX_BYTES: u64 = 32 << 20;

/// Default of `max_position_embeddings`.
const DEFAULT_CONTEXT: usize = 32_768;
/// Default of `rms_norm_eps`.
const DEFAULT_EPS: f64 = 1e-6;
/// Default of `mrope_section`.
const DEFAULT_ROPE_SECTIONS: [usize; 3] = [11, 11, 10];

/// The text model's dimensions.
#[derive(Debug, Clone, PartialEq)]
pub struct Config {
    pub hidden: usize,
    pub layers: usize,
    pub vocab: usize,
    /// The longest context that the model was trained for.
    pub context: usize,
    pub eps: f32,
    /// True if the embedding matrix is also the output head. The tensors of the checkpoint may show that it is not.
    pub tied: bool,
    /// For each layer: true for full attention, false for a gated delta net.
    pub full: Vec<bool>,
    /// Sizes of the attention layers. `context` is 0 here, because it depends on the memory plan.
    pub attention: AttentionShape,
    pub rope_theta: f64,
    /// Number of RoPE frequencies for time, height and width. A text token has the same position on all three axes.
    pub rope_sections: [usize; 3],
    pub delta: DeltaShape,
    pub ffn: FfnShape,
    /// Sizes of the residual streams, if there are several that layers mix. `None` for the usual single stream.
    pub streams: Option<StreamShape>,
    /// The indexer that selects the blocks of positions that attention layers read. `None` if attention layers read all
    /// positions.
    pub indexer: Option<IndexerShape>,
    /// The n-gram tables, in order of layers. The rows of a table are added to the residual streams before its layer.
    pub ngrams: Vec<NgramShape>,
    /// The `quantization` table. Empty if the configuration has no such table.
    pub quantization: Value,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub enum FfnShape {
    Dense {
        intermediate: usize,
    },
    Moe {
        experts: usize,
        /// Number of experts per token.
        k: usize,
        intermediate: usize,
        shared: usize,
        /// True if the weights of a token's experts are scaled so that they sum to one.
        renormalise: bool,
    },
}

impl Config {
    /// Reads `config.json` of a checkpoint directory.
    pub fn read(dir: &Path) -> Result<Self, ModelError> {
        Self::new(&json(dir)?)
    }

    /// Lowers the number of experts per token to `exactly`, or if that is `None`, to at most `at_most`.
    ///
    /// # Errors
    /// `exactly` is 0 or more than the model's own number, or the model is dense.
    pub fn use_fewer_experts(&mut self, exactly: Option<usize>, at_most: Option<usize>) -> Result<(), ModelError> {
        match (&mut self.ffn, exactly, at_most) {
            (FfnShape::Dense { .. }, Some(wanted), _) => {
                let why = format!("--experts-per-token {wanted}: this model is dense, it has no experts");
                return Err(ModelError::Config(why));
            }
            (FfnShape::Moe { k, .. }, Some(wanted), _) if !(1..=*k).contains(&wanted) => {
                return Err(ModelError::Config(format!("--experts-per-token {wanted}: this model takes 1 to {k}")));
            }
            (FfnShape::Moe { k, .. }, Some(wanted), _) => *k = wanted,
            (FfnShape::Moe { k, .. }, None, Some(max)) if max < *k => *k = max.max(1),
            (FfnShape::Moe { k, .. }, None, Some(max)) if max > *k => {
                tracing::warn!(
                    "SWIFTLM_TOP_K is {max}, but this model was trained with {k} experts per token; using {k}"
                );
            }
            _ => {}
        }
        Ok(())
    }

    /// Checks a parsed `config.json`.
    pub fn new(json: &Value) -> Result<Self, ModelError> {
        let text = text_config(json);
        let text = JsonTable(&text);
        // The outer configuration and its text model each have a type. Both must be supported.
        let outer = json.get("model_type").and_then(Value::as_str);
        if let Some(outer) = outer.filter(|outer| !outer.starts_with("qwen3_5"))
            && ModelFamily::named(outer).is_none()
        {
            return unsupported(outer);
        }
        let inner = text.0.get("model_type").and_then(Value::as_str).or(outer).unwrap_or("(absent)");
        let Some(family) = ModelFamily::named(inner) else { return unsupported(inner) };
        for (key, supported) in [("hidden_act", "silu"), ("mamba_ssm_dtype", "float32")] {
            if let Some(value) = text.0.get(key).and_then(Value::as_str).filter(|value| *value != supported) {
                return refuse(format!("{key} {value} is not supported, only {supported}"));
            }
        }
        let gate = match text.0.get("output_gate_type").and_then(Value::as_str) {
            None | Some("silu" | "swish") => OutputGate::Silu,
            Some("sigmoid") => OutputGate::Sigmoid,
            Some(other) => return refuse(format!("output_gate_type {other} is not supported, only swish and sigmoid")),
        };
        if text.flag("attention_bias", false)? {
            return refuse("attention_bias is not supported".into());
        }
        if !text.flag("attn_output_gate", true)? {
            return refuse("attention without an output gate is not supported".into());
        }
        if text.0.get("mlp_only_layers").and_then(Value::as_array).is_some_and(|layers| !layers.is_empty()) {
            return refuse("mlp_only_layers is not supported: every layer must have experts".into());
        }
        let layers = text.count("num_hidden_layers", 4096)?;
        let hidden = text.count("hidden_size", 1 << 20)?;
        let vocab = text.count("vocab_size", 1 << 24)?;
        let context = text.count_or("max_position_embeddings", 1 << 30, DEFAULT_CONTEXT)?;
        let eps = epsilon(text.number_or("rms_norm_eps", DEFAULT_EPS)?)?;
        let full = text.full_layers(layers)?;
        let (attention, rope_theta) = text.attention(eps)?;
        let mut config = Self {
            hidden,
            layers,
            vocab,
            context,
            eps,
            tied: is_tied(json),
            full,
            attention,
            rope_theta,
            rope_sections: text.rope_sections()?,
            delta: DeltaShape {
                key_heads: text.count("linear_num_key_heads", 1 << 12)?,
                value_heads: text.count("linear_num_value_heads", 1 << 12)?,
                key_dim: text.count("linear_key_head_dim", 1 << 12)?,
                value_dim: text.count("linear_value_head_dim", 1 << 12)?,
                conv_width: text.count("linear_conv_kernel_dim", 64)?,
                eps,
                gate,
            },
            ffn: if family == ModelFamily::Dense {
                FfnShape::Dense { intermediate: text.count("intermediate_size", 1 << 20)? }
            } else {
                text.moe()?
            },
            streams: None,
            indexer: None,
            ngrams: Vec::new(),
            quantization: quantization(json, text.0).cloned().unwrap_or(Value::Null),
        };
        if !config.delta.value_heads.is_multiple_of(config.delta.key_heads) {
            return refuse("linear_num_value_heads is not a multiple of linear_num_key_heads".into());
        }
        if family == ModelFamily::Qwen4Exp {
            config.streams = Some(StreamShape {
                count: text.count("hc_count", 16)?,
                rank: text.count("hc_lowrank", 1 << 16)?,
                hidden,
                eps,
            });
            config.indexer = Some(text.indexer(&config.attention)?);
            config.ngrams = text.ngrams(&config, ngram_file(json)?)?;
        }
        Ok(config)
    }

    /// Number of floats of one row of the residual: all streams.
    pub fn residual_width(&self) -> usize {
        self.hidden * self.streams.map_or(1, |streams| streams.count)
    }

    /// Number of experts per token. 0 in a dense model.
    pub fn experts_per_token(&self) -> usize {
        match self.ffn {
            FfnShape::Moe { k, .. } => k,
            FfnShape::Dense { .. } => 0,
        }
    }

    /// Number of layers with full attention.
    pub fn full_layers(&self) -> usize {
        self.full.iter().filter(|full| **full).count()
    }
}

/// Reads and parses the `config.json` of a directory.
pub fn json(dir: &Path) -> Result<Value, ModelError> {
    let path = dir.join("config.json");
    let text = read_json_file(&path, MAX_BYTES).map_err(StoreError::at(&path))?;
    serde_json::from_slice(&text).map_err(|error| ModelError::Config(format!("it is not valid JSON: {error}")))
}

/// The supported architectures, which differ in the keys that `config.json` must have.
#[derive(Clone, Copy, PartialEq)]
enum ModelFamily {
    Dense,
    Moe,
    Qwen4Exp,
}

impl ModelFamily {
    /// The family of a `model_type`, which may be that of the whole configuration or of its text model.
    fn named(model_type: &str) -> Option<Self> {
        match model_type.strip_suffix("_text").unwrap_or(model_type) {
            "qwen3_5" => Some(Self::Dense),
            "qwen3_5_moe" => Some(Self::Moe),
            "qwen4_exp" | "qwen3_8_flash_next" => Some(Self::Qwen4Exp),
            _ => None,
        }
    }
}

/// The keys of the text model. Converters write them in `text_config`, at the top level, or some at each level. A key
/// that is null in `text_config` is absent there.
fn text_config(json: &Value) -> Value {
    let mut keys = json.as_object().cloned().unwrap_or_default();
    if let Some(Value::Object(text)) = keys.remove("text_config") {
        keys.extend(text.into_iter().filter(|(_, value)| !value.is_null()));
    }
    keys.into()
}

/// True if one of the levels ties the output head to the embedding. The levels of some checkpoints differ, since
/// transformers reads the outer flag and mlx-lm the inner one. A flag matters only if the head or the embedding is
/// missing, and then an untied model could not answer at all.
fn is_tied(json: &Value) -> bool {
    [json, &json["text_config"]].iter().any(|table| table["tie_word_embeddings"] == Value::Bool(true))
}

fn unsupported<T>(model_type: &str) -> Result<T, ModelError> {
    refuse(format!("model_type {model_type} is not supported; Moestro serves qwen3_5, qwen3_5_moe and qwen4_exp"))
}

/// The quantization table. The name of its key and the object that contains it differ between checkpoints.
pub(super) fn quantization<'a>(json: &'a Value, text: &'a Value) -> Option<&'a Value> {
    let names = ["quantization", "quantization_config"];
    names.iter().flat_map(|name| [json.get(name), text.get(name)]).flatten().find(|table| table.is_object())
}

/// The name of the file to which some converters write the n-gram table, next to the shards.
fn ngram_file(json: &Value) -> Result<&str, ModelError> {
    let named = json.get("mlx_lm_extra_tensors").and_then(|extra| extra.get("ngram_file")).and_then(Value::as_str);
    match named {
        Some(name) if name.starts_with('.') || name.contains('/') => {
            refuse(format!("ngram_file {name} is not a file name"))
        }
        named => Ok(named.unwrap_or("ngram-table.safetensors")),
    }
}

impl JsonTable<'_> {
    /// For each layer, whether it has full attention: from `layer_types`, or else every `full_attention_interval`-th
    /// layer.
    fn full_layers(self, layers: usize) -> Result<Vec<bool>, ModelError> {
        let Some(types) = self.0.get("layer_types").and_then(Value::as_array) else {
            let interval = self.count_or("full_attention_interval", 4096, 4)?;
            return Ok((1..=layers).map(|layer| layer.is_multiple_of(interval)).collect());
        };
        if types.len() != layers {
            return refuse(format!("layer_types names {} layers, num_hidden_layers says {layers}", types.len()));
        }
        let full = types.iter().map(|kind| match kind.as_str() {
            // Converters of qwen4_exp rename the layers whose attention has an indexer.
            Some("full_attention" | "indexed_attention" | "qwen_sparse_attention") => Ok(true),
            Some("linear_attention") => Ok(false),
            _ => refuse(format!("layer type {kind} is not supported")),
        });
        full.collect()
    }

    /// The tables with parameters of RoPE. Older versions of transformers call them `rope_scaling`. Newer ones may write
    /// a table for each type of layer.
    fn rope_tables(&self) -> impl Iterator<Item = JsonTable<'_>> {
        let tables = ["rope_parameters", "rope_scaling"].iter().filter_map(|key| self.0.get(key));
        let of_attention =
            |table| Value::get(table, "full_attention").filter(|table| table.is_object()).unwrap_or(table);
        tables.filter(|table| table.is_object()).map(move |table| JsonTable(of_attention(table)))
    }

    /// The parameters of RoPE: the first table counts.
    fn rope(&self) -> JsonTable<'_> {
        self.rope_tables().next().unwrap_or(JsonTable(&Value::Null))
    }

    fn attention(self, eps: f32) -> Result<(AttentionShape, f64), ModelError> {
        let rope = self.rope();
        // mlx-lm writes `type` where transformers writes `rope_type`. A table that does not count may ask for a longer
        // context, too.
        let kinds = self.rope_tables().flat_map(|table| ["rope_type", "type"].map(|key| table.0.get(key)));
        // `mrope` is the default with the sections that all supported models have.
        let mut others = kinds.filter_map(|kind| kind?.as_str()).filter(|kind| !["default", "mrope"].contains(kind));
        if let Some(other) = others.next() {
            return refuse(format!("rope type {other} is not supported, only default"));
        }
        let number = |key: &str, default: f64| match [rope, self]
            .iter()
            .filter_map(|table| table.0.get(key))
            .find(|value| !value.is_null())
        {
            None => Ok(default),
            Some(value) => value.as_f64().filter(|n| *n > 0.0).map_or_else(|| refuse(format!("{key} is {value}")), Ok),
        };
        let heads = self.count("num_attention_heads", 1 << 12)?;
        let kv_heads = self.count("num_key_value_heads", 1 << 12)?;
        let dim = self.count("head_dim", 1 << 12)?;
        let rope_dim = (dim as f64 * number("partial_rotary_factor", 0.25)?) as usize;
        if !heads.is_multiple_of(kv_heads) {
            return refuse(format!("{heads} attention heads cannot share {kv_heads} key and value heads"));
        }
        if rope_dim > dim || rope_dim % 2 == 1 {
            return refuse(format!("{rope_dim} of {dim} dimensions of a head cannot be rotated by RoPE"));
        }
        let format = KvFormat::F32;
        let shape = AttentionShape { heads, kv_heads, dim, rope_dim, eps, context: 0, format, recent: None };
        Ok((shape, number("rope_theta", 1e7)?))
    }

    /// Sizes of the attention layers' indexer. RoPE rotates as many dimensions of an indexer head as of an attention
    /// head.
    fn indexer(self, attention: &AttentionShape) -> Result<IndexerShape, ModelError> {
        let dim = self.count("indexer_head_dim", 1 << 12)?;
        let ratio = self.count("indexer_compress_ratio", PAGE)?;
        let budget = self.count("indexer_budget", 1 << 24)?;
        let rope_dim = attention.rope_dim;
        if self.count_or("indexer_kv_heads", 1 << 12, 1)? != 1 {
            return refuse("an indexer with more than one key head is not supported".into());
        }
        if rope_dim > dim {
            return refuse(format!("RoPE rotates {rope_dim} dimensions, but the indexer's heads have {dim}"));
        }
        if !budget.is_multiple_of(ratio) {
            return refuse(format!("indexer_compress_ratio {ratio} does not divide the indexer's budget of {budget}"));
        }
        let heads = self.count("indexer_n_heads", 1 << 12)?;
        Ok(IndexerShape { heads, dim, rope_dim, ratio, blocks: budget / ratio, eps: attention.eps })
    }

    /// Sizes of the n-gram tables. `ple_layer_ids` counts layers from 1.
    fn ngrams(self, config: &Config, file: &str) -> Result<Vec<NgramShape>, ModelError> {
        let Config { layers, vocab, hidden, .. } = *config;
        if !self.0.get("ple_storage").is_none_or(Value::is_null) {
            return refuse("ple_storage is not supported: the n-gram table must be in safetensors files".into());
        }
        let listed = self.0.get("ple_layer_ids").and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
        let mut ids = std::collections::BTreeSet::new();
        for id in listed {
            match id.as_u64().filter(|id| (1..=layers as u64).contains(id)) {
                Some(id) => ids.insert(id as usize),
                None => return refuse(format!("ple_layer_ids has {id}, not a layer from 1 to {layers}")),
            };
        }
        let mut ngrams = Vec::with_capacity(ids.len());
        for (index, layer) in ids.into_iter().enumerate() {
            // If there are several end-of-text tokens, the first one separates texts. The others only end answers.
            let eos = self.0.get("eos_token_id").map(|eos| eos.get(0).unwrap_or(eos)).and_then(Value::as_u64);
            let Some(eos) = eos.filter(|eos| *eos < vocab as u64) else {
                return refuse("the n-gram table needs an eos_token_id in the text model's configuration".into());
            };
            let shape = NgramShape {
                layer: layer - 1,
                index,
                size: self.count_or("ngram_size", 16, 3)?,
                heads: self.count_or("heads_per_ngram", 256, 8)?,
                width: self.count_or("ple_embed_dim", 1 << 20, hidden)?,
                base: self.count_or("ngram_vocab_size_base", 1 << 32, 20_000_000)? as u64,
                divisor: self.count_or("make_ngram_vocab_size_divisible_by", 1 << 24, 128)? as u64,
                seed: match self.0.get("seed") {
                    // The `config.json` of released checkpoints has no seed. 1234 is the default of transformers.
                    None | Some(Value::Null) => 1234,
                    Some(seed) => seed.as_u64().map_or_else(|| refuse(format!("seed is {seed}")), Ok)?,
                },
                eos: eos as u32,
                vocab: vocab as u64,
                conv_width: self.count_or("ple_conv_kernel_size", 64, 4)?,
                file: file.into(),
            };
            if shape.size < 2 || !shape.width.is_multiple_of(shape.table_heads()) {
                let heads = shape.table_heads();
                let width = shape.width;
                return refuse(format!("{heads} heads of the n-gram table cannot share ple_embed_dim {width}"));
            }
            ngrams.push(shape);
        }
        Ok(ngrams)
    }

    /// Reads `mrope_section`, which only matters for images.
    fn rope_sections(self) -> Result<[usize; 3], ModelError> {
        let rope = self.rope();
        let Some(sections) = rope.0.get("mrope_section").filter(|sections| !sections.is_null()) else {
            return Ok(DEFAULT_ROPE_SECTIONS);
        };
        let count = |count: &Value| count.as_u64().filter(|count| *count <= 1 << 12).map(|count| count as usize);
        let counts: Option<Vec<usize>> = sections.as_array().and_then(|counts| counts.iter().map(count).collect());
        let counts = counts.and_then(|counts| counts.try_into().ok());
        counts.map_or_else(|| refuse(format!("mrope_section is {sections}, not three counts")), Ok)
    }

    fn moe(self) -> Result<FfnShape, ModelError> {
        let experts = self.count("num_experts", 1 << 16)?;
        Ok(FfnShape::Moe {
            experts,
            k: self.count("num_experts_per_tok", experts)?,
            intermediate: self.count("moe_intermediate_size", 1 << 20)?,
            shared: self.count("shared_expert_intermediate_size", 1 << 20)?,
            // Qwen3.5's configuration does not have the key. The default is true.
            renormalise: self.flag("norm_topk_prob", true)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn demo() -> Value {
        let text = include_str!("../../../../models/demo/moestro-demo/config.json");
        serde_json::from_str(text).unwrap()
    }

    #[test]
    fn demo_config_is_parsed() {
        let config = Config::new(&demo()).unwrap();
        assert_eq!(config.full, [false, false, false, true, false, false, false, true]);
        assert_eq!(config.attention.rope_dim, 16);
        let FfnShape::Moe { k, renormalise, .. } = config.ffn else { panic!("{:?}", config.ffn) };
        assert_eq!((k, renormalise), (4, true));
    }

    #[test]
    fn experts_per_token_can_only_shrink() {
        let k = |exactly, at_most| {
            let mut config = Config::new(&demo()).unwrap();
            config.use_fewer_experts(exactly, at_most).map(|()| match config.ffn {
                FfnShape::Moe { k, .. } => k,
                FfnShape::Dense { .. } => 0,
            })
        };
        assert_eq!(k(None, None).unwrap(), 4);
        assert_eq!(k(Some(3), None).unwrap(), 3);
        assert_eq!(k(Some(3), Some(2)).unwrap(), 3, "an explicit number wins");
        assert_eq!(k(None, Some(2)).unwrap(), 2);
        assert_eq!(k(None, Some(9)).unwrap(), 4);
        assert!(k(Some(5), None).unwrap_err().to_string().contains("1 to 4"));

        let mut dense = Config::new(&demo()).unwrap();
        dense.ffn = FfnShape::Dense { intermediate: 64 };
        assert!(dense.use_fewer_experts(Some(2), None).unwrap_err().to_string().contains("no experts"));
        assert!(dense.use_fewer_experts(None, Some(2)).is_ok());
    }

    #[test]
    fn unsupported_configs_are_refused() {
        for (pointer, value, word) in [
            ("/text_config/model_type", Value::from("llama"), "llama"),
            ("/text_config/model_type", "qwen9_text".into(), "qwen9_text is not supported"),
            ("/model_type", "qwen9".into(), "qwen9 is not supported"),
            ("/text_config/output_gate_type", "tanh".into(), "output_gate_type"),
            ("/text_config/rope_parameters/type", "yarn".into(), "yarn"),
            ("/text_config/rope_parameters/mrope_section", vec![11, 11].into(), "mrope_section"),
            ("/text_config/attention_bias", true.into(), "attention_bias"),
            ("/text_config/attn_output_gate", false.into(), "gate"),
            ("/text_config/hidden_act", "gelu".into(), "gelu"),
            ("/text_config/num_experts_per_tok", 33.into(), "num_experts_per_tok"),
            ("/text_config/num_hidden_layers", 7.into(), "layer_types"),
            ("/text_config/hidden_size", (-1).into(), "hidden_size"),
            ("/text_config/num_key_value_heads", 3.into(), "share"),
            ("/text_config/rms_norm_eps", (-1).into(), "rms_norm_eps is -1,"),
            ("/text_config/rms_norm_eps", 1.into(), "rms_norm_eps is 1,"),
            ("/text_config/rms_norm_eps", 0.into(), "rms_norm_eps is 0,"),
            ("/text_config/rms_norm_eps", 1e300.into(), "rms_norm_eps"),
        ] {
            assert_refused(demo(), pointer, value, word);
        }
    }

    #[test]
    fn unsupported_qwen4_configs_are_refused() {
        for (pointer, value, word) in [
            ("/text_config/indexer_kv_heads", Value::from(2), "one key head"),
            ("/text_config/indexer_head_dim", 4.into(), "rotates 8"),
            ("/text_config/indexer_budget", 18.into(), "does not divide"),
            ("/text_config/ple_layer_ids", serde_json::json!([0]), "ple_layer_ids"),
            ("/text_config/ple_layer_ids", serde_json::json!([7]), "ple_layer_ids"),
            ("/text_config/ple_embed_dim", 100.into(), "ple_embed_dim"),
            ("/text_config/eos_token_id", 320.into(), "eos_token_id"),
            ("/text_config/hc_count", 0.into(), "hc_count"),
        ] {
            assert_refused(qwen4(), pointer, value, word);
        }
    }

    #[test]
    fn qwen4_config_is_parsed() {
        let config = Config::new(&qwen4()).unwrap();
        assert_eq!(config.full, [false, false, true, false, false, true]);
        assert_eq!((config.delta.gate, config.residual_width()), (OutputGate::Sigmoid, 256));
        let indexer = config.indexer.unwrap();
        assert_eq!((indexer.heads, indexer.dim, indexer.rope_dim, indexer.ratio, indexer.blocks), (4, 16, 8, 4, 4));
        let [ngram] = &config.ngrams[..] else { panic!("{:?}", config.ngrams) };
        // `ple_layer_ids` counts from 1. The seed is absent.
        assert_eq!((ngram.layer, ngram.seed, ngram.eos, ngram.table_heads()), (1, 1234, 300, 16));
        let mut json = qwen4();
        json["model_type"] = "qwen3_8_flash_next".into();
        json["text_config"]["model_type"] = "qwen3_8_flash_next_text".into();
        json["text_config"]["eos_token_id"] = serde_json::json!([300, 302]);
        assert_eq!(Config::new(&json).unwrap(), config);
    }

    #[test]
    fn absent_keys_have_defaults() {
        let mut json = qwen4();
        let text = json["text_config"].as_object_mut().unwrap();
        let absent = ["rms_norm_eps", "max_position_embeddings", "ple_embed_dim", "full_attention_interval"];
        absent.iter().for_each(|key| drop(text.remove(*key).unwrap()));
        let config = Config::new(&json).unwrap();
        assert_eq!((config.eps, config.context), (1e-6, 32_768));
        // The n-gram table is as wide as the hidden state.
        assert_eq!((config.ngrams[0].width, config.hidden), (64, 64));
    }

    /// Values that are not the defaults show which table counts.
    #[test]
    fn rope_tables_are_found_in_all_places() {
        let rope = serde_json::json!({
            "rope_theta": 5000.0, "partial_rotary_factor": 0.5, "mrope_section": [8, 4, 4], "rope_type": "default",
        });
        let by_layer = serde_json::json!({"full_attention": rope, "linear_attention": null});
        let mut without_type = rope.clone();
        without_type["rope_type"] = Value::Null;
        for table in [rope, by_layer, without_type] {
            for key in ["rope_parameters", "rope_scaling"] {
                for level in ["text_config", "top"] {
                    for others in [None, Some(Value::Null)] {
                        let mut json = demo();
                        let text = json["text_config"].as_object_mut().unwrap();
                        text.remove("rope_parameters");
                        for absent in ["rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor"] {
                            text.extend(others.clone().map(|null| (absent.to_owned(), null)));
                        }
                        if level == "top" {
                            json[key] = table.clone();
                        } else {
                            json[level][key] = table.clone();
                        }
                        let config = Config::new(&json).unwrap();
                        let found = (config.rope_theta, config.attention.rope_dim, config.rope_sections);
                        assert_eq!(found, (5000.0, 32, [8, 4, 4]), "{json}");
                    }
                }
            }
        }
        let yarn = serde_json::json!({"full_attention": {"rope_type": "yarn"}});
        assert_refused(demo(), "/text_config/rope_parameters", yarn, "yarn");
        // The demo has `rope_parameters`, which count.
        let longer = serde_json::json!({"type": "linear", "factor": 4});
        assert_refused(demo(), "/text_config/rope_scaling", longer.clone(), "linear");
        assert_refused(demo(), "/rope_scaling", longer, "linear");
    }

    fn qwen4() -> Value {
        serde_json::from_str(include_str!("../../../../tests/fixtures/qwen4_exp/config.json")).unwrap()
    }

    /// Sets one key of `json` and expects an error with `word`.
    fn assert_refused(mut json: Value, pointer: &str, value: Value, word: &str) {
        // Keys such as `attn_output_gate` may be absent, so insert them into their parent object.
        let (table, key) = pointer.rsplit_once('/').unwrap();
        json.pointer_mut(table).unwrap()[key] = value;
        let error = Config::new(&json).unwrap_err().to_string();
        assert!(error.contains(word) && !error.contains('\n'), "{pointer}: {error}");
    }
}
