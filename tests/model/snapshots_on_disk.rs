//! Snapshots of any length survive the disk: after eviction from memory, and after a restart with another model.

use crate::{
    common::{
        Dice, ask,
        fixtures::{DEMO, FIXTURES, Folded},
        forward_with_snapshots, load_with, qwen4_exp,
    },
    qwen4_exp::edited,
};
use moestro_base::metrics::Metrics;
use moestro_compute::ops::KvBits;
use moestro_engine::{
    self as engine, Boundary, BoundaryKind, DiskCacheOptions, Request, Sampling,
    prompt_cache::{PromptCache, SnapshotKind, SnapshotSource},
};
use moestro_model::model::{LoadOptions, Model, PAGE, Qwen, Rows, Snapshot};
use std::{
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

/// Every remainder of a block, the boundaries of pages, and generated lengths.
fn lengths(seed: u64) -> Vec<usize> {
    let mut dice = Dice(seed);
    let mut all: Vec<usize> = (1..=16).chain([PAGE - 1, PAGE, PAGE + 1]).collect();
    all.extend((0..8).map(|_| 1 + dice.roll(PAGE + 60)));
    all.sort_unstable();
    all.dedup();
    all
}

fn bytes<'a>(model: &mut Qwen, snapshot: &'a Snapshot) -> (Vec<Vec<u8>>, &'a [u8]) {
    (snapshot.pages.iter().map(|page| model.read_page(page).unwrap()).collect(), &snapshot.state)
}

/// A cache in `dir` that shares pages with `model`.
fn open(dir: &Path, model: &Qwen) -> Arc<PromptCache> {
    let info = model.info();
    let cache = Arc::new(PromptCache::new(1 << 30, info.snapshot_size, Metrics::new("test", "cpu")));
    cache.set_page_pool(info.pages);
    let options = DiskCacheOptions { dir: dir.to_owned(), limit: 1 << 30, key: "a model".into() };
    cache.open_disk(options, info.context, || ());
    cache
}

/// Waits for `count` snapshots on the disk. A busy machine may write slowly, but it must not stop.
fn wait_until_written(cache: &PromptCache, model: &mut Qwen, count: usize) {
    let (mut written, mut since) = (0, Instant::now());
    while written < count {
        let now = cache.status().disk.unwrap().snapshots;
        if now > written {
            (written, since) = (now, Instant::now());
        }
        assert!(since.elapsed() < Duration::from_secs(60), "{:?}", cache.status());
        cache.answer_page_request(model);
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn check_family(name: &str, dir: &Path, kv_bits: KvBits, lengths: &[usize]) {
    let load = || {
        let mut options = LoadOptions { threads: Some(2), kv_bits, ..LoadOptions::default() };
        options.plan.prompt_cache = Some(64 << 20);
        load_with(dir, options)
    };
    let (mut first, cache_dir) = (load(), tempfile::tempdir().unwrap());
    let vocab = first.info().vocab;
    let ids: Vec<u32> = {
        let mut dice = Dice(7);
        (0..=lengths[lengths.len() - 1]).map(|_| dice.roll(vocab.min(1500)) as u32).collect()
    };
    let mut state = first.start().unwrap();
    let (computed, taken) = forward_with_snapshots(&mut first, &mut state, &ids, Rows::All, lengths);
    let taken_bytes: Vec<_> = taken.iter().map(|snapshot| bytes(&mut first, snapshot)).collect();

    let check = |cache: &PromptCache, model: &mut Qwen| {
        for (&len, expected) in lengths.iter().zip(&taken_bytes) {
            let (found, source) =
                cache.longest_prefix(&ids[..=len], 0, model).unwrap_or_else(|| panic!("{name}: lost {len}"));
            assert_eq!((found.len, source), (len, SnapshotSource::Disk), "{name}");
            assert!(bytes(model, &found) == *expected, "{name}: other bytes at {len}");
            let mut state = model.restore(&found, None).unwrap();
            let next = model.forward(&mut state, &ids[len..=len], Rows::Last).unwrap();
            assert!(next.data[..] == computed.data[len * vocab..(len + 1) * vocab], "{name}: other logits at {len}");
        }
    };
    let cache = open(cache_dir.path(), &first);
    for (&len, snapshot) in lengths.iter().zip(&taken) {
        cache.insert(&ids[..len], SnapshotKind::Message, snapshot.clone(), cache.clear_count());
    }
    wait_until_written(&cache, &mut first, lengths.len());
    // This evicts all snapshots from memory.
    cache.set_page_pool(first.info().pages);
    check(&cache, &mut first);
    cache.close(&mut first);

    let mut second = load();
    let cache = open(cache_dir.path(), &second);
    assert_eq!(cache.status().disk.unwrap().snapshots, lengths.len(), "{name}: snapshots removed at the start");
    check(&cache, &mut second);
    cache.close(&mut second);
}

#[test]
#[ignore = "long: five models, many lengths"]
fn snapshots_survive_at_any_length() {
    let dense = Folded::read("dense4").unfold();
    let blocks_of_3 = edited(|json| {
        json["text_config"]["indexer_compress_ratio"] = 3.into();
        json["text_config"]["indexer_budget"] = 12.into();
    });
    let other = Path::new(FIXTURES).join("qwen4_exp_other");
    check_family("dense", dense.path(), KvBits::Sixteen, &lengths(1));
    for bits in [KvBits::Sixteen, KvBits::Eight, KvBits::Four] {
        check_family(&format!("demo, {bits:?}"), Path::new(DEMO), bits, &lengths(2));
    }
    check_family("qwen4_exp", &qwen4_exp::dir(), KvBits::Sixteen, &lengths(3));
    check_family("qwen4_exp, blocks of 8", &other, KvBits::Sixteen, &lengths(4));
    check_family("qwen4_exp, blocks of 3", blocks_of_3.path(), KvBits::Sixteen, &lengths(5));
}

#[test]
fn snapshots_survive_at_every_page_remainder() {
    check_family("qwen4_exp", &qwen4_exp::dir(), KvBits::Sixteen, &(1..=PAGE).collect::<Vec<_>>());
}

/// Twenty turns of an agent. The server restarts after half of them. Except for new tokens, a turn computes only the last
/// token of the answer before it, which no pass has evaluated.
#[test]
fn agent_with_restart_computes_new_tokens_once() {
    let cache_dir = tempfile::tempdir().unwrap();
    let start = || {
        let mut options = LoadOptions { threads: Some(2), ..LoadOptions::default() };
        (options.plan.context, options.plan.prompt_cache) = (Some(8192), Some(64 << 20));
        let disk = DiskCacheOptions { dir: cache_dir.path().into(), limit: 1 << 30, key: "a model".into() };
        let options_of_engine =
            engine::Options { prompt_cache: 64 << 20, disk_cache: Some(disk), ..engine::Options::default() };
        engine::spawn(load_with(&qwen4_exp::dir(), options), options_of_engine, Metrics::new("test", "cpu")).unwrap()
    };
    let (mut running, mut dice) = (start(), Dice(11));
    let mut ids: Vec<u32> = (0..400).map(|_| dice.roll(300) as u32).collect();
    let mut boundaries = vec![Boundary { at: ids.len(), kind: BoundaryKind::System }];
    let (mut computed, mut new) = (0, ids.len());
    for turn in 0..20 {
        if turn == 10 {
            drop(running.0);
            running.1.join().unwrap();
            running = start();
        }
        let message = 100 + dice.roll(100);
        ids.extend((0..message).map(|_| dice.roll(300) as u32));
        new += message;
        boundaries.push(Boundary { at: ids.len(), kind: BoundaryKind::Message });
        let request = Request { boundaries: boundaries.clone(), ..Request::new(ids.clone(), 20, Sampling::greedy()) };
        let (answer, end) = ask(&running.0, request);
        let cached = end.unwrap().1.cached_tokens;
        assert!(turn == 0 || cached > 0, "turn {turn}");
        computed += ids.len() - cached;
        ids.extend(answer);
    }
    println!("{computed} computed, {new} new");
    assert!(computed * 100 <= new * 101, "{computed} of {new}");
}
