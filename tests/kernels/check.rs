//! Random weights, and expected results from plain f64 loops that share no code with the kernels.

use crate::host::Host;
use moestro_compute::device::Launch;
use moestro_compute::ops::{FP8_BLOCK, Float, Weight, WeightFormat};
pub use test_support::mutate::Dice;

fn random_float(dice: &mut Dice, float: Float, scale: f32) -> Vec<u8> {
    let v = dice.normal() * scale;
    match float {
        Float::F32 => v.to_le_bytes().to_vec(),
        Float::F16 => half::f16::from_f32(v).to_le_bytes().to_vec(),
        Float::Bf16 => half::bf16::from_f32(v).to_le_bytes().to_vec(),
    }
}

/// Codes, scales and biases of a random matrix whose values are about 1 / sqrt(cols).
pub fn parts(dice: &mut Dice, codes: WeightFormat, rows: usize, cols: usize) -> [Vec<u8>; 3] {
    let size = 1.0 / (cols as f32).sqrt();
    let [code_bytes, scale_bytes, _] = codes.row_bytes(cols);
    // 0x7f and 0xff are NaN in E4M3.
    let e4m3 = |code: u8| if code & 127 == 127 { 0 } else { code };
    let random: Vec<u8> = (0..rows * code_bytes).map(|_| dice.roll() as u8).collect();
    match codes {
        WeightFormat::Dense(float) => {
            [(0..rows * cols).flat_map(|_| random_float(dice, float, size)).collect(), vec![], vec![]]
        }
        WeightFormat::Affine { bits, group, scale } => {
            let groups = rows * cols / group as usize;
            let step = size / (1u32 << bits) as f32 * 3.0;
            let scales = (0..groups).flat_map(|_| random_float(dice, scale, step)).collect();
            [random, scales, (0..groups).flat_map(|_| random_float(dice, scale, size)).collect()]
        }
        WeightFormat::Mxfp4 | WeightFormat::Mxfp8 => {
            let is_e4m3 = codes == WeightFormat::Mxfp8;
            let codes = random.into_iter().map(|code| if is_e4m3 { e4m3(code) } else { code });
            [codes.collect(), (0..rows * scale_bytes).map(|_| 115 + dice.below(6) as u8).collect(), vec![]]
        }
        WeightFormat::Fp8(scale) => {
            let scale = scale.expect("no kernel reads FP8 without scales");
            let blocks = codes.part_bytes(rows, cols)[1] / scale.bytes();
            let scales = (0..blocks).flat_map(|_| random_float(dice, scale, size / 100.0));
            [random.into_iter().map(e4m3).collect(), scales.collect(), vec![]]
        }
        WeightFormat::Nvfp4 => [random, (0..rows * scale_bytes).map(|_| dice.below(127) as u8).collect(), vec![]],
    }
}

/// A matrix in the memory of the kernel program, and the values of the matrix.
pub struct Sample {
    pub matrix: Weight,
    pub values: Vec<f64>,
}

pub fn matrix(host: &mut Host, random: &mut Dice, codes: WeightFormat, rows: usize, cols: usize) -> Sample {
    let global_scale = if matches!(codes, WeightFormat::Nvfp4) { 0.25 } else { 1.0 };
    let parts = parts(random, codes, rows, cols);
    let regions = [0, 1, 2].map(|i| host.bytes(&parts[i]));
    let matrix = Weight { codes, rows, cols, global_scale, parts: regions };
    Sample { matrix, values: values(codes, rows, cols, global_scale, &parts) }
}

/// Every value of a matrix, decoded bit by bit from the definition of its format.
pub fn values(codes: WeightFormat, rows: usize, cols: usize, global_scale: f32, parts: &[Vec<u8>; 3]) -> Vec<f64> {
    let code = |bits: usize, row: usize, col: usize| {
        let start = row * (cols * bits / 8) * 8 + col * bits;
        (0..bits).map(|b| (u32::from(parts[0][(start + b) / 8] >> ((start + b) % 8)) & 1) << b).sum::<u32>()
    };
    let e2m1 = |q: u32| [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0][q as usize & 7] * if q & 8 == 0 { 1.0 } else { -1.0 };
    let e4m3 = |q: u32| {
        let (e, m) = ((q >> 3 & 15) as i32, f64::from(q & 7));
        let v = if e == 0 { m / 8.0 * 2f64.powi(-6) } else { (1.0 + m / 8.0) * 2f64.powi(e - 7) };
        if q & 128 == 0 { v } else { -v }
    };
    let mut out = Vec::with_capacity(rows * cols);
    for row in 0..rows {
        for col in 0..cols {
            let group = (row * cols + col) / codes.group();
            let value = match codes {
                WeightFormat::Dense(float) => f64::from(float.get(&parts[0], row * cols + col)),
                WeightFormat::Affine { bits, scale, .. } => {
                    f64::from(scale.get(&parts[1], group)) * f64::from(code(bits.into(), row, col))
                        + f64::from(scale.get(&parts[2], group))
                }
                WeightFormat::Mxfp4 => e2m1(code(4, row, col)) * 2f64.powi(i32::from(parts[1][group]) - 127),
                WeightFormat::Nvfp4 => e2m1(code(4, row, col)) * e4m3(parts[1][group].into()),
                WeightFormat::Fp8(scale) => {
                    let block = row / FP8_BLOCK * cols.div_ceil(FP8_BLOCK) + col / FP8_BLOCK;
                    e4m3(code(8, row, col)) * scale.map_or(1.0, |scale| f64::from(scale.get(&parts[1], block)))
                }
                WeightFormat::Mxfp8 => e4m3(code(8, row, col)) * 2f64.powi(i32::from(parts[1][group]) - 127),
            };
            out.push(value * f64::from(global_scale));
        }
    }
    out
}

/// `x [tokens, cols] * w [rows, cols]^T`.
pub fn product(x: &[f64], w: &[f64], cols: usize) -> Vec<f64> {
    x.chunks(cols).flat_map(|x| w.chunks(cols).map(move |w| x.iter().zip(w).map(|(a, b)| a * b).sum())).collect()
}

pub fn wide(x: &[f32]) -> Vec<f64> {
    x.iter().map(|&v| f64::from(v)).collect()
}

pub fn rms(x: &[f64], w: &[f64], eps: f64) -> Vec<f64> {
    let scale = 1.0 / (x.iter().map(|v| v * v).sum::<f64>() / x.len() as f64 + eps).sqrt();
    x.iter().zip(w).map(|(v, w)| v * scale * w).collect()
}

pub fn silu(x: f64) -> f64 {
    x / (1.0 + (-x).exp())
}

/// The largest difference, divided by the largest value. NaN if any difference is NaN.
pub fn difference(found: &[f32], expected: &[f64]) -> f64 {
    assert_eq!(found.len(), expected.len());
    let largest = expected.iter().fold(0f64, |m, v| m.max(v.abs()));
    let mut worst = 0f64;
    for (f, e) in found.iter().zip(expected) {
        let d = (f64::from(*f) - e).abs() / largest;
        if d.is_nan() || d > worst {
            worst = d;
        }
        if d.is_nan() {
            break;
        }
    }
    worst
}

/// Asserts that the difference is within the f32 tolerance of every kernel: 1e-5 of the largest value.
#[track_caller]
pub fn close(what: &str, found: &[f32], expected: &[f64]) {
    let d = difference(found, expected);
    assert!(d <= 1e-5, "{what}: relative error {d:.1e}");
}

pub const AFFINE4: WeightFormat = WeightFormat::Affine { bits: 4, group: 64, scale: Float::Bf16 };
pub const AFFINE8: WeightFormat = WeightFormat::Affine { bits: 8, group: 64, scale: Float::Bf16 };
pub const FP8: WeightFormat = WeightFormat::Fp8(Some(Float::Bf16));
pub const BF16: WeightFormat = WeightFormat::Dense(Float::Bf16);

/// The launch with the kernel that reads its row from the cache instead of threadgroup memory. `None` if there is none.
pub fn direct(launch: &Launch) -> Option<Launch> {
    let kernel = match launch.kernel {
        "gemv_1" => "gemv_direct_1",
        "gemv_norm_1" => "gemv_direct_norm_1",
        "gemv_conv" => "gemv_direct_conv",
        "gemv_head_norm_1" => "gemv_direct_head_norm_1",
        "moe_gate_up" => "moe_gate_up_direct",
        _ => return None,
    };
    Some(Launch { kernel, ..launch.clone() })
}
