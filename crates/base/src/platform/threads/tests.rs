use super::*;

fn add(sum: &AtomicUsize, number: usize) {
    sum.fetch_add(number, Ordering::Relaxed);
}

#[test]
fn every_task_runs_once() {
    for count in [1, 2, 5] {
        let threads = Threads::new(count);
        for tasks in [0, 1, 2, 3, 1000] {
            let hits: Vec<AtomicUsize> = (0..tasks).map(|_| AtomicUsize::new(0)).collect();
            threads.run(tasks, &|task| add(&hits[task], 1));
            assert!(hits.iter().all(|hit| hit.load(Ordering::Relaxed) == 1), "{count} threads, {tasks} tasks");
        }
    }
}

#[test]
fn consecutive_jobs_run_with_and_without_pauses() {
    let threads = Threads::new(3);
    let sum = AtomicUsize::new(0);
    for round in 0..2000 {
        threads.run(7, &|task| add(&sum, task));
        if round % 500 == 0 {
            std::thread::sleep(SPIN * 3);
        }
    }
    assert_eq!(sum.into_inner(), 2000 * 21);
}

/// Runs one task per thread. Each task waits until all tasks have begun, so all threads must run at the same time.
fn run_on_all_threads(threads: &Threads) {
    let began = AtomicUsize::new(0);
    let since = Instant::now();
    threads.run(threads.count(), &|_| {
        began.fetch_add(1, Ordering::Relaxed);
        while began.load(Ordering::Relaxed) < threads.count() {
            assert!(since.elapsed() < Duration::from_secs(60), "a thread did not wake up");
            std::thread::yield_now();
        }
    });
}

#[test]
fn all_parked_threads_wake_up() {
    let threads = Threads::new(7);
    threads.run(7, &|_| {});
    std::thread::sleep(SPIN * 20);
    run_on_all_threads(&threads);
}

#[test]
fn expected_pause_shortens_the_spin_time() {
    let threads = Threads::new(2);
    let job = || {
        run_on_all_threads(&threads);
        threads.pool.spin_time(threads.pool.number.0.load(Ordering::Relaxed))
    };
    assert_eq!(job(), SPIN);
    threads.expect_pause();
    assert_eq!(threads.pool.spin_time(1), SPIN_BEFORE_PAUSE);
    assert_eq!(job(), SPIN);
    let since = Instant::now();
    job();
    while threads.pool.parked.0.load(Ordering::Relaxed) < 1 {
        std::thread::yield_now();
    }
    assert!(since.elapsed() >= SPIN);
}

#[test]
fn panic_reaches_caller_and_pool_survives() {
    let threads = Threads::new(3);
    for bad in 0..8 {
        let caught = catch_unwind(AssertUnwindSafe(|| threads.run(8, &|task| assert_ne!(task, bad))));
        assert!(caught.is_err());
    }
    let sum = AtomicUsize::new(0);
    threads.run(8, &|task| add(&sum, task));
    assert_eq!(sum.into_inner(), 28);
}

#[test]
fn nested_and_concurrent_callers_finish() {
    let threads = Threads::new(2);
    let sum = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..200 {
                    threads.run(3, &|_| threads.run(2, &|_| add(&sum, 1)));
                }
            });
        }
    });
    assert_eq!(sum.into_inner(), 4 * 200 * 6);
}

#[test]
fn run_split_covers_the_range() {
    let threads = Threads::new(3);
    for (len, min) in [(0, 1), (1, 4), (17, 4), (1000, 1)] {
        let hits: Vec<AtomicUsize> = (0..len).map(|_| AtomicUsize::new(0)).collect();
        threads.run_split(len, min, &|range| range.for_each(|index| add(&hits[index], 1)));
        assert!(hits.iter().all(|hit| hit.load(Ordering::Relaxed) == 1));
    }
}
