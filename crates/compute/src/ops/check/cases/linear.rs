//! Checks of `linear`: GPU against CPU.

use crate::{
    device::{DeviceError, Driver},
    ops::{
        Backend, Float, Linear, Norm, Weight, WeightFormat,
        check::{CLOSE, HALF, KernelCheck},
    },
};

const fn affine(bits: u8, group: u16, scale: Float) -> WeightFormat {
    WeightFormat::Affine { bits, group, scale }
}

/// Affine formats with 4 or 8 bits and groups of 64 have their own kernels. All other formats share one kernel, except on
/// matrix units.
pub const FORMATS: [[WeightFormat; 2]; 7] = [
    [affine(4, 64, Float::Bf16), affine(8, 64, Float::Bf16)],
    [affine(2, 32, Float::F16), affine(3, 64, Float::Bf16)],
    [affine(5, 128, Float::F32), affine(6, 32, Float::Bf16)],
    [WeightFormat::Mxfp4, WeightFormat::Dense(Float::Bf16)],
    [WeightFormat::Mxfp8, WeightFormat::Nvfp4],
    [WeightFormat::Dense(Float::F16), WeightFormat::Dense(Float::F32)],
    [WeightFormat::Fp8(Some(Float::Bf16)), WeightFormat::Fp8(Some(Float::F32))],
];

pub fn cases(b: &mut KernelCheck<'_, impl Driver>) -> Result<(), DeviceError> {
    for codes in FORMATS {
        let matrices = [b.weight(codes[0], 137, 256)?, b.weight(codes[1], 18, 256)?];
        for tokens in [1, 6] {
            for norm in [false, true] {
                product(b, &matrices, tokens, [norm, norm], CLOSE)?;
            }
        }
        if let WeightFormat::Affine { bits: 4, group: 64, .. } = codes[0] {
            b.gpu.set_direct(true);
            let tall = [b.weight(codes[0], 4100, 128)?, b.weight(codes[1], 18, 128)?];
            for matrices in [&matrices, &tall] {
                product(b, matrices, 1, [false, false], CLOSE)?;
                product(b, matrices, 1, [true, true], CLOSE)?;
            }
            b.gpu.set_direct(false);
        }
        if b.gpu.tile_all_rows(true) {
            for tokens in [1, 6, 11] {
                for norm in [false, true] {
                    product(b, &matrices, tokens, [norm, false], CLOSE)?;
                }
            }
            if let WeightFormat::Affine { bits: 4, group: 64, .. } = codes[0] {
                // The number of rows of W chooses the number of simdgroups and the rows that each has.
                let sizes = [(20_490, &[6][..]), (12_700, &[2, 7, 9]), (8200, &[3, 6, 10]), (4100, &[1, 5, 12])];
                for (rows, tokens) in sizes {
                    let matrices = [b.weight(codes[0], rows, 128)?, b.weight(codes[1], 18, 128)?];
                    for &tokens in tokens {
                        product(b, &matrices, tokens, [true, false], CLOSE)?;
                    }
                }
            }
            b.gpu.tile_all_rows(false);
        }
        if !b.gpu.limits().uses_half_precision {
            continue;
        }
        let buffers = b.half_buffers(70, 256)?;
        b.gpu.set_half_buffers(Some(buffers));
        // Few rows of x have their own kernels.
        for tokens in [11, 23, 39, 70] {
            for norm in [false, true] {
                product(b, &matrices, tokens, [norm, norm], HALF)?;
            }
        }
        b.gpu.set_half_buffers(None);
    }
    Ok(())
}

/// Checks matrices with a norm before them, whose rows may be kept, or a residual sum after them.
fn product(
    b: &mut KernelCheck<'_, impl Driver>,
    matrices: &[Weight],
    tokens: usize,
    [norm, keep]: [bool; 2],
    allowed: f64,
) -> Result<(), DeviceError> {
    let cols = matrices[0].cols;
    let width = matrices.iter().map(|matrix| matrix.rows).sum::<usize>();
    let x = b.random(tokens * cols)?;
    let weight = b.random(cols)?;
    let kept = b.buffer(tokens * cols)?;
    let y = b.random(tokens * width)?;
    let norm = norm.then_some(Norm { weight, eps: 1e-6, keep: keep.then_some(kept) });
    let outputs = [y, kept];
    let op = Linear { x, tokens, norm, matrices, y, add: norm.is_none() };
    b.check_within(allowed, op, &outputs[..if keep { 2 } else { 1 }], &[])
}
