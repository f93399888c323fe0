//! Tests that a model that decodes ahead on a GPU gives the same bytes as one that does not.

use crate::{
    double::{Double, Fault, Plan, Shared},
    forward::common::argmax,
    host::Host,
    queue::{PROMPT, load_changed, load_segments, move_to},
};
use moestro_base::platform::os::MemoryLevel;
use moestro_compute::ops::KvBits;
use moestro_engine::{Sampler, Sampling, TokenMask};
use moestro_model::{
    model::{Model, NextToken, PAGE, PassHooks, Qwen, QwenState, Rows, SequenceState, TokenChoice},
    plan::Parallel,
};
use std::time::Instant;

const VOCAB: usize = 96;

/// A resident model on a device that reorders launches.
fn model(kv_bits: KvBits) -> (Qwen, Shared) {
    let double = Double::new(Host::fast());
    let control = double.control();
    control.lock().unwrap().seed = Some(7);
    let model = load_changed(false, |options| {
        options.kv_bits = kv_bits;
        options.plan.parallel = Parallel::Count(2);
    });
    (move_to(model, double), control)
}

fn hooks(usable: usize) -> PassHooks<'static> {
    PassHooks { next: Some(NextToken { usable, choice: TokenChoice::LIKELIEST }), ..PassHooks::default() }
}

/// Evaluates `id`, to continue with the most likely of the first `usable` tokens.
fn step(model: &mut Qwen, state: &mut QwenState, id: u32, usable: usize) -> Vec<f32> {
    let mut hooks = hooks(usable);
    model.forward_with(state, &[id], Rows::Last, &mut hooks).unwrap().data.to_vec()
}

fn plain(model: &mut Qwen, state: &mut QwenState, id: u32) -> Vec<f32> {
    model.forward(state, &[id], Rows::Last).unwrap().data.to_vec()
}

fn start(model: &mut Qwen, prompt: &[u32]) -> (QwenState, u32) {
    let mut state = model.start().unwrap();
    let logits = model.forward(&mut state, prompt, Rows::Last).unwrap();
    (state, argmax(logits.row(0)))
}

#[test]
fn logits_and_state_are_the_same() {
    // The first sequence passes the end of a page of 256 positions.
    let long: Vec<u32> = (0..252).map(|n| n * 7 % 96).collect();
    for (kv_bits, prompt, waits) in [(KvBits::Sixteen, &long[..], 1), (KvBits::Eight, &PROMPT, 0)] {
        let (mut model, control) = model(kv_bits);
        let [(mut ahead, mut id), (mut other, first)] = [(); 2].map(|()| start(&mut model, prompt));
        let (mut rows, mut steps_ahead) = (Vec::new(), 0);
        for n in 0..8 {
            control.lock().unwrap().seed = Some(n);
            rows.push(step(&mut model, &mut ahead, id, VOCAB));
            steps_ahead += usize::from(ahead.ahead().is_some());
            id = argmax(&rows[rows.len() - 1]);
        }
        assert_eq!(steps_ahead, 8 - waits, "a step that needs a new page does not run ahead");
        assert_eq!([ahead.take_ahead(), ahead.take_ahead()], [Some(id), None]);
        let mut id = first;
        for (n, row) in rows.iter().enumerate() {
            assert!(*row == plain(&mut model, &mut other, id), "{kv_bits:?}, step {n}");
            id = argmax(row);
        }
        plain(&mut model, &mut other, id);
        let [ahead, other] = [&mut ahead, &mut other].map(|state| model.snapshot(state).unwrap());
        assert!(ahead.len == other.len && ahead.state == other.state, "{kv_bits:?}");
    }
}

#[test]
fn other_passes_keep_the_logits() {
    let (mut model, control) = model(KvBits::Sixteen);
    let [(mut ahead, mut id), (mut other, _)] = [(); 2].map(|()| start(&mut model, &PROMPT));
    for n in 0..6 {
        control.lock().unwrap().seed = Some(n);
        let found = step(&mut model, &mut ahead, id, VOCAB);
        assert_eq!(ahead.ahead().is_some(), n % 2 == 0, "the pass of the other sequence ends the run of passes");
        let verified = model.verify(&mut other, &[id, 3]).unwrap();
        other.reject(1).unwrap();
        assert!(found == *verified.row(0), "step {n}");
        id = argmax(&found);
    }
}

#[test]
fn only_usable_tokens_are_chosen() {
    let (mut model, _) = model(KvBits::Sixteen);
    let (mut state, id) = start(&mut model, &PROMPT);
    let logits = step(&mut model, &mut state, id, VOCAB);
    let best = argmax(&logits);
    state.take_ahead();
    // `state` contains `best` now, so the same step is repeated with a new sequence.
    let (mut state, id) = start(&mut model, &PROMPT);
    let below = best as usize;
    let logits = step(&mut model, &mut state, id, below);
    assert_eq!(state.take_ahead(), Some(argmax(&logits[..below])), "ids below {below}");
}

#[test]
fn other_tokens_are_refused() {
    let (mut model, _) = model(KvBits::Sixteen);
    for wrong in 0..4 {
        let (mut state, id) = start(&mut model, &PROMPT);
        let next = argmax(&step(&mut model, &mut state, id, VOCAB));
        let (mut other, _) = start(&mut model, &PROMPT);
        let done = match wrong {
            0 => model.forward(&mut state, &[(next + 1) % 96], Rows::Last),
            1 => model.forward(&mut state, &[next, 5], Rows::Last),
            2 => model.verify(&mut state, &[next, 5]),
            _ => model.forward_each(&mut [(&mut state, next), (&mut other, 5)]),
        };
        assert!(done.is_err(), "{wrong}");
    }
    let (mut state, id) = start(&mut model, &PROMPT);
    assert_eq!(plain(&mut model, &mut state, id).len(), VOCAB, "the model still works");
}

#[test]
fn released_slots_wait_for_a_pass_ahead() {
    let double = Double::new(Host::fast());
    let control = double.control();
    let mut model = move_to(load_segments(false, 1), double);
    let [(mut state, mut id), (mut other, _)] = [(); 2].map(|()| start(&mut model, &PROMPT));
    let mut rows = Vec::new();
    for n in 0..5 {
        control.lock().unwrap().seed = Some(n);
        rows.push((id, step(&mut model, &mut state, id, VOCAB)));
        assert_eq!(state.ahead().is_some(), n < 3, "step {n}: only a resident model decodes ahead");
        if n == 2 {
            assert!(model.adapt_to_level(MemoryLevel::Short(1 << 40), Instant::now()));
        }
        id = argmax(&rows[n as usize].1);
    }
    for (n, (id, row)) in rows.into_iter().enumerate() {
        assert!(row == plain(&mut model, &mut other, id), "step {n}");
    }
}

#[test]
fn fault_ahead_fails_one_request() {
    let (mut model, control) = model(KvBits::Sixteen);
    let [(mut other, first), _] = [(); 2].map(|()| start(&mut model, &PROMPT));
    let expected = plain(&mut model, &mut other, first);
    // With the second step, the pass of the third token is submitted.
    for nth in 0..8 {
        let (mut state, mut id) = start(&mut model, &PROMPT);
        control.lock().unwrap().calls.clear();
        control.lock().unwrap().fault = Some(Plan { method: "commit", nth, fault: Fault::Fails });
        let mut failed = 0;
        for _ in 0..3 {
            match model.forward_with(&mut state, &[id], Rows::Last, &mut hooks(VOCAB)) {
                Ok(logits) => id = argmax(logits.row(0)),
                Err(_) => {
                    failed += 1;
                    (state, id) = start(&mut model, &PROMPT);
                }
            }
        }
        assert_eq!(failed, 1, "commit {nth}");
        let (mut state, id) = start(&mut model, &PROMPT);
        assert!(step(&mut model, &mut state, id, VOCAB) == expected, "the next request succeeds");
    }
}

/// Work for other requests waits for a pass ahead. If that pass fails, only its own request fails.
#[test]
fn fault_ahead_spares_pages_and_snapshots() {
    let (mut model, control) = model(KvBits::Sixteen);
    let bytes = vec![7; model.info().snapshot_size.page.bytes(PAGE) as usize];
    let (mut other, id) = start(&mut model, &PROMPT);
    control.lock().unwrap().calls.clear();
    step(&mut model, &mut other, id, VOCAB);
    let commits = control.lock().unwrap().calls["commit"];
    for work in 0..4 {
        // The last command buffers of a step are the pass ahead. Their number depends on the time that launches take.
        let is_spared = |nth: usize| {
            let [(mut other, _), (mut state, id)] = [(); 2].map(|()| start(&mut model, &PROMPT));
            let kept = model.snapshot(&mut other).unwrap();
            let page = model.make_page(bytes.clone()).unwrap();
            control.lock().unwrap().calls.clear();
            control.lock().unwrap().fault = Some(Plan { method: "commit", nth, fault: Fault::FailsAsleep });
            let stepped = model.forward_with(&mut state, &[id], Rows::Last, &mut hooks(VOCAB));
            let done = match work {
                0 => model.make_page(bytes.clone()).map(drop),
                1 => model.read_page(&page).map(drop),
                2 => Model::restore(&mut model, &kept, None).map(drop),
                _ => model.snapshot(&mut other).map(drop),
            };
            let next = state.ahead().map(|id| model.forward(&mut state, &[id], Rows::Last));
            control.lock().unwrap().fault = None;
            stepped.is_ok() && done.is_ok() && next.is_some_and(|next| next.is_err())
        };
        assert!((0..40).map(|attempt| commits - 2 + attempt % 3).any(is_spared), "work {work}");
    }
}

#[test]
fn gpu_chooses_as_the_sampler() {
    let (mut model, _) = model(KvBits::Sixteen);
    for (seed, top_p, min_p) in [(1, 0.95, 0.0), (2, 1.0, 0.3), (3, 1.0, 0.0)] {
        let sampling = Sampling { temperature: 1.5, top_k: 20, top_p, min_p, seed: Some(seed), ..Sampling::default() };
        let mut sampler = Sampler::new(sampling, &PROMPT, VOCAB - 2);
        let (mut state, mut id) = start(&mut model, &PROMPT);
        let mut likeliest = 0;
        for n in 0..10 {
            let mut hooks = PassHooks { next: sampler.next_token(), ..PassHooks::default() };
            let logits = model.forward_with(&mut state, &[id], Rows::Last, &mut hooks).unwrap();
            id = sampler.draw(logits.row(0), &TokenMask::Any).unwrap();
            assert_eq!(state.ahead(), Some(id), "seed {seed}, step {n}");
            likeliest += usize::from(id == argmax(logits.row(0)));
        }
        assert!(likeliest < 10, "seed {seed}: other tokens than the likeliest are chosen");
    }
}
