//! The injection of n-gram rows on the CPU.

use super::{NgramInject, NgramInjectRows};
use crate::{
    device::DeviceError,
    ops::{
        cpu::Cpu,
        norm::normalise,
        simd::{
            float,
            math::{sigmoid, silu},
            wide,
        },
    },
};

impl NgramInjectRows<'_> {
    /// Computes one row after the other.
    pub(in crate::ops) fn on_cpu(&self, cpu: &mut Cpu) -> Result<(), DeviceError> {
        let Self { inject, rows } = *self;
        let shape = inject.shape;
        let ring = shape.capacity * shape.width();
        for row in 0..inject.tokens {
            let [number, start] = cpu.memory.sequence(&rows, row);
            let proj = inject.proj.rows(row, 1, shape.width() + shape.hidden);
            let gates = inject.gates.rows(row, 1, shape.streams);
            let history = inject.history.rows(number, 1, ring);
            let streams = inject.streams.rows(row, 1, shape.width());
            NgramInject { start, tokens: 1, proj, gates, history, streams, ..inject }.on_cpu(cpu)?;
        }
        Ok(())
    }
}

impl NgramInject<'_> {
    pub(in crate::ops) fn on_cpu(&self, cpu: &mut Cpu) -> Result<(), DeviceError> {
        let Self { shape, weights, start, tokens, .. } = *self;
        let count = shape.streams;
        let hidden = shape.hidden;
        let width = shape.width();
        self.check_capacity(tokens)?;
        let memory = &cpu.memory;
        let threads = &cpu.compute.threads;
        let row = width + hidden;
        let proj = memory.floats(self.proj.floats(tokens * row));
        let vector = |region: crate::device::Region| memory.floats(region.floats(width));
        let [key_norm, query_norm, conv_norm] = [weights.key_norm, weights.query_norm, weights.conv_norm].map(vector);
        let conv = memory.floats(weights.conv.floats(shape.conv_width * width));
        let streams = memory.floats_mut(self.streams.floats(tokens * width));
        let gates = memory.floats_mut(self.gates.floats(tokens * count));
        let history = memory.floats_mut(self.history.floats(shape.capacity * width));

        let before = &*streams;
        let root = (hidden as f32).sqrt();
        threads.run_pieces(gates, 1, &|piece, gate| {
            let token = piece / count;
            let stream = piece % count * hidden;
            let [key, query] = [&proj[token * row + stream..], &before[token * width + stream..]];
            let s = normed_dot(&key[..hidden], &key_norm[stream..], &query[..hidden], &query_norm[stream..], shape.eps);
            let s = s / root;
            let s = if s == 0.0 { 0.0 } else { s.abs().max(1e-6).sqrt().copysign(s) };
            gate.fill(sigmoid(s));
        });
        let gates = &*gates;
        let value = |token: usize| &proj[token * row + width..][..hidden];
        threads.run_pieces(history, hidden, &|piece, m| {
            // The token of this call whose position is in this row of the ring.
            let token = (piece / count + shape.capacity - start % shape.capacity) % shape.capacity;
            if token < tokens {
                let gate = gates[token * count + piece % count];
                let stream = piece % count * hidden;
                normalise_scaled(value(token), gate, &conv_norm[stream..][..hidden], shape.eps, m);
            }
        });
        let history = &*history;
        threads.run_pieces(streams, hidden, &|piece, h| {
            let token = piece / count;
            let stream = piece % count * hidden;
            CONVOLVED.with_borrow_mut(|sum| {
                sum.clear();
                sum.resize(hidden, 0.0);
                for tap in 0..shape.conv_width {
                    let Some(position) = (start + token).checked_sub((shape.conv_width - 1 - tap) * shape.dilation)
                    else {
                        continue;
                    };
                    let m = &history[position % shape.capacity * width + stream..][..hidden];
                    add_product(sum, &conv[tap * width + stream..], m);
                }
                add_injection(h, gates[piece], value(token), sum);
            });
        });
        Ok(())
    }
}

thread_local! {
    /// The convolution of one token and stream.
    static CONVOLVED: std::cell::RefCell<Vec<f32>> = std::cell::RefCell::default();
    /// The value of one token times the gate of one stream.
    static GATED: std::cell::RefCell<Vec<f32>> = std::cell::RefCell::default();
}

/// `rms(scale * x) * weight`.
fn normalise_scaled(x: &[f32], scale: f32, weight: &[f32], eps: f32, y: &mut [f32]) {
    GATED.with_borrow_mut(|gated| {
        gated.clear();
        gated.extend(x.iter().map(|x| scale * x));
        normalise(gated, weight, eps, y);
    });
}

wide! {
    /// The dot product of `rms(a) * a_weight` and `rms(b) * b_weight`.
    fn normed_dot(a: &[f32], a_weight: &[f32], b: &[f32], b_weight: &[f32], eps: f32) -> f32 {
        let scale = |x: &[f32], [square]: [f32; 1]| 1.0 / (square / x.len() as f32 + eps).sqrt();
        let scales = scale(a, float::dot::<V, 1>(a, [a])) * scale(b, float::dot::<V, 1>(b, [b]));
        let mut lanes = [0f32; 16];
        for (at, (((a, v), b), w)) in a.iter().zip(a_weight).zip(b).zip(b_weight).enumerate() {
            lanes[at % 16] = (a * v).mul_add(b * w, lanes[at % 16]);
        }
        lanes.iter().sum::<f32>() * scales
    }
}

wide! {
    /// `y += a * b`.
    fn add_product(y: &mut [f32], a: &[f32], b: &[f32]) {
        for ((y, a), b) in y.iter_mut().zip(a).zip(b) {
            *y = a.mul_add(*b, *y);
        }
    }
}

wide! {
    /// `y += gate * value + silu(conv)`.
    fn add_injection(y: &mut [f32], gate: f32, value: &[f32], conv: &[f32]) {
        for ((y, value), conv) in y.iter_mut().zip(value).zip(conv) {
            *y += gate.mul_add(*value, silu(*conv));
        }
    }
}
