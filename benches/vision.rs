//! Speed of the vision tower on the CPU, compared with plain matrix products of the same sizes in Candle and in the
//! same process.
//!
//! ```text
//! cargo bench --bench vision [-- HEIGHTxWIDTH...]
//! ```
//! Writes a random tower of the real models' dimensions (0.9 GB in bf16) to a temporary directory. Prints for each
//! image (480x640 and 1024x1024) its tokens, the seconds and CPU seconds of the tower and of the products alone, and
//! the ratios. On a busy machine only the CPU seconds mean something. `RAYON_NUM_THREADS` sets the threads of both.

use candle_core::{Device, Tensor};
use moestro_base::{metrics::Metrics, platform::os::cpu_seconds};
use moestro_model::model::{LoadOptions, Model, Qwen};
use safetensors::{Dtype, SafeTensors, tensor::TensorView};
use std::{hint::black_box, path::Path, time::Instant};

const FIXTURE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/vision/hf_bf16");
const HIDDEN: usize = 1152;
const HEADS: usize = 16;
const INTERMEDIATE: usize = 4304;
const DEPTH: usize = 27;
const PATCH_VALUES: usize = 1536;
const WIDE: usize = 4 * HIDDEN;
/// The text model's hidden size.
const OUT: usize = 128;

/// A tensor of bf16 values.
struct RandomTensor {
    name: String,
    shape: Vec<usize>,
    bytes: Vec<u8>,
}

fn tower() -> Vec<RandomTensor> {
    let mut tensors = Vec::new();
    let mut add = |name: &str, shape: &[usize]| {
        let mut bits = tensors.len() as u64;
        let mut value = |centre: f32| {
            bits = bits.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let uniform = (bits >> 40) as f32 / (1 << 24) as f32 - 0.5;
            ((centre + uniform * 0.07).to_bits() >> 16) as u16
        };
        let is_gain = name.contains("norm") && name.ends_with("weight");
        let count = shape.iter().product::<usize>();
        let bytes = (0..count).flat_map(|_| value(if is_gain { 1.0 } else { 0.0 }).to_le_bytes()).collect();
        tensors.push(RandomTensor { name: format!("model.visual.{name}"), shape: shape.to_vec(), bytes });
    };
    let mut layer = |name: &str, shape: &[usize]| {
        add(&format!("{name}.weight"), shape);
        add(&format!("{name}.bias"), &shape[..1]);
    };
    layer("patch_embed.proj", &[HIDDEN, 3, 2, 16, 16]);
    for block in 0..DEPTH {
        layer(&format!("blocks.{block}.norm1"), &[HIDDEN]);
        layer(&format!("blocks.{block}.norm2"), &[HIDDEN]);
        layer(&format!("blocks.{block}.attn.qkv"), &[3 * HIDDEN, HIDDEN]);
        layer(&format!("blocks.{block}.attn.proj"), &[HIDDEN, HIDDEN]);
        layer(&format!("blocks.{block}.mlp.linear_fc1"), &[INTERMEDIATE, HIDDEN]);
        layer(&format!("blocks.{block}.mlp.linear_fc2"), &[HIDDEN, INTERMEDIATE]);
    }
    layer("merger.norm", &[HIDDEN]);
    layer("merger.linear_fc1", &[WIDE, WIDE]);
    layer("merger.linear_fc2", &[OUT, WIDE]);
    add("pos_embed.weight", &[2304, HIDDEN]);
    tensors
}

/// The small text model of the fixture, with a random tower of real size.
fn write_checkpoint(dir: &Path) {
    let read = |name: &str| std::fs::read(format!("{FIXTURE}/{name}")).unwrap();
    for name in ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"] {
        std::fs::write(dir.join(name), read(name)).unwrap();
    }
    let mut config: serde_json::Value = serde_json::from_slice(&read("config.json")).unwrap();
    let sizes = [
        ("depth", DEPTH),
        ("hidden_size", HIDDEN),
        ("num_heads", HEADS),
        ("intermediate_size", INTERMEDIATE),
        ("num_position_embeddings", 2304),
    ];
    for (key, value) in sizes {
        config["vision_config"][key] = value.into();
    }
    std::fs::write(dir.join("config.json"), config.to_string()).unwrap();
    for shard in 1..=2 {
        let bytes = read(&format!("model.safetensors-0000{shard}-of-00002.safetensors"));
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let text = file.tensors().into_iter().filter(|(name, _)| !name.contains("visual"));
        safetensors::serialize_to_file(text, None, &dir.join(format!("model-{shard}.safetensors"))).unwrap();
    }
    let tower = tower();
    let views = tower
        .iter()
        .map(|tensor| (&tensor.name, TensorView::new(Dtype::BF16, tensor.shape.clone(), &tensor.bytes).unwrap()));
    safetensors::serialize_to_file(views, None, &dir.join("model-tower.safetensors")).unwrap();
}

/// `(rows, inner, columns, count)` of the matrix products of an image with this many patches.
fn products(patches: usize) -> Vec<[usize; 4]> {
    let dim = HIDDEN / HEADS;
    vec![
        [patches, PATCH_VALUES, HIDDEN, 1],
        [patches, HIDDEN, 3 * HIDDEN, DEPTH],
        [patches, dim, patches, DEPTH * HEADS],
        [patches, patches, dim, DEPTH * HEADS],
        [patches, HIDDEN, HIDDEN, DEPTH],
        [patches, HIDDEN, INTERMEDIATE, DEPTH],
        [patches, INTERMEDIATE, HIDDEN, DEPTH],
        [patches / 4, WIDE, WIDE, 1],
        [patches / 4, WIDE, OUT, 1],
    ]
}

/// Seconds, and seconds of all threads together.
#[derive(Clone, Copy, Default)]
struct Cost {
    wall: f64,
    cpu: f64,
}

impl Cost {
    fn of(work: impl FnOnce()) -> Self {
        let (begun, cpu) = (Instant::now(), cpu_seconds());
        work();
        Self { wall: begun.elapsed().as_secs_f64(), cpu: cpu_seconds() - cpu }
    }

    fn plus(self, other: Self, factor: f64) -> Self {
        Self { wall: self.wall + other.wall * factor, cpu: self.cpu + other.cpu * factor }
    }
}

/// The cost of the products, from the mean of up to eight of each size. Weights are transposed, as in the tower.
fn multiply(patches: usize) -> Cost {
    let add = |sum: Cost, [rows, inner, columns, count]: [usize; 4]| {
        let random = |shape: (usize, usize)| Tensor::randn(0f32, 1.0, shape, &Device::Cpu).unwrap();
        let (a, b) = (random((rows, inner)), random((columns, inner)).t().unwrap());
        let repeats = count.min(8);
        let once = || drop(black_box(a.matmul(&b).unwrap()));
        once();
        sum.plus(Cost::of(|| (0..repeats).for_each(|_| once())), count as f64 / repeats as f64)
    };
    products(patches).into_iter().fold(Cost::default(), add)
}

fn noise(height: usize, width: usize) -> Vec<u8> {
    let pixels: Vec<u8> = (0..height * width * 3).map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
    let mut out = Vec::new();
    let encoder = image::codecs::png::PngEncoder::new(&mut out);
    let colour = image::ExtendedColorType::Rgb8;
    image::ImageEncoder::write_image(encoder, &pixels, width as u32, height as u32, colour).unwrap();
    out
}

fn main() {
    let sizes: Vec<String> = std::env::args().skip(1).filter(|arg| !arg.starts_with("--")).collect();
    let sizes = if sizes.is_empty() { vec!["480x640".into(), "1024x1024".into()] } else { sizes };
    let dir = tempfile::tempdir().unwrap();
    write_checkpoint(dir.path());
    let mut options = LoadOptions::default();
    (options.plan.context, options.vision.max_tokens) = (Some(4096), Some(1024));
    let model = Qwen::load(dir.path(), &options, &Metrics::new("bench", "cpu"), &mut |_, _| ()).unwrap();
    let processor = model.info().images.unwrap();
    println!("{} threads", candle_core::utils::get_num_threads());
    println!(
        "image          tokens   tower s     cpu s   GFLOP/s   products s     cpu s   GFLOP/s   ratio   cpu ratio"
    );
    for size in sizes {
        let (height, width) = size.split_once('x').expect("HEIGHTxWIDTH");
        let encoded = noise(height.parse().unwrap(), width.parse().unwrap());
        let image = processor.prepare(&encoded, None).unwrap();
        let patches = 4 * image.tokens();
        let tower = Cost::of(|| drop(model.encode_image(&image).unwrap()));
        let alone = multiply(patches);
        let flops: f64 = products(patches).iter().map(|sizes| sizes.iter().product::<usize>() as f64 * 2e-9).sum();
        println!(
            "{size:<12} {:>8} {:>9.2} {:>9.2} {:>9.1} {:>12.2} {:>9.2} {:>9.1} {:>7.2} {:>11.2}",
            image.tokens(),
            tower.wall,
            tower.cpu,
            flops / tower.wall,
            alone.wall,
            alone.cpu,
            flops / alone.wall,
            alone.wall / tower.wall,
            alone.cpu / tower.cpu
        );
    }
}
