//! A test double of Metal under `device::CommandQueue`.
//!
//! The command buffers of the double run some time after they are committed, on the kernels compiled for the host, in
//! any order that barriers and fences allow. A call that Metal forbids or leaves undefined fails the test. A test can
//! make any call fail, and can give the double its own memory, like an NVIDIA GPU that recovers from failures.
//!
//! Like Metal, the double reads a segment only if a residency set contains it or the command buffer names it, and its
//! command buffers keep no pipeline alive.

use crate::host::Host;
use moestro_compute::device::{
    Binding, BufferAccess, CommandStatus, DeviceError, Driver, Launch, Region, ResidencySet, ResidencySets, SkipUse,
    Slab,
};
use std::{
    cell::RefCell,
    collections::{BTreeMap, BTreeSet},
    ops::Range,
    sync::{Arc, Mutex, Weak},
    time::Duration,
};
use test_support::mutate::Dice;

/// An injected failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// The call returns an error.
    Refused,
    /// The command buffer fails halfway and signals no value.
    Fails,
    /// The same, but only while the queue sleeps in [`Driver::wait_event`]. Later command buffers run.
    FailsAsleep,
    /// The command buffer executes no launch, never ends, and signals no value.
    Hangs,
    /// The command buffer completes, but its signal is lost.
    Unsignalled,
    /// The command buffer fails, and every later command buffer on any queue fails, too. macOS does this to programs
    /// that caused too many errors.
    Banned,
}

/// A fault in the `nth` call of a method, counted from 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Plan {
    pub method: &'static str,
    pub nth: usize,
    pub fault: Fault,
}

pub struct Double(RefCell<Inner>);

/// Controls a double that a model owns.
#[derive(Default)]
pub struct Control {
    pub fault: Option<Plan>,
    /// Number of further calls in which the fault occurs.
    pub repeats: usize,
    /// Number of calls of each method.
    pub calls: BTreeMap<&'static str, usize>,
    /// If set, the random order of execution changes to this seed.
    pub seed: Option<u64>,
    /// True if the double reports matrix units.
    pub halves: bool,
    /// True if kernels see only those adopted bytes that were uploaded. Set before the first buffer is adopted.
    pub own_memory: bool,
    /// The message of a command buffer that fails.
    pub message: Option<&'static str>,
    /// Maximum number of threads in a threadgroup, for every kernel. The default is 1024.
    pub max_threads: Option<u32>,
    /// Kernels that do not compile.
    pub broken_kernels: &'static [&'static str],
    /// Number of residency sets after which the double refuses to create one.
    pub max_sets: Option<usize>,
    /// True if the double drops the pipeline of [`Driver::encode_fault`] at once, which is an error.
    pub drops_pipeline: bool,
}

/// A residency set: the numbers of its buffers.
#[derive(Clone, Default)]
struct BufferSet {
    buffers: Arc<Mutex<BTreeSet<u32>>>,
    control: Shared,
}

impl ResidencySet for BufferSet {
    type Buffer = u32;

    fn insert(&self, buffer: &u32) {
        assert!(self.buffers.lock().unwrap().insert(*buffer), "buffer {buffer} is in the set already");
    }

    fn remove(&self, buffer: &u32) {
        assert!(self.buffers.lock().unwrap().remove(buffer), "buffer {buffer} is not in the set");
    }

    fn request_residency(&self) {
        *self.control.lock().unwrap().calls.entry("residency").or_default() += 1;
    }
}

pub type Shared = Arc<Mutex<Control>>;

/// The working set of the double, from which the size of a residency set follows. The small models need several sets.
const WORKING_SET: u64 = 1 << 20;
/// The name of a launch that uploads the bytes of its only binding.
const UPLOAD: &str = "upload";

/// An adopted buffer.
struct Adopted {
    slab: Arc<Slab>,
    /// The offset in the slab.
    start: usize,
    /// The bytes that the kernel program holds.
    held: Vec<u8>,
}

struct Inner {
    host: Host,
    random: Dice,
    slabs: BTreeMap<u32, Adopted>,
    /// Adopted buffers whose addresses were requested. Kernels read these buffers through tables.
    addressed: BTreeSet<u32>,
    lengths: BTreeMap<u32, usize>,
    residency: ResidencySets<BufferSet>,
    /// Number of the residency set of each buffer.
    sets: BTreeMap<u32, Option<usize>>,
    pipelines: BTreeMap<&'static str, Arc<()>>,
    /// The number of the open command buffer.
    open: Option<u64>,
    begun: u64,
    /// Committed command buffers, oldest first.
    buffers: Vec<Commands>,
    event: u64,
    banned: bool,
    /// True inside [`Driver::wait_event`].
    is_asleep: bool,
    control: Shared,
}

/// A command buffer.
pub struct Commands {
    number: u64,
    value: u64,
    fenced: bool,
    /// The launches, grouped by the barriers between them.
    segments: Vec<Vec<Launch>>,
    fault: Option<Fault>,
    status: CommandStatus,
    pipelines: Vec<Weak<()>>,
    /// Adopted buffers outside the residency sets that the command buffer names. `None` before the first launch with a
    /// table.
    named: Option<BTreeSet<u32>>,
}

fn overlap(a: Region, b: Region) -> bool {
    a.buffer == b.buffer && a.offset < b.offset + b.len && b.offset < a.offset + a.len
}

impl Double {
    pub fn new(mut host: Host) -> Self {
        (host.twice, host.reuses_results) = (false, true);
        Self(RefCell::new(Inner {
            host,
            random: Dice(1),
            slabs: BTreeMap::new(),
            addressed: BTreeSet::new(),
            lengths: BTreeMap::new(),
            residency: ResidencySets::new(WORKING_SET),
            sets: BTreeMap::new(),
            pipelines: BTreeMap::new(),
            open: None,
            begun: 0,
            buffers: Vec::new(),
            event: 0,
            banned: false,
            is_asleep: false,
            control: Shared::default(),
        }))
    }

    pub fn control(&self) -> Shared {
        self.0.borrow().control.clone()
    }
}

impl Inner {
    /// Counts a call and returns its planned fault.
    fn called(&mut self, method: &'static str) -> Option<Fault> {
        let mut control = self.control.lock().unwrap();
        if let Some(seed) = control.seed.take() {
            self.random = Dice(seed);
        }
        let count = control.calls.entry(method).or_default();
        *count += 1;
        let count = *count;
        let repeats = control.repeats;
        let is_met = |plan: &Plan| plan.method == method && (plan.nth + 1..=plan.nth + 1 + repeats).contains(&count);
        control.fault.filter(is_met).map(|plan| plan.fault)
    }

    fn refused(&mut self, method: &'static str) -> Result<(), DeviceError> {
        match self.called(method) {
            Some(fault) => Err(DeviceError::Failed(format!("{method}: {fault:?}"))),
            None => Ok(()),
        }
    }

    /// Indices of the pending command buffers that may execute a launch now. A command buffer with a fence must wait
    /// for the earlier command buffers.
    fn ready(&self) -> Vec<usize> {
        let over = |commands: &Commands| commands.status != CommandStatus::Pending;
        let may = |index: &usize| {
            let commands = &self.buffers[*index];
            !over(commands) && (!commands.fenced || self.buffers[..*index].iter().all(over))
        };
        (0..self.buffers.len()).filter(may).collect()
    }

    /// Executes one launch of a random ready command buffer. Returns false if no command buffer is ready.
    fn step(&mut self) -> bool {
        let may_run = |index: &usize| match self.buffers[*index].fault {
            Some(Fault::Hangs) => false,
            Some(Fault::FailsAsleep) => self.is_asleep,
            _ => true,
        };
        let ready: Vec<usize> = self.ready().into_iter().filter(may_run).collect();
        if ready.is_empty() {
            return false;
        }
        let index = ready[self.random.below(ready.len())];
        let has_pipelines = self.buffers[index].pipelines.iter().all(|pipeline| pipeline.strong_count() > 0);
        assert!(has_pipelines, "a pipeline was dropped while a command buffer may use it");
        let left: usize = self.buffers[index].segments.iter().map(Vec::len).sum();
        let fault = self.buffers[index].fault;
        let fails = matches!(fault, Some(Fault::Fails | Fault::FailsAsleep | Fault::Banned)) || self.banned;
        if fails && (left < 2 || self.random.below(3) == 0) {
            self.banned |= self.buffers[index].fault == Some(Fault::Banned);
            let message = self.control.lock().unwrap().message.unwrap_or("an address fault");
            let why = if self.banned { "submissions are ignored" } else { message };
            self.buffers[index].status = CommandStatus::Failed(why.into());
            return true;
        }
        self.buffers[index].segments.retain(|segment| !segment.is_empty());
        let Some(count) = self.buffers[index].segments.first().map(Vec::len) else {
            let commands = &mut self.buffers[index];
            commands.status = CommandStatus::Done(2e-3);
            if commands.fault != Some(Fault::Unsignalled) {
                self.event = self.event.max(commands.value);
            }
            return true;
        };
        let choice = self.random.below(count);
        let launch = self.buffers[index].segments[0].swap_remove(choice);
        let named = self.buffers[index].named.clone();
        self.execute(&launch, named.as_ref());
        true
    }

    /// Adds a buffer to a residency set, if the double has one for it.
    fn make_resident(&mut self, buffer: u32, bytes: usize) {
        let max = self.control.lock().unwrap().max_sets.unwrap_or(usize::MAX);
        let count = self.residency.sets().len();
        let create = || (count < max).then(|| BufferSet { control: self.control.clone(), ..BufferSet::default() });
        let set = self.residency.add(&buffer, bytes as u64, create);
        self.sets.insert(buffer, set);
    }

    /// The pipeline of a kernel.
    fn pipeline(&mut self, kernel: &'static str) -> Result<Weak<()>, DeviceError> {
        if self.control.lock().unwrap().broken_kernels.contains(&kernel) {
            return Err(DeviceError::Failed(format!("{kernel} does not compile")));
        }
        Ok(Arc::downgrade(self.pipelines.entry(kernel).or_default()))
    }

    /// Executes a launch. `named` are the buffers outside the residency sets that the command buffer names.
    fn execute(&mut self, launch: &Launch, named: Option<&BTreeSet<u32>>) {
        if std::thread::panicking() {
            return; // The program may have exited.
        }
        if launch.kernel == UPLOAD {
            return self.refresh(launch.bindings[0].region);
        }
        let own_memory = self.control.lock().unwrap().own_memory;
        for binding in &launch.bindings {
            let access = binding.access;
            let is_adopted = self.slabs.contains_key(&binding.region.buffer);
            assert!(!is_adopted || access == BufferAccess::Read, "{} writes to weights", launch.kernel);
            if !own_memory {
                self.refresh(binding.region);
            }
        }
        if !own_memory && launch.bindings.iter().any(|binding| binding.is_table) {
            for buffer in self.addressed.clone() {
                let is_named = named.is_some_and(|named| named.contains(&buffer));
                assert!(is_named || self.sets[&buffer].is_some(), "segment {buffer} is not resident");
                self.refresh(Region { buffer, offset: 0, len: self.lengths[&buffer] });
            }
        }
        self.host.try_run(launch).unwrap_or_else(|fault| panic!("{fault}"));
    }

    /// Copies the current bytes of an adopted region to the kernel program, if it holds others.
    fn refresh(&mut self, region: Region) {
        let Some(Adopted { slab, start, held }) = self.slabs.get_mut(&region.buffer) else { return };
        let at = region.offset..region.offset + region.len;
        // SAFETY: reads into other slots of the slab may be in progress. The store exposes only slots that are
        // complete, and the kernels access only these slots.
        let now = unsafe { slab.bytes(*start + at.start..*start + at.end) };
        if held[at.clone()] != *now {
            held[at].copy_from_slice(now);
            self.host.write(region, now);
        }
    }

    /// True if a pending launch reads buffers through a table.
    fn reads_tables(&self) -> bool {
        let pending = self.buffers.iter().filter(|commands| commands.status == CommandStatus::Pending);
        let mut bindings = pending.flat_map(|c| &c.segments).flatten().flat_map(|launch| &launch.bindings);
        bindings.any(|binding| binding.is_table)
    }

    /// Executes zero to three steps.
    fn idle(&mut self) {
        for _ in 0..self.random.below(4) {
            self.step();
        }
    }

    /// The access of pending command buffers to `region`: `None`, reading, or writing.
    fn in_flight(&self, region: Region) -> Option<BufferAccess> {
        let pending = self.buffers.iter().filter(|commands| commands.status == CommandStatus::Pending);
        let bindings = pending.flat_map(|c| &c.segments).flatten().flat_map(|launch| &launch.bindings);
        let effects = bindings.filter(|binding| overlap(binding.region, region)).map(|binding| binding.access);
        effects.max_by_key(|effect| *effect != BufferAccess::Read)
    }

    fn inside(&self, region: Region) {
        let len = self.lengths.get(&region.buffer).unwrap_or_else(|| panic!("{region:?}: no such buffer"));
        assert!(region.offset + region.len <= *len, "{region:?} of {len} bytes");
    }
}

impl Driver for Double {
    type Encoder = Commands;
    type CommandBuffer = u64;

    fn name(&self) -> String {
        "the double".into()
    }

    fn working_set(&self) -> Option<u64> {
        None
    }

    /// This is enough for a segment of expert slots.
    fn max_buffer_len(&self) -> usize {
        1 << 30
    }

    fn compile(&mut self) -> Vec<(String, Option<DeviceError>)> {
        let inner = self.0.get_mut();
        let broken = inner.control.lock().unwrap().broken_kernels;
        match inner.refused("compile") {
            Ok(()) => broken.iter().map(|kernel| ((*kernel).into(), inner.pipeline(kernel).err())).collect(),
            Err(error) => vec![("kernels/some.metal".into(), Some(error))],
        }
    }

    fn max_threads(&mut self, kernel: &str) -> Result<u32, DeviceError> {
        let inner = self.0.get_mut();
        match inner.called("max_threads") {
            Some(fault) => Err(DeviceError::Failed(format!("{kernel}: {fault:?}"))),
            None if inner.control.lock().unwrap().broken_kernels.contains(&kernel) => {
                Err(DeviceError::Failed(format!("{kernel} does not compile")))
            }
            None => Ok(inner.control.lock().unwrap().max_threads.unwrap_or(1024)),
        }
    }

    fn allocate(&mut self, buffer: u32, bytes: usize) -> Result<(), DeviceError> {
        let inner = self.0.get_mut();
        inner.refused("allocate")?;
        let region = inner.host.zeros(bytes);
        assert_eq!(region.buffer, buffer, "buffers are counted");
        inner.lengths.insert(buffer, bytes);
        inner.make_resident(buffer, bytes);
        Ok(())
    }

    fn adopt(&mut self, buffer: u32, slab: &Arc<Slab>, range: Range<usize>) -> Result<(), DeviceError> {
        let inner = self.0.get_mut();
        inner.refused("adopt")?;
        assert!(range.start.is_multiple_of(16384), "no-copy buffers start at a page");
        let region = inner.host.empty(range.len());
        assert_eq!(region.buffer, buffer, "buffers are counted");
        inner.lengths.insert(buffer, range.len());
        let held = vec![0xff; range.len()];
        inner.slabs.insert(buffer, Adopted { slab: slab.clone(), start: range.start, held });
        inner.make_resident(buffer, range.len());
        Ok(())
    }

    fn address(&mut self, buffer: u32) -> Result<u64, DeviceError> {
        let inner = self.0.get_mut();
        inner.refused("address")?;
        assert!(inner.slabs.contains_key(&buffer), "buffer {buffer} is not adopted");
        inner.addressed.insert(buffer);
        Ok(inner.host.address(buffer))
    }

    fn free(&mut self, buffer: u32) {
        let inner = self.0.get_mut();
        inner.called("free");
        let is_addressed = inner.addressed.remove(&buffer);
        assert!(!is_addressed || !inner.reads_tables(), "segment {buffer} is freed while a launch may read it");
        let whole = Region { buffer, offset: 0, len: usize::MAX / 2 };
        assert_eq!(inner.in_flight(whole), None, "buffer {buffer} is freed while it is used");
        let Some(bytes) = inner.lengths.remove(&buffer) else { panic!("buffer {buffer} is freed twice") };
        if let Some(Some(set)) = inner.sets.remove(&buffer) {
            inner.residency.remove(set, &buffer, bytes as u64);
        }
        inner.slabs.remove(&buffer);
        inner.host.drop_buffer(buffer);
    }

    fn write(&mut self, region: Region, bytes: &[u8]) -> Result<(), DeviceError> {
        let inner = self.0.get_mut();
        inner.inside(region);
        assert_eq!(inner.in_flight(region), None, "{region:?} is written by the CPU while it is used");
        inner.host.write(region, bytes);
        Ok(())
    }

    fn read(&mut self, region: Region, bytes: &mut [u8]) -> Result<(), DeviceError> {
        let inner = self.0.get_mut();
        inner.inside(region);
        let used = inner.in_flight(region).is_some_and(|effect| effect != BufferAccess::Read);
        assert!(!used, "{region:?} is read by the CPU while it is written");
        bytes.copy_from_slice(&inner.host.read(region));
        Ok(())
    }

    fn begin(&mut self, fenced: bool) -> Result<Commands, DeviceError> {
        let inner = self.0.get_mut();
        inner.refused("begin")?;
        assert_eq!(inner.open, None, "one encoder at a time");
        inner.begun += 1;
        inner.open = Some(inner.begun);
        let (number, segments) = (inner.begun, vec![Vec::new()]);
        let pipelines = Vec::new();
        let status = CommandStatus::Pending;
        Ok(Commands { number, value: 0, fenced, segments, fault: None, status, pipelines, named: None })
    }

    fn barrier(&mut self, open: &mut Commands) {
        assert_eq!(self.0.get_mut().open, Some(open.number));
        open.segments.push(Vec::new());
    }

    fn launch(&mut self, open: &mut Commands, launch: &Launch) -> Result<(), DeviceError> {
        let inner = self.0.get_mut();
        inner.refused("launch")?;
        assert_eq!(inner.open, Some(open.number));
        let Launch { kernel, args, bindings, threads, grid, .. } = launch;
        assert!(args.len() * 4 <= 4096 && bindings.len() <= 30, "{kernel}: more than an encoder takes");
        assert!(*threads > 0 && threads.is_multiple_of(32) && *threads <= 1024, "{kernel}: {threads} threads");
        assert!(grid.iter().all(|n| *n > 0), "{kernel}: an empty grid");
        bindings.iter().for_each(|binding| inner.inside(binding.region));
        open.pipelines.push(inner.pipeline(kernel)?);
        if bindings.iter().any(|binding| binding.is_table) && open.named.is_none() {
            let outside = inner.slabs.keys().filter(|buffer| inner.sets[buffer].is_none());
            open.named = Some(outside.copied().collect());
        }
        open.segments.last_mut().unwrap().push(launch.clone());
        inner.idle();
        Ok(())
    }

    fn has_matrix_units(&self) -> bool {
        self.0.borrow().control.lock().unwrap().halves
    }

    fn min_tiled_weights(&self) -> Option<usize> {
        self.has_matrix_units().then_some(0)
    }

    fn has_own_memory(&self) -> bool {
        self.0.borrow().control.lock().unwrap().own_memory
    }

    fn upload(&mut self, open: &mut Commands, region: Region) -> Result<(), DeviceError> {
        let inner = self.0.get_mut();
        inner.refused("upload")?;
        inner.inside(region);
        let upload = Launch {
            kernel: UPLOAD,
            args: Vec::new(),
            bindings: vec![Binding::write(region)],
            grid: [1; 3],
            threads: 32,
            skip: SkipUse::None,
        };
        open.segments.extend([vec![upload], Vec::new()]);
        Ok(())
    }

    fn encode_fault(&mut self, open: &mut Commands) -> Result<(), DeviceError> {
        let inner = self.0.get_mut();
        inner.refused("encode_fault")?;
        open.pipelines.push(inner.pipeline("fault")?);
        if inner.control.lock().unwrap().drops_pipeline {
            inner.pipelines.remove("fault");
        }
        open.fault = Some(Fault::Fails);
        Ok(())
    }

    fn commit(&mut self, mut open: Commands, value: u64) -> u64 {
        let inner = self.0.get_mut();
        assert_eq!(inner.open.take(), Some(open.number));
        assert!(inner.buffers.last().is_none_or(|last| last.value < value), "an event's values grow");
        open.fault = inner.called("commit").or(open.fault);
        open.value = value;
        inner.buffers.push(open);
        inner.idle();
        value
    }

    fn signalled_value(&self) -> u64 {
        let mut inner = self.0.borrow_mut();
        inner.idle();
        inner.event
    }

    fn status(&self, committed: &u64) -> CommandStatus {
        let mut inner = self.0.borrow_mut();
        inner.idle();
        let commands = inner.buffers.iter().find(|commands| commands.value == *committed);
        commands.expect("a command buffer that was committed").status.clone()
    }

    fn wait_event(&self, value: u64, _: Duration) {
        let mut inner = self.0.borrow_mut();
        inner.is_asleep = true;
        while inner.event < value && inner.step() {}
        inner.is_asleep = false;
    }

    fn reset(&mut self, value: u64) -> Result<(), DeviceError> {
        let inner = self.0.get_mut();
        inner.refused("reset")?;
        assert!(inner.ready().is_empty(), "work is pending on the queue that is reset");
        inner.event = value;
        Ok(())
    }

    fn residency_request(&mut self) -> Option<Box<dyn Fn() + Send>> {
        Some(Box::new(self.0.get_mut().residency.request()))
    }

    fn leak_buffers(&mut self) {
        self.0.get_mut().called("leak_buffers");
    }
}

impl Drop for Double {
    fn drop(&mut self) {
        let inner = self.0.get_mut();
        let leaked = inner.control.lock().unwrap().calls.get("leak_buffers").is_some_and(|count| *count > 0);
        let numbers: BTreeSet<u64> = inner.ready().into_iter().map(|index| inner.buffers[index].number).collect();
        if !std::thread::panicking() {
            assert!(numbers.is_empty() || leaked, "memory was freed while command buffers {numbers:?} run");
        }
    }
}
