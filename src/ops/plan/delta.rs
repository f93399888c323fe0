//! The gated delta net between its projections: `kernels/delta.metal`, and its norm from `kernels/norm.metal`.

use super::{Binding, Dispatch, Region, floats};

/// Heads and sizes. A row of the projection is `q k v | z | b | a`, `width` floats.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Delta {
    pub key_heads: usize,
    pub value_heads: usize,
    pub dk: usize,
    pub dv: usize,
    /// Of the norm behind the recurrence.
    pub eps: f32,
}

impl Delta {
    pub fn channels(&self) -> usize {
        2 * self.key_heads * self.dk + self.value_heads * self.dv
    }

    pub fn values(&self) -> usize {
        self.value_heads * self.dv
    }

    pub fn width(&self) -> usize {
        self.channels() + self.values() + 2 * self.value_heads
    }

    fn args(&self, tokens: usize) -> Vec<u32> {
        let b_at = self.channels() + self.values();
        let words =
            [tokens, self.width(), self.key_heads, self.value_heads, self.dk, self.dv, b_at, b_at + self.value_heads];
        let mut args = words.map(|w| w as u32).to_vec();
        args.push(1e-6f32.to_bits());
        args
    }
}

/// The convolution with SiLU, and the l2 norms of q and k. `taps` `[4, channels]`; `state` `[3, channels]` moves on;
/// `out` `[tokens, channels]`.
pub fn conv(op: &Delta, tokens: usize, proj: Region, taps: Region, state: Region, out: Region) -> Dispatch {
    let channels = op.channels();
    Dispatch {
        kernel: "conv",
        args: op.args(tokens),
        bindings: vec![
            Binding::read(floats(proj, tokens * op.width())),
            Binding::read(floats(taps, channels * 4)),
            Binding::update(floats(state, channels * 3)),
            Binding::write(floats(out, tokens * channels)),
        ],
        grid: [(2 * op.key_heads + op.value_heads) as u32, 1, 1],
        threads: 128,
    }
}

/// What the recurrence's decay is made of, `[value_heads]` each: `rate` is `-exp(A_log)`.
#[derive(Debug, Clone, Copy)]
pub struct Decay {
    pub rate: Region,
    pub dt_bias: Region,
}

/// The recurrence over all tokens. `mixed` is [`conv`]'s output; `state` `[value_heads, dv, dk]` moves on; `out`
/// `[tokens, value_heads * dv]`. Panics if `dk` is above 256.
pub fn delta(
    op: &Delta,
    tokens: usize,
    proj: Region,
    mixed: Region,
    decay: Decay,
    state: Region,
    out: Region,
) -> Dispatch {
    assert!(op.dk <= 256, "key heads of {}", op.dk);
    Dispatch {
        kernel: if op.dk <= 128 { "delta_128" } else { "delta_256" },
        args: op.args(tokens),
        bindings: vec![
            Binding::read(floats(proj, tokens * op.width())),
            Binding::read(floats(mixed, tokens * op.channels())),
            Binding::read(floats(decay.rate, op.value_heads)),
            Binding::read(floats(decay.dt_bias, op.value_heads)),
            Binding::update(floats(state, op.values() * op.dk)),
            Binding::write(floats(out, tokens * op.values())),
        ],
        grid: [op.dv.div_ceil(16) as u32, op.value_heads as u32, 1],
        threads: 128,
    }
}

/// `y = rms(x; head) * w * silu(z)`, `z` read from the projection. `w` `[dv]`; `x`, `y` `[tokens, value_heads * dv]`.
pub fn gated_norm(op: &Delta, tokens: usize, x: Region, proj: Region, w: Region, y: Region) -> Dispatch {
    let words = [op.value_heads, op.dv, op.width(), op.channels()];
    let mut args = words.map(|w| w as u32).to_vec();
    args.push(op.eps.to_bits());
    Dispatch {
        kernel: "gated_norm",
        args,
        bindings: vec![
            Binding::read(floats(x, tokens * op.values())),
            Binding::read(floats(proj, tokens * op.width())),
            Binding::read(floats(w, op.dv)),
            Binding::write(floats(y, tokens * op.values())),
        ],
        grid: [op.value_heads.div_ceil(4) as u32, tokens as u32, 1],
        threads: 128,
    }
}
