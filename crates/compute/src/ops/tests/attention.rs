//! Compares attention over a cache with naive f64 loops, and with itself for other batches, thread counts and lengths.

use super::{TestCpu, to_bits};
use crate::{
    device::{CpuArithmetic, Region},
    ops::{
        Attention, AttentionShape, KvCache, KvFormat, KvWrite, QkNormRope,
        simd::{
            Isa,
            tests::{Random, with},
        },
    },
};

const FORMATS: [KvFormat; 2] = [KvFormat::F32, KvFormat::I16];

/// A cache of `count` positions with spare capacity, the values written to it, and queries and gates for each
/// position.
struct FilledCache {
    shape: AttentionShape,
    cache: KvCache,
    proj: Region,
    /// Queries that the write returned, `[count, heads * dim]`.
    q: Region,
    keys: Vec<f32>,
}

impl FilledCache {
    fn random(lab: &mut TestCpu, random: &mut Random, mut shape: AttentionShape, count: usize) -> Self {
        shape.context = count + 3;
        let proj = lab.random(random, count * shape.width());
        let cache = [0, 1].map(|_| lab.zeroed_bytes(shape.cache_bytes()));
        let table = lab.table(shape.pages());
        let cache = KvCache { keys: cache[0], values: cache[1], table, recent: Default::default() };
        let q = lab.buffer(count * shape.heads * shape.dim);
        let ones = lab.floats(&vec![1.0; shape.dim]);
        let rope = lab.buffer(count * shape.rope_dim);
        let mut filled = Self { shape, cache, proj, q, keys: Vec::new() };
        // Two calls, like a prompt in chunks.
        for (start, tokens) in [(0, count / 3), (count / 3, count - count / 3)] {
            filled.write(lab, start, tokens, [ones, ones], rope);
        }
        // Normalised keys.
        for row in lab.read(proj).chunks(shape.width()) {
            for key in row[2 * shape.heads * shape.dim..][..shape.kv_heads * shape.dim].chunks(shape.dim) {
                let mean = key.iter().map(|k| k * k).sum::<f32>() / shape.dim as f32;
                filled.keys.extend(key.iter().map(|k| k / (mean + shape.eps).sqrt()));
            }
        }
        filled
    }

    fn write(&self, lab: &mut TestCpu, start: usize, tokens: usize, [q_norm, k_norm]: [Region; 2], rope: Region) {
        let shape = &self.shape;
        let proj = self.proj.rows(start, tokens, shape.width());
        let q = self.q.rows(start, tokens, shape.heads * shape.dim);
        lab.run(KvWrite {
            shape,
            start,
            tokens,
            proj,
            norm_rope: QkNormRope { q_norm, k_norm, rope_table: rope },
            q,
            cache: self.cache,
        });
    }

    fn attend(&self, lab: &mut TestCpu, start: usize, tokens: usize) -> Vec<f32> {
        let shape = &self.shape;
        let cache = self.cache;
        let width = shape.heads * shape.dim;
        let q = self.q.rows(start, tokens, width);
        let proj = self.proj.rows(start, tokens, shape.width());
        let y = lab.buffer(tokens * width);
        lab.run(Attention { shape, start, tokens, q, cache, proj, partials: Region::default(), y });
        lab.read(y)
    }

    /// The output of head `head` at `position`, computed in f64.
    fn expected(&self, q: &[f32], proj: &[f32], head: usize, position: usize) -> Vec<f64> {
        let AttentionShape { heads, kv_heads, dim, .. } = self.shape;
        let kv = head / (heads / kv_heads);
        let width = self.shape.width();
        let dot = |k: &[f32]| q.iter().zip(k).map(|(q, k)| f64::from(*q) * f64::from(*k)).sum::<f64>();
        let key = |at: usize| &self.keys[(at * kv_heads + kv) * dim..][..dim];
        let value = |at: usize| &proj[at * width + (2 * heads + kv_heads + kv) * dim..][..dim];
        let scores: Vec<f64> = (0..=position).map(|at| dot(key(at)) / (dim as f64).sqrt()).collect();
        let max = scores.iter().copied().fold(f64::MIN, f64::max);
        let weights: Vec<f64> = scores.iter().map(|score| (score - max).exp()).collect();
        let total: f64 = weights.iter().sum();
        let gate = &proj[position * width + head * 2 * dim + dim..][..dim];
        let sum = |d: usize| weights.iter().enumerate().map(|(at, w)| w * f64::from(value(at)[d])).sum::<f64>() / total;
        (0..dim).map(|d| sum(d) / (1.0 + (-f64::from(gate[d])).exp())).collect()
    }
}

/// At most `tokens` tokens, and fewer for wide queries, which are slow under emulation. Their queries still fill several
/// tiles.
pub fn some_tokens(tokens: usize, width: usize) -> usize {
    tokens.min((1 << 16) / width)
}

impl TestCpu {
    fn zeroed_bytes(&mut self, bytes: usize) -> Region {
        self.buffer(bytes.div_ceil(4)).first(bytes)
    }
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
    SHAPES.into_iter().map(move |(heads, kv_heads, dim, count)| {
        (AttentionShape { heads, kv_heads, dim, rope_dim: 0, eps: 1e-6, context: 0, format, recent: None }, count)
    })
}

#[test]
fn attention_matches_naive_reference() {
    let mut random = Random(21);
    let mut lab = TestCpu::new();
    for (format, tolerance) in [(KvFormat::F32, 1e-6), (KvFormat::I16, 5e-5)] {
        for (shape, count) in shapes(format) {
            let filled = FilledCache::random(&mut lab, &mut random, shape, count);
            let dim = shape.dim;
            let width = shape.heads * shape.dim;
            let tokens = some_tokens((count / 2).min(70), width);
            let at = count - tokens;
            let got = filled.attend(lab.with(3, CpuArithmetic::Integer), at, tokens);
            let q = lab.read(filled.q);
            let proj = lab.read(filled.proj);
            for token in 0..tokens {
                for head in 0..shape.heads {
                    let q = &q[(at + token) * width + head * dim..][..dim];
                    let expected = filled.expected(q, &proj, head, at + token);
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
    let mut random = Random(22);
    let mut lab = TestCpu::new();
    for format in FORMATS {
        for (shape, count) in shapes(format) {
            let filled = FilledCache::random(&mut lab, &mut random, shape, count);
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
        let mut random = Random(23);
        let mut lab = TestCpu::new();
        let shape = AttentionShape {
            heads: 2,
            kv_heads: 2,
            dim: 64,
            rope_dim: 16,
            eps: 1e-6,
            context: 20,
            format,
            recent: None,
        };
        let filled = FilledCache::random(&mut lab, &mut random, shape, 12);
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
    let mut random = Random(24);
    let mut lab = TestCpu::new();
    let format = KvFormat::I16;
    let shape =
        AttentionShape { heads: 3, kv_heads: 3, dim: 40, rope_dim: 16, eps: 1e-6, context: 0, format, recent: None };
    let filled = FilledCache::random(&mut lab, &mut random, shape, 12);
    let norms = [lab.random(&mut random, 40), lab.random(&mut random, 40)];
    let rope = lab.random(&mut random, 5 * 16);
    let mut run = || {
        filled.write(&mut lab, 7, 5, norms, rope);
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
