//! Few rows of activations (2 to 16) with the processor's tiles (AMX), nearly as fast as their weights come from memory.
//!
//! Sixteen rows of weights are the rows of a tile, a byte a code, in the order in which they lie. The columns of up to three
//! other tiles are the digits of `W` rows of activations (4, 8 or 16, the last one repeated), four in a lane:
//!
//! ```text
//!       64 codes            W high, W middle, W low digits       sums of a group
//!     ┌───────────┐           ┌───────┬───────┬───────┐       ┌───────┬───────┬───────┐
//!  16 │   codes   │  16 lanes │   h   │   m   │   l   │ =  16 │   h   │   m   │   l   │
//! rows└───────────┘  of four  └───────┴───────┴───────┘   rows└───────┴───────┴───────┘
//! ```
//!
//! So weights are not transposed, as in [`super::amx`], which is worth it for more rows only; what is transposed are the
//! digits, once for all calls with the same. A register of sums then has `16 / W` rows of weights with `W` lines each.
//!
//! Groups pass through in stages: while one is unpacked, the one before is multiplied, the sums of the second before are
//! stored, and those of the third before join the accumulators. The next sixteen rows are asked for line by line in
//! between: a core keeps few requests to memory under way, and everything else waits if they come in one go.
//!
//! A load waits for a store under way with the same low twelve bits of its address, and stores of tiles are long under
//! way. Codes, digits and sums of a group therefore begin at the same such bits: those of the next group begin elsewhere.

use std::{
    arch::{asm, x86_64::*},
    ops::{Range, RangeInclusive},
};

use super::{
    Activations, Affine, CacheLine, Out, Scratch,
    amx::Shapes,
    amx_lay::{self as lay, LINE, TILE, step, tiles},
    gemm512::{finish, join},
    lay512::{ROWS, constants, transpose},
};

/// Most rows of activations.
const MOST: usize = 16;
/// Groups of which codes and sums are kept at a time; a group has one or two tiles of codes.
const KEPT: usize = 4;

/// Lines of the cache at multiples of 4,096 bytes.
#[derive(Clone, Copy)]
#[repr(C, align(4096))]
struct Page([CacheLine; 64]);

/// Buffers, kept from call to call.
#[derive(Default)]
pub struct Room {
    /// What `digits`, `scale` and `sum` are from: the shape, and each line's filling and address.
    laid: (usize, usize, usize),
    of: Vec<(u64, usize)>,
    /// For each 64 columns of weights (32 if a group has no more) the tiles of digits.
    digits: Vec<Page>,
    /// Unpacked codes, then sums, of the last few groups.
    kept: Vec<Page>,
    /// For each group a register: scales and sums of the lines; scales and biases of sixteen rows of weights.
    scale: Vec<CacheLine>,
    sum: Vec<CacheLine>,
    scales: Vec<CacheLine>,
    biases: Vec<CacheLine>,
    /// Rows of weights of other widths than 4 and 8 bits.
    bytes: Vec<u8>,
}

/// The numbers of lines that gain by it. Rows of few groups are done before the stages are full, and codes that are
/// unpacked apart (see [`lay::unpacked`]) or fill half of a tile take longer than two lines one by one.
pub fn lines(weight: &Affine<'_>) -> RangeInclusive<usize> {
    let whole = matches!(weight.bits, 4 | 8) && step(weight) == LINE;
    let least = if weight.groups() < 8 {
        4
    } else if whole {
        2
    } else {
        3
    };
    least..=MOST
}

/// See [`super::product`]; for so many [`lines`] and as many whole sixteens as `rows` has. Returns how many rows it
/// computed.
///
/// # Safety
/// As for [`super::product`].
#[target_feature(enable = "avx2,fma,bmi2,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,gfni")]
pub unsafe fn rows(
    weight: &Affine<'_>,
    rows: Range<usize>,
    lines: &[Activations<'_>],
    outs: &[Out],
    scratch: &mut Scratch,
) -> usize {
    let count = rows.len() / ROWS * ROWS;
    if count == 0 {
        return 0;
    }
    let rows = rows.start..rows.start + count;
    // SAFETY: passed on.
    unsafe {
        match lines.len() {
            ..=4 => blocks::<4>(weight, rows, lines, outs, &mut scratch.few),
            5..=8 => blocks::<8>(weight, rows, lines, outs, &mut scratch.few),
            _ => blocks::<MOST>(weight, rows, lines, outs, &mut scratch.few),
        }
        // No tile is wanted any more.
        asm!("tilerelease", options(nomem, nostack));
    }
    count
}

/// Bytes from one row of sums to the next: 8 lines have a half tile of low digits.
const fn apart(width: usize, tile: usize) -> usize {
    if width == 8 && tile == 1 { LINE / 2 } else { LINE }
}

#[inline]
#[target_feature(enable = "avx2,fma,bmi2,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,gfni")]
unsafe fn blocks<const W: usize>(
    weight: &Affine<'_>,
    rows: Range<usize>,
    lines: &[Activations<'_>],
    outs: &[Out],
    room: &mut Room,
) {
    let (chunks, groups) = (weight.cols / step(weight), weight.groups().next_multiple_of(16));
    let pages = |pages: &mut Vec<Page>, tiles: usize| {
        pages.resize(tiles.div_ceil(4).max(pages.len()), Page([CacheLine::ZERO; 64]));
    };
    pages(&mut room.digits, chunks * tiles(W));
    pages(&mut room.kept, 2 * KEPT * tiles(W));
    for registers in [&mut room.scale, &mut room.sum, &mut room.scales, &mut room.biases] {
        registers.resize(groups.max(registers.len()), CacheLine::ZERO);
    }
    let mut shapes = [(0, ROWS, step(weight)); 7];
    for tile in 0..3 {
        shapes[tile + 1] = (tile + 1, step(weight) / 4, apart(W, tile));
        shapes[tile + 4] = (tile + 4, ROWS, apart(W, tile));
    }
    let shapes = Shapes::new(&shapes);
    // SAFETY: these shapes are valid, and only this file uses tiles until they are released; there is room for what is
    // laid out; the rest is the caller's promise.
    unsafe {
        asm!("ldtilecfg [{}]", in(reg) &raw const shapes, options(nostack, readonly));
        let laid = (W, weight.cols, weight.group);
        let of = lines.iter().map(|line| (line.digits.filling, line.digits.planes[0].as_ptr().addr()));
        // Many calls come with the same lines: those for other rows of a weight, and for other weights.
        if room.laid != laid || !of.clone().eq(room.of.iter().copied()) {
            room.laid = laid;
            room.of.clear();
            room.of.extend(of);
            lay::digits::<W>(weight, lines, room.digits.as_mut_ptr().cast());
            lay::scales::<W>(weight, lines, room.scale.as_mut_ptr(), room.sum.as_mut_ptr());
        }
        for row in rows.step_by(ROWS) {
            block::<W>(weight, row, outs, room);
        }
    }
}

/// Sixteen rows of weights against all lines.
#[inline]
#[target_feature(enable = "avx2,fma,bmi2,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,gfni")]
unsafe fn block<const W: usize>(weight: &Affine<'_>, row: usize, outs: &[Out], room: &mut Room) {
    let (groups, step) = (weight.groups(), step(weight));
    let steps = weight.group / step;
    let (scales, biases) = (weight.constants(row).0.as_ptr(), weight.constants(row).1.as_ptr());
    // SAFETY: as for `blocks`, which made room.
    unsafe {
        constants::<1>(weight, scales, room.scales.as_mut_ptr());
        constants::<1>(weight, biases, room.biases.as_mut_ptr());
        let kept: *mut CacheLine = room.kept.as_mut_ptr().cast();
        let sums = kept.add(KEPT * tiles(W) * TILE);
        let packed = weight.codes(row).as_ptr();
        let nibbles = weight.bits == 4 && step == LINE;
        // The codes of chunk `n` begin `n * leap` bytes on, those of the next row `stride`.
        let (codes, stride, leap) = match weight.bits {
            _ if nibbles => (kept.cast::<u8>().cast_const(), LINE, tiles(W) * TILE * LINE),
            8 => (packed, weight.cols, step),
            _ => (lay::unpacked(weight, row, &mut room.bytes), weight.cols, step),
        };
        let place = |chunk: usize| codes.add(if nibbles { chunk % KEPT } else { chunk } * leap);
        let digits = |chunk: usize| room.digits.as_ptr().cast::<CacheLine>().add(chunk * tiles(W) * TILE);
        let sums = |group: usize| sums.add(group % KEPT * tiles(W) * TILE);
        let spread = spread::<W>();
        let mut lanes = [[_mm512_setzero_ps(); W]; 8];
        for at in 0..groups + 3 {
            if at < groups {
                lay::ahead(weight, row, at, !nibbles);
                if nibbles {
                    for chunk in at * steps..(at + 1) * steps {
                        let next = packed.wrapping_add(ROWS * (weight.cols + chunk * LINE) / 2);
                        lay::nibbles(weight, packed.add(chunk * LINE / 2), next, place(chunk).cast_mut().cast());
                    }
                }
            }
            if (1..groups + 2).contains(&at) {
                let group = at - 1;
                if group < groups {
                    load_tiles::<W>(place(group * steps), stride, digits(group * steps));
                }
                if group > 0 {
                    store_tiles::<W>(sums(group - 1));
                }
                if group < groups {
                    multiply::<W, true>();
                    for chunk in group * steps + 1..(group + 1) * steps {
                        load_tiles::<W>(place(chunk), stride, digits(chunk));
                        multiply::<W, false>();
                    }
                }
            }
            if at >= 3 {
                let group = at - 3;
                let lines = [load(room.scale.as_ptr().add(group)), load(room.sum.as_ptr().add(group))];
                let (scales, biases) = (room.scales.as_ptr().add(group), room.biases.as_ptr().add(group));
                for (index, lane) in lanes[group % 8].iter_mut().enumerate() {
                    let constants = if W == MOST {
                        [
                            _mm512_set1_ps(*scales.cast::<f32>().add(index)),
                            _mm512_set1_ps(*biases.cast::<f32>().add(index)),
                        ]
                    } else {
                        let spread = spread[index];
                        [_mm512_permutexvar_ps(spread, load(scales)), _mm512_permutexvar_ps(spread, load(biases))]
                    };
                    join(planes::<W>(sums(group), index), constants, lines, lane);
                }
            }
        }
        let mut results = [[0f32; 16]; W];
        for (index, results) in results.iter_mut().enumerate() {
            let mut l = [_mm512_setzero_ps(); 8];
            for (l, lanes) in l.iter_mut().zip(&lanes) {
                *l = lanes[index];
            }
            finish(l, groups, weight.gain, results.as_mut_ptr());
        }
        if W == MOST {
            let mut rows = [_mm512_setzero_si512(); MOST];
            for (row, results) in rows.iter_mut().zip(&results) {
                *row = _mm512_loadu_si512(results.as_ptr().cast());
            }
            for (out, line) in outs.iter().zip(transpose(rows)) {
                _mm512_storeu_si512(out.0.add(row).cast(), line);
            }
            return;
        }
        let results = results.as_flattened();
        for (line, out) in outs.iter().enumerate() {
            for index in 0..ROWS {
                out.0.add(row + index).write(results[index * W + line]);
            }
        }
    }
}

/// A register of floats.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn load(from: *const CacheLine) -> __m512 {
    // SAFETY: readable (caller).
    unsafe { _mm512_load_ps(from.cast()) }
}

/// For each register of sums, the row of weights of each lane.
#[inline]
#[target_feature(enable = "avx512f")]
fn spread<const W: usize>() -> [__m512i; W] {
    let mut spread = [_mm512_setzero_si512(); W];
    for (index, spread) in spread.iter_mut().enumerate() {
        let mut rows = [0i32; 16];
        for (lane, row) in rows.iter_mut().enumerate() {
            *row = (index * (16 / W) + lane / W) as i32;
        }
        // SAFETY: 64 bytes are read.
        *spread = unsafe { _mm512_loadu_si512(rows.as_ptr().cast()) };
    }
    spread
}

/// Tile 0 is codes, 1 to 3 digits.
#[inline(always)]
unsafe fn load_tiles<const W: usize>(codes: *const u8, stride: usize, digits: *const CacheLine) {
    // SAFETY: tiles have their shapes, and there are codes and digits for them (caller).
    unsafe {
        asm!("tileloadd tmm0, [{} + {}]", in(reg) codes, in(reg) stride, options(nostack, readonly));
        asm!("tileloadd tmm1, [{} + {}]", in(reg) digits, in(reg) LINE, options(nostack, readonly));
        if const { tiles(W) > 1 } {
            asm!("tileloadd tmm2, [{} + {}]", in(reg) digits.add(TILE), in(reg) LINE, options(nostack, readonly));
        }
        if const { tiles(W) > 2 } {
            asm!("tileloadd tmm3, [{} + {}]", in(reg) digits.add(2 * TILE), in(reg) LINE, options(nostack, readonly));
        }
    }
}

/// Tiles 4 to 6 are the sums, to which products are added, or which begin as them if these are the `FIRST`.
#[inline(always)]
unsafe fn multiply<const W: usize, const FIRST: bool>() {
    // SAFETY: tiles have their shapes (caller); nothing else is touched.
    unsafe {
        if FIRST {
            asm!("tilezero tmm4", "tilezero tmm5", "tilezero tmm6", options(nostack, nomem));
        }
        asm!("tdpbusd tmm4, tmm0, tmm1", options(nostack, nomem));
        if const { tiles(W) > 1 } {
            asm!("tdpbusd tmm5, tmm0, tmm2", options(nostack, nomem));
        }
        if const { tiles(W) > 2 } {
            asm!("tdpbusd tmm6, tmm0, tmm3", options(nostack, nomem));
        }
    }
}

#[inline(always)]
unsafe fn store_tiles<const W: usize>(to: *mut CacheLine) {
    // SAFETY: tiles have their shapes, and there is room for their sums (caller).
    unsafe {
        asm!("tilestored [{} + {}], tmm4", in(reg) to, in(reg) apart(W, 0), options(nostack));
        if const { tiles(W) > 1 } {
            asm!("tilestored [{} + {}], tmm5", in(reg) to.add(TILE), in(reg) apart(W, 1), options(nostack));
        }
        if const { tiles(W) > 2 } {
            asm!("tilestored [{} + {}], tmm6", in(reg) to.add(2 * TILE), in(reg) apart(W, 2), options(nostack));
        }
    }
}

/// The high, middle and low sums of `16 / W` rows of weights, the `index`th of them, with `W` lines each.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn planes<const W: usize>(sums: *const CacheLine, index: usize) -> [__m512i; 3] {
    // SAFETY: there are the sums of a group (caller).
    unsafe {
        macro_rules! load {
            ($at:expr) => {
                _mm512_load_si512(sums.add($at).cast())
            };
        }
        match W {
            // Four rows have high, middle, low and nothing in the quarters of a register each.
            4 => {
                let [a, b] = [load!(4 * index), load!(4 * index + 1)];
                let [c, d] = [load!(4 * index + 2), load!(4 * index + 3)];
                let upper = [_mm512_shuffle_i32x4::<0x44>(a, b), _mm512_shuffle_i32x4::<0x44>(c, d)];
                let lower = [_mm512_shuffle_i32x4::<0xee>(a, b), _mm512_shuffle_i32x4::<0xee>(c, d)];
                [
                    _mm512_shuffle_i32x4::<0x88>(upper[0], upper[1]),
                    _mm512_shuffle_i32x4::<0xdd>(upper[0], upper[1]),
                    _mm512_shuffle_i32x4::<0x88>(lower[0], lower[1]),
                ]
            }
            // Two rows have high and middle in halves, low in the other tile's register.
            8 => {
                let [a, b] = [load!(2 * index), load!(2 * index + 1)];
                [_mm512_shuffle_i32x4::<0x44>(a, b), _mm512_shuffle_i32x4::<0xee>(a, b), load!(TILE + index)]
            }
            _ => [load!(index), load!(TILE + index), load!(2 * TILE + index)],
        }
    }
}
