//! Compares results for images with those of transformers, on two small vision-language checkpoints, one in Hugging
//! Face's layout and one in MLX's layout. The fixture is described in `tests/fixtures/vision/README.md`.

use crate::common::{argmax, ask, distance, tensors};
use candle_core::{DType, Device};
use moestro_base::metrics::Metrics;
use moestro_compute::device::CpuArithmetic;
use moestro_engine::{self as engine, DraftPolicy, LookupDraft, Options, Request, Sampling};
use moestro_model::model::{Image, LoadOptions, Model, PassHooks, PlacedImage, Qwen, Reference, Rows, place_images};
use std::{path::Path, sync::Arc};

const FIXTURE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/vision");

/// A conversation of the fixture: its tokens, and its images together with the rows that transformers' tower computes
/// for them.
struct Chat {
    name: String,
    ids: Vec<u32>,
    images: Vec<(PlacedImage, Vec<f32>)>,
}

fn chats() -> Vec<Chat> {
    let refs: serde_json::Value =
        serde_json::from_slice(&std::fs::read(format!("{FIXTURE}/refs.json")).unwrap()).unwrap();
    let stages = tensors(Path::new(&format!("{FIXTURE}/images.safetensors")));
    let number = |value: &serde_json::Value| value.as_u64().unwrap() as usize;
    let chat = |(name, chat): (&String, &serde_json::Value)| {
        let ids: Vec<u32> = chat["ids"].as_array().unwrap().iter().map(|id| number(id) as u32).collect();
        let mut at = 0;
        let place = |(index, image): (usize, &serde_json::Value)| {
            let image = image.as_str().unwrap();
            let grid = &refs["images"][image]["grid_thw"];
            let (height, width) = (number(&grid[1]) / 2, number(&grid[2]) / 2);
            let image_at = at + ids[at..].iter().position(|id| *id == 1003).unwrap();
            at = image_at + height * width;
            let rows = stages[&format!("{image}.merged")].clone();
            (
                PlacedImage {
                    at: image_at,
                    image: Arc::new(Image { hash: [index as u8; 32], height, width, ..Image::default() }),
                },
                rows,
            )
        };
        let images = chat["images"].as_array().unwrap().iter().enumerate().map(place).collect();
        Chat { name: name.clone(), images, ids }
    };
    refs["chats"].as_object().unwrap().iter().map(chat).collect()
}

#[test]
fn reference_matches_transformers_with_images() {
    for (dir, tag) in [("mlx_4bit", "mlx4"), ("hf_bf16", "hf")] {
        let reference = Reference::open(Path::new(&format!("{FIXTURE}/{dir}")), Device::Cpu, DType::F32).unwrap();
        for Chat { name, ids, images, .. } in chats() {
            let expected = tensors(Path::new(&format!("{FIXTURE}/chat_{name}.safetensors")));
            let greedy: Vec<u32> = expected[&format!("{tag}.greedy")].iter().map(|id| *id as u32).collect();
            let vocab = 1024;
            // One call computes the prompt and the answer.
            let all = [&ids[..], &greedy[..greedy.len() - 1]].concat();
            let computed = reference.forward_with_images(&all, &images).unwrap();
            let logits = computed.logits.flatten_all().unwrap().to_vec1::<f32>().unwrap();
            let prompt = &expected[&format!("{tag}.prompt_logits")];
            let end = ids.len() * vocab;
            let found = distance(&logits[end - prompt.len()..end], prompt);
            assert!(found < 2e-4, "{dir}, chat {name}, prompt: {found}");
            let found = distance(&logits[end - vocab..], &expected[&format!("{tag}.decode_logits")]);
            assert!(found < 2e-4, "{dir}, chat {name}, answer: {found}");
            let ids: Vec<u32> = logits[end - vocab..].chunks(vocab).map(argmax).collect();
            assert_eq!(ids, greedy, "{dir}, chat {name}");
        }
    }
}

/// A model of the fixture, on two threads, with at most `slots` expert slots.
fn load(dir: &str, slots: Option<usize>) -> Qwen {
    let mut options =
        LoadOptions { math: CpuArithmetic::F32, threads: Some(2), verify: true, ..LoadOptions::default() };
    (options.plan.context, options.store.slots) = (Some(256), slots);
    let dir = format!("{FIXTURE}/{dir}");
    Qwen::load(Path::new(&dir), &options, &Metrics::new("test", "cpu"), &mut |_, _| ()).unwrap()
}

/// The ids of a conversation, with one placeholder per image, and the prepared images.
fn prompt(model: &Qwen, chat: &str) -> (Vec<u32>, Vec<PlacedImage>) {
    let refs: serde_json::Value =
        serde_json::from_slice(&std::fs::read(format!("{FIXTURE}/refs.json")).unwrap()).unwrap();
    let ids = refs["chats"][chat]["ids_unexpanded"].as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32);
    let processor = model.info().images.unwrap();
    let prepare = |image: &serde_json::Value| {
        let file = refs["images"][image.as_str().unwrap()]["file"].as_str().unwrap();
        processor.prepare(&std::fs::read(format!("{FIXTURE}/images/{file}")).unwrap(), None).unwrap()
    };
    let images: Vec<Arc<Image>> = refs["chats"][chat]["images"].as_array().unwrap().iter().map(prepare).collect();
    let (ids, images) = place_images(ids.collect(), &images, processor.image_token).unwrap();
    let expected: Vec<u32> =
        refs["chats"][chat]["ids"].as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect();
    assert_eq!(ids, expected);
    (ids, images)
}

#[test]
fn tower_matches_transformers() {
    let stages = tensors(Path::new(&format!("{FIXTURE}/images.safetensors")));
    for dir in ["mlx_4bit", "hf_bf16"] {
        let model = load(dir, None);
        // The third image is a JPEG, whose pixels depend on the decoder.
        for (name, file) in [("gradient", "gradient.png"), ("shapes", "shapes.png")] {
            let encoded = std::fs::read(format!("{FIXTURE}/images/{file}")).unwrap();
            let image = model.info().images.unwrap().prepare(&encoded, None).unwrap();
            let rows = model.encode_image(&image).unwrap();
            let found = distance(&rows, &stages[&format!("{name}.merged")]);
            assert!(found < 2e-5, "{dir}, {name}: {found}");
        }
    }
}

#[test]
fn answers_match_transformers_from_the_files() {
    let vocab = 1024;
    for (dir, tag) in [("mlx_4bit", "mlx4"), ("hf_bf16", "hf")] {
        let expected = tensors(Path::new(&format!("{FIXTURE}/chat_one.safetensors")));
        // The model has 4 layers of 4 experts. Each token uses 2 experts per layer.
        for slots in [None, Some(8)] {
            let mut model = load(dir, slots);
            let (ids, images) = prompt(&model, "one");
            for chunk in [1, 5, ids.len()] {
                let (mut state, mut logits) = (model.start().unwrap(), Vec::new());
                for ids in ids.chunks(chunk) {
                    let mut hooks = PassHooks { images: &images, ..PassHooks::default() };
                    logits = model.forward_with(&mut state, ids, Rows::Last, &mut hooks).unwrap().data.to_vec();
                }
                for (step, row) in expected[&format!("{tag}.decode_logits")].chunks(vocab).enumerate() {
                    let found = distance(&logits, row);
                    assert!(found < 2e-4, "{dir}, {slots:?} slots, chunks of {chunk}, step {step}: {found}");
                    let id = expected[&format!("{tag}.greedy")][step] as u32;
                    assert_eq!(argmax(&logits), id, "{dir}, step {step}");
                    logits = model.forward(&mut state, &[id], Rows::Last).unwrap().data.to_vec();
                }
            }
        }
    }
}

#[test]
fn drafts_do_not_change_answers_with_images() {
    let mut answers = Vec::new();
    // The answers consist of only three different tokens, which repeat, so that drafts are found.
    let sampling = Sampling { logit_bias: vec![(100, 50.0), (101, 50.0), (102, 50.0)], ..Sampling::greedy() };
    for speculate in [DraftPolicy::Off, DraftPolicy::Force] {
        let model = load("mlx_4bit", None);
        let (ids, images) = prompt(&model, "two");
        let options = Options { speculate, ..Options::default() };
        let metrics = Metrics::new("test", "cpu");
        let (handle, worker) = engine::spawn_with(model, Box::new(LookupDraft), options, metrics).unwrap();
        let request = Request { images, ..Request::new(ids, 40, sampling.clone()) };
        let (tokens, end) = ask(&handle, request);
        answers.push(tokens);
        assert!(speculate == DraftPolicy::Off || end.unwrap().1.drafted_tokens > 0);
        drop(handle);
        worker.join().unwrap();
    }
    assert_eq!(answers[0], answers[1]);
    assert_eq!(answers[0].len(), 40);
}

#[test]
fn answers_with_images_are_as_alone() {
    for slots in [None, Some(8)] {
        let start = |parallel: usize| {
            let options = Options { parallel, max_queue: 16, ..Options::default() };
            engine::spawn(load("mlx_4bit", slots), options, Metrics::new("test", "cpu")).unwrap()
        };
        let model = load("mlx_4bit", None);
        let requests: Vec<Request> = (0..6)
            .map(|seed| {
                let (ids, images) = prompt(&model, ["one", "two"][seed % 2]);
                // Every third request is text only.
                let (ids, images) = if seed % 3 == 2 { (ids[..5].to_vec(), Vec::new()) } else { (ids, images) };
                let sampling = Sampling { seed: Some(seed as u64), ..Sampling::default() };
                Request { images, ignore_eos: true, ..Request::new(ids, 12, sampling) }
            })
            .collect();
        let (handle, worker) = start(1);
        let alone: Vec<_> = requests.iter().map(|request| ask(&handle, request.clone()).0).collect();
        handle.drain();
        worker.join().unwrap();

        let (handle, worker) = start(4);
        let all: Vec<_> = requests.into_iter().map(|request| handle.submit(request).unwrap()).collect();
        let found: Vec<_> = all.into_iter().map(|events| engine::collect(events).0).collect();
        handle.drain();
        worker.join().unwrap();
        assert_eq!(found, alone, "{slots:?} slots");
        assert_ne!(found[0], found[4], "the seed or the image changes the answer");
    }
}
