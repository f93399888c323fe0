//! Damaged and hostile files must be used correctly or rejected with an error. No file may cause a panic, a hang, or
//! the use of more memory than the limit. `fuzz/` has the same targets for `cargo fuzz`.

use crate::shard::{self, Shard};
use moestro_base::{metrics::Metrics, platform::os};
use moestro_compute::experts::{ExpertStore, Options as StoreOptions, PassSize, ReadMode, WarmStart};
use moestro_model::{
    checkpoint::pack,
    model::{CheckpointInfo, LoadOptions, Model, Qwen, Rows},
};
use std::{
    fs,
    panic::{AssertUnwindSafe, catch_unwind},
    path::Path,
    time::{Duration, Instant},
};
use test_support::{
    mutate::{self, Dice},
    own_process::ran_in_own_process,
    random_cases::seeds,
};

/// A temporary directory in memory if possible, because these tests are not about the disk.
fn temp_dir() -> tempfile::TempDir {
    tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap()
}

/// Runs `case` with many seeds, and returns their number. No case may panic or take longer than a minute, and memory use
/// must not grow. Memory is that of the whole process, so each test runs in a process of its own.
fn for_each_seed(usual: u64, mut case: impl FnMut(&mut Dice)) -> usize {
    let before = os::resident_memory().unwrap_or(0);
    let seeds = seeds(usual);
    for seed in seeds.clone() {
        let begin = Instant::now();
        let outcome = catch_unwind(AssertUnwindSafe(|| case(&mut Dice(seed))));
        assert!(outcome.is_ok(), "case {seed} panicked");
        assert!(begin.elapsed() < Duration::from_secs(60), "case {seed} took {:?}", begin.elapsed());
    }
    let after = os::resident_memory().unwrap_or(0);
    assert!(after < before + (512 << 20), "{before} bytes resident before, {after} after");
    (seeds.end - seeds.start) as usize
}

/// Header, data and configuration of a small checkpoint.
fn micro(name: &str) -> (serde_json::Value, Vec<u8>, serde_json::Value) {
    let file = fs::read(format!("{}/tests/fixtures/micro/{name}.safetensors", env!("CARGO_MANIFEST_DIR"))).unwrap();
    let end = 8 + u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
    let mut header: serde_json::Value = serde_json::from_slice(&file[8..end]).unwrap();
    let more = header.as_object_mut().unwrap().remove("__metadata__").unwrap();
    let config = serde_json::from_str(more["config"].as_str().unwrap()).unwrap();
    (header, file[end..].to_vec(), config)
}

/// Loads a checkpoint if it fits into 64 MB, and runs a forward pass.
fn open(dir: &Path) -> Result<usize, String> {
    let mut options = LoadOptions { threads: Some(1), ..LoadOptions::default() };
    options.plan.context = Some(64);
    let found = CheckpointInfo::new(dir, &options).map_err(|error| error.to_string())?;
    // The test uses a lower memory limit than the plan for this machine, which would accept a large model.
    let footprint = found.footprint;
    let whole = footprint.weights().saturating_add(footprint.workspace_fixed);
    if whole > 64 << 20 || footprint.workspace_per_row > 1 << 20 {
        return Err("large".into());
    }
    let metrics = Metrics::new("test", "cpu");
    let mut model = Qwen::load(dir, &options, &metrics, &mut |_, _| ()).map_err(|error| error.to_string())?;
    let mut state = model.start().map_err(|error| error.to_string())?;
    let logits = model.forward(&mut state, &[1, 2, 3], Rows::Last).map_err(|error| error.to_string())?;
    Ok(logits.data.len())
}

#[test]
#[ignore = "long: 4,000 mutated checkpoints"]
fn mutated_checkpoints_open_or_fail_cleanly() {
    if ran_in_own_process(mutated_checkpoints_open_or_fail_cleanly) {
        return;
    }
    let names = ["affine4", "mixed", "mxfp4", "nvfp4", "dense4"];
    let whole = names.map(micro);
    let dir = temp_dir();
    let (mut opened, mut refused) = (0, 0);
    let count = for_each_seed(4_000, |dice| {
        let (header, data, config) = dice.pick(&whole);
        let (mut header, mut data, mut config) = (header.clone(), data.clone(), config.clone());
        let mut text = None;
        match dice.below(10) {
            0..=3 => mutate::json(dice, &mut header),
            4..=6 => mutate::json(dice, &mut config),
            7 => {
                let mut bytes = header.to_string().into_bytes();
                mutate::bytes(dice, &mut bytes);
                text = Some(bytes);
            }
            8 => mutate::bytes(dice, &mut data),
            _ => {
                mutate::json(dice, &mut header);
                mutate::json(dice, &mut config);
            }
        }
        let text = text.unwrap_or_else(|| header.to_string().into_bytes());
        let mut len = text.len() as u64;
        if dice.below(50) == 0 {
            len = dice.roll() >> dice.below(64);
        }
        fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
        fs::write(dir.path().join("model.safetensors"), [&len.to_le_bytes()[..], &text, &data].concat()).unwrap();
        match open(dir.path()) {
            Ok(_) => opened += 1,
            Err(why) => {
                assert!(!why.is_empty() && !why.contains('\n'), "{why}");
                refused += 1;
            }
        }
    });
    // If fewer checkpoints were opened or refused, the mutations would be too large or too small.
    assert!(opened > count / 40 && refused > count / 4, "{opened} opened, {refused} refused");
}

/// Number of bytes in each part of an expert.
const LEN: usize = 1750;

/// Reads every expert and compares its bytes with the checkpoint.
fn read_all(store: &ExpertStore, shard: &Shard) {
    for layer in 0..shard::LAYERS {
        for expert in 0..shard::EXPERTS {
            assert_eq!(shard.take(store, layer, &[expert as u32], PassSize::Small).unwrap(), 1);
        }
    }
}

#[test]
#[ignore = "long: 500 mutated packs"]
fn mutated_packs_never_serve_wrong_bytes() {
    if ran_in_own_process(mutated_packs_never_serve_wrong_bytes) {
        return;
    }
    let dir = temp_dir();
    let shard = Shard::new(dir.path(), LEN);
    let out = dir.path().join("model.pack");
    pack::write(&shard.map, &shard.files, &out, &|_| ()).unwrap();
    let names = ["manifest.json", "layer-000.experts", "layer-001.experts"];
    let whole = names.map(|name| fs::read(out.join(name)).unwrap());
    let manifest: serde_json::Value = serde_json::from_slice(&whole[0]).unwrap();
    let (mut unused, mut rebuilt) = (0, 0);
    let count = for_each_seed(500, |dice| {
        let target = dice.below(names.len());
        let mut changed = whole[target].clone();
        if target == 0 && dice.below(3) > 0 {
            let mut manifest = manifest.clone();
            mutate::json(dice, &mut manifest);
            changed = manifest.to_string().into_bytes();
        } else if target > 0 && dice.below(2) > 0 {
            // This simulates a lost disk block.
            let at = dice.below(changed.len() / 4096) * 4096;
            changed[at..at + 4096].iter_mut().for_each(|byte| *byte = !*byte);
        } else {
            mutate::bytes(dice, &mut changed);
        }
        fs::write(out.join(names[target]), &changed).unwrap();
        match pack::find(shard.dir(), &shard.map, &shard.files) {
            None => unused += 1,
            Some(pack) => {
                let options = StoreOptions {
                    io: ReadMode::Buffered,
                    threads: 2,
                    pack_records: Some(pack.records),
                    ..StoreOptions::new(3)
                };
                let metrics = Metrics::new("test", "cpu");
                match ExpertStore::open(pack.files, pack.map, options, metrics.clone()) {
                    Ok(store) => read_all(&store, &shard),
                    Err(_) => unused += 1,
                }
                rebuilt += usize::from(metrics.pack_damaged_records.get() > 0);
            }
        }
        fs::write(out.join(names[target]), &whole[target]).unwrap();
    });
    assert!(unused > count / 4 && rebuilt > count / 7, "{unused} not used, {rebuilt} rebuilt");
}

#[test]
fn mutated_hot_lists_are_harmless() {
    if ran_in_own_process(mutated_hot_lists_are_harmless) {
        return;
    }
    let dir = temp_dir();
    let shard = Shard::new(dir.path(), LEN);
    let file = dir.path().join("hot.json");
    let store = || {
        let warm_start = Some(WarmStart { file: file.clone(), identity: "me".into() });
        let options = StoreOptions { io: ReadMode::Buffered, threads: 2, warm_start, ..StoreOptions::new(4) };
        ExpertStore::open(shard.files.to_vec(), shard.map.clone(), options, Metrics::new("test", "cpu")).unwrap()
    };
    read_all(&store(), &shard);
    let whole = fs::read(&file).unwrap();
    let list: serde_json::Value = serde_json::from_slice(&whole).unwrap();
    for_each_seed(2_000, |dice| {
        let mut changed = whole.clone();
        if dice.below(2) > 0 {
            let mut list = list.clone();
            mutate::json(dice, &mut list);
            changed = list.to_string().into_bytes();
        } else {
            mutate::bytes(dice, &mut changed);
        }
        fs::write(&file, &changed).unwrap();
        let store = store();
        store.fill(&mut |_, _| ()).unwrap();
        read_all(&store, &shard);
    });
}
