//! Logits, and the sums over a row of logits that sampling needs.

pub use moestro_compute::ops::logits::{argmax, exp_sum, finite, peak, sum_from, to_weights};

use std::sync::Arc;

/// Logits, row after row: `[rows, vocab]`. A model may reuse the memory after the last clone was dropped.
#[derive(Debug, Clone, Default)]
pub struct Logits {
    pub vocab: usize,
    pub data: Arc<Vec<f32>>,
}

impl Logits {
    pub fn rows(&self) -> usize {
        self.data.len().checked_div(self.vocab).unwrap_or(0)
    }

    pub fn row(&self, index: usize) -> &[f32] {
        &self.data[index * self.vocab..(index + 1) * self.vocab]
    }
}
