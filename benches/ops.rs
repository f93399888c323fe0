//! Every operation of the forward pass alone, with the shapes of a 35B-A3B: time, bytes a second, and the share of what
//! memory gives when nothing is computed.
//!
//! ```text
//! cargo bench --bench ops -- [FILTER] [--threads N] [--f32]
//! ```
//! What decode reads of weights and states is read from a fresh copy each time, of which there are so many that no cache
//! holds them all; in prefill weights are read from memory once a task and then met by many rows, so that its bytes a
//! second say little more than how many rows a second there are.

use candle_core::{DType, Device, Result, Tensor};
use criterion::{Criterion, Throughput};
use moestro::{
    device::{Compute, Filling, Math, memory_bandwidth},
    ops::{self, Assignment, Codes, DeltaHeads, ExpertView, Float, HeadNorm, Job, Rotation, Weight},
};
use std::time::{Duration, Instant};

const HIDDEN: usize = 2048;
/// Copies of what is read together take this much memory.
const SPREAD: usize = 512 << 20;
const FOUR: Codes = affine(4);

const fn affine(bits: u8) -> Codes {
    Codes::Affine { bits, group: 64, scale: Float::Bf16 }
}

struct Bench {
    criterion: Criterion,
    compute: Compute,
    filter: Option<String>,
    memory: f64,
}

impl Bench {
    fn runs(&self, name: &str) -> bool {
        self.filter.as_ref().is_none_or(|filter| name.contains(filter.as_str()))
    }

    /// Times `op`, which gets a running number and reads and writes `bytes`.
    fn time(&mut self, name: &str, bytes: usize, mut op: impl FnMut(&Compute, usize) -> Result<()>) {
        if !self.runs(name) {
            return;
        }
        let (compute, mut number, mut best) = (self.compute.clone(), 0, f64::INFINITY);
        let mut group = self.criterion.benchmark_group("ops");
        group.throughput(Throughput::Bytes(bytes as u64));
        group.bench_function(name, |bench| {
            bench.iter_custom(|count| {
                let begin = Instant::now();
                for _ in 0..count {
                    op(&compute, number).expect(name);
                    number += 1;
                }
                let took = begin.elapsed();
                best = best.min(took.as_secs_f64() / count as f64);
                took
            })
        });
        group.finish();
        let rate = bytes as f64 / best;
        println!(
            "{name}: at best {:.1} us, {:.2} GB/s, {:.0} % of memory\n",
            best * 1e6,
            rate / 1e9,
            100.0 * rate / self.memory
        );
    }

    /// One linear layer `[rows, HIDDEN]` with one and with 128 rows of activations.
    fn linear(&mut self, name: &str, codes: Codes, rows: usize) -> Result<()> {
        for (phase, tokens) in [("decode", 1), ("prefill of 128", 128)] {
            let name = format!("linear, {name}, {phase}");
            if self.runs(&name) {
                let copies = weights(&[(codes, rows, HIDDEN)]);
                let x = random(&[tokens, HIDDEN])?;
                let op = |c: &Compute, i: usize| ops::linear(c, &x, &[&copies[i % copies.len()][0]]).map(drop);
                self.time(&name, size(&copies[0]), op);
            }
        }
        Ok(())
    }

    /// Eight experts and a shared one of `[512, HIDDEN]`.
    fn experts(&mut self, tokens: usize) -> Result<()> {
        let name = format!("experts, 8 of 4 bits and one of 8, {tokens} tokens each");
        if !self.runs(&name) {
            return Ok(());
        }
        let expert = |codes| [(codes, 512, HIDDEN), (codes, 512, HIDDEN), (codes, HIDDEN, 512)];
        let shapes: Vec<_> = (0..9).flat_map(|index| expert(if index < 8 { FOUR } else { affine(8) })).collect();
        let copies = weights(&shapes);
        let (x, out) = (random(&[tokens, HIDDEN])?, random(&[9 * tokens, HIDDEN])?);
        let rows: Vec<Assignment> =
            (0..9 * tokens as u32).map(|place| Assignment { token: place % tokens as u32, place }).collect();
        self.time(&name, size(&copies[0]), |compute, number| {
            let experts = copies[number % copies.len()].chunks_exact(3).zip(rows.chunks_exact(tokens));
            let job = |(weights, rows)| {
                let [gate, up, down]: &[Weight; 3] = <&[Weight; 3]>::try_from(weights as &[Weight]).expect("three");
                Job { expert: ExpertView { gate: gate.view(), up: up.view(), down: down.view() }, rows }
            };
            ops::experts(compute, &x, &experts.map(job).collect::<Vec<_>>(), &out)
        });
        Ok(())
    }

    /// 16 query heads and 2 key heads of 256 at the end of a context.
    fn attend(&mut self, context: usize, tokens: usize) -> Result<()> {
        let name = format!("attend, {tokens} queries at {context}");
        if !self.runs(&name) {
            return Ok(());
        }
        let (kind, width) = ops::cache_row(self.compute.math, 256);
        let bytes = 2 * context * 2 * width * kind.size_in_bytes();
        let caches: Vec<[Tensor; 2]> = (0..(SPREAD / bytes).clamp(1, 64))
            .map(|_| {
                let caches = [0, 1].map(|_| Tensor::zeros((2, context, width), kind, &Device::Cpu));
                let [keys, values] = caches;
                let (keys, values, rows) = (keys?, values?, random(&[256, 2 * 256])?);
                for at in (0..context).step_by(256) {
                    ops::remember(&keys, &rows, at, None)?;
                    ops::remember(&values, &rows, at, None)?;
                }
                Ok([keys, values])
            })
            .collect::<Result<_>>()?;
        let q = random(&[tokens, 16, 256])?;
        self.time(&name, bytes, |compute, number| {
            let [keys, values] = &caches[number % caches.len()];
            ops::attend(compute, &q, keys, values, context - tokens).map(drop)
        });
        Ok(())
    }

    /// What a delta layer does between its projections: 16 key heads, 32 value heads of 128.
    fn delta(&mut self, tokens: usize) -> Result<()> {
        let heads = DeltaHeads {
            key_heads: 16,
            value_heads: 32,
            key_dim: 128,
            value_dim: 128,
            decay: vec![-1.0; 32],
            dt_bias: vec![0.5; 32],
        };
        let (mixed, gates, o) = (random(&[tokens, 8192])?, random(&[tokens, 64])?, random(&[32, tokens, 128])?);
        let state_bytes = 4 * 32 * 128 * 128;
        let states: Vec<Tensor> = (0..SPREAD / state_bytes).map(|_| random(&[32, 128, 128])).collect::<Result<_>>()?;
        self.time(&format!("delta rule, {tokens} tokens"), 2 * state_bytes, |compute, number| {
            ops::delta_rule(compute, &heads, &mixed, &gates, &states[number % states.len()]).map(drop)
        });
        let (taps, samples) = (random(&[4, 8192])?, random(&[3, 8192])?);
        self.time(&format!("conv, {tokens} tokens"), 4 * 8192 * (2 * tokens + 10), |compute, _| {
            ops::conv(compute, &mixed, &taps, &samples).map(drop)
        });
        let (z, norm) = (random(&[tokens, 4096])?, random(&[128])?);
        self.time(&format!("gated norm, {tokens} tokens"), 3 * 4 * 4096 * tokens, |compute, _| {
            ops::gated_norm(compute, &o, &z, &norm, 1e-6).map(drop)
        });
        Ok(())
    }

    /// The small ones.
    fn rest(&mut self, tokens: usize) -> Result<()> {
        let (x, norm) = (random(&[tokens, HIDDEN])?, random(&[HIDDEN])?);
        self.time(&format!("norm, {tokens} tokens"), 2 * 4 * HIDDEN * tokens, |compute, _| {
            ops::rms_norm(compute, &x, &norm, 1e-6).map(drop)
        });
        let (projected, weight) = (random(&[tokens, 16 * 512])?, vec![1.0; 256]);
        let norm = HeadNorm { weight: &weight, eps: 1e-6 };
        self.time(&format!("rope, {tokens} tokens"), 2 * 4 * 4096 * tokens, |compute, _| {
            let rotation = Rotation::new(1000, tokens, 64, 1e7);
            ops::queries(compute, &projected, norm, &rotation).map(drop)
        });
        let (o, logits) = (random(&[tokens, 4096])?, random(&[tokens, 256])?);
        self.time(&format!("gate, {tokens} tokens"), 4 * 3 * 4096 * tokens, |compute, _| {
            ops::gate(compute, &o, &projected, 256).map(drop)
        });
        self.time(&format!("route, {tokens} tokens"), 4 * 256 * tokens, |_, _| ops::route(&logits, 8, true).map(drop));
        let (out, weights_of) = (random(&[9 * tokens, HIDDEN])?, vec![0.125; 8 * tokens]);
        let (shared, gates) = (out.narrow(0, 8 * tokens, tokens)?, random(&[tokens])?);
        self.time(&format!("combine, {tokens} tokens"), 4 * 10 * HIDDEN * tokens, |compute, _| {
            ops::combine(compute, &out, &weights_of, 8, Some((&shared, &gates))).map(drop)
        });
        let table = weights(&[(FOUR, 150_000, HIDDEN)]);
        let ids: Vec<u32> = (0..tokens as u32).map(|index| index * 7919 % 150_000).collect();
        self.time(&format!("embed, {tokens} tokens"), tokens * HIDDEN * 9 / 2, |_, _| {
            ops::embed(&table[0][0], &ids, &Device::Cpu).map(drop)
        });
        Ok(())
    }
}

fn random(shape: &[usize]) -> Result<Tensor> {
    Tensor::randn(0f32, 1.0, shape, &Device::Cpu)?.to_dtype(DType::F32)
}

/// As many copies of these weights as [`SPREAD`] holds. Scales and biases are small, codes anything.
fn weights(shapes: &[(Codes, usize, usize)]) -> Vec<Vec<Weight>> {
    let bytes: usize =
        shapes.iter().map(|(codes, rows, cols)| codes.row_bytes(*cols).iter().sum::<usize>() * rows).sum();
    let copies = (SPREAD / bytes).max(1);
    let mut slab = Filling::new(copies * (bytes + shapes.len() * 3 * 64)).expect("memory");
    let mut word = 1u64;
    let mut fill = |len: usize, part: usize, float: bool| {
        let filled = slab.fill(len, 64, |bytes| {
            for bytes in bytes.chunks_mut(8) {
                word = word.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                // 0x3c3c is 0.011 as bf16; a dense weight's exponents must not be anything either.
                let value = if part > 0 || float { 0x3c3c_3c3c_3c3c_3c3c ^ word >> 63 } else { word ^ word >> 32 };
                bytes.copy_from_slice(&value.to_le_bytes()[..bytes.len()]);
            }
            Ok::<_, std::io::Error>(())
        });
        filled.expect("memory")
    };
    (0..copies)
        .map(|_| {
            let weight = |&(codes, rows, cols): &(Codes, usize, usize)| {
                let sizes = codes.row_bytes(cols);
                let parts = [0, 1, 2].map(|part| fill(sizes[part] * rows, part, matches!(codes, Codes::Dense(_))));
                Weight { codes, rows, cols, gain: 1.0, parts }
            };
            shapes.iter().map(weight).collect()
        })
        .collect()
}

fn size(weights: &[Weight]) -> usize {
    weights.iter().flat_map(|weight| &weight.parts).map(|part| part.len()).sum()
}

fn main() -> Result<()> {
    let mut args = std::env::args().skip(1).filter(|arg| arg != "--bench");
    let (mut threads, mut filter, mut math) = (moestro::platform::os::physical_cores(), None, Math::Integer);
    while let Some(arg) = args.next() {
        match arg.as_str() {
            "--threads" => threads = args.next().and_then(|text| text.parse().ok()).expect("a number of threads"),
            "--f32" => math = Math::F32,
            _ => filter = Some(arg),
        }
    }
    let memory = memory_bandwidth(threads, 1 << 30, Duration::from_millis(500)).expect("memory");
    println!("{threads} threads read {:.1} GB/s of memory\n", memory / 1e9);
    let criterion = Criterion::default().sample_size(20).warm_up_time(Duration::from_millis(300));
    let criterion = criterion.measurement_time(Duration::from_secs(1)).without_plots();
    let mut bench = Bench { criterion, compute: Compute::cpu(threads, math), filter, memory };
    for (name, codes) in [("4 bits", FOUR), ("8 bits", affine(8)), ("3 bits", affine(3)), ("mxfp4", Codes::Mxfp4)] {
        bench.linear(name, codes, 8192)?;
    }
    bench.linear("bf16", Codes::Dense(Float::Bf16), 256)?;
    bench.experts(1)?;
    bench.experts(32)?;
    bench.attend(1024, 1)?;
    bench.attend(32_768, 1)?;
    bench.attend(4096, 128)?;
    for tokens in [1, 128] {
        bench.delta(tokens)?;
        bench.rest(tokens)?;
    }
    Ok(())
}
