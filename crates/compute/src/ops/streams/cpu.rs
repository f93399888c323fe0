//! Residual streams on the CPU.

use super::{ReadStreams, WriteStreams};
use crate::{
    device::DeviceError,
    ops::{
        Backend, Linear,
        cpu::Cpu,
        norm::normalise,
        simd::{
            math::{sigmoid, silu},
            wide,
        },
    },
};

/// Number of columns in a task if there are at most [`FEW_TOKENS`] tokens. Otherwise a task has whole rows.
const TASK_COLUMNS: usize = 512;
/// Maximum number of tokens whose columns are split into tasks.
const FEW_TOKENS: usize = 8;

impl ReadStreams<'_> {
    pub(in crate::ops) fn on_cpu(&self, cpu: &mut Cpu) -> Result<(), DeviceError> {
        let Self { shape, tokens, weights, buffers, .. } = *self;
        let width = shape.width();
        let rank = shape.rank;
        let count = shape.count;
        let hidden = shape.hidden;
        let streams = cpu.memory.floats(self.streams.floats(tokens * width));
        let norm = cpu.memory.floats(weights.norm.floats(width));
        let normed = cpu.memory.floats_mut(buffers.normed.floats(tokens * width));
        cpu.compute.threads.run_pieces(normed, hidden, &|piece, y| {
            let stream = piece % count * hidden;
            normalise(&streams[piece * hidden..][..hidden], &norm[stream..][..hidden], shape.eps, y);
        });
        cpu.memory.floats_mut(self.zeroed).fill(0.0);

        let both = [weights.down, weights.inject.unwrap_or(weights.down)];
        let matrices = if weights.inject.is_some() { &both[..] } else { &both[..1] };
        let low_width = matrices.iter().map(|matrix| matrix.rows).sum::<usize>();
        let project = Linear { x: buffers.normed, tokens, norm: None, matrices, y: buffers.low, add: false };
        cpu.execute(&project.into())?;

        let low = cpu.memory.floats(buffers.low.floats(tokens * low_width));
        let act = cpu.memory.floats_mut(buffers.act.floats(tokens * rank));
        let divisor = count as f32;
        for (act, low) in act.chunks_exact_mut(rank).zip(low.chunks_exact(low_width)) {
            act.iter_mut().zip(low).for_each(|(act, low)| *act = silu(low / divisor));
        }
        if weights.inject.is_some() {
            let inject = cpu.memory.floats_mut(self.inject.floats(tokens * count));
            for (inject, low) in inject.chunks_exact_mut(count).zip(low.chunks_exact(low_width)) {
                inject.iter_mut().zip(&low[rank..]).for_each(|(inject, low)| *inject = 2.0 * sigmoid(low / divisor));
            }
        }
        let matrices = std::slice::from_ref(&weights.up);
        cpu.execute(&Linear { x: buffers.act, tokens, norm: None, matrices, y: buffers.gates, add: false }.into())?;

        let normed = cpu.memory.floats(buffers.normed.floats(tokens * width));
        let gates = cpu.memory.floats(buffers.gates.floats(tokens * width));
        let out = cpu.memory.floats_mut(self.out.floats(tokens * hidden));
        let piece = if tokens <= FEW_TOKENS && hidden.is_multiple_of(TASK_COLUMNS) { TASK_COLUMNS } else { hidden };
        cpu.compute.threads.run_pieces(out, piece, &|task, out| {
            let token = task * piece / hidden;
            let first = task * piece % hidden;
            out.fill(0.0);
            for stream in 0..count {
                let at = token * width + stream * hidden + first;
                add_gated(out, &gates[at..], &normed[at..]);
            }
            out.iter_mut().for_each(|out| *out /= divisor);
        });
        Ok(())
    }
}

impl WriteStreams<'_> {
    pub(in crate::ops) fn on_cpu(&self, cpu: &mut Cpu) -> Result<(), DeviceError> {
        let Self { shape, tokens, .. } = *self;
        let hidden = shape.hidden;
        let memory = &cpu.memory;
        let y = memory.floats(self.y.floats(tokens * hidden));
        let inject = self.inject.map(|inject| memory.floats(inject.floats(tokens * shape.count)));
        let streams = memory.floats_mut(self.streams.floats(tokens * shape.width()));
        cpu.compute.threads.run_pieces(streams, hidden, &|piece, stream| {
            let y = &y[piece / shape.count * hidden..][..hidden];
            match inject {
                Some(inject) => add_scaled(stream, y, inject[piece]),
                None => stream.copy_from_slice(y),
            }
        });
        Ok(())
    }
}

wide! {
    /// `out += sigmoid(gate) * x`.
    fn add_gated(out: &mut [f32], gates: &[f32], x: &[f32]) {
        for ((out, gate), x) in out.iter_mut().zip(gates).zip(x) {
            *out = sigmoid(*gate).mul_add(*x, *out);
        }
    }
}

wide! {
    /// `y += scale * x`.
    fn add_scaled(y: &mut [f32], x: &[f32], scale: f32) {
        for (y, x) in y.iter_mut().zip(x) {
            *y = scale.mul_add(*x, *y);
        }
    }
}
