//! `config.json` as checked shapes. Anything unsupported is refused here.

use crate::{
    error::ModelError,
    ops::{AttentionShape, DeltaShape, KvFormat},
    platform::read_small_file,
};
use serde_json::Value;
use std::path::Path;

/// Most bytes of a `config.json`. Overrides for each matrix of a large model take one million.
const MAX_BYTES: u64 = 32 << 20;

/// The text model's dimensions.
#[derive(Debug, Clone, PartialEq)]
pub struct Config {
    pub hidden: usize,
    pub layers: usize,
    pub vocab: usize,
    /// The longest context that the model was trained for.
    pub context: usize,
    pub eps: f32,
    /// The embedding is also the head.
    pub tied: bool,
    /// Per layer: full attention, or else a gated delta net.
    pub full: Vec<bool>,
    /// The attention layers, with a context of 0 positions.
    pub attention: AttentionShape,
    pub rope_theta: f64,
    pub delta: DeltaShape,
    pub ffn: FfnShape,
    /// The `quantization` table, empty if there is none.
    pub quantization: Value,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub enum FfnShape {
    Dense {
        intermediate: usize,
    },
    Moe {
        experts: usize,
        /// Experts per token.
        k: usize,
        intermediate: usize,
        shared: usize,
        /// The weights of a token's experts sum to one.
        renormalise: bool,
    },
}

impl Config {
    /// Reads `config.json` of a checkpoint directory.
    pub fn read(dir: &Path) -> Result<Self, ModelError> {
        Self::new(&json(dir)?)
    }

    /// Lowers the experts per token: to `exactly`, which must be possible, or to `at_most` if that is fewer.
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
            (FfnShape::Moe { k, .. }, None, Some(most)) if most < *k => *k = most.max(1),
            (FfnShape::Moe { k, .. }, None, Some(most)) if most > *k => {
                tracing::warn!(
                    "SWIFTLM_TOP_K is {most}, but this model was trained with {k} experts per token; using {k}"
                );
            }
            _ => {}
        }
        Ok(())
    }

    /// Checks a parsed `config.json`.
    pub fn new(json: &Value) -> Result<Self, ModelError> {
        let text = JsonTable(json.get("text_config").unwrap_or(json));
        // The outer configuration and its text model each have a type. Both must be supported.
        if let Some(outer) = json.get("model_type").and_then(Value::as_str)
            && !outer.starts_with("qwen3_5")
        {
            return refuse(format!("model_type {outer} is not supported; Moestro serves qwen3_5_moe and qwen3_5"));
        }
        let moe = match text.0.get("model_type").or(json.get("model_type")).and_then(Value::as_str) {
            Some("qwen3_5_moe" | "qwen3_5_moe_text") => true,
            Some("qwen3_5" | "qwen3_5_text") => false,
            other => {
                let other = other.unwrap_or("(absent)");
                return refuse(format!("model_type {other} is not supported; Moestro serves qwen3_5_moe and qwen3_5"));
            }
        };
        for (key, supported) in [("hidden_act", "silu"), ("output_gate_type", "swish"), ("mamba_ssm_dtype", "float32")]
        {
            match text.0.get(key).and_then(Value::as_str) {
                None => {}
                Some(value) if value == supported || (key == "output_gate_type" && value == "silu") => {}
                Some(value) => return refuse(format!("{key} {value} is not supported, only {supported}")),
            }
        }
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
        let context = text.count("max_position_embeddings", 1 << 30)?;
        let eps = text.number("rms_norm_eps")? as f32;
        let full = text.full_layers(layers)?;
        let (attention, rope_theta) = text.attention(eps)?;
        let config = Self {
            hidden,
            layers,
            vocab,
            context,
            eps,
            tied: match text.0.get("tie_word_embeddings").or(json.get("tie_word_embeddings")) {
                Some(value) => value.as_bool().unwrap_or(false),
                None => false,
            },
            full,
            attention,
            rope_theta,
            delta: DeltaShape {
                key_heads: text.count("linear_num_key_heads", 1 << 12)?,
                value_heads: text.count("linear_num_value_heads", 1 << 12)?,
                key_dim: text.count("linear_key_head_dim", 1 << 12)?,
                value_dim: text.count("linear_value_head_dim", 1 << 12)?,
                conv_width: text.count("linear_conv_kernel_dim", 64)?,
                eps,
            },
            ffn: if moe {
                text.moe()?
            } else {
                FfnShape::Dense { intermediate: text.count("intermediate_size", 1 << 20)? }
            },
            quantization: quantization(json, text.0).cloned().unwrap_or(Value::Null),
        };
        if !config.delta.value_heads.is_multiple_of(config.delta.key_heads) {
            return refuse("linear_num_value_heads is no multiple of linear_num_key_heads".into());
        }
        Ok(config)
    }

    /// Experts per token, 0 in a dense model.
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

/// The `config.json` of a directory.
pub fn json(dir: &Path) -> Result<Value, ModelError> {
    let path = dir.join("config.json");
    let text = read_small_file(&path, MAX_BYTES)
        .map_err(|source| crate::error::StoreError::Io { path, source })
        .map_err(ModelError::Store)?;
    serde_json::from_slice(&text).map_err(|error| ModelError::Config(error.to_string()))
}

/// The quantisation table. Its name and place differ between checkpoints.
pub(super) fn quantization<'a>(json: &'a Value, text: &'a Value) -> Option<&'a Value> {
    let names = ["quantization", "quantization_config"];
    names.iter().flat_map(|name| [json.get(name), text.get(name)]).flatten().find(|table| table.is_object())
}

pub(super) fn refuse<T>(why: String) -> Result<T, ModelError> {
    Err(ModelError::Config(why))
}

/// A JSON object with checked access to its values.
#[derive(Clone, Copy)]
pub(super) struct JsonTable<'a>(pub &'a Value);

impl JsonTable<'_> {
    /// A whole number from 1 to `most`.
    pub fn count(self, key: &str, most: usize) -> Result<usize, ModelError> {
        match self.0.get(key) {
            None => refuse(format!("{key} is missing")),
            Some(value) => match value.as_u64() {
                Some(count) if count >= 1 && count <= most as u64 => Ok(count as usize),
                _ => refuse(format!("{key} is {value}, not a whole number from 1 to {most}")),
            },
        }
    }

    pub fn number(self, key: &str) -> Result<f64, ModelError> {
        match self.0.get(key).map(|value| (value, value.as_f64())) {
            Some((_, Some(number))) => Ok(number),
            Some((value, None)) => refuse(format!("{key} is {value}, not a number")),
            None => refuse(format!("{key} is missing")),
        }
    }

    pub fn flag(self, key: &str, default: bool) -> Result<bool, ModelError> {
        match self.0.get(key) {
            None | Some(Value::Null) => Ok(default),
            Some(Value::Bool(flag)) => Ok(*flag),
            Some(value) => refuse(format!("{key} is {value}, not true or false")),
        }
    }

    /// Which layers are full attention: from `layer_types`, or else every `full_attention_interval`-th.
    fn full_layers(self, layers: usize) -> Result<Vec<bool>, ModelError> {
        let Some(types) = self.0.get("layer_types").and_then(Value::as_array) else {
            let interval = if self.0.get("full_attention_interval").is_some() {
                self.count("full_attention_interval", 4096)?
            } else {
                4
            };
            return Ok((1..=layers).map(|layer| layer.is_multiple_of(interval)).collect());
        };
        if types.len() != layers {
            return refuse(format!("layer_types names {} layers, num_hidden_layers says {layers}", types.len()));
        }
        let full = types.iter().map(|kind| match kind.as_str() {
            Some("full_attention") => Ok(true),
            Some("linear_attention") => Ok(false),
            _ => refuse(format!("layer type {kind} is not supported")),
        });
        full.collect()
    }

    fn attention(self, eps: f32) -> Result<(AttentionShape, f64), ModelError> {
        let rope = JsonTable(self.0.get("rope_parameters").or(self.0.get("rope_scaling")).unwrap_or(&Value::Null));
        // mlx-lm writes `type` where transformers writes `rope_type`.
        match rope.0.get("rope_type").or(rope.0.get("type")).and_then(Value::as_str) {
            None | Some("default") => {}
            Some(other) => return refuse(format!("rope type {other} is not supported, only default")),
        }
        let number = |key: &str, default: f64| match rope.0.get(key).or(self.0.get(key)) {
            None | Some(Value::Null) => Ok(default),
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
            return refuse(format!("{rope_dim} of {dim} dimensions of a head is no valid RoPE dimension"));
        }
        let format = KvFormat::F32;
        let shape = AttentionShape { heads, kv_heads, dim, rope_dim, eps, context: 0, format, recent: None };
        Ok((shape, number("rope_theta", 1e7)?))
    }

    fn moe(self) -> Result<FfnShape, ModelError> {
        let experts = self.count("num_experts", 1 << 16)?;
        Ok(FfnShape::Moe {
            experts,
            k: self.count("num_experts_per_tok", experts)?,
            intermediate: self.count("moe_intermediate_size", 1 << 20)?,
            shared: self.count("shared_expert_intermediate_size", 1 << 20)?,
            // Absent in Qwen3.5's configuration, where it means true.
            renormalise: self.flag("norm_topk_prob", true)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn demo() -> Value {
        let text = include_str!("../../models/demo/moestro-demo/config.json");
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
            ("/text_config/model_type", "qwen4_exp_text".into(), "qwen4_exp_text is not supported"),
            ("/model_type", "qwen4_exp".into(), "qwen4_exp is not supported"),
            ("/text_config/rope_parameters/type", "yarn".into(), "yarn"),
            ("/text_config/attention_bias", true.into(), "attention_bias"),
            ("/text_config/attn_output_gate", false.into(), "gate"),
            ("/text_config/hidden_act", "gelu".into(), "gelu"),
            ("/text_config/num_experts_per_tok", 33.into(), "num_experts_per_tok"),
            ("/text_config/num_hidden_layers", 7.into(), "layer_types"),
            ("/text_config/hidden_size", (-1).into(), "hidden_size"),
            ("/text_config/num_key_value_heads", 3.into(), "share"),
        ] {
            let mut json = demo();
            // Keys such as `attn_output_gate` may be absent, so set them in their table.
            let (table, key) = pointer.rsplit_once('/').unwrap();
            json.pointer_mut(table).unwrap()[key] = value;
            let error = Config::new(&json).unwrap_err().to_string();
            assert!(error.contains(word) && !error.contains('\n'), "{pointer}: {error}");
        }
    }
}
