//! [`CommandQueue`] executes launches in order on a [`Driver`] that may reorder them.
//!
//! ```text
//! launch   encode into the open command buffer; if the launch conflicts with a launch since the last barrier, encode a
//!          barrier first
//! commit   submit the command buffer, which updates the fence and signals the next event value; the next command
//!          buffer waits for the fence
//! wait     commit, then wait until every command buffer has ended
//! ```
//! A wait spins before it sleeps, since waking a sleeping thread can take longer than the GPU needs for a layer.
//!
//! **Failures.** If the driver refuses a launch, the launch returns an error and is not encoded. If a command buffer
//! fails later, it never signals its value, so a wait queries the status of each command buffer. After all command
//! buffers have ended, the wait resets the driver (new queue, fence and event) and returns the first failure. Between
//! the failure and the wait, every call returns an error. The device is *lost* after several failures in a row, or if
//! no command buffer ends for too long. Then every call fails, and [`CommandQueue::is_lost`] returns true.
//!
//! **Pacing.** A command buffer is submitted when it has about [`MAX_SECONDS`] of work. A command buffer with more work
//! would delay the screen, and the system may kill it. The queue estimates work as the number of GPU threads times the
//! measured time per thread. After the system has ended work that delayed the screen, command buffers have a quarter of
//! that work.

use super::{
    CommandStatus, DeviceError, Driver, Launch, Region, Slab, SyncPoint, Timeline,
    error::{GPU_INTERACTIVITY, fail},
    residency::Heartbeat,
};
use std::{
    collections::{BTreeMap, VecDeque},
    ops::Range,
    sync::Arc,
    time::{Duration, Instant},
};

/// If no command buffer ends for this time, the device is lost. The system normally kills a slow command buffer
/// earlier.
const STALL_TIMEOUT: Duration = Duration::from_secs(60);
/// Number of failed waits in a row after which the device is lost.
const MAX_FAILURES: u32 = 3;
/// Estimated work, in seconds, at which a command buffer is submitted.
const MAX_SECONDS: f64 = 0.1;
/// Minimum GPU time of a command buffer that is used to measure the seconds per thread.
const MIN_MEASURED_SECONDS: f64 = 1e-3;
/// Interval between residency requests. Must be less than the time (about 1 s) after which macOS revokes residency.
const RESIDENCY_INTERVAL: Duration = Duration::from_millis(500);
/// Time for which residency requests continue after the last work.
const RESIDENCY_TIME: Duration = Duration::from_secs(180);
/// Maximum number of bytes of arguments in one launch (the limit of Metal's `setBytes`).
const MAX_ARGUMENT_BYTES: usize = 4096;
/// Time for which a wait spins before it sleeps.
const SPIN: Duration = Duration::from_millis(2);
/// Maximum duration of a single sleep.
const SLEEP: Duration = Duration::from_millis(100);

/// A GPU that executes launches in the order in which they were encoded: a driver, the open command buffer, and the
/// submitted command buffers that have not ended. The CPU may access a buffer only after [`CommandQueue::wait`] and
/// before the next launch that uses the buffer.
pub struct CommandQueue<D: Driver> {
    pub driver: D,
    /// Length in bytes of each buffer.
    lengths: BTreeMap<u32, usize>,
    next_buffer: u32,
    open: Option<OpenCommands<D::Encoder>>,
    in_flight: VecDeque<SubmittedCommands<D::CommandBuffer>>,
    /// Event value of the last submitted command buffer.
    last_value: u64,
    /// True if a command buffer was submitted since the fence was created, so that the next command buffer must wait
    /// for the fence.
    fenced: bool,
    /// The first failure that was not reported yet.
    failure: Option<String>,
    /// Number of failures since the last successful wait.
    failures: u32,
    /// Event value up to which waits have found no failure.
    succeeded_value: u64,
    /// Event value of the last command buffer that has ended.
    ended_value: u64,
    is_lost: bool,
    seconds_per_thread: f64,
    /// True after the system has ended work because it delayed the screen.
    has_delayed_screen: bool,
    /// Renews the residency of the buffers.
    heartbeat: Option<Heartbeat>,
    stall_timeout: Duration,
    spin: Duration,
}

/// The command buffer that is being encoded.
struct OpenCommands<E> {
    encoder: E,
    /// Launches encoded since the last barrier. The GPU may execute them at the same time.
    since_barrier: Vec<Launch>,
    /// Total number of GPU threads of all launches in the command buffer.
    threads: f64,
}

struct SubmittedCommands<C> {
    commands: C,
    value: u64,
    threads: f64,
}

impl<D: Driver> CommandQueue<D> {
    pub fn new(mut driver: D) -> Self {
        let seconds_per_thread = driver.initial_seconds_per_thread();
        let heartbeat = driver.residency_request().and_then(|request| {
            let started = Heartbeat::new(RESIDENCY_INTERVAL, RESIDENCY_TIME, request);
            started.inspect_err(|error| tracing::warn!(%error, "cannot start the residency thread")).ok()
        });
        Self {
            driver,
            lengths: BTreeMap::new(),
            next_buffer: 0,
            open: None,
            in_flight: VecDeque::new(),
            last_value: 0,
            fenced: false,
            failure: None,
            failures: 0,
            succeeded_value: 0,
            ended_value: 0,
            is_lost: false,
            seconds_per_thread,
            has_delayed_screen: false,
            heartbeat,
            stall_timeout: STALL_TIMEOUT,
            spin: SPIN,
        }
    }

    /// Sets the time after which the device is lost if no command buffer ends.
    pub fn with_stall_timeout(mut self, timeout: Duration) -> Self {
        self.stall_timeout = timeout;
        self
    }

    /// Returns an unreported failure, or an error if the device is lost.
    fn check_failure(&self) -> Result<(), DeviceError> {
        match &self.failure {
            Some(failure) => fail(failure),
            None if self.is_lost => fail("the GPU is lost after repeated failures"),
            None => Ok(()),
        }
    }

    fn check_bounds(&self, region: Region) -> Result<(), DeviceError> {
        match self.lengths.get(&region.buffer) {
            Some(len) if region.offset.checked_add(region.len).is_some_and(|end| end <= *len) => Ok(()),
            _ => fail(format!("{region:?} is outside its buffer, or there is no such buffer")),
        }
    }

    /// Assigns the next buffer number to a buffer of `bytes` bytes.
    fn add_buffer(&mut self, bytes: usize) -> Region {
        let buffer = self.next_buffer;
        self.next_buffer += 1;
        self.lengths.insert(buffer, bytes);
        Region { buffer, offset: 0, len: bytes }
    }

    /// Takes the open command buffer, or opens a new one. The caller must put it back into `open`.
    fn take_open(&mut self) -> Result<OpenCommands<D::Encoder>, DeviceError> {
        if let Some(open) = self.open.take() {
            return Ok(open);
        }
        let encoder = self.driver.begin(self.fenced).inspect_err(|_| {
            self.failures += 1;
            self.is_lost |= self.failures >= MAX_FAILURES;
        })?;
        Ok(OpenCommands { encoder, since_barrier: Vec::new(), threads: 0.0 })
    }

    /// Submits the open command buffer if there is an open command buffer.
    fn submit(&mut self) {
        let Some(OpenCommands { encoder, threads, .. }) = self.open.take() else { return };
        if let Some(heartbeat) = &self.heartbeat {
            heartbeat.mark_used();
        }
        self.last_value += 1;
        let commands = self.driver.commit(encoder, self.last_value);
        self.fenced = true;
        self.in_flight.push_back(SubmittedCommands { commands, value: self.last_value, threads });
        self.remove_ended();
    }

    /// Removes command buffers that have ended from `in_flight`, oldest first.
    fn remove_ended(&mut self) {
        while let Some(oldest) = self.in_flight.front() {
            match self.driver.status(&oldest.commands) {
                CommandStatus::Done(seconds) => {
                    if seconds >= MIN_MEASURED_SECONDS && oldest.threads > 0.0 {
                        self.seconds_per_thread = (seconds / oldest.threads).max(self.seconds_per_thread / 2.0);
                    }
                }
                CommandStatus::Failed(why) => {
                    self.has_delayed_screen |= why.contains(GPU_INTERACTIVITY);
                    self.failure.get_or_insert(why);
                }
                // If the signalled value equals this command buffer's value, the command buffer has succeeded. A larger
                // value does not prove this.
                CommandStatus::Pending if self.driver.signalled_value() == oldest.value => {}
                CommandStatus::Pending => return,
            }
            self.ended_value = oldest.value;
            self.in_flight.pop_front();
        }
    }

    /// Waits until all command buffers up to `value` have ended, or one has failed. The event's value alone does not
    /// prove that they succeeded, because a command buffer after a failed one may still signal its value.
    fn wait_value(&mut self, value: u64) {
        let mut last_change = Instant::now();
        let mut pending = self.in_flight.len();
        self.remove_ended();
        while self.failure.is_none() && self.in_flight.front().is_some_and(|oldest| oldest.value <= value) {
            if self.is_stalled(&mut pending, &mut last_change) {
                return;
            }
            self.pause(value, last_change);
            self.remove_ended();
        }
    }

    /// True if no command buffer has ended for `stall_timeout`. Then marks the device as lost.
    fn is_stalled(&mut self, pending: &mut usize, last_change: &mut Instant) -> bool {
        if self.in_flight.len() < *pending {
            *pending = self.in_flight.len();
            *last_change = Instant::now();
        }
        if last_change.elapsed() > self.stall_timeout {
            let seconds = self.stall_timeout.as_secs_f64();
            self.failure.get_or_insert_with(|| format!("the GPU has completed nothing for {seconds} s"));
            self.is_lost = true;
        }
        self.is_lost
    }

    /// Records that all work up to `value` has succeeded, and resets the failure count.
    fn mark_succeeded(&mut self, value: u64) {
        if value > self.succeeded_value {
            self.succeeded_value = value;
            self.failures = 0;
        }
    }

    /// Spins or sleeps for a moment during a wait for `value`.
    fn pause(&mut self, value: u64, since: Instant) {
        if since.elapsed() < self.spin {
            std::hint::spin_loop();
        } else {
            self.driver.wait_event(value, SLEEP.min(self.stall_timeout));
        }
    }

    /// Submits the open command buffer and waits until every command buffer has ended. Stores the first failure in
    /// `failure`.
    fn finish_all(&mut self) {
        self.submit();
        let mut last_change = Instant::now();
        let mut pending = self.in_flight.len();
        loop {
            self.remove_ended();
            match self.in_flight.is_empty() {
                true => break,
                false if self.is_stalled(&mut pending, &mut last_change) => return,
                false => self.pause(self.last_value, last_change),
            }
        }
        if self.failure.is_none() {
            return self.mark_succeeded(self.last_value);
        }
        self.failures += 1;
        self.fenced = false;
        // The new event starts at the last value, so this value does not prove that the work of the last command buffer
        // succeeded.
        self.succeeded_value = self.last_value;
        self.is_lost |= self.failures >= MAX_FAILURES || self.driver.reset(self.last_value).is_err();
    }
}

impl<D: Driver> Timeline for CommandQueue<D> {
    fn sync_point(&mut self) -> SyncPoint {
        SyncPoint(self.last_value + u64::from(self.open.is_some()))
    }

    fn completed(&mut self) -> SyncPoint {
        SyncPoint(self.driver.signalled_value().max(self.ended_value))
    }

    fn wait_for(&mut self, point: SyncPoint) -> Result<(), DeviceError> {
        if self.failure.is_some() {
            return self.wait();
        }
        self.check_failure()?;
        if point.0 > self.last_value {
            self.submit();
        }
        self.wait_value(point.0.min(self.last_value));
        if self.failure.is_some() {
            return self.wait();
        }
        self.mark_succeeded(point.0.min(self.last_value));
        Ok(())
    }
}

impl<D: Driver> CommandQueue<D> {
    /// Allocates zeroed memory.
    pub fn allocate(&mut self, bytes: usize) -> Result<Region, DeviceError> {
        self.check_failure()?;
        self.driver.allocate(self.next_buffer, bytes)?;
        Ok(self.add_buffer(bytes))
    }

    /// Frees a buffer from [`CommandQueue::allocate`] or [`CommandQueue::adopt`].
    pub fn release(&mut self, buffer: u32) {
        // Command buffers in flight may use the buffer, so wait for them.
        self.finish_all();
        if self.lengths.remove(&buffer).is_some() && self.in_flight.is_empty() {
            self.driver.free(buffer);
        }
    }

    /// Makes a range of a slab readable by launches. The range must start at a page boundary. If the device shares the
    /// CPU's memory, launches see later writes to the slab. Otherwise launches see only bytes that
    /// [`CommandQueue::upload`] has copied.
    pub fn adopt(&mut self, slab: &Arc<Slab>, range: Range<usize>) -> Result<Region, DeviceError> {
        self.check_failure()?;
        if range.is_empty() || range.end > slab.len() {
            return fail(format!("cannot adopt bytes {range:?} of a slab of {} bytes", slab.len()));
        }
        self.driver.adopt(self.next_buffer, slab, range.clone())?;
        Ok(self.add_buffer(range.len()))
    }

    /// Copies adopted bytes to the device, in order with launches. The bytes must not change until the device has
    /// completed the next sync point.
    pub fn upload(&mut self, region: Region) -> Result<(), DeviceError> {
        self.check_failure()?;
        self.check_bounds(region)?;
        let mut open = self.take_open()?;
        let done = self.driver.upload(&mut open.encoder, region);
        self.open = Some(open);
        done
    }

    pub fn write(&mut self, region: Region, bytes: &[u8]) -> Result<(), DeviceError> {
        self.check_failure()?;
        self.check_bounds(region)?;
        let len = bytes.len().min(region.len);
        self.driver.write(region.first(len), &bytes[..len])
    }

    pub fn read(&mut self, region: Region, bytes: &mut [u8]) -> Result<(), DeviceError> {
        self.check_failure()?;
        self.check_bounds(region)?;
        let len = bytes.len().min(region.len);
        self.driver.read(region.first(len), &mut bytes[..len])
    }

    /// Encodes one launch.
    pub fn launch(&mut self, launch: &Launch) -> Result<(), DeviceError> {
        self.check_failure()?;
        launch.bindings.iter().try_for_each(|binding| self.check_bounds(binding.region))?;
        if launch.args.len() * 4 > MAX_ARGUMENT_BYTES {
            return fail(format!("{}: {} words of arguments are too many", launch.kernel, launch.args.len()));
        }
        let max = self.driver.max_threads(launch.kernel)?;
        if launch.threads > max {
            return fail(format!("{}: {} threads per threadgroup exceed {max}", launch.kernel, launch.threads));
        }
        let mut open = self.take_open()?;
        if open.since_barrier.iter().any(|earlier| launch.conflicts_with(earlier)) {
            self.driver.barrier(&mut open.encoder);
            open.since_barrier.clear();
        }
        let done = self.driver.launch(&mut open.encoder, launch);
        if done.is_ok() {
            open.since_barrier.push(launch.clone());
        }
        open.threads += launch.grid.iter().map(|n| f64::from(*n)).product::<f64>() * f64::from(launch.threads);
        let max_seconds = if self.has_delayed_screen { MAX_SECONDS / 4.0 } else { MAX_SECONDS };
        let is_full = open.threads * self.seconds_per_thread >= max_seconds;
        self.open = Some(open);
        done?;
        if is_full {
            self.submit();
        }
        Ok(())
    }

    /// Submits all encoded launches.
    pub fn commit(&mut self) -> Result<(), DeviceError> {
        self.check_failure()?;
        self.submit();
        Ok(())
    }

    /// Submits all encoded launches and waits until the device has completed them.
    pub fn wait(&mut self) -> Result<(), DeviceError> {
        if self.is_lost {
            return self.failure.take().map_or_else(|| self.check_failure(), fail);
        }
        self.finish_all();
        self.failure.take().map_or(Ok(()), fail)
    }

    /// True after the system has ended work because it delayed the screen. Launches should then be small.
    pub fn has_delayed_screen(&self) -> bool {
        self.has_delayed_screen
    }

    /// True if the device is lost after repeated failures. Every further call fails, so the caller must use the CPU.
    pub fn is_lost(&self) -> bool {
        self.is_lost
    }

    /// Sets the time for which a wait spins before it sleeps. The default is 2 ms.
    pub fn set_spin(&mut self, time: Duration) {
        self.spin = time;
    }

    /// Makes the device fail on purpose, for `moestro doctor`. Returns the reported error message. `None` if the device
    /// cannot recover from a failure.
    ///
    /// # Errors
    /// The device did not report the failure, or did not recover from it.
    pub fn inject_fault(&mut self) -> Option<Result<String, DeviceError>> {
        if !self.driver.can_recover() {
            return None;
        }
        let reported = self.wait().and_then(|()| {
            let mut open = self.take_open()?;
            self.driver.encode_fault(&mut open.encoder)?;
            self.open = Some(open);
            self.finish_all();
            match self.failure.take() {
                Some(_) if self.is_lost => fail("the GPU did not recover from an error"),
                Some(failure) => Ok(failure),
                None => fail("the GPU did not report a write to an unmapped address"),
            }
        });
        Some(reported)
    }
    /// Writes 32-bit words to the start of a region.
    pub fn write_words(&mut self, region: Region, words: &[u32]) -> Result<(), DeviceError> {
        self.write(region.first(words.len() * 4), bytemuck::cast_slice(words))
    }

    /// Reads the whole region as 32-bit words.
    pub fn read_words(&mut self, region: Region) -> Result<Vec<u32>, DeviceError> {
        let mut words = vec![0; region.len / 4];
        self.read(region, bytemuck::cast_slice_mut(&mut words))?;
        Ok(words)
    }

    /// Reads the whole region as f32 values.
    pub fn read_floats(&mut self, region: Region) -> Result<Vec<f32>, DeviceError> {
        Ok(self.read_words(region)?.into_iter().map(f32::from_bits).collect())
    }
}

impl<D: Driver> Drop for CommandQueue<D> {
    /// Waits for all work, since the GPU must not use freed memory.
    fn drop(&mut self) {
        self.heartbeat = None;
        if !self.is_lost {
            self.finish_all();
        }
        if !self.in_flight.is_empty() {
            self.driver.leak_buffers();
        }
    }
}
