//! Checks of `router`: GPU against CPU.

use crate::{
    device::{DeviceError, Driver},
    ops::{ExpertStack, Float, MoeWeights, Norm, SharedExpert, WeightFormat, check::KernelCheck, router::Router},
};

pub fn cases(b: &mut KernelCheck<'_, impl Driver>) -> Result<(), DeviceError> {
    let affine = |bits| WeightFormat::Affine { bits, group: 64, scale: Float::Bf16 };
    case(b, 192, 21, WeightFormat::Dense(Float::F32), affine)?;
    if b.gpu.tile_all_rows(true) {
        case(b, 256, 128, affine(4), affine)?;
        b.gpu.tile_all_rows(false);
    }
    Ok(())
}

/// `down`: format of the shared expert's down matrix.
fn case(
    b: &mut KernelCheck<'_, impl Driver>,
    hidden: usize,
    inner: usize,
    down: WeightFormat,
    affine: impl Fn(u8) -> WeightFormat,
) -> Result<(), DeviceError> {
    let tokens = 3;
    let experts = 256;
    let k = 8;
    let shared = SharedExpert {
        gate_up: [b.weight(affine(4), inner, hidden)?, b.weight(affine(4), inner, hidden)?],
        down: b.weight(down, hidden, inner)?,
        result: b.weight(affine(8), 1, hidden)?,
    };
    let router = b.weight(affine(8), experts, hidden)?;
    let stacks = [(inner, hidden), (inner, hidden), (hidden, inner)].map(|(rows, cols)| ExpertStack {
        codes: affine(4),
        rows,
        cols,
        ..ExpertStack::default()
    });
    let table: Vec<u32> = (0..experts as u32).map(|expert| 7 * expert + 1).collect();
    for renormalise in [true, false] {
        let layer = &MoeWeights { k, renormalise, router, shared: Some(shared), stacks: stacks.clone() };
        let x = b.random(tokens * hidden)?;
        let keep = b.buffer(tokens * hidden)?;
        let norm = Some(Norm { weight: b.random(hidden)?, eps: 1e-6, keep: Some(keep) });
        let table = b.words(&table)?;
        let scores = b.buffer(tokens * layer.width())?;
        let ids = b.buffer(tokens * k)?;
        let slots = b.buffer(tokens * k)?;
        let weights = b.buffer(tokens * (k + 1))?;
        let op = Router { layer, tokens, x, norm, skip_shared: false, table, scores, ids, slots, weights };
        b.check(op, &[keep, weights], &[ids, slots])?;
    }
    Ok(())
}
