//! Checks the processor's instruction sets against portable Rust. They must give the same bytes both with f32
//! activations and with activations that are quantized to integers.

use super::{Finding, RandomInputs, difference};
use crate::device::CpuArithmetic;
use crate::ops::{
    Float, WeightFormat, WeightView,
    linear::products::{Activations, Product, multiply},
    quant::{ActivationFormat, QuantizedRows},
    simd::{Isa, OutPtr},
};
use moestro_base::platform::split_mix64::SplitMix64;

/// Number of rows of the weights. Odd, so that every kernel has a remainder.
const ROWS: usize = 37;
/// Number of columns of the weights: an odd number of groups of 128.
const COLS: usize = 5 * 128;
const TOKENS: usize = 3;
/// Allowed relative difference of products with integer activations from products with f32 activations. The least
/// precise format is 8-bit codes in groups of 128: there, activations are integers from -65,793 to 65,793, because a
/// group's sum must fit an i32 (`(2^31 - 1) / (128 * 255) = 65,793`).
const LEVELS: f64 = 2e-5;

/// One finding for each instruction set of this processor. The first is portable Rust, whose integer arithmetic is
/// compared with f32.
pub fn processor() -> Vec<Finding> {
    let mut found: Vec<Finding> =
        Isa::all().into_iter().map(|isa| Finding::new(format!("{isa:?}").to_lowercase(), Ok((0.0, 0.0)))).collect();
    for bits in [2, 3, 4, 5, 6, 8] {
        for group in [32, 64, 128] {
            compare(WeightFormat::Affine { bits, group, scale: Float::Bf16 }, &mut found);
        }
    }
    for codes in [
        WeightFormat::Mxfp4,
        WeightFormat::Nvfp4,
        WeightFormat::Mxfp8,
        WeightFormat::Fp8(Some(Float::F32)),
        WeightFormat::Dense(Float::Bf16),
        WeightFormat::Dense(Float::F16),
    ] {
        compare(codes, &mut found);
    }
    found
}

fn compare(codes: WeightFormat, found: &mut [Finding]) {
    let mut random = RandomInputs(SplitMix64(2));
    let parts = random.parts(codes, ROWS, COLS);
    let x = random.floats(TOKENS * COLS);
    let parts = [&parts[0][..], &parts[1][..], &parts[2][..]];
    let weight = WeightView { codes, rows: ROWS, cols: COLS, global_scale: 1.0, skipped: 0, parts };
    for arithmetic in [CpuArithmetic::F32, CpuArithmetic::Integer] {
        let plain = run(Isa::Scalar, arithmetic, &weight, &x, TOKENS);
        for (isa, finding) in Isa::all().into_iter().zip(&mut *found) {
            let (off, allowed) = match isa {
                Isa::Scalar => (difference(&plain, &run(Isa::Scalar, CpuArithmetic::F32, &weight, &x, TOKENS)), LEVELS),
                #[allow(unreachable_patterns)] // Scalar may be the only instruction set.
                _ => {
                    let same = run(isa, arithmetic, &weight, &x, TOKENS)
                        .iter()
                        .zip(&plain)
                        .all(|(a, b)| a.to_bits() == b.to_bits());
                    (if same { 0.0 } else { f64::INFINITY }, 0.0)
                }
            };
            if let Ok((worst, limit)) = &mut finding.outcome {
                *limit = allowed;
                *worst = if off <= *worst { *worst } else { off };
            }
        }
    }
}

/// Computes `x W^T` with one instruction set, for `together` rows of x at a time. Returns
/// `[rows of x, rows of weight]`.
pub(in crate::ops) fn run(
    isa: Isa,
    arithmetic: CpuArithmetic,
    weight: &WeightView<'_>,
    x: &[f32],
    together: usize,
) -> Vec<f32> {
    run_in(&mut QuantizedRows::default(), isa, arithmetic, weight, x, together)
}

/// [`run`] with a given buffer for the quantized rows.
pub(in crate::ops) fn run_in(
    quantized: &mut QuantizedRows,
    isa: Isa,
    arithmetic: CpuArithmetic,
    weight: &WeightView<'_>,
    x: &[f32],
    together: usize,
) -> Vec<f32> {
    let tokens = x.len() / weight.cols;
    let mut out = vec![f32::NAN; tokens * weight.rows];
    if let (CpuArithmetic::Integer, WeightFormat::Affine { bits, group, .. }) = (arithmetic, weight.codes) {
        let writer = quantized.resize(tokens, weight.cols, ActivationFormat::new(bits, group));
        // SAFETY: one thread, all rows.
        unsafe { writer.rows(x, 0..tokens) };
    }
    let input = |(token, x)| Activations { x, digits: quantized.row(token) };
    let inputs: Vec<Activations<'_>> = x.chunks_exact(weight.cols).enumerate().map(input).collect();
    let outs: Vec<OutPtr> = out.chunks_exact_mut(weight.rows).map(|row| OutPtr(row.as_mut_ptr())).collect();
    for (inputs, outs) in inputs.chunks(together).zip(outs.chunks(together)) {
        // SAFETY: each input writes to its own row of `out`, which no other code accesses. The processor has the
        // instruction sets that `Isa::all` lists. The parts have the lengths that the format requires.
        unsafe { multiply(isa, arithmetic, Product { weight, rows: 0..weight.rows, inputs, outs }) };
    }
    drop(outs);
    out
}
