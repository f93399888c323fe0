//! Per-request log line, request id and counters. The log line of an answer is a sentence, with the same facts as
//! fields.
//!
//! A [`RequestLog`] lives as long as the response body and writes its line when it is dropped, so requests of
//! disconnected clients are logged, too. The log never contains text of a message.

use super::{
    auth,
    timeouts::{Timeouts, with_deadline},
};
use crate::http::{ServerState, health::StorageHealth, quote, routes};
use axum::{
    Extension,
    extract::{Request, State},
    http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode},
    middleware::Next,
    response::{IntoResponse, Response},
};
use moestro_base::metrics::Metrics;
use moestro_engine::ClientId;
use std::{
    fmt::{self, Display, Formatter},
    hash::{BuildHasher, Hash, RandomState},
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

pub static REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// Header with the number of images of the request that were replaced by a sentence. A stream that begins before the
/// model is loaded does not have this header.
pub static IMAGES_NOT_SHOWN: HeaderName = HeaderName::from_static("x-moestro-images-not-shown");

/// Header with the number of tools that the prompt has because of `--reuse-tools`. A stream that begins before the
/// model is loaded does not have this header.
pub static REUSED_TOOLS: HeaderName = HeaderName::from_static("x-moestro-reused-tools");

/// Status of a request whose client disconnected before the response began. nginx uses the same status.
const CLIENT_CLOSED_REQUEST: u16 = 499;

/// Log target of the request lines.
pub const TARGET: &str = "moestro::request";

pub struct RequestLog {
    pub metrics: Arc<Metrics>,
    pub storage_health: Arc<StorageHealth>,
    method: Method,
    path: String,
    /// Label of the route in the metrics.
    endpoint: &'static str,
    id: String,
    /// Numbers that identify the client by its address and its API key.
    address: Option<u64>,
    key: u64,
    start: Instant,
    pub deadline: Option<Instant>,
    /// Longest time of a stream without an event, see [`Timeouts::event`].
    pub event_interval: Duration,
    status: OnceLock<StatusCode>,
    /// True if a stream began and has not finished.
    is_streaming: AtomicBool,
    is_generation: AtomicBool,
    prompt_tokens: AtomicUsize,
    cached_tokens: AtomicUsize,
    completion_tokens: AtomicUsize,
    first_token: OnceLock<Instant>,
    /// Number of images that were replaced by a sentence.
    images_not_shown: AtomicUsize,
    /// Number of tools that the request got from an earlier request.
    reused_tools: AtomicUsize,
}

impl RequestLog {
    fn new(metrics: Arc<Metrics>, storage_health: Arc<StorageHealth>, request: &Request) -> Self {
        let path = request.uri().path();
        Self {
            metrics,
            storage_health,
            method: request.method().clone(),
            path: quote(path).into_owned(),
            endpoint: routes::endpoint(path),
            id: client_id(request.headers()).unwrap_or_else(|| format!("req_{}", unique_id())),
            address: auth::client_address(request),
            key: auth::client_hash(request),
            start: Instant::now(),
            deadline: None,
            event_interval: Timeouts::default().event,
            status: OnceLock::new(),
            is_streaming: AtomicBool::new(false),
            is_generation: AtomicBool::new(false),
            prompt_tokens: AtomicUsize::new(0),
            cached_tokens: AtomicUsize::new(0),
            completion_tokens: AtomicUsize::new(0),
            first_token: OnceLock::new(),
            images_not_shown: AtomicUsize::new(0),
            reused_tools: AtomicUsize::new(0),
        }
    }

    /// Identifies the client of the request. `user` is the user that the client names.
    pub fn client(&self, user: impl Hash) -> ClientId {
        ClientId::new(self.address, self.key, user)
    }

    /// Identifies the client's API key.
    pub fn key(&self) -> u64 {
        self.key
    }

    pub fn is_late(&self) -> bool {
        self.deadline.is_some_and(|deadline| Instant::now() >= deadline)
    }

    /// Counts this request in `moestro_request_seconds`.
    pub fn mark_generation(&self) {
        self.is_generation.store(true, Relaxed);
    }

    pub fn add_tokens(&self, prompt: usize, completion: usize) {
        self.prompt_tokens.fetch_add(prompt, Relaxed);
        self.completion_tokens.fetch_add(completion, Relaxed);
    }

    /// Counts tokens of the prompt that were not computed, because a snapshot had them.
    pub fn add_cached_tokens(&self, cached: usize) {
        self.cached_tokens.fetch_add(cached, Relaxed);
    }

    /// The first call sets the time of the first generated token.
    pub fn mark_token(&self) {
        self.first_token.get_or_init(Instant::now);
    }

    /// Counts an image that was replaced by a sentence. The header [`IMAGES_NOT_SHOWN`] has the count.
    pub fn add_image_not_shown(&self) {
        self.images_not_shown.fetch_add(1, Relaxed);
    }

    /// Logs that the prompt has tools of an earlier request. The header [`REUSED_TOOLS`] has their number.
    pub fn set_reused_tools(&self, tools: usize) {
        self.reused_tools.store(tools, Relaxed);
        tracing::info!(
            id = self.id,
            endpoint = self.endpoint,
            tools,
            "request without tools continues a conversation with tools: its prompt has these tools, calls are forbidden"
        );
    }

    /// Marks the response as a stream. The log line says "cut short" unless [`RequestLog::end_stream`] follows.
    pub fn begin_stream(&self) {
        self.is_streaming.store(true, Relaxed);
    }

    pub fn end_stream(&self) {
        self.is_streaming.store(false, Relaxed);
    }

    /// Logs an error that ended a stream early.
    pub fn log_stream_error(&self, error: &str) {
        tracing::error!(id = self.id, endpoint = self.endpoint, error, "request failed after its stream began");
    }
}

/// The human-readable log line of a request.
struct RequestSentence<'a> {
    log: &'a RequestLog,
    status: u16,
}

impl Display for RequestSentence<'_> {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let Self { log, status } = self;
        let counts = [&log.prompt_tokens, &log.cached_tokens, &log.completion_tokens];
        let [prompt, cached, completion] = counts.map(|tokens| tokens.load(Relaxed));
        if prompt == 0 {
            write!(f, "{} {} {status}, {:.0} ms", log.method, log.path, log.start.elapsed().as_secs_f64() * 1e3)?;
        } else {
            let kind = match log.endpoint {
                "/v1/chat/completions" => "chat",
                "/v1/completions" => "completion",
                "/v1/messages" => "message",
                "/v1/responses" => "response",
                other => other,
            };
            write!(f, "{kind} {prompt} ")?;
            if cached > 0 {
                write!(f, "({cached} cached) ")?;
            }
            write!(f, "-> {completion} tokens, ")?;
            if let Some(first) = log.first_token.get() {
                write!(f, "{:.2} s to first, ", first.duration_since(log.start).as_secs_f64())?;
                let seconds = first.elapsed().as_secs_f64();
                if completion > 1 && seconds > 0.0 {
                    write!(f, "{:.0} tok/s, ", (completion - 1) as f64 / seconds)?;
                }
            }
            write!(f, "{status}")?;
        }
        if log.is_streaming.load(Relaxed) { write!(f, ", cut short") } else { Ok(()) }
    }
}

impl Drop for RequestLog {
    fn drop(&mut self) {
        let status = self.status.get().map_or(CLIENT_CLOSED_REQUEST, StatusCode::as_u16);
        let seconds = self.start.elapsed().as_secs_f64();
        self.metrics.record_request(self.endpoint, status);
        if self.is_generation.load(Relaxed) {
            self.metrics.request_seconds.observe(seconds);
        }
        let sentence = RequestSentence { log: self, status };
        macro_rules! log {
            ($level:ident) => {
                tracing::$level!(
                    target: TARGET,
                    method = %self.method,
                    path = self.path,
                    status,
                    ms = (seconds * 1e4).round() / 10.0,
                    prompt_tokens = self.prompt_tokens.load(Relaxed),
                    cached_tokens = self.cached_tokens.load(Relaxed),
                    completion_tokens = self.completion_tokens.load(Relaxed),
                    cut_short = self.is_streaming.load(Relaxed),
                    id = self.id,
                    "{sentence}"
                )
            };
        }
        // The level is debug, because the chat page in a browser and monitoring systems poll every few seconds. While a
        // model is loaded, the status of `/health` is 503.
        let is_poll = self.method == Method::GET && (status < 400 || self.endpoint == "/health");
        if is_poll { log!(debug) } else { log!(info) }
    }
}

/// Outermost layer: gives the request an id and a [`RequestLog`].
pub async fn log_request(State(state): State<Arc<ServerState>>, mut request: Request, next: Next) -> Response {
    let mut log = RequestLog::new(state.metrics.clone(), state.storage_health.clone(), &request);
    log.event_interval = state.timeouts.event;
    log.deadline = state.models.timeouts().request.and_then(|limit| log.start.checked_add(limit));
    let log = Arc::new(log);
    request.extensions_mut().insert(log.clone());
    let mut response = next.run(request).await;
    let _ = log.status.set(response.status());
    if let Ok(id) = HeaderValue::from_str(&log.id) {
        response.headers_mut().insert(REQUEST_ID.clone(), id);
    }
    for (name, count) in [(&IMAGES_NOT_SHOWN, &log.images_not_shown), (&REUSED_TOOLS, &log.reused_tools)] {
        let count = count.load(Relaxed);
        if count > 0 {
            response.headers_mut().insert(name.clone(), count.into());
        }
    }
    response
}

/// Ends a request whose deadline passes before its response begins. The engine ends a stream that has begun.
pub async fn enforce_deadline(Extension(log): Extension<Arc<RequestLog>>, request: Request, next: Next) -> Response {
    with_deadline(log.deadline, next.run(request)).await.unwrap_or_else(IntoResponse::into_response)
}

/// The client's own request id, if it is short and printable.
fn client_id(headers: &HeaderMap) -> Option<String> {
    let id = headers.get(&REQUEST_ID)?.to_str().ok()?;
    let is_printable = !id.is_empty() && id.len() <= 128 && id.bytes().all(|byte| byte.is_ascii_graphic());
    is_printable.then(|| id.to_owned())
}

/// 24 hexadecimal digits that are unique in this process and very likely unique among all processes.
pub fn unique_id() -> String {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    static KEYS: OnceLock<RandomState> = OnceLock::new();
    let count = COUNT.fetch_add(1, Relaxed);
    format!("{:016x}{:08x}", KEYS.get_or_init(RandomState::new).hash_one(count), count as u32)
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::body::Body;

    fn log_line(events: impl FnOnce(&RequestLog)) -> String {
        log_line_of(Method::POST, "/v1/messages", events)
    }

    /// The log line of a request during which `events` happens.
    fn log_line_of(method: Method, path: &str, events: impl FnOnce(&RequestLog)) -> String {
        let file = tempfile::NamedTempFile::new().unwrap();
        let writer = file.reopen().unwrap();
        let subscriber = tracing_subscriber::fmt().with_ansi(false).with_writer(move || writer.try_clone().unwrap());
        let request = Request::builder().method(method).uri(path).body(Body::empty()).unwrap();
        let log = RequestLog::new(Metrics::new("0", "cpu"), Arc::default(), &request);
        log.status.set(StatusCode::OK).unwrap();
        tracing::subscriber::with_default(subscriber.finish(), || {
            events(&log);
            drop(log);
        });
        std::fs::read_to_string(file.path()).unwrap()
    }

    #[test]
    fn unfinished_stream_is_cut_short() {
        let finished = log_line(|log| {
            log.begin_stream();
            log.end_stream();
        });
        assert!(finished.contains("cut_short=false"), "{finished}");
        let unfinished = log_line(|log| log.begin_stream());
        assert!(unfinished.contains("cut_short=true"), "{unfinished}");
        let body = log_line(|_| ());
        assert!(body.contains("cut_short=false"), "{body}");
    }

    #[test]
    fn answer_is_one_sentence() {
        let line = log_line_of(Method::POST, "/v1/chat/completions", |log| {
            log.add_tokens(18, 0);
            log.mark_token();
            log.add_tokens(0, 30);
        });
        // The times depend on the machine.
        let between = |line: &str, start: &str, end: &str| -> Option<String> {
            Some(line.split_once(start)?.1.split_once(end)?.0.to_owned())
        };
        let to_first = between(&line, "moestro::request: chat 18 -> 30 tokens, ", " s to first, ");
        let (seconds, hundredths) = to_first.as_ref().and_then(|time| time.split_once('.')).expect(&line);
        assert!(seconds.parse::<u32>().is_ok() && hundredths.len() == 2 && hundredths.parse::<u32>().is_ok(), "{line}");
        let rate = between(&line, " s to first, ", " tok/s, 200 method=POST");
        assert!(rate.is_some_and(|rate| rate.parse::<u64>().is_ok()), "{line}");
        let empty = log_line_of(Method::POST, "/v1/messages", |log| log.add_tokens(5, 0));
        assert!(empty.contains(": message 5 -> 0 tokens, 200 method"), "{empty}");
        let cached = log_line_of(Method::POST, "/v1/messages", |log| {
            log.add_tokens(500, 7);
            log.add_cached_tokens(480);
        });
        assert!(cached.contains(": message 500 (480 cached) -> 7 tokens, 200 method"), "{cached}");
        assert!(cached.contains(" prompt_tokens=500 cached_tokens=480 completion_tokens=7 "), "{cached}");
        let refused = log_line_of(Method::POST, "/v1/messages", |_| ());
        let time = between(&refused, ": POST /v1/messages 200, ", " ms method");
        assert!(time.is_some_and(|time| time.parse::<u64>().is_ok()), "{refused}");
    }

    #[test]
    fn long_path_is_truncated() {
        let path = format!("/{}", "x".repeat(15_000));
        assert!(log_line_of(Method::GET, &path, |_| ()).len() < 500);
    }

    #[test]
    fn successful_gets_are_debug_lines() {
        assert_eq!(log_line_of(Method::GET, "/metrics", |_| ()), "");
        assert_eq!(log_line_of(Method::GET, "/v1/models/x", |_| ()), "");
        assert!(log_line_of(Method::POST, "/metrics", |_| ()).contains("INFO"));
    }

    #[test]
    fn ids_are_unique() {
        let ids: std::collections::HashSet<_> = (0..1000).map(|_| unique_id()).collect();
        assert_eq!(ids.len(), 1000);
        assert!(ids.iter().all(|id| id.len() == 24));
    }
}
