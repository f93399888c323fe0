//! `kernels/attention.metal`: flash-decode, in splits of some positions whose partial results are folded behind.

use super::{Attention, AttentionShape, KvFormat, KvWrite, RECENT, rounded_until};
use crate::device::{Binding, Launch};

/// Positions one threadgroup looks at: the fewest, which fill a device that a row has for itself.
const LEAST: usize = 16;
/// Twice as many where there would be more parts than this; with few bits, whose parts one threadgroup joins, than this of those
/// that are not among the recent.
const PARTS: usize = 512;
const FEW_PARTS: usize = 256;
/// Parts of the recent positions at most.
const NEW_PARTS: usize = 2 * RECENT / LEAST;
/// Threads that join parts of few bits.
const JOINS: u32 = 512;

/// Positions in a part, if `positions` are to be less than `most` of them.
fn size(positions: usize, most: usize) -> usize {
    let mut size = LEAST;
    while positions / size >= most {
        size *= 2;
    }
    size
}

/// Parts into which the positions of a query at `position` are cut, and of how many.
fn parts(position: usize) -> (usize, usize) {
    let size = size(position, PARTS);
    (position / size + 1, size)
}

/// The same with few bits, of the positions that are not among the recent.
fn few_parts(position: usize) -> (usize, usize) {
    let until = rounded_until(position);
    let size = size(until, FEW_PARTS);
    (until.div_ceil(size), size)
}

/// Parts at most, for any query below `context`, in whatever format.
pub fn most_parts(context: usize) -> usize {
    context.div_ceil(LEAST).min(PARTS).max(context.div_ceil(LEAST).min(FEW_PARTS) + NEW_PARTS)
}

impl AttentionShape {
    /// With few bits, parts of the recent positions come first.
    fn splits(&self, start: usize, tokens: usize) -> usize {
        let last = (start + tokens).saturating_sub(1);
        match self.recent {
            // Just before their size doubles, there are most.
            Some(_) if few_parts(start).1 < few_parts(last).1 => NEW_PARTS + FEW_PARTS,
            Some(_) if start / RECENT < last / RECENT => NEW_PARTS + few_parts(last).0,
            Some(_) => (last - rounded_until(last)) / LEAST + 1 + few_parts(last).0,
            None if parts(start).1 < parts(last).1 => PARTS,
            None => parts(last).0,
        }
    }

    /// Floats of partial results for `tokens` rows from position `start`.
    pub fn partials(&self, start: usize, tokens: usize) -> usize {
        tokens * self.heads * self.splits(start, tokens) * (self.dim + 2)
    }

    fn args(&self, start: usize, tokens: usize) -> Vec<u32> {
        assert!(self.dim <= 256 && self.heads / self.kv_heads <= 32, "heads of {}", self.dim);
        assert!(start + tokens <= self.context, "position {} of {}", start + tokens, self.context);
        let words = [tokens, self.width(), self.heads, self.kv_heads, self.dim, self.rope_dim, start];
        let mut args = words.map(|w| w as u32).to_vec();
        args.push(self.splits(start, tokens) as u32);
        args.extend([self.eps.to_bits(), (1.0 / (self.dim as f32).sqrt()).to_bits()]);
        args.extend([self.recent.map_or(0, |recent| recent.room as u32), LEAST as u32]);
        args
    }

    /// The kernel for each format: in f32, bf16, 8 bits and 4 bits.
    fn kernel(&self, [full, half, eight, four]: [&'static str; 4]) -> &'static str {
        match self.format {
            KvFormat::Bf16 => half,
            KvFormat::Eight => eight,
            KvFormat::Four => four,
            KvFormat::F32 | KvFormat::I16 => full,
        }
    }
}

impl KvWrite<'_> {
    pub fn dispatch(&self) -> Launch {
        let Self { shape, start, tokens, proj, turn, q, cache } = *self;
        let mut dispatch = Launch {
            kernel: shape.kernel(["qk_norm_rope", "qk_norm_rope_bf16", "qk_norm_rope_q8", "qk_norm_rope_q4"]),
            args: shape.args(start, tokens),
            bindings: vec![
                Binding::read(proj.floats(tokens * shape.width())),
                Binding::read(turn.q_norm.floats(shape.dim)),
                Binding::read(turn.k_norm.floats(shape.dim)),
                Binding::read(turn.turn.floats(tokens * shape.rope_dim)),
                Binding::write(q.floats(tokens * shape.heads * shape.dim)),
                Binding::read_write(cache.keys),
                Binding::read_write(cache.values),
                Binding::read(cache.table),
            ],
            grid: [(shape.heads + 2 * shape.kv_heads) as u32, tokens as u32, 1],
            threads: 32,
        };
        if shape.recent.is_some() {
            let ring = cache.recent.map(|recent| Binding::read_write(recent.first(shape.recent_bytes())));
            dispatch.bindings.extend(ring);
        }
        dispatch
    }
}

impl Attention<'_> {
    /// Attention in splits, then their fold and the gate; as many rows at a time as `partials` has room for, and `most` at most.
    pub fn dispatches(&self, most: usize) -> impl Iterator<Item = [Launch; 2]> {
        let Self { shape, start, tokens, .. } = *self;
        let row = shape.partials(start, tokens) / tokens.max(1) * 4;
        let at_once = (self.partials.len / row.max(1)).clamp(1, most);
        (0..tokens).step_by(at_once).map(move |first| {
            let part = self.part(first, at_once.min(tokens - first));
            [part.splits(), part.fold()]
        })
    }

    /// Some of the rows.
    pub(super) fn part(&self, first: usize, count: usize) -> Self {
        let (queries, width) = (self.shape.heads * self.shape.dim, self.shape.width());
        let [q, y] = [self.q, self.y].map(|region| region.rows(first, count, queries));
        Self { start: self.start + first, tokens: count, q, proj: self.proj.rows(first, count, width), y, ..*self }
    }

    fn splits(&self) -> Launch {
        let Self { shape, start, tokens, q, cache, partials, .. } = *self;
        // A simdgroup has two heads.
        let groups = shape.heads / shape.kv_heads;
        let simdgroups = if groups.is_multiple_of(2) { groups / 2 } else { groups };
        let mut bindings = vec![
            Binding::read(q.floats(tokens * shape.heads * shape.dim)),
            Binding::read(cache.keys),
            Binding::read(cache.values),
            Binding::read(cache.table),
        ];
        if shape.recent.is_some() {
            bindings.extend(cache.recent.map(|recent| Binding::read(recent.first(shape.recent_bytes()))));
        }
        bindings.push(Binding::write(partials.floats(shape.partials(start, tokens))));
        Launch {
            kernel: shape.kernel(if shape.dim <= 128 {
                [
                    "attention_decode_128",
                    "attention_decode_128_bf16",
                    "attention_decode_128_q8",
                    "attention_decode_128_q4",
                ]
            } else {
                [
                    "attention_decode_256",
                    "attention_decode_256_bf16",
                    "attention_decode_256_q8",
                    "attention_decode_256_q4",
                ]
            }),
            args: shape.args(start, tokens),
            bindings,
            grid: [shape.splits(start, tokens) as u32, shape.kv_heads as u32, tokens as u32],
            threads: 32 * simdgroups as u32,
        }
    }

    fn fold(&self) -> Launch {
        let Self { shape, start, tokens, proj, partials, y, .. } = *self;
        // With few bits a threadgroup has all columns of a head, which are turned together.
        let columns = if shape.recent.is_some() { 1 } else { shape.dim.div_ceil(32) };
        Launch {
            kernel: if shape.recent.is_some() { "attention_merge_quant" } else { "attention_merge" },
            args: shape.args(start, tokens),
            bindings: vec![
                Binding::read(proj.floats(tokens * shape.width())),
                Binding::read(partials.floats(shape.partials(start, tokens))),
                Binding::write(y.floats(tokens * shape.heads * shape.dim)),
            ],
            grid: [shape.heads as u32, tokens as u32, columns as u32],
            threads: if shape.recent.is_some() { JOINS } else { 128 },
        }
    }
}

/// Pairs of a row and a query head that a threadgroup has.
const QUERIES: usize = 32;
/// Rows times positions of a launch: some 0.1 s on a small GPU, enough to fill a large one.
const WORK: usize = 1 << 24;

impl Attention<'_> {
    /// Attention with the gate, of as many rows at a time as are [`WORK`]. The cache is f32 or bf16.
    pub fn halves(&self) -> impl Iterator<Item = Launch> {
        let Self { start, tokens, .. } = *self;
        let at_once = (WORK / (start + tokens).max(1)).max(QUERIES);
        (0..tokens).step_by(at_once).map(move |first| self.part(first, at_once.min(tokens - first)).half())
    }

    fn half(&self) -> Launch {
        let Self { shape, start, tokens, q, cache, proj, y, .. } = *self;
        assert!(shape.dim <= 256 && shape.recent.is_none(), "heads of {}", shape.dim);
        assert!(start + tokens <= shape.context, "position {} of {}", start + tokens, shape.context);
        let queries = tokens * shape.heads * shape.dim;
        let words = [tokens, shape.width(), shape.heads, shape.kv_heads, shape.dim, start];
        let mut args = words.map(|word| word as u32).to_vec();
        args.push((1.0 / (shape.dim as f32).sqrt()).to_bits());
        let pairs = tokens * (shape.heads / shape.kv_heads);
        Launch {
            kernel: if shape.format == KvFormat::Bf16 { "attention_prefill_bf16" } else { "attention_prefill" },
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

#[cfg(test)]
mod tests {
    use super::{super::RecentRing, *};

    #[test]
    fn parts_are_few_and_no_shorter_than_asked_for() {
        assert_eq!((parts(0), parts(15), parts(16)), ((1, 16), (1, 16), (2, 16)));
        assert_eq!((parts(8191), parts(8192)), ((512, 16), (257, 32)));
        assert!((0..600_000).step_by(77).all(|position| parts(position).0 <= most_parts(position + 1)));
        assert_eq!((few_parts(127), few_parts(128), few_parts(4159)), ((0, 16), (4, 16), (252, 16)));
        assert_eq!(few_parts(4160), (128, 32));
        let few = |position: usize| NEW_PARTS + few_parts(position).0;
        assert!((0..600_000).step_by(77).all(|position| few(position) <= most_parts(position + 1)));
    }

    #[test]
    fn rows_on_both_sides_of_a_doubling_have_room() {
        let format = KvFormat::F32;
        let shape = AttentionShape {
            heads: 2,
            kv_heads: 1,
            dim: 64,
            rope_dim: 16,
            eps: 1e-6,
            context: 9000,
            format,
            recent: None,
        };
        assert_eq!(shape.splits(8180, 4), 512);
        assert_eq!(shape.splits(8190, 10), 512);
        assert_eq!(shape.splits(8192, 10), 257);
        let shape = AttentionShape { recent: Some(RecentRing { room: 256, format }), ..shape };
        assert_eq!([shape.splits(4150, 4), shape.splits(4150, 20), shape.splits(4160, 20)], [260, 264, 134]);
    }
}
