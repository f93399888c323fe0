//! `kernels/delta.metal`, and the norm from `kernels/norm.metal`.

use super::{Delta, DeltaRule, Past};
use crate::device::{Binding, Dispatch, Region};

impl Delta {
    pub(in crate::ops) fn args(&self, tokens: usize, past: usize, stored: usize) -> Vec<u32> {
        let b_at = self.channels() + self.values();
        let words =
            [tokens, self.width(), self.key_heads, self.value_heads, self.dk, self.dv, b_at, b_at + self.value_heads];
        let mut args = words.map(|w| w as u32).to_vec();
        args.extend([super::EPS.to_bits(), past as u32, stored as u32, 0, 0]);
        args
    }

    /// The projected rows and the past ones, of which there may be none: then they stand in for each other.
    pub(in crate::ops) fn rows(&self, tokens: usize, proj: Region, past: Past) -> (Region, Region) {
        let proj = proj.floats(tokens.max(1) * self.width());
        (proj, if past.rows > 0 { past.proj.floats(past.rows * self.width()) } else { proj })
    }
}

impl DeltaRule<'_> {
    /// The recurrence, then the norm. Panics if `dk` is above 256.
    pub fn dispatches(&self) -> impl Iterator<Item = Dispatch> {
        [self.recurrence(false, None)].into_iter().chain((self.tokens > 0).then(|| self.gated_norm()))
    }

    /// With `raw` rows, whose q and k lack their norms; with a region for `squares`, all of the norm behind but each head's factor.
    pub(super) fn recurrence(&self, raw: bool, squares: Option<Region>) -> Dispatch {
        let Self { shape, tokens, proj, mixed, decay, past, stored, state, norm, .. } = *self;
        let out = if squares.is_some() { self.y } else { self.out };
        let (proj, past_proj) = shape.rows(tokens, proj, past);
        let (few, channels) = (tokens.max(1), shape.channels());
        let mixed = mixed.floats(few * channels);
        let past_mixed = if past.rows > 0 { past.mixed.floats(past.rows * channels) } else { mixed };
        assert!(shape.dk <= 256, "key heads of {}", shape.dk);
        let mut args = shape.args(tokens, past.rows, stored);
        let flags = args.len() - 2;
        args[flags..].copy_from_slice(&[raw.into(), squares.is_some().into()]);
        Dispatch {
            kernel: if shape.dk <= 128 { "delta_128" } else { "delta_256" },
            args,
            bindings: vec![
                Binding::read(proj),
                Binding::read(mixed),
                Binding::read(past_proj),
                Binding::read(past_mixed),
                Binding::read(decay.rate.floats(shape.value_heads)),
                Binding::read(decay.dt_bias.floats(shape.value_heads)),
                Binding::update(state.floats(shape.values() * shape.dk)),
                Binding::write(out.floats(few * shape.values())),
                Binding::read(norm.floats(shape.dv)),
                squares.map_or(Binding::read(norm.first(0)), Binding::write),
            ],
            grid: [shape.dv.div_ceil(16) as u32, shape.value_heads as u32, 1],
            threads: 128,
        }
    }

    pub(super) fn gated_norm(&self) -> Dispatch {
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
