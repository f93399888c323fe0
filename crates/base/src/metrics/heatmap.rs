//! Expert heatmap for the page in the browser: which experts are in memory, and how often the router selected each
//! expert.
//!
//! The thread that owns the model counts selections. Any thread may read the heatmap.

use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

/// Counts selections of each expert, layer by layer.
pub struct ExpertHeatmap {
    experts_per_layer: usize,
    counts: Vec<AtomicU32>,
    in_memory: Box<dyn Fn() -> Vec<usize> + Send + Sync>,
}

impl ExpertHeatmap {
    /// `in_memory` returns the experts that are in memory now, as `layer * experts_per_layer + expert`.
    pub fn new(
        layers: usize,
        experts_per_layer: usize,
        in_memory: impl Fn() -> Vec<usize> + Send + Sync + 'static,
    ) -> Self {
        let counts = (0..layers * experts_per_layer).map(|_| AtomicU32::new(0)).collect();
        Self { experts_per_layer, counts, in_memory: Box::new(in_memory) }
    }

    /// Counts a selection of expert `key`.
    pub fn count(&self, key: usize) {
        let Some(count) = self.counts.get(key) else { return };
        // Only one thread writes, so the check and the addition need not be one atomic operation.
        if count.load(Relaxed) < u32::MAX - 1 {
            count.fetch_add(1, Relaxed);
        }
    }

    /// Returns one string per layer, with one character per expert. The character is `.` if the expert is not in memory.
    /// Otherwise, the character is a digit: the logarithm to base 2 of the count plus one, rounded down, at most 9.
    pub fn layers(&self) -> Vec<String> {
        let mut characters = vec!['.'; self.counts.len()];
        for key in (self.in_memory)() {
            let (Some(character), Some(count)) = (characters.get_mut(key), self.counts.get(key)) else { continue };
            let digit = (count.load(Relaxed) + 1).ilog2().min(9);
            *character = char::from(b'0' + digit as u8);
        }
        characters.chunks(self.experts_per_layer.max(1)).map(|layer| layer.iter().collect()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use parking_lot::Mutex;
    use std::sync::Arc;

    #[test]
    fn layer_shows_count_of_experts_in_memory() {
        let in_memory = Arc::new(Mutex::new(Vec::new()));
        let now = in_memory.clone();
        let heatmap = ExpertHeatmap::new(2, 3, move || now.lock().clone());
        assert_eq!(heatmap.layers(), ["...", "..."]);
        *in_memory.lock() = vec![0, 4];
        (0..7).for_each(|_| heatmap.count(4));
        (0..5000).for_each(|_| heatmap.count(5));
        assert_eq!(heatmap.layers(), ["0..", ".3."], "an expert that is not in memory has no digit");
        *in_memory.lock() = vec![4, 5, 99];
        heatmap.count(99);
        assert_eq!(heatmap.layers(), ["...", ".39"]);
        assert!(ExpertHeatmap::new(0, 0, Vec::new).layers().is_empty());
    }
}
