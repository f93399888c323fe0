//! A sequence restored from a snapshot must continue with the same bytes as an uninterrupted sequence. The snapshot may
//! be taken at any position of a pass and restored into any state.

use crate::common::{fixtures::DEMO, forward_with_snapshots, load_with};
use moestro_base::metrics::Metrics;
use moestro_compute::ops::KvBits;
use moestro_engine::{self as engine, Boundary, BoundaryKind, Request, Sampling};
use moestro_model::model::{LoadOptions, Model, PAGE, Qwen, Rows, Snapshot};
use std::path::Path;

const ALL: [KvBits; 3] = [KvBits::Sixteen, KvBits::Eight, KvBits::Four];

fn demo(kv_bits: KvBits) -> Qwen {
    load_with(Path::new(DEMO), LoadOptions { threads: Some(2), kv_bits, ..LoadOptions::default() })
}

fn prompt(seed: usize, len: usize) -> Vec<u32> {
    (0..len).map(|i| (100 + (i * 37 + seed * 101 + i * i * seed) % 1500) as u32).collect()
}

/// Appends `ids` to `state` and returns the bits of the logits after each id.
fn bits(model: &mut Qwen, state: &mut <Qwen as Model>::State, ids: &[u32]) -> Vec<u32> {
    let logits = model.forward(state, ids, Rows::All).unwrap();
    logits.data.iter().map(|logit| logit.to_bits()).collect()
}

#[test]
fn sequence_continues_from_any_snapshot() {
    ALL.into_iter().for_each(check_snapshots_anywhere);
}

fn check_snapshots_anywhere(kv_bits: KvBits) {
    let mut model = demo(kv_bits);
    let vocab = model.info().vocab;
    let ids = prompt(1, PAGE + 60);
    let mut state = model.start().unwrap();
    let whole = bits(&mut model, &mut state, &ids);

    // Take snapshots in one pass, in passes that are split at other positions, and after a pass.
    let places = [1, 3, 40, 64, 130, PAGE - 1, PAGE, PAGE + 1, ids.len()];
    let mut state = model.start().unwrap();
    let (marked, mut taken) = forward_with_snapshots(&mut model, &mut state, &ids, Rows::All, &places);
    assert!(marked.data.iter().map(|logit| logit.to_bits()).eq(whole.iter().copied()), "snapshots change the logits");
    let mut state = model.start().unwrap();
    for (from, to) in [(0, 33), (33, 34), (34, 290), (290, ids.len())] {
        let marks: Vec<usize> = places.iter().copied().filter(|mark| (from + 1..=to).contains(mark)).collect();
        let (_, more) = forward_with_snapshots(&mut model, &mut state, &ids[from..to], Rows::None, &marks);
        taken.extend(more);
    }
    taken.push(model.snapshot(&mut state).unwrap());
    assert_eq!(taken.len(), 2 * places.len() + 1);
    assert_eq!(taken.iter().map(|snapshot| snapshot.len).collect::<Vec<_>>()[..places.len()], places);

    // Restore into a new state, and into a state that another sequence used.
    let mut used = Some(state);
    for snapshot in &taken {
        for into in [None, used.take()] {
            let mut state = model.restore(snapshot, into).unwrap();
            let next = snapshot.len..ids.len().min(snapshot.len + 12);
            let rest = bits(&mut model, &mut state, &ids[next.clone()]);
            assert_eq!(rest, whole[next.start * vocab..next.end * vocab], "from {}", snapshot.len);
            model.forward(&mut state, &prompt(2, 50), Rows::None).unwrap();
            used = Some(state);
        }
    }
}

/// Two sequences restored from one snapshot share its full pages. After these pages, each sequence writes to its own
/// page.
#[test]
fn shared_pages_are_never_written() {
    for kv_bits in ALL {
        let mut model = demo(kv_bits);
        let pool = model.info().pages.unwrap();
        let (ids, all) = (prompt(5, PAGE + 20), pool.free());
        let mut state = model.start().unwrap();
        bits(&mut model, &mut state, &ids);
        let snapshot = model.snapshot(&mut state).unwrap();
        assert_eq!(all - pool.free(), 2);
        let mut other = model.restore(&snapshot, None).unwrap();
        assert_eq!(all - pool.free(), 3, "the full page is shared");
        let pages =
            |model: &mut Qwen| -> Vec<_> { snapshot.pages.iter().map(|page| model.read_page(page).unwrap()).collect() };
        let before = pages(&mut model);
        let on = [6, 7].map(|seed| prompt(seed, PAGE));
        let first = bits(&mut model, &mut state, &on[0]);
        let second = bits(&mut model, &mut other, &on[1]);
        assert!(pages(&mut model) == before && first != second, "{kv_bits:?}");
        // Each sequence has the same bytes as if it ran alone.
        for (on, found) in on.iter().zip([first, second]) {
            let mut alone = model.start().unwrap();
            bits(&mut model, &mut alone, &ids);
            assert!(bits(&mut model, &mut alone, on) == found, "{kv_bits:?}");
        }
        drop((state, other, snapshot));
        assert_eq!(pool.free(), all, "{kv_bits:?}");
    }
}

/// There are more conversations than pages. Snapshots of the first conversations are evicted, and a full context always
/// fits.
#[test]
fn snapshots_are_evicted_for_pages() {
    let run = |states: u64| {
        let mut options = LoadOptions { threads: Some(2), ..LoadOptions::default() };
        options.plan.context = Some(4 * PAGE);
        options.plan.prompt_cache = Some(states * demo(KvBits::Sixteen).info().snapshot_size.state);
        let prompt_cache = options.plan.prompt_cache.unwrap();
        let (model, metrics) = (load_with(Path::new(DEMO), options), Metrics::new("test", "cpu"));
        let pool = model.info().pages.unwrap();
        assert_eq!(pool.free(), if states > 0 { 6 } else { 4 });
        let options = engine::Options { prompt_cache, ..engine::Options::default() };
        let (engine, _worker) = engine::spawn(model, options, metrics.clone()).unwrap();
        let mut answers = Vec::new();
        for (seed, len) in
            [(11, 2 * PAGE + 10), (12, 2 * PAGE + 9), (13, 2 * PAGE), (13, 2 * PAGE + 40), (14, 4 * PAGE - 4)]
        {
            let ends = [Boundary { at: 2 * PAGE - 3, kind: BoundaryKind::Message }].to_vec();
            let request = Request { boundaries: ends, ..Request::new(prompt(seed, len), 4, Sampling::greedy()) };
            let (told, end) = crate::common::ask(&engine, request);
            answers.push((told, end.unwrap().1.cached_tokens));
        }
        assert!(
            engine.prompt_cache().bytes <= prompt_cache && metrics.prompt_cache_evictions_memory.get() > 0
                || states == 0
        );
        answers
    };
    let [alone, kept] = [0, 6].map(run);
    assert!(alone.iter().zip(&kept).all(|(alone, kept)| alone.0 == kept.0));
    assert!(alone.iter().all(|answer| answer.1 == 0) && kept[3].1 >= 2 * PAGE - 3, "{kept:?}");
}

#[test]
fn snapshot_sizes_match_the_declared_size() {
    ALL.into_iter().for_each(check_sizes);
}

fn check_sizes(kv_bits: KvBits) {
    let mut model = demo(kv_bits);
    let mut state = model.start().unwrap();
    let ids = prompt(3, 2 * PAGE + 9);
    let marks = [PAGE + 9, 2 * PAGE + 9];
    let (_, taken) = forward_with_snapshots(&mut model, &mut state, &ids, Rows::None, &marks);
    let size = model.info().snapshot_size;
    let bytes = |snapshot: &Snapshot| {
        (snapshot.state.len() + snapshot.pages.iter().map(|page| page.len()).sum::<usize>()) as u64
    };
    for snapshot in &taken {
        assert_eq!(bytes(snapshot), size.bytes(snapshot.len, 0));
    }
    let [early, late] = &taken[..] else { panic!() };
    assert!(std::sync::Arc::ptr_eq(&early.pages[0], &late.pages[0]));
    assert_eq!(bytes(late) - early.pages[0].len() as u64, size.bytes(late.len, early.len));
}

#[test]
fn foreign_snapshot_is_rejected() {
    let mut model = demo(KvBits::Sixteen);
    let foreign = Snapshot { len: 5, pages: vec![std::sync::Arc::new(vec![0; 40].into())], state: vec![0; 8].into() };
    assert!(model.restore(&foreign, None).is_err());
    let long = Snapshot { len: model.info().context + 1, ..foreign };
    assert!(model.restore(&long, None).is_err());
}
