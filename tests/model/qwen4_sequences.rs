//! Tests that several qwen4_exp sequences in one pass have the same bytes as if each ran alone: selection of blocks, rows
//! of n-gram tables, residual streams, images.

use crate::{
    common::{load_with, qwen4_images, sequence_mix::mix},
    qwen4_exp::{dir, options},
};
use moestro_compute::device::CpuArithmetic;
use moestro_model::{
    model::{LoadOptions, Model, Qwen, QwenState, Rows},
    plan::Parallel,
};
use std::path::Path;
use test_support::random_cases::seeds;

/// Number of tokens of the checkpoint.
const VOCAB: usize = 320;

/// The states of the first `sharing` sequences share buffers, so that one pass computes their rows.
fn place(dir: &Path, math: CpuArithmetic, slots: Option<usize>, sharing: usize) -> Qwen {
    let mut options = LoadOptions { math, verify: true, ..options() };
    options.store.slots = slots;
    options.plan.parallel = Parallel::Count(sharing);
    load_with(dir, options)
}

/// 60 is the minimum number of slots.
#[test]
fn sequences_together_match_each_alone() {
    let cases = [
        (CpuArithmetic::F32, None, 12),
        (CpuArithmetic::default(), None, 12),
        (CpuArithmetic::default(), Some(60), 12),
        (CpuArithmetic::default(), None, 5),
    ];
    for (index, (math, slots, sharing)) in cases.into_iter().enumerate() {
        let mut model = place(&dir(), math, slots, sharing);
        assert!(model.info().batch > 1);
        (0..2).for_each(|round| mix(&mut model, 2 * index as u64 + round, VOCAB));
    }
}

#[test]
#[ignore = "long: 60 random mixes"]
fn random_mixes_match_each_alone() {
    let mut models = [(None, 12), (Some(60), 12), (None, 5)]
        .map(|(slots, sharing)| place(&dir(), CpuArithmetic::default(), slots, sharing));
    seeds(60).for_each(|seed| mix(&mut models[seed as usize % 3], seed, VOCAB));
}

/// After an image, a row's position is less than its index in the sequence.
#[test]
fn sequences_with_images_match_each_alone() {
    let mut model = place(&qwen4_images::dir(), CpuArithmetic::F32, None, 12);
    let vocab = model.info().vocab as u32;
    let mut start = || -> Vec<QwenState> {
        let with_images = qwen4_images::cases().into_iter().map(|case| {
            let mut state = model.start().unwrap();
            let images = case.placed(&model);
            qwen4_images::extend(&mut model, &mut state, &case.prompt, &images, 1024);
            assert!(state.next < state.len);
            state
        });
        let mut states: Vec<_> = with_images.collect();
        let mut text = model.start().unwrap();
        model.forward(&mut text, &[5, 6, 7], Rows::None).unwrap();
        states.push(text);
        states
    };
    let [mut together, mut alone] = [start(), start()];
    for step in 0..9 {
        let ids = [3, 5, 8].map(|factor| (factor * step + 1) % vocab);
        let mut rows: Vec<_> = together.iter_mut().zip(ids).collect();
        let found = model.forward_each(&mut rows, &[]).unwrap();
        for (row, (state, id)) in alone.iter_mut().zip(ids).enumerate() {
            let expected = model.forward(state, &[id], Rows::Last).unwrap();
            assert!(found.row(row) == *expected.data, "step {step}, row {row}");
        }
    }
}
