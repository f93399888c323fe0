//! The inner products behind every linear layer, one file an instruction set, all with the same bytes.
//!
//! An affine weight meets activations quantised by [`super::quant`]. Per group the integer dot product fits an i32 and
//! is exact in any order; what comes up on the way, as sums of digits are shifted and added, may wrap around. What
//! follows is f32 and therefore has one order everywhere: the groups of a row are padded with zero groups to a multiple
//! of eight, group `g` belongs to lane `g % 8`, and going up in `g`
//! `lane = fma(dot, scale_w * scale_x, lane)`, then `lane = fma(bias_w, sum_x, lane)`; at the end [`tree`]. So neither
//! the processor, nor how many rows are computed together, nor the thread can be seen in a result.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
pub(super) mod float;
#[cfg(target_arch = "x86_64")]
mod gemm512;
#[cfg(target_arch = "x86_64")]
mod gemv512;
#[cfg(target_arch = "x86_64")]
mod lay512;
pub(super) mod math;
#[cfg(target_arch = "aarch64")]
mod neon;
mod scalar;
#[cfg(target_arch = "x86_64")]
mod short512;
pub(crate) mod vector;
mod wide;
#[cfg(target_arch = "x86_64")]
mod x86;

pub(crate) use vector::Vector;
pub(crate) use wide::wide;

use std::{cell::RefCell, ops::Range, sync::OnceLock};

use super::{
    Float, WeightFormat, WeightView,
    quant::{Digits, unpack},
};

/// An instruction set that has its own kernels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Isa {
    /// Plain Rust: the reference, and what processors without any of the others run.
    Scalar,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// AVX-512 with VNNI.
    #[cfg(target_arch = "x86_64")]
    Avx512,
    /// NEON alone.
    #[cfg(target_arch = "aarch64")]
    Neon,
    /// NEON with `sdot`.
    #[cfg(target_arch = "aarch64")]
    Dotprod,
}

impl Isa {
    /// The best that this processor has.
    pub fn best() -> Self {
        #[cfg(test)]
        if let Some(forced) = tests::FORCED.get() {
            return forced;
        }
        static BEST: OnceLock<Isa> = OnceLock::new();
        *BEST.get_or_init(|| *Self::all().last().unwrap_or(&Isa::Scalar))
    }

    /// All that this processor has, the slowest first.
    pub fn all() -> Vec<Self> {
        #[cfg_attr(not(any(target_arch = "x86_64", target_arch = "aarch64")), allow(unused_mut))]
        let mut all = vec![Isa::Scalar];
        #[cfg(target_arch = "x86_64")]
        {
            macro_rules! has { ($($name:tt)*) => { $(std::arch::is_x86_feature_detected!($name))&&* } }
            if has!("avx2" "fma" "bmi2") {
                all.push(Isa::Avx2);
                if has!("avx512f" "avx512bw" "avx512vl" "avx512dq" "avx512vnni") {
                    all.push(Isa::Avx512);
                }
            }
        }
        #[cfg(target_arch = "aarch64")]
        {
            all.push(Isa::Neon);
            if std::arch::is_aarch64_feature_detected!("dotprod") {
                all.push(Isa::Dotprod);
            }
        }
        all
    }
}

/// One row of activations.
#[derive(Clone, Copy)]
pub struct Activations<'a> {
    /// The row in f32, for the float kernels.
    pub x: &'a [f32],
    /// The row quantised in the weight's [`Format`](super::quant::Format), for the integer kernels.
    pub digits: Digits<'a>,
}

/// The destination of one line's products: the address for the weight's first row.
#[derive(Clone, Copy)]
pub struct Out(pub *mut f32);

impl Out {
    /// The place `count` values further on.
    ///
    /// # Safety
    /// As for `add` of the pointer.
    pub unsafe fn add(self, count: usize) -> Self {
        // SAFETY: passed on.
        Self(unsafe { self.0.add(count) })
    }
}

// SAFETY: only written through `product`, whose callers promise that no two threads share an output.
unsafe impl Send for Out {}
// SAFETY: as above.
unsafe impl Sync for Out {}

/// An affine weight, as the integer kernels see it.
#[derive(Clone, Copy)]
pub(crate) struct Affine<'a> {
    pub bits: usize,
    pub group: usize,
    pub cols: usize,
    pub float: Float,
    pub global_scale: f32,
    codes: &'a [u8],
    scales: &'a [u8],
    biases: &'a [u8],
}

impl<'a> Affine<'a> {
    fn new(view: &WeightView<'a>) -> Option<Self> {
        let WeightFormat::Affine { bits, group, scale } = view.codes else { return None };
        let [codes, scales, biases] = view.parts;
        let (bits, group) = (bits as usize, group as usize);
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

    /// The scales and biases of `row` as they are stored.
    pub fn constants(&self, row: usize) -> (&'a [u8], &'a [u8]) {
        let bytes = self.groups() * self.float.bytes();
        let range = row * bytes..(row + 1) * bytes;
        (&self.scales[range.clone()], &self.biases[range])
    }
}

/// 64 bytes that begin where a line of the cache does: the widest register.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
pub(crate) struct CacheLine([u8; 64]);

impl CacheLine {
    pub const ZERO: Self = Self([0; 64]);
}

/// Buffers of one thread, kept from call to call.
#[derive(Default)]
pub(crate) struct Scratch {
    /// Two rows of weights, loaded for the integer kernels.
    pub rows: [Loaded; 2],
    /// A row of weights in f32, and its codes before.
    pub values: Vec<f32>,
    pub bytes: Vec<u8>,
    #[cfg(target_arch = "x86_64")]
    pub tiles: lay512::Tiles,
}

/// A row of weights on its way through an integer kernel.
#[derive(Default)]
pub(crate) struct Loaded {
    /// Scales, then biases, each padded with zeros to a multiple of eight groups.
    pub constants: Vec<f32>,
    /// Unpacked codes, in the weight's order.
    pub bytes: Vec<u8>,
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

/// `outs[i][row] = weight[row] . lines[i].x` for every row in `rows` and every line; with `integer`, affine weights meet
/// the quantised row instead of the f32 one.
///
/// # Safety
/// There are as many `outs` as lines, each valid for writes at `rows`, and nobody else reads or writes there meanwhile.
/// The processor has `isa`.
/// The view's parts have the lengths its encoding asks for, and the lines `cols` values (padded groups for digits).
pub unsafe fn product(
    isa: Isa,
    integer: bool,
    weight: &WeightView<'_>,
    rows: Range<usize>,
    lines: &[Activations<'_>],
    outs: &[Out],
) {
    SCRATCH.with_borrow_mut(|scratch| match Affine::new(weight).filter(|_| integer) {
        // SAFETY: passed on.
        Some(affine) => unsafe {
            match isa {
                Isa::Scalar => scalar::rows(&affine, rows, lines, outs, scratch),
                #[cfg(target_arch = "x86_64")]
                Isa::Avx2 => avx2::rows(&affine, rows, lines, outs, scratch),
                #[cfg(target_arch = "x86_64")]
                Isa::Avx512 => avx512::rows(&affine, rows, lines, outs, scratch),
                #[cfg(target_arch = "aarch64")]
                Isa::Neon => neon::rows(&affine, rows, lines, outs, scratch),
                #[cfg(target_arch = "aarch64")]
                Isa::Dotprod => neon::rows_dotprod(&affine, rows, lines, outs, scratch),
            }
        },
        // SAFETY: passed on.
        None => unsafe {
            match isa {
                #[cfg(target_arch = "x86_64")]
                Isa::Avx2 => avx2::float_rows(weight, rows, lines, outs, scratch),
                #[cfg(target_arch = "x86_64")]
                Isa::Avx512 => avx512::float_rows(weight, rows, lines, outs, scratch),
                // Arm's baseline has NEON and fma: the compiler uses them here, too.
                _ => float::rows::<[f32; 16]>(weight, rows, lines, outs, scratch),
            }
        },
    })
}

/// The sum of eight lanes: halves are added until one is left.
#[inline(always)]
pub(crate) fn tree(l: [f32; 8]) -> f32 {
    ((l[0] + l[4]) + (l[2] + l[6])) + ((l[1] + l[5]) + (l[3] + l[7]))
}

impl Loaded {
    /// Unpacks the codes of `row` to bytes: 4-bit ones in the order of nibbles, others in their own.
    #[inline(always)]
    pub fn unpack(&mut self, weight: &Affine<'_>, row: usize) {
        self.bytes.resize(weight.cols, 0);
        if weight.bits == 4 {
            unpack::nibbles(weight.group, weight.codes(row), &mut self.bytes);
        } else {
            unpack::natural(weight.bits, weight.codes(row), &mut self.bytes, unpack::spread(weight.bits));
        }
    }

    /// Loads scales and biases of `row` and returns them in padded f32.
    #[inline(always)]
    pub fn load(&mut self, weight: &Affine<'_>, row: usize) {
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

#[cfg(test)]
pub(crate) mod tests;
