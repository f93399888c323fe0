//! Measures the inputs of estimates: memory bandwidth, the speed of the expert kernels, and the speed of expert reads.

use super::estimate::Bandwidth;
use crate::error::CommandError;
use moestro_base::{error::StoreError, metrics::Metrics, platform::Access};
use moestro_compute::{
    device::{CpuDevice, CpuTimeline, memory_bandwidth},
    experts::{ExpertChoice, ExpertStore, Options, PassSize, Prefetch},
};
use moestro_model::model::{CheckpointInfo, StoreOptions, speed};
use serde::Serialize;
use std::time::{Duration, Instant};

/// Maximum number of bytes that are read to measure memory bandwidth. The bytes are more than any CPU cache can hold.
const BLOCK: u64 = 512 << 20;

/// Results of the measurements, and the conditions of the measurements.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Measurements {
    #[serde(flatten)]
    pub bandwidth: Bandwidth,
    pub threads: usize,
    pub io_threads: usize,
    /// True if expert reads bypassed the page cache.
    pub direct: bool,
    pub kernels: KernelRate,
}

/// Source of the rate of the kernels.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum KernelRate {
    /// Measured with the model's own kernels on the CPU.
    Measured,
    /// Taken from a report of `moestro doctor` about this GPU.
    Reported,
    /// Assumed equal to memory bandwidth.
    Assumed,
}

/// Measures memory and kernels with `threads` threads and at most `max_bytes` bytes, and expert reads with
/// [`measure_reads`]. With a GPU, or without expert layers, the kernels are assumed to process weights at memory
/// bandwidth.
pub fn measure(
    found: &CheckpointInfo,
    store: &StoreOptions,
    threads: usize,
    gpu: bool,
    max_bytes: u64,
) -> Result<Measurements, CommandError> {
    let block = BLOCK.min(max_bytes) as usize;
    let memory = memory_bandwidth(threads, block, Duration::from_millis(200));
    let memory = memory.map_err(CommandError::io("cannot measure memory bandwidth"))?;
    let experts = found.footprint.experts_per_token.max(1);
    let (compute, kernels) = match found.feed_forward.filter(|_| !gpu) {
        Some(kinds) => {
            let compute = CpuDevice::new(threads, Default::default());
            let rate = speed::decode_rate(&kinds, experts, &compute, block, Duration::from_millis(300))?;
            (rate, KernelRate::Measured)
        }
        None => (memory, KernelRate::Assumed),
    };
    let ReadSpeed { rate, latency, direct, cache } = measure_reads(found, store)?;
    let bandwidth = Bandwidth { memory, compute, disk: rate, latency, cache };
    Ok(Measurements { bandwidth, threads, io_threads: store.threads, direct, kernels })
}

/// Speed of expert reads by the threads of the expert store, without computation.
struct ReadSpeed {
    /// Bytes per second if every expert of a token misses. Infinite for a model without routed experts.
    rate: f64,
    /// Seconds to read one expert.
    latency: f64,
    /// True if reads bypass the page cache.
    direct: bool,
    /// Bytes per second when the same experts are read again, from the page cache. Infinite if reads bypass the page
    /// cache.
    cache: f64,
}

fn measure_reads(found: &CheckpointInfo, store: &StoreOptions) -> Result<ReadSpeed, StoreError> {
    let k = found.footprint.experts_per_token;
    if k == 0 {
        return Ok(ReadSpeed { rate: f64::INFINITY, latency: 0.0, direct: true, cache: f64::INFINITY });
    }
    let metrics = Metrics::new(env!("CARGO_PKG_VERSION"), "cpu");
    let options = Options { io: store.io, threads: store.threads, prefetch: Prefetch::Off, ..Options::new(k) };
    let store = ExpertStore::open(found.files.clone(), found.experts.clone(), options, metrics)?;
    let direct = store.access() == Access::Direct;
    let read = |walk: &mut ExpertWalk, experts: usize, most: usize, budget: Duration| -> Result<_, StoreError> {
        let begin = Instant::now();
        let mut count = 0;
        while count < most && (count == 0 || begin.elapsed() < budget) {
            let Some((layer, ids)) = walk.next(experts) else { break };
            let choice = ExpertChoice { ids: &ids, k: ids.len(), logits: &[] };
            let mut asked = store.fetch(layer, &choice, PassSize::Small, &mut CpuTimeline)?;
            while asked.next(&mut CpuTimeline)?.is_some() {}
            count += 1;
        }
        Ok((begin.elapsed().as_secs_f64() / count.max(1) as f64, count))
    };
    // Latency reads use at most an eighth of the experts. The other experts are kept for the rate, which matters more.
    let max_count = (found.footprint.layers * found.footprint.experts / 8).max(1);
    let mut walk = ExpertWalk::new(found.footprint.layers, found.footprint.experts);
    let (latency, _) = read(&mut walk, 1, max_count, Duration::from_millis(150))?;
    let from = walk.clone();
    let (route, count) = read(&mut walk, k, usize::MAX, Duration::from_millis(450))?;
    let rate = |seconds: f64| k as f64 * found.footprint.expert as f64 / seconds;
    let cache = if direct { f64::INFINITY } else { rate(read(&mut { from }, k, count, Duration::from_millis(450))?.0) };
    Ok(ReadSpeed { rate: rate(route), latency, direct, cache })
}

/// Visits all experts, layer by layer. Consecutive experts of a layer are far apart in the file, as with a real router.
#[derive(Clone)]
struct ExpertWalk {
    /// Number of experts already returned, for each layer.
    returned: Vec<usize>,
    experts: usize,
    stride: usize,
    turn: usize,
}

impl ExpertWalk {
    fn new(layers: usize, experts: usize) -> Self {
        Self { returned: vec![0; layers], experts, stride: coprime(experts), turn: 0 }
    }

    /// Returns `count` experts of the next layer. An expert is returned again only after all other experts of its
    /// layer.
    fn next(&mut self, count: usize) -> Option<(usize, Vec<u32>)> {
        let layer = self.turn % self.returned.len().max(1);
        let first = self.returned.get_mut(layer)?;
        if *first + count > self.experts {
            *first = 0;
        }
        let ids = (*first..*first + count).map(|i| (i * self.stride % self.experts) as u32).collect();
        *first += count;
        self.turn += 1;
        Some((layer, ids))
    }
}

/// A stride near the golden section of `n` that has no common divisor with `n`, so that the multiples of the stride
/// visit all numbers below `n`.
fn coprime(n: usize) -> usize {
    let divisor = |mut a: usize, mut b: usize| {
        while b > 0 {
            (a, b) = (b, a % b);
        }
        a
    };
    (n * 618 / 1000..).find(|&stride| divisor(stride, n) == 1).unwrap_or(1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn walk_visits_every_expert_before_repeating() {
        for (layers, experts, single, count) in [(3, 16, 4, 4), (2, 255, 5, 5), (4, 64, 8, 8), (1, 1, 0, 1)] {
            let mut walk = ExpertWalk::new(layers, experts);
            let mut seen = BTreeSet::new();
            let mut visit = |count| {
                let (layer, ids) = walk.next(count).unwrap();
                assert_eq!(ids.len(), count);
                ids.iter().all(|&id| (id as usize) < experts && seen.insert((layer, id)))
            };
            assert!((0..single * layers).all(|_| visit(1)));
            assert!((0..(experts - single) / count * layers).all(|_| visit(count)));
            assert!(!visit(count), "all experts were returned");
        }
    }
}
