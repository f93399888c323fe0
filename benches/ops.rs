//! Benchmarks each operation of the forward pass separately, with the shapes of a 35B-A3B: time, bytes per second, and
//! the fraction of the memory bandwidth.
//!
//! ```text
//! cargo bench --bench ops -- [FILTER] [--threads N] [--f32]
//! ```
//! `attend pairs` compares attention over 8 and 4 bits with 16 bits, alternately. On Linux it measures CPU time, on
//! which other processes have little influence.
//!
//! Decode cases read weights and states from another copy each time. There are more copies than any cache can hold. In
//! prefill cases, a task reads weights from memory once and multiplies them with many rows, so their bytes per second
//! mostly show the number of rows per second.

use criterion::{Criterion, Throughput};
use moestro_compute::{
    device::{CpuArithmetic, CpuDevice, DeviceError, Region, memory_bandwidth},
    ops::{
        Attention, AttentionShape, Backend, CombineExperts, Conv, Cpu, Decay, DeltaRule, DeltaShape, Embedding,
        ExpertGroup, ExpertSet, ExpertSlots, ExpertStack, Experts, Float, KvBits, KvCache, KvWrite, Linear, MoeBuffers,
        MoeWeights, Norm, Op, QkNormRope, RecentRing, Replay, Router, SharedExpert, Weight, WeightFormat,
    },
};
use std::time::{Duration, Instant};

type Result<T> = std::result::Result<T, DeviceError>;

const HIDDEN: usize = 2048;
/// Total memory of all copies of one operand.
const SPREAD: usize = 512 << 20;
const FOUR: WeightFormat = affine(4);

const fn affine(bits: u8) -> WeightFormat {
    WeightFormat::Affine { bits, group: 64, scale: Float::Bf16 }
}

struct Bench {
    criterion: Criterion,
    compute: CpuDevice,
    filter: Option<String>,
    memory: f64,
}

/// A CPU device with buffers of random floats and weights. Codes are arbitrary, scales and biases are small.
struct Lab {
    cpu: Cpu,
    word: u64,
}

impl Lab {
    fn fill(&mut self, bytes: usize, value: impl Fn(u64) -> u64) -> Result<Region> {
        let region = self.cpu.allocate(bytes)?;
        let mut next = || {
            self.word = self.word.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            value(self.word)
        };
        let words: Vec<u8> = (0..bytes.div_ceil(8)).flat_map(|_| next().to_le_bytes()).collect();
        self.cpu.write(region, &words[..bytes])?;
        Ok(region)
    }

    /// Floats with a random sign and a magnitude of 1 to 2.
    fn floats(&mut self, count: usize) -> Result<Region> {
        self.fill(count * 4, |word| (word & 0x807f_ffff_807f_ffff) | 0x3f80_0000_3f80_0000)
    }

    fn buffer(&mut self, count: usize) -> Result<Region> {
        self.cpu.allocate(count * 4)
    }

    fn weight(&mut self, codes: WeightFormat, rows: usize, cols: usize) -> Result<Weight> {
        let mut parts = [Region::default(); 3];
        for (index, (part, len)) in parts.iter_mut().zip(codes.row_bytes(cols)).enumerate() {
            // 0x3c3c is 0.011 as bf16. Dense weights are also small, because arbitrary bits would give extreme
            // exponents.
            let small = index > 0 || matches!(codes, WeightFormat::Dense(_));
            let value = move |word: u64| if small { 0x3c3c_3c3c_3c3c_3c3c ^ word >> 63 } else { word ^ word >> 32 };
            *part = self.fill(len * rows, value)?;
        }
        Ok(Weight { codes, rows, cols, global_scale: 1.0, parts })
    }

    fn mixture(&mut self, k: usize, experts: usize, stacks: [ExpertStack; 3]) -> Result<MoeWeights> {
        let shared = SharedExpert {
            gate_up: [self.weight(affine(8), 512, HIDDEN)?, self.weight(affine(8), 512, HIDDEN)?],
            down: self.weight(affine(8), HIDDEN, 512)?,
            result: self.weight(affine(8), 1, HIDDEN)?,
        };
        let router = self.weight(affine(8), experts, HIDDEN)?;
        Ok(MoeWeights { k, renormalise: true, router, shared: Some(shared), stacks })
    }

    fn mixture_buffers(&mut self, layer: &MoeWeights, tokens: usize) -> Result<MoeBuffers> {
        let places = tokens * (layer.k + 1);
        Ok(MoeBuffers {
            scores: self.floats(tokens * layer.width())?,
            weights: self.floats(places)?,
            act: self.buffer(places * layer.row())?,
            out: self.floats(places * HIDDEN)?,
            ..MoeBuffers::default()
        })
    }
}

/// Full contexts of keys and values, and queries at their end.
struct Caches {
    shape: AttentionShape,
    proj: Region,
    q: Region,
    y: Region,
    tokens: usize,
    caches: Vec<KvCache>,
}

impl Caches {
    fn new(lab: &mut Lab, context: usize, tokens: usize, bits: KvBits) -> Result<Self> {
        let own = lab.cpu.limits().kv_format;
        let format = bits.format().unwrap_or(own);
        let recent = bits.format().map(|_| RecentRing { capacity: 512, format: own });
        let shape =
            AttentionShape { heads: 16, kv_heads: 2, dim: 256, rope_dim: 64, eps: 1e-6, context, format, recent };
        let (proj, q) = (lab.floats(256 * shape.width())?, lab.buffer(256 * 16 * 256)?);
        let rope = QkNormRope { q_norm: lab.floats(256)?, k_norm: lab.floats(256)?, rope_table: lab.floats(256 * 64)? };
        let bytes = 2 * shape.cache_bytes();
        let mut caches = Vec::new();
        for _ in 0..(SPREAD / bytes).clamp(1, 64) {
            let ring = shape.recent_bytes();
            let recent = if ring > 0 { [lab.cpu.allocate(ring)?, lab.cpu.allocate(ring)?] } else { Default::default() };
            let table = lab.cpu.allocate(shape.pages() * 4)?;
            lab.cpu.write_words(table, &(0..shape.pages() as u32).collect::<Vec<_>>())?;
            let [keys, values] = [lab.cpu.allocate(bytes / 2)?, lab.cpu.allocate(bytes / 2)?];
            let cache = KvCache { keys, values, table, recent };
            for start in (0..context).step_by(256) {
                lab.cpu
                    .execute(&KvWrite { shape: &shape, start, tokens: 256, proj, norm_rope: rope, q, cache }.into())?;
            }
            caches.push(cache);
        }
        let y = lab.buffer(tokens * 16 * 256)?;
        Ok(Self { shape, proj, q, y, tokens, caches })
    }

    fn op(&self, number: usize) -> Attention<'_> {
        let Self { shape, proj, q, y, tokens, .. } = self;
        let (start, cache) = (shape.context - tokens, self.caches[number % self.caches.len()]);
        Attention { shape, start, tokens: *tokens, q: *q, cache, proj: *proj, partials: Region::default(), y: *y }
    }
}

/// CPU time of all threads so far. On other systems than Linux, wall-clock time.
fn spent() -> Duration {
    // The kernel adds a thread's time since the last clock tick only when the thread yields.
    std::thread::yield_now();
    let of = |task: std::io::Result<std::fs::DirEntry>| {
        let text = std::fs::read_to_string(task.ok()?.path().join("schedstat")).ok()?;
        text.split_whitespace().next()?.parse::<u64>().ok()
    };
    let tasks = std::fs::read_dir("/proc/self/task").ok();
    let nanoseconds = tasks.and_then(|tasks| tasks.map(of).sum::<Option<u64>>());
    static BEGIN: std::sync::OnceLock<Instant> = std::sync::OnceLock::new();
    nanoseconds.map_or_else(|| BEGIN.get_or_init(Instant::now).elapsed(), Duration::from_nanos)
}

impl Bench {
    fn runs(&self, name: &str) -> bool {
        self.filter.as_ref().is_none_or(|filter| name.contains(filter.as_str()))
    }

    fn lab(&self) -> Lab {
        Lab { cpu: Cpu::new(self.compute.clone()), word: 1 }
    }

    /// Times the operations that `op` makes from a counter. `bytes` is the number of bytes that one operation reads and
    /// writes in total. Before each operation, the cached quantization of `x` is discarded.
    fn time<'o>(&mut self, name: &str, bytes: usize, cpu: &mut Cpu, x: Region, op: impl Fn(usize) -> Op<'o>) {
        let (mut number, mut best, keep) = (0, f64::INFINITY, [0; 4]);
        let mut group = self.criterion.benchmark_group("ops");
        group.throughput(Throughput::Bytes(bytes as u64));
        group.bench_function(name, |bench| {
            bench.iter_custom(|count| {
                let begin = Instant::now();
                for _ in 0..count {
                    let mut first = keep;
                    cpu.read(x.first(4), &mut first).and_then(|()| cpu.write(x.first(4), &first)).expect(name);
                    cpu.execute(&op(number)).expect(name);
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
            "{name}: best {:.1} us, {:.2} GB/s, {:.0} % of memory\n",
            best * 1e6,
            rate / 1e9,
            100.0 * rate / self.memory
        );
    }

    /// One linear layer `[rows, HIDDEN]` with one and with 128 rows of activations.
    fn linear(&mut self, name: &str, codes: WeightFormat, rows: usize) -> Result<()> {
        for (phase, tokens) in [("decode", 1), ("prefill of 128", 128)] {
            let name = format!("linear, {name}, {phase}");
            if self.runs(&name) {
                let mut lab = self.lab();
                let size = codes.row_bytes(HIDDEN).iter().sum::<usize>() * rows;
                let copies = (0..(SPREAD / size).max(1)).map(|_| lab.weight(codes, rows, HIDDEN));
                let copies: Vec<Weight> = copies.collect::<Result<_>>()?;
                let (x, y) = (lab.floats(tokens * HIDDEN)?, lab.buffer(tokens * rows)?);
                self.time(&name, size, &mut lab.cpu, x, |number| {
                    let matrices = std::slice::from_ref(&copies[number % copies.len()]);
                    Linear { x, tokens, norm: None, matrices, y, add: false }.into()
                });
            }
        }
        Ok(())
    }

    /// Eight experts and a shared expert of `[512, HIDDEN]`.
    fn experts(&mut self, tokens: usize) -> Result<()> {
        let name = format!("experts, 8 of 4 bits and one of 8, {tokens} tokens each");
        if !self.runs(&name) {
            return Ok(());
        }
        let mut lab = self.lab();
        let mut stride = 0;
        let stacks = [(512, HIDDEN), (512, HIDDEN), (HIDDEN, 512)].map(|(rows, cols)| {
            let at = FOUR.row_bytes(cols).map(|bytes| {
                stride += bytes * rows;
                stride - bytes * rows
            });
            ExpertStack { codes: FOUR, rows, cols, global_scales: vec![1.0; 8], at: vec![at; 8] }
        });
        let layer = lab.mixture(8, 8, stacks)?;
        let copies = SPREAD / (8 * stride);
        let small = |word: u64| 0x3c3c_3c3c_3c3c_3c3c ^ word >> 63;
        let segments = vec![lab.fill(copies * 8 * stride, small)?];
        let slots = ExpertSlots { segments, table: Region::default(), per_segment: usize::MAX, stride };
        let (x, buffers) = (lab.floats(tokens * HIDDEN)?, lab.mixture_buffers(&layer, tokens)?);
        let places: Vec<u32> = (0..8).flat_map(|rank| (0..tokens as u32).map(move |token| token * 8 + rank)).collect();
        let count = tokens as u32;
        let groups =
            |copy: u32| (0..8).map(move |e| ExpertGroup { expert: e, slot: copy * 8 + e, first: e * count, count });
        let groups: Vec<Vec<ExpertGroup>> = (0..copies as u32).map(|copy| groups(copy).collect()).collect();
        self.time(&name, 8 * stride + layer.shared.map_or(0, |s| s.down.bytes() * 3), &mut lab.cpu, x, |number| {
            let groups = &groups[number % copies];
            let set = ExpertSet::Loaded { groups, assignments: &places, shared: true, per_assignment: None };
            Experts { layer: &layer, slots: &slots, tokens, x, buffers, experts: set }.into()
        });
        Ok(())
    }

    /// 16 query heads and 2 key heads of 256 at the end of a context.
    fn attend(&mut self, context: usize, tokens: usize, bits: KvBits) -> Result<()> {
        let name = format!("attend, {tokens} queries at {context}, {bits:?} bits");
        if !self.runs(&name) {
            return Ok(());
        }
        let mut lab = self.lab();
        let caches = Caches::new(&mut lab, context, tokens, bits)?;
        self.time(&name, 2 * caches.shape.cache_bytes(), &mut lab.cpu, caches.y, |number| caches.op(number).into());
        Ok(())
    }

    /// Attention with each number of bits, alternately. Prints the medians, and the median ratio of the time with 16
    /// bits to that with fewer bits.
    fn pairs(&mut self, context: usize) -> Result<()> {
        let name = format!("attend pairs, 1 query at {context}");
        if !self.runs(&name) {
            return Ok(());
        }
        let all = [KvBits::Sixteen, KvBits::Eight, KvBits::Four];
        let mut lab = self.lab();
        let mut caches = Vec::new();
        for bits in all {
            caches.push(Caches::new(&mut lab, context, 1, bits)?);
        }
        let (mut rounds, each) = (Vec::new(), 16 * 32_768 / context);
        for round in 0..25 {
            let mut took = [0.0; 3];
            for (caches, took) in caches.iter().zip(&mut took) {
                let begin = spent();
                for number in 0..each {
                    lab.cpu.execute(&caches.op(round * each + number).into())?;
                }
                *took = (spent() - begin).as_secs_f64() / each as f64;
            }
            rounds.push(took);
        }
        let median = |of: &dyn Fn(&[f64; 3]) -> f64| {
            let mut values: Vec<f64> = rounds.iter().map(of).collect();
            values.sort_by(f64::total_cmp);
            values[values.len() / 2]
        };
        for (index, bits) in all.iter().enumerate() {
            let (time, ratio) = (median(&|round| round[index]), median(&|round| round[0] / round[index]));
            println!("{name}, {bits:?} bits: {:.1} us, 16 bits take {ratio:.3} times this", time * 1e6);
        }
        println!();
        Ok(())
    }

    /// A delta-net layer without its projections: 16 key heads, 32 value heads of 128.
    fn delta(&mut self, tokens: usize) -> Result<()> {
        let shape = DeltaShape {
            key_heads: 16,
            value_heads: 32,
            key_dim: 128,
            value_dim: 128,
            conv_width: 4,
            eps: 1e-6,
            gate: Default::default(),
        };
        let mut lab = self.lab();
        let (channels, values) = (shape.channels(), shape.values());
        let (proj, none) = (lab.floats(tokens * shape.width())?, Replay::default());
        let (taps, samples, mixed) =
            (lab.floats(4 * channels)?, lab.floats(3 * channels)?, lab.buffer(tokens * channels)?);
        self.time(&format!("conv, {tokens} tokens"), 4 * channels * (2 * tokens + 10), &mut lab.cpu, mixed, |_| {
            Conv {
                shape: &shape,
                tokens,
                proj,
                weight: taps,
                replay: none,
                committed: tokens,
                state: samples,
                out: mixed,
            }
            .into()
        });
        let decay = Decay { rate: lab.floats(32)?, dt_bias: lab.floats(32)? };
        let (norm, out, y) = (lab.floats(128)?, lab.buffer(tokens * values)?, lab.buffer(tokens * values)?);
        let bytes = 4 * values * 128;
        let states: Vec<Region> = (0..SPREAD / bytes).map(|_| lab.buffer(values * 128)).collect::<Result<_>>()?;
        self.time(&format!("delta rule, {tokens} tokens"), 2 * bytes, &mut lab.cpu, y, |number| {
            let state = states[number % states.len()];
            let (shape, replay, committed) = (&shape, none, tokens);
            DeltaRule { shape, tokens, proj, mixed, decay, replay, committed, state, norm, out, y }.into()
        });
        // The cost of a replay: adds `tokens` accepted rows to the state without computing their outputs, then computes
        // one new row.
        let replay = Replay { rows: tokens, proj, mixed };
        self.time(
            &format!("delta rule, one token after {tokens} accepted ones"),
            2 * bytes,
            &mut lab.cpu,
            y,
            |number| {
                let state = states[number % states.len()];
                let (shape, tokens, committed) = (&shape, 1, replay.rows + 1);
                let [proj, mixed] = [proj.floats(shape.width()), mixed.floats(channels)];
                DeltaRule { shape, tokens, proj, mixed, decay, replay, committed, state, norm, out, y }.into()
            },
        );
        Ok(())
    }

    /// Operations that take little time: norm and router, sum of the experts' results, embedding.
    fn rest(&mut self, tokens: usize) -> Result<()> {
        let mut lab = self.lab();
        let layer = lab.mixture(8, 256, Default::default())?;
        let (x, h, keep) = (lab.floats(tokens * HIDDEN)?, lab.floats(tokens * HIDDEN)?, lab.buffer(tokens * HIDDEN)?);
        let buffers = lab.mixture_buffers(&layer, tokens)?;
        let [ids, slots] = [lab.buffer(tokens * 8)?, lab.buffer(tokens * 8)?];
        let norm = Some(Norm { weight: lab.floats(HIDDEN)?, eps: 1e-6, keep: Some(keep) });
        let (scores, weights, table) = (buffers.scores, buffers.weights, Region::default());
        self.time(&format!("norm and route, {tokens} tokens"), layer.router.bytes(), &mut lab.cpu, x, |_| {
            Router { layer: &layer, tokens, x, norm, skip_shared: false, table, scores, ids, slots, weights }.into()
        });
        let none = ExpertSlots::default();
        self.time(&format!("combine, {tokens} tokens"), 4 * 10 * HIDDEN * tokens, &mut lab.cpu, x, |_| {
            CombineExperts { layer: &layer, slots: &none, tokens, buffers, per_assignment: None, h }.into()
        });
        let table = lab.weight(FOUR, 150_000, HIDDEN)?;
        let numbers: Vec<u32> = (0..tokens as u32).map(|index| index * 7919 % 150_000).collect();
        lab.cpu.write_words(ids, &numbers)?;
        self.time(&format!("embed, {tokens} tokens"), tokens * HIDDEN * 9 / 2, &mut lab.cpu, x, |_| {
            Embedding { table: &table, tokens, ids, into: h }.into()
        });
        Ok(())
    }
}

fn main() -> Result<()> {
    let mut args = std::env::args().skip(1).filter(|arg| arg != "--bench");
    let (mut threads, mut filter, mut math) =
        (moestro_base::platform::os::physical_cores(), None, CpuArithmetic::Integer);
    while let Some(arg) = args.next() {
        match arg.as_str() {
            "--threads" => threads = args.next().and_then(|text| text.parse().ok()).expect("--threads needs a number"),
            "--f32" => math = CpuArithmetic::F32,
            _ => filter = Some(arg),
        }
    }
    let memory = memory_bandwidth(threads, 1 << 30, Duration::from_millis(500))
        .expect("the memory benchmark allocates its buffer");
    println!("{threads} threads read {:.1} GB/s of memory\n", memory / 1e9);
    let criterion = Criterion::default().sample_size(20).warm_up_time(Duration::from_millis(300));
    let criterion = criterion.measurement_time(Duration::from_secs(1)).without_plots();
    let mut bench = Bench { criterion, compute: CpuDevice::new(threads, math), filter, memory };
    for (name, codes) in
        [("4 bits", FOUR), ("8 bits", affine(8)), ("3 bits", affine(3)), ("mxfp4", WeightFormat::Mxfp4)]
    {
        bench.linear(name, codes, 8192)?;
    }
    bench.linear("bf16", WeightFormat::Dense(Float::Bf16), 256)?;
    bench.experts(1)?;
    bench.experts(32)?;
    for bits in [KvBits::Sixteen, KvBits::Eight, KvBits::Four] {
        bench.attend(1024, 1, bits)?;
        bench.attend(32_768, 1, bits)?;
        bench.attend(4096, 128, bits)?;
    }
    bench.pairs(1024)?;
    bench.pairs(32_768)?;
    for tokens in [1, 128] {
        bench.delta(tokens)?;
        bench.rest(tokens)?;
    }
    Ok(())
}
