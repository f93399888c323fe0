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
use std::{
    collections::VecDeque,
    io,
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
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

    /// Reads an expert into its slot, whose state is [`State::Reading`], as soon as possible.
    pub fn demand(&self, slot: SlotId, layout: Layout) {
        let mut queue = self.shared.lock();
        queue.board(slot, layout);
        self.shared.start(&mut queue, slot, false);
        self.shared.wake(&queue);
    }

    /// Reads an expert into its slot, whose state is [`State::Queued`], when nothing more urgent is left.
    pub fn later(&self, slot: SlotId, layout: Layout) {
        let mut queue = self.shared.lock();
        queue.board(slot, layout);
        queue.later.push_back(slot);
        drop(queue);
        self.shared.work.notify_one();
    }

    /// Reads an expert now that [`Reader::later`] has queued.
    pub fn hurry(&self, slot: SlotId) {
        let mut queue = self.shared.lock();
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
        self.shared.lock().forget(slot)
    }

    /// The error of the last read into a slot. Tells once.
    pub fn failure(&self, slot: SlotId) -> Option<Failure> {
        self.shared.lock().flights.get_mut(slot.index())?.failure.take()
    }

    /// The number of experts whose reads have ended. Looked at before states are, it makes [`Reader::wait`] miss none.
    pub fn landed(&self) -> u64 {
        self.shared.landed.load(Ordering::Acquire)
    }

    /// True while reads are under way, or waiting.
    pub fn is_busy(&self) -> bool {
        let queue = self.shared.lock();
        queue.running > 0 || !(queue.demand.is_empty() && queue.background.is_empty() && queue.later.is_empty())
    }

    /// Waits until more than `seen` experts' reads have ended.
    pub fn wait(&self, seen: u64) {
        let mut queue = self.shared.lock();
        while self.landed() <= seen {
            queue = self.shared.landing.wait(queue).unwrap_or_else(PoisonError::into_inner);
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
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Cuts an expert into reads and lines them up.
    fn start(&self, queue: &mut Queue, slot: SlotId, background: bool) {
        self.states.set(slot, State::Reading);
        let Some(flight) = queue.flights.get(slot.index()) else { return };
        let jobs = if background { &mut queue.background } else { &mut queue.demand };
        jobs.extend(flight.layout.reads().iter().map(|&read| Job { slot, read, background }));
        if flight.left == 0 {
            self.land(slot, State::Ready);
        }
    }

    /// All reads of an expert have ended. Called under the lock, so that nobody goes to sleep in between.
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
            1 => self.work.notify_one(),
            _ => self.work.notify_all(),
        }
    }

    /// The life of one thread.
    fn serve(&self) {
        let mut queue = self.lock();
        while !queue.closing {
            if let Some(job) = self.next(&mut queue) {
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
        let Some(flight) = queue.flights.get_mut(job.slot.index()) else { return };
        if let Err(failure) = result {
            flight.failure = Some(failure);
        }
        flight.left -= 1;
        if flight.left == 0 {
            self.land(job.slot, if flight.failure.is_some() { State::Failed } else { State::Ready });
        }
    }

    /// Reads one range into its slot. A pack's record that cannot be read, or is not what was written, is put together
    /// from the checkpoint.
    fn read(&self, job: &Job) -> Result<(), Failure> {
        let read = &job.read;
        let base = job.slot.index() * self.slot_bytes + read.at;
        // SAFETY: the slot's state is Reading, so nobody reads it, and each of its reads has a range of its own and is taken
        // from the queue by one thread. A slot gets another expert only after all its reads have ended.
        let into = unsafe { self.slab.bytes_mut(base..base + read.len) };
        let failed = |source| {
            self.metrics.ssd_errors.inc();
            Failure { file: read.file, offset: read.offset, len: read.need, source }
        };
        let Some(packed) = self.source.packed() else { return self.fetch(read, into).map_err(failed) };
        let mut why = None;
        if !packed.is_damaged(read.file, read.offset) {
            let fetched = self.fetch(read, into);
            let read_in = into.get(..read.need).unwrap_or_default();
            match fetched.and_then(|()| packed.check(read.file, read.offset, read_in)) {
                Ok(()) => return Ok(()),
                Err(error) => why = Some(failed(error)),
            }
        }
        let (reads, bytes) = packed.mend(read.file, read.offset, into).map_err(|error| {
            let why = why.as_ref().map(|why| format!("{}; ", why.source)).unwrap_or_default();
            failed(io::Error::new(error.kind(), format!("{why}the checkpoint cannot be read either: {error}")))
        })?;
        self.metrics.ssd_reads.inc_by(reads);
        self.metrics.ssd_read_bytes.inc_by(bytes);
        if let Some(Failure { file, offset, source, .. }) = why {
            let path = self.source.path(file);
            if packed.mark(file, offset, &format_args!("{}, record at byte {offset}: {source}", path.display())) {
                self.metrics.pack_damaged_records.inc();
            }
        }
        Ok(())
    }

    /// Reads one range, over interruptions and short reads.
    fn fetch(&self, read: &Read, into: &mut [u8]) -> io::Result<()> {
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
                Err(error) => return Err(error),
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
                return Err(io::Error::new(io::ErrorKind::UnexpectedEof, text));
            }
            have = reached;
        }
        Ok(())
    }

    fn count_disk(&self) {
        if let (Some(now), Some(base)) = (disk_bytes_read(), self.disk_base) {
            let counted = self.metrics.ssd_disk_bytes.get();
            self.metrics.ssd_disk_bytes.inc_by(now.saturating_sub(base).saturating_sub(counted));
        }
    }
}
