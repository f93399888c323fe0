use super::*;
use serde_json::json;
use tokio::{
    task::JoinSet,
    time::{sleep, timeout},
};

const MIB: usize = 1 << 20;

fn memory(bytes: usize) -> Arc<RequestMemory> {
    let memory = RequestMemory::new(&Metrics::new("0", "cpu"));
    memory.set_plan((bytes + STEP_BYTES) as u64);
    memory
}

#[test]
fn dropped_permit_frees_its_memory() {
    let memory = memory(1 << 20);
    let mut one = memory.permit();
    let mut other = memory.permit();
    one.resize(700 << 10).unwrap();
    assert_eq!(other.resize(300 << 10).unwrap_err().status, 503, "another request holds it");
    assert_eq!(other.resize(2 << 20).unwrap_err().status, 413, "more than the plan has");
    other.resize(200 << 10).unwrap();
    other.grow(50 << 10).unwrap();
    assert_eq!(memory.gauge.get(), 950 << 10);
    one.resize(1).unwrap();
    other.resize(700 << 10).unwrap();
    drop((one, other));
    assert_eq!((memory.used.load(Relaxed), memory.gauge.get()), (0, 0));
}

#[test]
fn lone_request_never_gets_503() {
    let memory = memory(1 << 20);
    // The request fills 700 KiB, in any number of permits. It may have 768 KiB.
    for permits in [1, 2, 7, 70] {
        let mut more = memory.permit();
        let mut all: Vec<_> = (0..permits).map(|_| more.reserve((700 << 10) / permits).unwrap()).collect();
        let mut small = memory.permit();
        assert_eq!(more.resize(69 << 10).unwrap_err().status, 413, "{permits} permits");
        more.resize(60 << 10).unwrap();
        // Another request waits for this one only if it would fit alone.
        let other = memory.permit().resize(500 << 10).unwrap_err();
        assert_eq!(other.status, 503, "{permits} permits");
        assert_eq!(memory.permit().resize(800 << 10).unwrap_err().status, 413, "{permits} permits");
        small.resize(200 << 10).unwrap();
        // Freed permits no longer count as the request's own.
        all.clear();
        more.resize(500 << 10).unwrap();
    }
    assert_eq!(memory.used.load(Relaxed), 0);
}

#[test]
fn large_plan_allows_two_steps() {
    let memory = RequestMemory::new(&Metrics::new("0", "cpu"));
    let enough = TWO_STEPS_BYTES;
    for (bytes, steps) in [(enough - 1, 1), (enough, 2), (2 * enough, 2), (enough / 2, 1), (enough, 2)] {
        memory.set_plan(bytes as u64);
        assert_eq!(memory.steps.available_permits(), steps, "{bytes} bytes");
        assert_eq!(memory.total(), bytes - steps * STEP_BYTES, "{bytes} bytes");
    }
    let _running = [1, 2].map(|_| memory.steps.try_acquire().unwrap());
    memory.set_plan(enough as u64 / 2);
    assert_eq!(memory.total(), enough / 2 - 2 * STEP_BYTES, "two steps still run");
}

#[test]
fn large_permits_leave_room_for_small() {
    let memory = memory(4 << 20);
    let mut large = [memory.permit(), memory.permit(), memory.permit(), memory.permit()];
    let granted = large.iter_mut().filter_map(|permit| permit.resize(1 << 20).ok()).count();
    assert_eq!(granted, 3);
    memory.permit().resize(LARGE_BYTES).unwrap();
}

#[tokio::test]
async fn waiting_step_holds_no_working_memory() {
    let memory = memory(1 << 20);
    let running = memory.steps.clone().acquire_owned().await.unwrap();
    let permit = memory.permit();
    let mut waiting = std::pin::pin!(permit.run(600 << 10, || 7));
    assert!(timeout(Duration::from_millis(20), &mut waiting).await.is_err());
    assert_eq!(memory.gauge.get(), 0);
    drop(running);
    assert_eq!(waiting.await.unwrap(), 7);
}

/// Starts a step that needs `bytes` and runs until the sender is dropped.
async fn running_step(memory: &Arc<RequestMemory>, bytes: usize) -> (std::sync::mpsc::Sender<()>, JoinSet<()>) {
    let (release, wait) = std::sync::mpsc::channel::<()>();
    let permit = memory.permit();
    let mut tasks = JoinSet::new();
    tasks.spawn(async move { _ = permit.run(bytes, move || wait.recv()).await.unwrap() });
    while memory.used() < bytes {
        sleep(Duration::from_millis(1)).await;
    }
    (release, tasks)
}

#[tokio::test]
async fn step_waits_for_memory_of_steps() {
    let memory = memory(64 * MIB);
    memory.set_plan((64 * MIB + 2 * STEP_BYTES) as u64);
    let (release, mut running) = running_step(&memory, 40 * MIB).await;
    let mut waiting = JoinSet::new();
    for bytes in [30 * MIB, 40 * MIB, 48 * MIB, 40 * MIB] {
        let permit = memory.permit();
        waiting.spawn(async move { permit.run(bytes, || ()).await });
    }
    sleep(Duration::from_millis(20)).await;
    // The second turn is free for steps that fit.
    for bytes in [0, LARGE_BYTES, 8 * MIB] {
        timeout(Duration::from_secs(5), memory.permit().run(bytes, || ())).await.expect("it fits").unwrap();
    }
    assert_eq!(memory.permit().run(60 * MIB, || ()).await.unwrap_err().status, 413, "more than the plan has");
    assert!(waiting.try_join_next().is_none(), "it waits");
    drop(release);
    running.join_next().await.unwrap().unwrap();
    while let Some(waited) = waiting.join_next().await {
        waited.unwrap().unwrap();
    }
    assert_eq!((memory.used(), *memory.working_steps.lock()), (0, 0));
}

#[tokio::test]
async fn step_waits_for_limited_time() {
    let mut memory = memory(64 * MIB);
    Arc::get_mut(&mut memory).unwrap().entrance = Entrance::new(Duration::from_millis(100));
    memory.set_plan((64 * MIB + 2 * STEP_BYTES) as u64);
    let (release, mut running) = running_step(&memory, 40 * MIB).await;
    let permit = memory.permit();
    let refused = timeout(Duration::from_secs(60), permit.run(40 * MIB, || ())).await.expect("the time is limited");
    assert_eq!(refused.unwrap_err().status, 503);
    // Memory that was just freed gives no further time.
    let deadline = Instant::now();
    assert!(entrance::wait_before(deadline, std::future::ready(())).await.is_err());
    drop(release);
    running.join_next().await.unwrap().unwrap();
}

#[tokio::test]
async fn empty_permit_wakes_no_request() {
    let memory = memory(MIB);
    let freed = memory.entrance.freed();
    let began = Instant::now();
    drop(memory.permit().reserve(0).unwrap());
    freed.await;
    assert!(began.elapsed() >= Duration::from_millis(200), "it was woken after {:?}", began.elapsed());
}

#[tokio::test]
async fn kept_memory_of_step_stays_counted() {
    let memory = memory(64 * MIB);
    for (working, kept, expected) in [(20 * MIB, 3 * MIB, 3 * MIB), (MIB, MIB, MIB), (MIB, 2 * MIB, MIB), (MIB, 0, 0)] {
        let mut permit = memory.permit();
        permit.resize(1000).unwrap();
        assert_eq!(permit.run_and_keep(working, || 7, move |_| kept).await.unwrap(), 7);
        assert_eq!((permit.bytes(), memory.used()), (1000 + expected, 1000 + expected));
        assert_eq!(*memory.working_steps.lock(), 0);
        drop(permit);
        assert_eq!((memory.used(), memory.gauge.get()), (0, 0));
    }
}

#[tokio::test]
async fn step_beside_idle_requests_is_refused() {
    let memory = memory(MIB);
    let held = memory.permit().reserve(700 << 10).unwrap();
    let refused = timeout(Duration::from_secs(5), memory.permit().run(600 << 10, || ())).await.expect("no step ends");
    assert_eq!(refused.unwrap_err().status, 503);
    drop(held);
}

#[tokio::test]
async fn compilation_does_not_delay_steps() {
    let memory = memory(64 << 20);
    let (release, wait) = std::sync::mpsc::channel::<()>();
    let compiling = memory.permit();
    let compile = tokio::spawn(async move { compiling.run_compilation(1 << 20, move || wait.recv()).await });
    while memory.gauge.get() == 0 {
        sleep(Duration::from_millis(1)).await;
    }
    assert_eq!(memory.permit().run(0, || 7).await.unwrap(), 7);
    drop(release);
    compile.await.unwrap().unwrap().unwrap_err();
    assert_eq!(memory.gauge.get(), 0);
}

#[tokio::test]
async fn abandoned_compilation_blocks_no_other() {
    let memory = memory(64 << 20);
    // Compilations that cannot stop, although their clients disconnect.
    let mut abandoned = Vec::new();
    while abandoned.len() < COMPILER_THREADS {
        let permit = memory.permit();
        let compiled = permit.run_compilation(1 << 20, || 7);
        let compiled = timeout(Duration::from_secs(20), compiled).await;
        assert_eq!(compiled.expect("the others block it").unwrap(), 7, "beside {}", abandoned.len());
        let (release, wait) = std::sync::mpsc::channel::<()>();
        let (sender, started) = tokio::sync::oneshot::channel();
        let compile = move || {
            let _ = sender.send(());
            wait.recv()
        };
        let compiling = tokio::spawn(async move { permit.run_compilation(1 << 20, compile).await });
        started.await.unwrap();
        compiling.abort();
        assert!(compiling.await.unwrap_err().is_cancelled());
        abandoned.push(release);
        assert_eq!(memory.gauge.get(), (abandoned.len() as i64) << 20);
    }
    // The number of threads is limited.
    let permit = memory.permit();
    let mut waiting = std::pin::pin!(permit.run_compilation(1 << 20, || 7));
    let early = timeout(Duration::from_millis(50), &mut waiting).await;
    assert!(early.is_err(), "{} threads compile", COMPILER_THREADS + 1);
    abandoned.clear();
    assert_eq!(waiting.await.unwrap(), 7);
    while memory.gauge.get() > 0 {
        sleep(Duration::from_millis(1)).await;
    }
}

#[tokio::test]
async fn freed_memory_is_trimmed_twice() {
    let memory = memory(64 << 20);
    memory.permit().resize(TRIM_BYTES).unwrap();
    assert!(!memory.is_trimming.load(Relaxed), "too little to trim");
    memory.permit().resize(TRIM_BYTES).unwrap();
    assert!(memory.is_trimming.load(Relaxed));
    let finished = timeout(Duration::from_secs(20), async {
        while memory.is_trimming.load(Relaxed) {
            sleep(Duration::from_millis(10)).await;
        }
    });
    finished.await.expect("trimming ends");
    assert_eq!(memory.freed.load(Relaxed), 0);
}

#[test]
fn punctuation_in_strings_is_not_counted() {
    assert_eq!(parsed_bytes(br#"{"a": [0, 0], "b,:[{": "\"[,"}"#), 30 + 6 * JSON_VALUE_BYTES);
    assert_eq!(parsed_bytes(b""), 0);
}

#[test]
fn rendering_counts_texts_and_names() {
    assert_eq!(rendering_bytes([&json!("abcd")]), JSON_VALUE_BYTES + 20);
    assert_eq!(rendering_bytes([&json!({"ab": [1, null]})]), 5 * JSON_VALUE_BYTES + 10);
}

#[tokio::test]
async fn requests_at_once_enter_one_after_another() {
    let memory = memory(24 * MIB);
    let mut all = JoinSet::new();
    for index in 0..200 {
        let memory = memory.clone();
        all.spawn(async move {
            let mut permit = memory.permit();
            permit.resize(50 << 10).unwrap();
            permit.enter((300 << 10) + index * (7 << 10)).await.unwrap();
            // A small request also enters.
            memory.permit().enter(100 << 10).await.unwrap();
            sleep(Duration::from_millis(1)).await;
            // The prompt is made in more memory.
            drop(permit.reserve(MIB).unwrap());
            permit.resize(20 << 10).unwrap();
            permit.leave_entrance();
            sleep(Duration::from_millis(50)).await;
        });
    }
    while let Some(done) = all.join_next().await {
        done.unwrap();
    }
    assert!(memory.used() == 0 && memory.entrance.is_empty());
}

#[tokio::test]
async fn waiting_request_holds_nothing_and_may_leave() {
    let memory = memory(24 * MIB);
    let mut first = memory.permit();
    first.enter(3 * MIB).await.unwrap();
    let [mut second, mut third] = [memory.permit(), memory.permit()];
    let gone = timeout(Duration::from_millis(20), second.enter(3 * MIB)).await;
    assert!(gone.is_err(), "it waits for the first request");
    assert_eq!(memory.used(), 3 * MIB);
    let waiting = tokio::spawn(async move {
        third.enter(3 * MIB).await.unwrap();
        third
    });
    sleep(Duration::from_millis(20)).await;
    assert!(!waiting.is_finished());
    first.leave_entrance();
    let third = waiting.await.unwrap();
    assert_eq!(memory.used(), 6 * MIB);
    // A request that alone needs more than this part only waits for memory.
    second.enter(8 * MIB).await.unwrap();
    drop(third);
}

#[tokio::test]
async fn wait_for_memory_ends() {
    let entrance = Entrance::new(Duration::from_millis(50));
    let refused = entrance.enter(1, 1, || MIB, || Ok(false)).await;
    assert_eq!(refused.err().unwrap().status, 503);
    let too_large = entrance.enter(1, 1, || MIB, || Err(ApiError::too_much_memory(1, 1))).await;
    assert_eq!(too_large.err().unwrap().status, 413);
    assert!(entrance.is_empty());
}

#[tokio::test]
async fn small_request_waits_only_for_memory() {
    let memory = memory(MIB);
    let [mut large, mut small, mut last] = [memory.permit(), memory.permit(), memory.permit()];
    large.enter(MIB / 4 * 3).await.unwrap();
    small.enter(MIB / 4).await.unwrap();
    let mut entered = std::pin::pin!(last.enter(1));
    assert!(timeout(Duration::from_millis(20), &mut entered).await.is_err());
    drop(large);
    entered.await.unwrap();
}

#[tokio::test]
async fn request_that_fits_passes_others() {
    let memory = memory(24 * MIB);
    let [mut running, mut inside, mut large, mut other] = std::array::from_fn(|_| memory.permit());
    running.resize(10 * MIB).unwrap();
    inside.enter(MIB).await.unwrap();
    // It waits for memory.
    let waits = tokio::spawn(async move { large.enter(9 * MIB).await.map(|()| large) });
    sleep(Duration::from_millis(20)).await;
    assert!(!waits.is_finished());
    timeout(Duration::from_secs(5), other.enter(MIB)).await.expect("it fits").unwrap();
    let too_large = timeout(Duration::from_secs(5), memory.permit().enter(30 * MIB)).await;
    assert_eq!(too_large.expect("it fits nowhere").unwrap_err().status, 413);
    drop((running, inside, other));
    drop(waits.await.unwrap().unwrap());
    assert!(memory.entrance.is_empty());
}

#[tokio::test]
async fn largest_requests_enter_one_by_one() {
    let memory = memory(24 * MIB);
    let [mut first, mut second, mut small, mut full] = std::array::from_fn(|_| memory.permit());
    first.enter(4 * MIB).await.unwrap();
    assert!(timeout(Duration::from_millis(20), second.enter(4 * MIB)).await.is_err());
    // A small request only waits for memory, also beside those inside.
    full.enter(3 * MIB).await.unwrap();
    small.enter(LARGE_BYTES).await.unwrap();
    first.leave_entrance();
    second.enter(4 * MIB).await.unwrap();
    drop((first, second, small, full));
    assert!(memory.entrance.is_empty());
}

#[tokio::test]
async fn waiting_bodies_take_half_at_most() {
    let entrance = Entrance::new(Duration::from_secs(5));
    let first = timeout(Duration::from_millis(20), entrance.enter(MIB, 1, || 2 * MIB, || Ok(false)));
    let second = entrance.enter(1, 1, || 2 * MIB, || Ok(true));
    let (first, second) = tokio::join!(first, second);
    assert!(first.is_err(), "it waits");
    assert_eq!(second.err().unwrap().status, 503);
    assert!(entrance.is_empty());
}

/// The template's values of a call need the same memory, whether its arguments are text or an object.
#[test]
fn arguments_as_text_count_like_an_object() {
    let nested = "[[[0]]],".repeat(1000);
    let names: String = (0..1000).map(|name| format!(r#""{name}":{{"":""}},"#)).collect();
    for json in [r#"{"a":1}"#.into(), format!(r#"{{"a":[{nested}0]}}"#), format!(r#"{{{names}"b":{{}}}}"#)] {
        let [text, object]: [Value; 2] = [json.clone().into(), serde_json::from_str(&json).unwrap()];
        let bytes = |arguments: Value| {
            let calls = vec![ToolCall::new(Value::Null, "f", arguments)];
            message_bytes(&Message::<()>::assistant(String::new(), String::new(), calls))
        };
        let (text, object) = (bytes(text), bytes(object));
        assert!(text >= object && text < 2 * object, "{text} and {object}");
    }
}
