//! Metal behind [`Queue`](super::Queue). **No Mac was at hand when this was written: it has been type-checked for macOS and never
//! run.** What stands above it has: the queue on a double that keeps Metal's rules, the kernels, the launches, the schedule.
//!
//! Candle's device, buffers and residency set, but a command queue of our own and no `metal_fwd` on Candle's encoder:
//! that one commits by itself and gives nobody a command buffer to signal an event from, so work cannot be handed over without
//! waiting for all of it, and hits could not run while misses are read.
//!
//! Buffers are shared and untracked: hazards are known from the plan, so Metal need not look for them. Every call that may
//! leave objects to the thread's autorelease pool has a pool of its own, since a thread of ours has none.

mod library;

use super::{DeviceError, Dispatch, Driver, Region, Slab, Status};
use candle_metal_kernels::{
    RESOURCE_OPTIONS,
    metal::{Buffer, Device, ResidencySet},
};
use library::Library;
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

// Without it the system names no default GPU to a program that has no window.
#[link(name = "CoreGraphics", kind = "framework")]
unsafe extern "C" {}

/// No-copy buffers start and end at pages; 16 KiB is every Apple silicon's.
const PAGE: usize = 16384;

/// A Metal GPU.
pub struct Metal {
    device: Device,
    line: Channel,
    residency: Option<ResidencySet>,
    library: Library,
    buffers: BTreeMap<u32, Memory>,
}

/// The objects that a failure leaves unfit for use.
struct Channel {
    queue: Retained<ProtocolObject<dyn MTLCommandQueue>>,
    fence: Retained<ProtocolObject<dyn MTLFence>>,
    event: Retained<ProtocolObject<dyn MTLSharedEvent>>,
}

/// A command buffer being encoded.
pub struct Open {
    commands: Retained<ProtocolObject<dyn MTLCommandBuffer>>,
    encoder: Retained<ProtocolObject<dyn MTLComputeCommandEncoder>>,
}

/// A command buffer under way.
pub struct Committed(Retained<ProtocolObject<dyn MTLCommandBuffer>>);

// SAFETY: the Metal objects in it may be used from any thread, one at a time; what changes anything takes `&mut self`.
unsafe impl Send for Metal {}
// SAFETY: as above.
unsafe impl Send for Open {}
// SAFETY: as above.
unsafe impl Send for Committed {}

/// A buffer, and the slab it shows if it is not its own memory.
struct Memory {
    buffer: Buffer,
    _slab: Option<Arc<Slab>>,
}

impl Drop for Open {
    /// Metal aborts the program if an encoder goes before it has ended.
    fn drop(&mut self) {
        self.encoder.endEncoding();
    }
}

/// Candle's device, which panics when it is made before macOS 15 or without a GPU.
pub fn candle() -> Option<candle_core::Device> {
    AnyClass::get(c"MTLResidencySetDescriptor")?;
    Device::system_default()?;
    candle_core::Device::new_metal(0).ok()
}

fn failed<T>(what: &str) -> Result<T, DeviceError> {
    Err(DeviceError(format!("Metal refused {what}")))
}

impl Channel {
    fn new(device: &Device, residency: Option<&ResidencySet>) -> Result<Self, DeviceError> {
        let raw = device.as_ref();
        let (Some(queue), Some(fence), Some(event)) = (raw.newCommandQueue(), raw.newFence(), raw.newSharedEvent())
        else {
            return failed("a queue, a fence or an event");
        };
        if let Some(set) = residency.and_then(ResidencySet::raw) {
            queue.addResidencySet(set);
        }
        Ok(Self { queue, fence, event })
    }
}

impl Metal {
    /// The system's GPU; `gate` refuses one that lacks what the kernels need. Nothing is compiled yet. A kernel file that
    /// Apple's compiler refuses is an error of whoever launches one of its kernels.
    pub fn new(gate: bool) -> Result<Self, DeviceError> {
        // Not through a tensor device of Candle's: making one panics where there is no GPU, and before macOS 15.
        let Some(device) = Device::system_default() else {
            return Err(DeviceError("this Mac offers no Metal GPU".into()));
        };
        if !device.as_ref().hasUnifiedMemory() {
            let name = device.as_ref().name();
            return Err(DeviceError(format!("{name} has memory of its own; Metal is for GPUs that share the CPU's")));
        }
        if gate && !device.as_ref().supportsFamily(MTLGPUFamily::Apple7) {
            let name = device.as_ref().name();
            return Err(DeviceError(format!(
                "{name} is older than M1 or a virtual machine's: it cannot add up a simdgroup"
            )));
        }
        let library = Library::new(&device);
        // Since macOS 15. Before, what a launch binds becomes resident with its command buffer.
        let residency = AnyClass::get(c"MTLResidencySetDescriptor").map(|_| ResidencySet::new(&device));
        let line = Channel::new(&device, residency.as_ref())?;
        Ok(Self { device, line, residency, library, buffers: BTreeMap::new() })
    }

    fn keep(&mut self, number: u32, buffer: Buffer, slab: Option<Arc<Slab>>) {
        if let Some(set) = &self.residency {
            set.insert(&buffer);
        }
        self.buffers.insert(number, Memory { buffer, _slab: slab });
    }

    /// The address of a region; `None` if there is no such memory.
    fn contents(&self, region: Region) -> Option<*mut u8> {
        let memory = self.buffers.get(&region.buffer)?;
        // SAFETY: in bounds.
        (region.offset + region.len <= memory.buffer.length())
            .then(|| unsafe { memory.buffer.contents().add(region.offset) })
    }
}

impl Driver for Metal {
    type Open = Open;
    type Committed = Committed;

    fn name(&self) -> String {
        self.device.as_ref().name().to_string()
    }

    fn working_set(&self) -> Option<u64> {
        Some(self.device.recommended_max_working_set_size() as u64).filter(|bytes| *bytes > 0)
    }

    fn longest(&self) -> usize {
        self.device.as_ref().maxBufferLength()
    }

    fn compile(&mut self) -> Vec<(String, Option<DeviceError>)> {
        autoreleasepool(|_| self.library.all())
    }

    fn has_matrix_units(&self) -> bool {
        autoreleasepool(|_| self.library.has_tiles())
    }

    fn most_threads(&mut self, kernel: &str) -> Result<u32, DeviceError> {
        autoreleasepool(|_| Ok(self.library.pipeline(kernel)?.maxTotalThreadsPerThreadgroup() as u32))
    }

    fn allocate(&mut self, number: u32, bytes: usize) -> Result<(), DeviceError> {
        autoreleasepool(|_| {
            // Metal documents that a new buffer is cleared with zeros.
            let buffer = self.device.new_buffer(bytes.max(16), RESOURCE_OPTIONS);
            let buffer = buffer.map_err(|error| DeviceError(format!("{bytes} bytes: {error}")))?;
            self.keep(number, buffer, None);
            Ok(())
        })
    }

    fn adopt(&mut self, number: u32, slab: &Arc<Slab>, range: Range<usize>) -> Result<(), DeviceError> {
        if !range.start.is_multiple_of(PAGE) {
            return failed(&format!("bytes {range:?} of a slab: they do not start at a page"));
        }
        // SAFETY: in bounds (the caller's promise); only the address is taken.
        let start = unsafe { slab.bytes(range.clone()) }.as_ptr();
        let whole = range.len().next_multiple_of(PAGE);
        let Some(pointer) = NonNull::new(start.cast_mut().cast::<c_void>()) else { return failed("an empty slab") };
        autoreleasepool(|_| {
            // SAFETY: mapped memory from a page's start to a page's end (a mapping is whole pages), which lives as long as the
            // slab that is kept beside the buffer.
            let raw = unsafe {
                let raw = self.device.as_ref();
                raw.newBufferWithBytesNoCopy_length_options_deallocator(pointer, whole, RESOURCE_OPTIONS, None)
            };
            let Some(raw) = raw else { return failed(&format!("to look at {whole} bytes of ours without a copy")) };
            self.keep(number, Buffer::new(raw), Some(slab.clone()));
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
        let Some(to) = self.contents(region) else { return failed(&format!("{region:?}: there is no such memory")) };
        // SAFETY: in bounds, and no launch that touches it is in flight: the contract of `Gpu`.
        unsafe { to.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len().min(region.len)) };
        Ok(())
    }

    fn read(&mut self, region: Region, bytes: &mut [u8]) -> Result<(), DeviceError> {
        let Some(from) = self.contents(region) else { return failed(&format!("{region:?}: there is no such memory")) };
        // SAFETY: as in `write`.
        unsafe { bytes.as_mut_ptr().copy_from_nonoverlapping(from, bytes.len().min(region.len)) };
        Ok(())
    }

    fn begin(&mut self, fenced: bool) -> Result<Open, DeviceError> {
        autoreleasepool(|_| {
            let Some(commands) = self.line.queue.commandBuffer() else { return failed("a command buffer") };
            let Some(encoder) = commands.computeCommandEncoderWithDispatchType(MTLDispatchType::Concurrent) else {
                return failed("an encoder");
            };
            if fenced {
                encoder.waitForFence(&self.line.fence);
            }
            Ok(Open { commands, encoder })
        })
    }

    fn barrier(&mut self, open: &mut Open) {
        open.encoder.memoryBarrierWithScope(MTLBarrierScope::Buffers);
    }

    fn launch(&mut self, open: &mut Open, dispatch: &Dispatch) -> Result<(), DeviceError> {
        autoreleasepool(|_| {
            let pipeline = self.library.pipeline(dispatch.kernel)?;
            open.encoder.setComputePipelineState(&pipeline);
            let args: NonNull<[u32]> = NonNull::from(dispatch.args.as_slice());
            // SAFETY: the bytes are copied before the call returns.
            unsafe { open.encoder.setBytes_length_atIndex(args.cast::<c_void>(), dispatch.args.len() * 4, 0) };
            for (index, binding) in dispatch.bindings.iter().enumerate() {
                let Some(memory) = self.buffers.get(&binding.region.buffer) else {
                    return failed(&format!("{:?}: there is no such memory", binding.region));
                };
                let (buffer, offset) = (memory.buffer.as_ref(), binding.region.offset);
                // SAFETY: the offset lies in the buffer, which lives until the GPU is done: the queue frees none before.
                unsafe { open.encoder.setBuffer_offset_atIndex(Some(buffer), offset, index + 1) };
            }
            let [width, height, depth] = dispatch.grid.map(|n| n as usize);
            let threads = MTLSize { width: dispatch.threads as usize, height: 1, depth: 1 };
            open.encoder.dispatchThreadgroups_threadsPerThreadgroup(MTLSize { width, height, depth }, threads);
            Ok(())
        })
    }

    fn provoke(&mut self, open: &mut Open) -> Result<(), DeviceError> {
        autoreleasepool(|_| {
            let pipeline = self.library.fault()?;
            open.encoder.setComputePipelineState(&pipeline);
            let word = [0u32];
            // SAFETY: the bytes are copied before the call returns.
            unsafe { open.encoder.setBytes_length_atIndex(NonNull::from(&word).cast::<c_void>(), 4, 0) };
            let one = MTLSize { width: 1, height: 1, depth: 1 };
            open.encoder.dispatchThreadgroups_threadsPerThreadgroup(one, one);
            Ok(())
        })
    }

    fn commit(&mut self, open: Open, value: u64) -> Committed {
        autoreleasepool(|_| {
            open.encoder.updateFence(&self.line.fence);
            let commands = open.commands.clone();
            drop(open); // Ends the encoder.
            let event: &ProtocolObject<dyn MTLEvent> = ProtocolObject::from_ref(&*self.line.event);
            commands.encodeSignalEvent_value(event, value);
            commands.commit();
            Committed(commands)
        })
    }

    fn signalled(&self) -> u64 {
        self.line.event.signaledValue()
    }

    fn status(&self, committed: &Committed) -> Status {
        let Committed(commands) = committed;
        match commands.status() {
            MTLCommandBufferStatus::Completed => Status::Done(commands.GPUEndTime() - commands.GPUStartTime()),
            MTLCommandBufferStatus::Error => autoreleasepool(|_| {
                let why = commands.error().map(|error| error.localizedDescription().to_string());
                Status::Failed(why.unwrap_or_else(|| "the command buffer failed without a word".into()))
            }),
            _ => Status::Pending,
        }
    }

    fn park(&self, value: u64, most: Duration) {
        self.line.event.waitUntilSignaledValue_timeoutMS(value, most.as_millis() as u64);
    }

    fn renew(&mut self, value: u64) -> Result<(), DeviceError> {
        autoreleasepool(|_| {
            // Threads that still wait for the old event go on.
            self.line.event.setSignaledValue(value);
            self.line = Channel::new(&self.device, self.residency.as_ref())?;
            self.line.event.setSignaledValue(value);
            Ok(())
        })
    }

    fn reside(&mut self) {
        if let Some(set) = self.residency.as_ref().and_then(ResidencySet::raw) {
            autoreleasepool(|_| set.requestResidency());
        }
    }

    fn leak(&mut self) {
        mem::forget(mem::take(&mut self.buffers));
    }
}
