//! Experts on a GPU (`kernels/moe.metal`). All experts of a layer have the same layout in their slots and the same
//! global scale. Loading refuses a layer that the kernels cannot compute.

use super::{CombineExperts, ExpertSlots, ExpertStack, Experts, MoeBuffers, MoeWeights};
use crate::{
    device::{Binding, Launch, Region, SkipUse},
    ops::{
        Linear,
        linear::{HalfBuffers, HalfRows},
        quant::{fast, matrix_words},
    },
};

/// Maximum number of assignments of a job on matrix units.
const JOB: usize = 32;

/// Assignments grouped by expert. `jobs` holds `count` jobs of three words `{slot, first, count}`. The assignments of a
/// job are `order[first..first + count]`.
#[derive(Debug, Clone, Copy)]
pub struct Jobs {
    pub count: usize,
    pub jobs: Region,
    pub order: Region,
}

impl Jobs {
    pub(super) fn bindings(&self) -> [Binding; 2] {
        [self.jobs.floats(self.count * 3), self.order].map(Binding::indices)
    }
}

impl ExpertStack {
    /// True if the kernels have a fast path for the format of these experts.
    pub(super) fn is_fast(&self) -> bool {
        fast(self.codes, self.global_scale(), self.cols, &[4])
    }

    fn global_scale(&self) -> f32 {
        self.global_scales.first().copied().unwrap_or(1.0)
    }
}

impl MoeWeights {
    fn args(&self, tokens: usize, slots: &ExpertSlots) -> Vec<u32> {
        let mut args = vec![0, self.hidden(), self.inner(), self.k, tokens, self.shared_inner(), self.row()];
        args.extend([self.width(), self.router.rows, slots.stride / 16]);
        args.extend([slots.per_segment.trailing_zeros() as usize, slots.count()]);
        for stack in &self.stacks {
            args.extend(stack.at.first().copied().unwrap_or_default().map(|at| at / 16));
        }
        let mut args: Vec<u32> = args.into_iter().map(|word| word as u32).collect();
        for stack in &self.stacks {
            args.extend(matrix_words(stack.codes, stack.rows, stack.global_scale()));
        }
        args.extend(self.shared.map_or([0; 5], |shared| shared.down.words()));
        args.extend([0, 0]);
        args
    }

    /// The kernel of [`CombineExperts::down`], and its threads per threadgroup: a simdgroup for each expert of a token.
    pub fn threads(&self) -> (&'static str, u32) {
        let shared = self.shared.map(|shared| shared.down);
        let is_fast = self.stacks[2].is_fast() && shared.is_none_or(|m| fast(m.codes, m.global_scale, m.cols, &[4]));
        (if is_fast { "moe_down" } else { "moe_down_any" }, 32 * (self.k as u32 + 1))
    }

    pub(super) fn fast_up(&self) -> bool {
        self.stacks[..2].iter().all(ExpertStack::is_fast)
    }

    pub(super) fn act(&self, buffers: &MoeBuffers, tokens: usize) -> Region {
        buffers.act.floats(self.assignments(tokens) * self.row())
    }

    pub(super) fn launch(
        &self,
        tokens: usize,
        slots: &ExpertSlots,
        kernel: &'static str,
        bindings: Vec<Binding>,
        grid: [usize; 3],
        threads: usize,
    ) -> Launch {
        let args = self.args(tokens, slots);
        Launch { kernel, args, bindings, grid: grid.map(|n| n as u32), threads: threads as u32, skip: SkipUse::None }
    }
}

impl Experts<'_> {
    /// `act[assignment] = silu(gate x) * (up x)` for every assignment with a slot in `slots` (`[tokens * k]`). If
    /// `shared` is true, the launch also computes the shared expert's activation. Several calls may fill `act`, so the
    /// launch binds `act` for reading and writing.
    pub fn up(&self, slots: Region, shared: bool) -> Launch {
        let layer = self.layer;
        let tokens = self.tokens;
        let extra = usize::from(shared && layer.shared.is_some());
        let mut bindings = vec![
            Binding::read(self.x.floats(tokens * layer.hidden())),
            Binding::read(self.buffers.scores.floats(tokens * layer.width())),
            Binding::read(slots.floats(tokens * layer.k)),
            Binding::read_write(layer.act(&self.buffers, tokens)),
        ];
        bindings.extend([Binding::table(self.slots.table), Binding::no_skip_flag(self.x)]);
        let kernel = if layer.fast_up() { "moe_gate_up" } else { "moe_gate_up_any" };
        let grid = [layer.inner().div_ceil(8), layer.k + extra, tokens];
        Launch { skip: SkipUse::Reads, ..layer.launch(tokens, self.slots, kernel, bindings, grid, 128) }
    }

    /// Computes assignments grouped by expert: first `act` as in [`Experts::up`], then `out[assignment] = down act`.
    /// Leaves out the shared expert and the router's weights.
    pub fn by_expert(&self, jobs: Jobs) -> [Launch; 2] {
        let layer = self.layer;
        let tokens = self.tokens;
        let act = layer.act(&self.buffers, tokens);
        let words = jobs.bindings();
        let mut up = vec![Binding::read(self.x.floats(tokens * layer.hidden())), words[0], words[1]];
        up.push(Binding::read_write(act));
        up.push(Binding::table(self.slots.table));
        let kernel = if layer.fast_up() { "moe_gate_up_grouped" } else { "moe_gate_up_grouped_any" };
        let grid = [layer.inner().div_ceil(8), jobs.count, 1];
        let up = layer.launch(tokens, self.slots, kernel, up, grid, 128);
        let mut down = vec![Binding::read(act), words[0], words[1]];
        down.push(Binding::read_write(self.buffers.out.floats(tokens * layer.k * layer.hidden())));
        down.push(Binding::table(self.slots.table));
        let kernel = if layer.stacks[2].is_fast() { "moe_down_grouped" } else { "moe_down_grouped_any" };
        let grid = [layer.hidden().div_ceil(16), jobs.count, 1];
        [up, layer.launch(tokens, self.slots, kernel, down, grid, 128)]
    }

    /// Splits a group `[slot, first, count]` into jobs for [`Experts::half_launches`].
    pub fn jobs(slot: u32, first: u32, count: u32) -> impl Iterator<Item = [u32; 3]> {
        (first..first + count).step_by(JOB).map(move |from| [slot, from, (first + count - from).min(JOB as u32)])
    }

    /// [`Experts::by_expert`] in half precision on matrix units.
    pub fn half_launches(&self, jobs: Jobs, buffers: HalfBuffers) -> [Launch; 4] {
        let layer = self.layer;
        let tokens = self.tokens;
        let hidden = layer.hidden();
        let inner = layer.inner();
        let row = layer.row();
        let assignments = tokens * layer.k;
        let count = jobs.order.len / 4;
        let x = HalfRows::new(buffers.x, tokens, hidden);
        let halves = HalfRows::new(buffers.act, assignments, inner);
        let act = layer.act(&self.buffers, tokens);
        let launch = |from: &HalfRows, to: Region, kernel, width: usize| {
            let mut bindings = from.bindings().to_vec();
            bindings.extend(jobs.bindings());
            bindings.push(Binding::read_write(to));
            bindings.push(Binding::table(self.slots.table));
            layer.launch(tokens, self.slots, kernel, bindings, [width, jobs.count, 1], 128)
        };
        let up = if layer.fast_up() { "moe_gate_up_gemm" } else { "moe_gate_up_gemm_any" };
        let down = if layer.stacks[2].is_fast() { "moe_down_gemm" } else { "moe_down_gemm_any" };
        [
            x.fill(self.x, hidden, None),
            launch(&x, act, up, inner.div_ceil(32)),
            halves.fill_some(act, row, jobs.order, count),
            launch(&halves, self.buffers.out.floats(assignments * hidden), down, hidden.div_ceil(64)),
        ]
    }
}

impl CombineExperts<'_> {
    /// `h[token] += sum over ranks of weight * down act`, the shared expert last, for assignments that are
    /// computed one by one.
    pub fn down(&self, slots: Region) -> Launch {
        let layer = self.layer;
        let tokens = self.tokens;
        let buffers = &self.buffers;
        let mut bindings = vec![
            Binding::read(layer.act(buffers, tokens)),
            Binding::read(buffers.weights.floats(tokens * (layer.k + 1))),
            Binding::read(slots.floats(tokens * layer.k)),
            Binding::read_write(self.h.floats(tokens * layer.hidden())),
        ];
        bindings.extend(self.shared_down());
        let (kernel, threads) = layer.threads();
        let grid = [layer.hidden().div_ceil(8), tokens, 1];
        Launch { skip: SkipUse::Reads, ..layer.launch(tokens, self.slots, kernel, bindings, grid, threads as usize) }
    }

    /// For assignments grouped by expert: computes the shared expert (on matrix units if `half` is given), then adds up
    /// the results of all ranks.
    pub fn sum(&self, half: Option<HalfBuffers>) -> Vec<Launch> {
        let layer = self.layer;
        let tokens = self.tokens;
        let buffers = &self.buffers;
        let hidden = layer.hidden();
        let inner = layer.shared_inner();
        let routed = tokens * layer.k;
        let out = buffers.out.floats(routed * hidden);
        let mut launches = Vec::with_capacity(3);
        let mut shared = out.first(0);
        if let Some(expert) = &layer.shared {
            let act = buffers.act.part(routed * layer.row() * 4, tokens * inner * 4);
            let y = buffers.out.part(routed * hidden * 4, tokens * hidden * 4);
            launches.push(swiglu(tokens, inner, buffers.scores, layer.width(), layer.router.rows, act));
            let matrices = std::slice::from_ref(&expert.down);
            let down = Linear { x: act, tokens, norm: None, matrices, y, add: false };
            match half {
                Some(half) => launches.extend(down.half_launches(half)),
                // Not split, since its sums must equal those of `moe_down`.
                None => launches.push(down.launch_into(hidden)),
            }
            shared = y;
        }
        launches.push(self.combine(out, shared));
        launches
    }

    /// `h[token] += sum over ranks of weight * result`. `shared` has the shared expert's results.
    pub(super) fn combine(&self, out: Region, shared: Region) -> Launch {
        let layer = self.layer;
        let tokens = self.tokens;
        let hidden = layer.hidden();
        let bindings = vec![
            Binding::read(out),
            Binding::read(shared),
            Binding::read(self.buffers.weights.floats(tokens * (layer.k + 1))),
            Binding::read_write(self.h.floats(tokens * hidden)),
            Binding::no_skip_flag(out),
        ];
        let grid = [hidden.div_ceil(128), tokens, 1];
        Launch { skip: SkipUse::Reads, ..layer.launch(tokens, self.slots, "moe_combine", bindings, grid, 128) }
    }
}

/// `act = silu(gate) * up`, `[tokens, inner]`. A row has `width` floats; `inner` gates and then `inner` ups start
/// at column `at`. For a dense feed-forward or the shared expert.
pub fn swiglu(tokens: usize, inner: usize, scores: Region, width: usize, at: usize, act: Region) -> Launch {
    Launch {
        kernel: "swiglu",
        args: [inner, width, at].map(|w| w as u32).to_vec(),
        bindings: vec![Binding::read(scores.floats(tokens * width)), Binding::write(act.floats(tokens * inner))],
        grid: [inner.div_ceil(128) as u32, tokens as u32, 1],
        threads: 128,
        skip: SkipUse::None,
    }
}
