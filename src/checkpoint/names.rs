//! One name for each tensor, whatever converter wrote the checkpoint: MLX's names are ours (spec section 3).

/// A tensor's place in the model, by its name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Name {
    /// Part of the text model, under its canonical name.
    Ours(String),
    /// Vision tower or multi-token prediction: known, and not used.
    Skipped,
}

/// Brings a tensor's (or a quantisation entry's) name to the canonical form.
pub fn canonical(name: &str) -> Name {
    let skipped = ["vision_tower.", "model.visual.", "visual.", "model.vision_tower."];
    if skipped.iter().any(|prefix| name.starts_with(prefix)) || name.split('.').any(|part| part == "mtp") {
        return Name::Skipped;
    }
    Name::Ours(if let Some(rest) = name.strip_prefix("model.language_model.") {
        format!("language_model.model.{rest}")
    } else if name.starts_with("language_model.") {
        name.to_string()
    } else {
        format!("language_model.{name}")
    })
}

/// The canonical prefix of a layer's tensors.
pub fn layer(index: usize) -> String {
    format!("language_model.model.layers.{index}.")
}

pub const EMBED: &str = "language_model.model.embed_tokens";
pub const NORM: &str = "language_model.model.norm.weight";
pub const HEAD: &str = "language_model.lm_head";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_spelling() {
        for (found, ours) in [
            ("model.language_model.layers.3.mlp.gate.weight", "language_model.model.layers.3.mlp.gate.weight"),
            ("model.layers.3.mlp.gate.weight", "language_model.model.layers.3.mlp.gate.weight"),
            ("language_model.model.norm.weight", NORM),
            ("lm_head.weight", "language_model.lm_head.weight"),
        ] {
            assert_eq!(canonical(found), Name::Ours(ours.into()));
        }
        for found in ["vision_tower.blocks.0.attn.qkv.weight", "model.visual.pos_embed.weight", "mtp.fc.weight"] {
            assert_eq!(canonical(found), Name::Skipped);
        }
    }
}
