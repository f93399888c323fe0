//! Many clients with prompts of different lengths. The test computes when each answer would end if every client got an equal
//! part of the time, and compares.

use super::*;
use crate::ClientId;
use test_support::mutate::Dice;

const CLIENTS: usize = 32;
/// Number of tokens of each answer.
const ANSWER: usize = 16;

/// A request as the client sees it.
struct Asked {
    client: usize,
    prompt: usize,
    arrived: f64,
    first_token: f64,
    end: f64,
}

/// When a request would have its first token and its end.
#[derive(Clone, Copy)]
struct FairTimes {
    first_token: f64,
    end: f64,
}

/// The seconds that a prompt takes alone, and those of its answer.
fn seconds_alone(prompt: usize, (fixed, per_row): (f64, f64)) -> [f64; 2] {
    let passes = prompt.div_ceil(2048) as f64;
    [fixed * passes + per_row * prompt as f64, (fixed + per_row) * ANSWER as f64]
}

/// The times of all requests if every client with a request got an equal part of the time. A client's requests run in order
/// of arrival.
fn fair_times(asked: &[Asked], cost: (f64, f64)) -> Vec<FairTimes> {
    let mut left: Vec<[f64; 2]> = asked.iter().map(|request| seconds_alone(request.prompt, cost)).collect();
    let mut times = vec![FairTimes { first_token: f64::INFINITY, end: f64::INFINITY }; asked.len()];
    let mut now = 0.0;
    let mut arrived = 0;
    let mut current: Vec<usize> = Vec::new();
    let mut waiting: Vec<Vec<usize>> = vec![Vec::new(); CLIENTS];
    while arrived < asked.len() || !current.is_empty() {
        let part = |index: usize| if left[index][0] > 0.0 { left[index][0] } else { left[index][1] };
        let least = current.iter().map(|&index| part(index)).fold(f64::INFINITY, f64::min);
        let next_arrival = asked.get(arrived).map_or(f64::INFINITY, |request| request.arrived);
        let end = next_arrival.min(now + least * current.len() as f64).max(now);
        let each = (end - now) / current.len().max(1) as f64;
        now = end;
        for index in current.drain(..) {
            let [prompt, answer] = &mut left[index];
            let stage = if *prompt > 0.0 { prompt } else { answer };
            *stage = if *stage - each < 1e-9 { 0.0 } else { *stage - each };
            if left[index][0] == 0.0 {
                times[index].first_token = times[index].first_token.min(now);
            }
            if left[index][1] == 0.0 {
                times[index].end = now;
                waiting[asked[index].client].remove(0);
            }
        }
        while asked.get(arrived).is_some_and(|request| request.arrived <= now) {
            waiting[asked[arrived].client].push(arrived);
            arrived += 1;
        }
        current.extend(waiting.iter().filter_map(|requests| requests.first()));
    }
    times
}

/// Each client sends a request after its last one has ended, for `seconds`. Returns the requests in order of arrival.
fn run(engine: &mut Engine, seconds: f64, prompt_of: impl Fn(usize, usize) -> usize) -> Vec<Asked> {
    CLOCK.set(0.0);
    LONGEST.set(0.0);
    let mut asked: Vec<Asked> = Vec::new();
    let mut running: Vec<(usize, Events)> = Vec::new();
    let mut counts = [0; CLIENTS];
    let mut new: Vec<usize> = (0..CLIENTS).collect();
    loop {
        for client in new.drain(..) {
            let prompt = prompt_of(client, counts[client]);
            counts[client] += 1;
            let request = Request::new(vec![9; prompt], ANSWER, Sampling::greedy());
            let client_id = ClientId::new(0, 0, client);
            let request = Request { client: client_id, cache_prompt: false, ..request };
            running.push((asked.len(), engine.0.queue.push(request, 0).expect("nobody is refused")));
            let never = f64::INFINITY;
            asked.push(Asked { client, prompt, arrived: CLOCK.get(), first_token: never, end: never });
        }
        if running.is_empty() {
            return asked;
        }
        engine.step();
        let now = CLOCK.get();
        running.retain_mut(|(index, events)| {
            let (tokens, has_ended) = received(events);
            let request = &mut asked[*index];
            if tokens > 0 {
                request.first_token = request.first_token.min(now);
            }
            if has_ended {
                request.end = now;
                new.extend((now < seconds).then_some(request.client));
            }
            !has_ended
        });
    }
}

/// The tokens of a client's prompt, for the client's number and the number of its earlier prompts.
type PromptLength = fn(usize, usize) -> usize;

/// Prompts of 10 to 5,000 words, in tokens: of three lengths, of random lengths, of a length for each client, and with one
/// client that differs from all others.
const PROMPTS: [(&str, PromptLength); 5] = [
    ("three lengths", |client, _| [13, 1200, 6500][client % 3]),
    ("random lengths", |client, count| *Dice((client * 1000 + count) as u64).pick(&[13, 130, 1300, 6500])),
    ("a length for each client", |client, _| 13 + client * client * 6500 / 961),
    ("one long", |client, _| if client == 0 { 6500 } else { 13 }),
    ("one short", |client, _| if client == 0 { 13 } else { 6500 }),
];

#[test]
fn many_clients_get_equal_parts() {
    for parallel in [1, 2, 4] {
        for cost in COSTS {
            for (name, prompt_of) in PROMPTS {
                let mut engine = Engine::with_places(cost, 4, parallel);
                // A streamed model answers a request in minutes.
                let seconds = if cost.0 > 1.0 { 2500.0 } else { 100.0 };
                let asked = run(&mut engine, seconds, prompt_of);
                // A request that arrives in a chunk waits for the chunk.
                let chunk = LONGEST.get();
                let times = asked.iter().zip(fair_times(&asked, cost)).map(|(request, fair)| {
                    let share = |at: f64, fair: f64| (at - request.arrived) / (fair - request.arrived + chunk);
                    [share(request.first_token, fair.first_token), share(request.end, fair.end)]
                });
                let [first_tokens, ends]: [Vec<f64>; 2] = [0, 1].map(|at| times.clone().map(|both| both[at]).collect());
                let most = |times: &[f64]| times.iter().copied().fold(0.0, f64::max);
                let case = format!("{parallel} places, {cost:?}, {name}, {} requests", asked.len());
                let mut sorted = first_tokens.clone();
                sorted.sort_by(f64::total_cmp);
                let p99 = sorted[sorted.len() * 99 / 100];
                let end = most(&ends);
                let first = most(&first_tokens);
                println!("{case}: ends {end:.2} of the fair share, first tokens {first:.2}, p99 {p99:.2}");
                assert!(end <= 2.0, "{case}: an answer ended after {end} of the fair share");
            }
        }
    }
}
