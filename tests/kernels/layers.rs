//! Tests the operations between the projections: norms, convolution, delta rule, attention, and embedding.

use crate::{check::*, gpu::HostGpu, host::Host};
use moestro_compute::device::{CpuArithmetic, CpuDevice, Launch, Region};
use moestro_compute::ops::{
    Attention, AttentionShape, Backend, Conv, Cpu, Decay, DeltaNet, DeltaRule, DeltaShape, Embedding, Float,
    GpuBackend, KvCache, KvFormat, KvWrite, Linear, Norm, OutputGate, QkNormRope, Replay, RowTiles, Weight,
    WeightFormat, attention::PAGE, embedding::dequantize, norm::rms_norm,
};

#[test]
fn rms_norm_matches_reference() {
    let mut host = Host::start();
    let mut random = Dice(1);
    for (rows, cols) in [(1, 2048), (3, 3072), (2, 4096), (5, 77)] {
        let (x, w) = (random.normals(rows * cols), random.normals(cols));
        let (x_at, w_at, y) = (host.floats(&x), host.floats(&w), host.empty(rows * cols * 4));
        host.run(&rms_norm(rows, cols, 1e-6, x_at, w_at, y));
        let expected: Vec<f64> = wide(&x).chunks(cols).flat_map(|row| rms(row, &wide(&w), 1e-6)).collect();
        close("rms norm", &host.read_floats(y), &expected);
    }
}

#[test]
fn embedding_and_dequantize_match_reference() {
    let mut host = Host::start();
    let mut random = Dice(2);
    let (rows, cols) = (150, 576);
    for codes in [
        AFFINE4,
        AFFINE8,
        WeightFormat::Affine { bits: 3, group: 32, scale: Float::F16 },
        WeightFormat::Dense(Float::Bf16),
        WeightFormat::Fp8(Some(Float::Bf16)),
    ] {
        let sample = matrix(&mut host, &mut random, codes, rows, cols);
        let ids = [3u32, 149, 0];
        let (ids_at, h) = (host.words(&ids), host.empty(3 * cols * 4));
        host.run(&Embedding { table: &sample.matrix, tokens: 3, ids: ids_at, into: h }.launch());
        let expected: Vec<f64> =
            ids.iter().flat_map(|&i| sample.values[i as usize * cols..][..cols].to_vec()).collect();
        close("embedding", &host.read_floats(h), &expected);

        let (full, half) = (host.empty(rows * cols * 4), host.empty(rows * cols * 2));
        host.run(&dequantize(&sample.matrix, Float::F32, full));
        host.run(&dequantize(&sample.matrix, Float::F16, half));
        let full = host.read_floats(full);
        close("dequantize", &full, &sample.values);
        let half = host.read(half);
        for (i, v) in full.iter().enumerate() {
            let found = u16::from_le_bytes([half[2 * i], half[2 * i + 1]]);
            assert_eq!(found, half::f16::from_f32(*v).to_bits(), "{v} as f16");
        }
    }
}

/// Every code of E4M3 has exactly the value of its definition, on each path that reads FP8.
#[test]
fn e4m3_codes_have_exact_values() {
    let mut host = Host::start();
    let codes: Vec<u8> = (0..=255).collect();
    let expected = |code: u8| match code & 127 {
        127 => f32::NAN,
        bits => {
            let (exponent, mantissa) = (i32::from(bits >> 3), f32::from(bits & 7) / 8.0);
            let size = if exponent == 0 { mantissa / 64.0 } else { (1.0 + mantissa) * 2f32.powi(exponent - 7) };
            if code < 128 { size } else { -size }
        }
    };
    let expected: Vec<f32> = codes.iter().map(|code| expected(*code)).collect();
    let check = |found: Vec<f32>, what: &str| {
        for (code, (found, expected)) in found.iter().zip(&expected).enumerate() {
            assert!(found == expected || found.is_nan() && expected.is_nan(), "{what}: {code}: {found:e} {expected:e}");
        }
    };
    for (format, scales) in [
        (WeightFormat::Mxfp8, vec![127; 8]),
        (WeightFormat::Fp8(Some(Float::F32)), 1f32.to_le_bytes().repeat(2)),
        (WeightFormat::Fp8(Some(Float::Bf16)), vec![0x80, 0x3f, 0x80, 0x3f]),
    ] {
        let parts = [host.bytes(&codes), host.bytes(&scales), host.bytes(&[])];
        let weight = Weight { codes: format, rows: 1, cols: 256, global_scale: 1.0, parts };
        let out = host.empty(256 * 4);
        host.run(&dequantize(&weight, Float::F32, out));
        check(host.read_floats(out), &format!("{format:?}"));
        // One row per code, of which the product takes the first column.
        let rows: Vec<u8> = codes.iter().flat_map(|code| [*code, 0].into_iter().chain([0; 30])).collect();
        let scales = if format == WeightFormat::Mxfp8 { vec![127; 256] } else { scales };
        let parts = [host.bytes(&rows), host.bytes(&scales), host.bytes(&[])];
        let matrices = [Weight { codes: format, rows: 256, cols: 32, global_scale: 1.0, parts }];
        let first: Vec<f32> = (0..32).map(|column| if column == 0 { 1.0 } else { 0.0 }).collect();
        let (x, y) = (host.floats(&first), host.empty(256 * 4));
        host.run(&Linear { x, tokens: 1, norm: None, matrices: &matrices, y, add: false }.launch());
        check(host.read_floats(y), &format!("product of {format:?}"));
    }
}

#[test]
fn f16_rounding_matches_ieee() {
    let mut host = Host::start();
    let mut random = Dice(5);
    let mut values: Vec<f32> =
        (0..4096).map(|_| f32::from_bits(random.roll() as u32)).map(|v| if v.is_nan() { 1.5 } else { v }).collect();
    values.extend((0..2048).map(|i| f32::from_bits(0x3280_0000 + i * 0x1_3579)));
    values.extend((0..2048).map(|i| f32::from_bits(0x4770_0000 + i * 0x157)));
    let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
    let parts = [host.bytes(&bytes), host.bytes(&[]), host.bytes(&[])];
    let weight = Weight { codes: WeightFormat::Dense(Float::F32), rows: 8, cols: 1024, global_scale: 1.0, parts };
    let out = host.empty(8192 * 2);
    host.run(&dequantize(&weight, Float::F16, out));
    for (found, v) in host.read(out).chunks_exact(2).zip(&values) {
        assert_eq!(u16::from_le_bytes([found[0], found[1]]), half::f16::from_f32(*v).to_bits(), "{v:e}");
    }
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

fn delta(key_heads: usize, value_heads: usize, key_dim: usize, value_dim: usize) -> DeltaShape {
    DeltaShape { key_heads, value_heads, key_dim, value_dim, conv_width: 4, eps: 1e-6, gate: Default::default() }
}

/// Computes convolution, recurrence and gated norm over `chunks` of tokens. Every split into chunks must give the same
/// bytes, even if a chunk is added to the state only when the next chunk is computed.
fn delta_case(op: DeltaShape, chunks: &[&[usize]]) {
    let mut random = Dice((op.key_dim * 7 + op.value_dim) as u64);
    let tokens: usize = chunks[0].iter().sum();
    let (channels, values, width) = (op.channels(), op.values(), op.width());
    let proj = random.normals(tokens * width);
    let conv_weight = random.normals(channels * 4);
    let (rate, dt_bias, w) =
        (random.normals(op.value_heads), random.normals(op.value_heads), random.normals(op.value_dim));
    let rate: Vec<f32> = rate.iter().map(|a| -a.exp()).collect();
    let (conv0, state0) = (random.normals(channels * 3), random.normals(values * op.key_dim));

    let mut bytes: Option<Vec<Vec<u8>>> = None;
    for (chunks, late) in chunks.iter().flat_map(|chunks| [(chunks, false), (chunks, true)]) {
        let mut host = Host::start();
        let (conv_weight, conv_state) = (host.floats(&conv_weight), host.floats(&conv0));
        let decay = Decay { rate: host.floats(&rate), dt_bias: host.floats(&dt_bias) };
        let (w, state) = (host.floats(&w), host.floats(&state0));
        let all = host.floats(&proj);
        let [mixed, out, y] = [channels, values, values].map(|n| host.empty(tokens * n * 4));
        let (mut at, mut replay) = (0, Replay::default());
        for &n in *chunks {
            let rows =
                |region: moestro_compute::device::Region, width: usize| region.part(at * width * 4, n * width * 4);
            let (proj, mixed, out) = (rows(all, width), rows(mixed, channels), rows(out, values));
            let (shape, tokens, y) = (&op, n, rows(y, values));
            let keep = late && at + n < chunks.iter().sum();
            let committed = replay.rows + if keep { 0 } else { n };
            host.run(
                &Conv { shape, tokens, proj, weight: conv_weight, replay, committed, state: conv_state, out: mixed }
                    .launch(),
            );
            let rule = DeltaRule { shape, tokens, proj, mixed, decay, replay, committed, state, norm: w, out, y };
            rule.launches().for_each(|launch| host.run(&launch));
            replay = if keep { Replay { rows: n, proj, mixed } } else { Replay::default() };
            at += n;
        }
        let found = [mixed, out, y, state, conv_state].map(|r| host.read(r)).to_vec();
        assert!(bytes.get_or_insert(found.clone()) == &found, "chunks {chunks:?}, late {late}, change the result");
    }
    let found = bytes.unwrap();

    let proj = wide(&proj);
    let (mut conv, mut state) = (wide(&conv0), wide(&state0));
    let (mut mixed, mut out, mut y) = (vec![], vec![], vec![]);
    for row in proj.chunks(width) {
        conv.extend(&row[..channels]);
        let mut c: Vec<f64> = (0..channels)
            .map(|c| {
                silu((0..4).map(|j| f64::from(conv_weight[j * channels + c]) * conv[j * channels + c]).sum::<f64>())
            })
            .collect();
        conv.drain(..channels);
        let keys = op.key_heads * op.key_dim;
        for (i, head) in c[..2 * keys].chunks_mut(op.key_dim).enumerate() {
            let norm = (head.iter().map(|v| v * v).sum::<f64>() + 1e-6).sqrt();
            let scale = if i < op.key_heads { (op.key_dim as f64).powf(-0.5) } else { 1.0 };
            head.iter_mut().for_each(|v| *v *= scale / norm);
        }
        for head in 0..op.value_heads {
            let key = head / (op.value_heads / op.key_heads);
            let (q, k) = (&c[key * op.key_dim..][..op.key_dim], &c[keys + key * op.key_dim..][..op.key_dim]);
            let v = &c[2 * keys + head * op.value_dim..][..op.value_dim];
            let beta = sigmoid(row[channels + values + head]);
            let a = row[channels + values + op.value_heads + head] + f64::from(dt_bias[head]);
            let g = (f64::from(rate[head]) * a.exp().ln_1p()).exp();
            let mut o = Vec::new();
            for (i, s) in state[head * op.value_dim * op.key_dim..][..op.value_dim * op.key_dim]
                .chunks_mut(op.key_dim)
                .enumerate()
            {
                s.iter_mut().for_each(|s| *s *= g);
                let d = beta * (v[i] - s.iter().zip(k).map(|(s, k)| s * k).sum::<f64>());
                s.iter_mut().zip(k).for_each(|(s, k)| *s += d * k);
                o.push(s.iter().zip(q).map(|(s, q)| s * q).sum::<f64>());
            }
            let z = &row[channels + head * op.value_dim..][..op.value_dim];
            let gate = |z: f64| if op.gate == OutputGate::Sigmoid { sigmoid(z) } else { silu(z) };
            y.extend(rms(&o, &wide(&w), f64::from(op.eps)).iter().zip(z).map(|(o, z)| o * gate(*z)));
            out.extend(o);
        }
        mixed.extend(c);
    }
    for (name, found, expected) in [
        ("causal_conv", 0, &mixed),
        ("delta", 1, &out),
        ("gated norm", 2, &y),
        ("delta state", 3, &state),
        ("conv state", 4, &conv),
    ]
    .map(|(name, i, e)| (name, &found[i], e))
    {
        let found: Vec<f32> = found.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect();
        close(&format!("{name} of {op:?}"), &found, expected);
    }
}

/// Tests that the fused launches of a whole delta-net layer give the same bytes as one launch per step. This must hold
/// for single rows, for several rows, and after speculative rows.
#[test]
fn fused_delta_layer_equals_separate_launches() {
    let few_bits = WeightFormat::Affine { bits: 3, group: 32, scale: Float::F16 };
    // Matrix units need rows that are multiples of 128.
    let untiled = [AFFINE4, AFFINE8, few_bits].map(|codes| (codes, 48));
    let tiled = [AFFINE4, AFFINE8, FP8, WeightFormat::Mxfp4].map(|codes| (codes, 32));
    for (codes, value_dim) in untiled.into_iter().chain(tiled) {
        let is_tiled = value_dim == 32;
        let shape = &delta(2, 4, 64, value_dim);
        let (hidden, channels, values, heads) = (128, shape.channels(), shape.values(), shape.value_heads);
        let mut found: Vec<Vec<Vec<u8>>> = Vec::new();
        let cuts = [&[2, 1, 1, 5][..], &[2, 2, 4, 1]];
        for (apart, is_direct, cuts) in
            [(true, false, cuts[0]), (false, false, cuts[0]), (false, false, cuts[1]), (false, true, cuts[0])]
        {
            let (mut host, mut random) = (Host::start(), Dice(9));
            let mut weight = |host: &mut Host, rows, cols| matrix(host, &mut random, codes, rows, cols).matrix;
            let matrices = [channels, values, heads, heads].map(|rows| weight(&mut host, rows, hidden));
            let last = [weight(&mut host, hidden, values)];
            let mut floats = |count: usize| host.floats(&random.normals(count));
            let norm = Some(Norm { weight: floats(hidden), eps: 1e-6, keep: None });
            let (conv_weight, samples, state) =
                (floats(4 * channels), floats(3 * channels), floats(values * shape.key_dim));
            let (decay, gated) = (Decay { rate: floats(heads), dt_bias: floats(heads) }, floats(shape.value_dim));
            let all = floats(9 * hidden);
            let [proj, mixed, out, y] =
                [shape.width(), channels, values, values].map(|width| host.empty(9 * width * 4));
            let (mut replay, mut at) = (Replay::default(), 0);
            for (index, &tokens) in cuts.iter().enumerate() {
                let rows = |region: moestro_compute::device::Region, width: usize| region.rows(at, tokens, width);
                let (h, proj, mixed) = (rows(all, hidden), rows(proj, shape.width()), rows(mixed, channels));
                let (out, y) = (rows(out, values), rows(y, values));
                // The rows at index 0 are speculative.
                let committed = if index == 0 { 0 } else { replay.rows + tokens };
                let net = DeltaNet {
                    in_proj: Linear { x: h, tokens, norm, matrices: &matrices, y: proj, add: false },
                    conv: Conv {
                        shape,
                        tokens,
                        proj,
                        weight: conv_weight,
                        replay,
                        committed,
                        state: samples,
                        out: mixed,
                    },
                    rule: DeltaRule {
                        shape,
                        tokens,
                        proj,
                        mixed,
                        decay,
                        replay,
                        committed,
                        state,
                        norm: gated,
                        out,
                        y,
                    },
                    out_proj: Linear { x: y, tokens, norm: None, matrices: &last, y: h, add: true },
                };
                let tiles = is_tiled.then(|| RowTiles { min_weights: 0, buffer: host.empty(net.split_words(0) * 4) });
                let launches = if apart { net.apart(tiles) } else { net.launches(tiles) };
                if !apart && tokens == 1 {
                    assert_eq!(launches.len(), if is_tiled { 5 } else { 3 });
                }
                let variant = |launch: &Launch| direct(launch).filter(|_| is_direct).unwrap_or_else(|| launch.clone());
                launches.iter().for_each(|launch| host.run(&variant(launch)));
                replay = if index == 0 { Replay { rows: tokens, proj, mixed } } else { Replay::default() };
                at += tokens;
            }
            found.push([all, samples, state].map(|region| host.read(region)).to_vec());
        }
        assert!(found.iter().all(|other| *other == found[0]), "{codes:?}");
    }
}

#[test]
fn delta_net_matches_reference() {
    delta_case(delta(2, 4, 128, 128), &[&[7], &[1, 1, 1, 1, 1, 1, 1], &[2, 5]]);
    delta_case(delta(1, 3, 20, 37), &[&[4], &[3, 1]]);
    delta_case(DeltaShape { gate: OutputGate::Sigmoid, ..delta(1, 1, 256, 16) }, &[&[3]]);
}

/// macOS aborts launches whose threadgroups run too long, so a long recurrence must be split.
#[test]
fn long_recurrence_is_cut() {
    let shape = delta(1, 1, 16, 16);
    delta_case(shape, &[&[520], &[256, 264], &[100, 420]]);
    let tokens = 520;
    let rows = |width: usize| Region { buffer: 0, offset: 0, len: tokens * width * 4 };
    let (one, values) = (rows(1), rows(shape.values()));
    let rule = DeltaRule {
        shape: &shape,
        tokens,
        proj: rows(shape.width()),
        mixed: rows(shape.channels()),
        decay: Decay { rate: one, dt_bias: one },
        replay: Replay::default(),
        committed: tokens,
        state: rows(16),
        norm: one,
        out: values,
        y: values,
    };
    let cut = |rule: DeltaRule<'_>| {
        let launches = rule.launches().filter(|launch| launch.kernel.starts_with("gated_delta"));
        launches.map(|launch| launch.args[1]).collect::<Vec<u32>>()
    };
    assert_eq!(cut(rule), [256, 256, 8]);
    assert_eq!(cut(DeltaRule { committed: 0, ..rule }), [520], "rows that may be rejected store no state");
}

/// Computes attention of `tokens` rows after `start` cached positions, as in decoding and as in a prompt, and compares
/// it with plain loops. Also checks that computing row by row gives the same bytes.
fn attend_case(op: AttentionShape, start: usize, tokens: usize) {
    attend_on(Host::start(), op, start, tokens);
}

/// The same on a given host. Returns the results of decoding.
fn attend_on(mut host: Host, op: AttentionShape, start: usize, tokens: usize) -> Vec<f32> {
    host.twice = start < 100;
    let mut random = Dice((op.dim + start) as u64);
    let (width, dim) = (op.width(), op.dim);
    let proj = random.normals(tokens * width);
    let (q_norm, k_norm) = (random.normals(dim), random.normals(dim));
    let old = [random.normals(op.kv_heads * op.context * dim), random.normals(op.kv_heads * op.context * dim)];
    // The values of a row after the cache format has rounded them.
    let cast = |row: &[f32]| -> Vec<f32> {
        if op.format == KvFormat::F32 {
            return row.to_vec();
        }
        let max = row.iter().fold(0f32, |max, v| max.max(v.abs()));
        row.iter().map(|v| (v * (32_639.0 / max)).round_ties_even() * (max / 32_639.0)).collect()
    };
    let old = old.map(|v| v.chunks(dim).flat_map(cast).collect::<Vec<_>>());
    let rope_table: Vec<f32> = (0..tokens)
        .flat_map(|t| {
            (0..op.rope_dim / 2).map(move |j| (start + t) as f64 * 1e4f64.powf(-2.0 * j as f64 / op.rope_dim as f64))
        })
        .flat_map(|angle| [angle.cos() as f32, angle.sin() as f32])
        .collect();
    // The pages are in reverse order in memory.
    let pages = op.pages();
    let store = |host: &mut Host, v: &[f32]| {
        let mut paged = vec![0.0; pages * op.kv_heads * PAGE * dim];
        for (at, row) in v.chunks(dim).enumerate() {
            let (head, position) = (at / op.context, at % op.context);
            let to = ((pages - 1 - position / PAGE) * op.kv_heads + head) * PAGE + position % PAGE;
            paged[to * dim..][..dim].copy_from_slice(row);
        }
        if op.format == KvFormat::F32 {
            return host.floats(&paged);
        }
        let encode = |block: &[f32]| {
            let max = |row: &[f32]| row.iter().fold(0f32, |max, v| max.max(v.abs())).max(1e-30);
            let integers = block.chunks(dim).flat_map(|row| {
                let max = max(row);
                row.iter().map(move |v| ((v * (32_639.0 / max)).round_ties_even() as i16).to_le_bytes())
            });
            let scales = block.chunks(dim).flat_map(|row| (max(row) / 32_639.0).to_le_bytes());
            integers.flatten().chain(scales).collect::<Vec<u8>>()
        };
        host.bytes(&paged.chunks(PAGE * dim).flat_map(encode).collect::<Vec<_>>())
    };
    let (mut results, mut tiles, mut halves) = (Vec::new(), Vec::new(), Vec::new());
    for chunk in [tokens, 1] {
        let table = host.words(&(0..pages as u32).rev().collect::<Vec<_>>());
        let [keys, values] = [&old[0], &old[1]].map(|old| store(&mut host, old));
        let cache = KvCache { keys, values, table, recent: Default::default() };
        let norms = (host.floats(&q_norm), host.floats(&k_norm));
        let (proj, rope_table) = (host.floats(&proj), host.floats(&rope_table));
        let [y, by_tiles, by_half] = [(); 3].map(|()| host.empty(tokens * op.heads * dim * 4));
        for t in (0..tokens).step_by(chunk) {
            let rows =
                |region: moestro_compute::device::Region, width: usize| region.part(t * width * 4, chunk * width * 4);
            let (proj, at) = (rows(proj, width), start + t);
            let norm_rope = QkNormRope { q_norm: norms.0, k_norm: norms.1, rope_table: rows(rope_table, op.rope_dim) };
            let (q, partials) = (host.empty(chunk * op.heads * dim * 4), host.empty(op.partials(at, chunk) * 4));
            let [y, by_tiles, by_half] = [y, by_tiles, by_half].map(|y| rows(y, op.heads * dim));
            let (shape, start, tokens) = (&op, at, chunk);
            host.run(&KvWrite { shape, start, tokens, proj, norm_rope, q, cache }.launch());
            let attend = Attention { shape, start, tokens, q, cache, proj, partials, y };
            attend.launches(16, false).flatten().for_each(|launch| host.run(&launch));
            Attention { y: by_tiles, ..attend }.launches(16, true).flatten().for_each(|launch| host.run(&launch));
            Attention { y: by_half, ..attend }.half_launches(usize::MAX).for_each(|launch| host.run(&launch));
        }
        results.push(host.read_floats(y));
        tiles.push(host.read_floats(by_tiles));
        halves.push(host.read_floats(by_half));
    }
    let all = [&results, &tiles, &halves];
    assert!(all.iter().all(|found| found[0] == found[1]), "a row depends on other rows");

    let (mut keys, mut values) = (wide(&old[0]), wide(&old[1]));
    let mut expected = Vec::new();
    for (t, row) in wide(&proj).chunks(width).enumerate() {
        let placed = |from: usize, norm: &[f32]| -> Vec<f64> {
            let x = rms(&row[from..from + dim], &wide(norm), f64::from(op.eps));
            let mut y = x.clone();
            for j in 0..op.rope_dim / 2 {
                let at = (t * op.rope_dim / 2 + j) * 2;
                let (c, s) = (f64::from(rope_table[at]), f64::from(rope_table[at + 1]));
                y[j] = x[j] * c - x[j + op.rope_dim / 2] * s;
                y[j + op.rope_dim / 2] = x[j + op.rope_dim / 2] * c + x[j] * s;
            }
            y
        };
        for kv in 0..op.kv_heads {
            let at = (kv * op.context + start + t) * dim;
            let key = placed((2 * op.heads + kv) * dim, &k_norm);
            let value = &row[(2 * op.heads + op.kv_heads + kv) * dim..][..dim];
            let narrow = |row: &[f64]| wide(&cast(&row.iter().map(|v| *v as f32).collect::<Vec<_>>()));
            keys[at..at + dim].copy_from_slice(&narrow(&key));
            values[at..at + dim].copy_from_slice(&narrow(value));
        }
        for head in 0..op.heads {
            let q = placed(head * 2 * dim, &q_norm);
            let first = head / (op.heads / op.kv_heads) * op.context * dim;
            let score = |p: usize| -> f64 {
                q.iter().zip(&keys[first + p * dim..]).map(|(q, k)| q * k).sum::<f64>() / (dim as f64).sqrt()
            };
            let e: Vec<f64> = (0..=start + t).map(|p| score(p).exp()).collect();
            let sum: f64 = e.iter().sum();
            for i in 0..dim {
                let o: f64 = e.iter().enumerate().map(|(p, e)| e / sum * values[first + p * dim + i]).sum();
                expected.push(o * sigmoid(row[head * 2 * dim + dim + i]));
            }
        }
    }
    // A key or value halfway between two integers may round to either integer.
    let allowed = if op.format == KvFormat::I16 { 5e-5 } else { 1e-5 };
    for found in [&results[0], &tiles[0]] {
        let off = difference(found, &expected);
        assert!(off < allowed, "{op:?} from {start}: relative error {off:.1e}");
    }
    let off = difference(&halves[0], &expected);
    assert!(off < 2e-3, "in half precision {op:?} from {start}: relative error {off:.1e}");
    results.swap_remove(0)
}

fn op(heads: usize, kv_heads: usize, dim: usize, rope_dim: usize, context: usize) -> AttentionShape {
    AttentionShape { heads, kv_heads, dim, rope_dim, eps: 1e-6, context, format: KvFormat::F32, recent: None }
}

/// The errors that Metal's specification allows for `fast::exp` stay within the tolerances of every GPU.
#[test]
fn attention_tolerates_fast_exponentials() {
    let narrow = |shape| AttentionShape { format: KvFormat::I16, ..shape };
    for (shape, start) in
        [(op(8, 2, 256, 64, 40), 30), (op(2, 1, 20, 10, 8200), 8190), (narrow(op(8, 1, 256, 64, 300)), 250)]
    {
        let [exact, fast] = [Host::fast(), Host::with_exp_errors()].map(|host| attend_on(host, shape, start, 4));
        assert_ne!(exact, fast, "no exponential has an error");
    }
}

#[test]
fn attention_matches_reference() {
    attend_case(op(8, 2, 256, 64, 40), 0, 5);
    attend_case(op(8, 2, 256, 64, 40), 30, 5);
    attend_case(op(4, 1, 128, 32, 9), 6, 3);
    attend_case(op(3, 3, 20, 10, 7), 2, 1);
    attend_case(op(4, 2, 64, 16, 100), 62, 4);
    attend_case(op(6, 2, 64, 16, 150), 120, 25); // several threadgroups, across the boundary of a block of keys
    attend_case(op(2, 1, 20, 10, 8200), 8190, 4); // the split size doubles
    attend_case(AttentionShape { format: KvFormat::I16, ..op(8, 1, 256, 64, 40) }, 11, 3);
    attend_case(AttentionShape { format: KvFormat::I16, ..op(12, 1, 256, 64, 300) }, 250, 9); // two groups of heads
    attend_case(AttentionShape { format: KvFormat::I16, ..op(6, 1, 256, 64, 300) }, 252, 6); // three heads share a key
    attend_case(AttentionShape { format: KvFormat::I16, ..op(16, 1, 128, 32, 40) }, 17, 3); // two threadgroups
    attend_case(AttentionShape { format: KvFormat::I16, ..op(4, 2, 256, 64, 40) }, 30, 3);
    attend_case(AttentionShape { format: KvFormat::I16, ..op(2, 1, 64, 16, 20) }, 3, 2);
    attend_case(AttentionShape { format: KvFormat::I16, ..op(3, 3, 20, 10, 7) }, 2, 1);
}

/// Each key and value is read once for four query heads, sixteen bytes per lane at a time.
#[test]
fn keys_are_loaded_for_four_heads() {
    // Query heads of a key head; loads of a key and a value by all simdgroups, with both scales for two positions.
    for (groups, per_position) in [(8, 2.0 * 3.0), (4, 3.0), (6, 2.0 * 3.0), (16, 4.0 * 3.0)] {
        let shape = AttentionShape { format: KvFormat::I16, ..op(groups, 1, 256, 64, 512) };
        let mut host = Host::fast();
        let bytes = shape.cache_bytes();
        let [keys, values] = [(); 2].map(|()| host.bytes(&vec![0; bytes]));
        let table = host.words(&[0, 1]);
        let cache = KvCache { keys, values, table, recent: Default::default() };
        let (tokens, start) = (1, 511);
        let q = host.floats(&vec![1.0; groups * 256]);
        let proj = host.floats(&vec![0.0; shape.width()]);
        let [partials, y] = [shape.partials(start, 1) * 4, groups * 1024].map(|bytes| host.empty(bytes));
        host.twice = false;
        let op = Attention { shape: &shape, start, tokens, q, cache, proj, partials, y };
        let [splits, _] = op.launches(1, false).next().unwrap();
        host.run(&splits);
        assert_eq!(host.loads() as f64 / 512.0, per_position, "{groups} query heads");
    }
}

/// The keys and values that a device stores for rows of `proj`.
fn stored(backend: &mut dyn Backend, shape: &AttentionShape, proj: &[f32], norm: &[f32]) -> [Vec<u8>; 2] {
    let tokens = proj.len() / shape.width();
    let mut put = |bytes: Vec<u8>| {
        let region = backend.allocate(bytes.len()).unwrap();
        backend.write(region, &bytes).unwrap();
        region
    };
    let mut floats = |values: &[f32]| put(values.iter().flat_map(|value| value.to_le_bytes()).collect());
    let turn: Vec<f32> = (0..tokens * shape.rope_dim / 2).flat_map(|n| [(n as f32).cos(), (n as f32).sin()]).collect();
    let norm_rope = QkNormRope { q_norm: floats(norm), k_norm: floats(norm), rope_table: floats(&turn) };
    let (proj, q) = (floats(proj), floats(&vec![0.0; tokens * shape.heads * shape.dim]));
    let [keys, values] = [(); 2].map(|()| put(vec![0; shape.cache_bytes()]));
    let cache = KvCache { keys, values, table: put(vec![0; 4]), recent: Default::default() };
    backend.execute(&KvWrite { shape, start: 0, tokens, proj, norm_rope, q, cache }.into()).unwrap();
    [keys, values].map(|region| {
        let mut bytes = vec![0; region.len];
        backend.read(region, &mut bytes).unwrap();
        bytes
    })
}

#[test]
fn cached_rows_have_the_cpu_bytes() {
    let (tokens, dim) = (9, 256);
    let format = KvFormat::I16;
    let shape =
        AttentionShape { heads: 2, kv_heads: 2, dim, rope_dim: 64, eps: 1e-6, context: 16, format, recent: None };
    let mut random = Dice(77);
    let mut proj = random.normals(tokens * shape.width());
    // Each entry has a row and the factor for the values of its first KV head, which become zero, tiny, large or not
    // finite.
    let value = |token: usize| token * shape.width() + (2 * shape.heads + shape.kv_heads) * dim;
    for (token, factor) in [(1, 0.0), (2, 1e-36), (3, 1e30), (4, f32::INFINITY), (5, f32::NAN), (6, 1e-4)] {
        proj[value(token)..][..dim].iter_mut().for_each(|value| *value *= factor);
    }
    let norm = random.normals(dim);
    let mut cpu = Cpu::new(CpuDevice::new(1, CpuArithmetic::Integer));
    let mut gpu = GpuBackend::new(HostGpu::new(Host::start()).queue());
    let expected = stored(&mut cpu, &shape, &proj, &norm);
    let found = stored(&mut gpu, &shape, &proj, &norm);
    assert!(found[1] == expected[1], "values are stored as they are");
    // The GPU's norm and rotation add in another order than the CPU's. A key may therefore round to the next integer,
    // and a scale to the next float.
    let words = |bytes: &[u8]| bytes.as_chunks().0.iter().map(|pair| i32::from(i16::from_le_bytes(*pair))).collect();
    let [found, expected]: [Vec<i32>; 2] = [&found[0], &expected[0]].map(|bytes| words(bytes));
    let off = found.iter().zip(&expected).map(|(found, expected)| (found - expected).abs()).max();
    assert!(off <= Some(1), "keys differ by {off:?} units");
    assert!(expected.iter().any(|word| *word != 0));
}
