//! Residual streams on a GPU (`kernels/streams.metal`).

use super::{ReadStreams, StreamShape, WriteStreams};
use crate::{
    device::{Binding, Launch, Region, SkipUse},
    ops::{Linear, Weight, linear::HalfBuffers, norm::rms_norms},
};

impl StreamShape {
    fn launch(&self, kernel: &'static str, low: usize, flag: bool, bindings: Vec<Binding>, grid: [usize; 3]) -> Launch {
        let words = [self.count, self.hidden, self.rank, low, flag.into()];
        let [args, grid] =
            [words.to_vec(), grid.to_vec()].map(|all| all.into_iter().map(|word| word as u32).collect::<Vec<_>>());
        Launch { kernel, args, bindings, grid: [grid[0], grid[1], grid[2]], threads: 128, skip: SkipUse::None }
    }
}

impl ReadStreams<'_> {
    /// Launches the norm of each stream, the two products with their activations, and the mixture. If `half` is given,
    /// the products run on matrix units.
    pub(in crate::ops) fn launches(&self, half: Option<HalfBuffers>) -> Vec<Launch> {
        let Self { shape, tokens, weights, buffers, .. } = *self;
        let width = shape.width();
        let rank = shape.rank;
        let count = shape.count;
        let hidden = shape.hidden;
        let [streams, normed, gates] =
            [self.streams, buffers.normed, buffers.gates].map(|region| region.floats(tokens * width));
        let product = |x: Region, matrices: &[Weight], y: Region| {
            let linear = Linear { x, tokens, norm: None, matrices, y, add: false };
            half.map_or_else(|| vec![linear.launch()], |half| linear.half_launches(half))
        };
        let down: Vec<Weight> = [weights.down].into_iter().chain(weights.inject).collect();
        let low_width = down.iter().map(|matrix| matrix.rows).sum();
        let low = buffers.low.floats(tokens * low_width);
        let act = buffers.act.floats(tokens * rank);
        let inject = match weights.inject {
            Some(_) => Binding::write(self.inject.floats(tokens * count)),
            None => Binding::read(low.first(0)),
        };
        let zeroes = self.zeroed.len > 0;
        let zeroed =
            if zeroes { Binding::write(self.zeroed.floats(tokens * hidden)) } else { Binding::read(low.first(0)) };

        let mut launches = vec![rms_norms([tokens * count, count], hidden, shape.eps, streams, weights.norm, normed)];
        launches.extend(product(normed, &down, low));
        let bindings = vec![Binding::read(low), Binding::write(act), inject];
        launches.push(shape.launch("stream_gates", low_width, false, bindings, [low_width.div_ceil(128), tokens, 1]));
        launches.extend(product(act, &[weights.up], gates));
        let out = Binding::write(self.out.floats(tokens * hidden));
        let bindings = vec![Binding::read(normed), Binding::read(gates), out, zeroed];
        launches.push(shape.launch("stream_mix", low_width, zeroes, bindings, [hidden.div_ceil(128), tokens, 1]));
        launches
    }
}

impl WriteStreams<'_> {
    pub(in crate::ops) fn launch(&self) -> Launch {
        let Self { shape, tokens, y, inject, streams } = *self;
        let y = y.floats(tokens * shape.hidden);
        let streams = streams.floats(tokens * shape.width());
        let bindings = vec![
            Binding::read(y),
            Binding::read(inject.map_or(y.first(0), |inject| inject.floats(tokens * shape.count))),
            if inject.is_some() { Binding::read_write(streams) } else { Binding::write(streams) },
        ];
        let grid = [shape.hidden.div_ceil(128), shape.count, tokens];
        shape.launch("stream_write", 0, inject.is_some(), bindings, grid)
    }
}
