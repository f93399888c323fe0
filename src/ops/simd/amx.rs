//! Many rows of activations with the processor's tiles (AMX), whose products of bytes are sixteen times those of a register.
//!
//! Five rows of activations with three digits each are the rows of one tile; sixteen rows of weights, four codes in a
//! lane as in [`gemm512`], are the columns of another. Their product is the sums of one group, exact in 32 bits. What
//! follows is [`gemm512`]'s.
//!
//! Unpacking and transposing weights is worth it for more than the sixteen rows that [`super::amx_few`] takes.
//!
//! The compiler knows no tiles yet, so they are written as assembly. Their shapes and contents belong to a thread from
//! `ldtilecfg` to `tilerelease`, and nothing between the two uses them but this file or [`super::amx_few`].

use std::{
    arch::{asm, x86_64::*},
    ops::Range,
};

use super::{
    Activations, Affine, CacheLine, Out, Scratch,
    amx_lay::{LINE, step},
    gemm512::{everywhere, finish, join},
    lay512::{ROWS, Tiles, fill_codes, fill_constants},
};
use crate::platform::os;

/// Rows of activations in a tile.
const LINES: usize = 5;
/// Unpacked codes that stay in a core's cache while all rows of activations pass by.
const UNPACKED: usize = 128 << 10;

/// Whether the processor has tiles of bytes (and GFNI, as all that do), and the system keeps them when threads take turns.
pub fn usable() -> bool {
    // Leaf 7: bit 24 says tiles, bit 25 says that their bytes can be multiplied.
    let tiles = __cpuid(0).eax >= 7 && __cpuid_count(7, 0).edx >> 24 & 3 == 3;
    tiles && is_x86_feature_detected!("gfni") && os::allow_tiles()
}

/// The shapes of the tiles as `ldtilecfg` reads them.
#[repr(C, align(64))]
pub struct Shapes {
    palette: u8,
    start: u8,
    reserved: [u8; 14],
    bytes: [u16; 16],
    rows: [u8; 16],
}

impl Shapes {
    /// Of tiles with their numbers of rows and of bytes in a row.
    pub fn new(tiles: &[(usize, usize, usize)]) -> Self {
        let mut shapes = Self { palette: 1, start: 0, reserved: [0; 14], bytes: [0; 16], rows: [0; 16] };
        for (tile, rows, bytes) in tiles {
            (shapes.rows[*tile], shapes.bytes[*tile]) = (*rows as u8, *bytes as u16);
        }
        shapes
    }
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
    let (cols, Scratch { tiles, digits, .. }) = (weight.cols, scratch);
    let most = if lines.len() <= LINES { 1 } else { (UNPACKED / (ROWS * cols)).max(1) };
    let mut row = rows.start;
    while rows.end - row >= ROWS {
        let count = ((rows.end - row) / ROWS).min(most);
        for tile in 0..count {
            // SAFETY: the rows exist.
            unsafe {
                fill_constants::<1>(weight, row + tile * ROWS, tiles, tile * weight.groups());
                fill_codes::<1>(weight, row + tile * ROWS, 0..weight.groups(), tiles, tile * (cols / 4));
            }
        }
        let mut shaped = 0;
        for (lines, outs) in lines.chunks(LINES).zip(outs.chunks(LINES)) {
            if shaped != lines.len() {
                shaped = lines.len();
                // Tile 0 is digits, 1 codes, 2 sums; of 64 columns, or a group if it has fewer.
                let step = step(weight);
                let shapes = Shapes::new(&[(0, 3 * shaped, step), (1, step / 4, LINE), (2, 3 * shaped, LINE)]);
                // SAFETY: these shapes are valid; nothing else uses tiles until they are released.
                unsafe { asm!("ldtilecfg [{}]", in(reg) &raw const shapes, options(nostack, readonly)) };
            }
            let digits = planes(lines, digits);
            for tile in 0..count {
                // SAFETY: the shapes are those of so many lines, whose digits lie so far apart; the tile is filled; the
                // rest is the caller's promise.
                unsafe { some_lines(weight, row + tile * ROWS, lines, outs, digits, tiles, tile) };
            }
        }
        row += count * ROWS;
    }
    // SAFETY: no tile is wanted any more.
    unsafe { asm!("tilerelease", options(nomem, nostack)) };
    row - rows.start
}

/// Where the digits of `lines` begin, and how many bytes they lie apart. If they do so unevenly, they are copied to `room`.
fn planes(lines: &[Activations<'_>], room: &mut Vec<CacheLine>) -> (*const i8, usize) {
    let all = || lines.iter().flat_map(|line| line.digits.planes);
    let [first, second, _] = lines[0].digits.planes;
    let stride = second.as_ptr().addr().wrapping_sub(first.as_ptr().addr());
    if all().enumerate().all(|(index, plane)| plane.as_ptr() == first.as_ptr().wrapping_add(index * stride)) {
        return (first.as_ptr(), stride);
    }
    let vectors = first.len().div_ceil(LINE);
    room.resize((3 * lines.len() * vectors).max(room.len()), CacheLine::ZERO);
    for (plane, room) in all().zip(room.chunks_exact_mut(vectors)) {
        // SAFETY: a plane fits its vectors, which take any bytes.
        unsafe { plane.as_ptr().copy_to_nonoverlapping(room.as_mut_ptr().cast(), plane.len()) };
    }
    (room.as_ptr().cast(), vectors * LINE)
}

/// One tile of weights against some lines.
#[inline]
#[target_feature(enable = "avx2,fma,bmi2,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn some_lines(
    weight: &Affine<'_>,
    row: usize,
    lines: &[Activations<'_>],
    outs: &[Out],
    (digits, stride): (*const i8, usize),
    tiles: &Tiles,
    tile: usize,
) {
    let (groups, words) = (weight.groups(), weight.group / 4);
    let mut lanes = [[_mm512_setzero_ps(); 8]; LINES];
    let mut sums = [[CacheLine::ZERO; 3]; LINES];
    // SAFETY: tiles and digits have `groups` groups of `words` words; outs are writable at these rows (caller).
    unsafe {
        let codes = tiles.codes.as_ptr().add(tile * groups * words);
        let constants = tile * groups;
        for group in 0..groups {
            let digits = digits.add(group * weight.group);
            product(digits, stride, codes.add(group * words), weight.group, sums.as_mut_ptr().cast());
            let scale = _mm512_load_ps(tiles.scales.as_ptr().add(constants + group).cast());
            let bias = _mm512_load_ps(tiles.biases.as_ptr().add(constants + group).cast());
            for ((line, lanes), sums) in lines.iter().zip(&mut lanes).zip(&sums) {
                // Not by `map`, whose closure would be called: it has instructions that `map` was not compiled for.
                let [high, middle, low] = sums;
                let load = |sum: &CacheLine| _mm512_load_si512((&raw const *sum).cast());
                let sums = [load(high), load(middle), load(low)];
                join(sums, [scale, bias], everywhere(&line.digits, group), &mut lanes[group % 8]);
            }
        }
        for (lanes, out) in lanes.iter().zip(outs) {
            finish(*lanes, groups, weight.gain, out.0.add(row));
        }
    }
}

/// The sums of one group: digits `stride` bytes apart, by codes, to the rows of `to`.
///
/// # Safety
/// Tiles have their shapes; a group of digits and codes is readable, and `to` has as many rows as the digits.
#[inline(always)]
unsafe fn product(digits: *const i8, stride: usize, codes: *const CacheLine, group: usize, to: *mut CacheLine) {
    // SAFETY: passed on.
    unsafe {
        asm!(
            "tilezero tmm2",
            "2:",
            "tileloadd tmm0, [{digits} + {stride}]",
            "tileloadd tmm1, [{codes} + {line}]",
            "tdpbsud tmm2, tmm0, tmm1",
            "add {digits}, 64",
            "add {codes}, 1024",
            "dec {steps}",
            "jnz 2b",
            "tilestored [{to} + {line}], tmm2",
            digits = inout(reg) digits => _,
            stride = in(reg) stride,
            codes = inout(reg) codes => _,
            line = in(reg) LINE,
            steps = inout(reg) group.div_ceil(LINE) => _,
            to = in(reg) to,
            out("tmm0") _,
            out("tmm1") _,
            out("tmm2") _,
            options(nostack),
        );
    }
}
