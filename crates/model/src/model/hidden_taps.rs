//! Records hidden rows for drafts: the residual stream after some of the layers of a pass.

use crate::{error::ModelError, model::config::Config};
use moestro_compute::{
    device::{DeviceError, Region},
    ops::Backend,
};

/// Selects the hidden rows that a pass records for a draft.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct HiddenTaps {
    /// Layers whose output is recorded, in the order in which the draft reads them. Empty if no layer is recorded.
    pub layers: Vec<usize>,
    /// Maximum number of rows recorded per pass. Of a longer pass, the last rows are recorded. Must be at least the 16
    /// rows of a verify, because each of these rows may be accepted.
    pub rows: usize,
}

/// The buffers that passes copy hidden rows into.
#[derive(Debug, Default)]
pub struct TapBuffers {
    /// Layers and their buffers. `None` for the last layer, because its rows are still in the pass's buffers.
    layers: Vec<(usize, Option<Region>)>,
    /// Maximum number of rows in each buffer.
    capacity: usize,
    /// Number of rows of the last pass.
    pass_rows: usize,
    pub disabled: bool,
}

impl TapBuffers {
    /// Allocates buffers for `taps`, at most `rows` rows each.
    pub fn new(taps: &HiddenTaps, config: &Config, rows: usize, backend: &mut dyn Backend) -> Result<Self, ModelError> {
        if let Some(layer) = taps.layers.iter().find(|layer| **layer >= config.layers) {
            let layers = config.layers;
            return Err(ModelError::Config(format!("the draft reads layer {layer}; the model has {layers} layers")));
        }
        let capacity = taps.rows.min(rows);
        let mut layers = Vec::with_capacity(taps.layers.len());
        for &layer in &taps.layers {
            let is_last = layer + 1 == config.layers;
            let buffer = if is_last { None } else { Some(backend.allocate(capacity * config.residual_width() * 4)?) };
            layers.push((layer, buffer));
        }
        Ok(Self { layers, capacity, pass_rows: 0, disabled: false })
    }

    /// The taps that the buffers were allocated for.
    pub fn taps(&self) -> HiddenTaps {
        HiddenTaps { layers: self.layers.iter().map(|(layer, _)| *layer).collect(), rows: self.capacity }
    }

    /// True if passes copy hidden rows.
    pub fn is_recording(&self) -> bool {
        !self.disabled && !self.layers.is_empty()
    }

    /// Called after `layer` of a pass of `rows` rows. `h` is the residual stream.
    pub fn copy_rows(
        &mut self,
        backend: &mut dyn Backend,
        layer: usize,
        h: Region,
        rows: usize,
        hidden: usize,
    ) -> Result<(), DeviceError> {
        self.pass_rows = if self.disabled { 0 } else { rows };
        let kept = self.pass_rows.min(self.capacity);
        for (_, buffer) in self.layers.iter().filter(|(tapped, _)| kept > 0 && *tapped == layer) {
            let Some(buffer) = buffer else { continue };
            backend.copy(h.rows(rows - kept, kept, hidden), buffer.floats(kept * hidden))?;
        }
        Ok(())
    }

    /// Replaces `out` with the recorded rows among the first `rows` rows of the last pass, `[recorded rows, layers,
    /// hidden]`. `h` is the residual stream after that pass.
    pub fn read(
        &self,
        rows: usize,
        h: Region,
        hidden: usize,
        backend: &mut dyn Backend,
        out: &mut Vec<f32>,
    ) -> Result<(), DeviceError> {
        let first = self.pass_rows - self.pass_rows.min(self.capacity);
        let kept = rows.min(self.pass_rows).saturating_sub(first);
        let layers = self.layers.len();
        out.clear();
        out.resize(kept * layers * hidden, 0.0);
        let mut column = vec![0.0; if layers == 1 { 0 } else { kept * hidden }];
        for (index, (_, buffer)) in self.layers.iter().enumerate() {
            let from = buffer.unwrap_or_else(|| h.rows(first, kept, hidden));
            if layers == 1 {
                backend.read_floats(from, out)?;
                continue;
            }
            backend.read_floats(from, &mut column)?;
            for (row, values) in column.chunks_exact(hidden).enumerate() {
                out[(row * layers + index) * hidden..][..hidden].copy_from_slice(values);
            }
        }
        Ok(())
    }
}
