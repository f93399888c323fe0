//! Experts on the CPU: turns a call into jobs, and adds the results of the experts.

use super::{
    CombineExperts, ExpertGroup, ExpertSet, ExpertStack, Experts,
    feed_forward::{ExpertJob, ExpertView, JobRows, MAX_ASSIGNMENTS, compute},
};
use crate::{
    device::DeviceError,
    ops::{
        WeightView,
        cpu::{Cpu, CpuMemory, refuse},
        linear::reuse_empty,
        simd::{OutPtr, wide},
    },
};

impl Experts<'_> {
    pub(in crate::ops) fn on_cpu(&self, cpu: &mut Cpu) -> Result<(), DeviceError> {
        let layer = self.layer;
        let tokens = self.tokens;
        let hidden = self.layer.hidden();
        let Cpu { compute: with, memory, quantized, scratch } = cpu;
        let scratch = &mut scratch.experts;
        let mut jobs: Vec<ExpertJob<'_>> = reuse_empty(std::mem::take(&mut scratch.jobs));
        let mut table_groups = std::mem::take(&mut scratch.groups);
        let mut table_order = std::mem::take(&mut scratch.order);
        let (groups, assignments, shared) = match self.experts {
            ExpertSet::Loaded { groups, assignments, shared, .. } => (groups, assignments, shared),
            ExpertSet::Table { ids, slots } => {
                let count = tokens * layer.k;
                let entries = memory.words(ids.floats(count)).iter().zip(memory.words(slots.floats(count)));
                table_groups.clear();
                table_order.clear();
                table_order.extend(0..count as u32);
                table_groups.extend((0..).zip(entries).map(|(first, (&expert, &slot))| ExpertGroup {
                    expert,
                    slot,
                    first,
                    count: 1,
                }));
                (&table_groups[..], &table_order[..], true)
            }
        };
        if let Some(expert) = layer.shared.as_ref().filter(|_| shared) {
            let [gate, up] = expert.gate_up.each_ref().map(|weight| memory.view(weight));
            let rows = JobRows::Each { first: tokens * layer.k, count: tokens };
            jobs.push(ExpertJob { expert: ExpertView { gate, up, down: memory.view(&expert.down) }, rows });
        }
        for group in groups {
            let first = group.first as usize;
            let count = group.count as usize;
            let (Some(own), Some(expert)) = (assignments.get(first..first + count), self.expert(memory, *group)) else {
                return refuse(format!(
                    "{group:?} is out of range: {} assignments, {} segments",
                    assignments.len(),
                    self.slots.segments.len()
                ));
            };
            jobs.push(ExpertJob { expert, rows: JobRows::Assignments(own, layer.k) });
        }
        let at = self.x.floats(tokens * hidden);
        let out = memory.floats_mut(self.buffers.out.floats(layer.assignments(tokens) * hidden));
        let x = memory.floats(at);
        let mut rest = &jobs[..];
        let mut done = Ok(());
        while !rest.is_empty() && done.is_ok() {
            let mut rows = 0;
            let fits = |job: &&ExpertJob<'_>| {
                rows += job.rows.len();
                rows <= tokens + MAX_ASSIGNMENTS
            };
            let (some, later) = rest.split_at(rest.iter().take_while(fits).count().max(1));
            done = compute(with, quantized, Some(at), x, hidden, some, out, scratch);
            rest = later;
        }
        scratch.jobs = reuse_empty(jobs);
        scratch.groups = table_groups;
        scratch.order = table_order;
        done
    }

    /// The weights of a loaded expert; `None` if its slot does not exist.
    fn expert<'a>(&self, memory: &'a CpuMemory, group: ExpertGroup) -> Option<ExpertView<'a>> {
        let view = |index: usize| {
            let stack = &self.layer.stacks[index];
            let at = stack.at.get(group.expert as usize)?;
            let global_scale = *stack.global_scales.get(group.expert as usize)?;
            let bytes = stack.codes.part_bytes(stack.rows, stack.cols);
            let mut parts = [&[][..]; 3];
            for ((part, at), len) in parts.iter_mut().zip(at).zip(bytes) {
                *part = memory.bytes(self.slots.part(group.slot, *at, len)?);
            }
            let &ExpertStack { codes, rows, cols, .. } = stack;
            Some(WeightView { codes, rows, cols, global_scale, skipped: 0, parts })
        };
        Some(ExpertView { gate: view(0)?, up: view(1)?, down: view(2)? })
    }
}

impl CombineExperts<'_> {
    pub(in crate::ops) fn on_cpu(&self, cpu: &mut Cpu) -> Result<(), DeviceError> {
        let layer = self.layer;
        let tokens = self.tokens;
        let hidden = self.layer.hidden();
        let memory = &cpu.memory;
        let k = layer.k;
        let out = memory.floats(self.buffers.out.floats(layer.assignments(tokens) * hidden));
        let weights = memory.floats(self.buffers.weights.floats(tokens * (k + 1)));
        let h = memory.floats_mut(self.h.floats(tokens * hidden));
        let (routed, shared) = out.split_at(tokens * k * hidden);
        let base = OutPtr(h.as_mut_ptr());
        cpu.compute.threads.run_split(tokens, 16, &|range| {
            let base = &base;
            for token in range {
                // SAFETY: the ranges of a split are disjoint, so this row of `h` belongs to this task.
                let h = unsafe { std::slice::from_raw_parts_mut(base.0.add(token * hidden), hidden) };
                let weights = &weights[token * (k + 1)..][..k + 1];
                let ranks = &routed[token * k * hidden..][..k * hidden];
                let shared = layer.shared.is_some().then(|| &shared[token * hidden..][..hidden]);
                for (piece, h) in h.chunks_mut(COLUMNS).enumerate() {
                    sum(h, weights, ranks, shared, piece * COLUMNS, hidden);
                }
            }
        });
        Ok(())
    }
}

/// Number of columns that are added up at a time. Few enough that their sums stay in registers and the L1 cache.
const COLUMNS: usize = 512;

wide! {
    /// Adds `weight * row` of all ranks to `h`, in rank order. The shared expert's row comes last.
    fn sum(h: &mut [f32], weights: &[f32], ranks: &[f32], shared: Option<&[f32]>, first: usize, hidden: usize) {
        let mut sums = [0f32; COLUMNS];
        let sums = &mut sums[..h.len()];
        let rows = ranks.chunks_exact(hidden).chain(shared);
        let last = weights.len() - 1;
        for (rank, row) in rows.enumerate() {
            let weight = weights[rank.min(last)];
            for (sum, x) in sums.iter_mut().zip(&row[first..]) {
                *sum = weight.mul_add(*x, *sum);
            }
        }
        for (h, sum) in h.iter_mut().zip(sums) {
            *h += *sum;
        }
    }
}
