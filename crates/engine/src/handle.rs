//! [`Handle`], the public interface of the engine. [`spawn`] starts the thread that owns the model.

use super::{
    answer::TokenRules,
    model_runner::ModelRunner,
    prompt_cache::{DiskCacheOptions, PromptCache, PromptCacheStatus},
    queue::{AdmissionLimits, RequestQueue},
    request::{Events, Request},
    scheduler::Scheduler,
    speculation::{Draft, DraftPolicy, LookupDraft, Speculator},
};
use crate::error::EngineError;
use moestro_base::{metrics::Metrics, platform::os::interactive_thread};
use moestro_model::model::{ImageProcessor, Model};
use std::{io, sync::Arc, thread::JoinHandle, time::Duration};

/// Default of [`Options::max_queue`]: as many as Ollama's default, so that the requests of many clients all wait.
pub const DEFAULT_MAX_QUEUE: usize = 512;

/// Options of the engine.
#[derive(Debug, Clone)]
pub struct Options {
    /// Maximum number of requests that run at the same time.
    pub parallel: usize,
    /// Maximum number of requests that wait while `parallel` requests run.
    pub max_queue: usize,
    /// Maximum of the memory that all waiting requests hold together, in bytes.
    pub max_queue_bytes: usize,
    /// Tokens that end an answer.
    pub eos: Vec<u32>,
    /// Number of ids that are tokens. Ids from this number on only pad the vocabulary and are never sampled.
    pub usable_vocab: usize,
    /// When to use drafts.
    pub speculate: DraftPolicy,
    /// Maximum number of tokens in a draft.
    pub draft_tokens: usize,
    /// Maximum number of bytes of memory for the prompt cache. 0 disables the prompt cache.
    pub prompt_cache: u64,
    /// The disk cache, which keeps snapshots across restarts. `None` disables the disk cache.
    pub disk_cache: Option<DiskCacheOptions>,
    /// Time for which accepted requests may continue after [`Handle::drain`].
    pub grace: Duration,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            parallel: 1,
            max_queue: DEFAULT_MAX_QUEUE,
            max_queue_bytes: usize::MAX,
            eos: Vec::new(),
            usable_vocab: usize::MAX,
            // The server enables drafts. Tests that count forward passes need a policy without drafts.
            speculate: DraftPolicy::Off,
            draft_tokens: 7,
            prompt_cache: 0,
            disk_cache: None,
            grace: Duration::from_secs(5),
        }
    }
}

/// Starts an engine with prompt-lookup drafts. See [`spawn_with`].
pub fn spawn<M: Model>(model: M, options: Options, metrics: Arc<Metrics>) -> io::Result<(Handle, Worker)> {
    spawn_with(model, Box::new(LookupDraft), options, metrics)
}

/// Starts an engine: a thread that owns `model` and `draft`. The thread ends after [`Handle::drain`], or when the last
/// handle is dropped. [`Worker::join`] waits until the thread has ended.
pub fn spawn_with<M: Model>(
    mut model: M,
    draft: Box<dyn Draft<M>>,
    options: Options,
    metrics: Arc<Metrics>,
) -> io::Result<(Handle, Worker)> {
    let info = model.info();
    let cache = Arc::new(PromptCache::new(options.prompt_cache, info.snapshot_size, metrics.clone()));
    cache.set_page_pool(info.pages);
    let limits = AdmissionLimits {
        vocab: info.vocab,
        context: info.context,
        max_queue: options.max_queue,
        max_queue_bytes: options.max_queue_bytes,
        parallel: options.parallel.max(1),
        grace: options.grace,
    };
    let queue = Arc::new(RequestQueue::new(limits, metrics.clone()));
    if let Some(disk) = options.disk_cache.filter(|_| options.prompt_cache > 0) {
        let queue = queue.clone();
        cache.open_disk(disk, info.context, move || queue.wake());
    }
    let queue_guard = Arc::new(CloseOnDrop(queue.clone()));
    let images = info.images;
    let handle = Handle { queue: queue_guard, cache: cache.clone(), images };
    let rules = TokenRules { eos: options.eos, usable_vocab: options.usable_vocab };
    let policy = options.speculate;
    let draft_tokens = options.draft_tokens;
    let thread = std::thread::Builder::new().name("engine".into()).spawn(move || {
        interactive_thread();
        let speculator = Speculator::new(&mut model, draft, policy, draft_tokens, metrics.clone());
        let runner = ModelRunner::new(model, speculator, rules, queue.clone(), cache, metrics.clone());
        Scheduler::new(runner, queue, metrics).run();
    })?;
    Ok((handle, Worker { thread }))
}

/// Queues requests. Clones share the queue. The engine stops when the last clone is dropped.
#[derive(Clone)]
pub struct Handle {
    queue: Arc<CloseOnDrop>,
    cache: Arc<PromptCache>,
    images: Option<Arc<ImageProcessor>>,
}

impl Handle {
    /// Queues `request`. The events of the request arrive on the receiver. Dropping the receiver cancels the request.
    ///
    /// # Errors
    /// `QueueFull`, `Draining` or `Stopped`. `TimedOut` if the deadline has passed. `EmptyPrompt`, `PromptTooLong` or
    /// the model's `TokenOutOfRange` if the prompt is invalid.
    pub fn submit(&self, request: Request) -> Result<Events, EngineError> {
        let cached = if request.may_reuse() { self.cache.prefix_len(&request.cached_prompt().keys()) } else { 0 };
        self.queue.0.push(request, cached)
    }

    /// Maximum number of requests that run at the same time.
    pub fn parallel(&self) -> usize {
        self.queue.0.limits.parallel
    }

    /// The number of running requests, and the number of waiting requests.
    pub fn load(&self) -> (usize, usize) {
        self.queue.0.load()
    }

    /// Prompt length in tokens and time in the queue of the `most` oldest waiting requests, in order of arrival.
    pub fn waiting(&self, most: usize) -> Vec<(usize, Duration)> {
        self.queue.0.waiting(most)
    }

    /// Maximum number of tokens that a prompt and its answer may have together.
    pub fn context(&self) -> usize {
        self.queue.0.limits.context
    }

    /// Size of the vocabulary, including padding. A request with a token id beyond the vocabulary is refused.
    pub fn vocab(&self) -> usize {
        self.queue.0.limits.vocab
    }

    /// The processor that prepares images for the model. `None` if the model accepts only text.
    pub fn images(&self) -> Option<&Arc<ImageProcessor>> {
        self.images.as_ref()
    }

    /// The status of the prompt cache.
    pub fn prompt_cache(&self) -> PromptCacheStatus {
        self.cache.status()
    }

    /// Empties the prompt cache. A running request continues but saves no snapshot.
    pub fn clear_prompt_cache(&self) {
        self.cache.clear();
    }

    /// Stops accepting requests. Accepted requests may continue for [`Options::grace`] and then fail with `Draining`.
    /// The engine stops when no request is left. A second call has no effect.
    pub fn drain(&self) {
        self.queue.0.drain();
    }
}

/// The engine's thread.
pub struct Worker {
    thread: JoinHandle<()>,
}

impl Worker {
    /// Blocks until the engine has stopped and its model is freed.
    ///
    /// # Errors
    /// The engine's thread panicked.
    pub fn join(self) -> Result<(), EngineError> {
        self.thread.join().map_err(|_| EngineError::Stopped)
    }

    pub fn is_finished(&self) -> bool {
        self.thread.is_finished()
    }
}

/// Closes the queue when the last [`Handle`] is dropped, since no request can arrive after that. The engine's thread
/// has its own reference to the queue, without this guard.
struct CloseOnDrop(Arc<RequestQueue>);

impl Drop for CloseOnDrop {
    fn drop(&mut self) {
        self.0.close();
    }
}
