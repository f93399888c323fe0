//! The injection of n-gram rows on a GPU (`kernels/streams.metal`).

use super::{NgramInject, NgramInjectRows};
use crate::{
    device::{Binding, DeviceError, Launch, SkipUse},
    ops::SequenceRows,
};

impl NgramInject<'_> {
    /// Computes the gates and the new rows of the history, then adds the result to the streams.
    ///
    /// # Errors
    /// The history is too short for the tokens.
    pub(in crate::ops) fn launches(&self) -> Result<[Launch; 2], DeviceError> {
        self.check_capacity(self.tokens)?;
        Ok(self.launch_rows(None))
    }

    /// [`NgramInject::launches`]. If `rows` is given, each row belongs to another sequence.
    fn launch_rows(&self, rows: Option<SequenceRows>) -> [Launch; 2] {
        let Self { shape, weights, start, tokens, .. } = *self;
        let count = shape.streams;
        let hidden = shape.hidden;
        let width = shape.width();
        let words = [start, count, hidden, shape.conv_width, shape.dilation, shape.capacity];
        let mut args: Vec<u32> = words.into_iter().map(|word| word as u32).collect();
        args.extend([shape.eps.to_bits(), rows.is_some().into()]);
        let proj = Binding::read(self.proj.floats(tokens * (width + hidden)));
        let streams = self.streams.floats(tokens * width);
        let gates = self.gates.floats(tokens * count);
        let ring = self.history.floats(shape.capacity * width);
        let history = if rows.is_some() { self.history } else { ring };
        let sequences = SequenceRows::binding(rows, proj.region);
        let launch = |kernel, bindings, grid| Launch {
            kernel,
            args: args.clone(),
            bindings,
            grid,
            threads: 128,
            skip: SkipUse::None,
        };
        let gate = vec![
            proj,
            Binding::read(streams),
            Binding::read(weights.key_norm.floats(width)),
            Binding::read(weights.query_norm.floats(width)),
            Binding::read(weights.conv_norm.floats(width)),
            Binding::write(gates),
            // Rows of earlier positions must keep their values.
            Binding::read_write(history),
            sequences,
        ];
        let add = vec![
            proj,
            Binding::read(gates),
            Binding::read(weights.conv.floats(shape.conv_width * width)),
            Binding::read(history),
            Binding::read_write(streams),
            sequences,
        ];
        let blocks = hidden.div_ceil(128) as u32;
        [
            launch("ngram_gate", gate, [count as u32, tokens as u32, 1]),
            launch("ngram_add", add, [blocks, count as u32, tokens as u32]),
        ]
    }
}

impl NgramInjectRows<'_> {
    /// The launches of all rows.
    ///
    /// # Errors
    /// The history is too short for a row.
    pub(in crate::ops) fn launches(&self) -> Result<[Launch; 2], DeviceError> {
        self.inject.check_capacity(1)?;
        Ok(self.inject.launch_rows(Some(self.rows)))
    }
}
