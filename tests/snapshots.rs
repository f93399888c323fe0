//! A snapshot is the sequence: whatever goes on from one has the bytes of a sequence that was never interrupted, wherever
//! in a pass it was taken and whatever it is restored into.

mod common;

use common::{forward_with_snapshots, load_with};
use moestro::{
    engine::{self, Boundary, BoundaryKind, Request, Sampling},
    metrics::Metrics,
    model::{LoadOptions, Model, PAGE, Qwen, Rows, Snapshot},
    ops::KvBits,
};
use std::path::Path;

const DEMO: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/models/demo/moestro-demo");

const ALL: [KvBits; 3] = [KvBits::Sixteen, KvBits::Eight, KvBits::Four];

fn demo(kv_bits: KvBits) -> Qwen {
    load_with(Path::new(DEMO), LoadOptions { threads: Some(2), kv_bits, ..LoadOptions::default() })
}

fn prompt(seed: usize, len: usize) -> Vec<u32> {
    (0..len).map(|i| (100 + (i * 37 + seed * 101 + i * i * seed) % 1500) as u32).collect()
}

/// The bits of the logits behind each of `ids`, evaluated from `state` on.
fn bits(model: &mut Qwen, state: &mut <Qwen as Model>::State, ids: &[u32]) -> Vec<u32> {
    let logits = model.forward(state, ids, Rows::All).unwrap();
    logits.data.iter().map(|logit| logit.to_bits()).collect()
}

#[test]
fn a_sequence_goes_on_from_any_mark() {
    ALL.into_iter().for_each(goes_on_from_any_mark);
}

fn goes_on_from_any_mark(kv_bits: KvBits) {
    let mut model = demo(kv_bits);
    let vocab = model.info().vocab;
    let ids = prompt(1, PAGE + 60);
    let mut state = model.start().unwrap();
    let whole = bits(&mut model, &mut state, &ids);

    // In one pass, in passes that marks cut anywhere, and behind a pass.
    let places = [1, 3, 40, 64, 130, PAGE - 1, PAGE, PAGE + 1, ids.len()];
    let mut state = model.start().unwrap();
    let (marked, mut taken) = forward_with_snapshots(&mut model, &mut state, &ids, Rows::All, &places);
    assert!(marked.data.iter().map(|logit| logit.to_bits()).eq(whole.iter().copied()), "marks change the logits");
    let mut state = model.start().unwrap();
    for (from, to) in [(0, 33), (33, 34), (34, 290), (290, ids.len())] {
        let marks: Vec<usize> = places.iter().copied().filter(|mark| (from + 1..=to).contains(mark)).collect();
        let (_, more) = forward_with_snapshots(&mut model, &mut state, &ids[from..to], Rows::None, &marks);
        taken.extend(more);
    }
    taken.push(model.snapshot(&mut state).unwrap());
    assert_eq!(taken.len(), 2 * places.len() + 1);
    assert_eq!(taken.iter().map(|snapshot| snapshot.len).collect::<Vec<_>>()[..places.len()], places);

    // Into a state of its own, and into one that was something else before.
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

/// Two sequences that go on from one snapshot hold its whole pages, and each writes behind them into one of its own.
#[test]
fn shared_pages_are_written_by_neither() {
    for kv_bits in ALL {
        let mut model = demo(kv_bits);
        let pool = model.info().pages.unwrap();
        let (ids, all) = (prompt(5, PAGE + 20), pool.free());
        let mut state = model.start().unwrap();
        bits(&mut model, &mut state, &ids);
        let snapshot = model.snapshot(&mut state).unwrap();
        assert_eq!(all - pool.free(), 2);
        let mut other = model.restore(&snapshot, None).unwrap();
        assert_eq!(all - pool.free(), 3, "the whole page is shared");
        let before: Vec<_> = snapshot.pages.iter().map(|page| page.read().unwrap().into_owned()).collect();
        let on = [6, 7].map(|seed| prompt(seed, PAGE));
        let first = bits(&mut model, &mut state, &on[0]);
        let second = bits(&mut model, &mut other, &on[1]);
        let after = snapshot.pages.iter().map(|page| page.read().unwrap().into_owned());
        assert!(after.eq(before) && first != second, "{kv_bits:?}");
        // Each has the bytes that it has alone.
        for (on, found) in on.iter().zip([first, second]) {
            let mut alone = model.start().unwrap();
            bits(&mut model, &mut alone, &ids);
            assert!(bits(&mut model, &mut alone, on) == found, "{kv_bits:?}");
        }
        drop((state, other, snapshot));
        assert_eq!(pool.free(), all, "{kv_bits:?}");
    }
}

/// More conversations than there are pages for: what is kept of the first ones gives way, and a whole context always fits.
#[test]
fn checkpoints_give_way_where_pages_run_short() {
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
            let (told, end) = common::ask(&engine, request);
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
fn sizes_are_as_announced() {
    ALL.into_iter().for_each(sizes_are);
}

fn sizes_are(kv_bits: KvBits) {
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
fn a_snapshot_of_another_model_is_refused() {
    let model = demo(KvBits::Sixteen);
    let foreign = Snapshot { len: 5, pages: vec![std::sync::Arc::new(vec![0; 40].into())], state: vec![0; 8].into() };
    assert!(model.restore(&foreign, None).is_err());
    let long = Snapshot { len: model.info().context + 1, ..foreign };
    assert!(model.restore(&long, None).is_err());
}
