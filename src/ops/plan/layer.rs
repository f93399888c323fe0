//! One layer as launches: a mixer (five), then a mixture of experts (four, or five when some must be read first).

use super::*;

/// A layer's weights.
#[derive(Debug, Clone)]
pub struct Layer {
    /// `[hidden]` f32, in front of the mixer.
    pub norm: Region,
    pub mixer: Mixer,
    /// `[hidden]` f32, in front of the feed-forward.
    pub post_norm: Region,
    pub ffn: Ffn,
}

#[derive(Debug, Clone)]
pub enum Mixer {
    Delta {
        op: Delta,
        /// `q k v | z | b | a`.
        project: Vec<Matrix>,
        taps: Region,
        decay: Decay,
        norm: Region,
        out: Matrix,
    },
    Attend {
        op: Attend,
        /// `(query, gate) of each head | keys | values`.
        project: Vec<Matrix>,
        q_norm: Region,
        k_norm: Region,
        out: Matrix,
    },
}

// One a layer: its size does not matter.
#[allow(clippy::large_enum_variant)]
#[derive(Debug, Clone)]
pub enum Ffn {
    Moe(Mixture),
    /// Gate and up, then down.
    Dense([Matrix; 3]),
}

#[derive(Debug, Clone)]
pub struct Mixture {
    pub k: usize,
    pub renormalise: bool,
    pub router: Matrix,
    /// The shared expert: gate, up, down, and the gate of its result.
    pub shared: Option<[Matrix; 4]>,
    pub gate: Piece,
    pub up: Piece,
    pub down: Piece,
    /// Each expert's slot, `[experts]`: only read where every expert has one.
    pub table: Region,
}

/// What one sequence remembers of a layer.
#[derive(Debug, Clone, Copy)]
pub enum Memory {
    /// `[3, channels]` and `[value_heads, dv, dk]`, f32.
    Delta {
        conv: Region,
        heads: Region,
    },
    Attend(Cache),
}

/// Room for what a layer computes on its way, for up to `rows` rows; every layer uses the same.
#[derive(Debug, Clone, Copy)]
pub struct Scratch {
    pub rows: usize,
    /// `[rows, hidden]`: the residual stream.
    pub h: Region,
    /// `[rows, hidden]`: its norm, as the experts see it.
    pub normed: Region,
    pub proj: Region,
    pub mixed: Region,
    pub out: Region,
    pub y: Region,
    pub parts: Region,
    pub scores: Region,
    pub act: Region,
    /// `[rows * k]` each: what the router chose; where it lies if all of it is in memory.
    pub ids: Region,
    pub slots: Region,
    pub weights: Region,
    /// `[rows * k]` each, written by the CPU: slots of what was there, of what had to be read, of all.
    pub hits: Region,
    pub misses: Region,
    pub places: Region,
    /// `[rows, rotary / 2, (cos, sin)]`, written by the CPU.
    pub turn: Region,
}

/// Attention scratch is kept below this (bytes) by looking at fewer rows at once.
pub const PARTS: usize = 64 << 20;
/// Rows whose attention one launch computes at most.
pub const TOGETHER: usize = 16;

impl Scratch {
    /// Takes each buffer from `allocate` (bytes). `rows` is the most rows one launch will see.
    pub fn new<E>(
        layers: &[Layer],
        hidden: usize,
        rows: usize,
        mut allocate: impl FnMut(usize) -> Result<Region, E>,
    ) -> Result<Self, E> {
        let [mut proj, mut mixed, mut out, mut y, mut parts, mut scores, mut act, mut k, mut turn] = [1; 9];
        for layer in layers {
            match &layer.mixer {
                Mixer::Delta { op, .. } => {
                    proj = proj.max(op.width());
                    mixed = mixed.max(op.channels());
                    (out, y) = (out.max(op.values()), y.max(op.values()));
                }
                Mixer::Attend { op, .. } => {
                    proj = proj.max(op.width());
                    (out, y) = (out.max(op.heads * op.dim), y.max(op.heads * op.dim));
                    let at_once = attend_rows(op, op.context);
                    parts = parts.max(op.scratch(op.context - at_once.min(op.context), at_once.min(op.context)));
                    turn = turn.max(op.rotary);
                }
            }
            match &layer.ffn {
                Ffn::Dense([gate, ..]) => (scores, act) = (scores.max(2 * gate.rows), act.max(gate.rows)),
                Ffn::Moe(moe) => {
                    scores = scores.max(moe.width());
                    act = act.max((moe.k + 1) * moe.gate.rows.max(moe.shared_inner()));
                    k = k.max(moe.k);
                }
            }
        }
        let mut take = |floats: usize| allocate(floats * 4);
        Ok(Self {
            rows,
            h: take(rows * hidden)?,
            normed: take(rows * hidden)?,
            proj: take(rows * proj)?,
            mixed: take(rows * mixed)?,
            out: take(rows * out)?,
            y: take(rows * y)?,
            parts: take(parts)?,
            scores: take(rows * scores)?,
            act: take(rows * act)?,
            ids: take(rows * k)?,
            slots: take(rows * k)?,
            weights: take(rows * (k + 1))?,
            hits: take(rows * k)?,
            misses: take(rows * k)?,
            places: take(rows * k)?,
            turn: take(rows * turn)?,
        })
    }
}

/// Rows whose attention is computed in one launch when the cache holds `positions`.
fn attend_rows(op: &Attend, positions: usize) -> usize {
    (PARTS / (op.scratch(positions.saturating_sub(1), 1) * 4)).clamp(1, TOGETHER)
}

impl Mixture {
    fn shared_inner(&self) -> usize {
        self.shared.map_or(0, |shared| shared[2].cols)
    }

    /// Floats in a row of `router | shared gate | shared up | gate of the shared result`.
    pub fn width(&self) -> usize {
        self.router.rows + self.shared.map_or(0, |_| 2 * self.shared_inner() + 1)
    }

    fn op<'a>(&self, tokens: usize, slots: &'a Slots, scratch: &Scratch) -> Experts<'a> {
        Experts {
            tokens,
            k: self.k,
            gate: self.gate,
            up: self.up,
            down: self.down,
            slots,
            shared: self.shared.map(|shared| shared[2]),
            scores: scratch.scores,
            width: self.width(),
            shared_at: self.router.rows,
            act: scratch.act,
            weights: scratch.weights,
        }
    }

    /// Which slots the places of `tokens` rows are in was decided on the GPU: nobody need wait.
    pub fn resident(&self, tokens: usize, slots: &Slots, s: &Scratch) -> [Dispatch; 2] {
        let op = self.op(tokens, slots, s);
        [experts_up(&op, s.normed, s.slots, true), experts_down(&op, s.slots, s.h)]
    }

    /// What can run while experts are being read: those that were there (`hits`), and the shared one.
    pub fn early(&self, tokens: usize, slots: &Slots, s: &Scratch) -> Dispatch {
        experts_up(&self.op(tokens, slots, s), s.normed, s.hits, true)
    }

    /// The experts that had to be read (`misses`).
    pub fn late(&self, tokens: usize, slots: &Slots, s: &Scratch) -> Dispatch {
        experts_up(&self.op(tokens, slots, s), s.normed, s.misses, false)
    }

    /// A batch of places grouped by expert: their results, unweighted, to `out`.
    pub fn batch(&self, tokens: usize, slots: &Slots, s: &Scratch, jobs: Jobs, out: Region) -> [Dispatch; 2] {
        let op = self.op(tokens, slots, s);
        [experts_up_rows(&op, s.normed, jobs), experts_down_rows(&op, jobs, out)]
    }

    /// After all batches: the shared expert (`act` and `shared` are room for it), and the sum over ranks.
    pub fn combine(
        &self,
        tokens: usize,
        slots: &Slots,
        s: &Scratch,
        out: Region,
        act: Region,
        shared: Region,
    ) -> Vec<Dispatch> {
        let op = self.op(tokens, slots, s);
        let mut launches = Vec::with_capacity(3);
        if let Some([_, _, down, _]) = &self.shared {
            launches.push(swiglu(tokens, self.shared_inner(), s.scores, self.width(), self.router.rows, act));
            let matrices = std::slice::from_ref(down);
            launches.push(linear(&Linear { x: act, tokens, norm: None, matrices, y: shared, add: false }));
        }
        launches.push(experts_combine(&op, out, shared, s.h));
        launches
    }

    /// All `places` together: the layer's result, added to the residual stream.
    pub fn join(&self, tokens: usize, slots: &Slots, s: &Scratch) -> Dispatch {
        experts_down(&self.op(tokens, slots, s), s.places, s.h)
    }
}

impl Layer {
    /// `h += mixer(rms(h))` for `tokens` rows from position `start`.
    pub fn mix(&self, memory: &Memory, eps: f32, start: usize, tokens: usize, s: &Scratch) -> Vec<Dispatch> {
        let norm = Some(Norm { weight: self.norm, eps, keep: None });
        let project = |matrices| linear(&Linear { x: s.h, tokens, norm, matrices, y: s.proj, add: false });
        let back = |out: &Matrix| {
            let matrices = std::slice::from_ref(out);
            linear(&Linear { x: s.y, tokens, norm: None, matrices, y: s.h, add: true })
        };
        match (&self.mixer, memory) {
            (Mixer::Delta { op, project: matrices, taps, decay, norm, out }, Memory::Delta { conv: state, heads }) => {
                vec![
                    project(matrices),
                    conv(op, tokens, s.proj, *taps, *state, s.mixed),
                    delta(op, tokens, s.proj, s.mixed, *decay, *heads, s.out),
                    gated_norm(op, tokens, s.out, s.proj, *norm, s.y),
                    back(out),
                ]
            }
            (Mixer::Attend { op, project: matrices, q_norm, k_norm, out }, Memory::Attend(cache)) => {
                let turn = Turn { q_norm: *q_norm, k_norm: *k_norm, turn: s.turn };
                let mut launches =
                    vec![project(matrices), attend_place(op, start, tokens, s.proj, turn, s.out, *cache)];
                let at_once = attend_rows(op, start + tokens);
                for first in (0..tokens).step_by(at_once) {
                    let (at, n) = (start + first, at_once.min(tokens - first));
                    let rows = |region: Region, width: usize| region.part(first * width * 4, n * width * 4);
                    let (q, y) = (rows(s.out, op.heads * op.dim), rows(s.y, op.heads * op.dim));
                    launches.push(attend(op, at, n, q, *cache, s.parts));
                    launches.push(attend_join(op, at, n, rows(s.proj, op.width()), s.parts, y));
                }
                launches.push(back(out));
                launches
            }
            _ => panic!("the memory belongs to another layer"),
        }
    }

    /// The router's choice for a mixture; a dense feed-forward is done with this.
    pub fn choose(&self, eps: f32, tokens: usize, s: &Scratch) -> Vec<Dispatch> {
        let norm = |keep| Some(Norm { weight: self.post_norm, eps, keep });
        match &self.ffn {
            Ffn::Moe(moe) => {
                let mut matrices = vec![moe.router];
                matrices.extend(moe.shared.into_iter().flat_map(|[gate, up, _, result]| [gate, up, result]));
                let op = Route {
                    experts: moe.router.rows,
                    k: moe.k,
                    width: moe.width(),
                    gate_at: moe.shared.map(|_| moe.width() - 1),
                    renormalise: moe.renormalise,
                };
                let to = Chosen { ids: s.ids, slots: s.slots, weights: s.weights };
                let matrices = &matrices;
                let keep = norm(Some(s.normed));
                vec![
                    linear(&Linear { x: s.h, tokens, norm: keep, matrices, y: s.scores, add: false }),
                    route(&op, tokens, s.scores, moe.table, to),
                ]
            }
            Ffn::Dense([gate, up, down]) => vec![
                linear(&Linear { x: s.h, tokens, norm: norm(None), matrices: &[*gate, *up], y: s.scores, add: false }),
                swiglu(tokens, gate.rows, s.scores, 2 * gate.rows, 0, s.act),
                linear(&Linear { x: s.act, tokens, norm: None, matrices: &[*down], y: s.h, add: true }),
            ],
        }
    }
}
