//! `moestro bench --image`: the time from an image to the first token, step by step.

use super::report::median;
use crate::{command::text::show, error::CommandError};
use moestro_base::platform::{os, read_small_file};
use moestro_model::{
    error::ModelError,
    model::{Image, ImageProcessor, Model, PassHooks, PlacedImage, Qwen, Rows},
    plan::Size,
};
use serde::Serialize;
use std::{fmt, path::Path, sync::Arc, time::Instant};

/// Duration of each step in seconds.
#[derive(Debug, Clone, Copy, Serialize)]
struct ImageRun {
    /// Time to decode and scale the image.
    prepare: f64,
    tower: f64,
    /// Time to evaluate the prompt, which has the text and the image's tokens.
    prompt: f64,
    first_token: f64,
}

#[derive(Debug, Serialize)]
struct ImageReport {
    file: String,
    /// Height of the image in the vision tower, in pixels.
    height: usize,
    /// Width of the image in the vision tower, in pixels.
    width: usize,
    image_tokens: usize,
    prompt_tokens: usize,
    runs: Vec<ImageRun>,
    /// Median of each step.
    median: ImageRun,
    /// Number of bytes that the plan reserves for images.
    planned: u64,
    /// Limit of the whole memory plan in bytes.
    limit: u64,
    /// Peak memory of the process in bytes.
    peak_memory: Option<u64>,
}

/// Measures the steps `repeat` times. `prompt` is the text before the image.
pub fn run(model: &mut Qwen, file: &Path, prompt: &[u32], repeat: usize, json: bool) -> Result<(), CommandError> {
    let failed = |why: String| CommandError::Usage(format!("--image {}: {why}", file.display()));
    let encoded = read_small_file(file, ImageProcessor::MAX_ENCODED_BYTES as u64);
    let encoded = encoded.map_err(|error| failed(error.to_string()))?;
    let mut runs = Vec::new();
    let mut last = None;
    for _ in 0..repeat {
        let processor = model.info().images.ok_or_else(|| failed("this model cannot see images".into()))?;
        processor.forget();
        model.release_images();
        let begin = Instant::now();
        let image = processor.prepare(&encoded, None).map_err(|error| failed(format!("the image {error}")))?;
        let prepared = Instant::now();
        model.encode_image(&image)?;
        let encoded = Instant::now();
        evaluate(model, prompt, &image, processor.image_token)?;
        let end = Instant::now();
        let seconds = |from: Instant, to: Instant| (to - from).as_secs_f64();
        runs.push(ImageRun {
            prepare: seconds(begin, prepared),
            tower: seconds(prepared, encoded),
            prompt: seconds(encoded, end),
            first_token: seconds(begin, end),
        });
        last = Some(image);
    }
    let Some(image) = last else { return Ok(()) };
    let of = |step: fn(&ImageRun) -> f64| median(runs.iter().map(step).collect());
    let median = ImageRun {
        prepare: of(|run| run.prepare),
        tower: of(|run| run.tower),
        prompt: of(|run| run.prompt),
        first_token: of(|run| run.first_token),
    };
    let report = ImageReport {
        file: file.display().to_string(),
        height: image.pixels.height,
        width: image.pixels.width,
        image_tokens: image.tokens(),
        prompt_tokens: prompt.len() + image.tokens(),
        runs,
        median,
        planned: model.plan().vision,
        limit: model.plan().limit,
        peak_memory: os::peak_resident_memory(),
    };
    show(&report, json);
    Ok(())
}

/// Evaluates the prompt with the image at its end.
fn evaluate(model: &mut Qwen, prompt: &[u32], image: &Arc<Image>, placeholder: u32) -> Result<(), ModelError> {
    let images = [PlacedImage { at: prompt.len(), image: image.clone() }];
    let ids = [prompt, &vec![placeholder; image.tokens()]].concat();
    let mut state = model.start()?;
    for chunk in ids.chunks(model.info().chunk) {
        let mut hooks = PassHooks { images: &images, ..PassHooks::default() };
        model.forward_with(&mut state, chunk, Rows::Last, &mut hooks)?;
    }
    Ok(())
}

impl fmt::Display for ImageReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { file, height, width, image_tokens, prompt_tokens, runs, median, .. } = self;
        writeln!(f, "{file}: {width} x {height} in the tower, {image_tokens} of {prompt_tokens} prompt tokens")?;
        writeln!(f)?;
        writeln!(f, "run      prepare s   tower s   prompt s   first token s")?;
        let mut line = |name: &str, run: &ImageRun| {
            let ImageRun { prepare, tower, prompt, first_token } = run;
            writeln!(f, "{name:<8} {prepare:>9.3} {tower:>9.3} {prompt:>10.3} {first_token:>15.3}")
        };
        for (index, run) in runs.iter().enumerate() {
            line(&(index + 1).to_string(), run)?;
        }
        if runs.len() > 1 {
            line("median", median)?;
        }
        let Some(peak) = self.peak_memory else { return Ok(()) };
        let planned = Size(self.planned);
        let limit = Size(self.limit);
        writeln!(f)?;
        writeln!(f, "peak memory {} under a limit of {limit}, {planned} of it for images", Size(peak))
    }
}
