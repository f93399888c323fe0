//! The choice of a token on the CPU, for comparison with a GPU. The engine's sampler is another implementation, which
//! adds in f64.

use super::{Sample, TokenChoice};
use crate::{
    device::DeviceError,
    ops::{
        cpu::Cpu,
        logits::{finite, to_weights},
    },
};

impl Sample<'_> {
    pub(in crate::ops) fn on_cpu(&self, cpu: &mut Cpu) -> Result<(), DeviceError> {
        for (row, (place, choice)) in self.rows.iter().enumerate() {
            let id = choose(cpu.memory.floats(self.row(*place)), choice);
            cpu.memory.words_mut(self.ids.rows(row, 1, 1))[0] = id;
        }
        Ok(())
    }
}

/// The id of the chosen token.
fn choose(logits: &[f32], choice: &TokenChoice) -> u32 {
    let TokenChoice { top_k, temperature, top_p, min_p, share } = *choice;
    let mut top: Vec<(f32, u32)> = logits.iter().map(|logit| finite(*logit)).zip(0..).collect();
    top.retain(|(logit, _)| *logit > f32::NEG_INFINITY);
    top.sort_by(|(a, low), (b, high)| b.total_cmp(a).then(low.cmp(high)));
    top.truncate(top_k);
    let mut weights: Vec<f32> = top.iter().map(|(logit, _)| *logit).collect();
    if let Some(&(max, _)) = top.first() {
        to_weights(&mut weights, max, temperature);
    }
    let all: f32 = weights.iter().sum();
    let mut kept = 0.0;
    let mut count = 0;
    while weights.get(count).is_some_and(|weight| *weight >= min_p)
        && (count == 0 || top_p >= 1.0 || kept < all * top_p)
    {
        kept += weights[count];
        count += 1;
    }
    let mut left = kept * share;
    let mut chosen = 0;
    while chosen + 1 < count && left >= weights[chosen] {
        left -= weights[chosen];
        chosen += 1;
    }
    top.get(chosen).map_or(u32::MAX, |(_, id)| *id)
}
