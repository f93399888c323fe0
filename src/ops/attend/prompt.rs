//! `kernels/prompt.metal`: attention of a prompt's rows on matrix units.

use super::Attend;
use crate::{
    device::{Binding, Dispatch},
    ops::run::CacheFormat,
};

/// Pairs of a row and a query head that a threadgroup has.
const QUERIES: usize = 32;
/// Rows times positions of a launch: some 0.1 s on a small GPU, enough to fill a large one.
const WORK: usize = 1 << 24;

impl Attend<'_> {
    /// Attention with the gate, of as many rows at a time as are [`WORK`]. The cache is f32 or bf16.
    pub fn halves(&self) -> impl Iterator<Item = Dispatch> {
        let Self { start, tokens, .. } = *self;
        let at_once = (WORK / (start + tokens).max(1)).max(QUERIES);
        (0..tokens).step_by(at_once).map(move |first| self.part(first, at_once.min(tokens - first)).half())
    }

    fn half(&self) -> Dispatch {
        let Self { shape, start, tokens, q, cache, proj, y, .. } = *self;
        assert!(shape.dim <= 256 && shape.newest.is_none(), "heads of {}", shape.dim);
        assert!(start + tokens <= shape.context, "position {} of {}", start + tokens, shape.context);
        let queries = tokens * shape.heads * shape.dim;
        let words = [tokens, shape.width(), shape.heads, shape.kv_heads, shape.dim, start];
        let mut args = words.map(|word| word as u32).to_vec();
        args.push((1.0 / (shape.dim as f32).sqrt()).to_bits());
        let pairs = tokens * (shape.heads / shape.kv_heads);
        Dispatch {
            kernel: if shape.format == CacheFormat::Bf16 { "prompt_bf16" } else { "prompt" },
            args,
            bindings: vec![
                Binding::read(q.floats(queries)),
                Binding::read(cache.keys),
                Binding::read(cache.values),
                Binding::read(cache.table),
                Binding::read(proj.floats(tokens * shape.width())),
                Binding::write(y.floats(queries)),
            ],
            grid: [pairs.div_ceil(QUERIES) as u32, shape.kv_heads as u32, 1],
            threads: 256,
        }
    }
}
