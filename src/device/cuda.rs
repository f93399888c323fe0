//! CUDA behind [`Queue`](super::Queue). NVIDIA's driver and run-time compiler are loaded when a program looks for a GPU; building
//! needs neither.
//!
//! A card has memory of its own. What is allocated lies there. What is adopted has a copy there, which is made, and made
//! again, of the ranges that [`Driver::landed`] names; so a slab's bytes cross the bus once, and not with every launch.
//!
//! Everything goes to one stream, which executes launches and copies one after another: barriers and the fence have nothing to
//! do. The launches of a command buffer are handed over with it, as a graph if the same ones were seen before.
//!
//! CUDA does not forgive. After a launch that failed, each call fails until the process ends: there is no starting anew.

mod graph;
mod launch;
mod library;
mod line;
mod memory;

use super::{DeviceError, Dispatch, Driver, Region, Slab, Status};
use cudarc::driver::{
    result::{self, DriverError},
    sys::{self, CUdevice_attribute, CUdeviceptr, CUresult, CUstream},
};
use graph::Graphs;
use launch::{Launch, MOST_ARGUMENTS, MOST_BUFFERS};
use library::Library;
use line::Line;
use memory::{Memory, Pinned};
use std::{
    collections::BTreeMap,
    mem,
    ops::Range,
    ptr,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

/// A wait that has ceased to spin looks again after so long.
const NAP: Duration = Duration::from_micros(50);
/// The kernels need Ampere's reductions over a warp.
const OLDEST: (i32, i32) = (8, 0);

/// An NVIDIA card.
pub struct Cuda {
    name: String,
    device: sys::CUdevice,
    context: sys::CUcontext,
    stream: CUstream,
    library: Library,
    /// Bytes that were free at the start.
    free: usize,
    memory: BTreeMap<u32, Memory>,
    line: Line,
    graphs: Graphs,
    /// What is read back comes through here.
    pinned: Pinned,
}

// SAFETY: CUDA's handles may be used from any thread on which their context is current, which each call here sees to.
unsafe impl Send for Cuda {}

fn told(error: DriverError) -> DeviceError {
    let text = error.error_string().ok().and_then(|text| text.to_str().ok());
    DeviceError(text.map_or_else(|| format!("CUDA error {:?}", error.0), |text| format!("CUDA: {text}")))
}

/// Launches of a command buffer.
#[derive(Default)]
pub struct Launches(Vec<Launch>);

// SAFETY: a kernel's function may be used from any thread on which its context is current.
unsafe impl Send for Launches {}

/// The driver's version as a number: 12030 is that of CUDA 12.3.
fn version() -> i32 {
    let mut version = 0;
    // SAFETY: it writes one number.
    let _ = unsafe { sys::cuDriverGetVersion(&mut version) };
    version
}

fn refuse<T>(why: impl Into<String>) -> Result<T, DeviceError> {
    Err(DeviceError(why.into()))
}

impl Cuda {
    /// The first card that NVIDIA's driver shows (`CUDA_VISIBLE_DEVICES` says which that is); `None` where there is no driver or no
    /// card. `gate` refuses one that lacks what the kernels need. Nothing is compiled yet.
    ///
    /// # Errors
    /// The driver's: there should be a card, and it is of no use.
    pub fn new(gate: bool) -> Result<Option<Self>, DeviceError> {
        // SAFETY: NVIDIA's library may be loaded; it is asked for nothing but to be there.
        if !unsafe { sys::is_culib_present() } {
            return Ok(None);
        }
        match result::init() {
            Err(DriverError(CUresult::CUDA_ERROR_NO_DEVICE)) => return Ok(None),
            done => done.map_err(told)?,
        }
        if result::device::get_count().map_err(told)? == 0 {
            return Ok(None);
        }
        Self::first(gate).map(Some)
    }

    fn first(gate: bool) -> Result<Self, DeviceError> {
        let device = result::device::get(0).map_err(told)?;
        let name = result::device::get_name(device).map_err(told)?;
        // SAFETY: the device is there.
        let attribute = |attribute| unsafe { result::device::get_attribute(device, attribute) }.map_err(told);
        let capability = (
            attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        );
        if gate && capability < OLDEST {
            return refuse(format!("{name} is older than Ampere: it has no reductions over a warp"));
        }
        let library = Library::new(format!("sm_{}{}", capability.0, capability.1));
        // SAFETY: the device is there; the context is released once, when this goes.
        let context = unsafe { result::primary_ctx::retain(device) }.map_err(told)?;
        let (stream, line, memory) = (ptr::null_mut(), Line::default(), BTreeMap::new());
        let (graphs, pinned) = (Graphs::new(version(), capability), Pinned::default());
        let mut new = Self { name, device, context, stream, library, free: 0, memory, line, graphs, pinned };
        new.current()?;
        new.stream = result::stream::create(result::stream::StreamKind::NonBlocking).map_err(told)?;
        new.free = result::mem_get_info().map_err(told)?.0;
        Ok(new)
    }

    /// Makes the context this thread's.
    fn current(&self) -> Result<(), DeviceError> {
        // SAFETY: the context is retained.
        unsafe { result::ctx::set_current(self.context) }.map_err(told)
    }

    /// The address of a region.
    fn address(&self, region: Region) -> Result<CUdeviceptr, DeviceError> {
        match self.memory.get(&region.buffer) {
            Some(memory) => Ok(memory.pointer + region.offset as CUdeviceptr),
            None => refuse(format!("{region:?}: there is no such memory")),
        }
    }
}

impl Driver for Cuda {
    /// Launches that were not handed over yet.
    type Open = Launches;
    /// The event's value.
    type Committed = u64;

    fn name(&self) -> String {
        self.name.clone()
    }

    fn working_set(&self) -> Option<u64> {
        Some(self.free as u64)
    }

    fn longest(&self) -> usize {
        self.free
    }

    fn has_own_memory(&self) -> bool {
        true
    }

    fn recovers(&self) -> bool {
        false
    }

    fn compile(&mut self) -> Vec<(String, Option<DeviceError>)> {
        match self.current() {
            Ok(()) => self.library.all(),
            Err(error) => vec![("(the card)".into(), Some(error))],
        }
    }

    fn most_threads(&mut self, kernel: &str) -> Result<u32, DeviceError> {
        self.current()?;
        Ok(self.library.kernel(kernel)?.most_threads)
    }

    fn allocate(&mut self, buffer: u32, bytes: usize) -> Result<(), DeviceError> {
        self.current()?;
        let memory = Memory::new(bytes)?;
        // SAFETY: in bounds, and nobody uses it yet.
        unsafe { result::memset_d8_async(memory.pointer, 0, bytes, self.stream) }.map_err(told)?;
        self.memory.insert(buffer, memory);
        Ok(())
    }

    fn adopt(&mut self, buffer: u32, slab: &Arc<Slab>, range: Range<usize>) -> Result<(), DeviceError> {
        self.current()?;
        let mut memory = Memory::new(range.len())?;
        memory.show(slab, range);
        self.memory.insert(buffer, memory);
        Ok(())
    }

    fn free(&mut self, buffer: u32) {
        match self.current() {
            Ok(()) => drop(self.memory.remove(&buffer)),
            Err(_) => mem::forget(self.memory.remove(&buffer)),
        }
    }

    fn landed(&mut self, open: &mut Launches, region: Region) -> Result<(), DeviceError> {
        self.current()?;
        // The copy is behind them.
        open.0.drain(..).try_for_each(|launch| launch.run(self.stream)).map_err(told)?;
        match self.memory.get_mut(&region.buffer) {
            Some(memory) => memory.fetch(region, self.stream),
            None => refuse(format!("{region:?}: there is no such memory")),
        }
    }

    fn write(&mut self, region: Region, bytes: &[u8]) -> Result<(), DeviceError> {
        self.current()?;
        let bytes = bytes.get(..region.len).unwrap_or(bytes);
        // SAFETY: in bounds (the queue has looked); CUDA has a copy of pageable memory when the call returns.
        unsafe { result::memcpy_htod_async(self.address(region)?, bytes, self.stream) }.map_err(told)
    }

    fn read(&mut self, region: Region, bytes: &mut [u8]) -> Result<(), DeviceError> {
        self.current()?;
        let len = bytes.len().min(region.len);
        let from = self.address(region)?;
        let bytes = &mut bytes[..len];
        let staged = self.pinned.room(len);
        // SAFETY: in bounds (the queue has looked), and waited for.
        unsafe {
            match staged {
                Some(staged) => {
                    result::memcpy_dtoh_async(staged, from, self.stream).map_err(told)?;
                    result::stream::synchronize(self.stream).map_err(told)?;
                    bytes.copy_from_slice(staged);
                    Ok(())
                }
                None => {
                    result::memcpy_dtoh_async(bytes, from, self.stream).map_err(told)?;
                    result::stream::synchronize(self.stream).map_err(told)
                }
            }
        }
    }

    fn begin(&mut self, _: bool) -> Result<Launches, DeviceError> {
        self.current()?;
        // SAFETY: the stream is there. What fails here was broken before.
        match unsafe { sys::cuStreamQuery(self.stream) } {
            CUresult::CUDA_SUCCESS | CUresult::CUDA_ERROR_NOT_READY => Ok(Launches::default()),
            error => Err(told(DriverError(error))),
        }
    }

    fn barrier(&mut self, _: &mut Launches) {}

    fn launch(&mut self, open: &mut Launches, dispatch: &Dispatch) -> Result<(), DeviceError> {
        self.current()?;
        let Dispatch { kernel, args, bindings, grid, threads } = dispatch;
        if args.len() > MOST_ARGUMENTS || bindings.len() > MOST_BUFFERS {
            return refuse(format!("{kernel}: {} words and {} buffers", args.len(), bindings.len()));
        }
        let addresses = bindings.iter().map(|binding| self.address(binding.region)).collect::<Result<_, _>>()?;
        let function = self.library.kernel(kernel)?.function;
        open.0.push(Launch { function, args: args.clone(), addresses, grid: *grid, threads: *threads });
        Ok(())
    }

    fn provoke(&mut self, _: &mut Launches) -> Result<(), DeviceError> {
        refuse("CUDA does not recover from an error")
    }

    fn commit(&mut self, open: Launches, value: u64) -> u64 {
        // If this fails, the rest fails, too.
        let _ = self.current();
        if let Err(error) = self.graphs.submit(open.0, self.stream) {
            self.line.fail(error);
        }
        self.line.mark(value, self.stream);
        value
    }

    fn signalled(&self) -> u64 {
        let _ = self.current();
        self.line.reached()
    }

    fn status(&self, committed: &u64) -> Status {
        if self.signalled() >= *committed {
            // Nobody ends what takes long on a card without a screen: its time need not be known.
            return Status::Done(0.0);
        }
        self.line.failed().map_or(Status::Pending, Status::Failed)
    }

    fn park(&self, value: u64, most: Duration) {
        let begin = Instant::now();
        while self.signalled() < value && self.line.failed().is_none() && begin.elapsed() < most {
            thread::sleep(NAP);
        }
    }

    fn renew(&mut self, _: u64) -> Result<(), DeviceError> {
        refuse("CUDA does not recover from an error")
    }

    fn reside(&mut self) {}

    fn leak(&mut self) {
        mem::forget(mem::take(&mut self.memory));
    }
}

impl Drop for Cuda {
    fn drop(&mut self) {
        if self.current().is_err() {
            return self.leak();
        }
        self.graphs.clear();
        self.memory.clear();
        self.pinned.clear();
        self.library.unload();
        self.line.clear();
        // SAFETY: both were made here and are given back once. What the driver objects to no longer matters.
        unsafe {
            if !self.stream.is_null() {
                let _ = result::stream::destroy(self.stream);
            }
            let _ = result::primary_ctx::release(self.device);
        }
    }
}
