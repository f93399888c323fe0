//! Products of decoded and drafted rows on matrix units (`split_rows` and `gemv_tiles_*` in `kernels/row_tiles.metal`).
//!
//! A format, a shape and a device decide whether a product runs here, never the number of rows. So a row gives the same
//! bytes alone and together with others.

use super::{
    Linear,
    gpu::{args, pad_to_four},
};
use crate::{
    device::{Binding, Launch, Region, SkipUse},
    ops::{Float, Weight, WeightFormat, quant::fast},
};

/// Number of columns of a group. Each group has a scale in W and a scale in x.
const GROUP: usize = 64;
/// Number of words of a group of x: halves, the sum and the inverse of the scale, and the sum of the squares.
const GROUP_WORDS: [usize; 3] = [GROUP, 2, 1];
/// Number of rows of x that are stored together.
const TILE_ROWS: usize = 4;
/// Number of rows of W of a tile.
const BLOCK_ROWS: usize = 16;

/// Number of simdgroups that share the columns of a product with `width` rows of W. With more simdgroups, fewer rows
/// fill a large GPU. With fewer, each has a longer run of copies.
fn splits(width: usize) -> usize {
    match width {
        ..=8192 => 8,
        8193..=65536 => 4,
        _ => 2,
    }
}

/// The formats of a product on matrix units, which have their own kernels and order of the columns of x.
#[derive(Clone, Copy, PartialEq, Eq)]
enum TileFormats {
    /// Affine with 4 or 8 bits.
    Affine,
    /// FP8 and mxfp4, and bf16 beside them.
    Floats,
}

/// The kernel for this many rows of x and of W: its name, rows of x, tiles of W per simdgroup, and simdgroups. It
/// changes no byte. The limits are those of an H200: with fewer rows of W, two tiles per simdgroup would leave
/// multiprocessors idle, and in the middle, the threadgroups of the other kernels fill a bit more than the GPU once.
fn kernel(formats: TileFormats, tokens: usize, width: usize) -> (&'static str, usize, usize, usize) {
    let is_middle = (12_673..=20_480).contains(&width);
    match tokens {
        0..=4 if formats == TileFormats::Floats => ("gemv_tiles_floats_4", 4, 1, 8),
        5..=8 if formats == TileFormats::Floats => ("gemv_tiles_floats_8", 8, 1, 8),
        _ if formats == TileFormats::Floats => ("gemv_tiles_floats_16", 16, 1, 8),
        0..=4 if is_middle => ("gemv_tiles_pair_4", 4, 2, 8),
        0..=4 => ("gemv_tiles_4", 4, 1, 8),
        5..=8 if (20_481..=65_536).contains(&width) => ("gemv_tiles_trio_8", 8, 3, 4),
        5..=8 if width > 4096 => ("gemv_tiles_pair_8", 8, 2, 8),
        5..=8 => ("gemv_tiles_8", 8, 1, 8),
        _ if width > 8192 && !is_middle => ("gemv_tiles_wide_16", 16, 2, 4),
        _ => ("gemv_tiles_16", 16, 1, 8),
    }
}

/// Products of decoded rows on matrix units: their minimum size, and their buffer.
#[derive(Debug, Clone, Copy)]
pub struct RowTiles {
    /// Minimum number of weights of a product.
    pub min_weights: usize,
    /// Buffer for the split rows.
    pub buffer: Region,
}

/// The values of the rows that are multiplied.
#[derive(Debug, Clone, Copy)]
pub enum RowSource {
    /// x, or with the product's norm `x / rms * weight`.
    Rows,
    /// x times 1 / rms of each head. `squares` has the sums of squares of the delta rule.
    Heads { squares: Region, heads: usize, size: usize, eps: f32 },
    /// `silu(gate) * up` of rows with both.
    Swiglu,
}

impl Linear<'_> {
    /// Number of words of the buffer for the split rows, or 0 if the product does not run on matrix units.
    pub fn split_words(&self, min_weights: usize) -> usize {
        let cols = self.cols();
        let fits = cols.is_multiple_of(2 * GROUP)
            && self.width() * cols >= min_weights
            && self.norm.is_none_or(|norm| norm.keep.is_none())
            && self.tile_formats().is_some();
        if fits { self.split_parts().iter().sum() } else { 0 }
    }

    /// `None` if the kernels for tiles cannot read these matrices, or if all are bf16: on an H200, vector units take 0.6
    /// of the time for one row.
    fn tile_formats(&self) -> Option<TileFormats> {
        let is_packed = |m: &Weight| matches!(m.codes, WeightFormat::Mxfp4 | WeightFormat::Fp8(Some(_)));
        let is_float =
            |m: &Weight| (is_packed(m) || m.codes == WeightFormat::Dense(Float::Bf16)) && m.global_scale == 1.0;
        if self.matrices.iter().all(|m| fast(m.codes, m.global_scale, m.cols, &[4, 8])) {
            Some(TileFormats::Affine)
        } else if self.matrices.iter().all(is_float) && self.matrices.iter().any(is_packed) {
            Some(TileFormats::Floats)
        } else {
            None
        }
    }

    /// The launches of rows that are computed as in decoding.
    pub fn launches(&self, tiles: Option<RowTiles>) -> Vec<Launch> {
        match self.tiled(tiles, RowSource::Rows) {
            Some(launches) => launches.to_vec(),
            None => vec![self.launch()],
        }
    }

    /// The split of the rows, then the product. `None` if the product does not run on matrix units.
    pub fn tiled(&self, tiles: Option<RowTiles>, source: RowSource) -> Option<[Launch; 2]> {
        let tiles = tiles.filter(|tiles| self.split_words(tiles.min_weights) > 0)?;
        let [halves, factors, squares] = self.split_parts().map(|words| words * 4);
        let parts = [
            tiles.buffer.first(halves),
            tiles.buffer.part(halves, factors),
            tiles.buffer.part(halves + factors, squares),
        ];
        let formats = self.tile_formats()?;
        Some([self.split(parts, source, formats), self.tile_product(parts, formats)])
    }

    /// Number of words of each part of the split rows. Whole tiles of rows are stored.
    fn split_parts(&self) -> [usize; 3] {
        GROUP_WORDS.map(|words| words * self.tokens.next_multiple_of(TILE_ROWS) * (self.cols() / GROUP))
    }

    fn split(&self, parts: [Region; 3], source: RowSource, formats: TileFormats) -> Launch {
        let Self { x, tokens, norm, .. } = *self;
        let cols = self.cols();
        let plain = [0, 0, 0];
        let (stride, second, [kind, heads, size], eps) = match source {
            RowSource::Rows => match norm {
                Some(norm) => (cols, norm.weight.floats(cols), [1, 0, 0], 0.0),
                None => (cols, x.first(0), plain, 0.0),
            },
            RowSource::Heads { squares, heads, size, eps } => (cols, squares, [2, heads, size], eps),
            RowSource::Swiglu => (2 * cols, x.first(0), [3, 0, 0], 0.0),
        };
        let mut words = [cols, stride, kind, heads, size].map(|word| word as u32).to_vec();
        words.extend([eps.to_bits(), (formats == TileFormats::Floats).into()]);
        let mut bindings = vec![Binding::read(x.floats(tokens * stride)), Binding::read(second)];
        bindings.extend(parts.map(Binding::write));
        Launch {
            kernel: "split_rows",
            args: words,
            bindings,
            grid: [(cols / GROUP).div_ceil(4) as u32, tokens as u32, 1],
            threads: 128,
            skip: SkipUse::None,
        }
    }

    fn tile_product(&self, parts: [Region; 3], formats: TileFormats) -> Launch {
        let Self { tokens, norm, matrices, y, add, .. } = *self;
        let width = self.width();
        let y = y.floats(tokens * width);
        let mut bindings = parts.map(Binding::read).to_vec();
        bindings.push(if add { Binding::read_write(y) } else { Binding::write(y) });
        bindings.extend(pad_to_four(matrices).flat_map(Weight::bindings));
        bindings.push(Binding::no_skip_flag(parts[0]));
        let splits = splits(width);
        let (kernel, batch, tiles, simds) = kernel(formats, tokens, width);
        let rows = BLOCK_ROWS * tiles * simds / splits;
        let blocks: usize = matrices.iter().map(|m| m.rows.div_ceil(rows)).sum();
        let sizes = [tokens, self.cols(), width];
        Launch {
            kernel,
            args: args(
                sizes,
                matrices,
                [add.into(), norm.is_some().into(), splits as u32],
                norm.map_or(0.0, |n| n.eps),
            ),
            bindings,
            grid: [tokens.div_ceil(batch) as u32, blocks as u32, 1],
            threads: 32 * simds as u32,
            skip: SkipUse::Reads,
        }
    }
}
