//! The memory of keys and values: pages of [`PAGE`] positions of all layers, which sequences and snapshots share. A page goes
//! back to the pool when nobody holds it any more.
//!
//! A sequence writes into pages that it alone holds: those behind its last whole page. A whole page is never written again, so
//! a snapshot and whoever goes on from it hold the same one. Each sequence has a table of the pages that it holds.

use crate::model::{config::Config, state::snapshot::KvPage};
use crate::{
    device::{DeviceError, Region, Slab, SyncPoint, Timeline},
    error::ModelError,
    ops::{AttentionShape, Backend, BackendLimits, HalfBuffers, ModelPart, Op, attention::PAGE},
    plan::Plan,
};
use parking_lot::{Condvar, Mutex, ReentrantMutex, ReentrantMutexGuard};
use std::{
    cell::RefCell,
    fmt,
    ops::Range,
    sync::{Arc, Weak},
    time::Duration,
};

/// The time that a page is waited for which somebody holds for as long as he reads it.
const PATIENCE: Duration = Duration::from_secs(1);

/// A device behind a lock. A pass takes it as a whole; whoever reads pages for a file comes between two.
#[derive(Clone)]
pub(in crate::model) struct SharedBackend(Arc<ReentrantMutex<RefCell<Box<dyn Backend>>>>);

pub(in crate::model) type Whole<'a> = ReentrantMutexGuard<'a, RefCell<Box<dyn Backend>>>;

/// Keys (or values) of one layer, of all pages.
type Layer = [Region; 2];

/// All pages of a model on a device.
pub struct PagePool {
    run: Weak<ReentrantMutex<RefCell<Box<dyn Backend>>>>,
    pub(in crate::model) layers: Vec<Layer>,
    /// Bytes of a page in one of a layer's regions.
    part: usize,
    /// AttentionShape of keys (or values), each of which has [`PAGE`] rows of it.
    heads: usize,
    /// Those that nobody holds.
    free: Mutex<Vec<u32>>,
    returned: Condvar,
    count: usize,
    /// Pages of a whole context, and bytes of all that are not of the plan's context.
    context: usize,
    beyond: u64,
}

/// A page of the pool, while it is held.
pub struct PooledPage {
    pub(in crate::model) pool: Arc<PagePool>,
    pub(in crate::model) index: u32,
}

impl PooledPage {
    /// Bytes of a page.
    pub fn bytes(&self) -> usize {
        self.pool.page_bytes() as usize
    }

    /// See [`PagePool::read`].
    pub fn read(&self) -> Result<Vec<u8>, DeviceError> {
        self.pool.read(self.index, PAGE)
    }
}

impl Drop for PooledPage {
    fn drop(&mut self) {
        self.pool.free.lock().push(self.index);
        self.pool.returned.notify_all();
    }
}

impl fmt::Debug for PooledPage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "page {} of {}", self.index, self.pool.count)
    }
}

impl fmt::Debug for PagePool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} pages of {} bytes", self.count, self.page_bytes())
    }
}

impl SharedBackend {
    pub fn new(run: Box<dyn Backend>) -> Self {
        Self(Arc::new(ReentrantMutex::new(RefCell::new(run))))
    }

    /// Keeps others away until the guard goes.
    pub fn whole(&self) -> Whole<'_> {
        self.0.lock()
    }
}

macro_rules! pass_on {
    ($($name:ident($($arg:ident: $type:ty),*) $(-> $out:ty)?;)*) => {
        $(fn $name(&mut self $(, $arg: $type)*) $(-> $out)? {
            self.0.lock().borrow_mut().$name($($arg),*)
        })*
    };
}

impl Timeline for SharedBackend {
    pass_on! {
        sync_point() -> SyncPoint;
        completed() -> SyncPoint;
        wait_for(mark: SyncPoint) -> Result<(), DeviceError>;
        rest();
    }
}

impl Backend for SharedBackend {
    fn name(&self) -> String {
        self.0.lock().borrow().name()
    }

    fn limits(&self) -> BackendLimits {
        self.0.lock().borrow().limits()
    }

    fn accept(&self, part: ModelPart<'_>) -> Result<(), DeviceError> {
        self.0.lock().borrow().accept(part)
    }

    fn lost(&self) -> bool {
        self.0.lock().borrow().lost()
    }

    fn longest(&self) -> usize {
        self.0.lock().borrow().longest()
    }

    pass_on! {
        execute(op: &Op<'_>) -> Result<(), DeviceError>;
        prompt(room: Option<HalfBuffers>);
        read(from: Region, into: &mut [u8]) -> Result<(), DeviceError>;
        write(to: Region, bytes: &[u8]) -> Result<(), DeviceError>;
        copy(from: Region, to: Region) -> Result<(), DeviceError>;
        flush() -> Result<(), DeviceError>;
        allocate(bytes: usize) -> Result<Region, DeviceError>;
        adopt(slab: &Arc<Slab>, range: Range<usize>) -> Result<Region, DeviceError>;
        landed(region: Region, content: u64) -> Result<(), DeviceError>;
    }
}

impl PagePool {
    /// As many pages as `plan` has room for. They are committed as they are first written, where the system does so.
    pub(in crate::model) fn new(
        config: &Config,
        heads: &AttentionShape,
        plan: &Plan,
        run: &SharedBackend,
    ) -> Result<Arc<Self>, DeviceError> {
        let (part, layers, context) = (heads.page_bytes(), config.full_layers(), heads.pages());
        let count = plan.pages((2 * layers * part) as u64).max(context);
        let count = if layers == 0 { context } else { count };
        let beyond = ((count * 2 * layers * part) as u64).saturating_sub(plan.kv);
        let mut on = run.clone();
        let both = |_| Ok([on.allocate(count * part)?, on.allocate(count * part)?]);
        let layers = (0..layers).map(both).collect::<Result<_, DeviceError>>()?;
        let (run, free) = (Arc::downgrade(&run.0), Mutex::new((0..count as u32).rev().collect()));
        Ok(Arc::new(Self {
            run,
            layers,
            part,
            heads: heads.kv_heads,
            free,
            returned: Condvar::new(),
            count,
            context,
            beyond,
        }))
    }

    /// Pages that nobody holds.
    pub fn free(&self) -> usize {
        self.free.lock().len()
    }

    /// Bytes of a page.
    pub fn page_bytes(&self) -> u64 {
        (2 * self.layers.len() * self.part) as u64
    }

    /// Bytes of the pages that are there for snapshots.
    pub fn beyond(&self) -> u64 {
        self.beyond
    }

    /// Bytes of the pages in use, and `more`, that are more than a context has.
    pub fn over(&self, more: usize) -> u64 {
        (self.count + more).saturating_sub(self.free() + self.context) as u64 * self.page_bytes()
    }

    /// A page that nobody else holds.
    pub(in crate::model) fn take(self: &Arc<Self>) -> Result<Arc<KvPage>, ModelError> {
        let mut free = self.free.lock();
        if free.is_empty() {
            self.returned.wait_for(&mut free, PATIENCE);
        }
        let none = || ModelError::Memory(format!("all {} pages of keys and values are in use", self.count));
        let index = free.pop().ok_or_else(none)?;
        Ok(Arc::new(KvPage::Pooled(PooledPage { pool: self.clone(), index })))
    }

    /// A page with `bytes`, as [`PagePool::read`] gives them.
    pub fn put(self: &Arc<Self>, bytes: &[u8]) -> Result<Arc<KvPage>, ModelError> {
        let page = self.take()?;
        if let KvPage::Pooled(held) = &*page {
            self.write(held.index, PAGE, bytes)?;
        }
        Ok(page)
    }

    /// The first `rows` positions of a page: keys, then values, of one layer after the other, head by head.
    pub(in crate::model) fn read(&self, index: u32, rows: usize) -> Result<Vec<u8>, DeviceError> {
        let mut run = self.run()?;
        let lock = run.clone();
        let _whole = lock.whole();
        let mut out = vec![0; self.page_bytes() as usize / PAGE * rows];
        let mut rest = &mut out[..];
        for region in self.parts(index, rows) {
            let (part, behind) = std::mem::take(&mut rest).split_at_mut(region.len);
            run.read(region, part)?;
            rest = behind;
        }
        Ok(out)
    }

    /// The reverse of [`PagePool::read`].
    pub(in crate::model) fn write(&self, index: u32, rows: usize, bytes: &[u8]) -> Result<(), ModelError> {
        if bytes.len() != self.page_bytes() as usize / PAGE * rows {
            return Err(ModelError::Config("the snapshot belongs to another model".into()));
        }
        let (mut run, mut rest) = (self.run()?, bytes);
        for region in self.parts(index, rows) {
            let (part, behind) = rest.split_at(region.len);
            run.write(region, part)?;
            rest = behind;
        }
        Ok(())
    }

    fn run(&self) -> Result<SharedBackend, DeviceError> {
        self.run.upgrade().map(SharedBackend).ok_or_else(|| DeviceError("the model of these pages is gone".into()))
    }

    fn parts(&self, index: u32, rows: usize) -> impl Iterator<Item = Region> {
        let (part, row) = (self.part, self.part / PAGE);
        // As many rows of each head, of which a page has `PAGE`.
        let heads = self.heads;
        let head = row / heads;
        self.layers.iter().flatten().flat_map(move |region| {
            let first = region.part(index as usize * part, part);
            let whole = if rows == PAGE { 1 } else { heads };
            (0..whole).map(move |at| first.part(at * head * PAGE, part / whole / PAGE * rows))
        })
    }
}
