//! Compares attention to selected blocks over 8-bit and 4-bit keys and values with the Candle reference, and with its own
//! results for other chunks, verifies, snapshots and clients.

use crate::{
    common::{distance, forward_with_snapshots, load_with, prefill, sequence_mix::mix},
    qwen4_exp::synthetic,
};
use candle_core::{DType, Device};
use moestro_compute::{device::CpuArithmetic, ops::KvBits};
use moestro_model::{
    model::{KvPage, LoadOptions, Model, PAGE, Qwen, Reference, Rows, SequenceState, Snapshot},
    plan::Parallel,
};
use std::{path::Path, sync::Arc};
use test_support::random_cases::seeds;

const FEW: [(KvBits, u32); 2] = [(KvBits::Eight, 8), (KvBits::Four, 4)];
/// Positions in the blocks that a query attends to: some of the recent positions, and some of the older ones.
const BUDGET: usize = 96;
/// Number of tokens of the model.
const VOCAB: usize = 300;

fn load(dir: &Path, kv_bits: KvBits, math: CpuArithmetic) -> Qwen {
    let mut options = LoadOptions { math, threads: Some(2), kv_bits, verify: true, ..LoadOptions::default() };
    options.plan.parallel = Parallel::Count(12);
    load_with(dir, options)
}

fn ids() -> Vec<u32> {
    (0..PAGE as u32 + 80).map(|n| (n * n * 37 + n * 11 + 5) % VOCAB as u32).collect()
}

#[test]
fn forward_pass_matches_reference() {
    let root = tempfile::tempdir().unwrap();
    let dir = synthetic(root.path(), BUDGET);
    let ids = ids();
    let compute = |bits: Option<u32>| {
        let reference = Reference::open(&dir, Device::Cpu, DType::F64).unwrap();
        let reference = if let Some(bits) = bits { reference.with_kv_bits(bits) } else { reference };
        let logits = reference.forward(&ids).unwrap().logits.flatten_all().unwrap();
        logits.to_dtype(DType::F32).unwrap().to_vec1::<f32>().unwrap()
    };
    let rms = |a: &[f32], b: &[f32]| {
        let sum: f64 = a.iter().zip(b).map(|(a, b)| f64::from(a - b).powi(2)).sum();
        (sum / a.len() as f64).sqrt()
    };
    let exact = compute(None);
    for (kv_bits, bits) in FEW {
        let expected = compute(Some(bits));
        let (found, ..) = prefill(&mut load(&dir, kv_bits, CpuArithmetic::F32), &ids, 96);
        let (off, effect) = (rms(&found.data, &expected), rms(&expected, &exact));
        println!(
            "{bits} bits: off by {off:.1e}, at most {:.1e}; effect {effect:.1e}",
            distance(&found.data, &expected)
        );
        // A value that is almost halfway between two integers may round to the other integer.
        assert!(off < effect / 8.0, "{bits} bits: {off} of {effect}");
    }
}

#[test]
fn logits_ignore_chunks_verifies_and_snapshots() {
    let root = tempfile::tempdir().unwrap();
    let dir = synthetic(root.path(), BUDGET);
    let ids = ids();
    for (kv_bits, _) in FEW {
        let mut model = load(&dir, kv_bits, CpuArithmetic::default());
        let (mut state, marks) = (model.start().unwrap(), [70, 127, 128, 255, 257, 300]);
        let (expected, snapshots) = forward_with_snapshots(&mut model, &mut state, &ids, Rows::All, &marks);
        drop(state);
        for chunk in [1, 63, 130] {
            assert!(prefill(&mut model, &ids, chunk).0.data == expected.data, "{kv_bits:?}: chunks of {chunk}");
        }
        let mut state = model.start().unwrap();
        let mut at = 0;
        while at + 7 <= ids.len() {
            let rows = model.verify(&mut state, &[&ids[at..at + 3], &[9, 8, 7, 6]].concat()).unwrap();
            assert!(rows.data[..3 * expected.vocab] == expected.data[at * expected.vocab..][..3 * expected.vocab]);
            state.reject(4).unwrap();
            at += 3;
        }
        for (at, snapshot) in marks.into_iter().zip(snapshots) {
            assert_eq!(snapshot.state.len() as u64, model.info().snapshot_size.state);
            let copy = |page: &Arc<KvPage>| Arc::new(model.read_page(page).unwrap().into());
            let pages = snapshot.pages.iter().map(copy).collect();
            let mut restored = model.restore(&Snapshot { pages, ..snapshot }, None).unwrap();
            let rest = model.forward(&mut restored, &ids[at..], Rows::All).unwrap();
            assert!(rest.data[..] == expected.data[at * expected.vocab..], "{kv_bits:?}: restored at {at}");
        }
    }
}

#[test]
fn sequences_together_match_each_alone() {
    let root = tempfile::tempdir().unwrap();
    let dir = synthetic(root.path(), 16);
    for (kv_bits, _) in FEW {
        let mut model = load(&dir, kv_bits, CpuArithmetic::default());
        seeds(2).for_each(|seed| mix(&mut model, seed, VOCAB));
    }
}

/// Block keys keep their size, the keys and values of a token do not.
#[test]
fn cached_token_takes_half_and_quarter() {
    let root = tempfile::tempdir().unwrap();
    let dir = synthetic(root.path(), BUDGET);
    let [sixteen, eight, four] = [KvBits::Sixteen, KvBits::Eight, KvBits::Four]
        .map(|bits| load(&dir, bits, CpuArithmetic::default()).footprint().kv_per_token);
    // One attention layer with one key head of 64 values, and a block key of 128 values for each 4 positions.
    assert_eq!([sixteen, eight, four], [2 * 132 + 128, 2 * 68 + 128, 2 * 36 + 128]);
}
