//! The steps of a request: begin, prefill a chunk of the prompt, sample the first token, decode.

use super::{Scheduler, Step};
use crate::{
    engine::{
        answer::{PartialAnswer, StepOutput, TokenRules},
        cache_salt::CachedPrompt,
        idle_sequences::IdleSequence,
        live_request::{LiveRequest, Prefill, Stage, Work, may_reuse},
        prompt_cache::{SnapshotKind, SnapshotSource, snapshot_policy},
        queue::Abort,
        request::{Event, Finish, Request, Timings},
        sampler::logprobs,
        sequence::Sequence,
        speculation::{PendingRows, SampledToken},
    },
    error::{EngineError, ModelError},
    metrics::Metrics,
    model::{Model, ModelInfo, PassHooks, Rows, SequenceState},
};
use std::{
    any::Any,
    panic::{AssertUnwindSafe, catch_unwind},
    time::Instant,
};

/// Maximum number of rows per chunk if the request asks for the prompt's log-probabilities, which need the logits of
/// every row. With a vocabulary of 248,320, the logits of 32 rows take 32 MB. The chunk size does not change the
/// logits.
const PROMPT_LOGIT_ROWS: usize = 32;

impl<M: Model> Scheduler<M> {
    /// Runs a step. Returns one outcome per request of the step, in order.
    pub(super) fn step(&mut self, step: &mut Step<M::State>) -> Vec<Result<StepOutput, Abort>> {
        let (begun, chunk) = ((self.now)(), step.chunk);
        let [live] = &mut step.requests[..] else { return self.decode(step) };
        let (work, had) = (live.work(), live.len());
        let outcome = match work {
            Work::Decode => return self.decode(step),
            Work::Begin => catch_panic(|| self.begin(live)),
            Work::Sample => catch_panic(|| sample(live, self.model.info().context, &self.rules, &self.metrics)),
            Work::Prefill(_) if live.sequence.is_none() => catch_panic(|| self.restore(live)),
            Work::Prefill(_) if matches!(live.stage, Stage::Decode(_)) => catch_panic(|| self.recompute(live, chunk)),
            Work::Prefill(_) => catch_panic(|| self.prefill(live, chunk)),
        };
        if matches!(work, Work::Prefill(_)) {
            let rows = live.len().saturating_sub(had);
            let seconds = ((self.now)() - begun).as_secs_f64();
            self.time_share.record_chunk(rows, self.model.info().chunk, seconds, step.overtakes);
        }
        vec![outcome]
    }

    /// First step of a request: resumes from the longest cached prefix of its prompt.
    fn begin(&mut self, live: &mut LiveRequest<M::State>) -> Result<StepOutput, Abort> {
        let started = Instant::now();
        let queued = started - live.submitted.arrived;
        self.metrics.queue_seconds.observe(queued.as_secs_f64());
        let Request { ids, prompt_logprobs, boundaries, cache_prompt, .. } = &live.submitted.request;

        live.clear_count = self.cache.clear_count();
        let (sequence, source) = self.resume(&live.submitted.request, ids, live.clear_count)?;
        let hits = match source {
            _ if sequence.is_empty() => &self.metrics.prompt_cache_misses,
            None => &self.metrics.prompt_cache_hits_session,
            Some(SnapshotSource::Memory) => &self.metrics.prompt_cache_hits_memory,
            Some(SnapshotSource::Disk) => &self.metrics.prompt_cache_hits_disk,
        };
        hits.inc();
        if !sequence.is_empty() {
            self.metrics.prompt_cache_hit_tokens.observe(sequence.len() as f64);
        }
        self.speculator.start(&mut self.model);
        let cached_tokens = sequence.len();
        self.metrics.prompt_tokens_cached.inc_by(cached_tokens as u64);

        let max_snapshots = if *cache_prompt { self.cache.max_snapshots_per_prompt() } else { 0 };
        let mut snapshots = snapshot_policy::choose(boundaries, cached_tokens, ids.len(), max_snapshots);
        let prompt = live.submitted.request.cached_prompt();
        snapshots.retain(|(at, _)| prompt.has_whole_keys(*at));
        // The first token has no log-probability, since no token precedes it.
        let logprobs = prompt_logprobs.map(|_| vec![None]);
        let chunks_started = Instant::now();
        live.stage = Stage::Prefill(Prefill { cached_tokens, snapshots, logprobs, started, chunks_started });
        live.sequence = Some(sequence);
        Ok(StepOutput { events: vec![Event::Started { cached_tokens, queued }], finish: None })
    }

    /// A sequence with the longest cached prefix of `ids`, and the source of the snapshot if the prefix comes from a
    /// snapshot. Drops an idle sequence if necessary, so that at most `parallel` states exist.
    fn resume(
        &mut self,
        request: &Request,
        ids: &[u32],
        clear_count: u64,
    ) -> Result<(Sequence<M::State>, Option<SnapshotSource>), ModelError> {
        let (may_reuse, prompt) = (may_reuse(request), CachedPrompt { ids, ..request.cached_prompt() });
        self.idle.drop_cleared(clear_count);
        let previous = if may_reuse { self.idle.take_prefix(prompt) } else { None };
        let states = self.live.iter().filter(|live| live.sequence.is_some()).count() + self.idle.len();
        if previous.is_none() && states >= self.parallel {
            self.idle.drop_oldest();
        }
        let keys = prompt.keys();
        let mut source = None;
        let sequence = Sequence::sync(previous, &self.model, prompt, |offered| {
            // A snapshot shares only whole pages, so the sequence needs one page for the tokens after them.
            self.cache.evict_for_pages(1);
            let (snapshot, from) = if may_reuse { self.cache.longest_prefix(&keys, offered) } else { None }?;
            source = Some(from);
            Some(snapshot)
        })?;
        Ok((sequence, source))
    }

    /// Resumes a preempted request from the longest cached prefix of its tokens.
    fn restore(&mut self, live: &mut LiveRequest<M::State>) -> Result<StepOutput, Abort> {
        let request = &live.submitted.request;
        let ids = if live.dropped_tokens.is_empty() { &request.ids } else { &live.dropped_tokens };
        live.sequence = Some(self.resume(request, ids, live.clear_count)?.0);
        Ok(StepOutput::default())
    }

    /// Recomputes the next chunk of a dropped sequence. The passes are split so that the state has the same bytes as
    /// before.
    fn recompute(&mut self, live: &mut LiveRequest<M::State>, chunk: usize) -> Result<StepOutput, Abort> {
        let Some(sequence) = &mut live.sequence else { return Ok(StepOutput::default()) };
        let (from, prompt) = (sequence.len(), live.submitted.request.ids.len());
        let to = match from < prompt {
            true => chunk_end(from, prompt, chunk),
            // If the model rounds differently in a pass of several rows, each token of the answer needs a separate
            // pass, as before.
            false if !self.model.info().exact_chunks => from + 1,
            false => live.dropped_tokens.len().min(from + chunk),
        };
        self.speculator.follow(None);
        let submitted = &live.submitted;
        let keep_going = || !self.queue.should_cancel_step(submitted);
        let keep_going: Option<&dyn Fn() -> bool> = Some(&keep_going);
        let mut hooks = PassHooks { images: &submitted.request.images, keep_going, ..PassHooks::default() };
        sequence.extend(&mut self.model, &live.dropped_tokens[from..to], Rows::None, &mut hooks)?;
        Ok(StepOutput::default())
    }

    /// Evaluates one chunk of the prompt. After the last chunk, the request enters the decode stage.
    fn prefill(&mut self, live: &mut LiveRequest<M::State>, chunk: usize) -> Result<StepOutput, Abort> {
        let (Stage::Prefill(prefill), Some(sequence)) = (&mut live.stage, &mut live.sequence) else {
            return Ok(StepOutput::default());
        };
        let Request { ids, images, prompt_logprobs, max_tokens, .. } = &live.submitted.request;
        let chunk = if prompt_logprobs.is_some() { chunk.min(PROMPT_LOGIT_ROWS) } else { chunk };
        let from = sequence.len();
        let to = chunk_end(from, ids.len(), chunk);
        let is_last = to == ids.len();
        let rows = match prompt_logprobs {
            Some(_) => Rows::All,
            None if is_last && *max_tokens > 0 => Rows::Last,
            None => Rows::None,
        };

        let keys = live.submitted.request.cached_prompt().keys();
        let marks = prefill.snapshots.iter().copied().filter(|&(at, _)| from < at && at <= to);
        let snapshots = self.cache.reserve(&keys, marks.collect(), sequence.state().shared_positions());
        let marks: Vec<usize> = snapshots.iter().map(|snapshot| snapshot.0).collect();
        let (begin, submitted) = (Instant::now(), &live.submitted);
        let keep_going = || !self.queue.should_cancel_step(submitted);
        let keep_going: Option<&dyn Fn() -> bool> = Some(&keep_going);
        let mut hooks = PassHooks { images, snapshot_at: &marks, keep_going, ..PassHooks::default() };
        self.speculator.follow(Some(sequence));
        let logits = sequence.extend(&mut self.model, &ids[from..to], rows, &mut hooks)?;
        self.speculator.prompt_evaluated(&mut self.model, sequence, to - from, begin.elapsed());
        for ((at, kind), snapshot) in snapshots.into_iter().zip(hooks.snapshots) {
            self.cache.insert(&keys[..at], kind, snapshot, live.clear_count);
        }
        self.cache.record_prefill_speed(to - from, begin.elapsed());
        self.metrics.prompt_tokens_computed.inc_by((to - from) as u64);
        self.metrics.step_rows.observe((to - from) as f64);

        if let (Some(top), Some(entries)) = (prompt_logprobs, &mut prefill.logprobs) {
            // The logits of a row predict the next token.
            let next = &ids[from + 1..ids.len().min(to + 1)];
            let entry = |(row, &id): (usize, &u32)| Some(logprobs(logits.row(row), id, *top, self.rules.usable_vocab));
            entries.extend(next.iter().enumerate().map(entry));
        }
        let seconds = prefill.chunks_started.elapsed().as_secs_f64();
        let mut events = vec![Event::Prefilled { tokens: to, seconds }];
        if !is_last {
            return Ok(StepOutput { events, finish: None });
        }

        events.extend(prefill.logprobs.take().map(Event::Prompt));
        let prompt_seconds = prefill.started.elapsed().as_secs_f64();
        self.metrics.prefill_seconds.observe(prompt_seconds);
        let (prompt_tokens, cached_tokens) = (ids.len(), prefill.cached_tokens);
        let timings = Timings { prompt_tokens, cached_tokens, prompt_seconds, ..Timings::default() };
        let answer = PartialAnswer::new(&live.submitted.request, logits, timings, &self.rules)?;
        live.stage = Stage::Decode(Box::new(answer));
        let finish = (*max_tokens == 0).then_some(Finish::Length);
        Ok(StepOutput { events, finish })
    }

    /// Evaluates the last token of each request in one pass and samples the next tokens. Uses drafts if only one
    /// sequence decodes.
    fn decode(&mut self, step: &mut Step<M::State>) -> Vec<Result<StepOutput, Abort>> {
        let (begun, decoding) = ((self.now)(), step.decoding);
        // If an earlier pass verified a draft that contains the last token, the logits after the token are known
        // without a new pass.
        let has_row: Vec<_> = step.requests.iter_mut().map(|live| catch_panic(|| self.use_draft(live))).collect();
        let without_row = step.requests.iter_mut().zip(&has_row).filter(|(_, has_row)| matches!(has_row, Ok(false)));
        let mut without_row: Vec<_> = without_row.map(|(live, _)| live).collect();
        let sequences = without_row.len();
        let mut error = self.evaluate_last_tokens(&mut without_row, decoding).err();
        if let Some(Abort::Failed(error)) = error.as_ref().filter(|_| step.requests.len() > 1) {
            tracing::warn!(%error, sequences, "a pass of several sequences failed; recomputing each sequence");
            self.recover();
        }
        let has_failed = error.is_some();
        // The outcome of a request whose token is not sampled yet is `Ok(None)`.
        let outcome = |(live, has_row): (_, Result<bool, Abort>)| {
            let outcome = match has_row {
                Ok(has_row) if has_row || !has_failed => Ok(None),
                Ok(_) if sequences == 1 => Err(error.take().unwrap_or(Abort::StepCancelled)),
                Ok(_) => match &error {
                    Some(Abort::Failed(EngineError::Panicked(text))) => Err(EngineError::Panicked(text.clone()).into()),
                    _ => Ok(Some(StepOutput::default())),
                },
                Err(abort) => Err(abort),
            };
            (live, outcome)
        };
        let mut rows: Vec<_> = step.requests.iter_mut().zip(has_row).map(outcome).collect();
        let (ModelInfo { context, threads, .. }, rules, metrics) = (self.model.info(), &self.rules, &*self.metrics);
        let sample_row = |(live, outcome): &mut (&mut LiveRequest<M::State>, Result<Option<StepOutput>, Abort>)| {
            if let Ok(None) = outcome {
                *outcome = catch_panic(|| sample(live, context, rules, metrics)).map(Some);
            }
        };
        match threads {
            Some(threads) => threads.run_pieces(&mut rows, 1, &|_, row| row.iter_mut().for_each(sample_row)),
            None => rows.iter_mut().for_each(sample_row),
        }
        if has_failed {
            rows.iter_mut().for_each(|(live, _)| live.drop_sequence());
        }
        let outcomes = rows.into_iter().map(|(_, outcome)| outcome.map(Option::unwrap_or_default)).collect();
        self.time_share.record_decode(((self.now)() - begun).as_secs_f64());
        outcomes
    }

    /// Evaluates the last token of each of `requests` in one pass. Records the pass in the requests and the metrics.
    fn evaluate_last_tokens(
        &mut self,
        requests: &mut [&mut LiveRequest<M::State>],
        decoding: usize,
    ) -> Result<(), Abort> {
        let sequences = requests.len();
        let passed = catch_panic(|| match &mut *requests {
            [] => Ok(()),
            [live] => self.advance(live, decoding),
            several => self.advance_together(several),
        });
        let mut rows = 0;
        for live in requests {
            live.last_step = self.steps;
            live.must_run_alone = sequences > 1 && passed.is_err();
            if let Some((_, answer)) = live.decoding() {
                answer.timings.record_pass(decoding);
                rows += answer.rows.len();
            }
        }
        if sequences > 0 && passed.is_ok() {
            self.metrics.step_sequences.observe(sequences as f64);
            self.metrics.step_rows.observe(rows as f64);
        }
        passed
    }

    /// True if a verified draft contains the last token, so that the logits after it are known.
    fn use_draft(&mut self, live: &mut LiveRequest<M::State>) -> Result<bool, Abort> {
        let Some((sequence, answer)) = live.decoding() else { return Ok(false) };
        let Some(id) = answer.last else { return Ok(true) };
        Ok(self.speculator.accept(sequence, &mut self.model, &mut answer.rows, id, &mut answer.timings)?)
    }

    /// Evaluates the last token of one request, together with a draft if no other sequence decodes.
    fn advance(&mut self, live: &mut LiveRequest<M::State>, decoding: usize) -> Result<(), Abort> {
        let max_tokens = live.submitted.request.max_tokens;
        let Some((sequence, answer)) = live.decoding() else { return Ok(()) };
        let PartialAnswer { rows, sampler, masks, last: Some(id), timings, .. } = answer else { return Ok(()) };
        let remaining = max_tokens - timings.generated_tokens;
        let token = SampledToken { id: *id, sampler, masks: masks.as_ref(), remaining, may_draft: decoding <= 1 };
        Ok(self.speculator.advance(sequence, &mut self.model, rows, &token, timings)?)
    }

    /// Evaluates the last token of several requests in one pass, without drafts.
    fn advance_together(&mut self, requests: &mut [&mut LiveRequest<M::State>]) -> Result<(), Abort> {
        let decoding = requests.iter_mut().filter_map(|live| live.decoding());
        let decoding = decoding.filter_map(|(sequence, answer)| Some(((sequence, answer.last?), &mut answer.rows)));
        let (mut tokens, pending): (Vec<_>, Vec<_>) = decoding.unzip();
        self.speculator.follow(None);
        let logits = Sequence::extend_each(&mut self.model, &mut tokens)?;
        for (row, pending) in pending.into_iter().enumerate() {
            *pending = PendingRows::row_of(logits.clone(), row);
        }
        Ok(())
    }

    /// Removes rejected draft tokens from the sequence of a request that ends.
    pub(super) fn settle(&mut self, live: &mut LiveRequest<M::State>) -> Result<(), Abort> {
        let Some((sequence, answer)) = live.decoding() else { return Ok(()) };
        catch_panic(|| Ok(self.speculator.settle(sequence, &mut self.model, &answer.rows, &mut answer.timings)?))
    }

    /// Takes a snapshot at the end of the newest answer. Called after the last event was sent, so that no client waits
    /// for the snapshot.
    pub(super) fn save_answer_snapshot(&mut self) {
        let (model, cache) = (&self.model, &self.cache);
        let Some(IdleSequence { sequence, clear_count }) = self.idle.newest() else { return };
        let needed = || cache.snapshot_size().bytes(sequence.len(), sequence.state().shared_positions());
        if !sequence.cached_prompt().has_whole_keys(sequence.len()) {
            return;
        }
        let keys = sequence.cached_prompt().keys().into_owned();
        if !cache.make_room(&keys, SnapshotKind::Answer, &needed) {
            return;
        }
        match sequence.snapshot(model) {
            Ok(snapshot) => cache.insert(&keys, SnapshotKind::Answer, snapshot, *clear_count),
            Err(error) => {
                tracing::warn!(%error, "cannot take a snapshot at the end of the answer; dropping its sequence");
                self.idle.drop_newest();
                self.recover();
            }
        }
    }
}

/// Samples the next token of a request.
fn sample<S: SequenceState>(
    live: &mut LiveRequest<S>,
    context: usize,
    rules: &TokenRules,
    metrics: &Metrics,
) -> Result<StepOutput, Abort> {
    let is_full = live.len() == context;
    let Stage::Decode(answer) = &mut live.stage else { return Ok(StepOutput::default()) };
    answer.sample(&live.submitted, is_full, rules, metrics)
}

/// End of the chunk that starts at `from`, in a prompt of `len` tokens.
fn chunk_end(from: usize, len: usize, chunk: usize) -> usize {
    // A last chunk of one row is avoided, since kernels for one row may round differently from kernels for several
    // rows.
    if len == from + chunk + 1 && chunk > 1 { len - 2 } else { len.min(from + chunk) }
}

/// Runs `work` and turns a panic into an error. After a panic in a forward pass, only the sequences of the pass are
/// invalid, because every pass writes the model's buffers before it reads them.
fn catch_panic<T>(work: impl FnOnce() -> Result<T, Abort>) -> Result<T, Abort> {
    let message = |panic: Box<dyn Any + Send>| {
        let text = panic.downcast_ref::<&str>().map(|text| text.to_string());
        text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "no message".into())
    };
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|panic| Err(EngineError::Panicked(message(panic)).into()))
}
