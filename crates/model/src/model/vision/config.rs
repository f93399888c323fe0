//! The dimensions of the vision tower, and the limits of image sizes.

use crate::{
    error::ModelError,
    model::json_table::{JsonTable, refuse},
};
use moestro_base::{error::StoreError, platform::read_json_file};
use serde_json::Value;
use std::path::Path;

/// Maximum size of a processor configuration in bytes.
const MAX_BYTES: u64 = 1 << 20;
/// Number of pixels of the smallest and of the largest image, if the checkpoint does not define these limits.
const PIXELS: [u64; 2] = [65_536, 16_777_216];
/// Number of colour channels.
pub const CHANNELS: usize = 3;

/// The tower's dimensions, from `vision_config`.
#[derive(Debug, Clone, PartialEq)]
pub struct VisionConfig {
    pub depth: usize,
    pub hidden: usize,
    pub heads: usize,
    pub intermediate: usize,
    /// Width of the merged rows: the text model's hidden size.
    pub out_hidden: usize,
    /// Number of pixels per side of a patch.
    pub patch: usize,
    /// Number of frames per patch. A still image is repeated for each frame.
    pub frames: usize,
    /// Number of patches per side of the block that becomes one token.
    pub merge: usize,
    /// Number of rows, and of columns, of the position table.
    pub table_side: usize,
    pub rope_theta: f32,
    /// The token id that is the placeholder for each token of an image.
    pub image_token: u32,
}

/// Scaling and normalisation of images.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ImageLimits {
    /// Number of pixels of the smallest image.
    pub min_pixels: u64,
    /// Number of pixels of the largest image.
    pub max_pixels: u64,
    /// The sides of a scaled image are multiples of this: the side of a block of patches in pixels.
    pub factor: usize,
    pub mean: [f32; CHANNELS],
    pub std: [f32; CHANNELS],
}

impl VisionConfig {
    /// Reads a parsed `config.json`. `text_hidden` is the text model's hidden size.
    pub fn new(json: &Value, text_hidden: usize) -> Result<Self, ModelError> {
        let Some(vision) = json.get("vision_config").filter(|vision| vision.is_object()) else {
            return refuse("vision_config is missing".into());
        };
        let table = JsonTable(vision);
        let deepstack = vision.get("deepstack_visual_indexes").and_then(Value::as_array);
        if deepstack.is_some_and(|indexes| !indexes.is_empty()) {
            return refuse("deepstack_visual_indexes is not supported".into());
        }
        let activation = vision.get("hidden_act").and_then(Value::as_str);
        if let Some(other) = activation.filter(|name| *name != "gelu_pytorch_tanh") {
            return refuse(format!("vision hidden_act {other} is not supported, only gelu_pytorch_tanh"));
        }
        let rope = vision.get("rope_parameters");
        let theta = rope.and_then(|rope| rope.get("rope_theta")).and_then(Value::as_f64).unwrap_or(10_000.0);
        let entries = table.count_or("num_position_embeddings", 1 << 20, 2304)?;
        let config = Self {
            depth: table.count("depth", 1024)?,
            hidden: table.count("hidden_size", 1 << 16)?,
            heads: table.count("num_heads", 1 << 10)?,
            intermediate: table.count("intermediate_size", 1 << 20)?,
            out_hidden: table.count_or("out_hidden_size", 1 << 20, text_hidden)?,
            patch: table.count_or("patch_size", 64, 16)?,
            frames: table.count_or("temporal_patch_size", 16, 2)?,
            merge: table.count_or("spatial_merge_size", 16, 2)?,
            table_side: entries.isqrt(),
            rope_theta: theta as f32,
            image_token: match json.get("image_token_id").and_then(Value::as_u64).map(u32::try_from) {
                Some(Ok(id)) => id,
                _ => return refuse("image_token_id is missing".into()),
            },
        };
        if config.table_side.pow(2) != entries {
            return refuse(format!("num_position_embeddings {entries} is not a square"));
        }
        if !config.hidden.is_multiple_of(config.heads) || !(config.hidden / config.heads).is_multiple_of(4) {
            return refuse(format!("{} vision heads cannot share {} dimensions", config.heads, config.hidden));
        }
        if config.out_hidden != text_hidden {
            let found = config.out_hidden;
            return refuse(format!("the vision tower's rows have {found} values, the text model's {text_hidden}"));
        }
        if table.count_or("in_channels", 1 << 10, CHANNELS)? != CHANNELS {
            return refuse("in_channels is not 3".into());
        }
        Ok(config)
    }

    pub fn head_dim(&self) -> usize {
        self.hidden / self.heads
    }

    /// Number of values of a patch.
    pub fn patch_values(&self) -> usize {
        CHANNELS * self.frames * self.patch * self.patch
    }
}

impl ImageLimits {
    /// Reads `processor_config.json`, or `preprocessor_config.json` if the former does not exist. `min_pixels` and
    /// `max_pixels` take precedence over `size`. Despite their names, the `edge` fields of `size` are numbers of
    /// pixels, too.
    pub fn read(dir: &Path, config: &VisionConfig) -> Result<Self, ModelError> {
        let read = |name: &str| -> Result<Option<Value>, ModelError> {
            let path = dir.join(name);
            match read_json_file(&path, MAX_BYTES) {
                Ok(text) => serde_json::from_slice(&text)
                    .map(Some)
                    .map_err(|error| StoreError::NotACheckpoint { path, why: error.to_string() }.into()),
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
                Err(error) => Err(StoreError::at(&path)(error).into()),
            }
        };
        let nested =
            read("processor_config.json")?.and_then(|mut json| json.get_mut("image_processor").map(Value::take));
        let json = match nested.filter(Value::is_object) {
            Some(json) => json,
            None => read("preprocessor_config.json")?.unwrap_or(Value::Null),
        };
        Self::new(&json, config)
    }

    fn new(json: &Value, config: &VisionConfig) -> Result<Self, ModelError> {
        let pixels = |key: &str, edge: &str, default: u64| {
            let given = json.get(key).filter(|value| !value.is_null()).or_else(|| json.get("size")?.get(edge));
            match given.map(|value| (value, value.as_u64())) {
                None => Ok(default),
                Some((_, Some(pixels))) if (1..=1 << 40).contains(&pixels) => Ok(pixels),
                Some((value, _)) => refuse(format!("{key} of the image processor is {value}, not a count of pixels")),
            }
        };
        let three = |key: &str| match json.get(key) {
            None | Some(Value::Null) => Ok([0.5; CHANNELS]),
            Some(value) => {
                let values = value.as_array().map(|values| values.iter().filter_map(Value::as_f64).map(|v| v as f32));
                let values = values.and_then(|values| values.collect::<Vec<_>>().try_into().ok());
                values.map_or_else(|| refuse(format!("{key} of the image processor is {value}")), Ok)
            }
        };
        let limits = Self {
            min_pixels: pixels("min_pixels", "shortest_edge", PIXELS[0])?,
            max_pixels: pixels("max_pixels", "longest_edge", PIXELS[1])?,
            factor: config.patch * config.merge,
            mean: three("image_mean")?,
            std: three("image_std")?,
        };
        for (key, ours) in
            [("patch_size", config.patch), ("merge_size", config.merge), ("temporal_patch_size", config.frames)]
        {
            if json.get(key).and_then(Value::as_u64).is_some_and(|theirs| theirs != ours as u64) {
                return refuse(format!("{key} of the image processor is not the vision tower's {ours}"));
            }
        }
        if limits.std.contains(&0.0) || limits.min_pixels > limits.max_pixels {
            return refuse("the image processor's limits contradict each other".into());
        }
        Ok(limits)
    }

    /// The limits for images of at most `tokens` tokens.
    pub fn with_max_tokens(self, tokens: usize) -> Self {
        let max_pixels = self.max_pixels.min(tokens.saturating_mul(self.factor.pow(2)) as u64);
        Self { max_pixels, min_pixels: self.min_pixels.min(max_pixels), ..self }
    }

    /// Maximum number of tokens of an image. An image has at least one token, even if `max_pixels` is less.
    pub fn max_tokens(&self) -> usize {
        (self.max_pixels / self.factor.pow(2) as u64).max(1) as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    const FIXTURE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures/vision/hf_bf16");

    fn fixture() -> Value {
        serde_json::from_slice(&std::fs::read(format!("{FIXTURE}/config.json")).unwrap()).unwrap()
    }

    #[test]
    fn fixture_configuration_is_read() {
        let config = VisionConfig::new(&fixture(), 128).unwrap();
        assert_eq!((config.depth, config.hidden, config.table_side, config.image_token), (2, 64, 12, 1003));
        let limits = ImageLimits::read(Path::new(FIXTURE), &config).unwrap();
        assert_eq!((limits.min_pixels, limits.max_pixels, limits.factor), (4096, 65_536, 32));
        assert_eq!((limits.with_max_tokens(10).max_tokens(), limits.max_tokens()), (10, 64));
    }

    #[test]
    fn pixel_limits_win_over_size() {
        let config = VisionConfig::new(&fixture(), 128).unwrap();
        let read = |json: Value| {
            let limits = ImageLimits::new(&json, &config).unwrap();
            (limits.min_pixels, limits.max_pixels)
        };
        assert_eq!(read(Value::Null), (65_536, 16_777_216));
        assert_eq!(read(json!({"size": {"shortest_edge": 100, "longest_edge": 200}})), (100, 200));
        let both = json!({"min_pixels": 7, "max_pixels": 8, "size": {"shortest_edge": 100, "longest_edge": 200}});
        assert_eq!(read(both), (7, 8));
        for json in [json!({"patch_size": 14}), json!({"max_pixels": -1}), json!({"image_std": [0, 1, 1]})] {
            assert!(ImageLimits::new(&json, &config).is_err(), "{json}");
        }
    }

    #[test]
    fn unsupported_towers_are_refused() {
        for (key, value, word) in [
            ("deepstack_visual_indexes", json!([8]), "deepstack"),
            ("hidden_act", json!("gelu"), "hidden_act"),
            ("num_heads", json!(5), "heads"),
            ("num_position_embeddings", json!(145), "square"),
            ("out_hidden_size", json!(64), "text model"),
            ("depth", Value::Null, "depth"),
        ] {
            let mut json = fixture();
            json["vision_config"][key] = value;
            let error = VisionConfig::new(&json, 128).unwrap_err().to_string();
            assert!(error.contains(word), "{key}: {error}");
        }
    }
}
