//! Hidden rows for drafts: the residual stream behind some of the layers, as a pass leaves it.

use super::{Qwen, config::Config, placed::Placed};
use crate::{
    device::{DeviceError, Region},
    error::ModelError,
    ops::Run,
};

/// The hidden rows that a draft builds on.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Taps {
    /// Layers, in the order the draft wants them side by side: what they add is in. Empty: none are wanted.
    pub layers: Vec<usize>,
    /// Of the last rows of a pass, so many at most; at least the 16 of a verify, whose first rows may be those that stay.
    pub rows: usize,
}

impl Taps {
    /// Bytes they take on the device: behind the last layer the pass's own rows are still there.
    pub fn bytes(&self, config: &Config) -> u64 {
        let kept = self.layers.iter().filter(|layer| **layer + 1 < config.layers).count();
        (kept * self.rows * config.hidden * 4) as u64
    }
}

/// The buffers into which a pass copies them.
#[derive(Debug, Default)]
pub(super) struct Tapped {
    layers: Vec<(usize, Option<Region>)>,
    /// Room, and rows of the last pass.
    rows: usize,
    pass: usize,
    /// Nothing is copied.
    pub off: bool,
}

impl Tapped {
    /// The rows that were asked for.
    pub fn wanted(&self) -> Taps {
        Taps { layers: self.layers.iter().map(|(layer, _)| *layer).collect(), rows: self.rows }
    }

    /// A pass of so many rows is behind `layer`, and `h` is the residual stream.
    pub fn leave(
        &mut self,
        run: &mut dyn Run,
        layer: usize,
        h: Region,
        rows: usize,
        hidden: usize,
    ) -> Result<(), DeviceError> {
        self.pass = if self.off { 0 } else { rows };
        let kept = self.pass.min(self.rows);
        for (_, room) in self.layers.iter().filter(|(tapped, _)| kept > 0 && *tapped == layer) {
            let Some(room) = room else { continue };
            run.copy(h.rows(rows - kept, kept, hidden), room.floats(kept * hidden))?;
        }
        Ok(())
    }
}

impl Qwen {
    /// See [`Model::tap`](super::Model::tap).
    pub(super) fn set_taps(&self, taps: &Taps) -> Result<(), ModelError> {
        let config = &self.parts.config;
        if let Some(layer) = taps.layers.iter().find(|layer| **layer >= config.layers) {
            return Err(ModelError::Config(format!("the draft follows layer {layer} of {}", config.layers)));
        }
        let placed = &mut *self.placed.borrow_mut();
        let rows = taps.rows.min(placed.buffers.rows);
        let layers = taps.layers.iter().map(|&layer| {
            let last = layer + 1 == config.layers;
            let room = if last { None } else { Some(placed.run.allocate(rows * config.hidden * 4)?) };
            Ok((layer, room))
        });
        let layers = layers.collect::<Result<_, DeviceError>>()?;
        placed.tapped = Tapped { layers, rows, pass: 0, off: false };
        Ok(())
    }

    /// See [`Model::tapped`](super::Model::tapped).
    pub(super) fn read_taps(&self, rows: usize, into: &mut Vec<f32>) -> Result<(), ModelError> {
        let hidden = self.parts.config.hidden;
        let Placed { run, buffers, tapped, .. } = &mut *self.placed.borrow_mut();
        let first = tapped.pass - tapped.pass.min(tapped.rows);
        let (kept, sides) = (rows.min(tapped.pass).saturating_sub(first), tapped.layers.len());
        into.clear();
        into.resize(kept * sides * hidden, 0.0);
        let mut column = vec![0.0; if sides == 1 { 0 } else { kept * hidden }];
        for (side, (_, room)) in tapped.layers.iter().enumerate() {
            let from = room.unwrap_or_else(|| buffers.h.rows(first, kept, hidden));
            if sides == 1 {
                run.read_floats(from, into)?;
                continue;
            }
            run.read_floats(from, &mut column)?;
            for (row, values) in column.chunks_exact(hidden).enumerate() {
                into[(row * sides + side) * hidden..][..hidden].copy_from_slice(values);
            }
        }
        Ok(())
    }
}
