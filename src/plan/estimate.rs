//! The speed decoding can reach, from bandwidths measured on this machine.
//!
//! One token goes through the trunk (but for the embedding's other rows), reads and writes the delta nets' states, and goes,
//! in each layer, through k experts; those that missed come from the disk or the page cache first. The head is one matrix and
//! goes at the memory's rate. Layers' weights, in many small ones, go at the rate of the model's own expert kernels, as
//! measured here: on 16 cores that is half. The overlap assumed is the store's: within a layer, hits are computed while misses
//! are read and each miss is computed as it lands, so a layer takes
//!
//! ```text
//! max(k * expert / compute, wait + expert / compute) + overhead     wait = max(latency, m * expert / disk) + c * expert / cache
//! ```
//!
//! for m misses that are read from the disk and c that the page cache has: either computing hides the reads, or the last one
//! lands and is then computed; without misses nothing waits, and without reads from the disk there is no latency. Misses fall
//! independently, so m is binomial; for c its mean is taken. A token also takes what belongs to no layer: the last wait, reading
//! the logits back, the draw. Nothing is assumed to be read ahead across layers, which makes decoding faster than this; a short
//! context is assumed, and a processor that reading leaves alone, which make it slower.

use super::{ModelFootprint, Plan};
use serde::Serialize;

/// The hit rates that `moestro info` shows.
pub const HIT_RATES: [f64; 6] = [0.0, 0.5, 0.8, 0.9, 0.95, 1.0];

/// This machine's measurements.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Bandwidth {
    /// Bytes per second that all compute threads together read from memory.
    pub memory: f64,
    /// Bytes of layers' weights per second that the compute threads go through in decode.
    pub compute: f64,
    /// Bytes per second of random reads of one expert's size at the streamer's queue depth.
    pub disk: f64,
    /// Seconds that the read of one expert takes alone.
    pub latency: f64,
    /// Bytes per second of reads that the page cache answers.
    pub cache: f64,
}

/// The places where a wanted expert is found.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct HitRates {
    /// The part that slots have: the hit rate.
    pub slots: f64,
    /// The part of the others that the page cache has, where they are read through it.
    pub cache: f64,
}

impl HitRates {
    /// Everything in slots.
    pub const ALL: Self = Self { slots: 1.0, cache: 0.0 };

    /// At this hit rate, where a page cache of so many bytes is read through and has been filled: it has any expert without a
    /// slot as likely as any other.
    pub fn through(slots: f64, page_cache: u64, shape: &ModelFootprint, plan: &Plan) -> Self {
        let absent = shape.total_experts().saturating_sub(plan.slots as u64).saturating_mul(shape.expert);
        Self { slots, cache: (page_cache as f64 / absent.max(1) as f64).min(1.0) }
    }
}

/// Decoding at one hit rate.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Estimate {
    pub hit_rate: f64,
    pub tokens_per_second: f64,
    /// Bytes that a token reads from the disk.
    pub disk_bytes_per_token: f64,
}

/// Seconds beside the bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Overhead {
    /// Of a layer: launches, waits.
    pub layer: f64,
    /// Of a token, however many layers there are.
    pub token: f64,
}

/// Decode speed of `shape` where its experts are `found` in these parts (0 to 1).
pub fn estimate(shape: &ModelFootprint, bandwidth: &Bandwidth, found: HitRates, overhead: Overhead) -> Estimate {
    let miss = 1.0 - found.slots.clamp(0.0, 1.0);
    let (cached, read) = (miss * found.cache.clamp(0.0, 1.0), miss * (1.0 - found.cache.clamp(0.0, 1.0)));
    let (k, layers) = (shape.experts_per_token, shape.layers as f64);
    let expert = shape.expert as f64;
    let compute = expert / bandwidth.compute;
    // The chance that an expert which the disk need not give comes from the page cache.
    let from_cache = if read < 1.0 { cached / (1.0 - read) } else { 0.0 };
    let layer: f64 = (0..=k)
        .map(|reads| {
            let disk = if reads == 0 { 0.0 } else { (reads as f64 * expert / bandwidth.disk).max(bandwidth.latency) };
            let others = (k - reads) as f64 * from_cache;
            let wait = disk + if others > 0.0 { others * expert / bandwidth.cache } else { 0.0 };
            let landed = if reads > 0 { 1.0 } else { 1.0 - (1.0 - from_cache).powi(k as i32) };
            binomial(k, reads, read) * (wait + landed * compute).max(k as f64 * compute)
        })
        .sum();
    let trunk = shape.trunk.saturating_sub(shape.gathered + shape.head) as f64 / bandwidth.compute;
    let head = shape.head as f64 / bandwidth.memory;
    let state = 2.0 * shape.state as f64 / bandwidth.memory;
    Estimate {
        hit_rate: found.slots,
        tokens_per_second: 1.0 / (trunk + head + state + layers * (layer + overhead.layer) + overhead.token),
        disk_bytes_per_token: read * layers * k as f64 * expert,
    }
}

/// The probability of `m` successes in `n` trials.
fn binomial(n: usize, m: usize, p: f64) -> f64 {
    let choose: f64 = (0..m).map(|i| (n - i) as f64 / (i + 1) as f64).product();
    choose * p.powi(m as i32) * (1.0 - p).powi((n - m) as i32)
}

#[cfg(test)]
mod held_out;

#[cfg(test)]
mod tests {
    use super::super::tests::model_35b;
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
    fn the_ends_are_the_bandwidths() {
        let shape = model_35b();
        let bandwidth = Bandwidth { memory: 120e9, compute: 100e9, disk: 5e9, latency: 0.3e-3, cache: 10e9 };
        let read = (shape.trunk - shape.gathered - shape.head) as f64;
        let routed = 40.0 * 8.0 * shape.expert as f64;
        let warm = estimate(&shape, &bandwidth, HitRates::ALL, Overhead::default());
        let state = (2 * shape.state + shape.head) as f64 / 120e9;
        assert!((warm.tokens_per_second - 1.0 / ((read + routed) / 100e9 + state)).abs() < 1e-6);
        assert_eq!(warm.disk_bytes_per_token, 0.0);
        let waiting = estimate(&shape, &bandwidth, HitRates::ALL, Overhead { layer: 1e-3, token: 2e-3 });
        assert!((1.0 / waiting.tokens_per_second - 1.0 / warm.tokens_per_second - 0.042).abs() < 1e-9);
        // Nothing but misses: the disk, and the trunk and one expert a layer that it cannot hide.
        let cold = estimate(&shape, &bandwidth, HitRates { slots: 0.0, cache: 0.0 }, Overhead::default());
        let seconds = routed / 5e9 + (read + 40.0 * shape.expert as f64) / 100e9 + state;
        assert!((cold.tokens_per_second - 1.0 / seconds).abs() < 1e-6);
        assert!((cold.disk_bytes_per_token - routed).abs() < 1.0);
    }

    #[test]
    fn a_higher_hit_rate_is_never_slower() {
        let bandwidth = Bandwidth { memory: 20e9, compute: 15e9, disk: 1e9, latency: 1e-3, cache: 8e9 };
        let none = Overhead::default();
        let speeds = HIT_RATES.map(|rate| {
            estimate(&model_35b(), &bandwidth, HitRates { slots: rate, cache: 0.0 }, none).tokens_per_second
        });
        assert!(speeds.windows(2).all(|pair| pair[0] < pair[1]), "{speeds:?}");
    }
}
