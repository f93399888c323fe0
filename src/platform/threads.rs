//! The compute threads: a fixed crew that runs one parallel job at a time and does not sleep between layers.
//!
//! A token is some hundred short jobs with microseconds between them, so a worker that runs out of work spins for a
//! moment before it parks. The caller is one of the crew. Every thread has a run of neighbouring tasks, which it claims
//! one by one from the front, so that it reads memory in order; one that has finished its own goes on with the others',
//! so a core that is slower, or busy with someone else's process, does less. A job never waits for a worker that has not
//! yet woken: a worker enters a job through a gate, and the caller waits only for those inside.

use std::{
    any::Any,
    cell::UnsafeCell,
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

/// An idle worker spins this long before it parks: longer than the serial stretches between the jobs of one token, much
/// shorter than a wait for the disk.
const SPIN: Duration = Duration::from_micros(150);

/// The gate's word: the job's number in the high half, then one bit for "open", then how many workers are inside.
const OPEN: u64 = 1 << 31;
const INSIDE: u64 = OPEN - 1;
const NUMBER: u32 = 32;

type Job<'a> = &'a (dyn Fn(usize) + Sync);

/// A crew of compute threads, of which the caller is one.
pub struct Threads {
    crew: Arc<Crew>,
    workers: Vec<JoinHandle<()>>,
    /// Held by whoever runs a job. A second caller, or a job that calls back, runs its tasks itself.
    turn: Mutex<()>,
}

struct Crew {
    gate: AtomicU64,
    /// The job behind the gate; written only while the gate is closed and nobody is inside.
    job: UnsafeCell<Option<Job<'static>>>,
    shares: Vec<Share>,
    quit: AtomicBool,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    parked: AtomicUsize,
    bed: Mutex<()>,
    bell: Condvar,
}

/// The tasks that one thread begins with; in a cache line of its own.
#[derive(Default)]
#[repr(align(128))]
struct Share {
    next: AtomicUsize,
    end: AtomicUsize,
}

// SAFETY: `job` is written by the holder of `turn` while the gate is closed with nobody inside, and read only by workers
// that entered through the gate afterwards; everything else in the struct is Sync by itself.
unsafe impl Sync for Crew {}
// SAFETY: the job is a shared reference to a Sync closure.
unsafe impl Send for Crew {}

impl Threads {
    /// A crew of `count` threads (at least one): the caller and `count - 1` workers. A worker that the system refuses to
    /// start is done without.
    pub fn new(count: usize) -> Self {
        let crew = Arc::new(Crew {
            gate: AtomicU64::new(0),
            job: UnsafeCell::new(None),
            shares: (0..count.max(1)).map(|_| Share::default()).collect(),
            quit: AtomicBool::new(false),
            panic: Mutex::new(None),
            parked: AtomicUsize::new(0),
            bed: Mutex::new(()),
            bell: Condvar::new(),
        });
        let workers = (1..count)
            .map_while(|index| {
                let crew = crew.clone();
                std::thread::Builder::new().name(format!("compute-{index}")).spawn(move || crew.work(index)).ok()
            })
            .collect();
        Self { crew, workers, turn: Mutex::new(()) }
    }

    pub fn count(&self) -> usize {
        self.workers.len() + 1
    }

    /// Calls `job(i)` for every `i` in `0..tasks`, each exactly once, on some thread; returns when all are done. If a
    /// task panics, the panic is passed on once every thread has left the job; tasks not yet claimed then are skipped.
    pub fn run(&self, tasks: usize, job: &(dyn Fn(usize) + Sync)) {
        let turn = if tasks > 1 && !self.workers.is_empty() { self.turn.try_lock().ok() } else { None };
        let Some(_turn) = turn else {
            (0..tasks).for_each(job);
            return;
        };
        self.crew.open(job, tasks);
        let own = catch_unwind(AssertUnwindSafe(|| self.crew.claim(0, job)));
        self.crew.close();
        let others = lock(&self.crew.panic).take();
        if let Some(panic) = own.err().or(others) {
            drop(_turn);
            resume_unwind(panic);
        }
    }

    /// Cuts `0..len` into runs of at least `least` (the last may be shorter), about four a thread so that all finish
    /// together, and calls `job(start..end)` for each. Where the cuts fall depends on the thread count: only for work
    /// whose result does not depend on them.
    pub fn run_split(&self, len: usize, least: usize, job: &(dyn Fn(std::ops::Range<usize>) + Sync)) {
        let size = len.div_ceil(4 * self.count()).max(least).max(1);
        let size = if self.count() == 1 { len.max(1) } else { size };
        self.run(len.div_ceil(size), &|task| job(task * size..((task + 1) * size).min(len)));
    }

    /// Calls `job(i, piece)` for every piece of `size` values of `data` (the last may be shorter).
    pub fn run_pieces<T: Send>(&self, data: &mut [T], size: usize, job: &(dyn Fn(usize, &mut [T]) + Sync)) {
        struct Base<T>(*mut T);
        // SAFETY: each piece goes to one task, and T may be sent.
        unsafe impl<T: Send> Sync for Base<T> {}
        let (len, size) = (data.len(), size.max(1));
        let base = Base(data.as_mut_ptr());
        self.run(len.div_ceil(size), &|task| {
            let base = &base;
            let start = task * size;
            // SAFETY: in bounds of `data`, which is borrowed mutably until `run` returns; every task has a piece of its own.
            let piece = unsafe { std::slice::from_raw_parts_mut(base.0.add(start), size.min(len - start)) };
            job(task, piece);
        });
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        self.crew.quit.store(true, Ordering::SeqCst);
        drop(lock(&self.crew.bed));
        self.crew.bell.notify_all();
        for worker in self.workers.drain(..) {
            let _ = worker.join();
        }
    }
}

impl Crew {
    fn open(&self, job: Job<'_>, tasks: usize) {
        // SAFETY: only the lifetime changes; `close` returns after the last worker has left, while `job` still lives.
        let job = unsafe { std::mem::transmute::<Job<'_>, Job<'static>>(job) };
        // SAFETY: the caller holds the turn, the gate is closed and nobody is inside.
        unsafe { *self.job.get() = Some(job) };
        let count = self.shares.len();
        for (index, share) in self.shares.iter().enumerate() {
            share.next.store(index * tasks / count, Ordering::Relaxed);
            share.end.store((index + 1) * tasks / count, Ordering::Relaxed);
        }
        let number = (self.gate.load(Ordering::Relaxed) >> NUMBER).wrapping_add(1);
        self.gate.store(number << NUMBER | OPEN, Ordering::SeqCst);
        if self.parked.load(Ordering::SeqCst) > 0 {
            drop(lock(&self.bed));
            self.bell.notify_all();
        }
    }

    /// Takes all tasks that nobody has claimed out of the job.
    fn cancel(&self) {
        for share in &self.shares {
            share.next.fetch_max(share.end.load(Ordering::Relaxed), Ordering::Relaxed);
        }
    }

    /// Closes the gate and waits for those inside.
    fn close(&self) {
        self.cancel();
        self.gate.fetch_and(!OPEN, Ordering::AcqRel);
        let mut turns = 0u32;
        while self.gate.load(Ordering::Acquire) & INSIDE != 0 {
            turns += 1;
            // A worker inside may have lost its core to another process: let it have ours.
            if turns.is_multiple_of(256) { std::thread::yield_now() } else { std::hint::spin_loop() }
        }
    }

    /// Runs tasks until none is left, those of thread `own` first.
    fn claim(&self, own: usize, job: Job<'_>) {
        let (before, after) = self.shares.split_at(own);
        for share in after.iter().chain(before) {
            let end = share.end.load(Ordering::Relaxed);
            // Looking first keeps a counter that is used up from growing.
            while share.next.load(Ordering::Relaxed) < end {
                let task = share.next.fetch_add(1, Ordering::Relaxed);
                if task < end {
                    job(task);
                }
            }
        }
    }

    /// A worker's life.
    fn work(&self, own: usize) {
        let mut done = 0;
        while let Some(number) = self.enter(done) {
            // SAFETY: this thread is inside the gate, so the job is set, alive, and not being written.
            if let Some(job) = unsafe { *self.job.get() }
                && let Err(panic) = catch_unwind(AssertUnwindSafe(|| self.claim(own, job)))
            {
                self.cancel();
                *lock(&self.panic) = Some(panic);
            }
            self.gate.fetch_sub(1, Ordering::Release);
            done = number;
        }
    }

    /// Waits for a job with another number than `done` and enters it; `None` at the end.
    fn enter(&self, done: u64) -> Option<u64> {
        let mut since = Instant::now();
        let mut turns = 0u32;
        loop {
            let gate = self.gate.load(Ordering::SeqCst);
            if self.quit.load(Ordering::Relaxed) {
                return None;
            }
            if self.is_new(gate, done) {
                if self.gate.compare_exchange_weak(gate, gate + 1, Ordering::SeqCst, Ordering::Relaxed).is_ok() {
                    return Some(gate >> NUMBER);
                }
                continue;
            }
            turns += 1;
            if !turns.is_multiple_of(64) {
                std::hint::spin_loop();
            } else if since.elapsed() > SPIN {
                self.park(done);
                since = Instant::now();
            } else {
                std::thread::yield_now();
            }
        }
    }

    fn is_new(&self, gate: u64, done: u64) -> bool {
        gate & OPEN != 0 && gate >> NUMBER != done
    }

    fn park(&self, done: u64) {
        let mut bed = lock(&self.bed);
        self.parked.fetch_add(1, Ordering::SeqCst);
        while !self.quit.load(Ordering::SeqCst) && !self.is_new(self.gate.load(Ordering::SeqCst), done) {
            bed = self.bell.wait(bed).unwrap_or_else(PoisonError::into_inner);
        }
        self.parked.fetch_sub(1, Ordering::SeqCst);
    }
}

/// No lock here guards an invariant that a panic could break.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
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

    #[test]
    fn a_panic_reaches_the_caller_and_the_crew_lives_on() {
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
}
