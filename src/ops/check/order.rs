//! What no single launch shows: that launches which depend on each other run in order within and across command buffers,
//! that independent ones may overlap, and that memory of ours is the device's, too.

use super::{Bench, Trouble, values};
use crate::{
    device::{Gpu, Slab},
    ops::{
        self, Codes, Float,
        plan::{self, Linear, Matrix},
    },
};
use std::sync::Arc;

const SIDE: usize = 256;
const STEPS: usize = 40;
const WHAT: &str = "(order of launches)";
const SHARED: &str = "(shared memory)";

pub fn all<G: Gpu + ?Sized>(b: &mut Bench<'_, G>) -> Result<(), Trouble> {
    let (weight, matrix) = b.matrix(Codes::Affine { bits: 4, group: 64, scale: Float::Bf16 }, SIDE, SIDE)?;
    order(b, &matrix)?;
    shared(b, &weight, &matrix)
}

/// Two chains side by side, each product reading what the one before wrote: once with a wait behind every launch, once with
/// commits only. The bytes are the same.
fn order<G: Gpu + ?Sized>(b: &mut Bench<'_, G>, matrix: &Matrix) -> Result<(), Trouble> {
    let begin = [b.random.floats(SIDE), b.random.floats(SIDE)];
    let w = b.random.floats(SIDE);
    let w = b.floats(&w)?;
    let mut results = Vec::new();
    for wait in [true, false] {
        let mut chains = Vec::new();
        for x in &begin {
            chains.push([b.floats(x)?, b.room(SIDE)?]);
        }
        for step in 0..STEPS {
            for [x, y] in &mut chains {
                let matrices = std::slice::from_ref(matrix);
                let product = Linear { x: *x, tokens: 1, norm: None, matrices, y: *y, add: false };
                // The norm keeps values from growing out of all bounds.
                for dispatch in [plan::linear(&product), plan::rms_norm(1, SIDE, 1e-6, *y, w, *x)] {
                    b.gpu.launch(&dispatch)?;
                    if wait {
                        b.gpu.wait()?;
                    }
                }
            }
            if step % 7 == 6 {
                b.gpu.commit()?;
            }
        }
        b.gpu.wait()?;
        let mut last: Vec<f32> = Vec::new();
        for [x, y] in chains {
            last.extend(b.gpu.read_floats(x)?);
            last.extend(b.gpu.read_floats(y)?);
        }
        results.push(last);
    }
    // What is not a number equals nothing.
    b.enter(WHAT, if results[0] == results[1] { 0.0 } else { f64::INFINITY }, super::CLOSE);
    Ok(())
}

/// A product with weights in a slab that the device has adopted before they were written, and after they were written again.
fn shared<G: Gpu + ?Sized>(b: &mut Bench<'_, G>, weight: &ops::Weight, matrix: &Matrix) -> Result<(), Trouble> {
    let parts = weight.parts.each_ref().map(|part| part.bytes());
    let len = parts.iter().map(|part| part.len().next_multiple_of(16)).sum();
    let slab = Arc::new(Slab::new(len).map_err(candle_core::Error::wrap)?);
    let whole = b.gpu.adopt(&slab, 0..len)?;
    b.buffers.push(whole.buffer);
    let mut at = 0;
    let regions = parts.map(|part| {
        let region = whole.part(at, part.len());
        at += part.len().next_multiple_of(16);
        region
    });
    let x = b.random.floats(SIDE);
    let (x_at, y) = (b.floats(&x)?, b.room(SIDE)?);
    let expected = values(&ops::linear(&b.compute, &super::rows(&x, SIDE)?, &[weight])?)?;
    for negative in [false, true] {
        for (part, region) in parts.iter().zip(regions) {
            // SAFETY: the device has finished what it was given, and nobody else knows this slab.
            let into = unsafe { slab.bytes_mut(region.offset..region.offset + region.len) };
            into.copy_from_slice(part);
            if negative && region != regions[0] {
                // The sign of each scale and bias.
                into.iter_mut().skip(1).step_by(2).for_each(|byte| *byte ^= 0x80);
            }
        }
        let matrices = [Matrix { parts: regions, ..*matrix }];
        b.gpu.launch(&plan::linear(&Linear { x: x_at, tokens: 1, norm: None, matrices: &matrices, y, add: false }))?;
        b.gpu.wait()?;
        let found = b.gpu.read_floats(y)?;
        let expected: Vec<f32> = expected.iter().map(|v| if negative { -v } else { *v }).collect();
        b.enter(SHARED, super::difference(&found, &expected), super::CLOSE);
    }
    Ok(())
}
