//! The engine's thread: `loop { admit; step; publish }`.
//!
//! Up to `parallel` requests are live, each with its own sequence. A step evaluates either one chunk of one prompt, or
//! one token of each decoding sequence. [`TimeShare`] divides the time between these two kinds of step. [`ModelRunner`]
//! runs them.
//!
//! Live sequences share the page pool. If no page is free, the scheduler preempts the youngest request: the scheduler
//! drops the request's sequence, and recomputes the sequence when pages are free. Preemption changes no byte of an
//! answer.
//!
//! Before each step, the scheduler ends a request if its client has disconnected or needs no more tokens, its deadline
//! has passed, or the grace period of a draining engine is over. A model error or panic ends one request and drops its
//! sequence. If a pass of several sequences fails, each sequence is recomputed and continues alone, so that only the
//! faulty request ends. If macOS ends GPU work because it delayed the screen, the sequence is recomputed once, with
//! smaller submissions.

mod time_share;

use super::{
    abort::Abort,
    answer::StepOutput,
    live_request::{DRAFT_ROWS, LiveRequest, Stage, Work, reserved_pages},
    model_runner::{ModelRunner, Step},
    preemption,
    queue::RequestQueue,
    request::{Event, Finish, Request, Timings},
    shared_prefix,
};
use moestro_base::metrics::Metrics;
use moestro_model::model::Model;
use std::{
    sync::{Arc, atomic::Ordering::Relaxed},
    time::{Duration, Instant},
};
use time_share::TimeShare;

/// Minimum time between two pages that are read for the disk cache while a sequence decodes ahead. Such a read waits for
/// the pass in flight, so the GPU is idle for a moment.
const AHEAD_PAGE_INTERVAL: Duration = Duration::from_millis(100);

/// Decides which requests run next, and sends their events.
pub(super) struct Scheduler<M: Model> {
    runner: ModelRunner<M>,
    queue: Arc<RequestQueue>,
    metrics: Arc<Metrics>,
    /// Admitted requests, in order of arrival.
    live: Vec<LiveRequest<M::State>>,
    time_share: TimeShare,
    /// Number of steps so far.
    steps: u64,
    /// Time at which a page was last read for the disk cache.
    page_read: Option<Instant>,
    /// Clock that times the steps. Tests replace it.
    now: fn() -> Instant,
}

/// The requests that take part in the next step.
struct Choice {
    /// Indices into [`Scheduler::live`].
    indices: Vec<usize>,
    /// True if the step evaluates a prompt before an older prompt is complete.
    overtakes: bool,
}

impl Choice {
    fn one(index: usize) -> Self {
        Self { indices: vec![index], overtakes: false }
    }
}

/// A live request whose prompt, or dropped sequence, can be evaluated now.
#[derive(Clone, Copy)]
struct Prompt {
    index: usize,
    /// Number of tokens that are left to evaluate, or that are left before a snapshot that other requests wait for.
    rows: usize,
}

/// True if a page may be read now for the disk cache, after another page was read at `last`.
fn may_read_page(is_ahead: bool, last: Option<Instant>, now: Instant) -> bool {
    !is_ahead || last.is_none_or(|last| now.saturating_duration_since(last) >= AHEAD_PAGE_INTERVAL)
}

impl<M: Model> Scheduler<M> {
    pub fn new(runner: ModelRunner<M>, queue: Arc<RequestQueue>, metrics: Arc<Metrics>) -> Self {
        let live = Vec::new();
        let time_share = TimeShare::default();
        Self { runner, queue, metrics, live, time_share, steps: 0, page_read: None, now: Instant::now }
    }

    /// Runs until the queue is closed and empty.
    pub fn run(&mut self) {
        while self.admit() {
            self.run_step();
        }
    }

    fn run_step(&mut self) {
        let (mut step, overtakes) = self.next_step();
        let outcomes = self.step(&mut step, overtakes);
        for (mut request, outcome) in step.requests.into_iter().zip(outcomes) {
            let outcome = self.continue_after_delayed_screen(&mut request, outcome);
            self.publish(request, outcome);
        }
        let is_ahead = self.live.iter().any(LiveRequest::is_ahead);
        let now = (self.now)();
        if may_read_page(is_ahead, self.page_read, now) && self.runner.answer_page_request() {
            self.page_read = Some(now);
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
        while self.live.len() < self.queue.limits.parallel {
            let taken = preemption::reserved_pages(&self.live);
            let pages = self.runner.model.info().pages.map_or(usize::MAX, |pool| pool.count());
            let fits = |request: &Request| reserved_pages(request) <= pages.saturating_sub(taken);
            let mut idle = || {
                self.runner.model.fit_memory();
                self.runner.answer_page_request();
            };
            let Some(submitted) = self.queue.next(&fits, &mut idle) else { break };
            self.metrics.admitted_tokens.inc_by(submitted.request.ids.len() as u64);
            self.live.push(LiveRequest::new(submitted));
        }
        !self.live.is_empty()
    }

    /// Takes the requests of the next step out of `live`, and frees pages for the step. Returns the step, and whether
    /// it overtakes an older prompt.
    fn next_step(&mut self) -> (Step<M::State>, bool) {
        let info = self.runner.model.info();
        let is_shared = self.time_share.is_shared(self.live.len(), (self.now)());
        let chunk = if is_shared { self.time_share.chunk_rows(info.chunk.max(1)) } else { info.chunk.max(1) };
        let decoding = self.live.iter().filter(|live| live.work() == Work::Decode).count();
        if decoding == 0 {
            self.time_share.clear_decode_debt();
        }
        shared_prefix::find_waiting(&mut self.live, &self.runner.sequences);
        let Choice { mut indices, overtakes } = self.choose(chunk, info.batch.max(1));
        // Drafts need pages, but are disabled while several sequences decode.
        let decode_rows = if decoding > 1 { 1 } else { DRAFT_ROWS };
        self.free_pages(&mut indices, chunk, decode_rows);
        indices.sort_unstable_by(|a, b| b.cmp(a));
        let mut requests: Vec<_> = indices.into_iter().map(|index| self.live.remove(index)).collect();
        requests.reverse();
        self.steps += 1;
        // At most `parallel` states exist after the step.
        let states = self.live.iter().filter(|live| live.sequence.is_some()).count();
        let max_idle = self.queue.limits.parallel.saturating_sub(states + 1);
        (Step { requests, chunk, decoding, max_idle }, overtakes)
    }

    /// Runs a step and records its duration. Returns one outcome per request of the step, in order.
    fn step(&mut self, step: &mut Step<M::State>, overtakes: bool) -> Vec<Result<StepOutput, Abort>> {
        let work = step.requests.first().map(LiveRequest::work);
        let rows = |step: &Step<M::State>| step.requests.iter().map(LiveRequest::len).sum::<usize>();
        let begun = (self.now)();
        let had = rows(step);
        let outcomes = self.runner.run(step);
        let seconds = ((self.now)() - begun).as_secs_f64();
        match work {
            Some(Work::Prefill(_)) => {
                let most = self.runner.model.info().chunk;
                self.time_share.record_chunk(rows(step).saturating_sub(had), most, seconds, overtakes);
            }
            Some(Work::Decode) => {
                self.time_share.record_decode(seconds);
                step.requests.iter_mut().for_each(|live| live.last_step = self.steps);
                // Requests that continue after a failed pass do not reach `end`, which checks the device otherwise.
                if step.requests.iter().any(|live| live.must_run_alone) {
                    self.recover();
                }
            }
            Some(Work::Begin | Work::Sample) | None => {}
        }
        outcomes
    }

    /// Chooses the requests of the next step. `chunk` is the number of rows in the next chunk of a prompt, and `batch`
    /// the maximum number of sequences that decode in one pass.
    fn choose(&self, chunk: usize, batch: usize) -> Choice {
        let needs_no_pass = |live: &LiveRequest<_>| match live.work() {
            Work::Begin => !live.waits_for_prefix,
            Work::Sample => true,
            Work::Prefill(_) | Work::Decode => false,
        };
        if let Some(index) = self.live.iter().position(needs_no_pass) {
            return Choice::one(index);
        }
        let mut decoding: Vec<_> =
            (0..self.live.len()).filter(|&index| self.live[index].work() == Work::Decode).collect();
        let pool = self.runner.model.info().pages;
        let prompt = |(index, live): (usize, &LiveRequest<_>)| match live.work() {
            Work::Prefill(rows) => {
                let rows = live.awaited.map_or(rows, |at| at - live.len());
                preemption::may_resume(live, &self.live, pool.as_deref()).then_some(Prompt { index, rows })
            }
            _ => None,
        };
        let prompts = || self.live.iter().enumerate().filter_map(prompt);
        let oldest = prompts().next();
        let shortest = prompts().min_by_key(|prompt| prompt.rows);
        let is_shorter = |short: &Prompt| oldest.is_some_and(|oldest| 2 * short.rows <= oldest.rows);
        let overtaking = shortest.filter(|short| is_shorter(short) && self.time_share.may_overtake());
        let may_run = |next: &Prompt| decoding.is_empty() || self.time_share.may_run_chunk(next.rows <= chunk);
        if let Some(next) = overtaking.or(oldest).filter(may_run) {
            return Choice { indices: vec![next.index], overtakes: overtaking.is_some() };
        }
        if let Some(&index) = decoding.iter().find(|&&index| self.live[index].must_run_alone) {
            return Choice::one(index);
        }
        decoding.sort_by_key(|&index| self.live[index].last_step);
        decoding.truncate(batch);
        Choice { indices: decoding, overtakes: false }
    }

    /// Frees pages for the rows of a step: first pages of snapshots, then pages of idle sequences, then pages of the
    /// youngest requests. A preempted request is removed from `indices`.
    fn free_pages(&mut self, indices: &mut Vec<usize>, chunk: usize, decode_rows: usize) {
        self.runner.model.fit_memory();
        let pool = self.runner.model.info().pages;
        loop {
            let missing = || indices.iter().map(|&index| self.live[index].missing_pages(chunk, decode_rows)).sum();
            if self.runner.sequences.free_pages(pool.as_deref(), &missing) {
                return;
            }
            let Some(preempted) = preemption::preempt_youngest(&mut self.live) else { return };
            self.metrics.preemptions.inc();
            indices.retain(|&index| index != preempted);
        }
    }

    /// Lets a request continue whose GPU work was ended because it delayed the screen, the first time. Its sequence is
    /// recomputed from the last snapshot.
    fn continue_after_delayed_screen(
        &mut self,
        live: &mut LiveRequest<M::State>,
        outcome: Result<StepOutput, Abort>,
    ) -> Result<StepOutput, Abort> {
        let error = match outcome {
            Err(Abort::Failed(error)) if error.has_delayed_screen() => error,
            outcome => return outcome,
        };
        self.metrics.gpu_interactivity_errors.inc();
        if std::mem::replace(&mut live.has_delayed_screen, true) {
            return Err(Abort::Failed(error));
        }
        tracing::warn!(%error, "macOS ended GPU work that delayed the screen; trying again with smaller submissions");
        live.drop_sequence();
        self.recover();
        Ok(StepOutput::default())
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
        let outcome = self.runner.settle(&mut live).and(outcome);
        let is_intact = outcome.as_ref().err().is_none_or(Abort::is_between_steps);
        let kept = live.take_reusable_sequence().filter(|_| is_intact);
        let is_kept = kept.is_some();
        if let Some(sequence) = kept {
            self.runner.sequences.keep(sequence, live.clear_count);
        }
        if outcome.is_err() {
            self.recover();
        }
        // This call precedes the last event, because a client that receives the event may expect the engine to be free.
        self.queue.finish_running();
        let events = &live.submitted.events;
        match outcome {
            Ok(finish) => {
                let timings = match &live.stage {
                    Stage::Decode(answer) => answer.finish(&self.metrics),
                    Stage::New | Stage::Prefill(_) => Timings::default(),
                };
                let _ = events.send(Event::Done { finish, timings });
                // No client waits for the snapshot.
                if is_kept && let Err(error) = self.runner.sequences.save_newest(&mut self.runner.model) {
                    tracing::warn!(%error, "cannot take a snapshot at the end of the answer; dropping its sequence");
                    self.recover();
                }
            }
            Err(Abort::Disconnected | Abort::StepCancelled) => {}
            Err(Abort::Failed(error)) => {
                tracing::warn!(%error, "request failed");
                let _ = events.send(Event::Failed(error));
            }
        }
    }

    /// Switches to the CPU if an error has made the GPU unusable. The sequences of live requests are then recomputed.
    fn recover(&mut self) {
        if self.runner.recover() {
            self.live.iter_mut().for_each(LiveRequest::drop_sequence);
        }
    }
}

impl<M: Model> Drop for Scheduler<M> {
    /// Fails the waiting requests and closes the prompt cache when the engine's thread ends, even by a panic.
    fn drop(&mut self) {
        self.queue.stop();
        self.runner.sequences.snapshots.close(&mut self.runner.model);
    }
}

#[cfg(test)]
mod tests;
