//! Activations as 16-bit integers with a scale per weight group.
//!
//! A group of `n` values becomes `q_i = round_half_even(x_i / s)`, `s = max|x| / 32639`, together with
//! `sum = s * (q_0 + ... + q_{n-1})` for the bias of an affine weight. 32639 = 127 * 257, not 32767, so that every `q` is also
//! `256 * high + low` with two signed bytes: the form that byte multiply instructions want. The relative error of a
//! product is about 2e-5. All of it is integer or single-rounded f32 arithmetic, hence the same bytes on every processor.

use std::ops::Range;

/// Largest magnitude of a quantised activation.
pub const LEVELS: f32 = 32639.0;
/// Below this maximum a group counts as zero: its reciprocal scale would overflow.
const TINY: f32 = 1e-30;
/// Adding and subtracting 1.5 * 2^23 rounds an f32 below 2^22 to an integer, half to even.
const ROUND: f32 = 12_582_912.0;

/// In which order the values of a row are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Order {
    /// As they come.
    Natural,
    /// In each unit of 64 (32 if the group is 32) first the even, then the odd ones: the order in which the low and the
    /// high nibbles of packed 4-bit codes come out of a mask and a shift.
    Nibbles,
}

impl Order {
    /// Values that are permuted among themselves.
    pub fn unit(group: usize) -> usize {
        group.min(64)
    }

    /// Where value `index` is kept.
    pub fn place(self, index: usize, group: usize) -> usize {
        let unit = Self::unit(group);
        match self {
            Order::Natural => index,
            Order::Nibbles => index / unit * unit + index % 2 * (unit / 2) + index % unit / 2,
        }
    }
}

/// Quantised rows. Buffers keep their capacity, so that a reused one allocates nothing.
#[derive(Debug, Default)]
pub struct Quantised {
    cols: usize,
    groups: usize,
    q: Vec<i16>,
    high: Vec<i8>,
    low: Vec<i8>,
    scale: Vec<f32>,
    sum: Vec<f32>,
}

/// One quantised row. `scale` and `sum` are padded with zeros to a multiple of eight groups.
#[derive(Debug, Clone, Copy, Default)]
pub struct Digits<'a> {
    pub q: &'a [i16],
    pub high: &'a [i8],
    pub low: &'a [i8],
    pub scale: &'a [f32],
    pub sum: &'a [f32],
}

/// Rows of a [`Quantised`] being written; see [`Quantised::writer`].
#[derive(Clone, Copy)]
pub struct Writer {
    cols: usize,
    groups: usize,
    group: usize,
    order: Order,
    q: *mut i16,
    high: *mut i8,
    low: *mut i8,
    scale: *mut f32,
    sum: *mut f32,
}

// SAFETY: a Writer is a set of pointers; whoever writes through it promises disjoint ranges (see `Writer::write`).
unsafe impl Send for Writer {}
// SAFETY: as above.
unsafe impl Sync for Writer {}

impl Quantised {
    /// Makes room for `rows` rows of `cols` values in groups of `group`.
    pub fn resize(&mut self, rows: usize, cols: usize, group: usize) {
        debug_assert!(cols.is_multiple_of(group));
        self.cols = cols;
        self.groups = (cols / group).next_multiple_of(8);
        self.q.resize(rows * cols, 0);
        self.high.resize(rows * cols, 0);
        self.low.resize(rows * cols, 0);
        // The padding must be zero whatever the buffers held before.
        self.scale.clear();
        self.scale.resize(rows * self.groups, 0.0);
        self.sum.clear();
        self.sum.resize(rows * self.groups, 0.0);
    }

    /// A handle through which several threads fill disjoint parts; valid until the next `resize`.
    pub fn writer(&mut self, group: usize, order: Order) -> Writer {
        Writer {
            cols: self.cols,
            groups: self.groups,
            group,
            order,
            q: self.q.as_mut_ptr(),
            high: self.high.as_mut_ptr(),
            low: self.low.as_mut_ptr(),
            scale: self.scale.as_mut_ptr(),
            sum: self.sum.as_mut_ptr(),
        }
    }

    pub fn row(&self, row: usize) -> Digits<'_> {
        let (values, groups) = (row * self.cols..(row + 1) * self.cols, row * self.groups..(row + 1) * self.groups);
        Digits {
            q: &self.q[values.clone()],
            high: &self.high[values.clone()],
            low: &self.low[values],
            scale: &self.scale[groups.clone()],
            sum: &self.sum[groups],
        }
    }
}

impl Writer {
    /// Quantises `values`, which are the columns from `col` on of `row`; both are multiples of the group.
    ///
    /// # Safety
    /// The [`Quantised`] lives and was not resized; the range lies inside it; no one else reads or writes it meanwhile.
    pub unsafe fn write(&self, row: usize, col: usize, values: &[f32]) {
        let at = row * self.cols + col;
        for (index, values) in values.chunks_exact(self.group).enumerate() {
            let at = at + index * self.group;
            let group = row * self.groups + col / self.group + index;
            // SAFETY: one whole group inside the buffers, exclusively ours (caller).
            unsafe {
                let q = std::slice::from_raw_parts_mut(self.q.add(at), self.group);
                let (scale, sum) = quantise(values, q, self.order);
                let high = std::slice::from_raw_parts_mut(self.high.add(at), self.group);
                let low = std::slice::from_raw_parts_mut(self.low.add(at), self.group);
                for ((q, high), low) in q.iter().zip(high).zip(low) {
                    *low = *q as i8;
                    *high = ((i32::from(*q) + 128) >> 8) as i8;
                }
                self.scale.add(group).write(scale);
                self.sum.add(group).write(sum);
            }
        }
    }

    /// Quantises whole rows of `x` (`[.., cols]`). Safety as for [`Writer::write`].
    ///
    /// # Safety
    /// As for [`Writer::write`].
    pub unsafe fn rows(&self, x: &[f32], rows: Range<usize>) {
        for row in rows {
            // SAFETY: passed on.
            unsafe { self.write(row, 0, &x[row * self.cols..(row + 1) * self.cols]) };
        }
    }
}

/// One group: fills `q` and returns scale and scaled sum. A group with a value that is not finite has the scale NaN, so
/// that the damage shows in every product and nowhere else.
#[inline(always)]
pub(super) fn quantise(values: &[f32], q: &mut [i16], order: Order) -> (f32, f32) {
    // Bit patterns of magnitudes are ordered like the magnitudes, with NaN on top.
    let most = values.iter().fold(0u32, |most, value| most.max(value.to_bits() & 0x7fff_ffff));
    let most = f32::from_bits(most);
    if !(TINY..=f32::MAX).contains(&most) {
        q.fill(0);
        return if most.is_finite() { (0.0, 0.0) } else { (f32::NAN, f32::NAN) };
    }
    let inverse = LEVELS / most;
    let scale = most / LEVELS;
    let round = |value: f32| (value * inverse + ROUND).to_bits().wrapping_sub(ROUND.to_bits()) as i32;
    let mut sum = 0i32;
    match order {
        Order::Natural => {
            for (value, q) in values.iter().zip(q.iter_mut()) {
                let rounded = round(*value);
                sum += rounded;
                *q = rounded as i16;
            }
        }
        Order::Nibbles => {
            let unit = Order::unit(values.len());
            for (values, q) in values.chunks_exact(unit).zip(q.chunks_exact_mut(unit)) {
                let (even, odd) = q.split_at_mut(unit / 2);
                for ((pair, even), odd) in values.chunks_exact(2).zip(even).zip(odd) {
                    let (a, b) = (round(pair[0]), round(pair[1]));
                    sum += a + b;
                    *even = a as i16;
                    *odd = b as i16;
                }
            }
        }
    }
    (scale, scale * sum as f32)
}
