//! The eviction score of every expert: an estimate of the chance that the next token of its layer asks for it.
//!
//! Counting alone learns slowly: an expert that one token in fifty asks for is a stranger for most of the first fifty.
//! But a router scores every expert for every token, and how far an expert stayed below the ones that were taken says as
//! much about its chances as being taken does. So an expert's margin (its logit less the least logit taken) is followed
//! as a mean and a variance, and the chance that a normal variable with these is positive is one estimate; how often it
//! was taken lately is the other; the score is their mean, weighted by how much each has seen.
//!
//! Each layer has its own clock, so a layer that this token has not reached yet does not look older than one it has
//! passed; and experts that hold no slot keep their history, so one that comes back is not a stranger.

/// Tokens that margins and counts reach back. Longer is better while nothing changes, and a change of subject takes about
/// as long to notice.
const REACH: f32 = 256.0;

/// The most the estimate from margins weighs, in tokens of counting, and how fast it gets there.
const TRUST: f32 = 64.0;
const TRUST_A_TOKEN: f32 = 2.0;

/// Tokens that what an earlier run knew is worth.
const PRIOR: f32 = 16.0;

/// One expert of one layer: `layer * experts + expert`.
pub type Key = u32;

/// A layer's router's choice for some rows.
#[derive(Debug, Clone, Copy)]
pub struct Choice<'a> {
    /// The experts taken, `k` a row: place `row * k + rank`.
    pub ids: &'a [u32],
    pub k: usize,
    /// Every expert's logit, one row after the other; empty if they are not known. An expert's distance below those
    /// that were taken says as much of its chances as being taken does.
    pub logits: &'a [f32],
}

/// One layer's experts.
#[derive(Clone)]
struct Layer {
    /// Mean and variance of each expert's margin, and the share of tokens that took it.
    mean: Vec<f32>,
    variance: Vec<f32>,
    share: Vec<f32>,
    /// Mean of the variances: what a variance of few samples is drawn towards.
    spread: f32,
    /// Tokens that margins and counts have seen, up to their reach.
    margins: f32,
    counts: f32,
}

/// The scores of every expert of every layer.
pub struct Scores {
    experts: usize,
    layers: Vec<Layer>,
}

impl Scores {
    pub fn new(layers: usize, experts: usize) -> Self {
        let zeros = vec![0.0; experts];
        let (mean, variance, share) = (zeros.clone(), zeros.clone(), zeros);
        let layer = Layer { mean, variance, share, spread: 0.0, margins: 0.0, counts: 0.0 };
        Self { experts, layers: vec![layer; layers] }
    }

    /// Tokens went through `layer`.
    pub fn visit(&mut self, layer: usize, choice: Choice<'_>) {
        let Some(layer) = self.layers.get_mut(layer) else { return };
        let mut rows = choice.logits.chunks_exact(self.experts.max(1));
        for ids in choice.ids.chunks(choice.k.max(1)) {
            layer.count(ids);
            if let Some(row) = rows.next() {
                layer.weigh(row, ids);
            }
        }
        layer.spread = layer.variance.iter().sum::<f32>() / self.experts.max(1) as f32;
    }

    /// Sets the score of an expert nobody has asked for yet, from an earlier run.
    pub fn prime(&mut self, key: Key, score: f32) {
        let (layer, expert) = (key as usize / self.experts.max(1), key as usize % self.experts.max(1));
        let Some(layer) = self.layers.get_mut(layer) else { return };
        if let Some(share) = layer.share.get_mut(expert) {
            *share = score.clamp(0.0, 1.0);
            layer.counts = layer.counts.max(PRIOR);
        }
    }

    /// The eviction score of an expert, from 0 to 1: higher is kept longer.
    pub fn score(&self, key: Key) -> f32 {
        let expert = key as usize % self.experts.max(1);
        self.layers.get(key as usize / self.experts.max(1)).map_or(0.0, |layer| layer.score(expert))
    }
}

impl Layer {
    fn count(&mut self, ids: &[u32]) {
        self.counts = (self.counts + 1.0).min(REACH);
        let step = 1.0 / self.counts;
        for share in &mut self.share {
            *share *= 1.0 - step;
        }
        for &id in ids {
            if let Some(share) = self.share.get_mut(id as usize) {
                *share += step;
            }
        }
    }

    /// Running mean and variance, exact over the first tokens and exponential after.
    fn weigh(&mut self, row: &[f32], ids: &[u32]) {
        let taken = ids.iter().filter_map(|&id| row.get(id as usize));
        let least = taken.copied().fold(f32::INFINITY, f32::min);
        if !least.is_finite() {
            return;
        }
        self.margins = (self.margins + 1.0).min(REACH);
        let step = 1.0 / self.margins;
        for ((mean, variance), logit) in self.mean.iter_mut().zip(&mut self.variance).zip(row) {
            let off = logit - least - *mean;
            *mean += step * off;
            *variance = (1.0 - step) * (*variance + step * off * off);
        }
    }

    fn score(&self, expert: usize) -> f32 {
        let get = |values: &[f32]| values.get(expert).copied().unwrap_or(0.0);
        let share = get(&self.share);
        if self.margins == 0.0 {
            return share;
        }
        let variance = (get(&self.variance) * self.margins + 2.0 * self.spread) / (self.margins + 2.0);
        // The logistic function that comes closest to the normal distribution's.
        let chance = 1.0 / (1.0 + (-1.702 * get(&self.mean) / variance.max(1e-9).sqrt()).exp());
        let trust = (TRUST_A_TOKEN * self.margins).min(TRUST);
        (trust * chance + self.counts * share) / (trust + self.counts)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counted(ids: &[u32], k: usize) -> Choice<'_> {
        Choice { ids, k, logits: &[] }
    }

    #[test]
    fn wanted_often_beats_wanted_once_and_the_past_fades() {
        let mut scores = Scores::new(1, 4);
        for token in 0..100 {
            scores.visit(0, counted(&[if token % 2 == 0 { 0 } else { 1 + token % 3 }], 1));
        }
        assert!((1..4).all(|other| scores.score(0) > scores.score(other)));
        for _ in 0..1000 {
            scores.visit(0, counted(&[3], 1));
        }
        assert!(scores.score(3) > 0.9 && scores.score(0) < 0.1);
    }

    #[test]
    fn a_layer_not_yet_visited_is_not_older() {
        let mut scores = Scores::new(2, 2);
        for _ in 0..10 {
            scores.visit(0, counted(&[0], 1));
            scores.visit(1, counted(&[0], 1));
        }
        scores.visit(0, counted(&[0], 1));
        assert_eq!(scores.score(0), scores.score(2));
    }

    #[test]
    fn a_chunk_counts_like_its_tokens() {
        let logits = [3.0, 2.0, 1.0, 0.5, 2.5, 2.0, -1.0, 0.0, 4.0];
        let ids = [0, 1, 1, 2, 2, 1];
        let (mut chunk, mut single) = (Scores::new(1, 3), Scores::new(1, 3));
        chunk.visit(0, Choice { ids: &ids, k: 2, logits: &logits });
        for (ids, logits) in ids.chunks(2).zip(logits.chunks(3)) {
            single.visit(0, Choice { ids, k: 2, logits });
        }
        for key in 0..3 {
            assert_eq!(chunk.score(key), single.score(key));
        }
    }

    #[test]
    fn nearly_taken_is_worth_more_than_far_off() {
        let mut scores = Scores::new(1, 3);
        for token in 0..8 {
            let noise = [0.3, -0.2, 0.1, -0.4][token % 4];
            scores.visit(0, Choice { ids: &[0], k: 1, logits: &[5.0 + noise, 4.8 - noise, 1.0 + noise] });
        }
        assert!(scores.score(0) > scores.score(1) && scores.score(1) > scores.score(2) + 0.01);
    }

    #[test]
    fn what_an_earlier_run_knew_counts_until_this_one_knows_better() {
        let mut scores = Scores::new(1, 3);
        scores.prime(2, 0.8);
        assert!((scores.score(2) - 0.8).abs() < 1e-6 && scores.score(1) == 0.0);
        for _ in 0..100 {
            scores.visit(0, counted(&[1], 1));
        }
        assert!(scores.score(1) > scores.score(2));
    }

    #[test]
    fn logits_of_any_kind_give_a_finite_score() {
        let mut scores = Scores::new(1, 3);
        for logits in [[f32::NAN; 3], [f32::NEG_INFINITY; 3], [f32::INFINITY, 0.0, 0.0], [0.0; 3], [1e30, -1e30, 0.0]] {
            scores.visit(0, Choice { ids: &[0], k: 1, logits: &logits });
        }
        assert!((0..3).all(|key| scores.score(key).is_finite()));
    }

    /// The score by its definition: running mean and variance of each margin, the share of tokens, and their mean.
    #[test]
    fn the_score_is_what_the_top_of_this_file_says() {
        let rows = [[3.0f32, 2.0, 1.0, 0.5], [2.5, 2.0, -1.0, 4.0], [0.0, 1.0, 2.0, 3.5]];
        let taken = [[0u32, 1], [3, 0], [3, 2]];
        let mut scores = Scores::new(2, 4);
        for (row, ids) in rows.iter().zip(&taken) {
            scores.visit(1, Choice { ids, k: 2, logits: row });
        }
        let margins = rows.iter().zip(&taken).map(|(row, ids)| {
            let least = ids.iter().map(|id| row[*id as usize]).fold(f32::INFINITY, f32::min);
            row.map(|logit| f64::from(logit - least))
        });
        let margins: Vec<[f64; 4]> = margins.collect();
        let n = rows.len() as f64;
        let mean: [f64; 4] = std::array::from_fn(|e| margins.iter().map(|row| row[e]).sum::<f64>() / n);
        let variance: [f64; 4] =
            std::array::from_fn(|e| margins.iter().map(|row| (row[e] - mean[e]).powi(2)).sum::<f64>() / n);
        let spread = variance.iter().sum::<f64>() / 4.0;
        for e in 0..4 {
            let share = taken.iter().filter(|ids| ids.contains(&(e as u32))).count() as f64 / n;
            let drawn = (variance[e] * n + 2.0 * spread) / (n + 2.0);
            let chance = 1.0 / (1.0 + (-1.702 * mean[e] / drawn.sqrt()).exp());
            let trust = 2.0 * n;
            let wanted = (trust * chance + n * share) / (trust + n);
            let found = f64::from(scores.score(4 + e as Key));
            assert!((found - wanted).abs() < 1e-5, "expert {e}: {found}, not {wanted}");
        }
        assert!((0..4).all(|other| scores.score(other) == 0.0), "the other layer");
    }

    #[test]
    fn an_earlier_run_is_worth_sixteen_tokens() {
        let mut scores = Scores::new(2, 3);
        for (key, told) in [(0, -1.0), (1, 7.0), (4, 0.5)] {
            scores.prime(key, told);
        }
        assert_eq!([0, 1, 2, 3, 4, 5].map(|key| scores.score(key)), [0.0, 1.0, 0.0, 0.0, 0.5, 0.0]);
        scores.visit(1, counted(&[0], 1));
        let wanted = [1.0 / 17.0, 0.5 * 16.0 / 17.0, 0.0];
        assert!((3..6).zip(wanted).all(|(key, share)| (scores.score(key) - share).abs() < 1e-6));
        scores.prime(99, 0.5);
        assert_eq!(scores.score(99), 0.0);
    }
}
