use super::Conv;
use crate::{
    device::DeviceError,
    ops::{Codes, Decay, Delta, DeltaNet, DeltaRule, Float, Norm, Past, Project, check::Bench},
};

/// The convolution, and the delta rule behind it.
pub(in crate::ops) fn cases(b: &mut Bench<'_>) -> Result<(), DeviceError> {
    case(b, &Delta { key_heads: 1, value_heads: 2, dk: 128, dv: 32, eps: 1e-6 })?;
    case(b, &Delta { key_heads: 1, value_heads: 1, dk: 256, dv: 16, eps: 1e-6 })?;
    let affine = |bits, group| Codes::Affine { bits, group, scale: Float::Bf16 };
    let shape = &Delta { key_heads: 2, value_heads: 4, dk: 64, dv: 32, eps: 1e-6 };
    for (codes, tokens) in [(affine(4, 64), 1), (affine(3, 32), 1), (affine(8, 64), 3), (Codes::Mxfp4, 2)] {
        net(b, shape, codes, tokens)?;
    }
    Ok(())
}

/// A whole layer, behind two rows that were a trial.
fn net(b: &mut Bench<'_>, shape: &Delta, codes: Codes, tokens: usize) -> Result<(), DeviceError> {
    let (hidden, channels, values, heads) = (192, shape.channels(), shape.values(), shape.value_heads);
    let mut rows = |rows| b.weight(codes, rows, hidden);
    let matrices = [rows(channels)?, rows(values)?, rows(heads)?, rows(heads)?];
    let last = [b.weight(codes, hidden, values)?];
    let norm = Some(Norm { weight: b.random(hidden)?, eps: 1e-6, keep: None });
    let (taps, samples) = (b.random(4 * channels)?, b.random(3 * channels)?);
    let rate: Vec<f32> = b.random.floats(heads).iter().map(|a| -a.exp()).collect();
    let decay = Decay { rate: b.floats(&rate)?, dt_bias: b.random(heads)? };
    let (state, gated) = (b.random(values * shape.dk)?, b.random(shape.dv)?);
    let mut past = Past::default();
    for (tokens, stored) in [(2, 0), (tokens, 2 + tokens)] {
        let (h, proj, mixed) =
            (b.random(tokens * hidden)?, b.room(tokens * shape.width())?, b.room(tokens * channels)?);
        let (out, y) = (b.room(tokens * values)?, b.room(tokens * values)?);
        let project = Project { x: h, tokens, norm, matrices: &matrices, y: proj, add: false };
        let conv = Conv { shape, tokens, proj, taps, past, stored, state: samples, out: mixed };
        let rule = DeltaRule { shape, tokens, proj, mixed, decay, past, stored, state, norm: gated, out, y };
        let back = Project { x: y, tokens, norm: None, matrices: &last, y: h, add: true };
        b.check(DeltaNet { project, conv, rule, back }, &[h, samples, state], &[])?;
        past = Past { rows: 2, proj, mixed };
    }
    Ok(())
}

fn case(b: &mut Bench<'_>, shape: &Delta) -> Result<(), DeviceError> {
    let (tokens, channels, values) = (3, shape.channels(), shape.values());
    let proj = b.random(tokens * shape.width())?;
    let past = Past { rows: 2, proj: b.random(2 * shape.width())?, mixed: b.random(2 * channels)? };
    let (taps, state, out) = (b.random(4 * channels)?, b.random(3 * channels)?, b.room(tokens * channels)?);
    let stored = 2 + tokens;
    b.check(Conv { shape, tokens, proj, taps, past, stored, state, out }, &[out, state], &[])?;
    let (mixed, rate) = (out, b.random.floats(shape.value_heads));
    let rate: Vec<f32> = rate.iter().map(|a| -a.exp()).collect();
    let decay = Decay { rate: b.floats(&rate)?, dt_bias: b.random(shape.value_heads)? };
    let (state, norm) = (b.random(values * shape.dk)?, b.random(shape.dv)?);
    let (out, y) = (b.room(tokens * values)?, b.room(tokens * values)?);
    // The tokens may be taken back: only the past ones go into the state.
    let stored = 2;
    b.check(DeltaRule { shape, tokens, proj, mixed, decay, past, stored, state, norm, out, y }, &[out, state, y], &[])
}
