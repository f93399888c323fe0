//! `bench --draft-model`: compares the same greedy answer without and with drafts. The engine that `serve` uses
//! computes both. Answers without and with drafts alternate, so that a machine that slows down affects both equally.
//! Before each measured answer, the model is loaded with the same plan and generates a short answer.

use super::{load_model, report::median};
use crate::{
    command::{
        draft_source::DraftSource,
        load::{options, speculation, start_engine},
        text::show,
    },
    config::LoadSettings,
    error::CommandError,
};
use moestro_base::metrics::Metrics;
use moestro_engine::{self as engine, LookupDraft, Request, Sampling, Timings};
use moestro_model::model;
use serde::Serialize;
use std::{fmt, path::Path};

/// Maximum number of tokens of the warm-up answer.
const WARM_UP: usize = 32;

/// The whole report, with the structure that `--json` prints.
#[derive(Debug, Serialize)]
struct DraftReport {
    prompt_tokens: usize,
    tokens: usize,
    /// Kind of the draft.
    draft: &'static str,
    /// Median speed of the answers without drafts.
    plain_tokens_per_second: f64,
    /// Median speed of the answers with drafts.
    tokens_per_second: f64,
    /// For each pair of answers: the speed with drafts divided by the speed without drafts.
    ratios: Vec<f64>,
    /// Number of drafted tokens in all answers.
    drafted_tokens: usize,
    /// Number of accepted tokens in all answers.
    accepted_tokens: usize,
    /// Seconds that the drafts saved in all answers.
    saved_seconds: f64,
    /// Acceptance for each position in a draft.
    places: Vec<DraftPosition>,
}

#[derive(Debug, Clone, Copy, Serialize)]
struct DraftPosition {
    /// Number of drafts in which all earlier positions were accepted.
    tried: u32,
    /// Fraction of these drafts in which this position was accepted.
    right: f64,
}

/// Answers without drafts, or answers with drafts: the tokens and the timings of each answer.
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
    let [mut plain, mut drafted] = ["", ""].map(|draft| AnswerRuns { draft, all: Vec::new() });
    for pair in 0..repeat {
        // In even pairs, the answer without drafts comes first. In odd pairs, it comes second.
        let first = pair % 2 == 1;
        for drafts in [first, !first] {
            let (draft, answer) = answer(dir, load, prompt, tokens, drafts)?;
            let runs = if drafts { &mut drafted } else { &mut plain };
            runs.draft = draft;
            runs.all.push(answer);
        }
    }
    if let Some(run) = plain.all.iter().zip(&drafted.all).position(|(a, b)| a.0 != b.0) {
        let remedy = "serve with --draft-model off, and report this and the output of `moestro doctor` as a bug";
        return Err(CommandError::Unsound(format!("answer {} differs with drafts; {remedy}", run + 1)));
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
        ratios: drafted.speeds().zip(plain.speeds()).map(|(drafted, plain)| drafted / plain.max(1e-9)).collect(),
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

/// Loads the model, generates a short answer as a warm-up, and measures one answer. Returns the kind of draft and the
/// answer.
fn answer(
    dir: &Path,
    load: &LoadSettings,
    prompt: &[u32],
    tokens: usize,
    drafts: bool,
) -> Result<(&'static str, (Vec<u32>, Timings)), CommandError> {
    let found = DraftSource::new(load, dir, None)?;
    let options = model::LoadOptions { draft: found.footprint(), drafter: found.drafter(), ..options(load) };
    let metrics = Metrics::new(env!("CARGO_PKG_VERSION"), "cpu");
    let model = load_model(dir, load, options, prompt.len() + tokens, &metrics)?;
    let draft: Box<dyn engine::Draft<_>> = if drafts { found.load(&model)? } else { Box::new(LookupDraft) };
    let kind = draft.kind().name();
    let draft_flags = load.drafts.as_ref().filter(|_| drafts);
    let options = speculation(draft_flags, engine::Options::default());
    let (handle, worker) = start_engine(model, draft, options, metrics)?;
    let request =
        Request { ignore_eos: true, cache_prompt: false, ..Request::new(prompt.to_vec(), tokens, Sampling::greedy()) };
    let warm_up = Request { max_tokens: tokens.min(WARM_UP), ..request.clone() };
    engine::collect(handle.submit(warm_up)?).1?;
    let (ids, end) = engine::collect(handle.submit(request)?);
    drop(handle);
    let _ = worker.join();
    Ok((kind, (ids, end?.1)))
}

impl AnswerRuns {
    /// Decoding speeds in tokens per second.
    fn speeds(&self) -> impl Iterator<Item = f64> + '_ {
        self.all.iter().map(|(ids, timings)| ids.len() as f64 / timings.decode_seconds.max(1e-9))
    }

    fn median_speed(&self) -> f64 {
        median(self.speeds().collect())
    }
}

/// Summarizes the ratios of all pairs, for example as `1.31 times as fast (1.25 to 1.40)`. If the pairs contradict each
/// other, the summary says so.
fn compare(ratios: &[f64]) -> String {
    let min = ratios.iter().copied().fold(f64::MAX, f64::min);
    let max = ratios.iter().copied().fold(0.0, f64::max);
    match ratios.len() {
        0 => String::new(),
        1 => format!("{min:.2} times as fast (one pair; --repeat 3 shows the spread)"),
        _ if min <= 1.0 && max >= 1.0 => format!("no difference ({min:.2} to {max:.2} times as fast)"),
        _ => format!("{:.2} times as fast ({min:.2} to {max:.2})", median(ratios.to_vec())),
    }
}

impl fmt::Display for DraftReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { tokens, prompt_tokens, .. } = self;
        writeln!(f, "{tokens} tokens after a prompt of {prompt_tokens}, greedy: identical with and without drafts")?;
        writeln!(f, "  {:<8} {:>8.1} tok/s", "plain", self.plain_tokens_per_second)?;
        let compared = compare(&self.ratios);
        writeln!(f, "  {:<8} {:>8.1} tok/s  {compared}", self.draft, self.tokens_per_second)?;
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spread_around_one_is_no_difference() {
        assert_eq!(compare(&[0.97, 1.2, 1.05]), "no difference (0.97 to 1.20 times as fast)");
        assert_eq!(compare(&[1.3, 1.2, 1.5]), "1.30 times as fast (1.20 to 1.50)");
        assert_eq!(compare(&[0.8, 0.9]), "0.85 times as fast (0.80 to 0.90)");
        assert!(compare(&[1.1]).starts_with("1.10 times as fast (one pair"));
    }
}
