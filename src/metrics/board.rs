//! Which experts are in memory, for whoever draws a picture of it. Written by the thread that owns them, read by anybody.

use super::Metrics;
use std::sync::{
    Arc,
    atomic::{AtomicU32, Ordering::Relaxed},
};

/// The bit that says that an expert has a slot; the others count how often it was asked for.
const HELD: u32 = 1 << 31;

/// All experts of a model, layer by layer.
#[derive(Debug, Default)]
pub struct Board {
    experts: usize,
    places: Vec<AtomicU32>,
}

impl Board {
    pub fn new(layers: usize, experts: usize) -> Self {
        Self { experts, places: (0..layers * experts).map(|_| AtomicU32::new(0)).collect() }
    }

    /// These experts (`layer * experts + expert`) are in memory now, and no others.
    pub fn draw(&self, held: impl Iterator<Item = usize>) {
        for place in &self.places {
            place.fetch_and(!HELD, Relaxed);
        }
        for place in held.filter_map(|key| self.places.get(key)) {
            place.fetch_or(HELD, Relaxed);
        }
    }

    /// A layer asked for expert `key`.
    pub fn asked(&self, key: usize) {
        let Some(place) = self.places.get(key) else { return };
        // One thread writes: nothing is lost between the two.
        if place.load(Relaxed) & !HELD < HELD - 1 {
            place.fetch_add(1, Relaxed);
        }
    }

    /// One text a layer, one character an expert: `.` without a slot, else the logarithm of how often it was asked for, from
    /// 0 to 9.
    pub fn layers(&self) -> Vec<String> {
        let character = |place: &AtomicU32| {
            let place = place.load(Relaxed);
            let digit = ((place & !HELD) + 1).ilog2().min(9);
            if place & HELD == 0 { '.' } else { char::from(b'0' + digit as u8) }
        };
        self.places.chunks(self.experts.max(1)).map(|layer| layer.iter().map(character).collect()).collect()
    }
}

impl Metrics {
    /// A new model's experts, none of which is in memory.
    pub fn experts(&self, layers: usize, experts: usize) -> Arc<Board> {
        let board = Arc::new(Board::new(layers, experts));
        *self.board.lock() = board.clone();
        board
    }

    /// The experts of the model that was loaded last.
    pub fn board(&self) -> Arc<Board> {
        self.board.lock().clone()
    }

    /// No model is in memory.
    pub fn unloaded(&self) {
        self.experts(0, 0);
        let held = [&self.memory_trunk, &self.memory_experts, &self.memory_kv, &self.memory_state];
        let more = [&self.memory_workspace, &self.memory_prompt_cache, &self.expert_slots, &self.expert_slots_used];
        held.into_iter().chain(more).for_each(|gauge| gauge.set(0));
    }

    /// A pass verified drafted tokens of a kind, of which some were accepted, and saved seconds, or lost them.
    pub fn drafted(&self, kind: &str, accepted: usize, rejected: usize, saved: f64) {
        self.draft_cycles.with_label_values(&[kind]).inc();
        self.draft_tokens.with_label_values(&[kind, "accepted"]).inc_by(accepted as u64);
        self.draft_tokens.with_label_values(&[kind, "rejected"]).inc_by(rejected as u64);
        if saved > 0.0 {
            self.draft_seconds_saved.inc_by(saved);
        } else {
            self.draft_seconds_lost.inc_by(-saved);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_layer_is_a_text() {
        let board = Board::new(2, 3);
        assert_eq!(board.layers(), ["...", "..."]);
        board.draw([0, 4].into_iter());
        (0..7).for_each(|_| board.asked(4));
        (0..5000).for_each(|_| board.asked(5));
        assert_eq!(board.layers(), ["0..", ".3."], "what has no slot is cold");
        board.draw([4, 5, 99].into_iter());
        board.asked(99);
        assert_eq!(board.layers(), ["...", ".39"]);
        assert!(Board::default().layers().is_empty());
    }
}
