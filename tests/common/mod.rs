//! Helpers shared by integration tests: loading a model, and reading reference tensors.
#![allow(dead_code)] // Each test binary uses a part of it.

pub mod fixtures;
pub mod fp8_checkpoint;
pub mod qwen4_exp;
pub mod qwen4_images;
pub mod sequence_mix;
pub mod tensor_file;

use moestro::tools::synth::{self, Dimensions, SynthOptions};
use moestro_base::metrics::Metrics;
use moestro_compute::{
    device::CpuArithmetic,
    experts::{ExpertChoice, PassSize},
};
use moestro_engine::{Finish, Handle, Request, Timings, collect};
use moestro_model::model::{LoadOptions, Logits, Model, PassHooks, Qwen, QwenState, Rows, Snapshot};
use std::{
    collections::HashMap,
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
};

/// Deterministic pseudo-random numbers.
pub struct Dice(pub u64);

impl Dice {
    pub fn roll(&mut self, sides: usize) -> usize {
        self.0 = self.0.wrapping_mul(0x5851_F42D_4C95_7F2D).wrapping_add(0x1405_7B7E_F767_814F);
        ((self.0 >> 33) as usize) % sides
    }

    /// Random token ids of the demo.
    pub fn tokens(&mut self, count: usize) -> Vec<u32> {
        (0..count).map(|_| 100 + self.roll(1500) as u32).collect()
    }
}

/// Dimensions of a model with all kinds of tensors of `real`. The model has a vocabulary of 300 tokens and is a
/// sixteenth as wide as the 35B.
pub fn narrow(real: Dimensions) -> Dimensions {
    Dimensions {
        hidden: 128,
        heads: 2,
        kv_heads: 1,
        head_dim: 64,
        linear_key_heads: 2,
        linear_value_heads: 4,
        linear_head_dim: 32,
        experts: 16,
        expert_hidden: 64,
        shared_hidden: 64,
        vocab: 300,
        ..real
    }
}

/// Writes a model with these dimensions and random weights to `root`. Returns its directory.
pub fn write_model(root: &Path, dimensions: Dimensions, seed: u64) -> PathBuf {
    write_synthetic(root, synth_options(dimensions, seed))
}

pub fn synth_options(dimensions: Dimensions, seed: u64) -> SynthOptions {
    let (eos_token_ids, extras) = (Vec::new(), Vec::new());
    SynthOptions { dimensions, seed, router_skew: 0.5, eos_token_ids, shard: 1 << 20, threads: 2, extras }
}

/// Writes a synthetic model to `root`. Returns its directory.
pub fn write_synthetic(root: &Path, options: SynthOptions) -> PathBuf {
    let out = root.join("model");
    synth::write(&out, &options, &|_| ()).unwrap();
    out
}

/// The model in `dir` with the given arithmetic, on two threads.
pub fn load(dir: &Path, math: CpuArithmetic) -> Qwen {
    load_with(dir, LoadOptions { math, threads: Some(2), ..LoadOptions::default() })
}

pub fn load_with(dir: &Path, mut options: LoadOptions) -> Qwen {
    options.plan.context = options.plan.context.or(Some(2048));
    Qwen::load(dir, &options, &Metrics::new("test", "cpu"), &mut |_, _| ())
        .unwrap_or_else(|error| panic!("{}: {error}", dir.display()))
}

/// The error of loading the checkpoint in `dir`, in one line.
pub fn load_error(dir: &Path) -> String {
    let loaded = Qwen::load(dir, &LoadOptions::default(), &Metrics::new("test", "cpu"), &mut |_, _| ());
    let error = loaded.err().expect("it was loaded").to_string();
    assert!(!error.contains('\n'), "{error}");
    error
}

/// The tensors of a safetensors file as f32 (integers included), by name.
pub fn tensors(path: &Path) -> HashMap<String, Vec<f32>> {
    let bytes = std::fs::read(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let values = |tensor: safetensors::tensor::TensorView<'_>| -> Vec<f32> {
        let words = tensor.data().as_chunks::<4>().0.iter();
        match tensor.dtype() {
            safetensors::Dtype::F32 => words.map(|word| f32::from_le_bytes(*word)).collect(),
            safetensors::Dtype::I32 => words.map(|word| i32::from_le_bytes(*word) as f32).collect(),
            safetensors::Dtype::F16 => {
                let halves = tensor.data().as_chunks::<2>().0.iter();
                halves.map(|half| half::f16::from_le_bytes(*half).to_f32()).collect()
            }
            safetensors::Dtype::I64 => {
                let words = tensor.data().as_chunks::<8>().0.iter();
                words.map(|word| i64::from_le_bytes(*word) as f32).collect()
            }
            safetensors::Dtype::U8 => tensor.data().iter().map(|byte| f32::from(*byte)).collect(),
            other => panic!("{other:?}"),
        }
    };
    file.tensors().into_iter().map(|(name, tensor)| (name, values(tensor))).collect()
}

/// The experts that a layer's router chose: `k` for each token, in token order.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Routes {
    pub k: usize,
    pub ids: Vec<u32>,
}

/// Records each layer's router choices until the list is emptied. Passes of a dense model, and those of a few rows on a
/// GPU with all experts in memory, record nothing.
pub fn record_routes(model: &Qwen) -> Arc<Mutex<Vec<Routes>>> {
    let routes = Arc::new(Mutex::new(vec![Routes::default(); model.config().layers]));
    let log = routes.clone();
    if let Some(store) = model.store() {
        store.observe(Box::new(move |layer: usize, choice: &ExpertChoice<'_>, _: PassSize| {
            if let Some(routes) = log.lock().unwrap().get_mut(layer) {
                routes.k = choice.k;
                routes.ids.extend_from_slice(choice.ids);
            }
        }));
    }
    routes
}

/// Runs a prompt in chunks of `chunk` tokens. Returns its logits, the state, and each layer's router choices.
pub fn prefill(model: &mut Qwen, ids: &[u32], chunk: usize) -> (Logits, QwenState, Vec<Routes>) {
    let routes = record_routes(model);
    let mut state = model.start().unwrap();
    let mut logits = Vec::new();
    for ids in ids.chunks(chunk) {
        logits.extend_from_slice(&model.forward(&mut state, ids, Rows::All).unwrap().data);
    }
    let routes = std::mem::take(&mut *routes.lock().unwrap());
    (Logits { vocab: model.info().vocab, data: logits.into() }, state, routes)
}

/// Runs one pass that takes a snapshot at each of the positions `at`.
pub fn forward_with_snapshots(
    model: &mut Qwen,
    state: &mut QwenState,
    ids: &[u32],
    rows: Rows,
    at: &[usize],
) -> (Logits, Vec<Snapshot>) {
    let mut hooks = PassHooks { snapshot_at: at, ..PassHooks::default() };
    let logits = model.forward_with(state, ids, rows, &mut hooks).unwrap();
    (logits, hooks.snapshots)
}

/// Decodes greedily from the row `last`. Returns the ids, and the row of logits after each id.
pub fn decode(model: &mut Qwen, state: &mut QwenState, last: &[f32], count: usize) -> (Vec<u32>, Vec<f32>) {
    let (mut ids, mut rows, mut row) = (Vec::new(), Vec::new(), last.to_vec());
    for _ in 0..count {
        ids.push(argmax(&row));
        let next = model.forward(state, &[ids[ids.len() - 1]], Rows::Last).unwrap();
        rows.extend(std::mem::replace(&mut row, next.data.to_vec()));
    }
    (ids, rows)
}

/// The tokens of an answer, and its finish reason with timings, or its error.
pub fn ask(handle: &Handle, request: Request) -> (Vec<u32>, Result<(Finish, Timings), String>) {
    let (generated, end) = collect(handle.submit(request).unwrap());
    (generated, end.map_err(|error| error.to_string()))
}

pub fn argmax(row: &[f32]) -> u32 {
    let best = row.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1).then(b.0.cmp(&a.0)));
    best.unwrap().0 as u32
}

/// Largest allowed difference between the logits of the forward pass and the logits of mlx-lm or of the reference.
pub fn bound(math: CpuArithmetic) -> f32 {
    if math == CpuArithmetic::F32 { 2e-4 } else { 1e-3 }
}

/// The largest absolute difference between two values at the same position.
pub fn distance(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    let worst = a
        .iter()
        .zip(b)
        .map(|(a, b)| (a - b).abs())
        .fold(0.0, |worst: f32, d| if d > worst || d.is_nan() { d } else { worst });
    assert!(!worst.is_nan());
    worst
}

/// The difference between the largest value and the second largest value.
pub fn margin(row: &[f32]) -> f32 {
    let mut row = row.to_vec();
    row.sort_by(|a, b| b.total_cmp(a));
    row[0] - row[1]
}
