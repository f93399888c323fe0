//! The kernels on the host as a [`Gpu`]: what `device/metal.rs` is on a Mac. It is as late as a device may be: a launch runs
//! when somebody waits for it, or looks how far the device has come a second time. So a slot that is filled too early, or a list
//! that is written too early, gives wrong results.

use crate::host::Host;
use moestro::device::{DeviceError, Dispatch, Effect, Gpu, Mark, Region, Slab, Timeline};
use std::{
    collections::{HashMap, VecDeque},
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

pub struct HostGpu {
    host: Host,
    /// The bytes of each adopted slab that the program has seen.
    adopted: HashMap<u32, Adopted>,
    /// Bytes from [`Gpu::allocate`], given back or not.
    pub allocated: Arc<AtomicUsize>,
    /// Launches that are encoded and not run; each is a mark of its own.
    late: VecDeque<Dispatch>,
    encoded: u64,
    /// Marks that had been encoded when somebody last looked.
    looked: u64,
}

struct Adopted {
    slab: Arc<Slab>,
    start: usize,
    seen: Vec<u8>,
}

impl HostGpu {
    /// `host` runs each dispatch once: that its kernels do not depend on the order of threads is another test's matter.
    pub fn new(mut host: Host) -> Self {
        host.twice = false;
        Self { host, adopted: HashMap::new(), allocated: Arc::default(), late: VecDeque::new(), encoded: 0, looked: 0 }
    }
}

impl Gpu for HostGpu {
    fn name(&self) -> String {
        "the host".into()
    }

    fn working_set(&self) -> Option<u64> {
        None
    }

    fn compile(&mut self) -> Vec<(String, Option<DeviceError>)> {
        Vec::new()
    }

    fn allocate(&mut self, bytes: usize) -> Result<Region, DeviceError> {
        self.allocated.fetch_add(bytes, Ordering::Relaxed);
        let region = self.host.empty(bytes);
        self.host.write(region, &vec![0; bytes]);
        Ok(region)
    }

    fn release(&mut self, buffer: u32) {
        self.host.drop_buffer(buffer);
    }

    fn adopt(&mut self, slab: &Arc<Slab>, range: Range<usize>) -> Result<Region, DeviceError> {
        let region = self.host.empty(range.len());
        self.host.write(region, &vec![0; range.len()]);
        let adopted = Adopted { slab: slab.clone(), start: range.start, seen: vec![0; range.len()] };
        self.adopted.insert(region.buffer, adopted);
        Ok(region)
    }

    /// So short that a store's slab takes several buffers.
    fn longest(&self) -> usize {
        4 << 20
    }

    fn write(&mut self, region: Region, bytes: &[u8]) -> Result<(), DeviceError> {
        self.host.write(region.first(bytes.len()), bytes);
        Ok(())
    }

    fn read(&mut self, region: Region, bytes: &mut [u8]) -> Result<(), DeviceError> {
        self.see(region);
        bytes.copy_from_slice(&self.host.read(region.first(bytes.len())));
        Ok(())
    }

    fn launch(&mut self, dispatch: &Dispatch) -> Result<(), DeviceError> {
        self.late.push_back(dispatch.clone());
        self.encoded += 1;
        Ok(())
    }

    fn commit(&mut self) -> Result<(), DeviceError> {
        Ok(())
    }

    fn wait(&mut self) -> Result<(), DeviceError> {
        self.wait_for(Mark(self.encoded))
    }
}

impl Timeline for HostGpu {
    fn mark(&mut self) -> Mark {
        Mark(self.encoded)
    }

    fn passed(&mut self) -> Mark {
        let before = std::mem::replace(&mut self.looked, self.encoded);
        // An error is the next wait's.
        let _ = self.wait_for(Mark(before));
        Mark(self.encoded - self.late.len() as u64)
    }

    fn wait_for(&mut self, mark: Mark) -> Result<(), DeviceError> {
        while self.encoded - (self.late.len() as u64) < mark.0
            && let Some(dispatch) = self.late.front().cloned()
        {
            self.run(&dispatch)?;
            self.late.pop_front();
        }
        Ok(())
    }
}

impl HostGpu {
    fn run(&mut self, dispatch: &Dispatch) -> Result<(), DeviceError> {
        for binding in &dispatch.bindings {
            if self.see(binding.region) {
                assert_eq!(binding.effect, Effect::Read, "{} writes to weights", dispatch.kernel);
            }
        }
        self.host.try_run(dispatch).map_err(DeviceError)
    }

    /// Brings a region of a slab up to date, if it is one: a GPU has it in the very same memory.
    fn see(&mut self, region: Region) -> bool {
        let Some(adopted) = self.adopted.get_mut(&region.buffer) else { return false };
        // SAFETY: reads into the slab may go on in other slots; the experts hand out only what has landed, and nothing else
        // is touched.
        let now =
            unsafe { adopted.slab.bytes(adopted.start + region.offset..adopted.start + region.offset + region.len) };
        let seen = &mut adopted.seen[region.offset..region.offset + region.len];
        if seen != now {
            seen.copy_from_slice(now);
            self.host.write(region, seen);
        }
        true
    }
}
