//! Canonical tensor names. Converters use several naming schemes. The canonical scheme is MLX's.

/// Prefixes that classes of transformers and mlx-vlm, adapters and wrappers of training frameworks put before a name, in
/// any order and more than once: `base_model.model.model.language_model.layers.0...` is a tensor of layer 0.
const WRAPPERS: [&str; 4] = ["model.", "language_model.", "base_model.", "module."];

/// Parts of a name for a wrapped module, such as a layer that was compiled or sharded: `layers.0._orig_mod.mlp...` is a
/// tensor of layer 0.
const WRAPPED_MODULES: [&str; 3] = ["_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"];

/// The part of a model that has a tensor.
#[derive(Clone, Copy, PartialEq)]
enum TensorOwner {
    Text,
    Vision,
    Mtp,
}

/// The part to which a tensor belongs, and the tensor's name in that part.
fn split(name: &str) -> (TensorOwner, String) {
    let parts = name.split('.').filter(|part| !WRAPPED_MODULES.contains(part));
    let name = parts.collect::<Vec<_>>().join(".");
    let mut rest = name.as_str();
    while let Some(inner) = WRAPPERS.iter().find_map(|wrapper| rest.strip_prefix(wrapper)) {
        rest = inner;
    }
    let prefixes = [(TensorOwner::Vision, VISION_TOWER), (TensorOwner::Vision, "visual."), (TensorOwner::Mtp, MTP)];
    let part = prefixes.iter().find_map(|(part, prefix)| Some((*part, rest.strip_prefix(prefix)?)));
    let (part, rest) = part.unwrap_or((TensorOwner::Text, rest));
    (part, rest.to_owned())
}

fn name_in(part: TensorOwner, name: &str) -> Option<String> {
    let (found, rest) = split(name);
    (found == part).then_some(rest)
}

/// The canonical name of a tensor of the text model. `None` for a tensor of another part of the model. Also used for
/// the keys of a quantization table.
pub fn canonical_name(name: &str) -> Option<String> {
    let rest = name_in(TensorOwner::Text, name)?;
    let is_head = rest.split('.').next() == Some("lm_head");
    Some(format!("language_model.{}{rest}", if is_head { "" } else { "model." }))
}

/// The canonical name of a tensor of the vision tower. `None` for a tensor of another part of the model.
pub fn vision_name(name: &str) -> Option<String> {
    name_in(TensorOwner::Vision, name).map(|rest| format!("{VISION_TOWER}{rest}"))
}

/// The canonical name of a tensor of the head for multi-token prediction. `None` for a tensor of another part of the
/// model.
pub fn mtp_name(name: &str) -> Option<String> {
    name_in(TensorOwner::Mtp, name).map(|rest| format!("{MTP}{rest}"))
}

/// The canonical prefix of a layer's tensors.
pub fn layer_prefix(index: usize) -> String {
    format!("language_model.model.layers.{index}.")
}

/// The canonical prefix of the vision tower's tensors.
pub const VISION_TOWER: &str = "vision_tower.";
/// The canonical prefix of the tensors of the head for multi-token prediction.
pub const MTP: &str = "mtp.";
pub const EMBEDDING: &str = "language_model.model.embed_tokens";
pub const FINAL_NORM: &str = "language_model.model.norm.weight";
/// Prefix of the weights that mix the residual streams before the LM head, in models with several residual streams.
pub const LAST_MIX: &str = "language_model.model.hyper_connection_mixer.";
pub const LM_HEAD: &str = "language_model.lm_head";
