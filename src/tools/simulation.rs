//! Estimates the speed of a model on machines that we do not have, from published figures. We have not measured these
//! machines.
//!
//! Each unknown quantity has a pessimistic and an optimistic value, so the result is a range. The sources are:
//!
//! - Memory bandwidth: the manufacturer's figure. Engines reach 60 to 80 % of this figure in decode, and less on an
//!   Ultra, which has two dies (SwiftLM #26).
//! - Speed of direct reads with the size of an expert: measured by other projects that stream experts (ds4, flash-moe,
//!   streamlx, slotstream). There are no published figures for the M4 Max, so the figures of the M4 Pro are used.
//! - Time per layer for launches and barriers: a layer has 9 launches of at least 2 us each (qwisp #143). In resident
//!   engines for this model family, a layer takes 115 to 215 us longer than reading its bytes (35B: M1 Max 85 to 91
//!   tok/s, M3 Ultra 92, M5 Max 133).
//! - Time per layer to wait for the router's choice while streaming: from 20 us for the end of a command buffer (mlx
//!   #4521) to 0.3 ms for a copy through a framework (mlx-lm #1438).
//! - Hit rate by fraction of experts in memory: the range that anemll-mlx, turboquant, colibri and streamlx report for
//!   caches with the routing of real Qwen3.5 models.
//! - A PC has DDR5-5600 in two channels (`pc-64`) or a GeForce RTX 4090 (`rtx4090-64`), and an SSD on PCIe 4 whose direct
//!   reads are assumed.
//!
//! For resident models, published figures of other engines are within the range. A test checks two of these figures.
//! For streamed models, published figures are at the pessimistic end or below: streamlx reports 15.9 tok/s for the 35B
//! in 16 GiB of an M4 Air, and this estimate is 18 to 34 (`--machine m4-air-32 --memory-limit 16GiB`).
//!
//! On an H200 and on 16 CPU cores, the same formula was fitted to two resident models and a streamed model. For other
//! models the error of the formula was up to 10 % (`estimate_tests.rs`). For Macs there are no measurements to fit, so
//! the ranges are less certain.

use super::estimate::{Bandwidth, Estimate, HitRates, Overhead, estimate};
use moestro_model::{
    error::ModelError,
    plan::{MachineLimits, ModelFootprint, Plan, PlanOptions, Strategy},
};
use serde::Serialize;

const GIB: u64 = 1 << 30;
/// Memory of the process itself in bytes: code, the tokenizer with 248,000 entries, and threads.
const PROCESS_MEMORY: u64 = 256 << 20;
/// The GPU's recommended working set as a fraction of memory. On macOS, llmfit and sglang report 11.84 GB of 16 GB, and
/// 17.76 GB of 24 GB.
const WORKING_SET_FRACTION: f64 = 0.74;
/// Fraction of the memory bandwidth that decoding reaches: pessimistic, optimistic.
const EFFICIENCY: [f64; 2] = [0.6, 0.8];
/// [`EFFICIENCY`] of an Ultra, which has two dies. SwiftLM reads dense 4-bit models at 46 % of an M1 Ultra's 800 GB/s.
const ULTRA_EFFICIENCY: [f64; 2] = [0.35, 0.5];
/// Seconds per layer for launches and barriers: pessimistic, optimistic.
const LAYER_OVERHEAD: [f64; 2] = [215e-6, 40e-6];
/// Seconds per layer to wait for the router's choice: pessimistic, optimistic.
const ROUTER_WAIT: [f64; 2] = [250e-6, 40e-6];
/// Seconds to read one expert when no other read is in progress.
const READ_LATENCY: f64 = 0.4e-3;
/// Fraction of experts in memory, and the hit rates at this fraction: pessimistic, optimistic.
const HIT_RATE_POINTS: [(f64, [f64; 2]); 6] = [
    (0.0, [0.0, 0.0]),
    (0.25, [0.65, 0.81]),
    (0.47, [0.83, 0.92]),
    (0.63, [0.92, 0.95]),
    (0.88, [0.96, 0.985]),
    (1.0, [1.0, 1.0]),
];

/// The GPU that computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum MachineGpu {
    /// The CPU computes.
    None,
    /// The GPU shares the memory of the CPU.
    Unified,
    /// The GPU has separate memory, in bytes.
    Own(u64),
}

/// A machine, with figures published by its manufacturer and by other projects.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Machine {
    /// Name for `--machine`: chip, and memory in gigabytes.
    pub name: &'static str,
    /// Memory in bytes.
    pub memory: u64,
    pub gpu: MachineGpu,
    /// Memory bandwidth in bytes per second.
    pub bandwidth: f64,
    /// Fraction of `bandwidth` that decoding reaches: pessimistic, optimistic.
    pub efficiency: [f64; 2],
    /// Bytes per second of direct reads with the size of an expert: pessimistic, optimistic.
    pub disk: [f64; 2],
}

const fn machine(name: &'static str, gigabytes: u64, bandwidth: f64, disk: [f64; 2]) -> Machine {
    let bandwidth = bandwidth * 1e9;
    let disk = [disk[0] * 1e9, disk[1] * 1e9];
    Machine { name, memory: gigabytes * GIB, gpu: MachineGpu::Unified, bandwidth, efficiency: EFFICIENCY, disk }
}

/// A PC with an SSD on PCIe 4. `bandwidth` is that of the memory of `gpu`, or else of the CPU.
const fn pc(name: &'static str, gigabytes: u64, gpu: MachineGpu, bandwidth: f64) -> Machine {
    Machine { gpu, ..machine(name, gigabytes, bandwidth, [3.0, 6.0]) }
}

const fn ultra(name: &'static str, gigabytes: u64, bandwidth: f64, disk: [f64; 2]) -> Machine {
    Machine { efficiency: ULTRA_EFFICIENCY, ..machine(name, gigabytes, bandwidth, disk) }
}

impl Machine {
    /// Bandwidths in the pessimistic case (`case` 0) or the optimistic case (1). Expert reads bypass the page cache.
    fn reached(&self, case: usize) -> Bandwidth {
        let memory = self.bandwidth * self.efficiency[case];
        Bandwidth { memory, compute: memory, disk: self.disk[case], latency: READ_LATENCY, cache: f64::INFINITY }
    }
}

/// The machines that `moestro info --machine` knows.
pub const MACHINES: [Machine; 10] = [
    machine("m4-air-16", 16, 120.0, [2.4, 2.4]),
    machine("m4-air-32", 32, 120.0, [2.4, 2.4]),
    machine("m4-pro-48", 48, 273.0, [6.6, 6.6]),
    machine("m5-pro-48", 48, 307.0, [9.5, 17.3]),
    machine("m1-max-64", 64, 400.0, [4.4, 4.4]),
    ultra("m1-ultra-64", 64, 800.0, [5.4, 6.9]),
    machine("m4-max-128", 128, 546.0, [6.6, 6.6]),
    machine("m5-max-128", 128, 614.0, [11.0, 14.5]),
    pc("pc-64", 64, MachineGpu::None, 89.6),
    pc("rtx4090-64", 64, MachineGpu::Own(24 * GIB), 1008.0),
];

/// The estimate for a model on a machine.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Simulation {
    pub machine: Machine,
    pub plan: Plan,
    /// Decoding speed: pessimistic, optimistic.
    pub decode: [Estimate; 2],
    /// Fraction of the time in which computation waits for experts: pessimistic, optimistic.
    pub stall_share: [f64; 2],
}

/// Plans the memory of a model with this footprint on `machine`, and estimates its decoding speed.
///
/// # Errors
/// The model does not fit.
pub fn simulate(footprint: &ModelFootprint, machine: Machine, options: &PlanOptions) -> Result<Simulation, ModelError> {
    let gpu = match machine.gpu {
        MachineGpu::None => None,
        MachineGpu::Unified => Some((machine.memory as f64 * WORKING_SET_FRACTION) as u64),
        MachineGpu::Own(bytes) => Some(bytes),
    };
    let limits = MachineLimits { ram: Some(machine.memory), gpu, cgroup: None, process: PROCESS_MEMORY };
    simulate_within(footprint, machine, &limits, options)
}

/// Like [`simulate`], with known limits of the memory.
///
/// # Errors
/// The model does not fit.
pub fn simulate_within(
    footprint: &ModelFootprint,
    machine: Machine,
    limits: &MachineLimits,
    options: &PlanOptions,
) -> Result<Simulation, ModelError> {
    let plan = Plan::new(footprint, limits, options)?;
    let hits = if plan.strategy == Strategy::Resident { [1.0; 2] } else { hit_rates(plan.residency) };
    let each = [0, 1].map(|case| {
        let bandwidth = machine.reached(case);
        let wait = if plan.strategy == Strategy::Resident { 0.0 } else { ROUTER_WAIT[case] };
        // LAYER_OVERHEAD was derived from the time of whole tokens, so it includes the overhead per token.
        let overhead = Overhead { layer: LAYER_OVERHEAD[case] + wait, token: 0.0 };
        [hits[case], 1.0].map(|slots| estimate(footprint, &bandwidth, HitRates { slots, cache: 0.0 }, overhead))
    });
    Ok(Simulation {
        machine,
        plan,
        decode: each.map(|[streamed, _]| streamed),
        stall_share: each.map(|[streamed, hit]| 1.0 - streamed.tokens_per_second / hit.tokens_per_second),
    })
}

/// Pessimistic and optimistic hit rates if a fraction `residency` of all experts is in memory. Interpolates linearly
/// between the points of [`HIT_RATE_POINTS`].
pub fn hit_rates(residency: f64) -> [f64; 2] {
    let above =
        HIT_RATE_POINTS.iter().position(|(part, _)| *part >= residency).unwrap_or(HIT_RATE_POINTS.len() - 1).max(1);
    let (from, low) = HIT_RATE_POINTS[above - 1];
    let (to, high) = HIT_RATE_POINTS[above];
    let share = ((residency - from) / (to - from)).clamp(0.0, 1.0);
    [0, 1].map(|case| low[case] + share * (high[case] - low[case]))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tools::estimate::model_35b::model_35b;

    fn named(name: &str) -> Machine {
        *MACHINES.iter().find(|machine| machine.name == name).unwrap()
    }

    #[test]
    fn hit_rates_interpolate_between_points() {
        assert_eq!(hit_rates(0.0), [0.0, 0.0]);
        assert_eq!(hit_rates(0.25), [0.65, 0.81]);
        let [low, high] = hit_rates(0.36);
        assert!((low - 0.74).abs() < 1e-9 && (high - 0.865).abs() < 1e-9, "{low} {high}");
        assert_eq!(hit_rates(1.0), [1.0, 1.0]);
    }

    #[test]
    fn fitting_model_never_streams_or_stalls() {
        let found = simulate(&model_35b(), named("m1-ultra-64"), &PlanOptions::default()).unwrap();
        assert_eq!((found.plan.strategy, found.stall_share), (Strategy::Resident, [0.0, 0.0]));
    }

    /// Published speeds of other engines with all experts in memory: M1 Max (qwisp #36) and M5 Max (llm-benchpacks).
    #[test]
    fn range_contains_other_engines() {
        for (name, measured) in [("m1-max-64", 85.0..91.0), ("m5-max-128", 133.0..133.0)] {
            let found = simulate(&model_35b(), named(name), &PlanOptions::default()).unwrap();
            let [low, high] = found.decode.map(|case| case.tokens_per_second);
            assert!(low <= measured.start && measured.end <= high, "{name}: {low} to {high}");
        }
    }

    #[test]
    fn memory_that_computes_limits_the_plan() {
        let limit = |name| simulate(&model_35b(), named(name), &PlanOptions::default()).unwrap().plan.limit;
        assert_eq!((limit("pc-64"), limit("rtx4090-64")), (48 * GIB, 22 * GIB));
    }

    #[test]
    fn smaller_machine_streams_more_slowly() {
        let [small, large] = ["m4-air-16", "m4-air-32"]
            .map(|name| simulate(&model_35b(), named(name), &PlanOptions::default()).unwrap());
        assert_eq!(small.plan.strategy, Strategy::Streaming);
        for case in [0, 1] {
            assert!(small.decode[case].tokens_per_second < large.decode[case].tokens_per_second);
            assert!(small.stall_share[case] > 0.0);
        }
        assert!(small.decode[0].tokens_per_second < small.decode[1].tokens_per_second);
    }

    #[test]
    fn model_without_room_is_refused() {
        let tiny = Machine { memory: 3 * GIB, ..named("m4-air-16") };
        let refused = simulate(&model_35b(), tiny, &PlanOptions::default()).unwrap_err().to_string();
        assert!(refused.contains("trunk"), "{refused}");
    }

    #[test]
    fn simulation_uses_the_machines_figures() {
        let footprint = model_35b();
        for name in ["m4-air-16", "m1-ultra-64"] {
            let machine = named(name);
            let found = simulate(&footprint, machine, &PlanOptions::default()).unwrap();
            let streamed = found.plan.strategy == Strategy::Streaming;
            assert_eq!(streamed, name == "m4-air-16");
            for case in [0, 1] {
                let reached = machine.bandwidth * machine.efficiency[case];
                let disk = machine.disk[case];
                let bandwidth =
                    Bandwidth { memory: reached, compute: reached, disk, latency: READ_LATENCY, cache: 1e9 };
                let layer = LAYER_OVERHEAD[case] + if streamed { ROUTER_WAIT[case] } else { 0.0 };
                let overhead = Overhead { layer, token: 0.0 };
                let hits = if streamed { hit_rates(found.plan.residency)[case] } else { 1.0 };
                let [now, never] =
                    [hits, 1.0].map(|slots| estimate(&footprint, &bandwidth, HitRates { slots, cache: 0.0 }, overhead));
                assert_eq!(found.decode[case], now, "{name}");
                let stalled = 1.0 - now.tokens_per_second / never.tokens_per_second;
                assert!((found.stall_share[case] - stalled).abs() < 1e-12, "{name}");
            }
        }
        let air = named("m4-air-16");
        assert_eq!((air.memory, air.bandwidth, air.disk), (16 << 30, 120e9, [2.4e9, 2.4e9]));
    }
}
