//! The activations of a pass. The memory plan asks for the same buffers that are then allocated.

use crate::model::config::{Config, FfnShape};
use crate::{
    device::Region,
    ops::{BackendLimits, HalfBuffers, MoeBuffers},
};

/// Rows of logits computed at once.
pub const LOGITS: usize = 16;

/// Words that each buffer of a mixer and of a feed-forward begins at a multiple of.
const LINE: usize = 64;

/// MoeBuffers for up to `rows` rows; every layer uses the same. A layer's mixer is over when its feed-forward begins, so what only one
/// of the two needs (`proj` to `y`, and the experts' `act` and `out`) is the same memory. A mixer may go through its rows in
/// blocks, and has room for one.
#[derive(Debug, Clone, Copy, Default)]
pub struct Buffers {
    pub rows: usize,
    /// Rows of a mixer.
    pub block: usize,
    /// `[rows]` u32.
    pub ids: Region,
    /// `[rows, hidden]`: the residual stream, and its norm as the experts see it.
    pub h: Region,
    pub normed: Region,
    /// `[rows, rotated / 2, (cos, sin)]`.
    pub turn: Region,
    /// Of the mixers: projections of the input, q k v after the convolution, room for heads, and the output to project
    /// back, which is the beginning of `mixed` where a device allows that.
    pub proj: Region,
    pub mixed: Region,
    pub out: Region,
    pub(in crate::model) y: Region,
    /// A single row's `y`, where that is so: it need not wait until `mixed` has been read.
    pub(in crate::model) one: Region,
    pub partials: Region,
    pub room: MoeBuffers,
    /// `[rows, k]` u32: the experts that the router chose, and their slots if every expert is in memory.
    pub chosen: Region,
    pub slots: Region,
    /// `[k + 2, k]` u32 for each row that is computed place by place: a call's own slots, at the end all.
    pub per_assignment: Region,
    /// `[layers, experts]` u32: each expert's slot, looked at where every one has one.
    pub tables: Region,
    /// Rows in half precision, where products take such.
    pub half: HalfBuffers,
    /// `[LOGITS, vocab]`.
    pub logits: Region,
}

impl Buffers {
    /// Takes each buffer from `take` (bytes). `context` is the longest that there can be.
    pub fn new<E>(
        config: &Config,
        limits: &BackendLimits,
        rows: usize,
        context: usize,
        mut take: impl FnMut(usize) -> Result<Region, E>,
    ) -> Result<Self, E> {
        let (hidden, heads, delta) = (config.hidden, config.attention, config.delta);
        let full = config.full_layers();
        let (mut proj, mut values, mut mixed) = (0, 0, 0);
        if full > 0 {
            (proj, values) = (heads.width(), heads.heads * heads.dim);
        }
        if full < config.layers {
            (proj, values, mixed) = (proj.max(delta.width()), values.max(delta.values()), delta.channels());
        }
        let (k, experts, scores, mut act, out) = match config.ffn {
            FfnShape::Dense { intermediate } => (0, 0, 2 * intermediate, intermediate, 0),
            FfnShape::Moe { experts, k, intermediate, shared, .. } => {
                (k, experts, experts + 2 * shared + 1, (k + 1) * intermediate.max(shared), (k + 1) * hidden)
            }
        };
        if k > 0 && !limits.acts {
            // What the next layer's choice is guessed in.
            act = 4 * k;
        }
        let partials = limits.partials.map_or(0, |(together, most)| {
            let row = heads.heads * crate::ops::attention::max_splits(context) * (heads.dim + 2) * 4;
            (together * row).min(most.max(row)) / 4
        });
        // The rows of a product, and of the experts' activations.
        let widest = match config.ffn {
            FfnShape::Dense { intermediate } => intermediate,
            FfnShape::Moe { shared, .. } => shared,
        };
        let mut half = (0, 0);
        if limits.half {
            half.0 = HalfBuffers::words(hidden.max(values).max(widest));
            if let FfnShape::Moe { k, intermediate, .. } = config.ffn {
                half.1 = k * HalfBuffers::words(intermediate);
            }
        }
        let few = rows.min(limits.per_assignment.max(1));
        let mut take = |words: usize| take(words * 4);
        // Attention has no use for `mixed`.
        let [mixed, of_y] = if limits.in_place { [mixed.max(values), 0] } else { [mixed, values] };
        let (mixer, ffn) = ([proj, mixed, values, of_y], [act, out]);
        let stride = |words: &usize| words.next_multiple_of(LINE);
        let strides = |all: &[usize]| all.iter().map(stride).sum::<usize>();
        let block = rows.min(limits.mixer);
        let both = take(rows * strides(&ffn) + block * strides(&mixer).saturating_sub(strides(&ffn)))?;
        let part = |rows: usize, all: &[usize], index: usize| {
            both.part(rows * strides(&all[..index]) * 4, rows * all[index] * 4)
        };
        let [proj, mixed, heads] = [0, 1, 2].map(|index| part(block, &mixer, index));
        let y = if limits.in_place { mixed.part(0, block * values * 4) } else { part(block, &mixer, 3) };
        let [act, out] = [0, 1].map(|index| part(rows, &ffn, index));
        Ok(Self {
            rows,
            block,
            ids: take(rows)?,
            h: take(rows * hidden)?,
            normed: take(rows * hidden)?,
            turn: take(rows * config.attention.rope_dim)?,
            proj,
            mixed,
            out: heads,
            y,
            one: take(if limits.in_place { values } else { 0 })?,
            partials: take(partials)?,
            room: MoeBuffers {
                scores: take(rows * scores)?,
                weights: take(rows * (k + 1))?,
                act,
                out,
                jobs: take(rows * k * 3)?,
                order: take(rows * k)?,
            },
            chosen: take(rows * k)?,
            slots: take(rows * k)?,
            per_assignment: take(few * k * (k + 2))?,
            tables: take(config.layers * experts)?,
            half: HalfBuffers { x: take(rows * half.0)?, act: take(rows * half.1)? },
            logits: take(rows.min(LOGITS) * config.vocab)?,
        })
    }

    /// The output of a mixer for so many rows.
    pub fn y(&self, rows: usize) -> Region {
        if rows == 1 && self.one.len > 0 { self.one } else { self.y }
    }

    /// Bytes that a row takes, and what does not depend on rows.
    pub fn cost(config: &Config, limits: &BackendLimits) -> (u64, u64) {
        let bytes = |rows: usize| {
            let mut bytes = 0;
            let _ = Self::new(config, limits, rows, config.context, |len| {
                bytes += len as u64;
                Ok::<_, std::convert::Infallible>(Region { buffer: 0, offset: 0, len })
            });
            bytes
        };
        // Logits, slots place by place, and a mixer that goes in blocks are for a fixed number of rows.
        let rows = if limits.mixer == usize::MAX { 2 * LOGITS } else { limits.mixer.max(2 * LOGITS) };
        let (many, more) = (bytes(rows), bytes(rows + 1));
        let row = more - many;
        (row, many - row * rows as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        device::CpuArithmetic,
        ops::{Cpu, gpu_limits},
    };
    use std::convert::Infallible;

    #[test]
    fn a_feed_forward_has_the_memory_of_the_mixer_before_it() {
        let demo = include_str!("../../../models/demo/moestro-demo/config.json");
        let mut config = Config::new(&serde_json::from_str(demo).unwrap()).unwrap();
        let moe = config.ffn;
        for (ffn, rows) in [moe, FfnShape::Dense { intermediate: 100 }]
            .into_iter()
            .zip([[1, 333], [7, 450]])
            .flat_map(|(ffn, rows)| rows.map(|rows| (ffn, rows)))
        {
            config.ffn = ffn;
            for limits in [Cpu::limits(CpuArithmetic::default()), gpu_limits(None)] {
                let (mut buffer, mut bytes) = (0, 0);
                let take = |len| {
                    (buffer, bytes) = (buffer + 1, bytes + len as u64);
                    Ok::<_, Infallible>(Region { buffer, offset: 0, len })
                };
                let Ok(b) = Buffers::new(&config, &limits, rows, config.context, take);
                let (mixer, ffn) = ([b.proj, b.mixed, b.out, b.y], [b.room.act, b.room.out]);
                assert!(mixer[0].overlaps(ffn[0]), "{rows} rows");
                assert_eq!(b.y.overlaps(b.mixed), limits.in_place, "{rows} rows");
                // A mixer has room for a block of its rows, however many there are.
                let values = config.delta.values().max(config.attention.heads * config.attention.dim);
                assert_eq!([b.y.len, b.out.len], [4 * values * rows.min(limits.mixer); 2], "{rows} rows");
                let apart = if limits.in_place { &mixer[..3] } else { &mixer };
                for parts in [apart, &ffn] {
                    for (index, part) in parts.iter().enumerate() {
                        assert!(
                            part.offset % (4 * LINE) == 0 && !parts[..index].iter().any(|other| part.overlaps(*other))
                        );
                    }
                }
                let (row, fixed) = Buffers::cost(&config, &limits);
                let planned = fixed + rows as u64 * row;
                assert!(bytes == planned || rows < 2 * LOGITS && bytes < planned, "{rows} rows: {bytes}");
            }
        }
    }
}
