//! The dense feed-forward on the CPU.

use super::Mlp;
use crate::{
    device::DeviceError,
    ops::{
        cpu::Cpu,
        experts::{self, ExpertJob, ExpertView, JobRows},
        linear::{Norm, normed},
    },
};

impl Mlp<'_> {
    pub(in crate::ops) fn on_cpu(&self, cpu: &mut Cpu) -> Result<(), DeviceError> {
        let tokens = self.tokens;
        let hidden = self.down.rows;
        let Cpu { compute, memory, quantized, scratch } = cpu;
        let [gate, up] = self.gate_up.each_ref().map(|weight| memory.view(weight));
        let expert = ExpertView { gate, up, down: memory.view(self.down) };
        let norm = Norm { keep: None, ..self.norm };
        let (x, _) = normed(compute, memory, self.h, tokens, hidden, Some(norm), &mut scratch.normed);
        scratch.product.resize((tokens * hidden).max(scratch.product.len()), 0.0);
        let out = &mut scratch.product[..tokens * hidden];
        let job = ExpertJob { expert, rows: JobRows::Each { first: 0, count: tokens } };
        experts::compute(compute, quantized, None, x, hidden, &[job], out, &mut scratch.experts)?;
        let out = &*out;
        compute.threads.run_pieces(memory.floats_mut(self.h.floats(tokens * hidden)), 16 * hidden, &|task, h| {
            for (h, out) in h.iter_mut().zip(&out[task * 16 * hidden..]) {
                *h += out;
            }
        });
        Ok(())
    }
}
