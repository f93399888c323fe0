//! A driver that runs the kernels on the host, in order.
//!
//! [`HostGpu`] runs command buffers as late as a device may: only when a caller waits for them, which asks for progress
//! again and again. A slot or a list that is overwritten too early therefore gives wrong results. Like an NVIDIA GPU,
//! [`HostGpu`] has its own memory: adopted bytes are NaN until they are uploaded.

use crate::host::Host;
use moestro_compute::device::{
    Binding, BufferAccess, CommandQueue, CommandStatus, DeviceError, Driver, Launch, Region, Slab,
};
use std::{
    cell::RefCell,
    collections::{BTreeSet, HashMap, VecDeque},
    ops::Range,
    sync::{Arc, Mutex},
    time::Duration,
};
use test_support::mutate::Dice;

pub struct HostGpu {
    inner: RefCell<Inner>,
    pub count: Arc<Mutex<Count>>,
    /// True if the device reports matrix units.
    pub halves: bool,
    /// A kernel with wrong results.
    pub wrong: Option<&'static str>,
    /// A kernel that the driver refuses.
    pub refused: Option<&'static str>,
    /// True if the device ignores dependencies: it runs the launches of a command buffer in reverse order.
    pub reverses: bool,
    /// True if loads measure the variants of kernels.
    pub has_variants: bool,
    /// Number of times that each launch runs before it runs with its real inputs: with bytes that no launch has written.
    pub garbage_runs: usize,
}

/// Counts since the last reset.
#[derive(Default)]
pub struct Count {
    pub launches: usize,
    /// Launches of direct variants.
    pub direct: usize,
    /// Command buffers with launches.
    pub command_buffers: usize,
    /// Waits for command buffers that had not run.
    pub waits: usize,
    pub barriers: usize,
    /// Total bytes of allocated buffers, including buffers that were freed.
    pub allocated: usize,
}

struct Inner {
    host: Host,
    /// The slab of each adopted buffer, and the offset in the slab at which the buffer starts.
    adopted: HashMap<u32, (Arc<Slab>, usize)>,
    /// Submitted command buffers that have not run, with their event values.
    pending: VecDeque<(u64, Vec<Work>)>,
    /// Event value of the last command buffer that has run.
    event: u64,
    /// Messages of the command buffers that have failed.
    failed: HashMap<u64, String>,
    /// Number of questions about progress since the last launch or submission.
    asked: usize,
}

pub enum Work {
    Launch(Launch),
    /// An upload of adopted memory.
    Copy(Region),
}

impl HostGpu {
    /// Creates a device that runs each launch once. Other tests check that kernels do not depend on the order of
    /// threads.
    pub fn new(mut host: Host) -> Self {
        (host.twice, host.reuses_results) = (false, true);
        let (adopted, pending, failed) = Default::default();
        Self {
            inner: RefCell::new(Inner { host, adopted, pending, event: 0, failed, asked: 0 }),
            count: Arc::default(),
            halves: false,
            wrong: None,
            refused: None,
            reverses: false,
            has_variants: false,
            garbage_runs: 0,
        }
    }

    /// A device with matrix units.
    pub fn with_matrix_units(host: Host) -> Self {
        Self { halves: true, ..Self::new(host) }
    }

    pub fn queue(self) -> CommandQueue<Self> {
        CommandQueue::new(self)
    }

    /// Runs the oldest command buffer.
    fn run_oldest(&self, inner: &mut Inner) {
        let Some((value, mut work)) = inner.pending.pop_front() else { return };
        if self.reverses {
            work.reverse();
            work.sort_by_key(|work| matches!(work, Work::Launch(_)));
        }
        let mut random = Dice(value);
        for work in work {
            match work {
                Work::Copy(region) => inner.copy(region),
                Work::Launch(launch) => {
                    inner.run_on_garbage(&launch, self.garbage_runs, &mut random);
                    match inner.run(&launch) {
                        Ok(()) if self.wrong == Some(launch.kernel) => inner.spoil(&launch),
                        Ok(()) => {}
                        Err(fault) => drop(inner.failed.insert(value, fault)),
                    }
                }
            }
        }
        inner.event = value;
    }
}

impl Driver for HostGpu {
    type Encoder = Vec<Work>;
    type CommandBuffer = u64;

    fn name(&self) -> String {
        "the host".into()
    }

    fn working_set(&self) -> Option<u64> {
        None
    }

    /// This is enough for a segment of expert slots.
    fn max_buffer_len(&self) -> usize {
        1 << 30
    }

    fn compile(&mut self) -> Vec<(String, Option<DeviceError>)> {
        let broken = || ("kernels/some.metal".into(), Some(DeviceError::Failed("line 1: no".into())));
        self.refused.iter().map(|_| broken()).collect()
    }

    fn max_threads(&mut self, _: &str) -> Result<u32, DeviceError> {
        Ok(1024)
    }

    fn allocate(&mut self, buffer: u32, bytes: usize) -> Result<(), DeviceError> {
        self.count.lock().unwrap().allocated += bytes;
        let host = &mut self.inner.get_mut().host;
        let region = host.zeros(bytes);
        assert_eq!(region.buffer, buffer, "buffers are counted");
        Ok(())
    }

    fn adopt(&mut self, buffer: u32, slab: &Arc<Slab>, range: Range<usize>) -> Result<(), DeviceError> {
        let inner = self.inner.get_mut();
        let region = inner.host.empty(range.len());
        assert_eq!(region.buffer, buffer, "buffers are counted");
        inner.adopted.insert(buffer, (slab.clone(), range.start));
        Ok(())
    }

    fn address(&mut self, buffer: u32) -> Result<u64, DeviceError> {
        Ok(self.inner.get_mut().host.address(buffer))
    }

    fn free(&mut self, buffer: u32) {
        self.inner.get_mut().host.drop_buffer(buffer);
    }

    fn write(&mut self, region: Region, bytes: &[u8]) -> Result<(), DeviceError> {
        self.inner.get_mut().host.write(region, bytes);
        Ok(())
    }

    fn read(&mut self, region: Region, bytes: &mut [u8]) -> Result<(), DeviceError> {
        bytes.copy_from_slice(&self.inner.get_mut().host.read(region));
        Ok(())
    }

    fn has_matrix_units(&self) -> bool {
        self.halves
    }

    fn has_variants(&self) -> bool {
        self.has_variants
    }

    fn min_tiled_weights(&self) -> Option<usize> {
        self.halves.then_some(0)
    }

    fn has_own_memory(&self) -> bool {
        true
    }

    fn upload(&mut self, open: &mut Vec<Work>, region: Region) -> Result<(), DeviceError> {
        open.push(Work::Copy(region));
        Ok(())
    }

    fn begin(&mut self, _: bool) -> Result<Vec<Work>, DeviceError> {
        Ok(Vec::new())
    }

    fn barrier(&mut self, _: &mut Vec<Work>) {
        self.count.lock().unwrap().barriers += 1;
    }

    fn launch(&mut self, open: &mut Vec<Work>, launch: &Launch) -> Result<(), DeviceError> {
        if self.refused == Some(launch.kernel) {
            return Err(DeviceError::Failed("refused by the driver".into()));
        }
        let mut count = self.count.lock().unwrap();
        count.launches += 1;
        count.direct += usize::from(launch.kernel.contains("_direct"));
        drop(count);
        self.inner.get_mut().asked = 0;
        open.push(Work::Launch(launch.clone()));
        Ok(())
    }

    fn can_recover(&self) -> bool {
        false
    }

    fn encode_fault(&mut self, _: &mut Vec<Work>) -> Result<(), DeviceError> {
        Err(DeviceError::Failed("the host cannot fail on purpose".into()))
    }

    fn commit(&mut self, open: Vec<Work>, value: u64) -> u64 {
        let has_launches = open.iter().any(|work| matches!(work, Work::Launch(_)));
        self.count.lock().unwrap().command_buffers += usize::from(has_launches);
        let inner = self.inner.get_mut();
        inner.asked = 0;
        inner.pending.push_back((value, open));
        value
    }

    /// Runs a command buffer if the caller has asked before.
    fn signalled_value(&self) -> u64 {
        let inner = &mut *self.inner.borrow_mut();
        inner.asked += 1;
        if inner.asked > 1 && !inner.pending.is_empty() {
            self.count.lock().unwrap().waits += usize::from(inner.asked == 2);
            self.run_oldest(inner);
        }
        inner.event
    }

    fn status(&self, value: &u64) -> CommandStatus {
        let inner = self.inner.borrow();
        match inner.failed.get(value) {
            Some(fault) => CommandStatus::Failed(fault.clone()),
            None if *value <= inner.event => CommandStatus::Done(0.0),
            None => CommandStatus::Pending,
        }
    }

    fn wait_event(&self, _: u64, _: Duration) {}

    fn reset(&mut self, value: u64) -> Result<(), DeviceError> {
        self.inner.get_mut().event = value;
        Ok(())
    }

    /// So low that no command buffer is full.
    fn initial_seconds_per_thread(&self) -> f64 {
        0.0
    }

    fn leak_buffers(&mut self) {}
}

impl Inner {
    fn run(&mut self, launch: &Launch) -> Result<(), String> {
        for binding in &launch.bindings {
            let adopted = self.adopted.contains_key(&binding.region.buffer);
            assert!(!adopted || binding.access == BufferAccess::Read, "{} writes to weights", launch.kernel);
            // The kernels' pointers are declared `restrict`: the bytes that a launch reads must not overlap the bytes
            // it writes.
            let others = launch.bindings.iter().filter(|other| other.access != BufferAccess::Read && *other != binding);
            for other in others {
                assert!(!other.region.overlaps(binding.region), "{}: {binding:?} and {other:?}", launch.kernel);
            }
        }
        self.host.try_run(launch)
    }

    /// Runs a launch on garbage, as after a launch that should have written its inputs and did not. Then restores the
    /// buffers. Unchecked indices keep their bytes, because only the CPU writes them. So do tables of addresses, but some
    /// segments are not mapped, unless the CPU has listed slots in them.
    fn run_on_garbage(&mut self, launch: &Launch, runs: usize, random: &mut Dice) {
        let is_listed = launch.bindings.iter().any(|binding| binding.is_index);
        let is_kept =
            |region: Region| launch.bindings.iter().any(|other| other.is_index && other.region.overlaps(region));
        let changes = |binding: &&Binding| !(is_kept(binding.region) || binding.is_table && is_listed);
        for _ in 0..runs {
            let bindings: Vec<&Binding> = launch.bindings.iter().filter(changes).collect();
            let before: Vec<_> = bindings.iter().map(|binding| self.host.read(binding.region)).collect();
            for (binding, bytes) in bindings.iter().zip(&before) {
                let mut bytes = bytes.clone();
                if binding.is_table {
                    bytes.chunks_mut(8).filter(|_| random.below(2) == 0).for_each(|address| address.fill(0));
                } else {
                    fill_with_garbage(&mut bytes, random);
                }
                self.host.write(binding.region, &bytes);
            }
            let twice = std::mem::replace(&mut self.host.twice, false);
            self.host.run(launch);
            self.host.twice = twice;
            bindings.iter().zip(&before).for_each(|(binding, bytes)| self.host.write(binding.region, bytes));
        }
    }

    fn copy(&mut self, region: Region) {
        let (slab, start) = &self.adopted[&region.buffer];
        // SAFETY: the caller of `upload` promised that the bytes do not change before the upload is done.
        let bytes = unsafe { slab.bytes(start + region.offset..start + region.offset + region.len) };
        self.host.write(region, bytes);
    }

    /// Flips a bit at two places of each output. Each place is the high byte of a float or integer, or of the second of
    /// two half-precision values.
    fn spoil(&mut self, launch: &Launch) {
        for binding in launch.bindings.iter().filter(|binding| binding.access != BufferAccess::Read) {
            let places = BTreeSet::from([8, 12].map(|part| binding.region.len / part * 4 + 3));
            for at in places.into_iter().map(|at| binding.region.part(at, 1)) {
                let byte = self.host.read(at)[0];
                self.host.write(at, &[byte ^ 0x08]);
            }
        }
    }
}

/// Words of one kind: all bits set, any bits, small numbers, large floats, or small numbers among NaN.
fn fill_with_garbage(bytes: &mut [u8], random: &mut Dice) {
    let (kind, small) = (random.below(5), 1 + random.below(64));
    for word in bytes.chunks_mut(4) {
        let value = match kind {
            0 => u32::MAX,
            1 => random.roll() as u32,
            3 => (random.normal() * 1e30).to_bits(),
            4 if random.below(4) == 0 => f32::NAN.to_bits(),
            _ => random.below(small) as u32,
        };
        word.copy_from_slice(&value.to_le_bytes()[..word.len()]);
    }
}
