//! Writes synthetic checkpoints. They have the dimensions, names, encodings and file layout of real models in MLX
//! 4-bit, and random weights. For example, they show how a machine runs the 122B model without a download of 70 GB.
//!
//! [`layout`] lists the tensors, and [`noise`] fills them. Each value is a function of the seed, the tensor's name and
//! the value's index, so the bytes do not depend on the number of threads or on the order of writing. A few threads
//! compute blocks of a few megabytes and write them in file order.

pub mod command;
mod layout;
mod noise;
mod options;

pub use options::{Dimensions, StreamDimensions, SynthOptions};

use layout::SynthTensor;
use moestro_base::error::StoreError;
use moestro_base::platform::{self, OnBytes, atomic_file::PartialDir, os};
use std::{
    fs::{self, File},
    io::{self, Write},
    os::unix::fs::FileExt,
    path::Path,
};

/// Number of bytes per block: large enough for sequential disk speed, small enough for the cache of a core.
const BLOCK: usize = 2 << 20;

/// Summary of the checkpoint that was written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SynthSummary {
    pub bytes: u64,
    pub tensors: usize,
    pub shards: usize,
}

/// Number of bytes of all tensors that `options` describe.
pub fn size(options: &SynthOptions) -> u64 {
    layout::tensors(options).iter().map(SynthTensor::bytes).sum()
}

/// Writes a checkpoint to the directory `out`, which must be missing or empty. The files are written to the directory
/// `.NAME.partial` next to `out`. That directory is renamed when it is complete, and removed on failure. `progress`
/// receives the number of bytes written since its last call.
///
/// # Errors
/// The dimensions are impossible, or the file system fails. A full disk is detected before writing if the file system
/// reports its free space.
pub fn write(out: &Path, options: &SynthOptions, progress: OnBytes<'_>) -> Result<SynthSummary, StoreError> {
    options.dimensions.check()?;
    let at = StoreError::at(out);
    if fs::read_dir(out).map_or(out.exists(), |mut entries| entries.next().is_some()) {
        return Err(StoreError::Other(format!("{} already exists; synth overwrites nothing", out.display())));
    }
    let tensors = layout::tensors(options);
    let bytes: u64 = tensors.iter().map(SynthTensor::bytes).sum();
    os::check_free_space(out, "the checkpoint", bytes, "").map_err(at)?;
    let partial = PartialDir::create(out).map_err(at)?;
    let shards = layout::shards(&tensors, options.shard);
    let mut map = serde_json::Map::new();
    for (index, shard) in shards.iter().enumerate() {
        let name = match shards.len() {
            1 => "model.safetensors".to_owned(),
            count => format!("model-{:05}-of-{count:05}.safetensors", index + 1),
        };
        map.extend(shard.iter().map(|tensor| (tensor.name.clone(), name.clone().into())));
        let path = partial.path().join(&name);
        write_shard(&path, shard, options.threads, progress).map_err(StoreError::at(&path))?;
    }
    map.sort_keys();
    let index = serde_json::json!({ "metadata": { "total_size": bytes }, "weight_map": map });
    let texts = [
        ("model.safetensors.index.json", index),
        ("config.json", layout::config(options)),
        ("generation_config.json", layout::generation_config(options)),
    ];
    let texts = texts.map(|(name, json)| (name.to_owned(), format!("{json:#}\n").into_bytes()));
    for (name, content) in texts.iter().chain(&options.extras) {
        let path = partial.path().join(name);
        let written = File::create_new(&path).and_then(|mut file| file.write_all(content));
        written.map_err(StoreError::at(&path))?;
    }
    partial.finish(out).map_err(at)?;
    Ok(SynthSummary { bytes, tensors: tensors.len(), shards: shards.len() })
}

/// Writes a checkpoint of headers and sparse files to `dir`. Such a checkpoint takes almost no space and is enough to
/// plan memory.
///
/// # Errors
/// The file system fails.
pub fn outline(dir: &Path, dimensions: Dimensions) -> Result<(), StoreError> {
    let seed = 0;
    let router_skew = 0.0;
    let shard = u64::MAX;
    let threads = 1;
    // A model with an n-gram table needs an end-of-sequence token, which separates texts.
    let eos_token_ids = vec![0];
    let extras = Vec::new();
    let options = SynthOptions { dimensions, seed, router_skew, shard, threads, eos_token_ids, extras };
    let weights = dir.join("model.safetensors");
    let config = dir.join("config.json");
    let tensors = layout::tensors(&options);
    let header = layout::header(&tensors);
    let bytes = tensors.iter().map(SynthTensor::bytes).sum::<u64>() + header.len() as u64;
    let made = File::create_new(&weights).and_then(|mut file| {
        file.write_all(&header)?;
        file.set_len(bytes)
    });
    made.map_err(StoreError::at(&weights))?;
    fs::write(&config, layout::config(&options).to_string()).map_err(StoreError::at(&config))
}

fn write_shard(path: &Path, tensors: &[SynthTensor], threads: usize, progress: OnBytes<'_>) -> io::Result<()> {
    let file = File::create_new(path)?;
    let header = layout::header(tensors);
    file.write_all_at(&header, 0)?;
    let mut blocks = Vec::new();
    let mut start = header.len() as u64;
    for tensor in tensors {
        let bytes = tensor.bytes();
        blocks.extend((0..bytes).step_by(BLOCK).map(|from| (tensor, from, start)));
        start += bytes;
    }
    let fill = |(tensor, from, start): (&SynthTensor, u64, u64), block: &mut Vec<u8>| {
        let len = (tensor.bytes() - from).min(BLOCK as u64) as usize;
        let part = &mut block[..len];
        tensor.fill(from, part);
        file.write_all_at(part, start + from).map(|()| progress(len as u64))
    };
    platform::run_jobs("synth", threads, blocks, || Ok(vec![0; BLOCK]), fill)?;
    file.sync_all()
}

#[cfg(test)]
mod tests;
