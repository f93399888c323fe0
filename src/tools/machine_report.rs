//! Results of `moestro doctor --report` on this machine: a table for an issue, and a file that `moestro info` reads.

use super::{
    estimate::{Bandwidth, Overhead},
    measure::{KernelRate, Measurements},
};
use crate::error::CommandError;
use moestro_base::platform::{atomic_file::replace_file, os, read_small_file};
use moestro_compute::ops::Comparison;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::{
    fmt,
    path::{Path, PathBuf},
};

/// Measurements of a machine.
#[derive(Debug, Serialize)]
pub struct MachineReport {
    /// Expert reads from a checkpoint, and the bandwidth of the CPU's memory.
    pub unpacked: Measurements,
    /// Expert reads from the checkpoint's pack.
    pub packed: Measurements,
    pub device: DeviceFigures,
    /// [`DeviceFigures::matrix_rate`], measured again after all runs.
    pub matrix_rate_at_end: f64,
    /// Two ways to compute the same on the GPU.
    pub comparisons: Vec<Comparison>,
    pub runs: Vec<RunFigures>,
}

/// Measured costs of decoding on a device. `info` uses these costs for its estimate.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DeviceFigures {
    /// `cpu`, `metal` or `cuda`.
    pub kind: String,
    /// The GPU's name.
    pub gpu: Option<String>,
    /// Rate at which a large 4-bit matrix is multiplied by a vector, in bytes of the matrix per second.
    pub matrix_rate: f64,
    /// Time of a layer and of a token that does not depend on the bytes read, computed from the decoding speeds of two
    /// models in memory. `None` if these models do not fit in memory.
    pub overhead: Option<Overhead>,
    /// Seconds from a launch to the end of the wait for its result. A streamed layer waits once.
    pub wait: f64,
}

/// Figures of one measured answer.
#[derive(Debug, Serialize)]
pub struct RunFigures {
    pub what: String,
    pub prompt_tokens_per_second: f64,
    pub tokens_per_second: f64,
    /// Fraction of the expert lookups that found the expert in a slot.
    pub hit_rate: f64,
    /// Fraction of the time that was spent waiting for experts.
    pub stall_share: f64,
    /// Mean number of CPU cores in use.
    pub cores: f64,
}

/// Maximum size in bytes of the file with the last report.
const MAX_FILE: u64 = 1 << 20;

/// The file with the last report.
fn report_file() -> Option<PathBuf> {
    Some(os::state_dir()?.join("doctor.json"))
}

/// Saves a report for `moestro info`. The field `machine` of the report is a [`MachineReport`]. Returns the path of the
/// file.
///
/// # Errors
/// There is no home directory, or the file cannot be written.
pub fn save(report: &impl Serialize) -> Result<PathBuf, CommandError> {
    let file = report_file().ok_or_else(|| CommandError::Usage("cannot keep the report: HOME is not set".into()))?;
    let text = serde_json::to_vec_pretty(report).unwrap_or_default();
    let failed = &CommandError::io(format!("writing {}", file.display()));
    file.parent().map_or(Ok(()), std::fs::create_dir_all).map_err(failed)?;
    replace_file(&file, &text).map_err(failed)?;
    Ok(file)
}

impl DeviceFigures {
    /// The figures of the last report, if that report is about this device.
    pub fn of_last_report(kind: &str, gpu: Option<&str>) -> Option<Self> {
        Self::read(&report_file()?).filter(|figures| figures.kind == kind && figures.gpu.as_deref() == gpu)
    }

    /// Bytes per second at which the last report read experts from packs: this machine's disk.
    pub fn disk_of_last_report() -> Option<f64> {
        let report: Value = serde_json::from_slice(&read_small_file(&report_file()?, MAX_FILE).ok()?).ok()?;
        report["machine"]["packed"]["disk"].as_f64()
    }

    /// Replaces the assumed GPU figures in `measured` by measured figures. Also returns the time that does not depend
    /// on the bytes read. If `streams` is true, each layer also waits for the router's choice.
    pub fn apply(&self, measured: Measurements, streams: bool) -> (Measurements, Overhead) {
        let Overhead { layer, token } = self.overhead.unwrap_or_default();
        let memory = self.matrix_rate;
        let compute = self.matrix_rate;
        let bandwidth = Bandwidth { memory, compute, ..measured.bandwidth };
        let layer = layer + if streams { self.wait } else { 0.0 };
        (Measurements { bandwidth, kernels: KernelRate::Reported, ..measured }, Overhead { layer, token })
    }

    fn read(file: &Path) -> Option<Self> {
        let report: Value = serde_json::from_slice(&read_small_file(file, MAX_FILE).ok()?).ok()?;
        serde_json::from_value(report["machine"]["device"].clone()).ok()
    }
}

impl fmt::Display for MachineReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { unpacked, packed, device, matrix_rate_at_end, comparisons, runs } = self;
        writeln!(f, "\nmemory")?;
        let memory = unpacked.bandwidth.memory / 1e9;
        let threads = unpacked.threads;
        writeln!(f, "  {memory:>7.1} GB/s  read by {threads} threads of the CPU")?;
        writeln!(f, "  {:>7.1} GB/s  of a 4-bit matrix, by the {}", device.matrix_rate / 1e9, device.kind)?;
        let share = 100.0 * matrix_rate_at_end / device.matrix_rate;
        writeln!(f, "  {:>7.1} GB/s  of the same matrix at the end, {share:.0} %", matrix_rate_at_end / 1e9)?;
        writeln!(f, "\ndisk, experts of 1.8 MB")?;
        for (name, measured) in [("checkpoint", unpacked), ("pack", packed)] {
            let how = if measured.direct { "past" } else { "through" };
            let rate = measured.bandwidth.disk / 1e9;
            let latency = measured.bandwidth.latency * 1e3;
            writeln!(f, "  {rate:>7.2} GB/s  {latency:>6.2} ms for one expert  {name}, {how} the page cache")?;
        }
        if !comparisons.is_empty() {
            writeln!(f, "\n     A, us     B, us   A/B  decoding one token: A, B")?;
        }
        for Comparison { what, ways: [first, second], micros: [a, b] } in comparisons {
            writeln!(f, "  {a:>8.1}  {b:>8.1} {:>5.2}  {what}: {first}, {second}", a / b)?;
        }
        writeln!(f, "\n   prompt/s  decode/s  hit % stall %  cores  like 35b")?;
        for run in runs {
            let [hits, stall] = [run.hit_rate, run.stall_share].map(|share| 100.0 * share);
            let prompt = run.prompt_tokens_per_second;
            let decode = run.tokens_per_second;
            writeln!(f, "  {prompt:>9.1} {decode:>9.1} {hits:>6.1} {stall:>7.1} {:>6.1}  {}", run.cores, run.what)?;
        }
        if let Some(Overhead { layer, token }) = device.overhead {
            writeln!(
                f,
                "\noverhead beyond reading weights: {:.0} us per layer, {:.2} ms per token",
                layer * 1e6,
                token * 1e3
            )?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn figures() -> DeviceFigures {
        DeviceFigures {
            kind: "metal".into(),
            gpu: Some("Apple M1 Max".into()),
            matrix_rate: 300e9,
            overhead: Some(Overhead { layer: 1e-4, token: 1e-3 }),
            wait: 1.5e-4,
        }
    }

    #[test]
    fn report_replaces_assumptions_about_the_gpu() {
        let bandwidth = Bandwidth { memory: 60e9, compute: 60e9, disk: 5e9, latency: 1e-3, cache: 9e9 };
        let kernels = KernelRate::Assumed;
        let measured = Measurements { bandwidth, threads: 8, io_threads: 16, direct: true, kernels };
        let (known, overhead) = figures().apply(measured, false);
        assert_eq!((known.bandwidth.memory, known.bandwidth.compute), (300e9, 300e9));
        assert_eq!((known.bandwidth.disk, known.kernels), (5e9, KernelRate::Reported));
        assert_eq!(overhead, Overhead { layer: 1e-4, token: 1e-3 });
        let (_, streamed) = figures().apply(measured, true);
        assert_eq!(streamed, Overhead { layer: 2.5e-4, token: 1e-3 });
    }

    #[test]
    fn figures_are_read_from_a_report() {
        let figures = figures();
        let file = tempfile::NamedTempFile::new().unwrap();
        let report = serde_json::json!({ "machine": { "device": figures } });
        replace_file(file.path(), report.to_string().as_bytes()).unwrap();
        assert_eq!(DeviceFigures::read(file.path()), Some(figures));
        replace_file(file.path(), b"{}").unwrap();
        assert_eq!(DeviceFigures::read(file.path()), None);
    }
}
