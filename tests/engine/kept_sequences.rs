//! Which sequences and snapshots the engine keeps after an answer.

use super::{
    mock_model::MockModel,
    scheduler::{MS, answer, engine, options, request},
};
use moestro::engine::{Options, collect};
use std::{
    sync::{Arc, atomic::Ordering},
    time::{Duration, Instant},
};

#[test]
fn answer_is_cached_across_conversations() {
    let (handle, ..) = engine(&MockModel::default(), Options { prompt_cache: 1 << 20, ..options() });
    assert_eq!(answer(&handle, &[9, 5, 6]), [9, 5, 6]);
    assert_eq!(answer(&handle, &[20, 21]), [20, 21]);
    let (_, end) = collect(handle.submit(request(&[9, 5, 6, 9, 5, 6, 2, 30], 100)).unwrap());
    assert_eq!(end.unwrap().1.cached_tokens, 6);
}

#[test]
fn failing_prompt_evicts_nothing_beyond_its_end() {
    // The cache is large enough for the snapshots of one of the two prompts.
    let mock = MockModel { fails_on: Some(40), ..MockModel::default() };
    let (handle, ..) = engine(&mock, Options { prompt_cache: 100, ..options() });
    let evaluate = |ids: &[u32]| collect(handle.submit(request(ids, 0)).unwrap()).1;
    let kept: Vec<u32> = (30..38).collect();
    assert_eq!(evaluate(&kept).unwrap().1.cached_tokens, 0);
    // The prompt fails in its second chunk. Its snapshot would be in the third.
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
    // The snapshot is taken after the client has the answer.
    let deadline = Instant::now() + Duration::from_secs(10);
    while mock.recovered.load(Ordering::Relaxed) == 0 {
        assert!(Instant::now() < deadline, "the engine did not call recover");
        std::thread::sleep(MS);
    }
    // The device may be in an undefined state, so the sequence is dropped. The two references are those of the mocks.
    assert_eq!(Arc::strong_count(&mock.states), 2);
    assert_eq!(answer(&handle, &[7]), [7]);
}
