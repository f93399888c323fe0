use super::*;
use crate::engine::{Event, Finish, Options, Request, Sampling, parrot::Parrot, spawn};

struct Answer {
    ids: Vec<u32>,
    finish: Finish,
    timings: Timings,
    logprobs: Vec<Option<f32>>,
}

fn answer(parrot: Parrot, speculate: Speculate, draft_tokens: usize, request: &Request) -> Answer {
    let options = Options { eos: vec![parrot.eos], speculate, draft_tokens, ..Options::default() };
    let metrics = Metrics::new("test", "cpu");
    let (engine, worker) = spawn(parrot, options, metrics.clone()).unwrap();
    let mut events = engine.submit(request.clone()).unwrap();
    let (mut ids, mut logprobs) = (Vec::new(), Vec::new());
    let (finish, timings) = loop {
        match events.blocking_recv().unwrap() {
            Event::Token { id, logprobs: found } => {
                ids.push(id);
                logprobs.push(found.map(|found| found.logprob));
            }
            Event::Done { finish, timings } => break (finish, timings),
            Event::Failed(error) => panic!("{error}"),
            Event::Started { .. } | Event::Prompt(_) => {}
        }
    };
    // The next request goes on from this one's session: what was taken back must be gone.
    let mut again = request.clone();
    again.ids.extend(&ids);
    again.ids.push(40);
    let mut events = engine.submit(again).unwrap();
    while let Some(event) = events.blocking_recv() {
        if let Event::Started { cached_tokens, .. } = event {
            assert!(cached_tokens + 1 >= request.ids.len() + ids.len().saturating_sub(1), "{cached_tokens}");
        }
    }
    let counted = metrics.draft_tokens_accepted.get() + metrics.draft_tokens_rejected.get();
    assert!(counted >= timings.drafted_tokens as u64);
    drop(engine);
    worker.join().unwrap();
    Answer { ids, finish, timings, logprobs }
}

fn request(ids: &[u32], max_tokens: usize, sampling: Sampling) -> Request {
    Request {
        ids: ids.to_vec(),
        max_tokens,
        sampling,
        logprobs: Some(0),
        prompt_logprobs: None,
        ignore_eos: false,
        constraint: None,
        boundaries: Vec::new(),
        cache_prompt: true,
    }
}

#[test]
fn the_answer_is_the_same_with_and_without() {
    let prompt: Vec<u32> = (0..40).map(|n| [5, 6, 7, 8, 9, 5, 6, 11][n % 8] + (n as u32 / 16)).collect();
    // What the parrot says is in the prompt in part only, so that drafts are right for a while, then wrong.
    let said: Vec<u32> = prompt.iter().enumerate().map(|(n, &id)| if n % 7 == 6 { 30 } else { id }).collect();
    let seeded = |temperature| Sampling { temperature, seed: Some(3), ..Sampling::default() };
    let penal = Sampling { frequency_penalty: 9.0, presence_penalty: 1.0, repetition_penalty: 1.3, ..seeded(0.7) };
    let biased = Sampling { logit_bias: vec![(6, -80.0), (31, 20.0)], ..seeded(1.0) };
    for sampling in [seeded(0.0), seeded(0.7), seeded(13.0), penal, biased] {
        for (margin, max_tokens) in [(50.0, 100), (50.0, 13), (4.0, 60)] {
            let parrot = || Parrot { answer: Some(said.clone()), margin, ..Parrot::default() };
            let request = request(&prompt, max_tokens, sampling.clone());
            let plain = answer(parrot(), Speculate::Off, 0, &request);
            assert_eq!(plain.timings.drafted_tokens, 0);
            for width in [1, 3, 7, 15] {
                let forced = answer(parrot(), Speculate::Force, width, &request);
                assert_eq!((&forced.ids, forced.finish), (&plain.ids, plain.finish), "{sampling:?} {width}");
                assert_eq!(forced.logprobs, plain.logprobs);
                if margin > 10.0 && sampling.temperature < 1.0 && sampling.frequency_penalty == 0.0 {
                    let Timings { drafted_tokens: drafted, accepted_tokens: accepted, .. } = forced.timings;
                    assert!(0 < accepted && accepted < drafted, "{accepted} of {drafted}: the test must not be empty");
                }
            }
        }
    }
}

#[test]
fn rows_that_are_cheap_together_are_speculated_with() {
    // A pass costs the same however many rows it has.
    let parrot = Parrot { pass_delay: std::time::Duration::from_millis(1), context: 900, ..Parrot::default() };
    let prompt: Vec<u32> = (0..400).map(|n| 3 + (n * n + n / 7) % 60).collect();
    let request = request(&prompt, 390, Sampling { temperature: 0.0, ..Sampling::default() });
    let plain = answer(parrot.clone(), Speculate::Off, 0, &request);
    let auto = answer(parrot, Speculate::Auto, 7, &request);
    assert_eq!(auto.ids, plain.ids);
    assert!(auto.timings.accepted_tokens > 200, "{:?}", auto.timings);
    assert!(auto.timings.decode_seconds < 0.6 * plain.timings.decode_seconds, "{:?}", auto.timings);
    assert!(auto.timings.saved_seconds > 0.0);
}
