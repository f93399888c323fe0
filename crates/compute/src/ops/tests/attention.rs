//! Compares attention over a cache with naive f64 loops, and with itself for other batches, thread counts and lengths.

use super::{
    TestCpu,
    filled_cache::{FilledCache, shape},
    to_bits,
};
use crate::{
    device::{CpuArithmetic, Region},
    ops::{
        Attention, AttentionShape, KvFormat, KvWrite, QkNormRope,
        simd::{Isa, tests::with},
    },
};
use test_support::mutate::Dice;

const FORMATS: [KvFormat; 2] = [KvFormat::F32, KvFormat::I16];

/// At most `tokens` tokens, and fewer for wide queries, which are slow under emulation. Their queries still fill several
/// tiles.
pub fn some_tokens(tokens: usize, width: usize) -> usize {
    tokens.min((1 << 16) / width)
}

/// Query heads, key heads, head dimension, positions. There are shapes with one block and with several, odd sizes, and
/// every number of queries per key head.
const SHAPES: [(usize, usize, usize, usize); 7] = [
    (2, 2, 8, 5),
    (4, 2, 40, 300),
    (6, 2, 64, 513),
    (7, 1, 32, 256),
    (8, 1, 256, 530),
    (16, 1, 64, 257),
    (15, 5, 16, 90),
];

fn shapes(format: KvFormat) -> impl Iterator<Item = (AttentionShape, usize)> {
    SHAPES.into_iter().map(move |dims| (shape(dims, 0, format), dims.3))
}

#[test]
fn attention_matches_naive_reference() {
    let mut dice = Dice(21);
    let mut lab = TestCpu::new();
    for (format, tolerance) in [(KvFormat::F32, 1e-6), (KvFormat::I16, 5e-5)] {
        for (shape, count) in shapes(format) {
            let filled = FilledCache::new(&mut lab, &mut dice, shape, count);
            let dim = shape.dim;
            let width = shape.heads * shape.dim;
            let tokens = some_tokens((count / 2).min(70), width);
            let at = count - tokens;
            let got = filled.attend(lab.with(3, CpuArithmetic::Integer), at, tokens);
            let proj = lab.read(filled.proj);
            for token in 0..tokens {
                for head in 0..shape.heads {
                    let expected = filled.expected(&mut lab, head, at + token, &proj);
                    for (got, expected) in got[token * width + head * dim..].iter().zip(&expected) {
                        assert!((f64::from(*got) - expected).abs() < tolerance, "{got} {expected} {format:?} {count}");
                    }
                }
            }
        }
    }
}

#[test]
fn attention_bytes_ignore_batch_and_threads() {
    let mut dice = Dice(22);
    let mut lab = TestCpu::new();
    for format in FORMATS {
        for (shape, count) in shapes(format) {
            let filled = FilledCache::new(&mut lab, &mut dice, shape, count);
            let width = shape.heads * shape.dim;
            let tokens = some_tokens(count.min(150), width);
            let at = count - tokens;
            lab.rows_stand_alone(tokens, width, |lab, from, len| filled.attend(lab, at + from, len));
        }
    }
}

#[test]
fn cached_row_reproduces_its_values() {
    let mut plain: Vec<f32> = Vec::new();
    for format in FORMATS {
        let mut dice = Dice(23);
        let mut lab = TestCpu::new();
        let shape = shape((2, 2, 64, 12), 16, format);
        let filled = FilledCache::new(&mut lab, &mut dice, shape, 12);
        // The output of a zero query is the mean of all values.
        let width = 2 * 64;
        let zeros = lab.buffer(2 * 64);
        let shape = &filled.shape;
        let y = lab.buffer(width);
        let proj = filled.proj.rows(11, 1, shape.width());
        let cache = filled.cache;
        let partials = Region::default();
        lab.run(Attention { shape, start: 11, tokens: 1, q: zeros, cache, proj, partials, y });
        let mean = lab.read(y);
        if plain.is_empty() {
            plain.clone_from(&mean);
        }
        assert!(mean.iter().zip(&plain).all(|(a, b)| (a - b).abs() < 1e-4));
        let rope = QkNormRope { q_norm: y.floats(64), k_norm: y.floats(64), rope_table: lab.buffer(4 * 16) };
        let write = |start| KvWrite { shape, start, tokens: 4, proj: filled.proj, norm_rope: rope, q: filled.q, cache };
        assert!(!lab.fails(write(11)) && lab.fails(write(12)), "no room");
    }
}

#[test]
fn kv_write_and_gate_agree_across_isas() {
    let mut dice = Dice(24);
    let mut lab = TestCpu::new();
    let shape = shape((3, 3, 40, 12), 16, KvFormat::I16);
    let filled = FilledCache::new(&mut lab, &mut dice, shape, 12);
    let [q_norm, k_norm] = [(); 2].map(|()| lab.random(&mut dice, 40));
    let norm_rope = QkNormRope { q_norm, k_norm, rope_table: lab.random(&mut dice, 5 * 16) };
    let mut run = || {
        filled.write(&mut lab, 7, 5, norm_rope);
        let mut bits = lab.bits(filled.q);
        bits.extend(lab.bits(filled.cache.keys.first(filled.cache.keys.len / 4 * 4)));
        bits.extend(to_bits(filled.attend(&mut lab, 7, 5)));
        bits
    };
    let expected = with(Isa::Scalar, &mut run);
    for isa in Isa::all() {
        assert!(with(isa, &mut run) == expected, "{isa:?}");
    }
}
