//! Compares 8-bit and 4-bit keys and values with the Candle reference, with 16-bit keys and values, and with their own
//! results for other chunk sizes.

use crate::common::{
    decode, distance,
    fixtures::{self, DEMO},
    load_with, prefill,
};
use candle_core::{DType, Device};
use moestro_compute::{device::CpuArithmetic, ops::KvBits};
use moestro_model::model::{LoadOptions, Model, PAGE, Qwen, Reference, Rows, SequenceState};
use std::path::Path;

const FEW: [(KvBits, u32); 2] = [(KvBits::Eight, 8), (KvBits::Four, 4)];

fn demo(kv_bits: KvBits, math: CpuArithmetic) -> Qwen {
    load_with(Path::new(DEMO), LoadOptions { math, threads: Some(2), kv_bits, ..LoadOptions::default() })
}

/// Concatenated questions and answers that the demo was trained on.
fn text(count: usize) -> Vec<u32> {
    let (cases, _) = fixtures::demo();
    let all = cases.iter().cycle().flat_map(|case| [&case.prompt_ids[..], &case.greedy_ids].concat());
    all.take(count).collect()
}

fn log_probability(row: &[f32], id: u32) -> f64 {
    let max = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let total: f64 = row.iter().map(|x| f64::from(x - max).exp()).sum();
    f64::from(row[id as usize] - max) - total.ln()
}

#[test]
fn forward_pass_matches_reference() {
    let ids = text(400);
    let compute = |bits: Option<u32>| {
        let reference = Reference::open(Path::new(DEMO), Device::Cpu, DType::F64).unwrap();
        let reference = if let Some(bits) = bits { reference.with_kv_bits(bits) } else { reference };
        let logits = reference.forward(&ids).unwrap().logits.flatten_all().unwrap();
        logits.to_dtype(DType::F32).unwrap().to_vec1::<f32>().unwrap()
    };
    let exact = compute(None);
    for (kv_bits, bits) in FEW {
        let expected = compute(Some(bits));
        let effect = distance(&expected, &exact);
        for math in [CpuArithmetic::F32, CpuArithmetic::Integer] {
            let (found, ..) = prefill(&mut demo(kv_bits, math), &ids, 96);
            let rms = |a: &[f32], b: &[f32]| {
                let sum: f64 = a.iter().zip(b).map(|(a, b)| f64::from(a - b).powi(2)).sum();
                (sum / a.len() as f64).sqrt()
            };
            let (off, mean) = (distance(&found.data, &expected), rms(&found.data, &expected));
            let all = rms(&expected, &exact);
            println!(
                "{bits} bits, {math:?}: off by {off:.1e}, mean {mean:.1e}; effect of rounding: {effect:.1e}, mean {all:.1e}"
            );
            // The reference computes in f64, so a value that is almost halfway between two integers may round to the
            // other integer.
            assert!(mean < all / 8.0, "{bits} bits, {math:?}: {mean} of {all}");
        }
    }
}

#[test]
#[ignore = "exhaustive: every question, alone and after 500 tokens"]
fn eight_bit_answers_equal_sixteen_bit() {
    let (cases, _) = fixtures::demo();
    let mut models = [KvBits::Sixteen, KvBits::Eight].map(|bits| demo(bits, CpuArithmetic::Integer));
    let mut worst = [0f64; 2];
    let (mut sum, mut count) = (0.0, 0);
    // Each question is asked alone, and after 500 tokens of other text, so that most positions are quantized.
    for (place, before) in [0, 500].into_iter().enumerate() {
        for case in &cases {
            let ids = [&text(before)[..], &case.prompt_ids, &case.greedy_ids].concat();
            let rows = models.each_mut().map(|model| prefill(model, &ids, 512).0);
            for (at, next) in ids.iter().enumerate().skip(before.max(1)) {
                let [a, b] = rows.each_ref().map(|rows| log_probability(rows.row(at - 1), *next));
                worst[place] = worst[place].max((a - b).abs());
                (sum, count) = (sum + if place == 1 { (a - b).abs() } else { 0.0 }, count + place);
            }
            let prompt = &ids[..ids.len() - case.greedy_ids.len()];
            let [exact, few] = models.each_mut().map(|model| {
                let (logits, mut state, _) = prefill(model, prompt, 512);
                let last = logits.row(logits.rows() - 1).to_vec();
                decode(model, &mut state, &last, case.greedy_ids.len()).0
            });
            // After unrelated text the demo is uncertain, and the logits of its most likely tokens are close to each
            // other.
            assert!(before > 0 || exact == few, "{}", case.question);
        }
    }
    let mean = sum / count as f64;
    println!(
        "8 bits: log-probabilities within {:.2e}; after 500 tokens within {:.2e}, mean {mean:.2e}",
        worst[0], worst[1]
    );
    assert!(worst[0] <= BOUND && mean <= BOUND, "{worst:?} {mean}");
}

/// Largest difference of a log-probability that 8-bit keys and values may cause.
const BOUND: f64 = 2e-3;

#[test]
#[ignore = "long: every question"]
fn four_bit_perplexity_rises_under_one_percent() {
    let ids = text(4000);
    let mut options = LoadOptions { threads: Some(2), ..LoadOptions::default() };
    options.plan.context = Some(4096);
    let nats = [KvBits::Sixteen, KvBits::Four].map(|kv_bits| {
        let mut model = load_with(Path::new(DEMO), LoadOptions { kv_bits, ..options.clone() });
        let (logits, ..) = prefill(&mut model, &ids, 512);
        let each = ids[1..].iter().enumerate().map(|(at, next)| -log_probability(logits.row(at), *next));
        each.sum::<f64>() / (ids.len() - 1) as f64
    });
    let ratio = (nats[1] - nats[0]).exp();
    println!("4 bits: perplexity {:.4} of {:.4}, {ratio:.5}", nats[1].exp(), nats[0].exp());
    assert!((ratio - 1.0).abs() <= 0.01, "{ratio}");
}

#[test]
fn logits_ignore_chunks_threads_and_verifies() {
    let ids: Vec<u32> = (0..PAGE as u32 + 150).map(|n| n * 37 % 2000 + 5).collect();
    for (kv_bits, _) in FEW {
        let (expected, ..) = prefill(&mut demo(kv_bits, CpuArithmetic::Integer), &ids, 400);
        for (chunk, threads) in [(1, 2), (63, 1), (130, 3)] {
            let mut model =
                load_with(Path::new(DEMO), LoadOptions { threads: Some(threads), kv_bits, ..LoadOptions::default() });
            let (logits, ..) = prefill(&mut model, &ids, chunk);
            assert!(logits.data == expected.data, "{kv_bits:?}: chunks of {chunk} on {threads} threads");
        }
        // Verify and reject rows at every boundary of the ring.
        let mut model = demo(kv_bits, CpuArithmetic::Integer);
        let mut state = model.start().unwrap();
        let mut at = 0;
        while at + 7 <= ids.len() {
            let rows = model.verify(&mut state, &[&ids[at..at + 3], &[9, 8, 7, 6]].concat()).unwrap();
            for row in 0..3 {
                assert!(rows.row(row) == expected.row(at + row), "{kv_bits:?}: row {}", at + row);
            }
            state.reject(4).unwrap();
            at += 3;
        }
        let rest = model.forward(&mut state, &ids[at..], Rows::All).unwrap();
        assert!(rest.data[..] == expected.data[at * expected.vocab..]);
    }
}

#[test]
fn cached_token_takes_half_and_quarter() {
    // Heads have 256 values, as in all supported models.
    use moestro_compute::ops::KvFormat::{Eight, Four, I16};
    let of = |format: moestro_compute::ops::KvFormat| format.row_bytes(256) as f64 / I16.row_bytes(256) as f64;
    assert!(of(Eight) <= 0.53 && of(Four) <= 0.28, "{} {}", of(Eight), of(Four));
    let [sixteen, eight, four] = [KvBits::Sixteen, KvBits::Eight, KvBits::Four]
        .map(|bits| demo(bits, CpuArithmetic::Integer).footprint().kv_per_token);
    assert!(eight * 100 <= sixteen * 53 && four * 100 <= sixteen * 28, "{sixteen} {eight} {four}");
}
