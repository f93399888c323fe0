//! Launches in order on a GPU that by itself keeps none, and what becomes of them when one fails.
//!
//! ```text
//! launch   encode into the open command buffer; a barrier where this launch follows one since the last barrier
//! commit   update the fence, signal the next number, hand over; the next command buffer begins behind the fence
//! wait     commit, then until every command buffer is over: spinning first, since a wake-up can cost more than a layer
//! ```
//! **Failure.** A launch that is refused was not encoded, and that is all. A command buffer that fails later never signals: a
//! wait therefore asks each one how it stands, and once all are over it starts anew with another queue, fence and event, and
//! reports the first failure. Until it is reported, every call fails. A device that fails several times in a row, or does not
//! end what it was given, is lost: every call fails from then on, and [`Gpu::lost`] says so.
//!
//! **Pace.** A command buffer is handed over when it holds about [`SLICE`] of work: the system ends one that takes too long, and
//! the screen waits for it, too. The work is that of as many threads as the buffers before took, measured.

mod wait;

use super::{DeviceError, Dispatch, Driver, Gpu, Mark, Region, Slab, Timeline};
use std::{
    collections::{BTreeMap, VecDeque},
    ops::Range,
    sync::Arc,
    time::{Duration, Instant},
};

/// Longer than the system lets a command buffer run: if none has ended by then, none will.
const PATIENCE: Duration = Duration::from_secs(60);
/// Waits in a row that end in failure before the device is given up.
const ATTEMPTS: u32 = 3;
/// Work in one command buffer (seconds).
const SLICE: f64 = 0.1;
/// Seconds a thread takes, before anything was measured.
const FIRST_RATE: f64 = 1e-8;
/// Residency that is not asked for again goes stale.
const HEARTBEAT: Duration = Duration::from_millis(500);
/// Bytes of arguments that are copied into a command buffer, at most (Metal's `setBytes`).
const MOST_ARGUMENTS: usize = 4096;

/// A GPU behind a driver.
pub struct Queue<D: Driver> {
    driver: D,
    /// Each buffer's length.
    lengths: BTreeMap<u32, usize>,
    next: u32,
    open: Option<Open<D::Open>>,
    committed: VecDeque<Committed<D::Committed>>,
    /// The last number that a command buffer was told to signal.
    last: u64,
    /// A command buffer has updated the fence.
    fenced: bool,
    /// The first failure since one was reported.
    failure: Option<String>,
    /// Failures since a wait has found everything well done.
    failures: u32,
    /// The last number that a wait has seen the end of, and the last whose command buffer is over.
    settled: u64,
    over: u64,
    lost: bool,
    /// Seconds a thread takes.
    rate: f64,
    heartbeat: Option<Instant>,
    patience: Duration,
}

struct Open<C> {
    commands: C,
    /// Launches since the last barrier: they may overlap.
    unordered: Vec<Dispatch>,
    threads: f64,
}

struct Committed<C> {
    commands: C,
    value: u64,
    threads: f64,
}

fn refuse<T>(why: impl Into<String>) -> Result<T, DeviceError> {
    Err(DeviceError(why.into()))
}

impl<D: Driver> Queue<D> {
    pub fn new(driver: D) -> Self {
        Self {
            driver,
            lengths: BTreeMap::new(),
            next: 0,
            open: None,
            committed: VecDeque::new(),
            last: 0,
            fenced: false,
            failure: None,
            failures: 0,
            settled: 0,
            over: 0,
            lost: false,
            rate: FIRST_RATE,
            heartbeat: None,
            patience: PATIENCE,
        }
    }

    /// Gives a device up that ends nothing for so long.
    pub fn with_patience(mut self, patience: Duration) -> Self {
        self.patience = patience;
        self
    }

    /// Fails after a failure, until the next wait has reported it.
    fn sound(&self) -> Result<(), DeviceError> {
        match &self.failure {
            Some(failure) => refuse(failure),
            None if self.lost => refuse("the GPU was given up: it had failed again and again"),
            None => Ok(()),
        }
    }

    fn inside(&self, region: Region) -> Result<(), DeviceError> {
        match self.lengths.get(&region.buffer) {
            Some(len) if region.offset.checked_add(region.len).is_some_and(|end| end <= *len) => Ok(()),
            _ => refuse(format!("{region:?}: there is no such memory")),
        }
    }

    fn number(&mut self, bytes: usize) -> Region {
        let buffer = self.next;
        self.next += 1;
        self.lengths.insert(buffer, bytes);
        Region { buffer, offset: 0, len: bytes }
    }

    fn encode(&mut self, dispatch: &Dispatch) -> Result<(), DeviceError> {
        dispatch.bindings.iter().try_for_each(|binding| self.inside(binding.region))?;
        if dispatch.args.len() * 4 > MOST_ARGUMENTS {
            return refuse(format!("{}: {} words of arguments", dispatch.kernel, dispatch.args.len()));
        }
        let most = self.driver.most_threads(dispatch.kernel)?;
        if dispatch.threads > most {
            return refuse(format!("{}: {} threads, of which {most} are possible", dispatch.kernel, dispatch.threads));
        }
        let mut open = self.begun()?;
        if open.unordered.iter().any(|earlier| dispatch.follows(earlier)) {
            self.driver.barrier(&mut open.commands);
            open.unordered.clear();
        }
        let done = self.driver.launch(&mut open.commands, dispatch);
        if done.is_ok() {
            open.unordered.push(dispatch.clone());
        }
        open.threads += dispatch.grid.iter().map(|n| f64::from(*n)).product::<f64>() * f64::from(dispatch.threads);
        let full = open.threads * self.rate >= SLICE;
        self.open = Some(open);
        done?;
        if full {
            self.hand_over();
        }
        Ok(())
    }

    fn begin(&mut self) -> Result<D::Open, DeviceError> {
        self.driver.begin(self.fenced).inspect_err(|_| {
            self.failures += 1;
            self.lost |= self.failures >= ATTEMPTS;
        })
    }

    /// The open command buffer, or a new one; to be put back.
    fn begun(&mut self) -> Result<Open<D::Open>, DeviceError> {
        match self.open.take() {
            Some(open) => Ok(open),
            None => Ok(Open { commands: self.begin()?, unordered: Vec::new(), threads: 0.0 }),
        }
    }

    fn hand_over(&mut self) {
        let Some(Open { commands, threads, .. }) = self.open.take() else { return };
        if self.heartbeat.is_none_or(|last| last.elapsed() >= HEARTBEAT) {
            self.driver.reside();
            self.heartbeat = Some(Instant::now());
        }
        self.last += 1;
        let commands = self.driver.commit(commands, self.last);
        self.fenced = true;
        self.committed.push_back(Committed { commands, value: self.last, threads });
        self.reap();
    }
}

impl<D: Driver> Timeline for Queue<D> {
    fn mark(&mut self) -> Mark {
        Mark(self.last + u64::from(self.open.is_some()))
    }

    fn passed(&mut self) -> Mark {
        Mark(self.driver.signalled().max(self.over))
    }

    fn wait_for(&mut self, mark: Mark) -> Result<(), DeviceError> {
        if self.failure.is_some() {
            return self.wait();
        }
        self.sound()?;
        if mark.0 > self.last {
            self.hand_over();
        }
        self.reach(mark.0.min(self.last));
        if self.failure.is_some() {
            return self.wait();
        }
        self.forgive(mark.0.min(self.last));
        Ok(())
    }
}

impl<D: Driver> Gpu for Queue<D> {
    fn name(&self) -> String {
        self.driver.name()
    }

    fn working_set(&self) -> Option<u64> {
        self.driver.working_set()
    }

    fn compile(&mut self) -> Vec<(String, Option<DeviceError>)> {
        self.driver.compile()
    }

    fn allocate(&mut self, bytes: usize) -> Result<Region, DeviceError> {
        self.sound()?;
        self.driver.allocate(self.next, bytes)?;
        Ok(self.number(bytes))
    }

    fn release(&mut self, buffer: u32) {
        // Command buffers in flight may still use it.
        self.settle();
        if self.lengths.remove(&buffer).is_some() && self.committed.is_empty() {
            self.driver.free(buffer);
        }
    }

    fn adopt(&mut self, slab: &Arc<Slab>, range: Range<usize>) -> Result<Region, DeviceError> {
        self.sound()?;
        if range.is_empty() || range.end > slab.len() {
            return refuse(format!("bytes {range:?} of a slab of {}", slab.len()));
        }
        self.driver.adopt(self.next, slab, range.clone())?;
        Ok(self.number(range.len()))
    }

    fn has_own_memory(&self) -> bool {
        self.driver.has_own_memory()
    }

    fn has_matrix_units(&self) -> bool {
        self.driver.has_matrix_units()
    }

    fn landed(&mut self, region: Region) -> Result<(), DeviceError> {
        self.sound()?;
        self.inside(region)?;
        let mut open = self.begun()?;
        let done = self.driver.landed(&mut open.commands, region);
        self.open = Some(open);
        done
    }

    fn longest(&self) -> usize {
        self.driver.longest()
    }

    fn write(&mut self, region: Region, bytes: &[u8]) -> Result<(), DeviceError> {
        self.sound()?;
        self.inside(region)?;
        let len = bytes.len().min(region.len);
        self.driver.write(region.first(len), &bytes[..len])
    }

    fn read(&mut self, region: Region, bytes: &mut [u8]) -> Result<(), DeviceError> {
        self.sound()?;
        self.inside(region)?;
        let len = bytes.len().min(region.len);
        self.driver.read(region.first(len), &mut bytes[..len])
    }

    fn launch(&mut self, dispatch: &Dispatch) -> Result<(), DeviceError> {
        self.sound()?;
        self.encode(dispatch)
    }

    fn commit(&mut self) -> Result<(), DeviceError> {
        self.sound()?;
        self.hand_over();
        Ok(())
    }

    fn wait(&mut self) -> Result<(), DeviceError> {
        if self.lost {
            return self.failure.take().map_or_else(|| self.sound(), refuse);
        }
        self.settle();
        self.failure.take().map_or(Ok(()), refuse)
    }

    fn lost(&self) -> bool {
        self.lost
    }

    fn provoke(&mut self) -> Option<Result<String, DeviceError>> {
        if !self.driver.recovers() {
            return None;
        }
        let provoked = self.wait().and_then(|()| {
            let mut commands = self.begin()?;
            self.driver.provoke(&mut commands)?;
            self.open = Some(Open { commands, unordered: Vec::new(), threads: 0.0 });
            self.settle();
            match self.failure.take() {
                Some(_) if self.lost => refuse("the GPU did not recover from an error"),
                Some(failure) => Ok(failure),
                None => refuse("a write to an address that nobody has went unnoticed"),
            }
        });
        Some(provoked)
    }
}

impl<D: Driver> Drop for Queue<D> {
    /// The GPU must not outlive the memory it reads.
    fn drop(&mut self) {
        if !self.lost {
            self.settle();
        }
        if !self.committed.is_empty() {
            self.driver.leak();
        }
    }
}
