//! Tests that rows of several sequences in one pass have the same bytes as if each sequence ran alone.

use crate::{
    forward::common::Dice,
    gpu::HostGpu,
    host::Host,
    queue::{load_changed, move_to},
};
use moestro_compute::ops::KvBits;
use moestro_model::model::{Model, Qwen, QwenState, Rows, SequenceState};
use moestro_model::plan::Parallel;

/// A small model. The states of the first `sharing` sequences share buffers.
fn place(streaming: bool, sharing: usize, kv_bits: KvBits) -> Qwen {
    let model = load_changed(streaming, |options| {
        options.plan.parallel = Parallel::Count(sharing);
        options.kv_bits = kv_bits;
    });
    move_to(model, HostGpu::new(Host::fast()))
}

fn tokens(dice: &mut Dice, max: usize) -> Vec<u32> {
    (0..1 + dice.roll(max)).map(|_| dice.roll(96) as u32).collect()
}

fn start(model: &mut Qwen, prompt: &[u32]) -> QwenState {
    let mut state = model.start().unwrap();
    model.forward(&mut state, prompt, Rows::None).unwrap();
    state
}

/// Runs a random mix: sequences of different lengths start and end, some of them advance together, and others verify
/// drafts.
fn mix(model: &mut Qwen, seed: u64) {
    let (mut dice, count) = (Dice(seed), 2 + seed as usize % 5);
    let prompts: Vec<_> = (0..count).map(|_| tokens(&mut dice, 40)).collect();
    let [mut together, mut alone] =
        [(); 2].map(|()| prompts.iter().map(|prompt| start(model, prompt)).collect::<Vec<_>>());
    for step in 0..8 {
        let one = dice.roll(count);
        match dice.roll(4) {
            0 => {
                let draft = tokens(&mut dice, 4);
                let rejected = dice.roll(draft.len());
                let [found, expected] = [&mut together[one], &mut alone[one]].map(|state| {
                    let logits = model.verify(state, &draft).unwrap();
                    state.reject(rejected).unwrap();
                    logits.data
                });
                assert!(found == expected, "mix {seed}, step {step}: a verify of sequence {one}");
            }
            1 => {
                let prompt = tokens(&mut dice, 40);
                (together[one], alone[one]) = (start(model, &prompt), start(model, &prompt));
            }
            _ => {}
        }
        let ids: Vec<Option<u32>> =
            (0..count).map(|_| (count == 2 || dice.roll(4) > 0).then(|| dice.roll(96) as u32)).collect();
        let mut rows: Vec<_> = together.iter_mut().zip(&ids).filter_map(|(state, id)| Some((state, (*id)?))).collect();
        if rows.is_empty() {
            continue;
        }
        let found = model.forward_each(&mut rows).unwrap();
        let chosen = alone.iter_mut().zip(&ids).filter_map(|(state, id)| Some((state, (*id)?)));
        for (row, (state, id)) in chosen.enumerate() {
            let expected = model.forward(state, &[id], Rows::Last).unwrap();
            assert!(found.row(row) == *expected.data, "mix {seed}, step {step}: row {row} of {ids:?}");
        }
    }
    for (mut together, mut alone) in together.into_iter().zip(alone) {
        let [together, alone] = [&mut together, &mut alone].map(|state| model.snapshot(state).unwrap());
        assert!(together.state == alone.state, "mix {seed}: states");
    }
}

#[test]
#[ignore = "long: six mixes of sequences"]
fn sequences_together_match_each_alone() {
    for streaming in [false, true] {
        // In these three cases, all sequences, some sequences, or no sequences share buffers.
        for (seed, sharing) in [(1, 8), (2, 3), (3, 1)] {
            mix(&mut place(streaming, sharing, KvBits::Sixteen), seed);
        }
    }
}

#[test]
fn quantized_sequences_together_match_alone() {
    mix(&mut place(false, 8, KvBits::Eight), 4);
    mix(&mut place(true, 8, KvBits::Four), 5);
}

#[test]
#[ignore = "exhaustive: many mixes"]
fn random_mixes_match_each_alone() {
    // By default, a mix for each number of sequences.
    let mixes: u64 = std::env::var("MOESTRO_MIXES").map_or(5, |count| count.parse().unwrap());
    for streaming in [false, true] {
        let mut model = place(streaming, 6, KvBits::Sixteen);
        (10..10 + mixes).for_each(|seed| mix(&mut model, seed));
    }
}
