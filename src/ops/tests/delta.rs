//! The delta rule, its convolution and its gated norm: against plain loops in f64, and against themselves cut into other
//! chunks and with other thread counts.

use candle_core::{DType, Device, Result, Tensor};

use super::{bits, tensor, values};
use crate::{
    device::{Compute, Math},
    ops::{
        DeltaHeads, conv, delta_rule, gated_norm,
        simd::{
            Isa,
            tests::{Random, with},
        },
    },
};

fn heads(random: &mut Random, key_heads: usize, value_heads: usize, key_dim: usize, value_dim: usize) -> DeltaHeads {
    let mut draw = |size: f32, shift: f32| (0..value_heads).map(|_| random.unit() * size + shift).collect();
    let (decay, dt_bias) = (draw(1.0, -1.5), draw(1.0, 0.0));
    DeltaHeads { key_heads, value_heads, key_dim, value_dim, decay, dt_bias }
}

/// Section 2.2 of the specification, word by word.
fn rule(h: &DeltaHeads, mixed: &[f32], gates: &[f32], state: &mut [f64]) -> Vec<f64> {
    let width = 2 * h.key_heads * h.key_dim + h.value_heads * h.value_dim;
    let tokens = mixed.len() / width;
    let mut out = vec![0.0; h.value_heads * tokens * h.value_dim];
    for token in 0..tokens {
        let row: Vec<f64> = mixed[token * width..][..width].iter().map(|x| f64::from(*x)).collect();
        let gate = |index: usize| f64::from(gates[token * 2 * h.value_heads + index]);
        for head in 0..h.value_heads {
            let key = head / (h.value_heads / h.key_heads);
            let unit = |part: usize, scale: f64| -> Vec<f64> {
                let x = &row[(part * h.key_heads + key) * h.key_dim..][..h.key_dim];
                let norm = (x.iter().map(|x| x * x).sum::<f64>() + 1e-6).sqrt();
                x.iter().map(|x| x / norm * scale).collect()
            };
            let (q, k) = (unit(0, (h.key_dim as f64).powf(-0.5)), unit(1, 1.0));
            let beta = 1.0 / (1.0 + (-gate(head)).exp());
            let step = (gate(h.value_heads + head) + f64::from(h.dt_bias[head])).exp().ln_1p();
            let g = (f64::from(h.decay[head]) * step).exp();
            for i in 0..h.value_dim {
                let s = &mut state[(head * h.value_dim + i) * h.key_dim..][..h.key_dim];
                s.iter_mut().for_each(|s| *s *= g);
                let known: f64 = s.iter().zip(&k).map(|(s, k)| s * k).sum();
                let d = beta * (row[2 * h.key_heads * h.key_dim + head * h.value_dim + i] - known);
                s.iter_mut().zip(&k).for_each(|(s, k)| *s += d * k);
                out[(head * tokens + token) * h.value_dim + i] = s.iter().zip(&q).map(|(s, q)| s * q).sum();
            }
        }
    }
    out
}

#[test]
fn the_rule_is_right() -> Result<()> {
    let mut random = Random(31);
    for (key_heads, value_heads, key_dim, value_dim) in [(2, 4, 64, 32), (1, 2, 128, 128), (3, 3, 20, 48)] {
        let h = heads(&mut random, key_heads, value_heads, key_dim, value_dim);
        let tokens = 50;
        let mixed = tensor(&mut random, tokens, 2 * key_heads * key_dim + value_heads * value_dim)?;
        let gates = (tensor(&mut random, tokens, 2 * value_heads)? * 2.0)?;
        let state = Tensor::zeros((value_heads, value_dim, key_dim), DType::F32, &Device::Cpu)?;
        let mut plain = vec![0.0; value_heads * value_dim * key_dim];
        let expected = rule(&h, &values(&mixed)?, &values(&gates)?, &mut plain);
        let got = values(&delta_rule(&Compute::cpu(3, Math::Integer), &h, &mixed, &gates, &state)?)?;
        for (got, expected) in got.iter().zip(&expected).chain(values(&state)?.iter().zip(&plain)) {
            assert!((f64::from(*got) - expected).abs() < 1e-6, "{got} {expected}");
        }
    }
    Ok(())
}

#[test]
fn chunks_and_threads_do_not_show() -> Result<()> {
    let mut random = Random(32);
    let h = heads(&mut random, 2, 4, 64, 80);
    let (tokens, width) = (37, 2 * 2 * 64 + 4 * 80);
    // Columns of a wider projection, as in the model.
    let projected = tensor(&mut random, tokens, width + 4 * 80 + 8)?;
    let (taps, norm) = (tensor(&mut random, 4, width)?, tensor(&mut random, 1, 80)?.flatten_all()?);
    let run = |threads: usize, cuts: &[usize]| -> Result<(Vec<u32>, Vec<u32>)> {
        let compute = Compute::cpu(threads, Math::Integer);
        let samples = Tensor::zeros((3, width), DType::F32, &Device::Cpu)?;
        let state = Tensor::zeros((4, 80, 64), DType::F32, &Device::Cpu)?;
        let (mut rows, mut at) = (Vec::new(), 0);
        for len in cuts {
            let x = projected.narrow(0, at, *len)?;
            let mixed = conv(&compute, &x.narrow(1, 0, width)?, &taps, &samples)?;
            let o = delta_rule(&compute, &h, &mixed, &x.narrow(1, width + 320, 8)?, &state)?;
            rows.extend(bits(&gated_norm(&compute, &o, &x.narrow(1, width, 320)?, &norm, 1e-6)?)?);
            at += len;
        }
        let mut memory = bits(&state)?;
        memory.extend(bits(&samples)?);
        Ok((rows, memory))
    };
    let expected = run(1, &[37])?;
    for cuts in [vec![1; 37], vec![2, 1, 30, 4], vec![20, 17]] {
        assert!(run(1, &cuts)? == expected && run(3, &cuts)? == expected);
    }
    for isa in Isa::all() {
        assert!(with(isa, || run(1, &[37]))? == expected, "{isa:?}");
    }
    Ok(())
}

#[test]
fn the_convolution_is_right() -> Result<()> {
    let mut random = Random(33);
    let (tokens, width) = (6, 2048 * 2);
    let (x, taps) = (tensor(&mut random, tokens, width)?, tensor(&mut random, 4, width)?);
    let state = tensor(&mut random, 3, width)?;
    let full = Tensor::cat(&[&state, &x], 0)?.to_vec2::<f32>()?;
    let y = conv(&Compute::cpu(2, Math::Integer), &x, &taps, &state.copy()?)?.to_vec2::<f32>()?;
    let taps = taps.to_vec2::<f32>()?;
    for token in 0..tokens {
        for c in 0..width {
            let sum: f64 = (0..4).map(|j| f64::from(taps[j][c]) * f64::from(full[token + j][c])).sum();
            assert!((sum / (1.0 + (-sum).exp()) - f64::from(y[token][c])).abs() < 1e-6);
        }
    }
    Ok(())
}
