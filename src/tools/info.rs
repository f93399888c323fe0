//! `moestro info`: prints a model's memory plan on this machine and estimates its decoding speed.

use super::{
    estimate::{Estimate, HIT_RATES, HitRates, Overhead, estimate},
    machine_report::DeviceFigures,
    measure, rank, simulate,
    simulation::hit_rates,
};
use crate::command::{
    checkpoint_meta::resolve, device_choice::DeviceChoice, draft_source, load::options, local_models, text::show,
};
use crate::{
    cli,
    config::{LoadSettings, ModelSource, config_file::Settings},
    error::CommandError,
};
use measure::{KernelRate, Measurements};
use moestro_base::platform::os;
use moestro_chat::Tokenizer;
use moestro_model::{
    checkpoint,
    model::{self, CheckpointInfo, Config, config::FfnShape},
    plan::{LimitSource, MachineLimits, ModelFootprint, Plan, Size, Strategy},
};
use serde::Serialize;
use std::{fmt, path::PathBuf};

/// The whole report, with the structure that `--json` prints. Units are bytes, tokens, seconds, and bytes per second.
#[derive(Debug, Serialize)]
struct InfoReport {
    /// One or two sentences that say whether the model fits and how fast it is.
    verdict: String,
    model: String,
    directory: PathBuf,
    /// Directory of the packed experts. `None` if there is no pack.
    pack: Option<PathBuf>,
    /// Licence that the model card names.
    licence: Option<String>,
    shards: usize,
    weights: u64,
    /// Number of experts per token in training. `shape.experts_per_token` is the number in use.
    trained_experts_per_token: usize,
    #[serde(rename = "shape")]
    footprint: ModelFootprint,
    /// Device that `--device` selects: `cpu`, `metal` or `cuda`.
    device: &'static str,
    limits: MachineLimits,
    plan: Option<Plan>,
    /// Reason why there is no plan.
    refused: Option<String>,
    measured: Measurements,
    decode: Vec<Estimate>,
}

pub fn run(args: cli::tool_args::InfoArgs, settings: &Settings) -> Result<(), CommandError> {
    if let Some(machine) = args.machine.clone() {
        return simulate::run(args, &machine);
    }
    if args.like.is_some() || args.model.model.is_none() && settings.model.is_none() {
        return rank::run(args);
    }
    let source = ModelSource::new(args.model.model.as_deref());
    let load = LoadSettings::new(args.load).map_err(CommandError::Usage)?;
    let load = LoadSettings {
        parallel: args.parallel.parallel,
        prompt_cache: args.cache.prompt_cache,
        drafts: Some(args.drafts),
        serving: true,
        ..load
    };
    let dir = resolve(&source)?;
    // `serve` loads the tokenizer before the weights. This command does the same, so that both commands make the same
    // plan. A missing tokenizer is not an error here.
    let tokenizer = Tokenizer::load(&dir);
    let chosen = DeviceChoice::new(&load)?;
    let drafts = draft_source::DraftSource::new(&load, &dir, tokenizer.as_ref().ok())?;
    let draft = drafts.footprint();
    let drafter = drafts.drafter();
    let options = model::LoadOptions { gpu: chosen.working_set(), draft, drafter, ..options(&load) };
    let limits = MachineLimits::here(options.gpu);
    drop(tokenizer);
    let mut found = CheckpointInfo::new(&dir, &options)?;
    let plan = found.plan(&limits, &options.plan);
    let threads = load.flags.threads.unwrap_or_else(os::physical_cores);
    let room = plan.as_ref().map_or(u64::MAX, |plan| plan.limit / 4);
    let measured = measure::measure(&found, &options.store, threads, options.gpu.is_some(), room)?;
    let reported = chosen.gpu_name().and_then(|gpu| DeviceFigures::of_last_report(chosen.name(), Some(&gpu)));
    let streams = plan.as_ref().is_ok_and(|plan| plan.strategy == Strategy::Streaming);
    let (measured, overhead) = match &reported {
        Some(figures) => figures.apply(measured, streams),
        None => (measured, Overhead::default()),
    };
    let rates = if found.footprint.experts_per_token == 0 { &HIT_RATES[HIT_RATES.len() - 1..] } else { &HIT_RATES[..] };
    let trained = match Config::read(&dir)?.ffn {
        FfnShape::Moe { k, .. } => k,
        FfnShape::Dense { .. } => 0,
    };
    let (plan, refused) = match plan {
        Ok(plan) => (Some(plan), None),
        Err(error) => (None, Some(error)),
    };
    let found_in = |slots| match &plan {
        // The page cache may use the memory that the plan leaves free.
        Some(plan) if !measured.direct => {
            let memory = [limits.ram, limits.cgroup].into_iter().flatten().min().unwrap_or(0);
            HitRates::through(slots, memory.saturating_sub(plan.total()), &found.footprint, plan)
        }
        _ => HitRates { slots, cache: 0.0 },
    };
    let at = |slots| estimate(&found.footprint, &measured.bandwidth, found_in(slots), overhead);
    let decode: Vec<Estimate> = rates.iter().map(|&slots| at(slots)).collect();
    let verdict = verdict(plan.as_ref(), |slots| at(slots).tokens_per_second);
    let licence = checkpoint::licence::licence(&dir);
    let report = InfoReport {
        verdict,
        model: local_models::id(&source, settings),
        directory: dir,
        pack: found.pack,
        licence,
        shards: found.checkpoint.index.files.len(),
        weights: found.footprint.weights(),
        trained_experts_per_token: trained,
        device: chosen.name(),
        limits,
        plan,
        refused: refused.as_ref().map(ToString::to_string),
        measured,
        decode,
        footprint: found.footprint,
    };
    show(&report, args.json);
    refused.map_or(Ok(()), |error| Err(error.into()))
}

/// Returns a text such as `Fits in memory. About 13 tok/s.` `speed` gives the tokens per second at a hit rate.
fn verdict(plan: Option<&Plan>, speed: impl Fn(f64) -> f64) -> String {
    let digits = |speed: f64| if speed < 10.0 { format!("{speed:.1}") } else { format!("{speed:.0}") };
    match plan {
        None => "Does not fit in memory.".into(),
        Some(plan) if plan.strategy == Strategy::Resident => {
            format!("Fits in memory. About {} tok/s.", digits(speed(1.0)))
        }
        Some(plan) => {
            let share = 100.0 * plan.residency;
            let speeds = hit_rates(plan.residency).map(|rate| digits(speed(rate)));
            let about = if speeds[0] == speeds[1] { speeds[0].clone() } else { speeds.join(" to ") };
            format!("{share:.0} % of the experts fit in memory, the others are read from the SSD. About {about} tok/s.")
        }
    }
}

impl fmt::Display for InfoReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let footprint = &self.footprint;
        writeln!(f, "{}\n", self.verdict)?;
        writeln!(f, "{}  ({})", self.model, self.directory.display())?;
        if let Some(licence) = &self.licence {
            writeln!(f, "  licence         {licence:>10}")?;
        }
        let shards = if self.shards == 1 { "file" } else { "files" };
        writeln!(f, "  weights         {:>10}  in {} {shards}", Size(self.weights).to_string(), self.shards)?;
        writeln!(f, "  trunk           {:>10}  always in memory", Size(footprint.trunk).to_string())?;
        if footprint.layers > 0 {
            let experts = format!("{} layers x {} experts", footprint.layers, footprint.experts);
            writeln!(f, "  one expert      {:>10}  {experts}", Size(footprint.expert).to_string())?;
            let used = footprint.experts_per_token;
            let trained = self.trained_experts_per_token;
            let fewer = if used < trained { format!(" (trained with {trained})") } else { String::new() };
            writeln!(f, "  experts/token   {used:>10}{fewer}")?;
        }
        writeln!(f, "  KV cache        {:>10}  per token", Size(footprint.kv_per_token).to_string())?;
        writeln!(f, "  state           {:>10}  per sequence", Size(footprint.state).to_string())?;
        if let Some(pack) = &self.pack {
            writeln!(f, "  packed experts  in {}", pack.display())?;
        }
        writeln!(f)?;
        match &self.plan {
            Some(plan) => self.write_plan(f, plan)?,
            None => writeln!(f, "no plan: {}", self.refused.as_deref().unwrap_or_default())?,
        }
        writeln!(f)?;
        self.write_speed(f)
    }
}

impl InfoReport {
    fn write_plan(&self, f: &mut fmt::Formatter<'_>, plan: &Plan) -> fmt::Result {
        let strategy = match plan.strategy {
            Strategy::Resident => "resident",
            Strategy::Streaming => "streaming",
        };
        let from = match plan.limit_from {
            LimitSource::Asked => "--memory-limit",
            LimitSource::Ram => "of this machine's memory",
            LimitSource::Gpu => "the GPU's recommended working set",
            LimitSource::Cgroup => "of the control group's limit",
            LimitSource::Fallback => "assumed",
        };
        let device = self.device;
        let limit = Size(plan.limit);
        let share = 100.0 * plan.overcommit;
        writeln!(f, "plan: {strategy} on the {device}, {limit} ({from}); the whole model needs {share:.0} % of it")?;
        let mut line = |what: &str, bytes: u64, note: String| {
            writeln!(f, "  {}", format!("{what:<15} {:>10}  {note}", Size(bytes).to_string()).trim_end())
        };
        line("program", plan.process, String::new())?;
        line("trunk", plan.trunk, String::new())?;
        if plan.vision > 0 {
            line(
                "images",
                plan.vision,
                "one image in the vision tower, and recent ones; --no-vision needs none".into(),
            )?;
        }
        line("KV cache", plan.kv, format!("{} tokens", plan.context))?;
        line("state", plan.state, self.describe_state(plan))?;
        let mut chunks = format!("prefill in chunks of {} tokens", plan.chunk);
        if plan.residency < 1.0 {
            let absent = self.footprint.total_experts() - plan.slots as u64;
            chunks += &format!("; each reads up to {} of experts", Size(absent * self.footprint.expert));
        }
        line("workspace", plan.workspace, chunks)?;
        if plan.draft > 0 {
            line("draft", plan.draft, "weights and context of the draft; --draft-model lookup needs none".into())?;
        }
        line("requests", plan.requests, "reserved for request bodies".into())?;
        line("prompt cache", plan.prompt_cache, self.describe_prompt_cache(plan))?;
        let slots = format!("{} slots, {:.1} % of all experts", plan.slots, 100.0 * plan.residency);
        line("experts", plan.experts, if self.footprint.layers > 0 { slots } else { String::new() })?;
        if plan.page_cache > 0 {
            line("page cache", plan.page_cache, "left free, because experts are read through it".into())?;
        }
        Ok(())
    }

    /// Describes the number of requests that run at the same time, and the memory of one more request.
    fn describe_state(&self, plan: &Plan) -> String {
        let requests = if plan.parallel == 1 { "request at a time" } else { "requests at the same time" };
        let more = self.footprint.sequence + plan.chunk as u64 * self.footprint.sequence_per_row;
        let slots = more.checked_div(self.footprint.slot).filter(|_| plan.residency < 1.0);
        let cost = slots.map_or(String::new(), |slots| format!(", the size of {slots} slots"));
        format!("{} {requests}; one more takes {}{cost}", plan.parallel, Size(more))
    }

    /// Describes the number of snapshots that the prompt cache can hold, and the number of slots that would take the
    /// same memory.
    fn describe_prompt_cache(&self, plan: &Plan) -> String {
        let footprint = &self.footprint;
        let states = plan.states(footprint.state);
        if plan.prompt_cache == 0 || states == 0 {
            return "no snapshot: only a prompt that extends the last one is reused".into();
        }
        let each = format!("{} and {} per token", Size(footprint.state), Size(footprint.kv_per_token));
        let slots = plan.prompt_cache.checked_div(footprint.slot).filter(|_| plan.residency < 1.0);
        let cost = slots.map_or(String::new(), |slots| format!("; the size of {slots} slots"));
        format!("up to {states} snapshots of {each}{cost}")
    }

    fn write_speed(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Measurements { bandwidth, threads, io_threads, direct, kernels } = self.measured;
        let kernels_note = match kernels {
            KernelRate::Measured => "of this model's weights",
            KernelRate::Reported => "of a large matrix, from `moestro doctor --report`",
            KernelRate::Assumed => "assumed equal to memory bandwidth",
        };
        writeln!(f, "measured here")?;
        writeln!(f, "  memory          {:>5.1} GB/s  read by {threads} threads", bandwidth.memory / 1e9)?;
        writeln!(f, "  kernels         {:>5.1} GB/s  {kernels_note}", bandwidth.compute / 1e9)?;
        let is_resident = self.plan.as_ref().is_some_and(|plan| plan.strategy == Strategy::Resident);
        if self.footprint.layers == 0 || is_resident {
            let speed = self.decode.last().map_or(0.0, |estimate| estimate.tokens_per_second);
            return writeln!(f, "  decode          about {speed:.1} tokens/s");
        }
        let how = if direct { "past" } else { "through" };
        let note = format!("random experts, {io_threads} threads, {how} the page cache");
        writeln!(f, "  disk            {:>5.2} GB/s  {note}", bandwidth.disk / 1e9)?;
        if !direct {
            writeln!(f, "  page cache      {:>5.2} GB/s  the same experts read again", bandwidth.cache / 1e9)?;
        }
        writeln!(f, "  one expert      {:>6.2} ms  to read one", bandwidth.latency * 1e3)?;
        writeln!(f)?;
        writeln!(f, "decode, estimated (short context, no read-ahead across layers)")?;
        let row = |cell: fn(&Estimate) -> String| -> String {
            self.decode.iter().map(|estimate| format!("{:>8}", cell(estimate))).collect()
        };
        writeln!(f, "  hit rate      {}", row(|estimate| format!("{:.0} %", 100.0 * estimate.hit_rate)))?;
        writeln!(f, "  tokens/s      {}", row(|estimate| format!("{:.1}", estimate.tokens_per_second)))?;
        writeln!(f, "  MB read/token {}", row(|estimate| format!("{:.1}", estimate.disk_bytes_per_token / 1e6)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn verdict_says_fit_and_speed() {
        let mut plan: Plan = demo_plan();
        let speed = |rate: f64| 4.0 + 20.0 * rate;
        assert_eq!(verdict(Some(&plan), speed), "Fits in memory. About 24 tok/s.");
        plan.strategy = Strategy::Streaming;
        plan.residency = 0.25;
        let text = "25 % of the experts fit in memory, the others are read from the SSD. About 17 to 20 tok/s.";
        assert_eq!(verdict(Some(&plan), speed), text);
        assert_eq!(verdict(None, speed), "Does not fit in memory.");
    }

    /// The plan of the demo model, which is resident.
    fn demo_plan() -> Plan {
        let dir = crate::demo::unpack().unwrap();
        let mut found = CheckpointInfo::new(&dir, &model::LoadOptions::default()).unwrap();
        let limits = MachineLimits { ram: Some(8 << 30), ..MachineLimits::default() };
        found.plan(&limits, &moestro_model::plan::PlanOptions::default()).unwrap()
    }
}
