//! CPU time of the calling thread. A test whose work must grow linearly measures this time, because a busy machine changes
//! the time on the clock.

use std::time::Duration;

/// Runs `work` and returns its CPU time on this thread.
pub fn cpu_time_of(work: impl FnOnce()) -> Duration {
    let before = cpu_time();
    work();
    cpu_time() - before
}

fn cpu_time() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is a valid place for the result.
    let failed = unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) };
    assert_eq!(failed, 0, "the clock of a thread");
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}
