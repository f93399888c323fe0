//! Sampling: from logits to a token. The steps run in the usual order, with min-p last as in Hugging Face's `generate`:
//!
//! 1. add `logit_bias`;
//! 2. apply the repetition penalty to tokens of the prompt and the answer (divide positive logits, multiply negative ones),
//!    then subtract the frequency and presence penalties for tokens of the answer;
//! 3. mask tokens that the request's [`Constraint`](super::Constraint) does not allow;
//! 4. divide by the temperature; a temperature of 0 returns the largest logit here;
//! 5. top-k keeps the `k` most likely tokens;
//! 6. top-p keeps the fewest most likely tokens whose renormalised probabilities sum to at least `p`;
//! 7. min-p keeps tokens with at least `min_p` times the probability of the most likely one.
//!
//! Of equally likely tokens, the one with the lower id counts as more likely. NaN counts as impossible. Each token uses one
//! random number, which depends only on the seed and the token's position. A result therefore does not depend on earlier
//! draws or on other requests.

use super::{
    constraint::TokenMask,
    request::{Logprobs, Sampling},
};
use crate::platform::split_mix64::{INCREMENT, mix};
use std::{
    cmp::Ordering,
    collections::HashMap,
    hash::{BuildHasher, RandomState},
};

/// Samples the tokens of one answer.
#[derive(Clone)]
pub struct Sampler {
    sampling: Sampling,
    seed: u64,
    /// Ids from here on are never sampled.
    usable: usize,
    /// Position of the next token, counted from the start of the prompt.
    position: u64,
    /// Number of times each token occurs in the answer. 0 for tokens that occur only in the prompt. Empty without penalties.
    counts: HashMap<u32, u32>,
    /// Buffer for the logits of steps 1 to 3.
    row: Vec<f32>,
    /// Buffer for the tokens that steps 5 to 7 keep.
    pool: Vec<TokenCandidate>,
}

/// A token and its logit, later its weight: its probability times a factor common to all tokens.
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
    /// A sampler for an answer to `prompt`. Ids from `usable` on are never sampled.
    pub fn new(sampling: Sampling, prompt: &[u32], usable: usize) -> Self {
        let seed = sampling.seed.unwrap_or_else(|| RandomState::new().hash_one(prompt.len()));
        let position = prompt.len() as u64;
        let mut sampler =
            Self { sampling, seed, usable, position, counts: HashMap::new(), row: Vec::new(), pool: Vec::new() };
        if sampler.has_penalties() {
            sampler.counts.extend(prompt.iter().map(|&id| (id, 0)));
        }
        sampler
    }

    /// Samples the token after `logits` and counts it as part of the answer. `None` if no token is possible.
    pub fn draw(&mut self, logits: &[f32], mask: &TokenMask) -> Option<u32> {
        let logits = &logits[..logits.len().min(self.usable)];
        let mut row = std::mem::take(&mut self.row);
        let adjusts = self.has_penalties() || !self.sampling.logit_bias.is_empty();
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
        let best = argmax(logits)?;
        let top = finite(logits[best as usize]);
        let pool = &mut self.pool;
        if top_k > 0 && top_k < logits.len() {
            largest(logits, top_k, pool);
        } else {
            pool.clear();
            pool.extend(logits.iter().zip(0..).map(|(&logit, id)| TokenCandidate { id, value: finite(logit) }));
        }
        for candidate in pool.iter_mut() {
            candidate.value = ((candidate.value - top) / temperature).exp();
        }
        if top_p < 1.0 {
            keep_top_p(pool, top_p);
        }
        if min_p > 0.0 {
            // The most likely token has weight 1 and always stays.
            pool.retain(|candidate| candidate.value >= min_p.min(1.0));
        }
        let total: f64 = pool.iter().map(|candidate| f64::from(candidate.value)).sum();
        let mut left = uniform(self.seed, self.position) * total;
        for candidate in pool.iter() {
            left -= f64::from(candidate.value);
            if left < 0.0 {
                return Some(candidate.id);
            }
        }
        // Rounding errors can leave nothing of the sum.
        pool.iter().rev().find(|candidate| candidate.value > 0.0).map(|candidate| candidate.id)
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

/// The log-probability of `id` and of the `top` most likely usable tokens, from the softmax of the unmodified `logits`.
pub(super) fn logprobs(logits: &[f32], id: u32, top: usize, usable: usize) -> Logprobs {
    let peak = finite(peak(logits)).max(f32::MIN);
    let sum: f64 = logits.iter().map(|&logit| f64::from((finite(logit) - peak).exp())).sum();
    let log_sum = f64::from(peak) + sum.ln();
    let logprob = |logit: f32| (f64::from(finite(logit)) - log_sum) as f32;
    let mut likely = Vec::new();
    largest(&logits[..logits.len().min(usable)], top, &mut likely);
    Logprobs {
        logprob: logits.get(id as usize).map_or(f32::NEG_INFINITY, |&logit| logprob(logit)),
        top: likely.into_iter().map(|candidate| (candidate.id, logprob(candidate.value))).collect(),
    }
}

/// Maps a logit to a number that is safe to compute with: NaN to negative infinity, infinity to the largest finite number,
/// negative zero to zero.
fn finite(logit: f32) -> f32 {
    if logit.is_nan() { f32::NEG_INFINITY } else { logit.min(f32::MAX) + 0.0 }
}

/// The largest logit. Negative infinity if no token is possible.
fn peak(logits: &[f32]) -> f32 {
    // Sixteen lanes stay in registers. A comparison with NaN is false.
    let mut lanes = [f32::NEG_INFINITY; 16];
    let (blocks, rest) = logits.as_chunks::<16>();
    for block in blocks {
        for (lane, &logit) in lanes.iter_mut().zip(block) {
            *lane = if logit > *lane { logit } else { *lane };
        }
    }
    lanes.iter().chain(rest).fold(f32::NEG_INFINITY, |peak, &logit| if logit > peak { logit } else { peak })
}

/// The id of the largest logit, the lowest id of several. `None` if no token is possible.
pub fn argmax(logits: &[f32]) -> Option<u32> {
    let peak = peak(logits);
    // Finds the block first, which is a loop in registers, then the position within it.
    let has = |block: &[f32]| block.iter().fold(false, |any, &logit| any | (logit == peak));
    let block = logits.chunks(64).position(has)? * 64;
    let id = block + logits[block..].iter().position(|&logit| logit == peak)?;
    (peak > f32::NEG_INFINITY).then_some(id as u32)
}

/// Fills `pool` with the `count` largest logits, sorted.
fn largest(logits: &[f32], count: usize, pool: &mut Vec<TokenCandidate>) {
    pool.clear();
    let count = count.min(logits.len());
    if count == 0 {
        return;
    }
    // Sorting whenever the pool has twice `count` entries costs less than a heap. A later token must be larger than the
    // last one that is kept: an equal one has a higher id. Most blocks have no such token and are skipped.
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

/// Keeps the fewest most likely candidates whose weights sum to at least `share` of the total. Keeps at least one. The
/// largest weight is 1.
fn keep_top_p(pool: &mut Vec<TokenCandidate>, share: f32) {
    let mass = |bar: f32| -> f64 {
        pool.iter().map(|candidate| f64::from(if candidate.value >= bar { candidate.value } else { 0.0 })).sum()
    };
    let goal = mass(0.0) * f64::from(share.max(0.0));
    // Most rows keep few tokens, so only candidates above a sufficiently low bar are sorted.
    let bar = (0..).map(|step| 32f32.powi(-step)).find(|&bar| bar == 0.0 || mass(bar) >= goal).unwrap_or(0.0);
    pool.retain(|candidate| candidate.value >= bar);
    pool.sort_unstable_by(TokenCandidate::order);
    let mut reached = 0.0;
    let kept = pool.iter().position(|candidate| {
        reached += f64::from(candidate.value);
        reached >= goal
    });
    pool.truncate(kept.map_or(pool.len(), |last| last + 1));
}

/// A number in `0..1` that depends only on the seed and the position: two rounds of SplitMix64's finaliser (Steele, Lea,
/// Flood 2014), the second over the position.
fn uniform(seed: u64, position: u64) -> f64 {
    let bits = mix(mix(seed.wrapping_add(INCREMENT)).wrapping_add(position.wrapping_mul(INCREMENT)));
    (bits >> 11) as f64 / (1u64 << 53) as f64
}

#[cfg(test)]
#[path = "sampler_tests.rs"]
mod tests;
