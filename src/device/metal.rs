//! Metal. **No Mac was at hand when this was written: it has been type-checked for macOS and never run.** What it executes
//! has: the kernels, the dispatches and the schedule are the ones that the tests run on the host.
//!
//! Candle's device, buffers and residency set, but a command queue of our own and no `metal_fwd` on Candle's encoder:
//! that one commits by itself and gives nobody a command buffer to signal an event from, so work cannot be handed over without
//! waiting for all of it, and hits could not run while misses are read. When to commit and when to wait is
//! the pass's business (`model/forward.rs`).
//!
//! ```text
//! launch   encode into the open command buffer; a memory barrier where this launch follows one since the last barrier
//! commit   update the fence, signal the event with the next number, commit; the next encoder waits for the fence
//! wait     commit, then look at the event: spinning first, since the system's wake-up can cost more than a layer
//! ```
//! Buffers are shared and untracked: hazards are known from the plan, so Metal need not look for them.

mod library;

use super::{DeviceError, Dispatch, Gpu, Mark, Region, Slab, Timeline};
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
    MTLSharedEvent, MTLSize,
};
use std::{
    collections::BTreeMap,
    ffi::c_void,
    ops::Range,
    ptr::NonNull,
    sync::Arc,
    time::{Duration, Instant},
};

// Without it the system names no default GPU to a program that has no window.
#[link(name = "CoreGraphics", kind = "framework")]
unsafe extern "C" {}

/// No-copy buffers start and end at pages; 16 KiB is every Apple silicon's.
const PAGE: usize = 16384;
/// How long a wait spins before it asks the system to be woken.
const SPIN: Duration = Duration::from_millis(2);

/// A Metal GPU.
pub struct Metal {
    device: Device,
    queue: Retained<ProtocolObject<dyn MTLCommandQueue>>,
    residency: Option<ResidencySet>,
    fence: Retained<ProtocolObject<dyn MTLFence>>,
    event: Retained<ProtocolObject<dyn MTLSharedEvent>>,
    /// The last number a command buffer will signal: 0 before the first one, which has no fence to wait for.
    signalled: u64,
    library: Library,
    buffers: BTreeMap<u32, Memory>,
    next: u32,
    open: Option<Open>,
    /// Committed since the last wait.
    committed: Vec<Retained<ProtocolObject<dyn MTLCommandBuffer>>>,
}

// SAFETY: the Metal objects in it may be used from any thread, one at a time; every method takes `&mut self`.
unsafe impl Send for Metal {}

/// A buffer, and the slab it shows if it is not its own memory.
struct Memory {
    buffer: Buffer,
    _slab: Option<Arc<Slab>>,
}

/// A command buffer being encoded.
struct Open {
    commands: Retained<ProtocolObject<dyn MTLCommandBuffer>>,
    encoder: Retained<ProtocolObject<dyn MTLComputeCommandEncoder>>,
    /// Launches since the last barrier: they may overlap.
    unordered: Vec<Dispatch>,
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

impl Metal {
    /// The system's GPU. Nothing is compiled yet. A kernel file that Apple's compiler refuses is an error of
    /// whoever launches one of its kernels.
    pub fn new() -> Result<Self, DeviceError> {
        // Not through a tensor device of Candle's: making one panics where there is no GPU, and before macOS 15.
        let Some(device) = Device::system_default() else {
            return Err(DeviceError("this Mac offers no Metal GPU".into()));
        };
        if !device.as_ref().hasUnifiedMemory() {
            let name = device.as_ref().name();
            return Err(DeviceError(format!("{name} has memory of its own; Metal is for GPUs that share the CPU's")));
        }
        if !device.as_ref().supportsFamily(MTLGPUFamily::Apple7) {
            let name = device.as_ref().name();
            return Err(DeviceError(format!(
                "{name} is older than M1 or a virtual machine's: it cannot add up a simdgroup"
            )));
        }
        let library = Library::new(&device);
        let raw = device.as_ref();
        let (Some(queue), Some(fence), Some(event)) = (raw.newCommandQueue(), raw.newFence(), raw.newSharedEvent())
        else {
            return failed("a queue, a fence or an event");
        };
        // Since macOS 15. Before, what a launch binds becomes resident with its command buffer.
        let residency = AnyClass::get(c"MTLResidencySetDescriptor").map(|_| ResidencySet::new(&device));
        if let Some(set) = residency.as_ref().and_then(ResidencySet::raw) {
            queue.addResidencySet(set);
        }
        let (buffers, committed) = (BTreeMap::new(), Vec::new());
        Ok(Self {
            device,
            queue,
            residency,
            fence,
            event,
            signalled: 0,
            library,
            buffers,
            next: 0,
            open: None,
            committed,
        })
    }

    fn keep(&mut self, buffer: Buffer, len: usize, slab: Option<Arc<Slab>>) -> Region {
        if let Some(set) = &self.residency {
            set.insert(&buffer);
        }
        let number = self.next;
        self.next += 1;
        self.buffers.insert(number, Memory { buffer, _slab: slab });
        Region { buffer: number, offset: 0, len }
    }

    fn memory(&self, region: Region) -> Result<&Buffer, DeviceError> {
        match self.buffers.get(&region.buffer) {
            Some(memory) if region.offset + region.len <= memory.buffer.length() => Ok(&memory.buffer),
            _ => failed(&format!("{region:?}: there is no such memory")),
        }
    }

    fn open(&mut self) -> Result<Open, DeviceError> {
        if let Some(open) = self.open.take() {
            return Ok(open);
        }
        let Some(commands) = self.queue.commandBuffer() else { return failed("a command buffer") };
        let Some(encoder) = commands.computeCommandEncoderWithDispatchType(MTLDispatchType::Concurrent) else {
            return failed("an encoder");
        };
        if self.signalled > 0 {
            encoder.waitForFence(&self.fence);
        }
        Ok(Open { commands, encoder, unordered: Vec::new() })
    }

    fn encode(&mut self, open: &mut Open, dispatch: &Dispatch) -> Result<(), DeviceError> {
        let pipeline = self.library.pipeline(dispatch.kernel)?;
        if dispatch.threads as usize > pipeline.maxTotalThreadsPerThreadgroup() {
            let most = pipeline.maxTotalThreadsPerThreadgroup();
            return failed(&format!("{} threads for {}, whose limit is {most}", dispatch.threads, dispatch.kernel));
        }
        if open.unordered.iter().any(|earlier| dispatch.follows(earlier)) {
            open.encoder.memoryBarrierWithScope(MTLBarrierScope::Buffers);
            open.unordered.clear();
        }
        open.encoder.setComputePipelineState(&pipeline);
        let args: NonNull<[u32]> = NonNull::from(dispatch.args.as_slice());
        // SAFETY: the bytes are copied before the call returns.
        unsafe { open.encoder.setBytes_length_atIndex(args.cast::<c_void>(), dispatch.args.len() * 4, 0) };
        for (index, binding) in dispatch.bindings.iter().enumerate() {
            let buffer = self.memory(binding.region)?;
            // SAFETY: the offset lies in the buffer, and the buffer lives until the GPU is done: `release` waits.
            unsafe {
                open.encoder.setBuffer_offset_atIndex(Some(buffer.as_ref()), binding.region.offset, index + 1);
            }
        }
        let [width, height, depth] = dispatch.grid.map(|n| n as usize);
        let threads = MTLSize { width: dispatch.threads as usize, height: 1, depth: 1 };
        open.encoder.dispatchThreadgroups_threadsPerThreadgroup(MTLSize { width, height, depth }, threads);
        open.unordered.push(dispatch.clone());
        Ok(())
    }
}

impl Gpu for Metal {
    fn name(&self) -> String {
        self.device.as_ref().name().to_string()
    }

    fn working_set(&self) -> Option<u64> {
        Some(self.device.recommended_max_working_set_size() as u64).filter(|bytes| *bytes > 0)
    }

    fn compile(&mut self) -> Vec<(String, Option<DeviceError>)> {
        autoreleasepool(|_| self.library.all())
    }

    fn allocate(&mut self, bytes: usize) -> Result<Region, DeviceError> {
        let buffer = self.device.new_buffer(bytes.max(16), RESOURCE_OPTIONS);
        let buffer = buffer.map_err(|error| DeviceError(format!("{bytes} bytes: {error}")))?;
        // SAFETY: shared memory of at least this length that nobody else knows yet.
        unsafe { buffer.contents().write_bytes(0, bytes) };
        Ok(self.keep(buffer, bytes, None))
    }

    fn release(&mut self, buffer: u32) {
        // What is in flight may still use it; an error there is the next wait's to report.
        let _ = self.wait();
        if let (Some(memory), Some(set)) = (self.buffers.remove(&buffer), &self.residency) {
            set.remove(&memory.buffer);
        }
    }

    fn adopt(&mut self, slab: &Arc<Slab>, range: Range<usize>) -> Result<Region, DeviceError> {
        if range.is_empty() || range.end > slab.len() || !range.start.is_multiple_of(PAGE) {
            return failed(&format!("bytes {range:?} of a slab of {}", slab.len()));
        }
        // SAFETY: in bounds; only the address is taken.
        let start = unsafe { slab.bytes(range.clone()) }.as_ptr();
        let whole = range.len().next_multiple_of(PAGE);
        let Some(pointer) = NonNull::new(start.cast_mut().cast::<c_void>()) else { return failed("an empty slab") };
        // SAFETY: mapped memory from a page's start to a page's end (a mapping is whole pages), which lives as long as the
        // slab that is kept beside the buffer.
        let raw = unsafe {
            let raw = self.device.as_ref();
            raw.newBufferWithBytesNoCopy_length_options_deallocator(pointer, whole, RESOURCE_OPTIONS, None)
        };
        let Some(raw) = raw else { return failed(&format!("to look at {whole} bytes of ours without a copy")) };
        Ok(self.keep(Buffer::new(raw), range.len(), Some(slab.clone())))
    }

    fn longest(&self) -> usize {
        self.device.as_ref().maxBufferLength()
    }

    fn write(&mut self, region: Region, bytes: &[u8]) -> Result<(), DeviceError> {
        let buffer = self.memory(region)?;
        let len = bytes.len().min(region.len);
        // SAFETY: in bounds (checked by `memory`), and no launch that touches it is in flight: the trait's contract.
        unsafe { buffer.contents().add(region.offset).copy_from_nonoverlapping(bytes.as_ptr(), len) };
        Ok(())
    }

    fn read(&mut self, region: Region, bytes: &mut [u8]) -> Result<(), DeviceError> {
        let buffer = self.memory(region)?;
        let len = bytes.len().min(region.len);
        // SAFETY: as in `write`.
        unsafe { bytes.as_mut_ptr().copy_from_nonoverlapping(buffer.contents().add(region.offset), len) };
        Ok(())
    }

    fn launch(&mut self, dispatch: &Dispatch) -> Result<(), DeviceError> {
        // Metal leaves objects to the thread's pool, and a thread of ours has none.
        autoreleasepool(|_| {
            let mut open = self.open()?;
            let done = self.encode(&mut open, dispatch);
            self.open = Some(open);
            done
        })
    }

    fn commit(&mut self) -> Result<(), DeviceError> {
        autoreleasepool(|_| self.hand_over())
    }

    fn wait(&mut self) -> Result<(), DeviceError> {
        autoreleasepool(|_| self.finish())
    }
}

impl Timeline for Metal {
    fn mark(&mut self) -> Mark {
        Mark(self.signalled + u64::from(self.open.is_some()))
    }

    fn passed(&mut self) -> Mark {
        Mark(self.event.signaledValue())
    }

    fn wait_for(&mut self, mark: Mark) -> Result<(), DeviceError> {
        autoreleasepool(|_| {
            if mark.0 > self.signalled {
                self.hand_over()?;
            }
            self.reach(mark.0.min(self.signalled))
        })
    }
}

impl Drop for Metal {
    /// Metal aborts the program if an encoder goes before it has ended; and the GPU must not outlive the slabs it reads.
    fn drop(&mut self) {
        let _ = self.wait();
    }
}

impl Metal {
    fn hand_over(&mut self) -> Result<(), DeviceError> {
        let Some(open) = self.open.take() else { return Ok(()) };
        open.encoder.updateFence(&self.fence);
        open.encoder.endEncoding();
        self.signalled += 1;
        let event: &ProtocolObject<dyn MTLEvent> = ProtocolObject::from_ref(&*self.event);
        open.commands.encodeSignalEvent_value(event, self.signalled);
        open.commands.commit();
        self.committed.push(open.commands);
        Ok(())
    }

    fn finish(&mut self) -> Result<(), DeviceError> {
        self.hand_over()?;
        let reached = self.reach(self.signalled);
        self.committed.clear();
        reached
    }

    /// Waits until the event has this value.
    fn reach(&self, value: u64) -> Result<(), DeviceError> {
        let begin = Instant::now();
        while self.event.signaledValue() < value {
            if begin.elapsed() < SPIN {
                std::hint::spin_loop();
                continue;
            }
            if self.committed.iter().any(|commands| commands.status() == MTLCommandBufferStatus::Error) {
                break;
            }
            self.event.waitUntilSignaledValue_timeoutMS(value, 100);
        }
        match self.committed.iter().find_map(|commands| commands.error()) {
            Some(error) => Err(DeviceError(error.localizedDescription().to_string())),
            None => Ok(()),
        }
    }
}
