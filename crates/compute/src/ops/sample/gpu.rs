//! The choice of tokens on a GPU: for each row, the likeliest tokens of each block of logits, those of all blocks, and one
//! of them.

use super::{BLOCK, MAX_ROWS, Sample, max_top_k};
use crate::device::{Binding, Launch, Region, SkipUse};

/// Rows of values for `top_k`.
struct TopRows {
    values: Region,
    /// The ids of the values, if these are not indices.
    ids: Option<Region>,
    /// Number of values of each row.
    count: usize,
    /// Number of values from one place to the next, and the place of each row.
    stride: usize,
    places: Vec<usize>,
}

impl TopRows {
    /// The `k` largest values of each block of each row, with their ids.
    fn launch(&self, k: usize, [top, top_ids]: [Region; 2]) -> Launch {
        let sizes = [self.count, k, self.ids.is_some().into(), self.stride];
        let places = self.places.iter().copied().chain(std::iter::repeat(0)).take(MAX_ROWS);
        Launch {
            kernel: "top_k",
            args: sizes.into_iter().chain(places).map(|word| word as u32).collect(),
            bindings: vec![
                Binding::read(self.values),
                Binding::read(self.ids.unwrap_or(self.values)),
                Binding::write(top),
                Binding::write(top_ids),
            ],
            grid: [self.count.div_ceil(BLOCK) as u32, self.places.len() as u32, 1],
            threads: 256,
            skip: SkipUse::None,
        }
    }
}

impl Sample<'_> {
    pub(in crate::ops) fn launches(&self) -> impl Iterator<Item = Launch> {
        let Self { rows, count, stride, logits, scratch, ids } = *self;
        let k = max_top_k(rows);
        let candidates = k * count.div_ceil(BLOCK);
        let [all, kept] = [candidates, k].map(|each| each * rows.len());
        let words = |from: usize, count: usize| scratch.part(from * 4, count * 4);
        let of_blocks = [words(0, all), words(all, all)];
        let [top, mut top_ids] = [words(2 * all, kept), words(2 * all + kept, kept)];
        let ids = ids.floats(rows.len());
        if k == 1 {
            top_ids = ids;
        }
        let choices = rows.iter().flat_map(|(_, choice)| {
            let floats = [choice.temperature, choice.top_p, choice.min_p, choice.share];
            [choice.top_k as u32].into_iter().chain(floats.map(f32::to_bits))
        });
        let sample = Launch {
            kernel: "sample",
            args: [k as u32].into_iter().chain(choices).chain(std::iter::repeat(0)).take(1 + 5 * MAX_ROWS).collect(),
            bindings: vec![Binding::read(top), Binding::read(top_ids), Binding::write(ids)],
            grid: [rows.len() as u32, 1, 1],
            threads: 32,
            skip: SkipUse::None,
        };
        let places: Vec<usize> = rows.iter().map(|(place, _)| *place).collect();
        let last = places.iter().max().map_or(0, |last| last * stride + count);
        let first = TopRows { values: logits.floats(last), ids: None, count, stride, places };
        let second = TopRows {
            values: of_blocks[0],
            ids: Some(of_blocks[1]),
            count: candidates,
            stride: candidates,
            places: (0..rows.len()).collect(),
        };
        let tops = [first.launch(k, of_blocks), second.launch(k, [top, top_ids])];
        tops.into_iter().chain((k > 1).then_some(sample))
    }
}
