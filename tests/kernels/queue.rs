//! Tests the model on `device::CommandQueue` with the double of Metal: every order that the queue allows gives the same
//! bytes, and a fault fails only one request.

use crate::{
    double::{Double, Fault, Plan, Shared},
    forward::common::{argmax, fixtures::Folded, load_with},
    gpu::HostGpu,
    host::Host,
};
use moestro_base::platform::os::MemoryLevel;
use moestro_compute::{
    device::{CommandQueue, CommandStatus, CpuArithmetic, Driver, Launch, Region, Timeline},
    experts::ReadMode,
    ops::{KvBits, check, norm::rms_norm},
};
use moestro_model::{
    error::ModelError,
    model::{LoadOptions, Model, Qwen, Rows, StoreOptions},
};
use std::time::{Duration, Instant};

pub const PROMPT: [u32; 7] = [5, 90, 33, 2, 71, 18, 64];

/// A small mixture of experts, with all experts resident or with slots for two thirds of them.
pub fn load(streaming: bool) -> Qwen {
    load_changed(streaming, |_| ())
}

/// A model like [`load`], but with segments of `segment_bytes` bytes.
pub fn load_segments(streaming: bool, segment_bytes: usize) -> Qwen {
    load_changed(streaming, |options| options.store.segment_bytes = segment_bytes)
}

/// A model like [`load`], but with changed options.
pub fn load_changed(streaming: bool, change: impl FnOnce(&mut LoadOptions)) -> Qwen {
    let dir = Folded::read("affine4").unfold();
    let slots = streaming.then_some(4);
    let store = StoreOptions { io: ReadMode::Buffered, slots, ..StoreOptions::default() };
    let mut options = LoadOptions {
        math: CpuArithmetic::F32,
        threads: Some(1),
        store,
        gpu: Some(u64::MAX),
        ..LoadOptions::default()
    };
    if streaming {
        options.plan.stream = Some(true);
        options.plan.buffered = true;
    }
    options.plan.context = Some(512);
    change(&mut options);
    load_with(dir.path(), options)
}

pub fn place(driver: impl Driver, streaming: bool) -> Qwen {
    move_to(load(streaming), driver)
}

pub fn move_to(model: Qwen, driver: impl Driver) -> Qwen {
    move_to_queue(model, CommandQueue::new(driver))
}

pub fn move_to_queue(model: Qwen, gpu: CommandQueue<impl Driver>) -> Qwen {
    model.move_to(gpu).unwrap_or_else(|refused| panic!("{}", refused.error))
}

fn double(streaming: bool) -> (Qwen, Shared) {
    let double = Double::new(Host::fast());
    let control = double.control();
    (place(double, streaming), control)
}

/// Runs a request: the prompt in two chunks, and two generated tokens. Returns all rows of logits.
pub fn answer(model: &mut Qwen) -> Result<Vec<f32>, ModelError> {
    generate(model, 2)
}

/// Runs a request like [`answer`], with `tokens` generated tokens.
fn generate(model: &mut Qwen, tokens: usize) -> Result<Vec<f32>, ModelError> {
    let mut state = model.start()?;
    let mut rows = model.forward(&mut state, &PROMPT[..4], Rows::All)?.data.to_vec();
    let mut last = model.forward(&mut state, &PROMPT[4..], Rows::Last)?.data.to_vec();
    for _ in 0..tokens {
        let id = argmax(&last);
        rows.append(&mut last);
        last = model.forward(&mut state, &[id], Rows::Last)?.data.to_vec();
    }
    rows.append(&mut last);
    Ok(rows)
}

fn expected(streaming: bool) -> Vec<f32> {
    answer(&mut place(HostGpu::new(Host::fast()), streaming)).unwrap()
}

fn orders(streaming: bool, seeds: std::ops::Range<u64>) {
    let (expected, (mut model, control)) = (expected(streaming), double(streaming));
    for seed in seeds {
        control.lock().unwrap().seed = Some(seed);
        assert!(answer(&mut model).unwrap() == expected, "seed {seed}");
    }
    assert!(control.lock().unwrap().calls["residency"] > 0);
}

#[test]
#[ignore = "exhaustive: 150 orders"]
fn resident_model_ignores_launch_order() {
    orders(false, 0..150);
}

#[test]
#[ignore = "exhaustive: 150 orders"]
fn streaming_model_ignores_launch_order() {
    orders(true, 0..150);
}

/// A model on a double, with one slot per segment.
fn segmented(streaming: bool, own_memory: bool) -> (Qwen, impl Fn(&str) -> usize, Shared) {
    let double = Double::new(Host::fast());
    let control = double.control();
    control.lock().unwrap().own_memory = own_memory;
    let model = move_to(load_segments(streaming, 1), double);
    let calls = control.clone();
    let count = move |method: &str| calls.lock().unwrap().calls.get(method).copied().unwrap_or(0);
    (model, count, control)
}

#[test]
fn segments_are_adopted_as_they_fill() {
    let weights = {
        let (_, count, _) = segmented(true, false);
        count("adopt")
    };
    let (mut model, count, _) = segmented(true, false);
    assert_eq!(count("adopt"), weights, "no segment before an expert is loaded");
    assert!(answer(&mut model).unwrap() == expected(true));
    assert_eq!(count("adopt"), weights + 4);
    let (_, count, _) = segmented(false, false);
    assert_eq!(count("adopt"), weights + 6, "all experts are in memory");
}

#[test]
fn model_answers_with_refused_residency_sets() {
    let expected = expected(true);
    for max_sets in [0, 1, 2] {
        let double = Double::new(Host::fast());
        let control = double.control();
        control.lock().unwrap().max_sets = Some(max_sets);
        let mut model = move_to(load_segments(true, 1), double);
        assert!(answer(&mut model).unwrap() == expected, "{max_sets} sets");
    }
}

/// The other tests of the double prove nothing about pipelines if the double does not find this.
#[test]
#[should_panic(expected = "a pipeline was dropped")]
fn double_finds_a_dropped_pipeline() {
    let double = Double::new(Host::fast());
    double.control().lock().unwrap().drops_pipeline = true;
    let _ = CommandQueue::new(double).inject_fault();
}

/// Releases the segments of a resident model and restores them, with another order of launches in each round.
fn release_and_restore(rounds: u64) {
    let (expected, (mut model, count, control)) = (expected(false), segmented(false, false));
    let (now, all) = (Instant::now(), model.store().unwrap().slots());
    let adopted = |count: &dyn Fn(&str) -> usize| count("adopt") - count("free");
    let weights = adopted(&count) - all;
    for round in 0..rounds {
        control.lock().unwrap().seed = Some(round);
        let time = now + Duration::from_secs(round * 20);
        match round % 4 {
            1 => {
                assert!(model.adapt_to_level(MemoryLevel::Short(1 << 40), time));
                assert_eq!((model.store().unwrap().slots(), adopted(&count)), (4, weights + 4), "round {round}");
            }
            2 | 3 => drop(model.adapt_to_level(MemoryLevel::Spare(1 << 40), time)),
            _ => assert_eq!(model.store().unwrap().slots(), all, "all slots return"),
        }
        assert!(answer(&mut model).unwrap() == expected, "round {round}");
    }
}

#[test]
fn released_segments_keep_answers() {
    release_and_restore(12);
}

#[test]
fn slots_return_only_with_device_memory() {
    let (expected, (mut model, count, control)) = (expected(false), segmented(false, true));
    let (now, all, adopted) = (Instant::now(), model.store().unwrap().slots(), count("adopt"));
    assert!(model.adapt_to_level(MemoryLevel::Short(1 << 40), now));
    for (round, method) in (1..).zip(["adopt", "address", "none", "none"]) {
        assert!(answer(&mut model).unwrap() == expected, "round {round}");
        control.lock().unwrap().fault = Some(Plan { method, nth: count(method), fault: Fault::Refused });
        model.adapt_to_level(MemoryLevel::Spare(1 << 40), now + Duration::from_secs(20 * round));
        let slots = [4, 4, 5, all][round as usize - 1];
        assert_eq!(model.store().unwrap().slots(), slots, "{method}");
    }
    assert!(answer(&mut model).unwrap() == expected);
    // The refused call counts, and the buffer without an address is freed.
    assert_eq!(count("adopt") - count("free"), adopted + 1);
}

#[test]
#[ignore = "long: 200 orders"]
fn segments_survive_many_releases() {
    release_and_restore(200);
}

#[test]
fn residency_is_renewed_while_idle() {
    let QueueFixture { mut queue, control, launch } = QueueFixture::new("none", Fault::Refused);
    let requests = || control.lock().unwrap().calls.get("residency").copied().unwrap_or(0);
    queue.launch(&launch).unwrap();
    queue.wait().unwrap();
    let (begin, before) = (Instant::now(), requests());
    while requests() < before + 3 {
        assert!(begin.elapsed() < Duration::from_secs(60), "{before}, then {}", requests());
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn kernel_with_too_few_threads_is_refused() {
    let double = Double::new(Host::fast());
    double.control().lock().unwrap().max_threads = Some(64);
    let Err(refused) = load(false).move_to(CommandQueue::new(double)) else { panic!("it was accepted") };
    let error = refused.error.to_string();
    assert!(error.contains("needs threadgroups of") && error.contains("at most 64"), "{error}");
}

#[test]
fn every_wide_kernel_is_checked() {
    for (kv_bits, halves, kernel) in [
        (KvBits::Eight, false, "attention_merge_quant"),
        (KvBits::Sixteen, false, "attention_merge"),
        (KvBits::Sixteen, true, "attention_prefill_i16"),
    ] {
        let double = Double::new(Host::fast());
        {
            let control = double.control();
            let mut control = control.lock().unwrap();
            (control.max_threads, control.halves) = (Some(255), halves);
        }
        let model = load_changed(false, |options| options.kv_bits = kv_bits);
        let Err(refused) = model.move_to(CommandQueue::new(double)) else { panic!("it was accepted") };
        assert!(refused.error.to_string().contains(kernel), "{}", refused.error);
    }
}

#[test]
fn kernel_comparison_agrees_on_the_double() {
    let double = Double::new(Host::fast());
    let control = double.control();
    let (found, _) = check::kernels(CommandQueue::new(double));
    let wrong: Vec<_> = found.iter().filter(|finding| !finding.agrees()).collect();
    assert!(wrong.is_empty() && !found.is_empty(), "{wrong:?}");
    // Every start runs these checks. Metal drivers have failed on programs that create and free hundreds of buffers.
    let allocated = control.lock().unwrap().calls["allocate"];
    assert!(allocated < 80, "{allocated} buffers");
}

/// Injects a fault into each call of each method. The request must fail or have the right result, and the next request
/// must succeed.
fn faults(streaming: bool) {
    // One generated token: every call of a decode occurs, and the number of faults stays small.
    let answer = |model: &mut Qwen| generate(model, 1);
    let expected = answer(&mut place(HostGpu::new(Host::fast()), streaming)).unwrap();
    let (mut model, control) = double(streaming);
    control.lock().unwrap().calls.clear();
    assert!(answer(&mut model).unwrap() == expected);
    let calls = control.lock().unwrap().calls.clone();
    let mut tried = 0;
    for (method, faults) in [
        ("allocate", &[Fault::Refused][..]),
        ("max_threads", &[Fault::Refused]),
        ("begin", &[Fault::Refused]),
        ("launch", &[Fault::Refused]),
        ("commit", &[Fault::Fails, Fault::Unsignalled]),
    ] {
        assert!(calls[method] > 0, "{method} is never called");
        for (nth, fault) in (0..calls[method]).flat_map(|nth| faults.iter().map(move |fault| (nth, *fault))) {
            let plan = Plan { method, nth, fault };
            let mut control_now = control.lock().unwrap();
            (control_now.fault, control_now.seed) = (Some(plan), Some(nth as u64));
            control_now.calls.clear();
            drop(control_now);
            let found = answer(&mut model);
            // With different experts in its slots, a streaming model may make fewer calls.
            let met = control.lock().unwrap().calls.get(method).is_some_and(|count| *count > nth);
            match fault {
                Fault::Unsignalled => assert!(found.unwrap() == expected, "{plan:?}"),
                _ => assert!(found.is_err() == met, "{plan:?} was not reported"),
            }
            control.lock().unwrap().fault = None;
            assert!(answer(&mut model).unwrap() == expected, "after {plan:?}");
            tried += usize::from(met);
        }
    }
    println!("{tried} faults, {calls:?}");
    assert!(tried > 100, "{tried} faults");
}

#[test]
#[ignore = "exhaustive: a fault at every call"]
fn fault_fails_one_resident_request() {
    faults(false);
}

#[test]
#[ignore = "exhaustive: a fault at every call"]
fn fault_fails_one_streaming_request() {
    faults(true);
}

#[test]
fn refused_placement_returns_the_model() {
    for method in ["adopt", "allocate"] {
        let double = Double::new(Host::fast());
        double.control().lock().unwrap().fault = Some(Plan { method, nth: 0, fault: Fault::Refused });
        let Err(refused) = load(false).move_to(CommandQueue::new(double)) else { panic!("{method}") };
        let mut again = move_to(*refused.qwen, Double::new(Host::fast()));
        assert!(answer(&mut again).unwrap() == expected(false), "{method}");
    }
}

/// A queue over a double with a fault, and a launch that updates its own output.
struct QueueFixture {
    queue: CommandQueue<Double>,
    control: Shared,
    launch: Launch,
}

impl QueueFixture {
    fn new(method: &'static str, fault: Fault) -> Self {
        let double = Double::new(Host::fast());
        let control = double.control();
        // A busy machine can be slow. Only a device that hangs reaches the limit.
        let seconds = if fault == Fault::Hangs { 2 } else { 60 };
        let mut queue = CommandQueue::new(double).with_stall_timeout(Duration::from_secs(seconds));
        let launch = norm(&mut |bytes| queue.allocate(bytes).unwrap());
        control.lock().unwrap().fault = Some(Plan { method, nth: 0, fault });
        Self { queue, control, launch }
    }
}

/// `y = rms_norm(x) w` for 64 values.
fn norm(allocate: &mut dyn FnMut(usize) -> Region) -> Launch {
    let [x, w, y] = [64 * 4, 64 * 4, 64 * 4].map(allocate);
    norm_of(x, w, y)
}

fn norm_of(x: Region, w: Region, y: Region) -> Launch {
    rms_norm(1, 64, 1e-6, x, w, y)
}

#[test]
fn stalled_device_is_lost() {
    let QueueFixture { mut queue, control, launch } = QueueFixture::new("commit", Fault::Hangs);
    let begin = Instant::now();
    queue.launch(&launch).unwrap();
    let error = queue.wait().unwrap_err().to_string();
    assert!(error.contains("completed nothing") && queue.is_lost(), "{error}");
    assert!(queue.launch(&launch).is_err() && queue.wait().is_err() && queue.allocate(8).is_err());
    assert!(begin.elapsed() < Duration::from_secs(60));
    drop(queue);
    assert_eq!(control.lock().unwrap().calls["leak_buffers"], 1, "the device may still write");
}

#[test]
fn failure_before_successful_command_buffer_is_reported() {
    let QueueFixture { mut queue, launch, .. } = QueueFixture::new("commit", Fault::FailsAsleep);
    queue.set_spin(Duration::ZERO);
    queue.launch(&launch).unwrap();
    queue.commit().unwrap();
    queue.launch(&launch).unwrap();
    let last = queue.sync_point();
    let error = queue.wait_for(last).unwrap_err().to_string();
    assert!(error.contains("address fault") && !queue.is_lost(), "{error}");
    queue.launch(&launch).unwrap();
    queue.wait().unwrap();
}

#[test]
fn repeatedly_failing_device_is_lost() {
    let QueueFixture { mut queue, launch, .. } = QueueFixture::new("commit", Fault::Banned);
    let mut failed = 0;
    while !queue.is_lost() {
        queue.launch(&launch).unwrap();
        queue.wait().unwrap_err();
        failed += 1;
    }
    assert_eq!(failed, 3);
    let QueueFixture { mut queue, launch, control } = QueueFixture::new("none", Fault::Refused);
    control.lock().unwrap().fault = Some(Plan { method: "commit", nth: 0, fault: Fault::Fails });
    queue.launch(&launch).unwrap();
    queue.wait().unwrap_err();
    queue.launch(&launch).unwrap();
    assert!(queue.wait().is_ok() && !queue.is_lost(), "the device recovers from one failure");
}

#[test]
fn unreachable_sync_point_is_an_error() {
    let QueueFixture { mut queue, launch, .. } = QueueFixture::new("commit", Fault::Fails);
    queue.launch(&launch).unwrap();
    let point = queue.sync_point();
    assert!(queue.completed() < point);
    assert!(queue.wait_for(point).unwrap_err().to_string().contains("address fault"));
    queue.launch(&launch).unwrap();
    let next = queue.sync_point();
    assert!(next > point && queue.wait_for(next).is_ok() && queue.completed() == next);
}

#[test]
fn failure_persists_until_reported() {
    let QueueFixture { mut queue, launch, .. } = QueueFixture::new("commit", Fault::Fails);
    queue.launch(&launch).unwrap();
    // `release` waits but returns no result.
    queue.release(launch.bindings[1].region.buffer);
    assert!(queue.launch(&launch).is_err() && queue.read_words(launch.bindings[0].region).is_err());
    assert!(queue.wait().is_err());
    assert!(queue.wait().is_ok() && queue.read_words(launch.bindings[0].region).is_ok());
}

#[test]
fn command_buffer_holds_limited_work() {
    let QueueFixture { mut queue, control, launch } = QueueFixture::new("none", Fault::Refused);
    // The double takes 2 ms for any command buffer. In this test, each command buffer has one launch. The time of the
    // last command buffer may not be measured.
    for _ in 0..3 {
        queue.launch(&launch).unwrap();
        queue.commit().unwrap();
    }
    queue.wait().unwrap();
    let committed = || control.lock().unwrap().calls["commit"];
    let before = committed();
    for _ in 0..49 {
        queue.launch(&launch).unwrap();
    }
    assert_eq!(committed(), before, "less than 0.1 s");
    for _ in 0..51 {
        queue.launch(&launch).unwrap();
    }
    assert!(committed() > before, "nothing committed after 0.2 s of work");
    queue.wait().unwrap();
}

#[test]
fn launch_beyond_limits_is_refused() {
    let QueueFixture { mut queue, launch, .. } = QueueFixture::new("none", Fault::Refused);
    let wide = Launch { threads: 2048, ..launch.clone() };
    assert!(queue.launch(&wide).unwrap_err().to_string().contains("2048 threads per threadgroup exceed 1024"));
    let long = Launch { args: vec![0; 1025], ..launch.clone() };
    assert!(queue.launch(&long).unwrap_err().to_string().contains("arguments"));
    let mut outside = launch.clone();
    outside.bindings[0].region.len += 4;
    assert!(queue.launch(&outside).unwrap_err().to_string().contains("outside its buffer"));
    queue.launch(&launch).unwrap();
    queue.wait().unwrap();
}

/// Runs two launches without the queue, in one command buffer or in two. The second launch reads the output of the
/// first.
fn run_two_launches(seed: u64, barrier: bool, fenced: Option<bool>) -> Vec<u8> {
    let mut double = Double::new(Host::fast());
    double.control().lock().unwrap().seed = Some(seed);
    let mut buffers = 0;
    let first = norm(&mut |bytes| {
        double.allocate(buffers, bytes).unwrap();
        buffers += 1;
        Region { buffer: buffers - 1, offset: 0, len: bytes }
    });
    let [x, w, y] = [0, 1, 2].map(|index| first.bindings[index].region);
    let floats: Vec<u8> = (0..64).flat_map(|n| (1.0 + n as f32).to_le_bytes()).collect();
    double.write(x, &floats).unwrap();
    double.write(w, &floats).unwrap();
    let second = norm_of(y, w, x);
    let mut open = double.begin(false).unwrap();
    double.launch(&mut open, &first).unwrap();
    let mut value = 1;
    if let Some(fenced) = fenced {
        double.commit(open, value);
        value += 1;
        open = double.begin(fenced).unwrap();
    } else if barrier {
        double.barrier(&mut open);
    }
    double.launch(&mut open, &second).unwrap();
    let last = double.commit(open, value);
    while double.status(&last) == CommandStatus::Pending
        || fenced.is_some() && double.status(&1) == CommandStatus::Pending
    {
        double.wait_event(value, Duration::ZERO);
    }
    let mut bytes = vec![0; 256];
    double.read(x, &mut bytes).unwrap();
    bytes
}

#[test]
fn double_finds_missing_barrier_and_fence() {
    let right = run_two_launches(0, true, None);
    let always = |barrier, fenced, seeds| (0..seeds).all(|seed| run_two_launches(seed, barrier, fenced) == right);
    assert!(always(true, None, 16) && always(true, Some(true), 16));
    assert!(!always(false, None, 500), "some order must differ without a barrier");
    assert!(!always(false, Some(false), 500), "some order must differ without a fence");
}

#[test]
#[should_panic(expected = "is read by the CPU while it is written")]
fn double_finds_missing_wait() {
    for seed in 0..64 {
        let mut double = Double::new(Host::fast());
        double.control().lock().unwrap().seed = Some(seed);
        let mut buffers = 0;
        let launch = norm(&mut |bytes| {
            double.allocate(buffers, bytes).unwrap();
            buffers += 1;
            Region { buffer: buffers - 1, offset: 0, len: bytes }
        });
        let mut open = double.begin(false).unwrap();
        double.launch(&mut open, &launch).unwrap();
        let committed = double.commit(open, 1);
        double.read(launch.bindings[2].region, &mut [0; 256]).unwrap();
        while double.status(&committed) == CommandStatus::Pending {}
    }
}
