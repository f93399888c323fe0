//! The convolution on a GPU.

use super::Conv;
use crate::{
    device::{Binding, Launch, SkipUse},
    ops::SequenceRows,
};

/// Number of tokens per threadgroup, see `conv_tokens` in `kernels/delta_net.metal`.
fn conv_tokens(tokens: usize) -> usize {
    if tokens > 16 { 16 } else { 4 }
}

impl Conv<'_> {
    /// A launch of `causal_conv`. The convolution width must be 4.
    pub fn launch(&self) -> Launch {
        self.launch_rows(None)
    }

    /// [`Conv::launch`]. If `rows` is given, each row belongs to another sequence, and `state` holds the states of all
    /// sequences.
    pub(in crate::ops) fn launch_rows(&self, rows: Option<SequenceRows>) -> Launch {
        let Self { shape, tokens, proj, weight, replay, committed, state, out } = *self;
        let (proj, old) = shape.rows(tokens, proj, replay);
        let channels = shape.channels();
        let (of_each, sequences, committed) = if rows.is_some() { (1, tokens, 1) } else { (tokens, 1, committed) };
        let state = if rows.is_some() { state } else { state.floats(channels * 3) };
        Launch {
            kernel: "causal_conv",
            args: shape.args(of_each, replay.rows, committed, rows),
            bindings: vec![
                Binding::read(proj),
                Binding::read(old),
                Binding::read(weight.floats(channels * 4)),
                Binding::read_write(state),
                Binding::write(out.floats(tokens.max(1) * channels)),
                SequenceRows::binding(rows, proj),
                Binding::no_skip_flag(proj),
            ],
            grid: [
                (2 * shape.key_heads + shape.value_heads) as u32,
                of_each.div_ceil(conv_tokens(of_each)).max(1) as u32,
                sequences as u32,
            ],
            threads: 128,
            skip: SkipUse::Reads,
        }
    }
}
