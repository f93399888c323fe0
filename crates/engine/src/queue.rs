//! The bounded request queue between the handles and the engine's thread. Clients get equal parts of the time, see
//! [`turns`](super::turns). Requests of one client run in the order of arrival. If the queue is full, it gives up requests
//! of the client that has most for those of others, see [`fair_share`](super::fair_share).
//!
//! If the client of a queued request disconnects, or its deadline passes, the request is removed and never runs.

use super::{
    abort::Abort,
    fair_share::{QueueLimits, QueueShare, retry_seconds},
    request::{Event, Events, Request},
    turns::{Arrival, Turns},
};
use crate::error::EngineError;
use moestro_base::metrics::Metrics;
use moestro_model::error::ModelError;
use parking_lot::{Condvar, Mutex, MutexGuard};
use std::{
    collections::VecDeque,
    sync::Arc,
    time::{Duration, Instant},
};
use tokio::sync::mpsc;

/// Interval at which an idle engine checks for memory pressure.
const IDLE_INTERVAL: Duration = Duration::from_secs(1);

/// A request that waits in the queue or runs, and the channel for its events.
pub(super) struct SubmittedRequest {
    pub request: Request,
    pub events: mpsc::UnboundedSender<Event>,
    pub arrived: Instant,
    arrival: Arrival,
}

impl SubmittedRequest {
    /// The reason to end the request at the time `now`. `None` if the request may continue. `drain_deadline` is the end of
    /// a draining engine's grace period.
    fn abort_reason(&self, now: Instant, drain_deadline: Option<Instant>) -> Option<Abort> {
        if self.events.is_closed() {
            return Some(Abort::Disconnected);
        }
        let passed = |deadline: Option<Instant>| deadline.is_some_and(|deadline| now >= deadline);
        if passed(drain_deadline) {
            return Some(Abort::Failed(EngineError::Draining));
        }
        passed(self.request.deadline).then_some(Abort::Failed(EngineError::TimedOut))
    }

    fn share(&self) -> QueueShare {
        QueueShare { client: self.request.client, bytes: self.request.waiting_bytes }
    }
}

/// Limits that a request must meet to be queued.
pub(super) struct AdmissionLimits {
    pub vocab: usize,
    pub context: usize,
    /// Maximum number of requests that wait while `parallel` requests run.
    pub max_queue: usize,
    /// Maximum of the memory that all waiting requests hold together, in bytes.
    pub max_queue_bytes: usize,
    /// Maximum number of requests that run at the same time.
    pub parallel: usize,
    /// Time for which accepted requests may continue after [`RequestQueue::drain`].
    pub grace: Duration,
}

impl AdmissionLimits {
    fn check(&self, request: &Request) -> Result<(), EngineError> {
        let prompt = request.ids.len();
        if prompt == 0 {
            return Err(EngineError::EmptyPrompt);
        }
        if prompt > self.context {
            return Err(EngineError::PromptTooLong { prompt, context: self.context });
        }
        match request.ids.iter().find(|&&id| id as usize >= self.vocab) {
            Some(&id) => Err(ModelError::TokenOutOfRange { id, vocab: self.vocab }.into()),
            None => Ok(()),
        }
    }
}

/// The queue. The queue's lock is never held during a forward pass.
pub(super) struct RequestQueue {
    queue: Mutex<QueueState>,
    changed: Condvar,
    pub limits: AdmissionLimits,
    metrics: Arc<Metrics>,
}

#[derive(Default)]
struct QueueState {
    /// In order of arrival.
    waiting: VecDeque<SubmittedRequest>,
    running: usize,
    /// True if an idle engine has work other than requests.
    is_woken: bool,
    turns: Turns,
    phase: QueuePhase,
}

#[derive(Default, Clone, Copy)]
enum QueuePhase {
    #[default]
    Open,
    /// The queue accepts no more requests. If `deadline` is set, the remaining requests fail at that time.
    Draining {
        deadline: Option<Instant>,
    },
    Stopped,
}

impl RequestQueue {
    pub fn new(limits: AdmissionLimits, metrics: Arc<Metrics>) -> Self {
        Self { queue: Mutex::default(), changed: Condvar::new(), limits, metrics }
    }

    /// Appends a request, of whose prompt `cached` tokens are cached. The events of the request arrive on the returned
    /// receiver. If the queue is full, the request or waiting requests of another client fail with `QueueFull`.
    pub fn push(&self, request: Request, cached: usize) -> Result<Events, EngineError> {
        self.limits.check(&request)?;
        let arrived = Instant::now();
        if request.deadline.is_some_and(|deadline| arrived >= deadline) {
            return Err(EngineError::TimedOut);
        }
        let (sender, events) = mpsc::unbounded_channel();
        let mut queue = self.queue.lock();
        match queue.phase {
            QueuePhase::Open => {}
            QueuePhase::Draining { .. } => return Err(EngineError::Draining),
            QueuePhase::Stopped => return Err(EngineError::Stopped),
        }
        self.remove_aborted(&mut queue);
        let arrival = queue.turns.arrive(request.client, request.ids.len().saturating_sub(cached));
        let submitted = SubmittedRequest { request, events: sender, arrived, arrival };
        self.make_room(&mut queue, submitted.share())?;
        queue.waiting.push_back(submitted);
        self.update_metrics(&queue);
        self.changed.notify_one();
        Ok(events)
    }

    /// Takes the next request from the queue if `fits` accepts it in addition to the running requests. If no request
    /// runs, `fits` is not called. If no request runs and the queue is empty, blocks and calls `idle` once per
    /// [`IDLE_INTERVAL`] and after [`RequestQueue::wake`].
    ///
    /// Returns `None` if the next request does not fit, if the queue is empty while requests run, or if it is empty and
    /// closed.
    pub fn next(&self, fits: &dyn Fn(&Request) -> bool, idle: &mut dyn FnMut()) -> Option<SubmittedRequest> {
        let mut queue = self.queue.lock();
        loop {
            self.remove_aborted(&mut queue);
            let next = queue.take_next(fits);
            self.update_metrics(&queue);
            if next.is_some() || queue.running > 0 || !matches!(queue.phase, QueuePhase::Open) {
                return next;
            }
            if queue.is_woken || self.changed.wait_for(&mut queue, IDLE_INTERVAL).timed_out() {
                queue.is_woken = false;
                MutexGuard::unlocked(&mut queue, &mut *idle);
            }
        }
    }

    /// Makes [`RequestQueue::next`] call `idle`.
    pub fn wake(&self) {
        self.queue.lock().is_woken = true;
        self.changed.notify_one();
    }

    /// Marks a running request as finished.
    pub fn finish_running(&self) {
        let mut queue = self.queue.lock();
        queue.running = queue.running.saturating_sub(1);
        self.update_metrics(&queue);
    }

    /// Removes aborted requests from the queue. Then returns an error if `running` must end. Called between steps.
    pub fn check(&self, running: &SubmittedRequest) -> Result<(), Abort> {
        let mut queue = self.queue.lock();
        self.remove_aborted(&mut queue);
        self.update_metrics(&queue);
        running.abort_reason(Instant::now(), queue.deadline()).map_or(Ok(()), Err)
    }

    /// True if the running step should be cancelled: the step's client has disconnected, and another request runs or
    /// waits. The step evaluates the prompt up to position `end`.
    ///
    /// Without other requests the step is completed, since the client may repeat the request and reuse the state. It is
    /// also completed if a waiting request continues the same tokens.
    pub fn should_cancel_step(&self, running: &SubmittedRequest, end: usize) -> bool {
        running.events.is_closed() && {
            let queue = self.queue.lock();
            let mut waiting = queue.open().peekable();
            let is_needed = queue.running > 1 || waiting.peek().is_some();
            is_needed && !waiting.any(|other| running.request.shares_prefix(&other.request, end))
        }
    }

    /// The number of running requests, and the number of waiting requests.
    pub fn load(&self) -> (usize, usize) {
        let queue = self.queue.lock();
        (queue.running, queue.open().count())
    }

    /// Prompt length in tokens and time in the queue of the `most` oldest waiting requests, in order of arrival.
    pub fn waiting(&self, most: usize) -> Vec<(usize, Duration)> {
        let queue = self.queue.lock();
        queue.open().take(most).map(|waiting| (waiting.request.ids.len(), waiting.arrived.elapsed())).collect()
    }

    /// Accepts no more requests. Accepted requests fail at the end of the grace period.
    pub fn drain(&self) {
        let mut queue = self.queue.lock();
        if !matches!(queue.phase, QueuePhase::Draining { deadline: Some(_) } | QueuePhase::Stopped) {
            queue.phase = QueuePhase::Draining { deadline: Some(Instant::now() + self.limits.grace) };
        }
        self.changed.notify_all();
    }

    /// Accepts no more requests. Accepted requests run to their end.
    pub fn close(&self) {
        let mut queue = self.queue.lock();
        if matches!(queue.phase, QueuePhase::Open) {
            queue.phase = QueuePhase::Draining { deadline: None };
        }
        self.changed.notify_all();
    }

    /// Fails all waiting requests because the engine's thread ends. A drained queue keeps reporting `Draining`, so that
    /// a router sends the request to another server.
    pub fn stop(&self) {
        let mut queue = self.queue.lock();
        let drained = matches!(queue.phase, QueuePhase::Draining { .. });
        if !drained {
            queue.phase = QueuePhase::Stopped;
        }
        queue.running = 0;
        for waiting in queue.waiting.drain(..) {
            let error = if drained { EngineError::Draining } else { EngineError::Stopped };
            let _ = waiting.events.send(Event::Failed(error));
        }
        self.update_metrics(&queue);
    }

    /// Gives up waiting requests for a new request with this share if the queue is full, or refuses the new request.
    fn make_room(&self, queue: &mut QueueState, new: QueueShare) -> Result<(), EngineError> {
        let AdmissionLimits { max_queue, max_queue_bytes, parallel, .. } = self.limits;
        let requests = (max_queue + parallel).saturating_sub(queue.running);
        let waiting: Vec<_> = queue.waiting.iter().map(SubmittedRequest::share).collect();
        let room = QueueLimits { requests, bytes: max_queue_bytes }.make_room(&waiting, new);
        let longest = queue.waiting.front().map(|oldest| oldest.arrived.elapsed()).unwrap_or_default();
        let full = || EngineError::QueueFull { retry_seconds: retry_seconds(waiting.len(), longest) };
        let given_up = room.ok_or_else(full)?;
        for given_up in given_up.into_iter().rev().filter_map(|index| queue.waiting.remove(index)) {
            let _ = given_up.events.send(Event::Failed(full()));
        }
        Ok(())
    }

    fn remove_aborted(&self, queue: &mut QueueState) {
        let now = Instant::now();
        let deadline = queue.deadline();
        queue.waiting.retain(|waiting| match waiting.abort_reason(now, deadline) {
            None => true,
            Some(Abort::Disconnected | Abort::StepCancelled) => false,
            Some(Abort::Failed(error)) => {
                let _ = waiting.events.send(Event::Failed(error));
                false
            }
        });
    }

    fn update_metrics(&self, queue: &QueueState) {
        self.metrics.requests_running.set(queue.running as i64);
        self.metrics.requests_queued.set(queue.waiting.len() as i64);
    }
}

impl QueueState {
    /// The waiting requests whose clients have not disconnected.
    fn open(&self) -> impl Iterator<Item = &SubmittedRequest> {
        self.waiting.iter().filter(|waiting| !waiting.events.is_closed())
    }

    /// Takes the next request, if it fits.
    fn take_next(&mut self, fits: &dyn Fn(&Request) -> bool) -> Option<SubmittedRequest> {
        let arrivals: Vec<_> = self.waiting.iter().map(|waiting| &waiting.arrival).collect();
        let index = self.turns.next(&arrivals)?;
        if self.running > 0 && !fits(&self.waiting[index].request) {
            return None;
        }
        self.turns.take(&arrivals, index);
        self.running += 1;
        self.waiting.remove(index)
    }

    fn deadline(&self) -> Option<Instant> {
        match self.phase {
            QueuePhase::Draining { deadline } => deadline,
            _ => None,
        }
    }
}
