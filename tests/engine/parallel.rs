//! Tests of several requests at the same time: their order, and failures that end only one of the requests.

use super::scheduler::{
    MS, answer, ask, engine, options, request, slow_model, submit_with_deadline, wait_for_token, wait_until,
    wait_until_idle,
};
use mock_model::MockModel;
use moestro_compute::device::{CpuArithmetic, CpuDevice};
use moestro_engine::{
    DraftPolicy, Event, Events, Finish, Handle, Options, Request, Sampling, collect, error::EngineError,
};
use std::{
    sync::{Arc, atomic::Ordering},
    time::Duration,
};
use test_support::mutate::Dice;

fn parallel(count: usize) -> Options {
    Options { parallel: count, max_queue: 64, ..options() }
}

/// Number of tokens received since the last call.
fn count_tokens(events: &mut Events) -> usize {
    std::iter::from_fn(|| events.try_recv().ok()).filter(|event| matches!(event, Event::Token { .. })).count()
}

#[test]
fn short_request_overtakes_a_long_answer() {
    for batch in [1, 4] {
        let (handle, _, metrics) = engine(&MockModel { batch, ..slow_model() }, parallel(2));
        let mut long = handle.submit(request(&[9], 90_000)).unwrap();
        wait_for_token(&mut long);
        let (tokens, end) = ask(&handle, request(&[8, 7], 3));
        assert_eq!((tokens, end.unwrap().0), (vec![5; 3], Finish::Length));
        // The long answer takes 90 s.
        assert!(count_tokens(&mut long) < 10_000);
        wait_for_token(&mut long);
        assert_eq!((handle.load(), metrics.requests_running.get()), ((1, 0), 1));
    }
}

#[test]
fn short_request_overtakes_a_long_prompt() {
    let (handle, ..) = engine(&MockModel { chunk: 50, ..slow_model() }, parallel(2));
    // The long prompt takes a minute.
    let mut long = handle.submit(request(&[9; 60_000], 1)).unwrap();
    assert!(matches!(long.blocking_recv(), Some(Event::Started { .. })));
    wait_for_token(&mut handle.submit(request(&[8, 7], 1)).unwrap());
    assert_eq!(count_tokens(&mut long), 0);
}

#[test]
fn cancel_and_deadline_end_one_request() {
    let (handle, ..) = engine(&MockModel { batch: 4, ..slow_model() }, parallel(3));
    let mut stays = handle.submit(request(&[9], 90_000)).unwrap();
    let mut leaves = handle.submit(request(&[8], 90_000)).unwrap();
    let (late, _) = submit_with_deadline(&handle, &request(&[7], 90_000));
    wait_for_token(&mut leaves);
    drop(leaves);
    assert!(matches!(collect(late).1, Err(EngineError::TimedOut)));
    wait_until(|| handle.load() == (1, 0), "the request that stays runs alone");
    count_tokens(&mut stays);
    wait_for_token(&mut stays);
}

/// A request with a constraint: the answer must start with `id`, regardless of the model.
fn says(id: u32, ids: &[u32]) -> Request {
    let sampling = Sampling { logit_bias: vec![(id, 1000.0)], ..Sampling::greedy() };
    Request { sampling, ..request(ids, 200) }
}

/// Submits prompts of 20 tokens, which the mock repeats, and waits until all decode.
fn start_others(handle: &Handle, count: u32) -> Vec<(Vec<u32>, Events)> {
    let prompts = (0..count).map(|id| (0..20).map(|at| 10 + id + at).collect());
    let mut others: Vec<(Vec<u32>, Events)> =
        prompts.map(|ids: Vec<u32>| (ids.clone(), handle.submit(request(&ids, 100)).unwrap())).collect();
    others.iter_mut().for_each(|(_, events)| wait_for_token(events));
    others
}

/// Checks the rest of the answers to [`start_others`].
fn check_others(others: Vec<(Vec<u32>, Events)>) {
    for (prompt, events) in others {
        let (tokens, end) = collect(events);
        assert_eq!((&tokens[..], end.unwrap().0), (&prompt[1..], Finish::Stop));
    }
}

#[test]
fn error_in_shared_pass_ends_one_request() {
    for (batch, loses_device) in [(1, false), (4, false), (1, true), (4, true)] {
        let mock = MockModel { fails_on: Some(40), delay: MS, batch, ..MockModel::default() };
        let (handle, _, metrics) = engine(&mock, parallel(4));
        let others = start_others(&handle, 3);
        mock.loses_device.store(loses_device, Ordering::Relaxed);
        let (tokens, failed) = ask(&handle, says(40, &[9, 9]));
        assert_eq!((tokens, failed.unwrap_err().to_string()), (vec![40], "test error on token 40".into()));
        check_others(others);
        assert_eq!(metrics.gpu_lost.get(), i64::from(loses_device), "{batch}");
        wait_until_idle(&handle);
    }
}

#[test]
fn failed_prompt_ends_one_request() {
    for (fails_on, panics_on) in [(Some(40), None), (None, Some(40))] {
        let mock = MockModel { fails_on, panics_on, delay: MS, batch: 4, ..MockModel::default() };
        let (handle, ..) = engine(&mock, parallel(3));
        let others = start_others(&handle, 2);
        let (_, failed) = ask(&handle, request(&[8, 40, 8], 5));
        assert!(failed.unwrap_err().to_string().contains("token 40"));
        check_others(others);
    }
}

#[test]
fn panic_ends_the_requests_of_its_pass() {
    let mock = MockModel { panics_on: Some(41), delay: MS, batch: 2, context: 100_000, ..MockModel::default() };
    let (handle, worker, _) = engine(&mock, parallel(2));
    let mut shares = handle.submit(Request { max_tokens: 90_000, ..says(6, &[10, 11]) }).unwrap();
    wait_for_token(&mut shares);
    let (_, panicked) = ask(&handle, says(41, &[9, 9]));
    assert!(matches!(panicked, Err(EngineError::Panicked(text)) if text.contains("token 41")));
    assert!(matches!(collect(shares).1, Err(EngineError::Panicked(_))));
    assert_eq!(ask(&handle, request(&[9, 5], 9)).0, [9, 5]);
    handle.drain();
    worker.join().unwrap();
}

#[test]
fn verified_draft_needs_no_row() {
    // The prompt repeats itself, so that drafts succeed while the request decodes alone. The model stops within the answer
    // until other requests wait. These then join, in most rounds while verified tokens are still pending.
    let ids = [10, 11, 12, 13, 14, 15].repeat(20);
    let alone = answer(&engine(&MockModel::default(), options()).0, &ids);
    for stops_at in ids.len() + 10..ids.len() + 40 {
        let mock = MockModel { batch: 4, context: 1024, ..MockModel::default() };
        mock.stops_at.store(stops_at, Ordering::Relaxed);
        let (handle, ..) = engine(&mock, Options { speculate: DraftPolicy::Force, ..parallel(3) });
        let long = handle.submit(request(&ids, 500)).unwrap();
        wait_until(|| mock.evaluated.load(Ordering::Relaxed) == stops_at, "the model stops");
        let others: Vec<_> = (20..40).map(|id| (id, handle.submit(request(&[9, id, 8], 9)).unwrap())).collect();
        mock.stops_at.store(usize::MAX, Ordering::Relaxed);
        for (id, events) in others {
            let (tokens, end) = collect(events);
            assert_eq!((tokens, end.unwrap().0), (vec![9, id, 8], Finish::Stop));
        }
        let (tokens, end) = collect(long);
        let (finish, timings) = end.unwrap();
        assert_eq!((&tokens, finish), (&alone, Finish::Stop));
        let both_happen = timings.accepted_tokens > 0 && timings.decoding_sequences > timings.decode_passes;
        assert!(both_happen, "{stops_at}: {timings:?}");
    }
}

#[test]
fn logits_are_dropped_before_the_next_pass() {
    for (count, batch) in [(1, 1), (2, 2), (4, 4)] {
        let mock = MockModel { delay: MS, batch, ..MockModel::default() };
        let (handle, ..) = engine(&mock, parallel(count));
        let all: Vec<_> = (0..count as u32).map(|id| handle.submit(request(&[9, 20 + id, 8], 3)).unwrap()).collect();
        all.into_iter().for_each(|events| assert_eq!(collect(events).0.len(), 3));
        assert_eq!(mock.used_logits.load(Ordering::Relaxed), 0, "{count}");
        assert_eq!(mock.rows.load(Ordering::Relaxed), 3 * count);
    }
}

#[test]
fn shared_new_prefix_is_computed_once() {
    let mock = MockModel { delay: MS, ..MockModel::default() };
    let (handle, ..) = engine(&mock, Options { prompt_cache: 1 << 20, ..parallel(4) });
    let ids: Vec<u32> = (3..53).collect();
    let all: Vec<_> = (0..4).map(|_| handle.submit(request(&ids, 2)).unwrap()).collect();
    for events in all {
        assert_eq!(collect(events).0, ids[..2]);
    }
    // The prompt is evaluated once. Each other request evaluates its last token again. Each answer evaluates one token.
    assert_eq!(mock.evaluated.load(Ordering::Relaxed), 50 + 3 + 4);
}

#[test]
fn random_mixes_answer_as_alone() {
    let random = |n: u64| {
        let dice = &mut Dice(n);
        let ids = (0..1 + dice.below(40)).map(|_| 3 + dice.below(60) as u32).collect();
        let temperature = *dice.pick(&[0.0, 1.0, 20.0]);
        Request::new(ids, 1 + dice.below(30), Sampling { temperature, seed: Some(n), ..Sampling::default() })
    };
    let mock = MockModel { delay: Duration::from_micros(20), chunk: 7, ..MockModel::default() };
    let alone: Vec<_> = {
        let (handle, worker, _) = engine(&mock, options());
        let answers = (0..96).map(|n| ask(&handle, random(n)).0).collect();
        drop(handle);
        worker.join().unwrap();
        answers
    };
    let settings = [(1, 1, 1, 0), (2, 1, 1, 0), (4, 4, 2, 1 << 20), (8, 3, 1, 200)];
    for ((count, batch, threads, prompt_cache), decodes_ahead) in
        settings.into_iter().flat_map(|of| [(of, false), (of, true)])
    {
        let compute = Some(CpuDevice::new(threads, CpuArithmetic::Integer));
        let mock = MockModel { batch, compute, decodes_ahead, ..mock.clone() };
        let (handle, worker, metrics) = engine(&mock, Options { prompt_cache, ..parallel(count) });
        std::thread::scope(|scope| {
            for client in 0..8 {
                let (handle, alone, random) = (&handle, &alone, &random);
                scope.spawn(move || {
                    for n in (client..96).step_by(8) {
                        let mut events = handle.submit(random(n)).unwrap();
                        let mut dice = Dice(1000 + n);
                        if dice.below(4) == 0 {
                            (0..dice.below(9)).for_each(|_| drop(events.blocking_recv()));
                        } else {
                            assert_eq!(collect(events).0, alone[n as usize], "request {n}");
                        }
                    }
                });
            }
        });
        wait_until_idle(&handle);
        assert_eq!((metrics.requests_running.get(), metrics.requests_queued.get()), (0, 0));
        handle.drain();
        worker.join().unwrap();
        assert_eq!(Arc::strong_count(&mock.states), 2, "only the two mocks hold references");
    }
}
