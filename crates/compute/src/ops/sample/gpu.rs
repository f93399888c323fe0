//! The choice of a token on a GPU: the likeliest tokens of each block of logits, those of all blocks, and one of them.

use super::{BLOCK, Sample, TokenChoice};
use crate::device::{Binding, Launch, Region, SkipUse};

/// The `k` largest of each block of `values`, with their ids. `ids` are the ids of `values`, if these are not indices.
fn top_k(values: Region, ids: Option<Region>, k: usize, [top, top_ids]: [Region; 2]) -> Launch {
    let count = values.len / 4;
    Launch {
        kernel: "top_k",
        args: vec![count as u32, k as u32, ids.is_some().into()],
        bindings: vec![
            Binding::read(values),
            Binding::read(ids.unwrap_or(values)),
            Binding::write(top),
            Binding::write(top_ids),
        ],
        grid: [count.div_ceil(BLOCK) as u32, 1, 1],
        threads: 256,
        skip: SkipUse::None,
    }
}

impl Sample {
    pub(in crate::ops) fn launches(&self) -> impl Iterator<Item = Launch> {
        let TokenChoice { top_k: k, temperature, top_p, min_p, share } = self.choice;
        let candidates = k * self.count.div_ceil(BLOCK);
        let words = |from: usize, count: usize| self.scratch.part(from * 4, count * 4);
        let of_blocks = [words(0, candidates), words(candidates, candidates)];
        let [top, mut top_ids] = [words(2 * candidates, k), words(2 * candidates + k, k)];
        if k == 1 {
            top_ids = self.id.floats(1);
        }
        let sample = Launch {
            kernel: "sample",
            args: [k as u32].into_iter().chain([temperature, top_p, min_p, share].map(f32::to_bits)).collect(),
            bindings: vec![Binding::read(top), Binding::read(top_ids), Binding::write(self.id.floats(1))],
            grid: [1, 1, 1],
            threads: 32,
            skip: SkipUse::None,
        };
        let logits = self.logits.floats(self.count);
        let first = [top_k(logits, None, k, of_blocks), top_k(of_blocks[0], Some(of_blocks[1]), k, [top, top_ids])];
        first.into_iter().chain((k > 1).then_some(sample))
    }
}
