//! The engine's thread: `loop { admit; step; publish }`.
//!
//! Up to `parallel` requests are live, each with its own sequence. A step evaluates either one chunk of one prompt, or
//! one token of each decoding sequence. [`TimeShare`] divides the time between these two kinds of step. The module
//! `steps` implements both kinds.
//!
//! Live sequences share the page pool. If no page is free, the scheduler preempts the youngest request: the scheduler
//! drops the request's sequence, and recomputes the sequence when pages are free. Preemption changes no byte of an
//! answer.
//!
//! Before each step, the scheduler ends a request if its client has disconnected or needs no more tokens, its deadline
//! has passed, or the grace period of a draining engine is over. A model error or panic ends one request and drops its
//! sequence. If a pass of several sequences fails, each sequence is recomputed and continues alone, so that only the
//! faulty request ends.

mod steps;
mod time_share;

use super::{
    answer::{StepOutput, TokenRules},
    idle_sequences::IdleSequences,
    live_request::{DRAFT_ROWS, LiveRequest, Stage, Work, may_reuse, reserved_pages},
    prompt_cache::PromptCache,
    queue::{Abort, RequestQueue},
    request::{Event, Finish, Request, Timings},
    speculation::{Draft, DraftPolicy, Speculator},
};
use crate::{
    error::{EngineError, GPU_INTERACTIVITY},
    metrics::Metrics,
    model::Model,
};
use std::{
    sync::{Arc, atomic::Ordering::Relaxed},
    time::Instant,
};
use time_share::TimeShare;

/// Options of the scheduler. See [`super::Options`].
pub(super) struct SchedulerOptions {
    pub parallel: usize,
    pub rules: TokenRules,
    pub speculate: DraftPolicy,
    pub draft_tokens: usize,
}

/// Owns the model and everything that only the engine's thread uses.
pub(super) struct Scheduler<M: Model> {
    model: M,
    parallel: usize,
    rules: TokenRules,
    queue: Arc<RequestQueue>,
    cache: Arc<PromptCache>,
    metrics: Arc<Metrics>,
    speculator: Speculator<M>,
    /// Admitted requests, in order of arrival.
    live: Vec<LiveRequest<M::State>>,
    idle: IdleSequences<M::State>,
    time_share: TimeShare,
    /// Number of steps so far.
    steps: u64,
    /// Clock that times the steps. Tests replace it.
    now: fn() -> Instant,
}

/// The requests that take part in one step, and the step's parameters.
struct Step<S> {
    requests: Vec<LiveRequest<S>>,
    /// Maximum number of prompt rows to evaluate.
    chunk: usize,
    /// Number of live requests in the decode stage, including requests that are not part of this step.
    decoding: usize,
    /// True if the step evaluates a prompt before an older prompt is complete.
    overtakes: bool,
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
        let SchedulerOptions { parallel, rules, speculate, draft_tokens } = options;
        let speculator = Speculator::new(&mut model, draft, speculate, draft_tokens, metrics.clone());
        Self {
            model,
            parallel,
            rules,
            queue,
            cache,
            metrics,
            speculator,
            live: Vec::new(),
            idle: IdleSequences::default(),
            time_share: TimeShare::default(),
            steps: 0,
            now: Instant::now,
        }
    }

    /// Runs until the queue is closed and empty.
    pub fn run(mut self) {
        let _stop = StopOnDrop { queue: self.queue.clone(), cache: self.cache.clone() };
        while self.admit() {
            self.run_step();
        }
    }

    fn run_step(&mut self) {
        let mut step = self.next_step();
        let outcomes = self.step(&mut step);
        for (request, outcome) in step.requests.into_iter().zip(outcomes) {
            self.publish(request, outcome);
        }
    }

    /// Ends aborted and completed requests and admits new requests from the queue. Blocks while no request is live or
    /// waiting. Returns false when no request is left and the queue is closed.
    fn admit(&mut self) -> bool {
        for live in std::mem::take(&mut self.live) {
            match self.queue.check(&live.submitted) {
                Ok(()) if live.submitted.request.is_complete.load(Relaxed) => self.end(live, Ok(Finish::Stop)),
                Ok(()) => self.live.push(live),
                Err(abort) => self.end(live, Err(abort)),
            }
        }
        while self.live.len() < self.parallel {
            let taken: usize = self.live.iter().map(LiveRequest::reserved_pages).sum();
            let pages = self.model.info().pages.map_or(usize::MAX, |pool| pool.count());
            let fits = |request: &Request| reserved_pages(request) <= pages.saturating_sub(taken);
            let model = &mut self.model;
            let Some(submitted) = self.queue.next(&fits, &mut || model.fit_memory()) else { break };
            self.metrics.admitted_tokens.inc_by(submitted.request.ids.len() as u64);
            self.live.push(LiveRequest::new(submitted));
        }
        !self.live.is_empty()
    }

    /// Takes the requests of the next step out of `live`, and frees pages for the step.
    fn next_step(&mut self) -> Step<M::State> {
        let info = self.model.info();
        let is_shared = self.time_share.is_shared(self.live.len(), (self.now)());
        let chunk = if is_shared { self.time_share.chunk_rows(info.chunk.max(1)) } else { info.chunk.max(1) };
        let decoding = self.live.iter().filter(|live| live.work() == Work::Decode).count();
        if decoding == 0 {
            self.time_share.clear_decode_debt();
        }
        let (mut chosen, overtakes) = self.choose(chunk, info.batch.max(1));
        // Drafts need pages, but are disabled while several sequences decode.
        let decode_rows = if decoding > 1 { 1 } else { DRAFT_ROWS };
        self.free_pages(&mut chosen, chunk, decode_rows);
        chosen.sort_unstable_by(|a, b| b.cmp(a));
        let mut requests: Vec<_> = chosen.into_iter().map(|index| self.live.remove(index)).collect();
        requests.reverse();
        self.steps += 1;
        Step { requests, chunk, decoding, overtakes }
    }

    /// Indices of the live requests that take part in the next step, and whether that step overtakes an older prompt.
    fn choose(&self, chunk: usize, batch: usize) -> (Vec<usize>, bool) {
        let needs_no_pass = |live: &LiveRequest<_>| match live.work() {
            Work::Begin => !self.waits_for_prefix(live),
            Work::Sample => true,
            Work::Prefill(_) | Work::Decode => false,
        };
        if let Some(index) = self.live.iter().position(needs_no_pass) {
            return (vec![index], false);
        }
        let rows_left = |index: usize| match self.live[index].work() {
            Work::Prefill(rows) if self.may_evaluate(index) => Some((rows, index)),
            _ => None,
        };
        let mut decoding: Vec<_> =
            (0..self.live.len()).filter(|&index| self.live[index].work() == Work::Decode).collect();
        let oldest = (0..self.live.len()).find_map(rows_left);
        let shortest = (0..self.live.len()).filter_map(rows_left).min();
        let is_shorter = |short: &(usize, usize)| oldest.is_some_and(|oldest| 2 * short.0 <= oldest.0);
        let overtaking = shortest.filter(|short| is_shorter(short) && self.time_share.may_overtake());
        let next = overtaking.or(oldest);
        if let Some((_, index)) =
            next.filter(|next| decoding.is_empty() || self.time_share.may_run_chunk(next.0 <= chunk))
        {
            return (vec![index], overtaking.is_some());
        }
        if let Some(&index) = decoding.iter().find(|&&index| self.live[index].must_run_alone) {
            return (vec![index], false);
        }
        decoding.sort_by_key(|&index| self.live[index].last_step);
        decoding.truncate(batch);
        (decoding, false)
    }

    /// False for a preempted request while the other requests need the pages that the preempted request would use.
    fn may_evaluate(&self, index: usize) -> bool {
        let live = &self.live[index];
        let Some(pool) = self.model.info().pages.filter(|_| live.sequence.is_none()) else { return true };
        let others = self.live.iter().filter(|other| other.sequence.is_some());
        let taken: usize = others.map(LiveRequest::reserved_pages).sum();
        taken == 0 || live.reserved_pages() + taken <= pool.count()
    }

    /// True if another live request will soon take a snapshot of a prefix of this prompt, and that prefix is longer
    /// than any cached prefix. Waiting for the snapshot and restoring it is faster than computing the prefix twice.
    fn waits_for_prefix(&self, new: &LiveRequest<M::State>) -> bool {
        if !may_reuse(&new.submitted.request) {
            return false;
        }
        let prompt = new.submitted.request.cached_prompt();
        let keys = prompt.keys();
        let shared = |other: &LiveRequest<M::State>| {
            let (Stage::Prefill(prefill), Some(sequence)) = (&other.stage, &other.sequence) else { return None };
            let others = other.submitted.request.cached_prompt().keys();
            let is_shared = |at: usize| at < keys.len() && others[..at] == keys[..at];
            let coming = prefill.snapshots.iter().map(|snapshot| snapshot.0).filter(|&at| sequence.len() < at);
            coming.rev().find(|&at| is_shared(at))
        };
        let Some(coming) = self.live.iter().filter_map(shared).max() else { return false };
        coming > self.idle.prefix_len(prompt).max(self.cache.prefix_len(&keys))
    }

    /// Frees pages for the rows of a step: first pages of snapshots, then pages of idle sequences, then pages of the
    /// youngest requests. A preempted request is removed from `chosen`.
    fn free_pages(&mut self, chosen: &mut Vec<usize>, chunk: usize, decode_rows: usize) {
        self.model.fit_memory();
        loop {
            let missing = chosen.iter().map(|&index| self.live[index].missing_pages(chunk, decode_rows)).sum();
            self.cache.evict_for_pages(missing);
            let pool = self.model.info().pages;
            if pool.is_none_or(|pool| pool.free() >= missing) {
                return;
            }
            if self.idle.drop_oldest() {
                continue;
            }
            let mut holders = (0..self.live.len()).rev().filter(|&index| self.live[index].sequence.is_some());
            let (Some(youngest), Some(_)) = (holders.next(), holders.next()) else { return };
            self.metrics.preemptions.inc();
            self.live[youngest].drop_sequence();
            chosen.retain(|&index| index != youngest);
        }
    }

    /// Sends the events of a step to the client. Then ends the request or returns it to `live`.
    fn publish(&mut self, live: LiveRequest<M::State>, outcome: Result<StepOutput, Abort>) {
        let outcome = outcome.and_then(|StepOutput { events, finish }| {
            let is_received = events.into_iter().all(|event| live.submitted.events.send(event).is_ok());
            if is_received { Ok(finish) } else { Err(Abort::Disconnected) }
        });
        match outcome {
            Ok(None) => {
                let at = self.live.partition_point(|other| other.submitted.arrived <= live.submitted.arrived);
                self.live.insert(at, live);
            }
            Ok(Some(finish)) => self.end(live, Ok(finish)),
            Err(abort) => self.end(live, Err(abort)),
        }
    }

    /// Ends a request: keeps its sequence for later requests if the sequence is intact, and sends the last event.
    fn end(&mut self, mut live: LiveRequest<M::State>, outcome: Result<Finish, Abort>) {
        let outcome = self.settle(&mut live).and(outcome);
        let LiveRequest { submitted, sequence, stage, dropped_tokens, clear_count, .. } = live;
        let cache_prompt = submitted.request.cache_prompt;
        // A request that ends between two steps has a state that matches its tokens.
        let is_intact = matches!(
            &outcome,
            Ok(_) | Err(Abort::Disconnected | Abort::Failed(EngineError::TimedOut | EngineError::Draining))
        );
        let kept = sequence.filter(|sequence| is_intact && cache_prompt && sequence.len() >= dropped_tokens.len());
        let is_kept = kept.is_some();
        kept.into_iter().for_each(|sequence| self.idle.push(sequence, clear_count));
        let timings = match stage {
            Stage::Decode(answer) if outcome.is_ok() => {
                let decode_seconds = answer.started.elapsed().as_secs_f64();
                self.metrics.decode_seconds.observe(decode_seconds);
                Timings { decode_seconds, ..answer.timings }
            }
            _ => Timings::default(),
        };
        if outcome.is_err() {
            self.recover();
        }
        // This call precedes the last event, because a client that receives the event may expect the engine to be free.
        self.queue.finish_running();
        let last = match outcome {
            Ok(finish) => Event::Done { finish, timings },
            Err(Abort::Disconnected | Abort::StepCancelled) => return,
            Err(Abort::Failed(error)) => {
                tracing::warn!(%error, "request failed");
                if error.to_string().contains(GPU_INTERACTIVITY) {
                    self.metrics.gpu_interactivity_errors.inc();
                }
                let _ = submitted.events.send(Event::Failed(error));
                return;
            }
        };
        let _ = submitted.events.send(last);
        if is_kept {
            self.save_answer_snapshot();
        }
    }

    /// Switches to the CPU if an error has made the GPU unusable. Live sequences are recomputed on the CPU.
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
            Err(error) => tracing::error!(%error, "the GPU is lost after an error; cannot continue on the CPU"),
        }
    }
}

/// Fails the waiting requests and closes the prompt cache when the engine's thread ends, even by a panic.
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

#[cfg(test)]
mod tests;
