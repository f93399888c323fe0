//! Tests of requests at the same time whose prompts begin with the same tokens: the beginning is computed once.

use super::scheduler::{MS, engine, options, request, wait_until, wait_until_idle};
use mock_model::MockModel;
use moestro_engine::{Boundary, BoundaryKind, Event, Events, Finish, Handle, Options, Request, collect};
use std::{sync::atomic::Ordering, time::Instant};
use test_support::{mutate::Dice, random_cases::seeds};

/// Number of tokens of the answer to every prompt.
const ANSWER: usize = 2;

/// A model that waits after it has evaluated `stops_at` tokens.
fn stopping(stops_at: usize) -> MockModel {
    let mock = MockModel { context: 8192, chunk: 256, answer: Some(vec![5; ANSWER]), ..MockModel::default() };
    mock.stops_at.store(stops_at, Ordering::Relaxed);
    mock
}

fn caching(parallel: usize) -> Options {
    Options { parallel, prompt_cache: 1 << 24, ..options() }
}

/// Pseudo-random tokens that no answer contains.
fn tokens(seed: u64, count: usize) -> Vec<u32> {
    let mut dice = Dice(seed);
    (0..count).map(|_| 6 + dice.below(58) as u32).collect()
}

fn wait_for_evaluated(mock: &MockModel, count: usize) {
    wait_until(|| mock.evaluated.load(Ordering::Relaxed) >= count, "the model has evaluated the tokens");
}

fn resume(mock: &MockModel) {
    mock.stops_at.store(usize::MAX, Ordering::Relaxed);
}

fn check_answers(all: impl IntoIterator<Item = Events>) {
    for events in all {
        let (answer, end) = collect(events);
        assert_eq!((answer, end.unwrap().0), (vec![5; ANSWER], Finish::Stop));
    }
}

fn submit_all(handle: &Handle, requests: &[Request]) -> Vec<Events> {
    requests.iter().map(|request| handle.submit(request.clone()).unwrap()).collect()
}

#[test]
fn agents_compute_their_head_once() {
    const HEAD: usize = 3000;
    let head = tokens(1, HEAD);
    let system = |at| Boundary { at, kind: BoundaryKind::System };
    // The end of the common head is the end of the system prompt, or lies in the system prompt or in a message after it.
    for boundaries in [vec![system(HEAD)], vec![system(HEAD + 20)], vec![system(900)], vec![]] {
        // The others arrive while the model computes the beginning, the middle or the last chunk of the head. That chunk
        // takes only the snapshots that were known when it began.
        let last = if boundaries == [system(HEAD)] { 2900 } else { 2700 };
        for (count, under_way) in [(2, 0), (2, 1500), (2, last), (4, 0), (4, 1500), (4, last)] {
            let agent = |number: u64| Request {
                boundaries: boundaries.clone(),
                ..request(&[&head[..], &tokens(7 + number, 40 + 9 * number as usize)].concat(), 100)
            };
            let agents: Vec<Request> = (0..count).map(agent).collect();
            let mock = stopping(under_way);
            let (handle, ..) = engine(&mock, caching(4));
            let mut all = submit_all(&handle, &agents[..1]);
            wait_for_evaluated(&mock, under_way);
            all.extend(submit_all(&handle, &agents[1..]));
            resume(&mock);
            check_answers(all);
            wait_until_idle(&handle);
            let own: usize = agents.iter().map(|agent| agent.ids.len() - HEAD + ANSWER).sum();
            let computed = mock.evaluated.load(Ordering::Relaxed);
            assert!(computed <= HEAD * 21 / 20 + own, "{count} agents, {under_way}, {boundaries:?}: {computed}");
        }
    }
}

/// Prompts with random common beginnings, as of agents that start agents.
#[test]
fn random_common_beginnings_are_computed_once() {
    for seed in seeds(40) {
        let dice = &mut Dice(seed);
        let mock = stopping(0);
        let mut prompts = vec![tokens(dice.roll(), 600)];
        for _ in 1..4 {
            let parent = dice.pick(&prompts);
            let shared = dice.below(parent.len());
            prompts.push([&parent[..shared], &tokens(dice.roll(), 1 + shared % 300)].concat());
        }
        let mut distinct: Vec<&[u32]> =
            prompts.iter().flat_map(|ids| (1..=ids.len()).map(move |len| &ids[..len])).collect();
        distinct.sort_unstable();
        distinct.dedup();
        let (handle, ..) = engine(&mock, caching(5));
        // The model waits in the first chunk of another request until all have arrived.
        let other = handle.submit(request(&[3, 4], 100)).unwrap();
        let requests: Vec<Request> = prompts.iter().map(|ids| request(ids, 100)).collect();
        let all = submit_all(&handle, &requests);
        resume(&mock);
        check_answers(all.into_iter().chain([other]));
        wait_until_idle(&handle);
        let computed = mock.evaluated.load(Ordering::Relaxed);
        // Beginnings shorter than the smallest additional snapshot are computed again.
        let most = 2 + distinct.len() + 3 * 64 + 5 * ANSWER;
        assert!(computed <= most, "{seed}: computed {computed} of at most {most}");
    }
}

#[test]
fn waiting_request_continues_for_one_that_leaves() {
    let head = tokens(1, 3000);
    let ask = |seed| request(&[&head[..], &tokens(seed, 50)].concat(), 100);
    // The client disconnects in the middle of a chunk, or its deadline passes. If a busy machine does not reach the
    // middle of the chunk before the deadline, the next deadline is later.
    let mut has_timed_out = false;
    for wait in [None, Some(100), Some(1000), Some(10_000), Some(100_000)] {
        let is_late = wait.is_some();
        if has_timed_out {
            break;
        }
        let mock = stopping(1500);
        let (handle, ..) = engine(&mock, caching(3));
        let deadline = wait.map(|wait| Instant::now() + wait * MS);
        let Ok(mut first) = handle.submit(Request { deadline, ..ask(2) }) else { continue };
        let reached = || mock.evaluated.load(Ordering::Relaxed) >= 1500;
        wait_until(|| reached() || handle.load() == (0, 0), "the model is in the middle of the chunk");
        if !reached() {
            continue;
        }
        has_timed_out = is_late;
        let others = submit_all(&handle, &[ask(3), ask(4)]);
        if let Some(deadline) = deadline {
            std::thread::sleep(deadline.saturating_duration_since(Instant::now()));
        } else {
            first.close();
            drop(first);
        }
        resume(&mock);
        check_answers(others);
        wait_until_idle(&handle);
        let computed = mock.evaluated.load(Ordering::Relaxed);
        assert!(computed <= 3000 + 2 * (50 + ANSWER), "{is_late}: {computed}");
    }
    assert!(has_timed_out);
}

#[test]
fn nobody_waits_for_a_discarded_snapshot() {
    let head = tokens(1, 3000);
    let ask = |seed| request(&[&head[..], &tokens(seed, 50)].concat(), 100);
    // Without room for snapshots, and after the cache was cleared, every request computes its own prompt.
    for prompt_cache in [0, 1 << 24] {
        let mock = stopping(1500);
        let (handle, ..) = engine(&mock, Options { prompt_cache, ..caching(2) });
        let first = handle.submit(ask(2)).unwrap();
        wait_for_evaluated(&mock, 1500);
        handle.clear_prompt_cache();
        let mut second = handle.submit(ask(3)).unwrap();
        mock.stops_at.store(2400, Ordering::Relaxed);
        let started = second.blocking_recv();
        assert!(matches!(started, Some(Event::Started { cached_tokens: 0, .. })), "{started:?}");
        resume(&mock);
        check_answers([first, second]);
    }
}
