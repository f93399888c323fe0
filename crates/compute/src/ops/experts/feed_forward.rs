//! Expert feed-forward layers on the CPU: gate, up, SwiGLU and down for all experts of a call in two parallel
//! phases.
//!
//! A task of the first phase computes rows of gate and up. These rows form whole groups of the down projection's input,
//! so the task can quantize its own output. Results do not depend on which experts share a call, on which tokens share
//! an expert, or on the order of tasks.

use super::ExpertGroup;
use crate::{
    device::{CpuArithmetic, CpuDevice, DeviceError, Region},
    ops::{
        WeightFormat, WeightView,
        cpu::refuse,
        linear::{
            check,
            products::{self, Activations, Product},
            reuse_empty,
        },
        quant::{ActivationCache, QuantizedRow, QuantizedRows, RowWriter, format},
        simd::{Isa, OutPtr, math::silu, wide},
    },
};
use std::{
    cell::RefCell,
    ops::Range,
    sync::atomic::{AtomicBool, Ordering},
};

/// Maximum number of rows that one task computes together. Few enough that their results and the unpacked weights fit
/// into a core's cache.
const BLOCK: usize = 128;
/// Maximum number of rows of a gate or up projection in one task.
const SLICE: usize = 128;
/// Number of bytes of a down projection's weights in one task. Halved if there would be too few tasks for all threads.
const TASK: usize = 64 << 10;

/// Maximum number of assignments (chosen experts of tokens) that are computed together, not counting one assignment for
/// each token. Limits the size of the buffers between the up and down projections.
pub(in crate::ops) const MAX_ASSIGNMENTS: usize = 512;

/// One expert. `gate` and `up` are `[I, H]`, `down` is `[H, I]`.
#[derive(Clone, Copy)]
pub(in crate::ops) struct ExpertView<'a> {
    pub gate: WeightView<'a>,
    pub up: WeightView<'a>,
    pub down: WeightView<'a>,
}

/// Maps rows of `x` to rows of the result.
#[derive(Debug, Clone, Copy)]
pub(in crate::ops) enum JobRows<'a> {
    /// Row `t` maps to row `first + t`.
    Each { first: usize, count: usize },
    /// For each listed assignment, row `assignment / k` maps to row `assignment`.
    Assignments(&'a [u32], usize),
}

impl JobRows<'_> {
    pub(super) fn len(&self) -> usize {
        match self {
            JobRows::Each { count, .. } => *count,
            JobRows::Assignments(assignments, _) => assignments.len(),
        }
    }

    /// The row of `x` and the row of the result for entry `index`.
    fn get(&self, index: usize) -> (usize, usize) {
        match self {
            JobRows::Each { first, .. } => (index, first + index),
            // Divides in 32 bits, which is faster: a prompt needs thousands of these divisions before its tasks start.
            JobRows::Assignments(assignments, k) => {
                ((assignments[index] / *k as u32) as usize, assignments[index] as usize)
            }
        }
    }

    fn iter(&self) -> impl Iterator<Item = (usize, usize)> {
        self.some(0..self.len())
    }

    fn some(&self, range: Range<usize>) -> impl Iterator<Item = (usize, usize)> {
        range.map(|index| self.get(index))
    }
}

/// An expert and its rows in this call.
#[derive(Clone, Copy)]
pub(in crate::ops) struct ExpertJob<'a> {
    pub expert: ExpertView<'a>,
    pub rows: JobRows<'a>,
}

/// Buffers that are reused by all calls.
#[derive(Default)]
pub(in crate::ops) struct ExpertScratch {
    pub(super) jobs: Vec<ExpertJob<'static>>,
    pub(super) groups: Vec<ExpertGroup>,
    pub(super) order: Vec<u32>,
    claimed: Vec<bool>,
    /// Intermediate values, one entry for each shape and format among the down projections.
    intermediate: Vec<Intermediate>,
    /// For each job, its entry of `intermediate` and its first row there.
    assignments: Vec<(usize, usize)>,
    /// For each job, the number of its first task in the current phase.
    first: Vec<usize>,
    /// For each slice that two tasks share: true after the first of the two is done.
    first_done: Vec<AtomicBool>,
}

/// Buffers of one task.
#[derive(Default)]
struct TaskBuffers {
    /// Input rows of gate and of up. The down projection uses only the first list.
    inputs: [Vec<Activations<'static>>; 2],
    /// Output rows of the down projection.
    outs: Vec<OutPtr>,
    /// Products of gate, then of up.
    products: Vec<f32>,
}

thread_local! {
    static TASK_BUFFERS: RefCell<TaskBuffers> = RefCell::default();
}

/// `out[assignment] = Down(silu(Gate x[token]) * (Up x[token]))` for every row of every job, without the router's
/// weights. `x` is `[tokens, hidden]` in `region`; `out` is `[assignments, hidden]`. Refuses jobs that share an
/// assignment.
#[allow(clippy::too_many_arguments)]
pub(in crate::ops) fn compute(
    device: &CpuDevice,
    quantized: &mut ActivationCache,
    region: Option<Region>,
    x: &[f32],
    hidden: usize,
    jobs: &[ExpertJob<'_>],
    out: &mut [f32],
    scratch: &mut ExpertScratch,
) -> Result<(), DeviceError> {
    for job in jobs {
        let ExpertView { gate, up, down } = &job.expert;
        check(gate, hidden)?;
        check(up, hidden)?;
        check(down, gate.rows)?;
        if up.rows != gate.rows || down.rows != hidden {
            return refuse(format!(
                "gate, up and down projections have {}, {} and {} rows",
                gate.rows, up.rows, down.rows
            ));
        }
    }
    // Two tasks that write the same assignment would race, so each assignment may be claimed only once.
    let tokens = x.len() / hidden;
    let assignments = out.len() / hidden;
    scratch.claimed.clear();
    scratch.claimed.resize(assignments, false);
    for (token, assignment) in jobs.iter().flat_map(|job| job.rows.iter()) {
        match scratch.claimed.get_mut(assignment) {
            Some(claimed) if !*claimed && token < tokens => *claimed = true,
            _ => {
                return refuse(format!(
                    "assignment {assignment} of token {token} is a duplicate or out of range ({tokens} tokens, {assignments} assignments)"
                ));
            }
        }
    }
    let codes = jobs.iter().flat_map(|job| [job.expert.gate.codes, job.expert.up.codes]);
    quantized.fill(device, region, x, tokens, hidden, codes);
    arrange(device.arithmetic, jobs, &mut scratch.intermediate, &mut scratch.assignments);
    gate_and_up(device, quantized, x, hidden, jobs, scratch);
    down(device, hidden, jobs, out, scratch);
    Ok(())
}

/// `silu(gate) * up` of all rows whose down projections have the same shape and format.
#[derive(Default)]
struct Intermediate {
    cols: usize,
    codes: Option<WeightFormat>,
    rows: usize,
    quantized: QuantizedRows,
    /// f32 values, for down projections in float arithmetic, or until both tasks of a shared slice are done.
    values: Vec<f32>,
}

#[derive(Clone, Copy)]
struct IntermediateOut {
    quantized: Option<RowWriter>,
    values: OutPtr,
}

/// The first phase: gate and up, quantized for the down projection.
fn gate_and_up(
    device: &CpuDevice,
    formats: &ActivationCache,
    x: &[f32],
    hidden: usize,
    jobs: &[ExpertJob<'_>],
    scratch: &mut ExpertScratch,
) {
    let math = device.arithmetic;
    let isa = Isa::best();
    let ExpertScratch { intermediate, assignments, first, first_done, .. } = scratch;
    let slice = |job: &ExpertJob<'_>| job.expert.down.codes.group().clamp(64, SLICE);
    number(jobs, first, |job| job.rows.len().div_ceil(BLOCK) * job.expert.gate.rows.div_ceil(slice(job)));
    // With few slices for many threads, two tasks share a slice. The task that finishes later quantizes the slice.
    let parts = if total(first) < min_tasks(device) { 2 } else { 1 };
    let targets: Vec<IntermediateOut> =
        intermediate.iter_mut().map(|intermediate| intermediate.writer(math, parts > 1)).collect();
    first_done.clear();
    first_done.resize_with(total(first), AtomicBool::default);
    device.threads.run(parts * total(first), &|task| {
        let slice_of_all = task / parts;
        let part = task % parts;
        let (index, task) = locate(first, slice_of_all);
        let job = &jobs[index];
        let slices = job.expert.gate.rows.div_ceil(slice(job));
        let block = task / slices;
        let at = task % slices * slice(job);
        let whole = at..(at + slice(job)).min(job.expert.gate.rows);
        let border = |part: usize| whole.start + whole.len() * part / parts;
        let block = block * BLOCK..((block + 1) * BLOCK).min(job.rows.len());
        let (entry, start) = assignments[index];
        let to = SliceTarget { to: targets[entry], first: start + block.start, whole: whole.clone() };
        TASK_BUFFERS.with_borrow_mut(|TaskBuffers { inputs: [own, others], products, .. }| {
            let inputs = |codes: WeightFormat| {
                let rows = formats.of(math, codes);
                job.rows.some(block.clone()).map(move |(token, _)| Activations {
                    x: &x[token * hidden..(token + 1) * hidden],
                    digits: rows.map_or_else(QuantizedRow::default, |rows| rows.row(token)),
                })
            };
            let [gate, up] = [&job.expert.gate, &job.expert.up];
            let mut gates: Vec<Activations<'_>> = reuse_empty(std::mem::take(own));
            let mut ups: Vec<Activations<'_>> = reuse_empty(std::mem::take(others));
            gates.extend(inputs(gate.codes));
            let same = format(math, gate.codes) == format(math, up.codes);
            if !same {
                ups.extend(inputs(up.codes));
            }
            let inputs = [&gates[..], if same { &gates[..] } else { &ups[..] }];
            let last = || parts == 1 || first_done[slice_of_all].swap(true, Ordering::AcqRel);
            // SAFETY: sizes were checked. Each task writes its own rows and columns of the intermediate values. The
            // last task of a slice writes all quantized values of the slice.
            unsafe { swiglu(isa, math, [gate, up], border(part)..border(part + 1), inputs, &to, products, last) };
            *own = reuse_empty(gates);
            *others = reuse_empty(ups);
        });
    });
}

/// The second phase: the down projection.
fn down(device: &CpuDevice, hidden: usize, jobs: &[ExpertJob<'_>], out: &mut [f32], scratch: &mut ExpertScratch) {
    let math = device.arithmetic;
    let isa = Isa::best();
    let ExpertScratch { intermediate, assignments, first, .. } = scratch;
    let base = OutPtr(out.as_mut_ptr());
    let intermediate = &*intermediate;
    let height = |job: &ExpertJob<'_>, bytes: usize| {
        let row: usize = job.expert.down.codes.row_bytes(job.expert.down.cols).iter().sum();
        (bytes / row.max(1)).next_multiple_of(32).max(32)
    };
    let mut number_tasks = |bytes: usize| {
        number(jobs, first, |job| job.rows.len().div_ceil(BLOCK) * hidden.div_ceil(height(job, bytes)));
        total(first)
    };
    let mut bytes = TASK;
    if number_tasks(bytes) < min_tasks(device) {
        bytes /= 2;
        number_tasks(bytes);
    }
    device.threads.run(total(first), &|task| {
        let (index, task) = locate(first, task);
        let job = &jobs[index];
        let slices = hidden.div_ceil(height(job, bytes));
        let block = task / slices;
        let at = task % slices * height(job, bytes);
        let block = block * BLOCK..((block + 1) * BLOCK).min(job.rows.len());
        let rows = at..(at + height(job, bytes)).min(hidden);
        let (entry, start) = assignments[index];
        let integer = format(math, job.expert.down.codes).is_some();
        TASK_BUFFERS.with_borrow_mut(|TaskBuffers { inputs: [own, _], outs, .. }| {
            let mut inputs: Vec<Activations<'_>> = reuse_empty(std::mem::take(own));
            inputs.extend(block.clone().map(|row| intermediate[entry].input(integer, start + row)));
            outs.clear();
            // SAFETY: assignments were checked.
            outs.extend(job.rows.some(block).map(|(_, assignment)| unsafe { base.add(assignment * hidden) }));
            // SAFETY: sizes were checked. Each task writes its own rows of `out`, and each input has its own row of
            // `out`.
            unsafe { products::multiply(isa, math, Product { weight: &job.expert.down, rows, inputs: &inputs, outs }) };
            *own = reuse_empty(inputs);
        });
    });
}

/// Smallest number of tasks of a phase that keeps all threads busy to its end.
fn min_tasks(device: &CpuDevice) -> usize {
    if device.threads.count() > 1 { 8 * device.threads.count() } else { 0 }
}

/// Assigns a range of rows of the intermediate values to each job.
fn arrange(
    math: CpuArithmetic,
    jobs: &[ExpertJob<'_>],
    intermediate: &mut Vec<Intermediate>,
    assignments: &mut Vec<(usize, usize)>,
) {
    for entry in intermediate.iter_mut() {
        entry.rows = 0;
    }
    assignments.clear();
    for job in jobs {
        let cols = job.expert.gate.rows;
        let codes = job.expert.down.codes;
        let fits = |entry: &Intermediate| {
            entry.cols == cols && entry.codes.is_some_and(|other| format(math, other) == format(math, codes))
        };
        let entry = intermediate.iter().position(fits).unwrap_or_else(|| {
            intermediate.push(Intermediate { cols, codes: Some(codes), ..Intermediate::default() });
            intermediate.len() - 1
        });
        assignments.push((entry, intermediate[entry].rows));
        intermediate[entry].rows += job.rows.len();
    }
}

impl Intermediate {
    /// Resizes the buffers and returns pointers to them. Also allocates f32 values if tasks `share` a slice.
    fn writer(&mut self, math: CpuArithmetic, share: bool) -> IntermediateOut {
        let format = self.codes.and_then(|codes| format(math, codes));
        if share || format.is_none() {
            self.values.resize((self.rows * self.cols).max(self.values.len()), 0.0);
        }
        let quantized = format.map(|format| self.quantized.resize(self.rows, self.cols, format));
        IntermediateOut { quantized, values: OutPtr(self.values.as_mut_ptr()) }
    }

    fn input(&self, integer: bool, row: usize) -> Activations<'_> {
        if integer {
            Activations { x: &[], digits: self.quantized.row(row) }
        } else {
            Activations { x: &self.values[row * self.cols..(row + 1) * self.cols], digits: QuantizedRow::default() }
        }
    }
}

/// Destination of a slice's intermediate values: columns `whole` of the rows from `first` on.
struct SliceTarget {
    to: IntermediateOut,
    first: usize,
    whole: Range<usize>,
}

/// Computes `silu(gate) * up` for some inputs. A row of the weights gives a column of the result, so `rows` is the
/// range of columns that this call writes. If two tasks share a slice, the task for which `last` returns true quantizes
/// the whole slice.
///
/// # Safety
/// As for [`products::multiply`]. The caller has exclusive access to these columns and rows. The last task of a slice has
/// exclusive access to the whole slice, because the other task has finished writing.
#[allow(clippy::too_many_arguments)]
unsafe fn swiglu(
    isa: Isa,
    math: CpuArithmetic,
    weights: [&WeightView<'_>; 2],
    rows: Range<usize>,
    inputs: [&[Activations<'_>]; 2],
    target: &SliceTarget,
    products: &mut Vec<f32>,
    last: impl FnOnce() -> bool,
) {
    let count = inputs[0].len();
    let width = rows.len();
    let SliceTarget { to, first, whole } = target;
    if rows.is_empty() {
        return;
    }
    products.clear();
    products.resize(2 * count * width, 0.0);
    for ((weight, inputs), products) in weights.iter().zip(inputs).zip(products.chunks_exact_mut(count * width)) {
        let view = weight.of_rows(rows.clone());
        let mut outs = [OutPtr(std::ptr::null_mut()); BLOCK];
        for (out, products) in outs.iter_mut().zip(products.chunks_exact_mut(width)) {
            *out = OutPtr(products.as_mut_ptr());
        }
        // SAFETY: `outs` are rows of a local buffer that is as wide as the view has rows.
        unsafe {
            products::multiply(isa, math, Product { weight: &view, rows: 0..width, inputs, outs: &outs[..count] })
        };
    }
    let (gates, ups) = products.split_at_mut(count * width);
    activate(gates, ups);
    let cols = weights[0].rows;
    let shared = rows != *whole;
    for (input, values) in gates.chunks_exact(width).enumerate() {
        let row = first + input;
        match to.quantized.filter(|_| !shared) {
            // SAFETY: exclusive access (caller).
            Some(writer) => unsafe { writer.write(row, rows.start, values) },
            // SAFETY: exclusive access (caller). A row has as many values as the weights have rows.
            None => unsafe {
                to.values.0.add(row * cols + rows.start).copy_from_nonoverlapping(values.as_ptr(), values.len());
            },
        }
    }
    let Some(writer) = to.quantized.filter(|_| shared && last()) else { return };
    for row in *first..first + count {
        // SAFETY: all of the slice is written, and no other task reads it (caller).
        unsafe {
            let values = std::slice::from_raw_parts(to.values.0.add(row * cols + whole.start), whole.len());
            writer.write(row, whole.start, values);
        }
    }
}

wide! {
    /// SwiGLU: `gate = silu(gate) * up`.
    fn activate(gate: &mut [f32], up: &[f32]) {
        for (gate, up) in gate.iter_mut().zip(up) {
            *gate = silu(*gate) * up;
        }
    }
}

/// Numbers the tasks of all jobs consecutively: writes the first number of each job to `first`.
fn number<'a>(jobs: &[ExpertJob<'a>], first: &mut Vec<usize>, tasks: impl Fn(&ExpertJob<'a>) -> usize) {
    first.clear();
    first.push(0);
    let mut next = 0;
    for job in jobs {
        next += tasks(job);
        first.push(next);
    }
}

fn total(first: &[usize]) -> usize {
    first.last().copied().unwrap_or(0)
}

/// The job of `task`, and the number of the task within the job.
fn locate(first: &[usize], task: usize) -> (usize, usize) {
    let job = first.partition_point(|first| *first <= task) - 1;
    (job, task - first[job])
}
