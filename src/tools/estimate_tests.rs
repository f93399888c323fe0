//! Compares the estimate with measurements by `moestro bench` on an H200 and on 16 cores of its host (rows of
//! `benches/results/simulator.csv`). The constants were fitted to the first rows of each table. The other rows only
//! check the estimate.

use super::{Bandwidth, HitRates, Overhead, estimate};
use moestro_model::plan::{DraftFootprint, ModelFootprint};

/// Maximum relative error of a row to which the constants were not fitted.
const MAX_ERROR: f64 = 0.2;

/// The footprint of a synthetic checkpoint: `synth --like 35b --layers n`.
fn like_35b(layers: u64) -> ModelFootprint {
    let fours = layers / 4;
    footprint(572_129_280 + fours * 81_494_528, 286_064_640, 1_769_472, layers, fours * 6_586_368)
}

/// The footprint of a synthetic checkpoint: `synth --like 122b --layers 8`.
fn like_122b_with_8_layers() -> ModelFootprint {
    footprint(1_294_444_576, 429_096_960, 5_308_416, 8, 26_050_560)
}

fn footprint(trunk: u64, head: u64, expert: u64, layers: u64, state: u64) -> ModelFootprint {
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
        sequence: state,
        sequence_per_row: 0,
        workspace_per_row: 0,
        workspace_fixed: 0,
        context: 0,
        draft: DraftFootprint::default(),
        vision: 0,
    }
}

/// Checks the estimate for one device. A row has a model, its hit rate, the fraction of misses found in the page cache,
/// and the measured tokens per second. The first `fitted` rows were used to fit the constants.
fn check(
    what: &str,
    bandwidth: Bandwidth,
    overhead: Overhead,
    fitted: usize,
    rows: &[(ModelFootprint, f64, f64, f64)],
) {
    for (index, (footprint, slots, cache, measured)) in rows.iter().enumerate() {
        let estimated = estimate(footprint, &bandwidth, HitRates { slots: *slots, cache: *cache }, overhead);
        let error = estimated.tokens_per_second / measured - 1.0;
        println!("{what} {index}: {:.1} for {measured}, {:+.0} %", estimated.tokens_per_second, 100.0 * error);
        let most = if index < fitted { MAX_ERROR / 2.0 } else { MAX_ERROR };
        assert!(error.abs() < most, "{what}, row {index}: off by {error:.2}");
    }
}

#[test]
fn estimate_matches_16_cpu_cores() {
    // The rate of the layers, 86 GB/s, was fitted to the models with 4 and 8 layers. The LM head is read at memory
    // bandwidth. The disk figures were measured by `moestro info`.
    let bandwidth = Bandwidth { memory: 149e9, compute: 86e9, disk: 1.69e9, latency: 1.37e-3, cache: f64::INFINITY };
    let resident = [
        (like_35b(4), 294.2),
        (like_35b(8), 180.4),
        (like_35b(16), 106.9),
        (like_35b(40), 49.2),
        (like_122b_with_8_layers(), 90.7),
    ];
    let resident = resident.map(|(footprint, measured)| (footprint, 1.0, 0.0, measured));
    check("resident", bandwidth, Overhead::default(), 2, &resident);
    let streamed = [
        (like_35b(8), 0.972, 135.9),
        (like_35b(8), 0.854, 73.0),
        (like_122b_with_8_layers(), 0.912, 35.0),
        (like_35b(40), 0.975, 32.3),
    ];
    let streamed = streamed.map(|(footprint, hits, measured)| (footprint, hits, 0.0, measured));
    check("past the page cache", bandwidth, Overhead::default(), 0, &streamed);
}

#[test]
fn estimate_matches_h200() {
    // All weights are read at the rate of the LM head's kernel. The overheads per layer and per token were fitted to
    // the models with 4 and 8 layers.
    let bandwidth = Bandwidth { memory: 2.03e12, compute: 2.03e12, disk: 1.69e9, latency: 1.37e-3, cache: 11.1e9 };
    let overhead = Overhead { layer: 28.5e-6, token: 0.182e-3 };
    let resident = [
        (like_35b(4), 1955.0),
        (like_35b(8), 1429.0),
        (like_35b(16), 947.0),
        (like_35b(40), 460.0),
        (like_122b_with_8_layers(), 941.0),
    ];
    let resident = resident.map(|(footprint, measured)| (footprint, 1.0, 0.0, measured));
    check("resident", bandwidth, overhead, 2, &resident);
    // The wait for the router's choice was fitted to runs with direct reads. The rate of the page cache was fitted to
    // the first row.
    let overhead = Overhead { layer: overhead.layer + 0.11e-3, ..overhead };
    let streamed = [
        (like_35b(8), 0.799, 0.881, 186.6),
        (like_35b(8), 0.958, 0.415, 268.3),
        (like_35b(8), 0.894, 0.773, 223.4),
        (like_122b_with_8_layers(), 0.972, 0.071, 132.3),
        (like_122b_with_8_layers(), 0.898, 0.767, 105.9),
        (like_35b(40), 0.973, 0.249, 67.1),
        (like_35b(40), 0.805, 0.896, 46.3),
    ];
    check("through the page cache", bandwidth, overhead, 1, &streamed);
}
