//! `kernels/delta.metal`, and the norm from `kernels/norm.metal`.

use super::{Delta, DeltaRule};
use crate::device::{Binding, Dispatch};

impl Delta {
    pub(in crate::ops) fn args(&self, tokens: usize) -> Vec<u32> {
        let b_at = self.channels() + self.values();
        let words =
            [tokens, self.width(), self.key_heads, self.value_heads, self.dk, self.dv, b_at, b_at + self.value_heads];
        let mut args = words.map(|w| w as u32).to_vec();
        args.push(super::EPS.to_bits());
        args
    }
}

impl DeltaRule<'_> {
    /// The recurrence, then the norm. Panics if `dk` is above 256.
    pub fn dispatches(&self) -> [Dispatch; 2] {
        [self.recurrence(), self.gated_norm()]
    }

    fn recurrence(&self) -> Dispatch {
        let Self { shape, tokens, proj, mixed, decay, state, out, .. } = *self;
        assert!(shape.dk <= 256, "key heads of {}", shape.dk);
        Dispatch {
            kernel: if shape.dk <= 128 { "delta_128" } else { "delta_256" },
            args: shape.args(tokens),
            bindings: vec![
                Binding::read(proj.floats(tokens * shape.width())),
                Binding::read(mixed.floats(tokens * shape.channels())),
                Binding::read(decay.rate.floats(shape.value_heads)),
                Binding::read(decay.dt_bias.floats(shape.value_heads)),
                Binding::update(state.floats(shape.values() * shape.dk)),
                Binding::write(out.floats(tokens * shape.values())),
            ],
            grid: [shape.dv.div_ceil(16) as u32, shape.value_heads as u32, 1],
            threads: 128,
        }
    }

    fn gated_norm(&self) -> Dispatch {
        let Self { shape, tokens, proj, norm, out, y, .. } = *self;
        let words = [shape.value_heads, shape.dv, shape.width(), shape.channels()];
        let mut args = words.map(|w| w as u32).to_vec();
        args.push(shape.eps.to_bits());
        Dispatch {
            kernel: "gated_norm",
            args,
            bindings: vec![
                Binding::read(out.floats(tokens * shape.values())),
                Binding::read(proj.floats(tokens * shape.width())),
                Binding::read(norm.floats(shape.dv)),
                Binding::write(y.floats(tokens * shape.values())),
            ],
            grid: [shape.value_heads.div_ceil(4) as u32, tokens as u32, 1],
            threads: 128,
        }
    }
}
