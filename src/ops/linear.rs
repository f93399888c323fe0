//! `y = x W^T` for one or several weights that share their input, as one parallel job.

use std::{cell::RefCell, ops::Range};

use candle_core::{CpuStorage, CustomOp1, Layout, Result, Shape, Tensor, backend::BackendStorage, bail};

use super::{
    quant::{Digits, Format, Quantised},
    simd::{self, Isa, Line, Out},
    weight::{Codes, Weight, WeightView},
};
use crate::{
    device::{Compute, Math, Span},
    platform::Threads,
};

/// Rows of weights are cut in multiples of this, the height of the widest kernel's tile.
const TILE: usize = 32;
/// A task is at least and at most this many bytes of weights: the cost of claiming one must not show, nor must the wait
/// for the last.
const TASK: Range<usize> = 16 << 10..96 << 10;

/// The products of `x` (`[T, in]`, f32) with every weight (`[rows, in]`), side by side: `[T, sum of rows]`, f32.
///
/// A row of the result has the same bytes whatever `T` and the number of threads. With [`Math::Integer`] affine weights
/// meet activations quantised to integers (see [`quant`](super::quant)), everything else is f32.
pub fn linear(compute: &Compute, x: &Tensor, weights: &[&Weight]) -> Result<Tensor> {
    x.apply_op1_no_bwd(&Linear { compute, weights })
}

struct Linear<'a> {
    compute: &'a Compute,
    weights: &'a [&'a Weight],
}

impl CustomOp1 for Linear<'_> {
    fn name(&self) -> &'static str {
        "linear"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let (tokens, cols) = layout.shape().dims2()?;
        let x = contiguous(storage, layout)?;
        let mut total = 0;
        for weight in self.weights {
            check(&weight.view(), cols)?;
            total += weight.rows;
        }
        let mut out = vec![0f32; tokens * total];
        forward(self.compute, x, tokens, cols, self.weights, total, &mut out);
        Ok((CpuStorage::F32(out), Shape::from((tokens, total))))
    }
}

/// The values of a contiguous f32 tensor.
pub(super) fn contiguous<'a>(storage: &'a CpuStorage, layout: &Layout) -> Result<&'a [f32]> {
    let (CpuStorage::F32(values), Some((start, end))) = (storage, layout.contiguous_offsets()) else {
        bail!("expected a contiguous f32 tensor, got {:?} {:?}", storage.dtype(), layout)
    };
    match values.get(start..end) {
        Some(values) => Ok(values),
        None => bail!("layout {layout:?} does not fit its storage"),
    }
}

/// Checks a weight's sizes, on which the kernels rely.
pub(super) fn check(view: &WeightView<'_>, cols: usize) -> Result<()> {
    let known = match view.codes {
        Codes::Affine { bits, group, .. } => matches!(bits, 2..=6 | 8) && matches!(group, 32 | 64 | 128),
        _ => true,
    };
    let sizes = view.codes.row_bytes(cols);
    let fits = view.parts.iter().zip(sizes).all(|(part, bytes)| part.len() == bytes * view.rows);
    if !known || view.cols != cols || !cols.is_multiple_of(view.codes.group()) || !fits {
        let found = view.parts.map(<[u8]>::len);
        bail!("weight {:?} [{}, {}] with parts of {found:?} bytes, for {cols} values", view.codes, view.rows, view.cols)
    }
    Ok(())
}

/// How the activations of an affine weight are quantised; `None` where the product is f32.
pub(super) fn format(math: Math, codes: Codes) -> Option<Format> {
    match (math, codes) {
        (Math::Integer, Codes::Affine { bits, group, .. }) => Some(Format::new(bits, group)),
        _ => None,
    }
}

/// Activations quantised once for each distinct format among the weights that read them.
#[derive(Default)]
pub(super) struct Formats {
    formats: Vec<Format>,
    rows: Vec<Quantised>,
}

impl Formats {
    /// Quantises `x` (`[tokens, cols]`) in every format that `codes` names.
    pub fn fill(
        &mut self,
        compute: &Compute,
        x: &[f32],
        tokens: usize,
        cols: usize,
        codes: impl Iterator<Item = Codes>,
    ) {
        self.formats.clear();
        for format in codes.filter_map(|codes| format(compute.math, codes)) {
            if !self.formats.contains(&format) {
                self.formats.push(format);
            }
        }
        if self.rows.len() < self.formats.len() {
            self.rows.resize_with(self.formats.len(), Quantised::default);
        }
        for (format, rows) in self.formats.iter().zip(&mut self.rows) {
            let writer = rows.resize(tokens, cols, *format);
            compute.threads.run_split(tokens, 8, &|range| {
                // SAFETY: the ranges of a split are disjoint and inside `tokens`; `rows` is borrowed until all are done.
                unsafe { writer.rows(x, range) };
            });
        }
    }

    /// The quantised `row` for a weight of `codes`; empty where the product is f32.
    pub fn row(&self, math: Math, codes: Codes, row: usize) -> Digits<'_> {
        let wanted = format(math, codes);
        let found = self.formats.iter().position(|format| Some(*format) == wanted);
        found.map_or_else(Digits::default, |index| self.rows[index].row(row))
    }
}

thread_local! {
    static FORMATS: RefCell<Formats> = RefCell::default();
}

fn forward(
    compute: &Compute,
    x: &[f32],
    tokens: usize,
    cols: usize,
    weights: &[&Weight],
    total: usize,
    out: &mut [f32],
) {
    // Taken, not borrowed: a task that panics or calls back must find nothing locked.
    let mut formats = FORMATS.take();
    formats.fill(compute, x, tokens, cols, weights.iter().map(|weight| weight.codes));
    let base = Out(out.as_mut_ptr());
    let line = |weight: usize, token: usize| Line {
        x: &x[token * cols..(token + 1) * cols],
        digits: formats.row(compute.math, weights[weight].codes, token),
    };
    let place = |weight: usize, token: usize| {
        let first: usize = weights[..weight].iter().map(|weight| weight.rows).sum();
        // SAFETY: inside `out`, which has `total` columns.
        unsafe { base.add(token * total + first) }
    };
    // Decode has one line, for which lists need not be made.
    let many = if tokens > 1 { weights.len() } else { 0 };
    let all = || (0..many).flat_map(|weight| (0..tokens).map(move |token| (weight, token)));
    let lines: Vec<Line<'_>> = all().map(|(weight, token)| line(weight, token)).collect();
    let outs: Vec<Out> = all().map(|(weight, token)| place(weight, token)).collect();
    let height = height(&compute.threads, weights);
    let isa = Isa::best();
    compute.threads.run(tasks(weights, height), &|task| {
        let (index, rows) = locate(weights, height, task);
        let range = index * tokens..(index + 1) * tokens;
        let one = ([line(index, 0)], [place(index, 0)]);
        let (lines, outs) = if tokens > 1 { (&lines[range.clone()], &outs[range]) } else { (&one.0[..], &one.1[..]) };
        // SAFETY: checked sizes; each task writes its own columns of the weight's outputs.
        unsafe { simd::product(isa, compute.math == Math::Integer, &weights[index].view(), rows, lines, outs) };
    });
    drop(lines);
    FORMATS.set(formats);
}

/// Rows of weights in one task.
fn height(threads: &Threads, weights: &[&Weight]) -> usize {
    let bytes: usize = weights.iter().flat_map(|weight| &weight.parts).map(Span::len).sum();
    let rows: usize = weights.iter().map(|weight| weight.rows).sum();
    let task = (bytes / (8 * threads.count())).clamp(TASK.start, TASK.end);
    (task * rows / bytes.max(1)).next_multiple_of(TILE).max(TILE)
}

fn tasks(weights: &[&Weight], height: usize) -> usize {
    weights.iter().map(|weight| weight.rows.div_ceil(height)).sum()
}

/// Which weight and rows `task` computes.
fn locate(weights: &[&Weight], height: usize, mut task: usize) -> (usize, Range<usize>) {
    for (index, weight) in weights.iter().enumerate() {
        let here = weight.rows.div_ceil(height);
        if task < here {
            return (index, task * height..((task + 1) * height).min(weight.rows));
        }
        task -= here;
    }
    (0, 0..0)
}
