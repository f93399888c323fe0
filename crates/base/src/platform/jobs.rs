//! Runs I/O jobs on a few short-lived threads. Compute jobs use [`super::Threads`].

use parking_lot::Mutex;
use std::thread;

/// Receives the number of bytes done since its last call.
pub type OnBytes<'a> = &'a (dyn Fn(u64) + Sync);

/// Runs `work(job, buffers)` for all `jobs` on up to `threads` threads named `name`. Returns the results in the order
/// of the jobs. `make_buffers` allocates one set of buffers per thread. After the first error, skips jobs that have not
/// started, and returns the first error.
pub fn run_jobs<J, B, T, E>(
    name: &str,
    threads: usize,
    jobs: Vec<J>,
    make_buffers: impl Fn() -> Result<B, E> + Sync,
    work: impl Fn(J, &mut B) -> Result<T, E> + Sync,
) -> Result<Vec<T>, E>
where
    J: Send,
    T: Send,
    E: Send,
{
    let more = threads.min(jobs.len()).saturating_sub(1);
    let done = Mutex::new(Ok(Vec::with_capacity(jobs.len())));
    let left = Mutex::new(jobs.into_iter().enumerate());
    let next = || if done.lock().is_ok() { left.lock().next() } else { None };
    let serve = || {
        let served = make_buffers().and_then(|mut buffers| {
            while let Some((number, job)) = next() {
                let result = work(job, &mut buffers)?;
                if let Ok(done) = &mut *done.lock() {
                    done.push((number, result));
                }
            }
            Ok(())
        });
        if let Err(error) = served {
            let mut done = done.lock();
            // Keep the first error, which may be the cause of later errors.
            if done.is_ok() {
                *done = Err(error);
            }
        }
    };
    thread::scope(|scope| {
        for _ in 0..more {
            // If a thread cannot be started, the other threads run its jobs.
            let _ = thread::Builder::new().name(name.into()).spawn_scoped(scope, serve);
        }
        serve();
    });
    let mut done = done.into_inner()?;
    done.sort_unstable_by_key(|(number, _)| *number);
    Ok(done.into_iter().map(|(_, result)| result).collect())
}
