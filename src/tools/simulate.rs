//! `moestro info --machine`: simulates a model on another machine.

use crate::{
    cli,
    command::{checkpoint_meta::resolve, load::options, text::show},
    config::{self, LoadSettings, ModelSource},
    error::CommandError,
    tools::{
        simulation::{MACHINES, Simulation, simulate},
        synth,
    },
};
use moestro_base::{error::StoreError, platform::atomic_file::PartialDir};
use moestro_model::{
    model::{self, CheckpointInfo},
    plan::{ModelFootprint, Size, Strategy},
};
use serde::Serialize;
use std::fmt;

/// The whole report, with the structure that `--json` prints.
#[derive(Debug, Serialize)]
struct SimulationReport {
    model: String,
    #[serde(rename = "shape")]
    footprint: ModelFootprint,
    /// Results of the simulation. These figures are not measured.
    simulated: Vec<Simulation>,
    /// Machines on which the model does not fit, each with the reason.
    refused: Vec<(&'static str, String)>,
}

/// Working set of the GPU in bytes. A plan for a GPU needs a working set. The value is arbitrary.
const GPU: u64 = 64 << 30;

/// Prints the simulation for the machine called `name`, or for all machines if `name` is `all`.
pub fn run(args: cli::tool_args::InfoArgs, name: &str) -> Result<(), CommandError> {
    if name != "all" && MACHINES.iter().all(|machine| machine.name != name) {
        let known = MACHINES.map(|machine| machine.name).join(", ");
        return Err(CommandError::Usage(format!("unknown machine {name} for --machine; known are all, {known}")));
    }
    let load = LoadSettings::new(args.load).map_err(CommandError::Usage)?;
    let parallel = args.parallel.parallel;
    let prompt_cache = args.cache.prompt_cache;
    let load = LoadSettings { parallel, prompt_cache, serving: true, ..load };
    let options = model::LoadOptions { gpu: Some(GPU), ..options(&load) };
    let (model, footprint) = match (&args.like, &args.model.model) {
        (Some(_), Some(_)) => return Err(CommandError::Usage("MODEL and --like cannot be used together".into())),
        (Some(like), None) => (format!("like {like}, 4 bits"), outline(like, &options)?),
        (None, model) => {
            let dir = resolve(&ModelSource::new(model.as_deref()))?;
            (config::name(&dir), CheckpointInfo::new(&dir, &options)?.footprint)
        }
    };
    let mut report = SimulationReport { model, footprint, simulated: Vec::new(), refused: Vec::new() };
    for machine in MACHINES.iter().filter(|machine| name == "all" || machine.name == name) {
        match simulate(&report.footprint, *machine, &options.plan) {
            Ok(found) => report.simulated.push(found),
            Err(error) => report.refused.push((machine.name, error.to_string())),
        }
    }
    show(&report, args.json);
    Ok(())
}

/// Memory needs of a model without a checkpoint. Writes a temporary checkpoint of headers and sparse files, and removes
/// this checkpoint afterwards.
pub fn outline(like: &str, options: &model::LoadOptions) -> Result<ModelFootprint, CommandError> {
    let name = std::env::temp_dir().join(format!("moestro-like-{like}-{}", std::process::id()));
    let partial = PartialDir::create(&name).map_err(StoreError::at(&name))?;
    synth::outline(partial.path(), synth::command::dimensions(like)?)?;
    Ok(CheckpointInfo::unpacked(partial.path(), options)?.footprint)
}

impl fmt::Display for SimulationReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}: {} of weights", self.model, Size(self.footprint.weights()))?;
        writeln!(
            f,
            "simulated from public figures (pessimistic to optimistic); nothing was measured on these machines\n"
        )?;
        let columns = ["memory limit", "experts", "hit rate", "stall", "tokens/s"];
        write_row(f, "", columns.map(str::to_owned))?;
        for found in &self.simulated {
            write_row(f, found.machine.name, cells(found))?;
        }
        for (machine, _) in &self.refused {
            writeln!(f, "{machine:<12}  does not fit")?;
        }
        Ok(())
    }
}

fn write_row(f: &mut fmt::Formatter<'_>, name: &str, [limit, experts, hits, stall, speed]: [String; 5]) -> fmt::Result {
    writeln!(f, "{name:<12} {limit:>13} {experts:>8} {hits:>9} {stall:>9} {speed:>9}")
}

fn cells(found: &Simulation) -> [String; 5] {
    let Simulation { plan, decode, stall_share, .. } = found;
    let streams = plan.strategy == Strategy::Streaming;
    let percent = |shares| if streams { range(shares, 100.0) + " %" } else { String::new() };
    [
        Size(plan.limit).to_string(),
        format!("{:.0} %", 100.0 * plan.residency),
        percent(decode.map(|estimate| estimate.hit_rate)),
        percent(*stall_share),
        range(decode.map(|estimate| estimate.tokens_per_second), 1.0),
    ]
}

/// Formats both values, multiplied by `scale`, as a range. The numbers have one decimal if both are below 10.
pub fn range(values: [f64; 2], scale: f64) -> String {
    let [a, b] = values.map(|value| scale * value);
    let digits = usize::from(a.max(b) < 10.0);
    format!("{:.digits$}-{:.digits$}", a.min(b), a.max(b))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn range_starts_with_smaller_value() {
        assert_eq!(range([0.55, 0.47], 100.0), "47-55");
        assert_eq!(range([2.04, 3.18], 1.0), "2.0-3.2");
    }

    /// The expected sizes follow from the published configurations at 4.5 bits per weight. Keys and values have 16
    /// bits, and a row of 256 of them has a scale of 4 bytes.
    #[test]
    fn outline_has_sizes_of_the_real_model() {
        let options = model::LoadOptions { gpu: Some(GPU), ..model::LoadOptions::default() };
        let known = [
            ("35b", 1.39e9, 1_769_472, 20_640),
            ("122b", 3.48e9, 5_308_416, 24_768),
            ("397b", 5.57e9, 7_077_888, 30_960),
            // 12 layers, each with keys, values, and 128 floats per 4 positions.
            ("flash-next", 2.86e9, 2_764_800, 12 * (2 * 2 * 516 + 128)),
            ("27b", 15.1e9, 0, 16 * 2 * 4 * 516),
            ("9b", 5.04e9, 0, 8 * 2 * 4 * 516),
            ("4b", 2.37e9, 0, 8 * 2 * 4 * 516),
        ];
        for (like, trunk, expert, kv) in known {
            let footprint = outline(like, &options).unwrap();
            assert_eq!(footprint.expert, expert, "{like}");
            assert!((footprint.trunk as f64 / trunk - 1.0).abs() < 0.02, "{like}: {}", footprint.trunk);
            assert_eq!(footprint.kv_per_token, kv, "{like}");
        }
    }

    /// The other engine is SwiftLM with dense 4-bit models in memory.
    #[test]
    fn ultra_range_contains_other_engine() {
        let options = model::LoadOptions { gpu: Some(GPU), ..model::LoadOptions::default() };
        let ultra = *MACHINES.iter().find(|machine| machine.name == "m1-ultra-64").unwrap();
        for (dimensions, measured) in [(synth::Dimensions::of_9b(), 73.65), (synth::Dimensions::of_27b(), 24.58)] {
            let dir = tempfile::tempdir().unwrap();
            synth::outline(dir.path(), dimensions).unwrap();
            let footprint = CheckpointInfo::unpacked(dir.path(), &options).unwrap().footprint;
            let [low, high] =
                simulate(&footprint, ultra, &options.plan).unwrap().decode.map(|case| case.tokens_per_second);
            assert!(low <= measured && measured <= high, "{measured}: {low} to {high}");
        }
    }
}
