//! `bench --draft-model`: the same greedy answer plain and with drafts, side by side, as the engine of `serve` gives it. The
//! model is loaded twice, one after the other, by the same plan.

use super::load_with_bar;
use crate::{
    command::{device_choice::DeviceChoice, draft_source::DraftSource, options, show, speculation},
    config::LoadSettings,
    engine::{self, LookupDraft, Request, Sampling, Timings},
    error::CommandError,
    metrics::Metrics,
    model::{self, Model},
};
use serde::Serialize;
use std::{fmt, path::Path};

/// All of it; `--json` prints it as it is.
#[derive(Debug, Serialize)]
struct Report {
    prompt_tokens: usize,
    tokens: usize,
    /// The kind of the draft.
    draft: &'static str,
    /// Medians of the runs.
    plain_tokens_per_second: f64,
    tokens_per_second: f64,
    /// Of all runs together.
    drafted_tokens: usize,
    accepted_tokens: usize,
    saved_seconds: f64,
    /// For each place in a draft: how often all before it were right, and what part of these it was right, too.
    places: Vec<Place>,
}

#[derive(Debug, Clone, Copy, Serialize)]
struct Place {
    tried: u32,
    right: f64,
}

/// One way to answer: each run's tokens and timings.
struct Runs {
    draft: &'static str,
    all: Vec<(Vec<u32>, Timings)>,
}

pub fn run(
    dir: &Path,
    load: &LoadSettings,
    prompt: &[u32],
    tokens: usize,
    repeat: usize,
    json: bool,
) -> Result<(), CommandError> {
    let plain = answers(dir, load, prompt, tokens, repeat, false)?;
    let drafted = answers(dir, load, prompt, tokens, repeat, true)?;
    if let Some(run) = plain.all.iter().zip(&drafted.all).position(|(a, b)| a.0 != b.0) {
        return Err(CommandError::Unsound(format!("answer {} with drafts is not that without", run + 1)));
    }
    let sum = |count: fn(&Timings) -> usize| drafted.all.iter().map(|run| count(&run.1)).sum();
    let mut places = [[0; 2]; engine::MAX_DRAFT_POSITIONS];
    for (_, timings) in &drafted.all {
        for (all, one) in places.iter_mut().zip(&timings.draft_positions) {
            *all = [all[0] + one[0], all[1] + one[1]];
        }
    }
    let places = places.iter().take_while(|[tried, _]| *tried > 0);
    let report = Report {
        prompt_tokens: prompt.len(),
        tokens,
        draft: drafted.draft,
        plain_tokens_per_second: plain.median(),
        tokens_per_second: drafted.median(),
        drafted_tokens: sum(|timings| timings.drafted_tokens),
        accepted_tokens: sum(|timings| timings.accepted_tokens),
        saved_seconds: drafted.all.iter().map(|run| run.1.saved_seconds).sum(),
        places: places.map(|&[tried, right]| Place { tried, right: f64::from(right) / f64::from(tried) }).collect(),
    };
    show(&report, json);
    Ok(())
}

fn answers(
    dir: &Path,
    load: &LoadSettings,
    prompt: &[u32],
    tokens: usize,
    repeat: usize,
    drafts: bool,
) -> Result<Runs, CommandError> {
    let found = DraftSource::new(load, dir, None)?;
    let chosen = DeviceChoice::new(load)?;
    let mut options = model::LoadOptions {
        gpu: chosen.working_set(),
        draft: found.shape(),
        drafter: found.drafter(),
        ..options(load)
    };
    // As in any bench: an earlier run leaves nothing behind.
    options.store.warm = false;
    let metrics = Metrics::new(env!("CARGO_PKG_VERSION"), "cpu");
    let model = chosen.place(load_with_bar(dir, &options, &metrics)?)?;
    let needed = prompt.len() + tokens;
    if model.info().context < needed {
        let why = format!("the context is {} tokens; --ctx-size {needed} would do", model.info().context);
        return Err(CommandError::Usage(why));
    }
    let draft: Box<dyn engine::Draft<_>> = if drafts { found.load(&model)? } else { Box::new(LookupDraft) };
    let kind = draft.kind().name();
    let said = load.drafts.as_ref().filter(|_| drafts);
    let options = speculation(said, engine::Options::default());
    let (handle, worker) = engine::spawn_with(model, draft, options, metrics)
        .map_err(|source| CommandError::Io { what: "starting the engine's thread".into(), source })?;
    let request =
        Request { ignore_eos: true, cache_prompt: false, ..Request::new(prompt.to_vec(), tokens, Sampling::greedy()) };
    let mut all = Vec::with_capacity(repeat);
    for _ in 0..repeat {
        let (ids, end) = engine::collect(handle.submit(request.clone())?);
        all.push((ids, end?.1));
    }
    drop(handle);
    let _ = worker.join();
    Ok(Runs { draft: kind, all })
}

impl Runs {
    /// Tokens a second while decoding.
    fn median(&self) -> f64 {
        let speed = |(ids, timings): &(Vec<u32>, Timings)| ids.len() as f64 / timings.decode_seconds.max(1e-9);
        let mut speeds: Vec<f64> = self.all.iter().map(speed).collect();
        speeds.sort_by(f64::total_cmp);
        speeds.get(speeds.len() / 2).copied().unwrap_or(0.0)
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{} tokens behind {}, greedy: the same with and without drafts", self.tokens, self.prompt_tokens)?;
        writeln!(f, "  {:<8} {:>8.1} tok/s", "plain", self.plain_tokens_per_second)?;
        let ratio = self.tokens_per_second / self.plain_tokens_per_second.max(1e-9);
        writeln!(f, "  {:<8} {:>8.1} tok/s  {ratio:.2} times as fast", self.draft, self.tokens_per_second)?;
        writeln!(f, "{} of {} drafted tokens accepted", self.accepted_tokens, self.drafted_tokens)?;
        if !self.places.is_empty() {
            write!(f, "by place in the draft:")?;
            for place in &self.places {
                write!(f, " {:.2}", place.right)?;
            }
            writeln!(f)?;
        }
        Ok(())
    }
}
