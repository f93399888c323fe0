//! The state of one sequence: keys and values of the full-attention layers, convolution and delta state of the others.
//! Everything lies on the device and is updated in place.

use super::{
    config::Config,
    snapshot::{Frozen, Snapshot},
    tape::DeltaState,
};
use crate::{
    device::{DeviceError, Region},
    error::ModelError,
    ops::{
        Cache, CacheFormat, Heads, KvBits, Newest, Run,
        attend::{NEWEST, rounded_until},
    },
};
use parking_lot::Mutex;
use std::{ops::Range, sync::Arc};

/// One layer's memory.
#[derive(Debug, Clone, Copy)]
pub enum LayerState {
    /// `[KV, context, row]` each; keys after norm and rotation.
    Attention(Cache),
    DeltaNet(DeltaState),
}

/// The memory of sequences that are over: the next one begins there. So starting one neither allocates nor frees.
pub type Arenas = Arc<Mutex<Vec<Vec<LayerState>>>>;

/// A sequence's memory. It cannot be rewound further than a verify: the delta layers keep no other history.
#[derive(Debug)]
pub struct State {
    /// Tokens seen.
    pub len: usize,
    /// The length without the rows of a draft, while there are any: all of them will be taken back.
    pub(super) drafting: Option<usize>,
    /// Rows of the last verify, if nothing has come behind it.
    pub(super) tried: usize,
    pub(super) layers: Vec<LayerState>,
    pub(super) frozen: Frozen,
    /// The form of keys and values.
    shape: Heads,
    arenas: Arenas,
}

/// The form of keys and values: `format`, which is the device's, or fewer `bits`; for `context` positions, of which `rows` are
/// written at once at most.
pub fn heads(config: &Config, format: CacheFormat, bits: KvBits, context: usize, rows: usize) -> Heads {
    let shape = Heads { context, ..config.heads() };
    let Some(few) = bits.format() else { return Heads { format, ..shape } };
    // Whatever of a pass is marked or taken back, the newest are still there.
    let room = (rows + 2 * NEWEST).next_multiple_of(NEWEST);
    Heads { format: few, newest: Some(Newest { room, format }), ..shape }
}

impl State {
    /// An empty state with room for `shape.context` tokens. Pages are committed as they are first written.
    pub fn new(config: &Config, shape: Heads, arenas: &Arenas, run: &mut dyn Run) -> Result<Self, DeviceError> {
        let used = arenas.lock().pop();
        let layers = match used {
            Some(mut layers) => {
                for net in nets(&mut layers) {
                    net.clear();
                    for region in [net.conv, net.heads] {
                        run.write(region, &vec![0; region.len])?;
                    }
                }
                layers
            }
            None => allocate(config, &shape, run)?,
        };
        Ok(Self { len: 0, drafting: None, tried: 0, layers, frozen: Frozen::default(), shape, arenas: arenas.clone() })
    }

    /// A snapshot at `len`, behind what is written of it, where the other layers' states were `fixed`.
    pub fn snapshot(&mut self, len: usize, mut fixed: Vec<u8>, run: &mut dyn Run) -> Result<Snapshot, DeviceError> {
        let Self { layers, frozen, shape, .. } = self;
        // As many bytes wherever it is taken.
        let whole = fixed.len() + newest_bytes(layers, shape);
        newest(layers, shape, rounded_until(len)..len).try_for_each(|region| append(run, region, &mut fixed))?;
        fixed.resize(whole, 0);
        frozen.snapshot(len, fixed, |positions| {
            let mut out = Vec::new();
            rows(layers, shape, &positions).try_for_each(|region| append(run, region, &mut out))?;
            Ok(out)
        })
    }

    /// The delta nets' memory.
    pub(super) fn nets(&mut self) -> impl Iterator<Item = &mut DeltaState> {
        nets(&mut self.layers)
    }

    /// The delta and convolution states, which have taken in all rows.
    pub fn fixed(&self, run: &mut dyn Run) -> Result<Vec<u8>, DeviceError> {
        let mut out = Vec::new();
        fixed(&self.layers).try_for_each(|region| append(run, region, &mut out))?;
        Ok(out)
    }

    /// Makes this the sequence that `snapshot` was taken of.
    pub fn restore(&mut self, snapshot: &Snapshot, run: &mut dyn Run) -> Result<(), ModelError> {
        let Self { layers, frozen, shape, .. } = self;
        frozen.restore(snapshot, |positions, mut page: &[u8]| {
            rows(layers, shape, &positions).try_for_each(|region| take(run, region, &mut page))
        })?;
        let mut bytes = &snapshot.state[..];
        let newest = newest(layers, shape, rounded_until(snapshot.len)..snapshot.len);
        fixed(layers).chain(newest).try_for_each(|region| take(run, region, &mut bytes))?;
        self.nets().for_each(DeltaState::clear);
        (self.len, self.drafting, self.tried) = (snapshot.len, None, 0);
        Ok(())
    }

    /// Bytes of keys and values of one token, all layers.
    pub fn kv_bytes(config: &Config, format: CacheFormat) -> u64 {
        let a = &config.attention;
        (config.full_layers() * 2 * a.kv_heads * format.row_bytes(a.dim)) as u64
    }

    /// Bytes of the newest positions in a snapshot.
    pub fn newest_bytes(config: &Config, shape: &Heads) -> u64 {
        shape.newest.map_or(0, |newest| 2 * NEWEST as u64 * Self::kv_bytes(config, newest.format))
    }

    /// Bytes of everything else that does not grow with the context.
    pub fn fixed_bytes(config: &Config) -> u64 {
        let d = &config.delta;
        let layer = d.value_heads * d.value_dim * d.key_dim + (d.taps - 1) * d.mixed();
        ((config.layers - config.full_layers()) * layer * 4) as u64
    }
}

impl Drop for State {
    fn drop(&mut self) {
        self.arenas.lock().push(std::mem::take(&mut self.layers));
    }
}

/// The regions of some positions' keys and values, layer by layer.
fn rows(layers: &[LayerState], shape: &Heads, positions: &Range<usize>) -> impl Iterator<Item = Region> {
    let (first, count, heads, room) = (positions.start, positions.len(), shape.kv_heads, shape.context);
    let row = shape.format.row_bytes(shape.dim);
    caches(layers)
        .flat_map(|cache| [cache.keys, cache.values])
        .flat_map(move |cache| (0..heads).map(move |head| cache.part((head * room + first) * row, count * row)))
}

/// The regions of keys and values that are kept in 16 bits beside fewer; the first position is a multiple of [`NEWEST`].
fn newest(layers: &[LayerState], shape: &Heads, positions: Range<usize>) -> impl Iterator<Item = Region> {
    let (heads, ring) = (shape.kv_heads, shape.newest);
    let row = ring.map_or(0, |ring| ring.format.row_bytes(shape.dim));
    caches(layers).filter(move |_| ring.is_some()).flat_map(|cache| cache.newest).flat_map(move |cache| {
        let (positions, room) = (positions.clone(), ring.map_or(1, |ring| ring.room));
        (0..heads).flat_map(move |head| {
            let end = positions.end;
            let part =
                move |first: usize| cache.part((head * room + first % room) * row, (end - first).min(NEWEST) * row);
            positions.clone().step_by(NEWEST).map(part)
        })
    })
}

/// Bytes of as many of the newest as there can be.
fn newest_bytes(layers: &[LayerState], shape: &Heads) -> usize {
    let row = shape.newest.map_or(0, |ring| ring.format.row_bytes(shape.dim));
    caches(layers).count() * 2 * shape.kv_heads * 2 * NEWEST * row
}

fn caches(layers: &[LayerState]) -> impl Iterator<Item = &Cache> {
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

pub(super) fn append(run: &mut dyn Run, region: Region, out: &mut Vec<u8>) -> Result<(), DeviceError> {
    let start = out.len();
    out.resize(start + region.len, 0);
    run.read(region, &mut out[start..])
}

fn take(run: &mut dyn Run, region: Region, from: &mut &[u8]) -> Result<(), ModelError> {
    let foreign = || ModelError::Config("the snapshot belongs to another model".into());
    let bytes = from.split_off(..region.len).ok_or_else(foreign)?;
    Ok(run.write(region, bytes)?)
}

fn allocate(config: &Config, shape: &Heads, run: &mut dyn Run) -> Result<Vec<LayerState>, DeviceError> {
    let d = &config.delta;
    let (cache, ring) = (shape.cache_bytes(), shape.newest_bytes());
    let layer = |full: &bool| {
        Ok(if *full {
            let mut newest = [Region::default(); 2];
            if ring > 0 {
                newest = [run.allocate(ring)?, run.allocate(ring)?];
            }
            LayerState::Attention(Cache { keys: run.allocate(cache)?, values: run.allocate(cache)?, newest })
        } else {
            LayerState::DeltaNet(DeltaState {
                conv: run.allocate((d.taps - 1) * d.mixed() * 4)?,
                heads: run.allocate(d.values() * d.key_dim * 4)?,
                tape: None,
            })
        })
    };
    config.full.iter().map(layer).collect()
}
