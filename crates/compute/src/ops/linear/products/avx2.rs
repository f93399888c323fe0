//! AVX2 kernels. Byte products use `maddubs`, whose 16-bit sums cannot overflow for codes of up to six bits.

use std::arch::x86_64::*;

use super::{
    float,
    operands::AffineProduct,
    scratch::SimdScratch,
    x86::{self, load},
};

struct Maddubs;

/// See [`super::multiply`].
///
/// # Safety
/// As for [`super::multiply`].
#[target_feature(enable = "avx2,fma,bmi2")]
pub unsafe fn rows(product: &AffineProduct<'_>, scratch: &mut SimdScratch) {
    // SAFETY: guaranteed by the caller.
    unsafe { x86::rows::<Maddubs>(product, scratch) }
}

float::compiled_for!("avx2,fma,bmi2", crate::ops::simd::vector::Avx2);

/// Multiplies two vectors of codes, each at most 63, with their digits at `x` and `x + 32`. Returns eight partial sums.
#[inline(always)]
unsafe fn pair(a: __m256i, b: __m256i, x: [*const i8; 3]) -> __m256i {
    // SAFETY: the processor has AVX2, and 64 digits of each plane are readable (caller).
    unsafe {
        // Each 16-bit sum is at most 4 * 63 * 128 = 32256 in magnitude.
        let [high, middle, low] =
            x.map(|x| _mm256_add_epi16(_mm256_maddubs_epi16(a, load(x)), _mm256_maddubs_epi16(b, load(x.add(32)))));
        join(high, middle, low)
    }
}

/// Like [`pair`], for one vector of codes.
#[inline(always)]
unsafe fn single(a: __m256i, x: [*const i8; 3]) -> __m256i {
    // SAFETY: the processor has AVX2, and 32 digits of each plane are readable (caller).
    unsafe {
        let [high, middle, low] = x.map(|x| _mm256_maddubs_epi16(a, load(x)));
        join(high, middle, low)
    }
}

/// Returns `65536 * high + 256 * middle + low`, with neighbouring lanes added.
#[inline(always)]
unsafe fn join(high: __m256i, middle: __m256i, low: __m256i) -> __m256i {
    // SAFETY: the processor has AVX2 (caller).
    unsafe {
        let one = _mm256_set1_epi16(1);
        let upper = _mm256_add_epi32(_mm256_madd_epi16(high, _mm256_set1_epi16(256)), _mm256_madd_epi16(middle, one));
        _mm256_add_epi32(_mm256_slli_epi32::<8>(upper), _mm256_madd_epi16(low, one))
    }
}

impl x86::GroupDot for Maddubs {
    #[inline(always)]
    unsafe fn nibbles<const GROUP: usize>(codes: *const u8, x: [*const i8; 3]) -> __m256i {
        // SAFETY: a group is readable (caller).
        unsafe {
            let mask = _mm256_set1_epi8(15);
            if GROUP == 32 {
                let codes = _mm_loadu_si128(codes.cast());
                let both = _mm256_and_si256(_mm256_set_m128i(_mm_srli_epi16::<4>(codes), codes), mask);
                return single(both, x);
            }
            let mut sum = _mm256_setzero_si256();
            for at in (0..GROUP).step_by(64) {
                let codes = load(codes.add(at / 2));
                let even = _mm256_and_si256(codes, mask);
                let odd = _mm256_and_si256(_mm256_srli_epi16::<4>(codes), mask);
                sum = _mm256_add_epi32(sum, pair(even, odd, x.map(|x| x.add(at))));
            }
            sum
        }
    }

    #[inline(always)]
    unsafe fn bytes<const GROUP: usize, const WIDE: bool>(codes: *const u8, x: [*const i8; 3]) -> __m256i {
        // SAFETY: a group is readable (caller).
        unsafe {
            let mut sum = _mm256_setzero_si256();
            for at in (0..GROUP).step_by(32) {
                let codes = load(codes.add(at));
                let x = x.map(|x| x.add(at));
                if WIDE {
                    // A byte is its lower nibble plus sixteen times its upper nibble.
                    let mask = _mm256_set1_epi8(15);
                    let lower = _mm256_and_si256(codes, mask);
                    let upper = _mm256_and_si256(_mm256_srli_epi16::<4>(codes), mask);
                    sum = _mm256_add_epi32(sum, single(lower, x));
                    sum = _mm256_add_epi32(sum, _mm256_slli_epi32::<4>(single(upper, x)));
                } else {
                    sum = _mm256_add_epi32(sum, single(codes, x));
                }
            }
            sum
        }
    }
}
