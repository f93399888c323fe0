//! AVX2: byte products by `maddubs`, whose 16-bit sums cannot overflow for codes of up to six bits and signed digits.

use std::{arch::x86_64::*, ops::Range};

use super::{Affine, Line, Out, Scratch, float, x86};
use crate::ops::weight::WeightView;

struct Avx2;

/// See [`super::product`].
///
/// # Safety
/// As for [`super::product`].
#[target_feature(enable = "avx2,fma,bmi2")]
pub unsafe fn rows(weight: &Affine<'_>, rows: Range<usize>, lines: &[Line<'_>], outs: &[Out], scratch: &mut Scratch) {
    // SAFETY: passed on.
    unsafe { x86::rows::<Avx2>(weight, rows, lines, outs, scratch) }
}

/// See [`super::product`].
///
/// # Safety
/// As for [`super::product`].
#[target_feature(enable = "avx2,fma,bmi2")]
pub unsafe fn float_rows(
    weight: &WeightView<'_>,
    rows: Range<usize>,
    lines: &[Line<'_>],
    outs: &[Out],
    scratch: &mut Scratch,
) {
    // SAFETY: passed on.
    unsafe { float::rows(weight, rows, lines, outs, scratch) }
}

/// See [`super::vectorised`].
#[target_feature(enable = "avx2,fma,bmi2")]
pub fn vectorised<R>(work: impl FnOnce() -> R) -> R {
    work()
}

#[inline(always)]
unsafe fn load<T>(at: *const T) -> __m256i {
    // SAFETY: 32 bytes are readable (caller); any alignment.
    unsafe { _mm256_loadu_si256(at.cast()) }
}

/// Two vectors of codes (at most 63 each) and their digits: `256 * high + low` summed to eight lanes.
#[inline(always)]
unsafe fn pair(a: __m256i, b: __m256i, high: [__m256i; 2], low: [__m256i; 2]) -> __m256i {
    // SAFETY: the processor has AVX2 (caller).
    unsafe {
        // At most 4 * 63 * 128 = 32256 in magnitude.
        let high = _mm256_add_epi16(_mm256_maddubs_epi16(a, high[0]), _mm256_maddubs_epi16(b, high[1]));
        let low = _mm256_add_epi16(_mm256_maddubs_epi16(a, low[0]), _mm256_maddubs_epi16(b, low[1]));
        _mm256_add_epi32(_mm256_madd_epi16(high, _mm256_set1_epi16(256)), _mm256_madd_epi16(low, _mm256_set1_epi16(1)))
    }
}

impl x86::Dot for Avx2 {
    #[inline(always)]
    unsafe fn nibbles<const GROUP: usize>(codes: *const u8, high: *const i8, low: *const i8) -> __m256i {
        // SAFETY: a group is readable (caller).
        unsafe {
            let mask = _mm256_set1_epi8(15);
            let zero = _mm256_setzero_si256();
            if GROUP == 32 {
                let codes = _mm_loadu_si128(codes.cast());
                let both = _mm256_and_si256(_mm256_set_m128i(_mm_srli_epi16::<4>(codes), codes), mask);
                return pair(both, zero, [load(high), zero], [load(low), zero]);
            }
            let mut sum = zero;
            for at in (0..GROUP).step_by(64) {
                let codes = load(codes.add(at / 2));
                let (even, odd) =
                    (_mm256_and_si256(codes, mask), _mm256_and_si256(_mm256_srli_epi16::<4>(codes), mask));
                let (high, low) = (high.add(at), low.add(at));
                let part = pair(even, odd, [load(high), load(high.add(32))], [load(low), load(low.add(32))]);
                sum = _mm256_add_epi32(sum, part);
            }
            sum
        }
    }

    #[inline(always)]
    unsafe fn bytes<const GROUP: usize, const WIDE: bool>(
        codes: *const u8,
        high: *const i8,
        low: *const i8,
    ) -> __m256i {
        // SAFETY: a group is readable (caller).
        unsafe {
            let zero = _mm256_setzero_si256();
            let mut sum = zero;
            for at in (0..GROUP).step_by(32) {
                let (codes, high, low) = (load(codes.add(at)), load(high.add(at)), load(low.add(at)));
                if WIDE {
                    // A byte is two nibbles, sixteen times the upper one.
                    let mask = _mm256_set1_epi8(15);
                    let lower = _mm256_and_si256(codes, mask);
                    let upper = _mm256_and_si256(_mm256_srli_epi16::<4>(codes), mask);
                    let upper = pair(upper, zero, [high, zero], [low, zero]);
                    sum = _mm256_add_epi32(sum, pair(lower, zero, [high, zero], [low, zero]));
                    sum = _mm256_add_epi32(sum, _mm256_slli_epi32::<4>(upper));
                } else {
                    sum = _mm256_add_epi32(sum, pair(codes, zero, [high, zero], [low, zero]));
                }
            }
            sum
        }
    }
}
