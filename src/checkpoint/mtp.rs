//! The head for multi-token prediction in a checkpoint: its file, its names, and the convention of its norms (`w` or `1 + w`).
//! Converters do all of it in several ways.

use super::{Checkpoint, index::Index, names::TensorName};
use crate::error::{ModelError, StoreError};
use serde_json::Value;
use std::path::Path;

/// Prefix of the head's canonical names.
pub const PREFIX: &str = "mtp.";
/// Files that converters write beside the trunk's shards, likeliest first.
const BESIDE: [&str; 4] =
    ["mtp.safetensors", "mtp/weights.safetensors", "model-mtp.safetensors", "optiq/mtp.safetensors"];

/// The canonical name of a head's tensor in a file that also has others.
fn within(name: &str) -> TensorName {
    let prefixes = ["mtp.", "model.mtp.", "language_model.mtp."];
    match prefixes.iter().find_map(|prefix| name.strip_prefix(prefix)) {
        Some(rest) => TensorName::Text(format!("{PREFIX}{rest}")),
        None => TensorName::Skipped,
    }
}

/// The head that belongs to the checkpoint in `dir`, whose shards are `index`; `None` if there is none.
pub fn find(dir: &Path, index: &Index, config: &Value) -> Result<Option<Checkpoint>, ModelError> {
    let has = |index: &Index| index.tensors.keys().any(|name| within(name) != TensorName::Skipped);
    let mut found = has(index).then(|| index.clone());
    let said = config["mlx_lm_extra_tensors"]["mtp_file"].as_str();
    let plain = said.filter(|name| !Path::new(name).is_absolute() && !name.split('/').any(|part| part == ".."));
    for name in plain.into_iter().chain(BESIDE) {
        let path = dir.join(name);
        if found.is_none() && path.exists() {
            found = Some(Index::file(dir, path)?);
        }
    }
    found.map(|index| open(index, config)).transpose()
}

/// The head that has a directory of its own.
pub fn open_dir(dir: &Path, config: &Value) -> Result<Checkpoint, ModelError> {
    open(Index::open(dir)?, config)
}

fn open(index: Index, config: &Value) -> Result<Checkpoint, ModelError> {
    let prefixed = index.tensors.keys().any(|name| within(name) != TensorName::Skipped);
    let bare = |name: &str| TensorName::Text(format!("{PREFIX}{name}"));
    // It is quantised in its own way, of which the shapes tell.
    let mut head = if prefixed {
        Checkpoint::open_as(index, &Value::Null, within)?
    } else {
        Checkpoint::open_as(index, &Value::Null, bare)?
    };
    head.hugging_face = are_zero_centred(&head, config)?;
    Ok(head)
}

/// True if the head's norms hold `w - 1`. It is decided for all of them at once: the values of single norms overlap. Trained
/// norms of queries and keys have means of 1.7 to 1.8 (0.7 to 0.8 zero-centred), those in front of the layer 0.9 and more
/// (0.3 to 0.4).
fn are_zero_centred(head: &Checkpoint, config: &Value) -> Result<bool, ModelError> {
    let own = &config["mtplx_mtp_quantization"];
    let said = [
        &config["mtplx_mtp_norm_encoding"],
        &config["mtp_norm_encoding"],
        &own["norm_encoding"],
        &own["norm_weight_encoding"],
    ];
    if let Some(said) = said.into_iter().find_map(Value::as_str) {
        return Ok(["delta", "delta_plus_one", "mlx_delta"].contains(&said));
    }
    let means = |names: [&str; 2]| -> Result<(f32, f32), ModelError> {
        let mut both = [0.0; 2];
        for (mean, name) in both.iter_mut().zip(names) {
            let name = format!("{PREFIX}layers.0.{name}.weight");
            let len = head.get(&name)?.shape.iter().product();
            *mean = head.vector(&name, len)?.iter().sum::<f32>() / len.max(1) as f32;
        }
        Ok((both[0].min(both[1]), both[0].max(both[1])))
    };
    let heads = means(["self_attn.q_norm", "self_attn.k_norm"])?;
    let layer = means(["input_layernorm", "post_attention_layernorm"])?;
    match (heads, layer) {
        ((low, _), _) if low > 1.5 => Ok(false),
        ((_, high), (_, layers)) if high < 1.25 && layers < 0.7 => Ok(true),
        ((low, _), (least, _)) if low > 1.0 && least > 0.7 => Ok(false),
        _ => {
            let why = format!(
                "it cannot be told whether the norms of the MTP head hold w or 1 + w: their means are {heads:?} for queries \
                 and keys, {layer:?} in front of its layer"
            );
            Err(StoreError::NotACheckpoint { path: head.index.dir.clone(), why }.into())
        }
    }
}

/// Layers that `config.json` says the head has.
pub fn declared(config: &Value) -> u64 {
    let text = config.get("text_config").unwrap_or(config);
    text["mtp_num_hidden_layers"].as_u64().unwrap_or(0)
}

/// True if a directory holds a head and nothing else.
pub fn is_alone(config: &Value) -> bool {
    config["model_type"].as_str() == Some("qwen3_5_mtp")
}
