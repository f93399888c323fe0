//! The experts in their slots: `kernels/experts.metal`.

use super::{Binding, Codes, Dispatch, Matrix, Region, fast, floats, matrix_words};

/// One projection of an expert, and where its codes, scales and biases start in a slot (bytes, multiples of 16).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Piece {
    pub codes: Codes,
    pub rows: usize,
    pub cols: usize,
    pub gain: f32,
    pub at: [usize; 3],
}

/// The memory experts are in: up to four slabs of `per_slab` slots of `stride` bytes.
#[derive(Debug, Clone, PartialEq)]
pub struct Slots {
    pub slabs: Vec<Region>,
    pub per_slab: usize,
    pub stride: usize,
}

/// A layer's mixture, for `tokens` rows. A place is a chosen expert of a token: `token * k + rank`.
#[derive(Debug, Clone)]
pub struct Experts<'a> {
    pub tokens: usize,
    pub k: usize,
    pub gate: Piece,
    pub up: Piece,
    pub down: Piece,
    pub slots: &'a Slots,
    /// The shared expert's down projection.
    pub shared: Option<Matrix>,
    /// `[tokens, width]` f32: the projections beside the router's scores; the shared expert's gate, then up, start at `shared_at`.
    pub scores: Region,
    pub width: usize,
    pub shared_at: usize,
    /// `[tokens * k + tokens, row]` f32, `row` being the larger of the two widths.
    pub act: Region,
    /// `[tokens, k + 1]` f32: a weight for each rank, the shared expert's last.
    pub weights: Region,
}

/// Places grouped by expert: `count` jobs of three words `{slot, first, count}`, and the places they name in order.
#[derive(Debug, Clone, Copy)]
pub struct Jobs {
    pub count: usize,
    pub jobs: Region,
    pub order: Region,
}

impl Experts<'_> {
    fn hidden(&self) -> usize {
        self.gate.cols
    }

    fn inner(&self) -> usize {
        self.gate.rows
    }

    fn shared_inner(&self) -> usize {
        self.shared.map_or(0, |m| m.cols)
    }

    /// Floats in a row of `act`.
    pub fn row(&self) -> usize {
        self.inner().max(self.shared_inner())
    }

    fn args(&self) -> Vec<u32> {
        let mut args = vec![self.hidden(), self.inner(), self.k, self.tokens, self.shared_inner(), self.row()];
        args.extend([self.width, self.shared_at, self.slots.stride / 16, self.slots.per_slab]);
        for piece in [&self.gate, &self.up, &self.down] {
            args.extend(piece.at.map(|at| at / 16));
        }
        let mut args: Vec<u32> = args.into_iter().map(|word| word as u32).collect();
        for piece in [&self.gate, &self.up, &self.down] {
            args.extend(matrix_words(piece.codes, piece.rows, piece.gain));
        }
        let shared = self.shared.map_or([0; 5], |m| m.words());
        args.extend(shared);
        args
    }

    fn slabs(&self) -> impl Iterator<Item = Binding> {
        let slabs = &self.slots.slabs;
        (0..4).map(|i| Binding::read(slabs[i.min(slabs.len() - 1)]))
    }

    fn fast_up(&self) -> bool {
        [&self.gate, &self.up].iter().all(|p| fast(p.codes, p.gain, p.cols, &[4]))
    }

    fn fast_down(&self) -> bool {
        fast(self.down.codes, self.down.gain, self.down.cols, &[4])
    }

    fn act(&self) -> Region {
        floats(self.act, (self.tokens * self.k + self.tokens) * self.row())
    }

    fn launch(&self, kernel: &'static str, bindings: Vec<Binding>, grid: [usize; 3], threads: usize) -> Dispatch {
        Dispatch { kernel, args: self.args(), bindings, grid: grid.map(|n| n as u32), threads: threads as u32 }
    }
}

/// `act[place] = silu(gate x) * (up x)` for every place with a slot in `slots` `[tokens * k]`; with `shared`, the shared
/// expert's activation too. `x` is `[tokens, hidden]`, normed. Hits and misses may be two launches: hence `act` is updated.
pub fn experts_up(op: &Experts, x: Region, slots: Region, shared: bool) -> Dispatch {
    let places = op.tokens * op.k;
    let extra = usize::from(shared && op.shared.is_some());
    let mut bindings = vec![
        Binding::read(floats(x, op.tokens * op.hidden())),
        Binding::read(floats(op.scores, op.tokens * op.width)),
        Binding::read(slots.first(places * 4)),
        Binding::update(op.act()),
    ];
    bindings.extend(op.slabs());
    let kernel = if op.fast_up() { "experts_up" } else { "experts_up_any" };
    op.launch(kernel, bindings, [op.inner().div_ceil(8), op.k + extra, op.tokens], 128)
}

/// `h[token] += sum over ranks of weight * down act`, the shared expert last. `h` is `[tokens, hidden]`.
pub fn experts_down(op: &Experts, slots: Region, h: Region) -> Dispatch {
    let none = op.scores.first(0);
    let mut bindings = vec![
        Binding::read(op.act()),
        Binding::read(floats(op.weights, op.tokens * (op.k + 1))),
        Binding::read(slots.first(op.tokens * op.k * 4)),
        Binding::update(floats(h, op.tokens * op.hidden())),
    ];
    bindings.extend(op.shared.map_or([Binding::read(none); 3], |m| m.bindings()));
    bindings.extend(op.slabs());
    let fast = op.fast_down() && op.shared.is_none_or(|m| fast(m.codes, m.gain, m.cols, &[4]));
    let kernel = if fast { "experts_down" } else { "experts_down_any" };
    op.launch(kernel, bindings, [op.hidden().div_ceil(16), op.tokens, 1], 32 * (op.k + 1))
}

/// [`experts_up`] for places grouped by expert; the shared expert's activation is [`swiglu`]'s business.
pub fn experts_up_rows(op: &Experts, x: Region, jobs: Jobs) -> Dispatch {
    let mut bindings = vec![
        Binding::read(floats(x, op.tokens * op.hidden())),
        Binding::read(jobs.jobs.first(jobs.count * 12)),
        Binding::read(jobs.order),
        Binding::update(op.act()),
    ];
    bindings.extend(op.slabs());
    let kernel = if op.fast_up() { "experts_up_rows" } else { "experts_up_rows_any" };
    op.launch(kernel, bindings, [op.inner().div_ceil(8), jobs.count, 1], 128)
}

/// `out[place] = down act`, unweighted, for places grouped by expert. `out` is `[tokens * k, hidden]`.
pub fn experts_down_rows(op: &Experts, jobs: Jobs, out: Region) -> Dispatch {
    let mut bindings = vec![
        Binding::read(op.act()),
        Binding::read(jobs.jobs.first(jobs.count * 12)),
        Binding::read(jobs.order),
        Binding::update(floats(out, op.tokens * op.k * op.hidden())),
    ];
    bindings.extend(op.slabs());
    let kernel = if op.fast_down() { "experts_down_rows" } else { "experts_down_rows_any" };
    op.launch(kernel, bindings, [op.hidden().div_ceil(16), jobs.count, 1], 128)
}

/// `h[token] += sum over ranks of weight * out[place]`, then the shared expert's rows `[tokens, hidden]`.
pub fn experts_combine(op: &Experts, out: Region, shared: Region, h: Region) -> Dispatch {
    let hidden = op.tokens * op.hidden();
    let bindings = vec![
        Binding::read(floats(out, op.k * hidden)),
        Binding::read(if op.shared.is_some() { floats(shared, hidden) } else { out.first(0) }),
        Binding::read(floats(op.weights, op.tokens * (op.k + 1))),
        Binding::update(floats(h, hidden)),
    ];
    op.launch("experts_combine", bindings, [op.hidden().div_ceil(128), op.tokens, 1], 128)
}

/// `act = silu(gate) * up`, `[tokens, inner]`, of rows of `width` floats in which `inner` gates, then `inner` ups, start
/// at `at`: a dense feed-forward, or the shared expert on its own.
pub fn swiglu(tokens: usize, inner: usize, scores: Region, width: usize, at: usize, act: Region) -> Dispatch {
    Dispatch {
        kernel: "swiglu",
        args: [inner, width, at].map(|w| w as u32).to_vec(),
        bindings: vec![Binding::read(floats(scores, tokens * width)), Binding::write(floats(act, tokens * inner))],
        grid: [inner.div_ceil(128) as u32, tokens as u32, 1],
        threads: 128,
    }
}
