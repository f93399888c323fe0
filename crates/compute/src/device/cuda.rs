//! The CUDA [`Driver`] of [`CommandQueue`](super::CommandQueue).
//!
//! NVIDIA's driver and run-time compiler (NVRTC) are loaded when the program opens a GPU. Building the program needs
//! neither of them.
//!
//! The GPU has its own memory. Adopting a range of a slab allocates GPU memory of the same size. [`Driver::upload`]
//! copies bytes of the range to the GPU memory, so the bytes cross the bus once and not at every launch.
//!
//! All launches and all copies to the GPU go to one stream, which executes them in order. Barriers and fences therefore
//! do nothing. Results are copied to the CPU in another stream, while later launches run. The launches of a command
//! buffer are submitted together. A repeated sequence of launches is submitted as a CUDA graph.
//!
//! CUDA cannot recover from a failed launch: every later call fails until the process ends.

mod buffer;
mod error;
mod events;
mod graph;
mod launch;
mod library;

use super::{CommandStatus, DeviceError, Driver, Launch, Region, Slab, error::fail};
use buffer::{DeviceBuffer, StagingBuffer};
use cudarc::driver::{
    result::{self, DriverError},
    sys::{self, CUdevice_attribute, CUdeviceptr, CUevent, CUevent_flags, CUevent_wait_flags, CUresult, CUstream},
};
use error::cuda_error;
use events::EventTimeline;
use graph::GraphCache;
use launch::{CudaLaunch, MAX_ARGUMENTS, MAX_BUFFERS};
use library::CudaLibrary;
use std::{
    collections::BTreeMap,
    mem,
    ops::Range,
    ptr,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

/// Interval between two queries of the event during a wait.
const POLL_INTERVAL: Duration = Duration::from_micros(50);
/// Minimum compute capability: Ampere, since the kernels use integer warp reductions.
const MIN_CAPABILITY: (i32, i32) = (8, 0);

/// An NVIDIA GPU.
pub struct Cuda {
    name: String,
    device: sys::CUdevice,
    context: sys::CUcontext,
    stream: CUstream,
    /// Copies results to the CPU while later launches run on `stream`. Copies from this stream begin later than those from
    /// `stream`.
    read_stream: CUstream,
    /// Recorded on `stream` after each write of the CPU.
    last_write: CUevent,
    library: CudaLibrary,
    /// Free GPU memory in bytes when the GPU was opened.
    free_bytes: usize,
    buffers: BTreeMap<u32, DeviceBuffer>,
    events: EventTimeline,
    graphs: GraphCache,
    /// Pinned buffer through which results are copied to the CPU.
    staging: StagingBuffer,
}

// SAFETY: a thread may use CUDA handles if their context is current. Every method makes the context current.
unsafe impl Send for Cuda {}

/// The launches encoded so far in a command buffer.
#[derive(Default)]
pub struct CudaEncoder(Vec<CudaLaunch>);

// SAFETY: a thread may use a kernel's function if the context of the function is current.
unsafe impl Send for CudaEncoder {}

/// The driver's version as a number, such as 12030 for CUDA 12.3.
fn driver_version() -> i32 {
    let mut version = 0;
    // SAFETY: the call writes one integer.
    let _ = unsafe { sys::cuDriverGetVersion(&mut version) };
    version
}

impl Cuda {
    /// Opens the first GPU that NVIDIA's driver lists. `CUDA_VISIBLE_DEVICES` can select another GPU. Returns `None` if
    /// there is no driver or no GPU. If `require_features` is true, a GPU older than Ampere is an error. Does not
    /// compile kernels.
    ///
    /// # Errors
    /// The driver fails, or the GPU is too old.
    pub fn new(require_features: bool) -> Result<Option<Self>, DeviceError> {
        // SAFETY: the call only tries to load NVIDIA's library.
        if !unsafe { sys::is_culib_present() } {
            return Ok(None);
        }
        match result::init() {
            Err(DriverError(CUresult::CUDA_ERROR_NO_DEVICE)) => return Ok(None),
            done => done.map_err(cuda_error)?,
        }
        if result::device::get_count().map_err(cuda_error)? == 0 {
            return Ok(None);
        }
        Self::open_first(require_features).map(Some)
    }

    fn open_first(require_features: bool) -> Result<Self, DeviceError> {
        let device = result::device::get(0).map_err(cuda_error)?;
        let name = result::device::get_name(device).map_err(cuda_error)?;
        // SAFETY: the device exists.
        let attribute = |attribute| unsafe { result::device::get_attribute(device, attribute) }.map_err(cuda_error);
        let capability = (
            attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        );
        if require_features && capability < MIN_CAPABILITY {
            return fail(format!("{name} is older than Ampere and does not support integer warp reductions"));
        }
        let library = CudaLibrary::new(format!("sm_{}{}", capability.0, capability.1));
        // SAFETY: the device exists. `drop` releases the context once.
        let context = unsafe { result::primary_ctx::retain(device) }.map_err(cuda_error)?;
        let mut new = Self {
            name,
            device,
            context,
            stream: ptr::null_mut(),
            read_stream: ptr::null_mut(),
            last_write: ptr::null_mut(),
            library,
            free_bytes: 0,
            buffers: BTreeMap::new(),
            events: EventTimeline::default(),
            graphs: GraphCache::new(driver_version(), capability),
            staging: StagingBuffer::default(),
        };
        new.make_current()?;
        new.stream = result::stream::create(result::stream::StreamKind::NonBlocking).map_err(cuda_error)?;
        new.read_stream = result::stream::create(result::stream::StreamKind::NonBlocking).map_err(cuda_error)?;
        new.last_write = result::event::create(CUevent_flags::CU_EVENT_DISABLE_TIMING).map_err(cuda_error)?;
        new.free_bytes = result::mem_get_info().map_err(cuda_error)?.0;
        Ok(new)
    }

    /// Makes the context current on this thread.
    fn make_current(&self) -> Result<(), DeviceError> {
        // SAFETY: `new` retained the context.
        unsafe { result::ctx::set_current(self.context) }.map_err(cuda_error)
    }

    /// Records that the CPU has written to the GPU's memory, so that a read waits for this write.
    fn record_write(&self) -> Result<(), DeviceError> {
        // SAFETY: event and stream belong to this context.
        unsafe { result::event::record(self.last_write, self.stream) }.map_err(cuda_error)
    }

    /// The GPU address of a region.
    fn region_address(&self, region: Region) -> Result<CUdeviceptr, DeviceError> {
        match self.buffers.get(&region.buffer) {
            Some(buffer) => Ok(buffer.pointer + region.offset as CUdeviceptr),
            None => fail(format!("{region:?}: there is no such buffer")),
        }
    }
}

impl Driver for Cuda {
    type Encoder = CudaEncoder;
    /// The value that the command buffer's event signals.
    type CommandBuffer = u64;

    fn name(&self) -> String {
        self.name.clone()
    }

    fn working_set(&self) -> Option<u64> {
        Some(self.free_bytes as u64)
    }

    fn max_buffer_len(&self) -> usize {
        self.free_bytes
    }

    fn has_own_memory(&self) -> bool {
        true
    }

    fn has_variants(&self) -> bool {
        true
    }

    /// For smaller products, the launch that splits the rows costs as much as matrix units save.
    fn min_tiled_weights(&self) -> Option<usize> {
        Some(8 << 20)
    }

    fn can_recover(&self) -> bool {
        false
    }

    fn compile(&mut self) -> Vec<(String, Option<DeviceError>)> {
        match self.make_current() {
            Ok(()) => self.library.all(),
            Err(error) => vec![("(the GPU)".into(), Some(error))],
        }
    }

    fn max_threads(&mut self, kernel: &str) -> Result<u32, DeviceError> {
        self.make_current()?;
        Ok(self.library.kernel(kernel)?.max_threads)
    }

    fn allocate(&mut self, buffer: u32, bytes: usize) -> Result<(), DeviceError> {
        self.make_current()?;
        let memory = DeviceBuffer::new(bytes)?;
        // SAFETY: in bounds, and the memory is not used yet.
        unsafe { result::memset_d8_async(memory.pointer, 0, bytes, self.stream) }.map_err(cuda_error)?;
        self.buffers.insert(buffer, memory);
        self.record_write()
    }

    fn adopt(&mut self, buffer: u32, slab: &Arc<Slab>, range: Range<usize>) -> Result<(), DeviceError> {
        self.make_current()?;
        let mut memory = DeviceBuffer::new(range.len())?;
        memory.set_source(slab, range);
        self.buffers.insert(buffer, memory);
        Ok(())
    }

    fn address(&mut self, buffer: u32) -> Result<u64, DeviceError> {
        match self.buffers.get(&buffer) {
            Some(memory) => Ok(memory.pointer),
            None => fail(format!("there is no buffer {buffer}")),
        }
    }

    fn free(&mut self, buffer: u32) {
        match self.make_current() {
            Ok(()) => drop(self.buffers.remove(&buffer)),
            Err(_) => mem::forget(self.buffers.remove(&buffer)),
        }
    }

    fn upload(&mut self, encoder: &mut CudaEncoder, region: Region) -> Result<(), DeviceError> {
        self.make_current()?;
        // Submit the launches encoded so far, since the copy must run after them.
        encoder.0.drain(..).try_for_each(|launch| launch.run(self.stream)).map_err(cuda_error)?;
        match self.buffers.get_mut(&region.buffer) {
            Some(buffer) => buffer.upload(region, self.stream),
            None => fail(format!("{region:?}: there is no such buffer")),
        }
    }

    fn write(&mut self, region: Region, bytes: &[u8]) -> Result<(), DeviceError> {
        self.make_current()?;
        let bytes = bytes.get(..region.len).unwrap_or(bytes);
        // SAFETY: in bounds (checked by the queue). For pageable memory, CUDA copies the bytes before the call returns.
        unsafe { result::memcpy_htod_async(self.region_address(region)?, bytes, self.stream) }.map_err(cuda_error)?;
        self.record_write()
    }

    fn read(&mut self, region: Region, bytes: &mut [u8]) -> Result<(), DeviceError> {
        self.make_current()?;
        let len = bytes.len().min(region.len);
        let from = self.region_address(region)?;
        let stream = if self.events.is_idle() { self.stream } else { self.read_stream };
        // SAFETY: in bounds (checked by the queue). Context, streams and event belong to this GPU. Launches that write the
        // region have ended: the caller has waited for them.
        unsafe {
            let written =
                result::stream::wait_event(stream, self.last_write, CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT);
            written.and_then(|()| self.staging.read(from, &mut bytes[..len], stream)).map_err(cuda_error)
        }
    }

    fn begin(&mut self, _: bool) -> Result<CudaEncoder, DeviceError> {
        self.make_current()?;
        // SAFETY: the stream exists. An error here comes from earlier work.
        match unsafe { sys::cuStreamQuery(self.stream) } {
            CUresult::CUDA_SUCCESS | CUresult::CUDA_ERROR_NOT_READY => Ok(CudaEncoder::default()),
            error => Err(cuda_error(DriverError(error))),
        }
    }

    fn barrier(&mut self, _: &mut CudaEncoder) {}

    fn launch(&mut self, encoder: &mut CudaEncoder, launch: &Launch) -> Result<(), DeviceError> {
        self.make_current()?;
        let Launch { kernel, args, bindings, grid, threads, .. } = launch;
        if args.len() > MAX_ARGUMENTS || bindings.len() > MAX_BUFFERS {
            let words = args.len();
            let buffers = bindings.len();
            return fail(format!("{kernel}: {words} words of arguments or {buffers} buffers are too many"));
        }
        let addresses = bindings.iter().map(|binding| self.region_address(binding.region)).collect::<Result<_, _>>()?;
        let function = self.library.kernel(kernel)?.function;
        encoder.0.push(CudaLaunch { function, args: args.clone(), addresses, grid: *grid, threads: *threads });
        Ok(())
    }

    fn encode_fault(&mut self, _: &mut CudaEncoder) -> Result<(), DeviceError> {
        fail("CUDA cannot recover from an error")
    }

    fn commit(&mut self, encoder: CudaEncoder, value: u64) -> u64 {
        // If this call fails, the calls below fail too and report the error.
        let _ = self.make_current();
        match self.graphs.submit(encoder.0, self.stream) {
            Ok(()) => self.events.signal(value, self.stream),
            Err(error) => self.events.set_failure(error),
        }
        value
    }

    fn signalled_value(&self) -> u64 {
        let _ = self.make_current();
        self.events.reached()
    }

    fn status(&self, value: &u64) -> CommandStatus {
        if self.signalled_value() >= *value {
            // GPU time is not measured, since no watchdog kills long command buffers on a GPU without a screen.
            return CommandStatus::Done(0.0);
        }
        self.events.failure().map_or(CommandStatus::Pending, CommandStatus::Failed)
    }

    fn wait_event(&self, value: u64, timeout: Duration) {
        let begin = Instant::now();
        while self.signalled_value() < value && self.events.failure().is_none() && begin.elapsed() < timeout {
            thread::sleep(POLL_INTERVAL);
        }
    }

    fn reset(&mut self, _: u64) -> Result<(), DeviceError> {
        fail("CUDA cannot recover from an error")
    }

    /// A low estimate, which allows long command buffers, since no watchdog kills them.
    fn initial_seconds_per_thread(&self) -> f64 {
        1e-8
    }

    fn leak_buffers(&mut self) {
        mem::forget(mem::take(&mut self.buffers));
    }
}

impl Drop for Cuda {
    fn drop(&mut self) {
        if self.make_current().is_err() {
            return self.leak_buffers();
        }
        self.graphs.clear();
        self.buffers.clear();
        self.staging.clear();
        self.library.unload();
        self.events.clear();
        // SAFETY: `new` created stream and context, and both are released once. Errors are ignored at this point.
        unsafe {
            for stream in [self.stream, self.read_stream].into_iter().filter(|stream| !stream.is_null()) {
                let _ = result::stream::destroy(stream);
            }
            if !self.last_write.is_null() {
                let _ = result::event::destroy(self.last_write);
            }
            let _ = result::primary_ctx::release(self.device);
        }
    }
}
