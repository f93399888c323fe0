//! Compares the delta rule, its convolution and its gated norm with naive f64 loops, and with themselves for other
//! chunks and thread counts.

use super::{TestCpu, to_bits};
use crate::{
    device::{CpuArithmetic, Region},
    ops::{
        Conv, Decay, DeltaRule, DeltaShape, Replay,
        simd::{Isa, tests::with},
    },
};
use test_support::mutate::Dice;

pub(super) fn delta_shape(key_heads: usize, value_heads: usize, key_dim: usize, value_dim: usize) -> DeltaShape {
    DeltaShape { key_heads, value_heads, key_dim, value_dim, conv_width: 4, eps: 1e-6, gate: Default::default() }
}

/// One layer's weights and state.
#[derive(Clone, Copy)]
struct Layer {
    shape: DeltaShape,
    decay: Decay,
    weight: Region,
    norm: Region,
    samples: Region,
    state: Region,
}

impl Layer {
    fn random(lab: &mut TestCpu, dice: &mut Dice, shape: DeltaShape) -> Self {
        let mut draw = |size: f32, shift: f32| -> Vec<f32> {
            (0..shape.value_heads).map(|_| dice.unit() * size + shift).collect()
        };
        let rate = draw(1.0, -1.5);
        let bias = draw(1.0, 0.0);
        Self {
            shape,
            decay: Decay { rate: lab.floats(&rate), dt_bias: lab.floats(&bias) },
            weight: lab.random(dice, 4 * shape.channels()),
            norm: lab.random(dice, shape.value_dim),
            samples: lab.buffer(3 * shape.channels()),
            state: lab.buffer(shape.values() * shape.key_dim),
        }
    }

    /// Runs the convolution and the delta rule on `tokens` rows. Returns `q k v`, `o` and `y`.
    fn run(&self, lab: &mut TestCpu, proj: Region, tokens: usize) -> [Vec<f32>; 3] {
        self.run_from(lab, Replay::default(), proj, tokens, tokens).map(|region| lab.read(region))
    }

    /// Runs the convolution and the delta rule after the rows of `replay`. `committed` rows are added to the states.
    fn run_from(
        &self,
        lab: &mut TestCpu,
        replay: Replay,
        proj: Region,
        tokens: usize,
        committed: usize,
    ) -> [Region; 3] {
        let shape = &self.shape;
        let state = self.state;
        let mixed = lab.buffer(tokens * shape.channels());
        let out = lab.buffer(tokens * shape.values());
        let y = lab.buffer(tokens * shape.values());
        lab.run(Conv { shape, tokens, proj, weight: self.weight, replay, committed, state: self.samples, out: mixed });
        let decay = self.decay;
        let norm = self.norm;
        lab.run(DeltaRule { shape, tokens, proj, mixed, decay, replay, committed, state, norm, out, y });
        [mixed, out, y]
    }
}

/// The delta rule as `delta/mod.rs` documents it, after the convolution and the norms of q and k.
fn rule(h: &DeltaShape, rate: &[f32], bias: &[f32], mixed: &[f32], proj: &[f32], state: &mut [f64]) -> Vec<f64> {
    let mut out = Vec::new();
    for (row, proj) in mixed.chunks(h.channels()).zip(proj.chunks(h.width())) {
        let row: Vec<f64> = row.iter().map(|x| f64::from(*x)).collect();
        let gate = |index: usize| f64::from(proj[h.channels() + h.values() + index]);
        for head in 0..h.value_heads {
            let key = head / (h.value_heads / h.key_heads);
            let part = |part: usize| &row[(part * h.key_heads + key) * h.key_dim..][..h.key_dim];
            let q = part(0);
            let k = part(1);
            let beta = 1.0 / (1.0 + (-gate(head)).exp());
            let step = (gate(h.value_heads + head) + f64::from(bias[head])).exp().ln_1p();
            let g = (f64::from(rate[head]) * step).exp();
            for i in 0..h.value_dim {
                let s = &mut state[(head * h.value_dim + i) * h.key_dim..][..h.key_dim];
                s.iter_mut().for_each(|s| *s *= g);
                let known: f64 = s.iter().zip(k).map(|(s, k)| s * k).sum();
                let d = beta * (row[2 * h.key_heads * h.key_dim + head * h.value_dim + i] - known);
                s.iter_mut().zip(k).for_each(|(s, k)| *s += d * k);
                out.push(s.iter().zip(q).map(|(s, q)| s * q).sum());
            }
        }
    }
    out
}

#[test]
fn delta_rule_matches_naive_reference() {
    let mut dice = Dice(31);
    let mut lab = TestCpu::new();
    for (key_heads, value_heads, key_dim, value_dim) in [(2, 4, 64, 32), (1, 2, 128, 128), (3, 3, 20, 48)] {
        let shape = delta_shape(key_heads, value_heads, key_dim, value_dim);
        let layer = Layer::random(&mut lab, &mut dice, shape);
        let tokens = 50;
        let proj = lab.random(&mut dice, tokens * shape.width());
        let mut plain = vec![0.0; shape.values() * key_dim];
        let [mixed, out, _] = layer.run(lab.with(3, CpuArithmetic::Integer), proj, tokens);
        let rate = lab.read(layer.decay.rate);
        let bias = lab.read(layer.decay.dt_bias);
        let proj = lab.read(proj);
        let expected = rule(&shape, &rate, &bias, &mixed, &proj, &mut plain);
        for (got, expected) in out.iter().zip(&expected).chain(lab.read(layer.state).iter().zip(&plain)) {
            assert!((f64::from(*got) - expected).abs() < 1e-6, "{got} {expected}");
        }
    }
}

#[test]
fn delta_bytes_ignore_chunks_and_threads() {
    let mut dice = Dice(32);
    let mut lab = TestCpu::new();
    // With keys of 128 values, rows of S stay in registers on processors that have enough. The 1,024 channels of a
    // token are split into several tasks.
    for (key_dim, value_dim) in [(64, 80), (128, 80), (64, 192)] {
        let shape = delta_shape(2, 4, key_dim, value_dim);
        let layer = Layer::random(&mut lab, &mut dice, shape);
        let tokens = 37;
        let width = shape.width();
        let proj = lab.random(&mut dice, tokens * width);
        let mut run = |threads: usize, cuts: &[usize]| {
            let lab = lab.with(threads, CpuArithmetic::Integer);
            let layer = Layer {
                samples: lab.buffer(3 * shape.channels()),
                state: lab.buffer(shape.values() * shape.key_dim),
                ..layer
            };
            let mut rows = Vec::new();
            let mut at = 0;
            for len in cuts {
                rows.extend(layer.run(lab, proj.rows(at, *len, width), *len)[2].clone());
                at += len;
            }
            (to_bits(rows), lab.bits(layer.state), lab.bits(layer.samples))
        };
        let expected = run(1, &[37]);
        for cuts in [vec![1; 37], vec![2, 1, 30, 4], vec![20, 17]] {
            assert!(run(1, &cuts) == expected && run(3, &cuts) == expected);
        }
        for isa in Isa::all() {
            assert!(with(isa, || run(1, &[37])) == expected, "{isa:?}");
        }
    }
}

/// Computes nine rows at once, and in three passes of 4, 2 and 4 rows. The first two passes store none of their own
/// rows. Each later pass first stores the accepted rows of the pass before it: three of four, then two of two.
#[test]
fn rejected_rows_leave_state_bytes_unchanged() {
    let mut dice = Dice(35);
    let mut lab = TestCpu::new();
    for (key_heads, value_heads, key_dim, value_dim) in [(2, 4, 64, 80), (1, 2, 128, 128), (3, 3, 20, 48)] {
        let shape = delta_shape(key_heads, value_heads, key_dim, value_dim);
        let width = shape.width();
        let channels = shape.channels();
        let layer = Layer::random(&mut lab, &mut dice, shape);
        let proj = lab.random(&mut dice, 9 * width);
        let another = |lab: &mut TestCpu| Layer {
            samples: lab.buffer(3 * channels),
            state: lab.buffer(shape.values() * key_dim),
            ..layer
        };
        let whole = another(&mut lab);
        let [_, _, y] = whole.run(lab.with(1, CpuArithmetic::Integer), proj, 9);
        for threads in [1, 3] {
            let lab = lab.with(threads, CpuArithmetic::Integer);
            let layer = another(lab);
            let [mixed, _, first] = layer.run_from(lab, Replay::default(), proj, 4, 0);
            assert!(lab.read(layer.state).iter().chain(&lab.read(layer.samples)).all(|x| *x == 0.0));
            // The fourth row is rejected.
            let replay = Replay { rows: 3, proj: proj.floats(3 * width), mixed: mixed.floats(3 * channels) };
            let [again, _, second] = layer.run_from(lab, replay, proj.rows(3, 2, width), 2, 3);
            let replay = Replay { rows: 2, proj: proj.rows(3, 2, width), mixed: again };
            let [_, _, third] = layer.run_from(lab, replay, proj.rows(5, 4, width), 4, 6);
            let found = [first.floats(3 * shape.values()), second, third].map(|y| lab.read(y)).concat();
            assert!(found == y);
            assert!(lab.bits(layer.state) == lab.bits(whole.state));
            assert!(lab.bits(layer.samples) == lab.bits(whole.samples));

            // A pass without new rows stores only the accepted rows.
            for rows in 1..=3 {
                let [at_once, later] = [(); 2].map(|()| another(lab));
                at_once.run(lab, proj, rows);
                let [mixed, ..] = later.run_from(lab, Replay::default(), proj, rows, 0);
                later.run_from(lab, Replay { rows, proj: proj.floats(rows * width), mixed }, proj, 0, rows);
                assert!(lab.bits(later.state) == lab.bits(at_once.state), "{rows} rows");
                assert!(lab.bits(later.samples) == lab.bits(at_once.samples), "{rows} rows");
            }
        }
    }
}

#[test]
fn convolution_matches_naive_reference() {
    let mut dice = Dice(33);
    let mut lab = TestCpu::new();
    let shape = delta_shape(4, 16, 128, 192);
    let tokens = 6;
    let channels = shape.channels();
    let keys = 4 * 128;
    assert_eq!(channels, 2048 * 2);
    let layer = Layer { samples: lab.random(&mut dice, 3 * channels), ..Layer::random(&mut lab, &mut dice, shape) };
    let proj = lab.random(&mut dice, tokens * shape.width());
    let mut full: Vec<Vec<f32>> = lab.read(layer.samples).chunks(channels).map(<[f32]>::to_vec).collect();
    full.extend(lab.read(proj).chunks(shape.width()).map(|row| row[..channels].to_vec()));
    let [y, ..] = layer.run(lab.with(2, CpuArithmetic::Integer), proj, tokens);
    let taps = lab.read(layer.weight);
    for (token, y) in y.chunks(channels).enumerate() {
        let mut expected: Vec<f64> = (0..channels)
            .map(|c| {
                let tap = |j: usize| f64::from(taps[j * channels + c]) * f64::from(full[token + j][c]);
                let sum: f64 = (0..4).map(tap).sum();
                sum / (1.0 + (-sum).exp())
            })
            .collect();
        for (index, head) in expected[..2 * keys].chunks_mut(128).enumerate() {
            let norm = (head.iter().map(|x| x * x).sum::<f64>() + 1e-6).sqrt();
            let scale = if index < 4 { 128f64.powf(-0.5) } else { 1.0 };
            head.iter_mut().for_each(|x| *x *= scale / norm);
        }
        for (got, expected) in y.iter().zip(&expected) {
            assert!((f64::from(*got) - expected).abs() < 1e-6, "{got} {expected}");
        }
    }
}
