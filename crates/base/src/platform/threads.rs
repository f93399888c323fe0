//! [`Threads`]: a pool of compute threads that run one parallel job at a time and do not sleep between layers.
//!
//! A token takes several hundred short jobs with microseconds between them, so an idle worker spins before it parks.
//! The calling thread also runs tasks. Each thread owns a range of adjacent tasks and claims tasks one by one from the
//! front of its range, so that the thread reads memory in order. A thread that has finished its range claims tasks of
//! other ranges, so a slow core runs fewer tasks.
//!
//! With many cores, writing one shared cache line from all cores takes longer than a job. Therefore no cache line is
//! written by all threads. The caller publishes a job by incrementing the job number, which workers only read. Each
//! worker stores the number of its current or last job in its own cache line. At the end of a job, the caller reads
//! these cache lines. The caller withdraws the job from workers that have not entered the job, so no job waits for a
//! worker that is still waking up.
//!
//! Waking a thread takes the caller microseconds, and the thread runs tens of microseconds later. Waking fifteen
//! threads one after the other would be too slow. The caller therefore wakes only the first worker of every group of
//! [`WAKE_GROUP`] workers. The first worker wakes the other workers of its group.

use parking_lot::Mutex;
use std::{
    any::Any,
    cell::UnsafeCell,
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    thread::{JoinHandle, Thread},
    time::{Duration, Instant},
};

/// Time for which an idle worker spins before it parks. This time is longer than the serial work between two jobs or
/// two forward passes, such as sampling from 250,000 tokens. With 150 us, some of sixteen workers woke up late on one
/// machine.
const SPIN: Duration = Duration::from_millis(1);
/// Time for which an idle worker spins after [`Threads::expect_pause`].
const SPIN_BEFORE_PAUSE: Duration = Duration::from_micros(150);
/// Time after which a spinning worker yields its core to other processes between two checks.
const SPIN_BEFORE_YIELD: Duration = Duration::from_micros(20);
/// Number of workers in a group. The first worker of a group wakes the other workers.
const WAKE_GROUP: usize = 4;

type ParallelJob<'a> = &'a (dyn Fn(usize) + Sync);

/// A pool of compute threads. The calling thread is one of these threads.
pub struct Threads {
    pool: Arc<ThreadPool>,
    workers: Vec<JoinHandle<()>>,
    /// Locked while a job runs. A concurrent or nested call does not wait, but runs all of its tasks on the calling
    /// thread.
    caller: Mutex<()>,
}

#[derive(Default)]
struct ThreadPool {
    /// Number of the last published job.
    number: CacheAligned<AtomicU64>,
    /// The last published job. Written only while no worker is in a job.
    job: UnsafeCell<Option<ParallelJob<'static>>>,
    /// The task range of each thread. The caller's range is the first.
    ranges: Vec<CacheAligned<TaskRange>>,
    workers: Vec<CacheAligned<WorkerState>>,
    quit: AtomicBool,
    panicked: AtomicBool,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    /// Number of parked workers.
    parked: CacheAligned<AtomicUsize>,
    /// Job number at the last call of [`Threads::expect_pause`].
    pause_expected_after: AtomicU64,
}

/// The state of a worker.
#[derive(Default)]
struct WorkerState {
    /// `2 * number` of the worker's last job, plus 1 while the worker runs it.
    job: AtomicU64,
    /// True if the worker is parked or about to park.
    is_parked: AtomicBool,
    thread: OnceLock<Thread>,
}

/// A value in its own pair of cache lines, since processors prefetch cache lines in pairs.
#[derive(Default)]
#[repr(align(128))]
struct CacheAligned<T>(T);

/// The tasks that belong to one thread.
#[derive(Default)]
struct TaskRange {
    next: AtomicUsize,
    end: AtomicUsize,
}

// SAFETY: a thread writes `job` only while it holds the lock `Threads::caller` and no worker is in a job. Only workers
// that have entered the job read it. All other fields are Sync.
unsafe impl Sync for ThreadPool {}
// SAFETY: the job is a shared reference to a Sync closure.
unsafe impl Send for ThreadPool {}

impl Threads {
    /// A pool of `count` threads: the caller and `count - 1` workers. If the system cannot start a worker, the pool is
    /// smaller.
    pub fn new(count: usize) -> Self {
        let count = count.max(1);
        let pool = Arc::new(ThreadPool {
            ranges: (0..count).map(|_| CacheAligned::default()).collect(),
            workers: (1..count).map(|_| CacheAligned::default()).collect(),
            ..ThreadPool::default()
        });
        let workers = (1..count)
            .map_while(|index| {
                let pool = pool.clone();
                std::thread::Builder::new()
                    .name(format!("compute-{index}"))
                    .spawn(move || {
                        super::os::interactive_thread();
                        pool.work(index);
                    })
                    .ok()
            })
            .collect();
        Self { pool, workers, caller: Mutex::new(()) }
    }

    pub fn count(&self) -> usize {
        self.workers.len() + 1
    }

    /// Announces a pause before the next job, because the caller is about to wait for a disk. During the pause, idle
    /// workers spin for a shorter time before they park.
    pub fn expect_pause(&self) {
        self.pool.pause_expected_after.store(self.pool.number.0.load(Ordering::Relaxed), Ordering::Relaxed);
    }

    /// Calls `job(i)` exactly once for every `i` in `0..tasks`, on any thread. Returns when all calls have ended.
    ///
    /// If a task panics, skips tasks that have not started, and resumes the panic after every thread has left the job.
    pub fn run(&self, tasks: usize, job: &(dyn Fn(usize) + Sync)) {
        let caller = if tasks > 1 && !self.workers.is_empty() { self.caller.try_lock() } else { None };
        let Some(caller) = caller else {
            (0..tasks).for_each(job);
            return;
        };
        let number = self.pool.publish(job, tasks);
        let own = catch_unwind(AssertUnwindSafe(|| self.pool.claim(0, job)));
        if own.is_err() {
            self.pool.cancel();
        }
        let panicked = self.pool.close(number);
        let others = if panicked { self.pool.panic.lock().take() } else { None };
        if let Some(panic) = own.err().or(others) {
            drop(caller);
            resume_unwind(panic);
        }
    }

    /// Splits `0..len` into ranges of at least `min` values (the last range may be shorter) and calls `job(start..end)`
    /// for each range.
    ///
    /// There are about four ranges per thread, so that all threads finish at about the same time. The ranges depend on
    /// the number of threads, so the caller's result must not depend on the ranges.
    pub fn run_split(&self, len: usize, min: usize, job: &(dyn Fn(std::ops::Range<usize>) + Sync)) {
        let size = len.div_ceil(4 * self.count()).max(min).max(1);
        let size = if self.count() == 1 { len.max(1) } else { size };
        self.run(len.div_ceil(size), &|task| job(task * size..((task + 1) * size).min(len)));
    }

    /// Splits `data` into pieces of `size` values (the last piece may be shorter) and calls `job(i, piece)` for each
    /// piece.
    pub fn run_pieces<T: Send>(&self, data: &mut [T], size: usize, job: &(dyn Fn(usize, &mut [T]) + Sync)) {
        struct Base<T>(*mut T);
        // SAFETY: each piece goes to one task, and T is Send.
        unsafe impl<T: Send> Sync for Base<T> {}
        let len = data.len();
        let size = size.max(1);
        let base = Base(data.as_mut_ptr());
        self.run(len.div_ceil(size), &|task| {
            let base = &base;
            let start = task * size;
            // SAFETY: in bounds of `data`, which is borrowed mutably until `run` returns. Different tasks get disjoint
            // pieces.
            let piece = unsafe { std::slice::from_raw_parts_mut(base.0.add(start), size.min(len - start)) };
            job(task, piece);
        });
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        self.pool.quit.store(true, Ordering::SeqCst);
        for worker in &self.workers {
            worker.thread().unpark();
        }
        for worker in self.workers.drain(..) {
            let _ = worker.join();
        }
    }
}

impl ThreadPool {
    /// Publishes a job and returns its number.
    fn publish(&self, job: ParallelJob<'_>, tasks: usize) -> u64 {
        // SAFETY: only the lifetime changes. `close` returns after the last worker has left the job, so `job` is alive.
        let job = unsafe { std::mem::transmute::<ParallelJob<'_>, ParallelJob<'static>>(job) };
        // SAFETY: the caller holds `caller`, and the previous job is closed, so no worker is in a job.
        unsafe { *self.job.get() = Some(job) };
        let count = self.ranges.len();
        for (index, CacheAligned(range)) in self.ranges.iter().enumerate() {
            range.next.store(index * tasks / count, Ordering::Relaxed);
            range.end.store((index + 1) * tasks / count, Ordering::Relaxed);
        }
        let number = self.number.0.load(Ordering::Relaxed) + 1;
        // Sequentially consistent with `parked`: either a parking worker sees the new number, or `wake` sees the
        // worker.
        self.number.0.store(number, Ordering::SeqCst);
        self.wake(self.workers.iter().step_by(WAKE_GROUP));
        number
    }

    /// Unparks the parked workers among `workers`.
    fn wake<'a>(&self, workers: impl Iterator<Item = &'a CacheAligned<WorkerState>>) {
        if self.parked.0.load(Ordering::SeqCst) == 0 {
            return;
        }
        for CacheAligned(worker) in workers.filter(|worker| worker.0.is_parked.load(Ordering::SeqCst)) {
            if let Some(thread) = worker.thread.get() {
                thread.unpark();
            }
        }
    }

    /// Removes all tasks that have not started from the job.
    fn cancel(&self) {
        for CacheAligned(range) in &self.ranges {
            let end = range.end.load(Ordering::Relaxed);
            if range.next.load(Ordering::Relaxed) < end {
                range.next.fetch_max(end, Ordering::Relaxed);
            }
        }
    }

    /// Ends the job: withdraws the job from workers that have not entered it, and waits for workers that have entered
    /// it. Returns true if a task panicked.
    fn close(&self, number: u64) -> bool {
        let done = 2 * number;
        let inside = 2 * number + 1;
        for CacheAligned(WorkerState { job: at, .. }) in &self.workers {
            let mut turns = 0u32;
            loop {
                match at.load(Ordering::Acquire) {
                    now if now == done => break,
                    now if now == inside => {
                        turns += 1;
                        // The worker may have lost its core to another process. Yielding lets it run on this core.
                        if turns.is_multiple_of(256) { std::thread::yield_now() } else { std::hint::spin_loop() }
                    }
                    before => {
                        let taken = at.compare_exchange(before, done, Ordering::AcqRel, Ordering::Relaxed);
                        if taken.is_ok() {
                            break;
                        }
                    }
                }
            }
        }
        self.panicked.swap(false, Ordering::Relaxed)
    }

    /// Runs tasks until no task is left. Starts with the tasks of thread `own`.
    fn claim(&self, own: usize, job: ParallelJob<'_>) {
        let (before, after) = self.ranges.split_at(own);
        for CacheAligned(range) in after.iter().chain(before) {
            let end = range.end.load(Ordering::Relaxed);
            // The check before `fetch_add` keeps the counter close to `end`.
            while range.next.load(Ordering::Relaxed) < end {
                let task = range.next.fetch_add(1, Ordering::Relaxed);
                if task < end {
                    job(task);
                }
            }
        }
    }

    /// The loop of one worker.
    fn work(&self, own: usize) {
        let CacheAligned(WorkerState { job: at, thread, .. }) = &self.workers[own - 1];
        let _ = thread.set(std::thread::current());
        let mut done = 0;
        while let Some(number) = self.enter(own, done) {
            // SAFETY: this worker has entered the job, so the job is set, alive and not being written.
            if let Some(job) = unsafe { *self.job.get() }
                && let Err(panic) = catch_unwind(AssertUnwindSafe(|| self.claim(own, job)))
            {
                self.cancel();
                *self.panic.lock() = Some(panic);
                self.panicked.store(true, Ordering::Relaxed);
            }
            at.store(2 * number, Ordering::Release);
            done = number;
        }
    }

    /// Waits for a job with a number above `done` and enters it. Returns `None` when the pool is dropped.
    fn enter(&self, own: usize, mut done: u64) -> Option<u64> {
        let group =
            if own % WAKE_GROUP == 1 { &self.workers[own..self.workers.len().min(own + WAKE_GROUP - 1)] } else { &[] };
        let CacheAligned(WorkerState { job: at, .. }) = &self.workers[own - 1];
        let mut since = Instant::now();
        let mut turns = 0u32;
        loop {
            let number = self.number.0.load(Ordering::Acquire);
            if number != done {
                self.wake(group.iter());
                // The exchange fails if the caller has already withdrawn the job.
                let before = at.load(Ordering::Relaxed);
                let entered = before < 2 * number
                    && at.compare_exchange(before, 2 * number + 1, Ordering::AcqRel, Ordering::Relaxed).is_ok();
                if entered {
                    return Some(number);
                }
                done = number;
                continue;
            }
            if self.quit.load(Ordering::Relaxed) {
                return None;
            }
            turns += 1;
            if !turns.is_multiple_of(64) {
                std::hint::spin_loop();
                continue;
            }
            let idle = since.elapsed();
            if idle > self.spin_time(done) {
                self.park(own, done);
                since = Instant::now();
            } else if idle > SPIN_BEFORE_YIELD {
                std::thread::yield_now();
            }
        }
    }

    /// Time to spin after job `done`. The time is short before the first job.
    fn spin_time(&self, done: u64) -> Duration {
        if self.pause_expected_after.load(Ordering::Relaxed) == done { SPIN_BEFORE_PAUSE } else { SPIN }
    }

    fn park(&self, own: usize, done: u64) {
        let CacheAligned(WorkerState { is_parked, .. }) = &self.workers[own - 1];
        // Sequentially consistent with `number`: if the loop below misses a new job, `publish` sees this worker as
        // parked.
        is_parked.store(true, Ordering::SeqCst);
        self.parked.0.fetch_add(1, Ordering::SeqCst);
        while !self.quit.load(Ordering::SeqCst) && self.number.0.load(Ordering::SeqCst) == done {
            std::thread::park();
        }
        is_parked.store(false, Ordering::SeqCst);
        self.parked.0.fetch_sub(1, Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests;
