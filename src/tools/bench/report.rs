//! Prints the results of `moestro bench`: the figures of each run, and the median of each figure.

use super::run::{Phase, Run};
use crate::config::LoadSettings;
use moestro_base::platform::{Access, os};
use moestro_model::{
    model::Qwen,
    plan::{ModelFootprint, Plan, Size, Strategy},
};
use serde::Serialize;
use std::fmt;

/// The machine and the model of a benchmark.
#[derive(Debug, Clone, Serialize)]
pub struct BenchSetup {
    /// `cpu`, `metal` or `cuda`.
    pub device: &'static str,
    pub threads: usize,
    pub io_threads: usize,
    /// True if expert reads bypass the page cache. `None` for a model without routed experts.
    pub direct: Option<bool>,
    #[serde(rename = "shape")]
    pub footprint: ModelFootprint,
    pub plan: Plan,
}

impl BenchSetup {
    pub fn new(device: &'static str, model: &Qwen, load: &LoadSettings) -> Self {
        Self {
            device,
            threads: load.flags.threads.unwrap_or_else(os::physical_cores),
            io_threads: load.flags.io_threads,
            direct: model.store().map(|store| store.access() == Access::Direct),
            footprint: model.footprint().clone(),
            plan: model.plan().clone(),
        }
    }
}

/// The whole report, with the structure that `--json` prints.
#[derive(Debug, Serialize)]
pub struct BenchReport {
    pub model: String,
    #[serde(flatten)]
    pub setup: BenchSetup,
    /// True if each run started without experts in memory and without the checkpoint in the page cache.
    pub cold: bool,
    pub runs: Vec<Run>,
    /// Median of each figure over all runs.
    pub median: Option<Run>,
    /// Peak memory of the process in bytes.
    pub peak_memory: Option<u64>,
}

impl fmt::Display for BenchReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let BenchSetup { device, threads, io_threads, direct, footprint, plan } = &self.setup;
        let strategy = if plan.strategy == Strategy::Resident { "resident" } else { "streaming" };
        write!(f, "{}: {strategy}, {} of {} experts in memory", self.model, plan.slots, footprint.total_experts())?;
        let how = match direct {
            Some(true) => format!(", {io_threads} reading past the page cache"),
            Some(false) => format!(", {io_threads} reading through the page cache"),
            None => String::new(),
        };
        writeln!(f, "\n{device}, {threads} compute threads{how}")?;
        writeln!(f)?;
        // Without misses, all values in the columns about reads would be 0.
        let streams = self.runs.iter().any(|run| run.prompt.misses + run.decode.misses > 0);
        let title = ["run", "phase", "tokens", "tok/s", "hit %", "ahead %", "MB/tok", "MB disk", "stall %", "MB/s"];
        write_row(f, title.map(str::to_owned), streams)?;
        for (index, run) in self.runs.iter().enumerate() {
            write_run(f, &(index + 1).to_string(), run, streams)?;
        }
        let Some(median) = &self.median else { return Ok(()) };
        if self.runs.len() > 1 {
            write_run(f, "median", median, streams)?;
            let speeds = |phase: fn(&Run) -> &Phase| self.runs.iter().map(move |run| phase(run).tokens_per_second);
            for (name, phase) in [("prompt", (|run| &run.prompt) as fn(&Run) -> &Phase), ("decode", |run| &run.decode)]
            {
                let least = speeds(phase).fold(f64::MAX, f64::min);
                let most = speeds(phase).fold(0.0, f64::max);
                writeln!(f, "{name} {least:.2} to {most:.2} tok/s")?;
            }
        }
        writeln!(f)?;
        if let Some(peak) = self.peak_memory {
            writeln!(f, "peak memory {} under a limit of {}", Size(peak), Size(plan.limit))?;
        }
        let Run { prompt, decode, .. } = median;
        if prompt.ngram_rows + decode.ngram_rows > 0 {
            let [before, while_decoding] = [prompt, decode].map(|phase| 100.0 * phase.ngram_stall_share);
            let rows = prompt.ngram_rows + decode.ngram_rows;
            writeln!(
                f,
                "{rows} rows of the n-gram table read; waited for them {before:.2} % of the prompt, {while_decoding:.2} % of decoding"
            )?;
        }
        if decode.gpu_waits_per_token > 0.0 {
            let waits = decode.gpu_waits_per_token;
            let skipped = decode.gpu_skipped_launches_per_token;
            writeln!(f, "decode: {waits:.1} waits for routers and {skipped:.0} launches in vain per token")?;
        }
        writeln!(f, "decode without stalls: {:.2} tok/s", median.resident_tokens_per_second)
    }
}

fn write_run(f: &mut fmt::Formatter<'_>, name: &str, run: &Run, streams: bool) -> fmt::Result {
    for (phase, figures) in [("prompt", &run.prompt), ("decode", &run.decode)] {
        let disk = figures.disk_bytes_per_token.map_or("?".into(), |bytes| format!("{:.2}", bytes / 1e6));
        let cells = [
            name.to_owned(),
            phase.to_owned(),
            figures.tokens.to_string(),
            format!("{:.2}", figures.tokens_per_second),
            format!("{:.1}", 100.0 * figures.hit_rate),
            format!("{:.1}", 100.0 * figures.prefetch_rate),
            format!("{:.2}", figures.bytes_asked_per_token / 1e6),
            disk,
            format!("{:.1}", 100.0 * figures.stall_share),
            format!("{:.0}", figures.read_bytes_per_second / 1e6),
        ];
        write_row(f, cells, streams)?;
    }
    Ok(())
}

/// Writes one line of at most 80 characters. `streams` is true if the line has the columns about reads.
fn write_row(f: &mut fmt::Formatter<'_>, cells: [String; 10], streams: bool) -> fmt::Result {
    let [run, phase, tokens, speed, hits, ahead, asked, disk, stall, read] = cells;
    write!(f, "{run:<6} {phase:<6} {tokens:>7} {speed:>9}")?;
    if streams {
        write!(f, " {hits:>6} {ahead:>7} {asked:>8} {disk:>8} {stall:>7} {read:>7}")?;
    }
    writeln!(f)
}

/// Median of each figure. For an even number of runs, the mean of the two middle values.
pub fn median_run(runs: &[Run]) -> Option<Run> {
    let first = runs.first()?;
    let figure = |of: &dyn Fn(&Run) -> f64| median(runs.iter().map(of).collect());
    let phase = |of: fn(&Run) -> &Phase| Phase {
        tokens: of(first).tokens,
        seconds: figure(&|run| of(run).seconds),
        tokens_per_second: figure(&|run| of(run).tokens_per_second),
        hits: figure(&|run| of(run).hits as f64) as u64,
        misses: figure(&|run| of(run).misses as f64) as u64,
        prefetched: figure(&|run| of(run).prefetched as f64) as u64,
        hit_rate: figure(&|run| of(run).hit_rate),
        prefetch_rate: figure(&|run| of(run).prefetch_rate),
        reads: figure(&|run| of(run).reads as f64) as u64,
        bytes_asked_per_token: figure(&|run| of(run).bytes_asked_per_token),
        disk_bytes_per_token: of(first)
            .disk_bytes_per_token
            .map(|_| figure(&|run| of(run).disk_bytes_per_token.unwrap_or_default())),
        stall_share: figure(&|run| of(run).stall_share),
        ngram_rows: figure(&|run| of(run).ngram_rows as f64) as u64,
        ngram_stall_share: figure(&|run| of(run).ngram_stall_share),
        gpu_waits_per_token: figure(&|run| of(run).gpu_waits_per_token),
        gpu_skipped_launches_per_token: figure(&|run| of(run).gpu_skipped_launches_per_token),
        read_bytes_per_second: figure(&|run| of(run).read_bytes_per_second),
    };
    let resident_tokens_per_second = figure(&|run| run.resident_tokens_per_second);
    Some(Run { prompt: phase(|run| &run.prompt), decode: phase(|run| &run.decode), resident_tokens_per_second })
}

/// Median of `values`, or 0 if there are no values.
pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let middle = |index: usize| values.get(index).copied().unwrap_or(0.0);
    match values.len() {
        0 => 0.0,
        count if count % 2 == 1 => middle(count / 2),
        count => (middle(count / 2 - 1) + middle(count / 2)) / 2.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_fit_80_columns() {
        struct Row;
        impl fmt::Display for Row {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                let phase = Phase {
                    tokens: 1_000_000,
                    tokens_per_second: 99_999.99,
                    bytes_asked_per_token: 9_999e6,
                    disk_bytes_per_token: Some(9_999e6),
                    hit_rate: 1.0,
                    prefetch_rate: 1.0,
                    stall_share: 1.0,
                    read_bytes_per_second: 99_999e6,
                    ..Phase::default()
                };
                write_run(f, "median", &Run { prompt: phase, decode: phase, resident_tokens_per_second: 1.0 }, true)
            }
        }
        assert!(Row.to_string().lines().all(|line| line.chars().count() <= 80), "{Row}");
    }

    #[test]
    fn median_is_taken_per_column() {
        let run = |prompt: f64, decode: f64| Run {
            prompt: Phase { tokens_per_second: prompt, ..Phase::default() },
            decode: Phase { tokens_per_second: decode, ..Phase::default() },
            resident_tokens_per_second: decode,
        };
        let median = median_run(&[run(10_394.0, 3.0), run(10_239.0, 1.0), run(9_447.0, 2.0)]).unwrap();
        assert_eq!((median.prompt.tokens_per_second, median.decode.tokens_per_second), (10_239.0, 2.0));
        let even = median_run(&[run(1.0, 4.0), run(3.0, 2.0)]).unwrap();
        assert_eq!((even.prompt.tokens_per_second, even.decode.tokens_per_second), (2.0, 3.0));
        assert_eq!(median_run(&[]), None);
    }
}
