//! Expert heatmap for the page in the browser: which experts are in memory, and how often the router selected each
//! expert.
//!
//! The thread that owns the model writes the heatmap. Any thread may read the heatmap.

use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

/// Bit of a cell that is set if the expert has a slot. The other bits count how often the expert was selected.
const RESIDENT: u32 = 1 << 31;

/// A cell for each expert, layer by layer.
#[derive(Debug, Default)]
pub struct ExpertHeatmap {
    experts_per_layer: usize,
    cells: Vec<AtomicU32>,
}

impl ExpertHeatmap {
    pub fn new(layers: usize, experts_per_layer: usize) -> Self {
        let cells = (0..layers * experts_per_layer).map(|_| AtomicU32::new(0)).collect();
        Self { experts_per_layer, cells }
    }

    /// Marks only these experts (`layer * experts_per_layer + expert`) as resident.
    pub fn set_resident(&self, experts: impl Iterator<Item = usize>) {
        for cell in &self.cells {
            cell.fetch_and(!RESIDENT, Relaxed);
        }
        for cell in experts.filter_map(|key| self.cells.get(key)) {
            cell.fetch_or(RESIDENT, Relaxed);
        }
    }

    /// Counts a selection of expert `key`.
    pub fn count(&self, key: usize) {
        let Some(cell) = self.cells.get(key) else { return };
        // Only one thread writes, so the check and the addition need not be one atomic operation.
        if cell.load(Relaxed) & !RESIDENT < RESIDENT - 1 {
            cell.fetch_add(1, Relaxed);
        }
    }

    /// Returns one string per layer, with one character per expert. The character is `.` if the expert has no slot.
    /// Otherwise, the character is a digit: the logarithm to base 2 of the count plus one, rounded down, at most 9.
    pub fn layers(&self) -> Vec<String> {
        let character = |cell: &AtomicU32| {
            let cell = cell.load(Relaxed);
            let digit = ((cell & !RESIDENT) + 1).ilog2().min(9);
            if cell & RESIDENT == 0 { '.' } else { char::from(b'0' + digit as u8) }
        };
        self.cells.chunks(self.experts_per_layer.max(1)).map(|layer| layer.iter().map(character).collect()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layer_shows_count_of_resident_experts() {
        let heatmap = ExpertHeatmap::new(2, 3);
        assert_eq!(heatmap.layers(), ["...", "..."]);
        heatmap.set_resident([0, 4].into_iter());
        (0..7).for_each(|_| heatmap.count(4));
        (0..5000).for_each(|_| heatmap.count(5));
        assert_eq!(heatmap.layers(), ["0..", ".3."], "an expert without a slot has no digit");
        heatmap.set_resident([4, 5, 99].into_iter());
        heatmap.count(99);
        assert_eq!(heatmap.layers(), ["...", ".39"]);
        assert!(ExpertHeatmap::default().layers().is_empty());
    }
}
