//! Loads codes of rows in the order that the products need.

#![allow(clippy::needless_range_loop)]

use std::arch::x86_64::*;

/// Loads 32 values of each of sixteen rows and adds 128 to each value. Vector `w` holds values `4 w..4 w + 4` of each
/// row.
///
/// # Safety
/// 32 bytes are readable at `at` and at the next 15 multiples of `stride`.
#[inline]
#[target_feature(enable = "avx2,fma,bmi2,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
pub(super) unsafe fn transpose_bytes(at: *const u8, stride: usize) -> [__m512i; 8] {
    let mut rows = [_mm512_setzero_si512(); 8];
    for row in 0..8 {
        let first = row / 4 * 8 + row % 4;
        // SAFETY: guaranteed by the caller.
        let (low, high) = unsafe {
            let at = at.add(first * stride);
            (_mm256_loadu_si256(at.cast()), _mm256_loadu_si256(at.add(4 * stride).cast()))
        };
        let both = _mm512_inserti64x4::<1>(_mm512_castsi256_si512(low), high);
        rows[row] = _mm512_xor_si512(both, _mm512_set1_epi8(-128));
    }
    // The 128-bit lanes of `rows[0]` hold values 0..16 of row 0, values 16..32 of row 0, and the same values of row 4.
    let a = transpose_quarters([rows[0], rows[1], rows[2], rows[3]]);
    let b = transpose_quarters([rows[4], rows[5], rows[6], rows[7]]);
    let mut out = [_mm512_setzero_si512(); 8];
    for word in 0..4 {
        out[word] = _mm512_shuffle_i32x4::<0x88>(a[word], b[word]);
        out[word + 4] = _mm512_shuffle_i32x4::<0xdd>(a[word], b[word]);
    }
    out
}

/// Like [`transpose_bytes`], but for 4-bit codes. Returns twice each code, because a code's value is `2 * code - 15`.
///
/// # Safety
/// 16 bytes are readable at `at` and at the next 15 multiples of `stride`.
#[inline]
#[target_feature(enable = "avx2,fma,bmi2,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
pub(super) unsafe fn transpose_nibbles(at: *const u8, stride: usize) -> [__m512i; 8] {
    // SAFETY: guaranteed by the caller.
    let words = unsafe { transpose_words(at, stride) };
    let mask = _mm512_set1_epi8(30);
    let mut out = [_mm512_setzero_si512(); 8];
    for word in 0..4 {
        out[word] = _mm512_and_si512(_mm512_slli_epi16::<1>(words[word]), mask);
        out[word + 4] = _mm512_and_si512(_mm512_srli_epi16::<3>(words[word]), mask);
    }
    out
}

/// Loads four words of each of sixteen rows. Vector `w` holds word `w` of each row.
///
/// # Safety
/// 16 bytes are readable at `at` and at the next 15 multiples of `stride`.
#[inline]
#[target_feature(enable = "avx2,fma,bmi2,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn transpose_words(at: *const u8, stride: usize) -> [__m512i; 4] {
    let mut rows = [_mm512_setzero_si512(); 4];
    for row in 0..4 {
        // SAFETY: guaranteed by the caller.
        unsafe {
            let at = at.add(row * stride);
            let whole = _mm512_castsi128_si512(_mm_loadu_si128(at.cast()));
            let whole = _mm512_inserti32x4::<1>(whole, _mm_loadu_si128(at.add(4 * stride).cast()));
            let whole = _mm512_inserti32x4::<2>(whole, _mm_loadu_si128(at.add(8 * stride).cast()));
            rows[row] = _mm512_inserti32x4::<3>(whole, _mm_loadu_si128(at.add(12 * stride).cast()));
        }
    }
    transpose_quarters(rows)
}

/// Loads the scales of sixteen rows as f32, two for each entry of `to`.
///
/// # Safety
/// One word for each entry of `to` is readable at `at` and at the next 15 multiples of `stride`.
#[inline]
#[target_feature(enable = "avx2,fma,bmi2,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
pub(super) unsafe fn scales(at: *const u8, stride: usize, to: &mut [[__m512; 2]]) {
    let index = _mm512_mullo_epi32(
        _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
        _mm512_set1_epi32(stride as i32),
    );
    for (number, to) in to.chunks_mut(4).enumerate() {
        let at = at.wrapping_add(16 * number);
        let mut words = [_mm512_setzero_si512(); 4];
        // SAFETY: guaranteed by the caller. Reads four words of a row, or as many as `to` has entries.
        unsafe {
            if to.len() == 4 {
                words = transpose_words(at, stride);
            } else {
                for pair in 0..to.len() {
                    words[pair] = _mm512_i32gather_epi32::<1>(index, at.add(4 * pair).cast());
                }
            }
        }
        for (to, both) in to.iter_mut().zip(words) {
            to[0] = _mm512_castsi512_ps(_mm512_slli_epi32::<16>(both));
            to[1] = _mm512_castsi512_ps(_mm512_and_si512(both, _mm512_set1_epi32(-65536)));
        }
    }
}

/// In each 128-bit lane, the 32-bit word `w` of vector `v` becomes word `v` of vector `w`.
#[inline]
#[target_feature(enable = "avx2,fma,bmi2,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
fn transpose_quarters(v: [__m512i; 4]) -> [__m512i; 4] {
    let a = _mm512_unpacklo_epi32(v[0], v[1]);
    let b = _mm512_unpacklo_epi32(v[2], v[3]);
    let c = _mm512_unpackhi_epi32(v[0], v[1]);
    let d = _mm512_unpackhi_epi32(v[2], v[3]);
    [_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b), _mm512_unpacklo_epi64(c, d), _mm512_unpackhi_epi64(c, d)]
}

/// Loads 64 values of a row as signed bytes, in order.
///
/// # Safety
/// `8 * bits` bytes are readable.
#[inline]
#[target_feature(enable = "avx2,fma,bmi2,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
pub(super) unsafe fn signed_bytes(at: *const u8, bits: usize) -> __m512i {
    if bits == 8 {
        // SAFETY: guaranteed by the caller.
        return unsafe { _mm512_loadu_si512(at.cast()) };
    }
    // SAFETY: guaranteed by the caller.
    let both = unsafe { _mm256_loadu_si256(at.cast()) };
    let mask = _mm256_set1_epi8(15);
    let high = _mm256_srli_epi16::<4>(both);
    let low = _mm512_castsi256_si512(_mm256_and_si256(both, mask));
    let codes = _mm512_inserti64x4::<1>(low, _mm256_and_si256(high, mask));
    // The 16-byte parts of `codes` hold values 0..16, 32..48, 16..32 and 48..64. The shuffle puts them in order.
    let codes = _mm512_shuffle_i32x4::<0xd8>(codes, codes);
    _mm512_sub_epi8(_mm512_add_epi8(codes, codes), _mm512_set1_epi8(15))
}

/// Interleaves four rows of 64 one-byte values: each 32-bit word of the result holds the same value of all four rows.
/// The first and third vectors hold the first 32 values. The second and fourth vectors hold the last 32 values.
#[inline]
#[target_feature(enable = "avx2,fma,bmi2,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
pub(super) fn interleave(mut rows: [__m512i; 4]) -> [__m512i; 4] {
    // The 128-bit lane `i` gets four consecutive values of each quarter of the row: the 32-bit words `i`, `8 + i`,
    // `4 + i` and `12 + i`. The unpack instructions below work within lanes, so each result then has one quarter.
    let order = _mm512_setr_epi32(0, 8, 4, 12, 1, 9, 5, 13, 2, 10, 6, 14, 3, 11, 7, 15);
    for row in 0..4 {
        rows[row] = _mm512_permutexvar_epi32(order, rows[row]);
    }
    let [a, b, c, d] = rows;
    let lows = (_mm512_unpacklo_epi8(a, b), _mm512_unpacklo_epi8(c, d));
    let highs = (_mm512_unpackhi_epi8(a, b), _mm512_unpackhi_epi8(c, d));
    [
        _mm512_unpacklo_epi16(lows.0, lows.1),
        _mm512_unpackhi_epi16(lows.0, lows.1),
        _mm512_unpacklo_epi16(highs.0, highs.1),
        _mm512_unpackhi_epi16(highs.0, highs.1),
    ]
}
