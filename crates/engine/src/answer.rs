//! An answer during its generation: the sampler, the constraint, and the last token.

use super::{
    abort::Abort,
    constraint::{MaskWorker, TokenMask},
    queue::SubmittedRequest,
    request::{Event, Finish, Request, Timings},
    sampler::{RowOutput, Sampler, logprobs},
    speculation::PendingRows,
};
use crate::error::EngineError;
use moestro_base::metrics::Metrics;
use moestro_model::model::Logits;
use std::time::Instant;

pub struct PartialAnswer {
    pub rows: PendingRows,
    pub sampler: Sampler,
    pub masks: Option<MaskWorker>,
    /// The last token, which was sampled and sent but not evaluated. `None` before the first token.
    pub last: Option<u32>,
    last_sent: Option<Instant>,
    pub timings: Timings,
    started: Instant,
}

/// Which tokens may be sampled, and which tokens end an answer.
pub struct TokenRules {
    /// Tokens that end an answer.
    pub eos: Vec<u32>,
    /// Ids from this number on are never sampled.
    pub usable_vocab: usize,
}

/// The result of one step for one request.
#[derive(Default)]
pub struct StepOutput {
    pub events: Vec<Event>,
    /// Set if the answer is complete.
    pub finish: Option<Finish>,
}

impl PartialAnswer {
    /// Starts the answer to a prompt. `logits` are the logits of the prompt's last row.
    pub fn new(request: &Request, logits: Logits, timings: Timings, rules: &TokenRules) -> Result<Self, Abort> {
        Ok(Self {
            rows: PendingRows::last_of(logits),
            sampler: Sampler::new(request.sampling.clone(), &request.ids, rules.usable_vocab),
            masks: request.constraint.clone().map(MaskWorker::start).transpose()?,
            last: None,
            last_sent: None,
            timings,
            started: Instant::now(),
        })
    }

    /// Samples the next token. `is_full`: the context has no room for another token.
    ///
    /// After the last call, the sequence contains every sent token except the last one.
    pub fn sample(
        &mut self,
        SubmittedRequest { request, arrived, .. }: &SubmittedRequest,
        is_full: bool,
        rules: &TokenRules,
        metrics: &Metrics,
    ) -> Result<StepOutput, Abort> {
        let row = self.rows.current().ok_or(EngineError::NoLogits)?;
        let mask = self.masks.as_ref().map_or(Ok(TokenMask::Any), MaskWorker::next_mask)?;
        let id = self.sampler.draw_from(row, &mask).ok_or(EngineError::NoLogits)?;
        if rules.eos.contains(&id) && (self.masks.is_some() || !request.ignore_eos) {
            self.rows.end_answer(id);
            return Ok(StepOutput { events: Vec::new(), finish: Some(Finish::Stop) });
        }
        let logprobs = match (request.logprobs, row) {
            (Some(top), RowOutput::Logits(logits)) => Some(logprobs(logits, id, top, rules.usable_vocab)),
            _ => None,
        };
        if let Some(masks) = &self.masks {
            masks.append(id);
        }
        let now = Instant::now();
        match self.last_sent.replace(now) {
            None => metrics.time_to_first_token_seconds.observe((now - *arrived).as_secs_f64()),
            Some(before) => metrics.inter_token_seconds.observe((now - before).as_secs_f64()),
        }
        metrics.generated_tokens.inc();
        self.timings.generated_tokens += 1;
        self.last = Some(id);
        let is_complete = is_full || self.timings.generated_tokens == request.max_tokens;
        let finish = is_complete.then_some(Finish::Length);
        Ok(StepOutput { events: vec![Event::Token { id, logprobs }], finish })
    }

    /// Ends the answer. Returns its final timings.
    pub fn finish(&self, metrics: &Metrics) -> Timings {
        let decode_seconds = self.started.elapsed().as_secs_f64();
        metrics.decode_seconds.observe(decode_seconds);
        Timings { decode_seconds, ..self.timings }
    }
}
