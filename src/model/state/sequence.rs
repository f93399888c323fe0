//! The state of one sequence: keys and values of the full-attention layers, convolution and delta state of the others.
//! Everything lies on the device and is updated in place.

use crate::model::{
    SequenceState,
    config::Config,
    state::kv_pages::PagePool,
    state::rollback::DeltaState,
    state::snapshot::{KvPage, PAGE, Snapshot},
};
use crate::{
    device::{DeviceError, Region},
    error::ModelError,
    ops::{
        AttentionShape, Backend, KvBits, KvCache, KvFormat, RecentRing,
        attention::{RECENT, recent_start},
    },
};
use parking_lot::Mutex;
use std::{ops::Range, sync::Arc};

/// One layer's memory.
#[derive(Debug, Clone, Copy)]
pub enum LayerState {
    /// Keys are after norm and rotation.
    Attention(KvCache),
    DeltaNet(DeltaState),
}

/// The memory of a sequence beside its pages, which is its own.
#[derive(Debug, Default)]
pub struct Arena {
    layers: Vec<LayerState>,
    /// The numbers of its pages, as the device looks at them.
    table: Region,
}

/// The memory of sequences that are over: the next one begins there. So starting one neither allocates nor frees.
pub type Arenas = Arc<Mutex<Vec<Arena>>>;

/// A sequence's memory. It cannot be rewound further than a verify: the delta layers keep no other history.
#[derive(Debug)]
pub struct QwenState {
    /// Tokens seen.
    pub len: usize,
    /// Rows of the last verify, if nothing has come behind it.
    pub(in crate::model) tried: usize,
    pub(in crate::model) layers: Vec<LayerState>,
    table: Region,
    /// In order. Behind the last whole page before `len` nobody else holds one.
    pages: Vec<Arc<KvPage>>,
    pool: Arc<PagePool>,
    /// The form of keys and values.
    shape: AttentionShape,
    arenas: Arenas,
}

/// The form of keys and values: `format`, which is the device's, or fewer `bits`; for `context` positions, of which `rows` are
/// written at once at most.
pub fn heads(config: &Config, format: KvFormat, bits: KvBits, context: usize, rows: usize) -> AttentionShape {
    let shape = AttentionShape { context, ..config.attention };
    let Some(few) = bits.format() else { return AttentionShape { format, ..shape } };
    // Whatever of a pass is marked or taken back, the recent are still there.
    let room = (rows + 2 * RECENT).next_multiple_of(RECENT);
    AttentionShape { format: few, recent: Some(RecentRing { room, format }), ..shape }
}

impl QwenState {
    /// An empty state.
    pub fn new(
        config: &Config,
        shape: AttentionShape,
        pool: &Arc<PagePool>,
        arenas: &Arenas,
        run: &mut dyn Backend,
    ) -> Result<Self, DeviceError> {
        let mut state = Self::room(config, shape, pool, arenas, run)?;
        for net in state.nets() {
            net.clear();
            for region in [net.conv, net.heads] {
                run.write(region, &vec![0; region.len])?;
            }
        }
        Ok(state)
    }

    /// A state that is still to become something.
    pub fn room(
        config: &Config,
        shape: AttentionShape,
        pool: &Arc<PagePool>,
        arenas: &Arenas,
        run: &mut dyn Backend,
    ) -> Result<Self, DeviceError> {
        let used = arenas.lock().pop();
        let Arena { layers, table } = match used {
            Some(arena) => arena,
            None => allocate(config, &shape, pool, run)?,
        };
        let (pages, pool, arenas) = (Vec::new(), pool.clone(), arenas.clone());
        Ok(Self { len: 0, tried: 0, layers, table, pages, pool, shape, arenas })
    }

    /// Sees to it that there are pages for `tokens` more.
    pub fn make_room(&mut self, tokens: usize, run: &mut dyn Backend) -> Result<(), ModelError> {
        let (had, lacks) = (self.pages.len(), self.missing_pages(tokens));
        for _ in 0..lacks {
            self.pages.push(self.pool.take()?);
        }
        self.show(had, run)
    }

    /// Writes the numbers of the pages from `first` on for the device.
    fn show(&self, first: usize, run: &mut dyn Backend) -> Result<(), ModelError> {
        let numbers: Vec<u32> = self.pages[first..].iter().filter_map(|page| self.place(page)).collect();
        let at = self.table.part(first * 4, numbers.len() * 4);
        if numbers.is_empty() { Ok(()) } else { Ok(run.write_words(at, &numbers)?) }
    }

    /// A page's number, if it is one of this state's pool.
    fn place(&self, page: &KvPage) -> Option<u32> {
        match page {
            KvPage::Pooled(held) if Arc::ptr_eq(&held.pool, &self.pool) => Some(held.index),
            _ => None,
        }
    }

    /// A snapshot at `len`, behind what is written of it, where the other layers' states were `fixed`.
    pub fn snapshot(&mut self, len: usize, mut fixed: Vec<u8>, run: &mut dyn Backend) -> Result<Snapshot, DeviceError> {
        let Self { layers, shape, .. } = self;
        // As many bytes wherever it is taken.
        let whole = fixed.len() + recent_bytes(layers, shape);
        recent(layers, shape, recent_start(len)..len).try_for_each(|region| append(run, region, &mut fixed))?;
        fixed.resize(whole, 0);
        let mut pages = self.pages[..len / PAGE].to_vec();
        if let Some(last) = self.pages.get(len / PAGE).filter(|_| !len.is_multiple_of(PAGE)) {
            let number = self.place(last).unwrap_or_default();
            pages.push(Arc::new(KvPage::Copied(self.pool.read(number, len % PAGE)?)));
        }
        Ok(Snapshot { len, pages, state: Arc::new(fixed) })
    }

    /// The delta nets' memory.
    pub(in crate::model) fn nets(&mut self) -> impl Iterator<Item = &mut DeltaState> {
        nets(&mut self.layers)
    }

    /// The delta and convolution states, which have taken in all rows.
    pub fn fixed(&self, run: &mut dyn Backend) -> Result<Vec<u8>, DeviceError> {
        let mut out = Vec::new();
        fixed(&self.layers).try_for_each(|region| append(run, region, &mut out))?;
        Ok(out)
    }

    /// Makes this the sequence that `snapshot` was taken of. Whole pages are shared with it, if they are of the same pool.
    pub fn restore(&mut self, snapshot: &Snapshot, run: &mut dyn Backend) -> Result<(), ModelError> {
        self.pages.clear();
        if snapshot.pages.len() != snapshot.len.div_ceil(PAGE) {
            return Err(foreign());
        }
        for (index, page) in snapshot.pages.iter().enumerate() {
            let rows = PAGE.min(snapshot.len - index * PAGE);
            let ours = match self.place(page) {
                Some(_) if rows == PAGE => page.clone(),
                _ => {
                    let own = self.pool.take()?;
                    self.pool.write(self.place(&own).unwrap_or_default(), rows, &page.read()?)?;
                    own
                }
            };
            self.pages.push(ours);
        }
        self.show(0, run)?;
        let Self { layers, shape, .. } = self;
        let mut bytes = &snapshot.state[..];
        let recent = recent(layers, shape, recent_start(snapshot.len)..snapshot.len);
        fixed(layers).chain(recent).try_for_each(|region| take(run, region, &mut bytes))?;
        self.nets().for_each(DeltaState::clear);
        (self.len, self.tried) = (snapshot.len, 0);
        Ok(())
    }

    /// Bytes of keys and values of one token, all layers.
    pub fn kv_bytes(config: &Config, format: KvFormat) -> u64 {
        let a = &config.attention;
        (config.full_layers() * 2 * a.kv_heads * format.row_bytes(a.dim)) as u64
    }

    /// Bytes of the recent positions in a snapshot.
    pub fn recent_bytes(config: &Config, shape: &AttentionShape) -> u64 {
        shape.recent.map_or(0, |recent| 2 * RECENT as u64 * Self::kv_bytes(config, recent.format))
    }

    /// Bytes of everything else that does not grow with the context.
    pub fn fixed_bytes(config: &Config) -> u64 {
        let d = &config.delta;
        let layer = d.value_heads * d.value_dim * d.key_dim + (d.conv_width - 1) * d.channels();
        ((config.layers - config.full_layers()) * layer * 4) as u64
    }
}

impl SequenceState for QwenState {
    fn reject(&mut self, rows: usize) -> Result<(), ModelError> {
        if rows >= self.tried {
            return Err(ModelError::Config(format!("{rows} rows cannot be taken back")));
        }
        self.nets().for_each(|net| net.take_back(rows));
        self.tried = 0;
        self.len -= rows;
        Ok(())
    }

    fn missing_pages(&self, tokens: usize) -> usize {
        (self.len + tokens).min(self.shape.context).div_ceil(PAGE).saturating_sub(self.pages.len())
    }

    /// Whole pages are always shared.
    fn shared_positions(&self) -> usize {
        usize::MAX
    }
}

impl Drop for QwenState {
    fn drop(&mut self) {
        let (layers, table) = (std::mem::take(&mut self.layers), self.table);
        self.arenas.lock().push(Arena { layers, table });
    }
}

/// The regions of keys and values that are kept in 16 bits beside fewer; the first position is a multiple of [`RECENT`].
fn recent(layers: &[LayerState], shape: &AttentionShape, positions: Range<usize>) -> impl Iterator<Item = Region> {
    let (heads, ring) = (shape.kv_heads, shape.recent);
    let row = ring.map_or(0, |ring| ring.format.row_bytes(shape.dim));
    caches(layers).filter(move |_| ring.is_some()).flat_map(|cache| cache.recent).flat_map(move |cache| {
        let (positions, room) = (positions.clone(), ring.map_or(1, |ring| ring.room));
        (0..heads).flat_map(move |head| {
            let end = positions.end;
            let part =
                move |first: usize| cache.part((head * room + first % room) * row, (end - first).min(RECENT) * row);
            positions.clone().step_by(RECENT).map(part)
        })
    })
}

/// Bytes of as many of the recent as there can be.
fn recent_bytes(layers: &[LayerState], shape: &AttentionShape) -> usize {
    let row = shape.recent.map_or(0, |ring| ring.format.row_bytes(shape.dim));
    caches(layers).count() * 2 * shape.kv_heads * 2 * RECENT * row
}

fn caches(layers: &[LayerState]) -> impl Iterator<Item = &KvCache> {
    layers.iter().filter_map(|layer| match layer {
        LayerState::Attention(cache) => Some(cache),
        LayerState::DeltaNet(_) => None,
    })
}

fn nets(layers: &mut [LayerState]) -> impl Iterator<Item = &mut DeltaState> {
    layers.iter_mut().filter_map(|layer| match layer {
        LayerState::DeltaNet(net) => Some(net),
        LayerState::Attention(_) => None,
    })
}

/// The regions of the convolution and delta states, which do not grow.
fn fixed(layers: &[LayerState]) -> impl Iterator<Item = Region> {
    let both = |layer: &LayerState| match layer {
        LayerState::DeltaNet(net) => Some([net.conv, net.heads]),
        LayerState::Attention(_) => None,
    };
    layers.iter().filter_map(both).flatten()
}

pub(in crate::model) fn append(run: &mut dyn Backend, region: Region, out: &mut Vec<u8>) -> Result<(), DeviceError> {
    let start = out.len();
    out.resize(start + region.len, 0);
    run.read(region, &mut out[start..])
}

fn take(run: &mut dyn Backend, region: Region, from: &mut &[u8]) -> Result<(), ModelError> {
    let bytes = from.split_off(..region.len).ok_or_else(foreign)?;
    Ok(run.write(region, bytes)?)
}

fn foreign() -> ModelError {
    ModelError::Config("the snapshot belongs to another model".into())
}

fn allocate(
    config: &Config,
    shape: &AttentionShape,
    pool: &PagePool,
    run: &mut dyn Backend,
) -> Result<Arena, DeviceError> {
    let d = &config.delta;
    let (table, ring) = (run.allocate(shape.pages() * 4)?, shape.recent_bytes());
    let mut pages = pool.layers.iter();
    let layer = |full: &bool| {
        Ok(if *full {
            let mut recent = [Region::default(); 2];
            if ring > 0 {
                recent = [run.allocate(ring)?, run.allocate(ring)?];
            }
            let [keys, values] = *pages.next().ok_or_else(|| DeviceError("a layer has no pages".into()))?;
            LayerState::Attention(KvCache { keys, values, table, recent })
        } else {
            LayerState::DeltaNet(DeltaState {
                conv: run.allocate((d.conv_width - 1) * d.channels() * 4)?,
                heads: run.allocate(d.values() * d.key_dim * 4)?,
                tape: None,
            })
        })
    };
    let layers = config.full.iter().map(layer).collect::<Result<_, DeviceError>>()?;
    Ok(Arena { layers, table })
}
