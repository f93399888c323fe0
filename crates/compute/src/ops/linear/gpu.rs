//! Matrix products on a GPU (`kernels/linear.metal`).

use super::{Linear, Norm};
use crate::{
    device::{Binding, Launch, Region, SkipUse},
    ops::{Weight, quant::fast},
};

const NAMES: [[[&str; 2]; 2]; 2] = [
    [["gemv_1", "gemv_2"], ["gemv_norm_1", "gemv_norm_2"]],
    [["gemv_any_1", "gemv_any_2"], ["gemv_any_norm_1", "gemv_any_norm_2"]],
];

/// Number of rows of x per threadgroup if x has several rows. With more rows, a thread would need too many registers.
const BATCH_ROWS: usize = 2;

/// The words of the kernels' `LinearArgs`, without a skip flag. The flags are `add`, `keep` and `split_k`. `keep`:
/// threadgroups that store the normed x, or 0; for products of tiles, 1 if the rows are normed.
pub(super) fn args(sizes: [usize; 3], matrices: &[Weight], flags: [u32; 3], eps: f32) -> Vec<u32> {
    assert!((1..=4).contains(&matrices.len()), "{} matrices in one launch", matrices.len());
    let mut args = vec![0];
    args.extend(sizes.map(|size| size as u32));
    args.push(matrices.len() as u32);
    args.extend(flags);
    args.push(eps.to_bits());
    args.extend(pad_to_four(matrices).flat_map(Weight::words));
    args
}

/// Four matrices, as a kernel binds them. The last matrix fills the unused bindings.
pub(super) fn pad_to_four(matrices: &[Weight]) -> impl Iterator<Item = &Weight> {
    (0..4).map(|i| &matrices[i.min(matrices.len() - 1)])
}

/// Maximum number of rows of W for which the simdgroups of a threadgroup split the columns. Without the split, such a
/// launch would not fill a large GPU, and each simdgroup would wait for many loads in turn.
const SPLIT_K_MAX_ROWS: usize = 4096;

/// True if the kernels of 4-bit and 8-bit weights can read this matrix.
fn is_fast(matrix: &Weight) -> bool {
    fast(matrix.codes, matrix.global_scale, matrix.cols, &[4, 8])
}

/// The part of `rows` rows of `width` floats that starts at column `at` of the first row.
fn columns_from(y: Region, rows: usize, at: usize, width: usize) -> Region {
    y.floats(rows * width).part(at * 4, (rows * width - at) * 4)
}

impl Linear<'_> {
    /// Panics if there is no matrix, or more than four.
    pub fn launch(&self) -> Launch {
        self.launch_split(self.width())
    }

    /// [`Linear::launch`] with the output in the first columns of rows of `width` floats.
    pub(in crate::ops) fn launch_split(&self, width: usize) -> Launch {
        self.launch_with(0, width, self.width() <= SPLIT_K_MAX_ROWS)
    }

    /// A launch that never splits the columns, with the output in the first columns of rows of `width` floats.
    pub(in crate::ops) fn launch_into(&self, width: usize) -> Launch {
        self.launch_with(0, width, false)
    }

    /// A launch whose output starts at column `at` of rows of `width` floats.
    fn launch_with(&self, at: usize, width: usize, split_k: bool) -> Launch {
        let Self { x, tokens, norm, matrices, y, add } = *self;
        let cols = self.cols();
        let any = !matrices.iter().all(is_fast);
        let keep = norm.and_then(|n| n.keep);
        let x = x.floats(tokens * cols);
        let y = columns_from(y, tokens, at, width);
        let mut bindings = vec![
            Binding::read(x),
            Binding::read(norm.map_or(x.first(0), |n| n.weight.floats(cols))),
            if add || width > self.width() { Binding::read_write(y) } else { Binding::write(y) },
            keep.map_or(Binding::read(x.first(0)), |kept| Binding::write(kept.floats(tokens * cols))),
        ];
        bindings.extend(pad_to_four(matrices).flat_map(Weight::bindings));
        bindings.push(Binding::no_skip_flag(x));
        let batch = tokens > 1;
        // The four simdgroups of a threadgroup have four rows each, or share four rows.
        let blocks: usize = matrices.iter().map(|m| m.rows.div_ceil(if split_k { 4 } else { 16 })).sum();
        Launch {
            kernel: NAMES[usize::from(any)][usize::from(norm.is_some())][usize::from(batch)],
            args: args(
                [tokens, cols, width],
                matrices,
                [add.into(), keep.map_or(0, |_| blocks as u32), split_k.into()],
                norm.map_or(0.0, |n| n.eps),
            ),
            bindings,
            grid: [tokens.div_ceil(if batch { BATCH_ROWS } else { 1 }) as u32, blocks as u32, 1],
            threads: 128,
            skip: SkipUse::Reads,
        }
    }
}

/// Number of columns per step of a half-precision product. Half-precision rows are padded with zeros to a multiple of
/// this number.
const DEPTH: usize = 64;
/// Number of rows of x and number of rows of W per threadgroup.
const TILE: [usize; 2] = [64, 64];
/// The kernels for few rows of x (`kernels/short_prompt.metal`): rows of x, rows of W per threadgroup, and threads. A
/// row has the same bytes with each kernel.
const SHORT: [(&str, usize, usize, u32); 3] =
    [("gemm_short_16", 16, 64, 256), ("gemm_short_32", 32, 64, 128), ("gemm_short_64", 64, 64, 128)];

/// Buffers for half-precision rows.
#[derive(Debug, Clone, Copy, Default)]
pub struct HalfBuffers {
    /// Inputs of a product.
    pub x: Region,
    /// Activations between two products.
    pub act: Region,
    /// True if the device has the kernels for few rows.
    pub has_short: bool,
}

impl HalfBuffers {
    /// Number of 32-bit words of one row of `cols` values and its scale.
    pub fn words(cols: usize) -> usize {
        cols.next_multiple_of(DEPTH) / 2 + 1
    }

    /// Half-precision rows for the inputs of a product.
    pub(in crate::ops) fn rows(self, rows: usize, cols: usize) -> HalfRows {
        HalfRows { has_short: self.has_short, ..HalfRows::new(self.x, rows, cols) }
    }
}

/// Half-precision rows, and the power-of-two scale of each row.
#[derive(Debug, Clone, Copy)]
pub(in crate::ops) struct HalfRows {
    values: Region,
    scales: Region,
    cols: usize,
    has_short: bool,
}

impl HalfRows {
    pub fn new(buffers: Region, rows: usize, cols: usize) -> Self {
        let bytes = rows * cols.next_multiple_of(DEPTH) * 2;
        Self { values: buffers.first(bytes), scales: buffers.part(bytes, rows * 4), cols, has_short: false }
    }

    pub fn bindings(&self) -> [Binding; 2] {
        [self.values, self.scales].map(Binding::read)
    }

    /// Converts all rows of `x`, with `stride` floats per row, to half precision. If `norm` is given, normalises the
    /// rows first.
    pub fn fill(&self, x: Region, stride: usize, norm: Option<Norm>) -> Launch {
        self.launch(x, stride, norm, None, self.scales.len / 4)
    }

    /// Converts the `count` rows whose numbers are in `list` to half precision.
    pub fn fill_some(&self, x: Region, stride: usize, list: Region, count: usize) -> Launch {
        self.launch(x, stride, None, Some(list.floats(count)), count)
    }

    fn launch(&self, x: Region, stride: usize, norm: Option<Norm>, list: Option<Region>, count: usize) -> Launch {
        let cols = self.cols;
        let rows = self.scales.len / 4;
        let none = Binding::read(x.first(0));
        let keep = norm.and_then(|norm| norm.keep);
        let words = [cols, stride, cols.next_multiple_of(DEPTH), norm.is_some().into(), keep.is_some().into()];
        let mut args = words.map(|w| w as u32).to_vec();
        args.extend([list.is_some().into(), norm.map_or(0.0, |norm| norm.eps).to_bits()]);
        let write = if list.is_some() { Binding::read_write } else { Binding::write };
        Launch {
            kernel: "rows_to_half",
            args,
            bindings: vec![
                Binding::read(x.floats(rows * stride)),
                norm.map_or(none, |norm| Binding::read(norm.weight.floats(cols))),
                list.map_or(none, Binding::indices),
                write(self.values),
                write(self.scales),
                keep.map_or(none, |keep| Binding::write(keep.floats(rows * cols))),
            ],
            grid: [count as u32, 1, 1],
            threads: 128,
            skip: SkipUse::None,
        }
    }

    /// `y = x W^T` for one to four matrices, or `y += x W^T` if `add` is true. The results of the matrices are adjacent
    /// and start at column `at` of rows of `width` floats.
    fn product(&self, matrices: &[Weight], y: Region, at: usize, width: usize, add: bool) -> Launch {
        let tokens = self.scales.len / 4;
        let cols = self.cols;
        let any = !matrices.iter().all(is_fast);
        let rows: usize = matrices.iter().map(|m| m.rows).sum();
        let y = columns_from(y, tokens, at, width);
        let mut bindings = self.bindings().to_vec();
        bindings.push(if add || rows < width { Binding::read_write(y) } else { Binding::write(y) });
        bindings.extend(pad_to_four(matrices).flat_map(Weight::bindings));
        let has_short = self.has_short && !any && cols.is_multiple_of(2 * DEPTH);
        let short = SHORT.into_iter().find(|(_, most, ..)| has_short && tokens <= *most);
        let long = (if any { "gemm_any" } else { "gemm" }, TILE[0], TILE[1], 128);
        let (kernel, batch, block, threads) = short.unwrap_or(long);
        let blocks: usize = matrices.iter().map(|m| m.rows.div_ceil(block)).sum();
        Launch {
            kernel,
            args: args([tokens, cols, width], matrices, [add.into(), 0, 0], 0.0),
            bindings,
            grid: [tokens.div_ceil(batch) as u32, blocks as u32, 1],
            threads,
            skip: SkipUse::None,
        }
    }
}

/// Maximum number of rows of a matrix that a prompt multiplies in f32, if `gemm` cannot read the matrix. `gemm_any`
/// waits for memory at every step, so the few threadgroups of such a matrix take longer than all others of a launch.
const FEW_ROWS: usize = 16;

impl Linear<'_> {
    /// [`Linear::launch`] in half precision on matrix units.
    pub fn half_launches(&self, buffers: HalfBuffers) -> Vec<Launch> {
        let Self { x, tokens, norm, .. } = *self;
        let rows = buffers.rows(tokens, self.cols());
        let part = Linear { norm: norm.map(|norm| Norm { keep: None, ..norm }), ..*self };
        [vec![rows.fill(x, self.cols(), norm)], part.products(&rows, 0, self.width())].concat()
    }

    /// The products of `rows`, the half-precision rows of x, from column `at` of rows of `width` floats. Matrices with
    /// few rows in another format than `gemm`'s are multiplied in f32. This choice depends on the matrix only, so a row
    /// has the same bytes in every chunk of a prompt.
    pub(in crate::ops) fn products(&self, rows: &HalfRows, mut at: usize, width: usize) -> Vec<Launch> {
        let has_few_rows = |matrix: &Weight| matrix.rows <= FEW_ROWS && !is_fast(matrix);
        let mut launches = Vec::new();
        for matrices in self.matrices.chunk_by(|one, next| has_few_rows(one) == has_few_rows(next)) {
            let part = Linear { matrices, ..*self };
            launches.push(match matrices.iter().any(has_few_rows) {
                true => part.launch_with(at, width, true),
                false => rows.product(matrices, self.y, at, width, self.add),
            });
            at += part.width();
        }
        launches
    }
}
