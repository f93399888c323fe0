//! Compares a streamed model that computes layer spans with a resident model: all logits and states must have
//! the same bytes, whichever layer misses an expert, and also after a pass that was cancelled or failed.

use crate::{
    double::{Double, Fault, Plan, Shared},
    forward::{
        common::{Dice, narrow, write_model},
        options,
    },
    gpu::HostGpu,
    host::Host,
    queue::{move_to, move_to_queue},
};
use moestro::tools::synth::Dimensions;
use moestro_base::{metrics::Metrics, platform::os::MemoryLevel};
use moestro_compute::{
    device::{CommandQueue, CpuArithmetic, Driver},
    experts::Prefetch,
    ops::KvBits,
};
use moestro_model::plan::Parallel;
use moestro_model::{
    error::ModelError,
    model::{Logits, Model, PassHooks, Qwen, QwenState, Rows, SequenceState},
};
use std::{
    cell::Cell,
    collections::BTreeSet,
    fs::File,
    path::Path,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

/// Three delta nets and an attention layer.
const LAYERS: usize = 4;
/// Number of experts of all layers. A token selects two of eight experts in each layer.
const EXPERTS: usize = LAYERS * 8;
/// So few experts are missing that spans have several layers.
const SLOTS: usize = EXPERTS - 2;
/// Time after which a device that completes nothing is lost. A busy machine does not reach it.
const STALL_TIMEOUT: Duration = Duration::from_secs(60);

/// Writes the model of these tests to a new directory.
fn checkpoint() -> tempfile::TempDir {
    let root = tempfile::tempdir().unwrap();
    let dimensions = Dimensions {
        hidden: 64,
        heads: 1,
        linear_key_heads: 1,
        linear_value_heads: 2,
        layers: LAYERS,
        experts: 8,
        experts_per_token: 2,
        ..narrow(Dimensions::of_35b())
    };
    write_model(root.path(), dimensions, 3);
    root
}

/// Loads the model in `root`, with a segment for each slot. With `slots`, experts are streamed.
fn load(root: &Path, slots: Option<usize>, kv_bits: KvBits) -> (Qwen, Arc<Metrics>) {
    let mut options = options(slots.is_some());
    options.plan.buffered = false;
    (options.gpu, options.plan.parallel, options.plan.context) = (Some(u64::MAX), Parallel::Count(3), Some(512));
    (options.store.slots, options.store.segment_bytes, options.store.prefetch) = (slots, 1, Prefetch::Off);
    (options.plan.chunk, options.plan.prompt_cache) = (Some(64), Some(4 << 20));
    // The arithmetic of a CPU whose keys and values have the format of the GPU.
    (options.math, options.kv_bits) = (CpuArithmetic::Integer, kv_bits);
    let metrics = Metrics::new("test", "gpu");
    (Qwen::load(&root.join("model"), &options, &metrics, &mut |_, _| ()).unwrap(), metrics)
}

fn tokens(dice: &mut Dice, count: usize) -> Vec<u32> {
    (0..count).map(|_| dice.roll(300) as u32).collect()
}

/// Sequences after prompts of these lengths.
fn start<const N: usize>(model: &mut Qwen, prompts: [usize; N]) -> [QwenState; N] {
    prompts.map(|count| {
        let mut state = model.start().unwrap();
        model.forward(&mut state, &tokens(&mut Dice(count as u64), count), Rows::None).unwrap();
        state
    })
}

/// One random step: a token of one sequence, a token of each of two sequences, or a draft that is rejected in part.
fn step(model: &mut Qwen, states: &mut [QwenState], mut dice: Dice) -> Logits {
    let (one, tokens) = (dice.roll(states.len()), tokens(&mut dice, 3));
    match dice.roll(6) {
        0 => {
            let logits = model.verify(&mut states[one], &tokens).unwrap();
            states[one].reject(dice.roll(3)).unwrap();
            logits
        }
        1 => {
            let first = dice.roll(states.len() - 1);
            let [first, second] = &mut states[first..first + 2] else { unreachable!() };
            model.forward_each(&mut [(first, tokens[0]), (second, tokens[1])], &[]).unwrap()
        }
        _ => model.forward(&mut states[one], &tokens[..1], Rows::Last).unwrap(),
    }
}

#[test]
fn layer_spans_match_a_resident_model() {
    compare(|| HostGpu::new(Host::fast()).queue());
}

/// A GPU that shares the CPU's memory gets several layers in one command buffer.
#[test]
fn layers_of_spans_share_command_buffers() {
    let root = checkpoint();
    let run = |own_memory: bool| {
        let double = Double::new(Host::fast());
        let control = double.control();
        control.lock().unwrap().own_memory = own_memory;
        let mut model = move_to(load(root.path(), Some(EXPERTS - 1), KvBits::Sixteen).0, double);
        let mut states = start(&mut model, [5, 20, 1]);
        control.lock().unwrap().calls.clear();
        let rows: Vec<_> = (0..100).map(|round| step(&mut model, &mut states, Dice(round)).data.to_vec()).collect();
        let commits = control.lock().unwrap().calls["commit"];
        (rows, commits)
    };
    let ((shared, few), (own, many)) = (run(false), run(true));
    assert!(shared == own);
    println!("{few} instead of {many} command buffers");
    assert!(few < many, "{few} instead of {many} command buffers");
}

/// Runs random steps of three sequences on a resident and on a streamed model.
pub fn compare<D: Driver>(gpu: impl Fn() -> CommandQueue<D>) {
    let root = checkpoint();
    for kv_bits in [KvBits::Sixteen, KvBits::Four] {
        let (resident, _) = load(root.path(), None, kv_bits);
        let (streamed, metrics) = load(root.path(), Some(SLOTS), kv_bits);
        let [mut resident, mut streamed] = [resident, streamed].map(|model| move_to_queue(model, gpu()));
        // Some of the steps reach a block of quantized positions.
        let [mut expected, mut found] = [&mut resident, &mut streamed].map(|model| start(model, [50, 20, 1]));
        // Each fetch of a pass, with its layer and the number of misses before it.
        let (fetches, misses) = (Arc::new(Mutex::new(Vec::new())), metrics.clone());
        let log = fetches.clone();
        streamed.store().unwrap().observe(Box::new(move |layer, _, _| {
            log.lock().unwrap().push((layer, misses.lookups_decode_miss.get()));
        }));
        let (mut fewest, mut missed, now) = (u64::MAX, BTreeSet::new(), Instant::now());
        assert_eq!(streamed.store().unwrap().slots(), SLOTS);
        for round in 0..40 {
            let (waits, skipped) = (metrics.gpu_router_waits.get(), metrics.gpu_skipped_launches.get());
            let [one, two] =
                [step(&mut resident, &mut expected, Dice(round)), step(&mut streamed, &mut found, Dice(round))];
            assert!(one.data == two.data, "{kv_bits:?}, round {round}");
            fewest = fewest.min(metrics.gpu_router_waits.get() - waits);
            let mut fetches = std::mem::take(&mut *fetches.lock().unwrap());
            assert!(fetches.iter().map(|fetch| fetch.0).eq(0..LAYERS), "{fetches:?}");
            if metrics.gpu_skipped_launches.get() > skipped {
                fetches.push((LAYERS, metrics.lookups_decode_miss.get()));
                missed.extend(fetches.windows(2).filter(|pair| pair[1].1 > pair[0].1).map(|pair| pair[0].0));
            }
            if round == 20 {
                // Some experts are evicted, and others move to another slot.
                let bytes = streamed.store().unwrap().slot_bytes() as u64 * 10;
                assert!(streamed.adapt_to_level(MemoryLevel::Short(bytes), now));
            }
            streamed.adapt_to_level(MemoryLevel::Spare(1 << 40), now + Duration::from_secs(60 * round));
        }
        println!("{kv_bits:?}: layers {missed:?} missed within spans; fewest waits {fewest}");
        assert_eq!(fewest, 1, "one wait for all layers");
        assert!([0, LAYERS - 1].iter().all(|layer| missed.contains(layer)), "{missed:?}");
        for (one, two) in expected.iter_mut().zip(&mut found) {
            let [one, two] = [resident.snapshot(one).unwrap(), streamed.snapshot(two).unwrap()];
            assert!(one.state == two.state, "states");
        }
    }
}

/// The rows of steps that follow two prompts.
fn request(model: &mut Qwen) -> Vec<f32> {
    let mut states = start(model, [3, 1]);
    (0..5).flat_map(|round| step(model, &mut states, Dice(round)).data.to_vec()).collect()
}

/// An event that ends a pass within a span.
#[derive(Debug, Clone, Copy)]
enum Trouble {
    /// The request is cancelled before the pass submits a layer. Counts layers that were submitted before. A pass
    /// submits layers again after a miss.
    Cancelled(usize),
    /// A command buffer of the pass, counted from 0, has a fault.
    Faulty(usize, Fault),
    /// A missing expert cannot be read.
    Unreadable,
}

/// A streamed model on a double.
struct Streamed {
    model: Qwen,
    metrics: Arc<Metrics>,
    control: Shared,
    /// The layer of each fetch.
    fetches: Arc<Mutex<Vec<usize>>>,
    /// The only file with weights.
    shard: File,
}

impl Streamed {
    fn new(root: &Path, own_memory: bool, stall_timeout: Duration) -> Self {
        let (model, metrics) = load(root, Some(SLOTS), KvBits::Sixteen);
        let (double, fetches) = (Double::new(Host::fast()), Arc::new(Mutex::new(Vec::new())));
        let (control, log) = (double.control(), fetches.clone());
        control.lock().unwrap().own_memory = own_memory;
        control.lock().unwrap().halves = true;
        model.store().unwrap().observe(Box::new(move |layer, _, _| log.lock().unwrap().push(layer)));
        let queue = CommandQueue::new(double).with_stall_timeout(stall_timeout);
        let files = std::fs::read_dir(root.join("model")).unwrap().map(|entry| entry.unwrap().path());
        let mut shards = files.filter(|path| path.extension().is_some_and(|extension| extension == "safetensors"));
        let shard = File::options().write(true).open(shards.next().unwrap()).unwrap();
        assert_eq!(shards.next(), None);
        Self { model: move_to_queue(model, queue), metrics, control, fetches, shard }
    }

    /// Computes tokens until a pass needs one wait. The next pass then submits all layers together.
    fn run_span(&mut self, state: &mut QwenState, dice: &mut Dice) {
        for _ in 0..100 {
            let waits = self.metrics.gpu_router_waits.get();
            self.model.forward(state, &tokens(dice, 1), Rows::None).unwrap();
            if self.metrics.gpu_router_waits.get() == waits + 1 {
                return;
            }
        }
        panic!("no span has several layers");
    }

    /// Runs passes until `trouble` ends one. Returns the error.
    fn meet(&mut self, trouble: Trouble, seed: u64) -> ModelError {
        let (mut dice, mut states) = (Dice(seed), start(&mut self.model, [3, 1]));
        for _ in 0..100 {
            self.run_span(&mut states[0], &mut dice);
            let modified = self.shard.metadata().unwrap().modified().unwrap();
            if matches!(trouble, Trouble::Unreadable) {
                // The store refuses to read a file that has changed.
                self.shard.set_modified(modified + Duration::from_secs(1)).unwrap();
            }
            let done = self.pass(trouble, &mut states, &mut dice);
            self.shard.set_modified(modified).unwrap();
            if let Err(error) = done {
                return error;
            }
        }
        panic!("{trouble:?} does not occur");
    }

    /// Runs one pass with this trouble: a token, a verify or a token of each sequence. Only a token can be cancelled.
    fn pass(&mut self, trouble: Trouble, [one, two]: &mut [QwenState; 2], dice: &mut Dice) -> Result<(), ModelError> {
        let (ids, kind, submitted) = (tokens(dice, 2), dice.roll(3), Cell::new(0));
        let (cancelled, fault) = match trouble {
            Trouble::Cancelled(layer) => (layer, None),
            Trouble::Faulty(nth, fault) => (usize::MAX, Some((nth, fault))),
            Trouble::Unreadable => (usize::MAX, None),
        };
        let mut control = self.control.lock().unwrap();
        control.calls.clear();
        control.fault = fault.map(|(nth, fault)| Plan { method: "commit", nth, fault });
        drop(control);
        let keep_going = || submitted.replace(submitted.get() + 1) != cancelled;
        let mut hooks = PassHooks { keep_going: Some(&keep_going), ..PassHooks::default() };
        let done = match kind {
            0 if cancelled == usize::MAX => self.model.forward_each(&mut [(one, ids[0]), (two, ids[1])], &[]).map(drop),
            1 if cancelled == usize::MAX => self.model.verify(one, &ids).map(drop),
            _ => self.model.forward_with(one, &ids[..1], Rows::Last, &mut hooks).map(drop),
        };
        // A pass may end before its faulty command buffer. Other passes have no fault.
        self.control.lock().unwrap().fault = None;
        done
    }
}

#[test]
#[ignore = "exhaustive: every failure in every layer"]
fn trouble_within_a_span_leaves_no_trace() {
    let root = checkpoint();
    let gpu = HostGpu::with_matrix_units(Host::fast());
    let expected = request(&mut move_to(load(root.path(), None, KvBits::Sixteen).0, gpu));
    // The first command buffer of a pass has the embedding, and the last the head.
    let troubles = [
        Trouble::Cancelled(0),
        Trouble::Cancelled(LAYERS - 1),
        Trouble::Cancelled(LAYERS),
        Trouble::Faulty(0, Fault::Fails),
        Trouble::Faulty(1, Fault::Fails),
        Trouble::Faulty(LAYERS, Fault::Fails),
        Trouble::Faulty(LAYERS + 1, Fault::Fails),
        Trouble::Unreadable,
    ];
    for own_memory in [false, true] {
        let (mut streamed, now) = (Streamed::new(root.path(), own_memory, STALL_TIMEOUT), Instant::now());
        for (round, trouble) in troubles.iter().enumerate() {
            let what = format!("{trouble:?}, own memory: {own_memory}");
            let error = streamed.meet(*trouble, round as u64);
            let is_expected = match trouble {
                Trouble::Cancelled(_) => matches!(error, ModelError::GivenUp),
                Trouble::Faulty(..) => matches!(&error, ModelError::Device(why) if why.contains("address fault")),
                Trouble::Unreadable => matches!(&error, ModelError::Store(why) if why.to_string().contains("changed")),
            };
            assert!(is_expected && !streamed.model.recover().unwrap(), "{what}: {error}");
            // In every other round, a slot is released before the next prompt.
            let (time, bytes) =
                (now + Duration::from_secs(60 * round as u64), streamed.model.store().unwrap().slot_bytes());
            assert!(round % 2 == 0 || streamed.model.adapt_to_level(MemoryLevel::Short(bytes as u64), time));
            streamed.fetches.lock().unwrap().clear();
            assert!(request(&mut streamed.model) == expected, "after {what}");
            // Two prompts and five steps.
            let (fetches, passes) = (streamed.fetches.lock().unwrap(), (0..7).flat_map(|_| 0..LAYERS));
            assert!(fetches.iter().copied().eq(passes), "after {what}: {fetches:?}");
            streamed.model.adapt_to_level(MemoryLevel::Spare(1 << 40), time + Duration::from_secs(30));
        }
    }
}

#[test]
fn cpu_continues_after_loss_in_a_span() {
    let root = checkpoint();
    let expected = request(&mut load(root.path(), Some(SLOTS), KvBits::Sixteen).0);
    for nth in [1, LAYERS] {
        let mut streamed = Streamed::new(root.path(), false, Duration::from_millis(500));
        let error = streamed.meet(Trouble::Faulty(nth, Fault::Hangs), 1).to_string();
        assert!(error.contains("completed nothing") && streamed.model.recover().unwrap(), "{error}");
        assert!(request(&mut streamed.model) == expected && !streamed.model.is_on_gpu(), "command buffer {nth}");
    }
}
