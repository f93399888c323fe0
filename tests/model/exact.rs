//! Tests of exactness: greedy output and logits must not depend on slots, read mode, I/O threads and their order,
//! prefetching, or chunk size.

use crate::common::{decode, fixtures::DEMO, load_with, narrow, prefill, write_model};
use moestro::tools::synth;
use moestro_base::platform::Access;
use moestro_compute::experts::{Prefetch, ReadMode, ShardFiles};
use moestro_model::{
    error::ModelError,
    model::{LoadOptions, Model, PassHooks, Qwen, Rows, StoreOptions},
};
use std::{
    cell::Cell,
    path::{Path, PathBuf},
};

/// Settings that must not change results.
#[derive(Debug, Clone, Copy)]
struct Settings {
    slots: usize,
    io: ReadMode,
    io_threads: usize,
    prefetch: Prefetch,
    chunk: usize,
    threads: usize,
}

/// The answer, and the bits of every logit of the prompt and the answer.
fn run(dir: &Path, prompt: &[u32], tokens: usize, way: Settings) -> (Vec<u32>, Vec<u32>) {
    let Settings { slots, io, io_threads, prefetch, chunk, threads } = way;
    let store = StoreOptions { slots: Some(slots), io, threads: io_threads, prefetch, ..StoreOptions::default() };
    let options = LoadOptions { threads: Some(threads), store, ..LoadOptions::default() };
    let mut model = load_with(dir, options);
    assert_eq!(model.store().map(|store| store.slots()), Some(slots), "{way:?}");
    let (logits, mut state, _) = prefill(&mut model, prompt, chunk);
    let (ids, rows) = decode(&mut model, &mut state, logits.row(logits.rows() - 1), tokens);
    let bits = logits.data.iter().chain(&rows).map(|logit| logit.to_bits()).collect();
    (ids, bits)
}

/// Checks that every setting gives the same results as the first setting. The working set of a token is `per_token`
/// experts in each of `layers` layers.
fn check(dir: &Path, prompt: &[u32], tokens: usize, layers: usize, experts: usize, per_token: usize) {
    let all = layers * experts;
    let shards: Vec<PathBuf> = std::fs::read_dir(dir)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|ending| ending == "safetensors"))
        .collect();
    let direct = if ShardFiles::open(&shards, Access::Direct).is_ok() { ReadMode::Direct } else { ReadMode::Buffered };
    let plain = Settings {
        slots: all,
        io: ReadMode::Buffered,
        io_threads: 4,
        prefetch: Prefetch::Off,
        chunk: prompt.len(),
        threads: 2,
    };
    let (ids, bits) = run(dir, prompt, tokens, plain);
    assert_eq!(ids.len(), tokens);
    let few = layers * per_token;
    let mut ways = Vec::new();
    for slots in [all / 2, all / 4, few, per_token] {
        for io in [direct, ReadMode::Buffered] {
            ways.push(Settings { slots, io, prefetch: Prefetch::On, ..plain });
        }
    }
    for io_threads in [1, 2, 8, 32] {
        for prefetch in [Prefetch::On, Prefetch::Off, Prefetch::Auto] {
            ways.push(Settings { slots: all / 4, io: direct, io_threads, prefetch, ..plain });
        }
    }
    for chunk in [1, 2, 7, 16] {
        ways.push(Settings { slots: few, io: ReadMode::Auto, chunk, ..plain });
        ways.push(Settings { chunk, threads: 1, ..plain });
    }
    for way in ways {
        let (other_ids, other_bits) = run(dir, prompt, tokens, way);
        assert_eq!(other_ids, ids, "{way:?}");
        assert_eq!(other_bits.len(), bits.len());
        let first = other_bits.iter().zip(&bits).position(|(a, b)| a != b);
        assert_eq!(first, None, "{way:?}: a logit differs");
    }
}

#[test]
#[ignore = "exhaustive: all settings"]
fn demo_is_exact_under_all_settings() {
    let prompt: Vec<u32> = (0..40).map(|i| 100 + i * 37 % 1500).collect();
    check(Path::new(DEMO), &prompt, 24, 8, 32, 4);
}

#[test]
fn synthetic_model_is_exact() {
    let real = synth::Dimensions::of_35b();
    let dimensions = synth::Dimensions { layers: 5, experts_per_token: 4, ..narrow(real) };
    let root = tempfile::tempdir().unwrap();
    let out = write_model(root.path(), dimensions, 3);
    let prompt: Vec<u32> = (0..33).map(|i| i * 71 % 300).collect();
    check(&out, &prompt, 24, 5, 16, 4);
}

#[test]
fn aborted_pass_leaves_no_trace() {
    let (dir, prompt) = (Path::new(DEMO), (1..40).collect::<Vec<u32>>());
    let store = StoreOptions { slots: Some(24), prefetch: Prefetch::On, ..StoreOptions::default() };
    let mut model = load_with(dir, LoadOptions { threads: Some(2), store, ..LoadOptions::default() });
    let (expected, ..) = prefill(&mut model, &prompt, prompt.len());
    let layers = model.config().layers;
    for heard in 0..=layers {
        let (mut state, asked) = (model.start().unwrap(), Cell::new(0));
        let go_on = || asked.replace(asked.get() + 1) < heard;
        let mut hooks = PassHooks { snapshot_at: &[20], keep_going: Some(&go_on), ..PassHooks::default() };
        let ended = model.forward_with(&mut state, &prompt, Rows::All, &mut hooks);
        assert_eq!(matches!(ended, Err(ModelError::GivenUp)), heard < layers, "{heard}");
        assert_eq!(asked.get(), layers.min(heard + 1));
        drop(state);
        assert_eq!(prefill(&mut model, &prompt, prompt.len()).0.data, expected.data);
    }
}

#[test]
fn memory_of_dropped_logits_is_overwritten() {
    let mut model = load_with(Path::new(DEMO), LoadOptions { threads: Some(1), ..LoadOptions::default() });
    let prompt: Vec<u32> = (1..40).collect();
    let logits = |model: &mut Qwen, rows| {
        let mut state = model.start().unwrap();
        model.forward_with(&mut state, &prompt, rows, &mut PassHooks::default()).unwrap()
    };
    let logits_of_one = |model: &mut Qwen, token| {
        let mut state = model.start().unwrap();
        model.forward(&mut state, &[token], Rows::Last).unwrap()
    };
    let expected = logits(&mut model, Rows::Last).data.to_vec();
    for token in [7, 8] {
        let used = logits_of_one(&mut model, token);
        let memory = used.data.as_ptr();
        assert_ne!(logits(&mut model, Rows::Last).data.as_ptr(), memory, "logits in use are not overwritten");
        let used = logits_of_one(&mut model, token);
        let memory = used.data.as_ptr();
        drop(used);
        assert_eq!(logits(&mut model, Rows::None).rows(), 0);
        let found = logits(&mut model, Rows::Last);
        assert_eq!(*found.data, expected);
        assert_eq!(found.data.as_ptr(), memory, "the memory is reused");
    }
    assert_eq!(logits(&mut model, Rows::All).row(38), expected);
}
