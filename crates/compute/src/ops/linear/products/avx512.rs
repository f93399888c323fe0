//! AVX-512 kernels with VNNI: four byte products for each lane and instruction, exact in 32 bits.

use std::arch::x86_64::*;

use super::{
    float, gemm_avx512, gemv_avx512,
    operands::AffineProduct,
    scratch::SimdScratch,
    x86::{self, load},
};

struct Vnni;

/// See [`super::multiply`].
///
/// # Safety
/// As for [`super::multiply`].
#[target_feature(enable = "avx2,fma,bmi2,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
pub unsafe fn rows(product: &AffineProduct<'_>, scratch: &mut SimdScratch) {
    let mut rest = product.clone();
    // SAFETY: guaranteed by the caller.
    unsafe {
        if rest.inputs.len() > 1 {
            rest.rows.start += gemm_avx512::rows(&rest, scratch);
        }
        rest.rows.start += gemv_avx512::rows(&rest, scratch);
        x86::rows::<Vnni>(&rest, scratch);
    }
}

float::compiled_for!("avx2,fma,bmi2,avx512f,avx512bw,avx512vl,avx512dq", crate::ops::simd::vector::Avx512);

impl x86::GroupDot for Vnni {
    #[inline(always)]
    unsafe fn nibbles<const GROUP: usize>(codes: *const u8, x: [*const i8; 3]) -> __m256i {
        // SAFETY: a group is readable (caller).
        unsafe {
            let mask = _mm256_set1_epi8(15);
            let mut sum = _mm256_setzero_si256();
            if GROUP == 32 {
                let codes = _mm_loadu_si128(codes.cast());
                let both = _mm256_and_si256(_mm256_set_m128i(_mm_srli_epi16::<4>(codes), codes), mask);
                for x in x {
                    sum = _mm256_dpbusd_epi32(_mm256_slli_epi32::<8>(sum), both, load(x));
                }
                return sum;
            }
            for at in (0..GROUP).step_by(64) {
                let codes = load(codes.add(at / 2));
                let even = _mm256_and_si256(codes, mask);
                let odd = _mm256_and_si256(_mm256_srli_epi16::<4>(codes), mask);
                let mut part = _mm256_setzero_si256();
                for x in x {
                    part = _mm256_dpbusd_epi32(_mm256_slli_epi32::<8>(part), even, load(x.add(at)));
                    part = _mm256_dpbusd_epi32(part, odd, load(x.add(at + 32)));
                }
                sum = _mm256_add_epi32(sum, part);
            }
            sum
        }
    }

    #[inline(always)]
    unsafe fn bytes<const GROUP: usize, const WIDE: bool>(codes: *const u8, x: [*const i8; 3]) -> __m256i {
        // SAFETY: a group is readable (caller).
        unsafe {
            let mut sum = _mm256_setzero_si256();
            for x in x {
                sum = _mm256_slli_epi32::<8>(sum);
                for at in (0..GROUP).step_by(32) {
                    sum = _mm256_dpbusd_epi32(sum, load(codes.add(at)), load(x.add(at)));
                }
            }
            sum
        }
    }
}
