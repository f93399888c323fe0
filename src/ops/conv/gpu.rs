//! The convolution on a GPU.

use super::Conv;
use crate::device::{Binding, Launch};

/// Tokens per threadgroup.
const CONV: usize = 16;

impl Conv<'_> {
    /// A launch of `causal_conv`. The convolution width must be 4.
    pub fn launch(&self) -> Launch {
        let Self { shape, tokens, proj, weight, past, stored, state, out } = *self;
        let (proj, old) = shape.rows(tokens, proj, past);
        let channels = shape.channels();
        Launch {
            kernel: "causal_conv",
            args: shape.args(tokens, past.rows, stored),
            bindings: vec![
                Binding::read(proj),
                Binding::read(old),
                Binding::read(weight.floats(channels * 4)),
                Binding::read_write(state.floats(channels * 3)),
                Binding::write(out.floats(tokens.max(1) * channels)),
            ],
            grid: [(2 * shape.key_heads + shape.value_heads) as u32, tokens.div_ceil(CONV).max(1) as u32, 1],
            threads: 128,
        }
    }
}
