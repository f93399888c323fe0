use super::*;
use mock_model::MockModel;
use moestro_model::model::{LoadOptions, Model, PAGE, PageSize, Qwen, Rows};

/// A recurrent state of 100 bytes, and 1 byte of keys and values per position.
const SIZE: SnapshotSize = SnapshotSize { state: 100, page: PageSize::without_indexer(1) };

fn cache(limit: u64) -> PromptCache {
    PromptCache::new(limit, SIZE, Metrics::new("test", "cpu"))
}

fn snapshot(len: usize) -> Snapshot {
    let pages = (0..len).step_by(PAGE).map(|first| Arc::new(vec![7; PAGE.min(len - first)].into())).collect();
    Snapshot { len, pages, state: Arc::new(vec![1; 100]) }
}

/// `count` consecutive token ids that start at `1000 * first`.
fn tokens(first: u32, count: usize) -> Vec<u32> {
    (0..count as u32).map(|n| first * 1000 + n).collect()
}

/// The demo model, some tokens, and a snapshot of these tokens whose pages are in the model's pool.
pub fn paged() -> (Qwen, Vec<u32>, Snapshot) {
    let options = LoadOptions { threads: Some(1), ..LoadOptions::default() };
    let metrics = Metrics::new("test", "cpu");
    let mut model = Qwen::load(&test_support::demo(), &options, &metrics, &mut |_, _| ()).unwrap();
    let mut state = model.start().unwrap();
    let ids = (0..PAGE as u32 + 3).collect::<Vec<_>>();
    model.forward(&mut state, &ids, Rows::None).unwrap();
    let snapshot = model.snapshot(&mut state).unwrap();
    (model, ids, snapshot)
}

fn put(cache: &PromptCache, ids: &[u32], kind: SnapshotKind) -> bool {
    let made = cache.make_room(ids, kind, &|| SIZE.bytes(ids.len(), 0));
    if made {
        cache.insert(ids, kind, snapshot(ids.len()), cache.clear_count());
    }
    made
}

/// The snapshot that the cache finds, with a model whose pages are copies.
pub fn longest_prefix(cache: &PromptCache, ids: &[u32], min_len: usize) -> Option<(Snapshot, SnapshotSource)> {
    cache.longest_prefix(ids, min_len, &mut MockModel::default())
}

fn lens(cache: &PromptCache) -> Vec<usize> {
    let state = cache.state.lock();
    let mut lens: Vec<usize> = state.tree.iter().map(|(id, _)| state.tree.len(id)).collect();
    lens.sort_unstable();
    lens
}

#[test]
fn prompt_gets_longest_prefix_leaving_a_token() {
    let cache = cache(10_000);
    let ids = tokens(1, 50);
    assert!(longest_prefix(&cache, &ids, 0).is_none());
    for len in [10, 30, 50] {
        assert!(put(&cache, &ids[..len], SnapshotKind::Message));
    }
    assert_eq!(longest_prefix(&cache, &ids, 0).unwrap().0.len, 30);
    assert_eq!(longest_prefix(&cache, &[&ids[..], &[5]].concat(), 0).unwrap().0.len, 50);
    assert_eq!(longest_prefix(&cache, &ids[..30], 0).unwrap().0.len, 10);
    assert!(longest_prefix(&cache, &ids, 30).is_none());
    assert!(longest_prefix(&cache, &tokens(2, 50), 0).is_none());
    // An existing snapshot is not taken again.
    assert!(!put(&cache, &ids[..30], SnapshotKind::Message));
}

#[test]
fn least_valuable_snapshot_is_evicted_first() {
    let cache = cache(500);
    let system = tokens(1, 100);
    assert!(put(&cache, &system, SnapshotKind::System));
    let turn = |n: u32, count: usize| [&system[..], &tokens(n, count)].concat();
    // One conversation grows by 5 tokens, the other conversations grow by more.
    assert!(put(&cache, &turn(2, 5), SnapshotKind::Message));
    assert_eq!((cache.status().bytes, lens(&cache)), (405, vec![100, 105]));
    assert!(put(&cache, &turn(3, 90), SnapshotKind::Message));
    assert_eq!(lens(&cache), [100, 190]);
    assert_eq!(cache.status().bytes, 490);
    assert_eq!(cache.metrics.prompt_cache_evictions_memory.get(), 1);
    // An answer does not evict a more valuable snapshot. The next message does.
    assert!(!put(&cache, &turn(4, 40), SnapshotKind::Answer));
    assert!(put(&cache, &turn(4, 40), SnapshotKind::Message));
    assert_eq!(lens(&cache), [100, 140]);
}

#[test]
fn unused_snapshot_ages() {
    let cache = cache(1000);
    let old = tokens(1, 150);
    assert!(put(&cache, &old, SnapshotKind::Message));
    // Each of these snapshots is less valuable than the first one, but newer.
    for n in 2..40 {
        assert!(put(&cache, &tokens(n, 60), SnapshotKind::Message));
    }
    assert!(!lens(&cache).contains(&150));
}

#[test]
fn snapshots_are_evicted_in_order() {
    // Five snapshots with ascending weights fill the cache. No prompt of a snapshot is a prefix of another.
    let cache = cache(1015);
    let kinds =
        [SnapshotKind::Between, SnapshotKind::Answer, SnapshotKind::Message, SnapshotKind::Query, SnapshotKind::System];
    for (n, kind) in kinds.into_iter().enumerate() {
        assert!(put(&cache, &tokens(n as u32, 101 + n), kind));
    }
    // Prompts of 95, 94, ... tokens follow. Each insertion evicts one snapshot.
    let prompt = |n: u32| tokens(10 + n, 96 - n as usize);
    let mut gone = Vec::new();
    for n in 1..=8 {
        if n == 8 {
            // The snapshot of 92 tokens is used again.
            assert_eq!(longest_prefix(&cache, &[&prompt(4)[..], &[0]].concat(), 0).unwrap().0.len, 92);
        }
        let before = lens(&cache);
        assert!(put(&cache, &prompt(n), SnapshotKind::Message));
        let after = lens(&cache);
        gone.extend(before.into_iter().filter(|len| !after.contains(len)));
    }
    // The snapshots of `Between`, `Answer` and `Message` are evicted first. Then three prompts are evicted before
    // `Query`, which has twice their weight. The prompt of 92 tokens was used again, so the later prompt of 91 tokens
    // is evicted instead.
    assert_eq!(gone, [101, 102, 103, 95, 94, 93, 104, 91]);
}

#[test]
fn oversized_snapshot_evicts_nothing() {
    let cache = cache(300);
    assert!(put(&cache, &tokens(1, 20), SnapshotKind::Message));
    assert!(!put(&cache, &tokens(2, 201), SnapshotKind::Message));
    assert_eq!(lens(&cache), [20]);
    assert_eq!(PromptCache::new(99, SIZE, Metrics::new("test", "cpu")).max_snapshots_per_prompt(), 0);
}

#[test]
fn cleared_cache_is_empty() {
    let cache = cache(1000);
    assert!(put(&cache, &tokens(1, 20), SnapshotKind::Message));
    cache.clear();
    let empty = PromptCacheStatus { limit: 1000, bytes: 0, snapshots: 0, disk: None, disk_locked: false };
    assert_eq!(cache.status(), empty);
    assert_eq!(cache.clear_count(), 1);
    assert!(longest_prefix(&cache, &tokens(1, 30), 0).is_none());
    // A snapshot is ignored if its request began before the cache was cleared.
    cache.insert(&tokens(1, 20), SnapshotKind::Answer, snapshot(20), 0);
    assert_eq!(cache.status().snapshots, 0);
}

#[test]
fn answer_value_excludes_its_prompt() {
    let cache = cache(450);
    let system = tokens(1, 100);
    assert!(put(&cache, &system, SnapshotKind::System) && put(&cache, &tokens(2, 40), SnapshotKind::Message));
    // The answer saves as many tokens as the message, with half the weight.
    let answer = [&system[..], &tokens(3, 40)].concat();
    assert!(!put(&cache, &answer, SnapshotKind::Answer));
    assert_eq!(lens(&cache), [40, 100]);
    assert!(put(&cache, &answer, SnapshotKind::Message));
    assert_eq!(lens(&cache), [100, 140]);
}

#[test]
fn snapshot_of_pages_in_use_is_evicted() {
    let (model, ids, snapshot) = paged();
    let pool = model.info().pages.unwrap();
    let in_use = snapshot.pages[0].clone();
    let cache = PromptCache::new(1 << 30, model.info().snapshot_size, Metrics::new("test", "cpu"));
    cache.set_page_pool(Some(pool.clone()));
    cache.insert(&ids, SnapshotKind::Message, snapshot, 0);
    let free = pool.free();
    cache.evict_for_pages(free);
    assert_eq!(lens(&cache), [ids.len()], "enough pages were free");
    cache.evict_for_pages(free + 1);
    assert_eq!((lens(&cache), pool.free()), (vec![], free));
    drop(in_use);
    assert_eq!(pool.free(), free + 1);
}
