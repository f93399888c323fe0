//! Canonical tensor names. Converters use several naming schemes; MLX's is canonical.

/// The role of a tensor, according to its name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TensorName {
    /// Part of the text model, under its canonical name.
    Text(String),
    /// A tensor of the vision tower or of multi-token prediction, which the text model does not use.
    Skipped,
}

/// The canonical form of the name of a tensor or of a quantization entry.
pub fn canonical_name(name: &str) -> TensorName {
    let skipped = ["vision_tower.", "model.visual.", "visual.", "model.vision_tower."];
    if skipped.iter().any(|prefix| name.starts_with(prefix)) || name.split('.').any(|part| part == "mtp") {
        return TensorName::Skipped;
    }
    TensorName::Text(if let Some(rest) = name.strip_prefix("model.language_model.") {
        format!("language_model.model.{rest}")
    } else if name.starts_with("language_model.") {
        name.to_string()
    } else {
        format!("language_model.{name}")
    })
}

/// The canonical prefix of a layer's tensors.
pub fn layer_prefix(index: usize) -> String {
    format!("language_model.model.layers.{index}.")
}

pub const EMBEDDING: &str = "language_model.model.embed_tokens";
pub const FINAL_NORM: &str = "language_model.model.norm.weight";
/// Prefix of the mixture before the head, where the model has several residual streams.
pub const LAST_MIX: &str = "language_model.model.hyper_connection_mixer.";
pub const LM_HEAD: &str = "language_model.lm_head";
