//! Checks of launch order and shared memory: dependent launches run in order within and across command buffers,
//! independent launches may overlap, and the device sees adopted memory.

use crate::{
    device::{DeviceError, Driver, Region, Slab, Timeline},
    ops::{
        Backend, Float, Linear, Op, Weight, WeightFormat,
        check::{CLOSE, KernelCheck, difference},
        norm::rms_norm,
    },
};
use std::sync::Arc;

const SIDE: usize = 256;
const STEPS: usize = 40;
const ORDER: &str = "(order of launches)";
const SHARED: &str = "(shared memory)";

pub fn cases(b: &mut KernelCheck<'_, impl Driver>) -> Result<(), DeviceError> {
    let weight = b.weight(WeightFormat::Affine { bits: 4, group: 64, scale: Float::Bf16 }, SIDE, SIDE)?;
    order(b, &weight)?;
    shared(b, &weight)
}

fn product(x: Region, weight: &Weight, y: Region) -> Op<'_> {
    Linear { x, tokens: 1, norm: None, matrices: std::slice::from_ref(weight), y, add: false }.into()
}

/// Two interleaved chains in which each product reads the previous result of its chain. The chains run once with a wait
/// after every launch and once with commits only. The bytes must be equal.
fn order(b: &mut KernelCheck<'_, impl Driver>, weight: &Weight) -> Result<(), DeviceError> {
    let begin = [b.random.floats(SIDE), b.random.floats(SIDE)];
    let w = b.random(SIDE)?;
    let mut results = Vec::new();
    for step_by_step in [true, false] {
        let mut chains = Vec::new();
        for x in &begin {
            chains.push([b.floats(x)?, b.buffer(SIDE)?]);
        }
        b.gpu.set_waits_each(step_by_step);
        for step in 0..STEPS {
            for [x, y] in &chains {
                b.gpu.execute(&product(*x, weight, *y))?;
                // The norm bounds the values.
                b.gpu.launch(rms_norm(1, SIDE, 1e-6, *y, w, *x))?;
            }
            if step % 7 == 6 {
                b.gpu.flush()?;
            }
        }
        b.gpu.set_waits_each(true);
        let point = b.gpu.sync_point();
        b.gpu.wait_for(point)?;
        let mut last: Vec<f32> = Vec::new();
        for region in chains.into_iter().flatten() {
            last.extend(b.on_gpu(region)?);
        }
        results.push(last);
    }
    b.gpu.take_launched();
    // NaN differs from itself and fails here, too.
    b.record(&[ORDER], if results[0] == results[1] { 0.0 } else { f64::INFINITY }, CLOSE);
    Ok(())
}

/// A product with weights in an adopted slab, before and after the slab is overwritten.
fn shared(b: &mut KernelCheck<'_, impl Driver>, weight: &Weight) -> Result<(), DeviceError> {
    let mut parts = Vec::new();
    for part in weight.parts {
        let mut bytes = vec![0; part.len];
        b.cpu.read(part, &mut bytes)?;
        parts.push(bytes);
    }
    let len = parts.iter().map(|part| part.len().next_multiple_of(16)).sum();
    let slab = Arc::new(Slab::new(len).map_err(|error| DeviceError::Failed(error.to_string()))?);
    let (whole, _) = (b.cpu.adopt(&slab, 0..len)?, b.gpu.adopt(&slab, 0..len)?);
    let mut at = 0;
    let mut adopted = *weight;
    for (region, part) in adopted.parts.iter_mut().zip(&parts) {
        *region = whole.part(at, part.len());
        at += part.len().next_multiple_of(16);
    }
    let x = b.random(SIDE)?;
    let y = b.buffer(SIDE)?;
    b.cpu.execute(&product(x, weight, y))?;
    let expected = b.on_cpu(y)?;
    for negative in [false, true] {
        for (index, (part, region)) in parts.iter().zip(adopted.parts).enumerate() {
            // SAFETY: the device has finished, and no other code uses this slab.
            let into = unsafe { slab.bytes_mut(region.offset..region.offset + region.len) };
            into.copy_from_slice(part);
            if negative && index > 0 {
                // Flip the sign of each scale and bias.
                into.iter_mut().skip(1).step_by(2).for_each(|byte| *byte ^= 0x80);
            }
        }
        b.gpu.mark_loaded(whole, u64::from(negative))?;
        b.gpu.execute(&product(x, &adopted, y))?;
        let found = b.on_gpu(y)?;
        let expected: Vec<f32> = expected.iter().map(|v| if negative { -v } else { *v }).collect();
        b.record(&[SHARED], difference(&found, &expected), CLOSE);
    }
    b.gpu.take_launched();
    Ok(())
}
