//! The steps of a request: begin, read a chunk of the prompt, decode, sample.

use super::{Decode, IdleSequence, LiveRequest, Prefill, Scheduler, Stage, Step, StepOutput, Work, caught, may_reuse};
use crate::{
    engine::{
        constraint::{MaskWorker, TokenMask},
        prompt_cache::{PromptCache, SnapshotKind, SnapshotSource, snapshot_policy},
        queue::Abort,
        request::{Event, Finish, Request, Timings},
        sampler::{Sampler, logprobs},
        sequence::Sequence,
        speculation::{PendingRows, SampledToken},
    },
    error::{EngineError, ModelError},
    model::{Logits, Model, PassHooks, Rows, SequenceState, prefix_keys},
};
use std::time::Instant;

/// Maximum number of prompt rows whose logits are held at once, if the prompt's own log-probabilities are wanted. With a
/// vocabulary of 248,320 they take 32 MB. Smaller chunks do not change the logits.
const PROMPT_LOGIT_ROWS: usize = 32;

impl<M: Model> Scheduler<M> {
    /// Runs a step. Returns the outcome for each of its requests.
    pub(super) fn step(&mut self, step: &mut Step<M::State>) -> Vec<Result<StepOutput, Abort>> {
        let (begun, chunk) = (Instant::now(), step.chunk);
        let [live] = &mut step.requests[..] else {
            let outcomes = self.decode_together(&mut step.requests, step.decoding);
            self.time_share.record_decode(begun.elapsed().as_secs_f64());
            return outcomes;
        };
        let (work, had) = (live.work(), live.sequence.as_ref().map_or(0, Sequence::len));
        let outcome = caught(|| match work {
            Work::Begin => self.begin(live),
            Work::Sample => self.sample(live),
            Work::Read(_) if live.sequence.is_none() => self.restore(live),
            Work::Read(_) if matches!(live.stage, Stage::Decode(_)) => self.recompute(live, chunk),
            Work::Read(_) => self.prefill(live, chunk),
            Work::Decode => self.decode(live, step.decoding),
        });
        let seconds = begun.elapsed().as_secs_f64();
        let rows = live.sequence.as_ref().map_or(0, Sequence::len).saturating_sub(had);
        match work {
            Work::Decode => self.time_share.record_decode(seconds),
            Work::Read(_) => self.time_share.record_chunk(rows, seconds, step.is_jump),
            Work::Begin | Work::Sample => {}
        }
        vec![outcome]
    }

    /// First step: finds the longest known beginning of the prompt.
    fn begin(&mut self, live: &mut LiveRequest<M::State>) -> Result<StepOutput, Abort> {
        let started = Instant::now();
        let queued = started - live.request.arrived;
        self.metrics.queue_seconds.observe(queued.as_secs_f64());
        let Request { ids, images, prompt_logprobs, boundaries, cache_prompt, .. } = &live.request.request;

        live.clear_count = self.cache.clear_count();
        let (sequence, source) = self.resume(&live.request.request, ids, live.clear_count)?;
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
        // The first tokens of an image hold only a part of its hash.
        snapshots.retain(|(at, _)| !images.iter().any(|image| image.at < *at && *at < image.tokens().end));
        // The first token has no log-probability, since nothing precedes it.
        let logprobs = prompt_logprobs.map(|_| vec![None]);
        let chunks_started = Instant::now();
        live.stage = Stage::Prefill(Prefill { cached_tokens, snapshots, logprobs, started, chunks_started });
        live.sequence = Some(sequence);
        Ok(StepOutput { events: vec![Event::Started { cached_tokens, queued }], finish: None })
    }

    /// The longest known beginning of `ids`, and its source if that is a snapshot. At most `parallel` states are alive.
    fn resume(
        &mut self,
        request: &Request,
        ids: &[u32],
        clear_count: u64,
    ) -> Result<(Sequence<M::State>, Option<SnapshotSource>), ModelError> {
        let (may_reuse, images) = (may_reuse(request), &request.images);
        self.idle.retain(|idle| idle.clear_count == clear_count);
        let prefixes =
            self.idle.iter().enumerate().filter(|(_, idle)| may_reuse && idle.sequence.is_prefix_of(ids, images));
        let longest = prefixes.max_by_key(|(_, idle)| idle.sequence.len()).map(|(index, _)| index);
        let previous = longest.map(|index| self.idle.remove(index).sequence);
        let states = self.live.iter().filter(|live| live.sequence.is_some()).count() + self.idle.len();
        if previous.is_none() && states >= self.options.parallel && !self.idle.is_empty() {
            self.idle.remove(0);
        }
        let keys = prefix_keys(ids, images);
        let mut source = None;
        let sequence = Sequence::sync(previous, &self.model, ids, images, |offered| {
            // The sequence needs its own page after the last whole page of a snapshot.
            self.cache.evict_for_pages(1);
            let (snapshot, from) = if may_reuse { self.cache.longest_prefix(&keys, offered) } else { None }?;
            source = Some(from);
            Some(snapshot)
        })?;
        Ok((sequence, source))
    }

    /// Gives a request whose sequence was dropped a new one.
    fn restore(&mut self, live: &mut LiveRequest<M::State>) -> Result<StepOutput, Abort> {
        let request = &live.request.request;
        let ids = if live.lost.is_empty() { &request.ids } else { &live.lost };
        live.sequence = Some(self.resume(request, ids, live.clear_count)?.0);
        Ok(StepOutput::default())
    }

    /// Computes some of the tokens of a dropped sequence again, in passes that give the same bytes.
    fn recompute(&mut self, live: &mut LiveRequest<M::State>, chunk: usize) -> Result<StepOutput, Abort> {
        let Some(sequence) = &mut live.sequence else { return Ok(StepOutput::default()) };
        let (from, prompt) = (sequence.len(), live.request.request.ids.len());
        let to = match from < prompt {
            true => chunk_end(from, prompt, chunk),
            // Where a pass of several rows rounds differently, the answer's tokens are computed one by one again.
            false if self.model.info().batch == 1 => from + 1,
            false => live.lost.len().min(from + chunk),
        };
        self.speculator.follow(None);
        let request = &live.request;
        let keep_going = || !self.queue.should_cancel_step(request);
        let keep_going: Option<&dyn Fn() -> bool> = Some(&keep_going);
        let mut hooks = PassHooks { images: &request.request.images, keep_going, ..PassHooks::default() };
        sequence.extend(&mut self.model, &live.lost[from..to], Rows::None, &mut hooks)?;
        Ok(StepOutput::default())
    }

    /// Evaluates one chunk of the prompt. The last chunk starts the answer.
    fn prefill(&mut self, live: &mut LiveRequest<M::State>, chunk: usize) -> Result<StepOutput, Abort> {
        let (Stage::Prefill(prefill), Some(sequence)) = (&mut live.stage, &mut live.sequence) else {
            return Ok(StepOutput::default());
        };
        let Request { ids, images, prompt_logprobs, max_tokens, sampling, constraint, .. } = &live.request.request;
        let chunk = if prompt_logprobs.is_some() { chunk.min(PROMPT_LOGIT_ROWS) } else { chunk };
        let from = sequence.len();
        let to = chunk_end(from, ids.len(), chunk);
        let is_last = to == ids.len();
        let rows = match prompt_logprobs {
            Some(_) => Rows::All,
            None if is_last && *max_tokens > 0 => Rows::Last,
            None => Rows::None,
        };

        let keys = prefix_keys(ids, images);
        let snapshots = reserve_snapshots(&self.cache, &prefill.snapshots, sequence, &keys, to);
        let marks: Vec<usize> = snapshots.iter().map(|snapshot| snapshot.0).collect();
        let (begin, request) = (Instant::now(), &live.request);
        let keep_going = || !self.queue.should_cancel_step(request);
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

        if let (Some(top), Some(entries)) = (prompt_logprobs, &mut prefill.logprobs) {
            // A row predicts the token after it.
            let next = &ids[from + 1..ids.len().min(to + 1)];
            let entry =
                |(row, &id): (usize, &u32)| Some(logprobs(logits.row(row), id, *top, self.options.usable_vocab));
            entries.extend(next.iter().enumerate().map(entry));
        }
        let seconds = prefill.chunks_started.elapsed().as_secs_f64();
        let mut events = vec![Event::Prefilled { tokens: to, seconds }];
        if !is_last {
            return Ok(StepOutput { events, finish: None });
        }

        events.extend(prefill.logprobs.take().map(Event::Prompt));
        let masks = constraint.clone().map(MaskWorker::start).transpose()?;
        let now = Instant::now();
        let prompt_seconds = (now - prefill.started).as_secs_f64();
        self.metrics.prefill_seconds.observe(prompt_seconds);
        let (prompt_tokens, cached_tokens) = (ids.len(), prefill.cached_tokens);
        let timings = Timings { prompt_tokens, cached_tokens, prompt_seconds, ..Timings::default() };
        let sampler = Sampler::new(sampling.clone(), ids, self.options.usable_vocab);
        let rows = PendingRows::last_of(logits);
        let decode = Decode { rows, sampler, masks, last: None, last_sent: None, timings, started: now };
        live.stage = Stage::Decode(Box::new(decode));
        let finish = (*max_tokens == 0).then_some(Finish::Length);
        Ok(StepOutput { events, finish })
    }

    /// Evaluates the last token, and drafts after it if no other sequence decodes, and samples the next one.
    fn decode(&mut self, live: &mut LiveRequest<M::State>, decoding: usize) -> Result<StepOutput, Abort> {
        if let (Stage::Decode(decode), Some(sequence)) = (&mut live.stage, &mut live.sequence)
            && let Some(id) = decode.last
        {
            let Decode { rows, sampler, masks, timings, .. } = &mut **decode;
            let remaining = live.request.request.max_tokens - timings.generated_tokens;
            let token = SampledToken { id, sampler, masks: masks.as_ref(), remaining, may_draft: decoding <= 1 };
            self.speculator.advance(sequence, &mut self.model, rows, &token, timings)?;
            (live.last_step, live.is_alone) = (self.steps, false);
            timings.record_pass(decoding);
            self.metrics.step_sequences.observe(1.0);
        }
        self.sample(live)
    }

    /// Evaluates the last token of each sequence in one pass, and samples the next ones.
    fn decode_together(
        &mut self,
        requests: &mut [LiveRequest<M::State>],
        decoding: usize,
    ) -> Vec<Result<StepOutput, Abort>> {
        // A draft that was verified before may have the token. Then no pass is needed.
        let before: Vec<_> = requests.iter_mut().map(|live| caught(|| self.use_draft(live))).collect();
        let mut rows = Vec::new();
        for (live, sampled) in requests.iter_mut().zip(&before) {
            if let (Stage::Decode(decode), Some(sequence), Ok(None)) = (&live.stage, &mut live.sequence, sampled) {
                rows.extend(decode.last.map(|id| (sequence, id)));
            }
        }
        self.speculator.follow(None);
        self.metrics.step_sequences.observe(rows.len() as f64);
        let logits = caught(|| Ok(Sequence::extend_each(&mut self.model, &mut rows)?));
        if let Err(Abort::Failed(error)) = &logits {
            tracing::warn!(%error, "a pass of several sequences failed; each of them continues alone");
            self.recover();
        }
        let mut row = 0..;
        let after = |(live, sampled): (&mut LiveRequest<M::State>, Result<Option<StepOutput>, Abort>)| {
            let (sampled, logits) = match (sampled?, &logits) {
                (sampled, Ok(logits)) => (sampled, logits),
                (None, Err(Abort::Failed(EngineError::Panicked(text)))) => {
                    return Err(EngineError::Panicked(text.clone()).into());
                }
                (sampled, Err(_)) => {
                    live.drop_sequence();
                    live.is_alone = true;
                    return Ok(sampled.unwrap_or_default());
                }
            };
            // A request that has sampled from its draft has no row in the pass.
            if sampled.is_none()
                && let (Stage::Decode(decode), Some(row)) = (&mut live.stage, row.next())
            {
                decode.rows = PendingRows::last_of(Logits { vocab: logits.vocab, data: logits.row(row).to_vec() });
                decode.timings.record_pass(decoding);
                live.last_step = self.steps;
            }
            sampled.map_or_else(|| caught(|| self.sample(live)), Ok)
        };
        requests.iter_mut().zip(before).map(after).collect()
    }

    /// Samples from the next row of a verified draft, if the draft had the last token.
    fn use_draft(&mut self, live: &mut LiveRequest<M::State>) -> Result<Option<StepOutput>, Abort> {
        let (Stage::Decode(decode), Some(sequence)) = (&mut live.stage, &mut live.sequence) else { return Ok(None) };
        let Decode { rows, last, timings, .. } = &mut **decode;
        let Some(id) = *last else { return Ok(None) };
        let has_token = self.speculator.accept(sequence, &mut self.model, rows, id, timings)?;
        has_token.then(|| self.sample(live)).transpose()
    }

    /// Samples the next token.
    ///
    /// When the request ends, its sequence contains every sent token except the last.
    fn sample(&mut self, live: &mut LiveRequest<M::State>) -> Result<StepOutput, Abort> {
        let (Stage::Decode(decode), Some(sequence)) = (&mut live.stage, &live.sequence) else {
            return Ok(StepOutput::default());
        };
        let Request { max_tokens, logprobs: wanted, ignore_eos, .. } = &live.request.request;
        let Decode { rows, sampler, masks, last, last_sent, timings, .. } = &mut **decode;
        let row = rows.current().ok_or(EngineError::NoLogits)?;
        let mask = masks.as_ref().map_or(Ok(TokenMask::Any), MaskWorker::next_mask)?;
        let id = sampler.draw(row, &mask).ok_or(EngineError::NoLogits)?;
        if self.options.eos.contains(&id) && (masks.is_some() || !ignore_eos) {
            rows.end_answer(id);
            return Ok(StepOutput { events: Vec::new(), finish: Some(Finish::Stop) });
        }
        if let Some(masks) = masks {
            masks.append(id);
        }
        let logprobs = wanted.map(|top| logprobs(row, id, top, self.options.usable_vocab));
        let now = Instant::now();
        match last_sent.replace(now) {
            None => self.metrics.time_to_first_token_seconds.observe((now - live.request.arrived).as_secs_f64()),
            Some(before) => self.metrics.inter_token_seconds.observe((now - before).as_secs_f64()),
        }
        self.metrics.generated_tokens.inc();
        timings.generated_tokens += 1;
        *last = Some(id);
        let is_full = timings.generated_tokens == *max_tokens || sequence.len() == self.model.info().context;
        Ok(StepOutput { events: vec![Event::Token { id, logprobs }], finish: is_full.then_some(Finish::Length) })
    }

    /// Removes the rejected tokens of a verify from the sequence of a request that ends.
    pub(super) fn settle(&mut self, live: &mut LiveRequest<M::State>) -> Result<(), Abort> {
        let (Stage::Decode(decode), Some(sequence)) = (&mut live.stage, &mut live.sequence) else { return Ok(()) };
        let Decode { rows, timings, .. } = &mut **decode;
        caught(|| Ok(self.speculator.settle(sequence, &mut self.model, rows, timings)?))
    }

    /// Takes a snapshot at the end of an answer, after the client has received it.
    pub(super) fn save_answer_snapshot(&mut self) {
        let (model, cache) = (&self.model, &self.cache);
        let Some(IdleSequence { sequence, clear_count }) = self.idle.last_mut() else { return };
        let needed = || cache.snapshot_size().bytes(sequence.len(), sequence.state().shared_positions());
        let keys = sequence.prefix_keys().into_owned();
        if !cache.make_room(&keys, SnapshotKind::Answer, &needed) {
            return;
        }
        match sequence.snapshot(model) {
            Ok(snapshot) => cache.insert(&keys, SnapshotKind::Answer, snapshot, *clear_count),
            Err(error) => {
                tracing::warn!(%error, "cannot take a snapshot at the end of the answer; dropping its sequence");
                self.idle.pop();
                self.recover();
            }
        }
    }
}

/// Where the chunk that starts at `from` ends, in a prompt of `len` tokens.
fn chunk_end(from: usize, len: usize, chunk: usize) -> usize {
    // A last chunk of one row would be computed like a decoded row, which may be more exact than a prompt's.
    if len == from + chunk + 1 && chunk > 1 { len - 2 } else { len.min(from + chunk) }
}

/// The positions between the end of `sequence` and `to` at which the cache has room for a snapshot.
fn reserve_snapshots<S: SequenceState>(
    cache: &PromptCache,
    positions: &[(usize, SnapshotKind)],
    sequence: &Sequence<S>,
    keys: &[u32],
    to: usize,
) -> Vec<(usize, SnapshotKind)> {
    let mut wanted: Vec<_> = positions.iter().copied().filter(|&(at, _)| sequence.len() < at && at <= to).collect();
    wanted.sort_unstable_by_key(|&(_, kind)| kind);
    let mut reserved: Vec<(usize, SnapshotKind)> = Vec::new();
    for (at, kind) in wanted {
        // Bytes of all snapshots of this chunk: each shares its whole pages with the one before.
        let needed = || {
            let mut shared = sequence.state().shared_positions();
            let mut all: Vec<usize> = reserved.iter().map(|&(at, _)| at).chain([at]).collect();
            all.sort_unstable();
            let bytes = |at| {
                let before = shared;
                shared = shared.max(at);
                cache.snapshot_size().bytes(at, before)
            };
            all.into_iter().map(bytes).sum()
        };
        if cache.make_room(&keys[..at], kind, &needed) {
            reserved.push((at, kind));
        }
    }
    reserved.sort_unstable();
    reserved
}
