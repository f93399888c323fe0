//! Measures the speed-up of drafts on a checkpoint of any size. The draft is an oracle without weights: it knows the
//! answer and is wrong with a given probability.
//!
//! ```text
//! cargo bench --bench speculation -- MODEL [SETTING ...] [--share 0.5] [--tokens 128] [--prompt 64] [--rounds 5]
//!     [--temp 1] [--threads N] [--io direct|buffered] [--gpu] [--auto] [--rollback]
//! ```
//!
//! Settings: `oracle:ROWS@P` (each drafted token is right with probability P), `every:N` (only every Nth token of an
//! answer is right) and `lookup:ROWS`. `plain` always runs first. Each round generates the same answer once per
//! setting, in rotating order, with one engine. Each answer is compared with the plain one. `--share` streams the
//! experts, with slots for that share of them.
//!
//! With `--auto` every setting has its own engine, whose controller decides when to draft. Two more engines never
//! draft, `plain` and `again`: their difference is the noise of the measurement. The first round counts, too, and
//! starts without any cached expert.
//!
//! Prints CSV, one row per answer, then lines that start with `#`: medians of the ratios to `plain`, in wall-clock and
//! in CPU time, and `books`, the fraction of time that was lost according to the controller's own measurements.
//! `traffic` is the ratio that memory traffic allows: tokens per pass, times the bytes of a plain pass, divided by the
//! bytes of a pass with this many rows. The number of distinct experts is counted on the answer.
//!
//! `--rollback` measures the cost of a verify that can be rolled back. It compares a verify of four rows, some of which
//! are kept, with a pass of four rows that cannot be rolled back. The cost is given as a fraction of a decode step.

use moestro::command::device_choice::DeviceChoice;
use moestro_base::metrics::Metrics;
use moestro_compute::{
    device,
    experts::{ExpertChoice, PassSize, ReadMode},
};
use moestro_engine::{
    self as engine, Draft, DraftKind, DraftPolicy, DraftRequest, Event, Finish, Handle, LookupDraft, Request, Sampler,
    Sampling, Timings, TokenMask,
};
use moestro_model::{
    error::ModelError,
    model::{LoadOptions, Model, Qwen, QwenState, Rows, SequenceState},
    plan::PlanOptions,
};
use parking_lot::Mutex;
use std::{collections::HashSet, path::Path, sync::Arc, time::Instant};

#[derive(Debug, Clone, Copy, PartialEq)]
enum Setting {
    Plain,
    Oracle { rows: usize, right: f64 },
    Every(usize),
    Lookup(usize),
}

impl Setting {
    fn new(text: &str) -> Option<Self> {
        let (name, how) = text.split_once(':')?;
        let rows = || how.parse().ok();
        Some(match name {
            "oracle" => {
                let (rows, right) = how.split_once('@')?;
                Self::Oracle { rows: rows.parse().ok()?, right: right.parse().ok()? }
            }
            "every" => Self::Every(rows()?),
            "lookup" => Self::Lookup(rows()?),
            _ => return None,
        })
    }

    fn rows(self) -> usize {
        match self {
            Self::Plain => 1,
            Self::Oracle { rows, .. } | Self::Lookup(rows) => rows,
            Self::Every(_) => usize::MAX,
        }
    }
}

/// A draft that follows the current setting.
struct SettingDraft {
    setting: Arc<Mutex<Setting>>,
    /// Prompt and answer.
    known: Arc<Vec<u32>>,
    prompt: usize,
    dice: u64,
}

impl SettingDraft {
    fn roll(&mut self) -> f64 {
        self.dice = self.dice.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.dice >> 11) as f64 / (1u64 << 53) as f64
    }
}

impl Draft<Qwen> for SettingDraft {
    fn kind(&self) -> DraftKind {
        // Lookup drafts are never disabled for wrong tokens, so only the controller has an effect.
        DraftKind::Lookup
    }

    fn propose(
        &mut self,
        model: &mut Qwen,
        state: &mut QwenState,
        request: DraftRequest<'_>,
    ) -> Result<(), ModelError> {
        let setting = *self.setting.lock();
        let max = request.max.min(setting.rows() - 1);
        match setting {
            Setting::Plain => Ok(()),
            Setting::Lookup(_) => LookupDraft.propose(model, state, DraftRequest { max, ..request }),
            Setting::Oracle { .. } | Setting::Every(_) => {
                let DraftRequest { history, out, .. } = request;
                for place in history.end()..(history.end() + max).min(self.known.len()) {
                    let right = match setting {
                        Setting::Every(n) => (place - self.prompt).is_multiple_of(n),
                        Setting::Oracle { right, .. } => self.roll() < right,
                        _ => false,
                    };
                    out.push(if right {
                        self.known[place]
                    } else {
                        (self.known[place] + 1) % model.info().vocab as u32
                    });
                }
                Ok(())
            }
        }
    }
}

struct Args(Vec<String>);

impl Args {
    fn flag(&self, name: &str) -> Option<&str> {
        self.0.iter().position(|arg| arg == name).and_then(|at| self.0.get(at + 1)).map(String::as_str)
    }

    fn number<T: std::str::FromStr>(&self, name: &str, default: T) -> T {
        self.flag(name).and_then(|text| text.parse().ok()).unwrap_or(default)
    }

    fn has(&self, name: &str) -> bool {
        self.0.iter().any(|arg| arg == name)
    }
}

fn load(dir: &Path, args: &Args, metrics: &Arc<Metrics>) -> Qwen {
    let plan = PlanOptions {
        sequences: 1,
        serving: false,
        context: Some(
            args.number("--prompt", 64) + args.number("--tokens", 128).max(17 * (args.number("--rounds", 5) + 1)) + 64,
        ),
        prompt_cache: Some(0),
        ..PlanOptions::default()
    };
    let threads = args.flag("--threads").and_then(|text| text.parse().ok());
    let found = if args.has("--gpu") { device::open_gpu() } else { Ok(None) };
    let chosen = DeviceChoice::of(found, args.has("--gpu")).expect("a GPU");
    let gpu = chosen.working_set();
    let mut options = LoadOptions { threads, plan, verify: true, gpu, ..LoadOptions::default() };
    options.store.io = match args.flag("--io") {
        Some("buffered") => ReadMode::Buffered,
        _ => ReadMode::Direct,
    };
    if let Some(share) = args.flag("--share").and_then(|text| text.parse::<f64>().ok()) {
        let footprint = moestro_model::model::CheckpointInfo::new(dir, &options).expect("a checkpoint").footprint;
        options.store.slots = Some((share * (footprint.layers * footprint.experts) as f64) as usize);
    }
    chosen.place(Qwen::load(dir, &options, metrics, &mut |_, _| ()).expect("a model")).expect("a model for this device")
}

/// The plain answer, and the mean number of distinct experts in all layers for each number of rows of a pass.
fn answer(model: &mut Qwen, ids: &[u32], tokens: usize, sampling: &Sampling) -> (Vec<u32>, Vec<f64>) {
    let (mut state, mut sampler) = (model.start().expect("a state"), Sampler::new(sampling.clone(), ids, usize::MAX));
    let mut logits = model.forward(&mut state, ids, Rows::Last).expect("a prompt").data;
    let (mut generated, mut routes) = (Vec::new(), Vec::<Vec<Vec<u32>>>::new());
    let row = Arc::new(Mutex::new(Vec::new()));
    if let Some(store) = model.store() {
        let log = row.clone();
        store.observe(Box::new(move |_: usize, choice: &ExpertChoice<'_>, _: PassSize| {
            log.lock().push(choice.ids.to_vec());
        }));
    }
    while generated.len() < tokens {
        let id = sampler.draw(&logits, &TokenMask::Any).expect("a token");
        generated.push(id);
        logits = model.forward(&mut state, &[id], Rows::Last).expect("a token").data;
        routes.push(std::mem::take(&mut *row.lock()));
    }
    if let Some(store) = model.store() {
        store.observe(Box::new(|_: usize, _: &ExpertChoice<'_>, _: PassSize| ()));
    }
    let union = |rows: usize| {
        let layers = routes.first().map_or(0, Vec::len);
        let of = |window: &[Vec<Vec<u32>>]| -> usize {
            (0..layers).map(|layer| window.iter().flat_map(|row| &row[layer]).collect::<HashSet<_>>().len()).sum()
        };
        let windows: Vec<_> = routes.windows(rows).map(of).collect();
        windows.iter().sum::<usize>() as f64 / windows.len().max(1) as f64
    };
    (generated, (0..=16).map(|rows| if rows == 0 { 0.0 } else { union(rows) }).collect())
}

/// CPU seconds of all threads (Linux; 0 elsewhere).
fn cpu_seconds() -> f64 {
    let tasks = std::fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
    let of = |task: std::fs::DirEntry| {
        let text = std::fs::read_to_string(task.path().join("schedstat")).ok()?;
        text.split(' ').next()?.parse::<f64>().ok()
    };
    tasks.filter_map(of).sum::<f64>() / 1e9
}

struct Engine {
    handle: Handle,
    setting: Arc<Mutex<Setting>>,
    metrics: Arc<Metrics>,
}

struct Ran {
    seconds: f64,
    processor: f64,
    timings: Timings,
    misses: u64,
    bytes: u64,
    cycles: u64,
}

impl Engine {
    fn run(&self, setting: Setting, ids: &[u32], sampling: &Sampling, expected: &[u32]) -> Ran {
        *self.setting.lock() = setting;
        let request = Request {
            ignore_eos: true,
            cache_prompt: false,
            ..Request::new(ids.to_vec(), expected.len(), sampling.clone())
        };
        let m = &self.metrics;
        let cycles = || m.draft_cycles.with_label_values(&["lookup"]).get();
        let counts = || (m.lookups_decode_miss.get() + m.lookups_prefill_miss.get(), m.ssd_read_bytes.get(), cycles());
        let mut events = self.handle.submit(request).expect("a free place in the queue");
        let (mut generated, mut begun, mut before) = (Vec::new(), 0.0, (0, 0, 0));
        loop {
            match events.blocking_recv().expect("an event") {
                Event::Token { id, .. } => {
                    if generated.is_empty() {
                        (begun, before) = (cpu_seconds(), counts());
                    }
                    generated.push(id);
                }
                Event::Done { timings, finish, .. } => {
                    let ((misses, bytes, cycles), processor) = (counts(), cpu_seconds() - begun);
                    assert!(generated == expected, "{setting:?}: the answer differs from the plain one");
                    assert_eq!(finish, Finish::Length, "{setting:?}");
                    let (misses, bytes, cycles) = (misses - before.0, bytes - before.1, cycles - before.2);
                    return Ran { seconds: timings.decode_seconds, processor, timings, misses, bytes, cycles };
                }
                Event::Failed(error) => panic!("{error}"),
                Event::Started { .. } | Event::Prefilled { .. } | Event::Prompt(_) => {}
            }
        }
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

fn main() {
    let args = Args(std::env::args().skip(1).filter(|arg| arg != "--bench").collect());
    let Some(dir) = args.0.first().map(Path::new) else {
        println!("speculation: no model given, nothing measured");
        return;
    };
    let (tokens, prompt, rounds) =
        (args.number("--tokens", 128), args.number("--prompt", 64), args.number("--rounds", 5));
    let new_metrics = || Metrics::new("bench", "cpu");
    let metrics = new_metrics();
    let mut model = load(dir, &args, &metrics);
    let vocab = model.info().vocab as u32;
    let ids: Vec<u32> = (0..prompt as u32).map(|n| (n.wrapping_mul(2_654_435_761) >> 7) % vocab).collect();
    if args.has("--rollback") {
        return rollback(&mut model, &ids, rounds);
    }
    let sampling = Sampling { temperature: args.number("--temp", 1.0), seed: Some(7), ..Sampling::default() };
    let (generated, union) = answer(&mut model, &ids, tokens, &sampling);
    let footprint = model.footprint().clone();
    let pass = |rows: usize| {
        (footprint.trunk - footprint.gathered + 2 * footprint.state) as f64 + union[rows] * footprint.expert as f64
    };
    println!(
        "# distinct experts per layer: {:.2?}",
        [1, 2, 4, 8].map(|rows| union[rows] / footprint.layers.max(1) as f64)
    );

    let names: Vec<&str> = args.0[1..].iter().map(String::as_str).filter(|text| Setting::new(text).is_some()).collect();
    let auto = args.has("--auto");
    let names: Vec<&str> = ["plain", "again"].into_iter().take(1 + usize::from(auto)).chain(names).collect();
    let settings: Vec<Setting> = names.iter().map(|text| Setting::new(text).unwrap_or(Setting::Plain)).collect();
    let known: Arc<Vec<u32>> = Arc::new([&ids[..], &generated[..]].concat());
    let spawn = |model: Qwen, speculate: DraftPolicy, metrics: Arc<Metrics>| {
        let setting = Arc::new(Mutex::new(Setting::Plain));
        let draft = SettingDraft { setting: setting.clone(), known: known.clone(), prompt, dice: 1 };
        let options = engine::Options {
            speculate,
            draft_tokens: if speculate == DraftPolicy::Auto { 7 } else { 15 },
            ..Default::default()
        };
        let (handle, _) = engine::spawn_with(model, Box::new(draft), options, metrics.clone()).expect("a thread");
        Engine { handle, setting, metrics }
    };
    let mut engines = Vec::new();
    if auto {
        drop(model);
        for setting in &settings {
            let speculate = if *setting == Setting::Plain { DraftPolicy::Off } else { DraftPolicy::Auto };
            let metrics = new_metrics();
            engines.push(spawn(load(dir, &args, &metrics), speculate, metrics));
        }
    } else {
        engines.push(spawn(model, DraftPolicy::Force, metrics));
    }
    let engine = |index: usize| &engines[if auto { index } else { 0 }];
    println!("round,setting,seconds,processor_seconds,drafted,accepted,cycles,saved_seconds,misses,bytes_read");
    let mut ratios = vec![[Vec::new(), Vec::new()]; settings.len()];
    let mut sums = vec![[0.0; 8]; settings.len()];
    // With a shared engine, the first round does not count, because its caches are cold.
    let first = usize::from(!auto);
    for round in 0..rounds + first {
        let mut ran: Vec<Option<Ran>> = settings.iter().map(|_| None).collect();
        for index in (0..settings.len()).map(|n| (n + round) % settings.len()) {
            ran[index] = Some(engine(index).run(settings[index], &ids, &sampling, &generated));
        }
        let ran: Vec<Ran> = ran.into_iter().flatten().collect();
        for (index, run) in ran.iter().enumerate().filter(|_| round >= first) {
            let Timings { drafted_tokens, accepted_tokens, saved_seconds, .. } = run.timings;
            let Ran { seconds, processor, misses, bytes, cycles, .. } = *run;
            println!(
                "{round},{},{seconds:.4},{processor:.4},{drafted_tokens},{accepted_tokens},{cycles},{saved_seconds:.4},{misses},{bytes}",
                names[index]
            );
            ratios[index][0].push(ran[0].seconds / seconds);
            ratios[index][1].push(ran[0].processor / processor);
            let all = [
                seconds,
                processor,
                drafted_tokens as f64,
                accepted_tokens as f64,
                cycles as f64,
                misses as f64,
                bytes as f64,
                saved_seconds,
            ];
            sums[index].iter_mut().zip(all).for_each(|(sum, value)| *sum += value);
        }
    }
    for (index, setting) in settings.iter().enumerate() {
        let [clock, processor] = ratios[index].clone().map(median);
        let [seconds, cpu, drafted, accepted, cycles, misses, bytes, saved] = sums[index];
        let all = (tokens * rounds) as f64;
        let passes = all - accepted;
        let mut line = format!(
            "# {}: {:.2} tok/s, times plain {clock:.3} in wall-clock time, {processor:.3} in CPU time (of all rounds {:.3}, {:.3}); \
             {:.2} tokens per pass, {accepted} of {drafted} accepted in {cycles} cycles; per token {:.2} misses, {:.2} MB read; books {:.4}",
            names[index],
            all / seconds,
            sums[0][0] / seconds,
            sums[0][1] / cpu,
            all / passes,
            misses / all,
            bytes / all / 1e6,
            -saved / seconds
        );
        if let (Setting::Oracle { rows, .. }, false) = (setting, auto) {
            let traffic = all / passes * pass(1) / pass(*rows);
            line += &format!("; traffic {traffic:.3}, reached {:.3} of it", clock / traffic);
        }
        println!("{line}");
    }
}

/// Wall-clock and CPU seconds.
fn timed(what: &mut dyn FnMut()) -> [f64; 2] {
    let (begin, before) = (Instant::now(), cpu_seconds());
    what();
    [begin.elapsed().as_secs_f64(), cpu_seconds() - before]
}

fn rollback(model: &mut Qwen, ids: &[u32], rounds: usize) {
    const ROWS: usize = 4;
    let rows: Vec<u32> = (0..ROWS as u32).map(|n| 100 + 37 * n).collect();
    let mut states = [(); 3].map(|()| {
        let mut state = model.start().expect("a state");
        model.forward(&mut state, ids, Rows::None).expect("a prompt");
        state
    });
    println!("kept,decode_ms,pass_of_4_ms,verify_and_back_ms,cost_of_a_step,cost_in_processor_time");
    for kept in 1..=ROWS {
        let mut times = vec![];
        for round in 0..=rounds {
            let [plain, pass, verify] = &mut states;
            let of_one = timed(&mut || drop(model.forward(plain, &rows[..1], Rows::Last).expect("a token")));
            let of_four = timed(&mut || drop(model.forward(pass, &rows, Rows::All).expect("rows")));
            let back = timed(&mut || {
                drop(model.verify(verify, &rows).expect("rows"));
                if kept < ROWS {
                    verify.reject(ROWS - kept).expect("rows to remove");
                }
            });
            if round > 0 {
                times.push([of_one, of_four, back]);
            }
        }
        let column = |what: usize, how: usize| median(times.iter().map(|time| time[what][how]).collect());
        let cost = |how: usize| median(times.iter().map(|time| time[2][how] - time[1][how]).collect()) / column(0, how);
        let [one, four, back] = [0, 1, 2].map(|what| column(what, 0) * 1e3);
        println!("{kept},{one:.3},{four:.3},{back:.3},{:.4},{:.4}", cost(0), cost(1));
    }
}
