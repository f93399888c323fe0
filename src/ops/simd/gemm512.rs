//! Many rows of activations with AVX-512: 16 or 32 rows of weights are unpacked once into a tile whose lanes are rows, so
//! that products need no sums across a register, and then meet every line.
//!
//! A tile has for each four columns one vector: 16 rows, four codes each. The digits of a line meet it as a broadcast of
//! four bytes. Per group the integer sums become f32 and join eight accumulators a row, as everywhere (see [`super`]).

use std::{arch::x86_64::*, ops::Range};

use super::{Activations, Affine, CacheLine, Out, Scratch, unpack, x86};
use crate::ops::quant::{Digits, Order};

/// Rows of a tile: the 32-bit lanes of a register.
pub const ROWS: usize = 16;

/// Buffers for tiles of weights with their scales and biases.
#[derive(Default)]
pub struct Tiles {
    pub codes: Vec<CacheLine>,
    pub scales: Vec<CacheLine>,
    pub biases: Vec<CacheLine>,
    /// Rows of one tile before they are transposed.
    bytes: Vec<u8>,
    constants: Vec<f32>,
}

/// See [`super::product`]; for as many whole tiles as `rows` has. Returns how many rows it computed.
///
/// # Safety
/// As for [`super::product`].
#[target_feature(enable = "avx2,fma,bmi2,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
pub unsafe fn rows(
    weight: &Affine<'_>,
    rows: Range<usize>,
    lines: &[Activations<'_>],
    outs: &[Out],
    scratch: &mut Scratch,
) -> usize {
    let tiles = &mut scratch.tiles;
    let mut row = rows.start;
    while rows.end - row >= ROWS {
        let count = ((rows.end - row) / ROWS).min(2);
        // SAFETY: the rows exist; everything else is passed on.
        unsafe {
            for tile in 0..count {
                fill(weight, row + tile * ROWS, tiles, tile, tile, count);
            }
            if count == 2 {
                all_lines::<2>(weight, row, lines, outs, tiles);
            } else {
                all_lines::<1>(weight, row, lines, outs, tiles);
            }
        }
        row += count * ROWS;
    }
    row - rows.start
}

/// Unpacks rows `row..row + 16` into a tile: its codes from vector `at` on, its scales and biases from vector `constants` on,
/// each vector `step` behind the one before.
#[inline]
#[target_feature(enable = "avx2,fma,bmi2,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
pub unsafe fn fill(weight: &Affine<'_>, row: usize, tiles: &mut Tiles, at: usize, constants: usize, step: usize) {
    let (words, groups) = (weight.cols / 4, weight.groups());
    let room = |vectors: &mut Vec<CacheLine>, count: usize| vectors.resize(count.max(vectors.len()), CacheLine::ZERO);
    room(&mut tiles.codes, at + (words - 1) * step + 1);
    room(&mut tiles.scales, constants + (groups - 1) * step + 1);
    room(&mut tiles.biases, constants + (groups - 1) * step + 1);
    tiles.constants.resize(2 * ROWS * groups, 0.0);
    let (scales, biases) = tiles.constants.split_at_mut(ROWS * groups);
    for index in 0..ROWS {
        let (s, b) = weight.constants(row + index);
        unpack::widen(weight.float, s, &mut scales[index * groups..(index + 1) * groups]);
        unpack::widen(weight.float, b, &mut biases[index * groups..(index + 1) * groups]);
    }
    // SAFETY: source rows have `groups` or `words` words (half as many for nibbles), the targets room for them all.
    unsafe {
        turn(scales.as_ptr().cast(), groups, tiles.scales.as_mut_ptr().add(constants), step);
        turn(biases.as_ptr().cast(), groups, tiles.biases.as_mut_ptr().add(constants), step);
        let codes = tiles.codes.as_mut_ptr().add(at);
        if weight.bits == 4 {
            match Order::unit(weight.group) {
                32 => turn_nibbles::<4>(weight, row, codes, step),
                _ => turn_nibbles::<8>(weight, row, codes, step),
            }
        } else {
            tiles.bytes.resize(ROWS * weight.cols, 0);
            for (index, bytes) in tiles.bytes.chunks_exact_mut(weight.cols).enumerate() {
                x86::unpack_row(weight, row + index, bytes);
            }
            turn(tiles.bytes.as_ptr().cast(), words, codes, step);
        }
    }
}

/// Transposes 16 adjoining rows of `words` words each: vector `i * step` of `to` gets word `i` of every row.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn turn(from: *const u32, words: usize, to: *mut CacheLine, step: usize) {
    for at in (0..words).step_by(ROWS) {
        let here = (words - at).min(ROWS);
        // SAFETY: the mask keeps the loads inside the rows; the caller has room for as many vectors as words.
        unsafe {
            let vectors = load_block(from.add(at).cast(), words * 4, here);
            let put = |index: usize| _mm512_store_si512(to.add((at + index) * step).cast(), vectors[index]);
            if here == ROWS { (0..ROWS).for_each(put) } else { (0..here).for_each(put) }
        }
    }
}

/// [`turn`] for packed nibbles: each word becomes its four even codes and its four odd ones, in the order of
/// [`Order::Nibbles`], whose units are of `2 * HALF` words.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn turn_nibbles<const HALF: usize>(weight: &Affine<'_>, row: usize, to: *mut CacheLine, step: usize) {
    let words = weight.cols / 8;
    let from = weight.codes(row).as_ptr();
    let mask = _mm512_set1_epi32(0x0f0f_0f0f);
    for at in (0..words).step_by(ROWS) {
        let here = (words - at).min(ROWS);
        // SAFETY: as in `turn`; 16 rows of codes follow each other, and any address may be fetched.
        unsafe {
            for line in 0..8 {
                let next = from.wrapping_add(ROWS * words * 4 + at * 32 + line * 64);
                _mm_prefetch::<_MM_HINT_T1>(next.cast());
            }
            let vectors = load_block(from.add(at * 4), words * 4, here);
            let put = |index: usize| {
                let place = 2 * at + index / HALF * 2 * HALF + index % HALF;
                let (even, odd) = (vectors[index], _mm512_srli_epi32::<4>(vectors[index]));
                _mm512_store_si512(to.add(place * step).cast(), _mm512_and_si512(even, mask));
                _mm512_store_si512(to.add((place + HALF) * step).cast(), _mm512_and_si512(odd, mask));
            };
            if here == ROWS { (0..ROWS).for_each(put) } else { (0..here).for_each(put) }
        }
    }
}

/// The first `words` (at most 16) words of 16 rows that start `stride` bytes apart, transposed.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn load_block(from: *const u8, stride: usize, words: usize) -> [__m512i; ROWS] {
    let mask = if words >= ROWS { u16::MAX } else { (1 << words) - 1 };
    let mut a = [_mm512_setzero_si512(); ROWS];
    for (index, a) in a.iter_mut().enumerate() {
        // SAFETY: the mask keeps the load to words that exist (caller).
        *a = unsafe { _mm512_maskz_loadu_epi32(mask, from.add(index * stride).cast()) };
    }
    transpose(a)
}

/// Word `i` of register `j` goes to register `i` as word `j`.
#[inline]
#[target_feature(enable = "avx512f")]
pub fn transpose(mut a: [__m512i; ROWS]) -> [__m512i; ROWS] {
    // Pairs of words, then fours, within quarters of the registers; then the quarters themselves.
    let mut b = a;
    for i in 0..8 {
        b[2 * i] = _mm512_unpacklo_epi32(a[2 * i], a[2 * i + 1]);
        b[2 * i + 1] = _mm512_unpackhi_epi32(a[2 * i], a[2 * i + 1]);
    }
    for i in 0..4 {
        a[4 * i] = _mm512_unpacklo_epi64(b[4 * i], b[4 * i + 2]);
        a[4 * i + 1] = _mm512_unpackhi_epi64(b[4 * i], b[4 * i + 2]);
        a[4 * i + 2] = _mm512_unpacklo_epi64(b[4 * i + 1], b[4 * i + 3]);
        a[4 * i + 3] = _mm512_unpackhi_epi64(b[4 * i + 1], b[4 * i + 3]);
    }
    for i in 0..4 {
        b[i] = _mm512_shuffle_i32x4::<0x88>(a[i], a[i + 4]);
        b[i + 4] = _mm512_shuffle_i32x4::<0xdd>(a[i], a[i + 4]);
        b[i + 8] = _mm512_shuffle_i32x4::<0x88>(a[i + 8], a[i + 12]);
        b[i + 12] = _mm512_shuffle_i32x4::<0xdd>(a[i + 8], a[i + 12]);
    }
    for i in 0..4 {
        a[i] = _mm512_shuffle_i32x4::<0x88>(b[i], b[i + 8]);
        a[i + 4] = _mm512_shuffle_i32x4::<0x88>(b[i + 4], b[i + 12]);
        a[i + 8] = _mm512_shuffle_i32x4::<0xdd>(b[i], b[i + 8]);
        a[i + 12] = _mm512_shuffle_i32x4::<0xdd>(b[i + 4], b[i + 12]);
    }
    a
}

#[inline]
#[target_feature(enable = "avx2,fma,bmi2,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn all_lines<const M: usize>(
    weight: &Affine<'_>,
    row: usize,
    lines: &[Activations<'_>],
    outs: &[Out],
    tiles: &Tiles,
) {
    let (fours, rest) = lines.as_chunks::<4>();
    let (fours_out, rest_out) = outs.as_chunks::<4>();
    // SAFETY: passed on; there are as many outs as lines.
    unsafe {
        for (lines, outs) in fours.iter().zip(fours_out) {
            some_lines::<M, 4>(weight, row, lines, outs, tiles);
        }
        match (rest, rest_out) {
            ([a], [x]) => some_lines::<M, 1>(weight, row, &[*a], &[*x], tiles),
            ([a, b], [x, y]) => some_lines::<M, 2>(weight, row, &[*a, *b], &[*x, *y], tiles),
            ([a, b, c], [x, y, z]) => some_lines::<M, 3>(weight, row, &[*a, *b, *c], &[*x, *y, *z], tiles),
            _ => {}
        }
    }
}

/// `M` tiles against `N` lines.
#[inline]
#[target_feature(enable = "avx2,fma,bmi2,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn some_lines<const M: usize, const N: usize>(
    weight: &Affine<'_>,
    row: usize,
    lines: &[Activations<'_>; N],
    outs: &[Out; N],
    tiles: &Tiles,
) {
    let (groups, words) = (weight.groups(), weight.group / 4);
    let zero = _mm512_setzero_si512();
    let mut lanes = [[[_mm512_setzero_ps(); 8]; M]; N];
    // SAFETY: tiles and digits have `groups` groups of `words` words; outs are writable at these rows (caller).
    unsafe {
        let planes = lines.map(|line| line.digits.planes.map(|plane| plane.as_ptr().cast::<i32>()));
        for group in 0..groups {
            let mut sums = [[[zero; M]; 3]; N];
            for word in group * words..(group + 1) * words {
                let mut codes = [zero; M];
                for (m, codes) in codes.iter_mut().enumerate() {
                    *codes = _mm512_load_si512(tiles.codes.as_ptr().add(word * M + m).cast());
                }
                for (sums, planes) in sums.iter_mut().zip(&planes) {
                    for (sums, plane) in sums.iter_mut().zip(planes) {
                        let digits = _mm512_set1_epi32(plane.add(word).read_unaligned());
                        for (sum, codes) in sums.iter_mut().zip(codes) {
                            *sum = _mm512_dpbusd_epi32(*sum, codes, digits);
                        }
                    }
                }
            }
            for m in 0..M {
                let scale = _mm512_load_ps(tiles.scales.as_ptr().add(group * M + m).cast());
                let bias = _mm512_load_ps(tiles.biases.as_ptr().add(group * M + m).cast());
                for n in 0..N {
                    let sums = [sums[n][0][m], sums[n][1][m], sums[n][2][m]];
                    join(sums, [scale, bias], everywhere(&lines[n].digits, group), &mut lanes[n][m][group % 8]);
                }
            }
        }
        for n in 0..N {
            for (m, l) in lanes[n].iter_mut().enumerate() {
                finish(l, groups, weight.gain, outs[n].0.add(row + m * ROWS));
            }
        }
    }
}

/// The integer sums of one group, one register for each digit, join their accumulator. `weights` are scale and bias,
/// `lines` scale and sum.
#[inline]
#[target_feature(enable = "avx2,fma,bmi2,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
pub fn join(sums: [__m512i; 3], weights: [__m512; 2], lines: [__m512; 2], lane: &mut __m512) {
    let [high, middle, low] = sums;
    let upper = _mm512_add_epi32(_mm512_slli_epi32::<8>(high), middle);
    let dot = _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32::<8>(upper), low));
    *lane = _mm512_fmadd_ps(dot, _mm512_mul_ps(weights[0], lines[0]), *lane);
    *lane = _mm512_fmadd_ps(weights[1], lines[1], *lane);
}

/// Scale and sum of a group of a line, in all lanes.
///
/// # Safety
/// The line has that group.
#[inline]
#[target_feature(enable = "avx512f")]
pub unsafe fn everywhere(line: &Digits<'_>, group: usize) -> [__m512; 2] {
    // SAFETY: the caller's promise.
    unsafe { [_mm512_set1_ps(*line.scale.get_unchecked(group)), _mm512_set1_ps(*line.sum.get_unchecked(group))] }
}

/// Sixteen results at `to` from the accumulators of `groups` groups.
///
/// # Safety
/// There is room at `to`.
#[inline]
#[target_feature(enable = "avx2,fma,bmi2,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
pub unsafe fn finish(l: &mut [__m512; 8], groups: usize, gain: f32, to: *mut f32) {
    if !groups.is_multiple_of(8) {
        // The zero groups of the padding: they turn -0 into 0.
        for lane in &mut l[groups % 8..] {
            *lane = _mm512_add_ps(*lane, _mm512_setzero_ps());
        }
    }
    let sum = |a: __m512, b: __m512| _mm512_add_ps(a, b);
    let total = sum(sum(sum(l[0], l[4]), sum(l[2], l[6])), sum(sum(l[1], l[5]), sum(l[3], l[7])));
    // SAFETY: the caller's promise.
    unsafe { _mm512_storeu_ps(to, _mm512_mul_ps(total, _mm512_set1_ps(gain))) };
}
