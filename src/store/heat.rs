//! How much each expert is wanted: an estimate of the chance that the next token of its layer asks for it.
//!
//! Two running averages of "was it asked for", one over the last few dozen tokens and one over the last few hundred,
//! added up. Each layer has its own clock, so a layer that this token has not reached yet does not look older than one
//! it has passed; and experts that hold no slot keep their history, so one that comes back is not a stranger.

/// Tokens over which the fast and the slow average reach back.
const FAST: f32 = 32.0;
const SLOW: f32 = 512.0;

/// Tokens that what an earlier run knew is worth.
const PRIOR: f32 = 16.0;

/// One expert of one layer: `layer * experts + expert`.
pub type Key = u32;

/// The averages of every expert of every layer.
pub struct Heat {
    experts: usize,
    /// Fast and slow average by key.
    average: Vec<[f32; 2]>,
    /// Tokens each layer has seen, up to [`SLOW`].
    tokens: Vec<f32>,
}

impl Heat {
    pub fn new(layers: usize, experts: usize) -> Self {
        Self { experts, average: vec![[0.0; 2]; layers * experts], tokens: vec![0.0; layers] }
    }

    /// `tokens` more tokens went through `layer`; `wanted` gives the experts they asked for, each with how many of the
    /// tokens did.
    pub fn visit(&mut self, layer: usize, tokens: usize, wanted: impl Iterator<Item = (u32, f32)>) {
        let Some(seen) = self.tokens.get_mut(layer) else { return };
        let new = tokens.max(1) as f32;
        let total = *seen + new;
        // The mean of all tokens as long as there are few, then an exponential one.
        let weight = |span: f32| (new / total).max(1.0 - (1.0 - 1.0 / span).powf(new));
        let weights = [weight(FAST), weight(SLOW)];
        *seen = total.min(SLOW);
        let Some(row) = self.average.get_mut(layer * self.experts..(layer + 1) * self.experts) else { return };
        for average in row.iter_mut() {
            average[0] *= 1.0 - weights[0];
            average[1] *= 1.0 - weights[1];
        }
        for (expert, count) in wanted {
            if let Some(average) = row.get_mut(expert as usize) {
                let share = (count / new).min(1.0);
                average[0] += weights[0] * share;
                average[1] += weights[1] * share;
            }
        }
    }

    /// Sets the score of an expert nobody has asked for yet, from an earlier run; it weighs as much as [`PRIOR`] tokens.
    pub fn prime(&mut self, key: Key, score: f32) {
        let (Some(average), Some(tokens)) =
            (self.average.get_mut(key as usize), self.tokens.get_mut(key as usize / self.experts.max(1)))
        else {
            return;
        };
        *average = [score.clamp(0.0, 2.0) / 2.0; 2];
        *tokens = tokens.max(PRIOR);
    }

    /// What an expert's slot is worth: higher is kept longer.
    pub fn score(&self, key: Key) -> f32 {
        self.average.get(key as usize).map_or(0.0, |average| average[0] + average[1])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wanted_often_beats_wanted_once_and_the_past_fades() {
        let mut heat = Heat::new(1, 4);
        for token in 0..100 {
            let wanted = if token % 2 == 0 { 0 } else { 1 + token % 3 };
            heat.visit(0, 1, std::iter::once((wanted, 1.0)));
        }
        assert!((1..4).all(|other| heat.score(0) > heat.score(other)));
        for _ in 0..200 {
            heat.visit(0, 1, std::iter::once((3, 1.0)));
        }
        assert!(heat.score(3) > heat.score(0) && heat.score(0) > 0.0);
    }

    #[test]
    fn a_layer_not_yet_visited_is_not_older() {
        let mut heat = Heat::new(2, 2);
        for _ in 0..10 {
            heat.visit(0, 1, std::iter::once((0, 1.0)));
            heat.visit(1, 1, std::iter::once((0, 1.0)));
        }
        heat.visit(0, 1, std::iter::once((0, 1.0)));
        assert_eq!(heat.score(0), heat.score(2));
    }

    #[test]
    fn a_chunk_counts_like_its_tokens() {
        let mut chunk = Heat::new(1, 2);
        let mut single = Heat::new(1, 2);
        chunk.visit(0, 4, [(0, 4.0), (1, 2.0)].into_iter());
        for token in 0..4 {
            single.visit(0, 1, [(0, 1.0), (1, (token % 2) as f32)].into_iter());
        }
        for key in 0..2 {
            assert!((chunk.score(key) - single.score(key)).abs() < 1e-5);
        }
    }
}
