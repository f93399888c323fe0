//! The state of one sequence: keys and values of the full-attention layers, convolution and delta state of the others.
//! Everything lies on the device and is updated in place.

use super::{
    config::Config,
    snapshot::{Frozen, Snapshot},
};
use crate::{
    device::{DeviceError, Region},
    error::ModelError,
    ops::{Cache, CacheFormat, Run},
};
use std::{
    ops::Range,
    sync::{Arc, Mutex, PoisonError},
};

/// One layer's memory.
#[derive(Debug, Clone, Copy)]
pub enum LayerState {
    /// `[KV, context, row]` each; keys after norm and rotation.
    Attention(Cache),
    /// The last `taps - 1` raw samples, `[taps - 1, C]`, and the heads' matrices, `[Hv, Dv, Dk]`; f32.
    DeltaNet { conv: Region, heads: Region },
}

/// The memory of sequences that are over: the next one begins there. So starting one neither allocates nor frees.
pub type Arenas = Arc<Mutex<Vec<Vec<LayerState>>>>;

/// A sequence's memory. It cannot be rewound: the delta layers keep no history.
#[derive(Debug)]
pub struct State {
    /// Tokens seen.
    pub len: usize,
    pub(super) layers: Vec<LayerState>,
    pub(super) frozen: Frozen,
    /// Key and value heads, and positions there is room for.
    room: [usize; 2],
    arenas: Arenas,
}

impl State {
    /// An empty state with room for `context` tokens. Pages are committed as they are first written.
    pub fn new(config: &Config, context: usize, arenas: &Arenas, run: &mut dyn Run) -> Result<Self, DeviceError> {
        let used = arenas.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let layers = match used {
            Some(layers) => {
                for layer in &layers {
                    if let LayerState::DeltaNet { conv, heads } = layer {
                        for region in [*conv, *heads] {
                            run.write(region, &vec![0; region.len])?;
                        }
                    }
                }
                layers
            }
            None => allocate(config, context, run)?,
        };
        let room = [config.attention.kv_heads, context];
        Ok(Self { len: 0, layers, frozen: Frozen::default(), room, arenas: arenas.clone() })
    }

    /// A snapshot at `len`, behind what is written of it, where the other layers' states were `fixed`.
    pub fn snapshot(&mut self, len: usize, fixed: Vec<u8>, run: &mut dyn Run) -> Result<Snapshot, DeviceError> {
        let Self { layers, frozen, room, .. } = self;
        frozen.snapshot(len, fixed, |positions| {
            let mut out = Vec::new();
            rows(layers, *room, &positions).try_for_each(|region| append(run, region, &mut out))?;
            Ok(out)
        })
    }

    /// The delta and convolution states as they are now.
    pub fn fixed(&self, run: &mut dyn Run) -> Result<Vec<u8>, DeviceError> {
        let mut out = Vec::new();
        fixed(&self.layers).try_for_each(|region| append(run, region, &mut out))?;
        Ok(out)
    }

    /// Makes this the sequence that `snapshot` was taken of.
    pub fn restore(&mut self, snapshot: &Snapshot, run: &mut dyn Run) -> Result<(), ModelError> {
        let Self { layers, frozen, room, .. } = self;
        frozen.restore(snapshot, |positions, mut page: &[u8]| {
            rows(layers, *room, &positions).try_for_each(|region| take(run, region, &mut page))
        })?;
        let mut bytes = &snapshot.state[..];
        fixed(layers).try_for_each(|region| take(run, region, &mut bytes))?;
        self.len = snapshot.len;
        Ok(())
    }

    /// Bytes of keys and values of one token, all layers.
    pub fn kv_bytes(config: &Config, format: CacheFormat) -> u64 {
        let a = &config.attention;
        (config.full_layers() * 2 * a.kv_heads * format.row_bytes(a.dim)) as u64
    }

    /// Bytes of everything that does not grow with the context.
    pub fn fixed_bytes(config: &Config) -> u64 {
        let d = &config.delta;
        let layer = d.value_heads * d.value_dim * d.key_dim + (d.taps - 1) * d.mixed();
        ((config.layers - config.full_layers()) * layer * 4) as u64
    }
}

impl Drop for State {
    fn drop(&mut self) {
        self.arenas.lock().unwrap_or_else(PoisonError::into_inner).push(std::mem::take(&mut self.layers));
    }
}

/// The regions of some positions' keys and values, layer by layer.
fn rows(layers: &[LayerState], [heads, room]: [usize; 2], positions: &Range<usize>) -> impl Iterator<Item = Region> {
    let (first, count) = (positions.start, positions.len());
    let both = |layer: &LayerState| match layer {
        LayerState::Attention(cache) => Some([cache.keys, cache.values]),
        LayerState::DeltaNet { .. } => None,
    };
    layers.iter().filter_map(both).flatten().flat_map(move |cache| {
        let row = cache.len / (heads * room).max(1);
        (0..heads).map(move |head| cache.part((head * room + first) * row, count * row))
    })
}

/// The regions of the convolution and delta states, which do not grow.
fn fixed(layers: &[LayerState]) -> impl Iterator<Item = Region> {
    let both = |layer: &LayerState| match layer {
        LayerState::DeltaNet { conv, heads } => Some([*conv, *heads]),
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

fn allocate(config: &Config, context: usize, run: &mut dyn Run) -> Result<Vec<LayerState>, DeviceError> {
    let (a, d) = (&config.attention, &config.delta);
    let cache = a.kv_heads * context * run.limits().cache.row_bytes(a.dim);
    let layer = |full: &bool| {
        Ok(if *full {
            LayerState::Attention(Cache { keys: run.allocate(cache)?, values: run.allocate(cache)? })
        } else {
            LayerState::DeltaNet {
                conv: run.allocate((d.taps - 1) * d.mixed() * 4)?,
                heads: run.allocate(d.values() * d.key_dim * 4)?,
            }
        })
    };
    config.full.iter().map(layer).collect()
}
