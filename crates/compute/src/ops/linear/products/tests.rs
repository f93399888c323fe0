//! Compares every instruction set with a naive product. All instruction sets must give the same bytes.

use super::*;
use crate::{
    device::CpuArithmetic::{F32, Integer},
    ops::{
        Float, WeightFormat,
        check::processor,
        quant::{ActivationFormat, QuantizedRows, unpack},
        simd::vector::sum8,
    },
};
use test_support::mutate::Dice;

/// A random matrix whose parts start at odd addresses.
pub(crate) struct OwnedWeight {
    pub codes: WeightFormat,
    pub rows: usize,
    pub cols: usize,
    pub global_scale: f32,
    parts: [Vec<u8>; 3],
}

fn bytes(dice: &mut Dice, len: usize) -> Vec<u8> {
    (0..len).map(|_| dice.roll() as u8).collect()
}

fn floats(dice: &mut Dice, float: Float, len: usize) -> Vec<u8> {
    (0..len / float.bytes()).flat_map(|_| float.to_le_bytes(dice.unit() * 0.1)).collect()
}

impl OwnedWeight {
    pub fn random(dice: &mut Dice, codes: WeightFormat, rows: usize, cols: usize) -> Self {
        let sizes = codes.part_bytes(rows, cols);
        let parts = [0, 1, 2].map(|part| {
            let data = match (codes, part) {
                (WeightFormat::Affine { scale, .. }, 1 | 2) | (WeightFormat::Fp8(Some(scale)), 1) => {
                    floats(dice, scale, sizes[part])
                }
                (WeightFormat::Dense(float), 0) => floats(dice, float, sizes[part]),
                // Exponents near one, no NaN.
                (WeightFormat::Mxfp4 | WeightFormat::Mxfp8, 1) => {
                    (0..sizes[1]).map(|_| 120 + dice.below(12) as u8).collect()
                }
                (WeightFormat::Mxfp8 | WeightFormat::Fp8(_), 0) | (WeightFormat::Nvfp4, 1) => {
                    bytes(dice, sizes[part]).iter().map(|byte| if byte & 0x7f == 0x7f { 1 } else { *byte }).collect()
                }
                _ => bytes(dice, sizes[part]),
            };
            let mut odd = vec![0xa5; 1 + part];
            odd.extend(data);
            odd
        });
        Self { codes, rows, cols, global_scale: 1.0, parts }
    }

    pub fn view(&self) -> WeightView<'_> {
        let parts = [&self.parts[0][1..], &self.parts[1][2..], &self.parts[2][3..]];
        let Self { codes, rows, cols, global_scale, .. } = *self;
        WeightView { codes, rows, cols, global_scale, skipped: 0, parts }
    }
}

fn run(isa: Isa, arithmetic: CpuArithmetic, weight: &OwnedWeight, x: &[f32], together: usize) -> Vec<f32> {
    processor::run(isa, arithmetic, &weight.view(), x, together)
}

/// Bits `[index * bits, (index + 1) * bits)` of a little-endian stream.
fn code(bytes: &[u8], bits: usize, index: usize) -> u32 {
    (0..bits)
        .map(|bit| index * bits + bit)
        .enumerate()
        .fold(0, |code, (bit, at)| code | u32::from(bytes[at / 8] >> (at % 8) & 1) << bit)
}

/// A naive version of the arithmetic that `products/mod.rs` documents.
fn reference(weight: &OwnedWeight, x: &[f32]) -> Vec<f32> {
    let WeightFormat::Affine { bits, group, scale } = weight.codes else { panic!("affine only") };
    let bits = bits as usize;
    let group = group as usize;
    let view = weight.view();
    let groups = weight.cols / group;
    let levels = ((1u64 << 31) - 1) / (group as u64 * ((1 << bits) - 1));
    let levels = levels.min(1 << 21) as f32;
    let mut out = Vec::new();
    for x in x.chunks(weight.cols) {
        for row in 0..weight.rows {
            let codes = &view.parts[0][row * weight.cols * bits / 8..];
            let mut lanes = [0f32; 8];
            for g in 0..groups.next_multiple_of(8) {
                let mut dot = 0i64;
                let mut total = 0i64;
                let mut sx = 0f32;
                let mut sw = 0f32;
                let mut bw = 0f32;
                if g < groups {
                    let x = &x[g * group..(g + 1) * group];
                    let max = x.iter().fold(0f32, |max, x| max.max(x.abs()));
                    sx = max / levels;
                    for (i, x) in x.iter().enumerate() {
                        let q = if max == 0.0 { 0 } else { (x * (levels / max)).round_ties_even() as i64 };
                        dot += q * i64::from(code(codes, bits, g * group + i));
                        total += q;
                    }
                    sw = scale.get(view.parts[1], row * groups + g);
                    bw = scale.get(view.parts[2], row * groups + g);
                }
                let lane = &mut lanes[g % 8];
                *lane = (dot as f32).mul_add(sw * sx, *lane);
                *lane = bw.mul_add(sx * total as f32, *lane);
            }
            out.push(sum8(lanes));
        }
    }
    out
}

fn activations(dice: &mut Dice, tokens: usize, cols: usize) -> Vec<f32> {
    let mut x: Vec<f32> = (0..tokens * cols).map(|_| dice.unit() * 3.0).collect();
    for _ in 0..tokens {
        // A zero group and an outlier.
        let at = dice.below(tokens * cols / 32) * 32;
        x[at..at + 32].fill(0.0);
        let at = dice.below(tokens * cols);
        x[at] = 1000.0;
    }
    x
}

#[test]
fn largest_dot_product_fits_i32() {
    for (bits, group, levels) in [(2, 128, 1 << 21), (4, 64, 1 << 21), (4, 128, 1_118_481), (8, 64, 131_586)] {
        assert_eq!(ActivationFormat::new(bits, group).levels, levels);
    }
    for bits in [2, 3, 4, 5, 6, 8] {
        for group in [32, 64, 128] {
            // The largest possible dot product: all codes and activations are extreme and have one sign.
            let codes = WeightFormat::Affine { bits, group, scale: Float::F32 };
            let mut weight = OwnedWeight::random(&mut Dice(5), codes, 16, group.into());
            weight.parts[0].fill(0xff);
            let x: Vec<f32> = vec![-3.0; 2 * usize::from(group)];
            let expected = reference(&weight, &x);
            for isa in Isa::all() {
                for together in [1, 2] {
                    assert_same_bytes(
                        &run(isa, Integer, &weight, &x, together),
                        &expected,
                        &format!("{isa:?} {codes:?}"),
                    );
                }
            }
        }
    }
}

fn assert_same_bytes(a: &[f32], b: &[f32], what: &str) {
    assert_eq!(a.len(), b.len(), "{what}");
    for (index, (a, b)) in a.iter().zip(b).enumerate() {
        assert_eq!(a.to_bits(), b.to_bits(), "{what}: {index}: {a} {b}");
    }
}

#[test]
fn every_isa_gives_the_reference_bytes() {
    // tests/neon.sh reads this line.
    println!("kernels: {:?}", Isa::all());
    let mut dice = Dice(1);
    for bits in [2, 3, 4, 5, 6, 8] {
        for group in [32, 64, 128] {
            let long = [(1, 1, 1), (3, 8, 2), (37, 5, 7), (64, 19, 3), (70, 16, 9), (16, 3, 33)];
            let short = [(35, 1, 3), (16, 1, 1), (21, 2, 2), (23, 4, 3), (3, 4, 1)];
            for (rows, groups, tokens) in long.into_iter().chain(short) {
                let scale = [Float::Bf16, Float::F16, Float::F32][dice.below(3)];
                let codes = WeightFormat::Affine { bits, group, scale };
                let cols = groups * group as usize;
                let weight = OwnedWeight::random(&mut dice, codes, rows, cols);
                let x = activations(&mut dice, tokens, cols);
                let expected = reference(&weight, &x);
                for isa in Isa::all() {
                    for together in [1, 2, tokens] {
                        let what = format!("{isa:?} {codes:?} [{rows}, {cols}] {together} of {tokens} rows");
                        assert_same_bytes(&run(isa, Integer, &weight, &x, together), &expected, &what);
                    }
                }
            }
        }
    }
}

#[test]
fn requantized_rows_replace_old_results() {
    let mut dice = Dice(6);
    let mut quantized = QuantizedRows::default();
    let codes = WeightFormat::Affine { bits: 4, group: 64, scale: Float::Bf16 };
    let weight = OwnedWeight::random(&mut dice, codes, 32, 512);
    for _ in 0..3 {
        let x = activations(&mut dice, 4, 512);
        let expected = reference(&weight, &x);
        for isa in Isa::all() {
            let found = processor::run_in(&mut quantized, isa, Integer, &weight.view(), &x, 4);
            assert_same_bytes(&found, &expected, &format!("{isa:?}"));
        }
    }
}

#[test]
fn integer_products_are_close_to_float() {
    let mut dice = Dice(2);
    for bits in [2, 3, 4, 5, 6, 8] {
        let codes = WeightFormat::Affine { bits, group: 64, scale: Float::Bf16 };
        let weight = OwnedWeight::random(&mut dice, codes, 40, 1024);
        let x: Vec<f32> = (0..1024).map(|_| dice.unit()).collect();
        let exact = run(Isa::best(), F32, &weight, &x, 1);
        let fast = run(Isa::best(), Integer, &weight, &x, 1);
        let norm = exact.iter().map(|y| y * y).sum::<f32>().sqrt();
        let error = exact.iter().zip(&fast).map(|(a, b)| (a - b).powi(2)).sum::<f32>().sqrt();
        // The error of one value is at most half a level. The rest is f32 rounding on both sides.
        let bound = 1.0 / ActivationFormat::new(bits, 64).levels as f32 + 4e-7;
        assert!(error < bound * norm, "{bits} bits: {error} of {norm}");
    }
}

#[test]
fn float_products_agree_on_all_isas() {
    let mut dice = Dice(3);
    let affine = |bits| WeightFormat::Affine { bits, group: 32, scale: Float::F16 };
    let dense = [Float::F32, Float::F16, Float::Bf16].map(WeightFormat::Dense);
    let all =
        [WeightFormat::Mxfp4, WeightFormat::Nvfp4, WeightFormat::Mxfp8, affine(3), affine(4), affine(5), affine(8)];
    let fp8 = [None, Some(Float::F32), Some(Float::Bf16)].map(WeightFormat::Fp8);
    for codes in dense.into_iter().chain(all).chain(fp8) {
        for (rows, cols, tokens) in [(1, 32, 1), (5, 96, 3), (33, 320, 6)] {
            let mut weight = OwnedWeight::random(&mut dice, codes, rows, cols);
            weight.global_scale = 0.5;
            let x: Vec<f32> = (0..tokens * cols).map(|_| dice.unit()).collect();
            let expected = run(Isa::Scalar, F32, &weight, &x, 1);
            for isa in Isa::all() {
                for together in [1, 2, tokens] {
                    assert_same_bytes(&run(isa, F32, &weight, &x, together), &expected, &format!("{isa:?} {codes:?}"));
                }
            }
            let mut values = Vec::new();
            for token in 0..tokens {
                for row in 0..rows {
                    unpack::expand(&weight.view(), row, &mut Vec::new(), &mut values);
                    let x = &x[token * cols..];
                    let sum: f64 = values.iter().zip(x).map(|(w, x)| f64::from(*w) * f64::from(*x)).sum();
                    let size: f64 = values.iter().map(|w| f64::from(*w).abs()).sum();
                    let got = f64::from(expected[token * rows + row]);
                    assert!((sum * 0.5 - got).abs() <= 1e-5 * size, "{codes:?}: {} {got}", sum * 0.5);
                }
            }
        }
    }
}

#[test]
fn nonfinite_input_makes_outputs_nonfinite() {
    let mut dice = Dice(4);
    let codes = WeightFormat::Affine { bits: 4, group: 64, scale: Float::Bf16 };
    let weight = OwnedWeight::random(&mut dice, codes, 3, 128);
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut x = vec![1.0; 128];
        x[77] = bad;
        for isa in Isa::all() {
            assert!(run(isa, Integer, &weight, &x, 1).iter().all(|y| !y.is_finite()));
        }
    }
}
