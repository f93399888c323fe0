//! Tests prompts on matrix units: half-precision products are accurate, rows do not depend on other rows, no value
//! overflows, and the demo gives the same answers as on the CPU.

use crate::{
    card::assert_agrees,
    check::*,
    double::Double,
    experts::{group, layer},
    forward::{DEMO, answer, cases, common::load_with, options, planned},
    gpu::HostGpu,
    host::Host,
    queue,
};
use moestro_compute::{
    device::Region,
    ops::{
        ExpertSet, Experts, FP8_BLOCK, Float, HalfBuffers, Linear, MoeBuffers, MoeWeights, Norm, Weight, WeightFormat,
        experts::Jobs,
    },
};
use moestro_model::model::{LoadOptions, Model, PassHooks, Qwen, Rows};
use std::{collections::BTreeSet, path::Path};

/// Largest allowed difference, relative to the largest value.
const CLOSE: f64 = 1e-3;

fn buffer(host: &mut Host, rows: usize, cols: usize) -> Region {
    host.empty(rows * HalfBuffers::words(cols) * 4)
}

/// The product `x W^T` for the rows of `x`. If a norm weight is given, the rows are normalised first.
fn products(host: &mut Host, x: &[f32], sample: &Sample, cols: usize, norm: Option<&[f32]>) -> Vec<f32> {
    products_of(host, x, &[sample.matrix], cols, norm, false).0
}

/// The products of the rows of `x` with each matrix, on the kernels for few rows if `has_short` is true and they fit.
/// Also returns the kernels.
fn products_of(
    host: &mut Host,
    x: &[f32],
    matrices: &[Weight],
    cols: usize,
    norm: Option<&[f32]>,
    has_short: bool,
) -> (Vec<f32>, Vec<&'static str>) {
    let tokens = x.len() / cols;
    let width: usize = matrices.iter().map(|matrix| matrix.rows).sum();
    let (x, y) = (host.floats(x), host.empty(tokens * width * 4));
    let norm = norm.map(|weight| Norm { weight: host.floats(weight), eps: 1e-6, keep: None });
    let buffers = HalfBuffers { x: buffer(host, tokens, cols), has_short, ..HalfBuffers::default() };
    let op = Linear { x, tokens, norm, matrices, y, add: false };
    let launches = op.half_launches(buffers);
    launches.iter().for_each(|launch| host.run(launch));
    (host.read_floats(y), launches.iter().map(|launch| launch.kernel).collect())
}

fn largest(values: &[f64]) -> f64 {
    values.iter().fold(0.0, |max, value| max.max(value.abs()))
}

#[test]
fn half_products_of_every_format_are_close() {
    let (mut host, mut random) = (Host::start(), Dice(5));
    for (codes, cols) in [
        (AFFINE4, 192),
        (AFFINE8, 128),
        (WeightFormat::Affine { bits: 3, group: 32, scale: Float::F16 }, 96),
        (WeightFormat::Mxfp4, 160),
        (WeightFormat::Dense(Float::Bf16), 77),
        (WeightFormat::Fp8(Some(Float::Bf16)), 272),
    ] {
        let sample = matrix(&mut host, &mut random, codes, FP8_BLOCK + 6, cols);
        let (x, weight) = (random.normals(66 * cols), random.normals(cols));
        for norm in [None, Some(&weight[..])] {
            let found = products(&mut host, &x, &sample, cols, norm);
            let rows = wide(&x);
            let rows: Vec<f64> = match norm {
                None => rows,
                Some(weight) => rows.chunks(cols).flat_map(|row| rms(row, &wide(weight), 1e-6)).collect(),
            };
            let expected: Vec<f64> = rows.chunks(cols).flat_map(|row| product(row, &sample.values, cols)).collect();
            let off = found.iter().zip(&expected).map(|(f, e)| (f64::from(*f) - e).abs()).fold(0.0, f64::max);
            assert!(off < CLOSE * largest(&expected), "{codes:?} x {cols}: off by {off} of {}", largest(&expected));
        }
    }
}

#[test]
fn half_rows_are_independent_of_other_rows() {
    let (mut host, mut random, cols) = (Host::start(), Dice(6), 128);
    let sample = matrix(&mut host, &mut random, AFFINE4, 80, cols);
    let x = random.normals(70 * cols);
    let together = products(&mut host, &x, &sample, cols, None);
    for (first, count) in [(0, 1), (3, 5), (60, 10), (69, 1)] {
        let some = products(&mut host, &x[first * cols..(first + count) * cols], &sample, cols, None);
        assert!(some == together[first * 80..(first + count) * 80], "rows {first}, {count} of them");
    }
}

/// A prompt's rows have the same bytes however the prompt is cut: 72 rows at once, and chunks of 1 to 40 rows, which
/// use other kernels. Rows have values of very different sizes.
#[test]
fn few_half_rows_equal_many() {
    let (mut host, mut random) = (Host::start(), Dice(9));
    let mut kernels = BTreeSet::new();
    for cols in [128, 640, 1152] {
        let matrices = [(AFFINE4, 67), (AFFINE8, 21), (AFFINE4, 130)]
            .map(|(codes, rows)| matrix(&mut host, &mut random, codes, rows, cols).matrix);
        let width: usize = matrices.iter().map(|matrix| matrix.rows).sum();
        let mut x = random.normals(72 * cols);
        x.chunks_mut(cols).enumerate().for_each(|(row, values)| values[row % cols] *= 1e4);
        let weight = random.normals(cols);
        for norm in [None, Some(&weight[..])] {
            let (together, launched) = products_of(&mut host, &x, &matrices, cols, norm, true);
            assert_eq!(launched, ["rows_to_half", "gemm"]);
            for chunks in [&[1, 15, 16, 17, 23][..], &[32, 40], &[33, 2, 5, 32], &[64, 8]] {
                let mut first = 0;
                for count in chunks {
                    let rows = &x[first * cols..(first + count) * cols];
                    let (some, launched) = products_of(&mut host, rows, &matrices, cols, norm, true);
                    kernels.insert(launched[1]);
                    assert!(some == together[first * width..(first + count) * width], "{cols}: {first} + {count}");
                    first += count;
                }
                assert_eq!(first, 72);
            }
        }
    }
    assert_eq!(kernels.into_iter().collect::<Vec<_>>(), ["gemm_short_16", "gemm_short_32", "gemm_short_64"]);
}

/// Matrices with few rows in another format have f32 launches. The others keep the kernel of their format.
#[test]
fn few_rows_of_another_format_are_exact() {
    let (mut host, mut random, cols) = (Host::start(), Dice(10), 640);
    let affine8 = WeightFormat::Affine { bits: 8, group: 32, scale: Float::F16 };
    let formats =
        [WeightFormat::Dense(Float::Bf16), WeightFormat::Fp8(Some(Float::Bf16)), affine8, WeightFormat::Mxfp4];
    let (x, weight) = (random.normals(70 * cols), random.normals(cols));
    for codes in formats {
        let few = 1 + random.below(15);
        let samples = [(codes, few), (AFFINE4, 67), (codes, 16), (codes, 17)]
            .map(|(codes, rows)| matrix(&mut host, &mut random, codes, rows, cols));
        for (count, norm) in [(2, None), (3, Some(&weight[..])), (4, None), (4, Some(&weight[..]))] {
            let matrices: Vec<Weight> = samples[..count].iter().map(|sample| sample.matrix).collect();
            let width: usize = matrices.iter().map(|matrix| matrix.rows).sum();
            let (together, launched) = products_of(&mut host, &x, &matrices, cols, norm, true);
            let few_rows = if norm.is_some() { "gemv_any_norm_2" } else { "gemv_any_2" };
            let expected = ["rows_to_half", few_rows, "gemm", few_rows, "gemm_any"];
            assert_eq!(launched, expected[..=count], "{codes:?}");
            let mut first = 0;
            for rows in [1, 16, 53] {
                let part = &x[first * cols..(first + rows) * cols];
                let (some, _) = products_of(&mut host, part, &matrices, cols, norm, true);
                assert!(some == together[first * width..(first + rows) * width], "rows {first} + {rows}");
                first += rows;
            }
            for (row, found) in wide(&x).chunks(cols).zip(together.chunks(width)) {
                let row = norm.map_or_else(|| row.to_vec(), |weight| rms(row, &wide(weight), 1e-6));
                let mut found = found.iter();
                for sample in &samples[..count] {
                    let expected = product(&row, &sample.values, cols);
                    let of = expected.iter().zip(found.by_ref());
                    let off = of.map(|(e, f)| (f64::from(*f) - e).abs()).fold(0.0, f64::max);
                    let sizes = |of: &[f64]| of.iter().map(|value| value.abs()).collect::<Vec<_>>();
                    let size = largest(&product(&sizes(&row), &sizes(&sample.values), cols));
                    let bound = if sample.matrix.rows <= 16 { 1e-6 } else { CLOSE } * size;
                    assert!(off < bound, "{codes:?}, {count} matrices, {} rows: off by {off}", sample.matrix.rows);
                }
            }
        }
    }
}

#[test]
fn half_rows_do_not_overflow_or_vanish() {
    let (mut host, mut random, cols) = (Host::start(), Dice(7), 128);
    let sample = matrix(&mut host, &mut random, AFFINE4, 64, cols);
    let row = random.normals(cols);
    let sizes = [1e-30f32, 1e-6, 1.0, 7e4, 1e30];
    let mut x: Vec<f32> = sizes.iter().flat_map(|size| row.iter().map(move |v| v * size)).collect();
    x.extend(vec![0.0; cols]);
    let found = products(&mut host, &x, &sample, cols, None);
    let expected = product(&wide(&row), &sample.values, cols);
    for (size, found) in sizes.iter().zip(found.chunks(64)) {
        let off = found.iter().zip(&expected).map(|(f, e)| (f64::from(*f) / f64::from(*size) - e).abs());
        let off = off.fold(0.0, f64::max);
        assert!(off < CLOSE * largest(&expected), "rows of {size}: off by {off}");
    }
    assert!(found[5 * 64..].iter().all(|value| *value == 0.0), "a row of zeros");
}

/// 200 rows with 8 of 256 experts each have about 6 rows per expert. With tiles of 32 rows, the kernel would multiply
/// five times as many rows.
#[test]
fn short_prompts_multiply_few_empty_rows() {
    const SIDE: usize = 64;
    let (mut host, mut random, tokens, k, experts) = (Host::fast(), Dice(8), 200, 8, 256);
    let layer = layer(&mut host, &mut random, [AFFINE4; 3], SIDE, SIDE, experts);
    let none = host.words(&[]);
    let router = Weight { codes: AFFINE4, rows: experts, cols: SIDE, global_scale: 1.0, parts: [none; 3] };
    let mixture = &MoeWeights { k, renormalise: true, router, shared: None, stacks: layer.stacks };
    // Every row uses experts that are far apart, starting at a random expert.
    let starts: Vec<usize> = (0..tokens).map(|_| (random.normal().abs() * 1e4) as usize % experts).collect();
    let chosen: Vec<u32> =
        starts.iter().flat_map(|first| (0..k).map(move |rank| ((first + rank * 37) % experts) as u32)).collect();
    let grouped = group(&mut host, &chosen, experts);
    let words = host.read_words(grouped.jobs);
    let jobs: Vec<u32> =
        words.chunks_exact(3).flat_map(|job| Experts::jobs(job[0], job[1], job[2])).flatten().collect();
    let jobs = Jobs { count: jobs.len() / 3, jobs: host.words(&jobs), order: grouped.order };
    let assignments = tokens * (k + 1);
    let buffers = MoeBuffers {
        act: host.empty(assignments * SIDE * 4),
        out: host.empty(assignments * SIDE * 4),
        ..MoeBuffers::default()
    };
    let half = HalfBuffers { x: room_of(&mut host, tokens), act: room_of(&mut host, tokens * k), has_short: false };
    let x = host.floats(&random.normals(tokens * SIDE));
    let set = ExpertSet::Table { ids: none, slots: none };
    let op = Experts { layer: mixture, slots: &layer.slots, tokens, x, buffers, experts: set };
    let mut products = 0;
    for launch in op.half_launches(jobs, half) {
        host.run(&launch);
        products += host.products();
    }
    let needed = (tokens * k * 3 * SIDE * SIDE) as u64;
    println!("{:.3} times the multiplications of the rows", products as f64 / needed as f64);
    assert!(products >= needed && products * 100 <= needed * 151, "{products} for {needed}");
}

fn room_of(host: &mut Host, rows: usize) -> Region {
    buffer(host, rows, 64)
}

fn on_halves(options: LoadOptions) -> Qwen {
    planned(options, HostGpu::with_matrix_units(Host::fast()))
}

#[test]
#[ignore = "long: whole prompts"]
fn demo_prompts_on_matrix_units_match() {
    let (mut cpu, mut gpu) = (load_with(Path::new(DEMO), options(false)), on_halves(options(false)));
    // Only every fourth case is tested, since the kernels are slow on the host.
    for case in cases().into_iter().step_by(4) {
        let expected = answer(&mut cpu, &case.prompt_ids, &[], case.greedy_ids.len());
        let found = answer(&mut gpu, &case.prompt_ids, &[], case.greedy_ids.len());
        assert_agrees(&case.question, &found, &expected, 2e-2);
        assert!(found.1[0] != expected.1[0], "these products are not in half precision");
    }
}

#[test]
#[ignore = "exhaustive: many cuts"]
fn half_prompts_ignore_slots_and_chunking() {
    let case = cases().swap_remove(3);
    let (prompt, count) = (&case.prompt_ids, 1);
    let mut resident = on_halves(options(false));
    let expected = answer(&mut resident, prompt, &[], count);
    let chunks = vec![2, 9];
    assert!(answer(&mut resident, prompt, &chunks, count) == expected, "chunks {chunks:?}");
    let mut few = options(true);
    few.store.slots = Some(5);
    let mut streaming = on_halves(few);
    assert!(answer(&mut streaming, prompt, &[7], count) == expected, "five slots");
}

/// A prompt of which all but the last token is cached.
#[test]
fn single_row_of_prompt_equals_whole_prompt() {
    let prompt = &cases()[3].prompt_ids[..4];
    let mut model = on_halves(options(false));
    let mut last = |cached: usize| {
        let mut state = model.start().unwrap();
        let mut row = Vec::new();
        for ids in [&prompt[..cached], &prompt[cached..]].into_iter().filter(|ids| !ids.is_empty()) {
            let mut hooks = PassHooks { is_prompt: true, ..PassHooks::default() };
            row = model.forward_with(&mut state, ids, Rows::Last, &mut hooks).unwrap().data.to_vec();
        }
        row
    };
    let whole = last(0);
    for cached in 1..prompt.len() {
        assert!(last(cached) == whole, "{cached} tokens are cached");
    }
}

#[test]
fn half_prompts_ignore_launch_order() {
    for streaming in [false, true] {
        let double = Double::new(Host::fast());
        let control = double.control();
        control.lock().unwrap().halves = true;
        let mut model = queue::place(double, streaming);
        let expected = queue::answer(&mut model).unwrap();
        for seed in 0..10 {
            control.lock().unwrap().seed = Some(seed);
            assert!(queue::answer(&mut model).unwrap() == expected, "seed {seed}, streaming: {streaming}");
        }
    }
}
