//! Gate and up in one pass, SwiGLU, down, all experts of the call as one parallel job.
//!
//! Rows of a gate and up projection are cut where the groups of the down projection's input end, so the task that has
//! computed a run of the intermediate values also quantises them. Nothing depends on which experts share a call, on how
//! many tokens an expert serves, or on the order in which tasks are claimed.

use super::Group;
use crate::{
    device::{Compute, DeviceError, Math, Region},
    ops::{
        cpu::refuse,
        math::silu,
        project::{check, format},
        quant::{Digits, Quantised, QuantisedRows, Writer},
        simd::{self, Activations, Isa, Out, wide},
        weight::{Codes, WeightView},
    },
};
use std::{cell::RefCell, ops::Range};

/// Tokens that one task computes together: their results fit a core's cache beside the unpacked weights.
const BLOCK: usize = 128;
/// Most rows of a gate or up projection in one task.
const SLICE: usize = 128;
/// Bytes of a down projection in one task.
const TASK: usize = 64 << 10;

/// One expert: `gate` and `up` are `[I, H]`, `down` is `[H, I]`.
#[derive(Clone, Copy)]
pub(in crate::ops) struct ExpertView<'a> {
    pub gate: WeightView<'a>,
    pub up: WeightView<'a>,
    pub down: WeightView<'a>,
}

/// The rows of `x` that an expert serves, and their rows of the result.
#[derive(Debug, Clone, Copy)]
pub(in crate::ops) enum Rows<'a> {
    /// Row `t` goes to row `first + t`.
    Each { first: usize, count: usize },
    /// Row `place / k` goes to row `place`.
    Places(&'a [u32], usize),
}

impl Rows<'_> {
    fn len(&self) -> usize {
        match self {
            Rows::Each { count, .. } => *count,
            Rows::Places(places, _) => places.len(),
        }
    }

    /// Row of `x`, row of the result.
    fn get(&self, index: usize) -> (usize, usize) {
        match self {
            Rows::Each { first, .. } => (index, first + index),
            Rows::Places(places, k) => (places[index] as usize / k, places[index] as usize),
        }
    }

    fn iter(&self) -> impl Iterator<Item = (usize, usize)> {
        (0..self.len()).map(|index| self.get(index))
    }
}

/// An expert and all its rows of this call.
#[derive(Clone, Copy)]
pub(in crate::ops) struct Job<'a> {
    pub expert: ExpertView<'a>,
    pub rows: Rows<'a>,
}

/// Buffers kept from call to call.
#[derive(Default)]
pub(in crate::ops) struct Scratch {
    pub(super) jobs: Vec<Job<'static>>,
    pub(super) groups: Vec<Group>,
    pub(super) order: Vec<u32>,
    claimed: Vec<bool>,
    /// Intermediate values, one entry for each shape and format among the down projections.
    middle: Vec<Middle>,
    /// For each job: its entry of `middle` and its first row there.
    places: Vec<(usize, usize)>,
    /// For each job and phase: the number of its first task.
    first: Vec<usize>,
    lines: [Vec<Activations<'static>>; 2],
    outs: Vec<Out>,
}

/// An empty list with the room of another, whose elements lived shorter.
pub(super) fn emptied<A, B>(mut list: Vec<A>) -> Vec<B> {
    list.clear();
    // Collecting nothing from a list of equal layout keeps its memory.
    list.into_iter().filter_map(|_| None).collect()
}

thread_local! {
    /// Products of one task: gate, then up.
    static PRODUCTS: RefCell<Vec<f32>> = RefCell::default();
}

/// `out[place] = Down(silu(Gate x[token]) * (Up x[token]))` for every row of every job, unweighted. `x` is `[T, hidden]` and
/// lies at `of`; `out` is `[places, hidden]`. Refuses jobs of which two share a place.
#[allow(clippy::too_many_arguments)]
pub(in crate::ops) fn compute(
    with: &Compute,
    quantised: &mut QuantisedRows,
    of: Option<Region>,
    x: &[f32],
    hidden: usize,
    jobs: &[Job<'_>],
    out: &mut [f32],
    scratch: &mut Scratch,
) -> Result<(), DeviceError> {
    for job in jobs {
        let ExpertView { gate, up, down } = &job.expert;
        check(gate, hidden)?;
        check(up, hidden)?;
        check(down, gate.rows)?;
        if up.rows != gate.rows || down.rows != hidden {
            return refuse(format!("gate, up and down have {}, {} and {} rows", gate.rows, up.rows, down.rows));
        }
    }
    // A place that is written twice would be a race: each must be claimed once.
    let (tokens, places) = (x.len() / hidden, out.len() / hidden);
    scratch.claimed.clear();
    scratch.claimed.resize(places, false);
    for (token, place) in jobs.iter().flat_map(|job| job.rows.iter()) {
        match scratch.claimed.get_mut(place) {
            Some(claimed) if !*claimed && token < tokens => *claimed = true,
            _ => return refuse(format!("place {place} of token {token}: {tokens} tokens, {places} places, each once")),
        }
    }
    let codes = jobs.iter().flat_map(|job| [job.expert.gate.codes, job.expert.up.codes]);
    quantised.fill(with, of, x, tokens, hidden, codes);
    forward(with, quantised, x, hidden, jobs, out, scratch);
    Ok(())
}

/// `silu(gate) * up` of all rows whose down projections are alike.
#[derive(Default)]
struct Middle {
    cols: usize,
    codes: Option<Codes>,
    rows: usize,
    quantised: Quantised,
    /// In f32, for down projections that are not computed in integers.
    values: Vec<f32>,
}

#[derive(Clone, Copy)]
struct MiddleOut {
    quantised: Option<Writer>,
    values: Out,
}

fn forward<'a>(
    compute: &Compute,
    formats: &'a QuantisedRows,
    x: &'a [f32],
    hidden: usize,
    jobs: &[Job<'_>],
    out: &mut [f32],
    scratch: &mut Scratch,
) {
    let (math, isa) = (compute.math, Isa::best());
    let Scratch { middle, places, first, lines: [gates, ups], outs, .. } = scratch;
    arrange(math, jobs, middle, places);

    // Gate and up, quantised as the down projection wants it.
    let line = move |rows: Option<&'a Quantised>, token: usize| Activations {
        x: &x[token * hidden..(token + 1) * hidden],
        digits: rows.map_or_else(Digits::default, |rows| rows.row(token)),
    };
    let lines_of = |codes: fn(&ExpertView<'_>) -> Codes| {
        let rows = jobs.iter().map(move |job| (job, formats.of(math, codes(&job.expert))));
        rows.flat_map(move |(job, rows)| job.rows.iter().map(move |(token, _)| line(rows, token)))
    };
    let mut gate_lines: Vec<Activations<'_>> = emptied(std::mem::take(gates));
    let mut up_lines: Vec<Activations<'_>> = emptied(std::mem::take(ups));
    gate_lines.extend(lines_of(|expert| expert.gate.codes));
    let same = jobs.iter().all(|job| format(math, job.expert.gate.codes) == format(math, job.expert.up.codes));
    if !same {
        up_lines.extend(lines_of(|expert| expert.up.codes));
    }
    let for_up = if same { &gate_lines } else { &up_lines };
    let targets: Vec<MiddleOut> = middle.iter_mut().map(|middle| middle.writer(math)).collect();
    let slice = |job: &Job<'_>| job.expert.down.codes.group().clamp(64, SLICE);
    number(jobs, first, |job| job.rows.len().div_ceil(BLOCK) * job.expert.gate.rows.div_ceil(slice(job)));
    compute.threads.run(total(first), &|task| {
        let (index, before, task) = locate(jobs, first, task);
        let job = &jobs[index];
        let slices = job.expert.gate.rows.div_ceil(slice(job));
        let (block, at) = (task / slices, task % slices * slice(job));
        let rows = at..(at + slice(job)).min(job.expert.gate.rows);
        let block = block * BLOCK..((block + 1) * BLOCK).min(job.rows.len());
        let (gates, ups) = (&gate_lines[before..][block.clone()], &for_up[before..][block.clone()]);
        let (entry, start) = places[index];
        // SAFETY: checked sizes; each task writes its own rows and columns of the intermediate values.
        unsafe {
            let gate_up = [&job.expert.gate, &job.expert.up];
            swiglu(isa, math, gate_up, rows, [gates, ups], targets[entry], start + block.start);
        }
    });

    // Down.
    let base = Out(out.as_mut_ptr());
    let middle = &*middle;
    let rows = jobs.iter().zip(&*places).flat_map(|(job, (entry, start))| {
        let integer = format(math, job.expert.down.codes).is_some();
        (0..job.rows.len()).map(move |row| middle[*entry].line(integer, start + row))
    });
    *gates = emptied(gate_lines);
    let mut lines: Vec<Activations<'_>> = emptied(std::mem::take(gates));
    lines.extend(rows);
    outs.clear();
    outs.extend(jobs.iter().flat_map(|job| job.rows.iter()).map(|(_, place)| {
        // SAFETY: places were checked.
        unsafe { base.add(place * hidden) }
    }));
    let outs = &*outs;
    let height = |job: &Job<'_>| {
        let row: usize = job.expert.down.codes.row_bytes(job.expert.down.cols).iter().sum();
        (TASK / row.max(1)).next_multiple_of(32).max(32)
    };
    number(jobs, first, |job| job.rows.len().div_ceil(BLOCK) * hidden.div_ceil(height(job)));
    compute.threads.run(total(first), &|task| {
        let (index, before, task) = locate(jobs, first, task);
        let job = &jobs[index];
        let slices = hidden.div_ceil(height(job));
        let (block, at) = (task / slices, task % slices * height(job));
        let block = before + block * BLOCK..before + ((block + 1) * BLOCK).min(job.rows.len());
        let rows = at..(at + height(job)).min(hidden);
        let (lines, outs) = (&lines[block.clone()], &outs[block]);
        // SAFETY: checked sizes; each task writes its own rows of `out`, of which no two lines share one.
        unsafe { simd::product(isa, math == Math::Integer, &job.expert.down, rows, lines, outs) };
    });
    (*gates, *ups) = (emptied(lines), emptied(up_lines));
}

/// Gives every job its rows among the intermediate values.
fn arrange(math: Math, jobs: &[Job<'_>], middle: &mut Vec<Middle>, places: &mut Vec<(usize, usize)>) {
    for entry in middle.iter_mut() {
        entry.rows = 0;
    }
    places.clear();
    for job in jobs {
        let (cols, codes) = (job.expert.gate.rows, job.expert.down.codes);
        let alike = |entry: &Middle| {
            entry.cols == cols && entry.codes.is_some_and(|other| format(math, other) == format(math, codes))
        };
        let entry = middle.iter().position(alike).unwrap_or_else(|| {
            middle.push(Middle { cols, codes: Some(codes), ..Middle::default() });
            middle.len() - 1
        });
        places.push((entry, middle[entry].rows));
        middle[entry].rows += job.rows.len();
    }
}

impl Middle {
    /// Makes room for its rows.
    fn writer(&mut self, math: Math) -> MiddleOut {
        match self.codes.and_then(|codes| format(math, codes)) {
            Some(format) => {
                let writer = self.quantised.resize(self.rows, self.cols, format);
                MiddleOut { quantised: Some(writer), values: Out(std::ptr::null_mut()) }
            }
            None => {
                self.values.resize(self.rows * self.cols, 0.0);
                MiddleOut { quantised: None, values: Out(self.values.as_mut_ptr()) }
            }
        }
    }

    fn line(&self, integer: bool, row: usize) -> Activations<'_> {
        match integer {
            true => Activations { x: &[], digits: self.quantised.row(row) },
            false => Activations { x: &self.values[row * self.cols..(row + 1) * self.cols], digits: Digits::default() },
        }
    }
}

/// `silu(gate) * up` at columns `rows` for some lines, to the rows of `to` from `first` on.
///
/// # Safety
/// As for [`simd::product`]; those columns of those rows of `to` are exclusively the caller's.
unsafe fn swiglu(
    isa: Isa,
    math: Math,
    weights: [&WeightView<'_>; 2],
    rows: Range<usize>,
    lines: [&[Activations<'_>]; 2],
    to: MiddleOut,
    first: usize,
) {
    let (count, width, integer) = (lines[0].len(), rows.len(), math == Math::Integer);
    PRODUCTS.with_borrow_mut(|products| {
        products.clear();
        products.resize(2 * count * width, 0.0);
        for ((weight, lines), products) in weights.iter().zip(lines).zip(products.chunks_exact_mut(count * width)) {
            let view = part(weight, rows.clone());
            let mut outs = [Out(std::ptr::null_mut()); BLOCK];
            for (out, products) in outs.iter_mut().zip(products.chunks_exact_mut(width)) {
                *out = Out(products.as_mut_ptr());
            }
            // SAFETY: `outs` are rows of our own buffer, as wide as the view has rows.
            unsafe { simd::product(isa, integer, &view, 0..width, lines, &outs[..count]) };
        }
        let (gates, ups) = products.split_at_mut(count * width);
        activate(gates, ups);
        for (line, values) in gates.chunks_exact(width).enumerate() {
            let row = first + line;
            match to.quantised {
                // SAFETY: ours to write (caller).
                Some(writer) => unsafe { writer.write(row, rows.start, values) },
                // SAFETY: ours to write (caller); a row has as many values as the weights have rows.
                None => unsafe {
                    let to = to.values.0.add(row * weights[0].rows + rows.start);
                    to.copy_from_nonoverlapping(values.as_ptr(), values.len());
                },
            }
        }
    });
}

wide! {
    /// `gate = silu(gate) * up`.
    fn activate(gate: &mut [f32], up: &[f32]) {
        for (gate, up) in gate.iter_mut().zip(up) {
            *gate = silu(*gate) * up;
        }
    }
}

/// Some rows of a weight, as a weight.
fn part<'a>(weight: &WeightView<'a>, rows: Range<usize>) -> WeightView<'a> {
    let sizes = weight.codes.row_bytes(weight.cols);
    let parts = [0, 1, 2].map(|index| &weight.parts[index][rows.start * sizes[index]..rows.end * sizes[index]]);
    WeightView { rows: rows.len(), parts, ..*weight }
}

/// Numbers the tasks of all jobs one after the other.
fn number<'a>(jobs: &[Job<'a>], first: &mut Vec<usize>, tasks: impl Fn(&Job<'a>) -> usize) {
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

/// The job of `task`, how many rows the jobs before it have, and the task's number within it.
fn locate(jobs: &[Job<'_>], first: &[usize], task: usize) -> (usize, usize, usize) {
    let job = first.partition_point(|first| *first <= task) - 1;
    (job, jobs[..job].iter().map(|job| job.rows.len()).sum(), task - first[job])
}
