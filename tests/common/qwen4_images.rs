//! The tiny qwen4_exp checkpoint with a vision tower, and the results of transformers for two prompts with images.

use super::fixtures::FIXTURES;
use moestro_model::model::{Image, LoadOptions, Model, PassHooks, PlacedImage, Qwen, QwenState, Rows};
use std::{
    collections::HashMap,
    path::{Path, PathBuf},
    sync::Arc,
};

/// A prompt with images, and the results of transformers for it.
pub struct ImageCase {
    pub name: &'static str,
    /// The prompt. Each token of an image has the placeholder's id.
    pub prompt: Vec<u32>,
    pub greedy: Vec<u32>,
    /// The names of the images.
    pub images: Vec<String>,
    /// The rows of the prompt and of the answer without its last token.
    pub stored: HashMap<String, Vec<f32>>,
}

pub fn dir() -> PathBuf {
    Path::new(FIXTURES).join("qwen4_exp_images")
}

fn refs() -> serde_json::Value {
    serde_json::from_slice(&std::fs::read(dir().join("refs.json")).unwrap()).unwrap()
}

pub fn cases() -> Vec<ImageCase> {
    let json = refs();
    let ids = |value: &serde_json::Value| serde_json::from_value::<Vec<u32>>(value.clone()).unwrap();
    let case = |name: &'static str| {
        let prompt = &json["prompts"][name];
        let stored = super::tensors(&dir().join(format!("ref_{name}.safetensors")));
        let images = serde_json::from_value(prompt["images"].clone()).unwrap();
        ImageCase { name, prompt: ids(&prompt["ids"]), greedy: ids(&prompt["greedy"]), images, stored }
    };
    vec![case("one"), case("two")]
}

/// The picture with this name, as the model's image processor prepares it.
pub fn picture(model: &Qwen, name: &str) -> Arc<Image> {
    let file = Path::new(FIXTURES).join("vision/images").join(format!("{name}.png"));
    let image = model.info().images.unwrap().prepare(&std::fs::read(file).unwrap(), None).unwrap();
    let grid = &refs()["images"][name]["grid_thw"];
    let merge = merge();
    assert_eq!(
        [image.height, image.width].map(|side| (side * merge) as u64),
        [1, 2].map(|axis| grid[axis].as_u64().unwrap())
    );
    image
}

/// Number of patches per side of a token.
fn merge() -> usize {
    let config: serde_json::Value = serde_json::from_slice(&std::fs::read(dir().join("config.json")).unwrap()).unwrap();
    config["vision_config"]["spatial_merge_size"].as_u64().unwrap() as usize
}

/// The rows that transformers' tower computes for each picture.
pub fn tower_rows() -> HashMap<String, Vec<f32>> {
    super::tensors(&dir().join("rows.safetensors"))
}

impl ImageCase {
    /// The prompt and the answer without its last token.
    pub fn ids(&self) -> Vec<u32> {
        [&self.prompt[..], &self.greedy[..self.greedy.len() - 1]].concat()
    }

    /// The images of the prompt with the indices of their first tokens.
    pub fn placed(&self, model: &Qwen) -> Vec<PlacedImage> {
        let placeholder = model.info().images.unwrap().image_token;
        let mut at = 0;
        let place = |name: &String| {
            let image = picture(model, name);
            at += self.prompt[at..].iter().position(|id| *id == placeholder).unwrap();
            let placed = PlacedImage { at, image };
            at = placed.tokens().end;
            placed
        };
        let placed: Vec<PlacedImage> = self.images.iter().map(place).collect();
        assert!(!self.prompt[at..].contains(&placeholder));
        placed
    }
}

pub fn load(options: LoadOptions) -> Qwen {
    super::load_with(&dir(), options)
}

/// Appends `ids` to the sequence in chunks. Returns the logits of all rows.
pub fn extend(model: &mut Qwen, state: &mut QwenState, ids: &[u32], images: &[PlacedImage], chunk: usize) -> Vec<f32> {
    let mut logits = Vec::new();
    for ids in ids.chunks(chunk) {
        let mut hooks = PassHooks { images, ..PassHooks::default() };
        logits.extend_from_slice(&model.forward_with(state, ids, Rows::All, &mut hooks).unwrap().data);
    }
    logits
}
