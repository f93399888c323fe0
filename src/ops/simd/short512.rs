//! One row of activations with AVX-512, where a row of weights has one, two or four groups: as many rows at a time as
//! have sixteen groups together.
//!
//! Rows lie one behind the other, and so do their constants: sixteen groups are read as one stretch, whose halves meet
//! the same digits, since eight is a multiple of the groups of a row. [`super::gemv512`] would fill a quarter of a
//! register or less, and pay for all of it.

use std::{arch::x86_64::*, ops::Range};

use super::{Activations, Affine, Out, gemv512, x86};
use crate::ops::{Float, quant::Digits};

/// Groups that are computed together.
const GROUPS: usize = 16;

/// See [`super::product`]; for as many rows as fill whole stretches. Returns how many rows it computed, or none if the
/// weight is not one for this.
///
/// # Safety
/// As for [`super::product`].
#[target_feature(enable = "avx2,fma,bmi2,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
pub unsafe fn rows(weight: &Affine<'_>, rows: Range<usize>, lines: &[Activations<'_>], outs: &[Out]) -> Option<usize> {
    // SAFETY: passed on.
    unsafe {
        match (weight.bits, weight.group) {
            (4, 64) => of::<4, 64>(weight, rows, lines, outs),
            (4, 128) => of::<4, 128>(weight, rows, lines, outs),
            (8, 32) => of::<8, 32>(weight, rows, lines, outs),
            (8, 64) => of::<8, 64>(weight, rows, lines, outs),
            (8, 128) => of::<8, 128>(weight, rows, lines, outs),
            _ => None,
        }
    }
}

#[inline]
#[target_feature(enable = "avx2,fma,bmi2,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn of<const BITS: usize, const GROUP: usize>(
    weight: &Affine<'_>,
    rows: Range<usize>,
    lines: &[Activations<'_>],
    outs: &[Out],
) -> Option<usize> {
    // SAFETY: passed on.
    unsafe {
        match weight.groups() {
            1 => Some(stretches::<BITS, GROUP, 1>(weight, rows, lines, outs)),
            2 => Some(stretches::<BITS, GROUP, 2>(weight, rows, lines, outs)),
            4 => Some(stretches::<BITS, GROUP, 4>(weight, rows, lines, outs)),
            _ => None,
        }
    }
}

/// `COUNT` is how many groups a row has.
#[inline]
#[target_feature(enable = "avx2,fma,bmi2,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn stretches<const BITS: usize, const GROUP: usize, const COUNT: usize>(
    weight: &Affine<'_>,
    rows: Range<usize>,
    lines: &[Activations<'_>],
    outs: &[Out],
) -> usize {
    let together = GROUPS / COUNT;
    let count = rows.len() / together * together;
    for row in (rows.start..rows.start + count).step_by(together) {
        let (first, bytes) = (row * COUNT, GROUP * BITS / 8);
        let (low, high) = weight.codes[first * bytes..][..GROUPS * bytes].split_at(GROUPS / 2 * bytes);
        // SAFETY: a prefetch may name any address; digits have a row's length; the caller lets us write these outputs.
        unsafe {
            for line in (0..GROUPS * bytes).step_by(64) {
                x86::fetch(low.as_ptr().wrapping_add(line + x86::AHEAD));
            }
            let constants = [widen(weight.float, weight.scales, first), widen(weight.float, weight.biases, first)];
            for (line, out) in lines.iter().zip(outs) {
                let lanes = dot::<BITS, GROUP, COUNT>([low, high], constants, &line.digits);
                store::<COUNT>(
                    _mm512_mul_ps(tree::<COUNT>(lanes), _mm512_set1_ps(weight.global_scale)),
                    out.0.add(row),
                );
            }
        }
    }
    count
}

/// A lane a group: what the group adds to its row.
#[inline]
#[target_feature(enable = "avx2,fma,bmi2,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn dot<const BITS: usize, const GROUP: usize, const COUNT: usize>(
    codes: [&[u8]; 2],
    [scales, biases]: [__m512; 2],
    x: &Digits<'_>,
) -> __m512 {
    let mut sums = [_mm512_setzero_si512(); GROUPS / 2];
    // SAFETY: there are eight groups in either half, and `COUNT` of digits, whose scales and sums are padded to eight.
    unsafe {
        for (index, sum) in sums.iter_mut().enumerate() {
            *sum = gemv512::partial::<BITS, GROUP>(codes, index, x, index % COUNT);
        }
        let dots = _mm512_cvtepi32_ps(gemv512::gather(sums));
        let lanes = _mm512_fmadd_ps(dots, _mm512_mul_ps(scales, repeat::<COUNT>(x.scale)), _mm512_setzero_ps());
        _mm512_fmadd_ps(biases, repeat::<COUNT>(x.sum), lanes)
    }
}

/// The first `COUNT` values over and over.
#[inline]
#[target_feature(enable = "avx512f,avx512dq")]
unsafe fn repeat<const COUNT: usize>(values: &[f32]) -> __m512 {
    // SAFETY: at least eight values are there (caller).
    let four = unsafe { _mm_loadu_ps(values.as_ptr()) };
    match COUNT {
        1 => _mm512_broadcastss_ps(four),
        2 => _mm512_broadcast_f32x2(four),
        _ => _mm512_broadcast_f32x4(four),
    }
}

/// [`super::tree`] for each row: its sum stands in its first lane. The lanes that a row lacks are zeros there; adding
/// one makes -0 a zero, and so it does here.
#[inline]
#[target_feature(enable = "avx512f")]
fn tree<const COUNT: usize>(lanes: __m512) -> __m512 {
    let mut sums = _mm512_add_ps(lanes, _mm512_setzero_ps());
    if COUNT == 4 {
        sums = _mm512_add_ps(sums, _mm512_permute_ps::<0b01_00_11_10>(sums));
    }
    if COUNT > 1 {
        sums = _mm512_add_ps(sums, _mm512_permute_ps::<0b10_11_00_01>(sums));
    }
    sums
}

/// Writes the first lane of each row.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn store<const COUNT: usize>(sums: __m512, out: *mut f32) {
    // SAFETY: so many outputs are writable (caller).
    unsafe {
        match COUNT {
            1 => _mm512_storeu_ps(out, sums),
            2 => _mm256_storeu_ps(out, _mm512_castps512_ps256(_mm512_maskz_compress_ps(0x5555, sums))),
            _ => _mm_storeu_ps(out, _mm512_castps512_ps128(_mm512_maskz_compress_ps(0x1111, sums))),
        }
    }
}

/// Sixteen constants in f32, from `first` on.
#[inline]
#[target_feature(enable = "avx512f")]
fn widen(float: Float, all: &[u8], first: usize) -> __m512 {
    let at = all[first * float.bytes()..][..GROUPS * float.bytes()].as_ptr();
    // SAFETY: all that is read lies in the slice; any alignment.
    unsafe {
        match float {
            Float::F32 => _mm512_loadu_ps(at.cast()),
            Float::F16 => _mm512_cvtph_ps(_mm256_loadu_si256(at.cast())),
            Float::Bf16 => {
                let bits = _mm512_cvtepu16_epi32(_mm256_loadu_si256(at.cast()));
                _mm512_castsi512_ps(_mm512_slli_epi32::<16>(bits))
            }
        }
    }
}
