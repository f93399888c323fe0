//! The engine's thread: `loop { next; step; publish }`.
//!
//! A step evaluates one chunk of a prompt, or decodes one token. Before each step, [`Scheduler::guard`] ends the request if
//! its client has disconnected, its deadline has passed, or the engine is draining, and returns memory if the system is
//! short of it. A chunk can take seconds: while other clients wait, a chunk whose client has disconnected is cancelled
//! between two layers.
//!
//! An error or a panic of the model ends the request and drops its sequence. The next request starts from a clean state.

use super::{
    constraint::{MaskWorker, TokenMask},
    prompt_cache::{PromptCache, SnapshotKind, SnapshotSource, snapshot_policy},
    queue::{Abort, QueuedRequest, RequestQueue},
    request::{Event, Finish, Logprobs, Request, Timings},
    sampler::{Sampler, logprobs},
    sequence::Sequence,
    speculation::{Draft, DraftPolicy, PendingRows, SampledToken, Speculator},
};
use crate::{
    error::{EngineError, ModelError},
    metrics::Metrics,
    model::{Logits, MAX_VERIFY_ROWS, Model, PassHooks, Rows, SequenceState, prefix_keys},
};
use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
    time::Instant,
};

/// Most prompt rows whose logits are held at once, if the prompt's own log-probabilities are wanted. With a vocabulary of
/// 248,320 they take 32 MB. How a prompt is cut into chunks does not change its logits.
const PROMPT_LOGIT_ROWS: usize = 32;
/// Rows that one decode step may write, including those of a draft and of its verify.
const DECODE_STEP_ROWS: usize = 4 * MAX_VERIFY_ROWS;

/// Options of the scheduler. See [`super::Options`].
pub(super) struct SchedulerOptions {
    pub eos: Vec<u32>,
    pub usable_vocab: usize,
    pub speculate: DraftPolicy,
    pub draft_tokens: usize,
}

/// Owns the model and everything that only the engine's thread uses.
pub(super) struct Scheduler<M: Model> {
    model: M,
    eos: Vec<u32>,
    usable_vocab: usize,
    queue: Arc<RequestQueue>,
    cache: Arc<PromptCache>,
    metrics: Arc<Metrics>,
    speculator: Speculator<M>,
    /// The request that the next step continues.
    active: Option<ActiveRequest<M::State>>,
    /// The sequence of the last request, for a prompt that extends it.
    idle_sequence: Option<Sequence<M::State>>,
    /// [`PromptCache::clear_count`] when the last request began.
    clear_count: u64,
}

/// A request that the scheduler works on.
struct ActiveRequest<S> {
    request: QueuedRequest,
    /// Set by the first step.
    sequence: Option<Sequence<S>>,
    stage: Stage,
}

enum Stage {
    New,
    Prefill(Prefill),
    Decode(Box<Decode>),
}

/// A prompt that is being evaluated.
struct Prefill {
    cached_tokens: usize,
    /// Where to take snapshots, ascending.
    snapshots: Vec<(usize, SnapshotKind)>,
    /// Most rows per chunk.
    chunk: usize,
    /// Log-probabilities of the prompt, if they are wanted.
    logprobs: Option<Vec<Option<Logprobs>>>,
    /// Start of the request's first step.
    started: Instant,
    /// Start of the first chunk.
    chunks_started: Instant,
}

/// An answer that is being generated.
struct Decode {
    rows: PendingRows,
    sampler: Sampler,
    masks: Option<MaskWorker>,
    /// The last token: sampled and sent, not yet evaluated.
    last: Option<u32>,
    last_sent: Option<Instant>,
    timings: Timings,
    started: Instant,
}

/// The result of one step.
struct StepOutput {
    events: Vec<Event>,
    /// Set if the answer is complete.
    finish: Option<Finish>,
}

impl<M: Model> Scheduler<M> {
    pub fn new(
        mut model: M,
        draft: Box<dyn Draft<M>>,
        options: SchedulerOptions,
        queue: Arc<RequestQueue>,
        cache: Arc<PromptCache>,
        metrics: Arc<Metrics>,
    ) -> Self {
        let SchedulerOptions { eos, usable_vocab, speculate, draft_tokens } = options;
        let speculator = Speculator::new(&mut model, draft, speculate, draft_tokens, metrics.clone());
        Self {
            model,
            eos,
            usable_vocab,
            queue,
            cache,
            metrics,
            speculator,
            active: None,
            idle_sequence: None,
            clear_count: 0,
        }
    }

    /// Runs until the queue is closed and empty.
    pub fn run(mut self) {
        let _stop = StopOnDrop { queue: self.queue.clone(), cache: self.cache.clone() };
        while let Some(mut active) = self.next() {
            let outcome = self.step(&mut active);
            self.publish(active, outcome);
        }
    }

    /// The request to work on: the active one, else the oldest one in the queue. Blocks until there is one.
    fn next(&mut self) -> Option<ActiveRequest<M::State>> {
        if let Some(active) = self.active.take() {
            return Some(active);
        }
        let model = &mut self.model;
        let request = self.queue.next(&mut || model.fit_memory())?;
        Some(ActiveRequest { request, sequence: None, stage: Stage::New })
    }

    /// Runs one step of a request.
    fn step(&mut self, active: &mut ActiveRequest<M::State>) -> Result<StepOutput, Abort> {
        // After a panic the sequence is dropped. A forward pass writes its other buffers before it reads them.
        let step = catch_unwind(AssertUnwindSafe(|| {
            let outcome = self.guard(active).and_then(|()| self.run_stage(active));
            let continues = matches!(outcome, Ok(StepOutput { finish: None, .. }));
            if let (Stage::Decode(decode), Some(sequence), false) = (&mut active.stage, &mut active.sequence, continues)
            {
                self.speculator.settle(sequence, &mut self.model, &decode.rows, &mut decode.timings)?;
            }
            outcome
        }));
        step.unwrap_or_else(|panic| Err(Abort::Failed(EngineError::Panicked(panic_message(&*panic)))))
    }

    fn run_stage(&mut self, active: &mut ActiveRequest<M::State>) -> Result<StepOutput, Abort> {
        match (&mut active.stage, &mut active.sequence) {
            (Stage::Prefill(prefill), Some(sequence)) => {
                let (output, decode) = self.prefill(&active.request, sequence, prefill)?;
                if let Some(decode) = decode {
                    active.stage = Stage::Decode(Box::new(decode));
                }
                Ok(output)
            }
            (Stage::Decode(decode), Some(sequence)) => self.decode(&active.request, sequence, decode),
            _ => self.begin(active),
        }
    }

    /// Runs before each step: ends the request if it must end, and makes room for the step's rows.
    fn guard(&mut self, active: &ActiveRequest<M::State>) -> Result<(), Abort> {
        self.queue.check(&active.request)?;
        self.model.fit_memory();
        let Some(sequence) = &active.sequence else { return Ok(()) };
        let rows = match &active.stage {
            Stage::Prefill(prefill) => {
                prefill.chunk_end(sequence.len(), active.request.request.ids.len()) - sequence.len()
            }
            Stage::Decode(decode) if decode.last.is_some() => DECODE_STEP_ROWS,
            Stage::New | Stage::Decode(_) => 0,
        };
        self.cache.evict_for_pages(sequence.state().missing_pages(rows));
        Ok(())
    }

    /// First step: finds the longest known beginning of the prompt.
    fn begin(&mut self, active: &mut ActiveRequest<M::State>) -> Result<StepOutput, Abort> {
        let started = Instant::now();
        let queued = started - active.request.arrived;
        self.metrics.queue_seconds.observe(queued.as_secs_f64());
        let Request { ids, images, prompt_logprobs, boundaries, cache_prompt, .. } = &active.request.request;

        let sequence = self.resume(&active.request.request)?;
        self.speculator.start(&mut self.model, sequence.is_continuation());
        let cached_tokens = sequence.len();
        self.metrics.prompt_tokens_cached.inc_by(cached_tokens as u64);

        let max_snapshots = if *cache_prompt { self.cache.max_snapshots_per_prompt() } else { 0 };
        let mut snapshots = snapshot_policy::choose(boundaries, cached_tokens, ids.len(), max_snapshots);
        // The first tokens of an image hold only a part of its hash.
        snapshots.retain(|(at, _)| !images.iter().any(|image| image.at < *at && *at < image.tokens().end));
        let chunk = self.model.info().chunk.max(1);
        let chunk = if prompt_logprobs.is_some() { chunk.min(PROMPT_LOGIT_ROWS) } else { chunk };
        // The first token has no log-probability, since nothing precedes it.
        let logprobs = prompt_logprobs.map(|_| vec![None]);
        let chunks_started = Instant::now();
        active.stage = Stage::Prefill(Prefill { cached_tokens, snapshots, chunk, logprobs, started, chunks_started });
        active.sequence = Some(sequence);
        Ok(StepOutput { events: vec![Event::Started { cached_tokens, queued }], finish: None })
    }

    /// The sequence that a prompt starts from. It is removed from `self` until the request ends, so an error drops it.
    fn resume(&mut self, request: &Request) -> Result<Sequence<M::State>, ModelError> {
        let clear_count = std::mem::replace(&mut self.clear_count, self.cache.clear_count());
        // Log-probabilities of the prompt need every row.
        let may_reuse = request.cache_prompt && request.prompt_logprobs.is_none();
        let previous = self.idle_sequence.take().filter(|_| may_reuse && clear_count == self.clear_count);
        let mut hits = &self.metrics.prompt_cache_hits_session;
        let keys = prefix_keys(&request.ids, &request.images);
        let sequence = Sequence::sync(previous, &self.model, &request.ids, &request.images, |offered| {
            // The sequence needs its own page after the last whole page of a snapshot.
            self.cache.evict_for_pages(1);
            let (snapshot, source) = if may_reuse { self.cache.longest_prefix(&keys, offered) } else { None }?;
            hits = match source {
                SnapshotSource::Memory => &self.metrics.prompt_cache_hits_memory,
                SnapshotSource::Disk => &self.metrics.prompt_cache_hits_disk,
            };
            Some(snapshot)
        })?;
        if sequence.is_empty() {
            self.metrics.prompt_cache_misses.inc();
        } else {
            hits.inc();
            self.metrics.prompt_cache_hit_tokens.observe(sequence.len() as f64);
        }
        Ok(sequence)
    }

    /// Evaluates one chunk of the prompt. After the last chunk, returns the state of the answer.
    fn prefill(
        &mut self,
        request: &QueuedRequest,
        sequence: &mut Sequence<M::State>,
        prefill: &mut Prefill,
    ) -> Result<(StepOutput, Option<Decode>), Abort> {
        let Request { ids, prompt_logprobs, max_tokens, sampling, constraint, .. } = &request.request;
        let from = sequence.len();
        let to = prefill.chunk_end(from, ids.len());
        let is_last = to == ids.len();
        let rows = match prompt_logprobs {
            Some(_) => Rows::All,
            None if is_last && *max_tokens > 0 => Rows::Last,
            None => Rows::None,
        };
        let logits = self.evaluate_chunk(request, sequence, &prefill.snapshots, to, rows)?;
        if let (Some(top), Some(entries)) = (prompt_logprobs, &mut prefill.logprobs) {
            // A row predicts the token after it.
            let next = &ids[from + 1..ids.len().min(to + 1)];
            let entry = |(row, &id): (usize, &u32)| Some(logprobs(logits.row(row), id, *top, self.usable_vocab));
            entries.extend(next.iter().enumerate().map(entry));
        }
        let seconds = prefill.chunks_started.elapsed().as_secs_f64();
        let mut events = vec![Event::Prefilled { tokens: to, seconds }];
        if !is_last {
            return Ok((StepOutput { events, finish: None }, None));
        }

        events.extend(prefill.logprobs.take().map(Event::Prompt));
        let masks = constraint.clone().map(MaskWorker::start).transpose()?;
        let now = Instant::now();
        let prompt_seconds = (now - prefill.started).as_secs_f64();
        self.metrics.prefill_seconds.observe(prompt_seconds);
        let (prompt_tokens, cached_tokens) = (ids.len(), prefill.cached_tokens);
        let timings = Timings { prompt_tokens, cached_tokens, prompt_seconds, ..Timings::default() };
        let sampler = Sampler::new(sampling.clone(), ids, self.usable_vocab);
        let rows = PendingRows::last_of(logits);
        let decode = Decode { rows, sampler, masks, last: None, last_sent: None, timings, started: now };
        let finish = (*max_tokens == 0).then_some(Finish::Length);
        Ok((StepOutput { events, finish }, Some(decode)))
    }

    /// Evaluates the prompt up to `to` and saves the snapshots that fall into this chunk.
    fn evaluate_chunk(
        &mut self,
        request: &QueuedRequest,
        sequence: &mut Sequence<M::State>,
        positions: &[(usize, SnapshotKind)],
        to: usize,
        rows: Rows,
    ) -> Result<Logits, Abort> {
        let Request { ids, images, .. } = &request.request;
        let keys = prefix_keys(ids, images);
        let from = sequence.len();
        let snapshots = self.reserve_snapshots(positions, sequence, &keys, to);
        let marks: Vec<usize> = snapshots.iter().map(|snapshot| snapshot.0).collect();
        let begin = Instant::now();
        let queue = &self.queue;
        let keep_going = || !queue.should_cancel_step(request);
        let keep_going: Option<&dyn Fn() -> bool> = Some(&keep_going);
        let mut hooks = PassHooks { images, snapshot_at: &marks, keep_going, ..PassHooks::default() };
        let logits = sequence.extend(&mut self.model, &ids[from..to], rows, &mut hooks)?;
        self.speculator.prompt_evaluated(&mut self.model, sequence, to - from, begin.elapsed());
        for ((at, kind), snapshot) in snapshots.into_iter().zip(hooks.snapshots) {
            self.cache.insert(&keys[..at], kind, snapshot, self.clear_count);
        }
        self.cache.record_prefill_speed(to - from, begin.elapsed());
        self.metrics.prompt_tokens_computed.inc_by((to - from) as u64);
        Ok(logits)
    }

    /// The positions between the end of `sequence` and `to` at which the cache has room for a snapshot.
    fn reserve_snapshots(
        &self,
        positions: &[(usize, SnapshotKind)],
        sequence: &Sequence<M::State>,
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
                    self.cache.snapshot_size().bytes(at, before)
                };
                all.into_iter().map(bytes).sum()
            };
            if self.cache.make_room(&keys[..at], kind, &needed) {
                reserved.push((at, kind));
            }
        }
        reserved.sort_unstable();
        reserved
    }

    /// Evaluates the last token, if there is one, and samples the next.
    ///
    /// When the request ends, its sequence contains every sent token except the last.
    fn decode(
        &mut self,
        request: &QueuedRequest,
        sequence: &mut Sequence<M::State>,
        decode: &mut Decode,
    ) -> Result<StepOutput, Abort> {
        let Request { max_tokens, logprobs: wanted, ignore_eos, .. } = &request.request;
        let Decode { rows, sampler, masks, timings, .. } = decode;
        if let Some(id) = decode.last.take() {
            if let Some(masks) = masks {
                masks.append(id);
            }
            let remaining = max_tokens - timings.generated_tokens;
            let token = SampledToken { id, sampler, masks: masks.as_ref(), remaining };
            self.speculator.advance(sequence, &mut self.model, rows, &token, timings)?;
        }

        let row = rows.current().ok_or(EngineError::NoLogits)?;
        let mask = masks.as_ref().map_or(Ok(TokenMask::Any), MaskWorker::next_mask)?;
        let id = sampler.draw(row, &mask).ok_or(EngineError::NoLogits)?;
        if self.eos.contains(&id) && (masks.is_some() || !ignore_eos) {
            rows.end_answer(id);
            return Ok(StepOutput { events: Vec::new(), finish: Some(Finish::Stop) });
        }
        let logprobs = wanted.map(|top| logprobs(row, id, top, self.usable_vocab));
        let now = Instant::now();
        match decode.last_sent.replace(now) {
            None => self.metrics.time_to_first_token_seconds.observe((now - request.arrived).as_secs_f64()),
            Some(before) => self.metrics.inter_token_seconds.observe((now - before).as_secs_f64()),
        }
        self.metrics.generated_tokens.inc();
        timings.generated_tokens += 1;
        decode.last = Some(id);
        let is_full = timings.generated_tokens == *max_tokens || sequence.len() == self.model.info().context;
        Ok(StepOutput { events: vec![Event::Token { id, logprobs }], finish: is_full.then_some(Finish::Length) })
    }

    /// Sends the events of a step, and ends the request or keeps it for the next step.
    fn publish(&mut self, active: ActiveRequest<M::State>, outcome: Result<StepOutput, Abort>) {
        let outcome = outcome.and_then(|StepOutput { events, finish }| {
            let is_received = events.into_iter().all(|event| active.request.events.send(event).is_ok());
            if is_received { Ok(finish) } else { Err(Abort::Disconnected) }
        });
        match outcome {
            Ok(None) => self.active = Some(active),
            Ok(Some(finish)) => self.end(active, Ok(finish)),
            Err(abort) => self.end(active, Err(abort)),
        }
    }

    /// Ends a request: keeps its sequence if that is intact, and sends the last event.
    fn end(&mut self, active: ActiveRequest<M::State>, outcome: Result<Finish, Abort>) {
        let ActiveRequest { request, sequence, stage } = active;
        let cache_prompt = request.request.cache_prompt;
        // These ends happen between two steps, so the state matches the tokens.
        let is_intact = matches!(
            &outcome,
            Ok(_) | Err(Abort::Disconnected | Abort::Failed(EngineError::TimedOut | EngineError::Draining))
        );
        // A request that ends before its first step leaves the idle sequence of the one before.
        if let Some(sequence) = sequence.filter(|_| is_intact && cache_prompt) {
            self.idle_sequence = Some(sequence);
        }
        let timings = match stage {
            Stage::Decode(decode) if outcome.is_ok() => {
                let decode_seconds = decode.started.elapsed().as_secs_f64();
                self.metrics.decode_seconds.observe(decode_seconds);
                Timings { decode_seconds, ..decode.timings }
            }
            _ => Timings::default(),
        };
        if outcome.is_err() {
            self.recover();
        }
        // Before the last event: a client that receives it may expect the engine to be free.
        self.queue.finish_running();
        let last = match outcome {
            Ok(finish) => Event::Done { finish, timings },
            Err(Abort::Disconnected | Abort::StepCancelled) => return,
            Err(Abort::Failed(error)) => {
                tracing::warn!(%error, "request failed");
                let _ = request.events.send(Event::Failed(error));
                return;
            }
        };
        let _ = request.events.send(last);
        if cache_prompt {
            self.save_answer_snapshot();
        }
    }

    /// Switches to another device after an error if the current one is lost.
    fn recover(&mut self) {
        match self.model.recover() {
            Ok(false) => {}
            Ok(true) => {
                tracing::warn!("the GPU is lost after an error; computing on the CPU from now on");
                self.metrics.set_device("cpu");
                self.metrics.gpu_lost.set(1);
                self.idle_sequence = None;
                self.cache.set_page_pool(self.model.info().pages);
            }
            Err(error) => tracing::error!(%error, "the GPU is lost after an error, and the CPU cannot take over"),
        }
    }

    /// Takes a snapshot at the end of an answer, after the client has received it.
    fn save_answer_snapshot(&mut self) {
        let (model, cache) = (&self.model, &self.cache);
        let Some(sequence) = &mut self.idle_sequence else { return };
        let needed = || cache.snapshot_size().bytes(sequence.len(), sequence.state().shared_positions());
        let keys = sequence.prefix_keys().into_owned();
        if !cache.make_room(&keys, SnapshotKind::Answer, &needed) {
            return;
        }
        match sequence.snapshot(model) {
            Ok(snapshot) => cache.insert(&keys, SnapshotKind::Answer, snapshot, self.clear_count),
            Err(error) => {
                tracing::warn!(%error, "cannot take a snapshot at the end of the answer; dropping its sequence");
                self.idle_sequence = None;
                self.recover();
            }
        }
    }
}

impl Prefill {
    /// Where the chunk that starts at `from` ends, in a prompt of `len` tokens.
    fn chunk_end(&self, from: usize, len: usize) -> usize {
        // A last chunk of one row would be computed like a decoded row, which may be more exact than a prompt's.
        if len == from + self.chunk + 1 && self.chunk > 1 { len - 2 } else { len.min(from + self.chunk) }
    }
}

/// Fails the waiting requests and writes the cache to disk when the thread ends, even by a panic.
struct StopOnDrop {
    queue: Arc<RequestQueue>,
    cache: Arc<PromptCache>,
}

impl Drop for StopOnDrop {
    fn drop(&mut self) {
        self.queue.stop();
        self.cache.close();
    }
}

fn panic_message(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| text.to_string());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "no message".into())
}
