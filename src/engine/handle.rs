//! The door of the engine: a bounded line of requests, first in first out, in front of the one thread that owns the
//! model. Whoever waits in line and goes away leaves the line at once; so does whoever waits too long.

use super::{
    Draft, Event, Events, Lookup, Request, Scheduler, Speculate,
    cache::{Cache, Status, Storage},
};
use crate::{
    error::{EngineError, ModelError},
    metrics::Metrics,
    model::Model,
};
use parking_lot::{Condvar, Mutex, MutexGuard};
use std::{
    collections::VecDeque,
    io,
    sync::Arc,
    thread::JoinHandle,
    time::{Duration, Instant},
};
use tokio::sync::mpsc;

/// The time between two looks at the system's memory while there is nothing to do.
const IDLE: Duration = Duration::from_secs(1);

/// Options of the engine.
#[derive(Debug, Clone)]
pub struct Options {
    /// Requests that may wait beside the one being worked on.
    pub max_queue: usize,
    /// Tokens that end an answer.
    pub eos: Vec<u32>,
    /// Ids from here on are rows that pad the vocabulary: no text belongs to them, so they are never drawn.
    pub usable_vocab: usize,
    /// The use of drafts, and their tokens at most.
    pub speculate: Speculate,
    pub draft_tokens: usize,
    /// Bytes that the prompt cache may take in memory.
    pub prompt_cache: u64,
    /// The disk on which it keeps checkpoints for the next start.
    pub storage: Option<Storage>,
    /// The time that [`Handle::drain`] leaves to requests that were accepted before it.
    pub grace: Duration,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            max_queue: 16,
            eos: Vec::new(),
            usable_vocab: usize::MAX,
            // The server turns it on; tests that count passes want none of it.
            speculate: Speculate::Off,
            draft_tokens: 7,
            prompt_cache: 0,
            storage: None,
            grace: Duration::from_secs(5),
        }
    }
}

/// [`spawn_with`] drafts that are looked up.
pub fn spawn<M: Model>(model: M, options: Options, metrics: Arc<Metrics>) -> io::Result<(Handle, Worker)> {
    spawn_with(model, Box::new(Lookup), options, metrics)
}

/// Starts the thread that owns `model` and `draft`. It ends after [`Handle::drain`], or when the last handle is gone; a
/// [`Worker::join`] waits for that.
pub fn spawn_with<M: Model>(
    model: M,
    draft: Box<dyn Draft<M>>,
    options: Options,
    metrics: Arc<Metrics>,
) -> io::Result<(Handle, Worker)> {
    let info = model.info();
    let cache = Arc::new(Cache::new(options.prompt_cache, info.snapshot_size, metrics.clone()));
    cache.share_pages(info.pages);
    if let Some(storage) = options.storage.as_ref().filter(|_| options.prompt_cache > 0) {
        cache.store_in(storage);
    }
    let line = Arc::new(RequestQueue {
        queue: Mutex::default(),
        changed: Condvar::new(),
        limits: Limits { vocab: info.vocab, context: info.context, max_queue: options.max_queue, grace: options.grace },
        cache,
        metrics,
    });
    let door = Arc::new(Door(line.clone()));
    let thread = std::thread::Builder::new()
        .name("engine".into())
        .spawn(move || Scheduler::new(model, draft, options, line).run())?;
    Ok((Handle { door }, Worker { thread }))
}

/// Queues requests. Clones share the line; the engine stops when the last one is dropped.
#[derive(Clone)]
pub struct Handle {
    door: Arc<Door>,
}

impl Handle {
    /// Puts `request` at the end of the line; its events arrive on the receiver, and dropping that cancels it.
    ///
    /// Refuses with `QueueFull`, `Draining`, `Stopped` or, if its time is up, `TimedOut`; with `EmptyPrompt`, `PromptTooLong` or a model's
    /// `TokenOutOfRange` where the prompt can never be evaluated.
    pub fn submit(&self, request: Request) -> Result<Events, EngineError> {
        let line = &self.door.0;
        line.limits.admit(&request)?;
        let arrived = Instant::now();
        if request.deadline.is_some_and(|deadline| arrived >= deadline) {
            return Err(EngineError::TimedOut);
        }
        let (sender, events) = mpsc::unbounded_channel();

        let mut queue = line.queue.lock();
        match queue.phase {
            Phase::Open => {}
            Phase::Draining { .. } => return Err(EngineError::Draining),
            Phase::Stopped => return Err(EngineError::Stopped),
        }
        line.sweep(&mut queue);
        if queue.waiting.len() + usize::from(queue.running) > line.limits.max_queue {
            return Err(EngineError::QueueFull);
        }
        queue.waiting.push_back(Job { request, events: sender, arrived });
        line.count(&queue);
        line.changed.notify_one();
        Ok(events)
    }

    /// Requests being worked on (0 or 1) and requests waiting.
    pub fn load(&self) -> (usize, usize) {
        let queue = self.door.0.queue.lock();
        (usize::from(queue.running), queue.waiting.len())
    }

    /// The waiting requests in line: the tokens of the prompt, and the time since it came.
    pub fn waiting(&self) -> Vec<(usize, Duration)> {
        let queue = self.door.0.queue.lock();
        queue.waiting.iter().map(|job| (job.request.ids.len(), job.arrived.elapsed())).collect()
    }

    /// The most tokens a prompt and its answer may have together.
    pub fn context(&self) -> usize {
        self.door.0.limits.context
    }

    /// Ids below this are tokens or padding; anything else is refused.
    pub fn vocab(&self) -> usize {
        self.door.0.limits.vocab
    }

    /// The bytes and checkpoints of the prompt cache.
    pub fn prompt_cache(&self) -> Status {
        self.door.0.cache.status()
    }

    /// Empties the prompt cache. A request that is running goes on and leaves nothing.
    pub fn clear_prompt_cache(&self) {
        self.door.0.cache.clear();
    }

    /// Accepts nothing more. Accepted requests go on for [`Options::grace`] and then end with `Draining`; the engine
    /// stops as soon as nothing is left. A second call changes nothing.
    pub fn drain(&self) {
        self.door.0.drain();
    }
}

/// The engine's thread.
pub struct Worker {
    thread: JoinHandle<()>,
}

impl Worker {
    /// Waits until the engine has stopped and its model is freed. Blocks; an `Err` says that its thread panicked.
    pub fn join(self) -> Result<(), EngineError> {
        self.thread.join().map_err(|_| EngineError::Stopped)
    }

    pub fn is_finished(&self) -> bool {
        self.thread.is_finished()
    }
}

/// A request in line.
pub(super) struct Job {
    pub request: Request,
    pub events: mpsc::UnboundedSender<Event>,
    pub arrived: Instant,
}

impl Job {
    /// The reason to end the request now, if there is one.
    pub fn over(&self, drained: Option<Instant>) -> Option<Over> {
        if self.events.is_closed() {
            return Some(Over::Gone);
        }
        let now = Instant::now();
        if drained.is_some_and(|deadline| now >= deadline) {
            return Some(Over::Failed(EngineError::Draining));
        }
        if self.request.deadline.is_some_and(|deadline| now >= deadline) {
            return Some(Over::Failed(EngineError::TimedOut));
        }
        None
    }
}

/// The end of a request before that of its answer.
#[derive(Debug)]
pub(super) enum Over {
    /// Nobody listens any more.
    Gone,
    /// Nor did anybody in the middle of a step, while others waited: the session is of no use.
    GivenUp,
    Failed(EngineError),
}

impl From<EngineError> for Over {
    fn from(error: EngineError) -> Self {
        Over::Failed(error)
    }
}

impl From<ModelError> for Over {
    fn from(error: ModelError) -> Self {
        match error {
            ModelError::GivenUp => Over::GivenUp,
            error => Over::Failed(error.into()),
        }
    }
}

/// The state that handles and the engine's thread share. The lock is held for moments only, never across a
/// forward pass.
pub(super) struct RequestQueue {
    queue: Mutex<Queue>,
    changed: Condvar,
    limits: Limits,
    pub metrics: Arc<Metrics>,
    pub cache: Arc<Cache>,
}

#[derive(Default)]
struct Queue {
    waiting: VecDeque<Job>,
    running: bool,
    phase: Phase,
}

#[derive(Default, Clone, Copy)]
enum Phase {
    #[default]
    Open,
    /// Nothing more is accepted; at `deadline`, if there is one, the remaining requests end.
    Draining {
        deadline: Option<Instant>,
    },
    Stopped,
}

struct Limits {
    vocab: usize,
    context: usize,
    max_queue: usize,
    grace: Duration,
}

impl Limits {
    fn admit(&self, request: &Request) -> Result<(), EngineError> {
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

impl RequestQueue {
    /// The next request, or `None` when there will be none any more. Blocks; `idle` is called from time to time meanwhile.
    pub fn next(&self, idle: &mut dyn FnMut()) -> Option<Job> {
        let mut queue = self.queue.lock();
        loop {
            queue.running = false;
            self.sweep(&mut queue);
            if let Some(job) = queue.waiting.pop_front() {
                queue.running = true;
                self.count(&queue);
                return Some(job);
            }
            self.count(&queue);
            if !matches!(queue.phase, Phase::Open) {
                return None;
            }
            if self.changed.wait_for(&mut queue, IDLE).timed_out() {
                MutexGuard::unlocked(&mut queue, &mut *idle);
            }
        }
    }

    /// The running request is over.
    pub fn leave(&self) {
        let mut queue = self.queue.lock();
        queue.running = false;
        self.count(&queue);
    }

    /// Between two steps of the running request: lets go of those in line that are over, and says whether `job` is.
    pub fn check(&self, job: &Job) -> Result<(), Over> {
        let mut queue = self.queue.lock();
        self.sweep(&mut queue);
        self.count(&queue);
        job.over(queue.deadline()).map_or(Ok(()), Err)
    }

    /// In the middle of a step: true if nobody listens to the running `job` any more while another one waits. Without one, the step
    /// is worth ending: the client may ask again, and goes on from there.
    pub fn unwanted(&self, job: &Job) -> bool {
        job.events.is_closed() && self.queue.lock().waiting.iter().any(|other| !other.events.is_closed())
    }

    fn drain(&self) {
        let mut queue = self.queue.lock();
        if !matches!(queue.phase, Phase::Draining { deadline: Some(_) } | Phase::Stopped) {
            queue.phase = Phase::Draining { deadline: Some(Instant::now() + self.limits.grace) };
        }
        self.changed.notify_all();
    }

    /// The engine's thread ends: whoever is still in line learns it. One that was drained stays so: a request that was let in
    /// before and comes late may be sent again elsewhere.
    pub fn stop(&self) {
        let mut queue = self.queue.lock();
        let drained = matches!(queue.phase, Phase::Draining { .. });
        if !drained {
            queue.phase = Phase::Stopped;
        }
        queue.running = false;
        for job in queue.waiting.drain(..) {
            let why = if drained { EngineError::Draining } else { EngineError::Stopped };
            let _ = job.events.send(Event::Failed(why));
        }
        self.count(&queue);
    }

    fn sweep(&self, queue: &mut Queue) {
        let deadline = queue.deadline();
        queue.waiting.retain(|job| match job.over(deadline) {
            None => true,
            Some(Over::Gone | Over::GivenUp) => false,
            Some(Over::Failed(error)) => {
                let _ = job.events.send(Event::Failed(error));
                false
            }
        });
    }

    fn count(&self, queue: &Queue) {
        self.metrics.requests_running.set(i64::from(queue.running));
        self.metrics.requests_queued.set(queue.waiting.len() as i64);
    }
}

impl Queue {
    fn deadline(&self) -> Option<Instant> {
        match self.phase {
            Phase::Draining { deadline } => deadline,
            _ => None,
        }
    }
}

/// Held by the handles alone: when the last of them goes, nobody can come any more, so the engine finishes what was
/// accepted and stops.
struct Door(Arc<RequestQueue>);

impl Drop for Door {
    fn drop(&mut self) {
        let mut queue = self.0.queue.lock();
        if matches!(queue.phase, Phase::Open) {
            queue.phase = Phase::Draining { deadline: None };
        }
        self.0.changed.notify_all();
    }
}
