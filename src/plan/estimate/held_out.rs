//! Is the estimate right where it can be measured? Rows of `benches/results/simulator.csv` (H200 and 16 cores of its Xeon,
//! `moestro bench`): constants fitted to the first few, everything else held out.

use super::{Bandwidth, HitRates, Overhead, estimate};
use crate::plan::{DraftFootprint, ModelFootprint};

/// The most that a row may be off which nothing was fitted to.
const OFF: f64 = 0.2;

/// `synth --like 35b --layers n`.
fn s(layers: u64) -> ModelFootprint {
    let fours = layers / 4;
    shape(572_129_280 + fours * 81_494_528, 286_064_640, 1_769_472, layers, fours * 6_586_368)
}

/// `synth --like 122b --layers 8`.
fn q8() -> ModelFootprint {
    shape(1_294_444_576, 429_096_960, 5_308_416, 8, 26_050_560)
}

fn shape(trunk: u64, head: u64, expert: u64, layers: u64, state: u64) -> ModelFootprint {
    ModelFootprint {
        trunk,
        gathered: head,
        head,
        expert,
        slot: expert,
        layers: layers as usize,
        experts: 256,
        experts_per_token: 8,
        kv_per_token: 0,
        state,
        workspace_per_row: 0,
        workspace_fixed: 0,
        context: 0,
        draft: DraftFootprint::default(),
    }
}

/// A device, what its rates were fitted to, and rows: model, hit rate, the part of the misses that the page cache had, and
/// measured tokens a second.
fn check(
    what: &str,
    bandwidth: Bandwidth,
    overhead: Overhead,
    fitted: usize,
    rows: &[(ModelFootprint, f64, f64, f64)],
) {
    for (index, (shape, slots, cache, measured)) in rows.iter().enumerate() {
        let found = estimate(shape, &bandwidth, HitRates { slots: *slots, cache: *cache }, overhead);
        let off = found.tokens_per_second / measured - 1.0;
        println!("{what} {index}: {:.1} for {measured}, {:+.0} %", found.tokens_per_second, 100.0 * off);
        assert!(off.abs() < if index < fitted { OFF / 2.0 } else { OFF }, "{what}, row {index}: off by {off:.2}");
    }
}

#[test]
fn sixteen_cores() {
    // The head at the rate at which memory is read, layers at 86 GB/s (S4 and S8); the disk as `info` measures it.
    let bandwidth = Bandwidth { memory: 149e9, compute: 86e9, disk: 1.69e9, latency: 1.37e-3, cache: f64::INFINITY };
    let resident = [(s(4), 294.2), (s(8), 180.4), (s(16), 106.9), (s(40), 49.2), (q8(), 90.7)];
    let resident = resident.map(|(shape, measured)| (shape, 1.0, 0.0, measured));
    check("resident", bandwidth, Overhead::default(), 2, &resident);
    let streamed = [(s(8), 0.972, 135.9), (s(8), 0.854, 73.0), (q8(), 0.912, 35.0), (s(40), 0.975, 32.3)];
    let streamed = streamed.map(|(shape, hits, measured)| (shape, hits, 0.0, measured));
    check("past the page cache", bandwidth, Overhead::default(), 0, &streamed);
}

#[test]
fn a_card() {
    // All weights at the rate of the head's kernel; S4 and S8 give a layer's launches and what a token costs beside them.
    let bandwidth = Bandwidth { memory: 2.03e12, compute: 2.03e12, disk: 1.69e9, latency: 1.37e-3, cache: 11.1e9 };
    let overhead = Overhead { layer: 28.5e-6, token: 0.182e-3 };
    let resident = [(s(4), 1955.0), (s(8), 1429.0), (s(16), 947.0), (s(40), 460.0), (q8(), 941.0)];
    let resident = resident.map(|(shape, measured)| (shape, 1.0, 0.0, measured));
    check("resident", bandwidth, overhead, 2, &resident);
    // Waiting for a router's choice was fitted before, past the page cache; the page cache's rate to the first row.
    let overhead = Overhead { layer: overhead.layer + 0.11e-3, ..overhead };
    let streamed = [
        (s(8), 0.799, 0.881, 186.6),
        (s(8), 0.958, 0.415, 268.3),
        (s(8), 0.894, 0.773, 223.4),
        (q8(), 0.972, 0.071, 132.3),
        (q8(), 0.898, 0.767, 105.9),
        (s(40), 0.973, 0.249, 67.1),
        (s(40), 0.805, 0.896, 46.3),
    ];
    check("through the page cache", bandwidth, overhead, 1, &streamed);
}
