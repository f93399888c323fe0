//! The delta net on a GPU (`kernels/delta_net.metal`, `gated_rms_norm` of `kernels/norm.metal`).

use super::{DeltaNet, DeltaNetRows, DeltaRule};
use crate::{
    device::{Binding, Launch, Region, SkipUse},
    ops::{
        Conv, DeltaShape, OutputGate, Replay, SequenceRows,
        delta_shape::QK_EPS,
        linear::{HalfBuffers, RowSource, RowTiles},
    },
};

/// Maximum number of rows in a launch of the recurrence. A threadgroup computes the rows one after the other, and macOS
/// aborts launches whose threadgroups run too long.
const MAX_ROWS: usize = 256;

impl DeltaShape {
    pub(in crate::ops) fn args(
        &self,
        tokens: usize,
        replay: usize,
        committed: usize,
        rows: Option<SequenceRows>,
    ) -> Vec<u32> {
        let b_at = self.channels() + self.values();
        let words = [
            tokens,
            self.width(),
            self.key_heads,
            self.value_heads,
            self.key_dim,
            self.value_dim,
            b_at,
            b_at + self.value_heads,
        ];
        let mut args = vec![0];
        args.extend(words.map(|w| w as u32));
        args.extend([QK_EPS.to_bits(), replay as u32, committed as u32, 0, 0, rows.is_some().into(), self.gate_word()]);
        args
    }

    /// 1 if the gate is a sigmoid.
    fn gate_word(&self) -> u32 {
        (self.gate == OutputGate::Sigmoid).into()
    }

    /// Regions of the projected rows and of the replayed rows. Without replayed rows, the projected rows are bound
    /// twice.
    pub(in crate::ops) fn rows(&self, tokens: usize, proj: Region, replay: Replay) -> (Region, Region) {
        let proj = proj.floats(tokens.max(1) * self.width());
        (proj, if replay.rows > 0 { replay.proj.floats(replay.rows * self.width()) } else { proj })
    }
}

impl DeltaRule<'_> {
    /// The recurrence, then the norm. Panics if `key_dim` is above 256.
    pub fn launches(&self) -> impl Iterator<Item = Launch> {
        self.recurrences().into_iter().chain((self.tokens > 0).then(|| self.gated_norm()))
    }

    /// The recurrence in launches of at most [`MAX_ROWS`] rows. Each launch starts with the state that the previous
    /// launch stored.
    fn recurrences(&self) -> Vec<Launch> {
        let Self { shape, tokens, proj, mixed, replay, committed, out, .. } = *self;
        // A launch with rows that may be rejected cannot be split, because it stores only the committed state. Such a
        // launch has few rows.
        if tokens <= MAX_ROWS || replay.rows > 0 || committed != tokens {
            return vec![self.recurrence(false, None, None)];
        }
        let part = |first: usize| {
            let tokens = MAX_ROWS.min(tokens - first);
            let rows = |region: Region, width: usize| region.rows(first, tokens, width);
            let proj = rows(proj, shape.width());
            let mixed = rows(mixed, shape.channels());
            let part = Self { tokens, committed: tokens, proj, mixed, out: rows(out, shape.values()), ..*self };
            part.recurrence(false, None, None)
        };
        (0..tokens).step_by(MAX_ROWS).map(part).collect()
    }

    /// Computes the recurrence. If `raw` is true, q and k still need their l2 norms. If `squares` is given, the final
    /// norm is deferred: the results are not divided by each head's norm, which the next product computes from
    /// `squares`. If `rows` is given, each row belongs to another sequence.
    pub(super) fn recurrence(&self, raw: bool, squares: Option<Region>, rows: Option<SequenceRows>) -> Launch {
        let Self { shape, tokens, proj, mixed, decay, replay, committed, state, norm, .. } = *self;
        let out = if squares.is_some() { self.y } else { self.out };
        let (proj, past_proj) = shape.rows(tokens, proj, replay);
        let few = tokens.max(1);
        let channels = shape.channels();
        let mixed = mixed.floats(few * channels);
        let past_mixed = if replay.rows > 0 { replay.mixed.floats(replay.rows * channels) } else { mixed };
        assert!(shape.key_dim <= 256, "key heads of {}", shape.key_dim);
        let (of_each, sequences, committed) = if rows.is_some() { (1, tokens, 1) } else { (tokens, 1, committed) };
        let state = if rows.is_some() { state } else { state.floats(shape.values() * shape.key_dim) };
        let mut args = shape.args(of_each, replay.rows, committed, rows);
        let flags = args.len() - 4;
        args[flags..flags + 2].copy_from_slice(&[raw.into(), squares.is_some().into()]);
        Launch {
            kernel: if shape.key_dim <= 128 { "gated_delta_128" } else { "gated_delta_256" },
            args,
            bindings: vec![
                Binding::read(proj),
                Binding::read(mixed),
                Binding::read(past_proj),
                Binding::read(past_mixed),
                Binding::read(decay.rate.floats(shape.value_heads)),
                Binding::read(decay.dt_bias.floats(shape.value_heads)),
                Binding::read_write(state),
                Binding::write(out.floats(few * shape.values())),
                Binding::read(norm.floats(shape.value_dim)),
                squares.map_or(Binding::read(norm.first(0)), Binding::write),
                SequenceRows::binding(rows, proj),
                Binding::no_skip_flag(proj),
            ],
            grid: [shape.value_dim.div_ceil(16) as u32, shape.value_heads as u32, sequences as u32],
            threads: 128,
            skip: SkipUse::Reads,
        }
    }

    pub(super) fn gated_norm(&self) -> Launch {
        let Self { shape, tokens, proj, norm, out, y, .. } = *self;
        let words = [shape.value_heads, shape.value_dim, shape.width(), shape.channels()];
        let mut args = words.map(|w| w as u32).to_vec();
        args.extend([shape.gate_word(), shape.eps.to_bits()]);
        Launch {
            kernel: "gated_rms_norm",
            args,
            bindings: vec![
                Binding::read(out.floats(tokens * shape.values())),
                Binding::read(proj.floats(tokens * shape.width())),
                Binding::read(norm.floats(shape.value_dim)),
                Binding::write(y.floats(tokens * shape.values())),
            ],
            grid: [shape.value_heads.div_ceil(4) as u32, tokens as u32, 1],
            threads: 128,
            skip: SkipUse::None,
        }
    }
}

/// Maximum number of heads for which the output projection can apply the deferred norm.
const MAX_NORMED_HEADS: usize = 64;

impl DeltaNet<'_> {
    /// Three launches for one row, four for several rows, and one more if the final norm cannot be deferred. A product
    /// on matrix units has one more. The results equal those of [`DeltaNet::apart`].
    pub fn launches(&self, tiles: Option<RowTiles>) -> Vec<Launch> {
        self.launches_of(None, tiles)
    }

    /// Number of words of the buffer for split rows.
    pub fn split_words(&self, min_weights: usize) -> usize {
        self.in_proj.split_words(min_weights).max(self.out_proj.split_words(min_weights))
    }

    fn launches_of(&self, rows: Option<SequenceRows>, tiles: Option<RowTiles>) -> Vec<Launch> {
        let Self { in_proj, conv, rule, out_proj } = self;
        // Rows that may be replayed need the normed output of causal_conv, so the fused kernel cannot be used for
        // them.
        let shape = rule.shape;
        let at_once = rule.tokens == 1
            && rows.is_none()
            && rule.committed > rule.replay.rows
            && in_proj.norm.is_some_and(|norm| norm.keep.is_none());
        let mut projection = in_proj.launches(tiles);
        match projection.pop() {
            Some(product) if at_once => projection.push(self.convolved(product)),
            product => projection.extend(product.into_iter().chain([conv.launch_rows(rows)])),
        }
        let rest = if shape.value_heads <= MAX_NORMED_HEADS && shape.value_dim.is_multiple_of(16) {
            let squares = rule.out.floats(rule.tokens * shape.values() / 4);
            let mut rest = vec![rule.recurrence(at_once, Some(squares), rows)];
            let [heads, size] = [shape.value_heads, shape.value_dim];
            match out_proj.tiled(tiles, RowSource::Heads { squares, heads, size, eps: shape.eps }) {
                Some(tiled) => rest.extend(tiled),
                None => rest.push(self.normed(squares)),
            }
            rest
        } else {
            let mut rest = vec![rule.recurrence(at_once, None, rows), rule.gated_norm()];
            rest.extend(out_proj.launches(tiles));
            rest
        };
        [projection, rest].concat()
    }

    /// [`DeltaNet::launches`] with one launch per step.
    pub fn apart(&self, tiles: Option<RowTiles>) -> Vec<Launch> {
        let Self { in_proj, conv, rule, out_proj } = self;
        let projection = in_proj.launches(tiles).into_iter().chain([conv.launch()]);
        projection.chain(rule.launches()).chain(out_proj.launches(tiles)).collect()
    }

    /// All steps, with the projections in half precision on matrix units.
    pub(in crate::ops) fn half_launches(&self, half: HalfBuffers) -> Vec<Launch> {
        let Self { in_proj, conv, rule, out_proj } = self;
        let projection = in_proj.half_launches(half).into_iter().chain([conv.launch()]);
        projection.chain(rule.launches()).chain(out_proj.half_launches(half)).collect()
    }

    /// Makes the projection of one row apply the convolution as well.
    fn convolved(&self, mut launch: Launch) -> Launch {
        let Conv { shape, replay, proj, weight: taps, state, out, .. } = self.conv;
        let (_, old) = shape.rows(1, proj, replay);
        let channels = shape.channels();
        // The convolution's buffers replace the normed rows, which a product on matrix units does not have.
        let (kernel, at) = match launch.kernel {
            "gemv_tiles_4" => ("gemv_tiles_conv", 4..4),
            "gemv_tiles_pair_4" => ("gemv_tiles_pair_conv", 4..4),
            "gemv_tiles_floats_4" => ("gemv_tiles_floats_conv", 4..4),
            "gemv_norm_1" => ("gemv_conv", 3..4),
            _ => ("gemv_any_conv", 3..4),
        };
        launch.kernel = kernel;
        launch.args.push(replay.rows as u32);
        let memory = [
            Binding::read(taps.floats(4 * channels)),
            Binding::read(if replay.rows > 0 { old } else { taps }),
            Binding::read_write(state.floats(3 * channels)),
            Binding::write(out.floats(channels)),
        ];
        launch.bindings.splice(at, memory);
        launch
    }

    /// The output projection of rows with a deferred norm. The launch divides each head by the head's norm, computed
    /// from `squares`.
    fn normed(&self, squares: Region) -> Launch {
        let shape = self.rule.shape;
        let mut launch = self.out_proj.launch();
        launch.kernel = match launch.kernel {
            "gemv_1" => "gemv_head_norm_1",
            "gemv_2" => "gemv_head_norm_2",
            "gemv_any_1" => "gemv_any_head_norm_1",
            _ => "gemv_any_head_norm_2",
        };
        launch.args.extend([shape.value_heads as u32, shape.value_dim as u32, shape.eps.to_bits()]);
        launch.bindings[1] = Binding::read(squares);
        launch.bindings.remove(3);
        launch
    }
}

impl DeltaNetRows<'_> {
    /// The launches of all rows. The number of launches is the same as for rows of one sequence.
    pub fn launches(&self, tiles: Option<RowTiles>) -> Vec<Launch> {
        self.net.launches_of(Some(self.rows), tiles)
    }
}
