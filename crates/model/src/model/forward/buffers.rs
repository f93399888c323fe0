//! The activation buffers of a pass. The same code computes their sizes for the memory plan and allocates them.

use crate::model::{
    config::{Config, FfnShape},
    state::{rollback::MAX_VERIFY_ROWS, sequence::MAX_RING_BLOCK},
};
use moestro_compute::{
    device::Region,
    ops::{
        BackendLimits, ExpertGroup, HalfBuffers, MoeBuffers, MoeWeights, Sample, StreamBuffers, StreamShape,
        TokenChoice,
    },
};
use std::ops::Range;

/// Maximum number of rows of logits that are computed at once.
pub const LOGIT_ROWS: usize = 16;
/// Number of passes whose tables and logits have a place, if the device computes a pass while the CPU uses the logits of
/// the pass before.
const PASSES: usize = 2;

/// Each buffer inside the shared block starts at a multiple of this many words.
const ALIGN_WORDS: usize = 64;

/// Buffers for up to `rows` rows. All layers use the same buffers.
///
/// A layer's mixer (attention or delta net) ends before its feed-forward starts. So the buffers that only the mixer
/// needs (`proj` to `y`) share memory with those that only the experts need (`act` and `out`). A mixer may compute its
/// rows in blocks. The mixer's buffers then hold one block.
#[derive(Debug, Clone, Copy, Default)]
pub struct Buffers {
    pub rows: usize,
    /// Maximum number of rows that a mixer computes at once.
    pub block: usize,
    /// `[rows]` u32: token ids.
    pub ids: Region,
    /// `[PASSES * MAX_VERIFY_ROWS, 2]` u32, if each row belongs to another sequence: the number of the sequence, and the
    /// row's index there.
    pub sequences: Region,
    /// `[rows, hidden]`: the residual stream. With several residual streams, the result of a layer part.
    pub h: Region,
    /// `[rows, hidden]`: the normalised rows that the experts read. With several residual streams, the mixture that a
    /// layer part reads.
    pub normed: Region,
    /// `[rows, residual width]`: all residual streams, if there are several.
    pub streams: Region,
    /// `[rows, streams]`: the factor with which a layer part's result is added to each residual stream.
    pub inject: Region,
    /// Intermediate results of the mixture of streams.
    pub stream: MixBuffers,
    /// Projections of the indexer.
    pub index: Region,
    /// Rows of an n-gram table for the tokens of the pass.
    pub ngram: Region,
    /// `[rows, rope_dim / 2, (cos, sin)]`.
    pub rope: Region,
    /// Input projections of the mixer.
    pub proj: Region,
    /// A delta net's q, k, v after the convolution.
    pub mixed: Region,
    /// Attention's queries, or a delta net's output before norm and gate.
    pub head_out: Region,
    /// The mixer's output before the output projection. Shares memory with `mixed` if [`BackendLimits::delta_in_place`]
    /// is set.
    y: Region,
    /// `y` of a pass with a single row, if `y` shares memory with `mixed`. A separate buffer, so that heads can be
    /// written before all of `mixed` has been read.
    single_y: Region,
    /// Partial results of attention, or an indexer's scores.
    pub partials: Region,
    pub moe: MoeBuffers,
    /// `[rows, k]` u32: the experts that the router chose.
    pub expert_ids: Region,
    /// `[rows, k]` u32: the slots of the chosen experts, if every expert is resident.
    pub expert_slots: Region,
    /// For passes that compute experts one assignment at a time: a list of slots for each call, and one list with the
    /// slots of all calls. `[k + 2, k]` u32 for each row.
    pub per_assignment: Region,
    /// `[layers, experts]` u32: the slot of each expert. While experts are streamed, a layer's row is only valid after
    /// [`ExpertStore::take_device_slots`](moestro_compute::experts::ExpertStore::take_device_slots).
    pub slot_tables: Region,
    /// The routers' outputs of all layers, for layers that are computed before the CPU reads their choices.
    routes: Region,
    /// One word: the skip flag of these layers, see `kernels/quant.metal`.
    pub skip_flag: Region,
    /// Half-precision rows.
    pub half: HalfBuffers,
    /// `[PASSES * LOGIT_ROWS, vocab]`.
    pub logits: Region,
}

/// The router's output for one layer.
#[derive(Debug, Clone, Copy)]
pub struct RouteBuffers {
    /// `[rows, k]` u32: the chosen experts.
    pub ids: Region,
    /// `[rows, k]` u32: their slots, from the table.
    pub slots: Region,
    /// See [`MoeBuffers::weights`].
    pub weights: Region,
    /// See [`MoeBuffers::scores`].
    pub scores: Region,
}

/// The words of each buffer of [`RouteBuffers`] in one layer's part of `Buffers::routes`, and the length of that part.
fn route_layout(rows: usize, k: usize, width: usize) -> ([Range<usize>; 4], usize) {
    let mut end = 0;
    let ranges = [k, k, k + 1, width].map(|words| {
        let start = end;
        end = (start + rows * words).next_multiple_of(ALIGN_WORDS);
        start..start + rows * words
    });
    (ranges, end)
}

/// The buffers of [`RouteBuffers`] in a copy of `Buffers::routes` that starts `index` layers before.
pub fn split_route<'r>(routes: &'r [u32], index: usize, rows: usize, weights: &MoeWeights) -> [&'r [u32]; 4] {
    let (ranges, length) = route_layout(rows, weights.k, weights.width());
    ranges.map(|words| &routes[index * length..][words])
}

/// [`StreamBuffers`] for up to a block of rows.
#[derive(Debug, Clone, Copy, Default)]
pub struct MixBuffers(StreamBuffers);

impl MixBuffers {
    /// The buffers for `rows` rows.
    pub fn of(&self, shape: &StreamShape, rows: usize) -> StreamBuffers {
        let StreamBuffers { normed, low, act, gates } = self.0;
        StreamBuffers {
            normed: normed.floats(rows * shape.width()),
            low: low.floats(rows * shape.low_width()),
            act: act.floats(rows * shape.rank),
            gates: gates.floats(rows * shape.width()),
        }
    }
}

/// Number of words for each row, of the buffers whose size depends on the kinds of layers.
struct RowWords {
    proj: usize,
    mixed: usize,
    /// A mixer's output: `head_out` and `y`.
    values: usize,
    scores: usize,
    act: usize,
    out: usize,
    ngram: usize,
    /// Half-precision inputs of matrix products.
    half_x: usize,
    /// Half-precision activations of the experts.
    half_act: usize,
}

impl RowWords {
    fn new(config: &Config, limits: &BackendLimits) -> Self {
        let hidden = config.hidden;
        let heads = config.attention;
        let delta = config.delta;
        let full = config.full_layers();
        let mut proj = 0;
        let mut values = 0;
        let mut mixed = 0;
        if full > 0 {
            proj = heads.width();
            values = heads.heads * heads.dim;
        }
        if full < config.layers {
            proj = proj.max(delta.width());
            values = values.max(delta.values());
            mixed = delta.channels();
        }
        if !config.ngrams.is_empty() {
            // An n-gram table's projections: the keys of all streams, and the value.
            proj = proj.max(config.residual_width() + hidden);
        }
        let (k, scores, mut act, out) = match config.ffn {
            FfnShape::Dense { intermediate } => (0, 2 * intermediate, intermediate, 0),
            FfnShape::Moe { experts, k, intermediate, shared, .. } => {
                (k, experts + 2 * shared + 1, (k + 1) * intermediate.max(shared), (k + 1) * hidden)
            }
        };
        if k > 0 && !limits.needs_expert_buffers {
            // Space for the prediction of the next layer's experts.
            act = 4 * k;
        }
        let ngram = config.ngrams.iter().map(|ngram| ngram.width).max().unwrap_or(0);
        let mut half_x = 0;
        let mut half_act = 0;
        if limits.uses_half_precision {
            let widest = match config.ffn {
                FfnShape::Dense { intermediate } => intermediate,
                FfnShape::Moe { shared, .. } => shared,
            };
            let inputs = [hidden, values, widest, config.residual_width(), ngram];
            half_x = inputs.into_iter().map(HalfBuffers::words).max().unwrap_or(0);
            if let FfnShape::Moe { k, intermediate, .. } = config.ffn {
                half_act = k * HalfBuffers::words(intermediate);
            }
        }
        Self { proj, mixed, values, scores, act, out, ngram, half_x, half_act }
    }
}

/// Number of words of [`Buffers::partials`]. `context` is the length of the longest sequence.
fn partial_words(config: &Config, limits: &BackendLimits, context: usize) -> usize {
    let heads = config.attention;
    limits.partials.map_or(0, |(together, max)| {
        let row = heads.heads * moestro_compute::ops::attention::max_splits(context) * (heads.dim + 2);
        let row = row.max(config.indexer.map_or(0, |indexer| indexer.gpu_scratch(&heads, context))) * 4;
        (together * row).min(max.max(row)) / 4
    })
}

impl Buffers {
    /// Allocates each buffer by a call of `take` with its size in bytes. `context` is the length of the longest
    /// sequence.
    pub fn new<E>(
        config: &Config,
        limits: &BackendLimits,
        rows: usize,
        context: usize,
        mut take: impl FnMut(usize) -> Result<Region, E>,
    ) -> Result<Self, E> {
        let RowWords { proj, mixed, values, scores, act, out, ngram, half_x, half_act } = RowWords::new(config, limits);
        let hidden = config.hidden;
        let (k, experts) = match config.ffn {
            FfnShape::Dense { .. } => (0, 0),
            FfnShape::Moe { experts, k, .. } => (k, experts),
        };
        let passes = if limits.is_async { PASSES } else { 1 };
        let few = rows.min(limits.max_per_assignment_rows.max(1));
        let routes = if k > 0 { rows.min(limits.max_slot_table_rows) } else { 0 };
        let mut take = |words: usize| take(words * 4);
        // `y` can use the memory of `mixed` if the delta net can write its output over its input. Attention does not
        // use `mixed`.
        let [mixed, of_y] = if limits.delta_in_place { [mixed.max(values), 0] } else { [mixed, values] };
        let mixer = [proj, mixed, values, of_y];
        let ffn = [act, out];
        let stride = |words: &usize| words.next_multiple_of(ALIGN_WORDS);
        let strides = |all: &[usize]| all.iter().map(stride).sum::<usize>();
        // A ring of recent positions has room for the rows of one call of at most `MAX_RING_BLOCK` rows.
        let has_rings = config.indexer.is_some() || !config.ngrams.is_empty();
        let block = rows.min(limits.max_mixer_rows).min(if has_rings { MAX_RING_BLOCK } else { usize::MAX });
        let both = take(rows * strides(&ffn) + block * strides(&mixer).saturating_sub(strides(&ffn)))?;
        let part = |rows: usize, all: &[usize], index: usize| {
            both.part(rows * strides(&all[..index]) * 4, rows * all[index] * 4)
        };
        let [proj, mixed, heads] = [0, 1, 2].map(|index| part(block, &mixer, index));
        let y = if limits.delta_in_place { mixed.part(0, block * values * 4) } else { part(block, &mixer, 3) };
        let [act, out] = [0, 1].map(|index| part(rows, &ffn, index));
        let (width, streams) = config.streams.map_or((0, 0), |streams| (streams.width(), streams.count));
        let [low, rank] = config.streams.map_or([0; 2], |streams| [streams.low_width(), streams.rank]);
        Ok(Self {
            rows,
            block,
            ids: take(rows)?,
            sequences: take(2 * rows.min(passes * MAX_VERIFY_ROWS))?,
            h: take(rows * hidden)?,
            normed: take(rows * hidden)?,
            streams: take(rows * width)?,
            inject: take(rows * streams)?,
            stream: MixBuffers(StreamBuffers {
                normed: take(block * width)?,
                low: take(block * low)?,
                act: take(block * rank)?,
                gates: take(block * width)?,
            }),
            index: take(block * config.indexer.map_or(0, |indexer| indexer.width()))?,
            ngram: take(block * ngram)?,
            rope: take(rows * config.attention.rope_dim)?,
            proj,
            mixed,
            head_out: heads,
            y,
            single_y: take(if limits.delta_in_place { values } else { 0 })?,
            partials: take(partial_words(config, limits, context))?,
            moe: MoeBuffers {
                scores: take(rows * scores)?,
                weights: take(rows * (k + 1))?,
                act,
                out,
                jobs: take(rows * k * 3)?,
                order: take(rows * k)?,
            },
            expert_ids: take(rows * k)?,
            expert_slots: take(rows * k)?,
            per_assignment: take(few * k * (k + 2))?,
            slot_tables: take(config.layers * experts)?,
            routes: take(config.layers * route_layout(routes, k, scores).1)?,
            skip_flag: take(1)?,
            half: HalfBuffers { x: take(rows * half_x)?, act: take(rows * half_act)?, has_short: false },
            logits: take(rows.min(passes * LOGIT_ROWS) * config.vocab)?,
        })
    }

    /// The same buffers for a pass of `count` rows, but `count` rows from `first` on of the tables that the CPU writes
    /// before a pass or reads after it, except `ids`. So the CPU can prepare a pass while the GPU computes another one.
    pub fn at_rows(&self, first: usize, count: usize, config: &Config) -> Self {
        let rope = self.rope.rows(first, count, config.attention.rope_dim);
        let sequences = self.sequences.rows(first, count, 2);
        Self { rope, sequences, logits: self.logits.rows(first, count, config.vocab), ..*self }
    }

    /// Memory for choosing tokens from the first `usable` logits of `rows`. `None` if the device cannot choose from so
    /// many.
    pub fn sample_scratch(&self, rows: &[(usize, TokenChoice)], usable: usize) -> Option<Region> {
        let words = Sample::scratch_words(rows, usable)?;
        (words * 4 <= self.partials.len).then(|| self.partials.floats(words))
    }

    /// The residual between layers: `h`, or all streams.
    pub fn residual(&self) -> Region {
        if self.streams.len > 0 { self.streams } else { self.h }
    }

    /// The output of the router of `layer` for this many rows.
    pub fn route(&self, layer: usize, rows: usize, weights: &MoeWeights) -> RouteBuffers {
        let (ranges, _) = route_layout(rows, weights.k, weights.width());
        let all = self.routes(layer..layer + 1, rows, weights);
        let [ids, slots, weights, scores] = ranges.map(|words| all.part(words.start * 4, words.len() * 4));
        RouteBuffers { ids, slots, weights, scores }
    }

    /// The outputs of the routers of `layers`, one after the other.
    pub fn routes(&self, layers: Range<usize>, rows: usize, weights: &MoeWeights) -> Region {
        let (_, length) = route_layout(rows, weights.k, weights.width());
        self.routes.rows(layers.start, layers.len(), length)
    }

    /// The mixer's output for this many rows.
    pub fn y(&self, rows: usize) -> Region {
        if rows == 1 && self.single_y.len > 0 { self.single_y } else { self.y }
    }

    /// Number of bytes for each row, and number of bytes that do not depend on the number of rows.
    pub fn cost(config: &Config, limits: &BackendLimits) -> (u64, u64) {
        let bytes = |rows: usize| {
            let mut bytes = 0;
            let _ = Self::new(config, limits, rows, config.context, |len| {
                bytes += len as u64;
                Ok::<_, std::convert::Infallible>(Region { buffer: 0, offset: 0, len })
            });
            bytes
        };
        // Some buffers stop growing at some number of rows: logits, slots of assignments, and the buffers of a mixer
        // that computes in blocks.
        let rows = if limits.max_mixer_rows == usize::MAX {
            2 * LOGIT_ROWS
        } else {
            limits.max_mixer_rows.max(2 * LOGIT_ROWS)
        };
        let many = bytes(rows);
        let more = bytes(rows + 1);
        let row = more - many;
        (row, many - row * rows as u64)
    }
}

/// Lists in the CPU's memory, reused by all passes.
#[derive(Default)]
pub struct Scratch {
    pub rope: Vec<f32>,
    pub moe: MoeScratch,
    pub span: SpanScratch,
}

/// The state of [`layer_span`](super::layer_span).
#[derive(Default)]
pub struct SpanScratch {
    /// The outputs of the routers from layer `first` on.
    pub routes: Vec<u32>,
    pub first: usize,
    /// The layers in `routes` whose choices were not reported to the expert store yet.
    pub layers: Range<usize>,
    /// For each layer since the last wait: the backend's launch count just before the layer's experts.
    pub launches: Vec<u64>,
    /// True if the skip flag may be set.
    pub may_skip: bool,
}

/// Lists of the mixture of experts, reused by all layers.
#[derive(Default)]
pub struct MoeScratch {
    /// Chosen experts, `[tokens, k]`.
    pub ids: Vec<u32>,
    /// The router's logits, `[tokens, experts]`, if some experts are not resident.
    pub logits: Vec<f32>,
    /// Experts that are predicted for the next layer.
    pub predicted: Vec<u32>,
    /// Experts whose reads completed together.
    pub groups: Vec<ExpertGroup>,
    /// The assignments of `groups`.
    pub assignments: Vec<u32>,
    /// The slot of each assignment whose expert is loaded.
    pub slots: Vec<u32>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use moestro_compute::{
        device::CpuArithmetic,
        ops::{Cpu, gpu_limits},
    };
    use std::convert::Infallible;

    #[test]
    fn mixer_and_ffn_share_one_block() {
        let demo = include_str!("../../../../../models/demo/moestro-demo/config.json");
        let mut config = Config::new(&serde_json::from_str(demo).unwrap()).unwrap();
        let moe = config.ffn;
        for (ffn, rows) in [moe, FfnShape::Dense { intermediate: 100 }]
            .into_iter()
            .zip([[1, 333], [7, 450]])
            .flat_map(|(ffn, rows)| rows.map(|rows| (ffn, rows)))
        {
            config.ffn = ffn;
            for limits in [Cpu::limits(CpuArithmetic::default()), gpu_limits(None)] {
                let mut buffer = 0;
                let mut bytes = 0;
                let take = |len| {
                    buffer += 1;
                    bytes += len as u64;
                    Ok::<_, Infallible>(Region { buffer, offset: 0, len })
                };
                let Ok(b) = Buffers::new(&config, &limits, rows, config.context, take);
                let mixer = [b.proj, b.mixed, b.head_out, b.y];
                let ffn = [b.moe.act, b.moe.out];
                assert!(mixer[0].overlaps(ffn[0]), "{rows} rows");
                assert_eq!(b.y.overlaps(b.mixed), limits.delta_in_place, "{rows} rows");
                // The buffers of a mixer hold one block of rows.
                let values = config.delta.values().max(config.attention.heads * config.attention.dim);
                assert_eq!([b.y.len, b.head_out.len], [4 * values * rows.min(limits.max_mixer_rows); 2], "{rows} rows");
                let apart = if limits.delta_in_place { &mixer[..3] } else { &mixer };
                for parts in [apart, &ffn] {
                    for (index, part) in parts.iter().enumerate() {
                        assert!(
                            part.offset % (4 * ALIGN_WORDS) == 0
                                && !parts[..index].iter().any(|other| part.overlaps(*other))
                        );
                    }
                }
                let (row, fixed) = Buffers::cost(&config, &limits);
                let planned = fixed + rows as u64 * row;
                assert!(bytes == planned || rows < 2 * LOGIT_ROWS && bytes < planned, "{rows} rows: {bytes}");
            }
        }
    }
}
