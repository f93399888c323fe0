//! The KV cache's memory: pages of [`PAGE`] positions of all layers, which sequences and snapshots share.
//!
//! A full page is never written again, so a snapshot and the sequences restored from it share its full pages. A
//! sequence writes only to the pages after its last full page. No other sequence or snapshot refers to those pages. A
//! page returns to the pool when its last reference is dropped. Each sequence has a table of its page numbers on the
//! device.

use crate::{error::ModelError, model::config::Config, plan::Plan};
use moestro_compute::{
    device::{DeviceError, Region},
    ops::{AttentionShape, Backend, IndexerShape, KvFormat},
};
use parking_lot::Mutex;
use std::{fmt, ops::Range, sync::Arc};

pub use moestro_compute::ops::attention::PAGE;

/// Sizes of a page's content in bytes, all layers together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PageSize {
    /// Number of bytes of the keys and values of one position.
    pub position: u64,
    /// Number of positions of a block of the indexers. 1 if there are no indexers.
    pub block: usize,
    /// Number of bytes of the indexers' keys of one block. 0 if there are no indexers.
    pub block_key: u64,
}

impl PageSize {
    /// Sizes without indexers.
    pub const fn without_indexer(position: u64) -> Self {
        Self { position, block: 1, block_key: 0 }
    }

    /// Number of bytes of the first `rows` positions of a page. A started block has a whole key, so the number is not
    /// linear in `rows`.
    pub fn bytes(&self, rows: usize) -> u64 {
        rows as u64 * self.position + rows.div_ceil(self.block) as u64 * self.block_key
    }
}

impl Default for PageSize {
    fn default() -> Self {
        Self::without_indexer(0)
    }
}

/// Keys and values of up to [`PAGE`] positions. The layout of the bytes is private to the model.
#[derive(Debug)]
pub enum KvPage {
    /// A copy in the CPU's memory.
    Copied(Vec<u8>),
    /// A page of the pool, on the device.
    Pooled(PooledPage),
}

impl KvPage {
    /// Number of bytes.
    #[allow(clippy::len_without_is_empty)] // No code asks whether a page is empty.
    pub fn len(&self) -> usize {
        match self {
            KvPage::Copied(bytes) => bytes.len(),
            KvPage::Pooled(page) => page.pool.page_bytes() as usize,
        }
    }

    /// The bytes of a copy. `None` for a page on the device, which [`Model::read_page`](crate::model::Model::read_page)
    /// reads.
    pub fn copied(&self) -> Option<&[u8]> {
        match self {
            KvPage::Copied(bytes) => Some(bytes),
            KvPage::Pooled(_) => None,
        }
    }
}

impl From<Vec<u8>> for KvPage {
    fn from(bytes: Vec<u8>) -> Self {
        KvPage::Copied(bytes)
    }
}

/// The error of a snapshot or page that belongs to another model or a lost device.
pub fn foreign_snapshot() -> ModelError {
    ModelError::Config("the snapshot belongs to another model".into())
}

/// A page of the pool. Dropping this value returns the page to the pool.
pub struct PooledPage {
    pool: Arc<PagePool>,
    index: u32,
}

impl PooledPage {
    /// The number of the page, if it belongs to `pool`.
    pub fn index_in(&self, pool: &Arc<PagePool>) -> Option<u32> {
        Arc::ptr_eq(&self.pool, pool).then_some(self.index)
    }
}

impl Drop for PooledPage {
    fn drop(&mut self) {
        self.pool.free.lock().push(self.index);
    }
}

impl fmt::Debug for PooledPage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "page {} of {}", self.index, self.pool.count)
    }
}

/// All KV pages of a model on a device.
pub struct PagePool {
    /// Keys and values of each attention layer, `[pages, page_part]` bytes each.
    pub layers: Vec<[Region; 2]>,
    /// Block keys of the indexer of each attention layer, page by page. Empty if there are no indexers.
    pub index: Vec<Region>,
    /// Number of bytes of one page in one region of `layers`.
    page_part: usize,
    format: KvFormat,
    /// Number of dimensions of a head.
    dim: usize,
    indexer: Option<IndexerShape>,
    size: PageSize,
    /// Number of key and value heads. A page has [`PAGE`] rows of each head.
    kv_heads: usize,
    /// Numbers of the free pages.
    free: Mutex<Vec<u32>>,
    count: usize,
    /// Number of pages of one full context.
    context_pages: usize,
    /// Size of all pages minus the memory plan's size of the KV cache ([`Plan::kv`]), in bytes.
    beyond_context: u64,
}

impl fmt::Debug for PagePool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} pages of {} bytes", self.count, self.page_bytes())
    }
}

impl PagePool {
    /// Allocates as many pages as `plan` allows. If possible, the system commits the memory of a page when the page is
    /// first written.
    pub fn new(
        config: &Config,
        shape: &AttentionShape,
        plan: &Plan,
        backend: &mut dyn Backend,
    ) -> Result<Arc<Self>, DeviceError> {
        let page_part = shape.page_bytes();
        let layers = config.full_layers();
        let context_pages = shape.pages();
        let index_part = config.indexer.map_or(0, |indexer| indexer.key_bytes(PAGE));
        let page_bytes = layers * (2 * page_part + index_part);
        let count = plan.pages(page_bytes as u64).max(context_pages);
        let count = if layers == 0 { context_pages } else { count };
        let beyond_context = ((count * page_bytes) as u64).saturating_sub(plan.kv);
        let keys_values = |_| Ok([backend.allocate(count * page_part)?, backend.allocate(count * page_part)?]);
        let layers = (0..layers).map(keys_values).collect::<Result<Vec<_>, DeviceError>>()?;
        let with_index = if index_part > 0 { layers.len() } else { 0 };
        let index =
            (0..with_index).map(|_| backend.allocate(count * index_part)).collect::<Result<Vec<_>, DeviceError>>()?;
        let size = PageSize {
            position: (2 * layers.len() * page_part / PAGE) as u64,
            block: config.indexer.map_or(1, |indexer| indexer.ratio),
            block_key: (index.len() * config.indexer.map_or(0, |indexer| indexer.key_bytes(1))) as u64,
        };
        Ok(Arc::new(Self {
            layers,
            index,
            page_part,
            format: shape.format,
            dim: shape.dim,
            indexer: config.indexer,
            size,
            kv_heads: shape.kv_heads,
            free: Mutex::new((0..count as u32).rev().collect()),
            count,
            context_pages,
            beyond_context,
        }))
    }

    /// Number of all pages.
    pub fn count(&self) -> usize {
        self.count
    }

    /// Number of free pages.
    pub fn free(&self) -> usize {
        self.free.lock().len()
    }

    /// Number of bytes of a page.
    pub fn page_bytes(&self) -> u64 {
        self.size.bytes(PAGE)
    }

    /// Sizes of the bytes that [`PagePool::read`] returns.
    pub fn page_size(&self) -> PageSize {
        self.size
    }

    /// Number of bytes of a layer's block keys in the first `rows` positions of a page.
    fn key_bytes(&self, rows: usize) -> usize {
        self.indexer.map_or(0, |indexer| indexer.key_bytes(rows))
    }

    /// Number of bytes of the pages that exist for snapshots, beyond those of one context.
    pub fn snapshot_bytes(&self) -> u64 {
        self.beyond_context
    }

    /// Number of bytes by which the pages in use plus `more` pages exceed one context.
    pub fn excess_bytes(&self, more: usize) -> u64 {
        (self.count + more).saturating_sub(self.free() + self.context_pages) as u64 * self.page_bytes()
    }

    /// Takes a free page.
    pub fn take(self: &Arc<Self>) -> Result<PooledPage, ModelError> {
        let none = || ModelError::Memory(format!("all {} pages of keys and values are in use", self.count));
        let index = self.free.lock().pop().ok_or_else(none)?;
        Ok(PooledPage { pool: self.clone(), index })
    }

    /// Takes a free page and fills it with `bytes`, as [`PagePool::read`] returns them.
    pub fn take_filled(self: &Arc<Self>, bytes: &[u8], backend: &mut dyn Backend) -> Result<Arc<KvPage>, ModelError> {
        let page = self.take()?;
        self.write(page.index, PAGE, bytes, backend)?;
        Ok(Arc::new(KvPage::Pooled(page)))
    }

    /// Reads the first `rows` positions of a page: for each layer the keys and then the values, head by head, and at
    /// the end the block keys of the indexers.
    pub fn read(&self, index: u32, rows: usize, backend: &mut dyn Backend) -> Result<Vec<u8>, DeviceError> {
        let mut out = vec![0; self.size.bytes(rows) as usize];
        let mut rest = &mut out[..];
        for region in self.regions(index, rows) {
            let (part, after) = std::mem::take(&mut rest).split_at_mut(region.len);
            backend.read(region, part)?;
            rest = after;
        }
        Ok(out)
    }

    /// Writes bytes that [`PagePool::read`] returned to the first `rows` positions of a page.
    pub fn write(&self, index: u32, rows: usize, bytes: &[u8], backend: &mut dyn Backend) -> Result<(), ModelError> {
        if bytes.len() as u64 != self.size.bytes(rows) {
            return Err(foreign_snapshot());
        }
        let mut rest = bytes;
        for region in self.regions(index, rows) {
            let (part, after) = rest.split_at(region.len);
            backend.write(region, part)?;
            rest = after;
        }
        Ok(())
    }

    /// The regions of the first `rows` positions of a page: one region for each layer if the page is full, otherwise
    /// one or two for each head. Includes the keys of the blocks that are closed there.
    fn regions(&self, index: u32, rows: usize) -> impl Iterator<Item = Region> {
        let page_part = self.page_part;
        let heads = if rows == PAGE { 1 } else { self.kv_heads };
        let whole = [0..page_part, 0..0];
        let ranges = if rows == PAGE { whole } else { self.format.row_ranges(self.dim, PAGE, 0, rows) };
        let index_part = self.key_bytes(PAGE);
        let index_rows = self.key_bytes(rows);
        let index_page = move |region: &Region| region.part(index as usize * index_part, index_rows);
        let keys_values = self.layers.iter().flatten().flat_map(move |region| {
            let page = region.part(index as usize * page_part, page_part);
            let ranges = ranges.clone();
            (0..heads).flat_map(move |head| {
                let part = move |range: Range<usize>| page.part(head * (page_part / heads) + range.start, range.len());
                ranges.clone().into_iter().filter(|range| !range.is_empty()).map(part)
            })
        });
        keys_values.chain(self.index.iter().map(index_page))
    }
}
