//! Finds and opens the head for multi-token prediction (MTP) of a checkpoint.
//!
//! Converters differ in the head's file, in its tensor names, and in whether the head's norms store `w` or `w - 1`.

use super::{
    Checkpoint,
    index::Index,
    names::{MTP, mtp_name},
    norm_encoding,
};
use crate::error::ModelError;
use moestro_base::error::StoreError;
use serde_json::Value;
use std::path::Path;

/// Names of separate head files that converters write, most common first.
pub const HEAD_FILES: [&str; 4] =
    ["mtp.safetensors", "mtp/weights.safetensors", "model-mtp.safetensors", "optiq/mtp.safetensors"];

/// Finds the head of the checkpoint in `dir`: in the shards of `index`, or in a separate file. `None` if there is no
/// head.
pub fn find(dir: &Path, index: &Index, config: &Value) -> Result<Option<Checkpoint>, ModelError> {
    let has = |index: &Index| index.tensors.keys().any(|name| mtp_name(name).is_some());
    let mut found = has(index).then(|| index.clone());
    let configured = config["mlx_lm_extra_tensors"]["mtp_file"].as_str();
    let plain = configured.filter(|name| !Path::new(name).is_absolute() && !name.split('/').any(|part| part == ".."));
    for name in plain.into_iter().chain(HEAD_FILES) {
        let path = dir.join(name);
        if found.is_none() && path.exists() {
            found = Some(Index::open_file(dir, path)?);
        }
    }
    found.map(|index| open(index, config)).transpose()
}

/// Opens a head that has its own directory.
pub fn open_dir(dir: &Path, config: &Value) -> Result<Checkpoint, ModelError> {
    open(Index::open(dir)?, config)
}

fn open(index: Index, config: &Value) -> Result<Checkpoint, ModelError> {
    let is_prefixed = index.tensors.keys().any(|name| mtp_name(name).is_some());
    let bare = |name: &str| Some(format!("{MTP}{name}"));
    // The quantization table describes the trunk. The format of the head may differ, so it is inferred from shapes
    // alone.
    let mut head = if is_prefixed {
        Checkpoint::open_as(index, &Value::Null, mtp_name)?
    } else {
        Checkpoint::open_as(index, &Value::Null, bare)?
    };
    // A head in the shards of a model in Hugging Face's layout stores `w - 1`, as all norms of the model do.
    if head.hugging_face != Some(true) {
        head.hugging_face = Some(match stream_norms(&head) {
            Some(names) => norm_encoding::is_zero_centred(&head, &names)?,
            None => are_zero_centred(&head, config)?,
        });
    }
    Ok(head)
}

/// Names of the norms whose values are examined if the head has several residual streams. Includes the norms before
/// `fc`, because some converters added 1 to only a part of the norms. `None` if the head has a single residual stream.
fn stream_norms(head: &Checkpoint) -> Option<Vec<String>> {
    let name = |name: &str| format!("{MTP}{name}.weight");
    let streams = [
        "layers.0.attn_hyper_connection.hc_norm",
        "layers.0.mlp_hyper_connection.hc_norm",
        "hyper_connection_mixer.hc_norm",
        "pre_fc_norm_embedding",
        "pre_fc_norm_hidden",
    ];
    head.has(&name(streams[0])).then(|| streams.map(name).to_vec())
}

/// True if the head's norms store `w - 1` (zero-centred).
///
/// Uses `config.json` if it names the encoding. Otherwise examines the means of all norms together, because the ranges
/// of single norms overlap. The weights of trained query and key norms have means of 1.7 to 1.8 (stored as 0.7 to 0.8
/// if zero-centred). The weights of layer norms have means of at least 0.9 (stored as 0.3 to 0.4 if zero-centred).
fn are_zero_centred(head: &Checkpoint, config: &Value) -> Result<bool, ModelError> {
    let own = &config["mtplx_mtp_quantization"];
    let encodings = [
        &config["mtplx_mtp_norm_encoding"],
        &config["mtp_norm_encoding"],
        &own["norm_encoding"],
        &own["norm_weight_encoding"],
    ];
    if let Some(encoding) = encodings.into_iter().find_map(Value::as_str) {
        return Ok(["delta", "delta_plus_one", "mlx_delta"].contains(&encoding));
    }
    let means = |names: [&str; 2]| -> Result<(f32, f32), ModelError> {
        let mut both = [0.0; 2];
        for (mean, name) in both.iter_mut().zip(names) {
            let name = format!("{MTP}layers.0.{name}.weight");
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
                "cannot tell whether the norms of the MTP head store w or w - 1: their means are {heads:?} for the query \
                 and key norms, {layer:?} for the layer norms"
            );
            Err(StoreError::NotACheckpoint { path: head.index.dir.clone(), why }.into())
        }
    }
}

/// Number of layers of the head according to `config.json`.
pub fn declared_layers(config: &Value) -> u64 {
    let text = config.get("text_config").unwrap_or(config);
    text["mtp_num_hidden_layers"].as_u64().unwrap_or(0)
}

/// True if a checkpoint consists only of an MTP head.
pub fn is_head_only(config: &Value) -> bool {
    config["model_type"].as_str() == Some("qwen3_5_mtp")
}

#[cfg(test)]
mod tests {
    use super::*;
    use safetensors::{Dtype, tensor::TensorView};

    /// The encoding of a head whose norms are all 1.2. The head is in the shards of a model whose convolution has the
    /// shape `conv`.
    fn zero_centred(conv: [usize; 3]) -> Option<bool> {
        let dir = tempfile::tempdir().unwrap();
        let zeros = [0; 64];
        let norm = 1.2f32.to_le_bytes().repeat(4);
        let norms =
            ["attn_hyper_connection.hc_norm", "mlp_hyper_connection.hc_norm"].map(|name| format!("layers.0.{name}"));
        let others =
            ["hyper_connection_mixer.hc_norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"].map(String::from);
        let norm = |name: String| (format!("mtp.{name}.weight"), TensorView::new(Dtype::F32, vec![4], &norm).unwrap());
        let conv = TensorView::new(Dtype::F32, conv.to_vec(), &zeros).unwrap();
        let tensors = norms.into_iter().chain(others).map(norm).chain([("conv1d.weight".into(), conv)]);
        safetensors::serialize_to_file(tensors, None, &dir.path().join("model.safetensors")).unwrap();
        find(dir.path(), &Index::open(dir.path()).unwrap(), &Value::Null).unwrap().unwrap().hugging_face
    }

    #[test]
    fn hugging_face_head_is_zero_centred() {
        assert_eq!(zero_centred([4, 1, 4]), Some(true));
        // MLX's converters write both encodings, so the values decide.
        assert_eq!(zero_centred([4, 4, 1]), Some(false));
    }
}
