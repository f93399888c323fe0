use super::*;
use crate::model::{LoadOptions, Model, PAGE, Qwen, Rows};
use std::path::Path;

/// A state of 100 bytes and 1 byte a position.
const SIZE: SnapshotSize = SnapshotSize { state: 100, position: 1 };

fn cache(limit: u64) -> Cache {
    Cache::new(limit, SIZE, Metrics::new("test", "cpu"))
}

fn snapshot(len: usize) -> Snapshot {
    let pages = (0..len).step_by(PAGE).map(|first| Arc::new(vec![7; PAGE.min(len - first)].into())).collect();
    Snapshot { len, pages, state: Arc::new(vec![1; 100]) }
}

/// `count` tokens that begin with `first`.
fn tokens(first: u32, count: usize) -> Vec<u32> {
    (0..count as u32).map(|n| first * 1000 + n).collect()
}

/// The demo, tokens, and what it keeps of them in its pages.
pub(super) fn paged() -> (Qwen, Vec<u32>, Snapshot) {
    let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("models/demo/moestro-demo");
    let (options, metrics) = (LoadOptions { threads: Some(1), ..LoadOptions::default() }, Metrics::new("test", "cpu"));
    let mut model = Qwen::load(&demo, &options, &metrics, &mut |_, _| ()).unwrap();
    let (mut state, ids) = (model.start().unwrap(), (0..PAGE as u32 + 3).collect::<Vec<_>>());
    model.forward(&mut state, &ids, Rows::None).unwrap();
    let snapshot = model.snapshot(&mut state).unwrap();
    (model, ids, snapshot)
}

fn put(cache: &Cache, ids: &[u32], kind: Kind) -> bool {
    let made = cache.make_room(ids, kind, &|| SIZE.bytes(ids.len(), 0));
    if made {
        cache.insert(ids, kind, snapshot(ids.len()), cache.emptied());
    }
    made
}

fn lens(cache: &Cache) -> Vec<usize> {
    let inner = cache.inner.lock();
    let mut lens: Vec<usize> = inner.tree.iter().map(|(id, _)| inner.tree.len(id)).collect();
    lens.sort_unstable();
    lens
}

#[test]
fn a_prompt_takes_the_longest_that_leaves_a_token() {
    let cache = cache(10_000);
    let ids = tokens(1, 50);
    assert!(cache.deepest(&ids, 0).is_none());
    for len in [10, 30, 50] {
        assert!(put(&cache, &ids[..len], Kind::Message));
    }
    assert_eq!(cache.deepest(&ids, 0).unwrap().0.len, 30);
    assert_eq!(cache.deepest(&[&ids[..], &[5]].concat(), 0).unwrap().0.len, 50);
    assert_eq!(cache.deepest(&ids[..30], 0).unwrap().0.len, 10);
    assert!(cache.deepest(&ids, 30).is_none());
    assert!(cache.deepest(&tokens(2, 50), 0).is_none());
    // A checkpoint that is there is not taken again.
    assert!(!put(&cache, &ids[..30], Kind::Message));
}

#[test]
fn the_limit_holds_and_the_least_worth_goes_first() {
    let cache = cache(500);
    let system = tokens(1, 100);
    assert!(put(&cache, &system, Kind::System));
    let turn = |n: u32, count: usize| [&system[..], &tokens(n, count)].concat();
    // A conversation that grows by little and one that grows by much.
    assert!(put(&cache, &turn(2, 5), Kind::Message));
    assert_eq!((cache.status().bytes, lens(&cache)), (405, vec![100, 105]));
    assert!(put(&cache, &turn(3, 90), Kind::Message));
    assert_eq!(lens(&cache), [100, 190]);
    assert_eq!(cache.status().bytes, 490);
    assert_eq!(cache.metrics.prompt_cache_evictions_memory.get(), 1);
    // An answer does not push out what is worth more; the next message does.
    assert!(!put(&cache, &turn(4, 40), Kind::Answer));
    assert!(put(&cache, &turn(4, 40), Kind::Message));
    assert_eq!(lens(&cache), [100, 140]);
}

#[test]
fn what_is_not_used_grows_old() {
    let cache = cache(1000);
    let old = tokens(1, 150);
    assert!(put(&cache, &old, Kind::Message));
    // Each is worth less than the first, and comes later.
    for n in 2..40 {
        assert!(put(&cache, &tokens(n, 60), Kind::Message));
    }
    assert!(!lens(&cache).contains(&150));
}

#[test]
fn checkpoints_go_in_this_order() {
    // All bytes of these, none of which begins with another; each weighs more than the one before.
    let cache = cache(1015);
    let kinds = [Kind::Between, Kind::Answer, Kind::Message, Kind::Query, Kind::System];
    for (n, kind) in kinds.into_iter().enumerate() {
        assert!(put(&cache, &tokens(n as u32, 101 + n), kind));
    }
    // Prompts of 95, 94, ... tokens come, each of which needs the room of one.
    let prompt = |n: u32| tokens(10 + n, 96 - n as usize);
    let mut gone = Vec::new();
    for n in 1..=8 {
        if n == 8 {
            // The one of 92 tokens is used again.
            assert_eq!(cache.deepest(&[&prompt(4)[..], &[0]].concat(), 0).unwrap().0.len, 92);
        }
        let before = lens(&cache);
        assert!(put(&cache, &prompt(n), Kind::Message));
        let after = lens(&cache);
        gone.extend(before.into_iter().filter(|len| !after.contains(len)));
    }
    // Between, an answer, a message; then the prompts that came early before the question, which has twice their weight.; the one
    // that was used stays, and one that came later goes.
    assert_eq!(gone, [101, 102, 103, 95, 94, 93, 104, 91]);
}

#[test]
fn what_can_never_fit_pushes_nothing_out() {
    let cache = cache(300);
    assert!(put(&cache, &tokens(1, 20), Kind::Message));
    assert!(!put(&cache, &tokens(2, 201), Kind::Message));
    assert_eq!(lens(&cache), [20]);
    assert_eq!(super::Cache::new(99, SIZE, Metrics::new("test", "cpu")).share(), 0);
}

#[test]
fn emptied_it_is_empty() {
    let cache = cache(1000);
    assert!(put(&cache, &tokens(1, 20), Kind::Message));
    cache.clear();
    assert_eq!(cache.status(), Status { limit: 1000, bytes: 0, checkpoints: 0, disk: None });
    assert_eq!(cache.emptied(), 1);
    assert!(cache.deepest(&tokens(1, 30), 0).is_none());
    // A checkpoint under way when it was emptied comes too late.
    cache.insert(&tokens(1, 20), Kind::Answer, snapshot(20), 0);
    assert_eq!(cache.status().checkpoints, 0);
}

#[test]
fn an_answer_is_worth_only_what_it_adds_to_its_prompt() {
    let cache = cache(450);
    let system = tokens(1, 100);
    assert!(put(&cache, &system, Kind::System) && put(&cache, &tokens(2, 40), Kind::Message));
    // As many tokens as the message has, at half their weight.
    let answer = [&system[..], &tokens(3, 40)].concat();
    assert!(!put(&cache, &answer, Kind::Answer));
    assert_eq!(lens(&cache), [40, 100]);
    assert!(put(&cache, &answer, Kind::Message));
    assert_eq!(lens(&cache), [100, 140]);
}

#[test]
fn a_page_that_the_writer_reads_is_left_to_a_sequence_all_the_same() {
    let (model, ids, snapshot) = paged();
    let (pool, read) = (model.info().pages.unwrap(), snapshot.pages[0].clone());
    let cache = Cache::new(1 << 30, model.info().snapshot_size, Metrics::new("test", "cpu"));
    cache.share_pages(Some(pool.clone()));
    cache.insert(&ids, Kind::Message, snapshot, 0);
    let free = pool.free();
    cache.leave_pages(free);
    assert_eq!(lens(&cache), [ids.len()], "there were enough");
    cache.leave_pages(free + 1);
    assert_eq!((lens(&cache), pool.free()), (vec![], free));
    drop(read);
    assert_eq!(pool.free(), free + 1);
}

#[test]
fn a_write_that_is_given_up_leaves_no_page() {
    let dir = tempfile::tempdir().unwrap();
    let (files, _) = files::Files::open(dir.path(), "a key", SIZE).unwrap();
    let below = || std::fs::read_dir(files.dir()).unwrap().count();
    let (ids, whole) = (tokens(1, 2 * PAGE), snapshot(2 * PAGE));
    let mut pages: Vec<_> = whole.pages.iter().map(Arc::downgrade).collect();
    let mut bytes = 0;
    assert!(files.write(&ids, &whole.state, &pages, &[true, true], &mut bytes).unwrap());
    let (state, page) = files.bytes(ids.len());
    assert_eq!((below(), bytes), (3, state + 2 * page));
    // What every key has goes, whoever wrote it.
    files::forget_all(dir.path()).unwrap();
    assert_eq!(below(), 0);
    // The second page is somebody else's by now. The first was written all the same, and counts.
    pages[1] = std::sync::Weak::new();
    assert!(!files.write(&ids, &whole.state, &pages, &[true, true], &mut bytes).unwrap());
    assert_eq!((below(), bytes), (0, state + 3 * page));
}
