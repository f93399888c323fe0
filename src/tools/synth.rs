//! Writes synthetic checkpoints: dimensions, names, encodings and file layout of Qwen3.5 MoE in MLX 4-bit, with random
//! weights. They show how a machine runs the 122B model before anyone downloads 70 GB.
//!
//! [`layout`] lists the tensors, [`noise`] fills them. Each value is a function of the seed, the tensor's name and the
//! value's index, so bytes do not depend on threads or the order of writing. A few threads make and write blocks of a few
//! megabytes in file order.

pub mod command;
mod layout;
mod noise;

use crate::error::StoreError;
use crate::platform::{self, atomic_file::PartialDir};
use layout::SynthTensor;
use std::{
    fs::{self, File},
    io::{self, Write},
    os::unix::fs::FileExt,
    path::Path,
};

/// Bytes per block: large enough for sequential disk speed, small enough for the cache of a core.
const BLOCK: usize = 2 << 20;

/// Dimensions of a model, as in `config.json`. Every fourth layer has full attention.
#[derive(Debug, Clone, PartialEq)]
pub struct Dimensions {
    pub hidden: usize,
    pub layers: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub linear_key_heads: usize,
    pub linear_value_heads: usize,
    pub linear_head_dim: usize,
    pub experts: usize,
    pub experts_per_token: usize,
    pub expert_hidden: usize,
    pub shared_hidden: usize,
    pub vocab: usize,
}

impl Dimensions {
    /// Qwen3.5-35B-A3B and Qwen3.6-35B-A3B.
    pub fn of_35b() -> Self {
        Self {
            hidden: 2048,
            layers: 40,
            heads: 16,
            kv_heads: 2,
            head_dim: 256,
            linear_key_heads: 16,
            linear_value_heads: 32,
            linear_head_dim: 128,
            experts: 256,
            experts_per_token: 8,
            expert_hidden: 512,
            shared_hidden: 512,
            vocab: 248_320,
        }
    }

    /// Qwen3.5-122B-A10B.
    pub fn of_122b() -> Self {
        Self {
            hidden: 3072,
            layers: 48,
            heads: 32,
            linear_value_heads: 64,
            expert_hidden: 1024,
            shared_hidden: 1024,
            ..Self::of_35b()
        }
    }

    /// Qwen3.5-397B-A17B.
    pub fn of_397b() -> Self {
        Self { hidden: 4096, layers: 60, experts: 512, experts_per_token: 10, ..Self::of_122b() }
    }

    /// Dimensions of the model that `--like` names.
    pub fn of(name: &str) -> Option<Self> {
        match name {
            "35b" => Some(Self::of_35b()),
            "122b" => Some(Self::of_122b()),
            "397b" => Some(Self::of_397b()),
            _ => None,
        }
    }

    fn check(&self) -> Result<(), StoreError> {
        let refuse = |why: String| Err(StoreError::Other(why));
        if self.layers == 0 || self.vocab == 0 {
            return refuse("a model needs at least one layer and one token".into());
        }
        if self.experts < self.experts_per_token {
            let (e, k) = (self.experts, self.experts_per_token);
            return refuse(format!("{e} experts are too few: each token is routed to {k} of them"));
        }
        let inputs = [self.hidden, self.heads * self.head_dim, self.linear_value_heads * self.linear_head_dim];
        if inputs
            .iter()
            .chain([&self.expert_hidden, &self.shared_hidden])
            .any(|&n| n == 0 || !n.is_multiple_of(layout::GROUP))
        {
            return refuse(format!("every matrix needs a multiple of {} columns", layout::GROUP));
        }
        Ok(())
    }
}

/// The checkpoint to write.
#[derive(Debug, Clone)]
pub struct SynthOptions {
    pub dimensions: Dimensions,
    /// The same seed and dimensions give the same bytes.
    pub seed: u64,
    /// Standard deviation of the logarithm of the routers' row gains. With 0 all experts are about equally likely; larger values
    /// concentrate lookups on few experts.
    pub router_skew: f32,
    pub eos_token_ids: Vec<u32>,
    /// Maximum size of a shard in bytes.
    pub shard: u64,
    /// Threads that make and write blocks.
    pub threads: usize,
    /// Name and content of other files to write: tokenizer and template.
    pub extras: Vec<(String, Vec<u8>)>,
}

/// The checkpoint that was written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SynthSummary {
    pub bytes: u64,
    pub tensors: usize,
    pub shards: usize,
}

/// Bytes of all tensors that `options` describe.
pub fn size(options: &SynthOptions) -> u64 {
    layout::tensors(options).iter().map(SynthTensor::bytes).sum()
}

/// Writes a checkpoint to the directory `out`, which must be missing or empty. Files are written to `.NAME.partial` next to it,
/// which is renamed when complete and removed on failure. `progress` receives the bytes written since its last call.
///
/// # Errors
/// Fails on impossible dimensions and on file system errors. A full disk is detected before writing if the file system reports
/// its free space.
pub fn write(out: &Path, options: &SynthOptions, progress: &(dyn Fn(u64) + Sync)) -> Result<SynthSummary, StoreError> {
    options.dimensions.check()?;
    let at = |path: &Path| {
        let path = path.to_owned();
        move |source| StoreError::Io { path, source }
    };
    if fs::read_dir(out).map_or(out.exists(), |mut entries| entries.next().is_some()) {
        return Err(StoreError::Other(format!("{} already exists; synth overwrites nothing", out.display())));
    }
    let tensors = layout::tensors(options);
    let bytes: u64 = tensors.iter().map(SynthTensor::bytes).sum();
    if let Some(free) = crate::platform::os::free_space(out).filter(|&free| free < bytes + (64 << 20)) {
        let why = format!("{bytes} bytes are needed and {free} are free");
        return Err(at(out)(io::Error::new(io::ErrorKind::StorageFull, why)));
    }
    let partial = PartialDir::create(out).map_err(at(out))?;
    let shards = layout::shards(&tensors, options.shard);
    let mut map = serde_json::Map::new();
    for (index, shard) in shards.iter().enumerate() {
        let name = match shards.len() {
            1 => "model.safetensors".to_owned(),
            count => format!("model-{:05}-of-{count:05}.safetensors", index + 1),
        };
        map.extend(shard.iter().map(|tensor| (tensor.name.clone(), name.clone().into())));
        let path = partial.path().join(&name);
        write_shard(&path, shard, options.threads, progress).map_err(at(&path))?;
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
        File::create_new(&path).and_then(|mut file| file.write_all(content)).map_err(at(&path))?;
    }
    partial.finish(out).map_err(at(out))?;
    Ok(SynthSummary { bytes, tensors: tensors.len(), shards: shards.len() })
}

/// Writes a checkpoint of headers and sparse files to `dir`. It takes almost no space and is enough to plan memory.
///
/// # Errors
/// Fails on file system errors.
pub fn outline(dir: &Path, dimensions: Dimensions) -> Result<(), StoreError> {
    let (seed, router_skew, shard, threads) = (0, 0.0, u64::MAX, 1);
    let options =
        SynthOptions { dimensions, seed, router_skew, shard, threads, eos_token_ids: Vec::new(), extras: Vec::new() };
    let (weights, config) = (dir.join("model.safetensors"), dir.join("config.json"));
    let tensors = layout::tensors(&options);
    let header = layout::header(&tensors);
    let bytes = tensors.iter().map(SynthTensor::bytes).sum::<u64>() + header.len() as u64;
    let made = File::create_new(&weights).and_then(|mut file| {
        file.write_all(&header)?;
        file.set_len(bytes)
    });
    made.map_err(|source| StoreError::Io { path: weights, source })?;
    fs::write(&config, layout::config(&options).to_string()).map_err(|source| StoreError::Io { path: config, source })
}

fn write_shard(
    path: &Path,
    tensors: &[SynthTensor],
    threads: usize,
    progress: &(dyn Fn(u64) + Sync),
) -> io::Result<()> {
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
