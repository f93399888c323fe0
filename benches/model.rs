//! Benchmarks a whole model on random tokens, as llama-bench does: prefill, and decode at several context depths in
//! turn.
//!
//! ```text
//! cargo bench --bench model -- MODEL [--depths 1024,32768] [--kv-bits 16,8] [--tokens 16] [--rounds 5] [--threads N]
//!     [--gpu] [--f32] [--wait] [--blank] [--turns] [--checkpoints] [--passes 2,4,8 [--likeliest]]
//! ```
//!
//! Each depth gets a prompt of that many tokens, then `--tokens` more in every round.
//!
//! | option | effect |
//! |---|---|
//! | `--f32` | quantize nothing that the checkpoint has not quantized |
//! | `--wait` | start the rounds on a line on standard input: filling a context takes minutes, measuring seconds |
//! | `--blank` | use contexts of zeros instead of computed ones |
//! | `--turns` | each round waits for a line on standard input and prints `turn`, so that two builds can alternate |
//! | `--checkpoints` | take a snapshot after each round's tokens while the previous one exists, as decoding does |
//! | `--passes` | measure only passes of one row and of these row counts, alternating; one row of each is accepted |
//! | `--likeliest` | passes of several rows return likeliest tokens, as at temperature 0, instead of logits |
//!
//! Prints CSV:
//!
//! ```text
//! weights,<bytes per token>
//! prefill,<from>,<to>,<tok/s>                 between powers of two and for the whole prompt
//! decode,<round>,<depth>,<bits>,<tok/s>,<slowdown against first depth and bits>,<same in CPU time>,<CPU ms per token>
//! checkpoint,<round>,<depth>,<bits>,<ms>,<share of a token's time>
//! pass,<depth>,<bits>,<rows>,<ms>,<ratio to one row>
//! ```
//! and the medians over all rounds.

use moestro::command::device_choice::DeviceChoice;
use moestro_base::metrics::Metrics;
use moestro_compute::{
    device::{self, CpuArithmetic},
    ops::KvBits,
};
use moestro_model::{
    model::{LoadOptions, Model, PAGE, PassHooks, Qwen, QwenState, Rows, SequenceState, Snapshot},
    plan::PlanOptions,
};
use std::{io::BufRead, path::Path, sync::Arc, time::Instant};

struct Bench {
    model: Qwen,
    seed: u64,
    likeliest: bool,
}

impl Bench {
    fn token(&mut self) -> u32 {
        self.seed = self.seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        ((self.seed >> 33) % self.model.info().vocab as u64) as u32
    }

    /// A sequence of `tokens` random tokens.
    fn fill(&mut self, tokens: usize) -> QwenState {
        let mut state = self.model.start().expect("a state");
        let (begin, mut since, mut from) = (Instant::now(), Instant::now(), 0);
        let report = |from: usize, to: usize, since: Instant| {
            println!("prefill,{from},{to},{:.2}", (to - from) as f64 / since.elapsed().as_secs_f64());
        };
        while state.len < tokens {
            let count = self.model.info().chunk.min(tokens - state.len);
            let ids: Vec<u32> = (0..count).map(|_| self.token()).collect();
            let rows = if state.len + count == tokens { Rows::Last } else { Rows::None };
            self.model.forward(&mut state, &ids, rows).expect("a chunk");
            if state.len >= (2 * from).max(1024) && state.len < tokens {
                report(from, state.len, since);
                (since, from) = (Instant::now(), state.len);
            }
        }
        report(0, tokens, begin);
        state
    }

    /// A sequence of `tokens` tokens whose keys and values are all zero bytes.
    fn blank(&mut self, tokens: usize) -> QwenState {
        let mut state = self.model.start().expect("a state");
        self.model.forward(&mut state, &[1], Rows::None).expect("a token");
        let kept = self.model.snapshot(&mut state).expect("a checkpoint");
        let page = |rows: usize| Arc::new(vec![0; rows * self.model.kv_bytes() as usize].into());
        let pages = (0..tokens).step_by(PAGE).map(|first| page(PAGE.min(tokens - first))).collect();
        self.model.restore(&Snapshot { len: tokens, pages, ..kept }, Some(state)).expect("a state")
    }

    /// Mean seconds of `passes` passes of `rows` rows. One row of each is accepted, as when a whole draft is wrong.
    fn pass(&mut self, state: &mut QwenState, rows: usize, passes: usize) -> f64 {
        let mut spent = 0.0;
        for _ in 0..passes {
            let ids: Vec<u32> = (0..rows).map(|_| self.token()).collect();
            let begin = Instant::now();
            if rows == 1 {
                self.model.forward(state, &ids, Rows::Last).expect("a token");
            } else {
                // At temperature 0, the engine needs only the likeliest token after each row.
                let likeliest_below = self.likeliest.then_some(self.model.info().vocab);
                let mut hooks = PassHooks { likeliest_below, ..PassHooks::default() };
                self.model.forward_with(state, &ids, Rows::Verify, &mut hooks).expect("rows");
                state.reject(rows - 1).expect("rows to take back");
            }
            spent += begin.elapsed().as_secs_f64();
        }
        spent / passes as f64
    }

    /// Wall-clock and CPU seconds per token over `tokens` tokens.
    fn decode(&mut self, state: &mut QwenState, tokens: usize) -> [f64; 2] {
        let (begin, spent) = (Instant::now(), cpu_seconds());
        for _ in 0..tokens {
            let token = self.token();
            self.model.forward(state, &[token], Rows::Last).expect("a token");
        }
        [begin.elapsed().as_secs_f64(), cpu_seconds() - spent].map(|time| time / tokens as f64)
    }
}

/// CPU seconds of this process so far.
fn cpu_seconds() -> f64 {
    let mut usage = std::mem::MaybeUninit::<libc::rusage>::zeroed();
    // SAFETY: the pointer is to a local `rusage`, for which all-zero bytes are valid.
    let usage = unsafe {
        libc::getrusage(libc::RUSAGE_SELF, usage.as_mut_ptr());
        usage.assume_init()
    };
    [usage.ru_utime, usage.ru_stime].iter().map(|time| time.tv_sec as f64 + time.tv_usec as f64 / 1e6).sum()
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn main() {
    let args: Vec<String> = std::env::args().skip(1).filter(|arg| arg != "--bench").collect();
    let Some(dir) = args.first() else {
        println!("model: no model given, nothing measured");
        return;
    };
    let flag = |name: &str| args.iter().position(|arg| arg == name).and_then(|at| args.get(at + 1)).map(String::as_str);
    let number = |name: &str, default: usize| flag(name).map_or(default, |text| text.parse().expect("a number"));
    let depths = flag("--depths").unwrap_or("1024,32768").split(',');
    let depths: Vec<usize> = depths.map(|text| text.parse().expect("a depth")).collect();
    let bits: Vec<(&str, KvBits)> = flag("--kv-bits")
        .unwrap_or("16")
        .split(',')
        .map(|text| match text {
            "16" => (text, KvBits::Sixteen),
            "8" => (text, KvBits::Eight),
            "4" => (text, KvBits::Four),
            _ => panic!("bits"),
        })
        .collect();
    let (tokens, rounds) = (number("--tokens", 16).max(1), number("--rounds", 5).max(1));
    let widths = flag("--passes").unwrap_or_default().split(',').filter(|text| !text.is_empty());
    let widths: Vec<usize> = std::iter::once(1).chain(widths.map(|text| text.parse().expect("rows"))).collect();
    // The context must be large enough for the sum of all depths.
    let context = depths.iter().map(|depth| depth + widths.len() * tokens * (rounds + 1) + PAGE).sum::<usize>();
    let on_gpu = args.iter().any(|arg| arg == "--gpu");
    let chosen = DeviceChoice::of(if on_gpu { device::open_gpu() } else { Ok(None) }, on_gpu).expect("a GPU");
    let options = LoadOptions {
        gpu: chosen.working_set(),
        threads: flag("--threads").map(|text| text.parse().expect("threads")),
        math: if args.iter().any(|arg| arg == "--f32") { CpuArithmetic::F32 } else { CpuArithmetic::Integer },
        plan: PlanOptions { context: Some(context), ..PlanOptions::default() },
        verify: widths.len() > 1,
        ..LoadOptions::default()
    };
    let metrics = Metrics::new("bench", "cpu");
    let model = Qwen::load(Path::new(dir), &options, &metrics, &mut |_, _| ()).expect("the model loads");
    let model = chosen.place(model).expect("a model for this device");
    let footprint = model.footprint();
    let experts = (footprint.layers * footprint.experts_per_token) as u64 * footprint.expert;
    println!("weights,{}", footprint.trunk - footprint.gathered + experts);
    let mut bench = Bench { model, seed: 1, likeliest: args.iter().any(|arg| arg == "--likeliest") };
    let each = depths.iter().flat_map(|depth| bits.iter().map(move |bits| (*depth, *bits)));
    let mut states: Vec<(usize, (&str, KvBits), QwenState)> = Vec::new();
    for (depth, bits) in each {
        bench.model.set_kv_bits(bits.1).expect("a KV cache with these bits");
        let state = if args.iter().any(|arg| arg == "--blank") { bench.blank(depth) } else { bench.fill(depth) };
        states.push((depth, bits, state));
    }
    let wait = |told: &str| {
        println!("{told}");
        std::io::stdin().lock().read_line(&mut String::new()).expect("a line");
    };
    let turns = args.iter().any(|arg| arg == "--turns");
    if args.iter().any(|arg| arg == "--wait") {
        wait("ready");
    }
    if widths.len() > 1 {
        for (depth, bits, state) in &mut states {
            bench.model.set_kv_bits(bits.1).expect("a KV cache with these bits");
            let mut times = vec![Vec::new(); widths.len()];
            for _ in 0..=rounds {
                for (rows, times) in widths.iter().zip(&mut times) {
                    times.push(bench.pass(state, *rows, tokens));
                }
            }
            // Without the first round, which is a warm-up, as below.
            let times: Vec<f64> = times.into_iter().map(|times| median(times[1..].to_vec())).collect();
            for (rows, time) in widths.iter().zip(&times) {
                println!("pass,{depth},{},{rows},{:.4},{:.3}", bits.0, time * 1e3, time / times[0]);
            }
        }
        return;
    }
    let mut all = vec![[const { Vec::new() }; 6]; states.len()];
    let (checkpoints, mut held) = (args.iter().any(|arg| arg == "--checkpoints"), vec![None; states.len()]);
    for round in 0..=rounds {
        if turns {
            wait("turn");
        }
        let mut first = None;
        for (((depth, bits, state), all), held) in states.iter_mut().zip(&mut all).zip(&mut held) {
            bench.model.set_kv_bits(bits.1).expect("a KV cache with these bits");
            let times = bench.decode(state, tokens);
            let base = *first.get_or_insert(times);
            let [slower, dearer] = [0, 1].map(|clock| times[clock] / base[clock]);
            let begin = Instant::now();
            if checkpoints {
                *held = Some(bench.model.snapshot(state).expect("a checkpoint"));
            }
            let stall = begin.elapsed().as_secs_f64();
            // The first round is a warm-up. It also writes the pages that later rounds share.
            if round > 0 {
                println!(
                    "decode,{round},{depth},{},{:.2},{slower:.3},{dearer:.3},{:.3}",
                    bits.0,
                    1.0 / times[0],
                    times[1] * 1e3
                );
                if checkpoints {
                    println!("checkpoint,{round},{depth},{},{:.2},{:.3}", bits.0, stall * 1e3, stall / times[0]);
                }
                let values = [1.0 / times[0], slower, dearer, times[1] * 1e3, stall * 1e3, stall / times[0]];
                for (all, value) in all.iter_mut().zip(values) {
                    all.push(value);
                }
            }
        }
    }
    for ((depth, bits, _), all) in states.iter().zip(all) {
        let [rate, slower, dearer, spent, stall, of_token] = all.map(median);
        println!("decode,median,{depth},{},{rate:.2},{slower:.3},{dearer:.3},{spent:.3}", bits.0);
        if checkpoints {
            println!("checkpoint,median,{depth},{},{stall:.2},{of_token:.3}", bits.0);
        }
    }
}
