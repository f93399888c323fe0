use crate::{check::*, gpu::HostGpu, host::Host};
use moestro_compute::{
    device::{Launch, Region},
    ops::{
        Backend, DecodedProduct, ExpertStack, Float, GpuBackend, Linear, Mlp, MoeWeights, Norm, RowTiles, Weight,
        WeightFormat, experts::swiglu,
    },
};
use std::ops::Range;

/// Runs `matrices` on `tokens` random rows and compares with plain loops. If `norm`, the rows are normalised first. If
/// `add`, the products are added to y.
fn case(shapes: &[(WeightFormat, usize)], cols: usize, tokens: usize, norm: bool, add: bool) -> Launch {
    let mut host = Host::start();
    let mut random = Dice((cols * 31 + tokens) as u64);
    let samples: Vec<_> =
        shapes.iter().map(|&(codes, rows)| matrix(&mut host, &mut random, codes, rows, cols)).collect();
    let (x, w) = (random.normals(tokens * cols), random.normals(cols));
    let width: usize = shapes.iter().map(|s| s.1).sum();
    let before = random.normals(tokens * width);
    let (x_at, w_at, kept) = (host.floats(&x), host.floats(&w), host.empty(x.len() * 4));
    let y = if add { host.floats(&before) } else { host.empty(before.len() * 4) };
    let matrices: Vec<_> = samples.iter().map(|s| s.matrix).collect();
    let norm_at = norm.then_some(Norm { weight: w_at, eps: 1e-6, keep: Some(kept) });
    let op = Linear { x: x_at, tokens, norm: norm_at, matrices: &matrices, y, add };
    let launch = op.launch();
    host.run(&launch);
    let other = if add { host.floats(&before) } else { host.empty(before.len() * 4) };
    if let Some(direct) = direct(&Linear { y: other, ..op }.launch()) {
        let normed = host.read(kept);
        host.write(kept, &vec![0; normed.len()]);
        host.run(&direct);
        assert!(host.read(other) == host.read(y), "{} of {shapes:?} x {cols}", direct.kernel);
        assert!(!norm || host.read(kept) == normed, "the normed rows of {}", direct.kernel);
    }

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
    // Rows that are staged in two parts, and more rows of W than share their columns.
    case(&[(AFFINE8, 21), (AFFINE4, 9)], 6144, 1, true, true);
    case(&[(AFFINE4, 2050), (AFFINE8, 2060)], 64, 1, true, false);
    case(&[(AFFINE4, 4099)], 128, 1, false, true);
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
    let mut random = Dice(7);
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

/// A linear layer in the memory of the kernel program, with one value of each row 10,000 times the others.
struct TiledCase {
    host: Host,
    samples: Vec<Sample>,
    x: Vec<f32>,
    x_at: Region,
    cols: usize,
    norm: Option<Norm>,
    add: bool,
}

impl TiledCase {
    fn new(shapes: &[(WeightFormat, usize)], cols: usize, tokens: usize, norm: bool, add: bool) -> Self {
        let (mut host, mut random) = (Host::start(), Dice((cols * 7 + tokens) as u64));
        let samples = shapes.iter().map(|&(codes, rows)| matrix(&mut host, &mut random, codes, rows, cols)).collect();
        let mut x = random.normals(tokens * cols);
        for row in x.chunks_mut(cols) {
            row[random.below(cols)] *= 10_000.0;
        }
        let x_at = host.floats(&x);
        let weight = host.floats(&random.normals(cols));
        let norm = norm.then_some(Norm { weight, eps: 1e-6, keep: None });
        Self { host, samples, x, x_at, cols, norm, add }
    }

    /// The products of some rows, which are added to ones if the case adds.
    fn run(&mut self, rows: Range<usize>) -> Vec<f32> {
        let matrices: Vec<_> = self.samples.iter().map(|sample| sample.matrix).collect();
        let width: usize = matrices.iter().map(|matrix| matrix.rows).sum();
        let tokens = rows.len();
        let y = self.host.floats(&vec![1.0; tokens * width]);
        let x = self.x_at.rows(rows.start, tokens, self.cols);
        let op = Linear { x, tokens, norm: self.norm, matrices: &matrices, y, add: self.add };
        let buffer = self.host.empty(op.split_words(0) * 4);
        let launches = op.launches(Some(RowTiles { min_weights: 0, buffer }));
        assert_eq!(launches.len(), 2, "these rows are not multiplied on matrix units");
        launches.iter().for_each(|launch| self.host.run(launch));
        self.host.read_floats(y)
    }
}

#[test]
fn tiled_rows_are_exact() {
    let several = [(AFFINE8, 32), (AFFINE4, 17), (AFFINE4, 16), (AFFINE8, 1)];
    for (shapes, cols, tokens, norm, add) in [
        (&[(AFFINE4, 40)][..], 128, 1, false, false),
        (&[(AFFINE4, 21)], 5120, 3, false, true),
        (&[(AFFINE8, 21)], 2176, 4, true, false),
        (&[(AFFINE4, 64), (AFFINE4, 33)], 1152, 8, true, false),
        (&several, 2048, 7, true, true),
        (&several, 640, 16, false, false),
        (&[(AFFINE4, 8200)], 128, 21, false, true),
        (&[(AFFINE8, 8200)], 384, 2, false, false),
        (&[(AFFINE4, 4100)], 1152, 11, true, false),
        (&[(AFFINE8, 4100)], 384, 6, false, false),
        (&[(AFFINE8, 12_680)], 384, 3, false, false),
        (&[(AFFINE4, 12_680)], 128, 12, false, true),
        (&[(AFFINE4, 20_490)], 128, 5, false, true),
        (&[(AFFINE8, 20_490)], 384, 7, true, false),
        (&[(AFFINE4, 65_540)], 128, 5, false, false),
        (&[(AFFINE4, 65_540)], 384, 9, false, false),
        (&[(FP8, 269)], 384, 1, false, true),
        (&[(FP8, 149), (BF16, 9), (WeightFormat::Fp8(Some(Float::F32)), 17)], 5120, 7, true, false),
        (&[(WeightFormat::Mxfp4, 40), (WeightFormat::Mxfp4, 3)], 2176, 4, true, false),
        (&[(WeightFormat::Mxfp4, 8200)], 384, 15, false, true),
        (&[(BF16, 37), (FP8, 1)], 640, 11, false, true),
        (&[(BF16, 65_540), (FP8, 1)], 128, 2, false, false),
    ] {
        let mut case = TiledCase::new(shapes, cols, tokens, norm, add);
        let found = case.run(0..tokens);
        let mut rows = wide(&case.x);
        if let Some(norm) = case.norm {
            let weight = wide(&case.host.read_floats(norm.weight));
            rows = rows.chunks(cols).flat_map(|row| rms(row, &weight, 1e-6)).collect();
        }
        let width = found.len() / tokens;
        for (row, found) in rows.chunks(cols).zip(found.chunks(width)) {
            let products = case.samples.iter().flat_map(|sample| product(row, &sample.values, cols));
            let expected: Vec<f64> = products.map(|value| value + if add { 1.0 } else { 0.0 }).collect();
            let off = difference(found, &expected);
            assert!(off <= 2e-6, "{shapes:?} x {cols}, {tokens} rows: {off:.1e}");
        }
    }
}

#[test]
fn tiled_rows_ignore_their_neighbours() {
    for (shapes, cols) in [
        (&[(AFFINE4, 40), (AFFINE8, 9)][..], 640),
        (&[(AFFINE4, 20)], 2176),
        (&[(AFFINE4, 4100)], 256),
        (&[(AFFINE4, 8194), (AFFINE8, 5)], 256),
        (&[(AFFINE4, 12_670), (AFFINE8, 5)], 128),
        (&[(AFFINE4, 20_480), (AFFINE8, 5)], 128),
        (&[(FP8, 130), (BF16, 9)], 640),
        (&[(WeightFormat::Mxfp4, 20)], 1152),
    ] {
        let mut case = TiledCase::new(shapes, cols, 21, true, true);
        // Rows with NaN and infinity among the others.
        case.x[5 * cols + 3] = f32::NAN;
        case.x[6 * cols + 70] = f32::INFINITY;
        case.x[17 * cols] = -f32::INFINITY;
        case.x_at = case.host.floats(&case.x.clone());
        // `tiled_rows_are_exact` compares the orders of threads.
        case.host.twice = false;
        let bits = |rows: Vec<f32>| rows.into_iter().map(f32::to_bits).collect::<Vec<_>>();
        let alone: Vec<Vec<u32>> = (0..21).map(|row| bits(case.run(row..row + 1))).collect();
        let mut random = Dice(3);
        // A kernel has 4, 8 or 16 rows in tiles of four.
        for count in [1, 2, 3, 4, 5, 6, 8, 9, 11, 14, 16, 17, 21] {
            let first = random.below(22 - count);
            let together = bits(case.run(first..first + count));
            for (row, (found, expected)) in together.chunks(together.len() / count).zip(&alone[first..]).enumerate() {
                assert!(found == expected, "row {row} of {count} from {first}");
            }
        }
        for row in (0..21).filter(|row| ![5, 6, 17].contains(row)) {
            assert!(alone[row].iter().all(|bits| f32::from_bits(*bits).is_finite()), "row {row}");
        }
    }
}

#[test]
fn tiled_values_of_any_size_are_exact() {
    for exponent in [-120, -40, 0, 40, 110] {
        for codes in [AFFINE4, FP8, WeightFormat::Mxfp4] {
            let mut case = TiledCase::new(&[(codes, 16)], 256, 2, false, false);
            case.x.iter_mut().for_each(|value| *value *= 2f32.powi(exponent));
            case.x_at = case.host.floats(&case.x.clone());
            let found = case.run(0..2);
            let expected = product(&wide(&case.x), &case.samples[0].values, 256);
            let off = difference(&found, &expected);
            assert!(off <= 2e-6, "{codes:?}, 2^{exponent}: {off:.1e}");
        }
    }
}

#[test]
fn tiled_bf16_of_any_size_is_exact() {
    let mut random = Dice(4);
    for spread in [1, 20, 60, 200] {
        let mut case = TiledCase::new(&[(BF16, 19), (FP8, 1)], 384, 3, false, false);
        let sample = &mut case.samples[0];
        let exponents = (0..).map(|_| random.below(spread) as i32 - spread as i32 / 2);
        let values = sample.values.iter().zip(exponents).map(|(value, exponent)| value * 2f64.powi(exponent));
        let values: Vec<_> = values.map(half::bf16::from_f64).collect();
        sample.values = values.iter().map(|value| value.to_f64()).collect();
        sample.matrix.parts[0] =
            case.host.bytes(&values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<_>>());
        let found = case.run(0..3);
        for (row, found) in case.x.chunks(384).zip(found.chunks(20)) {
            let expected = product(&wide(row), &case.samples[0].values, 384);
            let off = difference(&found[..19], &expected);
            assert!(off <= 2e-6, "2^{spread}: {off:.1e}");
        }
    }
}

/// Row r of W has code r in column r % 128, and code 0 elsewhere. All scales are 1.
#[test]
fn tiled_products_decode_every_code() {
    for (codes, count) in [(FP8, 256), (WeightFormat::Mxfp4, 16)] {
        let mut case = TiledCase::new(&[(codes, count)], 128, 1, false, false);
        let row_bytes = codes.row_bytes(128)[0];
        let (mut bytes, bits) = (vec![0; count * row_bytes], row_bytes / 16);
        for code in 0..count {
            let bit = code % 128 * bits;
            bytes[code * row_bytes + bit / 8] |= (code << (bit % 8)) as u8;
        }
        let scales = if codes == FP8 { [0x80, 0x3f].repeat(2) } else { [127; 4].repeat(count) };
        let parts = [bytes, scales, vec![]];
        case.samples[0].matrix.parts = [0, 1, 2].map(|part| case.host.bytes(&parts[part]));
        case.x.fill(1.0);
        case.x_at = case.host.floats(&case.x.clone());
        let expected = product(&[1.0; 128], &values(codes, count, 128, 1.0, &parts), 128);
        for (code, (found, expected)) in case.run(0..1).into_iter().zip(expected).enumerate() {
            let is_nan = codes == FP8 && code % 128 == 127;
            assert!(if is_nan { found.is_nan() } else { f64::from(found) == expected }, "{codes:?} {code}: {found}");
        }
    }
}

#[test]
fn tiled_feed_forward_equals_its_steps() {
    let (mut host, mut random) = (Host::start(), Dice(11));
    let (hidden, inner, tokens) = (128, 256, 3);
    let mut weight = |rows, cols| matrix(&mut host, &mut random, AFFINE4, rows, cols).matrix;
    let gate_up = &[weight(inner, hidden), weight(inner, hidden)];
    let down = &weight(hidden, inner);
    let values = random.normals(tokens * hidden);
    let norm = Norm { weight: host.floats(&random.normals(hidden)), eps: 1e-6, keep: None };
    let [scores, act] = [2, 1].map(|parts| host.empty(tokens * parts * inner * 4));
    let [fused, steps] = [0, 1].map(|_| host.floats(&values));
    let op = Mlp { tokens, norm, gate_up, down, scores, act, h: fused };
    let buffer = host.empty(op.split_words(0) * 4);
    let tiles = Some(RowTiles { min_weights: 0, buffer });
    let launches = op.launches(tiles);
    assert_eq!(launches.len(), 4);
    launches.iter().for_each(|launch| host.run(launch));
    let linear = |x, norm, matrices, y, add| Linear { x, tokens, norm, matrices, y, add }.launches(tiles);
    let mut launches = linear(steps, Some(norm), &gate_up[..], scores, false);
    launches.push(swiglu(tokens, inner, scores, 2 * inner, 0, act));
    launches.extend(linear(act, None, std::slice::from_ref(down), steps, true));
    launches.iter().for_each(|launch| host.run(launch));
    assert!(host.read(fused) == host.read(steps));
}

#[test]
fn load_measures_each_product_once() {
    let mut gpu = HostGpu::new(Host::fast());
    gpu.has_variants = true;
    let count = gpu.count.clone();
    let mut backend = GpuBackend::new(gpu.queue());
    let weight = |codes, rows| Weight { codes, rows, cols: 64, global_scale: 1.0, parts: Default::default() };
    let product = |codes, rows: &[usize], has_norm| {
        let matrices = rows.iter().map(|rows| weight(codes, *rows)).collect();
        DecodedProduct::Matrices { matrices, has_norm }
    };
    let stack = |rows, cols| {
        let at = vec![[0, rows * cols / 2, rows * cols / 2 + rows * 16]];
        ExpertStack { codes: AFFINE4, rows, cols, global_scales: vec![1.0], at }
    };
    let stacks = [stack(8, 64), stack(8, 64), stack(64, 8)];
    let layer = &MoeWeights { k: 2, renormalise: true, router: weight(AFFINE4, 4), shared: None, stacks };
    let products = [
        product(AFFINE4, &[16], false),
        product(AFFINE4, &[9, 1], true),
        product(AFFINE4, &[16], false),
        product(AFFINE8, &[16], false),
        product(affine(3, 32), &[16], false),
        DecodedProduct::Experts { layer, stride: 1024 },
    ];
    backend.choose_variants(&products);
    // Four products have variants and differ. Each variant is launched as often as the other.
    let measured = { std::mem::take(&mut *count.lock().unwrap()) };
    assert_eq!((measured.direct * 2, measured.direct % 4), (measured.launches, 0));
    backend.choose_variants(&products);
    assert_eq!(count.lock().unwrap().launches, 0);
    // Without this, the load measures nothing.
    let mut plain = GpuBackend::new(HostGpu::new(Host::fast()).queue());
    plain.choose_variants(&products);
    assert_eq!(plain.launches(), 0);
}
