//! The engine's thread: `loop { admit; step; publish }`.
//!
//! Up to `parallel` requests are live, each with its sequence. A step evaluates a chunk of one prompt, or one token of
//! the sequences that decode. [`TimeShare`] divides the time between the two. `steps` has what a step does.
//!
//! Live sequences share the page pool. If pages run out, the youngest request loses its sequence, which is computed again when
//! pages are free. The bytes of an answer do not depend on it.
//!
//! Before each step, requests end whose clients have disconnected, whose deadlines have passed, or which a draining engine
//! cannot finish. An error or a panic of the model ends one request and drops its sequence. After an error in a pass of several
//! sequences, each is computed again and continues alone, so that only the one with the error ends.

mod steps;
mod time_share;

use super::{
    constraint::MaskWorker,
    prompt_cache::{PromptCache, SnapshotKind},
    queue::{Abort, QueuedRequest, RequestQueue},
    request::{Event, Finish, Logprobs, Request, Timings},
    sampler::Sampler,
    sequence::Sequence,
    speculation::{Draft, DraftPolicy, PendingRows, Speculator},
};
use crate::{
    error::{EngineError, GPU_INTERACTIVITY},
    metrics::Metrics,
    model::{MAX_VERIFY_ROWS, Model, PAGE, SequenceState, prefix_keys},
};
use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
    time::Instant,
};
use time_share::TimeShare;

/// Rows that a decode step with a draft may write.
const DRAFT_ROWS: usize = 4 * MAX_VERIFY_ROWS;
/// Maximum number of tokens of an answer for which pages must be free when a request is admitted next to others. Most answers
/// are shorter than what clients allow, so longer ones take pages as they grow.
const RESERVED_ANSWER: usize = 256;

/// Options of the scheduler. See [`super::Options`].
pub(super) struct SchedulerOptions {
    pub parallel: usize,
    pub eos: Vec<u32>,
    pub usable_vocab: usize,
    pub speculate: DraftPolicy,
    pub draft_tokens: usize,
}

/// Owns the model and everything that only the engine's thread uses.
pub(super) struct Scheduler<M: Model> {
    model: M,
    options: SchedulerOptions,
    queue: Arc<RequestQueue>,
    cache: Arc<PromptCache>,
    metrics: Arc<Metrics>,
    speculator: Speculator<M>,
    /// The requests under way, in order of arrival.
    live: Vec<LiveRequest<M::State>>,
    /// Sequences of ended requests, for prompts that extend them. The oldest is first.
    idle: Vec<IdleSequence<M::State>>,
    time_share: TimeShare,
    /// Number of steps so far.
    steps: u64,
}

/// A sequence without a request.
struct IdleSequence<S> {
    sequence: Sequence<S>,
    /// [`PromptCache::clear_count`] when its request began.
    clear_count: u64,
}

/// A request that the scheduler works on.
struct LiveRequest<S> {
    request: QueuedRequest,
    /// `None` before the first step, and after the sequence was dropped in favour of another one.
    sequence: Option<Sequence<S>>,
    stage: Stage,
    /// The tokens of a dropped sequence, which must be computed again before the answer continues.
    lost: Vec<u32>,
    /// [`PromptCache::clear_count`] when the request began.
    clear_count: u64,
    /// The step that evaluated its last token.
    last_step: u64,
    /// The next token must not share a pass with other sequences: one of them has failed.
    is_alone: bool,
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
    /// The last token: sampled and sent, not yet evaluated. `None` before the first one.
    last: Option<u32>,
    last_sent: Option<Instant>,
    timings: Timings,
    started: Instant,
}

/// The next work of a live request.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Work {
    /// A sequence to start from. Needs no pass.
    Begin,
    /// Its first token, from logits that are there. Needs no pass.
    Sample,
    /// This many rows of its prompt, or of a dropped sequence.
    Read(usize),
    /// One token.
    Decode,
}

/// The requests of a step, and how to run it.
struct Step<S> {
    requests: Vec<LiveRequest<S>>,
    /// Maximum number of rows of a prompt.
    chunk: usize,
    /// Number of live requests that decode.
    decoding: usize,
    /// True if a short prompt goes first.
    is_jump: bool,
}

/// The result of one step for one request.
#[derive(Default)]
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
        let SchedulerOptions { speculate, draft_tokens, .. } = options;
        let speculator = Speculator::new(&mut model, draft, speculate, draft_tokens, metrics.clone());
        Self {
            model,
            options,
            queue,
            cache,
            metrics,
            speculator,
            live: Vec::new(),
            idle: Vec::new(),
            time_share: TimeShare::default(),
            steps: 0,
        }
    }

    /// Runs until the queue is closed and empty.
    pub fn run(mut self) {
        let _stop = StopOnDrop { queue: self.queue.clone(), cache: self.cache.clone() };
        while self.admit() {
            let mut step = self.next_step();
            let outcomes = self.step(&mut step);
            for (request, outcome) in step.requests.into_iter().zip(outcomes) {
                self.publish(request, outcome);
            }
        }
    }

    /// Ends requests that must end and takes new ones from the queue. Blocks while there is none. Returns false once none is
    /// left and none can arrive.
    fn admit(&mut self) -> bool {
        for live in std::mem::take(&mut self.live) {
            match self.queue.check(&live.request) {
                Ok(()) => self.live.push(live),
                Err(abort) => self.end(live, Err(abort)),
            }
        }
        while self.live.len() < self.options.parallel {
            let taken: usize = self.live.iter().map(LiveRequest::reserved_pages).sum();
            let pages = self.model.info().pages.map_or(usize::MAX, |pool| pool.count());
            let fits = |request: &Request| reserved_pages(request) <= pages.saturating_sub(taken);
            let model = &mut self.model;
            let Some(request) = self.queue.next(&fits, &mut || model.fit_memory()) else { break };
            self.metrics.admitted_tokens.inc_by(request.request.ids.len() as u64);
            self.live.push(LiveRequest::new(request));
        }
        !self.live.is_empty()
    }

    /// Takes the requests of the next step out of `live`, and makes pages free for it.
    fn next_step(&mut self) -> Step<M::State> {
        let info = self.model.info();
        let is_contested = self.live.len() > 1;
        let chunk = if is_contested { self.time_share.chunk_rows(info.chunk.max(1)) } else { info.chunk.max(1) };
        let decoding = self.live.iter().filter(|live| live.work() == Work::Decode).count();
        if decoding == 0 {
            self.time_share.no_one_decodes();
        }
        let (mut chosen, is_jump) = self.choose(chunk, info.batch.max(1));
        // While several sequences decode, no draft needs pages.
        let decode_rows = if decoding > 1 { 1 } else { DRAFT_ROWS };
        self.free_pages(&mut chosen, chunk, decode_rows);
        chosen.sort_unstable_by(|a, b| b.cmp(a));
        let mut requests: Vec<_> = chosen.into_iter().map(|index| self.live.remove(index)).collect();
        requests.reverse();
        self.steps += 1;
        Step { requests, chunk, decoding, is_jump }
    }

    /// The live requests of the next step by index, and whether a short prompt goes first.
    fn choose(&self, chunk: usize, batch: usize) -> (Vec<usize>, bool) {
        let needs_no_pass = |live: &LiveRequest<_>| match live.work() {
            Work::Begin => !self.waits_for_prefix(live),
            Work::Sample => true,
            Work::Read(_) | Work::Decode => false,
        };
        if let Some(index) = self.live.iter().position(needs_no_pass) {
            return (vec![index], false);
        }
        let all = |is_wanted: &dyn Fn(Work) -> bool| -> Vec<usize> {
            (0..self.live.len()).filter(|&index| is_wanted(self.live[index].work())).collect()
        };
        let mut decoding = all(&|work| work == Work::Decode);
        let reading = all(&|work| matches!(work, Work::Read(_)));
        let oldest = reading.iter().copied().find(|&index| self.may_read(index));
        let is_short = |index: &usize| matches!(self.live[*index].work(), Work::Read(rows) if rows <= chunk);
        let short = reading.into_iter().find(|index| self.may_read(*index) && is_short(index));
        if let Some(index) = short.filter(|_| self.time_share.may_jump()) {
            return (vec![index], Some(index) != oldest || !self.time_share.may_read());
        }
        if let Some(index) = oldest.filter(|_| decoding.is_empty() || self.time_share.may_read()) {
            return (vec![index], false);
        }
        if let Some(&index) = decoding.iter().find(|&&index| self.live[index].is_alone) {
            return (vec![index], false);
        }
        decoding.sort_by_key(|&index| self.live[index].last_step);
        decoding.truncate(batch);
        (decoding, false)
    }

    /// False for a dropped sequence as long as older requests need its pages.
    fn may_read(&self, index: usize) -> bool {
        let live = &self.live[index];
        let Some(pool) = self.model.info().pages.filter(|_| live.sequence.is_none()) else { return true };
        let others = self.live.iter().filter(|other| other.sequence.is_some());
        let taken: usize = others.map(LiveRequest::reserved_pages).sum();
        taken == 0 || live.reserved_pages() + taken <= pool.count()
    }

    /// True if another request is about to reach a snapshot of this prompt that is longer than what the cache has: restoring it
    /// takes less time than computing the same tokens.
    fn waits_for_prefix(&self, new: &LiveRequest<M::State>) -> bool {
        let request = &new.request.request;
        if !may_reuse(request) {
            return false;
        }
        let keys = prefix_keys(&request.ids, &request.images);
        let shared = |other: &LiveRequest<M::State>| {
            let (Stage::Prefill(prefill), Some(sequence)) = (&other.stage, &other.sequence) else { return None };
            let Request { ids, images, .. } = &other.request.request;
            let others = prefix_keys(ids, images);
            let is_shared = |at: usize| at < keys.len() && others[..at] == keys[..at];
            let coming = prefill.snapshots.iter().map(|snapshot| snapshot.0).filter(|&at| sequence.len() < at);
            coming.rev().find(|&at| is_shared(at))
        };
        let Some(coming) = self.live.iter().filter_map(shared).max() else { return false };
        let idle = self.idle.iter().filter(|idle| idle.sequence.is_prefix_of(&request.ids, &request.images));
        let known = idle.map(|idle| idle.sequence.len()).max().unwrap_or(0);
        coming > known.max(self.cache.prefix_len(&keys))
    }

    /// Makes pages free for the rows of a step: those of snapshots first, then those of idle sequences, then those of the
    /// youngest requests, which leave the step.
    fn free_pages(&mut self, chosen: &mut Vec<usize>, chunk: usize, decode_rows: usize) {
        self.model.fit_memory();
        loop {
            let missing = chosen.iter().map(|&index| self.live[index].missing_pages(chunk, decode_rows)).sum();
            self.cache.evict_for_pages(missing);
            let pool = self.model.info().pages;
            if pool.is_none_or(|pool| pool.free() >= missing) {
                return;
            }
            if !self.idle.is_empty() {
                self.idle.remove(0);
                continue;
            }
            let mut holders = (0..self.live.len()).rev().filter(|&index| self.live[index].sequence.is_some());
            let (Some(youngest), Some(_)) = (holders.next(), holders.next()) else { return };
            self.metrics.preemptions.inc();
            self.live[youngest].drop_sequence();
            chosen.retain(|&index| index != youngest);
        }
    }

    /// Sends the events of a step, and ends the request or keeps it for the next step.
    fn publish(&mut self, live: LiveRequest<M::State>, outcome: Result<StepOutput, Abort>) {
        let outcome = outcome.and_then(|StepOutput { events, finish }| {
            let is_received = events.into_iter().all(|event| live.request.events.send(event).is_ok());
            if is_received { Ok(finish) } else { Err(Abort::Disconnected) }
        });
        match outcome {
            Ok(None) => {
                let at = self.live.partition_point(|other| other.request.arrived <= live.request.arrived);
                self.live.insert(at, live);
            }
            Ok(Some(finish)) => self.end(live, Ok(finish)),
            Err(abort) => self.end(live, Err(abort)),
        }
    }

    /// Ends a request: keeps its sequence if that is intact, and sends the last event.
    fn end(&mut self, mut live: LiveRequest<M::State>, outcome: Result<Finish, Abort>) {
        let outcome = self.settle(&mut live).and(outcome);
        let LiveRequest { request, sequence, stage, lost, clear_count, .. } = live;
        let cache_prompt = request.request.cache_prompt;
        // These ends happen between two steps, so the state matches the tokens.
        let is_intact = matches!(
            &outcome,
            Ok(_) | Err(Abort::Disconnected | Abort::Failed(EngineError::TimedOut | EngineError::Draining))
        );
        let kept = sequence.filter(|sequence| is_intact && cache_prompt && sequence.len() >= lost.len());
        let is_kept = kept.is_some();
        self.idle.extend(kept.map(|sequence| IdleSequence { sequence, clear_count }));
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
                if error.to_string().contains(GPU_INTERACTIVITY) {
                    self.metrics.gpu_interactivity_errors.inc();
                }
                let _ = request.events.send(Event::Failed(error));
                return;
            }
        };
        let _ = request.events.send(last);
        if is_kept {
            self.save_answer_snapshot();
        }
    }

    /// Switches to another device after an error if the current one is lost. Live sequences are computed again there.
    fn recover(&mut self) {
        match self.model.recover() {
            Ok(false) => {}
            Ok(true) => {
                tracing::warn!("the GPU is lost after an error; computing on the CPU from now on");
                self.metrics.set_device("cpu");
                self.metrics.gpu_lost.set(1);
                self.idle.clear();
                self.live.iter_mut().for_each(LiveRequest::drop_sequence);
                self.cache.set_page_pool(self.model.info().pages);
            }
            Err(error) => tracing::error!(%error, "the GPU is lost after an error, and the CPU cannot take over"),
        }
    }
}

impl<S: SequenceState> LiveRequest<S> {
    fn new(request: QueuedRequest) -> Self {
        Self {
            request,
            sequence: None,
            stage: Stage::New,
            lost: Vec::new(),
            clear_count: 0,
            last_step: 0,
            is_alone: false,
        }
    }

    fn work(&self) -> Work {
        let len = self.sequence.as_ref().map_or(0, Sequence::len);
        match &self.stage {
            Stage::New => Work::Begin,
            Stage::Prefill(_) => Work::Read(self.request.request.ids.len() - len),
            Stage::Decode(_) if len < self.lost.len() => Work::Read(self.lost.len() - len),
            Stage::Decode(decode) if decode.last.is_none() => Work::Sample,
            Stage::Decode(_) => Work::Decode,
        }
    }

    /// Drops the sequence. Its tokens are computed again when the request continues.
    fn drop_sequence(&mut self) {
        let Some(sequence) = self.sequence.take() else { return };
        match &mut self.stage {
            Stage::New => {}
            // The prompt continues from what the cache has of it. Log-probabilities need all of it.
            Stage::Prefill(prefill) => prefill.logprobs = prefill.logprobs.as_ref().map(|_| vec![None]),
            Stage::Decode(decode) => {
                if decode.last.is_some() {
                    decode.rows.clear();
                }
                if self.lost.len() < sequence.len() {
                    self.lost = sequence.tokens().to_vec();
                }
            }
        }
    }

    /// Pages that the next step needs beyond those that the sequence holds.
    fn missing_pages(&self, chunk: usize, decode_rows: usize) -> usize {
        // A sequence that starts from a snapshot copies its last page.
        let Some(sequence) = &self.sequence else { return 1 };
        let rows = match self.work() {
            Work::Read(rows) => rows.min(chunk),
            Work::Decode => decode_rows,
            Work::Begin | Work::Sample => 0,
        };
        sequence.state().missing_pages(rows)
    }

    /// Pages that the request holds or is expected to need.
    fn reserved_pages(&self) -> usize {
        let len = self.sequence.as_ref().map_or(0, Sequence::len).max(self.lost.len());
        reserved_pages(&self.request.request).max((len + DRAFT_ROWS).div_ceil(PAGE))
    }
}

/// Pages for a prompt and the beginning of its answer.
fn reserved_pages(request: &Request) -> usize {
    (request.ids.len() + request.max_tokens.min(RESERVED_ANSWER)).div_ceil(PAGE)
}

/// True if a request may start from state of earlier ones. Log-probabilities of the prompt need every row.
fn may_reuse(request: &Request) -> bool {
    request.cache_prompt && request.prompt_logprobs.is_none()
}

/// Runs `work`. A panic becomes an error. A forward pass writes its buffers before it reads them, so only the sequences of a
/// pass that panicked are lost.
fn caught<T>(work: impl FnOnce() -> Result<T, Abort>) -> Result<T, Abort> {
    let message = |panic: Box<dyn std::any::Any + Send>| {
        let text = panic.downcast_ref::<&str>().map(|text| text.to_string());
        text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "no message".into())
    };
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|panic| Err(EngineError::Panicked(message(panic)).into()))
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
