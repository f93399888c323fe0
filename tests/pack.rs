//! Packs as a user has them: one of another checkpoint is never used, a damaged record ends the request that reads it.

use moestro::{
    checkpoint::pack,
    demo,
    device::{Immediate, Mark},
    error::StoreError,
    experts::{Choice, ExpertMap, Experts, Io, Options, PIECES, Phase, Piece},
    metrics::Metrics,
};
use std::{
    fs::{self, File},
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    process::{Command, Output},
    time::Duration,
};

/// The demo model in `root/name`.
fn checkpoint(root: &Path, name: &str) -> PathBuf {
    let dir = root.join(name);
    fs::create_dir(&dir).unwrap();
    for name in ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"] {
        fs::write(dir.join(name), demo::file(name).unwrap()).unwrap();
    }
    fs::write(dir.join("chat_template.jinja"), demo::file("chat_template.jinja").unwrap()).unwrap();
    fs::write(dir.join("model.safetensors"), demo::file("model.safetensors").unwrap()).unwrap();
    dir
}

fn moestro(root: &Path, args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_moestro"));
    command.current_dir(root).env_clear().env("XDG_CACHE_HOME", root.join("cache")).env("MOESTRO_LOG", "info");
    command.args(args).output().unwrap()
}

/// The answer of the model in `dir`, and its stderr.
fn answer(root: &Path, dir: &str) -> (String, String) {
    let output = moestro(root, &["generate", dir, "-p", "What is 12+7?", "--temp", "0", "--thinking", "off"]);
    (String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap())
}

/// Turns the signs of most of the experts' scales, away from what a fingerprint samples.
fn change_scales(model: &Path) {
    let mut bytes = fs::read(model).unwrap();
    let data = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: serde_json::Value = serde_json::from_slice(&bytes[8..data]).unwrap();
    let samples: Vec<usize> = (0..16).map(|i| (bytes.len() - 4096) * i / 15).collect();
    for (name, tensor) in header.as_object().unwrap() {
        if name.contains("switch_mlp") && name.ends_with("scales") {
            let end = |i: usize| data + tensor["data_offsets"][i].as_u64().unwrap() as usize;
            for at in (end(0) + 1..end(1)).step_by(2) {
                if !samples.iter().any(|sample| (*sample..sample + 4096).contains(&at)) {
                    bytes[at] ^= 0x80;
                }
            }
        }
    }
    fs::write(model, bytes).unwrap();
}

#[test]
fn a_pack_of_a_changed_copy_does_not_answer_for_the_original() {
    let root = tempfile::tempdir().unwrap();
    let (original, copy) = (checkpoint(root.path(), "original"), checkpoint(root.path(), "copy"));
    change_scales(&copy.join("model.safetensors"));
    let shard = |dir: &Path| [dir.join("model.safetensors")];
    assert_eq!(pack::fingerprint(&shard(&original)).unwrap(), pack::fingerprint(&shard(&copy)).unwrap());
    let packed = moestro(root.path(), &["pack", "copy", "--out", "copy.pack"]);
    assert!(packed.status.success(), "{}", String::from_utf8_lossy(&packed.stderr));
    let (changed, said) = answer(root.path(), "copy");
    assert!(said.contains("experts are read from their pack"), "{said}");
    assert_ne!(changed, "12 + 7 = 19.\n", "the change does not show, so this test shows nothing");

    // The cache has a link to it, which the fingerprint finds; and here it lies beside the original, too.
    fs::rename(root.path().join("copy.pack"), root.path().join("original.pack")).unwrap();
    let (text, said) = answer(root.path(), "original");
    assert_eq!(text, "12 + 7 = 19.\n");
    assert!(said.contains("made from another checkpoint: layer 0, expert"), "{said}");
    let verified = moestro(root.path(), &["pack", "original", "--verify"]);
    let said = String::from_utf8_lossy(&verified.stderr).into_owned();
    assert!(!verified.status.success() && said.contains("layer 0, expert"), "{said}");
}

#[test]
fn the_experts_are_hashed_again_only_when_the_files_change() {
    let root = tempfile::tempdir().unwrap();
    let model = checkpoint(root.path(), "model").join("model.safetensors");
    // From now on its last change is long enough ago to be known by.
    std::thread::sleep(Duration::from_millis(3100));
    let packed = moestro(root.path(), &["pack", "model"]);
    assert!(packed.status.success(), "{}", String::from_utf8_lossy(&packed.stderr));
    let hashed = "their experts are hashed, once";
    let used = "experts are read from their pack";
    let look = || {
        let (text, said) = answer(root.path(), "model");
        assert_eq!(text, "12 + 7 = 19.\n");
        assert!(said.contains(used), "{said}");
        said.contains(hashed)
    };
    assert!(!look(), "these are the files that were packed");
    // The same bytes in another file.
    let other = root.path().join("other");
    fs::copy(&model, &other).unwrap();
    fs::rename(&other, &model).unwrap();
    std::thread::sleep(Duration::from_millis(3100));
    assert!(look(), "these may be any");
    assert!(!look(), "it was remembered");
    let again = moestro(root.path(), &["pack", "model"]);
    assert!(String::from_utf8_lossy(&again.stdout).contains("packed already"));
    let verified = moestro(root.path(), &["pack", "model", "--verify"]);
    let said = String::from_utf8_lossy(&verified.stdout).into_owned();
    assert!(verified.status.success() && said.contains("256 experts, each byte the checkpoint's"), "{said}");
}

const LEN: usize = 5000;

/// Two layers of six experts in one shard.
fn shard(dir: &Path) -> (ExpertMap, PathBuf) {
    let expert = |layer: usize, expert: usize| {
        std::array::from_fn(|part| {
            let nth = (layer * 6 + expert) * PIECES + part;
            Piece { file: 0, offset: (10 + nth * LEN) as u64, len: LEN }
        })
    };
    let map = ExpertMap { layers: (0..2).map(|l| (0..6).map(|e| expert(l, e)).collect()).collect() };
    let path = dir.join("model.safetensors");
    let data = (0..12 * PIECES * LEN).map(|at| (at * 31 + at / 251) as u8);
    fs::write(&path, 2u64.to_le_bytes().into_iter().chain(*b"{}").chain(data).collect::<Vec<u8>>()).unwrap();
    (map, path)
}

fn take(store: &Experts, layer: usize, experts: &[u32], phase: Phase) -> Result<usize, StoreError> {
    let choice = Choice { ids: experts, k: experts.len(), logits: &[] };
    let mut asked = store.ask(layer, &choice, phase, &mut Immediate)?;
    let mut seen = 0;
    while let Some(batch) = asked.next(&mut Immediate)? {
        seen += batch.len();
        batch.reads_until(Mark::START);
    }
    Ok(seen)
}

#[test]
fn four_kib_flipped_in_a_record_end_the_request_that_reads_it_and_no_other() {
    let dir = tempfile::tempdir().unwrap();
    let (map, path) = shard(dir.path());
    let (files, out) = ([path], dir.path().join("pack"));
    pack::write(&map, &files, &out, &|_| ()).unwrap();
    // One block of every record of the second layer, each at another place.
    let layer = File::options().read(true).write(true).open(out.join("layer-001.experts")).unwrap();
    for expert in 0..6 {
        let at = expert * 49152 + expert * 8192;
        let mut block = [0; 4096];
        layer.read_exact_at(&mut block, at).unwrap();
        layer.write_all_at(&block.map(|byte| !byte), at).unwrap();
    }
    drop(layer);
    fs::rename(&out, dir.path().parent().unwrap().join(dir.path().file_name().unwrap()).join("model.pack")).unwrap();
    fs::create_dir(dir.path().join("model")).unwrap();
    let pack = pack::find(&dir.path().join("model"), &map, &files).expect("its sizes and its checkpoint are right");
    for (io, phase) in [(Io::Buffered, Phase::Decode), (Io::Auto, Phase::Decode), (Io::Auto, Phase::Prefill)] {
        let options = Options { io, sums: Some(pack.sums.clone()), ..Options::new(4) };
        let metrics = Metrics::new("0", "cpu");
        let store = Experts::open(pack.files.clone(), pack.map.clone(), options, metrics.clone()).unwrap();
        for expert in 0..6u32 {
            let error = take(&store, 1, &[expert], phase).unwrap_err();
            let StoreError::Read { layer: 1, expert: found, offset, .. } = &error else { panic!("{error}") };
            assert_eq!((*found as u32, *offset), (expert, 49152 * u64::from(expert)));
            let text = error.to_string();
            assert!(text.contains("layer-001.experts") && text.contains("checksum"), "{text}");
            assert_eq!(take(&store, 0, &[expert, (expert + 1) % 6], phase).unwrap(), 2, "the store lives on");
        }
        assert!(metrics.ssd_errors.get() >= 6);
    }
}
