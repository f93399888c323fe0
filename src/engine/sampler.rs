//! Logits to a token. The order is that of the field, with min-p last as in Hugging Face's `generate`:
//!
//! 1. `logit_bias` is added;
//! 2. repetition penalty (tokens of the prompt and of the answer: a positive logit is divided, a negative one
//!    multiplied), then frequency and presence penalty (tokens of the answer only; both are subtracted);
//! 3. tokens that a [`super::Constraint`] does not allow become impossible;
//! 4. temperature divides; 0 ends here with the largest logit;
//! 5. top-k keeps the `k` likeliest;
//! 6. top-p keeps, of what is left and renormalised, the fewest likeliest whose probabilities reach `p`;
//! 7. min-p keeps what has at least `min_p` times the probability of the likeliest.
//!
//! Among equals the lower id counts as likelier, everywhere. A logit that is not a number counts as impossible. One
//! random number is used a token, a function of the seed and the token's place in the sequence only: what was drawn
//! before, or beside, does not matter.

use super::{Allowed, Logprobs, Sampling};
use crate::platform::split_mix64::{INCREMENT, mix};
use std::{
    cmp::Ordering,
    collections::HashMap,
    hash::{BuildHasher, RandomState},
};

/// Draws the tokens of one answer.
#[derive(Clone)]
pub struct Sampler {
    sampling: Sampling,
    seed: u64,
    usable: usize,
    /// Tokens so far, the prompt's included: the place of the next one.
    place: u64,
    /// The count of each token in the answer; 0 for a token of the prompt alone. Empty where no penalty asks.
    seen: HashMap<u32, u32>,
    /// The logits of steps 1 to 3.
    row: Vec<f32>,
    /// Tokens that are still in the draw.
    pool: Vec<Candidate>,
}

/// A token and its logit, later its weight (its probability times something common to all).
#[derive(Debug, Clone, Copy, PartialEq)]
struct Candidate {
    id: u32,
    value: f32,
}

impl Candidate {
    /// Likelier first.
    fn order(&self, other: &Self) -> Ordering {
        other.value.total_cmp(&self.value).then(self.id.cmp(&other.id))
    }
}

impl Sampler {
    /// For an answer to `prompt`. Ids from `usable` on are never drawn.
    pub fn new(sampling: Sampling, prompt: &[u32], usable: usize) -> Self {
        let seed = sampling.seed.unwrap_or_else(|| RandomState::new().hash_one(prompt.len()));
        let place = prompt.len() as u64;
        let mut sampler =
            Self { sampling, seed, usable, place, seen: HashMap::new(), row: Vec::new(), pool: Vec::new() };
        if sampler.penalises() {
            sampler.seen.extend(prompt.iter().map(|&id| (id, 0)));
        }
        sampler
    }

    /// The next token after `logits`; `None` if no token is possible. Counts it as part of the answer.
    pub fn draw(&mut self, logits: &[f32], allowed: &Allowed) -> Option<u32> {
        let logits = &logits[..logits.len().min(self.usable)];
        let mut row = std::mem::take(&mut self.row);
        let adjusts = self.penalises() || !self.sampling.logit_bias.is_empty();
        let logits = if adjusts || *allowed != Allowed::Any {
            row.clear();
            row.extend_from_slice(logits);
            if adjusts {
                self.adjust(&mut row);
            }
            if let Allowed::Only(words) = allowed {
                forbid(&mut row, words);
            }
            &row[..]
        } else {
            logits
        };
        let drawn = if self.sampling.temperature > 0.0 { self.pick(logits) } else { argmax(logits) };
        self.row = row;
        self.place += 1;
        if let Some(id) = drawn
            && self.penalises()
        {
            *self.seen.entry(id).or_default() += 1;
        }
        drawn
    }

    /// Becomes a copy of `other`, a sampler of the same answer.
    pub fn catch_up(&mut self, other: &Self) {
        self.place = other.place;
        if self.penalises() {
            self.seen.clone_from(&other.seen);
        }
    }

    fn penalises(&self) -> bool {
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
        for (&id, &count) in &self.seen {
            let Some(logit) = row.get_mut(id as usize) else { continue };
            *logit = if *logit > 0.0 { *logit / repetition_penalty } else { *logit * repetition_penalty };
            if count > 0 {
                *logit -= frequency_penalty * count as f32 + presence_penalty;
            }
        }
    }

    /// Steps 4 to 7 and the draw.
    fn pick(&mut self, logits: &[f32]) -> Option<u32> {
        let Sampling { temperature, top_k, top_p, min_p, .. } = self.sampling;
        let best = argmax(logits)?;
        let top = finite(logits[best as usize]);
        let pool = &mut self.pool;
        if top_k > 0 && top_k < logits.len() {
            largest(logits, top_k, pool);
        } else {
            pool.clear();
            pool.extend(logits.iter().zip(0..).map(|(&logit, id)| Candidate { id, value: finite(logit) }));
        }
        for candidate in pool.iter_mut() {
            candidate.value = ((candidate.value - top) / temperature).exp();
        }
        if top_p < 1.0 {
            keep_top_p(pool, top_p);
        }
        if min_p > 0.0 {
            // The likeliest has the weight 1 and stays, whatever is asked.
            pool.retain(|candidate| candidate.value >= min_p.min(1.0));
        }
        let total: f64 = pool.iter().map(|candidate| f64::from(candidate.value)).sum();
        let mut left = uniform(self.seed, self.place) * total;
        for candidate in pool.iter() {
            left -= f64::from(candidate.value);
            if left < 0.0 {
                return Some(candidate.id);
            }
        }
        // Rounding used the whole sum up.
        pool.iter().rev().find(|candidate| candidate.value > 0.0).map(|candidate| candidate.id)
    }
}

/// Step 3: what has no bit in `words` becomes impossible.
fn forbid(row: &mut [f32], words: &[u32]) {
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

/// The log-probability of `id` and the `top` likeliest of the usable tokens, under the softmax of `logits` as they are.
pub(super) fn logprobs(logits: &[f32], id: u32, top: usize, usable: usize) -> Logprobs {
    let peak = finite(peak(logits)).max(f32::MIN);
    let sum: f64 = logits.iter().map(|&logit| f64::from((finite(logit) - peak).exp())).sum();
    let normal = f64::from(peak) + sum.ln();
    let logprob = |logit: f32| (f64::from(finite(logit)) - normal) as f32;
    let mut likely = Vec::new();
    largest(&logits[..logits.len().min(usable)], top, &mut likely);
    Logprobs {
        logprob: logits.get(id as usize).map_or(f32::NEG_INFINITY, |&logit| logprob(logit)),
        top: likely.into_iter().map(|candidate| (candidate.id, logprob(candidate.value))).collect(),
    }
}

/// A number to compute with: what is not a number is impossible, infinity is the largest there is, and there is one zero.
fn finite(logit: f32) -> f32 {
    if logit.is_nan() { f32::NEG_INFINITY } else { logit.min(f32::MAX) + 0.0 }
}

/// The largest logit, negative infinity if all are impossible.
fn peak(logits: &[f32]) -> f32 {
    // Sixteen at a time, in registers. A comparison with NaN is false.
    let mut lanes = [f32::NEG_INFINITY; 16];
    let (blocks, rest) = logits.as_chunks::<16>();
    for block in blocks {
        for (lane, &logit) in lanes.iter_mut().zip(block) {
            *lane = if logit > *lane { logit } else { *lane };
        }
    }
    lanes.iter().chain(rest).fold(f32::NEG_INFINITY, |peak, &logit| if logit > peak { logit } else { peak })
}

/// The largest logit's id, the lowest of several; `None` if all are impossible.
pub fn argmax(logits: &[f32]) -> Option<u32> {
    let peak = peak(logits);
    // A block at a time, in registers, then within it.
    let has = |block: &[f32]| block.iter().fold(false, |any, &logit| any | (logit == peak));
    let block = logits.chunks(64).position(has)? * 64;
    let place = block + logits[block..].iter().position(|&logit| logit == peak)?;
    (peak > f32::NEG_INFINITY).then_some(place as u32)
}

/// The `count` largest, sorted.
fn largest(logits: &[f32], count: usize, pool: &mut Vec<Candidate>) {
    pool.clear();
    let count = count.min(logits.len());
    if count == 0 {
        return;
    }
    // Sorting again when twice as many have come costs less than keeping a heap in order. Later tokens must be
    // larger than the last that is kept, not equal to it: equals have a higher id. Most blocks have nothing to offer.
    let mut bar = f32::NEG_INFINITY;
    for (block, from) in logits.chunks(64).zip((0..).step_by(64)) {
        if pool.len() >= count && !block.iter().fold(false, |any, &logit| any | (logit > bar)) {
            continue;
        }
        for (&logit, id) in block.iter().zip(from..) {
            let candidate = Candidate { id, value: finite(logit) };
            if candidate.value > bar || pool.len() < count {
                pool.push(candidate);
            }
            if pool.len() == 2 * count {
                pool.sort_unstable_by(Candidate::order);
                pool.truncate(count);
                bar = pool[count - 1].value;
            }
        }
    }
    pool.sort_unstable_by(Candidate::order);
    pool.truncate(count);
}

/// Keeps the fewest likeliest candidates whose weights reach `share` of the whole; at least one. The largest weight is 1.
fn keep_top_p(pool: &mut Vec<Candidate>, share: f32) {
    let mass = |bar: f32| -> f64 {
        pool.iter().map(|candidate| f64::from(if candidate.value >= bar { candidate.value } else { 0.0 })).sum()
    };
    let goal = mass(0.0) * f64::from(share.max(0.0));
    // Few tokens are kept of most rows, so only those above a bar that is low enough are sorted.
    let bar = (0..).map(|step| 32f32.powi(-step)).find(|&bar| bar == 0.0 || mass(bar) >= goal).unwrap_or(0.0);
    pool.retain(|candidate| candidate.value >= bar);
    pool.sort_unstable_by(Candidate::order);
    let mut reached = 0.0;
    let kept = pool.iter().position(|candidate| {
        reached += f64::from(candidate.value);
        reached >= goal
    });
    pool.truncate(kept.map_or(pool.len(), |last| last + 1));
}

/// A number in `0..1` from the key alone: two rounds of SplitMix64's finaliser (Steele, Lea, Flood 2014), the second
/// over the place.
fn uniform(seed: u64, place: u64) -> f64 {
    let bits = mix(mix(seed.wrapping_add(INCREMENT)).wrapping_add(place.wrapping_mul(INCREMENT)));
    (bits >> 11) as f64 / (1u64 << 53) as f64
}

#[cfg(test)]
mod tests;
