//! Tests of the fast pass with images, partly against transformers' logits. The rows of the images come from the fixture.

use super::*;
use moestro_base::{metrics::Metrics, platform::os::MemoryLevel};
use moestro_compute::device::CpuArithmetic;
use std::path::Path;
use test_support::files::copy_files;

const FIXTURE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures/vision");

fn tensors(file: &str) -> std::collections::HashMap<String, Vec<f32>> {
    let bytes = std::fs::read(format!("{FIXTURE}/{file}.safetensors")).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let floats = |data: &[u8]| data.as_chunks::<4>().0.iter().map(|word| f32::from_le_bytes(*word)).collect();
    let floating = file.tensors().into_iter().filter(|(_, tensor)| tensor.dtype() == safetensors::Dtype::F32);
    floating.map(|(name, tensor)| (name, floats(tensor.data()))).collect()
}

/// The conversation with two images: 55 tokens up to the second image, which has 2 rows of 5.
fn chat() -> (Vec<u32>, Vec<PlacedImage>) {
    let refs: serde_json::Value =
        serde_json::from_slice(&std::fs::read(format!("{FIXTURE}/refs.json")).unwrap()).unwrap();
    let ids = refs["chats"]["two"]["ids"].as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect();
    let image = |at, hash: u8, width| PlacedImage {
        at,
        image: Arc::new(Image { hash: [hash; 32], height: 2, width, ..Image::default() }),
    };
    (ids, vec![image(16, 1, 3), image(55, 2, 5)])
}

fn load(dir: &Path) -> Qwen {
    let mut options = LoadOptions { math: CpuArithmetic::F32, threads: Some(2), ..LoadOptions::default() };
    options.plan.context = Some(128);
    Qwen::load(dir, &options, &Metrics::new("test", "cpu"), &mut |_, _| ()).unwrap()
}

fn model(dir: &str) -> Qwen {
    let model = load(&Path::new(FIXTURE).join(dir));
    let stages = tensors("images");
    for (hash, image) in [(1, "gradient"), (2, "noise")] {
        let rows = Arc::new(stages[&format!("{image}.merged")].clone());
        model.parts.vision.as_ref().unwrap().cache_rows([hash; 32], rows);
    }
    model
}

#[test]
fn snapshot_inside_an_image_continues_exactly() {
    let (ids, images) = chat();
    let mut model = model("mlx_4bit");
    let mut state = model.start().unwrap();
    let mut hooks = PassHooks { images: &images, snapshot_at: &[10, 18, 22, 40, 61], ..PassHooks::default() };
    let whole = model.forward_with(&mut state, &ids, Rows::Last, &mut hooks).unwrap().data;
    let expected = &tensors("chat_two")["mlx4.prompt_logits"];
    let expected = &expected[expected.len() - whole.len()..];
    let distance = whole.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(distance < 2e-4, "transformers' logits differ by {distance}");
    for snapshot in hooks.snapshots {
        let mut state = model.restore(&snapshot, None).unwrap();
        let mut hooks = PassHooks { images: &images, ..PassHooks::default() };
        let rest = model.forward_with(&mut state, &ids[snapshot.len..], Rows::Last, &mut hooks).unwrap();
        assert_eq!((state.len, state.next), (74, 66), "from {}", snapshot.len);
        assert_eq!(rest.data, whole, "from {}", snapshot.len);
    }
}

/// The fixture's rows differ from those that the tower computes for an empty image, so wrong rows would be noticed.
#[test]
fn rows_of_an_unfinished_image_are_kept() {
    let (ids, mut images) = chat();
    images.truncate(1);
    let mut model = model("mlx_4bit");
    let rows = model.encode_image(&images[0].image).unwrap();
    let forward = |model: &mut Qwen, images: &[PlacedImage], state: &mut QwenState, ids: &[u32]| {
        let mut hooks = PassHooks { images, ..PassHooks::default() };
        model.forward_with(state, ids, Rows::Last, &mut hooks).unwrap().data.to_vec()
    };
    let mut state = model.start().unwrap();
    let whole = forward(&mut model, &images, &mut state, &ids[..40]);
    let mut state = model.start().unwrap();
    forward(&mut model, &images, &mut state, &ids[..20]);
    model.release_images();
    assert_eq!(Arc::strong_count(&rows), 2, "the prompt has begun the image");
    assert_eq!(forward(&mut model, &images, &mut state, &ids[20..40]), whole);
    model.release_images();
    assert_eq!(Arc::strong_count(&rows), 1, "the prompt has passed the image");

    let vision = model.parts.vision.as_ref().unwrap();
    vision.cache_rows(images[0].image.hash, rows.clone());
    let mut state = model.start().unwrap();
    forward(&mut model, &images, &mut state, &ids[..20]);
    drop(images);
    model.release_images();
    assert_eq!(Arc::strong_count(&rows), 1, "the request has ended");
}

/// Writes the fixture's model without its routed experts: the shared expert of a layer becomes its dense feed-forward.
fn write_dense_checkpoint(dir: &Path) {
    let fixture = Path::new(FIXTURE).join("hf_bf16");
    copy_files(&fixture, dir, &["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]);
    let config = std::fs::read_to_string(fixture.join("config.json")).unwrap();
    let mut config: serde_json::Value = serde_json::from_str(&config.replace("qwen3_5_moe", "qwen3_5")).unwrap();
    config["text_config"]["intermediate_size"] = 128.into();
    for key in ["num_experts", "num_experts_per_tok"] {
        config["text_config"].as_object_mut().unwrap().remove(key);
    }
    std::fs::write(dir.join("config.json"), config.to_string()).unwrap();
    for shard in 1..=2 {
        let bytes = std::fs::read(fixture.join(format!("model.safetensors-0000{shard}-of-00002.safetensors"))).unwrap();
        let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap().tensors();
        let is_routed =
            |name: &str| [".experts.", ".mlp.gate.", "_expert_gate."].iter().any(|part| name.contains(part));
        let dense = tensors.into_iter().filter(|(name, _)| !is_routed(name));
        let dense = dense.map(|(name, tensor)| (name.replace("shared_expert.", ""), tensor));
        safetensors::serialize_to_file(dense, None, &dir.join(format!("model-{shard}.safetensors"))).unwrap();
    }
}

#[test]
fn dense_model_frees_images_under_pressure() {
    let dir = tempfile::tempdir().unwrap();
    write_dense_checkpoint(dir.path());
    let mut model = load(dir.path());
    assert!(model.store().is_none());
    let rows = Arc::new(vec![0.0; 128]);
    model.parts.vision.as_ref().unwrap().cache_rows([1; 32], rows.clone());
    for (level, holders) in [(MemoryLevel::Enough, 2), (MemoryLevel::Short(1), 1)] {
        model.parts.vision.as_ref().unwrap().set_memory_check(move || level);
        model.fit_memory();
        assert_eq!(Arc::strong_count(&rows), holders, "{level:?}");
    }
}
