//! Estimates decoding speed from bandwidths measured on this machine.
//!
//! One token reads the trunk (but only one row of the embedding), reads and writes the delta-net states, and computes
//! with k experts in each layer. Experts that are not in memory are first read from the disk or the page cache. The LM
//! head is one large matrix and is read at memory bandwidth. The many small matrices of the layers are read more
//! slowly, at the measured rate of the expert kernels. On 16 cores, this rate is about half of memory bandwidth.
//!
//! Within a layer, experts in memory are computed while other experts are read, and each expert is computed when it
//! arrives. If m experts are read from the disk and c experts from the page cache, a layer takes
//!
//! ```text
//! max(k * expert / compute, wait + expert / compute) + overhead
//! wait = max(latency, m * expert / disk) + c * expert / cache
//! ```
//!
//! In the first case of `max`, computation takes longer than the reads. In the second case, the last expert arrives
//! after all other experts are computed. If m is 0, there is no latency. If m and c are 0, there is no second case.
//!
//! Misses are assumed to be independent, so m has a binomial distribution. For c, the mean is used. A token also has
//! costs outside the layers: the last wait, copying the logits, and sampling. The estimate ignores prefetching, which
//! makes decoding faster. The estimate also assumes a short context and reads that need no CPU time. If these
//! assumptions do not hold, decoding is slower than estimated.

use moestro_model::plan::{ModelFootprint, Plan};
use serde::{Deserialize, Serialize};

/// Hit rates that `moestro info` shows.
pub const HIT_RATES: [f64; 6] = [0.0, 0.5, 0.8, 0.9, 0.95, 1.0];

/// Measurements of this machine.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Bandwidth {
    /// Bytes per second that all compute threads read from memory together.
    pub memory: f64,
    /// Bytes of layer weights per second that decoding processes.
    pub compute: f64,
    /// Bytes per second of random reads with the size of an expert, at the queue depth of the expert reader.
    pub disk: f64,
    /// Seconds to read one expert when no other read is in progress.
    pub latency: f64,
    /// Bytes per second of reads from the page cache.
    pub cache: f64,
}

/// Hit rates of slots and page cache, as fractions from 0 to 1.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct HitRates {
    /// Fraction of experts found in slots.
    pub slots: f64,
    /// Fraction of the other experts found in the page cache. 0 if reads bypass the page cache.
    pub cache: f64,
}

impl HitRates {
    /// Hit rates if every expert is in a slot.
    pub const ALL: Self = Self { slots: 1.0, cache: 0.0 };

    /// Hit rates for reads through a page cache of `page_cache` bytes. Assumes that the page cache is full and contains
    /// each expert without a slot with the same probability.
    pub fn through(slots: f64, page_cache: u64, footprint: &ModelFootprint, plan: &Plan) -> Self {
        let absent = footprint.total_experts().saturating_sub(plan.slots as u64).saturating_mul(footprint.expert);
        Self { slots, cache: (page_cache as f64 / absent.max(1) as f64).min(1.0) }
    }
}

/// Estimated decoding speed at one hit rate.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Estimate {
    pub hit_rate: f64,
    pub tokens_per_second: f64,
    /// Number of bytes read from the disk per token.
    pub disk_bytes_per_token: f64,
}

/// Overhead in seconds that does not depend on the number of bytes read.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Overhead {
    /// Overhead of each layer: launches and waits.
    pub layer: f64,
    /// Overhead of each token that does not depend on the number of layers.
    pub token: f64,
}

/// Estimates the decoding speed of a model with this footprint at the hit rates `found`.
pub fn estimate(footprint: &ModelFootprint, bandwidth: &Bandwidth, found: HitRates, overhead: Overhead) -> Estimate {
    let miss = 1.0 - found.slots.clamp(0.0, 1.0);
    let cached = miss * found.cache.clamp(0.0, 1.0);
    let read = miss * (1.0 - found.cache.clamp(0.0, 1.0));
    let k = footprint.experts_per_token;
    let layers = footprint.layers as f64;
    let expert = footprint.expert as f64;
    let compute = expert / bandwidth.compute;
    // Conditional probability that an expert is read from the page cache, given that it is not read from the disk.
    let from_cache = if read < 1.0 { cached / (1.0 - read) } else { 0.0 };
    let layer: f64 = (0..=k)
        .map(|reads| {
            let disk = if reads == 0 { 0.0 } else { (reads as f64 * expert / bandwidth.disk).max(bandwidth.latency) };
            let others = (k - reads) as f64 * from_cache;
            let wait = disk + if others > 0.0 { others * expert / bandwidth.cache } else { 0.0 };
            let last_arrives = if reads > 0 { 1.0 } else { 1.0 - (1.0 - from_cache).powi(k as i32) };
            binomial(k, reads, read) * (wait + last_arrives * compute).max(k as f64 * compute)
        })
        .sum();
    let trunk = footprint.trunk.saturating_sub(footprint.gathered + footprint.head) as f64 / bandwidth.compute;
    let head = footprint.head as f64 / bandwidth.memory;
    let state = 2.0 * footprint.state as f64 / bandwidth.memory;
    Estimate {
        hit_rate: found.slots,
        tokens_per_second: 1.0 / (trunk + head + state + layers * (layer + overhead.layer) + overhead.token),
        disk_bytes_per_token: read * layers * k as f64 * expert,
    }
}

/// Probability of `m` successes in `n` independent trials with success probability `p`.
fn binomial(n: usize, m: usize, p: f64) -> f64 {
    let choose: f64 = (0..m).map(|i| (n - i) as f64 / (i + 1) as f64).product();
    choose * p.powi(m as i32) * (1.0 - p).powi((n - m) as i32)
}

#[cfg(test)]
#[path = "estimate_tests.rs"]
mod measured;

#[cfg(test)]
#[path = "../../crates/model/src/plan/model_35b.rs"]
pub mod model_35b;

#[cfg(test)]
mod tests {
    use super::model_35b::model_35b;
    use super::*;

    #[test]
    fn binomial_sums_to_one() {
        for p in [0.0, 0.05, 0.5, 1.0] {
            let sum: f64 = (0..=8).map(|m| binomial(8, m, p)).sum();
            assert!((sum - 1.0).abs() < 1e-12, "{p}: {sum}");
        }
        assert_eq!(binomial(8, 0, 0.0), 1.0);
        assert!((binomial(3, 2, 0.5) - 0.375).abs() < 1e-12);
    }

    #[test]
    fn full_and_zero_hit_rates_match_bandwidths() {
        let footprint = model_35b();
        let bandwidth = Bandwidth { memory: 120e9, compute: 100e9, disk: 5e9, latency: 0.3e-3, cache: 10e9 };
        let read = (footprint.trunk - footprint.gathered - footprint.head) as f64;
        let routed = 40.0 * 8.0 * footprint.expert as f64;
        let warm = estimate(&footprint, &bandwidth, HitRates::ALL, Overhead::default());
        let state = (2 * footprint.state + footprint.head) as f64 / 120e9;
        assert!((warm.tokens_per_second - 1.0 / ((read + routed) / 100e9 + state)).abs() < 1e-6);
        assert_eq!(warm.disk_bytes_per_token, 0.0);
        let waiting = estimate(&footprint, &bandwidth, HitRates::ALL, Overhead { layer: 1e-3, token: 2e-3 });
        assert!((1.0 / waiting.tokens_per_second - 1.0 / warm.tokens_per_second - 0.042).abs() < 1e-9);
        // Without hits, a token takes the time of the disk reads, plus the time of the trunk, plus the time to compute
        // the last expert of each layer.
        let cold = estimate(&footprint, &bandwidth, HitRates { slots: 0.0, cache: 0.0 }, Overhead::default());
        let seconds = routed / 5e9 + (read + 40.0 * footprint.expert as f64) / 100e9 + state;
        assert!((cold.tokens_per_second - 1.0 / seconds).abs() < 1e-6);
        assert!((cold.disk_bytes_per_token - routed).abs() < 1.0);
    }

    #[test]
    fn higher_hit_rate_is_never_slower() {
        let bandwidth = Bandwidth { memory: 20e9, compute: 15e9, disk: 1e9, latency: 1e-3, cache: 8e9 };
        let none = Overhead::default();
        let speeds = HIT_RATES.map(|rate| {
            estimate(&model_35b(), &bandwidth, HitRates { slots: rate, cache: 0.0 }, none).tokens_per_second
        });
        assert!(speeds.windows(2).all(|pair| pair[0] < pair[1]), "{speeds:?}");
    }

    #[test]
    fn estimate_matches_hand_computed_misses() {
        let footprint = ModelFootprint {
            trunk: 5000,
            gathered: 1000,
            head: 0,
            expert: 1000,
            layers: 3,
            experts_per_token: 2,
            state: 3_000_000,
            ..model_35b()
        };
        let bandwidth = Bandwidth { memory: 60e6, compute: 1e4, disk: 2e3, latency: 0.6, cache: 4e3 };
        let overhead = Overhead { layer: 0.05, token: 0.2 };
        let found = estimate(&footprint, &bandwidth, HitRates { slots: 0.75, cache: 0.0 }, overhead);
        // The trunk takes 0.4 s and the state 0.1 s. A layer takes 0.2 s if both experts hit. If one expert misses, the
        // layer takes the latency plus the time to compute one expert. If both experts miss, the layer takes one second of
        // reading plus the time to compute one expert.
        let layer = 0.5625 * 0.2 + 0.375 * 0.7 + 0.0625 * 1.1;
        assert!((found.tokens_per_second - 1.0 / (0.5 + 3.0 * (layer + 0.05) + 0.2)).abs() < 1e-9, "{found:?}");
        assert!((found.disk_bytes_per_token - 1500.0).abs() < 1e-9 && found.hit_rate == 0.75, "{found:?}");
        // Half of the misses are in the page cache. Zero, one or two experts are read from the page cache, at a quarter of
        // a second each.
        let found = estimate(&footprint, &bandwidth, HitRates { slots: 0.75, cache: 0.5 }, overhead);
        let one = 1.0 / 7.0; // Probability of the page cache, given that the disk is not needed.
        let layer = 0.765625 * (0.2f64).max(2.0 * one * 0.25 + 0.1 * (1.0 - (6.0f64 / 7.0).powi(2)))
            + 0.21875 * (0.7 + one * 0.25)
            + 0.015625 * 1.1;
        assert!((found.tokens_per_second - 1.0 / (0.5 + 3.0 * (layer + 0.05) + 0.2)).abs() < 1e-9, "{found:?}");
        assert!((found.disk_bytes_per_token - 750.0).abs() < 1e-9, "{found:?}");
        // The head is read at memory bandwidth.
        let footprint = ModelFootprint { head: 3000, ..footprint };
        let memory = Bandwidth { memory: 3e4, ..bandwidth };
        let [whole, apart] = [bandwidth, memory].map(|bandwidth| {
            let state = 2.0 * footprint.state as f64 / bandwidth.memory;
            1.0 / estimate(&footprint, &bandwidth, HitRates::ALL, Overhead::default()).tokens_per_second - state
        });
        assert!((whole - 3000.0 / bandwidth.memory - 0.1 - 0.6).abs() < 1e-9 && (apart - 0.1 - 0.1 - 0.6).abs() < 1e-9);
    }

    #[test]
    fn estimate_of_dense_model_is_finite() {
        let footprint =
            ModelFootprint { expert: 0, slot: 0, layers: 0, experts: 0, experts_per_token: 0, ..model_35b() };
        let bandwidth = Bandwidth { memory: 1e9, compute: 1e9, disk: 1e9, latency: 1e-3, cache: 1e9 };
        assert!(estimate(&footprint, &bandwidth, HitRates::ALL, Overhead::default()).tokens_per_second.is_finite());
    }
}
