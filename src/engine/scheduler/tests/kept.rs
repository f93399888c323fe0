//! What is kept behind an answer, and what is not.

use super::*;

#[test]
fn an_answer_is_known_behind_another_conversation() {
    let (handle, ..) = engine(&MockModel::default(), Options { prompt_cache: 1 << 20, ..options() });
    assert_eq!(says(&handle, &[9, 5, 6]), [9, 5, 6]);
    assert_eq!(says(&handle, &[20, 21]), [20, 21]);
    let (_, end) = hear(handle.submit(ask(&[9, 5, 6, 9, 5, 6, 2, 30], 100)).unwrap());
    assert_eq!(end.unwrap().1.cached_tokens, 6);
}

#[test]
fn a_prompt_that_fails_pushes_nothing_out_for_places_that_it_never_reached() {
    // There is room for the checkpoints of one of the two prompts.
    let mock = MockModel { fails_on: Some(40), ..MockModel::default() };
    let (handle, ..) = engine(&mock, Options { prompt_cache: 100, ..options() });
    let evaluate = |ids: &[u32]| hear(handle.submit(ask(ids, 0)).unwrap()).1;
    let kept: Vec<u32> = (30..38).collect();
    assert_eq!(evaluate(&kept).unwrap().1.cached_tokens, 0);
    // It ends in its second chunk; the place for a checkpoint is in the third.
    let mut fails: Vec<u32> = (41..61).collect();
    fails[10] = 40;
    assert!(evaluate(&fails).is_err());
    assert_eq!(evaluate(&[&kept[..], &[50]].concat()).unwrap().1.cached_tokens, 8);
}

#[test]
fn a_checkpoint_that_fails_takes_its_session_with_it() {
    let mock = MockModel { no_answers_kept: true, ..MockModel::default() };
    let (handle, ..) = engine(&mock, Options { prompt_cache: 1 << 20, ..options() });
    says(&handle, &[9, 5, 6]);
    // It is taken behind the answer, when nobody waits any more.
    let patience = Instant::now() + Duration::from_secs(10);
    while mock.recovered.load(Ordering::Relaxed) == 0 {
        assert!(Instant::now() < patience, "the device was not looked after");
        std::thread::sleep(MS);
    }
    // The device may be in the middle of something: its state is of no use, and nothing lives beside the two mocks.
    assert_eq!(Arc::strong_count(&mock.states), 2);
    assert_eq!(says(&handle, &[7]), [7]);
}
