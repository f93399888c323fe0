//! The reader: a pool of threads that bring experts from files into slots by positional reads.
//!
//! Each expert is one to nine reads ([`Layout`]), taken by whichever thread is free, so that a single miss already keeps
//! the disk busy. Experts that the model waits for go before everything else; the rest (predictions, warm start) waits
//! in a second queue, of which only half the threads may work at a time. The lock guards the queues alone and is never
//! held across a read. The slot's state ([`States`]) tells how a read ended.

use super::{
    layout::{Layout, Read},
    slots::{SlotId, State, States},
    source::Source,
};
use crate::{device::Slab, metrics::Metrics, platform::os::disk_bytes_read};
use parking_lot::{Condvar, Mutex, MutexGuard};
use std::{
    collections::VecDeque,
    io,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::JoinHandle,
    time::Duration,
};

/// An idle pool waits this long before it looks at the system's count of disk bytes.
const QUIET: Duration = Duration::from_millis(20);

/// A read that failed for good.
#[derive(Debug)]
pub struct Failure {
    pub file: u32,
    pub offset: u64,
    pub len: usize,
    pub source: io::Error,
}

/// One expert on its way into a slot.
struct Flight {
    layout: Layout,
    /// Reads that are not over yet.
    left: usize,
    failure: Option<Failure>,
}

#[derive(Clone, Copy)]
struct Job {
    slot: SlotId,
    read: Read,
    background: bool,
    /// The expert is this read alone.
    whole: bool,
}

/// The end of a read.
enum End {
    Sound,
    /// It waits for [`Shared::compare`].
    Unchecked,
    /// It did not pass; the next read of it takes it from elsewhere.
    Damaged,
    Failed(Failure),
}

#[derive(Default)]
struct Queue {
    demand: VecDeque<Job>,
    /// Reads of background experts that have been started.
    background: VecDeque<Job>,
    /// Background experts whose reads have not been started.
    later: VecDeque<SlotId>,
    background_running: usize,
    flights: Vec<Flight>,
    running: usize,
    /// Reads ended since the disk's bytes were last looked up.
    uncounted: bool,
    closing: bool,
}

struct Shared {
    source: Box<dyn Source>,
    slab: Arc<Slab>,
    states: States,
    slot_bytes: usize,
    threads: usize,
    queue: Mutex<Queue>,
    work: Condvar,
    /// Experts whose reads have ended, and the bell for it.
    landed: AtomicU64,
    landing: Condvar,
    metrics: Arc<Metrics>,
    /// Experts may be used while their checksums are compared.
    beside: AtomicBool,
    /// The system's count when the pool was made, less what pools before it have told the metrics.
    disk_base: Option<u64>,
}

/// The pool. Dropping it ends the threads after the reads they are in.
pub struct Reader {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

impl Reader {
    /// `slab` holds slots of `slot_bytes` each; nobody else writes to it.
    pub fn new(
        source: Box<dyn Source>,
        slab: Arc<Slab>,
        states: States,
        slot_bytes: usize,
        threads: usize,
        metrics: Arc<Metrics>,
    ) -> io::Result<Self> {
        let threads = threads.max(1);
        let flight = || Flight { layout: Layout::empty(), left: 0, failure: None };
        let slots = slab.len() / slot_bytes.max(1);
        let queue = Queue { flights: (0..slots).map(|_| flight()).collect(), ..Queue::default() };
        let counted = metrics.ssd_disk_bytes.get();
        let shared = Arc::new(Shared {
            source,
            slab,
            states,
            slot_bytes,
            threads,
            queue: Mutex::new(queue),
            work: Condvar::new(),
            landed: AtomicU64::new(0),
            landing: Condvar::new(),
            metrics,
            beside: AtomicBool::new(false),
            disk_base: disk_bytes_read().map(|now| now.saturating_sub(counted)),
        });
        let mut reader = Self { shared, threads: Vec::with_capacity(threads) };
        for index in 0..threads {
            let shared = reader.shared.clone();
            let thread = std::thread::Builder::new().name(format!("expert-io-{index}"));
            reader.threads.push(thread.spawn(move || shared.serve())?);
        }
        Ok(reader)
    }

    pub fn source(&self) -> &dyn Source {
        &*self.shared.source
    }

    /// From now on an expert is [`State::Checking`] while its checksum is compared, where there is one.
    pub fn check_beside(&self, on: bool) {
        self.shared.beside.store(on, Ordering::Relaxed);
    }

    /// Reads an expert into its slot, whose state is [`State::Reading`], as soon as possible.
    pub fn demand(&self, slot: SlotId, layout: Layout) {
        let mut queue = self.shared.queue.lock();
        queue.board(slot, layout);
        self.shared.start(&mut queue, slot, false);
        self.shared.wake(&queue);
    }

    /// Reads an expert into its slot, whose state is [`State::Queued`], when nothing more urgent is left.
    pub fn later(&self, slot: SlotId, layout: Layout) {
        let mut queue = self.shared.queue.lock();
        queue.board(slot, layout);
        queue.later.push_back(slot);
        drop(queue);
        self.shared.work.notify_one();
    }

    /// Reads an expert now that [`Reader::later`] has queued.
    pub fn hurry(&self, slot: SlotId) {
        let mut queue = self.shared.queue.lock();
        if queue.forget(slot) {
            self.shared.start(&mut queue, slot, false);
        } else {
            // Started already: what is left of it moves to the front.
            let queue = &mut *queue;
            for _ in 0..queue.background.len() {
                let Some(job) = queue.background.pop_front() else { break };
                if job.slot == slot {
                    queue.demand.push_back(Job { background: false, ..job });
                } else {
                    queue.background.push_back(job);
                }
            }
        }
        self.shared.wake(&queue);
    }

    /// Takes back a read that [`Reader::later`] has queued; false if it has been started (and will be done). The slot
    /// is the caller's.
    pub fn cancel(&self, slot: SlotId) -> bool {
        self.shared.queue.lock().forget(slot)
    }

    /// The error of the last read into a slot. Tells once.
    pub fn failure(&self, slot: SlotId) -> Option<Failure> {
        self.shared.queue.lock().flights.get_mut(slot.index())?.failure.take()
    }

    /// The number of experts whose reads have ended. Looked at before states are, it makes [`Reader::wait`] miss none.
    pub fn landed(&self) -> u64 {
        self.shared.landed.load(Ordering::Acquire)
    }

    /// True while reads are under way, or waiting.
    pub fn is_busy(&self) -> bool {
        let queue = self.shared.queue.lock();
        queue.running > 0 || !(queue.demand.is_empty() && queue.background.is_empty() && queue.later.is_empty())
    }

    /// Waits until more than `seen` experts' reads have ended.
    pub fn wait(&self, seen: u64) {
        let mut queue = self.shared.queue.lock();
        while self.landed() <= seen {
            self.shared.landing.wait(&mut queue);
        }
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        self.shared.queue.lock().closing = true;
        self.shared.work.notify_all();
        for thread in self.threads.drain(..) {
            // A reader thread has nothing to panic on; if one did, there is nothing to be saved here.
            let _ = thread.join();
        }
        self.shared.count_disk();
    }
}

impl Queue {
    fn board(&mut self, slot: SlotId, layout: Layout) {
        if let Some(flight) = self.flights.get_mut(slot.index()) {
            *flight = Flight { left: layout.reads().len(), layout, failure: None };
        }
    }

    fn forget(&mut self, slot: SlotId) -> bool {
        let found = self.later.iter().position(|&other| other == slot);
        found.and_then(|at| self.later.remove(at)).is_some()
    }
}

impl Shared {
    /// Cuts an expert into reads and lines them up.
    fn start(&self, queue: &mut Queue, slot: SlotId, background: bool) {
        self.states.set(slot, State::Reading);
        let Some(flight) = queue.flights.get(slot.index()) else { return };
        let jobs = if background { &mut queue.background } else { &mut queue.demand };
        let whole = flight.layout.reads().len() == 1;
        jobs.extend(flight.layout.reads().iter().map(|&read| Job { slot, read, background, whole }));
        if flight.left == 0 {
            self.land(slot, State::Ready);
        }
    }

    /// All reads of an expert have ended, or its check. Called under the lock, so that nobody goes to sleep in between.
    fn land(&self, slot: SlotId, state: State) {
        self.states.set(slot, state);
        self.landed.fetch_add(1, Ordering::Release);
        self.landing.notify_one();
    }

    fn next(&self, queue: &mut Queue) -> Option<Job> {
        if let Some(job) = queue.demand.pop_front() {
            return Some(job);
        }
        if queue.background_running >= self.threads.div_ceil(2) {
            return None;
        }
        while queue.background.is_empty() {
            let slot = queue.later.pop_front()?;
            self.start(queue, slot, true);
        }
        let job = queue.background.pop_front()?;
        queue.background_running += 1;
        Some(job)
    }

    fn wake(&self, queue: &Queue) {
        match queue.demand.len() {
            0 => {}
            1 => {
                self.work.notify_one();
            }
            _ => {
                self.work.notify_all();
            }
        }
    }

    /// The life of one thread.
    fn serve(&self) {
        let mut queue = self.queue.lock();
        while !queue.closing {
            if let Some(job) = self.next(&mut queue) {
                queue.running += 1;
                let mut end = MutexGuard::unlocked(&mut queue, || self.read(&job));
                if matches!(end, End::Unchecked) {
                    self.land(job.slot, State::Checking);
                    end = MutexGuard::unlocked(&mut queue, || self.compare(&job));
                }
                self.end(&mut queue, job, end);
            } else if queue.uncounted && queue.running == 0 {
                let quiet = self.work.wait_for(&mut queue, QUIET);
                if quiet.timed_out() && queue.uncounted && queue.running == 0 {
                    queue.uncounted = false;
                    MutexGuard::unlocked(&mut queue, || self.count_disk());
                }
            } else {
                self.work.wait(&mut queue);
            }
        }
    }

    fn end(&self, queue: &mut Queue, job: Job, end: End) {
        queue.running -= 1;
        queue.uncounted = true;
        if job.background {
            queue.background_running -= 1;
        }
        let Some(flight) = queue.flights.get_mut(job.slot.index()) else { return };
        flight.left -= 1;
        let damaged = matches!(end, End::Damaged);
        if let End::Failed(failure) = end {
            flight.failure = Some(failure);
        }
        if flight.left == 0 {
            let sound = if damaged { State::Damaged } else { State::Ready };
            self.land(job.slot, if flight.failure.is_some() { State::Failed } else { sound });
        }
    }

    fn count_disk(&self) {
        if let (Some(now), Some(base)) = (disk_bytes_read(), self.disk_base) {
            let counted = self.metrics.ssd_disk_bytes.get();
            self.metrics.ssd_disk_bytes.inc_by(now.saturating_sub(base).saturating_sub(counted));
        }
    }
}

mod read;
#[cfg(test)]
pub(super) mod tests;
