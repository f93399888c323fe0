//! Tests which sequences and snapshots the engine keeps after an answer.

use super::scheduler::{answer, ask, engine, options, request, wait_until};
use mock_model::MockModel;
use moestro_engine::{CacheSalt, DiskCacheOptions, Event, Handle, Image, Options, PlacedImage, Request, Sampling};
use std::{
    path::Path,
    sync::{Arc, atomic::Ordering},
};

fn disk_cache(dir: &Path) -> Options {
    let disk_cache = Some(DiskCacheOptions { dir: dir.into(), limit: 1 << 20, key: "mock".into() });
    Options { prompt_cache: 1 << 20, disk_cache, ..options() }
}

#[test]
fn answer_is_cached_across_conversations() {
    let (handle, ..) = engine(&MockModel::default(), Options { prompt_cache: 1 << 20, ..options() });
    assert_eq!(answer(&handle, &[9, 5, 6]), [9, 5, 6]);
    assert_eq!(answer(&handle, &[20, 21]), [20, 21]);
    let (_, end) = ask(&handle, request(&[9, 5, 6, 9, 5, 6, 2, 30], 100));
    assert_eq!(end.unwrap().1.cached_tokens, 6);
}

#[test]
fn failing_prompt_evicts_nothing_beyond_its_end() {
    // The cache has room for the snapshots of only one of the two prompts.
    let mock = MockModel { fails_on: Some(40), ..MockModel::default() };
    let (handle, ..) = engine(&mock, Options { prompt_cache: 100, ..options() });
    let evaluate = |ids: &[u32]| ask(&handle, request(ids, 0)).1;
    let kept: Vec<u32> = (30..38).collect();
    assert_eq!(evaluate(&kept).unwrap().1.cached_tokens, 0);
    // The prompt fails in its second chunk. The snapshot of the prompt would be taken in the third chunk.
    let mut fails: Vec<u32> = (41..61).collect();
    fails[10] = 40;
    assert!(evaluate(&fails).is_err());
    assert_eq!(evaluate(&[&kept[..], &[50]].concat()).unwrap().1.cached_tokens, 8);
}

#[test]
fn failed_snapshot_drops_its_sequence() {
    let mock = MockModel { answer_snapshots_fail: true, ..MockModel::default() };
    let (handle, ..) = engine(&mock, Options { prompt_cache: 1 << 20, ..options() });
    answer(&handle, &[9, 5, 6]);
    // The engine takes the snapshot after it has sent the answer.
    wait_until(|| mock.recovered.load(Ordering::Relaxed) > 0, "the engine calls recover");
    // The device may be in an undefined state, so the sequence is dropped. The two references belong to the two mocks.
    assert_eq!(Arc::strong_count(&mock.states), 2);
    assert_eq!(answer(&handle, &[7]), [7]);
}

#[test]
fn kept_sequence_holds_no_pixels() {
    let (handle, ..) = engine(&MockModel::default(), options());
    let image = Arc::new(Image { hash: [1; 32], height: 1, width: 2, ..Image::default() });
    let evaluate = |ids: &[u32]| {
        let images = vec![PlacedImage { at: 1, image: image.clone() }];
        ask(&handle, Request { images, ..request(ids, 100) }).1.unwrap().1
    };
    assert_eq!(evaluate(&[9, 5, 5, 6]).cached_tokens, 0);
    // The engine drops the request after it has sent the answer.
    wait_until(|| Arc::strong_count(&image) == 1, "the sequence holds no image");
    assert!(evaluate(&[9, 5, 5, 6, 9, 5, 5, 6, 2, 30]).cached_tokens >= 4, "the sequence is kept");
}

#[test]
fn token_evaluated_ahead_stays_in_the_sequence() {
    for (decodes_ahead, whole, cut) in [(false, 6, 4), (true, 7, 4)] {
        let (handle, ..) = engine(&MockModel { decodes_ahead, ..MockModel::default() }, options());
        assert_eq!(answer(&handle, &[9, 5, 6]), [9, 5, 6]);
        // The end-of-sequence token, 2, was evaluated ahead.
        assert_eq!(cached(&handle, &[9, 5, 6, 9, 5, 6, 2, 30], None), whole, "ahead: {decodes_ahead}");
        // No token is evaluated after the last one that the client wants.
        let (tokens, _) = ask(&handle, request(&[20, 21, 22], 2));
        assert_eq!(tokens, [20, 21]);
        assert_eq!(cached(&handle, &[20, 21, 22, 20, 21, 30], None), cut, "ahead: {decodes_ahead}");
    }
}

/// Evaluates a prompt. Returns the number of prompt tokens that were cached.
fn cached(handle: &Handle, ids: &[u32], salt: Option<&str>) -> usize {
    let request = Request { cache_salt: salt.map(CacheSalt::new), ..request(ids, 100) };
    ask(handle, request).1.unwrap().1.cached_tokens
}

#[test]
fn requests_with_other_salts_share_no_state() {
    // Without a cache, a prompt can only continue a kept sequence.
    for prompt_cache in [0, 1 << 20] {
        let (handle, ..) = engine(&MockModel::default(), Options { prompt_cache, parallel: 8, ..options() });
        let first: Vec<u32> = (30..42).collect();
        // The mock model repeats its prompt.
        let second = [&first[..], &first, &[2, 50]].concat();
        assert_eq!(cached(&handle, &first, Some("a")), 0);
        for salt in [Some("b"), None, Some("A")] {
            assert_eq!(cached(&handle, &second, salt), 0, "{salt:?} with a cache of {prompt_cache}");
        }
        assert_eq!(cached(&handle, &second, Some("a")), 24, "with a cache of {prompt_cache}");
        let third = [&second[..], &second, &[2, 51]].concat();
        assert_eq!(cached(&handle, &third, None), 50, "with a cache of {prompt_cache}");
    }
}

#[test]
fn short_salted_prompts_are_not_confused() {
    // The cache identifies a prompt by one key per token, and the first eight keys together contain the salt's hash.
    // The cache takes no snapshot of a shorter prompt with a salt, whose keys contain only a part of the hash.
    let (handle, ..) = engine(&MockModel::default(), Options { prompt_cache: 1 << 20, ..options() });
    for salt in [Some("a"), Some("b"), None] {
        assert_eq!(cached(&handle, &[30, 31, 32], salt), 0, "{salt:?}");
    }
    assert_eq!(cached(&handle, &[30, 31, 32, 40], Some("a")), 0);
    assert_eq!(cached(&handle, &[30, 31, 32, 41], None), 2);
}

#[test]
fn salted_snapshot_on_disk_needs_its_salt() {
    let dir = tempfile::tempdir().unwrap();
    let start = || engine(&MockModel::default(), disk_cache(dir.path()));
    let (first, worker, _) = start();
    let ids: Vec<u32> = (30..42).collect();
    assert_eq!(cached(&first, &ids, Some("a")), 0);
    first.drain();
    worker.join().unwrap();

    let (second, _, metrics) = start();
    let longer = [&ids[..], &[50]].concat();
    for salt in [Some("b"), None] {
        assert_eq!(cached(&second, &longer, salt), 0, "{salt:?}");
    }
    assert_eq!(metrics.prompt_cache_hits_disk.get(), 0);
    assert_eq!(cached(&second, &longer, Some("a")), 11);
    assert_eq!(metrics.prompt_cache_hits_disk.get(), 1);
}

#[test]
fn snapshot_is_written_while_engine_decodes() {
    let dir = tempfile::tempdir().unwrap();
    let tokens = 1 << 20;
    let mock = MockModel { context: 2 * tokens, answer: Some(vec![5; tokens]), ..MockModel::default() };
    let (handle, ..) = engine(&mock, disk_cache(dir.path()));
    let mut events = handle.submit(Request::new((30..42).collect(), tokens, Sampling::greedy())).unwrap();
    while handle.prompt_cache().disk.unwrap().snapshots == 0 {
        assert!(!matches!(events.try_recv(), Ok(Event::Done { .. })), "the snapshot is written too late");
    }
}
