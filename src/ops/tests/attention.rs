//! Attention over a cache: against plain loops in f64, and against itself with other batches, threads and lengths.

use candle_core::{DType, Device, Result, Tensor};

use super::{bits, tensor};
use crate::{
    device::{Compute, Math},
    ops::{
        HeadNorm, Rotation, attend, cache_row, gate, queries, remember, rms_norm,
        simd::{
            Isa,
            tests::{Random, with},
        },
    },
};

/// Keys and values of `count` positions in caches with room for more, and as plain values.
struct Filled {
    keys: Tensor,
    values: Tensor,
    plain: [Vec<f32>; 2],
    shared: usize,
    dim: usize,
}

impl Filled {
    fn random(random: &mut Random, math: Math, shared: usize, dim: usize, count: usize) -> Result<Self> {
        let (kind, width) = cache_row(math, dim);
        let cache = || Tensor::zeros((shared, count + 3, width), kind, &Device::Cpu);
        let (keys, values) = (cache()?, cache()?);
        let rows = [tensor(random, count, shared * dim)?, tensor(random, count, shared * dim)?];
        for (cache, rows) in [(&keys, &rows[0]), (&values, &rows[1])] {
            // In two calls, as a prompt in chunks would.
            remember(cache, &rows.narrow(0, 0, count / 3)?, 0, None)?;
            remember(cache, &rows.narrow(0, count / 3, count - count / 3)?, count / 3, None)?;
        }
        let plain = [rows[0].flatten_all()?.to_vec1()?, rows[1].flatten_all()?.to_vec1()?];
        Ok(Self { keys, values, plain, shared, dim })
    }

    /// Head `head` of the query at `position`, in f64.
    fn expected(&self, q: &[f32], heads: usize, head: usize, position: usize) -> Vec<f64> {
        let group = heads / self.shared;
        let row =
            |part: usize, at: usize| &self.plain[part][(at * self.shared + head / group) * self.dim..][..self.dim];
        let dot = |k: &[f32]| q.iter().zip(k).map(|(q, k)| f64::from(*q) * f64::from(*k)).sum::<f64>();
        let scores: Vec<f64> = (0..=position).map(|at| dot(row(0, at)) / (self.dim as f64).sqrt()).collect();
        let most = scores.iter().copied().fold(f64::MIN, f64::max);
        let weights: Vec<f64> = scores.iter().map(|score| (score - most).exp()).collect();
        let total: f64 = weights.iter().sum();
        (0..self.dim)
            .map(|d| weights.iter().enumerate().map(|(at, w)| w * f64::from(row(1, at)[d])).sum::<f64>() / total)
            .collect()
    }
}

/// Query heads, key heads, D, positions: one block and several, odd sizes, every number of queries a key head can have.
const SHAPES: [(usize, usize, usize, usize); 7] = [
    (2, 2, 8, 5),
    (4, 2, 40, 300),
    (6, 2, 64, 513),
    (7, 1, 32, 256),
    (8, 1, 256, 600),
    (16, 1, 64, 257),
    (15, 5, 16, 90),
];

#[test]
fn attention_is_right() -> Result<()> {
    let mut random = Random(21);
    for (heads, shared, dim, count) in SHAPES {
        for (math, tolerance) in [(Math::F32, 1e-6), (Math::Integer, 5e-5)] {
            let filled = Filled::random(&mut random, math, shared, dim, count)?;
            let tokens = (count / 2).min(70);
            let q = (tensor(&mut random, tokens, heads * dim)? * 4.0)?.reshape((tokens, heads, dim))?;
            let at = count - tokens;
            let got = attend(&Compute::cpu(3, math), &q, &filled.keys, &filled.values, at)?.to_vec2::<f32>()?;
            let q = q.to_vec3::<f32>()?;
            for token in 0..tokens {
                for head in 0..heads {
                    let expected = filled.expected(&q[token][head], heads, head, at + token);
                    for (got, expected) in got[token][head * dim..].iter().zip(&expected) {
                        assert!((f64::from(*got) - expected).abs() < tolerance, "{got} {expected} {math:?} {count}");
                    }
                }
            }
        }
    }
    Ok(())
}

#[test]
fn attention_does_not_see_batch_or_threads() -> Result<()> {
    let mut random = Random(22);
    for (heads, shared, dim, count) in SHAPES {
        for math in [Math::F32, Math::Integer] {
            let filled = Filled::random(&mut random, math, shared, dim, count)?;
            let tokens = count.min(150);
            let q = tensor(&mut random, tokens, heads * dim)?.reshape((tokens, heads, dim))?;
            let at = count - tokens;
            let run = |threads: usize, from: usize, len: usize| {
                let compute = Compute::cpu(threads, math);
                bits(&attend(&compute, &q.narrow(0, from, len)?, &filled.keys, &filled.values, at + from)?)
            };
            let expected = run(1, 0, tokens)?;
            assert!(run(2, 0, tokens)? == expected && run(5, 0, tokens)? == expected);
            for isa in Isa::all() {
                assert!(with(isa, || run(1, 0, tokens))? == expected, "{isa:?}");
            }
            for token in [0, tokens / 2, tokens - 1] {
                let row = token * heads * dim..(token + 1) * heads * dim;
                assert!(run(1, token, 1)? == expected[row.clone()] && run(4, token, 1)? == expected[row]);
            }
        }
    }
    Ok(())
}

#[test]
fn a_cached_row_is_its_values() -> Result<()> {
    let mut random = Random(23);
    let (shared, dim, tokens) = (2, 64, 5);
    let x = tensor(&mut random, tokens, shared * dim)?;
    let weight: Vec<f32> = (0..dim).map(|_| random.unit()).collect();
    let rotation = Rotation::new(7, tokens, 16, 1e7);
    let mut plain = Vec::new();
    for math in [Math::F32, Math::Integer] {
        let (kind, width) = cache_row(math, dim);
        let cache = Tensor::zeros((shared, 20, width), kind, &Device::Cpu)?;
        remember(&cache, &x, 7, Some((HeadNorm { weight: &weight, eps: 1e-6 }, &rotation)))?;
        // One query of zeros sees the mean of what is at positions 7..12.
        let zero = Tensor::zeros((1, shared, dim), DType::F32, &Device::Cpu)?;
        let nothing = cache.zeros_like()?;
        let mean = attend(&Compute::cpu(1, math), &zero, &nothing, &cache, 11)?.to_vec2::<f32>()?;
        if plain.is_empty() {
            plain.clone_from(&mean[0]);
        }
        assert!(mean[0].iter().zip(&plain).all(|(a, b)| (a - b).abs() < 1e-4));
        assert!(remember(&cache, &x, 16, None).is_err(), "no room");
    }
    Ok(())
}

#[test]
fn what_surrounds_attention_has_the_same_bytes_everywhere() -> Result<()> {
    let mut random = Random(24);
    let (heads, dim, tokens) = (3, 40, 5);
    let x = tensor(&mut random, tokens, heads * dim)?;
    let projected = tensor(&mut random, tokens, heads * 2 * dim)?;
    let weight: Vec<f32> = (0..dim).map(|_| random.unit()).collect();
    let all: Vec<f32> = (0..heads * dim).map(|_| random.unit()).collect();
    let all = Tensor::from_vec(all, heads * dim, &Device::Cpu)?;
    let (norm, rotation) = (HeadNorm { weight: &weight, eps: 1e-6 }, Rotation::new(7, tokens, 16, 1e7));
    let compute = Compute::cpu(1, Math::Integer);
    let run = || -> Result<(Vec<u32>, Vec<i16>)> {
        let cache = Tensor::zeros((heads, 20, dim + 2), DType::I16, &Device::Cpu)?;
        remember(&cache, &x, 7, Some((norm, &rotation)))?;
        let mut rows = bits(&queries(&compute, &projected, norm, &rotation)?)?;
        rows.extend(bits(&gate(&compute, &x, &projected, dim)?)?);
        rows.extend(bits(&rms_norm(&compute, &x, &all, 1e-6)?)?);
        Ok((rows, cache.flatten_all()?.to_vec1()?))
    };
    let expected = with(Isa::Scalar, run)?;
    for isa in Isa::all() {
        assert!(with(isa, run)? == expected, "{isa:?}");
    }
    Ok(())
}
