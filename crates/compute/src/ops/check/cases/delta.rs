//! Checks of `delta`: GPU against CPU.

use crate::{
    device::{DeviceError, Driver},
    ops::{
        Conv, DeltaShape, Float, Linear, Norm, OutputGate, Replay, SequenceRows, WeightFormat,
        check::{CLOSE, KernelCheck},
        delta::{Decay, DeltaNet, DeltaNetRows, DeltaRule},
    },
};

/// Checks whole layers. The checks of the convolution include the delta rule alone.
pub fn cases(b: &mut KernelCheck<'_, impl Driver>) -> Result<(), DeviceError> {
    let affine = |bits, group| WeightFormat::Affine { bits, group, scale: Float::Bf16 };
    let shape = &DeltaShape {
        key_heads: 2,
        value_heads: 4,
        key_dim: 64,
        value_dim: 32,
        conv_width: 4,
        eps: 1e-6,
        gate: Default::default(),
    };
    for (codes, tokens) in [(affine(4, 64), 1), (affine(3, 32), 1), (affine(8, 64), 3), (WeightFormat::Mxfp4, 2)] {
        case(b, shape, codes, tokens, 192)?;
    }
    for tokens in [1, 3] {
        case(b, &DeltaShape { gate: OutputGate::Sigmoid, ..*shape }, affine(4, 64), tokens, 192)?;
    }
    b.gpu.set_direct(true);
    case(b, shape, affine(8, 64), 1, 192)?;
    b.gpu.set_direct(false);
    if b.gpu.tile_all_rows(true) {
        for codes in [affine(4, 64), WeightFormat::Mxfp4] {
            case(b, shape, codes, 1, 256)?;
        }
        // With this many rows of W, a simdgroup has two tiles of them.
        case(b, &DeltaShape { value_heads: 192, ..*shape }, affine(4, 64), 1, 128)?;
        b.gpu.tile_all_rows(false);
    }
    rows_of_sequences(b, shape, affine(4, 64))
}

/// Checks a whole layer after a verify of two rows.
fn case(
    b: &mut KernelCheck<'_, impl Driver>,
    shape: &DeltaShape,
    codes: WeightFormat,
    tokens: usize,
    hidden: usize,
) -> Result<(), DeviceError> {
    let channels = shape.channels();
    let values = shape.values();
    let heads = shape.value_heads;
    let mut rows = |rows| b.weight(codes, rows, hidden);
    let matrices = [rows(channels)?, rows(values)?, rows(heads)?, rows(heads)?];
    let last = [b.weight(codes, hidden, values)?];
    let norm = Some(Norm { weight: b.random(hidden)?, eps: 1e-6, keep: None });
    let taps = b.random(4 * channels)?;
    let samples = b.random(3 * channels)?;
    let rate: Vec<f32> = b.random.floats(heads).iter().map(|a| -a.exp()).collect();
    let decay = Decay { rate: b.floats(&rate)?, dt_bias: b.random(heads)? };
    let state = b.random(values * shape.key_dim)?;
    let gated = b.random(shape.value_dim)?;
    let mut replay = Replay::default();
    for (tokens, committed) in [(2, 0), (tokens, 2 + tokens)] {
        let h = b.random(tokens * hidden)?;
        let proj = b.buffer(tokens * shape.width())?;
        let mixed = b.buffer(tokens * channels)?;
        let out = b.buffer(tokens * values)?;
        let y = b.buffer(tokens * values)?;
        let in_proj = Linear { x: h, tokens, norm, matrices: &matrices, y: proj, add: false };
        let conv = Conv { shape, tokens, proj, weight: taps, replay, committed, state: samples, out: mixed };
        let rule = DeltaRule { shape, tokens, proj, mixed, decay, replay, committed, state, norm: gated, out, y };
        let out_proj = Linear { x: y, tokens, norm: None, matrices: &last, y: h, add: true };
        b.check(&DeltaNet { in_proj, conv, rule, out_proj }, &[h, samples, state], &[])?;
        replay = Replay { rows: 2, proj, mixed };
    }
    Ok(())
}

/// Checks that rows of two sequences give the same bytes in one launch as in one launch per row.
fn rows_of_sequences(
    b: &mut KernelCheck<'_, impl Driver>,
    shape: &DeltaShape,
    codes: WeightFormat,
) -> Result<(), DeviceError> {
    let hidden = 192;
    let channels = shape.channels();
    let values = shape.values();
    let heads = shape.value_heads;
    let mut rows = |rows| b.weight(codes, rows, hidden);
    let matrices = [rows(channels)?, rows(values)?, rows(heads)?, rows(heads)?];
    let last = [b.weight(codes, hidden, values)?];
    let norm = Some(Norm { weight: b.random(hidden)?, eps: 1e-6, keep: None });
    let weight = b.random(4 * channels)?;
    let rate: Vec<f32> = b.random.floats(heads).iter().map(|a| -a.exp()).collect();
    let decay = Decay { rate: b.floats(&rate)?, dt_bias: b.random(heads)? };
    let gated = b.random(shape.value_dim)?;
    let sample = 3 * channels;
    let matrix = values * shape.key_dim;
    let mut twice = |count: usize| {
        let values = b.random.floats(count);
        Ok::<_, DeviceError>([b.floats(&values)?, b.floats(&values)?])
    };
    let h = twice(2 * hidden)?;
    let samples = twice(2 * sample)?;
    let states = twice(2 * matrix)?;
    let proj = b.buffer(2 * shape.width())?;
    let mixed = b.buffer(2 * channels)?;
    let out = b.buffer(2 * values)?;
    let y = b.buffer(2 * values)?;
    let net = |tokens, h, samples, state| {
        let replay = Replay::default();
        let committed = 1;
        let conv = Conv { shape, tokens, proj, weight, replay, committed, state: samples, out: mixed };
        DeltaNet {
            in_proj: Linear { x: h, tokens, norm, matrices: &matrices, y: proj, add: false },
            conv,
            rule: DeltaRule { shape, tokens, proj, mixed, decay, replay, committed, state, norm: gated, out, y },
            out_proj: Linear { x: y, tokens, norm: None, matrices: &last, y: h, add: true },
        }
    };
    // Row 0 belongs to sequence 1, row 1 to sequence 0.
    let rows = SequenceRows { starts: [0, 0], table: b.words(&[1, 0, 0, 0])? };
    let mut ran = Vec::new();
    for launch in (DeltaNetRows { net: net(2, h[0], samples[0], states[0]), rows }).launches(None) {
        ran.extend(b.launch(launch));
    }
    for row in 0..2 {
        let number = 1 - row;
        let sample = samples[1].rows(number, 1, sample);
        let state = states[1].rows(number, 1, matrix);
        for launch in net(1, h[1].rows(row, 1, hidden), sample, state).launches(None) {
            b.launch(launch);
        }
    }
    for [together, alone] in [h, samples, states] {
        let found = b.on_gpu(together)?;
        let expected = b.on_gpu(alone)?;
        b.record(&ran, if found == expected { 0.0 } else { f64::INFINITY }, CLOSE);
    }
    Ok(())
}
