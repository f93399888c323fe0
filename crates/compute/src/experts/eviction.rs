//! Eviction scores: an estimate of the probability that the next token of a layer selects an expert.
//!
//! Hit counts alone learn slowly: of the experts that one token in fifty selects, many have no hit in the first fifty
//! tokens. But the router computes a logit for every expert and token, and unselected experts with high logits are
//! likely to be selected soon. The score therefore combines two estimates:
//!
//! * Margin: an expert's logit minus the lowest selected logit of the same token. A normal distribution with the
//!   running mean and variance of the margin gives the probability that the margin is positive, which is a selection.
//! * Share: the recent frequency of selection.
//!
//! The score is a weighted mean of both estimates. The weight of an estimate grows with the number of tokens that it
//! has seen.
//!
//! Each layer counts its own tokens. With a common count, layers that the current token has not reached yet would seem
//! older than the layers before them. Experts without a slot keep their statistics.

use super::choice::ExpertChoice;

/// Window of the running statistics, in tokens. A longer window is more precise while the distribution is stable, but
/// adapts more slowly to a change of topic.
const WINDOW: f32 = 256.0;

/// Maximum weight of the margin estimate. The weight of the share estimate is the number of tokens that it has seen.
const MARGIN_WEIGHT: f32 = 64.0;
/// Weight of the margin estimate per token that the estimate has seen, up to [`MARGIN_WEIGHT`].
const MARGIN_WEIGHT_PER_TOKEN: f32 = 2.0;

/// Weight of a score from an earlier run, in tokens of the share estimate.
const PRIOR_TOKENS: f32 = 16.0;

/// Identifies an expert of a layer: `layer * experts_per_layer + expert`.
pub type ExpertKey = u32;

/// Running statistics of one layer's experts.
#[derive(Clone)]
struct LayerStats {
    /// Mean of each expert's margin.
    mean: Vec<f32>,
    /// Variance of each expert's margin.
    variance: Vec<f32>,
    /// Share of the tokens that selected each expert.
    share: Vec<f32>,
    /// Mean of `variance` over all experts. While a layer has seen few tokens, the score uses this mean as a prior.
    mean_variance: f32,
    /// Number of tokens in `mean` and `variance`, at most [`WINDOW`].
    margin_tokens: f32,
    /// Number of tokens in `share`, at most [`WINDOW`].
    share_tokens: f32,
}

/// The scores of all experts of all layers.
pub struct EvictionScores {
    experts: usize,
    layers: Vec<LayerStats>,
}

impl EvictionScores {
    pub fn new(layers: usize, experts: usize) -> Self {
        let zeros = vec![0.0; experts];
        let mean = zeros.clone();
        let variance = zeros.clone();
        let share = zeros;
        let layer = LayerStats { mean, variance, share, mean_variance: 0.0, margin_tokens: 0.0, share_tokens: 0.0 };
        Self { experts, layers: vec![layer; layers] }
    }

    /// Updates the statistics of `layer` with the router's choice for some tokens.
    pub fn update(&mut self, layer: usize, choice: ExpertChoice<'_>) {
        let Some(layer) = self.layers.get_mut(layer) else { return };
        let mut rows = choice.logits.chunks_exact(self.experts.max(1));
        for ids in choice.ids.chunks(choice.k.max(1)) {
            layer.update_shares(ids);
            if let Some(row) = rows.next() {
                layer.update_margins(row, ids);
            }
        }
        layer.mean_variance = layer.variance.iter().sum::<f32>() / self.experts.max(1) as f32;
    }

    /// Sets the initial score of an expert to its score in an earlier run. Called before the first token.
    pub fn set_prior(&mut self, key: ExpertKey, score: f32) {
        let layer = key as usize / self.experts.max(1);
        let expert = key as usize % self.experts.max(1);
        let Some(layer) = self.layers.get_mut(layer) else { return };
        if let Some(share) = layer.share.get_mut(expert) {
            *share = score.clamp(0.0, 1.0);
            layer.share_tokens = layer.share_tokens.max(PRIOR_TOKENS);
        }
    }

    /// The score of an expert, from 0 to 1. The expert with the lowest score is evicted first.
    pub fn score(&self, key: ExpertKey) -> f32 {
        let expert = key as usize % self.experts.max(1);
        self.layers.get(key as usize / self.experts.max(1)).map_or(0.0, |layer| layer.score(expert))
    }
}

impl LayerStats {
    fn update_shares(&mut self, ids: &[u32]) {
        self.share_tokens = (self.share_tokens + 1.0).min(WINDOW);
        let step = 1.0 / self.share_tokens;
        for share in &mut self.share {
            *share *= 1.0 - step;
        }
        for &id in ids {
            if let Some(share) = self.share.get_mut(id as usize) {
                *share += step;
            }
        }
    }

    /// Updates mean and variance: exact over the first [`WINDOW`] tokens, then an exponential moving average.
    fn update_margins(&mut self, row: &[f32], ids: &[u32]) {
        let selected = ids.iter().filter_map(|&id| row.get(id as usize));
        let lowest = selected.copied().fold(f32::INFINITY, f32::min);
        if !lowest.is_finite() {
            return;
        }
        self.margin_tokens = (self.margin_tokens + 1.0).min(WINDOW);
        let step = 1.0 / self.margin_tokens;
        for ((mean, variance), logit) in self.mean.iter_mut().zip(&mut self.variance).zip(row) {
            let off = logit - lowest - *mean;
            *mean += step * off;
            *variance = (1.0 - step) * (*variance + step * off * off);
        }
    }

    fn score(&self, expert: usize) -> f32 {
        let get = |values: &[f32]| values.get(expert).copied().unwrap_or(0.0);
        let share = get(&self.share);
        if self.margin_tokens == 0.0 {
            return share;
        }
        let variance =
            (get(&self.variance) * self.margin_tokens + 2.0 * self.mean_variance) / (self.margin_tokens + 2.0);
        // The logistic function with factor 1.702 approximates the normal distribution function.
        let chance = 1.0 / (1.0 + (-1.702 * get(&self.mean) / variance.max(1e-9).sqrt()).exp());
        let weight = (MARGIN_WEIGHT_PER_TOKEN * self.margin_tokens).min(MARGIN_WEIGHT);
        (weight * chance + self.share_tokens * share) / (weight + self.share_tokens)
    }
}
