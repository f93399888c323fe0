//! Images in prompts: turns encoded bytes into rows that replace the embeddings of the image's tokens.
//!
//! | file | what it holds |
//! |---|---|
//! | `config` | dimensions of the tower, limits of image sizes |
//! | `decode`, `pixel_blocks`, `resize`, `patches` | bytes to pixels, without metadata, to the tower's size, to its input rows |
//! | `jpeg_frame` | memory of the decoder of JPEG |
//! | `webp_tables` | memory of a WebP file's Huffman tables |
//! | `processor` | all of these for one image |
//! | `image` | an image and its place in a prompt; cache keys of its tokens |
//! | `tower`, `weights`, `activation` | patches to rows, in Candle tensors |
//! | `work_limit` | work that a GPU gets at once |
//! | `row_cache` | rows of recent images |

mod activation;
mod config;
mod decode;
mod image;
mod jpeg_frame;
mod patches;
mod pixel_blocks;
mod processor;
mod resize;
mod row_cache;
mod tower;
mod webp_tables;
mod weights;
mod work_limit;

pub use config::{ImageLimits, VisionConfig};
pub use image::{Image, PlacedImage, place_images, prefix_keys};
pub use processor::ImageProcessor;
#[cfg(test)]
pub use resize::RgbImage;
pub use tower::VisionTower;

use crate::{checkpoint::index::Index, error::ModelError, model::config as model_config};
use candle_core::Device;
use moestro_base::{
    metrics::Metrics,
    platform::{
        Threads,
        os::{MemoryLevel, MemoryMonitor},
    },
};
use row_cache::ImageRowCache;
use std::{
    cell::RefCell,
    path::Path,
    sync::{Arc, Weak},
    time::Instant,
};
use weights::TowerWeights;
use work_limit::WorkLimit;

/// Maximum size of the rows of recent images in bytes.
const ROW_CACHE_BYTES: usize = 32 << 20;

/// Returns the system's memory level.
type MemoryCheck = Box<dyn FnMut() -> MemoryLevel + Send>;

/// The vision tower of a loaded model, with the rows of recent images.
pub struct Vision {
    tower: VisionTower,
    cache: RefCell<ImageRowCache>,
    /// The image in which the last chunk with images ended. The next chunk of that prompt needs its rows again. The
    /// request owns the image, so the reference is dead after the request has ended.
    unfinished: RefCell<Weak<Image>>,
    pub processor: Arc<ImageProcessor>,
    metrics: Arc<Metrics>,
    /// The memory check of a model without an expert store, and the time of the next check.
    memory: RefCell<(MemoryCheck, Instant)>,
}

/// Opens the vision tower of the checkpoint in `dir`. Returns `None` if the checkpoint has no vision tower. If the
/// tower cannot be used, logs a warning and returns `None`; the model then reads text only.
pub fn open(dir: &Path, index: &Index, text_hidden: usize) -> Option<VisionTower> {
    let open = || -> Result<Option<VisionTower>, ModelError> {
        let Some(weights) = TowerWeights::open(index.clone())? else { return Ok(None) };
        let config = VisionConfig::new(&model_config::json(dir)?, text_hidden)?;
        weights.check(&config)?;
        let limits = ImageLimits::read(dir, &config)?;
        Ok(Some(VisionTower { config, limits, weights, work: WorkLimit::new(Device::Cpu) }))
    };
    open().unwrap_or_else(|error| {
        tracing::warn!(%error, "cannot use the vision tower; the model reads text only");
        None
    })
}

impl VisionTower {
    /// Limits images to at most this many tokens.
    pub fn with_max_tokens(self, tokens: usize) -> Self {
        Self { limits: self.limits.with_max_tokens(tokens), ..self }
    }

    /// If `on_gpu` is true and Candle can open a Metal device, the tower computes on that device in bf16.
    pub fn on_gpu(self, on_gpu: bool) -> Self {
        let device = if on_gpu { crate::model::open_candle_gpu() } else { None };
        match device {
            Some(device) => {
                let work = WorkLimit::new(device.clone());
                Self { weights: self.weights.on_gpu(device), work, ..self }
            }
            None => self,
        }
    }

    /// Reads and converts weights on these threads.
    pub fn on_threads(self, threads: Arc<Threads>) -> Self {
        Self { weights: self.weights.on_threads(threads), ..self }
    }

    /// Number of bytes for the memory plan: the buffers for one image, the caches, and the weights if they stay on a
    /// GPU. On a GPU, Candle rounds the size of each result up to a power of two.
    pub fn bytes(&self, on_gpu: bool) -> u64 {
        // The cache always keeps the rows of the newest image, even if they exceed its limit.
        let rows = (4 * self.limits.max_tokens() * self.config.out_hidden).max(ROW_CACHE_BYTES);
        let caches = rows + processor::RECENT_BYTES;
        let workspace = Self::workspace(&self.config, self.limits.max_tokens());
        let on_device = if on_gpu { TowerWeights::gpu_bytes(&self.config) + workspace } else { 0 };
        workspace + on_device + caches as u64
    }
}

impl Vision {
    pub fn new(tower: VisionTower, metrics: Arc<Metrics>) -> Self {
        let processor = Arc::new(ImageProcessor::new(tower.limits, tower.config.image_token));
        let mut monitor = MemoryMonitor::open();
        let memory = RefCell::new((Box::new(move || monitor.check()) as MemoryCheck, Instant::now()));
        let cache = RefCell::new(ImageRowCache::new(ROW_CACHE_BYTES));
        Self { tower, cache, unfinished: RefCell::default(), processor, metrics, memory }
    }

    /// Checks the system's memory at most once per 250 ms. Returns true if memory is short.
    pub fn memory_is_short(&self) -> bool {
        let (check, next) = &mut *self.memory.borrow_mut();
        let now = Instant::now();
        if now < *next {
            return false;
        }
        *next = now + MemoryMonitor::CHECK_INTERVAL;
        matches!(check(), MemoryLevel::Short(_))
    }

    /// Returns the rows `[tokens, hidden]` of an image, from the cache if possible.
    pub fn rows(&self, image: &Image, keep_going: Option<&dyn Fn() -> bool>) -> Result<Arc<Vec<f32>>, ModelError> {
        if let Some(rows) = self.cache.borrow_mut().get(&image.hash) {
            self.metrics.images_cache.inc();
            return Ok(rows);
        }
        let begun = Instant::now();
        let rows = Arc::new(self.tower.rows(image, keep_going)?);
        let seconds = begun.elapsed().as_secs_f64();
        self.metrics.images_tower.inc();
        self.metrics.vision_tower_seconds.inc_by(seconds);
        tracing::debug!(tokens = image.tokens(), seconds, "computed an image's rows");
        self.cache_rows(image.hash, rows.clone());
        Ok(rows)
    }

    /// Replaces the check of the system's memory.
    #[cfg(test)]
    pub fn set_memory_check(&self, check: impl FnMut() -> MemoryLevel + Send + 'static) {
        *self.memory.borrow_mut() = (Box::new(check), Instant::now());
    }

    pub(super) fn cache_rows(&self, hash: [u8; 32], rows: Arc<Vec<f32>>) {
        self.cache.borrow_mut().insert(hash, rows);
    }

    /// Notes whether the current chunk ends inside `image`, or at the end of `image` or later.
    pub fn set_finished(&self, image: &Arc<Image>, is_finished: bool) {
        let mut unfinished = self.unfinished.borrow_mut();
        match is_finished {
            false => *unfinished = Arc::downgrade(image),
            true if unfinished.as_ptr() == Arc::as_ptr(image) => *unfinished = Weak::new(),
            true => {}
        }
    }

    /// Frees the memory of cached rows and weights, which can be computed or read again. Keeps the rows of an image that
    /// a running prompt has begun, because the tower would have to compute them again for the next chunk.
    pub fn release(&self) {
        self.tower.weights.release();
        // Candle keeps the memory of dropped tensors until the next wait.
        if let Err(error) = self.tower.work.wait() {
            tracing::warn!(%error, "cannot wait for the GPU; it keeps the weights of the vision tower");
        }
        self.processor.forget();
        let unfinished = self.unfinished.borrow().upgrade();
        self.cache.borrow_mut().retain_only(unfinished.map(|image| image.hash));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::names::vision_name;
    use std::cell::Cell;

    fn fixture(name: &str) -> (VisionTower, Index) {
        let dir = format!("{}/../../tests/fixtures/vision/{name}", env!("CARGO_MANIFEST_DIR"));
        let dir = Path::new(&dir);
        let hidden = model_config::json(dir).unwrap()["text_config"]["hidden_size"].as_u64().unwrap();
        let index = Index::open(dir).unwrap();
        (open(dir, &index, hidden as usize).unwrap(), index)
    }

    #[test]
    fn tower_waits_for_each_block() {
        let (tower, _) = fixture("hf_bf16");
        let pixels = RgbImage { height: 64, width: 96, data: vec![7; 64 * 96 * 3] };
        let image = Image { height: 2, width: 3, pixels, ..Image::default() };
        // A request can be cancelled after each block, because the device has computed it.
        let called = Cell::new(0);
        let keep_going = || {
            assert_eq!(tower.work.most().1, called.get());
            called.set(called.get() + 1);
            true
        };
        tower.rows(&image, Some(&keep_going)).unwrap();
        assert_eq!(called.get(), tower.config.depth);
        assert!(matches!(tower.rows(&image, Some(&|| false)), Err(ModelError::GivenUp)));
    }

    #[test]
    fn weights_that_are_zero_are_refused() {
        let (_, index) = fixture("mlx_4bit");
        let image = Image {
            height: 2,
            width: 2,
            pixels: RgbImage { height: 64, width: 64, data: vec![7; 64 * 64 * 3] },
            ..Image::default()
        };
        let matrices = ["patch_embed.proj", "blocks.0.attn.qkv", "blocks.1.mlp.linear_fc2", "merger.linear_fc1"];
        for part in matrices.into_iter().chain(["blocks.0.norm1", "blocks.1.norm2", "merger.norm"]) {
            let dir = tempfile::tempdir().unwrap();
            let mut bytes = std::fs::read(&index.files[0]).unwrap();
            let zeroed = index.tensors.iter().filter(|(name, _)| name.contains(&format!("{part}.")));
            zeroed.for_each(|(_, entry)| bytes[entry.offset as usize..][..entry.len].fill(0));
            std::fs::write(dir.path().join("model.safetensors"), bytes).unwrap();
            std::fs::copy(index.dir.join("config.json"), dir.path().join("config.json")).unwrap();
            let index = Index::open(dir.path()).unwrap();
            let hidden = model_config::json(dir.path()).unwrap()["text_config"]["hidden_size"].as_u64().unwrap();
            let tower = open(dir.path(), &index, hidden as usize).unwrap();
            let error = tower.rows(&image, None).unwrap_err().to_string();
            assert!(error.contains(&format!("{part}.weight is zero")), "{part}: {error}");
        }
    }

    /// A GPU computes with bf16 whatever the checkpoint has.
    #[test]
    fn plan_counts_the_blocks_as_bf16() {
        let (tower, index) = fixture("hf_bf16");
        let is_in_block = |name: &str| name.contains(".blocks.") && vision_name(name).is_some();
        let blocks = index.tensors.iter().filter(|(name, _)| is_in_block(name));
        let bytes: u64 = blocks.map(|(_, entry)| entry.shape.iter().product::<usize>() as u64 * 2).sum();
        assert_eq!(TowerWeights::gpu_bytes(&tower.config), bytes);
        assert!(tower.bytes(true) > tower.bytes(false) + bytes);
    }
}
