//! Canonical tensor names. Converters use several naming schemes. The canonical scheme is MLX's.

/// The canonical name of a tensor of the text model. `None` for a tensor of another part of the model. Also used for
/// the keys of a quantization table.
pub fn canonical_name(name: &str) -> Option<String> {
    if vision_part(name).is_some() || name.split('.').any(|part| part == "mtp") {
        return None;
    }
    Some(if let Some(rest) = name.strip_prefix("model.language_model.") {
        format!("language_model.model.{rest}")
    } else if name.starts_with("language_model.") {
        name.to_string()
    } else {
        format!("language_model.{name}")
    })
}

/// The canonical name of a tensor of the vision tower. `None` for a tensor of another part of the model.
pub fn vision_name(name: &str) -> Option<String> {
    vision_part(name).map(|rest| format!("{VISION_TOWER}{rest}"))
}

/// The name of a tensor of the vision tower, without the tower's prefix. `None` if the tensor does not belong to the
/// tower.
fn vision_part(name: &str) -> Option<&str> {
    let prefixes = [
        VISION_TOWER,
        "model.visual.",
        "visual.",
        "model.vision_tower.",
        "language_model.vision_tower.",
        "model.language_model.visual.",
    ];
    prefixes.iter().find_map(|prefix| name.strip_prefix(prefix))
}

/// The canonical prefix of a layer's tensors.
pub fn layer_prefix(index: usize) -> String {
    format!("language_model.model.layers.{index}.")
}

/// The canonical prefix of the vision tower's tensors.
pub const VISION_TOWER: &str = "vision_tower.";
pub const EMBEDDING: &str = "language_model.model.embed_tokens";
pub const FINAL_NORM: &str = "language_model.model.norm.weight";
/// Prefix of the weights that mix the residual streams before the LM head, in models with several residual streams.
pub const LAST_MIX: &str = "language_model.model.hyper_connection_mixer.";
pub const LM_HEAD: &str = "language_model.lm_head";
