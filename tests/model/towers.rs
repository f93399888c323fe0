//! Tests vision towers of other dimensions and encodings: rows of images of odd sizes match a reference, quantized
//! weights load, and caches are freed. `tests/fixtures/vision/towers.py` writes the towers.

use crate::common::{
    distance,
    tensor_file::{self, Tensors, serialized},
    tensors,
};
use half::bf16;
use moestro_base::metrics::Metrics;
use moestro_model::model::{LoadOptions, Model, Qwen};
use safetensors::{Dtype, SafeTensors};
use serde_json::Value;
use std::{ops::Deref, path::Path, sync::Arc};
use tempfile::TempDir;

const FIXTURE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/vision");

fn read(name: &str) -> Vec<u8> {
    std::fs::read(format!("{FIXTURE}/{name}")).unwrap()
}

/// A model and its directory. The directory must outlive the model, because the weights of the tower are read for each
/// image.
struct TestModel {
    model: Qwen,
    _dir: TempDir,
}

impl Deref for TestModel {
    type Target = Qwen;

    fn deref(&self) -> &Qwen {
        &self.model
    }
}

/// The fixture's text model with another tower.
fn load(tower: &Tensors, vision_config: &Value, processor: &Value) -> TestModel {
    let dir = tempfile::tempdir().unwrap();
    for name in ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"] {
        std::fs::write(dir.path().join(name), read(&format!("hf_bf16/{name}"))).unwrap();
    }
    let mut config: Value = serde_json::from_slice(&read("hf_bf16/config.json")).unwrap();
    config["vision_config"] = vision_config.clone();
    std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
    std::fs::write(dir.path().join("preprocessor_config.json"), processor.to_string()).unwrap();
    for shard in 1..=2 {
        let mut text = tensor_file::read(&read(&format!("hf_bf16/model.safetensors-0000{shard}-of-00002.safetensors")));
        text.retain(|name, _| !name.contains("visual"));
        std::fs::write(dir.path().join(format!("model-{shard}.safetensors")), serialized(&text)).unwrap();
    }
    std::fs::write(dir.path().join("model-tower.safetensors"), serialized(tower)).unwrap();
    let mut options = LoadOptions { threads: Some(2), ..LoadOptions::default() };
    options.plan.context = Some(256);
    let model = Qwen::load(dir.path(), &options, &Metrics::new("test", "cpu"), &mut |_, _| ()).unwrap();
    TestModel { model, _dir: dir }
}

/// Draws the same picture as `towers.py`.
fn picture(height: usize, width: usize) -> Vec<u8> {
    let value = |y: usize, x: usize, c: usize| (x * (7 + 2 * c) + y * (13 - c) + x * y * (c + 1)) as u8;
    let pixels: Vec<u8> =
        (0..height).flat_map(|y| (0..width).flat_map(move |x| (0..3).map(move |c| value(y, x, c)))).collect();
    let mut out = Vec::new();
    let encoder = image::codecs::png::PngEncoder::new(&mut out);
    let colour = image::ExtendedColorType::Rgb8;
    image::ImageEncoder::write_image(encoder, &pixels, width as u32, height as u32, colour).unwrap();
    out
}

fn rows(model: &Qwen, height: usize, width: usize) -> Arc<Vec<f32>> {
    let image = model.info().images.unwrap().prepare(&picture(height, width), None).unwrap();
    model.encode_image(&image).unwrap()
}

#[test]
fn other_towers_match_reference() {
    let bytes = read("towers.safetensors");
    let (_, metadata) = SafeTensors::read_metadata(&bytes).unwrap();
    let towers: Value = serde_json::from_str(&metadata.metadata().as_ref().unwrap()["towers"]).unwrap();
    let all = tensor_file::read(&bytes);
    for (name, tower) in towers.as_object().unwrap() {
        let prefix = format!("{name}/");
        let own =
            all.iter().filter_map(|(path, tensor)| Some((path.strip_prefix(&prefix)?.to_owned(), tensor.clone())));
        let (stored, expected): (Tensors, Tensors) = own.partition(|(path, _)| path.contains('.'));
        let model = load(&stored, &tower["vision_config"], &tower["processor"]);
        assert_eq!(expected.len(), tower["sizes"].as_array().unwrap().len());
        for (size, (_, _, data)) in expected {
            let (height, width) = size.split_once('x').unwrap();
            let words = data.as_chunks::<4>().0.iter();
            let expected: Vec<f32> = words.map(|word| f32::from_le_bytes(*word)).collect();
            let found = distance(&rows(&model, height.parse().unwrap(), width.parse().unwrap()), &expected);
            assert!(found < 2e-5, "{name}, {size}: {found}");
        }
    }
}

/// Quantizes a matrix to affine codes as MLX stores them, in groups of 32. Also returns the dequantized values.
fn quantize(path: &str, [rows, cols]: [usize; 2], data: &[u8], bits: usize) -> [Tensors; 2] {
    let values: Vec<f32> = data.as_chunks::<2>().0.iter().map(|bytes| bf16::from_le_bytes(*bytes).to_f32()).collect();
    let (mut codes, mut scales, mut biases, mut plain) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for group in values.chunks_exact(32) {
        let (min, max) = group.iter().fold((f32::MAX, f32::MIN), |(a, b), value| (a.min(*value), b.max(*value)));
        let levels = ((1u32 << bits) - 1) as f32;
        let (scale, bias) = (bf16::from_f32((max - min) / levels), bf16::from_f32(min));
        let code = |value: &f32| ((value - bias.to_f32()) / scale.to_f32()).round().clamp(0.0, levels) as u32;
        for word in group.chunks_exact(32 / bits) {
            let word = word.iter().enumerate().fold(0, |word, (at, value)| word | code(value) << (at * bits));
            codes.extend(word.to_le_bytes());
        }
        plain
            .extend(group.iter().flat_map(|value| (code(value) as f32 * scale.to_f32() + bias.to_f32()).to_le_bytes()));
        scales.extend(scale.to_le_bytes());
        biases.extend(bias.to_le_bytes());
    }
    let tensor = |part: &str, dtype: Dtype, cols: usize, bytes: Vec<u8>| {
        (format!("{path}.{part}"), (dtype, vec![rows, cols], bytes))
    };
    let quantized = [
        tensor("weight", Dtype::U32, cols * bits / 32, codes),
        tensor("scales", Dtype::BF16, cols / 32, scales),
        tensor("biases", Dtype::BF16, cols / 32, biases),
    ];
    [quantized.into(), [tensor("weight", Dtype::F32, cols, plain)].into()]
}

#[test]
fn quantized_tower_matches_its_dequantized_weights() {
    let mut tower = tensor_file::read(&read("mlx_4bit/model.safetensors"));
    tower.retain(|name, _| name.starts_with("vision_tower."));
    let config: Value = serde_json::from_slice(&read("mlx_4bit/config.json")).unwrap();
    let processor: Value = serde_json::from_slice(&read("mlx_4bit/preprocessor_config.json")).unwrap();
    let exact = tensors(Path::new(&format!("{FIXTURE}/images.safetensors")));
    for bits in [4, 8] {
        let [mut packed, mut plain] = [tower.clone(), tower.clone()];
        let mut count = 0;
        for (name, (_, shape, data)) in &tower {
            if let (Some(path), [rows, cols]) = (name.strip_suffix(".weight"), &shape[..])
                && cols.is_multiple_of(32)
            {
                let [quantized, dequantized] = quantize(path, [*rows, *cols], data, bits);
                packed.extend(quantized);
                plain.extend(dequantized);
                count += 1;
            }
        }
        // The quantized matrices are qkv, proj and fc1 of each block, two matrices of the merger, and the position
        // table. fc2 is not quantized, because its 136 columns are not a multiple of 32.
        assert_eq!(count, 2 * 3 + 3);
        let [packed, plain] = [packed, plain].map(|tower| load(&tower, &config["vision_config"], &processor));
        for (height, width) in [(64, 96), (33, 200)] {
            let found = distance(&rows(&packed, height, width), &rows(&plain, height, width));
            assert!(found < 1e-5, "{bits} bits, {height} x {width}: {found}");
        }
        // The quantized weights approximate the weights of the fixture, so the rows are similar but not equal.
        let image = packed.info().images.unwrap().prepare(&read("images/gradient.png"), None).unwrap();
        let found = distance(&packed.encode_image(&image).unwrap(), &exact["gradient.merged"]);
        assert!((1e-4..2.0).contains(&found), "{bits} bits: {found}");
    }
}

#[test]
fn released_rows_are_computed_again() {
    let mut options = LoadOptions { threads: Some(2), ..LoadOptions::default() };
    options.plan.context = Some(256);
    let dir = format!("{FIXTURE}/mlx_4bit");
    let metrics = Metrics::new("test", "cpu");
    let model = Qwen::load(Path::new(&dir), &options, &metrics, &mut |_, _| ()).unwrap();
    assert!(model.plan().vision > 0, "images are in the plan");
    let first = rows(&model, 40, 50);
    assert!(Arc::ptr_eq(&first, &rows(&model, 40, 50)), "the second request takes the cached rows");
    model.release_images();
    assert_eq!(Arc::strong_count(&first), 1, "the cache holds no rows after a release");
    let again = rows(&model, 40, 50);
    assert!(!Arc::ptr_eq(&first, &again));
    assert_eq!(first, again);
}
