//! Tests of packs through the command line. A pack of another checkpoint must never be used, and damaged records must
//! be rebuilt.

use crate::{process::Process, program, shard::Shard};
use moestro::tools::synth;
use moestro_base::{error::StoreError, metrics::Metrics};
use moestro_compute::{
    device::{CpuTimeline, SyncPoint},
    experts::{ExpertChoice, ExpertStore, Options, PassSize, Prefetch, ReadMode},
};
use moestro_model::{
    checkpoint::pack,
    model::{self, Model, Qwen, Rows, StoreOptions},
};
use serde_json::{Value, json};
use std::{
    fs::{self, File},
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    process::{Command, Output},
    time::Duration,
};
use test_support::{DEMO, files::copy_dir};

/// Copies the demo model to `root/name`.
fn checkpoint(root: &Path, name: &str) -> PathBuf {
    let dir = root.join(name);
    copy_dir(DEMO, &dir);
    dir
}

fn moestro(root: &Path, args: &[&str]) -> Output {
    let mut command = program::moestro(root);
    command.current_dir(root).env("XDG_CACHE_HOME", root.join("cache")).env("MOESTRO_LOG", "info");
    command.args(args).output().unwrap()
}

/// Runs `moestro generate` on the model in `dir`. Returns the answer and the output on stderr.
fn answer(root: &Path, dir: &str) -> (String, String) {
    let output = moestro(root, &["generate", dir, "-p", "What is 12+7?", "--temp", "0", "--thinking", "off"]);
    (String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap())
}

#[test]
fn experts_are_rehashed_only_after_file_changes() {
    let root = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let model = checkpoint(root.path(), "model").join("model.safetensors");
    // Wait until the files are settled, so that they have an identity.
    std::thread::sleep(Duration::from_millis(3100));
    let packed = moestro(root.path(), &["pack", "model"]);
    assert!(packed.status.success(), "{}", String::from_utf8_lossy(&packed.stderr));
    let hashed = "hashing the checkpoint's experts once";
    let used = "experts are read from their pack";
    let load = || {
        let (text, stderr) = answer(root.path(), "model");
        assert_eq!(text, "12 + 7 = 19.\n");
        assert!(stderr.contains(used), "{stderr}");
        stderr.contains(hashed)
    };
    assert!(!load(), "the packed files are known");
    // Replace a file with another file that has the same bytes.
    let other = root.path().join("other");
    fs::copy(&model, &other).unwrap();
    fs::rename(&other, &model).unwrap();
    std::thread::sleep(Duration::from_millis(3100));
    assert!(load(), "the new file is unknown");
    assert!(!load(), "the comparison was remembered");
    let again = moestro(root.path(), &["pack", "model"]);
    assert!(String::from_utf8_lossy(&again.stdout).contains("the pack is up to date"));
    let verified = moestro(root.path(), &["pack", "model", "--verify"]);
    let stderr = String::from_utf8_lossy(&verified.stdout).into_owned();
    assert!(verified.status.success() && stderr.contains("256 experts are identical to the checkpoint"), "{stderr}");
    let stdout = String::from_utf8(packed.stdout).unwrap();
    let (pack, _) = stdout.split_once(": ").unwrap();
    damage(Path::new(pack), 1, 1000);
    let verified = moestro(root.path(), &["pack", "model", "--verify"]);
    let stderr = String::from_utf8_lossy(&verified.stderr);
    assert!(!verified.status.success() && stderr.contains("layer 1"), "{stderr}");
}

/// The record stride of each layer of a pack.
fn strides(pack: &Path) -> Vec<u64> {
    let manifest: Value = serde_json::from_slice(&fs::read(pack.join("manifest.json")).unwrap()).unwrap();
    manifest["layers"].as_array().unwrap().iter().map(|layer| layer["stride"].as_u64().unwrap()).collect()
}

/// Changes `len` bytes of every record of a layer, at different offsets.
fn damage(pack: &Path, layer: usize, len: usize) {
    let stride = strides(pack)[layer];
    let path = pack.join(format!("layer-{layer:03}.experts"));
    let file = File::options().read(true).write(true).open(path).unwrap();
    for record in 0..file.metadata().unwrap().len() / stride {
        let at = record * stride + record * 8192 % (stride / 2);
        let mut block = vec![0; len];
        file.read_exact_at(&mut block, at).unwrap();
        block.iter_mut().for_each(|byte| *byte = !*byte);
        file.write_all_at(&block, at).unwrap();
    }
}

#[test]
fn damaged_record_is_rebuilt_from_checkpoint() {
    let dir = tempfile::tempdir().unwrap();
    let shard = Shard::new(dir.path(), 5000);
    let out = dir.path().join("model.pack");
    pack::write(&shard.map, &shard.files, &out, &|_| ()).unwrap();
    damage(&out, 1, 4096);
    let open = |io| {
        let pack = pack::find(shard.dir(), &shard.map, &shard.files).expect("its sizes and its checkpoint match");
        let options = Options { io, pack_records: Some(pack.records), ..Options::new(4) };
        let metrics = Metrics::new("0", "cpu");
        (ExpertStore::open(pack.files, pack.map, options, metrics.clone()).unwrap(), metrics)
    };
    for (io, size) in
        [(ReadMode::Buffered, PassSize::Small), (ReadMode::Auto, PassSize::Small), (ReadMode::Auto, PassSize::Large)]
    {
        let (store, metrics) = open(io);
        let damaged = || (metrics.pack_damaged_records.get(), metrics.ssd_errors.get());
        assert_eq!(shard.take(&store, 0, &[0, 1, 2, 3], size).unwrap(), 4);
        assert_eq!(damaged(), (0, 0));
        for round in 0..3 {
            for expert in 0..6 {
                assert_eq!(shard.take(&store, 1, &[expert, (expert + 2) % 6], size).unwrap(), 2);
                assert!(round == 0 || damaged() == (6, 6), "a damaged record was read again: {:?}", damaged());
            }
        }
    }

    let (store, metrics) = open(ReadMode::Auto);
    shard.take(&store, 1, &[5], PassSize::Small).unwrap();
    File::options().write(true).open(&shard.files[0]).unwrap().set_len(1000).unwrap();
    for expert in [2, 3, 2] {
        let error = shard.take(&store, 1, &[expert], PassSize::Small).unwrap_err();
        let StoreError::Read { layer: 1, expert: found, .. } = &error else { panic!("{error}") };
        let text = error.to_string();
        assert_eq!(*found as u32, expert, "{text}");
        let all = ["layer-001.experts", "checksum", "model.safetensors"];
        assert!(all.iter().all(|part| text.contains(part)), "{text}");
    }
    assert_eq!(metrics.pack_damaged_records.get(), 1, "a record that cannot be rebuilt is not marked");
    assert_eq!(shard.take(&store, 0, &[1, 4], PassSize::Small).unwrap(), 2, "the store still works");
}

/// Fetches experts of a layer. Returns two numbers: the number of experts whose last returned bytes were correct, and
/// how often wrong bytes were returned.
fn fetch_counting_wrong(
    shard: &Shard,
    store: &ExpertStore,
    layer: usize,
    ids: &[u32],
    size: PassSize,
) -> (usize, usize) {
    let choice = ExpertChoice { ids, k: ids.len(), logits: &[] };
    let mut asked = store.fetch(layer, &choice, size, &mut CpuTimeline).unwrap();
    let (mut right, mut wrong) = (std::collections::HashMap::new(), 0);
    while let Some(batch) = asked.next(&mut CpuTimeline).unwrap() {
        for landed in batch.iter() {
            let pieces = &shard.map.layers[layer][landed.expert as usize];
            let mut all = pieces.iter().zip(landed.pieces);
            let same = all.all(|(piece, got)| &shard.bytes[piece.offset as usize..][..piece.len] == got);
            right.insert(landed.expert, same);
            wrong += usize::from(!same);
        }
        batch.release_after(SyncPoint::START);
    }
    (right.values().filter(|same| **same).count(), wrong)
}

#[test]
fn layer_ends_after_all_checksums_match() {
    // In the build directory, because the directory for temporary files may be small.
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    // The experts are so large that they are returned before their checksums are verified.
    let shard = Shard::new(dir.path(), 300_000);
    let out = dir.path().join("model.pack");
    pack::write(&shard.map, &shard.files, &out, &|_| ()).unwrap();
    damage(&out, 0, 1);
    let mut early = 0;
    for (slots, size) in [(2, PassSize::Small), (4, PassSize::Small), (11, PassSize::Large)] {
        let pack = pack::find(shard.dir(), &shard.map, &shard.files).unwrap();
        let options = Options { pack_records: Some(pack.records), prefetch: Prefetch::On, ..Options::new(slots) };
        let metrics = Metrics::new("0", "cpu");
        let store = ExpertStore::open(pack.files, pack.map, options, metrics.clone()).unwrap();
        store.verify_in_background(true);
        for round in 0..3 {
            for expert in 0..6u32 {
                let ids = [expert, (expert + 1) % 6];
                store.prefetch(0, &[ids[1], (expert + 3) % 6], size);
                let (right, wrong) = fetch_counting_wrong(&shard, &store, 0, &ids, size);
                assert_eq!(right, 2, "{slots} slots, round {round}: {ids:?}");
                assert!(round == 0 || wrong == 0, "damaged records are known");
                early += wrong;
                let other = fetch_counting_wrong(&shard, &store, 1, &ids, size);
                assert_eq!(other, (2, 0), "{slots} slots, round {round}: layer 1, {ids:?}");
            }
        }
        assert_eq!((metrics.pack_damaged_records.get(), metrics.ssd_errors.get()), (6, 6));
    }
    assert!(early > 0, "no expert was handed out before verification, so this test is void");
}

/// Loads the model with `slots` slots and evaluates a chunk of 16 tokens, then single tokens. Returns the bits of the
/// logits, the number of damaged records, and true if the model is resident.
fn logits(dir: &Path, slots: usize) -> (Vec<u32>, i64, bool) {
    let store = StoreOptions { slots: Some(slots), ..StoreOptions::default() };
    let options = model::LoadOptions { store, threads: Some(2), ..model::LoadOptions::default() };
    let metrics = Metrics::new("0", "cpu");
    let mut model = Qwen::load(dir, &options, &metrics, &mut |_, _| ()).unwrap();
    let mut state = model.start().unwrap();
    let ids: Vec<u32> = (0..24).map(|id| id * 37 % 500).collect();
    let mut bits = Vec::new();
    for cut in [&ids[..16]].into_iter().chain(ids[16..].chunks(1)) {
        bits.extend(model.forward(&mut state, cut, Rows::Last).unwrap().data.iter().map(|logit| logit.to_bits()));
    }
    (bits, metrics.pack_damaged_records.get(), model.store().unwrap().is_resident())
}

#[test]
fn damaged_records_do_not_change_logits() {
    // In the build directory, because the directory for temporary files may be small.
    let root = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let dir = root.path().join("model");
    // Experts have 1.7 MB, so they are used before their checksums are verified.
    let dimensions = synth::Dimensions { layers: 4, experts: 12, vocab: 512, ..synth::Dimensions::of_35b() };
    let (eos_token_ids, extras) = (vec![], vec![]);
    let options = synth::SynthOptions {
        dimensions,
        seed: 5,
        router_skew: 0.5,
        eos_token_ids,
        shard: 1 << 30,
        threads: 2,
        extras,
    };
    synth::write(&dir, &options, &|_| ()).unwrap();
    let expected = logits(&dir, 24);
    assert_eq!((expected.1, expected.2), (0, false));
    let found = model::CheckpointInfo::unpacked(&dir, &model::LoadOptions::default()).unwrap();
    let out = root.path().join("model.pack");
    pack::write(&found.experts, &found.files, &out, &|_| ()).unwrap();
    (0..4).for_each(|layer| damage(&out, layer, 4096));
    for slots in [8, 24, 48] {
        let (bits, damaged, resident) = logits(&dir, slots);
        assert!(bits == expected.0, "{slots} slots: other logits");
        assert!(damaged >= 40 && resident == (slots == 48), "{slots} slots: {damaged}");
    }
}

#[test]
fn damaged_pack_answers_correctly_and_is_reported() {
    let root = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    checkpoint(root.path(), "model");
    let packed = moestro(root.path(), &["pack", "model", "--out", "model.pack"]);
    assert!(packed.status.success(), "{}", String::from_utf8_lossy(&packed.stderr));
    let pack = root.path().join("model.pack");
    (0..strides(&pack).len()).for_each(|layer| damage(&pack, layer, 1000));
    let (text, stderr) = answer(root.path(), "model");
    assert_eq!(text, "12 + 7 = 19.\n");
    assert!(stderr.contains("experts are read from their pack"), "{stderr}");
    assert_eq!(stderr.matches("the pack is damaged").count(), 1, "{stderr}");

    let mut command = Command::new(program::MOESTRO);
    command.current_dir(root.path()).env("XDG_CACHE_HOME", root.path().join("cache"));
    let server = Process::spawn(command, &["model", "--thinking", "off"]);
    let answer = server.chat(&[json!({"role": "user", "content": "What is 12+7?"})]);
    assert_eq!(answer["choices"][0]["message"]["content"], "12 + 7 = 19.", "{answer}");
    let health: Value = serde_json::from_str(&server.ask("GET", "/health", "")).unwrap();
    assert_eq!(health["status"], "ok");
    assert_eq!(health["pack"]["damaged_records"], 256, "{health}");
    assert_eq!(server.metric("moestro_pack_damaged_records"), 256);
}
