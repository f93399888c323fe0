//! Products with several matrices as one parallel job. A row of the result has the same bytes for any number of tokens
//! and threads. With [`CpuArithmetic::Integer`](crate::device::CpuArithmetic), affine weights are multiplied with
//! quantized activations (see [`quant`](crate::ops::quant)). All other products are f32.

use super::{
    Norm,
    products::{Activations, Product, multiply},
};
use crate::{
    device::{CpuDevice, DeviceError, Region},
    ops::{
        WeightFormat, WeightView,
        cpu::{CpuMemory, refuse},
        norm::normalise,
        quant::{ActivationCache, QuantizedRow},
        simd::{Isa, OutPtr, wide},
    },
};
use moestro_base::platform::Threads;
use std::{cell::RefCell, ops::Range};

/// The number of weight rows in a task is a multiple of this, the block height of the widest kernel. For a single row
/// of activations, which uses no blocks, it is a multiple of half of this.
const ROW_UNIT: usize = 32;
/// Minimum and maximum number of bytes of weights in a task. With smaller tasks, claiming tasks would cost too much.
/// With larger tasks, threads would wait longer for the last task.
const TASK_BYTES: Range<usize> = 16 << 10..96 << 10;
/// Maximum number of rows of activations in a task. The quantized values of these rows stay in L2 while the weights are
/// read. Tasks with consecutive numbers share the rows. There are many tasks, so all threads finish at about the same
/// time.
const BLOCK: usize = 128;

wide! {
    fn add(y: &mut [f32], x: &[f32]) {
        for (y, x) in y.iter_mut().zip(x) {
            *y += x;
        }
    }
}

/// Returns the input rows of the product: `x`, or the normalised `x`, which is stored in `norm.keep` or `own`. Also
/// returns the region of these rows. `None` if the rows are in `own`.
pub(in crate::ops) fn normed<'a>(
    compute: &CpuDevice,
    memory: &'a CpuMemory,
    x: Region,
    tokens: usize,
    cols: usize,
    norm: Option<Norm>,
    own: &'a mut Vec<f32>,
) -> (&'a [f32], Option<Region>) {
    let at = x.floats(tokens * cols);
    let x = memory.floats(at);
    let Some(norm) = norm else { return (x, Some(at)) };
    let keep = norm.keep.map(|keep| keep.floats(tokens * cols));
    let y = match keep {
        Some(keep) => memory.floats_mut(keep),
        None => {
            own.resize((tokens * cols).max(own.len()), 0.0);
            &mut own[..tokens * cols]
        }
    };
    let weight = memory.floats(norm.weight.floats(cols));
    compute.threads.run_pieces(y, 16 * cols, &|task, piece| {
        for (row, y) in piece.chunks_exact_mut(cols).enumerate() {
            normalise(&x[(task * 16 + row) * cols..][..cols], weight, norm.eps, y);
        }
    });
    (y, keep)
}

/// A weight, and the output column of its first row.
#[derive(Clone, Copy, Default)]
pub(in crate::ops) struct OutputColumns<'a> {
    pub weight: WeightView<'a>,
    pub at: usize,
}

/// Checks the sizes that the kernels rely on.
pub(in crate::ops) fn check(view: &WeightView<'_>, cols: usize) -> Result<(), DeviceError> {
    let known = match view.codes {
        WeightFormat::Affine { bits, group, .. } => matches!(bits, 2..=6 | 8) && matches!(group, 32 | 64 | 128),
        _ => true,
    };
    let sizes = view.codes.part_bytes(view.rows, cols);
    let fits = view.parts.iter().zip(sizes).all(|(part, bytes)| part.len() == bytes);
    if !known || view.cols != cols || !cols.is_multiple_of(view.codes.group()) || !fits {
        let (found, WeightView { codes, rows, cols: have, .. }) = (view.parts.map(<[u8]>::len), view);
        return refuse(format!(
            "weight {codes:?} [{rows}, {have}] with parts of {found:?} bytes does not fit {cols} input columns"
        ));
    }
    Ok(())
}

thread_local! {
    /// Input rows and outputs of one task.
    static TASK_BUFFERS: RefCell<(Vec<Activations<'static>>, Vec<OutPtr>)> = RefCell::default();
}

/// Returns an empty vector that reuses the memory of `list`. The elements may have another lifetime.
pub(in crate::ops) fn reuse_empty<A, B>(mut list: Vec<A>) -> Vec<B> {
    list.clear();
    // Collecting nothing from a vector of the same layout keeps its memory.
    list.into_iter().filter_map(|_| None).collect()
}

/// Multiplies the rows `x`, already quantized, with all weights. Writes the results to the weights' columns of `out`,
/// `[tokens, width]`. If `sums` is given, each task also adds its results to `sums`, which has the same shape as `out`.
#[allow(clippy::too_many_arguments)]
pub(in crate::ops) fn product(
    compute: &CpuDevice,
    quantized: &ActivationCache,
    x: &[f32],
    cols: usize,
    weights: &[OutputColumns<'_>],
    out: &mut [f32],
    width: usize,
    sums: Option<OutPtr>,
) {
    let tokens = x.len() / cols.max(1);
    let base = OutPtr(out.as_mut_ptr());
    let mut rows_of = [None; 4];
    for (rows, OutputColumns { weight, .. }) in rows_of.iter_mut().zip(weights) {
        *rows = quantized.of(compute.arithmetic, weight.codes);
    }
    let input = |weight: usize, token: usize| Activations {
        x: &x[token * cols..(token + 1) * cols],
        digits: rows_of[weight].map_or_else(QuantizedRow::default, |rows| rows.row(token)),
    };
    // SAFETY: the address is inside `out`, which has `width` columns.
    let output = |weight: usize, token: usize| unsafe { base.add(token * width + weights[weight].at) };
    let height = height(&compute.threads, weights, if tokens > 1 { ROW_UNIT } else { ROW_UNIT / 2 });
    let isa = Isa::best();
    let block = tokens.clamp(1, BLOCK);
    let count = tasks(weights, height);
    compute.threads.run(count * tokens.div_ceil(block), &|task| {
        let at = task / count * block;
        let task = task % count;
        let (index, rows) = locate(weights, height, task);
        let batch = at..(at + block).min(tokens);
        let compute_batch = |inputs: &[Activations<'_>], outs: &[OutPtr]| {
            let product = Product { weight: &weights[index].weight, rows: rows.clone(), inputs, outs };
            // SAFETY: sizes were checked. Each task writes its own columns of the outputs.
            unsafe { multiply(isa, compute.arithmetic, product) };
            let Some(sums) = sums else { return };
            for (out, token) in outs.iter().zip(batch.clone()) {
                // SAFETY: no other task reads or writes these results and these sums.
                unsafe {
                    let sums = sums.add(token * width + weights[index].at + rows.start).0;
                    add(
                        std::slice::from_raw_parts_mut(sums, rows.len()),
                        std::slice::from_raw_parts(out.add(rows.start).0, rows.len()),
                    );
                }
            }
        };
        if tokens == 1 {
            return compute_batch(&[input(index, 0)], &[output(index, 0)]);
        }
        TASK_BUFFERS.with_borrow_mut(|(own, outs)| {
            let mut inputs: Vec<Activations<'_>> = reuse_empty(std::mem::take(own));
            inputs.extend(batch.clone().map(|token| input(index, token)));
            outs.clear();
            outs.extend(batch.clone().map(|token| output(index, token)));
            compute_batch(&inputs, outs);
            *own = reuse_empty(inputs);
        });
    });
}

/// Number of rows of weights in one task, a multiple of `unit`.
fn height(threads: &Threads, weights: &[OutputColumns<'_>], unit: usize) -> usize {
    let bytes: usize = weights.iter().flat_map(|column| column.weight.parts).map(<[u8]>::len).sum();
    let rows: usize = weights.iter().map(|column| column.weight.rows).sum();
    let task = (bytes / (8 * threads.count())).clamp(TASK_BYTES.start, TASK_BYTES.end);
    (task * rows / bytes.max(1)).next_multiple_of(unit).max(unit)
}

fn tasks(weights: &[OutputColumns<'_>], height: usize) -> usize {
    weights.iter().map(|column| column.weight.rows.div_ceil(height)).sum()
}

/// The index of the weight that `task` multiplies, and the range of its rows.
fn locate(weights: &[OutputColumns<'_>], height: usize, mut task: usize) -> (usize, Range<usize>) {
    for (index, OutputColumns { weight, .. }) in weights.iter().enumerate() {
        let here = weight.rows.div_ceil(height);
        if task < here {
            return (index, task * height..((task + 1) * height).min(weight.rows));
        }
        task -= here;
    }
    (0, 0..0)
}
