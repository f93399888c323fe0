//! `moestro info` without a model: which models suit this machine, and how fast they are by estimate.

use super::{
    machine_report::DeviceFigures,
    simulate::{outline, range},
    simulation::{Machine, MachineGpu, Simulation, simulate_within},
};
use crate::{
    cli,
    command::{
        device_choice::DeviceChoice,
        load::options,
        text::{show, table},
    },
    config::LoadSettings,
    error::CommandError,
};
use moestro_base::platform::os;
use moestro_compute::device::memory_bandwidth;
use moestro_model::{
    model,
    plan::{MachineLimits, Size},
};
use serde::Serialize;
use std::{fmt, time::Duration};

/// Dimensions, and a 4-bit checkpoint that has them.
const MODELS: [(&str, &str); 5] = [
    ("4b", "mlx-community/Qwen3.5-4B-MLX-4bit"),
    ("9b", "mlx-community/Qwen3.5-9B-MLX-4bit"),
    ("35b", "mlx-community/Qwen3.5-35B-A3B-4bit"),
    ("122b", "mlx-community/Qwen3.5-122B-A10B-4bit"),
    ("397b", "mlx-community/Qwen3.5-397B-A17B-4bit"),
];
/// Speed of reads from an SSD if it is not known, in bytes per second: pessimistic, optimistic.
const ASSUMED_DISK: [f64; 2] = [1e9, 5e9];
/// Fraction of the measured memory bandwidth that decoding reaches: pessimistic, optimistic.
const EFFICIENCY: [f64; 2] = [0.7, 1.0];
/// Tokens per second, by the pessimistic estimate, from which a model is suggested.
const FAST_ENOUGH: f64 = 10.0;
/// Number of bytes that are read to measure memory bandwidth.
const BLOCK: usize = 512 << 20;

/// The report, with the structure that `--json` prints.
#[derive(Debug, Serialize)]
struct Ranking {
    device: &'static str,
    limits: MachineLimits,
    /// Bytes per second.
    memory: f64,
    /// True if `memory` was measured on the device that computes.
    is_of_device: bool,
    /// Bytes per second: pessimistic, optimistic.
    disk: [f64; 2],
    is_disk_measured: bool,
    models: Vec<RankedModel>,
}

#[derive(Debug, Serialize)]
struct RankedModel {
    model: &'static str,
    weights: u64,
    /// `None` if the model does not fit.
    simulated: Option<Simulation>,
    is_suggested: bool,
}

/// Ranks the models of [`MODELS`], or only the one with the dimensions of `--like`.
pub fn run(args: cli::tool_args::InfoArgs) -> Result<(), CommandError> {
    let load = LoadSettings::new(args.load).map_err(CommandError::Usage)?;
    let parallel = args.parallel.parallel;
    let prompt_cache = args.cache.prompt_cache;
    let load = LoadSettings { parallel, prompt_cache, serving: true, ..load };
    let chosen = DeviceChoice::new(&load)?;
    let options = model::LoadOptions { gpu: chosen.working_set(), ..options(&load) };
    let limits = MachineLimits::here(options.gpu);
    let threads = load.flags.threads.unwrap_or_else(os::physical_cores);
    let measured = memory_bandwidth(threads, BLOCK, Duration::from_millis(500));
    let measured = measured.map_err(CommandError::io("cannot measure memory bandwidth"))?;
    let reported = chosen.gpu_name().and_then(|gpu| DeviceFigures::of_last_report(chosen.name(), Some(&gpu)));
    let memory = reported.as_ref().map_or(measured, |figures| figures.matrix_rate);
    let is_of_device = options.gpu.is_none() || reported.is_some();
    let disk = DeviceFigures::disk_of_last_report();
    let machine = Machine {
        name: "this machine",
        memory: limits.ram.unwrap_or(0),
        // The limits have the memory of this machine's GPU.
        gpu: MachineGpu::None,
        bandwidth: memory,
        efficiency: EFFICIENCY,
        disk: disk.map_or(ASSUMED_DISK, |disk| [disk; 2]),
    };
    let mut models = Vec::new();
    for (like, id) in MODELS.into_iter().chain(unlisted(args.like.as_deref())) {
        if args.like.as_deref().is_some_and(|only| only != like) {
            continue;
        }
        let footprint = outline(like, &options)?;
        let simulated = simulate_within(&footprint, machine, &limits, &options.plan).ok();
        models.push(RankedModel { model: id, weights: footprint.weights(), simulated, is_suggested: false });
    }
    let is_fast = |model: &&mut RankedModel| slowest(model) >= FAST_ENOUGH;
    if let Some(best) = models.iter_mut().filter(is_fast).max_by_key(|model| model.weights) {
        best.is_suggested = true;
    }
    models.sort_by(|a, b| slowest(b).total_cmp(&slowest(a)));
    let is_disk_measured = disk.is_some();
    show(
        &Ranking { device: chosen.name(), limits, memory, is_of_device, disk: machine.disk, is_disk_measured, models },
        args.json,
    );
    Ok(())
}

/// The dimensions of `--like` if no checkpoint with them is listed.
fn unlisted(like: Option<&str>) -> Option<(&'static str, &'static str)> {
    ["27b", "flash-next"].into_iter().find(|name| Some(*name) == like).map(|name| (name, name))
}

/// Tokens per second by the pessimistic estimate. 0 if the model does not fit.
fn slowest(model: &RankedModel) -> f64 {
    model.simulated.as_ref().map_or(0.0, |found| found.decode[0].tokens_per_second)
}

impl fmt::Display for Ranking {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ram = self.limits.ram.map_or_else(|| "unknown memory".into(), |ram| Size(ram).to_string());
        writeln!(out, "this machine: {ram}, on the {}", self.device)?;
        let memory = self.memory / 1e9;
        let note = if self.is_of_device { "" } else { " by the CPU; `moestro doctor --report` measures the GPU" };
        writeln!(out, "  memory  {memory:>9.1} GB/s  measured{note}")?;
        let disk = if self.is_disk_measured {
            "measured by doctor --report"
        } else {
            "assumed; `moestro doctor --report` measures it"
        };
        writeln!(out, "  SSD     {:>9} GB/s  {disk}", range(self.disk, 1e-9))?;
        writeln!(out, "\ntokens per second are simulated from these figures, pessimistic to optimistic\n")?;
        let cells = |row: &RankedModel| {
            let mark = if row.is_suggested { "<- suggested" } else { "" };
            let (experts, speed) = match &row.simulated {
                Some(found) => (
                    format!("{:.0} %", 100.0 * found.plan.residency),
                    range(found.decode.map(|estimate| estimate.tokens_per_second), 1.0),
                ),
                None => ("".into(), "does not fit".into()),
            };
            [row.model.into(), Size(row.weights).to_string(), experts, speed, mark.into()]
        };
        let rows: Vec<[String; 5]> = self.models.iter().map(cells).collect();
        write!(out, "{}", table(["MODEL", "SIZE", "EXPERTS IN MEMORY", "TOKENS/S", ""], &rows))?;
        if let Some(best) = self.models.iter().find(|model| model.is_suggested) {
            writeln!(out, "\nnext: moestro run {}", best.model)?;
        }
        Ok(())
    }
}
