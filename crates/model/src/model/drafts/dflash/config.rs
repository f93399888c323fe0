//! `config.json` of a DFlash draft, in the two published schemas. Until May 2026 `block_size` and `rope_theta` were at
//! the top level; since June 2026 they are in `dflash_config` and `rope_parameters`. Returns an error for anything that
//! is not supported.

use crate::{
    error::ModelError,
    model::{
        config,
        json_table::{JsonTable, epsilon, refuse},
    },
};
use serde_json::Value;

/// Default number of rows of a block.
const BLOCK: usize = 16;

/// The dimensions of a draft network.
#[derive(Debug, Clone, PartialEq)]
pub struct DflashConfig {
    pub hidden: usize,
    pub intermediate: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub dim: usize,
    pub eps: f32,
    pub theta: f64,
    pub layers: Vec<AttentionWindow>,
    /// Layers of the target model whose output (the residual stream, before any norm) is the draft's context.
    pub taps: Vec<usize>,
    /// Number of rows of a block: one for the last token of the sequence, and one for each proposed token.
    pub block: usize,
    /// The mask token: the placeholder for a proposed token, a row of the target's embedding.
    pub mask: u32,
    pub vocab: usize,
    /// Number of layers of the target model that the draft was trained for, if the configuration declares it.
    pub target_layers: Option<usize>,
    /// Factor by which the embedding rows of a block are multiplied.
    pub input_scale: f32,
    /// Factor by which logits are multiplied before the soft cap.
    pub output_scale: f32,
    /// Soft cap of the scaled logits: `tanh(x / cap) * cap`.
    pub cap: Option<f32>,
    /// Sizes of the parts that DFlash2 adds to DFlash. `None` for a draft without these parts.
    pub dflash2: Option<Dflash2>,
    /// The `quantization` table, or null.
    pub quantization: Value,
}

/// The positions that a row attends to in one layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AttentionWindow {
    /// True if a row attends only to its own and earlier positions.
    pub causal: bool,
    /// If set, a row attends only to positions nearer than this.
    pub size: Option<usize>,
}

impl AttentionWindow {
    /// The positions that the query at `position` attends to.
    pub fn seen(self, position: usize) -> std::ops::Range<usize> {
        let window = self.size.unwrap_or(usize::MAX);
        let end = if self.causal { position + 1 } else { position.saturating_add(window) };
        (position + 1).saturating_sub(window)..end
    }
}

/// Sizes of the parts that DFlash2 adds to DFlash: convolutions whose kernels depend on the input, and a selector that
/// scores candidate tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Dflash2 {
    /// Width of a convolution in rows.
    pub taps: usize,
    /// Number of channels that share an input-dependent kernel.
    pub group: usize,
    /// Dimension of the selector's codebooks.
    pub rank: usize,
    /// Number of candidate tokens per position.
    pub candidates: usize,
}

/// Returns true for the `config.json` of a DFlash draft.
pub fn is_dflash(json: &Value) -> bool {
    json.get("dflash_config").is_some()
        || architectures(json).any(|name| name.starts_with("DFlash") || name.starts_with("Qwen3DFlash"))
}

fn architectures(json: &Value) -> impl Iterator<Item = &str> {
    json.get("architectures").and_then(Value::as_array).into_iter().flatten().filter_map(Value::as_str)
}

impl DflashConfig {
    /// Checks a parsed `config.json`, without the target model.
    pub fn new(json: &Value) -> Result<Self, ModelError> {
        let null = Value::Null;
        let own = JsonTable(json.get("dflash_config").unwrap_or(&null));
        let top = JsonTable(json);
        // A key in `dflash_config` (the newer schema) takes precedence over the same key at the top level.
        let table_of = |key: &str| if own.0.get(key).is_some_and(|value| !value.is_null()) { own } else { top };
        let has = |key: &str| table_of(key).0.get(key).is_some_and(|value| !value.is_null());
        let count = |key: &str, max: usize| table_of(key).count(key, max);
        for (key, supported) in [("hidden_act", "silu"), ("model_type", "qwen3")] {
            if let Some(value) = json.get(key).and_then(Value::as_str).filter(|value| *value != supported) {
                return refuse(format!("a DFlash draft with {key} {value} is not supported, only {supported}"));
            }
        }
        let dflash2 = match architectures(json).next() {
            None | Some("DFlashDraftModel") => None,
            Some("DFlash2DraftModel") => Some(Dflash2 {
                taps: count("conv_kernel_size", 64)?,
                group: count("conv_group_size", 1 << 20)?,
                rank: count("selector_rank", 1 << 16)?,
                candidates: count("selector_top_k", 1 << 10)?,
            }),
            Some(other) => return refuse(format!("a draft of architecture {other} is not supported")),
        };
        if top.flag("attention_bias", false)? {
            return refuse("a DFlash draft with attention_bias is not supported".into());
        }
        let layers = top.count("num_hidden_layers", 4096)?;
        let target_layers = has("num_target_layers").then(|| count("num_target_layers", 4096)).transpose()?;
        let number = |key: &str, default: f64| if has(key) { table_of(key).number(key) } else { Ok(default) };
        let cap = number("final_logit_softcapping", 0.0)? as f32;
        let config = Self {
            hidden: top.count("hidden_size", 1 << 20)?,
            intermediate: top.count("intermediate_size", 1 << 20)?,
            heads: top.count("num_attention_heads", 1 << 12)?,
            kv_heads: top.count("num_key_value_heads", 1 << 12)?,
            dim: top.count("head_dim", 1 << 12)?,
            eps: epsilon(top.number("rms_norm_eps")?)?,
            theta: theta(top)?,
            layers: windows(top, layers)?,
            taps: taps(own, top, layers, target_layers)?,
            block: table_of("block_size").count_or("block_size", 1 << 10, BLOCK)?,
            mask: match table_of("mask_token_id").0.get("mask_token_id").and_then(Value::as_u64) {
                Some(mask) if mask < 1 << 24 => mask as u32,
                _ => return refuse("a DFlash draft needs a mask_token_id".into()),
            },
            vocab: top.count("vocab_size", 1 << 24)?,
            target_layers,
            input_scale: number("input_embedding_scale", 1.0)? as f32,
            output_scale: number("output_multiplier", 1.0)? as f32,
            cap: Some(cap).filter(|cap| *cap > 0.0),
            dflash2,
            quantization: config::quantization(json, json).cloned().unwrap_or(Value::Null),
        };
        if !config.heads.is_multiple_of(config.kv_heads) || config.dim % 2 == 1 {
            return refuse(
                "num_attention_heads, num_key_value_heads and head_dim of this DFlash draft do not fit together".into(),
            );
        }
        if dflash2.is_some_and(|dflash2| !config.hidden.is_multiple_of(dflash2.group)) {
            return refuse("conv_group_size of this DFlash2 draft does not divide hidden_size".into());
        }
        Ok(config)
    }

    /// Fails if the draft does not fit `target`.
    pub fn check(&self, target: &config::Config) -> Result<(), ModelError> {
        let sizes = [("hidden_size", self.hidden, target.hidden), ("vocab_size", self.vocab, target.vocab)];
        let layers = self.target_layers.map(|layers| ("num_target_layers", layers, target.layers));
        for (what, ours, theirs) in sizes.into_iter().chain(layers) {
            if ours != theirs {
                return refuse(format!("this DFlash draft is for another model: its {what} is {ours}, not {theirs}"));
            }
        }
        if target.residual_width() != target.hidden {
            let other = "use --draft-model mtp, lookup or a small model";
            return refuse(format!("a DFlash draft reads one residual stream, but this model has several; {other}"));
        }
        if let Some(tap) = self.taps.iter().find(|tap| **tap >= target.layers) {
            return refuse(format!("this DFlash draft taps layer {tap}; the model has {} layers", target.layers));
        }
        if self.mask as usize >= target.vocab {
            return refuse(format!("the mask token {} is outside the vocabulary of {}", self.mask, target.vocab));
        }
        Ok(())
    }

    /// Number of values of one position's context: the hidden rows of all tapped layers.
    pub fn features(&self) -> usize {
        self.taps.len() * self.hidden
    }

    /// Width of keys, and of values, of one position in one layer.
    pub fn kv(&self) -> usize {
        self.kv_heads * self.dim
    }
}

/// The RoPE base: from the top level, else from `rope_parameters`, else from `rope_scaling`.
fn theta(top: JsonTable<'_>) -> Result<f64, ModelError> {
    let tables = ["rope_parameters", "rope_scaling"].map(|key| top.0.get(key).filter(|table| table.is_object()));
    for table in tables.into_iter().flatten() {
        let kind = table.get("rope_type").or(table.get("type")).and_then(Value::as_str);
        if let Some(other) = kind.filter(|kind| *kind != "default") {
            return refuse(format!("rope type {other} of a DFlash draft is not supported, only default"));
        }
    }
    let tables = [Some(top.0)].into_iter().chain(tables).flatten();
    let found = tables.filter_map(|table| table.get("rope_theta")).find(|theta| !theta.is_null());
    match found.map(|theta| (theta, theta.as_f64())) {
        Some((_, Some(theta))) if theta > 0.0 => Ok(theta),
        Some((theta, _)) => refuse(format!("rope_theta of a DFlash draft is {theta}")),
        None => refuse("rope_theta of a DFlash draft is missing".into()),
    }
}

/// The window of each layer. `is_causal` applies to all layers. If `is_causal` is absent, only layers with a window are
/// causal.
fn windows(top: JsonTable<'_>, layers: usize) -> Result<Vec<AttentionWindow>, ModelError> {
    let causal = match top.0.get("is_causal") {
        None | Some(Value::Null) => None,
        Some(_) => Some(top.flag("is_causal", false)?),
    };
    let Some(types) = top.0.get("layer_types").and_then(Value::as_array) else {
        return Ok(vec![AttentionWindow { causal: causal.unwrap_or(false), size: None }; layers]);
    };
    if types.len() != layers {
        return refuse(format!("layer_types names {} layers, num_hidden_layers says {layers}", types.len()));
    }
    let window = |kind: &Value| match kind.as_str() {
        Some("full_attention") => Ok(AttentionWindow { causal: causal.unwrap_or(false), size: None }),
        Some("sliding_attention") => {
            let window = top.count("sliding_window", 1 << 30)?;
            Ok(AttentionWindow { causal: causal.unwrap_or(true), size: Some(window) })
        }
        _ => refuse(format!("layer type {kind} of a DFlash draft is not supported")),
    };
    types.iter().map(window).collect()
}

/// The tapped layers. By default, the tapped layers are evenly spaced from the second layer to the fourth from the end.
fn taps(
    own: JsonTable<'_>,
    top: JsonTable<'_>,
    layers: usize,
    target_layers: Option<usize>,
) -> Result<Vec<usize>, ModelError> {
    let ids = own.0.get("target_layer_ids").or(top.0.get("target_layer_ids")).filter(|ids| !ids.is_null());
    let Some(ids) = ids else {
        let Some(all) = target_layers.filter(|all| *all > 3) else {
            return refuse("a DFlash draft needs target_layer_ids or num_target_layers".into());
        };
        let step = (all - 4) as f64 / (layers - 1).max(1) as f64;
        return Ok(match layers {
            1 => vec![all / 2],
            _ => (0..layers).map(|index| (1.0 + index as f64 * step).round_ties_even() as usize).collect(),
        });
    };
    let ids = ids.as_array().filter(|ids| (1..=256).contains(&ids.len()));
    let ids = ids.and_then(|ids| ids.iter().map(|id| id.as_u64().map(|id| id as usize)).collect::<Option<Vec<_>>>());
    match ids {
        Some(ids) => Ok(ids),
        None => refuse("target_layer_ids of a DFlash draft is not a list of layers".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn nested() -> Value {
        json!({
            "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "hidden_size": 64, "intermediate_size": 128,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_hidden_layers": 3,
            "rms_norm_eps": 1e-6, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "use_sliding_window": false, "sliding_window": 12, "vocab_size": 96, "num_target_layers": 8,
            "rope_parameters": {"rope_theta": 1e7, "rope_type": "default"},
            "dflash_config": {"block_size": 8, "mask_token_id": 90, "target_layer_ids": [1, 2, 4, 5]},
        })
    }

    #[test]
    fn both_schemas_parse_alike() {
        let new = DflashConfig::new(&nested()).unwrap();
        assert_eq!((new.block, new.mask, new.theta), (8, 90, 1e7));
        assert_eq!(new.taps, [1, 2, 4, 5]);
        assert_eq!(new.layers[0], AttentionWindow { causal: true, size: Some(12) });
        assert_eq!(new.layers[2], AttentionWindow { causal: false, size: None });
        let mut old = nested();
        let table = old.as_object_mut().unwrap();
        table.remove("rope_parameters");
        table["dflash_config"].as_object_mut().unwrap().remove("block_size");
        table.extend([("block_size".into(), 8.into()), ("rope_theta".into(), 1e7.into())]);
        assert_eq!(DflashConfig::new(&old).unwrap(), new);
        old["rope_theta"].take();
        old["rope_scaling"] = json!({"rope_theta": 1e7, "type": "default"});
        old.as_object_mut().unwrap().remove("block_size");
        assert_eq!(DflashConfig::new(&old).unwrap(), DflashConfig { block: 16, ..new });
    }

    #[test]
    fn windows_follow_causality_and_layer_types() {
        let mut json = nested();
        json["is_causal"] = false.into();
        let layers = DflashConfig::new(&json).unwrap().layers;
        assert!(layers.iter().all(|window| !window.causal));
        assert_eq!(layers[0].seen(30), 19..42);
        assert_eq!(layers[2].seen(30), 0..usize::MAX);
        let causal = AttentionWindow { causal: true, size: Some(12) };
        assert_eq!((causal.seen(30), causal.seen(3)), (19..31, 0..4));
        json.as_object_mut().unwrap().remove("layer_types");
        assert!(DflashConfig::new(&json).unwrap().layers.iter().all(|window| window.size.is_none()));
    }

    #[test]
    fn default_taps_are_evenly_spaced() {
        let mut json = nested();
        json["dflash_config"].as_object_mut().unwrap().remove("target_layer_ids");
        json["num_hidden_layers"] = 5.into();
        json.as_object_mut().unwrap().remove("layer_types");
        for (layers, taps) in [(32, [1, 8, 15, 22, 29]), (40, [1, 10, 19, 28, 37]), (64, [1, 16, 31, 46, 61])] {
            json["num_target_layers"] = layers.into();
            assert_eq!(DflashConfig::new(&json).unwrap().taps, taps);
        }
    }

    #[test]
    fn unsupported_drafts_are_refused() {
        for (key, value, word) in [
            ("architectures", json!(["DSparkDraftModel"]), "DSpark"),
            ("architectures", json!(["DFlash2DraftModel"]), "conv_kernel_size"),
            ("model_type", "llama".into(), "llama"),
            ("attention_bias", true.into(), "attention_bias"),
            ("rope_parameters", json!({"rope_theta": 1e7, "rope_type": "yarn"}), "yarn"),
            ("layer_types", json!(["full_attention"]), "layer_types"),
            ("layer_types", json!(["full_attention", "chunked", "chunked"]), "chunked"),
            ("dflash_config", json!({"target_layer_ids": [1]}), "mask_token_id"),
            ("dflash_config", json!({"mask_token_id": 3, "target_layer_ids": "all"}), "target_layer_ids"),
        ] {
            let mut json = nested();
            json[key] = value;
            let error = DflashConfig::new(&json).unwrap_err().to_string();
            assert!(error.contains(word) && !error.contains('\n'), "{key}: {error}");
        }
    }

    #[test]
    fn draft_of_another_model_is_refused() {
        let demo = include_str!("../../../../../../models/demo/moestro-demo/config.json");
        let mut target = config::Config::new(&serde_json::from_str(demo).unwrap()).unwrap();
        let draft = DflashConfig::new(&nested()).unwrap();
        assert!(draft.check(&target).unwrap_err().to_string().contains("hidden_size is 64, not 256"));
        target.hidden = 64;
        target.vocab = 96;
        draft.check(&target).unwrap();
        for (change, word) in [
            (DflashConfig { taps: vec![1, 8], ..draft.clone() }, "taps layer 8"),
            (DflashConfig { mask: 96, ..draft.clone() }, "mask token"),
            (DflashConfig { target_layers: Some(9), ..draft.clone() }, "num_target_layers is 9"),
        ] {
            assert!(change.check(&target).unwrap_err().to_string().contains(word));
        }
    }

    #[test]
    fn model_with_several_streams_is_refused() {
        let json = include_str!("../../../../../../tests/fixtures/qwen4_exp/config.json");
        let target = config::Config::new(&serde_json::from_str(json).unwrap()).unwrap();
        let hidden = target.hidden;
        let vocab = target.vocab;
        let draft = DflashConfig { hidden, vocab, target_layers: None, ..DflashConfig::new(&nested()).unwrap() };
        let error = draft.check(&target).unwrap_err().to_string();
        assert!(error.contains("one residual stream") && error.contains("--draft-model mtp"), "{error}");
    }
}
