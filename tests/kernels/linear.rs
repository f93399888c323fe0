use crate::{check::*, host::Host};
use moestro_compute::{
    device::Launch,
    ops::{Float, Linear, Norm, WeightFormat},
};

/// Runs `matrices` on `tokens` random rows and compares with plain loops. If `norm`, the rows are normalised first. If
/// `add`, the products are added to y.
fn case(shapes: &[(WeightFormat, usize)], cols: usize, tokens: usize, norm: bool, add: bool) -> Launch {
    let mut host = Host::start();
    let mut random = Random((cols * 31 + tokens) as u64);
    let samples: Vec<_> =
        shapes.iter().map(|&(codes, rows)| matrix(&mut host, &mut random, codes, rows, cols)).collect();
    let (x, w) = (random.normals(tokens * cols), random.normals(cols));
    let width: usize = shapes.iter().map(|s| s.1).sum();
    let before = random.normals(tokens * width);
    let (x_at, w_at, kept) = (host.floats(&x), host.floats(&w), host.empty(x.len() * 4));
    let y = if add { host.floats(&before) } else { host.empty(before.len() * 4) };
    let matrices: Vec<_> = samples.iter().map(|s| s.matrix).collect();
    let norm_at = norm.then_some(Norm { weight: w_at, eps: 1e-6, keep: Some(kept) });
    let launch = Linear { x: x_at, tokens, norm: norm_at, matrices: &matrices, y, add }.launch();
    host.run(&launch);

    let mut x = wide(&x);
    if norm {
        x = x.chunks(cols).flat_map(|row| rms(row, &wide(&w), 1e-6)).collect();
        close("the normed rows", &host.read_floats(kept), &x);
    }
    let mut expected = Vec::new();
    for (t, row) in x.chunks(cols).enumerate() {
        for sample in &samples {
            expected.extend(product(row, &sample.values, cols));
        }
        if add {
            let (from, to) = (t * width, (t + 1) * width);
            expected[from..to].iter_mut().zip(&before[from..to]).for_each(|(e, b)| *e += f64::from(*b));
        }
    }
    close(&format!("{shapes:?} x {cols}, {tokens} tokens"), &host.read_floats(y), &expected);
    launch
}

fn affine(bits: u8, group: u16) -> WeightFormat {
    WeightFormat::Affine { bits, group, scale: Float::Bf16 }
}

#[test]
fn gemv_of_affine_formats_matches_reference() {
    for bits in [2, 3, 4, 5, 6, 8] {
        for group in [32, 64, 128] {
            case(&[(affine(bits, group), 19)], 384, 1, false, false);
        }
    }
    for scale in [Float::F16, Float::F32] {
        case(&[(WeightFormat::Affine { bits: 4, group: 64, scale }, 17)], 192, 2, false, false);
    }
}

#[test]
fn gemv_of_other_formats_matches_reference() {
    for codes in [WeightFormat::Mxfp4, WeightFormat::Nvfp4, WeightFormat::Mxfp8] {
        case(&[(codes, 21)], 352, 1, false, false);
        case(&[(codes, 5)], 64, 3, true, true);
    }
    for float in [Float::F32, Float::F16, Float::Bf16] {
        case(&[(WeightFormat::Dense(float), 7)], 77, 2, true, false);
        // Blocks of 128 rows and columns: the last ones are incomplete.
        case(&[(WeightFormat::Fp8(Some(float)), 269)], 352, 1, false, false);
        case(&[(WeightFormat::Fp8(Some(float)), 131), (AFFINE4, 5)], 128, 3, true, true);
    }
}

#[test]
fn gemv_of_real_widths_matches_reference() {
    for cols in [2048, 3072, 4096] {
        assert_eq!(case(&[(AFFINE4, 67)], cols, 1, false, false).kernel, "gemv_1");
        assert_eq!(case(&[(AFFINE8, 33)], cols, 1, true, false).kernel, "gemv_norm_1");
    }
    for cols in [512, 1024] {
        case(&[(AFFINE4, 64)], cols, 1, false, true);
    }
}

#[test]
fn gemv_of_several_matrices_matches_reference() {
    case(&[(AFFINE4, 64), (AFFINE4, 33), (AFFINE4, 4), (AFFINE4, 4)], 256, 1, true, false);
    case(&[(AFFINE8, 32), (AFFINE4, 16), (AFFINE4, 16), (AFFINE8, 1)], 2048, 5, true, false);
    assert_eq!(
        case(&[(AFFINE8, 32), (affine(6, 64), 16), (AFFINE4, 1)], 128, 1, true, false).kernel,
        "gemv_any_norm_1"
    );
}

#[test]
fn gemv_rows_are_independent() {
    let mut host = Host::start();
    let mut random = Random(7);
    // These cases have several rows with more columns than are staged at once. With a norm, the simdgroups of a
    // threadgroup share the rows of a small matrix.
    for (codes, cols, tokens, kernel) in [
        (AFFINE4, 512, 16, "gemv_norm_2"),
        (AFFINE4, 2560, 3, "gemv_2"),
        (AFFINE4, 2560, 3, "gemv_norm_2"),
        (AFFINE8, 2560, 5, "gemv_2"),
        (AFFINE8, 2560, 3, "gemv_norm_2"),
        (affine(3, 32), 512, 5, "gemv_any_norm_2"),
    ] {
        let sample = matrix(&mut host, &mut random, codes, 40, cols);
        let (x, w) = (random.normals(tokens * cols), random.normals(cols));
        let (x, weight) = (host.floats(&x), host.floats(&w));
        let norm = kernel.contains("norm").then_some(Norm { weight, eps: 1e-6, keep: None });
        let together = host.empty(tokens * 40 * 4);
        let matrices = [sample.matrix];
        let all = Linear { x, tokens, norm, matrices: &matrices, y: together, add: false };
        assert_eq!((all.launch().kernel, all.launch().grid[0]), (kernel, tokens.div_ceil(2) as u32));
        host.run(&all.launch());
        let together = host.read(together);
        for t in 0..tokens {
            let (row, alone) = (x.part(t * cols * 4, cols * 4), host.empty(40 * 4));
            host.run(&Linear { x: row, tokens: 1, y: alone, ..all }.launch());
            assert_eq!(host.read(alone), together[t * 160..(t + 1) * 160], "row {t} of {codes:?}, {kernel}");
        }
    }
}
