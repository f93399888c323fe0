//! Hidden rows for drafts: the residual stream behind some of the layers, as a pass leaves it.

use crate::{
    device::{DeviceError, Region},
    model::config::Config,
    ops::Backend,
};

/// The hidden rows that a draft builds on.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct HiddenTaps {
    /// Layers, in the order the draft wants them side by side: what they add is in. Empty: none are wanted.
    pub layers: Vec<usize>,
    /// Of the last rows of a pass, so many at most; at least the 16 of a verify, whose first rows may be those that stay.
    pub rows: usize,
}

impl HiddenTaps {
    /// Bytes they take on the device: behind the last layer the pass's own rows are still there.
    pub fn bytes(&self, config: &Config) -> u64 {
        let kept = self.layers.iter().filter(|layer| **layer + 1 < config.layers).count();
        (kept * self.rows * config.hidden * 4) as u64
    }
}

/// The buffers into which a pass copies them.
#[derive(Debug, Default)]
pub(in crate::model) struct Tapped {
    pub layers: Vec<(usize, Option<Region>)>,
    /// Room, and rows of the last pass.
    pub rows: usize,
    pub pass: usize,
    /// Nothing is copied.
    pub off: bool,
}

impl Tapped {
    /// The rows that were asked for.
    pub fn wanted(&self) -> HiddenTaps {
        HiddenTaps { layers: self.layers.iter().map(|(layer, _)| *layer).collect(), rows: self.rows }
    }

    /// A pass of so many rows is behind `layer`, and `h` is the residual stream.
    pub fn leave(
        &mut self,
        run: &mut dyn Backend,
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
