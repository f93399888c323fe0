//! The reader: a pool of threads that bring experts from files into slots by positional reads.
//!
//! Each expert is one to nine reads ([`Layout`]), taken by whichever thread is free, so that a single miss already keeps
//! the disk busy. What the model waits for goes before everything else; the rest (predictions, warm start) waits in a
//! second queue, of which only half the threads may work at a time. The lock guards the queues alone and is never held
//! across a read.

use super::{
    layout::{Layout, Read},
    slots::Place,
    source::Source,
};
use crate::{device::Slab, metrics::Metrics, platform::os::disk_bytes_read};
use std::{
    collections::VecDeque,
    io,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread::JoinHandle,
    time::{Duration, Instant},
};

/// How long a pool with nothing to do waits before it looks at the system's count of disk bytes.
const QUIET: Duration = Duration::from_millis(20);

/// A read that failed for good.
#[derive(Debug)]
pub struct Failure {
    pub file: u32,
    pub offset: u64,
    pub len: usize,
    pub source: io::Error,
}

/// All reads of one occupation are over.
#[derive(Debug)]
pub struct Done {
    pub place: Place,
    pub failure: Option<Failure>,
}

/// What is on its way into one slot.
struct Flight {
    place: Option<Place>,
    layout: Layout,
    /// Reads that are not over yet.
    left: usize,
    failure: Option<Failure>,
}

#[derive(Clone, Copy)]
struct Job {
    slot: usize,
    read: Read,
    background: bool,
}

#[derive(Default)]
struct Queue {
    demand: VecDeque<Job>,
    /// Reads of background experts that have been started.
    background: VecDeque<Job>,
    /// Background experts that have not.
    later: VecDeque<Place>,
    background_running: usize,
    flights: Vec<Flight>,
    done: Vec<Done>,
    running: usize,
    /// Reads ended since the disk's bytes were last looked up.
    uncounted: bool,
    closing: bool,
}

struct Shared {
    source: Box<dyn Source>,
    slab: Arc<Slab>,
    slot_bytes: usize,
    threads: usize,
    queue: Mutex<Queue>,
    work: Condvar,
    landed: Condvar,
    metrics: Arc<Metrics>,
    /// The system's count when the pool was made.
    disk_base: Option<u64>,
}

/// The pool. Dropping it ends the threads after the reads they are in.
pub struct Reader {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

impl Reader {
    /// `slab` holds `slots` slots of `slot_bytes` each; nobody else writes to it.
    pub fn new(
        source: Box<dyn Source>,
        slab: Arc<Slab>,
        slots: usize,
        slot_bytes: usize,
        threads: usize,
        metrics: Arc<Metrics>,
    ) -> io::Result<Self> {
        let threads = threads.max(1);
        let flight = || Flight { place: None, layout: Layout::empty(), left: 0, failure: None };
        let queue = Queue { flights: (0..slots).map(|_| flight()).collect(), ..Queue::default() };
        let shared = Arc::new(Shared {
            source,
            slab,
            slot_bytes,
            threads,
            queue: Mutex::new(queue),
            work: Condvar::new(),
            landed: Condvar::new(),
            metrics,
            disk_base: disk_bytes_read(),
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

    /// Reads an expert into its slot as soon as possible.
    pub fn demand(&self, place: Place, layout: Layout) {
        let mut queue = self.shared.lock();
        queue.take_off(place, layout);
        queue.start(place, false);
        self.shared.wake(&queue);
    }

    /// Reads an expert when nothing more urgent is left.
    pub fn later(&self, place: Place, layout: Layout) {
        let mut queue = self.shared.lock();
        queue.take_off(place, layout);
        queue.later.push_back(place);
        drop(queue);
        self.shared.work.notify_one();
    }

    /// What was to be read later is wanted now.
    pub fn hurry(&self, place: Place) {
        let mut queue = self.shared.lock();
        if queue.forget(place) {
            queue.start(place, false);
        } else {
            // Started already: what is left of it moves to the front.
            let queue = &mut *queue;
            for _ in 0..queue.background.len() {
                let Some(job) = queue.background.pop_front() else { break };
                if job.slot == place.slot.index() {
                    queue.demand.push_back(Job { background: false, ..job });
                } else {
                    queue.background.push_back(job);
                }
            }
        }
        self.shared.wake(&queue);
    }

    /// Gives up on what was to be read later; false if it has been started (and will be done).
    pub fn cancel(&self, place: Place) -> bool {
        self.shared.lock().forget(place)
    }

    /// Moves what is over to `done`, without waiting.
    pub fn collect(&self, done: &mut Vec<Done>) {
        done.append(&mut self.shared.lock().done);
    }

    /// Waits until something is over that has not been collected.
    pub fn wait(&self) {
        let mut queue = self.shared.lock();
        while queue.done.is_empty() {
            queue = self.shared.landed.wait(queue).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        self.shared.lock().closing = true;
        self.shared.work.notify_all();
        for thread in self.threads.drain(..) {
            // A reader thread has nothing to panic on; if one did, there is nothing to be saved here.
            let _ = thread.join();
        }
        self.shared.count_disk();
    }
}

impl Queue {
    fn take_off(&mut self, place: Place, layout: Layout) {
        if let Some(flight) = self.flights.get_mut(place.slot.index()) {
            *flight = Flight { place: Some(place), left: layout.reads().len(), layout, failure: None };
        }
    }

    fn start(&mut self, place: Place, background: bool) {
        let slot = place.slot.index();
        let Some(flight) = self.flights.get(slot) else { return };
        let queue = if background { &mut self.background } else { &mut self.demand };
        queue.extend(flight.layout.reads().iter().map(|&read| Job { slot, read, background }));
        if flight.left == 0 {
            self.done.push(Done { place, failure: None });
        }
    }

    fn forget(&mut self, place: Place) -> bool {
        let found = self.later.iter().position(|&other| other == place);
        found.and_then(|at| self.later.remove(at)).is_some()
    }

    fn next(&mut self, background_most: usize) -> Option<Job> {
        if let Some(job) = self.demand.pop_front() {
            return Some(job);
        }
        if self.background_running >= background_most {
            return None;
        }
        while self.background.is_empty() {
            let place = self.later.pop_front()?;
            self.start(place, true);
        }
        let job = self.background.pop_front()?;
        self.background_running += 1;
        Some(job)
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wake(&self, queue: &Queue) {
        match queue.demand.len() {
            0 => {}
            1 => self.work.notify_one(),
            _ => self.work.notify_all(),
        }
        if !queue.done.is_empty() {
            self.landed.notify_one();
        }
    }

    /// The life of one thread.
    fn serve(&self) {
        let background_most = self.threads.div_ceil(2);
        let mut queue = self.lock();
        while !queue.closing {
            if let Some(job) = queue.next(background_most) {
                queue.running += 1;
                drop(queue);
                let result = self.read(&job);
                queue = self.lock();
                self.end(&mut queue, job, result);
            } else if queue.uncounted && queue.running == 0 {
                let (back, quiet) = self.work.wait_timeout(queue, QUIET).unwrap_or_else(PoisonError::into_inner);
                queue = back;
                if quiet.timed_out() && queue.uncounted && queue.running == 0 {
                    queue.uncounted = false;
                    drop(queue);
                    self.count_disk();
                    queue = self.lock();
                }
            } else {
                queue = self.work.wait(queue).unwrap_or_else(PoisonError::into_inner);
            }
        }
    }

    fn end(&self, queue: &mut Queue, job: Job, result: Result<(), Failure>) {
        queue.running -= 1;
        queue.uncounted = true;
        if job.background {
            queue.background_running -= 1;
        }
        let Some(flight) = queue.flights.get_mut(job.slot) else { return };
        if let Err(failure) = result {
            flight.failure = Some(failure);
        }
        flight.left -= 1;
        if flight.left == 0
            && let Some(place) = flight.place.take()
        {
            let failure = flight.failure.take();
            queue.done.push(Done { place, failure });
            self.landed.notify_one();
        }
    }

    /// Reads one range into its slot, over interruptions and short reads.
    fn read(&self, job: &Job) -> Result<(), Failure> {
        let read = &job.read;
        let base = job.slot * self.slot_bytes + read.at;
        // SAFETY: the slot is loading, so nobody reads it, and each of its reads has a range of its own and is taken
        // from the queue by one thread. The store reuses a slot only after all its reads have ended.
        let into = unsafe { self.slab.bytes_mut(base..base + read.len) };
        let block = self.source.block();
        let mut have = 0;
        while have < read.need {
            let begin = Instant::now();
            let result = match into.get_mut(have..) {
                Some(rest) => self.source.read(read.file, read.offset + have as u64, rest),
                None => Ok(0),
            };
            let got = match result {
                Ok(got) => got,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(self.fail(read, error)),
            };
            self.metrics.ssd_reads.inc();
            self.metrics.ssd_read_bytes.inc_by(got as u64);
            self.metrics.ssd_read_seconds.observe(begin.elapsed().as_secs_f64());
            if have + got >= read.need {
                break;
            }
            // A direct read goes on at a block's start. Less than a block more than before is the file's end.
            let reached = (have + got) / block * block;
            if reached == have {
                let size = self.source.size(read.file).unwrap_or(0);
                let text =
                    format!("the file ends {} bytes too early (it had {size} when opened)", read.need - have - got);
                return Err(self.fail(read, io::Error::new(io::ErrorKind::UnexpectedEof, text)));
            }
            have = reached;
        }
        let read_in = into.get(..read.need).unwrap_or_default();
        self.source.check(read.file, read.offset, read_in).map_err(|error| self.fail(read, error))
    }

    fn fail(&self, read: &Read, source: io::Error) -> Failure {
        self.metrics.ssd_errors.inc();
        Failure { file: read.file, offset: read.offset, len: read.need, source }
    }

    fn count_disk(&self) {
        if let (Some(now), Some(base)) = (disk_bytes_read(), self.disk_base) {
            let counted = self.metrics.ssd_disk_bytes.get();
            self.metrics.ssd_disk_bytes.inc_by(now.saturating_sub(base).saturating_sub(counted));
        }
    }
}
