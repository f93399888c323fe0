//! Checks of `ngram`: GPU against CPU.

use crate::{
    device::{DeviceError, Driver},
    ops::{
        SequenceRows,
        check::KernelCheck,
        ngram::{InjectShape, InjectWeights, NgramInject, NgramInjectRows},
    },
};

/// Checks consecutive calls over the same history, from the start of a sequence until the ring has wrapped around.
pub fn cases(b: &mut KernelCheck<'_, impl Driver>) -> Result<(), DeviceError> {
    let shape = &InjectShape { streams: 3, hidden: 160, conv_width: 4, dilation: 3, capacity: 16, eps: 1e-6 };
    let width = shape.width();
    let weights = &InjectWeights {
        key_norm: b.random(width)?,
        query_norm: b.random(width)?,
        conv_norm: b.random(width)?,
        conv: b.random(shape.conv_width * width)?,
    };
    let history = b.random(shape.capacity * width)?;
    let mut start = 0;
    for tokens in [5, 1, 7, 6] {
        let proj = b.random(tokens * (width + shape.hidden))?;
        let streams = b.random(tokens * width)?;
        let gates = b.buffer(tokens * shape.streams)?;
        let op = NgramInject { shape, weights, start, tokens, proj, gates, history, streams };
        b.check(op, &[gates, history, streams], &[])?;
        start += tokens;
    }
    // Row 0 belongs to sequence 1, row 1 to sequence 0.
    let rows = SequenceRows { starts: [2, 21], table: b.words(&[1, 21, 0, 2])? };
    let history = b.random(2 * shape.capacity * width)?;
    let proj = b.random(2 * (width + shape.hidden))?;
    let streams = b.random(2 * width)?;
    let gates = b.buffer(2 * shape.streams)?;
    let inject = NgramInject { shape, weights, start: 0, tokens: 2, proj, gates, history, streams };
    b.check(NgramInjectRows { inject, rows }, &[gates, history, streams], &[])
}
