//! `moestro info --machine`: a model on a machine that is not here.

use crate::{
    cli,
    command::{options, resolve, show},
    config::{self, LoadSettings, ModelSource},
    error::{CommandError, StoreError},
    model::{self, CheckpointInfo},
    plan::{MACHINES, ModelFootprint, Simulation, Size, Strategy, simulate},
    platform::atomic_file::PartialDir,
    tools::synth,
};
use serde::Serialize;
use std::fmt;

/// Everything that is said; `--json` prints it as it is.
#[derive(Debug, Serialize)]
struct Report {
    model: String,
    shape: ModelFootprint,
    /// Nothing of this was measured.
    simulated: Vec<Simulation>,
    /// Machines that the model does not fit on, and the reason.
    refused: Vec<(&'static str, String)>,
}

/// A GPU's memory: its plan is another than the processor's.
const GPU: u64 = 64 << 30;

/// Prints the simulation on the machine of this name, or on all.
pub fn run(typed: cli::InfoArgs, name: &str) -> Result<(), CommandError> {
    if name != "all" && MACHINES.iter().all(|machine| machine.name != name) {
        let known = MACHINES.map(|machine| machine.name).join(", ");
        return Err(CommandError::Usage(format!("--machine {name}: all, {known} are known")));
    }
    let load = LoadSettings::new(typed.load).map_err(CommandError::Usage)?.serving();
    let load = LoadSettings { prompt_cache: typed.cache.prompt_cache, ..load };
    let options = model::LoadOptions { gpu: Some(GPU), ..options(&load) };
    let (model, shape) = match (&typed.like, &typed.model.model) {
        (Some(_), Some(_)) => return Err(CommandError::Usage("a MODEL or --like, not both".into())),
        (Some(like), None) => (format!("like {like}, 4 bits"), outline(like, &options)?),
        (None, model) => {
            let dir = resolve(&ModelSource::new(model.as_deref()))?;
            (config::name(&dir), CheckpointInfo::new(&dir, &options)?.shape)
        }
    };
    let mut report = Report { model, shape, simulated: Vec::new(), refused: Vec::new() };
    for machine in MACHINES.iter().filter(|machine| name == "all" || machine.name == name) {
        match simulate(&report.shape, *machine, &options.plan) {
            Ok(found) => report.simulated.push(found),
            Err(error) => report.refused.push((machine.name, error.to_string())),
        }
    }
    show(&report, typed.json);
    Ok(())
}

/// The sizes of a model of which there is no checkpoint: of one made of headers and holes, which goes again.
fn outline(like: &str, options: &model::LoadOptions) -> Result<ModelFootprint, CommandError> {
    let name = std::env::temp_dir().join(format!("moestro-like-{like}-{}", std::process::id()));
    let io = |source| StoreError::Io { path: name.clone(), source };
    let partial = PartialDir::create(&name).map_err(io)?;
    synth::outline(partial.path(), synth::command::dimensions(like)?)?;
    Ok(CheckpointInfo::unpacked(partial.path(), options)?.shape)
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}: {} of weights", self.model, Size(self.shape.weights()))?;
        writeln!(f, "simulated from public figures, cautious to hopeful; nothing was measured on these machines\n")?;
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

/// Two values times `scale`, the smaller first, with a digit more where both are small.
fn range(values: [f64; 2], scale: f64) -> String {
    let [a, b] = values.map(|value| scale * value);
    let digits = usize::from(a.max(b) < 10.0);
    format!("{:.digits$}-{:.digits$}", a.min(b), a.max(b))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_begins_with_the_smaller_value() {
        assert_eq!(range([0.55, 0.47], 100.0), "47-55");
        assert_eq!(range([2.04, 3.18], 1.0), "2.0-3.2");
    }

    /// The sums of the published configurations, 4.5 bits a weight: an expert, everything else, and one token's keys and values,
    /// which a GPU keeps as f32.
    #[test]
    fn an_outline_has_the_sizes_of_the_model_it_is_like() {
        let options = model::LoadOptions { gpu: Some(GPU), ..model::LoadOptions::default() };
        let known = [
            ("35b", 1.39e9, 1_769_472, 40_960),
            ("122b", 3.48e9, 5_308_416, 49_152),
            ("397b", 5.57e9, 7_077_888, 61_440),
        ];
        for (like, trunk, expert, kv) in known {
            let shape = outline(like, &options).unwrap();
            assert_eq!(shape.expert, expert, "{like}");
            assert!((shape.trunk as f64 / trunk - 1.0).abs() < 0.02, "{like}: {}", shape.trunk);
            assert_eq!(shape.kv_per_token, kv, "{like}");
        }
    }
}
