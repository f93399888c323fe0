//! Counts heap allocations on all threads after decoding has warmed up. There must be few allocations per token, and
//! their number must not grow with the context. Also checks that the plan includes the memory of a prompt chunk.

use crate::{
    common::load_with,
    counting::{BYTES, CALLS, in_use},
};
use moestro_model::model::{LoadOptions, Model, Qwen, QwenState, Rows, cpu_scratch};
use std::{path::Path, sync::atomic::Ordering::Relaxed};
use test_support::{DEMO, own_process::ran_in_own_process};

/// Maximum number of allocations per token and layer.
const MAX_PER_LAYER: u64 = 120;

/// Number of allocations, and number of allocated bytes, per token over the next `tokens` tokens.
fn measure(model: &mut Qwen, state: &mut QwenState, tokens: u32) -> (u64, u64) {
    let before = (CALLS.load(Relaxed), BYTES.load(Relaxed));
    for index in 0..tokens {
        model.forward(state, &[100 + index * 37 % 1500], Rows::Last).unwrap();
    }
    let (calls, bytes) = (CALLS.load(Relaxed) - before.0, BYTES.load(Relaxed) - before.1);
    (calls / u64::from(tokens), bytes / u64::from(tokens))
}

/// The plan includes the memory of a chunk, except for the buffers that every device has. The plan must not be much
/// larger than this memory.
#[test]
fn memory_of_a_chunk_is_planned() {
    if ran_in_own_process(memory_of_a_chunk_is_planned) {
        return;
    }
    const FEW: usize = 256;
    const MANY: usize = 2048;
    let mut options = LoadOptions { threads: Some(2), ..LoadOptions::default() };
    (options.plan.context, options.plan.chunk) = (Some(FEW + MANY), Some(MANY));
    let mut model = load_with(Path::new(DEMO), options);
    let mut state = model.start().unwrap();
    let mut held = [FEW, MANY].map(|rows| {
        let ids: Vec<u32> = (0..rows as u32).map(|index| index * 71 % 1500).collect();
        model.forward(&mut state, &ids, Rows::None).unwrap();
        in_use() as u64
    });
    held[1] -= held[0];
    let (taken, planned) = (held[1] / (MANY - FEW) as u64, cpu_scratch(model.config())[0]);
    println!("{taken} bytes a row, {planned} planned");
    assert!(taken <= planned && taken > planned / 2, "{taken} bytes a row, {planned} planned");
}

#[test]
fn decode_allocations_stay_within_bounds() {
    if ran_in_own_process(decode_allocations_stay_within_bounds) {
        return;
    }
    let mut options = LoadOptions { threads: Some(2), ..LoadOptions::default() };
    options.plan.context = Some(6000);
    let mut model = load_with(Path::new(DEMO), options);
    let mut state = model.start().unwrap();
    let (layers, logits) = (model.config().layers as u64, 4 * model.info().vocab as u64);
    let mut at = Vec::new();
    for len in [64, 600, 5000] {
        while state.len < len {
            let ids: Vec<u32> = (0..(len - state.len).min(256) as u32).map(|index| index * 71 % 1500).collect();
            model.forward(&mut state, &ids, Rows::None).unwrap();
        }
        measure(&mut model, &mut state, 8);
        at.push(measure(&mut model, &mut state, 32));
    }
    println!("allocations and bytes a token, {layers} layers, logits of {logits} bytes: {at:?}");
    assert!(at[0].0 <= MAX_PER_LAYER * layers, "{at:?}");
    for later in &at[1..] {
        // The numbers may differ slightly, because tokens use different experts and threads make queues for messages.
        // Four bytes for each position of the context would be 2,144 bytes more.
        assert!(later.0 <= at[0].0 + layers && later.1 <= at[0].1 + 256, "{at:?}");
    }
}
