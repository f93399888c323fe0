//! Experts of decoded and drafted rows on matrix units (`kernels/expert_tiles.metal`).
//!
//! A format, a shape and a device decide whether a layer runs here, never the number of rows. All rows of a call that
//! use an expert are one job. A row gives the same bytes alone and together with others.

use super::{CombineExperts, Experts, Jobs, MoeWeights};
use crate::{
    device::{Binding, Launch, Region, SkipUse},
    ops::{Weight, quant::fast},
};

/// Columns of a step: two groups of 64.
const STEP: usize = 128;
/// Rows of x of a tile.
const TILE_ROWS: usize = 4;
/// Rows of the down projection per threadgroup of `moe_down_tiles`.
const DOWN_ROWS: usize = 128;
/// Maximum number of assignments of a job.
const MAX_JOB: usize = 32;
/// Maximum number of ranks of a token, with the shared expert, whose results one launch adds up.
const MAX_RANKS: usize = 16;

/// The kernel of gate and up for this many jobs, and its rows per threadgroup. It changes no byte. With more rows, x is
/// split less often, but few jobs do not fill the GPU. The limits are those of an H200.
fn up_kernel(jobs: usize) -> (&'static str, usize) {
    match jobs {
        0..=12 => ("moe_gate_up_tiles_1", 16),
        13..=24 => ("moe_gate_up_tiles_2", 32),
        _ => ("moe_gate_up_tiles_4", 64),
    }
}

impl MoeWeights {
    /// True if the kernels for matrix units can compute this layer.
    pub fn fits_tiles(&self) -> bool {
        let is_fast = |m: &Weight| fast(m.codes, m.global_scale, m.cols, &[4]);
        self.fast_up()
            && self.stacks[2].is_fast()
            && self.shared.is_none_or(|expert| [&expert.down].into_iter().chain(&expert.gate_up).all(is_fast))
            && [self.hidden(), self.inner(), self.shared_inner()].iter().all(|cols| cols.is_multiple_of(STEP))
    }

    /// `act` of the jobs of the shared expert, if it is part of the call, and of `count` others: `jobs` has the slots of all
    /// assignments or, with `order`, a list of jobs.
    fn gate_up_tiles(
        &self,
        op: &Experts<'_>,
        [jobs, order]: [Binding; 2],
        count: usize,
        is_list: bool,
        shared: bool,
    ) -> Launch {
        let tokens = op.tokens;
        let none = Binding::read(op.buffers.scores.first(0));
        let shared = self.shared.filter(|_| shared);
        let shared_jobs = shared.map_or(0, |_| tokens.div_ceil(TILE_ROWS));
        let x = Binding::read(op.x.floats(tokens * self.hidden()));
        let act = Binding::read_write(self.act(&op.buffers, tokens));
        let mut bindings = vec![x, jobs, order, act, Binding::table(op.slots.table)];
        bindings.extend(shared.map_or([[none; 3]; 2], |shared| shared.gate_up.map(|m| m.bindings())).concat());
        bindings.push(Binding::no_skip_flag(op.buffers.scores));
        let jobs = shared_jobs + count;
        let (kernel, rows) = up_kernel(jobs);
        let width = if shared.is_some() { self.row() } else { self.inner() };
        let grid = [width.div_ceil(rows), jobs, 1];
        let launch = self.launch(tokens, op.slots, kernel, bindings, grid, 256);
        with_jobs(Launch { skip: SkipUse::Reads, ..launch }, is_list, shared_jobs)
    }
}

impl Experts<'_> {
    /// [`Experts::up`] on matrix units.
    pub fn up_tiles(&self, slots: Region, shared: bool) -> Launch {
        let assignments = self.tokens * self.layer.k;
        let list = Binding::read(slots.floats(assignments));
        self.layer.gate_up_tiles(self, [list; 2], assignments, false, shared)
    }

    /// [`Experts::by_expert`] on matrix units, and `act` of the shared expert if it is part of the call. A job has at most
    /// 32 assignments; see [`Experts::jobs`].
    pub fn by_expert_tiles(&self, jobs: Jobs, shared: bool) -> [Launch; 2] {
        let Self { layer, tokens, .. } = *self;
        let words = jobs.bindings();
        let up = layer.gate_up_tiles(self, words, jobs.count, true, shared);
        let out = Binding::read_write(self.buffers.out.floats(tokens * layer.k * layer.hidden()));
        let mut bindings = vec![Binding::read(layer.act(&self.buffers, tokens)), words[0], words[1], out];
        bindings.extend([Binding::read(self.buffers.scores.first(0)); 3]);
        bindings.extend([Binding::table(self.slots.table), Binding::no_skip_flag(self.buffers.scores)]);
        let grid = [layer.hidden().div_ceil(DOWN_ROWS), jobs.count, 1];
        let down = layer.launch(tokens, self.slots, "moe_down_tiles", bindings, grid, 128);
        [up, with_jobs(Launch { skip: SkipUse::Reads, ..down }, true, 0)]
    }
}

/// Tells a kernel in the last words of its arguments whether its jobs are a list, and the number of jobs of the shared
/// expert's gate and up.
fn with_jobs(mut launch: Launch, is_list: bool, shared_jobs: usize) -> Launch {
    if let Some(words) = launch.args.last_chunk_mut() {
        *words = [is_list.into(), shared_jobs as u32];
    }
    launch
}

impl CombineExperts<'_> {
    /// [`CombineExperts::down`] on matrix units: one launch for one token, two for several.
    pub fn down_tiles(&self, slots: Region) -> Vec<Launch> {
        let layer = self.layer;
        let assignments = self.tokens * layer.k;
        let slots = Binding::read(slots.floats(assignments));
        if self.tokens > 1 || layer.k + 1 > MAX_RANKS {
            return vec![self.results(slots, assignments), self.add_up()];
        }
        let mut bindings = vec![
            Binding::read(layer.act(&self.buffers, self.tokens)),
            Binding::read(self.buffers.weights.floats(layer.k + 1)),
            slots,
            Binding::read_write(self.h.floats(layer.hidden())),
        ];
        bindings.extend(self.shared_down());
        let grid = [layer.hidden().div_ceil(16), 1, 1];
        let launch = layer.launch(1, self.slots, "moe_down_tiles_1", bindings, grid, 32 * (layer.k + 1));
        vec![Launch { skip: SkipUse::Reads, ..launch }]
    }

    /// [`CombineExperts::sum`] on matrix units.
    pub fn sum_tiles(&self) -> Vec<Launch> {
        let none = Binding::read(self.buffers.scores.first(0));
        // Only the shared expert's jobs, which come first and read no slots.
        let shared = self.layer.shared.map(|_| self.results(none, 0));
        shared.into_iter().chain([self.add_up()]).collect()
    }

    /// The results of the shared expert and of the assignments with a slot.
    fn results(&self, slots: Binding, assignments: usize) -> Launch {
        let layer = self.layer;
        let act = Binding::read(layer.act(&self.buffers, self.tokens));
        let out = Binding::read_write(self.buffers.out.floats(layer.assignments(self.tokens) * layer.hidden()));
        let mut bindings = vec![act, slots, slots, out];
        bindings.extend(self.shared_down());
        let grid = [layer.hidden().div_ceil(DOWN_ROWS), self.tokens.div_ceil(MAX_JOB) + assignments, 1];
        let launch = layer.launch(self.tokens, self.slots, "moe_down_tiles", bindings, grid, 128);
        Launch { skip: SkipUse::Reads, ..launch }
    }

    /// Bindings of the shared expert's down matrix, the table of segments and the skip flag.
    pub(super) fn shared_down(&self) -> [Binding; 5] {
        let none = Binding::read(self.buffers.scores.first(0));
        let [codes, scales, biases] = self.layer.shared.map_or([none; 3], |shared| shared.down.bindings());
        [codes, scales, biases, Binding::table(self.slots.table), Binding::no_skip_flag(self.buffers.scores)]
    }

    /// `h[token] += sum over ranks of weight * out`.
    fn add_up(&self) -> Launch {
        let layer = self.layer;
        let routed = self.tokens * layer.k * layer.hidden() * 4;
        let out = self.buffers.out;
        let shared = match layer.shared {
            Some(_) => out.part(routed, self.tokens * layer.hidden() * 4),
            None => out.first(0),
        };
        self.combine(out.first(routed), shared)
    }
}
