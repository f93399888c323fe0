//! Products, norms, embeddings and whole weights.

use super::{Bench, Trouble, difference, rows, values};
use crate::{
    device::Gpu,
    ops::{
        self, Codes, Float, Weight,
        plan::{self, Linear, Matrix, Norm},
    },
};

const EPS: f32 = 1e-6;

const fn affine(bits: u8, group: u16, scale: Float) -> Codes {
    Codes::Affine { bits, group, scale }
}

/// 4 and 8 bits in groups of 64 have kernels of their own; the rest shares one.
const FAST: [Codes; 2] = [affine(4, 64, Float::Bf16), affine(8, 64, Float::Bf16)];
const OTHERS: [[Codes; 2]; 5] = [
    [affine(2, 32, Float::F16), affine(3, 64, Float::Bf16)],
    [affine(5, 128, Float::F32), affine(6, 32, Float::Bf16)],
    [Codes::Mxfp4, Codes::Nvfp4],
    [Codes::Mxfp8, Codes::Dense(Float::Bf16)],
    [Codes::Dense(Float::F16), Codes::Dense(Float::F32)],
];

pub fn all<G: Gpu + ?Sized>(b: &mut Bench<'_, G>) -> Result<(), Trouble> {
    for codes in std::iter::once(FAST).chain(OTHERS) {
        let one = b.matrix(codes[0], 37, 256)?;
        let two = b.matrix(codes[1], 18, 256)?;
        for tokens in [1, 6] {
            for norm in [false, true] {
                product(b, [&one, &two], tokens, norm)?;
            }
        }
        whole(b, &one)?;
        whole(b, &two)?;
    }
    let (x, w) = (b.random.floats(3 * 200), b.random.floats(200));
    let (x_at, w_at, y) = (b.floats(&x)?, b.floats(&w)?, b.room(x.len())?);
    let expected = ops::rms_norm(&b.compute, &rows(&x, 200)?, &rows(&w, 200)?.flatten_all()?, EPS)?;
    b.check(&plan::rms_norm(3, 200, EPS, x_at, w_at, y), &[(y, &values(&expected)?)])
}

/// Two matrices in one launch, with a norm in front or a sum behind.
fn product<G: Gpu + ?Sized>(
    b: &mut Bench<'_, G>,
    matrices: [&(Weight, Matrix); 2],
    tokens: usize,
    norm: bool,
) -> Result<(), Trouble> {
    let cols = matrices[0].1.cols;
    let (x, w) = (b.random.floats(tokens * cols), b.random.floats(cols));
    let x_cpu = match norm {
        true => ops::rms_norm(&b.compute, &rows(&x, cols)?, &rows(&w, cols)?.flatten_all()?, EPS)?,
        false => rows(&x, cols)?,
    };
    let mut expected = values(&ops::linear(&b.compute, &x_cpu, &matrices.map(|(weight, _)| weight))?)?;
    let before = b.random.floats(expected.len());
    if !norm {
        expected.iter_mut().zip(&before).for_each(|(value, before)| *value += before);
    }
    let (x_at, weight, kept, y) = (b.floats(&x)?, b.floats(&w)?, b.room(x.len())?, b.floats(&before)?);
    let norm_at = norm.then_some(Norm { weight, eps: EPS, keep: Some(kept) });
    let matrices = matrices.map(|(_, matrix)| *matrix);
    let op = Linear { x: x_at, tokens, norm: norm_at, matrices: &matrices, y, add: !norm };
    let normed = if norm { values(&x_cpu)? } else { Vec::new() };
    b.check(&plan::linear(&op), &[(y, &expected), (kept, &normed)])
}

/// Rows by number, and all of them as f32 and as f16.
fn whole<G: Gpu + ?Sized>(b: &mut Bench<'_, G>, (weight, matrix): &(Weight, Matrix)) -> Result<(), Trouble> {
    let (count, device) = (matrix.rows * matrix.cols, b.compute.device.clone());
    let ids: Vec<u32> = (0..matrix.rows as u32).collect();
    let expected = values(&ops::embed(weight, &ids, &device)?)?;
    let (ids_at, h, full, half) = (b.words(&ids)?, b.room(count)?, b.room(count)?, b.room(count.div_ceil(2))?);
    b.check(&plan::embed(matrix, ids.len(), ids_at, h), &[(h, &expected)])?;
    b.check(&plan::dequantise(matrix, Float::F32, full), &[(full, &expected)])?;
    let dispatch = plan::dequantise(matrix, Float::F16, half.first(count * 2));
    if b.run(&dispatch) {
        let bytes = b.read(half.first(count * 2))?;
        let found: Vec<f32> = bytes.chunks_exact(2).map(|v| half::f16::from_le_bytes([v[0], v[1]]).to_f32()).collect();
        let rounded: Vec<f32> = expected.iter().map(|v| half::f16::from_f32(*v).to_f32()).collect();
        // One unit in f16's last place: what is about to be rounded may differ in f32's.
        b.enter(dispatch.kernel, difference(&found, &rounded), 1e-3);
    }
    Ok(())
}
