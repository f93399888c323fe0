//! A [`Gpu`] that runs the kernels on the host.
//!
//! [`HostGpu`] runs launches as late as a device may: only when a caller waits for them, or asks for progress a second
//! time. A slot or a list that is overwritten too early therefore gives wrong results. Like an NVIDIA GPU, [`HostGpu`]
//! has its own memory: adopted bytes are NaN until they are uploaded.

use crate::host::Host;
use moestro_compute::device::{BufferAccess, DeviceError, Gpu, Launch, Region, Slab, SyncPoint, Timeline};
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
    /// The slab of each adopted buffer, and the offset in the slab at which the buffer starts.
    adopted: HashMap<u32, (Arc<Slab>, usize)>,
    /// Total bytes allocated by [`Gpu::allocate`], including bytes that were released.
    pub allocated: Arc<AtomicUsize>,
    /// Encoded work that has not run yet. Each item is one sync point.
    pending: VecDeque<Work>,
    encoded: u64,
    /// Number of encoded sync points at the last call of `completed`.
    last_encoded: u64,
    /// True if the device reports matrix units.
    pub halves: bool,
}

#[derive(Clone)]
enum Work {
    Launch(Launch),
    /// An upload of adopted memory.
    Copy(Region),
}

impl HostGpu {
    /// Creates a device that runs each launch once. Other tests check that kernels do not depend on the order of
    /// threads.
    pub fn new(mut host: Host) -> Self {
        host.twice = false;
        Self {
            host,
            adopted: HashMap::new(),
            allocated: Arc::default(),
            pending: VecDeque::new(),
            encoded: 0,
            last_encoded: 0,
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

    fn address(&mut self, buffer: u32) -> Result<u64, DeviceError> {
        Ok(self.host.address(buffer))
    }

    fn max_threads(&mut self, _: &str) -> Result<u32, DeviceError> {
        Ok(1024)
    }

    fn has_own_memory(&self) -> bool {
        true
    }

    fn has_matrix_units(&self) -> bool {
        self.halves
    }

    fn upload(&mut self, region: Region) -> Result<(), DeviceError> {
        self.pending.push_back(Work::Copy(region));
        self.encoded += 1;
        Ok(())
    }

    /// This is enough for a segment of expert slots.
    fn max_buffer_len(&self) -> usize {
        1 << 30
    }

    fn write(&mut self, region: Region, bytes: &[u8]) -> Result<(), DeviceError> {
        self.host.write(region.first(bytes.len()), bytes);
        Ok(())
    }

    fn read(&mut self, region: Region, bytes: &mut [u8]) -> Result<(), DeviceError> {
        bytes.copy_from_slice(&self.host.read(region.first(bytes.len())));
        Ok(())
    }

    fn launch(&mut self, launch: &Launch) -> Result<(), DeviceError> {
        self.pending.push_back(Work::Launch(launch.clone()));
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
        let before = std::mem::replace(&mut self.last_encoded, self.encoded);
        // If this fails, the next wait reports the error.
        let _ = self.wait_for(SyncPoint(before));
        SyncPoint(self.encoded - self.pending.len() as u64)
    }

    fn wait_for(&mut self, point: SyncPoint) -> Result<(), DeviceError> {
        while self.encoded - (self.pending.len() as u64) < point.0
            && let Some(work) = self.pending.front().cloned()
        {
            match work {
                Work::Launch(launch) => self.run(&launch)?,
                Work::Copy(region) => self.copy(region),
            }
            self.pending.pop_front();
        }
        Ok(())
    }
}

impl HostGpu {
    fn run(&mut self, launch: &Launch) -> Result<(), DeviceError> {
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
        self.host.try_run(launch).map_err(DeviceError)
    }

    fn copy(&mut self, region: Region) {
        let (slab, start) = &self.adopted[&region.buffer];
        // SAFETY: the caller of `upload` promised that the bytes do not change before the upload is done.
        let bytes = unsafe { slab.bytes(start + region.offset..start + region.offset + region.len) };
        self.host.write(region, bytes);
    }
}
