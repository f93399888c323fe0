//! Linear layers and experts: against a plain reference, and against themselves with other batches and thread counts.

use candle_core::{Device, Result, Tensor};

use super::{
    Assignment, Codes, ExpertView, Float, Job, Weight, combine, experts, linear,
    quant::Format,
    simd::{
        Isa,
        tests::{Owned, Random, with},
    },
};
use crate::device::{Compute, Math, Span};

mod attention;
mod delta;

const AFFINE: Codes = Codes::Affine { bits: 4, group: 64, scale: Float::Bf16 };

fn weight(random: &mut Random, codes: Codes, rows: usize, cols: usize) -> Weight {
    let owned = Owned::random(random, codes, rows, cols);
    let parts = owned.view().parts.map(|part| Span::from_bytes(part).expect("memory"));
    Weight { codes, rows, cols, gain: 1.0, parts }
}

fn tensor(random: &mut Random, rows: usize, cols: usize) -> Result<Tensor> {
    Tensor::from_vec((0..rows * cols).map(|_| random.unit()).collect::<Vec<_>>(), (rows, cols), &Device::Cpu)
}

fn values(tensor: &Tensor) -> Result<Vec<f32>> {
    tensor.flatten_all()?.to_vec1()
}

fn bits(tensor: &Tensor) -> Result<Vec<u32>> {
    Ok(values(tensor)?.into_iter().map(f32::to_bits).collect())
}

#[test]
fn linear_does_not_see_batch_threads_or_neighbours() -> Result<()> {
    let mut random = Random(11);
    let eight = Codes::Affine { bits: 8, group: 64, scale: Float::Bf16 };
    let weights = [(AFFINE, 300), (eight, 7), (Codes::Dense(Float::Bf16), 65), (AFFINE, 1), (Codes::Mxfp4, 40)]
        .map(|(codes, rows)| weight(&mut random, codes, rows, 384));
    let all: Vec<&Weight> = weights.iter().collect();
    let x = tensor(&mut random, 67, 384)?;
    for math in [Math::Integer, Math::F32] {
        let one = Compute::cpu(1, math);
        let expected = bits(&linear(&one, &x, &all)?)?;
        for threads in [2, 5] {
            assert!(bits(&linear(&Compute::cpu(threads, math), &x, &all)?)? == expected);
        }
        let rows: Vec<Tensor> = (0..67).map(|row| linear(&one, &x.narrow(0, row, 1)?, &all)).collect::<Result<_>>()?;
        assert!(bits(&Tensor::cat(&rows, 0)?)? == expected);
        let alone: Vec<Tensor> = all.iter().map(|weight| linear(&one, &x, &[weight])).collect::<Result<_>>()?;
        assert!(bits(&Tensor::cat(&alone, 1)?)? == expected);
    }
    Ok(())
}

#[test]
fn linear_refuses_what_does_not_fit() -> Result<()> {
    let mut random = Random(12);
    let weight = weight(&mut random, AFFINE, 8, 128);
    let compute = Compute::cpu(1, Math::Integer);
    assert!(linear(&compute, &tensor(&mut random, 2, 64)?, &[&weight]).is_err());
    let short = Weight { rows: 9, ..weight.clone() };
    assert!(linear(&compute, &tensor(&mut random, 2, 128)?, &[&short]).is_err());
    let odd = Weight { codes: Codes::Affine { bits: 7, group: 64, scale: Float::Bf16 }, ..weight };
    assert!(linear(&compute, &tensor(&mut random, 2, 128)?, &[&odd]).is_err());
    Ok(())
}

/// Experts of `[gate and up, down]` codes and their intermediate size, routed at random to `k` each of `tokens`.
struct Layer {
    weights: Vec<[Weight; 3]>,
    rows: Vec<Vec<Assignment>>,
}

impl Layer {
    const HIDDEN: usize = 256;

    fn random(random: &mut Random, kinds: &[(Codes, Codes, usize)], tokens: usize, k: usize) -> Self {
        let hidden = Self::HIDDEN;
        let weights = kinds.iter().map(|(up, down, inner)| {
            [
                weight(random, *up, *inner, hidden),
                weight(random, *up, *inner, hidden),
                weight(random, *down, hidden, *inner),
            ]
        });
        let weights: Vec<_> = weights.collect();
        let mut rows = vec![Vec::new(); kinds.len()];
        for token in 0..tokens {
            let first = random.below(kinds.len());
            for rank in 0..k {
                let place = (token * k + rank) as u32;
                rows[(first + rank) % kinds.len()].push(Assignment { token: token as u32, place });
            }
        }
        Self { weights, rows }
    }

    fn jobs(&self) -> Vec<Job<'_>> {
        let mut jobs = Vec::new();
        for (weights, rows) in self.weights.iter().zip(&self.rows) {
            let [gate, up, down] = weights;
            jobs.push(Job { expert: ExpertView { gate: gate.view(), up: up.view(), down: down.view() }, rows });
        }
        jobs
    }
}

fn kinds() -> Vec<(Codes, Codes, usize)> {
    let affine = |bits, group| Codes::Affine { bits, group, scale: Float::Bf16 };
    vec![
        (AFFINE, AFFINE, 192),
        (AFFINE, AFFINE, 192),
        (affine(3, 32), affine(8, 128), 384),
        (AFFINE, affine(5, 32), 96),
        (Codes::Dense(Float::F32), AFFINE, 64),
        (AFFINE, Codes::Mxfp8, 160),
    ]
}

#[test]
fn experts_do_what_they_say() -> Result<()> {
    let mut random = Random(13);
    let (tokens, k) = (40, 3);
    let layer = Layer::random(&mut random, &kinds(), tokens, k);
    let x = tensor(&mut random, tokens, Layer::HIDDEN)?;
    for math in [Math::F32, Math::Integer] {
        // Some levels of each product's activations, which depend on the weight.
        let levels = |weight: &Weight| match weight.codes {
            Codes::Affine { bits, group, .. } if math == Math::Integer => 4.0 / Format::new(bits, group).levels as f32,
            _ => 0.0,
        };
        let (compute, plain) = (Compute::cpu(3, math), Compute::cpu(1, Math::F32));
        let out = Tensor::zeros((tokens * k, Layer::HIDDEN), candle_core::DType::F32, &Device::Cpu)?;
        experts(&compute, &x, &layer.jobs(), &out)?;
        let out = out.to_vec2::<f32>()?;
        for ([gate, up, down], rows) in layer.weights.iter().zip(&layer.rows) {
            let tolerance = 1e-6 + levels(gate) + levels(up) + levels(down);
            for row in rows {
                let x = x.narrow(0, row.token as usize, 1)?;
                let (gate, up) = (values(&linear(&plain, &x, &[gate])?)?, values(&linear(&plain, &x, &[up])?)?);
                let act: Vec<f32> = gate.iter().zip(&up).map(|(g, u)| g / (1.0 + (-g).exp()) * u).collect();
                let act = Tensor::from_vec(act, (1, gate.len()), &Device::Cpu)?;
                let expected = values(&linear(&plain, &act, &[down])?)?;
                let size = expected.iter().fold(0f32, |most, y| most.max(y.abs()));
                for (got, expected) in out[row.place as usize].iter().zip(&expected) {
                    assert!((got - expected).abs() <= tolerance * size, "{got} {expected} of {size}");
                }
            }
        }
    }
    Ok(())
}

#[test]
fn experts_do_not_see_batch_threads_or_each_other() -> Result<()> {
    let mut random = Random(14);
    let (tokens, k) = (300, 4);
    let layer = Layer::random(&mut random, &kinds(), tokens, k);
    let x = tensor(&mut random, tokens, Layer::HIDDEN)?;
    let places = || Tensor::zeros((tokens * k, Layer::HIDDEN), candle_core::DType::F32, &Device::Cpu);
    for math in [Math::Integer, Math::F32] {
        let (one, many) = (Compute::cpu(1, math), Compute::cpu(4, math));
        let together = places()?;
        experts(&one, &x, &layer.jobs(), &together)?;
        let expected = bits(&together)?;
        let threaded = places()?;
        experts(&many, &x, &layer.jobs(), &threaded)?;
        assert!(bits(&threaded)? == expected);
        let single = places()?;
        for job in layer.jobs().iter().rev() {
            for row in job.rows {
                let rows = std::slice::from_ref(row);
                experts(&many, &x, &[Job { expert: job.expert, rows }], &single)?;
            }
        }
        assert!(bits(&single)? == expected);
        for isa in Isa::all() {
            let here = places()?;
            with(isa, || experts(&one, &x, &layer.jobs(), &here))?;
            assert!(bits(&here)? == expected, "{isa:?}");
        }
    }
    Ok(())
}

#[test]
fn experts_refuse_what_does_not_fit() -> Result<()> {
    let mut random = Random(15);
    let layer = Layer::random(&mut random, &kinds()[..1], 1, 1);
    let compute = Compute::cpu(1, Math::Integer);
    let x = tensor(&mut random, 1, Layer::HIDDEN)?;
    let out = tensor(&mut random, 2, Layer::HIDDEN)?;
    let expert = layer.jobs()[0].expert;
    let bad = [(0, 2), (1, 0)].map(|(token, place)| vec![Assignment { token, place }]);
    let twice = vec![Assignment { token: 0, place: 1 }; 2];
    for rows in bad.iter().chain([&twice]) {
        assert!(experts(&compute, &x, &[Job { expert, rows }], &out).is_err());
    }
    let mixed = ExpertView { down: expert.up, ..expert };
    assert!(experts(&compute, &x, &[Job { expert: mixed, rows: &layer.rows[0] }], &out).is_err());
    Ok(())
}

#[test]
fn combine_adds_in_rank_order() -> Result<()> {
    let mut random = Random(16);
    let (tokens, k, hidden) = (5, 3, 40);
    let out = tensor(&mut random, tokens * k + tokens, hidden)?;
    let shared = out.narrow(0, tokens * k, tokens)?;
    let gate = tensor(&mut random, tokens, 1)?;
    let weights: Vec<f32> = (0..tokens * k).map(|_| random.unit()).collect();
    let got = combine(&Compute::cpu(2, Math::Integer), &out, &weights, k, Some((&shared, &gate)))?.to_vec2::<f32>()?;
    let (rows, gate) = (out.to_vec2::<f32>()?, values(&gate)?);
    for token in 0..tokens {
        for col in 0..hidden {
            let routed = (token * k..(token + 1) * k).fold(0f32, |y, at| weights[at].mul_add(rows[at][col], y));
            assert_eq!(got[token][col], gate[token].mul_add(rows[tokens * k + token][col], routed));
        }
    }
    Ok(())
}
