//! Activations as integers of up to 22 bits with one scale for each weight group.
//!
//! A group of `n` values becomes `q_i = round_half_even(x_i / s)` with `s = max|x| / levels`, together with `sum = s *
//! (q_0 + ... + q_{n-1})` for the bias of an affine weight. The dot product of a group must fit an i32, so `levels` is
//! at most `(2^31 - 1) / (n * (2^bits - 1))`. `levels` is also at most 2^21, because the rounding below is exact up to
//! 2^21.
//!
//! For groups of 64 and codes of up to 4 bits, `levels` is 2^21. The error of a product is then that of f32 arithmetic
//! (about 2e-7). For codes of 8 bits, `levels` is 131586, and the error is about 4e-6.
//!
//! A `q` is stored as `65536 * high + 256 * middle + low` in three signed bytes, for byte multiply instructions. All
//! arithmetic is integer or f32 with a single rounding, so all processors give the same bytes.

use std::ops::Range;

use super::weight::WeightFormat;
use crate::{
    device::{CpuArithmetic, CpuDevice, Region},
    ops::simd::{
        CacheLine,
        math::{ROUND, rounded},
        wide,
    },
};

/// Maximum number of levels. A product with the inverse scale then stays below `levels + 1/2`, however it is rounded.
const MAX_LEVELS: u32 = 1 << 21;
/// A group whose largest magnitude is below this counts as zero, because its inverse scale would overflow.
const TINY: f32 = 1e-30;
/// Maximum number of values in a group.
const MAX_GROUP: usize = 128;

/// The order in which the values of a row are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ValueOrder {
    /// The order of the matrix columns.
    Natural,
    /// In each unit of 64 values (32 if the group is 32), first the even values, then the odd ones. A mask and a
    /// shift produce packed 4-bit codes in this order.
    Nibbles,
}

impl ValueOrder {
    /// Number of values in one unit.
    pub fn unit(group: usize) -> usize {
        group.min(64)
    }
}

/// The format of activations for one weight format.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ActivationFormat {
    pub group: usize,
    pub order: ValueOrder,
    /// Largest magnitude of a quantized value.
    pub levels: u32,
}

impl ActivationFormat {
    /// The format for weight codes of 2 to 8 bits with one scale for each `group` of at most 128 values.
    pub fn new(bits: u8, group: u16) -> Self {
        debug_assert!(usize::from(group) <= MAX_GROUP);
        let max = u32::from(group) * ((1 << bits) - 1);
        Self {
            group: group.into(),
            order: if bits == 4 { ValueOrder::Nibbles } else { ValueOrder::Natural },
            levels: (i32::MAX as u32 / max).min(MAX_LEVELS),
        }
    }
}

/// Quantized rows. Buffers keep their capacity for the next call.
#[derive(Debug, Default)]
pub struct QuantizedRows {
    cols: usize,
    groups: usize,
    /// `[rows][3][cols]`, each row padded to whole cache lines: the high, middle and low digits.
    planes: Vec<CacheLine>,
    scale: Vec<f32>,
    sum: Vec<f32>,
}

/// The input rows of a product, quantized in each format that its weights need. Valid until the f32 rows are
/// overwritten.
#[derive(Default)]
pub struct ActivationCache {
    /// Region of the f32 rows. `None` if the rows are not in a buffer of the backend.
    region: Option<Region>,
    formats: Vec<ActivationFormat>,
    rows: Vec<QuantizedRows>,
}

impl ActivationCache {
    /// Quantizes `x` (`[tokens, cols]` in `region`) in the formats that `codes` need. Formats that are cached are
    /// skipped.
    pub fn fill(
        &mut self,
        compute: &CpuDevice,
        region: Option<Region>,
        x: &[f32],
        tokens: usize,
        cols: usize,
        codes: impl Iterator<Item = WeightFormat>,
    ) {
        if region.is_none() || self.region != region {
            self.formats.clear();
            self.region = region;
        }
        for format in codes.filter_map(|codes| format(compute.arithmetic, codes)) {
            if self.formats.contains(&format) {
                continue;
            }
            let index = self.formats.len();
            self.formats.push(format);
            if self.rows.len() == index {
                self.rows.push(QuantizedRows::default());
            }
            let writer = self.rows[index].resize(tokens, cols, format);
            compute.threads.run_split(tokens, 8, &|range| {
                // SAFETY: the ranges of a split are disjoint and inside `tokens`. The rows are borrowed until all
                // tasks are done.
                unsafe { writer.rows(x, range) };
            });
        }
    }

    /// The rows for a weight of format `codes`; `None` if the product is f32.
    pub fn of(&self, math: CpuArithmetic, codes: WeightFormat) -> Option<&QuantizedRows> {
        let wanted = format(math, codes)?;
        self.formats.iter().position(|format| *format == wanted).map(|index| &self.rows[index])
    }

    /// Drops rows that were quantized from `region`, whose bytes change.
    pub fn forget(&mut self, region: Region) {
        if self.region.is_some_and(|cached| cached.overlaps(region)) {
            self.region = None;
        }
    }
}

/// One quantized row. `planes` are the high, middle and low digits. `scale` and `sum` are zero-padded to a multiple
/// of eight groups.
#[derive(Debug, Clone, Copy, Default)]
pub struct QuantizedRow<'a> {
    pub planes: [&'a [i8]; 3],
    pub scale: &'a [f32],
    pub sum: &'a [f32],
}

/// Writes rows of a [`QuantizedRows`]. Created by [`QuantizedRows::resize`].
#[derive(Clone, Copy)]
pub struct RowWriter {
    cols: usize,
    groups: usize,
    format: ActivationFormat,
    planes: *mut i8,
    scale: *mut f32,
    sum: *mut f32,
}

// SAFETY: a RowWriter is a set of pointers. Callers of `RowWriter::write` guarantee disjoint ranges.
unsafe impl Send for RowWriter {}
// SAFETY: as above.
unsafe impl Sync for RowWriter {}

impl QuantizedRows {
    /// Number of bytes of a row of `cols` values with groups of 32 or more.
    pub fn row_bytes(cols: usize) -> usize {
        3 * cols.next_multiple_of(64) + 8 * (cols / 32).next_multiple_of(8)
    }

    /// Resizes the buffers for `rows` rows of `cols` values. Returns a handle through which several threads fill
    /// disjoint parts, valid until the next call. Every part must be written before it is read.
    pub fn resize(&mut self, rows: usize, cols: usize, format: ActivationFormat) -> RowWriter {
        debug_assert!(cols.is_multiple_of(format.group));
        self.cols = cols;
        self.groups = (cols / format.group).next_multiple_of(8);
        // Never shrinks, because growing again would clear the memory.
        self.planes.resize((rows * 3 * cols.div_ceil(64)).max(self.planes.len()), CacheLine::ZERO);
        // The padding must be zero.
        self.scale.clear();
        self.scale.resize(rows * self.groups, 0.0);
        self.sum.clear();
        self.sum.resize(rows * self.groups, 0.0);
        RowWriter {
            cols: self.cols,
            groups: self.groups,
            format,
            planes: self.planes.as_mut_ptr().cast(),
            scale: self.scale.as_mut_ptr(),
            sum: self.sum.as_mut_ptr(),
        }
    }

    pub fn row(&self, row: usize) -> QuantizedRow<'_> {
        let groups = row * self.groups..(row + 1) * self.groups;
        QuantizedRow {
            planes: [0, 1, 2].map(|digit| {
                let lines = self.cols.div_ceil(64);
                let plane = &self.planes[(3 * row + digit) * lines..][..lines];
                // SAFETY: cache lines are digits without gaps. These lines hold at least `cols` digits.
                unsafe { std::slice::from_raw_parts(plane.as_ptr().cast(), self.cols) }
            }),
            scale: &self.scale[groups.clone()],
            sum: &self.sum[groups],
        }
    }
}

impl RowWriter {
    /// Quantizes `values`, the columns from `col` on of `row`. `col` and the number of values are multiples of the
    /// group.
    ///
    /// # Safety
    /// The [`QuantizedRows`] is alive and was not resized. The range is inside its buffers, and no other thread
    /// accesses the range.
    #[inline(always)]
    pub unsafe fn write(&self, row: usize, col: usize, values: &[f32]) {
        let stride = self.cols.next_multiple_of(64);
        let at = 3 * row * stride + col;
        let mut buffer = [0; MAX_GROUP];
        let q = &mut buffer[..self.format.group];
        for (index, values) in values.chunks_exact(q.len()).enumerate() {
            let at = at + index * q.len();
            let group = row * self.groups + col / q.len() + index;
            let (scale, sum) = quantize(values, q, self.format);
            // SAFETY: one whole group inside the buffers, with exclusive access (caller).
            unsafe {
                let plane = |digit| std::slice::from_raw_parts_mut(self.planes.add(at + digit * stride), q.len());
                let planes = [0, 1, 2].map(plane);
                split(q, planes);
                self.scale.add(group).write(scale);
                self.sum.add(group).write(sum);
            }
        }
    }

    /// Quantizes whole rows of `x` (`[.., cols]`).
    ///
    /// # Safety
    /// As for [`RowWriter::write`].
    #[inline(always)]
    pub unsafe fn rows(&self, x: &[f32], rows: Range<usize>) {
        for row in rows {
            // SAFETY: guaranteed by the caller.
            unsafe { self.write(row, 0, &x[row * self.cols..(row + 1) * self.cols]) };
        }
    }
}

wide! {
    /// Quantizes one group into `q`. Returns the scale and the scaled sum. If a value is not finite, the scale is
    /// NaN, so that exactly the products with this group become NaN.
    pub(in crate::ops) fn quantize(values: &[f32], q: &mut [i32], format: ActivationFormat) -> (f32, f32) {
        // Bit patterns of magnitudes have the same order as the magnitudes, and NaN is the largest.
        let max = values.iter().fold(0u32, |max, value| max.max(value.to_bits() & 0x7fff_ffff));
        let max = f32::from_bits(max);
        if !(TINY..=f32::MAX).contains(&max) {
            q.fill(0);
            return if max.is_finite() { (0.0, 0.0) } else { (f32::NAN, f32::NAN) };
        }
        let levels = format.levels as f32;
        let inverse = levels / max;
        let scale = max / levels;
        let round = |value: f32| rounded(value * inverse + ROUND);
        let mut sum = 0i32;
        match format.order {
            ValueOrder::Natural => {
                for (value, q) in values.iter().zip(q.iter_mut()) {
                    *q = round(*value);
                    sum += *q;
                }
            }
            ValueOrder::Nibbles => {
                let unit = ValueOrder::unit(values.len());
                for (values, q) in values.chunks_exact(unit).zip(q.chunks_exact_mut(unit)) {
                    let (even, odd) = q.split_at_mut(unit / 2);
                    for ((pair, even), odd) in values.chunks_exact(2).zip(even).zip(odd) {
                        *even = round(pair[0]);
                        *odd = round(pair[1]);
                        sum += *even + *odd;
                    }
                }
            }
        }
        (scale, scale * sum as f32)
    }
}

wide! {
    /// Splits values into three signed digits. Each digit is -128 to 127, and the remainder is a multiple of 256.
    fn split(q: &[i32], planes: [&mut [i8]; 3]) {
        let [high, middle, low] = planes;
        for (((q, high), middle), low) in q.iter().zip(high).zip(middle).zip(low) {
            *low = *q as i8;
            *middle = ((*q + 0x80) >> 8) as i8;
            *high = ((*q + 0x8080) >> 16) as i8;
        }
    }
}

/// The format of activations for this weight format; `None` if the product is f32.
pub(in crate::ops) fn format(math: CpuArithmetic, codes: WeightFormat) -> Option<ActivationFormat> {
    match (math, codes) {
        (CpuArithmetic::Integer, WeightFormat::Affine { bits, group, .. }) => Some(ActivationFormat::new(bits, group)),
        _ => None,
    }
}
