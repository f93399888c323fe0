//! The Metal [`Driver`] of [`CommandQueue`](super::CommandQueue).
//!
//! **This file has been type-checked for macOS but has never run on a Mac.** Its callers have run: the kernels, the
//! launches, and the queue with a test double that enforces Metal's rules.
//!
//! The driver uses Candle's device, buffers and residency sets, but not Candle's command queue. Candle can commit work
//! without waiting (`Commands::flush`), but gives no access to command buffers or events. With Candle's queue, the CPU
//! could only wait for all work, and the GPU could not compute with experts in memory while other experts are read.
//!
//! Buffers use shared storage and no hazard tracking, since [`CommandQueue`](super::CommandQueue) tracks hazards
//! itself. Our threads have no autorelease pool, so every call that may create autoreleased objects opens a pool.

mod exception;
mod library;
mod resident_buffers;

pub use exception::catch_exception;

use super::{
    CommandStatus, DeviceError, Driver, Launch, Region, ResidencySets, Slab,
    error::{explain, fail},
};
use candle_metal_kernels::{
    RESOURCE_OPTIONS,
    metal::{Buffer, Device},
};
use library::MetalLibrary;
use objc2::{
    rc::{Retained, autoreleasepool},
    runtime::{AnyClass, ProtocolObject},
};
use objc2_metal::{
    MTLBarrierScope, MTLBuffer, MTLCommandBuffer, MTLCommandBufferStatus, MTLCommandEncoder, MTLCommandQueue,
    MTLComputeCommandEncoder, MTLComputePipelineState, MTLDevice, MTLDispatchType, MTLEvent, MTLFence, MTLGPUFamily,
    MTLResource, MTLResourceUsage, MTLSharedEvent, MTLSize,
};
use resident_buffers::ResidentBuffers;
use std::{collections::BTreeMap, ffi::c_void, mem, ops::Range, ptr::NonNull, sync::Arc, time::Duration};

// Without CoreGraphics, the system returns no default GPU to a program without a window.
#[link(name = "CoreGraphics", kind = "framework")]
unsafe extern "C" {}

/// Page size of Apple silicon. No-copy buffers must start and end at page boundaries.
const PAGE: usize = 16384;

/// A Metal GPU.
pub struct Metal {
    device: Device,
    queue: MetalQueue,
    residency: Option<ResidencySets<ResidentBuffers>>,
    library: MetalLibrary,
    buffers: BTreeMap<u32, MetalBuffer>,
}

/// The objects that must be replaced after a failure.
struct MetalQueue {
    commands: Retained<ProtocolObject<dyn MTLCommandQueue>>,
    fence: Retained<ProtocolObject<dyn MTLFence>>,
    event: Retained<ProtocolObject<dyn MTLSharedEvent>>,
}

/// A command buffer that is being encoded.
pub struct MetalEncoder {
    /// True after [`Metal::use_tables`] has made adopted buffers resident for this command buffer.
    has_tables: bool,
    commands: Retained<ProtocolObject<dyn MTLCommandBuffer>>,
    encoder: Retained<ProtocolObject<dyn MTLComputeCommandEncoder>>,
}

/// A submitted command buffer.
pub struct MetalCommands(Retained<ProtocolObject<dyn MTLCommandBuffer>>);

// SAFETY: Metal objects may move between threads if only one thread at a time uses them. All mutating methods take
// `&mut self`.
unsafe impl Send for Metal {}
// SAFETY: as for [`Metal`].
unsafe impl Send for MetalEncoder {}
// SAFETY: as for [`Metal`].
unsafe impl Send for MetalCommands {}

struct MetalBuffer {
    buffer: Buffer,
    /// Number of the residency set that contains the buffer. `None` if no set does.
    set: Option<usize>,
    /// The slab whose memory the buffer uses. The reference to the slab keeps the memory mapped. `None` if the buffer
    /// was not adopted.
    slab: Option<Arc<Slab>>,
}

impl Drop for MetalEncoder {
    /// Metal aborts the program if an encoder is dropped before `endEncoding`.
    fn drop(&mut self) {
        self.encoder.endEncoding();
    }
}

/// True on macOS 15 and later with a GPU whose residency sets work.
pub fn has_residency_sets() -> bool {
    Device::system_default().is_some_and(|device| ResidentBuffers::are_supported(&device))
}

impl MetalQueue {
    fn new(device: &Device, residency: Option<&ResidencySets<ResidentBuffers>>) -> Result<Self, DeviceError> {
        let raw = device.as_ref();
        let (Some(commands), Some(fence), Some(event)) = (raw.newCommandQueue(), raw.newFence(), raw.newSharedEvent())
        else {
            return fail("Metal cannot create a command queue, a fence or an event");
        };
        if let Some(residency) = residency {
            residency.sets().iter().for_each(|set| set.add_to(&commands));
        }
        Ok(Self { commands, fence, event })
    }
}

impl Metal {
    /// Opens the system's GPU. If `require_features` is true, a GPU that lacks a feature of the kernels is an error.
    /// Does not compile kernels. If a kernel file does not compile, launching one of its kernels fails.
    pub fn new(require_features: bool) -> Result<Self, DeviceError> {
        // `candle_core::Device` is not used here, since it would panic without a GPU and before macOS 15.
        let Some(device) = Device::system_default() else {
            return fail("this Mac has no Metal GPU");
        };
        if !device.as_ref().hasUnifiedMemory() {
            let name = device.as_ref().name();
            return fail(format!("{name} does not share the CPU's memory, which Moestro requires on Metal"));
        }
        // macOS 13 introduced this class together with GPU addresses of buffers, which the kernels need.
        if AnyClass::get(c"MTLIOCommandQueueDescriptor").is_none() {
            return fail("Moestro on Metal needs macOS 13 or later");
        }
        if require_features && !device.as_ref().supportsFamily(MTLGPUFamily::Apple7) {
            let name = device.as_ref().name();
            return Err(DeviceError::Failed(format!(
                "{name} is older than M1 or belongs to a virtual machine: it does not support simdgroup reductions"
            )));
        }
        let library = MetalLibrary::new(&device);
        let working_set = device.recommended_max_working_set_size() as u64;
        let residency = ResidentBuffers::are_supported(&device).then(|| ResidencySets::new(working_set));
        if residency.is_none() {
            tracing::warn!(
                "before macOS 15, every command buffer must make its memory resident again; large models will be slow"
            );
        }
        let queue = MetalQueue::new(&device, residency.as_ref())?;
        Ok(Self { device, queue, residency, library, buffers: BTreeMap::new() })
    }

    fn add_buffer(&mut self, number: u32, buffer: Buffer, slab: Option<Arc<Slab>>) {
        let create_set = || ResidentBuffers::create(&self.device, &self.queue.commands);
        let sets = self.residency.as_mut();
        let set = sets.and_then(|sets| sets.add(&buffer, buffer.length() as u64, create_set));
        self.buffers.insert(number, MetalBuffer { buffer, set, slab });
    }

    /// Makes those adopted buffers resident for this command buffer that no residency set keeps resident.
    fn use_tables(&self, open: &mut MetalEncoder) {
        if std::mem::replace(&mut open.has_tables, true) {
            return;
        }
        for memory in self.buffers.values().filter(|memory| memory.slab.is_some() && memory.set.is_none()) {
            let resource: &ProtocolObject<dyn MTLResource> = ProtocolObject::from_ref(memory.buffer.as_ref());
            open.encoder.useResource_usage(resource, MTLResourceUsage::Read);
        }
    }

    /// The CPU address of a region. `None` if the region is not inside a buffer.
    fn contents(&self, region: Region) -> Option<*mut u8> {
        let memory = self.buffers.get(&region.buffer)?;
        // SAFETY: in bounds.
        (region.offset + region.len <= memory.buffer.length())
            .then(|| unsafe { memory.buffer.contents().add(region.offset) })
    }
}

impl Driver for Metal {
    type Encoder = MetalEncoder;
    type CommandBuffer = MetalCommands;

    fn name(&self) -> String {
        self.device.as_ref().name().to_string()
    }

    fn working_set(&self) -> Option<u64> {
        Some(self.device.recommended_max_working_set_size() as u64).filter(|bytes| *bytes > 0)
    }

    fn max_buffer_len(&self) -> usize {
        self.device.as_ref().maxBufferLength()
    }

    fn compile(&mut self) -> Vec<(String, Option<DeviceError>)> {
        autoreleasepool(|_| self.library.all())
    }

    fn has_variants(&self) -> bool {
        true
    }

    fn set_precise_exp(&mut self) -> bool {
        self.library.set_precise_exp();
        true
    }

    fn has_matrix_units(&self) -> bool {
        autoreleasepool(|_| self.library.has_tiles())
    }

    fn max_threads(&mut self, kernel: &str) -> Result<u32, DeviceError> {
        autoreleasepool(|_| Ok(self.library.pipeline(kernel)?.maxTotalThreadsPerThreadgroup() as u32))
    }

    fn allocate(&mut self, number: u32, bytes: usize) -> Result<(), DeviceError> {
        autoreleasepool(|_| {
            // Metal fills a new buffer with zeros.
            let buffer = self.device.new_buffer(bytes.max(16), RESOURCE_OPTIONS);
            let buffer =
                buffer.map_err(|error| DeviceError::Memory(format!("cannot allocate {bytes} bytes: {error}")))?;
            self.add_buffer(number, buffer, None);
            Ok(())
        })
    }

    fn adopt(&mut self, number: u32, slab: &Arc<Slab>, range: Range<usize>) -> Result<(), DeviceError> {
        if !range.start.is_multiple_of(PAGE) {
            return fail(format!("cannot adopt bytes {range:?} of a slab: the range does not start at a page"));
        }
        // SAFETY: in bounds (checked by the queue). Only the address is used.
        let start = unsafe { slab.bytes(range.clone()) }.as_ptr();
        let whole = range.len().next_multiple_of(PAGE);
        let Some(pointer) = NonNull::new(start.cast_mut().cast::<c_void>()) else {
            return fail("cannot adopt an empty slab");
        };
        autoreleasepool(|_| {
            // SAFETY: a slab is mapped in whole pages, so the last page is complete. The slab is stored with the
            // buffer, so the pages stay mapped.
            let raw = unsafe {
                let raw = self.device.as_ref();
                raw.newBufferWithBytesNoCopy_length_options_deallocator(pointer, whole, RESOURCE_OPTIONS, None)
            };
            let Some(raw) = raw else {
                return fail(format!("Metal cannot use {whole} bytes of a slab without a copy"));
            };
            self.add_buffer(number, Buffer::new(raw), Some(slab.clone()));
            Ok(())
        })
    }

    fn address(&mut self, number: u32) -> Result<u64, DeviceError> {
        match self.buffers.get(&number) {
            Some(memory) => Ok(memory.buffer.as_ref().gpuAddress()),
            None => fail(format!("there is no buffer {number}")),
        }
    }

    fn free(&mut self, number: u32) {
        autoreleasepool(|_| {
            let Some(memory) = self.buffers.remove(&number) else { return };
            if let (Some(sets), Some(set)) = (&mut self.residency, memory.set) {
                sets.remove(set, &memory.buffer, memory.buffer.length() as u64);
            }
        });
    }

    fn write(&mut self, region: Region, bytes: &[u8]) -> Result<(), DeviceError> {
        let Some(to) = self.contents(region) else { return fail(format!("{region:?} is outside its buffer")) };
        // SAFETY: in bounds, and no launch that uses the region is in flight (the contract of `CommandQueue`).
        unsafe { to.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len().min(region.len)) };
        Ok(())
    }

    fn read(&mut self, region: Region, bytes: &mut [u8]) -> Result<(), DeviceError> {
        let Some(from) = self.contents(region) else { return fail(format!("{region:?} is outside its buffer")) };
        // SAFETY: as in `write`.
        unsafe { bytes.as_mut_ptr().copy_from_nonoverlapping(from, bytes.len().min(region.len)) };
        Ok(())
    }

    fn begin(&mut self, fenced: bool) -> Result<MetalEncoder, DeviceError> {
        autoreleasepool(|_| {
            // Unretained references are cheaper. The queue does not free a buffer that a command buffer in flight uses.
            let Some(commands) = self.queue.commands.commandBufferWithUnretainedReferences() else {
                return fail("Metal cannot create a command buffer");
            };
            let Some(encoder) = commands.computeCommandEncoderWithDispatchType(MTLDispatchType::Concurrent) else {
                return fail("Metal cannot create a compute encoder");
            };
            if fenced {
                encoder.waitForFence(&self.queue.fence);
            }
            Ok(MetalEncoder { has_tables: false, commands, encoder })
        })
    }

    fn barrier(&mut self, open: &mut MetalEncoder) {
        open.encoder.memoryBarrierWithScope(MTLBarrierScope::Buffers);
    }

    fn launch(&mut self, open: &mut MetalEncoder, launch: &Launch) -> Result<(), DeviceError> {
        autoreleasepool(|_| {
            let pipeline = self.library.pipeline(launch.kernel)?;
            open.encoder.setComputePipelineState(pipeline);
            let args: NonNull<[u32]> = NonNull::from(launch.args.as_slice());
            // SAFETY: Metal copies the bytes before the call returns.
            unsafe { open.encoder.setBytes_length_atIndex(args.cast::<c_void>(), launch.args.len() * 4, 0) };
            for (index, binding) in launch.bindings.iter().enumerate() {
                let Some(memory) = self.buffers.get(&binding.region.buffer) else {
                    return fail(format!("{:?}: there is no such buffer", binding.region));
                };
                let buffer = memory.buffer.as_ref();
                let offset = binding.region.offset;
                // SAFETY: the offset is inside the buffer. The queue does not free the buffer before the GPU has
                // completed the launch.
                unsafe { open.encoder.setBuffer_offset_atIndex(Some(buffer), offset, index + 1) };
            }
            if launch.bindings.iter().any(|binding| binding.is_table) {
                self.use_tables(open);
            }
            let [width, height, depth] = launch.grid.map(|n| n as usize);
            let threads = MTLSize { width: launch.threads as usize, height: 1, depth: 1 };
            open.encoder.dispatchThreadgroups_threadsPerThreadgroup(MTLSize { width, height, depth }, threads);
            Ok(())
        })
    }

    fn encode_fault(&mut self, open: &mut MetalEncoder) -> Result<(), DeviceError> {
        autoreleasepool(|_| {
            let pipeline = self.library.fault_pipeline()?;
            open.encoder.setComputePipelineState(pipeline);
            let word = [0u32];
            // SAFETY: Metal copies the bytes before the call returns.
            unsafe { open.encoder.setBytes_length_atIndex(NonNull::from(&word).cast::<c_void>(), 4, 0) };
            let one = MTLSize { width: 1, height: 1, depth: 1 };
            open.encoder.dispatchThreadgroups_threadsPerThreadgroup(one, one);
            Ok(())
        })
    }

    fn commit(&mut self, open: MetalEncoder, value: u64) -> MetalCommands {
        autoreleasepool(|_| {
            open.encoder.updateFence(&self.queue.fence);
            let commands = open.commands.clone();
            drop(open); // Ends encoding.
            let event: &ProtocolObject<dyn MTLEvent> = ProtocolObject::from_ref(&*self.queue.event);
            commands.encodeSignalEvent_value(event, value);
            commands.commit();
            MetalCommands(commands)
        })
    }

    fn signalled_value(&self) -> u64 {
        self.queue.event.signaledValue()
    }

    fn status(&self, commands: &MetalCommands) -> CommandStatus {
        let MetalCommands(commands) = commands;
        match commands.status() {
            MTLCommandBufferStatus::Completed => CommandStatus::Done(commands.GPUEndTime() - commands.GPUStartTime()),
            MTLCommandBufferStatus::Error => autoreleasepool(|_| {
                let why = commands.error().map(|error| error.localizedDescription().to_string());
                CommandStatus::Failed(
                    why.map_or_else(|| "the command buffer failed without an error message".into(), explain),
                )
            }),
            _ => CommandStatus::Pending,
        }
    }

    fn wait_event(&self, value: u64, timeout: Duration) {
        self.queue.event.waitUntilSignaledValue_timeoutMS(value, timeout.as_millis() as u64);
    }

    fn reset(&mut self, value: u64) -> Result<(), DeviceError> {
        autoreleasepool(|_| {
            // This wakes threads that wait for the old event.
            self.queue.event.setSignaledValue(value);
            self.queue = MetalQueue::new(&self.device, self.residency.as_ref())?;
            self.queue.event.setSignaledValue(value);
            Ok(())
        })
    }

    fn residency_request(&mut self) -> Option<Box<dyn Fn() + Send>> {
        Some(Box::new(self.residency.as_ref()?.request()))
    }

    /// Leaks queue, fence, event and pipelines, too, since command buffers do not retain the objects that they use.
    fn leak_buffers(&mut self) {
        mem::forget(mem::take(&mut self.buffers));
        mem::forget((self.queue.commands.clone(), self.queue.fence.clone(), self.queue.event.clone()));
        self.library.leak_pipelines();
    }
}
