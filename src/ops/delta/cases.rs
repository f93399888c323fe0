//! Checks of this operation: GPU against CPU.

use super::{Decay, DeltaNet, DeltaRule, DeltaShape, Replay};
use crate::{
    device::DeviceError,
    ops::{Conv, Float, Linear, Norm, WeightFormat, check::KernelCheck},
};

/// Whole layers. The checks of the convolution cover the rule alone.
pub(in crate::ops) fn cases(b: &mut KernelCheck<'_>) -> Result<(), DeviceError> {
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
        case(b, shape, codes, tokens)?;
    }
    Ok(())
}

/// A whole layer, after a verify of two rows.
fn case(b: &mut KernelCheck<'_>, shape: &DeltaShape, codes: WeightFormat, tokens: usize) -> Result<(), DeviceError> {
    let (hidden, channels, values, heads) = (192, shape.channels(), shape.values(), shape.value_heads);
    let mut rows = |rows| b.weight(codes, rows, hidden);
    let matrices = [rows(channels)?, rows(values)?, rows(heads)?, rows(heads)?];
    let last = [b.weight(codes, hidden, values)?];
    let norm = Some(Norm { weight: b.random(hidden)?, eps: 1e-6, keep: None });
    let (taps, samples) = (b.random(4 * channels)?, b.random(3 * channels)?);
    let rate: Vec<f32> = b.random.floats(heads).iter().map(|a| -a.exp()).collect();
    let decay = Decay { rate: b.floats(&rate)?, dt_bias: b.random(heads)? };
    let (state, gated) = (b.random(values * shape.key_dim)?, b.random(shape.value_dim)?);
    let mut past = Replay::default();
    for (tokens, stored) in [(2, 0), (tokens, 2 + tokens)] {
        let (h, proj, mixed) =
            (b.random(tokens * hidden)?, b.room(tokens * shape.width())?, b.room(tokens * channels)?);
        let (out, y) = (b.room(tokens * values)?, b.room(tokens * values)?);
        let project = Linear { x: h, tokens, norm, matrices: &matrices, y: proj, add: false };
        let conv = Conv { shape, tokens, proj, weight: taps, past, stored, state: samples, out: mixed };
        let rule = DeltaRule { shape, tokens, proj, mixed, decay, past, stored, state, norm: gated, out, y };
        let back = Linear { x: y, tokens, norm: None, matrices: &last, y: h, add: true };
        b.check(&DeltaNet { project, conv, rule, back }, &[h, samples, state], &[])?;
        past = Replay { rows: 2, proj, mixed };
    }
    Ok(())
}
