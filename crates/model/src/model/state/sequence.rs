//! The state of one sequence, which is in the device's memory and is updated in place.
//!
//! Full-attention layers have keys and values in pages of the pool. Delta nets have a convolution and a recurrent state
//! of fixed size. This fixed part is an *arena*. The next sequence reuses the arena, so starting a sequence allocates
//! nothing.

use super::{
    kv_pages::{KvPage, PAGE, PagePool, foreign_snapshot},
    last_tokens::LastTokens,
    pass_ahead::PassAhead,
    rollback::{DeltaState, MAX_VERIFY_ROWS, append_region},
    row_ring::{KeptRows, RowRing},
    snapshot::Snapshot,
};
use crate::{
    error::ModelError,
    model::{SequenceState, config::Config},
};
use moestro_compute::{
    device::{DeviceError, Region},
    ops::{
        AttentionShape, Backend, BackendLimits, IndexCache, KvBits, KvCache, KvFormat, RecentRing,
        attention::{RECENT, recent_start},
    },
};
use parking_lot::Mutex;
use std::{ops::Range, sync::Arc};

/// Number of bytes of the position `next` at the end of a snapshot's state.
pub const NEXT_BYTES: usize = 8;
/// Maximum number of rows that one call writes to a ring.
pub const MAX_RING_BLOCK: usize = 2048;

/// One layer's state.
#[derive(Debug, Clone, Copy)]
pub enum LayerState {
    /// The KV cache, with keys after norm and RoPE, and the cache of the indexer. The latter is empty without an
    /// indexer.
    Attention(KvCache, IndexCache),
    DeltaNet(DeltaState),
}

impl LayerState {
    /// The states of sequences `0..=number` that share these buffers. Each region holds the states of all these
    /// sequences. `self` must be the state of sequence `number`.
    pub fn up_to(&self, number: usize) -> Self {
        let all = |region: Region| up_to(region, number);
        match *self {
            LayerState::Attention(cache, index) => LayerState::Attention(
                KvCache { table: all(cache.table), recent: cache.recent.map(all), ..cache },
                IndexCache { recent: all(index.recent), ..index },
            ),
            LayerState::DeltaNet(delta) => LayerState::DeltaNet(DeltaState {
                conv: all(delta.conv),
                recurrent: all(delta.recurrent),
                replay: None,
            }),
        }
    }
}

/// The regions of sequences `0..=number`, which share a buffer. `region` must be that of sequence `number`.
fn up_to(region: Region, number: usize) -> Region {
    Region { offset: region.offset - number * region.len, len: (number + 1) * region.len, ..region }
}

/// The memory of a sequence except its KV pages.
#[derive(Debug, Default)]
pub struct Arena {
    /// Index of this arena among the arenas that share its buffers.
    number: usize,
    layers: Vec<LayerState>,
    rings: Rings,
    /// The page table of the sequence, which the device reads.
    table: Region,
}

impl Arena {
    /// Arena `number`, counted from 0, of the `count` arenas that share these buffers.
    fn part(number: usize, count: usize, layers: &[LayerState], rings: &Rings, table: Region) -> Self {
        let part = |region: Region| region.part(number * (region.len / count), region.len / count);
        let ring = |ring: &RowRing| RowRing { rows: part(ring.rows), ..*ring };
        let layer = |layer: &LayerState| match *layer {
            LayerState::Attention(cache, index) => LayerState::Attention(
                KvCache { table: part(cache.table), recent: cache.recent.map(part), ..cache },
                IndexCache { recent: part(index.recent), ..index },
            ),
            LayerState::DeltaNet(delta) => {
                let conv = part(delta.conv);
                let recurrent = part(delta.recurrent);
                LayerState::DeltaNet(DeltaState { conv, recurrent, ..delta })
            }
        };
        let [all, ngrams] = [&rings.all, &rings.ngrams].map(|rings| rings.iter().map(ring).collect());
        let layers = layers.iter().map(layer).collect();
        Self { number, layers, rings: Rings { all, ngrams }, table: part(table) }
    }
}

/// The ring buffers of a sequence.
#[derive(Debug, Clone, Default)]
pub struct Rings {
    /// All rings, in order of layers. Snapshots use the same order.
    all: Vec<RowRing>,
    /// For each n-gram table, the inputs of its convolution.
    pub ngrams: Vec<RowRing>,
}

impl Rings {
    /// [`Rings::ngrams`] of sequences `0..=number` that share buffers. `self` must be the rings of sequence `number`.
    pub fn ngrams_up_to(&self, number: usize) -> Vec<RowRing> {
        self.ngrams.iter().map(|ring| RowRing { rows: up_to(ring.rows, number), ..*ring }).collect()
    }
}

/// Arenas of sequences that have ended.
pub type FreeArenas = Arc<Mutex<ArenaList>>;

#[derive(Debug)]
pub struct ArenaList {
    free: Vec<Arena>,
    /// Number of arenas in the next allocation. These arenas share buffers, so that a GPU can compute rows of different
    /// sequences in one operation.
    next: usize,
}

impl ArenaList {
    /// Creates an empty list. The first `together` arenas share buffers. Each later arena has its own buffers.
    pub fn new(together: usize) -> FreeArenas {
        Arc::new(Mutex::new(Self { free: Vec::new(), next: together.max(1) }))
    }

    /// Takes the oldest free arena: the arena with the lowest buffer number and, within that buffer, the lowest number.
    fn take(&mut self) -> Option<Arena> {
        let oldest = (0..self.free.len()).min_by_key(|index| {
            let arena = &self.free[*index];
            (arena.table.buffer, arena.number)
        })?;
        Some(self.free.swap_remove(oldest))
    }
}

/// A sequence of a [`Qwen`](crate::model::Qwen). Only rows of the last verify pass can be rejected, because a delta net
/// keeps no older history.
#[derive(Debug)]
pub struct QwenState {
    /// Number of tokens in the sequence.
    pub len: usize,
    /// Position of the next text token. Smaller than `len` if the sequence has images.
    pub next: usize,
    /// Number of rows in the last pass if it was a verify pass, otherwise 0.
    pub verified: usize,
    /// The last token's pass, if the token was evaluated ahead. `len` and `next` include this token.
    pub ahead: Option<Arc<PassAhead>>,
    pub layers: Vec<LayerState>,
    pub rings: Rings,
    /// The last tokens, for the n-gram tables.
    pub tokens: LastTokens,
    /// Number of last tokens that a snapshot keeps for the n-gram tables.
    kept_tokens: usize,
    /// Index of this sequence's arena among the arenas that share its buffers.
    pub number: usize,
    table: Region,
    /// Pages in order of positions. Only pages that are full at `len` may be shared with snapshots and other sequences.
    pages: Vec<Arc<KvPage>>,
    pool: Arc<PagePool>,
    /// Sizes of the attention layers and the format of their keys and values.
    shape: AttentionShape,
    free_arenas: FreeArenas,
}

/// Returns the sizes of the attention layers and the format of their KV cache: the format that the device prefers, or a
/// format with fewer `bits`. The cache holds `context` positions, of which one pass writes at most `rows`.
pub fn kv_shape(config: &Config, limits: &BackendLimits, bits: KvBits, context: usize, rows: usize) -> AttentionShape {
    let shape = AttentionShape { context, ..config.attention };
    let Some(quantized) = bits.format() else { return AttentionShape { format: limits.kv_format, ..shape } };
    // The ring of recent positions is so large that a pass overwrites no position that a snapshot inside the pass, or
    // the rejection of its rows, still needs.
    let capacity = (rows + 2 * RECENT).next_multiple_of(RECENT);
    AttentionShape { format: quantized, recent: Some(RecentRing { capacity, format: limits.recent_format }), ..shape }
}

/// Number of bytes of one token in all attention layers: its keys and values, and its part of the block keys.
pub fn kv_bytes_per_token(config: &Config, format: KvFormat) -> u64 {
    let index = config.indexer.map_or(0, |indexer| indexer.key_bytes(PAGE).div_ceil(PAGE));
    keys_and_values(config, format) + (config.full_layers() * index) as u64
}

/// Number of bytes of the keys and values of one token in all layers.
fn keys_and_values(config: &Config, format: KvFormat) -> u64 {
    let a = &config.attention;
    (config.full_layers() * 2 * a.kv_heads * format.row_bytes(a.dim)) as u64
}

/// For each ring: its number of rows, floats per row, and the rows that snapshots keep.
fn ring_sizes(config: &Config, block: usize) -> Vec<(usize, usize, KeptRows)> {
    let mut sizes = Vec::new();
    // A verify pass may split its rows into several calls of the mixer, and may reject all of its rows except the
    // first.
    let block = block.max(MAX_VERIFY_ROWS);
    for (layer, full) in config.full.iter().enumerate() {
        if let Some(ngram) = config.ngrams.iter().find(|ngram| ngram.layer == layer) {
            let history = ngram.history();
            sizes.push((block + history, config.residual_width(), KeptRows::Last(history)));
        }
        if let Some(indexer) = config.indexer.filter(|_| *full) {
            sizes.push((block + indexer.ratio, indexer.recent_width(), KeptRows::OpenBlock(indexer.ratio)));
        }
    }
    sizes
}

/// Number of bytes of the rings and the last tokens: in a sequence, and in a snapshot. `block` is the maximum number of
/// rows in one call of a mixer.
pub fn ring_bytes(config: &Config, block: usize) -> [u64; 2] {
    let mut bytes = [0, kept_tokens(config) as u64 * 4];
    for (capacity, width, keep) in ring_sizes(config, block) {
        bytes[0] += (capacity * width * 4) as u64;
        bytes[1] += RowRing { rows: Region::default(), capacity, width, keep }.snapshot_bytes() as u64;
    }
    bytes
}

/// Number of tokens before a position that its n-grams depend on.
fn kept_tokens(config: &Config) -> usize {
    config.ngrams.iter().map(|ngram| ngram.size - 1).max().unwrap_or(0)
}

/// Number of bytes of the recent positions in a snapshot of a cache with 8 or 4 bits. Snapshots store recent positions
/// in the format of the ring.
pub fn recent_snapshot_bytes(config: &Config, shape: &AttentionShape) -> u64 {
    shape.recent.map_or(0, |recent| 2 * RECENT as u64 * keys_and_values(config, recent.format))
}

/// Number of bytes of the states of all delta nets in one sequence.
pub fn delta_bytes(config: &Config) -> u64 {
    let d = &config.delta;
    let layer = d.value_heads * d.value_dim * d.key_dim + (d.conv_width - 1) * d.channels();
    ((config.layers - config.full_layers()) * layer * 4) as u64
}

impl QwenState {
    /// Starts an empty sequence.
    pub fn new(
        config: &Config,
        shape: AttentionShape,
        pool: &Arc<PagePool>,
        free_arenas: &FreeArenas,
        backend: &mut dyn Backend,
    ) -> Result<Self, DeviceError> {
        let mut state = Self::uninitialised(config, shape, pool, free_arenas, backend)?;
        for delta in state.delta_states() {
            delta.reset();
            for region in delta.regions() {
                backend.write(region, &vec![0; region.len])?;
            }
        }
        Ok(state)
    }

    /// Allocates a sequence whose delta-net states are undefined. The caller clears them or restores a snapshot.
    pub fn uninitialised(
        config: &Config,
        shape: AttentionShape,
        pool: &Arc<PagePool>,
        free_arenas: &FreeArenas,
        backend: &mut dyn Backend,
    ) -> Result<Self, DeviceError> {
        let reused = free_arenas.lock().take();
        let Arena { number, layers, rings, table } = match reused {
            Some(arena) => arena,
            None => {
                let list = &mut *free_arenas.lock();
                list.free = allocate(config, &shape, pool, list.next, backend)?;
                list.next = 1;
                list.take().ok_or_else(|| DeviceError::Failed("no free state for another sequence".into()))?
            }
        };
        let pages = Vec::new();
        let pool = pool.clone();
        let free_arenas = free_arenas.clone();
        let tokens = LastTokens::default();
        let kept_tokens = kept_tokens(config);
        let len = 0;
        let next = 0;
        let verified = 0;
        let ahead = None;
        Ok(Self {
            len,
            next,
            verified,
            ahead,
            layers,
            rings,
            tokens,
            kept_tokens,
            number,
            table,
            pages,
            pool,
            shape,
            free_arenas,
        })
    }

    /// True if the states of both sequences are in the same buffers.
    pub fn shares_buffers(&self, other: &Self) -> bool {
        self.table.buffer == other.table.buffer
    }

    /// Takes the pages that `tokens` more tokens need.
    pub fn reserve_pages(&mut self, tokens: usize, backend: &mut dyn Backend) -> Result<(), ModelError> {
        let first = self.pages.len();
        let missing = self.missing_pages(tokens);
        for _ in 0..missing {
            self.pages.push(Arc::new(KvPage::Pooled(self.pool.take()?)));
        }
        self.write_table(first, backend)
    }

    /// Writes the numbers of the pages from `first` on to the page table on the device.
    fn write_table(&self, first: usize, backend: &mut dyn Backend) -> Result<(), ModelError> {
        let numbers: Vec<u32> = self.pages[first..].iter().filter_map(|page| self.page_index(page)).collect();
        let at = self.table.part(first * 4, numbers.len() * 4);
        if numbers.is_empty() { Ok(()) } else { Ok(backend.write_words(at, &numbers)?) }
    }

    /// The number of a page, if it belongs to the pool of this sequence.
    fn page_index(&self, page: &KvPage) -> Option<u32> {
        match page {
            KvPage::Pooled(page) => page.index_in(&self.pool),
            KvPage::Copied(_) => None,
        }
    }

    /// Takes a snapshot of the first `len` tokens. `next` is the position after these tokens. `fixed` has the states of
    /// the delta nets and the kept rows of the rings after these tokens.
    pub fn snapshot(
        &mut self,
        len: usize,
        next: usize,
        fixed: Vec<u8>,
        backend: &mut dyn Backend,
    ) -> Result<Snapshot, DeviceError> {
        let Self { layers, shape, .. } = self;
        let mut state = fixed;
        let tokens = self.tokens.before(len, self.kept_tokens);
        // `u32::MAX` marks positions before the start, which have no token.
        let missing = std::iter::repeat_n(u32::MAX, self.kept_tokens - tokens.len());
        state.extend(missing.chain(tokens.iter().copied()).flat_map(u32::to_le_bytes));
        // The state is padded, so that snapshots have the same size at every position.
        let size = state.len() + recent_bytes(layers, shape);
        recent_regions(layers, shape, recent_start(len)..len)
            .try_for_each(|region| append_region(backend, region, &mut state))?;
        state.resize(size, 0);
        state.extend((next as u64).to_le_bytes());
        let mut pages = self.pages[..len / PAGE].to_vec();
        if let Some(last) = self.pages.get(len / PAGE).filter(|_| !len.is_multiple_of(PAGE)) {
            let index = self.page_index(last).unwrap_or_default();
            pages.push(Arc::new(KvPage::Copied(self.pool.read(index, len % PAGE, backend)?)));
        }
        Ok(Snapshot { len, pages, state: Arc::new(state) })
    }

    pub fn delta_states(&mut self) -> impl Iterator<Item = &mut DeltaState> {
        self.layers.iter_mut().filter_map(|layer| match layer {
            LayerState::DeltaNet(delta) => Some(delta),
            LayerState::Attention(..) => None,
        })
    }

    /// Reads the states of the delta nets and the kept rows of the rings. No replay may be pending, so that the states
    /// include all rows.
    pub fn fixed_bytes(&self, backend: &mut dyn Backend) -> Result<Vec<u8>, DeviceError> {
        let mut out = Vec::new();
        delta_regions(&self.layers).try_for_each(|region| append_region(backend, region, &mut out))?;
        self.rings.all.iter().try_for_each(|ring| ring.append_bytes(self.len, backend, &mut out))?;
        Ok(out)
    }

    /// Restores `snapshot` into this sequence. Full pages of the same pool are shared, all others are copied.
    pub fn restore(&mut self, snapshot: &Snapshot, backend: &mut dyn Backend) -> Result<(), ModelError> {
        self.pages.clear();
        if snapshot.pages.len() != snapshot.len.div_ceil(PAGE) {
            return Err(foreign_snapshot());
        }
        for (index, page) in snapshot.pages.iter().enumerate() {
            let rows = PAGE.min(snapshot.len - index * PAGE);
            let page = match self.page_index(page) {
                Some(_) if rows == PAGE => page.clone(),
                _ => {
                    let own = Arc::new(KvPage::Pooled(self.pool.take()?));
                    let bytes = page.copied().ok_or_else(foreign_snapshot)?;
                    self.pool.write(self.page_index(&own).unwrap_or_default(), rows, bytes, backend)?;
                    own
                }
            };
            self.pages.push(page);
        }
        self.write_table(0, backend)?;
        let Self { layers, shape, .. } = self;
        let mut bytes = &snapshot.state[..];
        for region in delta_regions(layers) {
            let part = bytes.split_off(..region.len).ok_or_else(foreign_snapshot)?;
            backend.write(region, part)?;
        }
        for ring in &self.rings.all {
            let part = bytes.split_off(..ring.snapshot_bytes()).ok_or_else(foreign_snapshot)?;
            ring.restore(snapshot.len, part, backend)?;
        }
        let tokens = bytes.split_off(..4 * self.kept_tokens).ok_or_else(foreign_snapshot)?;
        let tokens = tokens.as_chunks().0.iter().map(|word| u32::from_le_bytes(*word));
        self.tokens = LastTokens::ending_at(snapshot.len, tokens.filter(|token| *token != u32::MAX).collect());
        for region in recent_regions(layers, shape, recent_start(snapshot.len)..snapshot.len) {
            let part = bytes.split_off(..region.len).ok_or_else(foreign_snapshot)?;
            backend.write(region, part)?;
        }
        self.delta_states().for_each(DeltaState::reset);
        let next = snapshot.state.last_chunk::<NEXT_BYTES>().ok_or_else(foreign_snapshot)?;
        let next = u64::from_le_bytes(*next);
        if next > snapshot.len as u64 {
            return Err(foreign_snapshot());
        }
        self.next = next as usize;
        self.len = snapshot.len;
        self.verified = 0;
        Ok(())
    }
}

impl SequenceState for QwenState {
    fn reject(&mut self, rows: usize) -> Result<(), ModelError> {
        if rows >= self.verified {
            return Err(ModelError::Config(format!("cannot reject {rows} rows of a verify of {}", self.verified)));
        }
        self.delta_states().for_each(|delta| delta.reject(rows));
        self.verified = 0;
        self.len -= rows;
        self.next -= rows;
        Ok(())
    }

    fn ahead(&self) -> Option<u32> {
        self.ahead.as_ref().map(|pass| pass.id)
    }

    fn take_ahead(&mut self) -> Option<u32> {
        self.ahead.take().map(|pass| pass.id)
    }

    fn missing_pages(&self, tokens: usize) -> usize {
        (self.len + tokens).min(self.shape.context).div_ceil(PAGE).saturating_sub(self.pages.len())
    }

    /// A snapshot shares all full pages.
    fn shared_positions(&self) -> usize {
        usize::MAX
    }
}

impl Drop for QwenState {
    fn drop(&mut self) {
        let layers = std::mem::take(&mut self.layers);
        let rings = std::mem::take(&mut self.rings);
        self.free_arenas.lock().free.push(Arena { number: self.number, layers, rings, table: self.table });
    }
}

/// The regions of recent positions in the rings of a quantized cache. `positions` starts at a multiple of [`RECENT`].
fn recent_regions(
    layers: &[LayerState],
    shape: &AttentionShape,
    positions: Range<usize>,
) -> impl Iterator<Item = Region> {
    let heads = shape.kv_heads;
    let ring = shape.recent;
    let dim = shape.dim;
    let rings = kv_caches(layers).flat_map(move |cache| ring.map(|ring| (ring, cache.recent)));
    rings.flat_map(|(ring, caches)| caches.map(|cache| (ring, cache))).flat_map(move |(ring, cache)| {
        let positions = positions.clone();
        let RecentRing { capacity, format } = ring;
        (0..heads).flat_map(move |head| {
            let end = positions.end;
            let parts = move |first: usize| {
                let ranges = format.row_ranges(dim, capacity, first % capacity, (end - first).min(RECENT));
                let block = head * capacity * format.row_bytes(dim);
                ranges.map(|range| cache.part(block + range.start, range.len())).into_iter()
            };
            positions.clone().step_by(RECENT).flat_map(parts).filter(|part| part.len > 0)
        })
    })
}

/// Maximum total length of [`recent_regions`] in bytes.
fn recent_bytes(layers: &[LayerState], shape: &AttentionShape) -> usize {
    let row = shape.recent.map_or(0, |ring| ring.format.row_bytes(shape.dim));
    kv_caches(layers).count() * 2 * shape.kv_heads * 2 * RECENT * row
}

fn kv_caches(layers: &[LayerState]) -> impl Iterator<Item = &KvCache> {
    layers.iter().filter_map(|layer| match layer {
        LayerState::Attention(cache, _) => Some(cache),
        LayerState::DeltaNet(_) => None,
    })
}

fn delta_regions(layers: &[LayerState]) -> impl Iterator<Item = Region> {
    let regions = |layer: &LayerState| match layer {
        LayerState::DeltaNet(delta) => Some(delta.regions()),
        LayerState::Attention(..) => None,
    };
    layers.iter().filter_map(regions).flatten()
}

/// Allocates arenas that share buffers.
fn allocate(
    config: &Config,
    shape: &AttentionShape,
    pool: &PagePool,
    count: usize,
    backend: &mut dyn Backend,
) -> Result<Vec<Arena>, DeviceError> {
    let d = &config.delta;
    let table = backend.allocate(count * shape.pages() * 4)?;
    let ring = count * shape.recent_bytes();
    let mut pages = pool.layers.iter();
    let mut index_pages = pool.index.iter();
    let mut rings = Rings::default();
    for (capacity, width, keep) in ring_sizes(config, backend.limits().max_mixer_rows.min(MAX_RING_BLOCK)) {
        let ring = RowRing { rows: backend.allocate(count * capacity * width * 4)?, capacity, width, keep };
        rings.all.push(ring);
        if matches!(keep, KeptRows::Last(_)) {
            rings.ngrams.push(ring);
        }
    }
    let mut recent_keys = rings.all.iter().filter(|ring| matches!(ring.keep, KeptRows::OpenBlock(_)));
    let layer = |full: &bool| {
        Ok(if *full {
            let mut recent = [Region::default(); 2];
            if ring > 0 {
                recent = [backend.allocate(ring)?, backend.allocate(ring)?];
            }
            let [keys, values] = *pages.next().ok_or_else(|| DeviceError::Failed("a layer has no KV pages".into()))?;
            let block_keys = index_pages.next().copied().unwrap_or_default();
            let index = recent_keys.next().map_or_else(IndexCache::default, |ring| IndexCache {
                keys: block_keys,
                recent: ring.rows,
                capacity: ring.capacity,
            });
            LayerState::Attention(KvCache { keys, values, table, recent }, index)
        } else {
            LayerState::DeltaNet(DeltaState {
                conv: backend.allocate(count * (d.conv_width - 1) * d.channels() * 4)?,
                recurrent: backend.allocate(count * d.values() * d.key_dim * 4)?,
                replay: None,
            })
        })
    };
    let layers = config.full.iter().map(layer).collect::<Result<Vec<_>, DeviceError>>()?;
    Ok((0..count).map(|number| Arena::part(number, count, &layers, &rings, table)).collect())
}
