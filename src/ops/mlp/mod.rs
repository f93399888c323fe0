//! The dense feed-forward of the small models: `h += Down(silu(Gate x) * Up x)` with `x = rms(h)`.

use super::{
    Weight,
    cpu::Cpu,
    experts::{self, ExpertView, Job, Rows},
    project::{Norm, Project, normed},
};
use crate::device::{DeviceError, Dispatch, Effect, Region};

#[derive(Debug, Clone, Copy)]
pub struct Mlp<'a> {
    pub tokens: usize,
    /// The norm in front of gate and up.
    pub norm: Norm,
    /// `[I, H]` both.
    pub gate_up: &'a [Weight; 2],
    /// `[H, I]`.
    pub down: &'a Weight,
    /// `[tokens, 2 * I]` and `[tokens, I]`: room.
    pub scores: Region,
    pub act: Region,
    /// `[tokens, H]`: the residual stream.
    pub h: Region,
}

impl Mlp<'_> {
    pub(super) fn touches(&self, see: &mut dyn FnMut(Region, Effect)) {
        let inner = self.tokens * self.down.cols;
        see(self.scores.floats(2 * inner), Effect::Write);
        see(self.act.floats(inner), Effect::Write);
        see(self.h.floats(self.tokens * self.down.rows), Effect::Update);
    }

    pub(super) fn on_cpu(&self, cpu: &mut Cpu) -> Result<(), DeviceError> {
        let (tokens, hidden) = (self.tokens, self.down.rows);
        let Cpu { compute, memory, quantised, scratch } = cpu;
        let [gate, up] = self.gate_up.each_ref().map(|weight| memory.view(weight));
        let expert = ExpertView { gate, up, down: memory.view(self.down) };
        let norm = Norm { keep: None, ..self.norm };
        let (x, _) = normed(compute, memory, self.h, tokens, hidden, Some(norm), &mut scratch.normed);
        scratch.product.resize((tokens * hidden).max(scratch.product.len()), 0.0);
        let out = &mut scratch.product[..tokens * hidden];
        let job = Job { expert, rows: Rows::Each { first: 0, count: tokens } };
        experts::compute(compute, quantised, None, x, hidden, &[job], out, &mut scratch.experts)?;
        let out = &*out;
        compute.threads.run_pieces(memory.floats_mut(self.h.floats(tokens * hidden)), 16 * hidden, &|task, h| {
            for (h, out) in h.iter_mut().zip(&out[task * 16 * hidden..]) {
                *h += out;
            }
        });
        Ok(())
    }

    /// [`Mlp::dispatches`] on matrix units.
    pub(super) fn halves(&self, room: Region) -> Vec<Dispatch> {
        let (gate_up, act, down) = self.steps();
        [&gate_up.halves(room)[..], &[act], &down.halves(room)].concat()
    }

    /// Gate and up; their activation; down, added to `h`.
    pub fn dispatches(&self) -> [Dispatch; 3] {
        let (gate_up, act, down) = self.steps();
        [gate_up.dispatch(), act, down.dispatch()]
    }

    fn steps(&self) -> (Project<'_>, Dispatch, Project<'_>) {
        let Self { tokens, norm, gate_up, down, scores, act, h } = *self;
        let inner = down.cols;
        (
            Project { x: h, tokens, norm: Some(norm), matrices: gate_up, y: scores, add: false },
            experts::swiglu(tokens, inner, scores, 2 * inner, 0, act),
            Project { x: act, tokens, norm: None, matrices: std::slice::from_ref(down), y: h, add: true },
        )
    }
}
