//! Tests that rows of several sequences in one pass have the same bytes as if each sequence ran alone.

use crate::{
    forward::common::sequence_mix::mix,
    gpu::HostGpu,
    host::Host,
    queue::{load_changed, move_to},
};
use moestro_compute::ops::KvBits;
use moestro_model::{model::Qwen, plan::Parallel};
use test_support::random_cases::seeds;

/// Number of tokens of the small model.
const VOCAB: usize = 96;

/// A small model. The states of the first `sharing` sequences share buffers.
fn place(streaming: bool, sharing: usize, kv_bits: KvBits) -> Qwen {
    let model = load_changed(streaming, |options| {
        options.plan.parallel = Parallel::Count(sharing);
        options.kv_bits = kv_bits;
    });
    move_to(model, HostGpu::new(Host::fast()))
}

#[test]
#[ignore = "long: six mixes of sequences"]
fn sequences_together_match_each_alone() {
    for streaming in [false, true] {
        // In these three cases, all sequences, some sequences, or no sequences share buffers.
        for (seed, sharing) in [(1, 8), (2, 3), (3, 1)] {
            mix(&mut place(streaming, sharing, KvBits::Sixteen), seed, VOCAB);
        }
    }
}

#[test]
fn quantized_sequences_together_match_alone() {
    mix(&mut place(false, 8, KvBits::Eight), 4, VOCAB);
    mix(&mut place(true, 8, KvBits::Four), 5, VOCAB);
}

#[test]
#[ignore = "long: ten random mixes"]
fn random_mixes_match_each_alone() {
    // By default, a mix for each number of sequences.
    for streaming in [false, true] {
        let mut model = place(streaming, 6, KvBits::Sixteen);
        seeds(5).for_each(|seed| mix(&mut model, seed, VOCAB));
    }
}
