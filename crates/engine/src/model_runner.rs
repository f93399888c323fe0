//! [`ModelRunner`]: runs the steps of requests on the model: begin, prefill a chunk of the prompt, sample the first
//! token, decode. The scheduler decides which requests take part in a step.

use super::{
    abort::{Abort, catch_panic},
    answer::{PartialAnswer, StepOutput, TokenRules},
    live_request::{LiveRequest, Prefill, Stage, Work},
    prompt_cache::{PromptCache, SnapshotSource},
    queue::RequestQueue,
    request::{Event, Finish, Request, Timings},
    sampler::logprobs,
    sequence::Sequence,
    sequence_cache::SequenceCache,
    speculation::{PendingRows, SampledToken, Speculator},
};
use crate::error::EngineError;
use moestro_base::metrics::Metrics;
use moestro_model::{
    error::ModelError,
    model::{Logits, Model, ModelInfo, NextToken, PassHooks, Rows, SequenceState},
};
use std::{sync::Arc, time::Instant};

/// The model, and what its passes read and write besides the requests.
pub(super) struct ModelRunner<M: Model> {
    pub model: M,
    pub sequences: SequenceCache<M::State>,
    speculator: Speculator<M>,
    rules: TokenRules,
    queue: Arc<RequestQueue>,
    metrics: Arc<Metrics>,
}

/// The requests of a step, and the step's parameters. A step is one of four kinds of [`Work`]. Only a decode step may
/// have several requests.
pub(super) struct Step<S> {
    pub requests: Vec<LiveRequest<S>>,
    /// Maximum number of prompt rows to evaluate.
    pub chunk: usize,
    /// Number of live requests in the decode stage, including requests that are not part of this step.
    pub decoding: usize,
    /// Maximum number of idle sequences to keep if the step allocates a state.
    pub max_idle: usize,
}

/// A request in a decode step. The outcome is empty until the next token is sampled.
struct DecodeRow<'a, S> {
    live: &'a mut LiveRequest<S>,
    outcome: Result<StepOutput, Abort>,
}

impl<S: SequenceState> DecodeRow<'_, S> {
    /// Drops a sequence of which another token was evaluated ahead than the sampler has drawn.
    fn drop_wrong_sequence(&mut self) {
        let Some((sequence, answer)) = self.live.decoding() else { return };
        if let (Some(ahead), Some(last)) = (sequence.ahead(), answer.last)
            && ahead != last
        {
            tracing::debug!(ahead, last, "recomputing a sequence: another token was evaluated ahead");
            self.live.drop_sequence();
        }
    }
}

impl<M: Model> ModelRunner<M> {
    pub fn new(
        model: M,
        speculator: Speculator<M>,
        rules: TokenRules,
        queue: Arc<RequestQueue>,
        cache: Arc<PromptCache>,
        metrics: Arc<Metrics>,
    ) -> Self {
        Self { model, sequences: SequenceCache::new(cache), speculator, rules, queue, metrics }
    }

    /// Runs a step. Returns one outcome per request of the step, in order.
    pub fn run(&mut self, step: &mut Step<M::State>) -> Vec<Result<StepOutput, Abort>> {
        let Step { requests, chunk, decoding, max_idle } = step;
        let [live] = &mut requests[..] else { return self.decode(requests, *decoding) };
        let outcome = match live.work() {
            Work::Decode => return self.decode(requests, *decoding),
            Work::Begin => catch_panic(|| self.begin(live, *max_idle)),
            Work::Sample => catch_panic(|| live.sample(self.model.info().context, &self.rules, &self.metrics)),
            Work::Prefill(_) if live.sequence.is_none() => catch_panic(|| self.restore(live, *max_idle)),
            Work::Prefill(_) if matches!(live.stage, Stage::Decode(_)) => catch_panic(|| self.recompute(live, *chunk)),
            Work::Prefill(_) => catch_panic(|| self.prefill(live, *chunk)),
        };
        vec![outcome]
    }

    /// First step of a request: resumes from the longest cached prefix of its prompt.
    fn begin(&mut self, live: &mut LiveRequest<M::State>, max_idle: usize) -> Result<StepOutput, Abort> {
        let started = Instant::now();
        let queued = started - live.submitted.arrived;
        self.metrics.queue_seconds.observe(queued.as_secs_f64());

        live.clear_count = self.sequences.snapshots.clear_count();
        let (sequence, source) = self.resume(live, max_idle)?;
        let cached_tokens = sequence.len();
        self.sequences.snapshots.count_lookup(cached_tokens, source);
        self.speculator.start(&mut self.model);
        let request = &live.submitted.request;
        let snapshots = self.sequences.snapshot_positions(request, cached_tokens);
        // The first token has no log-probability, since no token precedes it.
        let logprobs = request.prompt_logprobs.map(|_| vec![None]);
        let chunks_started = Instant::now();
        live.stage = Stage::Prefill(Prefill { cached_tokens, snapshots, logprobs, started, chunks_started });
        live.sequence = Some(sequence);
        Ok(StepOutput { events: vec![Event::Started { cached_tokens, queued }], finish: None })
    }

    /// A sequence with the longest cached prefix of the tokens that `live` must evaluate, and the source of the
    /// snapshot if the prefix comes from a snapshot.
    fn resume(
        &mut self,
        live: &LiveRequest<M::State>,
        max_idle: usize,
    ) -> Result<(Sequence<M::State>, Option<SnapshotSource>), ModelError> {
        let request = &live.submitted.request;
        let prompt = live.tokens_to_evaluate();
        self.sequences.resume(&mut self.model, request, prompt, live.clear_count, max_idle)
    }

    /// Resumes a preempted request from the longest cached prefix of its tokens.
    fn restore(&mut self, live: &mut LiveRequest<M::State>, max_idle: usize) -> Result<StepOutput, Abort> {
        live.sequence = Some(self.resume(live, max_idle)?.0);
        Ok(StepOutput::default())
    }

    /// Recomputes the next chunk of a dropped sequence.
    fn recompute(&mut self, live: &mut LiveRequest<M::State>, chunk: usize) -> Result<StepOutput, Abort> {
        let chunk = live.next_chunk(chunk, self.model.info().exact_chunks);
        let Some(sequence) = &mut live.sequence else { return Ok(StepOutput::default()) };
        self.speculator.follow(None);
        let keep_going = || !self.queue.should_cancel_step(&live.submitted, chunk.end);
        let images = &live.submitted.request.images;
        let is_prompt = chunk.start < live.submitted.request.ids.len();
        let mut hooks = PassHooks { is_prompt, images, keep_going: Some(&keep_going), ..PassHooks::default() };
        sequence.extend(&mut self.model, &live.dropped_tokens[chunk.clone()], Rows::None, &mut hooks)?;
        Ok(StepOutput::default())
    }

    /// Evaluates one chunk of the prompt. After the last chunk, the request enters the decode stage.
    fn prefill(&mut self, live: &mut LiveRequest<M::State>, chunk: usize) -> Result<StepOutput, Abort> {
        let chunk = live.next_chunk(chunk, self.model.info().exact_chunks);
        let (Stage::Prefill(prefill), Some(sequence)) = (&mut live.stage, &mut live.sequence) else {
            return Ok(StepOutput::default());
        };
        let submitted = &live.submitted;
        let cache = &self.sequences.snapshots;
        let Request { ids, images, prompt_logprobs, max_tokens, .. } = &submitted.request;
        let is_last = chunk.end == ids.len();
        let rows = match prompt_logprobs {
            Some(_) => Rows::All,
            None if is_last && *max_tokens > 0 => Rows::Last,
            None => Rows::None,
        };

        let keys = submitted.request.cached_prompt().keys();
        let is_inside = |at: usize| chunk.start < at && at <= chunk.end;
        let wanted = prefill.snapshots.iter().copied().filter(|&(at, _)| is_inside(at)).collect();
        let snapshots = cache.reserve(&keys, wanted, sequence.state().shared_positions());
        let snapshot_at: Vec<usize> = snapshots.iter().map(|&(at, _)| at).collect();
        let begin = Instant::now();
        // The requests that wait for a snapshot continue from the end of the chunk if the client disconnects.
        let is_awaited = live.awaited.is_some();
        let keep_going = || is_awaited || !self.queue.should_cancel_step(submitted, chunk.end);
        let keep_going: Option<&dyn Fn() -> bool> = Some(&keep_going);
        let snapshot_at = &snapshot_at[..];
        let following = &ids[chunk.end..];
        let mut hooks =
            PassHooks { is_prompt: true, following, images, snapshot_at, keep_going, ..PassHooks::default() };
        self.speculator.follow(Some(sequence));
        let logits = sequence.extend(&mut self.model, &ids[chunk.clone()], rows, &mut hooks)?;
        self.speculator.prompt_evaluated(&mut self.model, sequence, chunk.len(), begin.elapsed());
        for ((at, kind), snapshot) in snapshots.into_iter().zip(hooks.snapshots) {
            cache.insert(&keys[..at], kind, snapshot, live.clear_count);
        }
        cache.record_prefill_speed(chunk.len(), begin.elapsed());
        self.metrics.prompt_tokens_computed.inc_by(chunk.len() as u64);
        self.metrics.step_rows.observe(chunk.len() as f64);

        if let (Some(top), Some(entries)) = (prompt_logprobs, &mut prefill.logprobs) {
            // The logits of a row predict the next token.
            let next = &ids[chunk.start + 1..ids.len().min(chunk.end + 1)];
            let entry = |(row, &id): (usize, &u32)| Some(logprobs(logits.row(row), id, *top, self.rules.usable_vocab));
            entries.extend(next.iter().enumerate().map(entry));
        }
        let seconds = prefill.chunks_started.elapsed().as_secs_f64();
        let prefilled = Event::Prefilled { tokens: chunk.end, seconds };
        if is_last {
            return self.start_answer(live, prefilled, logits);
        }
        Ok(StepOutput { events: vec![prefilled], finish: None })
    }

    /// Starts the answer after the last chunk of the prompt. `logits` are the logits of that chunk.
    fn start_answer(
        &mut self,
        live: &mut LiveRequest<M::State>,
        prefilled: Event,
        logits: Logits,
    ) -> Result<StepOutput, Abort> {
        let Stage::Prefill(prefill) = &mut live.stage else { return Ok(StepOutput::default()) };
        let request = &live.submitted.request;
        let mut events = vec![prefilled];
        events.extend(prefill.logprobs.take().map(Event::Prompt));
        let prompt_seconds = prefill.started.elapsed().as_secs_f64();
        self.metrics.prefill_seconds.observe(prompt_seconds);
        let prompt_tokens = request.ids.len();
        let cached_tokens = prefill.cached_tokens;
        let timings = Timings { prompt_tokens, cached_tokens, prompt_seconds, ..Timings::default() };
        let finish = (request.max_tokens == 0).then_some(Finish::Length);
        live.stage = Stage::Decode(Box::new(PartialAnswer::new(request, logits, timings, &self.rules)?));
        Ok(StepOutput { events, finish })
    }

    /// Evaluates the last token of each request in one pass and samples the next tokens. Uses drafts if only one
    /// sequence decodes. If the pass fails, the sequences of all requests are dropped.
    fn decode(&mut self, requests: &mut [LiveRequest<M::State>], decoding: usize) -> Vec<Result<StepOutput, Abort>> {
        let new = |live| DecodeRow { live, outcome: Ok(StepOutput::default()) };
        let mut rows: Vec<DecodeRow<M::State>> = requests.iter_mut().map(new).collect();
        for row in &mut rows {
            row.drop_wrong_sequence();
            row.outcome = catch_panic(|| self.use_draft(row.live));
        }
        let needs_pass = |row: &&mut DecodeRow<M::State>| row.outcome.is_ok() && !row.live.has_logits();
        let mut evaluated: Vec<_> = rows.iter_mut().filter(needs_pass).collect();
        let failure = self.evaluate_last_tokens(&mut evaluated, decoding).err();
        let has_failed = failure.is_some();
        if let Some(abort) = failure {
            end_or_retry(&mut evaluated, abort);
        }
        let (ModelInfo { context, threads, .. }, rules, metrics) = (self.model.info(), &self.rules, &*self.metrics);
        let sample_row = |DecodeRow { live, outcome }: &mut DecodeRow<M::State>| {
            // A request without a sequence continues alone in a later step.
            if outcome.is_ok() && live.sequence.is_some() {
                *outcome = catch_panic(|| live.sample(context, rules, metrics));
            }
        };
        match threads {
            Some(threads) => threads.run_pieces(&mut rows, 1, &|_, row| row.iter_mut().for_each(sample_row)),
            None => rows.iter_mut().for_each(sample_row),
        }
        if has_failed {
            rows.iter_mut().for_each(|row| row.live.drop_sequence());
        }
        rows.into_iter().map(|row| row.outcome).collect()
    }

    /// Evaluates the last token of each request in one pass. Records the pass in the requests and the metrics.
    fn evaluate_last_tokens(&mut self, rows: &mut [&mut DecodeRow<M::State>], decoding: usize) -> Result<(), Abort> {
        let passed = catch_panic(|| match &mut *rows {
            [] => Ok(()),
            [row] => self.advance(row.live, decoding),
            several => {
                // The pass of a sequence that is ahead is submitted already.
                several.sort_by_key(|row| !row.live.is_ahead());
                let (ahead, others) = several.split_at_mut(several.partition_point(|row| row.live.is_ahead()));
                for rows in [ahead, others] {
                    match rows {
                        [] => {}
                        [row] => self.advance(row.live, decoding)?,
                        rows => self.advance_together(rows, decoding)?,
                    }
                }
                Ok(())
            }
        });
        let mut evaluated = 0;
        for DecodeRow { live, .. } in &mut *rows {
            live.must_run_alone = false;
            if let Some((_, answer)) = live.decoding() {
                answer.timings.record_pass(decoding);
                evaluated += answer.rows.len();
            }
        }
        if !rows.is_empty() && passed.is_ok() {
            self.metrics.step_sequences.observe(rows.len() as f64);
            self.metrics.step_rows.observe(evaluated as f64);
        }
        passed
    }

    /// Uses the logits of an earlier pass if that pass verified a draft that contains the last token.
    fn use_draft(&mut self, live: &mut LiveRequest<M::State>) -> Result<StepOutput, Abort> {
        if let Some((sequence, PartialAnswer { rows, last: Some(id), timings, .. })) = live.decoding() {
            self.speculator.accept(sequence, &mut self.model, rows, *id, timings)?;
        }
        Ok(StepOutput::default())
    }

    /// Evaluates the last token of one request, together with a draft if no other sequence decodes.
    fn advance(&mut self, live: &mut LiveRequest<M::State>, decoding: usize) -> Result<(), Abort> {
        let Request { max_tokens, logprobs, .. } = live.submitted.request;
        let needs_logits = logprobs.is_some();
        let Some((sequence, answer)) = live.decoding() else { return Ok(()) };
        let PartialAnswer { rows, sampler, masks, last: Some(id), timings, .. } = answer else { return Ok(()) };
        let remaining = max_tokens - timings.generated_tokens;
        let is_alone = decoding <= 1;
        let token = SampledToken { id: *id, sampler, masks: masks.as_ref(), needs_logits, remaining, is_alone };
        Ok(self.speculator.advance(sequence, &mut self.model, rows, &token, timings)?)
    }

    /// Evaluates the last token of several requests in one pass, without drafts.
    fn advance_together(&mut self, rows: &mut [&mut DecodeRow<M::State>], decoding: usize) -> Result<(), Abort> {
        // The next pass has the same rows unless other sequences decode in turn with these.
        let next = if rows.len() == decoding { next_tokens(rows) } else { Vec::new() };
        let decoding = rows.iter_mut().filter_map(|row| row.live.decoding());
        let decoding = decoding.filter_map(|(sequence, answer)| Some(((sequence, answer.last?), &mut answer.rows)));
        let (mut tokens, pending): (Vec<_>, Vec<_>) = decoding.unzip();
        self.speculator.follow(None);
        let logits = Sequence::extend_each(&mut self.model, &mut tokens, &next)?;
        for (row, pending) in pending.into_iter().enumerate() {
            *pending = PendingRows::row_of(logits.clone(), row);
        }
        Ok(())
    }

    /// Removes rejected draft tokens from the sequence of a request that ends, and appends a token that was evaluated
    /// ahead.
    pub fn settle(&mut self, live: &mut LiveRequest<M::State>) -> Result<(), Abort> {
        let Some((sequence, answer)) = live.decoding() else { return Ok(()) };
        catch_panic(|| {
            self.speculator.settle(sequence, &mut self.model, &answer.rows, &mut answer.timings)?;
            sequence.append_ahead();
            Ok(())
        })
    }

    /// Reads a page for the disk cache. Returns false if it waits for none.
    pub fn answer_page_request(&mut self) -> bool {
        self.sequences.snapshots.answer_page_request(&mut self.model)
    }

    /// Switches to the CPU if an error has made the GPU unusable. Returns true if the sequences of all live requests
    /// are lost and must be recomputed.
    pub fn recover(&mut self) -> bool {
        match self.model.recover() {
            Ok(false) => false,
            Ok(true) => {
                tracing::warn!("the GPU is lost after an error; computing on the CPU from now on");
                self.metrics.set_device("cpu");
                self.metrics.gpu_lost.set(1);
                self.sequences.clear(self.model.info().pages);
                true
            }
            Err(error) => {
                tracing::error!(%error, "the GPU is lost after an error; cannot continue on the CPU");
                false
            }
        }
    }
}

/// The rules that will choose the next token of each request. Empty if one of the rules is unknown, or if no request
/// needs another pass.
fn next_tokens<S: SequenceState>(rows: &[&mut DecodeRow<S>]) -> Vec<NextToken> {
    let next = |row: &&mut DecodeRow<S>| match &row.live.stage {
        Stage::Decode(answer) if answer.masks.is_none() => answer.sampler.next_token(),
        _ => None,
    };
    let continues = |row: &&mut DecodeRow<S>| match &row.live.stage {
        Stage::Decode(answer) => answer.timings.generated_tokens + 1 < row.live.submitted.request.max_tokens,
        _ => false,
    };
    let all: Option<Vec<NextToken>> = rows.iter().map(next).collect();
    all.filter(|_| rows.iter().any(continues)).unwrap_or_default()
}

/// Handles the error of a pass. The error of one sequence ends its request, and a panic ends every request of the pass.
/// After an error in a pass of several sequences, each sequence is recomputed and continues alone, so that only the
/// faulty request ends.
fn end_or_retry<S: SequenceState>(rows: &mut [&mut DecodeRow<S>], abort: Abort) {
    match (rows, abort) {
        ([row], abort) => row.outcome = Err(abort),
        (rows, Abort::Failed(EngineError::Panicked(text))) => {
            rows.iter_mut().for_each(|row| row.outcome = Err(EngineError::Panicked(text.clone()).into()));
        }
        (rows, abort) => {
            tracing::warn!(
                ?abort,
                sequences = rows.len(),
                "a pass of several sequences failed; recomputing each of them"
            );
            for DecodeRow { live, .. } in rows {
                live.drop_sequence();
                live.must_run_alone = true;
            }
        }
    }
}
