//! Files that were damaged, by accident or on purpose: each is used rightly or refused with a sentence. Nothing panics,
//! hangs, or takes more memory than it was given. `fuzz/` has the same targets for `cargo fuzz`.

mod common;
#[path = "support/mutate.rs"]
mod mutate;

use moestro::{
    checkpoint::pack,
    device::{Immediate, Mark},
    experts::{Choice, ExpertMap, Experts, Io, Options as StoreOptions, PIECES, Phase, Piece, Warm},
    metrics::Metrics,
    model::{Model, Options, Qwen, Rows, Surveyed},
    platform::os,
};
use mutate::Dice;
use std::{
    fs,
    panic::{AssertUnwindSafe, catch_unwind},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

/// A directory in memory where there is one: the disk is not what is tested.
fn place() -> tempfile::TempDir {
    tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap()
}

/// Runs `case` for many numbers: none may panic or take long. The memory in use stays.
fn each(cases: u64, mut case: impl FnMut(&mut Dice)) {
    let before = os::resident_memory().unwrap_or(0);
    for seed in 0..cases {
        let begin = Instant::now();
        let outcome = catch_unwind(AssertUnwindSafe(|| case(&mut Dice(seed))));
        assert!(outcome.is_ok(), "case {seed} panicked");
        assert!(begin.elapsed() < Duration::from_secs(10), "case {seed} took {:?}", begin.elapsed());
    }
    let after = os::resident_memory().unwrap_or(0);
    assert!(after < before + (512 << 20), "{before} bytes in memory before, {after} after");
}

/// The header, the data, and the configuration of a small checkpoint.
fn micro(name: &str) -> (serde_json::Value, Vec<u8>, serde_json::Value) {
    let file = fs::read(format!("{}/tests/fixtures/micro/{name}.safetensors", env!("CARGO_MANIFEST_DIR"))).unwrap();
    let end = 8 + u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
    let mut header: serde_json::Value = serde_json::from_slice(&file[8..end]).unwrap();
    let more = header.as_object_mut().unwrap().remove("__metadata__").unwrap();
    let config = serde_json::from_str(more["config"].as_str().unwrap()).unwrap();
    (header, file[end..].to_vec(), config)
}

/// Loads what can be loaded within 64 MB, and computes with it.
fn open(dir: &Path) -> Result<usize, String> {
    let mut options = Options { threads: Some(1), ..Options::default() };
    options.wishes.context = Some(64);
    let found = Surveyed::new(dir, &options).map_err(|error| error.to_string())?;
    // A plan for this machine would let a large one in.
    let shape = found.shape;
    if shape.weights().saturating_add(shape.workspace_fixed) > 64 << 20 || shape.workspace_per_row > 1 << 20 {
        return Err("large".into());
    }
    let metrics = Metrics::new("test", "cpu");
    let mut model = Qwen::load(dir, &options, &metrics, &mut |_, _| ()).map_err(|error| error.to_string())?;
    let mut state = model.start().map_err(|error| error.to_string())?;
    let logits = model.forward(&mut state, &[1, 2, 3], Rows::Last).map_err(|error| error.to_string())?;
    Ok(logits.data.len())
}

#[test]
fn twenty_thousand_checkpoints() {
    let names = ["affine4", "mixed", "mxfp4", "nvfp4", "dense4"];
    let whole = names.map(micro);
    let dir = place();
    let (mut opened, mut refused) = (0, 0);
    each(20_000, |dice| {
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
    // With fewer of either, the changes are too small, or too large, to show anything.
    assert!(opened > 500 && refused > 5000, "{opened} opened, {refused} refused");
}

const LEN: usize = 1750;

/// Two layers of six experts in one shard; every byte says where it is.
fn shard(dir: &Path) -> (ExpertMap, PathBuf) {
    let expert = |layer: usize, expert: usize| {
        std::array::from_fn(|part| {
            let nth = (layer * 6 + expert) * PIECES + part;
            Piece { file: 0, offset: (10 + nth * LEN) as u64, len: LEN }
        })
    };
    let map = ExpertMap { layers: (0..2).map(|l| (0..6).map(|e| expert(l, e)).collect()).collect() };
    let path = dir.join("model/model.safetensors");
    fs::create_dir(dir.join("model")).unwrap();
    let data = (0..12 * PIECES * LEN).map(|at| (at * 31 + at / 251) as u8);
    fs::write(&path, 2u64.to_le_bytes().into_iter().chain(*b"{}").chain(data).collect::<Vec<u8>>()).unwrap();
    (map, path)
}

/// Reads every expert; those that come must be the checkpoint's, byte by byte. Returns how many were refused.
fn read_all(store: &Experts, map: &ExpertMap, shard: &[u8]) -> usize {
    let mut refused = 0;
    for (layer, experts) in map.layers.iter().enumerate() {
        for (expert, pieces) in experts.iter().enumerate() {
            let choice = Choice { ids: &[expert as u32], k: 1, logits: &[] };
            let mut asked = store.ask(layer, &choice, Phase::Decode, &mut Immediate).unwrap();
            match asked.next(&mut Immediate) {
                Ok(Some(batch)) => {
                    for landed in batch.iter() {
                        for (piece, got) in pieces.iter().zip(landed.pieces) {
                            assert!(&shard[piece.offset as usize..][..piece.len] == got, "other bytes were served");
                        }
                    }
                    batch.reads_until(Mark::START);
                }
                Ok(None) => panic!("no expert came"),
                Err(error) => {
                    assert!(error.to_string().contains(&format!("layer {layer}, expert {expert}")), "{error}");
                    refused += 1;
                }
            }
        }
    }
    refused
}

#[test]
fn two_thousand_packs() {
    let dir = place();
    let (map, path) = shard(dir.path());
    let files = [path.clone()];
    let bytes = fs::read(&path).unwrap();
    let out = dir.path().join("model.pack");
    pack::write(&map, &files, &out, &|_| ()).unwrap();
    let names = ["manifest.json", "layer-000.experts", "layer-001.experts"];
    let whole = names.map(|name| fs::read(out.join(name)).unwrap());
    let manifest: serde_json::Value = serde_json::from_slice(&whole[0]).unwrap();
    let (mut unused, mut refused) = (0, 0);
    each(2_000, |dice| {
        let which = dice.below(names.len());
        let mut changed = whole[which].clone();
        if which == 0 && dice.below(3) > 0 {
            let mut manifest = manifest.clone();
            mutate::json(dice, &mut manifest);
            changed = manifest.to_string().into_bytes();
        } else if which > 0 && dice.below(2) > 0 {
            // A block that a disk has lost.
            let at = dice.below(changed.len() / 4096) * 4096;
            changed[at..at + 4096].iter_mut().for_each(|byte| *byte = !*byte);
        } else {
            mutate::bytes(dice, &mut changed);
        }
        fs::write(out.join(names[which]), &changed).unwrap();
        match pack::find(&dir.path().join("model"), &map, &files) {
            None => unused += 1,
            Some(pack) => {
                let options =
                    StoreOptions { io: Io::Buffered, threads: 2, sums: Some(pack.sums), ..StoreOptions::new(3) };
                match Experts::open(pack.files, pack.map, options, Metrics::new("test", "cpu")) {
                    Ok(store) => refused += usize::from(read_all(&store, &map, &bytes) > 0),
                    Err(_) => unused += 1,
                }
            }
        }
        fs::write(out.join(names[which]), &whole[which]).unwrap();
    });
    assert!(unused > 500 && refused > 300, "{unused} not used, {refused} refused");
}

#[test]
fn two_thousand_warm_lists() {
    let dir = place();
    let (map, path) = shard(dir.path());
    let bytes = fs::read(&path).unwrap();
    let file = dir.path().join("hot.json");
    let store = || {
        let warm = Some(Warm { file: file.clone(), identity: "me".into() });
        let options = StoreOptions { io: Io::Buffered, threads: 2, warm, ..StoreOptions::new(4) };
        Experts::open(vec![path.clone()], map.clone(), options, Metrics::new("test", "cpu")).unwrap()
    };
    let first = store();
    read_all(&first, &map, &bytes);
    drop(first);
    let whole = fs::read(&file).unwrap();
    let list: serde_json::Value = serde_json::from_slice(&whole).unwrap();
    each(2_000, |dice| {
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
        assert_eq!(read_all(&store, &map, &bytes), 0);
    });
}
