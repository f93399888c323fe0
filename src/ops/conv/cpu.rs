use super::Conv;
use crate::{
    device::DeviceError,
    ops::{
        cpu::{Cpu, refuse},
        delta::EPS,
        math::silu,
        simd::{float, wide},
    },
};

/// Channels of a task.
const PIECE: usize = 2048;

impl Conv<'_> {
    pub(in crate::ops) fn on_cpu(&self, cpu: &mut Cpu) -> Result<(), DeviceError> {
        let (tokens, taps, shape, past) = (self.tokens, self.taps(), self.shape, self.past.rows);
        let (channels, width) = (shape.channels(), shape.width());
        if taps < 1 || self.taps.len != taps * channels * 4 {
            return refuse(format!("conv: {} bytes of taps for {channels} channels", self.taps.len));
        }
        let (memory, threads) = (&cpu.memory, &cpu.compute.threads);
        let x = memory.floats(self.proj.floats(tokens * width));
        let old = memory.floats(self.past.proj.floats(past * width));
        let weight = memory.floats(self.taps);
        let state = memory.floats_mut(self.state.floats((taps - 1) * channels));
        let y = memory.floats_mut(self.out.floats(tokens * channels));
        let kept = taps - 1;
        // A row behind the state.
        let raw = |row: usize| {
            let (rows, row) = if row < past { (old, row) } else { (x, row - past) };
            &rows[row * width..][..channels]
        };
        let before = &*state;
        // Channels do not touch each other either, which is all there is to share out in decode.
        let piece = if channels.is_multiple_of(PIECE) { PIECE } else { channels };
        threads.run_pieces(y, piece, &|task, y| {
            let (token, first) = (task * piece / channels, task * piece % channels);
            y.fill(0.0);
            for tap in 0..taps {
                let at = past + token + tap;
                let row = if at < kept { &before[at * channels..][..channels] } else { raw(at - kept) };
                add(y, &weight[tap * channels + first..], &row[first..]);
            }
            activate(y);
        });
        let keys = shape.key_heads * shape.dk;
        threads.run_pieces(y, channels, &|_, row| {
            let (q, rest) = row.split_at_mut(keys);
            q.chunks_exact_mut(shape.dk).for_each(|q| unit(q, (shape.dk as f32).powf(-0.5)));
            rest[..keys].chunks_exact_mut(shape.dk).for_each(|k| unit(k, 1.0));
        });
        // Rows that stay move up; the rest is raw.
        let stay = kept.saturating_sub(self.stored);
        state.copy_within((kept - stay) * channels.., 0);
        for row in stay..kept {
            state[row * channels..(row + 1) * channels].copy_from_slice(raw(self.stored - (kept - row)));
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
    /// `x * scale / sqrt(sum(x^2) + EPS)`.
    fn unit(x: &mut [f32], scale: f32) {
        let [square] = float::dot::<V, 1>(x, [x]);
        let scale = scale / (square + EPS).sqrt();
        for x in x {
            *x *= scale;
        }
    }
}
