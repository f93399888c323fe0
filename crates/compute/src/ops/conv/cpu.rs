//! The convolution on the CPU.

use super::Conv;
use crate::{
    device::DeviceError,
    ops::{
        cpu::{Cpu, refuse},
        delta_shape::QK_EPS,
        simd::{OutPtr, float, math::silu, wide},
    },
};
use std::ops::Range;

/// Number of channels in a task if there are at most [`FEW_TOKENS`] tokens. Otherwise each token is a task.
const TASK_CHANNELS: usize = 512;
/// Maximum number of tokens whose channels are split into tasks.
const FEW_TOKENS: usize = 8;

impl Conv<'_> {
    pub(in crate::ops) fn on_cpu(&self, cpu: &mut Cpu) -> Result<(), DeviceError> {
        let tokens = self.tokens;
        let taps = self.shape.conv_width;
        let shape = self.shape;
        let replay = self.replay.rows;
        let channels = shape.channels();
        let width = shape.width();
        if taps < 1 || self.weight.len != taps * channels * 4 {
            return refuse(format!(
                "convolution weights of {} bytes do not fit {taps} x {channels} channels",
                self.weight.len
            ));
        }
        let memory = &cpu.memory;
        let threads = &cpu.compute.threads;
        let x = memory.floats(self.proj.floats(tokens * width));
        let old = memory.floats(self.replay.proj.floats(replay * width));
        let weight = memory.floats(self.weight);
        let state = memory.floats_mut(self.state.floats((taps - 1) * channels));
        let y = memory.floats_mut(self.out.floats(tokens * channels));
        let kept = taps - 1;
        // A row after the state: replayed rows, then new rows.
        let raw = |row: usize| {
            let (rows, row) = if row < replay { (old, row) } else { (x, row - replay) };
            &rows[row * width..][..channels]
        };
        let keys = shape.key_heads * shape.key_dim;
        // Normalises the queries and keys among the channels from `first` on. The range starts and ends at a head
        // boundary.
        let units = |first: usize, y: &mut [f32]| {
            for (at, head) in (first..2 * keys).step_by(shape.key_dim).zip(y.chunks_exact_mut(shape.key_dim)) {
                unit(head, if at < keys { (shape.key_dim as f32).powf(-0.5) } else { 1.0 });
            }
        };
        let base = OutPtr(state.as_mut_ptr());
        // Row `row` of the state, from channel `first` on.
        let kept_row = |row: usize, first: usize| {
            let base = &base;
            // SAFETY: the address is inside the state. The channels of a task belong to no other task.
            unsafe { base.add(row * channels + first) }.0
        };
        // Rows that stay in the state move up. The other rows are copied from the input.
        let stay = kept.saturating_sub(self.committed);
        let keep = |own: Range<usize>| {
            for row in 0..if stay == kept { 0 } else { kept } {
                let from = if row < stay {
                    kept_row(row + kept - stay, own.start).cast_const()
                } else {
                    raw(self.committed - (kept - row))[own.clone()].as_ptr()
                };
                // SAFETY: the two rows do not overlap, and these channels belong to this task.
                unsafe { from.copy_to_nonoverlapping(kept_row(row, own.start), own.len()) };
            }
        };
        let convolve = |token: usize, first: usize, y: &mut [f32]| {
            y.fill(0.0);
            for tap in 0..taps {
                let at = replay + token + tap;
                let row = if at < kept {
                    unsafe { std::slice::from_raw_parts(kept_row(at, first).cast_const(), y.len()) }
                } else {
                    &raw(at - kept)[first..]
                };
                add(y, &weight[tap * channels + first..], row);
            }
            activate(y);
        };
        // Channels are independent, so a few tokens are split by channels.
        let cut = tokens <= FEW_TOKENS
            && channels.is_multiple_of(TASK_CHANNELS)
            && TASK_CHANNELS.is_multiple_of(shape.key_dim);
        let piece = if cut { TASK_CHANNELS } else { channels };
        threads.run_pieces(y, piece, &|task, y| {
            let token = task * piece / channels;
            let first = task * piece % channels;
            convolve(token, first, y);
            units(first, y);
            if tokens == 1 {
                keep(first..first + piece);
            }
        });
        // With one token, each task has updated its own channels of the state.
        if tokens != 1 {
            keep(0..channels);
        }
        Ok(())
    }
}

wide! {
    /// `y += weight * x`.
    fn add(y: &mut [f32], weight: &[f32], x: &[f32]) {
        for ((y, w), x) in y.iter_mut().zip(weight).zip(x) {
            *y = w.mul_add(*x, *y);
        }
    }
}

wide! {
    fn activate(y: &mut [f32]) {
        for y in y {
            *y = silu(*y);
        }
    }
}

wide! {
    /// `x * scale / sqrt(sum(x^2) + QK_EPS)`.
    fn unit(x: &mut [f32], scale: f32) {
        let [square] = float::dot::<V, 1>(x, [x]);
        let scale = scale / (square + QK_EPS).sqrt();
        for x in x {
            *x *= scale;
        }
    }
}
