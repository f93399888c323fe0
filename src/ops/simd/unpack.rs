//! From packed bits to bytes and floats, in plain Rust that compilers vectorise: small enough to be the reference, too.

use crate::ops::{
    quant::Order,
    weight::{Codes, Float, WeightView},
};

/// Packed floats (any alignment) to f32.
#[inline(always)]
pub fn widen(float: Float, bytes: &[u8], out: &mut [f32]) {
    match float {
        Float::F32 => {
            for (value, out) in bytes.as_chunks().0.iter().zip(out) {
                *out = f32::from_le_bytes(*value);
            }
        }
        Float::Bf16 => {
            for (value, out) in bytes.as_chunks().0.iter().zip(out) {
                *out = f32::from_bits(u32::from(u16::from_le_bytes(*value)) << 16);
            }
        }
        Float::F16 => {
            for (value, out) in bytes.as_chunks().0.iter().zip(out) {
                *out = half(u16::from_le_bytes(*value));
            }
        }
    }
}

/// IEEE half to f32, without a branch.
#[inline(always)]
fn half(bits: u16) -> f32 {
    let sign = u32::from(bits & 0x8000) << 16;
    let rest = u32::from(bits & 0x7fff) << 13;
    // Moves the exponent's bias from 15 to 127; exact, also for subnormals.
    let finite = (f32::from_bits(rest) * f32::from_bits(0x7780_0000)).to_bits();
    let bits = if rest >= 0x0f80_0000 { rest | 0x7f80_0000 } else { finite };
    f32::from_bits(bits | sign)
}

/// Unpacks a row of codes to bytes in their natural order. `spread` takes eight codes from the low `8 * bits` bits of a
/// word to its eight bytes.
#[inline(always)]
pub fn natural(bits: usize, codes: &[u8], out: &mut [u8], spread: impl Fn(u64) -> u64) {
    if bits == 8 {
        out.copy_from_slice(codes);
        return;
    }
    let (out, _) = out.as_chunks_mut::<8>();
    // Whole words may be read as long as eight bytes are left; the rest byte by byte.
    let whole = if codes.len() >= 8 { ((codes.len() - 8) / bits + 1).min(out.len()) } else { 0 };
    for (index, out) in out[..whole].iter_mut().enumerate() {
        let at = index * bits;
        let mut word = [0; 8];
        word.copy_from_slice(&codes[at..at + 8]);
        *out = spread(u64::from_le_bytes(word)).to_le_bytes();
    }
    for (codes, out) in codes[whole * bits..].chunks_exact(bits).zip(&mut out[whole..]) {
        let mut word = [0; 8];
        word[..bits].copy_from_slice(codes);
        *out = spread(u64::from_le_bytes(word)).to_le_bytes();
    }
}

/// The plain `spread` for [`natural`].
#[inline(always)]
pub fn spread(bits: usize) -> impl Fn(u64) -> u64 {
    let mask = (1u64 << bits) - 1;
    move |word| (0..8).fold(0, |out, index| out | ((word >> (index * bits)) & mask) << (8 * index))
}

/// Unpacks a row of 4-bit codes to bytes in the order [`Order::Nibbles`].
#[inline(always)]
pub fn nibbles(group: usize, codes: &[u8], out: &mut [u8]) {
    let unit = Order::unit(group);
    for (codes, out) in codes.chunks_exact(unit / 2).zip(out.chunks_exact_mut(unit)) {
        let (even, odd) = out.split_at_mut(unit / 2);
        for ((code, even), odd) in codes.iter().zip(even).zip(odd) {
            *even = code & 15;
            *odd = code >> 4;
        }
    }
}

/// E2M1: sign, two bits of exponent, one of mantissa.
const E2M1: [f32; 16] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];

/// E4M3 (no infinities; 0x7f and 0xff are NaN).
fn e4m3(code: u8) -> f32 {
    let (exponent, mantissa) = (i32::from(code >> 3 & 15), f32::from(code & 7));
    let magnitude = match (exponent, code & 7) {
        (15, 7) => f32::NAN,
        (0, _) => mantissa / 512.0,
        _ => (1.0 + mantissa / 8.0) * power(exponent - 7 + 127),
    };
    if code & 0x80 == 0 { magnitude } else { -magnitude }
}

/// `2^(biased - 127)`; E8M0's 255 is NaN, its 0 the subnormal 2^-127.
fn power(biased: i32) -> f32 {
    match biased {
        0 => f32::from_bits(1 << 22),
        255 => f32::NAN,
        _ => f32::from_bits((biased as u32) << 23),
    }
}

/// One row of any weight in f32, gain not applied. `bytes` is a buffer.
#[inline(always)]
pub fn expand(view: &WeightView<'_>, row: usize, bytes: &mut Vec<u8>, out: &mut Vec<f32>) {
    let cols = view.cols;
    let sizes = view.codes.row_bytes(cols);
    let part = |index: usize| &view.parts[index][row * sizes[index]..(row + 1) * sizes[index]];
    out.resize(cols, 0.0);
    bytes.resize(cols, 0);
    match view.codes {
        Codes::Dense(float) => widen(float, part(0), out),
        Codes::Affine { bits, group, scale } => {
            natural(bits as usize, part(0), bytes, spread(bits as usize));
            let groups = bytes.chunks_exact(group as usize).zip(out.chunks_exact_mut(group as usize));
            for (index, (codes, out)) in groups.enumerate() {
                let (s, b) = (scale.get(part(1), index), scale.get(part(2), index));
                for (code, out) in codes.iter().zip(out) {
                    *out = f32::from(*code).mul_add(s, b);
                }
            }
        }
        Codes::Mxfp4 | Codes::Nvfp4 | Codes::Mxfp8 => {
            let group = view.codes.group();
            let eight = view.codes == Codes::Mxfp8;
            natural(if eight { 8 } else { 4 }, part(0), bytes, spread(4));
            for (index, (codes, out)) in bytes.chunks_exact(group).zip(out.chunks_exact_mut(group)).enumerate() {
                let code = part(1)[index];
                let scale = if view.codes == Codes::Nvfp4 { e4m3(code) } else { power(i32::from(code)) };
                for (code, out) in codes.iter().zip(out) {
                    let value = if eight { e4m3(*code) } else { E2M1[usize::from(code & 15)] };
                    *out = value * scale;
                }
            }
        }
    }
}
