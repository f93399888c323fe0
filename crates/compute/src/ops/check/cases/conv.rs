//! Checks of `conv`: GPU against CPU.

use crate::{
    device::{DeviceError, Driver},
    ops::{Decay, DeltaRule, DeltaShape, OutputGate, Replay, check::KernelCheck, conv::Conv},
};

/// Checks the convolution, and the delta rule after it.
pub fn cases(b: &mut KernelCheck<'_, impl Driver>) -> Result<(), DeviceError> {
    case(
        b,
        &DeltaShape {
            key_heads: 1,
            value_heads: 2,
            key_dim: 128,
            value_dim: 32,
            conv_width: 4,
            eps: 1e-6,
            gate: Default::default(),
        },
    )?;
    case(
        b,
        &DeltaShape {
            key_heads: 1,
            value_heads: 1,
            key_dim: 256,
            value_dim: 16,
            conv_width: 4,
            eps: 1e-6,
            gate: OutputGate::Sigmoid,
        },
    )
}

fn case(b: &mut KernelCheck<'_, impl Driver>, shape: &DeltaShape) -> Result<(), DeviceError> {
    let tokens = 3;
    let channels = shape.channels();
    let values = shape.values();
    let proj = b.random(tokens * shape.width())?;
    let replay = Replay { rows: 2, proj: b.random(2 * shape.width())?, mixed: b.random(2 * channels)? };
    let taps = b.random(4 * channels)?;
    let state = b.random(3 * channels)?;
    let out = b.buffer(tokens * channels)?;
    let committed = 2 + tokens;
    b.check(Conv { shape, tokens, proj, weight: taps, replay, committed, state, out }, &[out, state], &[])?;
    let mixed = out;
    let rate = b.random.floats(shape.value_heads);
    let rate: Vec<f32> = rate.iter().map(|a| -a.exp()).collect();
    let decay = Decay { rate: b.floats(&rate)?, dt_bias: b.random(shape.value_heads)? };
    let state = b.random(values * shape.key_dim)?;
    let norm = b.random(shape.value_dim)?;
    let out = b.buffer(tokens * values)?;
    let y = b.buffer(tokens * values)?;
    // Only the replayed rows go into the state.
    let committed = 2;
    b.check(
        DeltaRule { shape, tokens, proj, mixed, decay, replay, committed, state, norm, out, y },
        &[out, state, y],
        &[],
    )
}
