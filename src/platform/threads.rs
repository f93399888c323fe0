//! The thread pool: a fixed number of compute threads that run one parallel job at a time and do not sleep between layers.
//!
//! A token is some hundred short jobs with microseconds between them, so a worker that runs out of work spins for a
//! moment before it parks. The caller is one of the threads. Every thread has a run of neighbouring tasks, which it claims
//! one by one from the front, so that it reads memory in order; one that has finished its own goes on with the others',
//! so a core that is slower, or busy with someone else's process, does less.
//!
//! With many cores a cache line that all of them write costs more than a job: nothing here is written by all. A job is
//! announced by its number, which workers only read. Each worker says in a line of its own which job it is in or has
//! done; the caller looks there at the end, and takes a job away from a worker that has not begun it, so that no job ever
//! waits for one that has not yet woken.
//!
//! Waking a thread costs microseconds, and it runs tens of microseconds later: were they woken one after the other, the last
//! of fifteen would come too late. Each parks by itself; the caller wakes the first of every [`TROOP`], who wakes the rest.

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

/// An idle worker spins for this long before it parks: longer than what one thread does alone between two jobs of a pass,
/// or between two passes (it chooses among 250,000 tokens). Of sixteen workers some were woken late with 150 us on one
/// machine, and none on another. It gives its core to other processes after [`ALONE`].
const SPIN: Duration = Duration::from_millis(1);
/// And for this long once the caller [rests](Threads::rest).
const REST: Duration = Duration::from_micros(150);
const ALONE: Duration = Duration::from_micros(20);
/// Workers that are woken by the first of them.
const TROOP: usize = 4;

type Job<'a> = &'a (dyn Fn(usize) + Sync);

/// A pool of compute threads, of which the caller is one.
pub struct Threads {
    pool: Arc<Pool>,
    workers: Vec<JoinHandle<()>>,
    /// Held by whoever runs a job. A second caller, or a job that calls back, runs its tasks itself.
    caller: Mutex<()>,
}

struct Pool {
    /// The number of the last job announced.
    number: CacheLine<AtomicU64>,
    /// That job; written only while no worker is in one.
    job: UnsafeCell<Option<Job<'static>>>,
    /// The tasks of each thread, the caller's first.
    shares: Vec<CacheLine<Share>>,
    at: Vec<CacheLine<At>>,
    quit: AtomicBool,
    panicked: AtomicBool,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    parked: CacheLine<AtomicUsize>,
    /// The number of the last job when the caller last rested.
    rested: AtomicU64,
}

/// Where a worker is.
#[derive(Default)]
struct At {
    /// Its last job: twice the number, and one more while it is in it.
    job: AtomicU64,
    /// It is parked, or about to be.
    asleep: AtomicBool,
    thread: OnceLock<Thread>,
}

/// A value in cache lines of its own: two, since processors fetch them in pairs.
#[derive(Default)]
#[repr(align(128))]
struct CacheLine<T>(T);

/// The tasks that one thread begins with.
#[derive(Default)]
struct Share {
    next: AtomicUsize,
    end: AtomicUsize,
}

// SAFETY: `job` is written by the holder of `caller` while no worker is in a job, and read only by workers that have
// entered the job afterwards; everything else in the struct is Sync by itself.
unsafe impl Sync for Pool {}
// SAFETY: the job is a shared reference to a Sync closure.
unsafe impl Send for Pool {}

impl Threads {
    /// A pool of `count` threads (at least one): the caller and `count - 1` workers. A worker that the system refuses to
    /// start is done without.
    pub fn new(count: usize) -> Self {
        let count = count.max(1);
        let pool = Arc::new(Pool {
            number: CacheLine::default(),
            job: UnsafeCell::new(None),
            shares: (0..count).map(|_| CacheLine::default()).collect(),
            at: (1..count).map(|_| CacheLine::default()).collect(),
            quit: AtomicBool::new(false),
            panicked: AtomicBool::new(false),
            panic: Mutex::new(None),
            parked: CacheLine::default(),
            rested: AtomicU64::new(0),
        });
        let workers = (1..count)
            .map_while(|index| {
                let pool = pool.clone();
                std::thread::Builder::new().name(format!("compute-{index}")).spawn(move || pool.work(index)).ok()
            })
            .collect();
        Self { pool, workers, caller: Mutex::new(()) }
    }

    pub fn count(&self) -> usize {
        self.workers.len() + 1
    }

    /// Says that the next job may be long in coming, since its caller waits for a disk: nobody need spin for it.
    pub fn rest(&self) {
        self.pool.rested.store(self.pool.number.0.load(Ordering::Relaxed), Ordering::Relaxed);
    }

    /// Calls `job(i)` for every `i` in `0..tasks`, each exactly once, on some thread; returns when all are done. If a
    /// task panics, the panic is passed on once every thread has left the job; tasks not yet claimed then are skipped.
    pub fn run(&self, tasks: usize, job: &(dyn Fn(usize) + Sync)) {
        let caller = if tasks > 1 && !self.workers.is_empty() { self.caller.try_lock() } else { None };
        let Some(caller) = caller else {
            (0..tasks).for_each(job);
            return;
        };
        let number = self.pool.open(job, tasks);
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
        self.pool.quit.store(true, Ordering::SeqCst);
        for worker in &self.workers {
            worker.thread().unpark();
        }
        for worker in self.workers.drain(..) {
            let _ = worker.join();
        }
    }
}

impl Pool {
    /// Announces a job; returns its number.
    fn open(&self, job: Job<'_>, tasks: usize) -> u64 {
        // SAFETY: only the lifetime changes; `close` returns after the last worker has left, while `job` still lives.
        let job = unsafe { std::mem::transmute::<Job<'_>, Job<'static>>(job) };
        // SAFETY: the caller holds `caller`, and the job before was closed: no worker is in one.
        unsafe { *self.job.get() = Some(job) };
        let count = self.shares.len();
        for (index, CacheLine(share)) in self.shares.iter().enumerate() {
            share.next.store(index * tasks / count, Ordering::Relaxed);
            share.end.store((index + 1) * tasks / count, Ordering::Relaxed);
        }
        let number = self.number.0.load(Ordering::Relaxed) + 1;
        // In one order with the count of the parked: either they see the number, or they are seen.
        self.number.0.store(number, Ordering::SeqCst);
        self.rouse(self.at.iter().step_by(TROOP));
        number
    }

    /// Wakes those who sleep.
    fn rouse<'a>(&self, workers: impl Iterator<Item = &'a CacheLine<At>>) {
        if self.parked.0.load(Ordering::SeqCst) == 0 {
            return;
        }
        for CacheLine(at) in workers.filter(|at| at.0.asleep.load(Ordering::SeqCst)) {
            if let Some(thread) = at.thread.get() {
                thread.unpark();
            }
        }
    }

    /// Takes all tasks that nobody has claimed out of the job.
    fn cancel(&self) {
        for CacheLine(share) in &self.shares {
            let end = share.end.load(Ordering::Relaxed);
            if share.next.load(Ordering::Relaxed) < end {
                share.next.fetch_max(end, Ordering::Relaxed);
            }
        }
    }

    /// Ends the job: takes it from the workers that have not entered it, and waits for those that have. True if a task has
    /// panicked.
    fn close(&self, number: u64) -> bool {
        let (done, inside) = (2 * number, 2 * number + 1);
        for CacheLine(At { job: at, .. }) in &self.at {
            let mut turns = 0u32;
            loop {
                match at.load(Ordering::Acquire) {
                    now if now == done => break,
                    now if now == inside => {
                        turns += 1;
                        // A worker inside may have lost its core to another process: let it have ours.
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

    /// Runs tasks until none is left, those of thread `own` first.
    fn claim(&self, own: usize, job: Job<'_>) {
        let (before, after) = self.shares.split_at(own);
        for CacheLine(share) in after.iter().chain(before) {
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
        let CacheLine(At { job: at, thread, .. }) = &self.at[own - 1];
        let _ = thread.set(std::thread::current());
        let mut done = 0;
        while let Some(number) = self.enter(own, done) {
            // SAFETY: this worker has entered the job, so it is set, alive, and not being written.
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

    /// Waits for a job with a higher number than `done` and enters it; `None` at the end.
    fn enter(&self, own: usize, mut done: u64) -> Option<u64> {
        let troop = if own % TROOP == 1 { &self.at[own..self.at.len().min(own + TROOP - 1)] } else { &[] };
        let CacheLine(At { job: at, .. }) = &self.at[own - 1];
        let mut since = Instant::now();
        let mut turns = 0u32;
        loop {
            let number = self.number.0.load(Ordering::Acquire);
            if number != done {
                self.rouse(troop.iter());
                // Another word than that of the last job here: the caller has taken this one away already.
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
            if idle > self.patience(done) {
                self.park(own, done);
                since = Instant::now();
            } else if idle > ALONE {
                std::thread::yield_now();
            }
        }
    }

    /// How long to spin behind job `done`. Before the first a pool is at rest.
    fn patience(&self, done: u64) -> Duration {
        if self.rested.load(Ordering::Relaxed) == done { REST } else { SPIN }
    }

    fn park(&self, own: usize, done: u64) {
        let CacheLine(At { asleep, .. }) = &self.at[own - 1];
        // In one order with the number: whoever announces a job behind the look at it sees who sleeps.
        asleep.store(true, Ordering::SeqCst);
        self.parked.0.fetch_add(1, Ordering::SeqCst);
        while !self.quit.load(Ordering::SeqCst) && self.number.0.load(Ordering::SeqCst) == done {
            std::thread::park();
        }
        asleep.store(false, Ordering::SeqCst);
        self.parked.0.fetch_sub(1, Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests;
