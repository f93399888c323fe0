//! A backend protected by a lock. The engine's thread runs passes on the backend. The prompt cache's threads read KV
//! pages between passes.

use moestro_compute::{
    device::{DeviceError, Region, Slab, SyncPoint, Timeline},
    ops::{Backend, BackendLimits, HalfBuffers, ModelPart, Op, ReservedBuffer},
};
use parking_lot::{ReentrantMutex, ReentrantMutexGuard};
use std::{
    cell::RefCell,
    ops::Range,
    sync::{Arc, Weak},
    time::Duration,
};

type Locked = ReentrantMutex<RefCell<Box<dyn Backend>>>;

/// A backend protected by a lock. Clones share the backend.
#[derive(Clone)]
pub struct SharedBackend(Arc<Locked>);

/// A reference that does not keep the backend alive.
pub struct WeakBackend(Weak<Locked>);

impl SharedBackend {
    pub fn new(backend: Box<dyn Backend>) -> Self {
        Self(Arc::new(ReentrantMutex::new(RefCell::new(backend))))
    }

    /// Locks the backend until the guard is dropped. The same thread may lock it again.
    pub fn lock(&self) -> ReentrantMutexGuard<'_, RefCell<Box<dyn Backend>>> {
        self.0.lock()
    }

    /// Waits for all submitted work, and drops its failure, which was reported already. So the next pass can succeed.
    pub fn drop_failure(&mut self) {
        let submitted = self.sync_point();
        let _ = self.wait_for(submitted);
    }

    pub fn downgrade(&self) -> WeakBackend {
        WeakBackend(Arc::downgrade(&self.0))
    }
}

impl WeakBackend {
    pub fn upgrade(&self) -> Option<SharedBackend> {
        self.0.upgrade().map(SharedBackend)
    }
}

macro_rules! forward_locked {
    ($($name:ident($($arg:ident: $type:ty),*) $(-> $out:ty)?;)*) => {
        $(fn $name(&mut self $(, $arg: $type)*) $(-> $out)? {
            self.0.lock().borrow_mut().$name($($arg),*)
        })*
    };
}

impl Timeline for SharedBackend {
    forward_locked! {
        sync_point() -> SyncPoint;
        completed() -> SyncPoint;
        wait_for(point: SyncPoint) -> Result<(), DeviceError>;
        begin_disk_wait() -> Option<Duration>;
        stay_awake();
    }
}

impl Backend for SharedBackend {
    fn limits(&self) -> BackendLimits {
        self.0.lock().borrow().limits()
    }

    fn accept(&self, part: ModelPart<'_>) -> Result<(), DeviceError> {
        self.0.lock().borrow().accept(part)
    }

    fn is_lost(&self) -> bool {
        self.0.lock().borrow().is_lost()
    }

    fn max_buffer_len(&self) -> usize {
        self.0.lock().borrow().max_buffer_len()
    }

    forward_locked! {
        check_threads(part: ModelPart<'_>) -> Result<(), DeviceError>;
        execute(op: &Op<'_>) -> Result<(), DeviceError>;
        set_half_buffers(buffers: Option<HalfBuffers>);
        begin_layers(streams: bool);
        end_layer() -> Result<(), DeviceError>;
        set_skip_flag(flag: Option<Region>);
        launches() -> u64;
        read(from: Region, into: &mut [u8]) -> Result<(), DeviceError>;
        write(to: Region, bytes: &[u8]) -> Result<(), DeviceError>;
        copy(from: Region, to: Region) -> Result<(), DeviceError>;
        flush() -> Result<(), DeviceError>;
        allocate(bytes: usize) -> Result<Region, DeviceError>;
        adopt(slab: &Arc<Slab>, range: Range<usize>) -> Result<Region, DeviceError>;
        adopt_as(buffer: ReservedBuffer, slab: &Arc<Slab>) -> Result<Region, DeviceError>;
        adopt_segments(table: ReservedBuffer, slab: &Arc<Slab>, segments: &[Range<usize>]) -> Result<(Vec<Region>, Region), DeviceError>;
        release_segment(segment: Region) -> Result<(), DeviceError>;
        restore_segment(segment: Region) -> Result<(), DeviceError>;
        mark_loaded(region: Region, content: u64) -> Result<(), DeviceError>;
        keep_gpu_awake() -> Result<(), DeviceError>;
    }
}
