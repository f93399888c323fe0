//! [`LayerHits`]: how often each layer hit, which decides how many layers a pass submits before the CPU reads the
//! routers' choices.
//!
//! Every further layer saves a wait for the device, if no layer before it needs an expert that is not in memory.
//! Otherwise its launches do nothing, and the layer is submitted again.

/// Weight of the last pass in the share of a layer.
const STEP: f32 = 1.0 / 8.0;

/// Minimum probability that all earlier layers hit, so that submitting a further layer saves time. Measured on an H100
/// (`benches/results/look_ahead.csv`).
const MIN_CHANCE: f32 = 0.5;

/// The same with prefetching. Higher, because the layers of a span do not prefetch.
const MIN_CHANCE_PREFETCHING: f32 = 0.7;

/// The share of recent passes in which launches could read all experts of a layer at once, for each layer.
pub struct LayerHits {
    shares: Vec<f32>,
}

impl LayerHits {
    pub fn new(layers: usize) -> Self {
        Self { shares: vec![0.0; layers] }
    }

    /// Records whether launches could read all experts that a pass selected in `layer`.
    pub fn record(&mut self, layer: usize, all_hit: bool) {
        if let Some(share) = self.shares.get_mut(layer) {
            *share += STEP * (f32::from(u8::from(all_hit)) - *share);
        }
    }

    /// Number of layers to submit from layer `first` on: at least one, and at most the layers that are left.
    pub fn layers_to_submit(&self, first: usize, prefetches: bool) -> usize {
        let earlier = self.shares.get(first..self.shares.len().saturating_sub(1)).unwrap_or_default();
        let min_chance = if prefetches { MIN_CHANCE_PREFETCHING } else { MIN_CHANCE };
        let mut chance = 1.0;
        let is_likely = |share: &&f32| {
            chance *= **share;
            chance >= min_chance
        };
        1 + earlier.iter().take_while(is_likely).count()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A model of 40 layers whose layers all hit in this share of the passes.
    fn with_share(share: f32) -> LayerHits {
        LayerHits { shares: vec![share; 40] }
    }

    #[test]
    fn more_hits_allow_more_layers() {
        let layers = [0.0, 0.49, 0.51, 0.85, 0.98, 1.0].map(|share| with_share(share).layers_to_submit(0, false));
        assert_eq!(layers, [1, 1, 2, 5, 35, 40]);
        let layers = [0.51, 0.69, 0.85, 1.0].map(|share| with_share(share).layers_to_submit(0, true));
        assert_eq!(layers, [1, 1, 3, 40]);
        assert_eq!([38, 39, 40, 99].map(|first| with_share(1.0).layers_to_submit(first, false)), [2, 1, 1, 1]);
    }

    #[test]
    fn layer_that_misses_is_submitted_last() {
        let mut hits = with_share(1.0);
        for _ in 0..6 {
            hits.record(7, false);
        }
        assert_eq!([0, 7, 8].map(|first| hits.layers_to_submit(first, false)), [8, 1, 32]);
        for _ in 0..6 {
            hits.record(7, true);
        }
        assert_eq!(hits.layers_to_submit(0, false), 40);
    }

    #[test]
    fn new_model_waits_in_each_layer() {
        let mut hits = LayerHits::new(3);
        assert_eq!(hits.layers_to_submit(0, false), 1);
        for _ in 0..16 {
            (0..3).for_each(|layer| hits.record(layer, true));
        }
        assert_eq!(hits.layers_to_submit(0, false), 3);
        assert_eq!(LayerHits::new(0).layers_to_submit(0, false), 1);
    }
}
