//! Tests of `run_jobs`: order, buffers and errors.

use moestro_base::platform::run_jobs;
use std::sync::atomic::{AtomicUsize, Ordering};

#[test]
fn results_follow_the_order_of_jobs() {
    for threads in [0, 1, 2, 7] {
        let squares = run_jobs("squares", threads, (0..1000).collect(), || Ok::<_, ()>(0), |job: u64, _| Ok(job * job));
        assert_eq!(squares.unwrap(), (0..1000).map(|job| job * job).collect::<Vec<_>>());
    }
    assert_eq!(run_jobs("none", 3, Vec::<u64>::new(), || Ok::<_, ()>(()), |job, ()| Ok(job)), Ok(vec![]));
}

#[test]
fn each_thread_has_one_set_of_buffers() {
    let made = AtomicUsize::new(0);
    let make = || Ok::<_, ()>(made.fetch_add(1, Ordering::Relaxed));
    let used = run_jobs("buffers", 3, vec![(); 500], make, |(), buffer| Ok(*buffer)).unwrap();
    assert!(made.into_inner() <= 3 && used.iter().all(|buffer| *buffer < 3));
}

#[test]
fn first_error_stops_the_run() {
    let begun = AtomicUsize::new(0);
    let run = |bad: usize| {
        run_jobs(
            "jobs",
            3,
            (0..1000).collect(),
            || Ok(()),
            |job: usize, ()| {
                begun.fetch_add(1, Ordering::Relaxed);
                if job == bad { Err(job) } else { Ok(()) }
            },
        )
    };
    assert_eq!(run(3).unwrap_err(), 3);
    assert!(begun.swap(0, Ordering::Relaxed) < 1000);
    run(2000).unwrap();
    assert_eq!(begun.into_inner(), 1000);
    assert_eq!(run_jobs("no buffers", 3, vec![1, 2], || Err::<(), _>("none"), |job, ()| Ok(job)), Err("none"));
}
