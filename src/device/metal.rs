//! The Metal driver under [`CommandQueue`](super::CommandQueue).
//!
//! **This file has been type-checked for macOS but has never run on a Mac.** The layers above it have run: the queue over a
//! test double that enforces Metal's rules, the kernels, the launches and the schedule.
//!
//! It uses Candle's device, buffers and residency set, but its own command queue. Candle's encoder commits by itself and
//! gives access to no command buffer, so it cannot signal an event. Work could then not be submitted without waiting for
//! all of it, and experts that are in memory could not be computed while others are read.
//!
//! Buffers are shared and untracked. The queue knows the hazards, so Metal need not track them. Our threads have no
//! autorelease pool, so every call that may create autoreleased objects opens one.

mod library;

use super::{CommandStatus, DeviceError, Driver, Launch, Region, Slab, error::fail};
use candle_metal_kernels::{
    RESOURCE_OPTIONS,
    metal::{Buffer, Device, ResidencySet},
};
use library::MetalLibrary;
use objc2::{
    rc::{Retained, autoreleasepool},
    runtime::{AnyClass, ProtocolObject},
};
use objc2_metal::{
    MTLBarrierScope, MTLCommandBuffer, MTLCommandBufferStatus, MTLCommandEncoder, MTLCommandQueue,
    MTLComputeCommandEncoder, MTLComputePipelineState, MTLDevice, MTLDispatchType, MTLEvent, MTLFence, MTLGPUFamily,
    MTLResidencySet, MTLSharedEvent, MTLSize,
};
use std::{collections::BTreeMap, ffi::c_void, mem, ops::Range, ptr::NonNull, sync::Arc, time::Duration};

// Without CoreGraphics, the system returns no default GPU to a program without a window.
#[link(name = "CoreGraphics", kind = "framework")]
unsafe extern "C" {}

/// Page size of Apple silicon. No-copy buffers start and end at pages.
const PAGE: usize = 16384;

/// A Metal GPU.
pub struct Metal {
    device: Device,
    queue: MetalQueue,
    residency: Option<ResidencySet>,
    library: MetalLibrary,
    buffers: BTreeMap<u32, MetalBuffer>,
}

/// The objects that are unusable after a failure.
struct MetalQueue {
    commands: Retained<ProtocolObject<dyn MTLCommandQueue>>,
    fence: Retained<ProtocolObject<dyn MTLFence>>,
    event: Retained<ProtocolObject<dyn MTLSharedEvent>>,
}

/// A command buffer that is being encoded.
pub struct MetalEncoder {
    commands: Retained<ProtocolObject<dyn MTLCommandBuffer>>,
    encoder: Retained<ProtocolObject<dyn MTLComputeCommandEncoder>>,
}

/// A submitted command buffer.
pub struct MetalCommands(Retained<ProtocolObject<dyn MTLCommandBuffer>>);

// SAFETY: any thread may use its Metal objects, one thread at a time. All methods that change them take `&mut self`.
unsafe impl Send for Metal {}
// SAFETY: as above.
unsafe impl Send for MetalEncoder {}
// SAFETY: as above.
unsafe impl Send for MetalCommands {}

/// A buffer, and the slab whose memory it uses, if any.
struct MetalBuffer {
    buffer: Buffer,
    _slab: Option<Arc<Slab>>,
}

impl Drop for MetalEncoder {
    /// Metal aborts the program if an encoder is dropped before `endEncoding`.
    fn drop(&mut self) {
        self.encoder.endEncoding();
    }
}

/// Candle's device. `None` before macOS 15 or without a GPU, where Candle panics.
pub fn candle() -> Option<candle_core::Device> {
    AnyClass::get(c"MTLResidencySetDescriptor")?;
    Device::system_default()?;
    candle_core::Device::new_metal(0).ok()
}

impl MetalQueue {
    fn new(device: &Device, residency: Option<&ResidencySet>) -> Result<Self, DeviceError> {
        let raw = device.as_ref();
        let (Some(commands), Some(fence), Some(event)) = (raw.newCommandQueue(), raw.newFence(), raw.newSharedEvent())
        else {
            return fail("Metal cannot create a command queue, a fence or an event");
        };
        if let Some(set) = residency.and_then(ResidencySet::raw) {
            commands.addResidencySet(set);
        }
        Ok(Self { commands, fence, event })
    }
}

impl Metal {
    /// Opens the system's GPU. With `require_features`, a GPU that lacks a feature of the kernels is an error. Nothing is
    /// compiled yet. If a kernel file does not compile, launching one of its kernels fails.
    pub fn new(require_features: bool) -> Result<Self, DeviceError> {
        // A Candle tensor device would panic without a GPU and before macOS 15.
        let Some(device) = Device::system_default() else {
            return fail("this Mac has no Metal GPU");
        };
        if !device.as_ref().hasUnifiedMemory() {
            let name = device.as_ref().name();
            return fail(format!("{name} does not share the CPU's memory, which Moestro requires on Metal"));
        }
        if require_features && !device.as_ref().supportsFamily(MTLGPUFamily::Apple7) {
            let name = device.as_ref().name();
            return Err(DeviceError(format!(
                "{name} is older than M1 or a virtual machine's: it cannot add up a simdgroup"
            )));
        }
        let library = MetalLibrary::new(&device);
        // Residency sets exist since macOS 15. Before, a buffer becomes resident with the command buffer that uses it.
        let residency = AnyClass::get(c"MTLResidencySetDescriptor").map(|_| ResidencySet::new(&device));
        let queue = MetalQueue::new(&device, residency.as_ref())?;
        Ok(Self { device, queue, residency, library, buffers: BTreeMap::new() })
    }

    fn add_buffer(&mut self, number: u32, buffer: Buffer, slab: Option<Arc<Slab>>) {
        if let Some(set) = &self.residency {
            set.insert(&buffer);
        }
        self.buffers.insert(number, MetalBuffer { buffer, _slab: slab });
    }

    /// The address of a region. `None` if it is not inside a buffer.
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
            let buffer = buffer.map_err(|error| DeviceError(format!("cannot allocate {bytes} bytes: {error}")))?;
            self.add_buffer(number, buffer, None);
            Ok(())
        })
    }

    fn adopt(&mut self, number: u32, slab: &Arc<Slab>, range: Range<usize>) -> Result<(), DeviceError> {
        if !range.start.is_multiple_of(PAGE) {
            return fail(format!("cannot adopt bytes {range:?} of a slab: the range does not start at a page"));
        }
        // SAFETY: in bounds (the caller's promise). Only the address is used.
        let start = unsafe { slab.bytes(range.clone()) }.as_ptr();
        let whole = range.len().next_multiple_of(PAGE);
        let Some(pointer) = NonNull::new(start.cast_mut().cast::<c_void>()) else {
            return fail("cannot adopt an empty slab");
        };
        autoreleasepool(|_| {
            // SAFETY: the memory is mapped in whole pages, and the slab, which is stored with the buffer, keeps it mapped.
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

    fn free(&mut self, number: u32) {
        autoreleasepool(|_| {
            if let (Some(memory), Some(set)) = (self.buffers.remove(&number), &self.residency) {
                set.remove(&memory.buffer);
            }
        });
    }

    fn write(&mut self, region: Region, bytes: &[u8]) -> Result<(), DeviceError> {
        let Some(to) = self.contents(region) else { return fail(format!("{region:?} is outside its buffer")) };
        // SAFETY: in bounds, and no launch that uses the region is in flight (the contract of `Gpu`).
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
            let Some(commands) = self.queue.commands.commandBuffer() else {
                return fail("Metal cannot create a command buffer");
            };
            let Some(encoder) = commands.computeCommandEncoderWithDispatchType(MTLDispatchType::Concurrent) else {
                return fail("Metal cannot create a compute encoder");
            };
            if fenced {
                encoder.waitForFence(&self.queue.fence);
            }
            Ok(MetalEncoder { commands, encoder })
        })
    }

    fn barrier(&mut self, open: &mut MetalEncoder) {
        open.encoder.memoryBarrierWithScope(MTLBarrierScope::Buffers);
    }

    fn launch(&mut self, open: &mut MetalEncoder, launch: &Launch) -> Result<(), DeviceError> {
        autoreleasepool(|_| {
            let pipeline = self.library.pipeline(launch.kernel)?;
            open.encoder.setComputePipelineState(&pipeline);
            let args: NonNull<[u32]> = NonNull::from(launch.args.as_slice());
            // SAFETY: Metal copies the bytes before the call returns.
            unsafe { open.encoder.setBytes_length_atIndex(args.cast::<c_void>(), launch.args.len() * 4, 0) };
            for (index, binding) in launch.bindings.iter().enumerate() {
                let Some(memory) = self.buffers.get(&binding.region.buffer) else {
                    return fail(format!("{:?}: there is no such buffer", binding.region));
                };
                let (buffer, offset) = (memory.buffer.as_ref(), binding.region.offset);
                // SAFETY: the offset is inside the buffer. The queue frees no buffer before the GPU is done with it.
                unsafe { open.encoder.setBuffer_offset_atIndex(Some(buffer), offset, index + 1) };
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
            open.encoder.setComputePipelineState(&pipeline);
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
                    why.unwrap_or_else(|| "the command buffer failed without an error message".into()),
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
            // Wakes threads that still wait for the old event.
            self.queue.event.setSignaledValue(value);
            self.queue = MetalQueue::new(&self.device, self.residency.as_ref())?;
            self.queue.event.setSignaledValue(value);
            Ok(())
        })
    }

    fn request_residency(&mut self) {
        if let Some(set) = self.residency.as_ref().and_then(ResidencySet::raw) {
            autoreleasepool(|_| set.requestResidency());
        }
    }

    fn leak_buffers(&mut self) {
        mem::forget(mem::take(&mut self.buffers));
    }
}
