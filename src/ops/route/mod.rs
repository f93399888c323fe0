//! The router's choice (spec 2.3): scores of all experts, softmax, the k likeliest. Of equal scores the expert of lower number
//! goes first. The shared expert's gate is computed beside it, and on a GPU also its gate and up projection.

mod cases;

pub(super) use cases::cases;

use super::{
    cpu::{Cpu, refuse},
    experts::{Mixture, Shared},
    project::{Column, HalfRows, Norm, Project, check, normed, product},
    simd::Out,
};
use crate::device::{Binding, DeviceError, Dispatch, Effect, Region};
use std::cell::RefCell;

/// The experts of each row of `x`, or of its norm.
#[derive(Debug, Clone, Copy)]
pub struct Route<'a> {
    pub layer: &'a Mixture,
    pub tokens: usize,
    /// `[tokens, hidden]`.
    pub x: Region,
    pub norm: Option<Norm>,
    /// Only the choice: nothing of the shared expert is computed, and a row of scores is as long as there are experts.
    pub alone: bool,
    /// `[experts]` u32: each expert's slot, as far as known.
    pub table: Region,
    /// `[tokens, layer.width()]`: room for `router | shared gate | shared up | gate of the shared result`.
    pub scores: Region,
    /// `[tokens, k]` u32, likeliest first.
    pub ids: Region,
    /// `[tokens, k]` u32: the table's entry of each.
    pub slots: Region,
    /// `[tokens, k + 1]` f32: a weight for each rank, the shared expert's last.
    pub weights: Region,
}

/// Rows in a task that chooses.
const ROWS: usize = 4;

thread_local! {
    /// The experts of a row, being sorted.
    static ORDER: RefCell<Vec<u32>> = RefCell::default();
}

impl Route<'_> {
    fn width(&self) -> usize {
        if self.alone { self.layer.router.rows } else { self.layer.width() }
    }

    fn shared(&self) -> Option<&Shared> {
        self.layer.shared.as_ref().filter(|_| !self.alone)
    }

    pub(super) fn touches(&self, see: &mut dyn FnMut(Region, Effect)) {
        let (tokens, Mixture { k, router, .. }) = (self.tokens, self.layer);
        see(self.x.floats(tokens * router.cols), Effect::Read);
        if let Some(keep) = self.norm.and_then(|norm| norm.keep) {
            see(keep.floats(tokens * router.cols), Effect::Write);
        }
        see(self.scores.floats(tokens * self.width()), Effect::Write);
        see(self.ids.floats(tokens * k), Effect::Write);
        see(self.slots.floats(tokens * k), Effect::Write);
        see(self.weights.floats(tokens * (k + 1)), Effect::Write);
    }

    pub(super) fn on_cpu(&self, cpu: &mut Cpu) -> Result<(), DeviceError> {
        let (tokens, layer, width) = (self.tokens, self.layer, self.width());
        let (k, experts, cols) = (layer.k, layer.router.rows, layer.router.cols);
        let Cpu { compute, memory, quantised, scratch } = cpu;
        let router = Column { weight: memory.view(&layer.router), at: 0 };
        let columns = match self.shared() {
            Some(shared) => [router, Column { weight: memory.view(&shared.result), at: width - 1 }],
            None => [router, Column { at: experts, ..Column::default() }],
        };
        let columns = &columns[..if self.shared().is_some() { 2 } else { 1 }];
        for column in columns {
            check(&column.weight, cols)?;
        }
        if k > experts {
            return refuse(format!("{k} of {experts} experts"));
        }
        let (x, key) = normed(compute, memory, self.x, tokens, cols, self.norm, &mut scratch.normed);
        quantised.fill(compute, key, x, tokens, cols, columns.iter().map(|column| column.weight.codes));
        let scores = memory.floats_mut(self.scores.floats(tokens * width));
        product(compute, quantised, x, cols, columns, scores, width, None);
        let ids = memory.words_mut(self.ids.floats(tokens * k));
        let weights = memory.floats_mut(self.weights.floats(tokens * (k + 1)));
        let (base, scores, shared) = (Out(weights.as_mut_ptr()), &*scores, self.shared().is_some());
        compute.threads.run_pieces(ids, ROWS * k.max(1), &|task, ids| {
            // SAFETY: each task has weights of its own rows, of which there are as many as of ids.
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
            *slot = table.get(*id as usize).copied().unwrap_or(super::experts::NONE);
        }
        Ok(())
    }

    /// `kernels/linear.metal`, then `kernels/route.metal`. Panics above 1024 experts.
    pub fn dispatches(&self) -> [Dispatch; 2] {
        let Self { layer, tokens, x, norm, scores, .. } = *self;
        let mut matrices = [layer.router; 4];
        let mut count = 1;
        if let Some(shared) = self.shared() {
            matrices[1..].copy_from_slice(&[shared.gate_up[0], shared.gate_up[1], shared.result]);
            count = 4;
        }
        let product = Project { x, tokens, norm, matrices: &matrices[..count], y: scores, add: false };
        [product.dispatch(), self.choice()]
    }

    /// The same with the shared expert's part on matrix units. The choice is made from scores as exact as ever: those of the
    /// normed rows that are kept, so there has to be a norm that keeps them.
    pub(super) fn halves(&self, room: Region) -> Option<Vec<Dispatch>> {
        let Self { layer, tokens, x, norm, scores, .. } = *self;
        let kept = norm?.keep?;
        let (cols, experts, width) = (layer.router.cols, layer.router.rows, self.width());
        let rows = HalfRows::new(room, tokens, cols);
        let matrices = std::slice::from_ref(&layer.router);
        let router = Project { x: kept, tokens, norm: None, matrices, y: scores, add: false };
        let mut launches = vec![rows.fill(x, cols, norm), router.dispatch_into(width)];
        if let Some(Shared { gate_up: [gate, up], result, .. }) = self.shared() {
            launches.push(rows.product(&[*gate, *up, *result], scores, (experts, width), false));
        }
        launches.push(self.choice());
        Some(launches)
    }

    /// The second launch: each row's k experts and weights from its scores.
    pub fn choice(&self) -> Dispatch {
        let Self { layer, tokens, table, scores, ids, slots, weights, .. } = *self;
        let (experts, k, width) = (layer.router.rows, layer.k, self.width());
        assert!(experts <= 1024 && k <= experts, "{k} of {experts} experts");
        let shared = self.shared().is_some();
        let gate = [if shared { width - 1 } else { 0 }, shared.into(), layer.renormalise.into()];
        let words = [experts, k, width, gate[0], gate[1], gate[2]];
        Dispatch {
            kernel: "route",
            args: words.map(|w| w as u32).to_vec(),
            bindings: vec![
                Binding::read(scores.floats(tokens * width)),
                Binding::read(table.floats(experts)),
                Binding::write(ids.floats(tokens * k)),
                Binding::write(slots.floats(tokens * k)),
                Binding::write(weights.floats(tokens * (k + 1))),
            ],
            grid: [tokens as u32, 1, 1],
            threads: 32,
        }
    }
}

/// The k likeliest of one row, and their weights, which sum to one with `renormalise`.
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
    let most = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let weigh = |id: u32| (row[id as usize] - most).exp();
    let sum: f32 =
        if renormalise { chosen.iter().map(|&id| weigh(id)).sum() } else { (0..row.len() as u32).map(weigh).sum() };
    for ((id, weight), chosen) in ids.iter_mut().zip(weights).zip(chosen) {
        (*id, *weight) = (*chosen, weigh(*chosen) / sum);
    }
}
