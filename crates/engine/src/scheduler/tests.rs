//! Tests the order of steps with a simulated clock. Each forward pass advances the clock by a given time.

use super::*;
use crate::{
    DraftPolicy, Events, LookupDraft, Sampling, answer::TokenRules, prompt_cache::PromptCache, queue::AdmissionLimits,
    speculation::Speculator,
};
use mock_model::MockModel;
use moestro_model::model::Model;
use std::cell::Cell;

thread_local! {
    static START: Instant = Instant::now();
    /// Simulated seconds since the start.
    static CLOCK: Cell<f64> = const { Cell::new(0.0) };
    /// Fixed seconds per pass, and seconds per row.
    static COST: Cell<(f64, f64)> = const { Cell::new((0.0, 0.0)) };
    /// Duration of the longest pass in seconds.
    static LONGEST: Cell<f64> = const { Cell::new(0.0) };
}

fn pass(rows: usize) {
    let (fixed, per_row) = COST.get();
    let seconds = fixed + per_row * rows as f64;
    CLOCK.set(CLOCK.get() + seconds);
    LONGEST.set(LONGEST.get().max(seconds));
}

/// Values of [`COST`] for a model in memory, a small model on a GPU, and a model streamed from SSD.
const COSTS: [(f64, f64); 3] = [(0.02, 0.001), (0.003, 0.0001), (4.0, 0.002)];

struct Engine(Scheduler<MockModel>);

impl Engine {
    fn new(cost: (f64, f64)) -> Self {
        Self::with_batch(cost, 1)
    }

    fn with_batch(cost: (f64, f64), batch: usize) -> Self {
        Self::with_places(cost, batch, 4)
    }

    fn with_places(cost: (f64, f64), batch: usize, parallel: usize) -> Self {
        COST.set(cost);
        let mut mock = MockModel {
            chunk: 2048,
            batch,
            context: 100_000,
            answer: Some(vec![5; 90_000]),
            on_pass: pass,
            ..MockModel::default()
        };
        let info = mock.info();
        let metrics = Metrics::new("test", "cpu");
        let limits = AdmissionLimits {
            vocab: info.vocab,
            context: info.context,
            max_queue: 100,
            max_queue_bytes: usize::MAX,
            parallel,
            grace: Duration::ZERO,
        };
        let queue = Arc::new(RequestQueue::new(limits, metrics.clone()));
        let cache = Arc::new(PromptCache::new(1 << 24, info.snapshot_size, metrics.clone()));
        let rules = TokenRules { eos: Vec::new(), usable_vocab: usize::MAX };
        let speculator = Speculator::new(&mut mock, Box::new(LookupDraft), DraftPolicy::Off, 1, metrics.clone());
        let runner = ModelRunner::new(mock, speculator, rules, queue.clone(), cache, metrics.clone());
        let mut scheduler = Scheduler::new(runner, queue, metrics);
        scheduler.now = || START.with(|start| *start + Duration::from_secs_f64(CLOCK.get()));
        Self(scheduler)
    }

    fn submit(&self, prompt: usize, max_tokens: usize) -> Events {
        let request = Request::new(vec![9; prompt], max_tokens, Sampling::greedy());
        self.0.queue.push(Request { cache_prompt: false, ..request }, 0).unwrap()
    }

    /// Runs one step. Returns the time at which the step began.
    fn step(&mut self) -> f64 {
        let begun = CLOCK.get();
        assert!(self.0.admit());
        self.0.run_step();
        begun
    }

    /// Runs one step, after which the clients send new requests.
    fn step_with(&mut self, clients: &mut [Client]) {
        self.step();
        clients.iter_mut().for_each(|client| client.poll(self));
    }
}

/// Number of tokens received since the last call, and true if the request has ended.
fn received(events: &mut Events) -> (usize, bool) {
    let mut tokens = 0;
    let mut ended = false;
    while let Ok(event) = events.try_recv() {
        tokens += usize::from(matches!(event, Event::Token { .. }));
        ended |= matches!(event, Event::Done { .. });
    }
    (tokens, ended)
}

/// A client that sends requests of one size. The client sends each request after the previous one has ended.
struct Client {
    size: (usize, usize),
    events: Events,
    tokens: usize,
    ended: usize,
}

impl Client {
    fn new(engine: &Engine, prompt: usize, max_tokens: usize) -> Self {
        Self { size: (prompt, max_tokens), events: engine.submit(prompt, max_tokens), tokens: 0, ended: 0 }
    }

    fn poll(&mut self, engine: &Engine) {
        let (tokens, ended) = received(&mut self.events);
        self.tokens += tokens;
        if ended {
            self.ended += 1;
            self.events = engine.submit(self.size.0, self.size.1);
        }
    }
}

#[test]
fn short_request_waits_at_most_one_chunk() {
    for cost in COSTS {
        let mut engine = Engine::new(cost);
        let idle = cost.0 + 50.0 * cost.1;
        let mut others = [Client::new(&engine, 4096, 1), Client::new(&engine, 16, 800)];
        for _ in 0..100 {
            engine.step_with(&mut others);
        }
        LONGEST.set(0.0);
        let mut worst = 0.0f64;
        for number in 0..60 {
            // The request arrives at the beginning of a step. This is the worst case, since the request waits for the
            // whole step.
            let arrived = engine.step();
            let mut short = engine.submit(50, 1);
            while received(&mut short).0 == 0 {
                engine.step_with(&mut others);
            }
            worst = worst.max(CLOCK.get() - arrived);
            for _ in 0..number * 7 % 40 {
                engine.step_with(&mut others);
            }
        }
        // A streamed model takes seconds even for a short prompt, so the decoding sequence gets its share between
        // chunks.
        let chunks = if cost.0 > 1.0 { 3.0 } else { 1.0 };
        let bound = 3.0 * idle + chunks * LONGEST.get();
        assert!(worst <= bound, "{cost:?}: first token after {worst} s, bound {bound} s");
    }
}

#[test]
fn chunks_stay_small_between_two_answers() {
    let mut engine = Engine::new(COSTS[0]);
    let mut long = Client::new(&engine, 4096, 1);
    let longest_of = |engine: &mut Engine, long: &mut Client, seconds: f64| {
        LONGEST.set(0.0);
        let end = CLOCK.get() + seconds;
        while CLOCK.get() < end {
            engine.step();
            long.poll(engine);
        }
        LONGEST.get()
    };
    // A client alone gets chunks of the largest size.
    assert!(longest_of(&mut engine, &mut long, 10.0) > 2.0);
    let mut answer = engine.submit(16, 800);
    while !received(&mut answer).1 {
        engine.step();
        long.poll(&engine);
    }
    assert!(longest_of(&mut engine, &mut long, 4.0) < 0.6);
    // The other client does not return.
    assert!(longest_of(&mut engine, &mut long, 10.0) > 2.0);
}

#[test]
fn decoding_keeps_half_its_rate() {
    for cost in COSTS {
        let mut engine = Engine::new(cost);
        let mut answer = Client::new(&engine, 16, 90_000);
        while answer.tokens == 0 {
            engine.step();
            answer.poll(&engine);
        }
        let mut others = [Client::new(&engine, 4096, 1), Client::new(&engine, 50, 1)];
        let begun = CLOCK.get();
        let had = answer.tokens;
        while others[0].ended < 30 {
            engine.step_with(&mut others);
            answer.poll(&engine);
        }
        let alone = (CLOCK.get() - begun) / (cost.0 + cost.1);
        let rate = (answer.tokens - had) as f64 / alone;
        assert!(rate > 0.48, "{cost:?}: {rate} of the rate alone");
        assert!(rate < 0.75, "{cost:?}: prompts get {} of the time", 1.0 - rate);
    }
}

#[test]
fn requests_decode_in_turn_or_together() {
    for batch in [1, 2, 4] {
        let mut engine = Engine::with_batch(COSTS[0], batch);
        let mut all = [0; 4].map(|_| engine.submit(16, 90_000));
        let mut have_begun = [false; 4];
        while have_begun != [true; 4] {
            engine.step();
            all.iter_mut().zip(&mut have_begun).for_each(|(events, has_begun)| *has_begun |= received(events).0 > 0);
        }
        let passes = |engine: &Engine| {
            let sizes = &engine.0.metrics.step_sequences;
            (sizes.get_sample_count(), sizes.get_sample_sum())
        };
        let (count, sequences) = passes(&engine);
        for _ in 0..100 {
            engine.step();
        }
        assert_eq!(all.map(|mut events| received(&mut events).0), [100 * batch / 4; 4], "{batch}");
        assert_eq!(passes(&engine), (count + 100, sequences + (100 * batch) as f64), "{batch}");
    }
}

#[test]
fn long_prompt_proceeds_beside_short_ones() {
    for cost in COSTS {
        for decodes in [false, true] {
            let mut engine = Engine::new(cost);
            let mut others = [Client::new(&engine, 50, 1), Client::new(&engine, 50, 1)].into_iter().collect::<Vec<_>>();
            others.extend(decodes.then(|| Client::new(&engine, 16, 90_000)));
            let mut long = engine.submit(8192, 1);
            let begun = CLOCK.get();
            while received(&mut long).0 == 0 {
                engine.step_with(&mut others);
            }
            let passes = (8192.0 / 64.0f64).min(8192.0 * cost.1 / 0.2).max(4.0);
            let alone = passes * cost.0 + 8192.0 * cost.1;
            let times = (CLOCK.get() - begun) / alone;
            assert!(others[0].ended > 1, "{cost:?}: no short request ended");
            assert!(times < if decodes { 8.0 } else { 4.0 }, "{cost:?}: {times} times as long as alone");
        }
    }
}

/// A request that waits for a snapshot of a long prompt waits no longer than if it computed its own prompt.
#[test]
fn awaited_prompt_overtakes_up_to_its_snapshot() {
    let mut engine = Engine::new(COSTS[0]);
    let ask = |engine: &Engine, tail: usize| {
        let ids = [vec![8; 1000], vec![6 + tail as u32 % 2; tail]].concat();
        engine.0.queue.push(Request::new(ids, 1, Sampling::greedy()), 0).unwrap()
    };
    let mut oldest = engine.submit(20_000, 1);
    let mut long = ask(&engine, 12_000);
    (0..4).for_each(|_| _ = engine.step());
    let arrived = CLOCK.get();
    let mut short = ask(&engine, 21);
    while received(&mut short).0 == 0 {
        engine.step();
    }
    let seconds = CLOCK.get() - arrived;
    assert!(seconds < 4.0, "first token after {seconds} s");
    assert_eq!([&mut oldest, &mut long].map(|events| received(events).0), [0, 0]);
    while received(&mut long).0 == 0 {
        engine.step();
    }
    let computed = engine.0.metrics.prompt_tokens_computed.get();
    assert!(computed <= 33_000 + 21, "computed {computed} tokens");
}

mod many_clients;

mod time_share {
    use super::super::time_share::TimeShare;

    /// Chunk size that the scheduler settles on if a chunk of `rows` rows takes `seconds(rows)`.
    fn settled(seconds: impl Fn(usize) -> f64) -> usize {
        let mut share = TimeShare::default();
        for _ in 0..100 {
            let rows = share.chunk_rows(2048);
            share.record_chunk(rows, 2048, seconds(rows), false);
        }
        share.chunk_rows(2048)
    }

    #[test]
    fn chunk_takes_half_a_second() {
        assert_eq!(settled(|rows| rows as f64 / 1000.0), 256);
        assert_eq!(settled(|rows| rows as f64 / 10_000.0), 2048);
        assert_eq!(settled(|rows| rows as f64 / 30.0), 64);
    }

    #[test]
    fn chunk_with_fixed_time_is_larger() {
        assert_eq!(settled(|rows| 5.0 + rows as f64 / 1000.0), 2048);
        assert_eq!(settled(|rows| 0.4 + rows as f64 / 1000.0), 512);
    }

    #[test]
    fn first_chunk_is_small() {
        assert_eq!([2048, 600, 100, 8].map(|most| TimeShare::default().chunk_rows(most)), [64, 37, 50, 8]);
    }
}

#[test]
fn pages_are_read_seldom_while_decoding_ahead() {
    let start = Instant::now();
    let after = |millis| start + Duration::from_millis(millis);
    for (is_ahead, millis, may_read) in [(false, 0, true), (true, 0, false), (true, 99, false), (true, 100, true)] {
        assert_eq!(may_read_page(is_ahead, Some(start), after(millis)), may_read, "{is_ahead} {millis}");
    }
    assert!(may_read_page(true, None, start));
}
