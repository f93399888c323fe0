//! Checks of `router`: GPU against CPU.

use crate::{
    device::{DeviceError, Driver},
    ops::{ExpertStack, Float, MoeWeights, Norm, SharedExpert, WeightFormat, check::KernelCheck, router::Router},
};

pub fn cases(b: &mut KernelCheck<'_, impl Driver>) -> Result<(), DeviceError> {
    let (tokens, experts, k, hidden, inner) = (3, 256, 8, 192, 21);
    let affine = |bits| WeightFormat::Affine { bits, group: 64, scale: Float::Bf16 };
    let shared = SharedExpert {
        gate_up: [b.weight(affine(4), inner, hidden)?, b.weight(affine(4), inner, hidden)?],
        down: b.weight(WeightFormat::Dense(Float::F32), hidden, inner)?,
        result: b.weight(affine(8), 1, hidden)?,
    };
    let router = b.weight(affine(8), experts, hidden)?;
    let stacks: [ExpertStack; 3] = Default::default();
    let table: Vec<u32> = (0..experts as u32).map(|expert| 7 * expert + 1).collect();
    for renormalise in [true, false] {
        let layer = &MoeWeights { k, renormalise, router, shared: Some(shared), stacks: stacks.clone() };
        let (x, keep) = (b.random(tokens * hidden)?, b.buffer(tokens * hidden)?);
        let norm = Some(Norm { weight: b.random(hidden)?, eps: 1e-6, keep: Some(keep) });
        let (table, scores) = (b.words(&table)?, b.buffer(tokens * layer.width())?);
        let (ids, slots, weights) = (b.buffer(tokens * k)?, b.buffer(tokens * k)?, b.buffer(tokens * (k + 1))?);
        let op = Router { layer, tokens, x, norm, skip_shared: false, table, scores, ids, slots, weights };
        b.check(op, &[keep, weights], &[ids, slots])?;
    }
    Ok(())
}
