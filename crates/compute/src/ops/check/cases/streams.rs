//! Checks of `streams`: GPU against CPU.

use crate::{
    device::{DeviceError, Driver, Region},
    ops::{
        Backend, Float, WeightFormat,
        check::{CLOSE, HALF, KernelCheck},
        streams::{ReadStreams, StreamBuffers, StreamMix, StreamShape, WriteStreams},
    },
};

pub fn cases(b: &mut KernelCheck<'_, impl Driver>) -> Result<(), DeviceError> {
    let shape = &StreamShape { count: 3, rank: 64, hidden: 192, eps: 1e-6 };
    let affine = WeightFormat::Affine { bits: 4, group: 64, scale: Float::Bf16 };
    for (codes, tokens, layer) in [(affine, 1, true), (WeightFormat::Dense(Float::Bf16), 3, false)] {
        read(b, shape, codes, tokens, layer, CLOSE)?;
    }
    for (tokens, inject) in [(1, false), (3, true)] {
        let y = b.random(tokens * shape.hidden)?;
        let inject = if inject { Some(b.random(tokens * shape.count)?) } else { None };
        let streams = b.random(tokens * shape.width())?;
        b.check(WriteStreams { shape, tokens, y, inject, streams }, &[streams], &[])?;
    }
    if b.gpu.limits().uses_half_precision {
        let buffers = b.half_buffers(70, shape.width())?;
        b.gpu.set_half_buffers(Some(buffers));
        read(b, shape, affine, 70, true, HALF)?;
        b.gpu.set_half_buffers(None);
    }
    Ok(())
}

/// Checks the mixture before a layer part, or before the output head, which adds nothing to the streams.
fn read(
    b: &mut KernelCheck<'_, impl Driver>,
    shape: &StreamShape,
    codes: WeightFormat,
    tokens: usize,
    layer: bool,
    allowed: f64,
) -> Result<(), DeviceError> {
    let width = shape.width();
    let rank = shape.rank;
    let hidden = shape.hidden;
    let mut weights = StreamMix {
        norm: b.random(width)?,
        down: b.weight(codes, rank, width)?,
        up: b.weight(codes, width, rank)?,
        inject: None,
    };
    let mut inject = Region::default();
    let mut zeroed = Region::default();
    if layer {
        weights.inject = Some(b.weight(codes, shape.count, width)?);
        inject = b.buffer(tokens * shape.count)?;
        zeroed = b.buffer(tokens * hidden)?;
    }
    let low_width = if layer { shape.low_width() } else { rank };
    let buffers = StreamBuffers {
        normed: b.buffer(tokens * width)?,
        low: b.buffer(tokens * low_width)?,
        act: b.buffer(tokens * rank)?,
        gates: b.buffer(tokens * width)?,
    };
    let streams = b.random(tokens * width)?;
    let out = b.buffer(tokens * hidden)?;
    let op = ReadStreams { shape, tokens, weights: &weights, streams, buffers, out, inject, zeroed };
    let found = [buffers.normed, buffers.low, buffers.act, buffers.gates, out, inject, zeroed];
    b.check_within(allowed, &op, &found[..if layer { 7 } else { 5 }], &[])
}
