//! `bench --draft-model`: compares the same greedy answer without and with drafts, computed by the engine that `serve` uses.
//! The model is loaded twice, one after the other, with the same plan.

use super::{load_with_bar, report::median};
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

/// The whole report, in the shape that `--json` prints.
#[derive(Debug, Serialize)]
struct DraftReport {
    prompt_tokens: usize,
    tokens: usize,
    /// Kind of draft.
    draft: &'static str,
    /// Medians of the runs.
    plain_tokens_per_second: f64,
    tokens_per_second: f64,
    /// Totals of all runs.
    drafted_tokens: usize,
    accepted_tokens: usize,
    saved_seconds: f64,
    /// Acceptance for each position in a draft.
    places: Vec<DraftPosition>,
}

#[derive(Debug, Clone, Copy, Serialize)]
struct DraftPosition {
    /// Number of times all earlier positions were accepted.
    tried: u32,
    /// Share of these in which this position was accepted.
    right: f64,
}

/// Answers of one configuration: tokens and timings of each run.
struct AnswerRuns {
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
        return Err(CommandError::Unsound(format!("answer {} differs with drafts", run + 1)));
    }
    let sum = |count: fn(&Timings) -> usize| drafted.all.iter().map(|run| count(&run.1)).sum();
    let mut places = [[0; 2]; engine::MAX_DRAFT_POSITIONS];
    for (_, timings) in &drafted.all {
        for (all, one) in places.iter_mut().zip(&timings.draft_positions) {
            *all = [all[0] + one[0], all[1] + one[1]];
        }
    }
    let places = places.iter().take_while(|[tried, _]| *tried > 0);
    let report = DraftReport {
        prompt_tokens: prompt.len(),
        tokens,
        draft: drafted.draft,
        plain_tokens_per_second: plain.median_speed(),
        tokens_per_second: drafted.median_speed(),
        drafted_tokens: sum(|timings| timings.drafted_tokens),
        accepted_tokens: sum(|timings| timings.accepted_tokens),
        saved_seconds: drafted.all.iter().map(|run| run.1.saved_seconds).sum(),
        places: places
            .map(|&[tried, right]| DraftPosition { tried, right: f64::from(right) / f64::from(tried) })
            .collect(),
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
) -> Result<AnswerRuns, CommandError> {
    let found = DraftSource::new(load, dir, None)?;
    let chosen = DeviceChoice::new(load)?;
    let mut options = model::LoadOptions {
        gpu: chosen.working_set(),
        draft: found.shape(),
        drafter: found.drafter(),
        ..options(load)
    };
    // Earlier runs must not influence this one.
    options.store.warm = false;
    let metrics = Metrics::new(env!("CARGO_PKG_VERSION"), "cpu");
    let model = chosen.place(load_with_bar(dir, &options, &metrics)?)?;
    let needed = prompt.len() + tokens;
    if model.info().context < needed {
        let why = format!("the context is {} tokens; use --ctx-size {needed}", model.info().context);
        return Err(CommandError::Usage(why));
    }
    let draft: Box<dyn engine::Draft<_>> = if drafts { found.load(&model)? } else { Box::new(LookupDraft) };
    let kind = draft.kind().name();
    let said = load.drafts.as_ref().filter(|_| drafts);
    let options = speculation(said, engine::Options::default());
    let (handle, worker) = engine::spawn_with(model, draft, options, metrics)
        .map_err(|source| CommandError::Io { what: "cannot start the engine thread".into(), source })?;
    let request =
        Request { ignore_eos: true, cache_prompt: false, ..Request::new(prompt.to_vec(), tokens, Sampling::greedy()) };
    let mut all = Vec::with_capacity(repeat);
    for _ in 0..repeat {
        let (ids, end) = engine::collect(handle.submit(request.clone())?);
        all.push((ids, end?.1));
    }
    drop(handle);
    let _ = worker.join();
    Ok(AnswerRuns { draft: kind, all })
}

impl AnswerRuns {
    /// Median decoding speed in tokens per second.
    fn median_speed(&self) -> f64 {
        let speed = |(ids, timings): &(Vec<u32>, Timings)| ids.len() as f64 / timings.decode_seconds.max(1e-9);
        median(self.all.iter().map(speed).collect())
    }
}

impl fmt::Display for DraftReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{} tokens after a prompt of {}, greedy: identical with and without drafts",
            self.tokens, self.prompt_tokens
        )?;
        writeln!(f, "  {:<8} {:>8.1} tok/s", "plain", self.plain_tokens_per_second)?;
        let ratio = self.tokens_per_second / self.plain_tokens_per_second.max(1e-9);
        writeln!(f, "  {:<8} {:>8.1} tok/s  {ratio:.2} times as fast", self.draft, self.tokens_per_second)?;
        writeln!(f, "{} of {} drafted tokens accepted", self.accepted_tokens, self.drafted_tokens)?;
        if !self.places.is_empty() {
            write!(f, "acceptance by position in the draft:")?;
            for place in &self.places {
                write!(f, " {:.2}", place.right)?;
            }
            writeln!(f)?;
        }
        Ok(())
    }
}
