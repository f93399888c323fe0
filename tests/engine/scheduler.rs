//! Tests of the queue and the scheduler: order, ends of answers, cancellation, deadlines, draining and errors.

use mock_model::MockModel;
use moestro_base::metrics::Metrics;
use moestro_engine::{
    Event, Events, Finish, Handle, Options, Request, Sampling, Timings, Worker, collect, error::EngineError, spawn,
};
use std::{
    sync::{Arc, atomic::Ordering},
    time::{Duration, Instant},
};

pub const MS: Duration = Duration::from_millis(1);

pub fn options() -> Options {
    Options { eos: vec![2], ..Options::default() }
}

pub fn engine(mock: &MockModel, options: Options) -> (Handle, Worker, Arc<Metrics>) {
    let metrics = Metrics::new("test", "cpu");
    let (handle, worker) = spawn(mock.clone(), options, metrics.clone()).unwrap();
    (handle, worker, metrics)
}

pub fn request(ids: &[u32], max_tokens: usize) -> Request {
    Request::new(ids.to_vec(), max_tokens, Sampling::greedy())
}

/// The tokens of an answer and how it ended.
pub fn ask(handle: &Handle, request: Request) -> (Vec<u32>, Result<(Finish, Timings), EngineError>) {
    collect(handle.submit(request).unwrap())
}

pub fn answer(handle: &Handle, ids: &[u32]) -> Vec<u32> {
    let (tokens, end) = ask(handle, request(ids, 100));
    assert_eq!(end.unwrap().0, Finish::Stop);
    tokens
}

/// Submits a request and waits until it runs.
fn start(handle: &Handle, request: Request) -> Events {
    let mut events = handle.submit(request).unwrap();
    assert!(matches!(events.blocking_recv(), Some(Event::Started { .. })));
    events
}

/// Waits for the next token.
pub fn wait_for_token(events: &mut Events) {
    while !matches!(events.blocking_recv(), Some(Event::Token { .. })) {}
}

/// Submits a request that the engine soon ends, and returns its deadline. If a busy machine stops this thread until the
/// deadline, the engine refuses the request, and the next deadline is later.
pub fn submit_with_deadline(handle: &Handle, request: &Request) -> (Events, Instant) {
    for wait in [50 * MS, 500 * MS, 5000 * MS, 50_000 * MS] {
        let deadline = Instant::now() + wait;
        match handle.submit(Request { deadline: Some(deadline), ..request.clone() }) {
            Err(EngineError::TimedOut) => {}
            submitted => return (submitted.unwrap(), deadline),
        }
    }
    panic!("every deadline has passed");
}

/// Waits until `is_done`. Panics after a minute.
pub fn wait_until(is_done: impl Fn() -> bool, what: &str) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !is_done() {
        assert!(Instant::now() < deadline, "not after a minute: {what}");
        std::thread::sleep(MS);
    }
}

pub fn wait_until_idle(handle: &Handle) {
    wait_until(|| handle.load() == (0, 0), "the engine is idle");
}

/// A model that takes a millisecond per token and whose answers take longer than any test.
pub fn slow_model() -> MockModel {
    MockModel { delay: MS, context: 100_000, answer: Some(vec![5; 90_000]), ..MockModel::default() }
}

#[test]
fn every_eos_token_ends_the_answer() {
    let mock = MockModel { answer: Some(vec![5, 6, 7, 8]), ..MockModel::default() };
    for (eos, tokens) in [(vec![2, 7], vec![5, 6]), (vec![6, 2], vec![5]), (vec![2], vec![5, 6, 7, 8])] {
        let (handle, ..) = engine(&mock, Options { eos, ..options() });
        assert_eq!(answer(&handle, &[9]), tokens);
    }
}

#[test]
fn ignore_eos_continues_after_eos() {
    let (handle, ..) = engine(&MockModel::default(), options());
    let (tokens, end) = ask(&handle, Request { ignore_eos: true, ..request(&[9, 5], 6) });
    assert_eq!(tokens, [9, 5, 2, 2, 2, 2]);
    assert_eq!(end.unwrap().0, Finish::Length);
}

#[test]
fn length_limit_is_max_tokens_or_context() {
    let (handle, ..) = engine(&MockModel { context: 6, ..MockModel::default() }, options());
    let run = |ids: &[u32], max| {
        let (tokens, end) = ask(&handle, request(ids, max));
        (tokens.len(), end.unwrap().0)
    };
    assert_eq!(run(&[9, 5, 6, 7], 0), (0, Finish::Length));
    assert_eq!(run(&[9, 5, 6, 7], 2), (2, Finish::Length));
    // The context has room for three more tokens. A fourth token is sent but not evaluated.
    assert_eq!(run(&[9, 5, 6, 7], 100), (3, Finish::Length));
    assert_eq!(run(&[9, 5, 6, 7, 8, 3], 100), (1, Finish::Length));
    // The answer ends before the context is full.
    assert_eq!(run(&[9, 5, 6], 100), (3, Finish::Stop));
}

#[test]
fn invalid_prompt_is_refused() {
    let (handle, ..) = engine(&MockModel { context: 3, ..MockModel::default() }, options());
    assert!(matches!(handle.submit(request(&[], 1)), Err(EngineError::EmptyPrompt)));
    let long = handle.submit(request(&[9; 4], 1));
    assert!(matches!(long, Err(EngineError::PromptTooLong { prompt: 4, context: 3 })));
    let error = handle.submit(request(&[64], 1)).unwrap_err().to_string();
    assert_eq!(error, "token id 64 is outside the vocabulary of 64");
    assert_eq!(answer(&handle, &[9]), [9]);
}

#[test]
fn requests_run_in_order() {
    let (handle, ..) = engine(&MockModel { delay: MS, ..MockModel::default() }, options());
    let mut receivers: Vec<_> = (10..16).map(|id| handle.submit(request(&[id, 5], 100)).unwrap()).collect();
    while let [first, second, ..] = &mut receivers[..] {
        // When a request starts, the previous one has finished.
        assert!(matches!(second.blocking_recv(), Some(Event::Started { .. })));
        let answer: Vec<_> = std::iter::from_fn(|| first.try_recv().ok()).collect();
        assert!(matches!(answer.last(), Some(Event::Done { finish: Finish::Stop, .. })));
        receivers.remove(0);
    }
    assert_eq!(collect(receivers.remove(0)).0, [15, 5]);
}

#[test]
fn full_queue_refuses_until_client_disconnects() {
    let (handle, ..) = engine(&slow_model(), Options { max_queue: 2, parallel: 3, ..options() });
    let mut all: Vec<_> = (0..5).map(|_| handle.submit(request(&[9], 90_000)).unwrap()).collect();
    assert!(matches!(handle.submit(request(&[9], 1)), Err(EngineError::QueueFull { .. })));
    wait_until(|| handle.load() == (3, 2), "three requests run and two wait");
    assert_eq!(handle.parallel(), 3);
    // A queued request whose client disconnects frees its place in the queue at once, although the engine is busy.
    all.pop();
    assert!(handle.submit(request(&[9], 1)).is_ok());
}

#[test]
fn complete_answer_gets_its_timings() {
    let prompt: Vec<u32> = (3..43).collect();
    let mock = MockModel::default();
    mock.stops_at.store(prompt.len() + 5, Ordering::Relaxed);
    let (handle, _, metrics) = engine(&mock, Options { prompt_cache: 1 << 20, ..options() });
    let request = request(&prompt, 100);
    let is_complete = request.is_complete.clone();
    let mut events = handle.submit(request).unwrap();
    (0..3).for_each(|_| wait_for_token(&mut events));
    is_complete.store(true, Ordering::Relaxed);
    mock.stops_at.store(usize::MAX, Ordering::Relaxed);
    let (rest, end) = collect(events);
    let (finish, timings) = end.unwrap();
    assert_eq!(finish, Finish::Stop);
    assert!(timings.decode_passes >= 2 && timings.generated_tokens == 3 + rest.len(), "{timings:?}");
    assert_eq!(metrics.decode_seconds.get_sample_count(), 1);
    // Another prompt takes the answer's sequence, so the next prompt starts from the snapshot at the answer's end.
    answer(&handle, &[50, 51]);
    let evaluated = prompt.len() + 2 + rest.len();
    let next = [&prompt[..], &prompt[..evaluated - prompt.len()], &[60]].concat();
    let (_, end) = collect(handle.submit(self::request(&next, 1)).unwrap());
    assert_eq!(end.unwrap().1.cached_tokens, evaluated);
}

#[test]
fn closed_cache_has_no_snapshots_in_metrics() {
    let (handle, worker, metrics) = engine(&MockModel::default(), Options { prompt_cache: 1 << 20, ..options() });
    answer(&handle, &[9, 5, 6]);
    // The second request starts after the first answer's snapshot was taken.
    answer(&handle, &[20, 21]);
    let gauges = [&metrics.prompt_cache_bytes_memory, &metrics.prompt_cache_snapshots_memory];
    assert!(gauges.iter().all(|gauge| gauge.get() > 0));
    handle.drain();
    worker.join().unwrap();
    assert_eq!(gauges.map(|gauge| gauge.get()), [0, 0]);
}

#[test]
fn abandoned_chunk_is_cancelled_for_others() {
    let mock = MockModel { chunk: 100_000, ..slow_model() };
    let (handle, ..) = engine(&mock, options());
    drop(start(&handle, request(&[9; 60_000], 1)));
    let (_, end) = ask(&handle, request(&[8], 1));
    assert_eq!(end.unwrap().1.cached_tokens, 0);
    assert!(mock.evaluated.load(Ordering::Relaxed) < 10_000);
}

#[test]
fn abandoned_chunk_is_kept_without_others() {
    let mock = MockModel { chunk: 100_000, ..slow_model() };
    let (handle, ..) = engine(&mock, options());
    let events = start(&handle, request(&[9; 100], 1));
    // A request without a running chunk would be cancelled.
    wait_until(|| mock.evaluated.load(Ordering::Relaxed) > 0, "the chunk runs");
    drop(events);
    wait_until_idle(&handle);
    let (_, end) = collect(handle.submit(request(&[9; 101], 1)).unwrap());
    assert_eq!(end.unwrap().1.cached_tokens, 100);
}

#[test]
fn disconnected_queued_request_leaves_at_once() {
    let mock = slow_model();
    mock.stops_at.store(0, Ordering::Relaxed);
    let (handle, ..) = engine(&mock, options());
    let running = handle.submit(request(&[9; 20], 1)).unwrap();
    wait_until(|| handle.load() == (1, 0), "the request runs");
    let waiting: Vec<_> = (0..3).map(|_| handle.submit(request(&[8], 1)).unwrap()).collect();
    assert_eq!((handle.load(), handle.waiting(9).len()), ((1, 3), 3));
    // The step of the running request has not ended.
    drop(waiting);
    assert_eq!((handle.load(), handle.waiting(9).len()), ((1, 0), 0));
    mock.stops_at.store(usize::MAX, Ordering::Relaxed);
    assert_eq!(collect(running).0, [5]);
    // This request comes after those that were in the queue.
    assert_eq!(ask(&handle, request(&[7], 1)).0, [5]);
    assert_eq!(mock.evaluated.load(Ordering::Relaxed), 21, "the requests in the queue were not computed");
}

#[test]
fn deadline_ends_running_and_waiting_requests() {
    let endless = request(&[9], 90_000);
    // The request with the deadline waits, or runs beside the other.
    for parallel in [1, 2] {
        let (handle, ..) = engine(&slow_model(), Options { parallel, ..options() });
        let _running = handle.submit(endless.clone()).unwrap();
        let (late, deadline) = submit_with_deadline(&handle, &endless);
        assert!(matches!(collect(late).1, Err(EngineError::TimedOut)));
        assert!(Instant::now() >= deadline);
        let late = Request { deadline: Some(deadline), ..endless.clone() };
        assert!(matches!(handle.submit(late), Err(EngineError::TimedOut)));
        wait_until(|| handle.load() == (1, 0), "the request without a deadline runs alone");
    }
}

#[test]
fn drain_finishes_accepted_requests() {
    let mock = MockModel { delay: MS, ..MockModel::default() };
    let (handle, worker, _) = engine(&mock, options());
    let receivers: Vec<_> = (10..14).map(|id| handle.submit(request(&[id], 100)).unwrap()).collect();
    handle.drain();
    assert!(matches!(handle.submit(request(&[9], 1)), Err(EngineError::Draining)));
    for (id, events) in (10..14).zip(receivers) {
        assert_eq!(collect(events).0, [id]);
    }
    worker.join().unwrap();
    assert_eq!(Arc::strong_count(&mock.states), 1, "the model and all states are freed");
    // The error is `Draining`, so that a router sends the request to another server. `Stopped` would look like a
    // failure.
    assert!(matches!(handle.submit(request(&[9], 1)), Err(EngineError::Draining)));
}

#[test]
fn drain_ends_after_the_grace_period() {
    let (handle, worker, _) = engine(&slow_model(), Options { grace: 50 * MS, ..options() });
    let running = handle.submit(request(&[9], 90_000)).unwrap();
    let waiting = handle.submit(request(&[9], 90_000)).unwrap();
    handle.drain();
    assert!(matches!(collect(running).1, Err(EngineError::Draining)));
    assert!(matches!(collect(waiting).1, Err(EngineError::Draining)));
    worker.join().unwrap();
}

#[test]
fn engine_stops_with_its_last_handle() {
    let (handle, worker, _) = engine(&MockModel::default(), options());
    let events = handle.clone().submit(request(&[9], 100)).unwrap();
    assert!(!worker.is_finished() && handle.context() == MockModel::default().context);
    drop(handle);
    assert_eq!(collect(events).0, [9]);
    worker.join().unwrap();
}

#[test]
fn error_or_panic_ends_one_request() {
    let mock = MockModel { fails_on: Some(40), panics_on: Some(41), ..MockModel::default() };
    let (handle, ..) = engine(&mock, options());
    for _ in 0..3 {
        let (_, failed) = ask(&handle, request(&[9, 40], 5));
        assert_eq!(failed.unwrap_err().to_string(), "test error on token 40");
        assert_eq!(answer(&handle, &[9, 5]), [9, 5]);
        let (_, panicked) = ask(&handle, request(&[9, 5, 2, 41], 5));
        assert!(matches!(panicked, Err(EngineError::Panicked(text)) if text.contains("token 41")));
        assert_eq!(answer(&handle, &[9, 5, 6]), [9, 5, 6]);
    }
    // The two mocks and the sequence of the last request hold references.
    wait_until_idle(&handle);
    assert_eq!(Arc::strong_count(&mock.states), 3);
}

#[test]
fn missing_logits_fail_the_request() {
    let (handle, ..) = engine(&MockModel::default(), Options { usable_vocab: 0, ..options() });
    assert!(matches!(ask(&handle, request(&[9], 5)).1, Err(EngineError::NoLogits)));
}

#[test]
fn extended_prompt_is_cached() {
    let (handle, _, metrics) = engine(&MockModel::default(), options());
    assert_eq!(answer(&handle, &[9, 5, 6]), [9, 5, 6]);
    // The state contains the prompt and the answer.
    let (tokens, end) = ask(&handle, request(&[9, 5, 6, 9, 5, 6, 2, 30], 100));
    assert_eq!(tokens, [9, 5, 6, 9, 5, 6, 2, 30][..6]);
    assert_eq!(end.unwrap().1.cached_tokens, 6);
    assert_eq!((metrics.prompt_tokens_computed.get(), metrics.prompt_tokens_cached.get()), (5, 6));
    assert_eq!(metrics.generated_tokens.get(), 9);
    assert_eq!(metrics.time_to_first_token_seconds.get_sample_count(), 2);
    assert_eq!(metrics.inter_token_seconds.get_sample_count(), 7);
    assert_eq!(metrics.queue_seconds.get_sample_count(), 2);
}

#[test]
fn prompt_logprobs_do_not_depend_on_chunks() {
    let ids: Vec<u32> = (0..77).map(|place| 3 + place * 7 % 60).collect();
    let run = |chunk, max_tokens| {
        let (handle, ..) = engine(&MockModel { chunk, margin: 2.0, ..MockModel::default() }, options());
        let request = Request { prompt_logprobs: Some(3), logprobs: Some(2), ..request(&ids, max_tokens) };
        let mut events = handle.submit(request).unwrap();
        let mut next = || loop {
            match events.blocking_recv() {
                Some(Event::Prefilled { .. }) => {}
                other => return other,
            }
        };
        assert!(matches!(next(), Some(Event::Started { cached_tokens: 0, .. })));
        let Some(Event::Prompt(prompt)) = next() else { panic!("no prompt") };
        if max_tokens > 0 {
            let Some(Event::Token { logprobs: Some(logprobs), id }) = next() else { panic!() };
            assert_eq!((logprobs.top.len(), logprobs.top[0]), (2, (id, logprobs.logprob)));
        }
        assert!(matches!(next(), Some(Event::Done { finish: Finish::Length, .. })));
        prompt
    };
    let prompt = run(1000, 0);
    assert_eq!(prompt.len(), ids.len());
    assert_eq!(prompt.iter().position(|entry| entry.is_some()), Some(1));
    assert!(prompt[1..].iter().flatten().all(|entry| entry.top.len() == 3 && entry.top[0].1 >= entry.logprob));
    for (chunk, max_tokens) in [(1, 0), (7, 1), (32, 0), (33, 1)] {
        assert_eq!(run(chunk, max_tokens), prompt);
    }
}

#[test]
fn only_needed_logits_are_computed() {
    let ids: Vec<u32> = (3..23).collect();
    for (max_tokens, prompt_logprobs, rows) in
        [(0, None, 0), (1, None, 1), (3, None, 3), (0, Some(0), 20), (3, Some(0), 22)]
    {
        let mock = MockModel::default();
        let (handle, ..) = engine(&mock, options());
        let (tokens, end) = ask(&handle, Request { prompt_logprobs, ..request(&ids, max_tokens) });
        assert_eq!((tokens.len(), end.unwrap().0), (max_tokens, Finish::Length));
        assert_eq!(mock.rows.load(Ordering::Relaxed), rows, "{max_tokens} tokens");
    }
}

#[test]
fn seed_reproduces_regardless_of_history() {
    let warm = Sampling { temperature: 30.0, seed: Some(11), ..Sampling::default() };
    let run = |before: &[&[u32]], chunk| {
        let (handle, ..) = engine(&MockModel { chunk, ..MockModel::default() }, Options { eos: vec![], ..options() });
        for prompt in before {
            let _ = ask(&handle, request(prompt, 5));
        }
        ask(&handle, Request { sampling: warm.clone(), ..request(&[9, 5, 6, 7], 30) }).0
    };
    let tokens = run(&[], 8);
    assert_eq!(tokens.len(), 30);
    assert_eq!(run(&[&[8, 3], &[9, 5, 6]], 1), tokens);
    assert_eq!(run(&[&[9, 5]], 3), tokens);
}
