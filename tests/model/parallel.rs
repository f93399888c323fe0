//! Tests that several requests at the same time never change an answer.
//!
//! Clients send random requests: prompts with shared beginnings, different lengths, temperatures, a grammar, several
//! choices, and disconnects. Each answer is compared with the answer of an engine that runs one request at a time.

use super::common::{Dice, fixtures::DEMO, load_with};
use moestro_base::{metrics::Metrics, platform::os};
use moestro_compute::{experts::Prefetch, ops::KvBits};
use moestro_engine::{self as engine, Constraint, DraftPolicy, Event, Finish, Handle, Request, Sampling, TokenMask};
use moestro_model::{
    model::{LoadOptions, Model, Qwen, QwenState, Rows, SequenceState, StoreOptions},
    plan::Parallel,
};
use std::{
    ops::Range,
    path::Path,
    sync::{Arc, Barrier},
    thread,
};
use test_support::{own_process::ran_in_own_process, random_cases::seeds};

/// A constraint that allows ids with a certain remainder. The allowed remainder changes with each token.
#[derive(Clone)]
struct Remainders(u32);

impl Constraint for Remainders {
    fn allowed(&mut self) -> Result<TokenMask, String> {
        let word = (0..32).filter(|bit| bit % 4 == self.0 % 4).fold(0, |word, bit| word | 1 << bit);
        Ok(TokenMask::Only(vec![word; 64]))
    }

    fn accept(&mut self, _: u32) -> Result<(), String> {
        self.0 += 1;
        Ok(())
    }

    fn fork(&self) -> Box<dyn Constraint> {
        Box::new(self.clone())
    }
}

/// The requests that a client sends together.
struct Visit {
    requests: Vec<Request>,
    /// Number of events after which the client disconnects. `None` if the client stays until the end.
    leaves_after: Option<usize>,
}

/// An answer: its tokens with the bits of their log-probabilities, and its finish reason.
type Answer = (Vec<(u32, u32)>, Option<Finish>);

fn visit(number: u64, longest: usize) -> Visit {
    let mut dice = Dice(number.wrapping_mul(0x9E37_79B9_7F4A_7C15));
    let system = Dice(dice.roll(3) as u64 + 77).tokens(90);
    let shared = [0, 40, 90][dice.roll(3)];
    let max = if dice.roll(4) == 0 { 500 } else { 60 };
    let length = 1 + dice.roll(max);
    let ids = [&system[..shared], &dice.tokens(length)[..]].concat();
    let temperature = [0.0, 0.7, 1.5][dice.roll(3)];
    let constraint = (dice.roll(5) == 0).then(|| Box::new(Remainders(number as u32)) as Box<dyn Constraint>);
    let max_tokens = 1 + dice.roll(longest);
    let choices = if dice.roll(5) == 0 { 3 } else { 1 };
    let request = |choice: u64| Request {
        logprobs: Some(0),
        ignore_eos: true,
        constraint: constraint.clone(),
        ..Request::new(
            ids.clone(),
            max_tokens,
            Sampling { temperature, top_p: 0.95, seed: Some(number + choice), ..Sampling::default() },
        )
    };
    Visit { requests: (0..choices).map(request).collect(), leaves_after: (dice.roll(6) == 0).then(|| dice.roll(12)) }
}

fn answers(handle: &Handle, visit: &Visit, leaves: bool) -> Vec<Answer> {
    let all: Vec<_> = visit.requests.iter().map(|request| handle.submit(request.clone()).unwrap()).collect();
    let read = |mut events: engine::Events| {
        let (mut tokens, mut seen) = (Vec::new(), 0);
        loop {
            if leaves && visit.leaves_after == Some(seen) {
                return (tokens, None);
            }
            seen += 1;
            match events.blocking_recv().unwrap() {
                Event::Token { id, logprobs } => tokens.push((id, logprobs.unwrap().logprob.to_bits())),
                Event::Done { finish, .. } => return (tokens, Some(finish)),
                Event::Failed(error) => panic!("{error}"),
                Event::Started { .. } | Event::Prefilled { .. } | Event::Prompt(_) => {}
            }
        }
    };
    all.into_iter().map(read).collect()
}

/// Settings of the engine, except the number of parallel requests.
#[derive(Clone)]
struct Setup {
    slots: Option<usize>,
    context: usize,
    cached_snapshots: u64,
    speculate: DraftPolicy,
    kv_bits: KvBits,
    /// Maximum number of tokens in an answer.
    longest: usize,
}

impl Default for Setup {
    fn default() -> Self {
        let (slots, speculate, kv_bits) = (None, DraftPolicy::Off, KvBits::Sixteen);
        Self { slots, context: 2048, cached_snapshots: 8, speculate, kv_bits, longest: 24 }
    }
}

impl Setup {
    fn start(&self, parallel: usize) -> (Handle, engine::Worker, Arc<Metrics>) {
        let store = StoreOptions { slots: self.slots, prefetch: Prefetch::On, ..StoreOptions::default() };
        // The rows of a pass are sampled on all threads.
        let threads = Some(if parallel > 1 { 3 } else { 1 });
        let mut options = LoadOptions { threads, store, kv_bits: self.kv_bits, verify: true, ..LoadOptions::default() };
        options.plan.context = Some(self.context);
        options.plan.chunk = Some(96);
        options.plan.parallel = Parallel::Count(parallel);
        // Without snapshots, the pool has only the pages of one context.
        options.plan.prompt_cache = (self.cached_snapshots == 0).then_some(0);
        let qwen = load_with(Path::new(DEMO), options);
        let size = qwen.info().snapshot_size;
        let options = engine::Options {
            parallel,
            max_queue: 1000,
            prompt_cache: self.cached_snapshots * size.bytes(400, 0),
            speculate: self.speculate,
            ..engine::Options::default()
        };
        let metrics = Metrics::new("test", "cpu");
        let (handle, worker) = engine::spawn(qwen, options, metrics.clone()).unwrap();
        (handle, worker, metrics)
    }

    fn check(&self, seed: u64) -> Arc<Metrics> {
        self.check_visits(seed, seeds(12))
    }

    /// Compares the answers to visits of several clients with the answers to the same visits one after another.
    fn check_visits(&self, seed: u64, visits: Range<u64>) -> Arc<Metrics> {
        let visit = |number: u64| visit(seed * 100_000 + number, self.longest);
        let (alone, worker, _) = self.start(1);
        let expected: Vec<Vec<Answer>> = visits.clone().map(|number| answers(&alone, &visit(number), false)).collect();
        alone.drain();
        worker.join().unwrap();

        let clients = 2 + seed as usize % 7;
        let (handle, worker, metrics) = self.start(2 + seed as usize % 4);
        let barrier = Barrier::new(clients);
        thread::scope(|scope| {
            for client in 0..clients {
                let (handle, first, expected, barrier) = (&handle, visits.start, &expected, &barrier);
                scope.spawn(move || {
                    barrier.wait();
                    for number in (client..expected.len()).step_by(clients) {
                        let found = answers(handle, &visit(first + number as u64), true);
                        for (found, expected) in found.into_iter().zip(&expected[number]) {
                            match found {
                                (tokens, None) => assert_eq!(tokens, expected.0[..tokens.len()], "{seed} {number}"),
                                whole => assert_eq!(whole, *expected, "{seed} {number}"),
                            }
                        }
                    }
                });
            }
        });
        handle.drain();
        worker.join().unwrap();
        assert_eq!((metrics.requests_running.get(), metrics.requests_queued.get()), (0, 0));
        metrics
    }
}

/// Sequences of different lengths. For one of the sequences, the last pass is a verify with rejected rows.
fn states(model: &mut Qwen, count: usize) -> Vec<QwenState> {
    let mut dice = Dice(5);
    let mut state = |index: usize| {
        let mut state = model.start().unwrap();
        model.forward(&mut state, &dice.tokens(3 + 70 * index), Rows::None).unwrap();
        if index % 3 == 1 {
            model.verify(&mut state, &dice.tokens(4)).unwrap();
            state.reject(2).unwrap();
        }
        state
    };
    (0..count).map(&mut state).collect()
}

#[test]
fn rows_of_sequences_match_single_rows() {
    // The states of the first `sharing` sequences share buffers, so one pass computes their rows.
    let cases = [
        (None, KvBits::Sixteen, 10),
        (Some(40), KvBits::Sixteen, 10),
        (None, KvBits::Eight, 10),
        (None, KvBits::Sixteen, 3),
    ];
    for (slots, kv_bits, sharing) in cases {
        let store = StoreOptions { slots, ..StoreOptions::default() };
        let mut options = LoadOptions { threads: Some(1), store, kv_bits, verify: true, ..LoadOptions::default() };
        options.plan.parallel = Parallel::Count(sharing);
        let mut model = load_with(Path::new(DEMO), options);
        for count in [2, 5] {
            let (mut together, mut alone) = (states(&mut model, count), states(&mut model, count));
            let mut ids = Dice(9);
            for step in 0..3 {
                let ids = ids.tokens(count);
                let mut rows: Vec<_> = together.iter_mut().zip(ids.iter().copied()).collect();
                let found = model.forward_each(&mut rows, &[]).unwrap();
                for (index, (state, id)) in alone.iter_mut().zip(&ids).enumerate() {
                    let expected = model.forward(state, &[*id], Rows::Last).unwrap();
                    let same = found.row(index).iter().zip(expected.row(0)).all(|(a, b)| a.to_bits() == b.to_bits());
                    assert!(same, "sequence {index} of {count}, step {step}, {slots:?} slots, {kv_bits:?}");
                }
            }
            for (mut together, mut alone) in together.into_iter().zip(alone) {
                let [together, alone] = [&mut together, &mut alone].map(|state| model.snapshot(state).unwrap());
                assert_eq!(together.state, alone.state);
            }
        }
    }
}

#[test]
fn unused_sequence_states_take_no_memory() {
    if ran_in_own_process(unused_sequence_states_take_no_memory) {
        return;
    }
    const COUNT: u64 = 256;
    let mut options = LoadOptions { threads: Some(1), ..LoadOptions::default() };
    options.plan.chunk = Some(96);
    options.plan.parallel = Parallel::Count(COUNT as usize);
    let mut model = load_with(Path::new(DEMO), options);
    let before = os::resident_memory().unwrap_or(0);
    let mut state = model.start().unwrap();
    model.forward(&mut state, &[100], Rows::Last).unwrap();
    let after = os::resident_memory().unwrap_or(0);
    let all = model.footprint().state * COUNT;
    assert!(all > 64 << 20, "{all} bytes in all states");
    // States that share a huge page take memory together.
    assert!(
        after < before + all / 2,
        "{before} bytes before the first of {COUNT} states of {all} bytes, {after} after"
    );
}

#[test]
fn few_mixes_answer_as_alone() {
    Setup { longest: 12, ..Setup::default() }.check_visits(1, 0..4);
    Setup { longest: 12, slots: Some(40), ..Setup::default() }.check_visits(2, 0..4);
}

#[test]
#[ignore = "long: random mixes of several clients"]
fn resident_answers_are_as_alone() {
    (0..3).for_each(|seed| drop(Setup::default().check(seed)));
}

#[test]
#[ignore = "long: random mixes of several clients"]
fn streamed_answers_are_as_alone() {
    for (seed, slots) in [(3, 12), (4, 40)] {
        Setup { slots: Some(slots), ..Setup::default() }.check(seed);
    }
}

#[test]
#[ignore = "long: random mixes of several clients"]
fn drafts_and_kv_bits_change_nothing() {
    Setup { speculate: DraftPolicy::Force, ..Setup::default() }.check(5);
    Setup { kv_bits: KvBits::Eight, cached_snapshots: 2, ..Setup::default() }.check(6);
}

#[test]
#[ignore = "long: two answers of 450 tokens"]
fn preempted_answers_are_as_alone() {
    // The pool has four pages. Both answers can start, but each of them needs three pages at its end.
    let setup = Setup { context: 1024, cached_snapshots: 0, ..Setup::default() };
    let mut dice = Dice(3);
    let mut request =
        || Request { logprobs: Some(0), ignore_eos: true, ..Request::new(dice.tokens(100), 450, Sampling::greedy()) };
    let visit = Visit { requests: vec![request(), request()], leaves_after: None };
    let [(expected, none), (found, some)] = [1, 2].map(|parallel| {
        let (handle, worker, metrics) = setup.start(parallel);
        let found = answers(&handle, &visit, false);
        handle.drain();
        worker.join().unwrap();
        (found, metrics.preemptions.get())
    });
    assert_eq!(found, expected);
    assert!(none == 0 && some > 0, "{some} preemptions");
}
