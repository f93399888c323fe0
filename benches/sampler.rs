//! Measures how long it takes to sample one token from the logits of Qwen3.5's vocabulary. Sampling runs between two
//! forward passes, so it should take a small fraction of a pass.

use criterion::{Criterion, criterion_group, criterion_main};
use moestro_engine::{Sampler, Sampling, TokenMask};
use std::hint::black_box;

const VOCAB: usize = 248_320;

/// Logits with a realistic distribution: most are far below the largest.
fn logits() -> Vec<f32> {
    let mut bits = 1u64;
    let mut uniform = || {
        bits = bits.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (bits >> 40) as f32 / (1 << 24) as f32
    };
    (0..VOCAB).map(|_| (0..12).map(|_| uniform()).sum::<f32>() * 3.0 - 18.0).collect()
}

fn draw(criterion: &mut Criterion) {
    let logits = logits();
    let prompt: Vec<u32> = (0..4096).map(|place| place * 7).collect();
    let neutral = Sampling { seed: Some(1), ..Sampling::default() };
    let cases = [
        ("greedy", Sampling { temperature: 0.0, ..neutral.clone() }),
        ("temperature", neutral.clone()),
        ("top_k 20, top_p 0.95", Sampling { top_k: 20, top_p: 0.95, ..neutral.clone() }),
        ("top_p 0.95", Sampling { top_p: 0.95, ..neutral.clone() }),
        ("min_p 0.05", Sampling { min_p: 0.05, ..neutral.clone() }),
        ("presence penalty, top_k 20", Sampling { presence_penalty: 1.5, top_k: 20, ..neutral.clone() }),
    ];
    for (name, sampling) in cases {
        let mut sampler = Sampler::new(sampling, &prompt, VOCAB);
        criterion.bench_function(name, |bench| bench.iter(|| sampler.draw(black_box(&logits), &TokenMask::Any)));
    }
    // A third of all tokens is allowed, scattered over the vocabulary like those of a JSON string.
    let allowed =
        TokenMask::Only((0..VOCAB as u32 / 32).map(|word| word.wrapping_mul(0x9E37_79B1) & 0x5555_9249).collect());
    let mut sampler = Sampler::new(Sampling { top_k: 20, top_p: 0.95, ..neutral }, &prompt, VOCAB);
    criterion.bench_function("top_k 20, top_p 0.95, a third of all tokens allowed", |bench| {
        bench.iter(|| sampler.draw(black_box(&logits), &allowed));
    });
}

criterion_group!(benches, draw);
criterion_main!(benches);
