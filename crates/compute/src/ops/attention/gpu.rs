//! Attention on a GPU: flash-decoding in splits of the positions, whose partial results a second launch merges
//! (`kernels/attention.metal`, `kernels/kv_quant.metal`), and attention of a prompt on matrix units
//! (`kernels/attention_prefill.metal`).

use super::{Attention, AttentionRows, AttentionShape, KvFormat, KvWrite, RECENT, recent_start};
use crate::{
    device::{Binding, Launch, Region, SkipUse},
    ops::SequenceRows,
};

/// Minimum number of positions in a split. Splits may be small, so that a single row can fill the device.
const MIN_SPLIT: usize = 16;
/// Maximum number of splits of a row. If a row would have more, the split size doubles.
const MAX_SPLITS: usize = 512;
/// Maximum number of splits of a row in a quantized cache, not counting the splits of the recent positions. Less than
/// [`MAX_SPLITS`], because one threadgroup merges all splits.
const MAX_QUANT_SPLITS: usize = 256;
/// Maximum number of splits of the recent positions.
const MAX_RECENT_SPLITS: usize = 2 * RECENT / MIN_SPLIT;
/// Number of threads in a threadgroup that merges the splits.
const MERGE_THREADS: u32 = 512;
/// Places of words in `AttentionArgs`.
const SPLITS: usize = 7;
const LEAST_SPLIT: usize = 11;
const LANE_COLUMNS: usize = 13;
const SHARED_HEADS: usize = 14;
const MERGED_COLUMNS: usize = 15;

/// Number of positions per split: [`MIN_SPLIT`], doubled until `positions` contain fewer than `max` whole splits.
fn split_size(positions: usize, max: usize) -> usize {
    let mut size = MIN_SPLIT;
    while positions / size >= max {
        size *= 2;
    }
    size
}

/// Number of splits for a query at `position`, and positions per split.
fn splits_at(position: usize) -> (usize, usize) {
    let size = split_size(position, MAX_SPLITS);
    (position / size + 1, size)
}

/// Number of splits of a quantized cache for a query at `position`, and positions per split. Does not count splits of
/// the recent positions.
fn quant_splits_at(position: usize) -> (usize, usize) {
    let until = recent_start(position);
    let size = split_size(until, MAX_QUANT_SPLITS);
    (until.div_ceil(size), size)
}

/// Maximum number of splits of any query at a position below `context`, in any cache format.
pub fn max_splits(context: usize) -> usize {
    context
        .div_ceil(MIN_SPLIT)
        .min(MAX_SPLITS)
        .max(context.div_ceil(MIN_SPLIT).min(MAX_QUANT_SPLITS) + MAX_RECENT_SPLITS)
}

impl AttentionShape {
    /// Maximum number of splits of any of the rows. In a quantized cache, splits of the recent positions come first.
    fn splits(&self, start: usize, tokens: usize) -> usize {
        let last = (start + tokens).saturating_sub(1);
        match self.recent {
            // The number of splits is largest just before the split size doubles.
            Some(_) if quant_splits_at(start).1 < quant_splits_at(last).1 => MAX_RECENT_SPLITS + MAX_QUANT_SPLITS,
            Some(_) if start / RECENT < last / RECENT => MAX_RECENT_SPLITS + quant_splits_at(last).0,
            Some(_) => (last - recent_start(last)) / MIN_SPLIT + 1 + quant_splits_at(last).0,
            None if splits_at(start).1 < splits_at(last).1 => MAX_SPLITS,
            None => splits_at(last).0,
        }
    }

    /// Number of floats of partial results for `tokens` rows from position `start`.
    pub fn partials(&self, start: usize, tokens: usize) -> usize {
        self.partials_of(start, tokens, None)
    }

    /// Maximum number of splits of any of the rows. With `rows`, each row belongs to a different sequence.
    fn splits_of(&self, start: usize, tokens: usize, rows: Option<SequenceRows>) -> usize {
        match rows {
            Some(SequenceRows { starts: [first, last], .. }) => self.splits(first, last - first + 1),
            None => self.splits(start, tokens),
        }
    }

    fn partials_of(&self, start: usize, tokens: usize, rows: Option<SequenceRows>) -> usize {
        tokens * self.heads * self.splits_of(start, tokens, rows) * (self.dim + 2)
    }

    /// Arguments of the kernels of one launch. `lane_columns` is the order of partial results.
    fn args(&self, start: usize, tokens: usize, rows: Option<SequenceRows>, lane_columns: usize) -> Vec<u32> {
        assert!(self.dim <= 256 && self.heads / self.kv_heads <= 32, "heads of {}", self.dim);
        let end = rows.map_or(start + tokens, |rows| rows.starts[1] + 1);
        assert!(end <= self.context, "position {end} of {}", self.context);
        let words = [tokens, self.width(), self.heads, self.kv_heads, self.dim, self.rope_dim, start];
        let mut args = words.map(|w| w as u32).to_vec();
        args.push(self.splits_of(start, tokens, rows) as u32);
        args.extend([self.eps.to_bits(), (1.0 / (self.dim as f32).sqrt()).to_bits()]);
        args.extend([self.recent.map_or(0, |recent| recent.capacity as u32), MIN_SPLIT as u32]);
        args.push(rows.map_or(0, |_| self.pages() as u32));
        args.push(lane_columns as u32);
        args.extend([self.shared_heads().unwrap_or(0) as u32, 1]);
        args
    }

    /// For comparisons: the splits and the merge of one row with two query heads per simdgroup instead of more.
    pub(in crate::ops) fn with_two_heads(&self, launches: [Launch; 2]) -> [Launch; 2] {
        let groups = self.heads / self.kv_heads;
        let [mut splits, mut merge] = launches;
        if groups.is_multiple_of(2) {
            for launch in [&mut splits, &mut merge] {
                launch.args[LANE_COLUMNS] = 1;
                launch.args[SHARED_HEADS] = 0;
            }
            splits.threads = 16 * groups as u32;
            splits.grid[1] = self.kv_heads as u32;
        }
        [splits, merge]
    }

    /// For comparisons: the splits and the merge of one row at `position` with another minimum number of positions in a
    /// split. The cache must not be quantized.
    pub(in crate::ops) fn with_min_split(&self, launches: [Launch; 2], position: usize, min: usize) -> [Launch; 2] {
        let mut size = min;
        while position / size >= MAX_SPLITS {
            size *= 2;
        }
        let count = position / size + 1;
        let [mut splits, mut merge] = launches;
        for launch in [&mut splits, &mut merge] {
            launch.args[SPLITS] = count as u32;
            launch.args[LEAST_SPLIT] = min as u32;
        }
        splits.grid[0] = count as u32;
        for partials in [splits.bindings.last_mut(), merge.bindings.get_mut(1)].into_iter().flatten() {
            partials.region = partials.region.floats(self.heads * count * (self.dim + 2));
        }
        [splits, merge]
    }

    /// True if the kernel on matrix units can compute the splits.
    pub(in crate::ops) fn fits_tiles(&self) -> bool {
        self.dim == 256 && self.format == KvFormat::I16
    }

    /// Number of query heads that share a simdgroup with each key and value, if the kernel has this many for the shape.
    fn shared_heads(&self) -> Option<usize> {
        let groups = self.heads / self.kv_heads;
        let is_full = matches!(self.dim, 128 | 256);
        [4, 3].into_iter().find(|heads| is_full && groups.is_multiple_of(*heads))
    }

    /// Number of adjacent columns of a lane, in which order the splits are stored. 1 means column by column.
    fn lane_columns(&self, on_tiles: bool) -> usize {
        let is_ordered = self.format != KvFormat::I16 || on_tiles && self.fits_tiles();
        if is_ordered || self.shared_heads().is_none() { 1 } else { self.dim / 32 }
    }

    /// The kernel that computes the splits, its number of threads per threadgroup, and its number of threadgroups per
    /// split. `on_tiles` allows the kernel on matrix units.
    fn decode_kernel(&self, on_tiles: bool) -> (&'static str, u32, usize) {
        let groups = self.heads / self.kv_heads;
        if on_tiles && self.fits_tiles() {
            return ("attention_decode_tiles", 128, self.kv_heads * groups.div_ceil(8));
        }
        let (simdgroups, threadgroups) = match self.shared_heads() {
            // One or two sets of heads in a threadgroup. Two simdgroups share the positions of a set.
            Some(heads) => {
                let sets = groups / heads;
                let at_once = if sets.is_multiple_of(2) { 2 } else { 1 };
                (2 * at_once, self.kv_heads * sets / at_once)
            }
            // A simdgroup computes two query heads, or one if the number of query heads per key head is odd.
            None if groups.is_multiple_of(2) => (groups / 2, self.kv_heads),
            None => (groups, self.kv_heads),
        };
        let kernel = self.kernel(if self.dim <= 128 {
            ["attention_decode_128", "attention_decode_128_i16", "attention_decode_128_q8", "attention_decode_128_q4"]
        } else {
            ["attention_decode_256", "attention_decode_256_i16", "attention_decode_256_q8", "attention_decode_256_q4"]
        });
        (kernel, 32 * simdgroups as u32, threadgroups)
    }

    /// The kernels with the largest threadgroups, and their numbers of threads.
    pub fn wide_kernels(&self, has_matrix_units: bool, on_tiles: bool) -> Vec<(&'static str, u32)> {
        let (decode, threads, _) = self.decode_kernel(on_tiles);
        let prefill = (has_matrix_units && self.recent.is_none()).then(|| (self.prefill_kernel(), PREFILL_THREADS));
        [Some((decode, threads)), prefill, Some((self.merge_kernel(), MERGE_THREADS))].into_iter().flatten().collect()
    }

    fn merge_kernel(&self) -> &'static str {
        if self.recent.is_some() { "attention_merge_quant" } else { "attention_merge" }
    }

    fn prefill_kernel(&self) -> &'static str {
        if self.format == KvFormat::I16 { "attention_prefill_i16" } else { "attention_prefill" }
    }

    /// The rings of recent positions to bind: those of one sequence or, if `rows` is set, those of all sequences.
    pub(in crate::ops) fn rings(&self, recent: [Region; 2], rows: Option<SequenceRows>) -> [Region; 2] {
        if rows.is_some() { recent } else { recent.map(|recent| recent.first(self.recent_bytes())) }
    }

    /// Chooses the kernel of the cache format. The kernels are for f32, 16 bits, 8 bits and 4 bits.
    pub(in crate::ops) fn kernel(&self, [full, half, eight, four]: [&'static str; 4]) -> &'static str {
        match self.format {
            KvFormat::I16 => half,
            KvFormat::Eight => eight,
            KvFormat::Four => four,
            KvFormat::F32 => full,
        }
    }
}

impl KvWrite<'_> {
    pub fn launch(&self) -> Launch {
        self.launch_rows(None)
    }

    /// [`KvWrite::launch`]. If `rows` is given, each row belongs to another sequence.
    pub(in crate::ops) fn launch_rows(&self, rows: Option<SequenceRows>) -> Launch {
        let Self { shape, start, tokens, proj, norm_rope, q, cache } = *self;
        let mut launch = Launch {
            kernel: shape.kernel(["qk_norm_rope", "qk_norm_rope_i16", "qk_norm_rope_q8", "qk_norm_rope_q4"]),
            args: shape.args(start, tokens, rows, 1),
            bindings: vec![
                Binding::read(proj.floats(tokens * shape.width())),
                Binding::read(norm_rope.q_norm.floats(shape.dim)),
                Binding::read(norm_rope.k_norm.floats(shape.dim)),
                Binding::read(norm_rope.rope_table.floats(tokens * shape.rope_dim)),
                Binding::write(q.floats(tokens * shape.heads * shape.dim)),
                Binding::read_write(cache.keys),
                Binding::read_write(cache.values),
                Binding::indices(cache.table),
                SequenceRows::binding(rows, cache.table),
            ],
            grid: [(shape.heads + 2 * shape.kv_heads) as u32, tokens as u32, 1],
            threads: 32,
            skip: SkipUse::None,
        };
        if shape.recent.is_some() {
            launch.bindings.extend(shape.rings(cache.recent, rows).map(Binding::read_write));
        }
        launch
    }
}

impl Attention<'_> {
    /// Pairs of launches. The first of a pair computes attention in splits, on matrix units if `on_tiles` is true and
    /// the shape allows it. The second merges the splits and applies the gate. Each pair computes as many rows as fit
    /// in `partials`, at most `max`.
    pub fn launches(&self, max: usize, on_tiles: bool) -> impl Iterator<Item = [Launch; 2]> {
        self.launches_of(max, on_tiles, None)
    }

    fn launches_of(&self, max: usize, on_tiles: bool, rows: Option<SequenceRows>) -> impl Iterator<Item = [Launch; 2]> {
        let Self { shape, start, tokens, .. } = *self;
        let row = shape.partials_of(start, tokens, rows) / tokens.max(1) * 4;
        let at_once = (self.partials.len / row.max(1)).clamp(1, max);
        (0..tokens).step_by(at_once).map(move |first| {
            let count = at_once.min(tokens - first);
            let part = self.part(first, count);
            let rows = rows.map(|rows| rows.part(first, count));
            [part.splits(on_tiles, rows), part.merge(on_tiles, rows)]
        })
    }

    /// This operation for rows `first..first + count` only.
    pub(in crate::ops) fn part(&self, first: usize, count: usize) -> Self {
        let queries = self.shape.heads * self.shape.dim;
        let width = self.shape.width();
        let [q, y] = [self.q, self.y].map(|region| region.rows(first, count, queries));
        Self { start: self.start + first, tokens: count, q, proj: self.proj.rows(first, count, width), y, ..*self }
    }

    fn splits(&self, on_tiles: bool, rows: Option<SequenceRows>) -> Launch {
        let Self { shape, start, tokens, q, cache, partials, .. } = *self;
        let (kernel, threads, groups) = shape.decode_kernel(on_tiles);
        let mut bindings = vec![
            Binding::read(q.floats(tokens * shape.heads * shape.dim)),
            Binding::read(cache.keys),
            Binding::read(cache.values),
            Binding::indices(cache.table),
            SequenceRows::binding(rows, cache.table),
        ];
        if shape.recent.is_some() {
            bindings.extend(shape.rings(cache.recent, rows).map(Binding::read));
        }
        bindings.push(Binding::write(partials.floats(shape.partials_of(start, tokens, rows))));
        Launch {
            kernel,
            args: shape.args(start, tokens, rows, shape.lane_columns(on_tiles)),
            bindings,
            grid: [shape.splits_of(start, tokens, rows) as u32, groups as u32, tokens as u32],
            threads,
            skip: SkipUse::None,
        }
    }

    fn merge(&self, on_tiles: bool, rows: Option<SequenceRows>) -> Launch {
        let Self { shape, start, tokens, proj, cache, partials, y, .. } = *self;
        // The merge of a quantized cache transforms a whole head, so one threadgroup computes all columns of a head.
        // Registers limit a multiprocessor to two of these threadgroups. From four rows on, threadgroups of 128 columns
        // still fill a GPU and are faster: 3.9 us instead of 9.7 for eight rows after 520 tokens on an H200. One row
        // would take 3.3 us instead of 2.8.
        let columns = if shape.recent.is_some() { shape.dim } else { 32 };
        let merged = if tokens >= 4 && columns == 32 && shape.dim.is_multiple_of(128) { 4 } else { 1 };
        let mut args = shape.args(start, tokens, rows, shape.lane_columns(on_tiles));
        args[MERGED_COLUMNS] = merged as u32;
        Launch {
            kernel: shape.merge_kernel(),
            args,
            bindings: vec![
                Binding::read(proj.floats(tokens * shape.width())),
                Binding::read(partials.floats(shape.partials_of(start, tokens, rows))),
                SequenceRows::binding(rows, cache.table),
                Binding::write(y.floats(tokens * shape.heads * shape.dim)),
            ],
            grid: [shape.heads as u32, tokens as u32, shape.dim.div_ceil(columns * merged) as u32],
            threads: MERGE_THREADS,
            skip: SkipUse::None,
        }
    }
}

impl AttentionRows<'_> {
    /// First the write of keys and values, then the splits and merges of all rows. The number of launches is the same
    /// as for rows of one sequence.
    pub fn launches(&self, max: usize, on_tiles: bool) -> impl Iterator<Item = Launch> {
        let rows = Some(self.rows);
        std::iter::once(self.write.launch_rows(rows)).chain(self.attention.launches_of(max, on_tiles, rows).flatten())
    }
}

/// Number of pairs (row, query head) per threadgroup.
const QUERIES: usize = 32;
/// Number of threads in a threadgroup that computes attention on matrix units.
const PREFILL_THREADS: u32 = 256;
/// Maximum number of rows times positions in a launch. Large enough to fill a large GPU, and small enough that a launch
/// does not occupy a small GPU for long.
const WORK: usize = 1 << 24;

/// Maximum number of rows times positions in a launch on this device: a quarter of [`WORK`] if the device shares the
/// CPU's memory, since it also draws the screen, and a quarter of that after it has delayed the screen.
pub(in crate::ops) fn prompt_work(has_own_memory: bool, has_delayed_screen: bool) -> usize {
    let quarters = u32::from(!has_own_memory) + u32::from(has_delayed_screen);
    WORK >> (2 * quarters)
}

/// Number of rows in a launch over this many positions.
fn rows_at_once(positions: usize, work: usize) -> usize {
    (work / positions.max(1)).max(QUERIES)
}

impl Attention<'_> {
    /// Attention and the gate on matrix units, in launches of at most `work` rows times positions. The cache must have
    /// f32 or 16-bit rows.
    pub fn half_launches(&self, work: usize) -> impl Iterator<Item = Launch> {
        let Self { start, tokens, .. } = *self;
        let at_once = rows_at_once(start + tokens, work);
        (0..tokens).step_by(at_once).map(move |first| self.part(first, at_once.min(tokens - first)).half_launch())
    }

    fn half_launch(&self) -> Launch {
        let Self { shape, start, tokens, q, cache, proj, y, .. } = *self;
        assert!(shape.dim <= 256 && shape.recent.is_none(), "heads of {}", shape.dim);
        assert!(start + tokens <= shape.context, "position {} of {}", start + tokens, shape.context);
        let queries = tokens * shape.heads * shape.dim;
        let words = [tokens, shape.width(), shape.heads, shape.kv_heads, shape.dim, start];
        let mut args = words.map(|word| word as u32).to_vec();
        args.push((1.0 / (shape.dim as f32).sqrt()).to_bits());
        let pairs = tokens * (shape.heads / shape.kv_heads);
        Launch {
            kernel: shape.prefill_kernel(),
            args,
            bindings: vec![
                Binding::read(q.floats(queries)),
                Binding::read(cache.keys),
                Binding::read(cache.values),
                Binding::indices(cache.table),
                Binding::read(proj.floats(tokens * shape.width())),
                Binding::write(y.floats(queries)),
            ],
            grid: [pairs.div_ceil(QUERIES) as u32, shape.kv_heads as u32, 1],
            threads: PREFILL_THREADS,
            skip: SkipUse::None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{
        super::{KvCache, RecentRing},
        *,
    };

    #[test]
    fn split_count_and_size_are_bounded() {
        assert_eq!((splits_at(0), splits_at(15), splits_at(16)), ((1, 16), (1, 16), (2, 16)));
        assert_eq!((splits_at(8191), splits_at(8192)), ((512, 16), (257, 32)));
        assert!((0..600_000).step_by(77).all(|position| splits_at(position).0 <= max_splits(position + 1)));
        assert_eq!((quant_splits_at(127), quant_splits_at(128), quant_splits_at(4159)), ((0, 16), (4, 16), (252, 16)));
        assert_eq!(quant_splits_at(4160), (128, 32));
        let few = |position: usize| MAX_RECENT_SPLITS + quant_splits_at(position).0;
        assert!((0..600_000).step_by(77).all(|position| few(position) <= max_splits(position + 1)));
    }

    #[test]
    fn four_query_heads_share_a_simdgroup() {
        let shape = |groups: usize, dim: usize, format: KvFormat| AttentionShape {
            heads: 2 * groups,
            kv_heads: 2,
            dim,
            rope_dim: 16,
            eps: 1e-6,
            context: 9000,
            format,
            recent: None,
        };
        // Query heads per key head; threads, threadgroups of a split and order of the partial results.
        for (groups, dim, expected) in [
            (8, 256, (128, 2, 8)),
            (16, 256, (128, 4, 8)),
            (4, 128, (64, 2, 4)),
            (12, 256, (64, 6, 8)),
            (6, 256, (128, 2, 8)),
            (3, 256, (64, 2, 8)),
            (2, 256, (32, 2, 1)),
            (5, 256, (160, 2, 1)),
            (8, 64, (128, 2, 1)),
        ] {
            let shape = shape(groups, dim, KvFormat::I16);
            let (_, threads, threadgroups) = shape.decode_kernel(false);
            assert_eq!((threads, threadgroups, shape.lane_columns(false)), expected, "{groups} heads of {dim}");
        }
        assert_eq!(shape(8, 256, KvFormat::I16).lane_columns(true), 1);
        assert_eq!(shape(8, 256, KvFormat::F32).lane_columns(false), 1);
    }

    #[test]
    fn changed_launches_have_valid_arguments() {
        let shape = &AttentionShape {
            heads: 16,
            kv_heads: 2,
            dim: 256,
            rope_dim: 64,
            eps: 1e-6,
            context: 9000,
            format: KvFormat::I16,
            recent: None,
        };
        let part = Region { len: 1 << 30, ..Region::default() };
        let cache = KvCache { keys: part, values: part, table: part, recent: [part; 2] };
        let op = Attention { shape, start: 8191, tokens: 1, q: part, cache, proj: part, partials: part, y: part };
        let [splits, merge] = op.launches(1, false).next().unwrap();
        assert_eq!([SPLITS, LEAST_SPLIT, LANE_COLUMNS, SHARED_HEADS].map(|at| splits.args[at]), [512, 16, 8, 4]);
        assert_eq!(splits.args, merge.args);
        let [two, merge_two] = shape.with_two_heads([splits.clone(), merge.clone()]);
        assert_eq!((two.threads, two.grid, two.args[LANE_COLUMNS], two.args[SHARED_HEADS]), (128, [512, 2, 1], 1, 0));
        assert_eq!(two.args, merge_two.args);
        let [long, merge_long] = shape.with_min_split([splits, merge], 8191, 64);
        assert_eq!((long.grid, long.args[SPLITS], long.args[LEAST_SPLIT]), ([128, 2, 1], 128, 64));
        assert_eq!(long.args, merge_long.args);
        let partials = 16 * 128 * 258 * 4;
        assert_eq!([long.bindings[5], merge_long.bindings[1]].map(|binding| binding.region.len), [partials; 2]);
    }

    #[test]
    fn launches_are_small_on_gpus_with_screens() {
        let rows = |own, delayed| rows_at_once(32_768, prompt_work(own, delayed));
        assert_eq!([rows(true, false), rows(true, true)], [512, 128]);
        assert_eq!([rows(false, false), rows(false, true)], [128, QUERIES]);
        assert_eq!(rows_at_once(1 << 30, prompt_work(false, true)), QUERIES);
    }

    #[test]
    fn rows_across_a_size_change_fit() {
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
        let shape = AttentionShape { recent: Some(RecentRing { capacity: 256, format }), ..shape };
        assert_eq!([shape.splits(4150, 4), shape.splits(4150, 20), shape.splits(4160, 20)], [260, 264, 134]);
    }
}
