//! Sampling: from logits to a token. The steps run in the usual order, with min-p last as in Hugging Face's `generate`:
//!
//! 1. add `logit_bias`;
//! 2. apply the repetition penalty to tokens of the prompt and the answer (divide positive logits, multiply negative
//!    ones), then subtract the frequency and presence penalties for tokens of the answer;
//! 3. mask tokens that the request's [`Constraint`](super::Constraint) does not allow;
//! 4. divide by the temperature; a temperature of 0 selects the token with the largest logit here;
//! 5. top-k keeps the `k` most likely tokens;
//! 6. top-p keeps the fewest most likely tokens whose renormalised probabilities sum to at least `p`;
//! 7. min-p keeps tokens with at least `min_p` times the probability of the most likely one.
//!
//! Of equally likely tokens, the one with the lower id counts as more likely. NaN counts as impossible. Each token uses
//! one random number, which depends only on the seed and the token's position. A result therefore does not depend on
//! earlier draws or on other requests.

use super::{
    constraint::TokenMask,
    request::{Logprobs, Sampling},
};
use moestro_base::platform::split_mix64::{INCREMENT, mix};
use moestro_model::model::{
    NextToken, TokenChoice,
    logits::{argmax, exp_sum, finite, peak, sum_from, to_weights},
};
use std::{
    cmp::Ordering,
    collections::HashMap,
    hash::{BuildHasher, RandomState},
};

/// A GPU does not choose tokens below this temperature, because quotients may overflow.
const MIN_GPU_TEMPERATURE: f32 = 0.01;

/// Samples the tokens of one answer.
#[derive(Clone)]
pub struct Sampler {
    sampling: Sampling,
    seed: u64,
    /// Ids from this number on are never sampled.
    usable: usize,
    /// Position of the next token, counted from the start of the prompt.
    position: u64,
    /// Number of times each token occurs in the answer. 0 for a token that occurs only in the prompt. The map is empty
    /// if the request sets no penalty.
    counts: HashMap<u32, u32>,
    /// Buffer for the logits of steps 1 to 3.
    row: Vec<f32>,
    /// Buffer for the tokens that steps 5 to 7 keep. Empty if these steps keep every token.
    pool: Vec<TokenCandidate>,
    /// Buffer for the weights of `pool`, or of every token.
    weights: Vec<f32>,
}

/// Result of a pass for one row, from which a token is sampled.
#[derive(Debug, Clone, Copy)]
pub enum RowOutput<'a> {
    Logits(&'a [f32]),
    /// The likeliest token, for an answer that needs no logits.
    Likeliest(u32),
}

/// A token with its logit or its weight. A weight is the probability times a factor that is the same for all tokens.
#[derive(Debug, Clone, Copy, PartialEq)]
struct TokenCandidate {
    id: u32,
    value: f32,
}

impl TokenCandidate {
    /// Sorts the most likely candidate first.
    fn order(&self, other: &Self) -> Ordering {
        other.value.total_cmp(&self.value).then(self.id.cmp(&other.id))
    }
}

impl Sampler {
    /// A sampler for an answer to `prompt`. Ids of `usable` or more are never sampled.
    pub fn new(sampling: Sampling, prompt: &[u32], usable: usize) -> Self {
        let seed = sampling.seed.unwrap_or_else(|| RandomState::new().hash_one(prompt.len()));
        let position = prompt.len() as u64;
        let (counts, row, pool, weights) = Default::default();
        let mut sampler = Self { sampling, seed, usable, position, counts, row, pool, weights };
        if sampler.has_penalties() {
            sampler.counts.extend(prompt.iter().map(|&id| (id, 0)));
        }
        sampler
    }

    /// Samples the token after a row and counts it as part of the answer. Returns `None` if no token is possible.
    pub fn draw_from(&mut self, row: RowOutput<'_>, mask: &TokenMask) -> Option<u32> {
        match row {
            RowOutput::Logits(logits) => self.draw(logits, mask),
            RowOutput::Likeliest(id) => {
                self.position += 1;
                (id != u32::MAX).then_some(id)
            }
        }
    }

    /// Samples the token after `logits` and counts it as part of the answer. Returns `None` if no token is possible.
    pub fn draw(&mut self, logits: &[f32], mask: &TokenMask) -> Option<u32> {
        let logits = &logits[..logits.len().min(self.usable)];
        let mut row = std::mem::take(&mut self.row);
        let adjusts = self.adjusts();
        let logits = if adjusts || *mask != TokenMask::Any {
            row.clear();
            row.extend_from_slice(logits);
            if adjusts {
                self.adjust(&mut row);
            }
            if let TokenMask::Only(words) = mask {
                apply_mask(&mut row, words);
            }
            &row[..]
        } else {
            logits
        };
        let drawn = if self.sampling.temperature > 0.0 { self.sample(logits) } else { argmax(logits) };
        self.row = row;
        self.position += 1;
        if let Some(id) = drawn
            && self.has_penalties()
        {
            *self.counts.entry(id).or_default() += 1;
        }
        drawn
    }

    /// How the next call of [`Sampler::draw`] without a mask chooses a token, if a GPU can choose in this way.
    pub fn next_token(&self) -> Option<NextToken> {
        let Sampling { temperature, top_k, top_p, min_p, .. } = self.sampling;
        let choice = match temperature {
            _ if self.adjusts() => return None,
            ..=0.0 => TokenChoice::LIKELIEST,
            MIN_GPU_TEMPERATURE.. if (1..=TokenChoice::MAX_TOP_K).contains(&top_k) => {
                let share = uniform(self.seed, self.position) as f32;
                TokenChoice { top_k, temperature, top_p, min_p: min_p.min(1.0), share }
            }
            _ => return None,
        };
        Some(NextToken { usable: self.usable, choice })
    }

    /// Set if the next calls of [`Sampler::draw`] without a mask choose the likeliest of the ids below this number.
    pub fn likeliest_below(&self) -> Option<usize> {
        (self.sampling.temperature <= 0.0 && !self.adjusts()).then_some(self.usable)
    }

    /// Copies the progress of `other`, a sampler of the same answer.
    pub fn catch_up(&mut self, other: &Self) {
        self.position = other.position;
        if self.has_penalties() {
            self.counts.clone_from(&other.counts);
        }
    }

    fn has_penalties(&self) -> bool {
        let Sampling { repetition_penalty, presence_penalty, frequency_penalty, .. } = self.sampling;
        (repetition_penalty, presence_penalty, frequency_penalty) != (1.0, 0.0, 0.0)
    }

    /// True if steps 1 and 2 may change a logit.
    fn adjusts(&self) -> bool {
        self.has_penalties() || !self.sampling.logit_bias.is_empty()
    }

    /// Steps 1 and 2.
    fn adjust(&self, row: &mut [f32]) {
        for &(id, bias) in &self.sampling.logit_bias {
            if let Some(logit) = row.get_mut(id as usize) {
                *logit += bias;
            }
        }
        let Sampling { repetition_penalty, presence_penalty, frequency_penalty, .. } = self.sampling;
        for (&id, &count) in &self.counts {
            let Some(logit) = row.get_mut(id as usize) else { continue };
            *logit = if *logit > 0.0 { *logit / repetition_penalty } else { *logit * repetition_penalty };
            if count > 0 {
                *logit -= frequency_penalty * count as f32 + presence_penalty;
            }
        }
    }

    /// Steps 4 to 7, and the draw.
    fn sample(&mut self, logits: &[f32]) -> Option<u32> {
        let Sampling { temperature, top_k, top_p, min_p, .. } = self.sampling;
        let max = finite(logits[argmax(logits)? as usize]);
        let pool = &mut self.pool;
        let weights = &mut self.weights;
        pool.clear();
        weights.clear();
        if top_k > 0 && top_k < logits.len() {
            largest(logits, top_k, pool);
            weights.extend(pool.iter().map(|candidate| candidate.value));
        } else {
            weights.extend_from_slice(logits);
        }
        to_weights(weights, max, temperature);
        if top_p < 1.0 || min_p > 0.0 {
            // The most likely token has weight 1 and always stays.
            let bar = if min_p > 0.0 { min_p.min(1.0) } else { 0.0 };
            keep(pool, weights, bar, top_p);
            weights.clear();
            weights.extend(pool.iter().map(|candidate| candidate.value));
        }
        let drawn = pick(weights, uniform(self.seed, self.position))?;
        Some(pool.get(drawn).map_or(drawn as u32, |candidate| candidate.id))
    }
}

/// Step 3: masks tokens whose bit in `words` is not set.
fn apply_mask(row: &mut [f32], words: &[u32]) {
    for (block, word) in row.chunks_mut(32).zip(words.iter().copied().chain(std::iter::repeat(0))) {
        match word {
            0 => block.fill(f32::NEG_INFINITY),
            u32::MAX => {}
            _ => {
                for (bit, logit) in block.iter_mut().enumerate() {
                    *logit = if word >> bit & 1 == 1 { *logit } else { f32::NEG_INFINITY };
                }
            }
        }
    }
}

/// The log-probability of `id`, and the log-probabilities of the `top` most likely usable tokens, from the softmax of
/// the unmodified `logits`.
pub(super) fn logprobs(logits: &[f32], id: u32, top: usize, usable: usize) -> Logprobs {
    let peak = finite(peak(logits)).max(f32::MIN);
    let sum = exp_sum(logits, peak);
    let log_sum = f64::from(peak) + sum.ln();
    let logprob = |logit: f32| (f64::from(finite(logit)) - log_sum) as f32;
    let mut likely = Vec::new();
    largest(&logits[..logits.len().min(usable)], top, &mut likely);
    Logprobs {
        logprob: logits.get(id as usize).map_or(f32::NEG_INFINITY, |&logit| logprob(logit)),
        top: likely.into_iter().map(|candidate| (candidate.id, logprob(candidate.value))).collect(),
    }
}

/// Fills `pool` with the `count` largest logits, sorted.
fn largest(logits: &[f32], count: usize, pool: &mut Vec<TokenCandidate>) {
    pool.clear();
    let count = count.min(logits.len());
    if count == 0 {
        return;
    }
    // Sorting whenever the pool has twice `count` entries costs less than a heap. A later token must have a larger
    // logit than the last kept token, since its id is higher. Most blocks have no such token and are skipped.
    let mut bar = f32::NEG_INFINITY;
    for (block, from) in logits.chunks(64).zip((0..).step_by(64)) {
        if pool.len() >= count && !block.iter().fold(false, |any, &logit| any | (logit > bar)) {
            continue;
        }
        for (&logit, id) in block.iter().zip(from..) {
            let candidate = TokenCandidate { id, value: finite(logit) };
            if candidate.value > bar || pool.len() < count {
                pool.push(candidate);
            }
            if pool.len() == 2 * count {
                pool.sort_unstable_by(TokenCandidate::order);
                pool.truncate(count);
                bar = pool[count - 1].value;
            }
        }
    }
    pool.sort_unstable_by(TokenCandidate::order);
    pool.truncate(count);
}

/// Steps 6 and 7: fills `pool` with the candidates of weight `bar` or more. If `share` is less than 1, keeps only the
/// most likely of these candidates: as few as reach this share of all weights, but at least one.
///
/// `weights` belongs to the sorted candidates in `pool`, or to every token if `pool` is empty.
fn keep(pool: &mut Vec<TokenCandidate>, weights: &[f32], bar: f32, share: f32) {
    let goal = if share < 1.0 { sum_from(weights, 0.0) * f64::from(share.max(0.0)) } else { 0.0 };
    if pool.is_empty() {
        // For most rows few tokens are kept, so only tokens above a low enough bar are sorted.
        let reaches = |low: &f32| *low == 0.0 || sum_from(weights, *low) >= goal;
        let low = if share < 1.0 { (0..).map(|step| 32f32.powi(-step)).find(reaches) } else { None };
        let bar = bar.max(low.unwrap_or(0.0));
        for (block, from) in weights.chunks(64).zip((0..).step_by(64)) {
            if block.iter().fold(false, |any, &weight| any | (weight >= bar)) {
                let candidates = block.iter().zip(from..).map(|(&value, id)| TokenCandidate { id, value });
                pool.extend(candidates.filter(|candidate| candidate.value >= bar));
            }
        }
        if share < 1.0 {
            pool.sort_unstable_by(TokenCandidate::order);
        }
    } else {
        pool.iter_mut().zip(weights).for_each(|(candidate, &weight)| candidate.value = weight);
        pool.retain(|candidate| candidate.value >= bar);
    }
    if share < 1.0 {
        let mut reached = 0.0;
        let last = pool.iter().position(|candidate| {
            reached += f64::from(candidate.value);
            reached >= goal
        });
        pool.truncate(last.map_or(pool.len(), |last| last + 1));
    }
}

/// The index at which the running sum of `weights` exceeds `share` of their total.
fn pick(weights: &[f32], share: f64) -> Option<usize> {
    const BLOCK: usize = 1024;
    let mut left = share * sum_from(weights, 0.0);
    for (block, from) in weights.chunks(BLOCK).zip((0..).step_by(BLOCK)) {
        let sum = sum_from(block, 0.0);
        if left >= sum {
            left -= sum;
            continue;
        }
        for (&weight, index) in block.iter().zip(from..) {
            left -= f64::from(weight);
            if left < 0.0 {
                return Some(index);
            }
        }
    }
    // Because of rounding errors, the loop may end without a result.
    weights.iter().rposition(|&weight| weight > 0.0)
}

/// A number in `0..1` that depends only on the seed and the position. Applies SplitMix64's finaliser (Steele, Lea,
/// Flood 2014) twice, the second time over the position.
fn uniform(seed: u64, position: u64) -> f64 {
    let bits = mix(mix(seed.wrapping_add(INCREMENT)).wrapping_add(position.wrapping_mul(INCREMENT)));
    (bits >> 11) as f64 / (1u64 << 53) as f64
}

#[cfg(test)]
#[path = "sampler_tests.rs"]
mod tests;
