//! Keys and values in 8 or 4 bits (`--kv-bits`): the row format, and which positions a query reads in this format.
//!
//! A row is first multiplied by a Hadamard matrix, which spreads outliers over all values. Queries are multiplied by
//! the same matrix, so products with keys do not change. Before the gate, the output of attention is multiplied by the
//! matrix again, which undoes the transform.
//!
//! Then each group of 32 values is stored as integers and one bf16 scale: a row has `D * bits / 8` bytes of codes and
//! `D / 32` scales. 8-bit integers are -127 to 127. 4-bit integers are the odd numbers from -15 to 15; byte `j` of a
//! group holds value `j` in its low nibble and value `j + 16` in its high nibble.
//!
//! A ring keeps the most recent positions exactly. A query at `p` reads positions from [`recent_start`]`(p)` on from
//! the ring. This start depends on `p` alone, so a row's result does not depend on when the row is computed.

use super::{GROUP, KvFormat, MAX_HEAD_DIM, PAGE};
use crate::ops::simd::{
    math::{ROUND, rounded},
    wide,
};

/// A query reads at least this many recent positions from the ring, and fewer than twice as many.
pub const RECENT: usize = 64;
/// A group whose largest magnitude is below this counts as zero, because its inverse scale would overflow.
const TINY: f32 = 1e-30;

/// The first position that a query at `position` reads from the ring. A multiple of [`RECENT`].
pub fn recent_start(position: usize) -> usize {
    (position / RECENT * RECENT).saturating_sub(RECENT)
}

/// Number of bits of a quantized format. `None` for [`KvFormat::F32`] and [`KvFormat::I16`].
pub(in crate::ops) fn bits(format: KvFormat) -> Option<usize> {
    match format {
        KvFormat::Eight => Some(8),
        KvFormat::Four => Some(4),
        KvFormat::F32 | KvFormat::I16 => None,
    }
}

wide! {
    /// `x = H x / sqrt(n)` for each `n` values, in place. `H` is the Hadamard matrix of size `n`, the largest power
    /// of two that divides the length. Applying it twice restores the input.
    pub(in crate::ops) fn hadamard(x: &mut [f32]) {
        let size = 1 << x.len().trailing_zeros().min(20);
        for x in x.chunks_exact_mut(size) {
            let mut half = 1;
            while half < size {
                for pair in x.chunks_exact_mut(2 * half) {
                    let (low, high) = pair.split_at_mut(half);
                    for (low, high) in low.iter_mut().zip(high) {
                        (*low, *high) = (*low + *high, *low - *high);
                    }
                }
                half *= 2;
            }
            let scale = 1.0 / (size as f32).sqrt();
            x.iter_mut().for_each(|x| *x *= scale);
        }
    }
}

wide! {
    /// Quantizes `row`, already transformed, into codes and scales. A group with a value that is not finite gets the scale NaN.
    pub(super) fn quantize_row(bits: usize, row: &[f32], codes: &mut [u8], scales: &mut [u8]) {
        let groups = row.chunks_exact(GROUP).zip(codes.chunks_exact_mut(GROUP * bits / 8));
        for ((group, codes), scale) in groups.zip(scales.chunks_exact_mut(2)) {
            // Bit patterns of magnitudes have the same order as the magnitudes, and NaN is the largest.
            let max = group.iter().fold(0u32, |max, value| max.max(value.to_bits() & 0x7fff_ffff));
            let max = f32::from_bits(max);
            // The scale is rounded up to bf16, so that no code exceeds `levels`.
            let levels = if bits == 8 { 127.0 } else { 15.0 };
            let up = ((max / levels).to_bits() + 0xffff) >> 16;
            let (half, inverse) = if max.is_nan() || up >= 0x7f80 {
                (0x7fc0, 0.0)
            } else if max < TINY {
                (0, 0.0)
            } else {
                (up, 1.0 / f32::from_bits(up << 16))
            };
            scale.copy_from_slice(&(half as u16).to_le_bytes());
            let round = |x: f32| rounded(x + ROUND);
            if bits == 8 {
                for (code, value) in codes.iter_mut().zip(group) {
                    *code = round(value * inverse) as u8;
                }
            } else {
                let (low, high) = group.split_at(GROUP / 2);
                let nibble = |value: f32| round(value * inverse * 0.5 + 7.5).clamp(0, 15) as u8;
                for ((code, low), high) in codes.iter_mut().zip(low).zip(high) {
                    *code = nibble(*low) | nibble(*high) << 4;
                }
            }
        }
    }
}

/// Unpacks the integers of a row, and its scales as f32.
#[inline(always)]
pub(super) fn unpack_row(bits: usize, [codes, halves]: [&[u8]; 2], integers: &mut [i16], scales: &mut [f32]) {
    for (scale, half) in scales.iter_mut().zip(halves.as_chunks::<2>().0) {
        *scale = f32::from_bits(u32::from(u16::from_le_bytes(*half)) << 16);
    }
    if bits == 8 {
        for (integer, code) in integers.iter_mut().zip(codes) {
            *integer = i16::from(*code as i8);
        }
        return;
    }
    let groups = integers.chunks_exact_mut(GROUP).zip(codes.chunks_exact(GROUP / 2));
    for (integers, codes) in groups {
        let (low, high) = integers.split_at_mut(GROUP / 2);
        for ((code, low), high) in codes.iter().zip(low).zip(high) {
            *low = 2 * i16::from(code & 15) - 15;
            *high = 2 * i16::from(code >> 4) - 15;
        }
    }
}

wide! {
    /// Dequantizes the codes and the scales of a row to `to`. The Hadamard transform is not undone.
    pub(in crate::ops) fn dequantize_row(bits: usize, row: [&[u8]; 2], to: &mut [f32]) {
        let mut integers = [0i16; MAX_HEAD_DIM];
        let mut scales = [0f32; MAX_HEAD_DIM / GROUP];
        let integers = &mut integers[..to.len()];
        let scales = &mut scales[..to.len() / GROUP];
        unpack_row(bits, row, integers, scales);
        for ((to, integers), scale) in to.chunks_exact_mut(GROUP).zip(integers.chunks_exact(GROUP)).zip(&*scales) {
            for (to, integer) in to.iter_mut().zip(integers) {
                *to = f32::from(*integer) * scale;
            }
        }
    }
}

/// Dequantizes rows of `dim` values from their codes and scales. The Hadamard transform is not undone.
pub(in crate::ops) fn dequantize_rows(bits: usize, [codes, scales]: [&[u8]; 2], dim: usize) -> Vec<f32> {
    let rows = codes.chunks_exact(dim * bits / 8).zip(scales.chunks_exact(dim / GROUP * 2));
    let mut values = vec![0.0; rows.len() * dim];
    rows.zip(values.chunks_exact_mut(dim)).for_each(|((codes, scales), to)| dequantize_row(bits, [codes, scales], to));
    values
}

/// Quantized rows in pages that a table lists.
#[derive(Clone, Copy)]
pub(in crate::ops) struct QuantizedKv<'a> {
    pub bits: usize,
    pub dim: usize,
    bytes: &'a [u8],
    table: &'a [u32],
    heads: usize,
    /// Number of bytes of the codes of a row.
    pub code_row: usize,
    /// Number of bytes of the scales of a row.
    pub scale_row: usize,
}

/// Consecutive quantized rows of one head.
#[derive(Clone, Copy)]
pub(in crate::ops) struct CodeRows<'a> {
    pub codes: &'a [u8],
    pub scales: &'a [u8],
}

impl<'a> CodeRows<'a> {
    /// The codes and the scales of each row of `kv`.
    #[inline(always)]
    pub fn iter(self, kv: &QuantizedKv<'_>) -> impl Iterator<Item = [&'a [u8]; 2]> {
        let rows = self.codes.chunks_exact(kv.code_row).zip(self.scales.chunks_exact(kv.scale_row));
        rows.map(|(codes, scales)| [codes, scales])
    }

    /// Number of bytes.
    #[cfg(target_arch = "x86_64")]
    pub fn len(self) -> usize {
        self.codes.len() + self.scales.len()
    }
}

impl<'a> QuantizedKv<'a> {
    pub fn new(bits: usize, bytes: &'a [u8], table: &'a [u32], heads: usize, dim: usize) -> Self {
        Self { bits, dim, bytes, table, heads, code_row: dim * bits / 8, scale_row: dim / GROUP * 2 }
    }

    /// `count` rows to prefetch: the first rows of the page after the page of `first`. If there is no such page, the
    /// rows from `first` on.
    #[inline(always)]
    pub fn next_page_rows(&self, head: usize, first: usize, count: usize) -> CodeRows<'a> {
        let next = first / PAGE * PAGE + PAGE;
        self.rows(head, if next / PAGE < self.table.len() { next } else { first }, count)
    }

    /// The rows of positions `first..first + count`, which are in one page.
    #[inline(always)]
    pub fn rows(&self, head: usize, first: usize, count: usize) -> CodeRows<'a> {
        let page = self.table[first / PAGE] as usize;
        let size = PAGE * (self.code_row + self.scale_row);
        let block = &self.bytes[(page * self.heads + head) * size..][..size];
        let (codes, scales) = block.split_at(PAGE * self.code_row);
        let part = |bytes: &'a [u8], row: usize| &bytes[first % PAGE * row..][..count * row];
        CodeRows { codes: part(codes, self.code_row), scales: part(scales, self.scale_row) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::simd::{Isa, tests::with};
    use test_support::mutate::Dice;

    #[test]
    fn hadamard_matches_definition_and_inverts_itself() {
        for dim in [32usize, 64, 96, 256] {
            let n = 1usize << dim.trailing_zeros();
            let x: Vec<f32> = (0..dim).map(|_| 0.0).collect();
            for one in [0, 5, dim - 1] {
                let mut turned = x.clone();
                turned[one] = 3.0;
                hadamard(&mut turned);
                for (at, value) in turned.iter().enumerate() {
                    let sign = if ((at % n) & (one % n)).count_ones().is_multiple_of(2) { 1.0 } else { -1.0 };
                    let expected = if at / n == one / n { sign * 3.0 / (n as f32).sqrt() } else { 0.0 };
                    assert!((value - expected).abs() < 1e-6, "{dim} {one} {at}");
                }
                hadamard(&mut turned);
                assert!(turned.iter().enumerate().all(|(at, v)| (v - if at == one { 3.0 } else { 0.0 }).abs() < 1e-5));
            }
        }
    }

    #[test]
    fn quantized_row_is_within_half_step() {
        let mut dice = Dice(31);
        for (bits, levels) in [(8, 127.0), (4, 15.0)] {
            let row: Vec<f32> = (0..128).map(|at| dice.unit() * [1e-3, 1.0, 50.0, 0.0][at / GROUP]).collect();
            let (mut codes, mut scales) = (vec![0xaa; 16 * bits], vec![0xaa; 8]);
            quantize_row(bits, &row, &mut codes, &mut scales);
            for isa in Isa::all() {
                let mut other = (vec![0; codes.len()], vec![0; scales.len()]);
                with(isa, || quantize_row(bits, &row, &mut other.0, &mut other.1));
                assert!(other.0 == codes && other.1 == scales, "{isa:?}");
            }
            let read = dequantize_rows(bits, [&codes, &scales], 128);
            for (at, (value, read)) in row.iter().zip(&read).enumerate() {
                let group = &row[at / GROUP * GROUP..][..GROUP];
                let max = group.iter().fold(0f32, |max, value| max.max(value.abs()));
                // 8-bit integers are 1 apart, 4-bit ones 2. Rounding makes the scale up to 1/128 larger.
                let step = max / levels * if bits == 8 { 0.5 } else { 1.0 } * 1.01;
                assert!((value - read).abs() <= step, "{bits}: {value} {read} of {max}");
            }
        }
    }

    #[test]
    fn nonfinite_value_makes_its_group_nan() {
        for (bits, bad) in [(8, f32::NAN), (4, f32::INFINITY), (8, f32::MAX * 2.0)] {
            let mut row = vec![1.0; 64];
            row[40] = bad;
            let (mut codes, mut scales) = (vec![0; 8 * bits], vec![0; 4]);
            quantize_row(bits, &row, &mut codes, &mut scales);
            let read = dequantize_rows(bits, [&codes, &scales], 64);
            assert!(read[..32].iter().all(|value| (value - 1.0).abs() < 0.1) && read[32..].iter().all(|v| v.is_nan()));
        }
    }

    #[test]
    fn recent_start_depends_on_position_only() {
        assert_eq!([0, 63, 64, 127, 128, 191, 192, 1000].map(recent_start), [0, 0, 0, 0, 64, 64, 128, 896]);
        assert!((0..2000).all(|p| p < 64 || (RECENT..2 * RECENT).contains(&(p - recent_start(p)))));
    }
}
