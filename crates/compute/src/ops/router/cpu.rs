//! The router on the CPU.

use super::Router;
use crate::{
    device::DeviceError,
    ops::{
        cpu::{Cpu, refuse},
        experts::NO_SLOT,
        linear::{OutputColumns, check, normed, product},
        simd::OutPtr,
    },
};
use std::cell::RefCell;

/// Number of rows in a task of the top-k.
const ROWS: usize = 4;

thread_local! {
    /// Expert numbers of a row, sorted by score.
    static ORDER: RefCell<Vec<u32>> = RefCell::default();
}

impl Router<'_> {
    pub(in crate::ops) fn on_cpu(&self, cpu: &mut Cpu) -> Result<(), DeviceError> {
        let tokens = self.tokens;
        let layer = self.layer;
        let width = self.width();
        let k = layer.k;
        let experts = layer.router.rows;
        let cols = layer.router.cols;
        let Cpu { compute, memory, quantized, scratch } = cpu;
        let router = OutputColumns { weight: memory.view(&layer.router), at: 0 };
        let columns = match self.shared() {
            Some(shared) => [router, OutputColumns { weight: memory.view(&shared.result), at: width - 1 }],
            None => [router, OutputColumns { at: experts, ..OutputColumns::default() }],
        };
        let columns = &columns[..if self.shared().is_some() { 2 } else { 1 }];
        for column in columns {
            check(&column.weight, cols)?;
        }
        if k > experts {
            return refuse(format!("cannot choose {k} of {experts} experts"));
        }
        let (x, key) = normed(compute, memory, self.x, tokens, cols, self.norm, &mut scratch.normed);
        quantized.fill(compute, key, x, tokens, cols, columns.iter().map(|column| column.weight.codes));
        let scores = memory.floats_mut(self.scores.floats(tokens * width));
        product(compute, quantized, x, cols, columns, scores, width, None);
        let ids = memory.words_mut(self.ids.floats(tokens * k));
        let weights = memory.floats_mut(self.weights.floats(tokens * (k + 1)));
        let base = OutPtr(weights.as_mut_ptr());
        let scores = &*scores;
        let shared = self.shared().is_some();
        compute.threads.run_pieces(ids, ROWS * k.max(1), &|task, ids| {
            // SAFETY: each task writes the weights of its rows, one row for each row of ids.
            let weights = unsafe {
                std::slice::from_raw_parts_mut(base.add(task * ROWS * (k + 1)).0, ids.len() / k.max(1) * (k + 1))
            };
            let rows = scores[task * ROWS * width..].chunks_exact(width);
            ORDER.with_borrow_mut(|order| {
                for ((scores, ids), weights) in rows.zip(ids.chunks_exact_mut(k)).zip(weights.chunks_exact_mut(k + 1)) {
                    choose(&scores[..experts], layer.renormalise, order, ids, &mut weights[..k]);
                    weights[k] = if shared { 1.0 / ((-scores[width - 1]).exp() + 1.0) } else { 0.0 };
                }
            });
        });
        let table = memory.words(self.table);
        for (slot, id) in memory.words_mut(self.slots.floats(tokens * k)).iter_mut().zip(&*ids) {
            *slot = table.get(*id as usize).copied().unwrap_or(NO_SLOT);
        }
        Ok(())
    }
}

/// Chooses the top-k of one row and computes their softmax weights. If `renormalise` is true, the weights sum to one.
fn choose(row: &[f32], renormalise: bool, order: &mut Vec<u32>, ids: &mut [u32], weights: &mut [f32]) {
    let k = ids.len();
    order.clear();
    order.extend(0..row.len() as u32);
    let before = |a: &u32, b: &u32| row[*b as usize].total_cmp(&row[*a as usize]).then(a.cmp(b));
    if k < order.len() {
        order.select_nth_unstable_by(k, before);
    }
    let chosen = &mut order[..k];
    chosen.sort_unstable_by(before);
    let max = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let weigh = |id: u32| (row[id as usize] - max).exp();
    let sum: f32 =
        if renormalise { chosen.iter().map(|&id| weigh(id)).sum() } else { (0..row.len() as u32).map(weigh).sum() };
    for ((id, weight), chosen) in ids.iter_mut().zip(weights).zip(chosen) {
        *id = *chosen;
        *weight = weigh(*chosen) / sum;
    }
}
