//! Vectors of sixteen floats for each instruction set. Operations work lane by lane or in a fixed order, so all
//! instruction sets give the same bytes.

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;

/// Sixteen lanes of f32.
///
/// Methods may only be called in code compiled for the type's instructions. Only [`super::wide!`] names the types,
/// in functions that run on processors that have them.
pub(crate) trait Vector: Copy {
    /// True if sixteen vectors fit into registers with some to spare.
    const HAS_32_REGISTERS: bool = false;

    fn splat(x: f32) -> Self;
    fn load(x: &[f32; 16]) -> Self;
    fn store(self, to: &mut [f32; 16]);
    fn from_i16(x: &[i16; 16]) -> Self;
    /// `self * b + c` with one rounding.
    fn fma(self, b: Self, c: Self) -> Self;
    /// The sum of the lanes: adds lanes 8..16 to 0..8, then [`sum8`].
    fn sum(self) -> f32;

    /// [`Self::sum`] of each vector.
    #[inline(always)]
    fn sum_all(all: [Self; 16]) -> [f32; 16] {
        all.map(Self::sum)
    }

    /// Prefetches the cache line at `at`, which may be any address, into L2, which tracks more misses than L1.
    #[inline(always)]
    fn prefetch(_at: *const u8) {}
}

impl Vector for [f32; 16] {
    #[inline(always)]
    fn splat(x: f32) -> Self {
        [x; 16]
    }

    #[inline(always)]
    fn load(x: &[f32; 16]) -> Self {
        *x
    }

    #[inline(always)]
    fn store(self, to: &mut [f32; 16]) {
        *to = self;
    }

    #[inline(always)]
    fn from_i16(x: &[i16; 16]) -> Self {
        x.map(f32::from)
    }

    #[inline(always)]
    fn fma(self, b: Self, c: Self) -> Self {
        std::array::from_fn(|i| self[i].mul_add(b[i], c[i]))
    }

    #[inline(always)]
    fn sum(self) -> f32 {
        sum8(std::array::from_fn(|i| self[i] + self[i + 8]))
    }
}

#[cfg(target_arch = "x86_64")]
#[derive(Clone, Copy)]
pub(crate) struct Avx2(__m256, __m256);

// SAFETY of every block: the processor has the instructions (contract of the trait). Arrays have the length that is
// read or written, at any alignment.
#[cfg(target_arch = "x86_64")]
impl Vector for Avx2 {
    #[inline(always)]
    fn splat(x: f32) -> Self {
        // SAFETY: see above.
        unsafe { Self(_mm256_set1_ps(x), _mm256_set1_ps(x)) }
    }

    #[inline(always)]
    fn load(x: &[f32; 16]) -> Self {
        // SAFETY: see above.
        unsafe { Self(_mm256_loadu_ps(x.as_ptr()), _mm256_loadu_ps(x.as_ptr().add(8))) }
    }

    #[inline(always)]
    fn store(self, to: &mut [f32; 16]) {
        // SAFETY: see above.
        unsafe {
            _mm256_storeu_ps(to.as_mut_ptr(), self.0);
            _mm256_storeu_ps(to.as_mut_ptr().add(8), self.1);
        }
    }

    #[inline(always)]
    fn from_i16(x: &[i16; 16]) -> Self {
        // SAFETY: see above.
        unsafe {
            let half =
                |at: usize| _mm256_cvtepi32_ps(_mm256_cvtepi16_epi32(_mm_loadu_si128(x.as_ptr().add(at).cast())));
            Self(half(0), half(8))
        }
    }

    #[inline(always)]
    fn fma(self, b: Self, c: Self) -> Self {
        // SAFETY: see above.
        unsafe { Self(_mm256_fmadd_ps(self.0, b.0, c.0), _mm256_fmadd_ps(self.1, b.1, c.1)) }
    }

    #[inline(always)]
    fn sum(self) -> f32 {
        // SAFETY: see above.
        unsafe { sum8_avx(_mm256_add_ps(self.0, self.1)) }
    }

    #[inline(always)]
    fn prefetch(at: *const u8) {
        // SAFETY: see above.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(at.cast()) }
    }
}

#[cfg(target_arch = "x86_64")]
#[derive(Clone, Copy)]
pub(crate) struct Avx512(__m512);

#[cfg(target_arch = "x86_64")]
impl Vector for Avx512 {
    const HAS_32_REGISTERS: bool = true;

    #[inline(always)]
    fn splat(x: f32) -> Self {
        // SAFETY: see above.
        unsafe { Self(_mm512_set1_ps(x)) }
    }

    #[inline(always)]
    fn load(x: &[f32; 16]) -> Self {
        // SAFETY: see above.
        unsafe { Self(_mm512_loadu_ps(x.as_ptr())) }
    }

    #[inline(always)]
    fn store(self, to: &mut [f32; 16]) {
        // SAFETY: see above.
        unsafe { _mm512_storeu_ps(to.as_mut_ptr(), self.0) }
    }

    #[inline(always)]
    fn from_i16(x: &[i16; 16]) -> Self {
        // SAFETY: see above.
        unsafe { Self(_mm512_cvtepi32_ps(_mm512_cvtepi16_epi32(_mm256_loadu_si256(x.as_ptr().cast())))) }
    }

    #[inline(always)]
    fn fma(self, b: Self, c: Self) -> Self {
        // SAFETY: see above.
        unsafe { Self(_mm512_fmadd_ps(self.0, b.0, c.0)) }
    }

    #[inline(always)]
    fn sum(self) -> f32 {
        // SAFETY: see above.
        unsafe {
            let low = _mm512_castps512_ps256(self.0);
            let high = _mm512_extractf32x8_ps::<1>(self.0);
            sum8_avx(_mm256_add_ps(low, high))
        }
    }

    #[inline(always)]
    fn sum_all(all: [Self; 16]) -> [f32; 16] {
        // SAFETY: see above.
        unsafe { sum_all(all) }
    }

    #[inline(always)]
    fn prefetch(at: *const u8) {
        // SAFETY: see above.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(at.cast()) }
    }
}

/// The sums of sixteen vectors. Each step combines two registers into one, so that every addition uses all lanes.
#[cfg(target_arch = "x86_64")]
#[inline]
#[target_feature(enable = "avx512f")]
fn sum_all(all: [Avx512; 16]) -> [f32; 16] {
    // Reduces each vector to one 128-bit lane: adds its upper half to its lower half, then adds the two 128-bit lanes
    // of the result.
    let halves = |at: usize| {
        let a = all[at].0;
        let b = all[at + 1].0;
        _mm512_add_ps(_mm512_shuffle_f32x4::<0x44>(a, b), _mm512_shuffle_f32x4::<0xee>(a, b))
    };
    let quarters = |at: usize| {
        let a = halves(at);
        let b = halves(at + 2);
        _mm512_add_ps(_mm512_shuffle_f32x4::<0x88>(a, b), _mm512_shuffle_f32x4::<0xdd>(a, b))
    };
    // Each 128-bit lane now holds four sums of one vector. Adds sums 0 + 2 and 1 + 3, then both results.
    let pairs = |at: usize| {
        let a = quarters(at);
        let b = quarters(at + 4);
        _mm512_castps_pd(_mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b)))
    };
    let a = pairs(0);
    let b = pairs(8);
    let low = _mm512_unpacklo_pd(a, b);
    let high = _mm512_unpackhi_pd(a, b);
    let sums = _mm512_add_ps(_mm512_castpd_ps(low), _mm512_castpd_ps(high));
    let order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    let mut out = [0f32; 16];
    // SAFETY: sixteen values fit.
    unsafe { _mm512_storeu_ps(out.as_mut_ptr(), _mm512_permutexvar_ps(order, sums)) };
    out
}

/// The sum of eight lanes, by halving.
#[inline(always)]
pub(crate) fn sum8(l: [f32; 8]) -> f32 {
    ((l[0] + l[4]) + (l[2] + l[6])) + ((l[1] + l[5]) + (l[3] + l[7]))
}

/// [`sum8`] in registers.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
pub(in crate::ops) unsafe fn sum8_avx(lanes: __m256) -> f32 {
    // SAFETY: the processor has AVX (caller).
    unsafe {
        let four = _mm_add_ps(_mm256_castps256_ps128(lanes), _mm256_extractf128_ps::<1>(lanes));
        let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
        _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps::<1>(two, two)))
    }
}
