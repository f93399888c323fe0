//! The report of `bench`.

use super::run::{Phase, Run};
use crate::{
    config::LoadSettings,
    model::Qwen,
    plan::{ModelFootprint, Plan, Size, Strategy},
    platform::{Access, os},
};
use serde::Serialize;
use std::fmt;

/// The machine and the model.
#[derive(Debug, Clone, Serialize)]
pub struct Setup {
    /// `cpu` or `metal`.
    pub device: &'static str,
    pub threads: usize,
    pub io_threads: usize,
    /// Experts were read past the page cache, or through it; `None` without routed experts.
    pub direct: Option<bool>,
    pub shape: ModelFootprint,
    pub plan: Plan,
}

impl Setup {
    pub fn new(device: &'static str, model: &Qwen, load: &LoadSettings) -> Self {
        Self {
            device,
            threads: load.threads.unwrap_or_else(os::physical_cores),
            io_threads: load.io_threads,
            direct: model.store().map(|store| store.access() == Access::Direct),
            shape: model.shape().clone(),
            plan: model.plan().clone(),
        }
    }
}

/// All of it; `--json` prints it as it is.
#[derive(Debug, Serialize)]
pub struct Report {
    model: String,
    #[serde(flatten)]
    setup: Setup,
    /// Each run began with no expert in memory and nothing of the checkpoint in the page cache.
    cold: bool,
    runs: Vec<Run>,
    /// The run whose decode speed is the median.
    median: Option<Run>,
    /// The most bytes the process has had in memory.
    peak_memory: Option<u64>,
}

impl Report {
    pub fn new(model: String, setup: Setup, cold: bool, runs: Vec<Run>, peak_memory: Option<u64>) -> Self {
        let mut order: Vec<&Run> = runs.iter().collect();
        order.sort_by(|a, b| a.decode.tokens_per_second.total_cmp(&b.decode.tokens_per_second));
        let median = order.get(order.len().saturating_sub(1) / 2).map(|&run| run.clone());
        Self { model, setup, cold, runs, median, peak_memory }
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Setup { device, threads, io_threads, direct, shape, plan } = &self.setup;
        let strategy = if plan.strategy == Strategy::Resident { "resident" } else { "streaming" };
        write!(f, "{}: {strategy}, {} of {} experts in memory", self.model, plan.slots, shape.total_experts())?;
        let how = match direct {
            Some(true) => format!(", {io_threads} reading past the page cache"),
            Some(false) => format!(", {io_threads} reading through the page cache"),
            None => String::new(),
        };
        writeln!(f, "; {device}, {threads} compute threads{how}")?;
        writeln!(f)?;
        writeln!(
            f,
            "run      phase   tokens   tok/s   hits %   ahead %   MB asked/token   MB disk/token   stall %   MB/s read"
        )?;
        for (index, run) in self.runs.iter().enumerate() {
            self.write_run(f, &(index + 1).to_string(), run)?;
        }
        let Some(median) = &self.median else { return Ok(()) };
        if self.runs.len() > 1 {
            self.write_run(f, "median", median)?;
        }
        writeln!(f)?;
        if let Some(peak) = self.peak_memory {
            writeln!(f, "peak memory {} under a limit of {}", Size(peak), Size(plan.limit))?;
        }
        writeln!(f, "with every expert in memory: {:.2} tok/s", median.resident_tokens_per_second)?;
        let (speed, hits) = (median.perfect_tokens_per_second, 100.0 * median.perfect_hit_rate);
        writeln!(f, "with a cache of this size that knows the future: {speed:.2} tok/s, {hits:.1} % hits")
    }
}

impl Report {
    fn write_run(&self, f: &mut fmt::Formatter<'_>, name: &str, run: &Run) -> fmt::Result {
        self.write_phase(f, name, "prompt", &run.prompt)?;
        self.write_phase(f, name, "decode", &run.decode)
    }

    fn write_phase(&self, f: &mut fmt::Formatter<'_>, run: &str, name: &str, phase: &Phase) -> fmt::Result {
        let disk = phase.disk_bytes_per_token.map_or("?".into(), |bytes| format!("{:.2}", bytes / 1e6));
        writeln!(
            f,
            "{run:<8} {name}  {:>7} {:>7.2}  {:>7.1}   {:>7.1}   {:>14.2}   {disk:>13}   {:>7.1}   {:>9.0}",
            phase.tokens,
            phase.tokens_per_second,
            100.0 * phase.hit_rate,
            100.0 * phase.prefetch_rate,
            phase.bytes_asked_per_token / 1e6,
            100.0 * phase.stall_share,
            phase.read_bytes_per_second / 1e6,
        )
    }
}
