//! `moestro doctor --report`: measures this machine with synthetic models of real dimensions.

use crate::{
    command::{
        device_choice::{CPU, working_set},
        text::print_note,
    },
    error::CommandError,
    tools::{
        bench::run::{BenchSession, Run},
        estimate::{Bandwidth, HitRates, Overhead, estimate},
        machine_report::{DeviceFigures, MachineReport, RunFigures},
        measure,
        synth::{self, Dimensions, SynthOptions},
    },
};
use moestro_base::{
    error::StoreError,
    metrics::Metrics,
    platform::{atomic_file::PartialDir, os},
};
use moestro_compute::{
    device::{CpuDevice, DeviceError, Driver, GPU_KIND, SystemGpu},
    ops::{Comparison, Cpu, DecodedAttention, GpuBackend, compare_kernels, time_attention},
};
use moestro_model::{
    checkpoint::pack,
    model::{CheckpointInfo, LoadOptions, Model, Qwen, StoreOptions, speed},
    plan::{ModelFootprint, PlanOptions, Strategy},
};
use std::{
    path::Path,
    time::{Duration, Instant},
};

/// Size in bytes of the matrix that is multiplied by a vector.
const MATRIX: usize = 256 << 20;
/// Times that a wait for the GPU spins before it sleeps. The times are compared with the default.
const SPINS: [Duration; 2] = [Duration::ZERO, Duration::from_micros(200)];

/// The synthetic models that are measured, and the numbers of prompt and answer tokens of each run.
pub struct ReportModels {
    /// Model that is measured in memory and streamed from disk.
    pub shallow: Dimensions,
    /// Model with more layers and fewer experts. The difference in time to `shallow` gives the cost of a layer.
    pub deep: Dimensions,
    pub prompt: usize,
    pub decode: usize,
}

impl ReportModels {
    /// Models with the dimensions of Qwen3.5-35B-A3B, but with 4 and with 8 layers.
    pub fn like_35b() -> Self {
        Self {
            shallow: Dimensions { layers: 4, ..Dimensions::of_35b() },
            deep: Dimensions { layers: 8, experts: 32, ..Dimensions::of_35b() },
            prompt: 128,
            decode: 64,
        }
    }
}

/// Conditions of a run.
#[derive(Default)]
struct RunOptions {
    /// Number of slots of a model that is streamed from disk. `None` for a model in memory.
    slots: Option<usize>,
    gpu_awake: Option<bool>,
    spin: Option<Duration>,
}

/// Function that opens the GPU. Returns `None` if there is no GPU.
type OpenGpu<'a> = &'a dyn Fn() -> Option<SystemGpu>;

/// Measures memory, disk and decoding. `wait` is the time in seconds from a launch to the end of the wait for its
/// result. Temporary files are written to `dir`, which must not exist, and are removed at the end.
///
/// # Errors
/// The disk is too small or fails, or a model cannot be loaded.
pub fn measure(open: OpenGpu<'_>, wait: f64, models: &ReportModels, dir: &Path) -> Result<MachineReport, CommandError> {
    let partial = PartialDir::create(dir).map_err(StoreError::at(dir))?;
    let [shallow, deep] = ["shallow", "deep"].map(|name| partial.path().join(name));
    write(&shallow, &models.shallow)?;
    let bench = MachineBench { open, models };

    let mut gpu = open();
    let kind = if gpu.is_some() { GPU_KIND } else { CPU };
    let gpu_name = gpu.as_ref().map(|gpu| gpu.driver.name());
    let threads = os::physical_cores();
    let matrix_rate = matrix_rate(gpu.take(), threads)?;
    let comparisons = compare(open).unwrap_or_else(|error| {
        print_note(format_args!("cannot compare kernels: {error}"));
        Vec::new()
    });
    let disk = || {
        let found = CheckpointInfo::new(&shallow, &LoadOptions::default())?;
        measure::measure(&found, &StoreOptions::default(), threads, false, u64::MAX)
    };
    let unpacked = disk()?;
    let bandwidth = match kind {
        CPU => unpacked.bandwidth,
        _ => Bandwidth { memory: matrix_rate, compute: matrix_rate, ..unpacked.bandwidth },
    };

    let mut runs = Vec::new();
    let first = bench.run(&shallow, "4 layers, in memory", RunOptions::default(), &mut runs)?;
    if gpu_name.is_some() {
        for spin in SPINS {
            let what = format!("4 layers, in memory, waits spin {:.1} ms", spin.as_secs_f64() * 1e3);
            bench.run(&shallow, &what, RunOptions { spin: Some(spin), ..RunOptions::default() }, &mut runs)?;
        }
    }
    // There are so few slots that most tokens need reads from disk.
    let slots = Some((models.shallow.layers * models.shallow.experts / 8).max(1));
    let mut stream = |layout: &str| {
        let awake: &[Option<bool>] = if gpu_name.is_some() { &[Some(false), Some(true)] } else { &[None] };
        awake.iter().try_for_each(|gpu_awake| {
            let note = gpu_awake.map_or("", |on| if on { ", GPU awake" } else { ", GPU may rest" });
            let what = format!("4 layers, 1/8 in memory, {layout}{note}");
            let options = RunOptions { slots, gpu_awake: *gpu_awake, spin: None };
            bench.run(&shallow, &what, options, &mut runs).map(drop)
        })
    };
    stream("checkpoint")?;
    let found = CheckpointInfo::unpacked(&shallow, &LoadOptions::default())?;
    pack::write(&found.experts, &found.files, &shallow.with_extension("pack"), &|_| ())?;
    let packed = disk()?;
    stream("pack")?;
    drop(found);
    let used = [&shallow, &shallow.with_extension("pack")];
    used.into_iter().try_for_each(std::fs::remove_dir_all).map_err(StoreError::at(dir))?;
    write(&deep, &models.deep)?;
    let second = bench.run(&deep, "8 layers, in memory", RunOptions::default(), &mut runs)?;

    let overhead = match (first, second) {
        (Some(first), Some(second)) => Some(overhead(&bandwidth, [&first, &second])),
        _ => None,
    };
    // A machine that is warm by now may be slower, without any sign of it in the system's counters.
    let matrix_rate_at_end = self::matrix_rate(open(), threads)?;
    let device = DeviceFigures { kind: kind.into(), gpu: gpu_name, matrix_rate, overhead, wait };
    Ok(MachineReport { unpacked, packed, device, matrix_rate_at_end, comparisons, runs })
}

/// Compares two ways to compute the same on the GPU, if there is one.
fn compare(open: OpenGpu<'_>) -> Result<Vec<Comparison>, DeviceError> {
    let Some(mut gpu) = open() else { return Ok(Vec::new()) };
    let mut found = compare_kernels(&mut gpu)?;
    let attention = DecodedAttention::long();
    let [fast, _] = time_attention(&mut gpu, &attention, |launches| launches)?;
    drop(gpu);
    if let Some(mut gpu) = open()
        && gpu.driver.set_precise_exp()
    {
        let [precise, _] = time_attention(&mut gpu, &attention, |launches| launches)?;
        found.push(Comparison::new("35B attention, 32768 tokens".into(), ["fast exp", "precise exp"], [fast, precise]));
    }
    Ok(found)
}

/// Rate at which a large 4-bit matrix is multiplied by a vector, on the GPU if there is one.
fn matrix_rate(gpu: Option<SystemGpu>, threads: usize) -> Result<f64, CommandError> {
    let budget = Duration::from_millis(500);
    Ok(match gpu {
        Some(gpu) => speed::matrix_rate(&mut GpuBackend::new(gpu), MATRIX, budget)?,
        None => speed::matrix_rate(&mut Cpu::new(CpuDevice::new(threads, Default::default())), MATRIX, budget)?,
    })
}

fn write(dir: &Path, dimensions: &Dimensions) -> Result<(), CommandError> {
    let options = SynthOptions {
        dimensions: dimensions.clone(),
        seed: 0,
        router_skew: 0.5,
        eos_token_ids: vec![0],
        shard: u64::MAX,
        threads: os::physical_cores().min(4),
        extras: Vec::new(),
    };
    synth::write(dir, &options, &|_| ())?;
    Ok(())
}

struct MachineBench<'a> {
    open: OpenGpu<'a>,
    models: &'a ReportModels,
}

/// The footprint of a model that was entirely in memory, and the seconds per token.
type ResidentRun = (ModelFootprint, f64);

impl MachineBench<'_> {
    /// Measures an answer of the model in `dir`. If all experts were in memory, returns the model's footprint and the
    /// seconds per token.
    fn run(
        &self,
        dir: &Path,
        what: &str,
        run: RunOptions,
        runs: &mut Vec<RunFigures>,
    ) -> Result<Option<ResidentRun>, CommandError> {
        let ReportModels { prompt, decode, .. } = *self.models;
        let gpu = (self.open)();
        let options = LoadOptions {
            gpu: gpu.as_ref().map(working_set),
            plan: PlanOptions {
                context: Some(prompt + decode),
                prompt_cache: Some(0),
                stream: run.slots.is_some().then_some(true),
                ..PlanOptions::default()
            },
            store: StoreOptions { slots: run.slots, ..StoreOptions::default() },
            gpu_awake: run.gpu_awake,
            ..LoadOptions::default()
        };
        let metrics = Metrics::new(env!("CARGO_PKG_VERSION"), CPU);
        let mut model = Qwen::load(dir, &options, &metrics, &mut |_, _| ())?;
        if let Some(mut gpu) = gpu {
            if let Some(spin) = run.spin {
                gpu.set_spin(spin);
            }
            model = model.move_to(gpu).map_err(|refused| refused.error)?;
        }
        let footprint = model.footprint().clone();
        let is_resident = model.plan().strategy == Strategy::Resident;
        let ids: Vec<u32> = (0..prompt).map(|index| (index * 7919 % model.info().vocab) as u32).collect();
        let mut session = BenchSession { model, metrics };
        // The first answer fills the slots and warms up pipelines.
        session.run(&ids, decode)?;
        let begin = Instant::now();
        let cpu = os::cpu_seconds();
        let Run { prompt, decode, .. } = session.run(&ids, decode)?;
        let cores = (os::cpu_seconds() - cpu) / begin.elapsed().as_secs_f64();
        runs.push(RunFigures {
            what: what.into(),
            prompt_tokens_per_second: prompt.tokens_per_second,
            tokens_per_second: decode.tokens_per_second,
            hit_rate: decode.hit_rate,
            stall_share: decode.stall_share,
            cores,
        });
        Ok(is_resident.then_some((footprint, 1.0 / decode.tokens_per_second)))
    }
}

/// Computes the time per layer and per token that does not depend on the bytes read, from runs of two models in memory.
fn overhead(bandwidth: &Bandwidth, runs: [&ResidentRun; 2]) -> Overhead {
    let [first, second] = runs.map(|(footprint, seconds)| {
        let bytes = estimate(footprint, bandwidth, HitRates::ALL, Overhead::default());
        (footprint.layers as f64, seconds - 1.0 / bytes.tokens_per_second)
    });
    let layer = ((second.1 - first.1) / (second.0 - first.0)).max(0.0);
    Overhead { layer, token: (first.1 - first.0 * layer).max(0.0) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[ignore = "long: measures four models"]
    fn report_measures_disk_memory_and_runs() {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("report");
        let models =
            ReportModels { shallow: Dimensions::narrow(4, 64), deep: Dimensions::narrow(8, 8), prompt: 8, decode: 4 };
        let report = measure(&|| None, 0.0, &models, &dir).unwrap();
        assert_eq!(std::fs::read_dir(root.path()).unwrap().count(), 0, "temporary files are removed");
        let runs: Vec<&str> = report.runs.iter().map(|run| run.what.as_str()).collect();
        let streamed = ["4 layers, 1/8 in memory, checkpoint", "4 layers, 1/8 in memory, pack"];
        assert_eq!(runs, ["4 layers, in memory", streamed[0], streamed[1], "8 layers, in memory"]);
        assert!(report.runs.iter().all(|run| run.tokens_per_second > 0.0 && run.prompt_tokens_per_second > 0.0));
        assert!(report.runs.iter().all(|run| (run.hit_rate < 1.0) == run.what.contains("1/8")));
        assert!(report.unpacked.bandwidth.disk > 0.0 && report.packed.bandwidth.disk > 0.0);
        assert!(report.matrix_rate_at_end > 0.0);
        assert!(report.device.matrix_rate > 0.0 && report.device.overhead.is_some());
        let text = report.to_string();
        assert!(text.contains("pack, ") && text.contains("8 layers, in memory"), "{text}");
    }

    #[test]
    fn overhead_explains_both_runs() {
        let bandwidth = Bandwidth { memory: 300e9, compute: 300e9, disk: 5e9, latency: 1e-3, cache: 9e9 };
        let expected = Overhead { layer: 2e-4, token: 1e-3 };
        let run = |layers: usize| {
            let dir = tempfile::tempdir().unwrap();
            synth::outline(dir.path(), Dimensions { layers, ..Dimensions::of_35b() }).unwrap();
            let footprint = CheckpointInfo::unpacked(dir.path(), &LoadOptions::default()).unwrap().footprint;
            let speed = estimate(&footprint, &bandwidth, HitRates::ALL, expected).tokens_per_second;
            (footprint, 1.0 / speed)
        };
        let found = overhead(&bandwidth, [&run(4), &run(8)]);
        assert!((found.layer - 2e-4).abs() < 1e-9 && (found.token - 1e-3).abs() < 1e-9, "{found:?}");
    }
}
