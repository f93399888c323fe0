//! The measurements behind the estimates, made here and now: the memory, and the disk through the store itself.

use crate::{
    config::LoadSettings,
    device::{CpuDevice, CpuTimeline, memory_bandwidth},
    error::{CommandError, StoreError},
    experts::{ExpertChoice, ExpertStore, Options, PassKind, Prefetch},
    metrics::Metrics,
    model::{CheckpointInfo, speed},
    plan::Bandwidth,
    platform::Access,
};
use serde::Serialize;
use std::time::{Duration, Instant};

/// The most bytes that are read to measure the memory: more than any cache.
const BLOCK: u64 = 512 << 20;

/// Results of the measurements, and their conditions.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Measured {
    #[serde(flatten)]
    pub bandwidth: Bandwidth,
    pub threads: usize,
    pub io_threads: usize,
    /// The experts were read past the page cache.
    pub direct: bool,
    /// The model's kernels were measured; the GPU's are not.
    pub kernels: bool,
}

/// Measures memory and the model's kernels with `threads` threads, using at most `room` bytes, and the disk as [`disk`]
/// does. Where a GPU computes (`gpu`), or a model has no layers, the kernels are taken to go through weights as fast as the
/// threads read memory.
pub fn measure(
    found: &CheckpointInfo,
    load: &LoadSettings,
    threads: usize,
    gpu: bool,
    room: u64,
) -> Result<Measured, CommandError> {
    let io = |source| CommandError::Io { what: "measuring the memory".into(), source };
    let memory = memory_bandwidth(threads, BLOCK.min(room) as usize, Duration::from_millis(200)).map_err(io)?;
    let at_once = found.shape.experts_per_token.max(1);
    let kernels = found.feed_forward.filter(|_| !gpu);
    let compute = match &kernels {
        Some(kinds) => {
            let compute = CpuDevice::new(threads, Default::default());
            speed::decode_rate(kinds, at_once, &compute, BLOCK.min(room) as usize, Duration::from_millis(300))?
        }
        None => memory,
    };
    let Disk { rate, latency, direct, cache } = disk(found, load)?;
    let bandwidth = Bandwidth { memory, compute, disk: rate, latency, cache };
    Ok(Measured { bandwidth, threads, io_threads: load.io_threads, direct, kernels: kernels.is_some() })
}

/// What decoding gets of the disk, through the store's own threads, without any computation.
struct Disk {
    /// Bytes per second of routes of which every expert misses. Infinite for a model without routed experts.
    rate: f64,
    /// Seconds of a route of one expert.
    latency: f64,
    /// Read past the page cache.
    direct: bool,
    /// Bytes per second of the same routes once more, which the page cache now has; infinite where it is read past.
    cache: f64,
}

fn disk(found: &CheckpointInfo, load: &LoadSettings) -> Result<Disk, StoreError> {
    let k = found.shape.experts_per_token;
    if k == 0 {
        return Ok(Disk { rate: f64::INFINITY, latency: 0.0, direct: true, cache: f64::INFINITY });
    }
    let metrics = Metrics::new(env!("CARGO_PKG_VERSION"), "cpu");
    let options = Options {
        io: crate::command::options(load).store.io,
        threads: load.io_threads,
        prefetch: Prefetch::Off,
        ..Options::new(k)
    };
    let store = ExpertStore::open(found.files.clone(), found.experts.clone(), options, metrics)?;
    let direct = store.access() == Access::Direct;
    let read = |routes: &mut Routes, experts: usize, most: usize, budget: Duration| -> Result<_, StoreError> {
        let (begin, mut count) = (Instant::now(), 0);
        while count < most && (count == 0 || begin.elapsed() < budget) {
            let Some((layer, ids)) = routes.next(experts) else { break };
            let choice = ExpertChoice { ids: &ids, k: ids.len(), logits: &[] };
            let mut asked = store.fetch(layer, &choice, PassKind::Decode, &mut CpuTimeline)?;
            while asked.next(&mut CpuTimeline)?.is_some() {}
            count += 1;
        }
        Ok((begin.elapsed().as_secs_f64() / count.max(1) as f64, count))
    };
    // A small model has few experts to read: most of them for the more important figure.
    let few = (found.shape.layers * found.shape.experts / 8).max(1);
    let mut routes = Routes::new(found.shape.layers, found.shape.experts);
    let (latency, _) = read(&mut routes, 1, few, Duration::from_millis(150))?;
    let from = routes.clone();
    let (route, count) = read(&mut routes, k, usize::MAX, Duration::from_millis(450))?;
    let rate = |seconds: f64| k as f64 * found.shape.expert as f64 / seconds;
    let cache = match direct {
        true => f64::INFINITY,
        false => rate(read(&mut { from }, k, count, Duration::from_millis(450))?.0),
    };
    Ok(Disk { rate: rate(route), latency, direct, cache })
}

/// Walks over all experts, layer after layer, those of a layer scattered over the file as a router scatters them.
#[derive(Clone)]
struct Routes {
    /// The number of experts of each layer that have been given out.
    given: Vec<usize>,
    experts: usize,
    stride: usize,
    turn: usize,
}

impl Routes {
    fn new(layers: usize, experts: usize) -> Self {
        Self { given: vec![0; layers], experts, stride: coprime(experts), turn: 0 }
    }

    /// `count` experts of the next layer, never given out before as long as there are such.
    fn next(&mut self, count: usize) -> Option<(usize, Vec<u32>)> {
        let layer = self.turn % self.given.len().max(1);
        let first = self.given.get_mut(layer)?;
        if *first + count > self.experts {
            *first = 0;
        }
        let ids = (*first..*first + count).map(|i| (i * self.stride % self.experts) as u32).collect();
        *first += count;
        self.turn += 1;
        Some((layer, ids))
    }
}

/// About the golden section of `n`, without a common divisor with it: its multiples visit all numbers below `n`.
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
    fn routes_visit_every_expert_before_any_again() {
        for (layers, experts, single, count) in [(3, 16, 4, 4), (2, 255, 5, 5), (4, 64, 8, 8), (1, 1, 0, 1)] {
            let mut routes = Routes::new(layers, experts);
            let mut seen = BTreeSet::new();
            let mut visit = |count| {
                let (layer, ids) = routes.next(count).unwrap();
                assert_eq!(ids.len(), count);
                ids.iter().all(|&id| (id as usize) < experts && seen.insert((layer, id)))
            };
            assert!((0..single * layers).all(|_| visit(1)));
            assert!((0..(experts - single) / count * layers).all(|_| visit(count)));
            assert!(!visit(count), "then they begin again");
        }
    }
}
