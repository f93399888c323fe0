use super::*;

#[test]
fn every_task_runs_once() {
    for count in [1, 2, 5] {
        let threads = Threads::new(count);
        for tasks in [0, 1, 2, 3, 1000] {
            let hits: Vec<AtomicUsize> = (0..tasks).map(|_| AtomicUsize::new(0)).collect();
            threads.run(tasks, &|task| {
                hits[task].fetch_add(1, Ordering::Relaxed);
            });
            assert!(hits.iter().all(|hit| hit.load(Ordering::Relaxed) == 1), "{count} threads, {tasks} tasks");
        }
    }
}

#[test]
fn jobs_follow_each_other_with_and_without_sleep() {
    let threads = Threads::new(3);
    let sum = AtomicUsize::new(0);
    for round in 0..2000 {
        threads.run(7, &|task| {
            sum.fetch_add(task, Ordering::Relaxed);
        });
        if round % 500 == 0 {
            std::thread::sleep(SPIN * 3);
        }
    }
    assert_eq!(sum.into_inner(), 2000 * 21);
}

/// A job of as many tasks as threads, each of which waits for all others, so that each needs a thread of its own.
fn meet(threads: &Threads) {
    let (began, since) = (AtomicUsize::new(0), Instant::now());
    threads.run(threads.count(), &|_| {
        began.fetch_add(1, Ordering::Relaxed);
        while began.load(Ordering::Relaxed) < threads.count() {
            assert!(since.elapsed() < Duration::from_secs(10), "somebody sleeps on");
            std::thread::yield_now();
        }
    });
}

#[test]
fn all_who_sleep_are_woken() {
    let threads = Threads::new(7);
    threads.run(7, &|_| {});
    std::thread::sleep(SPIN * 20);
    meet(&threads);
}

#[test]
fn nobody_spins_for_long_until_the_job_behind_a_rest() {
    let threads = Threads::new(2);
    let job = || {
        meet(&threads);
        threads.pool.patience(threads.pool.number.0.load(Ordering::Relaxed))
    };
    assert_eq!(job(), SPIN);
    threads.rest();
    assert_eq!(threads.pool.patience(1), REST);
    assert_eq!(job(), SPIN);
    let since = Instant::now();
    job();
    while threads.pool.parked.0.load(Ordering::Relaxed) < 1 {
        std::thread::yield_now();
    }
    assert!(since.elapsed() >= SPIN);
}

#[test]
fn a_panic_reaches_the_caller_and_the_pool_lives_on() {
    let threads = Threads::new(3);
    for bad in 0..8 {
        let caught = catch_unwind(AssertUnwindSafe(|| threads.run(8, &|task| assert_ne!(task, bad))));
        assert!(caught.is_err());
    }
    let sum = AtomicUsize::new(0);
    threads.run(8, &|task| {
        sum.fetch_add(task, Ordering::Relaxed);
    });
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
                    threads.run(3, &|_| {
                        threads.run(2, &|_| {
                            sum.fetch_add(1, Ordering::Relaxed);
                        })
                    });
                }
            });
        }
    });
    assert_eq!(sum.into_inner(), 4 * 200 * 6);
}

#[test]
fn split_covers_the_range() {
    let threads = Threads::new(3);
    for (len, least) in [(0, 1), (1, 4), (17, 4), (1000, 1)] {
        let hits: Vec<AtomicUsize> = (0..len).map(|_| AtomicUsize::new(0)).collect();
        threads.run_split(len, least, &|range| {
            for index in range {
                hits[index].fetch_add(1, Ordering::Relaxed);
            }
        });
        assert!(hits.iter().all(|hit| hit.load(Ordering::Relaxed) == 1));
    }
}
