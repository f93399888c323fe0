//! Memory of requests: bodies, parsed JSON, prompts and tokens, charged to the memory plan.
//!
//! A request gets memory from its [`MemoryPermit`]s before it allocates. A request is refused with 503 if other requests
//! hold the memory, and with 413 if it would not fit even alone. A body waits for the memory of its parsed values, see
//! [`Entrance`]. All estimates of memory are in this file, except those of images.
//! The memory of a step is reserved when its turn comes, so waiting requests do not hold it. If other steps hold the
//! memory, the step lets the next one have its turn, and tries again until they end, for 30 s at most.
//!
//! | stage of a request | holds | and until the step ends |
//! |---|---|---|
//! | body | text, [`parsed_bytes`], in some APIs twice; stored items that it names | |
//! | images, one at a time | also the pixels; the file of a download | memory to read and decode |
//! | prompt | also [`token_bytes`] | [`rendering_bytes`], [`message_bytes`], [`tokenizing_bytes`] |
//! | in the queue, and running | tokens, pixels, tools, other fields | a constant, to compile a format |
//! | answer | also [`answer_bytes`] of a body, [`waiting_bytes`] of a later choice | |
//!
//! Expensive work (parsing, translating, rendering, tokenizing) runs on blocking threads, one or two steps at a time, in
//! order of arrival. A step cannot be cancelled, so steps are short: a disconnected client is noticed after the current step.
//! Output formats are compiled outside these steps, one at a time, because a compilation may take seconds.

use crate::http::{
    ApiError,
    layers::entrance::{self, Entrance, EntrancePlace, LARGE_BYTES},
};
use axum::http::StatusCode;
use moestro_base::{metrics::Metrics, platform::os};
use moestro_chat::{Message, Part, ToolCall};
use parking_lot::{Mutex, RwLock};
use prometheus::IntGauge;
use serde_json::Value;
use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed},
    },
    time::Duration,
};
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore},
    task::spawn_blocking,
    time::Instant,
};

/// Bytes of memory for all requests before the memory plan is known.
const UNPLANNED_BYTES: usize = 128 << 20;

/// Bytes of memory per byte of text during tokenization. The highest measured value is 309, for a text of digits.
const TOKENIZE_FACTOR: usize = 400;

/// Bytes of text that a step may tokenize in the memory that is set aside for the step.
const TOKENIZE_PIECE: usize = 20 << 10;

/// Bytes of memory that are set aside for every step.
const STEP_BYTES: usize = TOKENIZE_FACTOR * TOKENIZE_PIECE;

/// Bytes of memory for requests from which a plan allows two steps at a time instead of one step.
const TWO_STEPS_BYTES: usize = 64 << 20;

/// Bytes of memory per opening bracket, comma and colon of a JSON text that is parsed. The highest measured value is
/// 246, for `[[[0]]]` repeated.
const JSON_VALUE_BYTES: usize = 256;

/// Bytes of memory per byte of text that a chat template renders. See [`rendering_bytes`].
const RENDER_FACTOR: usize = 5;

/// Bytes of memory per node of a stored JSON value.
const STORED_NODE_BYTES: usize = 128;

/// Bytes of memory per token in a JSON list of ids: the digits, a comma, and the spare capacity of the growing text.
const TOKEN_ID_BYTES: usize = 24;

/// Bytes of memory per token in a JSON list that has each token's text. The text is both in memory and in the JSON.
const TOKEN_TEXT_BYTES: usize = 160;

/// Bytes of memory per token in the log-probabilities of a body: the id, the text, and the JSON. The highest measured
/// value is 341, in a chat, whose tokens have `bytes`.
pub const LOGPROB_BYTES: usize = 352;

/// Bytes of memory per token in the log-probabilities of the Responses API: JSON values, and the text of four events. The
/// highest measured value is 1935, without alternatives.
pub const RESPONSES_LOGPROB_BYTES: usize = 2048;

/// Bytes of memory per update of a choice that waits for an earlier choice: the update and the allocations of its lists.
const WAITING_UPDATE_BYTES: usize = 512;

/// Bytes of memory per token in the log-probabilities of an update.
const WAITING_LOGPROB_BYTES: usize = 32;

/// Bytes of memory of a choice that waits until all choices of a body are complete, without its text.
pub const CHOICE_BYTES: usize = 1024;

/// Bytes of memory per byte of an answer's text: the text with its spare capacity, a copy, and up to six characters in
/// JSON.
const ANSWER_TEXT_FACTOR: usize = 9;

/// Bytes of memory per piece of an answer, such as a tool call: its id, and its object in JSON.
const ANSWER_DELTA_BYTES: usize = 1024;

/// Bytes of memory per byte of decoded text: the byte, the text, and up to six characters in JSON.
const DECODED_FACTOR: usize = 16;

/// Maximum number of compilations at the same time: one, and those that have not stopped since their clients disconnected.
const COMPILER_THREADS: usize = 3;

/// Number of freed bytes above which memory is returned to the operating system (a trim).
const TRIM_BYTES: usize = 1 << 20;

/// Delays of the trims after memory was freed. There are two trims, because a response is freed a little after its
/// permit.
const TRIM_DELAYS: [Duration; 2] = [Duration::from_millis(50), Duration::from_millis(400)];

/// Evicts the oldest entry of a cache that uses the memory of requests. Returns false if the cache is empty.
type EvictOldest = Box<dyn Fn() -> bool + Send + Sync>;

/// The memory of all requests.
pub struct RequestMemory {
    /// Caches that use the memory of requests. They are called when a request finds no free memory.
    caches: RwLock<Vec<EvictOldest>>,
    total: AtomicUsize,
    used: AtomicUsize,
    entrance: Arc<Entrance>,
    gauge: IntGauge,
    steps: Arc<Semaphore>,
    /// Number of steps that hold working memory.
    working_steps: Mutex<usize>,
    /// A semaphore with one permit, because output formats are compiled one at a time. A request holds the permit.
    compilations: Arc<Semaphore>,
    /// A thread that compiles holds a permit until it ends, even if the client disconnects.
    compiler_threads: Arc<Semaphore>,
    allows_two_steps: AtomicBool,
    /// Number of bytes freed since the last trim.
    freed: AtomicUsize,
    is_trimming: AtomicBool,
}

impl RequestMemory {
    pub fn new(metrics: &Metrics) -> Arc<Self> {
        Arc::new(Self {
            caches: RwLock::default(),
            total: AtomicUsize::new(UNPLANNED_BYTES),
            used: AtomicUsize::new(0),
            entrance: Entrance::new(entrance::MAX_WAIT),
            gauge: metrics.request_memory.clone(),
            steps: Arc::new(Semaphore::new(1)),
            working_steps: Mutex::new(0),
            compilations: Arc::new(Semaphore::new(1)),
            compiler_threads: Arc::new(Semaphore::new(COMPILER_THREADS)),
            allows_two_steps: AtomicBool::new(false),
            freed: AtomicUsize::new(0),
            is_trimming: AtomicBool::new(false),
        })
    }

    /// Sets the total memory of requests, which the plan of the loaded model has reserved.
    pub fn set_plan(&self, bytes: u64) {
        let bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
        let had_two = self.allows_two_steps.load(Relaxed);
        let has_two = match bytes >= TWO_STEPS_BYTES {
            true if !had_two => {
                self.steps.add_permits(1);
                true
            }
            true => true,
            // If two steps run now, the second step stays allowed until the next plan.
            false => had_two && self.steps.forget_permits(1) == 0,
        };
        self.allows_two_steps.store(has_two, Relaxed);
        let steps = 1 + usize::from(has_two);
        self.total.store(bytes.saturating_sub(steps * STEP_BYTES), Relaxed);
    }

    /// Maximum size of all permits together in bytes.
    pub fn total(&self) -> usize {
        self.total.load(Relaxed)
    }

    /// Size of all permits together in bytes.
    #[cfg(test)]
    pub fn used(&self) -> usize {
        self.used.load(Relaxed)
    }

    /// Maximum memory of the requests that wait in a queue: half, so that running and new requests have the other half.
    pub fn waiting_limit(&self) -> usize {
        self.total() / 2
    }

    /// Adds the function that evicts the oldest entry of a cache.
    pub fn add_cache(&self, evict_oldest: EvictOldest) {
        self.caches.write().push(evict_oldest);
    }

    /// The first permit of a request, without bytes. [`MemoryPermit::reserve`] makes its other permits.
    pub fn permit(self: &Arc<Self>) -> MemoryPermit {
        MemoryPermit::new(self.clone(), Arc::default())
    }

    fn release(self: &Arc<Self>, bytes: usize) {
        // A permit without bytes must not wake requests that wait for memory, which drop such permits.
        if bytes == 0 {
            return;
        }
        self.used.fetch_sub(bytes, Relaxed);
        self.gauge.sub(signed(bytes));
        self.entrance.wake();
        if self.freed.fetch_add(bytes, Relaxed).saturating_add(bytes) > TRIM_BYTES {
            self.trim();
        }
    }

    /// Returns freed memory to the operating system, unless a trim is scheduled already.
    fn trim(self: &Arc<Self>) {
        let Ok(runtime) = tokio::runtime::Handle::try_current() else { return };
        if self.is_trimming.swap(true, Relaxed) {
            return;
        }
        let memory = self.clone();
        runtime.spawn(async move {
            for delay in TRIM_DELAYS {
                tokio::time::sleep(delay).await;
                memory.freed.store(0, Relaxed);
                // The trim is not awaited, because it may take some milliseconds.
                drop(spawn_blocking(os::trim_memory));
            }
            memory.is_trimming.store(false, Relaxed);
            if memory.freed.load(Relaxed) > TRIM_BYTES {
                memory.trim();
            }
        });
    }
}

/// A part of the memory that one request may use. The memory is free again when the permit is dropped and its last step has ended.
pub struct MemoryPermit {
    held: Arc<HeldBytes>,
    /// The request's place among those whose prompts are made.
    entrance_place: Option<EntrancePlace>,
}

/// The working memory of a step.
struct WorkingMemory {
    permit: MemoryPermit,
    /// True if other steps may wait for the memory.
    is_counted: bool,
}

struct HeldBytes {
    memory: Arc<RequestMemory>,
    /// Size of all permits of the request.
    request_bytes: Arc<AtomicUsize>,
    /// Size of the permit. Only [`MemoryPermit`] changes the size. Steps only hold the memory.
    bytes: AtomicUsize,
}

impl MemoryPermit {
    fn new(memory: Arc<RequestMemory>, request_bytes: Arc<AtomicUsize>) -> Self {
        let held = HeldBytes { memory, request_bytes, bytes: AtomicUsize::new(0) };
        Self { held: Arc::new(held), entrance_place: None }
    }

    /// Another permit of the same request, with `bytes`.
    pub fn reserve(&self, bytes: usize) -> Result<Self, ApiError> {
        let mut other = Self::new(self.held.memory.clone(), self.held.request_bytes.clone());
        other.resize(bytes)?;
        Ok(other)
    }

    /// Changes the size of the permit to `bytes`.
    pub fn resize(&mut self, bytes: usize) -> Result<(), ApiError> {
        let HeldBytes { memory, request_bytes, .. } = &*self.held;
        let before = self.bytes();
        let more = bytes.saturating_sub(before);
        if more > 0 {
            let limit = self.limit_with(more)?;
            let fits = |used: usize| used.checked_add(more).filter(|&used| used <= limit);
            while memory.used.fetch_update(Relaxed, Relaxed, fits).is_err() {
                if !memory.caches.read().iter().any(|evict_oldest| evict_oldest()) {
                    return Err(ApiError::memory_in_use());
                }
            }
            request_bytes.fetch_add(more, Relaxed);
            memory.gauge.add(signed(more));
        } else {
            self.held.release(before - bytes);
        }
        self.held.bytes.store(bytes, Relaxed);
        Ok(())
    }

    /// The limit for all requests together if this one needs `more` bytes.
    ///
    /// # Errors
    /// The request would not fit even alone.
    fn limit_with(&self, more: usize) -> Result<usize, ApiError> {
        let total = self.held.memory.total();
        let needed = self.held.request_bytes.load(Relaxed).saturating_add(more);
        let limit = if needed > LARGE_BYTES { total / 4 * 3 } else { total };
        if needed > limit { Err(ApiError::too_much_memory(needed, limit)) } else { Ok(limit) }
    }

    /// Adds `bytes` to the permit.
    pub fn grow(&mut self, bytes: usize) -> Result<(), ApiError> {
        self.resize(self.bytes().saturating_add(bytes))
    }

    /// Adds `bytes` to the permit. Waits until `deadline` while other requests hold the memory.
    pub async fn grow_before(&mut self, bytes: usize, deadline: Instant) -> Result<(), ApiError> {
        let memory = self.held.memory.clone();
        loop {
            let freed = memory.entrance.freed();
            if self.try_grow(bytes)? {
                return Ok(());
            }
            entrance::wait_before(deadline, freed).await?;
        }
    }

    pub fn bytes(&self) -> usize {
        self.held.bytes.load(Relaxed)
    }

    /// Adds `bytes` for a parsed body to the permit. Waits at the [`Entrance`] while other requests hold the memory.
    pub async fn enter(&mut self, bytes: usize) -> Result<(), ApiError> {
        if bytes <= LARGE_BYTES && self.try_grow(bytes)? {
            return Ok(());
        }
        self.limit_with(bytes)?;
        let memory = self.held.memory.clone();
        let entered = memory.entrance.enter(self.bytes(), bytes, || memory.total(), || self.try_grow(bytes)).await?;
        self.entrance_place = Some(entered);
        Ok(())
    }

    /// Lets other requests enter, because the prompt is ready or because the request waits for something else.
    pub fn leave_entrance(&mut self) {
        self.entrance_place = None;
    }

    /// Adds `bytes` to the permit. Returns false if other requests hold the memory.
    fn try_grow(&mut self, bytes: usize) -> Result<bool, ApiError> {
        match self.grow(bytes) {
            Ok(()) => Ok(true),
            Err(error) if error.status == StatusCode::SERVICE_UNAVAILABLE => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Runs one step on a blocking thread when its turn comes. The step needs `working` bytes until it ends. Waits while
    /// other steps hold this memory. If the caller is dropped while the step waits, the step does not start.
    pub async fn run<T: Send + 'static>(
        &self,
        working: usize,
        step: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, ApiError> {
        let started = self.start_step(working).await?;
        self.run_beside_steps(started, step).await
    }

    /// Runs one step as [`MemoryPermit::run`]. The permit keeps as much of the step's memory as `kept` returns.
    pub async fn run_and_keep<T: Send + 'static>(
        &mut self,
        working: usize,
        step: impl FnOnce() -> T + Send + 'static,
        kept: impl FnOnce(&T) -> usize + Send + 'static,
    ) -> Result<T, ApiError> {
        let (working, turn) = self.start_step(working).await?;
        let step = move || {
            let output = step();
            let own = working.end(kept(&output));
            (output, own)
        };
        let (output, own) = self.run_beside_steps(turn, step).await?;
        self.held.bytes.fetch_add(own.held.bytes.swap(0, Relaxed), Relaxed);
        Ok(output)
    }

    /// Waits for a step's turn and memory.
    async fn start_step(&self, working: usize) -> Result<(WorkingMemory, OwnedSemaphorePermit), ApiError> {
        let memory = &self.held.memory;
        let mut deadline = None;
        loop {
            let freed = memory.entrance.freed();
            let turn = turn(&memory.steps).await?;
            if let Some(working) = self.reserve_working(working)? {
                return Ok((working, turn));
            }
            // A step that needs less memory may run first.
            drop(turn);
            let deadline = *deadline.get_or_insert_with(|| memory.entrance.deadline());
            entrance::wait_before(deadline, freed).await?;
        }
    }

    /// Reserves `bytes` for a step. Returns `None` if other steps hold them. Requests that only hold memory and run no
    /// step could wait for each other for ever, so then the memory is refused.
    fn reserve_working(&self, bytes: usize) -> Result<Option<WorkingMemory>, ApiError> {
        let mut steps = self.held.memory.working_steps.lock();
        let mut own = self.reserve(0)?;
        if own.try_grow(bytes)? {
            *steps += usize::from(bytes > 0);
            Ok(Some(WorkingMemory { permit: own, is_counted: bytes > 0 }))
        } else if *steps == 0 {
            Err(ApiError::memory_in_use())
        } else {
            Ok(None)
        }
    }

    /// Runs one compilation, which needs `working` bytes, on a blocking thread when its turn comes. If the caller is
    /// dropped, the next compilation may start, but the thread holds the memory until it ends.
    pub async fn run_compilation<T: Send + 'static>(
        &self,
        working: usize,
        compile: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, ApiError> {
        let _turn = turn(&self.held.memory.compilations).await?;
        let thread = turn(&self.held.memory.compiler_threads).await?;
        let working = self.reserve(working)?;
        self.run_beside_steps((working, thread), compile).await
    }

    /// Runs `work` on a blocking thread at once, beside the steps. The thread holds `guard` and the memory of the permit
    /// until `work` ends, even if the client disconnects.
    pub async fn run_beside_steps<T: Send + 'static>(
        &self,
        guard: impl Send + 'static,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, ApiError> {
        let held = self.held.clone();
        let work = move || {
            let output = work();
            drop(guard);
            (output, held)
        };
        let work = spawn_blocking(work).await;
        let (output, _) = work.map_err(|_| ApiError::failed("The request could not be processed."))?;
        Ok(output)
    }
}

/// Waits for a turn, in order of arrival.
async fn turn(turns: &Arc<Semaphore>) -> Result<OwnedSemaphorePermit, ApiError> {
    turns.clone().acquire_owned().await.map_err(|_| ApiError::failed("The server stops."))
}

impl WorkingMemory {
    /// Ends the step. Returns a permit for `bytes` of its memory.
    fn end(self, bytes: usize) -> MemoryPermit {
        let HeldBytes { memory, request_bytes, bytes: all } = &*self.permit.held;
        let kept = MemoryPermit::new(memory.clone(), request_bytes.clone());
        let bytes = bytes.min(self.permit.bytes());
        all.fetch_sub(bytes, Relaxed);
        kept.held.bytes.store(bytes, Relaxed);
        kept
    }
}

impl Drop for WorkingMemory {
    fn drop(&mut self) {
        let HeldBytes { memory, bytes, .. } = &*self.permit.held;
        // The memory is free before the step no longer counts, so a step that finds no memory knows that it may wait.
        self.permit.held.release(bytes.swap(0, Relaxed));
        *memory.working_steps.lock() -= usize::from(self.is_counted);
    }
}

impl HeldBytes {
    fn release(&self, bytes: usize) {
        self.request_bytes.fetch_sub(bytes, Relaxed);
        self.memory.release(bytes);
    }
}

impl Drop for HeldBytes {
    fn drop(&mut self) {
        self.release(self.bytes.load(Relaxed));
    }
}

fn signed(bytes: usize) -> i64 {
    i64::try_from(bytes).unwrap_or(i64::MAX)
}

/// Memory of parsed JSON, estimated from its text.
pub fn parsed_bytes(json: &[u8]) -> usize {
    let mut values = 0usize;
    let mut in_string = false;
    let mut is_escaped = false;
    for byte in json {
        match byte {
            _ if is_escaped => is_escaped = false,
            b'\\' => is_escaped = in_string,
            b'"' => in_string = !in_string,
            b'[' | b'{' | b',' | b':' if !in_string => values += 1,
            _ => {}
        }
    }
    json.len().saturating_add(values.saturating_mul(JSON_VALUE_BYTES))
}

/// Memory of rendering `values` with a chat template: a copy, the template's values, the output of the template's
/// filters for each text, and the prompt, whose capacity may be twice its length.
pub fn rendering_bytes<'a>(values: impl IntoIterator<Item = &'a Value>) -> usize {
    values.into_iter().map(|value| tree_bytes(value, JSON_VALUE_BYTES, RENDER_FACTOR)).sum()
}

/// Memory of rendering a message, in addition to its images.
pub fn message_bytes<I>(message: &Message<I>) -> usize {
    let Message { content, reasoning, calls, extra, .. } = message;
    let typed = 2 + usize::from(reasoning.is_some()) + usize::from(!calls.is_empty());
    // Fields that the client sent are also in `extra`.
    let nodes = if extra.contains_key("content") { 1 } else { 1 + 2 * typed };
    let part = |part: &Part<I>| match part {
        Part::Text(text) | Part::Tool(text) => text.len(),
        Part::Image(_) => 0,
    };
    let text = content.iter().flat_map(|content| &content.parts).map(part).sum::<usize>()
        + reasoning.as_ref().map_or(0, String::len);
    let extra: usize = extra.iter().map(|field| field_bytes(field, JSON_VALUE_BYTES, RENDER_FACTOR)).sum();
    let calls: usize = calls.iter().map(call_bytes).sum();
    nodes * JSON_VALUE_BYTES + RENDER_FACTOR * text + calls + extra
}

/// Memory of rendering a call. If its arguments are text, the template's values are made beside the parsed values, which
/// takes about a third more memory. Half is counted.
fn call_bytes(call: &ToolCall) -> usize {
    let text = call.0["function"]["arguments"].as_str().unwrap_or_default();
    rendering_bytes([&call.0]) + parsed_bytes(text.as_bytes()) / 2 * 3
}

/// Memory of a JSON value with `node` bytes for each value and each name, and `factor` bytes for each byte of text.
fn tree_bytes(value: &Value, node: usize, factor: usize) -> usize {
    node + match value {
        Value::String(text) => factor * text.len(),
        Value::Array(items) => items.iter().map(|item| tree_bytes(item, node, factor)).sum(),
        Value::Object(fields) => fields.iter().map(|field| field_bytes(field, node, factor)).sum(),
        Value::Null | Value::Bool(_) | Value::Number(_) => 0,
    }
}

fn field_bytes((name, value): (&String, &Value), node: usize, factor: usize) -> usize {
    node + factor * name.len() + tree_bytes(value, node, factor)
}

/// Memory of tokenizing one piece of text, beyond the memory that is set aside for every step.
pub fn tokenizing_bytes(text_len: usize) -> usize {
    text_len.saturating_sub(TOKENIZE_PIECE) * TOKENIZE_FACTOR
}

/// Memory of token ids: one copy in the HTTP server and one copy in the engine.
pub fn token_bytes(tokens: usize) -> usize {
    2 * tokens * size_of::<u32>()
}

/// Memory of a response that lists tokens.
pub fn token_list_bytes(tokens: usize, has_text: bool) -> usize {
    tokens * if has_text { TOKEN_TEXT_BYTES } else { TOKEN_ID_BYTES }
}

/// Memory of an update of a choice that waits for an earlier choice. `logprobs` counts the alternatives, too.
pub fn waiting_bytes(text_len: usize, logprobs: usize) -> usize {
    WAITING_UPDATE_BYTES + text_len + logprobs * WAITING_LOGPROB_BYTES
}

/// Memory of an answer's text until the whole answer is sent. An answer has `deltas` pieces of different kinds, such as
/// tool calls.
pub fn answer_bytes(text_len: usize, deltas: usize) -> usize {
    text_len * ANSWER_TEXT_FACTOR + deltas * ANSWER_DELTA_BYTES
}

/// Memory of a response with decoded text.
pub fn decoded_bytes(text_len: usize) -> usize {
    text_len * DECODED_FACTOR
}

/// Memory of a stored JSON value: its texts and names, and an estimate for each node.
pub fn value_bytes(value: &Value) -> usize {
    tree_bytes(value, STORED_NODE_BYTES, 1)
}

#[cfg(test)]
mod tests;
