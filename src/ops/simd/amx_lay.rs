//! What [`super::amx_few`] multiplies, laid out for it: activations once in a call, weights sixteen rows at a time.

use std::arch::x86_64::*;

use super::{
    Activations, Affine, CacheLine,
    lay512::{ROWS, first, transpose},
    x86,
};

/// Lines of the cache in a tile, and bytes in such a line.
pub const TILE: usize = 16;
pub const LINE: usize = 64;

/// Tiles that hold three digits of `width` lines.
pub const fn tiles(width: usize) -> usize {
    (3 * width).div_ceil(TILE)
}

/// Columns of weights that a tile takes.
pub fn step(weight: &Affine<'_>) -> usize {
    weight.group.min(LINE)
}

/// The digits of all lines as tiles: [`tiles`] of them one after the other for each [`step`] of columns.
#[inline]
#[target_feature(enable = "avx512f")]
pub unsafe fn digits<const W: usize>(weight: &Affine<'_>, lines: &[Activations<'_>], to: *mut CacheLine) {
    let step = step(weight);
    for tile in 0..tiles(W) {
        let mut planes = [std::ptr::null(); 16];
        for (lane, plane) in planes.iter_mut().enumerate() {
            // What stands in columns that no line has is not read.
            let (digit, line) = ((tile * 16 + lane) / W, lane % W);
            *plane = lines[line.min(lines.len() - 1)].digits.planes[digit.min(2)].as_ptr();
        }
        for chunk in 0..weight.cols / step {
            let mut words = [_mm512_setzero_si512(); 16];
            // SAFETY: planes have a row's digits; there is room for a tile of each chunk (caller).
            unsafe {
                for (words, plane) in words.iter_mut().zip(planes) {
                    *words = _mm512_maskz_loadu_epi32(first(step / 4), plane.add(chunk * step).cast());
                }
                store(transpose(words), to.add((chunk * tiles(W) + tile) * TILE), step / 4);
            }
        }
    }
}

/// The scales and sums of the lines of each group, lane `i` having those of line `i % W`.
#[inline]
#[target_feature(enable = "avx512f")]
pub unsafe fn scales<const W: usize>(
    weight: &Affine<'_>,
    lines: &[Activations<'_>],
    scale: *mut CacheLine,
    sum: *mut CacheLine,
) {
    for at in (0..weight.groups()).step_by(16) {
        let (mut scales, mut sums) = ([_mm512_setzero_si512(); 16], [_mm512_setzero_si512(); 16]);
        // SAFETY: there are values for all groups, and the mask keeps to them; there is room for all groups (caller).
        unsafe {
            for lane in 0..16 {
                let digits = &lines[(lane % W).min(lines.len() - 1)].digits;
                let mask = first(weight.groups() - at);
                scales[lane] = _mm512_maskz_loadu_epi32(mask, digits.scale.as_ptr().add(at).cast());
                sums[lane] = _mm512_maskz_loadu_epi32(mask, digits.sum.as_ptr().add(at).cast());
            }
            store(transpose(scales), scale.add(at), 16);
            store(transpose(sums), sum.add(at), 16);
        }
    }
}

/// Stores 16 registers, or the first 8.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn store(registers: [__m512i; 16], to: *mut CacheLine, count: usize) {
    // SAFETY: there is room (caller). Loops of a known length keep the registers where they are.
    unsafe {
        if count == 16 {
            for (index, register) in registers.iter().enumerate() {
                _mm512_store_si512(to.add(index).cast(), *register);
            }
        } else {
            for (index, register) in registers.iter().enumerate().take(8) {
                _mm512_store_si512(to.add(index).cast(), *register);
            }
        }
    }
}

/// Asks for what group `group` of the next sixteen rows has: scales, biases and, with `codes`, codes.
#[inline]
#[target_feature(enable = "avx512f")]
pub fn ahead(weight: &Affine<'_>, row: usize, group: usize, codes: bool) {
    let (scales, biases) = weight.constants(row);
    let ask = |from: *const u8, bytes: usize| {
        for at in (0..bytes).step_by(LINE) {
            let place = from.wrapping_add(bytes * (weight.groups() + group) + at);
            _mm_prefetch::<_MM_HINT_T1>(place.cast());
        }
    };
    ask(scales.as_ptr(), ROWS * weight.float.bytes());
    ask(biases.as_ptr(), ROWS * weight.float.bytes());
    if codes {
        ask(weight.codes(row).as_ptr(), ROWS * weight.group * weight.bits / 8);
    }
}

/// The low half of each byte, and its high half moved down, as matrices of bits.
const LOW: i64 = 0x0102_0408_0000_0000;
const HIGH: i64 = 0x1020_4080_0000_0000;

/// Unpacks a tile of codes of 4 bits, in the order of nibbles, and asks for as many bytes at `next` in between.
#[inline]
#[target_feature(enable = "avx2,avx512f,avx512bw,gfni")]
pub unsafe fn nibbles(weight: &Affine<'_>, packed: *const u8, next: *const u8, to: *mut CacheLine) {
    let halves = _mm512_set_epi64(HIGH, HIGH, HIGH, HIGH, LOW, LOW, LOW, LOW);
    let bytes = weight.cols / 2;
    // SAFETY: sixteen rows have these codes, and `to` takes a tile (caller); any address may be asked for.
    unsafe {
        for row in 0..ROWS {
            if row % 2 == 0 {
                _mm_prefetch::<_MM_HINT_T1>(next.wrapping_add(row * LINE / 2).cast());
            }
            let both = _mm512_broadcast_i64x4(_mm256_loadu_si256(packed.add(row * bytes).cast()));
            _mm512_store_si512(to.add(row).cast(), _mm512_gf2p8affine_epi64_epi8::<0>(both, halves));
        }
    }
}

/// Unpacks sixteen rows of codes that [`nibbles`] does not: of other widths than 4 and 8 bits, or in groups of 32.
#[inline]
#[target_feature(enable = "avx2,bmi2,avx512f,avx512bw,gfni")]
pub unsafe fn unpacked(weight: &Affine<'_>, row: usize, room: &mut Vec<u8>) -> *const u8 {
    let halves = _mm256_set_epi64x(HIGH, HIGH, LOW, LOW);
    room.resize((ROWS * weight.cols).max(room.len()), 0);
    for (index, bytes) in room.chunks_exact_mut(weight.cols).take(ROWS).enumerate() {
        // SAFETY: the processor has BMI2; sixteen bytes are read and thirty-two written.
        unsafe {
            if weight.bits != 4 {
                x86::unpack_row(weight, row + index, bytes);
                continue;
            }
            for (packed, bytes) in weight.codes(row + index).chunks_exact(16).zip(bytes.chunks_exact_mut(32)) {
                let both = _mm256_broadcastsi128_si256(_mm_loadu_si128(packed.as_ptr().cast()));
                _mm256_storeu_si256(bytes.as_mut_ptr().cast(), _mm256_gf2p8affine_epi64_epi8::<0>(both, halves));
            }
        }
    }
    room.as_ptr()
}
