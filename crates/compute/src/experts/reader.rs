//! A pool of threads that read experts from files into slots with positional reads.
//!
//! An expert takes one to nine reads ([`ReadPlan`]). Any idle thread takes the next read, so the reads of a single
//! expert use several threads. Demand reads, for which a layer waits, come first. Prefetches and the warm start are
//! background reads. At most half of the threads perform background reads. The lock guards only the queues and is never
//! held during a read. Results are published through the slot states ([`SlotStates`]).

use super::{
    read_plan::{ReadPlan, ReadRange},
    slot_layout::SlotLayout,
    slot_table::{SlotId, SlotState, SlotStates},
    source::{ExpertSource, PackRecords},
};
use crate::device::Slab;
use moestro_base::{
    metrics::Metrics,
    platform::{
        os::{disk_bytes_read, interactive_thread},
        read_aligned,
    },
};
use parking_lot::{Condvar, Mutex, MutexGuard};
use std::{
    collections::VecDeque,
    io,
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

/// Idle time of the pool after which it updates the metric of bytes read from the disk.
const IDLE_BEFORE_COUNT: Duration = Duration::from_millis(20);

/// A read that failed permanently.
#[derive(Debug)]
pub struct ReadFailure {
    pub file: u32,
    pub offset: u64,
    pub len: usize,
    pub source: io::Error,
}

/// An expert that is being read into a slot.
#[derive(Default)]
struct ExpertRead {
    plan: ReadPlan,
    /// Number of reads that have not ended.
    reads_left: usize,
    failure: Option<ReadFailure>,
}

#[derive(Clone, Copy)]
struct ReadJob {
    slot: SlotId,
    read: ReadRange,
    is_background: bool,
    /// True if one read covers the whole expert.
    is_whole_expert: bool,
}

/// The result of a read.
enum ReadOutcome {
    Done,
    /// The bytes are usable, but [`ReaderState::verify`] must check them.
    Unverified,
    /// The checksum did not match. The next read takes the expert's bytes from the checkpoint, not from the packed
    /// file.
    Damaged,
    Failed(ReadFailure),
}

#[derive(Default)]
struct ReadQueue {
    demand: VecDeque<ReadJob>,
    /// Background reads of experts whose state is Reading.
    background: VecDeque<ReadJob>,
    /// Experts whose background read has not started and whose state is Queued. These reads can be cancelled.
    unstarted: VecDeque<SlotId>,
    background_running: usize,
    /// The read in progress for each slot.
    experts: Vec<ExpertRead>,
    running: usize,
    /// True if reads have ended since the metric of disk bytes was last updated.
    is_uncounted: bool,
    is_closing: bool,
}

struct ReaderState {
    source: Box<dyn ExpertSource>,
    slab: Arc<Slab>,
    states: SlotStates,
    layout: SlotLayout,
    threads: usize,
    queue: Mutex<ReadQueue>,
    work: Condvar,
    /// Number of experts whose reads have ended. `finished_changed` is notified on each change.
    finished: AtomicU64,
    finished_changed: Condvar,
    metrics: Arc<Metrics>,
    /// True if a read found zeros only, which is logged once.
    has_logged_zeros: AtomicBool,
    /// True if layers may use an expert before its checksum is verified.
    verify_in_background: AtomicBool,
    /// The system's count of bytes read by this process when the pool started, minus the metric's value at that time.
    disk_base: Option<u64>,
}

/// The pool of reader threads. Dropping the pool waits for the reads that are in progress.
pub struct ExpertReader {
    state: Arc<ReaderState>,
    threads: Vec<JoinHandle<()>>,
}

impl ExpertReader {
    /// Starts the threads. `layout` describes the slots in `slab`. Only the reader writes to these slots.
    pub fn new(
        source: Box<dyn ExpertSource>,
        slab: Arc<Slab>,
        states: SlotStates,
        layout: SlotLayout,
        threads: usize,
        metrics: Arc<Metrics>,
    ) -> io::Result<Self> {
        let threads = threads.max(1);
        let experts = (0..layout.slots).map(|_| ExpertRead::default()).collect();
        let queue = ReadQueue { experts, ..ReadQueue::default() };
        let counted = metrics.ssd_disk_bytes.get();
        let state = Arc::new(ReaderState {
            source,
            slab,
            states,
            layout,
            threads,
            queue: Mutex::new(queue),
            work: Condvar::new(),
            finished: AtomicU64::new(0),
            finished_changed: Condvar::new(),
            metrics,
            has_logged_zeros: AtomicBool::new(false),
            verify_in_background: AtomicBool::new(false),
            disk_base: disk_bytes_read().map(|now| now.saturating_sub(counted)),
        });
        let mut reader = Self { state, threads: Vec::with_capacity(threads) };
        for index in 0..threads {
            let state = reader.state.clone();
            let thread = std::thread::Builder::new().name(format!("expert-io-{index}"));
            reader.threads.push(thread.spawn(move || {
                interactive_thread();
                state.serve();
            })?);
        }
        Ok(reader)
    }

    pub fn source(&self) -> &dyn ExpertSource {
        &*self.state.source
    }

    /// Turns background verification on or off. If background verification is on, an expert can be used while its
    /// checksum is being verified. During that time, the expert's state is [`SlotState::Checking`].
    pub fn verify_in_background(&self, on: bool) {
        self.state.verify_in_background.store(on, Ordering::Relaxed);
    }

    /// Queues a demand read of an expert. The caller must have set the slot to [`SlotState::Reading`].
    pub fn read_now(&self, slot: SlotId, plan: ReadPlan) {
        let mut queue = self.state.queue.lock();
        queue.set_plan(slot, plan);
        self.state.start(&mut queue, slot, false);
        self.state.wake(&queue);
    }

    /// Queues a background read of an expert. The caller must have set the slot to [`SlotState::Queued`].
    pub fn read_later(&self, slot: SlotId, plan: ReadPlan) {
        let mut queue = self.state.queue.lock();
        queue.set_plan(slot, plan);
        queue.unstarted.push_back(slot);
        drop(queue);
        self.state.work.notify_one();
    }

    /// Turns the background read of an expert into a demand read.
    pub fn expedite(&self, slot: SlotId) {
        let mut queue = self.state.queue.lock();
        if queue.remove_unstarted(slot) {
            self.state.start(&mut queue, slot, false);
        } else {
            // The expert's reads are already queued as jobs, and threads may have taken some of the jobs. Move the
            // remaining jobs.
            let queue = &mut *queue;
            for _ in 0..queue.background.len() {
                let Some(job) = queue.background.pop_front() else { break };
                if job.slot == slot {
                    queue.demand.push_back(ReadJob { is_background: false, ..job });
                } else {
                    queue.background.push_back(job);
                }
            }
        }
        self.state.wake(&queue);
    }

    /// Cancels a background read. If the read was already started, returns false and does not cancel it.
    pub fn cancel(&self, slot: SlotId) -> bool {
        self.state.queue.lock().remove_unstarted(slot)
    }

    /// Returns the error of the last read into a slot, and clears the error.
    pub fn take_failure(&self, slot: SlotId) -> Option<ReadFailure> {
        self.state.queue.lock().experts.get_mut(slot.index())?.failure.take()
    }

    /// Counts how often the reads or the verification of an expert have ended. Call this before checking slot states,
    /// and pass the result to [`ExpertReader::wait`]. A change after the check then ends the wait.
    pub fn finished(&self) -> u64 {
        self.state.finished.load(Ordering::Acquire)
    }

    /// True while reads are running or queued.
    pub fn is_busy(&self) -> bool {
        let queue = self.state.queue.lock();
        queue.running > 0 || !(queue.demand.is_empty() && queue.background.is_empty() && queue.unstarted.is_empty())
    }

    /// Blocks until [`ExpertReader::finished`] exceeds `seen`.
    pub fn wait(&self, seen: u64) {
        let mut queue = self.state.queue.lock();
        while self.finished() <= seen {
            self.state.finished_changed.wait(&mut queue);
        }
    }

    /// Blocks until [`ExpertReader::finished`] exceeds `seen`, at most for `timeout`. Returns false after a timeout.
    pub fn wait_at_most(&self, seen: u64, timeout: Duration) -> bool {
        let mut queue = self.state.queue.lock();
        let deadline = Instant::now() + timeout;
        while self.finished() <= seen {
            if self.state.finished_changed.wait_until(&mut queue, deadline).timed_out() {
                return self.finished() > seen;
            }
        }
        true
    }
}

impl Drop for ExpertReader {
    fn drop(&mut self) {
        self.state.queue.lock().is_closing = true;
        self.state.work.notify_all();
        for thread in self.threads.drain(..) {
            // If the thread has panicked, the panic was already logged.
            let _ = thread.join();
        }
        self.state.count_disk_bytes();
    }
}

impl ReadQueue {
    fn set_plan(&mut self, slot: SlotId, plan: ReadPlan) {
        if let Some(expert) = self.experts.get_mut(slot.index()) {
            *expert = ExpertRead { reads_left: plan.reads().len(), plan, failure: None };
        }
    }

    fn remove_unstarted(&mut self, slot: SlotId) -> bool {
        let found = self.unstarted.iter().position(|&other| other == slot);
        found.and_then(|at| self.unstarted.remove(at)).is_some()
    }
}

impl ReaderState {
    /// Queues each read of an expert as a job.
    fn start(&self, queue: &mut ReadQueue, slot: SlotId, is_background: bool) {
        self.states.set(slot, SlotState::Reading);
        let Some(expert) = queue.experts.get(slot.index()) else { return };
        let jobs = if is_background { &mut queue.background } else { &mut queue.demand };
        let is_whole_expert = expert.plan.reads().len() == 1;
        jobs.extend(expert.plan.reads().iter().map(|&read| ReadJob { slot, read, is_background, is_whole_expert }));
        if expert.reads_left == 0 {
            self.publish(slot, SlotState::Ready);
        }
    }

    /// Sets the state of an expert whose reads or verification have ended, and wakes the waiting thread. The caller
    /// must hold the lock of the queue. Otherwise [`ExpertReader::wait`] could miss the notification.
    fn publish(&self, slot: SlotId, state: SlotState) {
        self.states.set(slot, state);
        self.finished.fetch_add(1, Ordering::Release);
        self.finished_changed.notify_one();
    }

    fn next(&self, queue: &mut ReadQueue) -> Option<ReadJob> {
        if let Some(job) = queue.demand.pop_front() {
            return Some(job);
        }
        if queue.background_running >= self.threads.div_ceil(2) {
            return None;
        }
        while queue.background.is_empty() {
            let slot = queue.unstarted.pop_front()?;
            self.start(queue, slot, true);
        }
        let job = queue.background.pop_front()?;
        queue.background_running += 1;
        Some(job)
    }

    fn wake(&self, queue: &ReadQueue) {
        if queue.demand.len() > 1 {
            self.work.notify_all();
        } else if !queue.demand.is_empty() {
            self.work.notify_one();
        }
    }

    /// The loop of one reader thread.
    fn serve(&self) {
        let mut queue = self.queue.lock();
        while !queue.is_closing {
            if let Some(job) = self.next(&mut queue) {
                queue.running += 1;
                let mut outcome = MutexGuard::unlocked(&mut queue, || self.read(&job));
                if matches!(outcome, ReadOutcome::Unverified) {
                    self.publish(job.slot, SlotState::Checking);
                    outcome = MutexGuard::unlocked(&mut queue, || self.verify(&job));
                }
                self.finish(&mut queue, job, outcome);
            } else if queue.is_uncounted && queue.running == 0 {
                let waited = self.work.wait_for(&mut queue, IDLE_BEFORE_COUNT);
                if waited.timed_out() && queue.is_uncounted && queue.running == 0 {
                    queue.is_uncounted = false;
                    MutexGuard::unlocked(&mut queue, || self.count_disk_bytes());
                }
            } else {
                self.work.wait(&mut queue);
            }
        }
    }

    fn finish(&self, queue: &mut ReadQueue, job: ReadJob, outcome: ReadOutcome) {
        queue.running -= 1;
        queue.is_uncounted = true;
        if job.is_background {
            queue.background_running -= 1;
        }
        let Some(expert) = queue.experts.get_mut(job.slot.index()) else { return };
        expert.reads_left -= 1;
        let is_damaged = matches!(outcome, ReadOutcome::Damaged);
        if let ReadOutcome::Failed(failure) = outcome {
            expert.failure = Some(failure);
        }
        if expert.reads_left == 0 {
            let state = if is_damaged { SlotState::Damaged } else { SlotState::Ready };
            self.publish(job.slot, if expert.failure.is_some() { SlotState::Failed } else { state });
        }
    }

    fn count_disk_bytes(&self) {
        if let (Some(now), Some(base)) = (disk_bytes_read(), self.disk_base) {
            let counted = self.metrics.ssd_disk_bytes.get();
            self.metrics.ssd_disk_bytes.inc_by(now.saturating_sub(base).saturating_sub(counted));
        }
    }

    /// The byte range of the slab that a job fills.
    fn range(&self, job: &ReadJob) -> Range<usize> {
        let base = self.layout.start(job.slot.index()) + job.read.at;
        base..base + job.read.len
    }

    fn failure(&self, read: &ReadRange, source: io::Error) -> ReadFailure {
        self.metrics.ssd_errors.inc();
        ReadFailure { file: read.file, offset: read.offset, len: read.needed, source }
    }

    /// Reads one range into its slot. If a packed record cannot be read or its checksum does not match, the record is
    /// rebuilt from the checkpoint.
    fn read(&self, job: &ReadJob) -> ReadOutcome {
        let read = &job.read;
        // SAFETY: the slot is Reading, so no other thread reads the slot. The reads of an expert have disjoint ranges,
        // and each read is taken from the queue by one thread. The slot is reused only after all its reads have ended.
        let into = unsafe { self.slab.bytes_mut(self.range(job)) };
        let Some(records) = self.source.pack_records() else {
            if let Err(error) = self.read_range(read, into) {
                return ReadOutcome::Failed(self.failure(read, error));
            }
            self.report_zero(read, into.get(..read.needed).unwrap_or_default());
            return ReadOutcome::Done;
        };
        let mut why = None;
        if !records.is_damaged(read.file, read.offset) {
            let due =
                self.read_range(read, into).and_then(|()| records.count_read(read.file, read.offset, read.needed));
            let bytes = into.get(..read.needed).unwrap_or_default();
            match due {
                Ok(true) if job.is_whole_expert && self.verify_in_background.load(Ordering::Relaxed) => {
                    return ReadOutcome::Unverified;
                }
                Ok(true) => why = records.verify(read.file, read.offset, bytes).err(),
                Ok(false) => {}
                Err(error) => why = Some(error),
            }
            if why.is_none() {
                return ReadOutcome::Done;
            }
        }
        let why = why.map(|why| self.failure(read, why).source);
        match records.rebuild(read.file, read.offset, into) {
            Ok((reads, bytes)) => {
                self.metrics.ssd_reads.inc_by(reads);
                self.metrics.ssd_read_bytes.inc_by(bytes);
                if let Some(why) = why {
                    self.mark_damaged(records, read, &why);
                }
                ReadOutcome::Done
            }
            Err(error) => {
                let why = why.map(|why| format!("{why}; ")).unwrap_or_default();
                let both = format!("{why}the checkpoint cannot be read either: {error}");
                ReadOutcome::Failed(self.failure(read, io::Error::new(error.kind(), both)))
            }
        }
    }

    /// Logs the first read of a checkpoint that finds zeros only. A pack has checksums instead.
    fn report_zero(&self, read: &ReadRange, bytes: &[u8]) {
        let has_logged = &self.has_logged_zeros;
        if !has_logged.load(Ordering::Relaxed)
            && bytes.iter().all(|byte| *byte == 0)
            && !has_logged.swap(true, Ordering::Relaxed)
        {
            let file = self.source.path(read.file);
            tracing::warn!(
                file = %file.display(),
                offset = read.offset,
                "a part of an expert is zero, as in a file whose download did not end"
            );
        }
    }

    /// Verifies the checksum of a record in state [`SlotState::Checking`].
    fn verify(&self, job: &ReadJob) -> ReadOutcome {
        let read = &job.read;
        let base = self.range(job).start;
        let Some(records) = self.source.pack_records() else { return ReadOutcome::Done };
        // SAFETY: the slot is Checking: no thread writes to it, and it is not reused.
        let bytes = unsafe { self.slab.bytes(base..base + read.needed) };
        match records.verify(read.file, read.offset, bytes) {
            Ok(()) => ReadOutcome::Done,
            Err(why) => {
                self.mark_damaged(records, read, &self.failure(read, why).source);
                ReadOutcome::Damaged
            }
        }
    }

    /// Marks a record as damaged, so that later reads rebuild it from the checkpoint.
    fn mark_damaged(&self, records: &PackRecords, read: &ReadRange, why: &io::Error) {
        let path = self.source.path(read.file);
        let offset = read.offset;
        let why = format!("{}, record at byte {offset}: {why}", path.display());
        if records.mark_damaged(read.file, offset, &why) {
            self.metrics.pack_damaged_records.inc();
        }
    }

    /// Reads one range. After an interruption or a short read, reads again until all needed bytes have arrived.
    fn read_range(&self, read: &ReadRange, into: &mut [u8]) -> io::Result<()> {
        let result = read_aligned(into, read.needed, self.source.block(), |rest, start| {
            let begin = Instant::now();
            let got = self.source.read(read.file, read.offset + start as u64, rest)?;
            self.metrics.ssd_reads.inc();
            self.metrics.ssd_read_bytes.inc_by(got as u64);
            self.metrics.ssd_read_seconds.observe(begin.elapsed().as_secs_f64());
            Ok(got)
        });
        result.map_err(|error| match error.kind() {
            io::ErrorKind::UnexpectedEof => {
                let size = self.source.size(read.file).unwrap_or(0);
                io::Error::new(error.kind(), format!("{error} (the file had {size} when opened)"))
            }
            _ => error,
        })
    }
}
