//! Operands of the products: activations and weights.

use crate::ops::{
    Float, WeightFormat, WeightView,
    quant::{QuantizedRow, unpack},
    simd::OutPtr,
};
use std::ops::Range;

/// One row of activations.
#[derive(Clone, Copy)]
pub struct Activations<'a> {
    /// The row in f32, for the float kernels.
    pub x: &'a [f32],
    /// The row quantized for the weight, for the integer kernels.
    pub digits: QuantizedRow<'a>,
}

/// Rows `rows` of a weight times every input: `outs[i][row] = weight[row] . inputs[i]`.
#[derive(Clone)]
pub struct Product<'a, W> {
    pub weight: &'a W,
    pub rows: Range<usize>,
    pub inputs: &'a [Activations<'a>],
    pub outs: &'a [OutPtr],
}

pub(super) type AffineProduct<'a> = Product<'a, AffineWeight<'a>>;

/// An affine weight as the integer kernels use it.
#[derive(Clone, Copy)]
pub(crate) struct AffineWeight<'a> {
    pub bits: usize,
    pub group: usize,
    pub cols: usize,
    pub float: Float,
    pub global_scale: f32,
    codes: &'a [u8],
    scales: &'a [u8],
    biases: &'a [u8],
}

impl<'a> AffineWeight<'a> {
    pub fn new(view: &WeightView<'a>) -> Option<Self> {
        let WeightFormat::Affine { bits, group, scale } = view.codes else { return None };
        let [codes, scales, biases] = view.parts;
        let bits = bits as usize;
        let group = group as usize;
        Some(Self {
            bits,
            group,
            cols: view.cols,
            float: scale,
            global_scale: view.global_scale,
            codes,
            scales,
            biases,
        })
    }

    pub fn groups(&self) -> usize {
        self.cols / self.group
    }

    /// The codes of `row`.
    pub fn codes(&self, row: usize) -> &'a [u8] {
        let bytes = self.cols * self.bits / 8;
        &self.codes[row * bytes..(row + 1) * bytes]
    }

    /// The stored scales and biases of `row`.
    pub fn constants(&self, row: usize) -> (&'a [u8], &'a [u8]) {
        let bytes = self.groups() * self.float.bytes();
        let range = row * bytes..(row + 1) * bytes;
        (&self.scales[range.clone()], &self.biases[range])
    }
}

/// A row of weights, prepared for an integer kernel.
#[derive(Default)]
pub(crate) struct WeightRow {
    /// Scales, then biases, each zero-padded to a multiple of eight groups.
    pub constants: Vec<f32>,
    /// Unpacked codes in the weight's order.
    pub bytes: Vec<u8>,
}

impl WeightRow {
    /// Unpacks the codes of `row` to bytes: 4-bit codes in nibble order, others in natural order.
    #[inline(always)]
    pub fn unpack(&mut self, weight: &AffineWeight<'_>, row: usize) {
        self.bytes.resize(weight.cols, 0);
        if weight.bits == 4 {
            unpack::nibbles(weight.group, weight.codes(row), &mut self.bytes);
        } else {
            unpack::natural(weight.bits, weight.codes(row), &mut self.bytes, unpack::spread(weight.bits));
        }
    }

    /// Loads the scales and biases of `row` as padded f32.
    #[inline(always)]
    pub fn load(&mut self, weight: &AffineWeight<'_>, row: usize) {
        let padded = weight.groups().next_multiple_of(8);
        if self.constants.len() != 2 * padded {
            self.constants.clear();
            self.constants.resize(2 * padded, 0.0);
        }
        let (scales, biases) = weight.constants(row);
        let (s, b) = self.constants.split_at_mut(padded);
        unpack::widen(weight.float, scales, &mut s[..weight.groups()]);
        unpack::widen(weight.float, biases, &mut b[..weight.groups()]);
        s[weight.groups()..].fill(0.0);
        b[weight.groups()..].fill(0.0);
    }
}

#[cfg(target_arch = "x86_64")]
/// The bits of eight bytes that codes of `bits` bits use, for `pdep`.
pub(super) fn pdep_mask(bits: usize) -> u64 {
    0x0101_0101_0101_0101 * ((1 << bits) - 1)
}
