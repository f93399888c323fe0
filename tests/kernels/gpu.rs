//! The kernels on the host as a [`Gpu`]: what `device/metal.rs` is on a Mac. It is as late as a device may be: a launch runs
//! when somebody waits for it, or looks how far the device has come a second time. So a slot that is filled too early, or a list
//! that is written too early, gives wrong results. And it has memory of its own, as a card has: adopted bytes that it was not told
//! of are no numbers.

use crate::host::Host;
use moestro::device::{BufferAccess, DeviceError, Gpu, Launch, Region, Slab, SyncPoint, Timeline};
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
    /// Each adopted slab, and the byte where it begins.
    adopted: HashMap<u32, (Arc<Slab>, usize)>,
    /// Bytes from [`Gpu::allocate`], given back or not.
    pub allocated: Arc<AtomicUsize>,
    /// Work that is encoded and not done; each piece is a mark of its own.
    late: VecDeque<Work>,
    encoded: u64,
    /// Marks that had been encoded when somebody last looked.
    looked: u64,
    /// A prompt's products are in half precision.
    pub halves: bool,
}

#[derive(Clone)]
enum Work {
    Launch(Launch),
    /// From adopted memory.
    Copy(Region),
}

impl HostGpu {
    /// `host` runs each dispatch once: that its kernels do not depend on the order of threads is another test's matter.
    pub fn new(mut host: Host) -> Self {
        host.twice = false;
        Self {
            host,
            adopted: HashMap::new(),
            allocated: Arc::default(),
            late: VecDeque::new(),
            encoded: 0,
            looked: 0,
            halves: false,
        }
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
        self.host.write(region, &vec![0xff; range.len()]);
        self.adopted.insert(region.buffer, (slab.clone(), range.start));
        Ok(region)
    }

    fn has_own_memory(&self) -> bool {
        true
    }

    fn has_matrix_units(&self) -> bool {
        self.halves
    }

    fn upload(&mut self, region: Region) -> Result<(), DeviceError> {
        self.late.push_back(Work::Copy(region));
        self.encoded += 1;
        Ok(())
    }

    /// So short that a store's slab takes several buffers.
    fn max_buffer_len(&self) -> usize {
        4 << 20
    }

    fn write(&mut self, region: Region, bytes: &[u8]) -> Result<(), DeviceError> {
        self.host.write(region.first(bytes.len()), bytes);
        Ok(())
    }

    fn read(&mut self, region: Region, bytes: &mut [u8]) -> Result<(), DeviceError> {
        bytes.copy_from_slice(&self.host.read(region.first(bytes.len())));
        Ok(())
    }

    fn launch(&mut self, dispatch: &Launch) -> Result<(), DeviceError> {
        self.late.push_back(Work::Launch(dispatch.clone()));
        self.encoded += 1;
        Ok(())
    }

    fn commit(&mut self) -> Result<(), DeviceError> {
        Ok(())
    }

    fn wait(&mut self) -> Result<(), DeviceError> {
        self.wait_for(SyncPoint(self.encoded))
    }
}

impl Timeline for HostGpu {
    fn sync_point(&mut self) -> SyncPoint {
        SyncPoint(self.encoded)
    }

    fn completed(&mut self) -> SyncPoint {
        let before = std::mem::replace(&mut self.looked, self.encoded);
        // An error is the next wait's.
        let _ = self.wait_for(SyncPoint(before));
        SyncPoint(self.encoded - self.late.len() as u64)
    }

    fn wait_for(&mut self, mark: SyncPoint) -> Result<(), DeviceError> {
        while self.encoded - (self.late.len() as u64) < mark.0
            && let Some(work) = self.late.front().cloned()
        {
            match work {
                Work::Launch(dispatch) => self.run(&dispatch)?,
                Work::Copy(region) => self.copy(region),
            }
            self.late.pop_front();
        }
        Ok(())
    }
}

impl HostGpu {
    fn run(&mut self, dispatch: &Launch) -> Result<(), DeviceError> {
        for binding in &dispatch.bindings {
            let adopted = self.adopted.contains_key(&binding.region.buffer);
            assert!(!adopted || binding.access == BufferAccess::Read, "{} writes to weights", dispatch.kernel);
            // The kernels are told that what they read and what they write are apart.
            let others =
                dispatch.bindings.iter().filter(|other| other.access != BufferAccess::Read && *other != binding);
            for other in others {
                assert!(!other.region.overlaps(binding.region), "{}: {binding:?} and {other:?}", dispatch.kernel);
            }
        }
        self.host.try_run(dispatch).map_err(DeviceError)
    }

    fn copy(&mut self, region: Region) {
        let (slab, start) = &self.adopted[&region.buffer];
        // SAFETY: the program has promised that nobody writes these bytes until this is done.
        let bytes = unsafe { slab.bytes(start + region.offset..start + region.offset + region.len) };
        self.host.write(region, bytes);
    }
}
