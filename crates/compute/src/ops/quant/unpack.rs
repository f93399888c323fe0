//! Unpacks packed bits to bytes and floats. Portable code that compilers vectorise. Tests use it as the reference.

use super::{
    activations::ValueOrder,
    weight::{FP8_BLOCK, Float, WeightFormat, WeightView},
};

/// Converts packed floats of any alignment to f32.
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

/// Converts an IEEE half to f32 without a branch.
#[inline(always)]
fn half(bits: u16) -> f32 {
    let sign = u32::from(bits & 0x8000) << 16;
    let rest = u32::from(bits & 0x7fff) << 13;
    // Changes the exponent's bias from 15 to 127. Exact, also for subnormals.
    let finite = (f32::from_bits(rest) * f32::from_bits(0x7780_0000)).to_bits();
    let bits = if rest >= 0x0f80_0000 { rest | 0x7f80_0000 } else { finite };
    f32::from_bits(bits | sign)
}

/// Unpacks a row of codes to bytes in natural order. `spread` moves eight codes from the low `8 * bits` bits of a
/// word to its eight bytes.
#[inline(always)]
pub fn natural(bits: usize, codes: &[u8], out: &mut [u8], spread: impl Fn(u64) -> u64) {
    if bits == 8 {
        out.copy_from_slice(codes);
        return;
    }
    let (out, _) = out.as_chunks_mut::<8>();
    // Reads 8-byte words while eight bytes are left, then single bytes.
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

/// The portable `spread` for [`natural`].
#[inline(always)]
pub fn spread(bits: usize) -> impl Fn(u64) -> u64 {
    let mask = (1u64 << bits) - 1;
    move |word| (0..8).fold(0, |out, index| out | ((word >> (index * bits)) & mask) << (8 * index))
}

/// Unpacks a row of 4-bit codes to bytes in the order [`ValueOrder::Nibbles`].
#[inline(always)]
pub fn nibbles(group: usize, codes: &[u8], out: &mut [u8]) {
    let unit = ValueOrder::unit(group);
    for (codes, out) in codes.chunks_exact(unit / 2).zip(out.chunks_exact_mut(unit)) {
        let (even, odd) = out.split_at_mut(unit / 2);
        for ((code, even), odd) in codes.iter().zip(even).zip(odd) {
            *even = code & 15;
            *odd = code >> 4;
        }
    }
}

/// E2M1: sign, two exponent bits, one mantissa bit. Without a branch, like [`e4m3`], so that it vectorises.
#[inline(always)]
fn e2m1(code: u8) -> f32 {
    const HALF: u32 = 0.5f32.to_bits();
    let magnitude = u32::from(code & 7);
    // 0.5 is the only subnormal. The exponent and mantissa of a larger value are the leading bits of the f32, apart
    // from the exponent's bias.
    let bits = if magnitude > 1 { HALF + (magnitude << 22) } else { magnitude * HALF };
    f32::from_bits(bits | u32::from(code & 8) << 28)
}

/// E4M3 (no infinities; 0x7f and 0xff are NaN).
#[inline(always)]
fn e4m3(code: u8) -> f32 {
    let magnitude = u32::from(code & 0x7f);
    let normal = ((127 - 7) << 23) + (magnitude << 20);
    let subnormal = (magnitude as f32 / 512.0).to_bits();
    let bits = if magnitude > 7 { normal } else { subnormal };
    let bits = if magnitude == 0x7f { f32::NAN.to_bits() } else { bits };
    f32::from_bits(bits | u32::from(code & 0x80) << 24)
}

/// `2^(biased - 127)`. 255 is NaN in E8M0, and 0 is the subnormal 2^-127.
fn power(biased: i32) -> f32 {
    match biased {
        0 => f32::from_bits(1 << 22),
        255 => f32::NAN,
        _ => f32::from_bits((biased as u32) << 23),
    }
}

/// Dequantizes one row of a weight of any format to f32, without its global scale. `bytes` is a scratch buffer.
#[inline(always)]
pub fn expand(view: &WeightView<'_>, row: usize, bytes: &mut Vec<u8>, out: &mut Vec<f32>) {
    let cols = view.cols;
    let sizes = view.codes.row_bytes(cols);
    let part = |index: usize| &view.parts[index][row * sizes[index]..(row + 1) * sizes[index]];
    out.resize(cols, 0.0);
    match view.codes {
        WeightFormat::Dense(float) => widen(float, part(0), out),
        WeightFormat::Affine { bits, group, scale } => {
            bytes.resize(cols, 0);
            natural(bits as usize, part(0), bytes, spread(bits as usize));
            let groups = bytes.chunks_exact(group as usize).zip(out.chunks_exact_mut(group as usize));
            for (index, (codes, out)) in groups.enumerate() {
                let s = scale.get(part(1), index);
                let b = scale.get(part(2), index);
                for (code, out) in codes.iter().zip(out) {
                    *out = f32::from(*code).mul_add(s, b);
                }
            }
        }
        WeightFormat::Mxfp4 => fours(view.codes.group(), part(0), part(1), |code| power(i32::from(code)), out),
        WeightFormat::Nvfp4 => fours(view.codes.group(), part(0), part(1), e4m3, out),
        WeightFormat::Mxfp8 => {
            let group = view.codes.group();
            for ((codes, scale), out) in part(0).chunks_exact(group).zip(part(1)).zip(out.chunks_exact_mut(group)) {
                let scale = power(i32::from(*scale));
                for (code, out) in codes.iter().zip(out) {
                    *out = e4m3(*code) * scale;
                }
            }
        }
        WeightFormat::Fp8(scales) => {
            let first = (view.skipped + row) / FP8_BLOCK * cols.div_ceil(FP8_BLOCK);
            let blocks = part(0).chunks(FP8_BLOCK).zip(out.chunks_mut(FP8_BLOCK));
            for (block, (codes, out)) in blocks.enumerate() {
                let scale = scales.map_or(1.0, |float| float.get(view.parts[1], first + block));
                for (code, out) in codes.iter().zip(out) {
                    *out = e4m3(*code) * scale;
                }
            }
        }
    }
}

impl WeightView<'_> {
    /// All values in row order.
    pub fn to_f32(&self) -> Vec<f32> {
        let mut all = vec![0.0; self.rows * self.cols];
        self.write_f32(&mut all);
        all
    }

    /// Writes all values in row order to `out`.
    pub fn write_f32(&self, out: &mut [f32]) {
        let mut bytes = Vec::new();
        let mut row = Vec::new();
        for (index, out) in out.chunks_exact_mut(self.cols.max(1)).enumerate() {
            expand(self, index, &mut bytes, &mut row);
            out.iter_mut().zip(&row).for_each(|(out, value)| *out = value * self.global_scale);
        }
    }
}

/// E2M1 codes in groups with one scale each. The low nibble of a byte comes first.
#[inline(always)]
fn fours(group: usize, codes: &[u8], scales: &[u8], scale: impl Fn(u8) -> f32, out: &mut [f32]) {
    for ((codes, code), out) in codes.chunks_exact(group / 2).zip(scales).zip(out.chunks_exact_mut(group)) {
        let scale = scale(*code);
        for (pair, out) in codes.iter().zip(out.as_chunks_mut::<2>().0) {
            *out = [e2m1(pair & 15) * scale, e2m1(pair >> 4) * scale];
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The numbers of rows and columns are not multiples of the block size.
    #[test]
    fn fp8_blocks_share_scales_across_rows() {
        let rows = 300;
        let cols = 200;
        let codes: Vec<u8> = (0..rows * cols).map(|at| (at * 7 % 251) as u8 & 0xf7).collect();
        let scales: Vec<u8> = (1..=6u8).flat_map(|n| f32::from(n).to_le_bytes()).collect();
        let view = |codes, parts| WeightView { codes, rows, cols, global_scale: 0.5, skipped: 0, parts };
        let blocks = WeightFormat::Fp8(Some(Float::F32));
        assert_eq!(blocks.part_bytes(rows, cols), [rows * cols, scales.len(), 0]);
        let whole = view(blocks, [&codes, &scales, &[]]);
        let found = whole.to_f32();
        for part in [0..300, 5..130, 127..129, 128..300, 299..300] {
            let inner = 3..part.len().max(4) - 1;
            let view = whole.of_rows(part.clone());
            assert_eq!(view.to_f32(), found[part.start * cols..part.end * cols]);
            if inner.end <= part.len() {
                let at = part.start + inner.start;
                assert_eq!(view.of_rows(inner.clone()).to_f32(), found[at * cols..(at + inner.len()) * cols]);
            }
        }
        let plain = view(WeightFormat::Fp8(None), [&codes, &[], &[]]).to_f32();
        for (at, (found, code)) in found.iter().zip(&codes).enumerate() {
            let scale = (at / cols / 128 * 2 + at % cols / 128 + 1) as f32;
            assert_eq!((*found, plain[at]), (e4m3(*code) * scale * 0.5, e4m3(*code) * 0.5), "{at}");
        }
    }

    #[test]
    fn small_floats_decode_by_definition() {
        let magnitudes = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
        for code in 0..16u8 {
            let sign = if code & 8 == 0 { 1.0 } else { -1.0 };
            assert_eq!(e2m1(code).to_bits(), f32::to_bits(sign * magnitudes[usize::from(code & 7)]), "{code}");
        }
        for code in 0..=255u8 {
            let sign = if code & 0x80 == 0 { 1.0 } else { -1.0 };
            let exponent = i32::from(code >> 3 & 15);
            let mantissa = f32::from(code & 7);
            let magnitude = match (exponent, code & 7) {
                (15, 7) => f32::NAN,
                (0, _) => mantissa / 8.0 * 2f32.powi(-6),
                _ => (1.0 + mantissa / 8.0) * 2f32.powi(exponent - 7),
            };
            let found = e4m3(code);
            assert!(found.to_bits() == (sign * magnitude).to_bits() || found.is_nan() && magnitude.is_nan(), "{code}");
        }
    }
}
