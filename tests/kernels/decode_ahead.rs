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
    error::ModelError,
    model::{Model, NextToken, PAGE, PassHooks, Qwen, QwenState, Rows, SequenceState, TokenChoice},
    plan::Parallel,
};
use std::time::Instant;

const VOCAB: usize = 96;

/// A resident model for two sequences on a device that reorders launches.
fn model(kv_bits: KvBits) -> (Qwen, Shared) {
    model_for(2, kv_bits)
}

fn model_for(sequences: usize, kv_bits: KvBits) -> (Qwen, Shared) {
    let double = Double::new(Host::fast());
    let control = double.control();
    control.lock().unwrap().seed = Some(7);
    let model = load_changed(false, |options| {
        options.kv_bits = kv_bits;
        options.plan.parallel = Parallel::Count(sequences);
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

/// A verify that needs only the likeliest tokens computes the same tokens and the same state.
#[test]
fn verify_returns_the_likeliest_tokens() {
    for kv_bits in [KvBits::Sixteen, KvBits::Eight] {
        let (mut model, control) = model(kv_bits);
        let [(mut one, _), (mut other, _)] = [(); 2].map(|()| start(&mut model, &PROMPT));
        for (n, usable) in (0..).zip([VOCAB, 50, 5, 1, VOCAB + 9]) {
            control.lock().unwrap().seed = Some(n);
            let ids: Vec<u32> = (0..=3 * n as u32).map(|id| id * 31 % 96).collect();
            let logits = model.verify(&mut other, &ids).unwrap();
            let mut hooks = PassHooks { likeliest_below: Some(usable), ..PassHooks::default() };
            assert_eq!(model.forward_with(&mut one, &ids, Rows::Verify, &mut hooks).unwrap().rows(), 0);
            let likeliest = |row| argmax(&logits.row(row)[..usable.min(VOCAB)]);
            assert_eq!(hooks.likeliest, (0..ids.len()).map(likeliest).collect::<Vec<_>>(), "{kv_bits:?}, {usable}");
            [&mut one, &mut other].into_iter().for_each(|state| state.reject(ids.len() / 2).unwrap());
        }
        let [one, other] = [&mut one, &mut other].map(|state| model.snapshot(state).unwrap());
        assert!(one.len == other.len && one.state == other.state, "{kv_bits:?}");
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

/// Evaluates a token of some sequences in one pass, to continue with their likeliest tokens. `ids` has the last token of
/// every sequence.
fn step_together(
    model: &mut Qwen,
    states: &mut [QwenState],
    ids: &mut [u32],
    which: &[usize],
) -> Result<Vec<Vec<f32>>, ModelError> {
    let next = vec![NextToken { usable: VOCAB, choice: TokenChoice::LIKELIEST }; which.len()];
    let chosen = states.iter_mut().enumerate().filter(|(index, _)| which.contains(index));
    let mut rows: Vec<_> = chosen.map(|(index, state)| (state, ids[index])).collect();
    let logits = model.forward_each(&mut rows, &next)?;
    let rows = (0..which.len()).map(|row| logits.row(row).to_vec()).collect::<Vec<_>>();
    which.iter().zip(&rows).for_each(|(index, row)| ids[*index] = argmax(row));
    Ok(rows)
}

/// The logits of the first tokens after each prompt, of one sequence at a time.
fn alone(model: &mut Qwen, prompts: &[&[u32]], steps: usize) -> Vec<Vec<Vec<f32>>> {
    let rows = |prompt: &&[u32]| {
        let (mut state, mut id) = start(model, prompt);
        let step = |_| {
            let row = plain(model, &mut state, id);
            id = argmax(&row);
            row
        };
        (0..steps).map(step).collect()
    };
    prompts.iter().map(rows).collect()
}

#[test]
fn sequences_decode_ahead_together() {
    let (mut model, control) = model_for(4, KvBits::Sixteen);
    // The last sequence passes the end of a page of 256 positions.
    let long: Vec<u32> = (0..254).map(|n| n * 7 % 96).collect();
    let prompts = [&PROMPT[..], &PROMPT[..3], &[5, 9, 1, 2], &long];
    let expected = alone(&mut model, &prompts, 9);
    let (mut states, mut ids): (Vec<_>, Vec<_>) = prompts.iter().map(|prompt| start(&mut model, prompt)).unzip();
    let mut steps = [0; 4];
    // The sequences of each step. All passes run ahead, except before a new page, and where another pass comes first:
    // the CPU continues some sequences and then the others, or a prompt is computed.
    let (all, two, others): (&[usize], &[usize], &[usize]) = (&[0, 1, 2, 3], &[0, 2], &[1, 3]);
    let order = [all, all, all, all, two, others, all, all, all];
    let mut seen = Vec::new();
    for (n, which) in (0..).zip(order) {
        control.lock().unwrap().seed = Some(n);
        if n == 7 {
            start(&mut model, &PROMPT);
        }
        let rows = step_together(&mut model, &mut states, &mut ids, which).unwrap();
        for (index, row) in which.iter().zip(rows) {
            assert!(row == expected[*index][steps[*index]], "step {n}, sequence {index}");
            steps[*index] += 1;
            let ahead = states[*index].ahead();
            assert!(ahead.is_none_or(|ahead| ahead == ids[*index]), "step {n}, sequence {index}");
        }
        seen.push(which.iter().all(|index| states[*index].ahead().is_some()));
    }
    assert_eq!(seen, [true, false, true, true, false, false, true, false, true]);
    for (state, id) in states.iter_mut().zip(&ids) {
        assert_eq!(state.take_ahead(), Some(*id));
    }
}

#[test]
fn ended_sequences_leave_a_pass_ahead() {
    let (mut model, control) = model_for(3, KvBits::Eight);
    let prompts = [&PROMPT[..], &PROMPT[..3], &[5, 9, 1, 2]];
    let expected = alone(&mut model, &prompts, 4);
    let (mut states, mut ids): (Vec<_>, Vec<_>) = prompts.iter().map(|prompt| start(&mut model, prompt)).unzip();
    let mut which = vec![0, 1, 2];
    for (n, _) in expected[0].iter().enumerate() {
        control.lock().unwrap().seed = Some(n as u64);
        let rows = step_together(&mut model, &mut states, &mut ids, &which).unwrap();
        for (index, row) in which.iter().zip(rows) {
            assert!(row == expected[*index][n], "step {n}, sequence {index}");
            assert!(states[*index].ahead().is_some(), "step {n}, sequence {index}");
        }
        if n == 1 {
            states[0].take_ahead();
            which = vec![1, 2];
        }
    }
}

#[test]
fn fault_ahead_fails_all_sequences_of_pass() {
    let (mut model, control) = model_for(2, KvBits::Sixteen);
    let prompts = [&PROMPT[..], &PROMPT[..3]];
    let expected = alone(&mut model, &prompts, 3);
    let mut failed = 0;
    for nth in 0..10 {
        let (mut states, mut ids): (Vec<_>, Vec<_>) = prompts.iter().map(|prompt| start(&mut model, prompt)).unzip();
        control.lock().unwrap().calls.clear();
        control.lock().unwrap().fault = Some(Plan { method: "commit", nth, fault: Fault::Fails });
        for n in 0..3 {
            let Ok(rows) = step_together(&mut model, &mut states, &mut ids, &[0, 1]) else {
                failed += 1;
                break;
            };
            assert!(rows.iter().zip(&expected).all(|(row, expected)| *row == expected[n]), "commit {nth}");
        }
        control.lock().unwrap().fault = None;
        drop(states);
        let (mut states, mut ids): (Vec<_>, Vec<_>) = prompts.iter().map(|prompt| start(&mut model, prompt)).unzip();
        let rows = step_together(&mut model, &mut states, &mut ids, &[0, 1]).unwrap();
        assert!(rows.iter().zip(&expected).all(|(row, expected)| *row == expected[0]), "after commit {nth}");
    }
    assert!(failed > 4, "{failed} steps failed");
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
            _ => model.forward_each(&mut [(&mut state, next), (&mut other, 5)], &[]),
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
    for work in 0..4 {
        // The last command buffers of a step are the pass ahead. Their number depends on the time that launches take,
        // so it is counted each time.
        let is_spared = |attempt: usize| {
            let [(mut other, first), (mut state, id)] = [(); 2].map(|()| start(&mut model, &PROMPT));
            let kept = model.snapshot(&mut other).unwrap();
            let page = model.make_page(bytes.clone()).unwrap();
            control.lock().unwrap().calls.clear();
            step(&mut model, &mut other, first, VOCAB);
            let nth = control.lock().unwrap().calls["commit"] - 2 + attempt % 3;
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
        assert!((0..100).any(is_spared), "work {work}");
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
